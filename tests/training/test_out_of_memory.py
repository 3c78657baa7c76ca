"""Out-of-memory errors, injected in many places: the message of the command line, and whether its advice is right."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from runs import DATA, DEVICE, SILENT, options

from xtrain.config import ModelConfig, resolve
from xtrain.data.batches import Loader
from xtrain.errors import UserError, is_out_of_memory
from xtrain.kernels.attention import gemm_attention as attention
from xtrain.nn import arena
from xtrain.profile import main as profile_main
from xtrain.train import main, train
from xtrain.training import memory_plan as memory
from xtrain.training import out_of_memory
from xtrain.training.out_of_memory import MARGIN, OutOfMemory, check_fits, explain, needed
from xtrain.training.run import Run
from xtrain.training.single_process import SINGLE_PROCESS
from xtrain.training.zero_plan import zero1, zero3
from xtrain.tuning.finetune import FinetuneConfig

SMALL = [
    "--preset",
    "test",
    "--data",
    str(DATA / "grammar.txt"),
    "--steps",
    "2",
    "--batch",
    "32",
    "--seq-len",
    "32",
]
SMALL += ["--vocab-size", "300", "--eval-batches", "1", "--sample-tokens", "2", "--name", "run"]
SMALL += ["--precision", "fp32"]  # in bf16, attention is another function


def too_much(*_, **__):
    np.empty((1 << 40, 1 << 20), np.float32)


class OutOfMemoryError(MemoryError):
    """An error like CuPy's."""


def as_cupy(*_, **__):
    raise OutOfMemoryError("Out of memory allocating 1,024 bytes (allocated so far: 512 bytes).")


def as_driver(*_, **__):
    raise RuntimeError("cudaErrorMemoryAllocation: out of memory")


def once(before, error):
    """The plan in the message runs through the same functions."""
    left = [error]
    return lambda *a, **k: left.pop()() if left else before(*a, **k)


@pytest.mark.parametrize("error", [too_much, as_cupy, as_driver])
@pytest.mark.parametrize(
    "owner, name, where",
    [
        (arena, "zeros_on", "arena.py"),
        (Loader, "next_batch", "run.py"),
        (attention, "attention_bwd", "backward"),
    ],
)
def test_at_the_command_line(tmp_path, monkeypatch, capsys, owner, name, where, error):
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(owner, name, once(getattr(owner, name), error))
    assert main([*SMALL, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    first = said.splitlines()[0]
    assert (
        first.startswith("xtrain.train: out of memory: ")
        and where in first
        and "Traceback" not in said
    )
    expected = {
        too_much: "4.00 EiB",
        as_cupy: "1,024 bytes",
        as_driver: "cudaErrorMemoryAllocation",
    }[error]
    assert expected in first
    for text in (
        "steps of 32 x 32 tokens",
        "moments",
        "options that need less",
        "--micro-batch 16",
        "--recompute block",
    ):
        assert text in said, text


def test_the_layer_is_named(tmp_path, monkeypatch, capsys):
    from xtrain.nn.deferred import SwiGLULinear

    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    calls = []

    def second(*given):
        calls.append(given)
        return too_much() if len(calls) == 2 else before(*given)

    before = SwiGLULinear.forward
    monkeypatch.setattr(SwiGLULinear, "forward", staticmethod(second))
    assert main([*SMALL, "--out", str(tmp_path)]) == 2
    assert "layer 1" in capsys.readouterr().err.splitlines()[0]


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="illegal"), out_of_memory.explained(None, None, "cpu"):
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access")
    assert not is_out_of_memory(ValueError("out of memory of what was said"))


def test_the_advice_is_the_plan(tmp_path):
    config, shape = resolve(options(tmp_path, batch=64, micro_batch=64, seq_len=64), gpu=False)
    model = ModelConfig(vocab_size=320, **shape)
    lines = explain(config, model, DEVICE)

    def size(B):
        plan = memory.plan(model, B, 64, "fp32", "none", 64 // B)
        if DEVICE == "gpu":
            return plan.reserved + memory.OUTSIDE
        copies = 3 * plan.kinds["weights"]  # for checkpoints: weights and moments
        return sum(n for kind, n in plan.kinds.items() if "cuBLAS" not in kind) + copies

    assert f"{size(64) / 1e9:.2f} GB" in lines[0]
    half = next(line for line in lines if "--micro-batch 32" in line)
    less = size(32)
    assert f"{less / 1e9:.2f} GB" in half and "fits" in half
    sizes = [float(m[1]) for line in lines[1:] if (m := re.search(r"([\d.]+) GB", line))]
    assert len(sizes) >= 8


def test_what_is_there_decides(tmp_path, monkeypatch):
    config, shape = resolve(options(tmp_path, batch=64, micro_batch=64, seq_len=64), gpu=False)
    model = ModelConfig(vocab_size=320, **shape)
    need = [needed(replace(config, micro_batch=B), model, "cpu").nbytes for B in (32, 1)]
    monkeypatch.setattr(out_of_memory, "free_memory", lambda: sum(need) // 2)
    said = {
        line.split()[1]: line
        for line in explain(config, model, "cpu")
        if line.startswith("    --micro-batch")
    }
    assert "does not fit" in said["32"] and "does not fit" not in said["1"]


def test_without_a_plan(tmp_path, monkeypatch):
    """Planning may run out of memory as well."""
    monkeypatch.setattr(out_of_memory.memory_plan, "plan", as_cupy)
    config, shape = resolve(options(tmp_path), gpu=False)
    with (
        pytest.raises(UserError, match=r"xtrain\.profile --plan"),
        out_of_memory.explained(config, ModelConfig(vocab_size=320, **shape), "cpu"),
    ):
        too_much()


def test_other_command_lines(tmp_path, monkeypatch, capsys):
    from xtrain import generate
    from xtrain.inspect import profile

    def options(*_, **__):
        too_much()

    monkeypatch.setattr(profile, "measure", options)
    assert profile_main([]) == 2
    assert "xtrain.profile: out of memory" in capsys.readouterr().err
    monkeypatch.setattr(generate, "generate", options)
    assert generate.main(["a", "--model", "b"]) == 2
    assert "xtrain.generate: out of memory" in capsys.readouterr().err


# ----------------------------------------------------------------------------- before the first step
needs_cpu = pytest.mark.skipif(DEVICE == "gpu", reason="on a GPU the allocation fails")


def runs_with(monkeypatch, free, start):
    """Start a training with so many free bytes. -> what it was refused with, "" if it made a step."""
    steps = []

    def step(run):
        steps.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "step", step)
    monkeypatch.setattr(out_of_memory, "free_memory", lambda: free)
    try:
        start()
    except UserError as error:
        assert not steps
        return str(error)
    except KeyboardInterrupt:
        assert steps
    return ""


@needs_cpu
def test_a_run_that_cannot_fit_is_refused_before_its_first_step(tmp_path, monkeypatch):
    given = options(tmp_path, batch=64, seq_len=64, name=None)
    config, shape = resolve(given, gpu=False)
    least = needed(config, ModelConfig(vocab_size=320, **shape), "cpu").nbytes
    start = lambda: train(given, SILENT)
    said = runs_with(monkeypatch, least // 2, start)
    assert re.match(r"a run with steps of 64 x 64 tokens, .* needs at least .* are available", said)
    assert "--micro-batch 32" in said
    assert "use a smaller --batch" in runs_with(monkeypatch, 1 << 20, start)
    for free in (least, None):
        assert not runs_with(monkeypatch, free, start)
    # a model that the plan does not know
    given = replace(given, change="xtrain.examples_of_tests:same")
    same = SimpleNamespace(same=lambda model: model)
    monkeypatch.setitem(sys.modules, "xtrain.examples_of_tests", same)
    assert not runs_with(monkeypatch, least // 2, lambda: train(given, SILENT))


@needs_cpu
def test_ranks_share_a_machine(tmp_path):
    """All refuse, also if only one of them has too little memory."""
    config, shape = resolve(options(tmp_path, batch=64, seq_len=64), gpu=False)
    model = ModelConfig(vocab_size=320, **shape)
    two = SimpleNamespace(world=2, local_world=2, gather=lambda mine: [mine, "of another rank"])
    with pytest.raises(OutOfMemory, match="another rank"):
        check_fits(config, model, "cpu", two)
    alone, shared = needed(config, model, "cpu"), needed(config, model, "cpu", two)
    assert shared.kinds["moments"] == alone.kinds["moments"] // 2
    copies = "copies for a checkpoint"  # of rank 0, from the memory of both
    assert shared.kinds[copies] == alone.kinds[copies] // 2
    assert "of 2 ranks" in explain(config, model, "cpu", two)[0]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_gpus_divide_what_zero_says(tmp_path, monkeypatch, zero):
    """The message on a GPU of several is about its share, and recommends --zero 3 where it is supported."""
    monkeypatch.setattr(out_of_memory, "_available_bytes", lambda *_: 8 * 10**9)
    kind = dict(batch=64, micro_batch=16, zero=zero, precision="bf16")
    config, shape = resolve(options(tmp_path, **kind), gpu=True)
    model = ModelConfig(vocab_size=320, **shape | {"head_dim": 64, "n_layers": 16})
    four = SimpleNamespace(world=4, local_world=4)
    alone = needed(replace(config, batch=16), model, "gpu")
    shared = needed(config, model, "gpu", four)
    plan = memory.plan(model, 16, config.seq_len, "bf16", config.recompute, steps=1)
    expected = {0: plan.reserved, 1: zero1(plan, 4), 3: zero3(plan, model, "bf16", 4)}[zero]
    assert alone.nbytes == plan.reserved + memory.OUTSIDE
    assert shared.nbytes == int(expected + memory.OUTSIDE)
    share = 4 if zero else 1
    assert shared.kinds["moments"] == pytest.approx(alone.kinds["moments"] / share, 0.01)
    assert sum(shared.kinds.values()) <= shared.nbytes
    advice = "\n".join(explain(config, model, "gpu", four))
    assert ("--zero 3 " in advice) == (zero < 3)
    assert "--zero 3 " not in "\n".join(explain(config, model, "gpu"))
    muon = replace(config, optimizer="muon")
    assert "--zero 3 " not in "\n".join(explain(muon, model, "gpu", four))


MEASURE = r"""
import ctypes, re, sys
from types import SimpleNamespace
import numpy as np
from xtrain.config import ModelConfig, TrainConfig, resolve
from xtrain.nn.model import Transformer
from xtrain.training.out_of_memory import needed
from xtrain.training.run import Run
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # arrays of 64 KB and more are returned when they are freed
def memory(name):
    return 1024 * int(re.search(name + r":\s+(\d+)", open("/proc/self/status").read())[1])
for vocab, dim, layers, batch, seq_len, recompute, optimizer in eval(sys.argv[1]):
    config = ModelConfig(vocab_size=vocab, dim=dim, n_layers=layers, n_heads=4, max_seq_len=seq_len)
    options = dict(batch=batch, seq_len=seq_len, recompute=recompute, optimizer=optimizer)
    options |= dict(precision="fp32", preset="tiny", save_every=800)
    c, _ = resolve(TrainConfig(**options), False)
    least = needed(c, config, "cpu").nbytes
    open("/proc/self/clear_refs", "w").write("5")
    before = memory("VmRSS")
    ids = np.random.default_rng(0).integers(0, vocab, (batch, seq_len)).astype(np.int32)
    loader = SimpleNamespace(next_batch=lambda: (ids, ids, None))
    model = Transformer(config, 0, "cpu", "fp32", recompute)
    run = Run(c, model, SimpleNamespace(loader=lambda *_: loader))
    run.step()
    run.step()
    print(least, memory("VmHWM") - before)
    del run, model
"""


@needs_cpu
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
def test_the_plan_agrees_with_the_peak_of_the_process():
    """Never much more than is used, because it refuses; and no small part of it."""
    shapes = [
        (512, 96, 4, 16, 128, "none", "adamw"),
        (512, 64, 2, 4, 512, "block", "muon"),
        (16384, 128, 1, 2, 64, "attention", "adamw"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, repr(shapes)], capture_output=True, text=True, check=True
    )
    for line, shape in zip(done.stdout.splitlines(), shapes, strict=True):
        planned, measured = map(int, line.split())
        assert 0.75 * measured < planned < MARGIN * measured, (shape, planned, measured)


def test_a_frozen_model_in_codes_needs_less():
    """--weights counts, and is an advice where the frozen model is whole."""
    model = ModelConfig(
        vocab_size=500, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, max_seq_len=32,
        n_experts=3, experts_per_token=2, expert_hidden_dim=40,
    )  # fmt: skip
    options = dict(batch=2, micro_batch=2, seq_len=16, steps=3, save_every=9, precision="fp32")
    whole = FinetuneConfig(init="x", data=("y",), lora=4, **options)
    coded = replace(whole, weights="nf4")
    frozen = [needed(c, model, "cpu").kinds["frozen weights"] for c in (whole, coded)]
    assert frozen[1] < 0.7 * frozen[0]
    advice = [{option for option, *_ in out_of_memory._less(c, model, "cpu", SINGLE_PROCESS)} for c in (whole, coded)]  # fmt: skip
    assert "--weights nf4" in advice[0] and "--weights nf4" not in advice[1]
