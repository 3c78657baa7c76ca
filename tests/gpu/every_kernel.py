"""Start every kernel on small, odd shapes, for compute-sanitizer.

    compute-sanitizer --tool memcheck  python tests/gpu/every_kernel.py
    compute-sanitizer --tool racecheck --kernel-regex kns=xtrain python tests/gpu/every_kernel.py

Names of functions below (models, rows ...) start only those.  Values are pytest's business; this only has to reach every line of every kernel, soon: no PyTorch, no hypothesis, and
every array an allocation of its own, for inside a memory pool's block an access out of bounds would go unseen.
A kernel of xtrain/kernels that was never started is named at the end (exit code 1).
"""

import importlib
import itertools
import pkgutil
import sys

import cupy as cp
import numpy as np

import xtrain
import xtrain.kernels
from xtrain import functional as F
from xtrain.autograd import Tensor
from xtrain.kernels import _launch, flash_attention
from xtrain.kernels.cast import BFLOAT16, cast_fwd
from xtrain.kernels.cross_entropy import count_targets
from xtrain.kernels.elementwise import add_into, scale_into
from xtrain.kernels.rope import rope_tables
from xtrain.kernels.softmax import causal_softmax_bwd, causal_softmax_fwd
from xtrain.optim import clip

DTYPES = (np.dtype(np.float32), BFLOAT16)
RNG = np.random.default_rng(0)


def draw(*shape, dtype=np.float32):
    return cast_fwd(cp.asarray(RNG.standard_normal(shape, dtype=np.float32)), dtype)


def leaf(*shape, dtype=np.float32):
    return Tensor(draw(*shape, dtype=dtype), requires_grad=True)


def backward(y):
    y.backward(draw(*y.shape, dtype=y.dtype))


def models():
    """Whole training steps: forward, backward, clip, AdamW."""
    shapes = [
        dict(vocab_size=131, dim=37, n_heads=3, n_kv_heads=1, head_dim=16, hidden_dim=53),
        dict(vocab_size=300, dim=64, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=96),
        dict(vocab_size=1000, dim=200, n_heads=2, n_kv_heads=2, head_dim=64, hidden_dim=264),
        dict(vocab_size=517, dim=264, n_heads=2, n_kv_heads=1, head_dim=128, hidden_dim=1000),
        dict(vocab_size=5003, dim=1040, n_heads=2, n_kv_heads=1, head_dim=8, hidden_dim=136),
    ]
    for i, (shape, precision) in enumerate(itertools.product(shapes, ("fp32", "bf16"))):
        if precision == "bf16" and shape["head_dim"] == 8:
            shape = dict(shape, head_dim=16)
        T = (33, 65, 100)[i % 3]
        config = xtrain.ModelConfig(
            n_layers=2, max_seq_len=128, qk_norm=i % 4 < 2, tie_embeddings=i % 3 == 0, **shape
        )
        again = ("none", "attention", "block")[i % 3]
        model = xtrain.Transformer(config, 0, "gpu", precision, recompute=again)
        optimizer = xtrain.AdamW(model, 1e-3, weight_decay=0.1)
        ids = RNG.integers(0, config.vocab_size, (3, T)).astype(np.int32)
        for _ in range(2):
            model.zero_grad()
            model.loss(ids, np.where(ids % 7 == 0, -100, ids)).backward()
            optimizer.apply(cp.asarray(optimizer.advance()), clip(model, 1.0)[1])
        cp.cuda.Device().synchronize()


def rows(dtype):
    """Ops on rows: widths below, above and between what one warp, one block and one register tile hold."""
    for N, C in ((1, 1), (3, 37), (5, 264), (2, 1040), (7, 4100), (2, 20000)):
        x, w = leaf(N, C, dtype=dtype), leaf(C)
        backward(F.rmsnorm(x, w, 1e-6))
        backward(F.add(*F.residual_rmsnorm(x, leaf(N, C, dtype=dtype), w, 1e-6)))
        backward(F.swiglu(leaf(N, 2 * C, dtype=dtype)))
        for op in (F.silu, lambda x: F.scale(x, 0.3), lambda x: F.add(x, x)):
            backward(op(leaf(N, C, dtype=dtype)))
        backward(F.cast(leaf(N, C, dtype=dtype), DTYPES[dtype == np.float32]))
        add_into(draw(N, C, dtype=dtype), draw(N, C, dtype=dtype))
        scale_into(draw(N, C, dtype=dtype), cp.ones(1, np.float32))
        targets = cp.asarray(RNG.integers(0, C, N))
        for factor in (1.0, 0.5):
            logits, inverse = F.scale(leaf(N, C, dtype=dtype), 1.0), count_targets(targets)
            F.scale(F.cross_entropy(logits, targets, C, inverse), factor).backward()


def heads(dtype):
    for B, T, H, D in ((1, 1, 1, 8), (2, 33, 3, 16), (1, 70, 2, 64), (2, 5, 5, 128), (2, 9, 3, 10)):
        cos_sin = tuple(map(cp.asarray, rope_tables(D, T, 10000.0)))
        backward(F.rope(leaf(B * T, H, D, dtype=dtype), *cos_sin, None, T))
        backward(F.swap_heads(leaf(B, T, H, D, dtype=dtype)))


def scores():
    for A, R, S, causal in itertools.product((1, 3), (1, 33, 130), (1, 40, 300, 1100), (0, 1)):
        if S >= R or not causal:
            p = causal_softmax_fwd(draw(A, R, S), R, 0.3, bool(causal))
            causal_softmax_bwd(draw(A, R, S), p, R, 0.3, bool(causal))


def flash(dtype):
    for D, causal in itertools.product((16, 32, 64, 128), (True, False)):
        for B, T, H, G in ((1, 1, 1, 1), (2, 67, 4, 2), (1, 200, 3, 1)):
            q, do = (draw(B, T, H, D, dtype=dtype) for _ in range(2))
            k, v = (draw(B, T, G, D, dtype=dtype) for _ in range(2))
            o, lse = flash_attention.flash_attention_fwd(q, k, v, 0.2, causal)
            flash_attention.flash_attention_bwd(do, q, k, v, o, lse, 0.2, causal)


def hopper(dtype):
    """wgmma and TMA, compute capability 9.0: tiles that end early, several per block, shared heads, a past, a packed array"""
    if dtype == np.float32 or cp.cuda.Device().compute_capability != "90":
        return
    usual, flash_attention.HOPPER = flash_attention.HOPPER, True
    shapes = ((1, 1, 1, 1, 1), (2, 67, 67, 4, 2), (1, 300, 333, 3, 1), (3, 200, 900, 2, 2))
    for D, causal, (B, T, S, H, G) in itertools.product((64, 128), (True, False), shapes):
        qkv = [draw(B, n, heads, D, dtype=dtype) for n, heads in ((T, H), (S, G), (S, G))]
        o, lse = flash_attention.flash_attention_fwd(*qkv, 0.2, causal)
        flash_attention.flash_attention_bwd(draw(*o.shape, dtype=dtype), *qkv, o, lse, 0.2, causal)
    packed = draw(2, 130, 4 * 64, dtype=dtype)
    q, k, v = (
        packed[..., a * 64 : b * 64].reshape(2, 130, -1, 64) for a, b in ((0, 2), (2, 3), (3, 4))
    )
    flash_attention.flash_attention_fwd(q, k, v, 0.2)
    flash_attention.HOPPER = usual


def never_started() -> list[str]:
    """Kernels that stand in a file of xtrain/kernels and were not launched. (Those made by a function for each tile
    have no name in the file, and the naive ones are for reading.)"""
    started = {key[0] for key in _launch._plans}
    missing = []
    for info in pkgutil.iter_modules(xtrain.kernels.__path__):
        module = importlib.import_module(f"xtrain.kernels.{info.name}")
        for name, value in vars(module).items():
            is_kernel = name.endswith("_kernel") and hasattr(value, "py_func")
            if is_kernel and "naive" not in name and value not in started:
                missing.append(f"{info.name}.{name}")
    return missing


WORK = {
    "models": models,
    "rows": rows,
    "heads": heads,
    "scores": scores,
    "flash": flash,
    "hopper": hopper,
}


def main(names: list[str]) -> int:
    cp.cuda.set_allocator(None)
    for name in names or WORK:
        for dtype in [()] if name in ("models", "scores") else [(d,) for d in DTYPES]:
            WORK[name](*dtype)
            cp.cuda.Device().synchronize()
            print(name, *dtype, f"{len(_launch._plans)} kernels started", flush=True)
    missing = [] if names else never_started()
    print("never started:", ", ".join(missing) or "none", flush=True)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
