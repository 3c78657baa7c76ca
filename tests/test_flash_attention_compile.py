"""The FlashAttention kernels compile without a GPU: in float32, registers instead of local memory, no spills.

Needs NVVM (CUDA toolkit, or the nvidia-nvvm package), and ptxas for the last part; skipped without them.
"""

import functools
import os
import re
import shutil
import subprocess
import types as python_types

import numba.cuda.dispatcher
import pytest
from numba import cuda, types
from test_compile import nvvm, require  # noqa: F401

from xtrain.kernels import flash_attention as fa
from xtrain.kernels import flash_attention_fp32 as fp32
from xtrain.kernels.flash_attention_table import TABLE

pytestmark = pytest.mark.usefixtures("nvvm")

HALF, FULL = types.Array(types.uint16, 1, "C"), types.Array(types.float32, 1, "C")
SCALARS = (*[types.int32] * 6, types.float32)
SIGNATURES = {
    "fwd": (HALF, FULL, HALF, HALF, HALF, *SCALARS),
    "dq": (HALF, FULL, *[HALF] * 5, FULL, *SCALARS),
    "dkdv": (*[HALF] * 6, FULL, FULL, *SCALARS),
}
BTHD, BHT = types.Array(types.float32, 4, "C"), types.Array(types.float32, 3, "C")
FP32 = {
    "fwd": (BTHD, BHT, BTHD, BTHD, BTHD, types.float32),
    "dq": (BTHD, BHT, *[BTHD] * 5, BHT, types.float32),
    "dkdv": (*[BTHD] * 6, BHT, BHT, types.float32),
}
CHOSEN = {(*key, config) for key, rows in TABLE.items() for _, config in rows}
SMALL = {(*key, fa.SMALL[key[0]]) for key in TABLE if key[2]}
ONE_OF_EACH = [(kind, D, True, TABLE[kind, D, True][-1][1]) for kind, D in (
    ("fwd", 64), ("dq", 32), ("dkdv", 16), ("dkdv", 128),
)]  # fmt: skip


@functools.cache
def ptxas():
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("ptxas") or shutil.which("ptxas", path=f"{home}/bin")


def check_ptx(monkeypatch, kernel, signature, cc):
    require(cc)
    here = python_types.SimpleNamespace(compute_capability=cc)
    monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: here)
    ptx, _ = cuda.compile(kernel.py_func, signature, device=False, abi="numba", cc=cc, output="ptx")
    name = kernel.py_func.__name__
    assert not re.search(r"\.f64\b", ptx), f"{name} computes in float64"
    assert ".local " not in ptx, f"{name} keeps an array in local memory"
    return ptx


def check_registers(tmp_path, ptx, threads, min_blocks, cc, shared):
    """What ptxas makes of it, told the block size and how many blocks shall fit a multiprocessor."""
    bounds = f".maxntid {threads}, 1, 1\n.minnctapersm {min_blocks}\n{{"
    if ".maxntid" not in ptx:  # plain Numba has no launch_bounds
        ptx = re.sub(r"(\.visible \.entry[^{]*)\{", lambda m: m.group(1) + bounds, ptx, count=1)
    (tmp_path / "kernel.ptx").write_text(ptx)
    command = [ptxas(), "-v", f"--gpu-name=sm_{cc[0]}{cc[1]}", "kernel.ptx", "-o", os.devnull]
    report = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert report.returncode == 0, report.stderr
    spilled = re.search(r"(\d+) bytes spill stores", report.stderr).group(1)
    registers = re.search(r"Used (\d+) registers", report.stderr).group(1)
    assert spilled == "0", f"{spilled} bytes spilled with {registers} registers"
    assert int(registers) * threads * min_blocks <= 65536


def check_bf16(monkeypatch, tmp_path, choice, cc):
    kind, D, causal, config = choice
    kernel, shared = fa.make_kernel(kind, D, causal, config)
    ptx = check_ptx(monkeypatch, kernel, SIGNATURES[kind], cc)
    assert "mma.sync.aligned.m16n8k16" in ptx and "cp.async" in ptx and "ldmatrix" in ptx
    if ptxas():
        check_registers(tmp_path, ptx, 32 * config[2], config[3], cc, shared)


@pytest.mark.parametrize("cc", [(9, 0)])
@pytest.mark.parametrize("choice", ONE_OF_EACH, ids=str)
def test_tensor_core_kernels_compile(monkeypatch, tmp_path, choice, cc):
    check_bf16(monkeypatch, tmp_path, choice, cc)


@pytest.mark.slow
@pytest.mark.parametrize("choice", sorted(CHOSEN, key=str), ids=str)
def test_all_chosen_tiles(monkeypatch, tmp_path, choice):
    check_bf16(monkeypatch, tmp_path, choice, (9, 0))


@pytest.mark.slow
@pytest.mark.parametrize("cc", [(8, 0), (12, 0)])
@pytest.mark.parametrize("choice", sorted(SMALL, key=str), ids=str)
def test_small_tiles_on_other_cards(monkeypatch, choice, cc):
    kind, D, causal, config = choice
    check_ptx(monkeypatch, fa.make_kernel(kind, D, causal, config)[0], SIGNATURES[kind], cc)


@pytest.mark.parametrize("cc", [(8, 0), (12, 0)])
def test_one_small_tile_on_other_cards(monkeypatch, cc):
    check_ptx(
        monkeypatch, fa.make_kernel("fwd", 16, True, fa.SMALL["fwd"])[0], SIGNATURES["fwd"], cc
    )


@pytest.mark.parametrize("cc", [(7, 5), (9, 0)])
@pytest.mark.parametrize("kind", list(FP32))
def test_fp32_kernels_compile(monkeypatch, kind, cc):
    makers = {"fwd": fp32.make_fwd_kernel, "dq": fp32.make_dq_kernel, "dkdv": fp32.make_dkdv_kernel}
    ptx = check_ptx(monkeypatch, makers[kind](64 if cc[0] == 7 else 33, True), FP32[kind], cc)
    shared = [int(n) for n in re.findall(r"\.shared[^;]*\[(\d+)\];", ptx)]
    assert sum(shared) <= 48 * 1024
