"""Out-of-memory errors, injected in many places: the message of the command line, and whether its advice is right."""

import re

import numpy as np
import pytest
from runs import DATA, DEVICE, options

from xtrain.config import ModelConfig, resolve
from xtrain.data.batches import Loader
from xtrain.errors import UserError, is_out_of_memory
from xtrain.kernels.attention import gemm_attention as attention
from xtrain.nn import modules as nn
from xtrain.profile import main as profile_main
from xtrain.train import main
from xtrain.training import memory_plan as memory
from xtrain.training import out_of_memory
from xtrain.training.out_of_memory import explain

SMALL = [
    "--preset",
    "test",
    "--data",
    str(DATA / "grammar.txt"),
    "--steps",
    "2",
    "--batch",
    "4",
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
        (nn, "zeros_on", "modules.py"),
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
        "a step of 4 x 32 tokens",
        "moments",
        "options that need less",
        "--micro-batch 2",
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
    with pytest.raises(RuntimeError, match="illegal"), out_of_memory.explained(None, {}, "cpu"):
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access")
    assert not is_out_of_memory(ValueError("out of memory of what was said"))


def test_the_advice_is_the_plan(tmp_path):
    config, shape = resolve(options(tmp_path, batch=8, micro_batch=8, seq_len=64), gpu=False)
    model = ModelConfig(vocab_size=320, **shape)
    lines = explain(config, model, DEVICE)
    plan = memory.plan(model, 8, 64, "fp32", "none")
    outside = memory.OUTSIDE if DEVICE == "gpu" else 0
    assert f"{(plan.reserved + outside) / 1e9:.2f} GB" in lines[0]
    half = next(line for line in lines if "--micro-batch 4" in line)
    less = memory.plan(model, 4, 64, "fp32", "none", accumulate=2).reserved + outside
    assert f"{less / 1e9:.2f} GB" in half and "fits" in half
    sizes = [float(m[1]) for line in lines[1:] if (m := re.search(r"([\d.]+) GB", line))]
    assert len(sizes) >= 8


def test_what_is_there_decides(tmp_path, monkeypatch):
    config, shape = resolve(options(tmp_path, batch=64, micro_batch=64, seq_len=64), gpu=False)
    model = ModelConfig(vocab_size=320, **shape)
    need = [memory.plan(model, B, 64, "fp32", "none", 2).reserved for B in (32, 1)]
    monkeypatch.setattr(out_of_memory, "_available_bytes", lambda device: sum(need) / 2)
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
        out_of_memory.explained(config, shape, "cpu"),
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
