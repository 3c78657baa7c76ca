"""Training in fp8: gradients against float32 and against the codes written out in NumPy, accumulation, recompute, resume, errors.

On a GPU the model is on it. Without one it computes with NumPy arrays in bf16, which the references accept (the kernels have
tests/kernels/test_fp8.py).
"""

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from checks import GPU, normal, to_host
from rich.console import Console
from runs import DATA, SILENT, assert_same_run, metrics, options, run

from xtrain import ModelConfig, device
from xtrain.config import resolve
from xtrain.device import to_device
from xtrain.errors import UserError
from xtrain.finetune import finetune
from xtrain.finetune import main as finetune_main
from xtrain.kernels.cross_entropy import cross_entropy_ref
from xtrain.kernels.fp8 import DTYPES, LARGEST, Operand, encode_ref
from xtrain.nn import fp8 as fp8_module
from xtrain.nn import functional as F
from xtrain.nn import model as model_module
from xtrain.nn.autograd import Tensor, inference, no_grad
from xtrain.nn.deferred import Stream
from xtrain.nn.fp8 import SPACING, Fp8Scales
from xtrain.nn.model import Transformer
from xtrain.nn.modules import Parameter
from xtrain.nn.optim import AdamW, clip
from xtrain.profile import main as profile_main
from xtrain.reinforce import main as reinforce_main
from xtrain.train import main as train_main
from xtrain.training import loop, out_of_memory, run_log
from xtrain.training.memory_plan import plan, planning
from xtrain.tuning.finetune import FinetuneConfig

BF16 = ml_dtypes.bfloat16
HAS_FP8 = not GPU or int(device.cupy().cuda.Device().compute_capability) >= 89
pytestmark = pytest.mark.skipif(not HAS_FP8, reason="needs compute capability 8.9")
DEVICE = "gpu" if GPU else "cpu"
CONFIG = ModelConfig(
    vocab_size=100, dim=128, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=64, hidden_dim=128, max_seq_len=64, qkv_bias=True,
    qk_norm=False,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 100, (4, 64))
TARGETS = np.roll(IDS, -1, 1)


@pytest.fixture(autouse=True)
def fp8_on_the_host(monkeypatch):
    if not GPU:
        monkeypatch.setattr(Transformer, "_check_precision", lambda *_: None)


def train(precision="fp8", steps=3, micro=4, config=CONFIG, head=False, **more):
    """-> the model, losses and gradients of each step. head: in fp8"""
    model = Transformer(config, 0, DEVICE, precision, **more)
    if head:
        model.use_fp8_head()
    optimizer, losses, gradients = AdamW(model, 1e-3), [], []
    for _ in range(steps):
        model.zero_grad()
        count = to_device(np.full(1, 1 / TARGETS.size, np.float32), DEVICE)
        parts = [
            model.loss(IDS[i : i + micro], TARGETS[i : i + micro], count)
            for i in range(0, 4, micro)
        ]
        for part in parts:  # all forward passes first: a scale must not change under saved codes
            part.backward()
        losses.append(sum(float(p) for p in parts))
        gradients.append({n: to_host(p.grad).copy() for n, p in model.named_parameters()})
        optimizer.step(clip(model, 1.0)[1])
    return model, losses, gradients


def error(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# ----------------------------------------------------------------------------- gradients
def test_loss_and_gradients_are_near_float32():
    model, losses, gradients = train()
    _, exact, expected = train("fp32")
    assert np.abs(np.array(losses) / exact - 1).max() < 2e-3
    for step, limit in ((0, 0.2), (1, 0.3)):
        for name, dx in gradients[step].items():
            assert 1e-4 < error(dx, expected[step][name]) < limit, (step, name)
    assert not to_host(model.fp8.last_counts_K).any()
    scales = to_host(model.fp8.scale_S)
    assert scales.shape == (3 * 4 * 2 * SPACING,) and not to_host(model.fp8.largest_RS).any()
    assert (scales[::SPACING] != 1).all() and (scales.reshape(-1, SPACING)[:, 1:] == 1).all()


def test_a_layer_equals_its_codes_in_numpy():
    """y, dx, dw, db of F.linear from the codes themselves, in the first step and in the second."""
    w = Parameter((256, 128), 0.02)
    arrays = (
        normal(1, 256, 128, mean=0, scale=0.02),
        normal(2, 128, 128),
        normal(3, 128, 256, scale=1e-4),
    )
    bias = Tensor(to_device(normal(4, 256), DEVICE), requires_grad=True)
    w.offset, w._data = 0, to_device(arrays[0], DEVICE)
    w.half = to_device(arrays[0].astype(BF16), DEVICE)
    scales = Fp8Scales([("w", w)], DEVICE)
    w_bf16 = arrays[0].astype(BF16)
    for factor in (1, 2):  # the second step's numbers are twice as large
        x, dy = ((a * np.float32(factor)).astype(BF16) for a in arrays[1:])
        matrices = (("e4m3", x, factor), ("e4m3", w_bf16, 1), ("e5m2", dy, factor))
        decoded = []
        for kind, a, growth in matrices:  # the scale is that of the step before
            a = a.astype(np.float32)
            scale = np.abs(a).max() / np.float32(growth) * np.float32(2 / LARGEST[kind])
            codes, _, counts = encode_ref(a, scale, kind)
            assert counts == (0, 0)
            decoded.append(codes.view(DTYPES[kind]).astype(np.float32) * scale)
        xd, wd, dyd = decoded
        input_ = Tensor(to_device(x, DEVICE), requires_grad=True)
        w.grad_written = bias.grad_written = False
        y = F.linear(input_, w, None, bias)
        y.backward(to_device(dy, DEVICE))
        assert error(to_host(y.data).astype(np.float32), xd @ wd.T + to_host(bias.data)) < 1e-2
        assert error(to_host(input_.grad).astype(np.float32), dyd @ wd) < 4e-3
        # Hopper's tensor cores add fp8 products with about 14 bits
        assert error(to_host(w._grad), dyd.T @ xd) < (1e-3 if GPU else 1e-5)
        assert error(to_host(bias._grad), dy.astype(np.float32).sum(0)) < 1e-3
        scales.update()
        assert scales.ready


def test_every_module_and_unfused_forms_use_codes():
    """A branch whose values are read in between gives what the fused branch gives, within bf16."""
    model = Transformer(CONFIG, 0, DEVICE, "fp8")
    model.arena.refresh()
    mlp, norm = model.model.layers[0].mlp, model.model.layers[0].post_attention_layernorm
    h = Tensor(to_device(normal(1, 128, 128, mean=0), DEVICE), requires_grad=True)
    z = mlp(norm(Stream(h, dtype=BF16)))
    gated = F.swiglu(mlp.gate_up(norm(Stream(h, dtype=BF16)))).read()
    gu = mlp.gate_up(norm(Stream(h, dtype=BF16))).read()
    for other in (mlp.down_proj(gated), mlp.down_proj(F.swiglu(gu))):
        assert error(to_host(other.data).astype("f4"), to_host(z.data).astype("f4")) < 0.03
        assert other.node.function.__name__ == "Fp8Linear"
    assert z.node.function.__name__ == "Fp8MLP"


@pytest.mark.parametrize("recompute", ["attention", "block"])
def test_recompute_changes_no_bit(recompute):
    _, losses, gradients = train()
    _, again, others = train(recompute=recompute)
    assert losses == again
    assert all(np.array_equal(a[n], b[n]) for a, b in zip(gradients, others) for n in a)


@pytest.mark.parametrize("head", [False, True])
def test_accumulated_gradients_are_those_of_the_batch(head):
    """Micro-batches have scales of their own in the first step only."""
    _, losses, gradients = train(steps=2, head=head)
    _, parts, sums = train(steps=2, micro=2, head=head)
    assert np.allclose(losses, parts, rtol=1e-3)
    # Either differs from float32 by up to 0.26 in one parameter; a micro-batch left out gives 0.45 to 0.9
    assert all(error(sums[1][n], gradients[1][n]) < 0.3 for n in sums[1])


def test_without_backward_the_model_computes_in_bf16():
    model, _, _ = train(steps=2)
    half = Transformer(CONFIG, 1, DEVICE, "bf16")
    for (_, p), (_, q) in zip(model.named_parameters(), half.named_parameters()):
        q.data = p.data
    for mode in (no_grad, inference):
        with mode():
            assert model.loss(IDS, TARGETS).item() == half.loss(IDS, TARGETS).item()
    assert not to_host(model.fp8.largest_RS).any()
    assert model.loss(IDS, TARGETS).item() != half.loss(IDS, TARGETS).item()


def test_a_step_that_is_not_finite_keeps_the_scales_and_is_counted():
    model, _, _ = train(steps=2)
    before = to_host(model.fp8.scale_S).copy()
    w = model.model.layers[0].mlp.gate_up.weight
    kept = to_host(w.data).copy()
    w.data = to_device(np.full_like(kept, np.nan), DEVICE)
    optimizer = AdamW(model, 1e-3)
    model.zero_grad()
    model.loss(IDS, TARGETS).backward()
    optimizer.step(to_device(np.full(1, np.nan, np.float32), DEVICE))
    counts = dict(zip(model.fp8.kinds, to_host(model.fp8.last_counts_K).reshape(-1, 2).tolist()))
    assert counts["gate_up w"][1] >= kept.size and counts["qkv w"] == [0, 0]
    after = to_host(model.fp8.scale_S)
    assert np.isfinite(after).all() and after[SPACING * 7] == before[SPACING * 7]
    w.data = to_device(kept, DEVICE)
    assert np.isfinite(model.loss(IDS, TARGETS).item())


# ----------------------------------------------------------------------------- the head
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_in_fp8(tied):
    config = replace(CONFIG, tie_embeddings=tied)
    model, losses, gradients = train(config=config, head=True)
    half, plain, others = train(config=config)
    _, exact, expected = train("fp32", config=config)
    assert np.abs(np.array(losses) / exact - 1).max() < 3e-3
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert losses != plain
    for step in range(2):
        assert all(error(gradients[step][n], expected[step][n]) < 0.3 for n in gradients[step])
    if not tied:
        assert (
            error(others[0][head], expected[0][head])
            < error(gradients[0][head], expected[0][head])
            < 0.1
        )
    assert model.fp8.kinds == half.fp8.kinds + ["lm_head x", "lm_head w", "lm_head dy"]
    assert not to_host(model.fp8.last_counts_K).any()
    for (_, p), (_, q) in zip(model.named_parameters(), half.named_parameters()):
        q.data = p.data
    with no_grad():  # validation computes in bf16
        assert model.loss(IDS, TARGETS).item() == half.loss(IDS, TARGETS).item()


def test_the_head_equals_its_codes_in_numpy():
    """Loss, dx and dw of F.linear_cross_entropy, in chunks and at once."""
    N, C, V = 384, 128, 250
    x, w = normal(1, N, C, mean=0).astype(BF16), normal(2, 256, C, mean=0, scale=0.05)
    targets = np.random.default_rng(3).integers(0, V, N)
    parameter = Parameter((256, C), 0.02)
    parameter.offset, parameter._data = 0, to_device(w, DEVICE)
    parameter.half = to_device(w.astype(BF16), DEVICE)
    scales = Fp8Scales([("lm_head", parameter)], DEVICE)
    inv_count = np.full(1, 1 / N, np.float32)

    def decoded(a, kind):
        scale = np.abs(a).max() * np.float32(2 / LARGEST[kind])
        return encode_ref(a, scale, kind)[0].view(DTYPES[kind]).astype(np.float32) * scale

    xd, wd = (decoded(a.astype(BF16).astype(np.float32), "e4m3") for a in (x, w))
    logits = (xd @ wd.T).astype(BF16).astype(np.float32)
    loss_N, d = cross_entropy_ref(logits, targets, V, inv_count)
    dd = decoded(d, "e4m3")
    for rows in (
        None,
        None,
        128,
    ):  # in the first step all scales are measured, later they are those of the step before
        input_ = Tensor(to_device(x, DEVICE), requires_grad=True)
        parameter.grad_written = False
        given = to_device(targets, DEVICE), V, to_device(inv_count, DEVICE), rows
        loss = F.linear_cross_entropy(input_, parameter, *given)
        loss.backward()
        assert abs(loss.item() / loss_N.mean() - 1) < 1e-3
        assert error(to_host(input_.grad).astype(np.float32), dd @ wd) < 0.01
        assert error(to_host(parameter._grad), dd.T @ xd) < 0.01
        scales.update()


# ----------------------------------------------------------------------------- runs
RUN = dict(dim=128, heads=2, head_dim=64, hidden_dim=128, layers=1, seq_len=64, batch=4, steps=6, eval_every=3, sample_every=6)  # fmt: skip


@pytest.mark.parametrize("head", [False, True])
def test_resume_is_exact(tmp_path, monkeypatch, head):
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    kind = dict(RUN, precision="fp8", fp8_head=head, save_every=3)
    whole = run(tmp_path / "a", **kind)
    run(tmp_path / "b", **kind, stop_at=2)
    parts = run(tmp_path / "b", **kind, resume=True)
    assert_same_run(whole, parts)
    lines = [line for line in metrics(whole) if "loss" in line]
    assert len(lines) == 6 and all(line["fp8_nonfinite"] == 0 for line in lines)
    assert all(line["fp8_clamped"] >= 0 for line in lines)


def test_a_bf16_run_continues_in_fp8(tmp_path, monkeypatch):
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    run(tmp_path / "a", **RUN, precision="bf16", stop_at=2)
    folder = run(tmp_path / "a", **RUN, precision="fp8", resume=True, allow_change=("precision",))
    lines = [line for line in metrics(folder) if "loss" in line]
    assert ["fp8_clamped" in line for line in lines] == [False] * 2 + [True] * 4


def test_fine_tuning(tmp_path, monkeypatch):
    """Rows are as long as fp8 needs; a length that does not fit is refused before the run begins."""
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    model = run(tmp_path / "a", **RUN | dict(seq_len=256, steps=1))
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "def f(x):"}\n{"text": "x = 1"}\n{"text": "def g(y):"}\n')
    given = dict(
        init=str(model),
        data=str(data),
        out=str(tmp_path),
        precision="fp8",
        batch=1,
        steps=2,
        sample_tokens=2,
    )
    folder = finetune(FinetuneConfig(**given), SILENT)
    lines = [line for line in metrics(folder) if "loss" in line]
    assert len(lines) == 2 and lines[1]["fp8_nonfinite"] == 0
    assert json.loads((folder / "config.json").read_text())["train"]["seq_len"] == 128
    with pytest.raises(UserError, match="a multiple of 128 tokens in a forward pass, not 64"):
        finetune(FinetuneConfig(**given, name="b", seq_len=64), SILENT)
    assert not (tmp_path / "b").exists()


def test_the_head_may_change_on_resuming(tmp_path, monkeypatch):
    """Its scales are then measured anew, with all others."""
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    run(tmp_path / "a", **RUN, precision="fp8", stop_at=2)
    again = dict(RUN, precision="fp8", fp8_head=True, resume=True)
    with pytest.raises(UserError, match="fp8_head was False, is True"):
        run(tmp_path / "a", **again)
    folder = run(tmp_path / "a", **again, allow_change=("fp8_head",))
    assert len([line for line in metrics(folder) if "loss" in line]) == 6


def test_the_start_says_what_is_in_fp8_and_the_report_what_did_not_fit(tmp_path, monkeypatch):
    """Of a run whose scales are so small that numbers are clamped in each step."""
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    said = io.StringIO()
    monkeypatch.setattr(fp8_module, "scale_factor", lambda kind: np.float32(0.5 / LARGEST[kind]))
    folder = run(
        tmp_path / "a", Console(file=said, width=300), **RUN, precision="fp8", fp8_head=True
    )
    said = said.getvalue()
    assert (
        "(products of 4 matrices of the blocks and of the head; embedding and attention in bf16)"
        in said
    )
    lines = [line for line in metrics(folder) if "loss" in line]
    clamped = lines[-1]["fp8_clamped"]
    kinds = {k: x for k, x in lines[-1].items() if k.startswith("fp8_clamped_")}
    assert clamped == sum(kinds.values()) > 0 and "fp8_clamped_lm_head_w" in kinds
    assert re.search(rf"step 6/6 .* fp8 clamped {clamped:,.0f} \(\w+ (x|w|dy) [\d,]+\)", said)
    page = (folder / "report.html").read_text()
    in_all = sum(line.get("fp8_clamped_lm_head_w", 0) for line in lines)
    assert f"<td>lm_head w</td><td>clamped to the largest code</td><td>{in_all:,.0f}</td>" in page
    plain = run(tmp_path / "b", **RUN, precision="bf16")
    assert "<h2>fp8</h2>" not in (plain / "report.html").read_text()


@pytest.mark.parametrize("head", [False, True])
def test_the_memory_plan(head):
    """What each op keeps for backward, and the arrays that stay, are those of the model that computes."""
    shape = CONFIG, 4, 64
    eight, half = plan(*shape, "fp8", fp8_head=head), plan(*shape, "bf16")
    assert half.peak < eight.peak < 1.5 * half.peak and eight.kinds["bf16 copy of the weights"]
    model = Transformer(CONFIG, 0, DEVICE, "fp8")
    if head:
        model.use_fp8_head()
    found = kept_by_op(model.loss(IDS, TARGETS))
    with planning(CONFIG.padded_vocab_size):
        planned = Transformer(CONFIG, None, "gpu", "fp8")
        if head:
            planned.use_fp8_head()
        expected = kept_by_op(planned.loss(IDS, TARGETS))
        for name in ("weights", "half", "grads"):
            assert getattr(planned.arena, name).nbytes == getattr(model.arena, name).nbytes
        for name in ("scale_S", "largest_RS", "factor_S", "counts_K", "last_counts_K"):
            assert getattr(planned.fp8, name).nbytes == getattr(model.fp8, name).nbytes
    assert found == expected and found["Fp8MLP"] > 0
    codes = sum(x.nbytes for x in saved_by(model.loss(IDS, TARGETS)) if isinstance(x, Operand))
    assert eight.kept["fp8 codes"] == codes


OPS = ("Fp8Linear", "Fp8AddNormLinear", "Fp8MLP", "LinearCrossEntropy", "Fp8LinearCrossEntropy")


def saved_by(root, ops=OPS):
    """The arrays that these ops keep for backward, parameters included."""
    nodes, seen = [root.node], set()
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        nodes += [edge.node for edge in node.ctx.edges if edge is not None]
        if node.function.__name__ in ops:
            yield from node.ctx.saved


def kept_by_op(root):
    """Bytes that each op keeps for backward."""
    return {op: sum(getattr(x, "nbytes", 0) for x in saved_by(root, [op])) for op in OPS}


@pytest.mark.parametrize("T, micro, halves", [(128, 6, 3), (64, 6, 2), (32, 4, None)])
def test_the_advice_when_memory_runs_out_can_be_followed(tmp_path, T, micro, halves):
    """No micro-batch is named whose tokens fp8 refuses; bf16 is, where it needs less."""
    given = options(
        tmp_path, batch=2 * micro, micro_batch=micro, seq_len=T, precision="fp8", preset="tiny"
    )
    config, shape = resolve(given, gpu=True)
    lines = out_of_memory.explain(config, ModelConfig(vocab_size=320, **shape), "cpu")
    named = {int(n) for n in re.findall(r"--micro-batch (\d+)", "\n".join(lines))}
    assert all(n * T % 128 == 0 for n in named) and (halves is None or halves in named)
    # of the least tokens, AdamW needs more than the activations
    assert halves is None or any("--precision bf16" in line for line in lines)
    assert halves is None or any(line.split()[:2] == ["fp8", "codes"] for line in lines)


def test_numbers_of_a_step():
    fp8 = SimpleNamespace(kinds=["qkv x", "down_proj x"])
    assert loop.fp8_numbers(None, np.zeros((0, 2))) == {}
    assert loop.fp8_numbers(fp8, np.zeros((2, 2))) == {"fp8_clamped": 0, "fp8_nonfinite": 0}
    numbers = loop.fp8_numbers(fp8, np.array([[3.0, 0], [2000, 1]]))
    assert numbers == {
        "fp8_clamped": 2003, "fp8_nonfinite": 1, "fp8_clamped_qkv_x": 3, "fp8_clamped_down_proj_x": 2000, "fp8_nonfinite_down_proj_x": 1,
    }  # fmt: skip
    assert run_log.fp8_text("fp8_clamped", numbers) == "fp8 clamped 2,003 (down_proj x 2,000)"
    assert run_log.fp8_text("fp8_nonfinite", {"fp8_nonfinite": 0}) == ""


def test_evaluation_during_the_run_is_that_of_bf16(tmp_path, monkeypatch):
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    tasks = tmp_path / "quiz.jsonl"
    tasks.write_text('{"prompt": "def f", "choices": ["(x)", "1"], "answer": 0}\n' * 2)
    kind = dict(RUN, eval_tasks=(str(tasks),), steps=2, eval_every=2)
    folder = run(tmp_path / "a", **kind, precision="fp8")
    found = {k for line in metrics(folder) for k in line if k.startswith("quiz/")}
    assert "quiz/acc" in found
    model = Transformer.from_pretrained(folder / "checkpoints" / "step-000002", DEVICE, "bf16")
    trained = Transformer.from_pretrained(folder / "checkpoints" / "step-000002", DEVICE, "fp8")
    with no_grad():
        assert model.loss(IDS, TARGETS).item() == trained.loss(IDS, TARGETS).item()


# ----------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    "main, given, message",
    [
        (train_main, "--device cpu", "precision 'fp8' is not supported on the cpu: choose fp32, or bf16 on a GPU"),
        (train_main, "--seq-len 100 --batch 2", "a multiple of 128 tokens in a forward pass, not 200"),
        (train_main, "--micro-batch 1 --batch 2 --seq-len 64", "tokens in a forward pass, not 64"),
        (finetune_main, "--lora 4 --init x", "--precision fp8 is not supported with --lora: choose bf16"),
        (reinforce_main, "--init x", "--precision fp8: give one of auto, fp32, bf16"),
        (profile_main, "--plan --lora 4", "precision fp8 is not supported with adapters (--lora) or for serving"),
        (profile_main, "--plan --dim 96 --heads 3", "matrices whose rows and columns are multiples of 128"),
    ],
)  # fmt: skip
def test_the_command_line_refuses_in_one_sentence(
    tmp_path, monkeypatch, capsys, main, given, message
):
    monkeypatch.undo()
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    data = (
        []
        if main is profile_main
        else ["--data", str(DATA / "grammar.txt"), "--out", str(tmp_path / "runs")]
    )
    assert main([*given.split(), "--precision", "fp8", *data]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line and not (tmp_path / "runs").exists()


def test_an_older_card_is_refused(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(model_module, "has_fp8", lambda: False)
    with (
        planning(0),
        pytest.raises(UserError, match=r"compute capability 8\.9 \(Ada\): choose precision bf16"),
    ):
        Transformer(CONFIG, None, "gpu", "fp8")


def test_errors(monkeypatch):
    with pytest.raises(UserError, match="a multiple of 128 tokens in a forward pass, not 64"):
        Transformer(CONFIG, 0, DEVICE, "fp8").loss(IDS[:1], TARGETS[:1])
    narrow = ModelConfig(vocab_size=9, dim=96, n_layers=1, n_heads=3, head_dim=32)
    with pytest.raises(UserError, match=r"multiples of 128, but model\.layers\.0\.self_attn\.qkv"):
        Transformer(narrow, 0, DEVICE, "fp8")
    with pytest.raises(UserError, match="--precision fp8 is not supported with --lora"):
        FinetuneConfig(precision="fp8", lora=4).validate()
    with pytest.raises(UserError, match="--fp8-head needs --precision fp8, not bf16"):
        FinetuneConfig(precision="bf16", fp8_head=True).validate()
    with pytest.raises(UserError, match="an fp8 head needs precision fp8, this model has fp32"):
        Transformer(CONFIG, 0, DEVICE).use_fp8_head()
    with pytest.raises(UserError, match="found no Linear module"):
        Fp8Scales([], DEVICE)
    monkeypatch.undo()
    with pytest.raises(UserError, match="not supported with adapters"):
        Transformer(CONFIG, 0, "gpu" if GPU else "sim", "fp8", trainable=False)
    with pytest.raises(UserError, match="precision 'fp8' is not supported on the cpu"):
        Transformer(CONFIG, 0, "cpu", "fp8")
