"""Compile kernels without a GPU: to PTX with Numba and NVVM, and to machine code with ptxas if available.

`pip install -e '.[compile]'` installs NVVM and ptxas from PyPI, and numba-cuda, because Numba 0.68
alone does not find that NVVM and does not know GPUs after sm_90. Without numba-cuda these tests are
skipped. XTRAIN_COMPILE=all (as in .ci/run) compiles also for other GPUs than 9.0; a missing compiler is then
a failure.
"""

import glob
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import types as python_types

import pytest
from numba import cuda
from numba.cuda import dispatcher
from numba.cuda.codegen import CUDACodeLibrary

from xtrain import simulator
from xtrain.kernels.runtime.compiler import COMPILER
from xtrain.kernels.runtime.launch import numba_type

ALL = os.environ.get("XTRAIN_COMPILE") == "all"
CARDS = [(7, 5), (8, 0), (9, 0), (12, 0)] if ALL else [(9, 0)]
# bf16 kernels need compute capability 8.0: asynchronous copies, bf16 matrix products
CARDS_BF16 = [cc for cc in CARDS if cc >= (8, 0)]
only_all = pytest.mark.skipif(not ALL, reason="takes minutes: XTRAIN_COMPILE=all")


def give_up(why):
    """Fail if XTRAIN_COMPILE=all, else skip: a user without a compiler cannot compile."""
    (pytest.fail if ALL else pytest.skip)(why)


def missing(why):
    """Fail if XTRAIN_COMPILE=all, else leave out the check."""
    if ALL:
        pytest.fail(why)


@pytest.fixture(scope="session")
def nvvm():
    if COMPILER != "numba":
        pytest.skip("for numba-cuda; test_compile_mlir.py is for numba-cuda-mlir")
    if not ALL and importlib.util.find_spec("numba_cuda") is None:
        # Numba alone supports GPUs up to sm_90. .ci/run compiles everything with XTRAIN_COMPILE=all,
        # which does not skip.
        pytest.skip("needs numba-cuda: pip install -e '.[compile]'")  # in .ci/run: a failure
    try:
        from numba.cuda.cudadrv.nvvm import NVVM

        NVVM()
    except Exception as error:
        give_up(f"no NVVM here: {str(error).splitlines()[0]}")


def compiled(monkeypatch, kernel, signature, cards, in_registers=((7, 5), (8, 0), (9, 0))):
    """-> {GPU: PTX}. Checks that the kernel computes in float32 and, on in_registers, uses no local memory."""
    found = ptx_for(monkeypatch, kernel, signature, cards)
    for cc, ptx in found.items():
        check_float32(kernel, cc, ptx)
        promised = cc in in_registers and ".local " in ptx
        assert not promised, f"{label(kernel, cc)} keeps an array in local memory"
    return found


def check_float32(kernel, cc, ptx):
    """Fails if the PTX has a float64 instruction."""
    wide = [line.strip() for line in ptx.splitlines() if re.search(r"\.f64\b", line)]
    assert not wide, f"{label(kernel, cc)} computes in float64: {wide[0]}"


def label(kernel, cc):
    return f"{kernel.py_func.__name__} for sm_{cc[0]}{cc[1]}"


def signatures(monkeypatch, launch_all):
    """-> [(kernel, argument types)] of everything that launch_all() launches; nothing is run"""
    found = {}

    def note(kernel, grid, block, *args, **options):
        kinds = tuple(numba_type(a) for a in args)
        found[kernel, kinds] = None

    monkeypatch.setattr(simulator, "run", note)
    launch_all()
    return list(found)


# A test of very many kernels compiles a share of them, so that several processes have work until the end.
SHARES = 4
every_share = pytest.mark.parametrize("share", range(SHARES))


# The kernels, one of so many, that are compiled for all cards: what distinguishes cards is the same for all kernels.
FOURTH = 4


def with_cards(found, cards, share):
    """[(kernel, argument types)] -> [(kernel, argument types, GPUs to compile for)], one of SHARES equal parts of them

    The first signature of each kernel is for the oldest card and 9.0, of every FOURTH kernel for all cards. The other
    signatures are for 9.0 alone, for which ptxas counts registers: the PTX for 7.5 and 8.0 has the same code.
    """
    kernels = set()
    chosen = []
    for kernel, signature in found:
        name = kernel.py_func.__module__, kernel.py_func.__name__
        chosen_cards = [(9, 0)]
        if name not in kernels:
            every = len(kernels) % FOURTH == 0
            chosen_cards = cards if every else sorted({cards[0], (9, 0)})
        chosen.append((kernel, signature, chosen_cards))
        kernels.add(name)
    return chosen[share::SHARES]


def once_each(choices):
    """Of the choices (kind, width, causal, ...) that differ in `causal` alone, the causal one: masks take more registers."""
    return list({(c[:2], c[3:]): c for c in sorted(choices, key=str)}.values())


def ptx_for(monkeypatch, kernel, signature, cards):
    """-> {GPU: PTX}. Numba's part, which takes most of the time, runs once: its output is the same for all GPUs."""
    libraries = []
    name = "get_asm_strs" if hasattr(CUDACodeLibrary, "get_asm_strs") else "get_asm_str"
    get, original = CUDACodeLibrary.get_asm_str, getattr(CUDACodeLibrary, name)
    note = lambda library, cc=None: (libraries.append(library), original(library, cc))[1]
    options = {k: v for k, v in kernel.targetoptions.items() if k in ("fastmath", "fma", "opt")}
    # device functions are compiled for the current device, which does not exist here
    here = python_types.SimpleNamespace(compute_capability=cards[0])
    with monkeypatch.context() as patch:
        patch.setattr(dispatcher, "get_current_device", lambda: here)
        patch.setattr(CUDACodeLibrary, name, note)
        how = dict(device=False, abi="numba", cc=cards[0], output="ptx")
        cuda.compile(kernel.py_func, signature, **how, **options)
    found = {cc: get(libraries[0], cc) for cc in cards}
    for cc, ptx in found.items():
        if f".target sm_{cc[0]}{cc[1]}" not in ptx:
            give_up(f"this Numba does not know compute capability {cc[0]}.{cc[1]}")
    return found


def ptxas():
    """-> the ptxas of this environment's packages, which fits their NVVM, else the machine's, else None"""
    found = importlib.util.find_spec("nvidia")
    packages = [f"{folder}/*/bin" for folder in found.submodule_search_locations] if found else []
    folders = [f for pattern in packages for f in sorted(glob.glob(pattern), reverse=True)]
    folders += [os.environ.get("PATH", ""), os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin"]
    return shutil.which("ptxas", path=os.pathsep.join(folders))


def check_registers(tmp_path, ptx, threads, min_blocks, cc, spills=0):
    """Fails if more than `spills` bytes of registers spill when `min_blocks` blocks of `threads` must fit on a
    multiprocessor. Needs ptxas."""
    if not ptxas():
        return missing("no ptxas: pip install -e '.[compile]'")
    bounds = f".maxntid {threads}, 1, 1\n.minnctapersm {min_blocks}\n{{"
    if ".maxntid" not in ptx:  # Numba without numba-cuda has no launch_bounds
        ptx = re.sub(r"(\.visible \.entry[^{]*)\{", lambda m: m.group(1) + bounds, ptx, count=1)
    (tmp_path / "kernel.ptx").write_text(ptx)
    command = [ptxas(), "-v", f"--gpu-name=sm_{cc[0]}{cc[1]}", "kernel.ptx", "-o", os.devnull]
    report = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if "Unsupported .version" in report.stderr:
        return missing("this ptxas is older than NVVM")
    assert report.returncode == 0, report.stderr
    spilled = int(re.search(r"(\d+) bytes spill stores", report.stderr).group(1))
    registers = re.search(r"Used (\d+) registers", report.stderr).group(1)
    assert spilled <= spills, f"{spilled} bytes spilled with {registers} registers"
    assert int(registers) * threads * min_blocks <= 65536


def compile_for_sm_90a(monkeypatch, kernel, signature, threads, per_sm) -> str:
    """-> PTX of a kernel with wgmma

    numba-cuda compiles for sm_90a; plain Numba for sm_90, and as inline PTX passes through unread, its target is renamed here.
    """
    here = python_types.SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: here)
    options = {"device": False, "abi": "numba", "output": "ptx"}
    if "launch_bounds" in inspect.signature(cuda.compile).parameters:
        more = {"cc": (9, 0, "a"), "launch_bounds": (threads, per_sm)}
        return cuda.compile(kernel.py_func, signature, **options, **more)[0]
    ptx = cuda.compile(kernel.py_func, signature, **options, cc=(9, 0))[0]
    bounds = f".maxntid {threads}, 1, 1\n.minnctapersm {per_sm}\n{{"
    ptx = re.sub(r"(\.visible \.entry[^{]*)\{", lambda m: m.group(1) + bounds, ptx, count=1)
    return re.sub(r"\.target sm_90\b", ".target sm_90a", ptx)


def check_sm_90a(tmp_path, kernel, ptx, threads, per_sm):
    """Fails if a kernel with wgmma computes in float64, spills, or needs more registers than its launch has."""
    name = kernel.py_func.__name__
    assert not re.search(r"\.f64\b", ptx), f"{name} computes in float64"
    assert ".local " not in ptx, f"{name} keeps an array in local memory"
    assert re.search(r"\.extern \.shared \.align 1024 ", ptx), "tiles need their alignment"
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor.4d", "setmaxnreg.inc"):
        assert instruction in ptx
    if not ptxas():
        give_up("no ptxas: the registers are not checked")
    (tmp_path / "kernel.ptx").write_text(ptx)
    command = [ptxas(), "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    report = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if "Unsupported .version" in report.stderr:
        give_up(f"this ptxas is older than the PTX: {report.stderr.strip()[:90]}")
    assert report.returncode == 0, report.stderr
    assert "serialized" not in report.stderr, "too few registers: the products run one by one"
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", report.stderr), report.stderr
    registers = int(re.search(r"Used (\d+) registers", report.stderr).group(1))
    assert registers <= 65536 // (threads * per_sm) // 8 * 8
