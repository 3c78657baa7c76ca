"""Cases of bench_kernels.py: kernels that write fp8 codes in both orientations.

Inputs are bf16, the residual stream float32. Bytes: every input once, and 2 per code. Compared are
the numbers that the codes stand for, both orientations.
"""

import cupy as cp
import numpy as np
from _cases import DTYPES, C, Case, F, N, Peer, case, double, draw, functional, size

from xtrain.device import to_numpy
from xtrain.kernels import fp8 as K
from xtrain.kernels import residual, swiglu
from xtrain.kernels.cross_entropy import count_targets, cross_entropy
from xtrain.kernels.fp8_norm import fp8_norm as norm

EPS = 1e-6


def slot(kind, largest):
    """Return the slot of a matrix whose largest number was this in the step before."""
    scale = cp.full(1, largest * K.scale_factor(kind), np.float32)
    return K.Slot(scale, cp.zeros(1, np.int32), cp.zeros(2, np.int64), kind)


def only_bf16(dtype):
    """Raise TypeError for another dtype, which bench_kernels.py reports as not supported."""
    if dtype != DTYPES["bf16"]:
        raise TypeError("activations of fp8 training are bf16")


def decoded(x):
    """Return the numbers of the codes and, from the transposed codes, the same again."""
    number = lambda codes: to_numpy(codes).view(K.DTYPES[x.kind]).astype(np.float32)
    return tuple(cp.asarray(number(c)) * x.scale_1 for c in (x.codes_NK, x.codes_KN.T))


def expected(values, slot):
    """Return what `decoded` must give, by the reference for numbers in float64."""
    scale = to_numpy(slot.scale_1)[0]
    codes = K.encode_ref(to_numpy(values).astype(np.float32), scale, slot.kind)[0]
    numbers = cp.asarray(codes.view(K.DTYPES[slot.kind]).astype(np.float32)) * scale
    return numbers, numbers


def torch_codes(y, kind, scale):
    """Return, by PyTorch, the codes, the transposed codes and the largest size."""
    import torch

    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    largest = K.LARGEST[kind]
    codes = (y.float() / scale).clamp(-largest, largest).to(dtype)
    return codes, codes.t().contiguous(), y.abs().max()


def codes_case(op, arrays, values, f, kind, shape):
    """Return the case of a launcher that encodes.

    op: the launcher.
    values: of arrays in float64.
    f: the values in PyTorch.
    """
    matrix_slot = slot(kind, 20.0)
    result = op(*arrays, matrix_slot)
    scale = float(matrix_slot.scale_1[0])
    return Case(
        size(*arrays, result.codes_NK, result.codes_KN),
        lambda: op(*arrays, matrix_slot),
        got=lambda: decoded(op(*arrays, matrix_slot)),
        want=lambda: expected(values(*map(double, arrays)), matrix_slot),
        peer=Peer(lambda *x: torch_codes(f(*x), kind, scale), arrays),
        shape=shape,
    )


@case
def fp8_e4m3(dtype):
    x = draw(dtype, N, C)
    return codes_case(K.fp8, (x,), lambda x: x, lambda x: x, "e4m3", f"N={N} C={C}")


@case
def fp8_e5m2(dtype):
    x = draw(dtype, N, C)
    return codes_case(K.fp8, (x,), lambda x: x, lambda x: x, "e5m2", f"N={N} C={C}")


@case
def fp8_swiglu(dtype):
    def f(gu):
        gate, up = gu.chunk(2, -1)
        return functional().silu(gate) * up

    gu = draw(dtype, N, 2 * F, scale=2.0)
    return codes_case(K.fp8_swiglu, (gu,), swiglu.swiglu_ref, f, "e4m3", f"N={N} F={F}")


@case
def fp8_swiglu_bwd(dtype):
    def f(dy, gu):
        import torch

        gate, up = gu.chunk(2, -1)
        sig = gate.sigmoid()
        return torch.cat([dy * up * sig * (1 + gate * (1 - sig)), dy * gate * sig], -1)

    arrays = draw(dtype, N, F, seed=1), draw(dtype, N, 2 * F, scale=2.0)
    return codes_case(K.fp8_swiglu_bwd, arrays, swiglu.swiglu_bwd_ref, f, "e5m2", f"N={N} F={F}")


def loss_case(dtype, vocab_size, P):
    """Measure the loss and the codes of its gradient.

    The column `naive` is that of the gradient in bf16, and its codes after it. Bytes: the logits
    twice, and 2 per code. Both columns overwrite no logits that the other reads.
    """
    only_bf16(dtype)
    rows = 2048  # of a chunk of the head
    logits, again = (draw(dtype, rows, P, scale=2.0) for _ in range(2))
    targets = cp.asarray(np.random.default_rng(3).integers(0, vocab_size, rows))
    inverse = count_targets(targets)
    lse = cp.empty(rows, np.float32)
    matrix_slot = slot("e4m3", float(inverse[0]))
    scale = float(matrix_slot.scale_1[0])
    loss_arguments = (targets, vocab_size, inverse)

    def ours():
        loss, _ = cross_entropy(logits, *loss_arguments, with_gradient=False, lse_N=lse)
        return loss, K.fp8_cross_entropy(logits, targets, lse, *loss_arguments[1:], matrix_slot)

    def want():
        loss, d = cross_entropy(double(logits).astype(np.float32), *loss_arguments)
        return loss, *expected(d, matrix_slot)

    def peer(x, targets):
        import torch

        x = x[:, :vocab_size].float()
        d = (x.softmax(-1) - functional().one_hot(targets, vocab_size)) * float(inverse[0])
        loss = functional().cross_entropy(x, targets, reduction="none")
        d = torch.nn.functional.pad(d, (0, P - vocab_size))
        return loss, *torch_codes(d, "e4m3", scale)

    return Case(
        size(logits, logits) + 2 * rows * P,
        ours,
        got=lambda: (ours()[0], *decoded(ours()[1])),
        want=want,
        peer=Peer(peer, (logits, targets)),
        naive=lambda: K.fp8(cross_entropy(again, *loss_arguments)[1], matrix_slot),
        shape=f"N={rows} V={vocab_size} P={P}",
    )


@case
def fp8_cross_entropy(dtype):
    return loss_case(dtype, 50257, 50304)


@case
def fp8_cross_entropy_151936(dtype):
    return loss_case(dtype, 151936, 151936)


# ----------------------------------------------------------------------------- fp8_norm.py
def norm_case(dtype, N, C):
    """Measure the norm; the column `naive` is that of the two kernels that this one replaces."""
    only_bf16(dtype)
    x = draw(np.float32, N, C)
    r = draw(dtype, N, C, seed=1)
    w = draw(np.float32, C, seed=2)
    matrix_slot = slot("e4m3", 8.0)
    scale = float(matrix_slot.scale_1[0])

    def got():
        h, y, rstd = norm(x, r, w, EPS, matrix_slot)
        return h, *decoded(y), rstd

    def want():
        h, y, rstd = residual.residual_rmsnorm_ref(*map(double, (x, r, w)), EPS)
        return h, *expected(y, matrix_slot), rstd

    def two_kernels():
        _, y, _ = residual.residual_rmsnorm_fwd(x, r, w, EPS)
        return K.fp8(y, matrix_slot)

    def peer(x, r, w):
        h = x + r
        return h, *torch_codes(functional().rms_norm(h, (C,), w, EPS), "e4m3", scale)

    return Case(
        size(x, x, r) + 2 * N * C,
        lambda: norm(x, r, w, EPS, matrix_slot),
        got=got,
        want=want,
        peer=Peer(peer, (x, r, w)),
        naive=two_kernels,
        shape=f"N={N} C={C}",
    )


@case
def fp8_norm(dtype):
    return norm_case(dtype, N, C)


@case
def fp8_norm_1024(dtype):
    return norm_case(dtype, 8192, 1024)


@case
def fp8_norm_2048(dtype):
    return norm_case(dtype, 8192, 2048)
