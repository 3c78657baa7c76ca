"""Every kernel compiles with numba-cuda-mlir too, without a GPU; KNOWN lists exceptions.

    pip install numba numba-cuda-mlir nvidia-nvvm nvidia-cuda-nvrtc nvidia-nvjitlink        without numba-cuda
    XTRAIN_COMPILER=mlir pytest tests/kernels/test_compile_mlir.py

The compiler asks the driver for one thing only, the compute capability, which is set here. Each kernel is compiled for one
signature and compute capability 9.0, those in KNOWN until one fails, and every EIGHTH one for each of 7.5, 8.0 and 12.0.
XTRAIN_COMPILE=all compiles every signature of helpers/every_signature.py for 9.0, and a third of the kernels for each of the
other GPUs.
"""

import collections
import itertools
import multiprocessing
import os
import re
import traceback
from typing import NamedTuple

import every_signature
import numpy as np
import pytest

from xtrain.kernels.runtime import compile, compiler
from xtrain.kernels.runtime.launch import struct_format

ALL = os.environ.get("XTRAIN_COMPILE") == "all"
OTHERS = [(7, 5), (8, 0), (12, 0)]
EIGHTH = 8
SHARES = 8
pytestmark = pytest.mark.skipif(
    compiler.COMPILER != "mlir", reason="needs numba-cuda-mlir and XTRAIN_COMPILER=mlir"
)

# Kernels that release 0.6.0 does not compile for every signature -> what its error says. known_issues.md has the causes.
KNOWN: dict[str, str] = {}
# Kernels that keep an array in local memory for compute capability 9.0.
LOCAL: set[str] = set()


@pytest.fixture(autouse=True)
def full_errors(monkeypatch):
    """Errors of the compiler with their cause"""
    monkeypatch.setenv("NUMBA_CUDA_MLIR_ICE_FULL_TB", "1")


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


def compiled(monkeypatch, kernel, signature, card):
    """-> what the compiler knows of the kernel, compiled for this compute capability"""
    from numba_cuda_mlir import tools

    monkeypatch.setattr(tools, "_cached_cc", card)
    options = dict(kernel.targetoptions)
    if options.get("chip") != "sm_90a":
        options.pop("chip", None)  # of a card for which it has been compiled
    return type(kernel)(kernel.py_func, targetoptions=options).compile(signature).metadata


def check_code(name, made, signature, card):
    """What is wrong with kernels of release 0.6 that mlir_changes.py does not fix"""
    ptx = made["ptx"]
    assert made["func_name"] in ptx and len(made["cubin"]) > 1000
    assert re.search(rf"^\.target sm_{card[0]}{card[1]}a?$", ptx, re.M)
    assert parameters(ptx) == packed(signature), f"{name}: launch.py packs others"
    assert not re.search(r"\.f64\b", ptx), f"{name} computes in float64"
    # the compiler's own code for an atomic addition in a device function: a shared address without its base
    lost = set(re.findall(r"add\.s64\s+(%rd\d+), 0, ", ptx))
    used = set(re.findall(r"atom\.global\S*\s+%r\d+, \[(%rd\d+)\]", ptx))
    assert not lost & used, f"{name} adds to shared memory as if it were global memory"
    # its dynamic shared memory: a variable of one byte, the kernel's static arrays begin 8 bytes after it
    one_byte = re.search(r"^\s*\.shared \.align \d+ \.b8 [^;\[]*;", ptx, re.M)
    assert not one_byte, f"{name}: static arrays overlap with dynamic shared memory"
    if card == (9, 0) and name not in LOCAL:
        assert ".local ." not in ptx, f"{name} keeps an array in local memory"
    called = re.search(r"^\s*call\S*\s.*", ptx, re.M)
    assert not called, f"{name} calls a function: {called.group()}"


def check(monkeypatch, kernels, card):
    """Compile, and compare the kernels that fail with KNOWN. -> the names of those that compile"""
    passed, failed, wrong = set(), set(), []
    for kernel, signature in kernels:
        name, more = kernel.py_func.__name__, ALL and card == (9, 0)
        if not more and (name in failed or (name in passed and name not in KNOWN)):
            continue
        try:
            made = compiled(monkeypatch, kernel, signature, card)
        except Exception as error:
            failed.add(name)
            text = "".join(traceback.format_exception(error))
            if not re.search(KNOWN.get(name, r"\Z\A"), text):
                wrong.append(f"{name} {signature}: {text[-1000:]}")
            continue
        passed.add(name)
        check_code(name, made, signature, card)
    assert not wrong, "\n\n".join(wrong)
    fixed = passed & {*KNOWN} - failed if card == (9, 0) else set()
    assert not fixed, f"these compile now, so remove them from KNOWN: {sorted(fixed)}"
    return passed


def names_of(pairs):
    """-> the names of the kernels, those with the most signatures first"""
    count = collections.Counter(kernel.py_func.__name__ for kernel, _ in pairs)
    return sorted(count, key=lambda name: (-count[name], name))


# In shares, so that both processes of pytest -n 2 have work until the end.
@pytest.mark.parametrize("share", range(SHARES))
def test_every_kernel(monkeypatch, share):
    groups = every_signature.every_signature((9, 0)).values()
    pairs = list(dict.fromkeys(itertools.chain.from_iterable(groups)))
    names = {*names_of(pairs)[share::SHARES]}
    chosen = [pair for pair in pairs if pair[0].py_func.__name__ in names]
    assert check(monkeypatch, chosen, (9, 0)) | {*KNOWN} >= names


@pytest.mark.parametrize("card", OTHERS, ids=str)
def test_other_cards(monkeypatch, card):
    kernels = [pair for group in every_signature.every_signature(card).values() for pair in group]
    few = names_of(kernels)[OTHERS.index(card) :: len(OTHERS) if ALL else EIGHTH]
    kernels = [pair for pair in kernels if pair[0].py_func.__name__ in few]
    assert len(check(monkeypatch, kernels, card)) >= 5


DIVIDE = {"adamw_kernel", "rmsnorm_fwd_naive_kernel"}


def test_the_machine_code_is_that_of_a_whole_program(monkeypatch):
    """Relocatable code has a function for the rare cases of a division, and with a call wgmma products wait for each other."""
    from numba_cuda_mlir import tools

    monkeypatch.setattr(tools, "_cached_cc", (9, 0))
    groups = every_signature.every_signature((9, 0))
    divides = [p for p in groups["training float32"] if p[0].py_func.__name__ in DIVIDE]
    for kernel, signature in [*divides, groups["wgmma"][0]]:
        name, code = compile._translate(kernel, signature)
        functions = set(re.findall(rb"\0\.text\.([\w$]+)", code))
        assert functions == {name.encode()}, f"{kernel.py_func.__name__}: {functions}"


def test_an_index_costs_what_it_costs_with_numba_cuda(monkeypatch):
    """As released: a multiplication by a stride and an addition of an offset."""
    cuda, types = compiler.cuda, compiler.types
    arrays = tuple(types.Array(compiler.float32, ndim, "C") for ndim in (1, 2))

    @cuda.jit
    def copy(y, x):
        i = cuda.blockIdx.x * 256 + cuda.threadIdx.x + cuda.laneid
        if i < y.size:
            y[i] = x[i, 3]

    ptx = compiled(monkeypatch, copy, arrays, (9, 0))["ptx"]
    assert len(re.findall(r"mul\.lo\.s64", ptx)) == 1  # the row
    assert re.search(r"ld\.global\.f32\s+%f\d+, \[%rd\d+\+12\]", ptx)  # the column


def test_a_row_keeps_its_offset(monkeypatch):
    """A device function gets a contiguous array that begins in the middle of another one."""
    cuda = compiler.cuda

    @cuda.jit
    def write(row, value):
        row[1] = value

    @cuda.jit
    def rows(x):
        table = cuda.shared.array((4, 8), compiler.float32)
        write(table[2], x[0])
        cuda.syncthreads()
        x[cuda.threadIdx.x] = table[2, cuda.threadIdx.x]

    array = compiler.types.Array(compiler.float32, 1, "C")
    ptx = compiled(monkeypatch, rows, (array,), (9, 0))["ptx"]
    assert re.search(rf"st\.shared\.\w+\s+\[\w+\+{4 * (2 * 8 + 1)}\]", ptx), ptx


def test_a_nan_differs_from_itself(monkeypatch):
    """In release 0.6 x != x is False, because "not equal" holds for ordered numbers only."""
    cuda, array = compiler.cuda, compiler.types.Array(compiler.float32, 1, "C")

    @cuda.jit
    def mark(x):
        i = cuda.threadIdx.x
        if x[i] != x[i]:
            x[i] = 1
        if x[i] != x[i + 1]:
            x[i + 1] = 2

    ptx = compiled(monkeypatch, mark, (array,), (9, 0))["ptx"]
    assert re.search(r"setp\.(nan|num)\.f32", ptx) and re.search(r"setp\.(neu|eq)\.f32", ptx), ptx
    assert not re.search(r"setp\.(ne|equ)\.f32", ptx)


@pytest.mark.parametrize(
    "kinds, found",
    [
        ("uint32 uint32", "u32"),
        ("uint64 uint32", "u64"),
        ("int32 uint32", "s64"),
        ("int32 int32", "s32"),
    ],
)
def test_extremes_of_unsigned_integers(monkeypatch, kinds, found):
    """Release 0.6 compares all integers as signed ones: a block table's entry of -1 became the smallest of its tile."""
    cuda = compiler.cuda
    arrays = [compiler.types.Array(getattr(compiler.types, kind), 1, "C") for kind in kinds.split()]

    @cuda.jit
    def extremes(a, b, y):
        y[0] = max(a[0], b[0])
        y[1] = min(a[1], b[1])

    to = compiler.types.Array(compiler.types.int64, 1, "C")
    ptx = compiled(monkeypatch, extremes, (*arrays, to), (9, 0))["ptx"]
    assert sorted(re.findall(r"\t(max|min)\.(\w+)", ptx)) == [("max", found), ("min", found)], ptx


@pytest.mark.parametrize("kind", ["int64", "float64"])
def test_a_shuffle_of_64_bits_is_two_of_32(monkeypatch, kind):
    """Release 0.6 passes on the lower 32 bits, or rounds to float32."""
    cuda, array = compiler.cuda, compiler.types.Array(getattr(compiler.types, kind), 1, "C")

    @cuda.jit
    def exchange(x):
        i = cuda.threadIdx.x
        v = cuda.shfl_xor_sync(0xFFFFFFFF, x[i], 1) + cuda.shfl_up_sync(0xFFFFFFFF, x[i], 2)
        v += cuda.shfl_down_sync(0xFFFFFFFF, x[i], 3)
        x[i] = v + cuda.shfl_sync(0xFFFFFFFF, x[i], 4)

    ptx = compiled(monkeypatch, exchange, (array,), (9, 0))["ptx"]
    found = re.findall(r"shfl\.sync\.(\w+)\.b32 %r\d+, %r\d+, (\d+), (\d+), -1", ptx)
    wanted = [("bfly", "1", "31"), ("up", "2", "0"), ("down", "3", "31"), ("idx", "4", "31")]
    assert sorted(found) == sorted(2 * wanted), found


class Pair(NamedTuple):
    x: object
    i: object


def test_a_named_tuple_costs_nothing(monkeypatch):
    """Release 0.6 can pass one and read its fields, but not make one."""
    cuda, array = compiler.cuda, compiler.types.Array(compiler.float32, 1, "C")

    @cuda.jit
    def write(pair):
        pair.x[pair.i] = compiler.float32(1)

    @cuda.jit
    def with_a_tuple(x):
        write(Pair(x, i=cuda.threadIdx.x))

    @cuda.jit
    def without(x):
        x[cuda.threadIdx.x] = compiler.float32(1)

    with_tuple, plain = (
        re.sub(
            r"\b\w*(with_a_tuple|without)\w*",
            "name",
            compiled(monkeypatch, k, (array,), (9, 0))["ptx"],
        )
        for k in (with_a_tuple, without)
    )
    count = lambda ptx: sorted(re.findall(r"^\s+([a-z][\w.]+) ", ptx, re.M))
    assert count(with_tuple) == count(plain), with_tuple


def test_adamw_is_not_contracted(monkeypatch):
    """As test_compile.py: it equals its reference bit for bit."""
    from xtrain.kernels import adamw

    found = [p for group in every_signature.every_signature((9, 0)).values() for p in group]
    kernels = [pair for pair in found if pair[0].py_func.__module__ == adamw.__name__]
    assert len(kernels) >= 2  # with the bf16 copy and without
    for kernel, signature in kernels:
        ptx = compiled(monkeypatch, kernel, signature, (9, 0))["ptx"]
        assert "mul.rn.f32" in ptx and "sqrt.rn.f32" in ptx and "div.rn.f32" in ptx
        free = r"\bfma\.\S+|\b(?:add|sub|mul)\.f32|\S+\.ftz\S*|\S+\.approx\S*|\S+\.f64"
        assert not re.findall(free, ptx), set(re.findall(free, ptx))


def test_compile_in_a_forked_process(monkeypatch):
    """After this process has compiled kernels itself. With MLIR's threads, the fork would wait for them forever."""
    from numba_cuda_mlir import tools

    from xtrain.kernels.runtime.compile import _translate

    monkeypatch.setattr(tools, "_cached_cc", (9, 0))

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
