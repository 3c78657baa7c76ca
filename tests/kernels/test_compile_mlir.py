"""Every kernel compiles with numba-cuda-mlir too, for compute capability 9.0 and without a GPU; KNOWN lists exceptions.

    pip install numba numba-cuda-mlir nvidia-nvvm nvidia-cuda-nvrtc nvidia-nvjitlink        without numba-cuda
    XTRAIN_COMPILER=mlir pytest tests/kernels/test_compile_mlir.py

The compiler asks the driver for one thing only, the compute capability, which is set here. Each kernel is compiled for one
signature, and those in KNOWN until one fails. XTRAIN_COMPILE=all compiles every signature that the launchers of
test_compile.py and test_engine_compile.py use.
"""

import multiprocessing
import os
import re
import traceback
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from xtrain import simulator
from xtrain.kernels.runtime import compiler
from xtrain.kernels.runtime.launch import numba_type, struct_format

ALL = os.environ.get("XTRAIN_COMPILE") == "all"
pytestmark = pytest.mark.skipif(
    compiler.COMPILER != "mlir", reason="needs numba-cuda-mlir and XTRAIN_COMPILER=mlir"
)

# Kernels that release 0.6.0 does not compile for every signature -> what its error says. known_issues.md has the causes.
KNOWN: dict[str, str] = {}


@pytest.fixture(autouse=True)
def compute_capability(monkeypatch):
    from numba_cuda_mlir import tools

    monkeypatch.setattr(tools, "_cached_cc", (9, 0))
    monkeypatch.setenv(
        "NUMBA_CUDA_MLIR_ICE_FULL_TB", "1"
    )  # errors of the compiler with their cause


def launched(monkeypatch, launch_all):
    """-> [(kernel, argument types)] of what launch_all() launches"""
    found = {}

    def note(kernel, grid, block, *args, **options):
        found[kernel, tuple(map(numba_type, args))] = None

    monkeypatch.setattr(simulator, "run", note)
    launch_all()
    return list(found)


def of_mlir(kind):
    """A type of Numba as a type of numba-cuda-mlir"""
    if hasattr(kind, "ndim"):
        return compiler.types.Array(of_mlir(kind.dtype), kind.ndim, kind.layout)
    return getattr(compiler.types, str(kind))


def parameters(ptx):
    """-> the bits of the kernel's parameters"""
    start = ptx.index(".entry")
    found = re.findall(r"\.param \.[a-z](\d+) ", ptx[start : ptx.index("{", start)])
    return [int(bits) for bits in found]


def packed(signature):
    """-> the bits of the parameters that launch.py passes: for an array, 3 + 2 ndim of 64; a boolean is a byte"""
    bits = []
    for kind in signature:
        if hasattr(kind, "ndim"):
            bits += [64] * len(struct_format(np.empty((1,) * kind.ndim)))
        else:
            bits.append(8 if kind == compiler.boolean else kind.bitwidth)
    return bits


def check(kernels):
    """Compile, and compare the kernels that fail with KNOWN. -> the names of those that compile"""
    compiled, failed, wrong = set(), set(), []
    for kernel, signature in kernels:
        name = kernel.py_func.__name__
        if not ALL and (name in failed or (name in compiled and name not in KNOWN)):
            continue
        try:
            made = kernel.compile(signature).metadata
        except Exception as error:
            failed.add(name)
            text = "".join(traceback.format_exception(error))
            if not re.search(KNOWN.get(name, r"\Z\A"), text):
                wrong.append(f"{name} {signature}: {text[-1000:]}")
            continue
        compiled.add(name)
        assert made["func_name"] in made["ptx"] and len(made["cubin"]) > 1000
        assert parameters(made["ptx"]) == packed(signature), f"{name}: launch.py packs others"
        assert not re.search(r"\.f64\b", made["ptx"]), f"{name} computes in float64"
        # the compiler's own code for an atomic addition in a device function: a shared address without its base
        lost = set(re.findall(r"add\.s64\s+(%rd\d+), 0, ", made["ptx"]))
        used = set(re.findall(r"atom\.global\S*\s+%r\d+, \[(%rd\d+)\]", made["ptx"]))
        assert not lost & used, f"{name} adds to shared memory as if it were global memory"
    assert not wrong, "\n\n".join(wrong)
    fixed = compiled & {*KNOWN} - failed
    assert not fixed, f"these compile now, so remove them from KNOWN: {sorted(fixed)}"
    return compiled


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_kernels_of_training(monkeypatch, dtype):
    import test_compile

    everything = launched(monkeypatch, lambda: test_compile.launch_everything(dtype))
    assert len(check(everything)) >= 40


def test_kernels_of_the_engine(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "serving")
    import test_engine_compile

    everything = launched(monkeypatch, test_engine_compile.launch_engine)
    assert len(check(everything)) >= 15


def test_kernels_of_attention(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent / "attention")
    import test_flash_attention_compile as bf16
    import test_flash_attention_hopper_compile as hopper

    kernels = []
    for kind, D, causal, tiles in bf16.ONE_OF_EACH:
        kernel, _ = bf16.fa.make_kernel(kind, D, causal, tiles, 0)
        kernels.append((kernel, tuple(map(of_mlir, bf16.SIGNATURES[kind]))))
    for kind, D, causal, tiles in hopper.ONE_OF_EACH:
        kernel = hopper.MAKERS[kind](D, causal, tiles, 0)
        kernels.append((kernel, tuple(map(of_mlir, hopper.SIGNATURES[kind]))))
    assert len(check(kernels)) >= 6


def test_compile_in_a_forked_process():
    """After this process has compiled kernels itself. With MLIR's threads, the fork would wait for them forever."""
    from xtrain.kernels.runtime.compile import _translate

    cuda, signature = compiler.cuda, (compiler.types.Array(compiler.float32, 1, "C"),)

    def make(number):
        @cuda.jit
        def fill(x):
            x[cuda.threadIdx.x] = compiler.float32(number)

        return fill

    _translate(make(1), signature)
    start = multiprocessing.get_context("fork").Process
    fork = start(target=_translate, args=(make(2), signature))
    fork.start()
    fork.join(60)
    ended = fork.exitcode
    fork.kill()
    assert ended == 0
