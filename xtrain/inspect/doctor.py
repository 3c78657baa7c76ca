"""Checks the machine: what xtrain finds, what is missing or incompatible, and the command that
fixes it.

This module must work in a broken installation: it imports only the standard library at the top. A
package that a check needs is imported inside the check; if it is missing, the check fails with the
install command.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .. import machine
from ..cli import print_text

# The install_requires of setup.cfg; a test compares them.
NEEDED = {
    "numpy": ">=2.0,<2.5", "numba": ">=0.61", "ml_dtypes": ">=0.5", "safetensors": ">=0.5",
    "tokenizers": ">=0.20.1", "typing_extensions": ">=4.8", "rich": ">=13",
    "jinja2": ">=3.1.6", "matplotlib": ">=3.8.4", "packaging": ">=24", "threadpoolctl": ">=3",
}  # fmt: skip
# The packages of the extras gpu and gpu12.
ON_GPU = {
    "numba-cuda": ">=0.24",
    "nvmath-python": ">=0.6",
    "nvidia-ml-py": ">=12",
    "cuda-pathfinder": ">=1.2",
}
LIBRARIES = ("cudart", "nvrtc", "nvvm", "nvJitLink", "cublas", "cublasLt")  # that training loads
# Do not install by the bare name: on PyPI `xtrain` is another project.
EXTRA = "pip install -e '.[{}]'  # in the checkout"
REINSTALL_MPI = "pip install --force-reinstall mpi4py mpich"
LEAST_CUDA = 12  # major version of CUDA that the driver must support
GB = 1e9
LEAST_MEMORY = 1 * GB
LEAST_DISK = 2 * GB
SECONDS = 180  # for a check in a subprocess: compiling the first kernel for a GPU takes a while


@dataclass(frozen=True)
class Check:
    """One line of the report. ok None: absent, and not needed. fix: a command, or what to do."""

    name: str
    ok: bool | None
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver. gpu: the name of the first GPU. cuda: the major version of CUDA that it
    supports; None: unknown."""

    version: str
    gpu: str
    cuda: int | None


def examine() -> list[Check]:
    """Run all checks. An exception in a check is reported as a failed check."""
    checks: list[Check] = []
    for check in (python, packages, memory, disk, simulator, gpu, row_bits, mpi):
        try:
            checks += check()
        except Exception as error:
            checks.append(Check(check.__name__, False, _first_line(error), "please report this"))
    return checks


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


# ----------------------------------------------------------------------------- Python and its packages
def python() -> Iterator[Check]:
    """Check that Python is new enough."""
    version = platform.python_version()
    ok = sys.version_info >= (3, 11)
    yield Check("Python", ok, f"{version}, {platform.platform()}", "install Python 3.11 or newer")


def packages() -> Iterator[Check]:
    """Check that every required package is installed, in a version that works."""
    for name, bounds in NEEDED.items():
        yield _package(name, bounds, f"pip install '{name}{bounds}'")


def _package(name: str, bounds: str, fix: str) -> Check:
    """Check that a package is installed, and its version within bounds such as ">=2.0,<2.5"."""
    installed = _version(name)
    if installed is None:
        return Check(name, False, "not installed", fix)
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return Check(name, True, f"{installed} (not compared: packaging is not installed)", fix)
    return Check(name, SpecifierSet(bounds).contains(installed, prereleases=True), installed, fix)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ----------------------------------------------------------------------------- memory and disk
def memory() -> Iterator[Check]:
    """Check that enough memory is free."""
    free = machine.free_memory()
    if free is not None:
        fix = "end other programs, or train with a smaller --batch or --preset"
        yield Check("free memory", free >= LEAST_MEMORY, f"{free / GB:.1f} GB", fix)


def disk() -> Iterator[Check]:
    """Check that the folders of runs and of the cache are writable and have free space."""
    from ..device import cache_folder

    for name, folder, fix in (
        ("disk here", Path.cwd(), "free some space, or choose another folder with --out"),
        (
            "disk of the cache",
            cache_folder(),
            "free some space, or set XTRAIN_CACHE to another folder",
        ),
    ):
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        writable = existing.is_dir() and os.access(existing, os.W_OK)
        found = f"{free / GB:.1f} GB free in {folder}" + ("" if writable else ", not writable")
        yield Check(name, writable and free >= LEAST_DISK, found, fix)


# ----------------------------------------------------------------------------- kernels
def simulator() -> list[Check]:
    """Check that a kernel runs in the simulator.

    In a subprocess, because a crash must not end the doctor.
    """
    return _in_subprocess(
        "kernel in the simulator",
        "xtrain.inspect.doctor.try_simulator",
        "pip install --force-reinstall 'numba>=0.61' 'numpy>=2.0,<2.5'",
    )


def try_simulator() -> Iterator[Check]:
    """Run a small kernel in the simulator and compare it with NumPy."""
    from ..simulator import sim

    yield Check("kernel in the simulator", *_run_kernel(sim))


def _run_kernel(to_device: Callable) -> tuple[bool, str, str]:
    """Compare RMSNorm of a few numbers with its reference. Returns ok, found, fix."""
    import numpy as np

    from ..device import to_numpy
    from ..kernels.rmsnorm import rmsnorm_fwd

    x_NC = np.linspace(-2, 3, 2 * 64, dtype=np.float32).reshape(2, 64)
    w_C = np.ones(64, np.float32)
    expected, _ = rmsnorm_fwd(x_NC, w_C, 1e-5)
    got, _ = rmsnorm_fwd(to_device(x_NC), to_device(w_C), 1e-5)
    error = float(np.abs(np.asarray(to_numpy(got)) - expected).max())
    return error < 1e-5, f"compiled and run, largest error {error:.0e}", "please report this"


def row_bits() -> Iterator[Check]:
    """List the bf16 products of earlier runs whose rows depend on their number.

    In batch-invariant mode they are divided. In float32 all are: none of a GPU's is expected to
    pass.
    """
    from ..kernels.row_bits import failed

    divided = [text for text in failed() if "bfloat16" in text]
    if divided:
        found = f"{len(divided)} bf16 products are divided, such as {divided[0]}"
        yield Check("batch-invariant products", None, found, "nothing: they take longer")


# ----------------------------------------------------------------------------- GPU
def gpu() -> list[Check]:
    """Check the driver, GPUs, CUDA libraries and NCCL, and compile and run a kernel.

    Without a driver, nothing is missing.
    """
    driver = _driver()
    if driver is None:
        fix = "if there is a GPU, install NVIDIA's driver"
        return [Check("GPU", None, "no NVIDIA driver: everything runs on the CPU", fix)]
    old = driver.cuda is not None and driver.cuda < LEAST_CUDA
    extra = EXTRA.format("gpu12" if driver.cuda == 12 else "gpu")
    fix = "update NVIDIA's driver to 580 or newer"
    checks = [Check("driver", not old, f"{driver.version} ({driver.gpu})", fix)]
    cupys = [p for p in ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x") if _version(p)]
    if len(cupys) > 1:
        fix = f"pip uninstall -y {' '.join(cupys)} && {extra}"
        found = f"installed more than once: {', '.join(cupys)}"
        return [*checks, Check("CuPy", False, found, fix)]
    if not cupys:
        return [*checks, Check("CuPy", False, "not installed: the GPU is not used", extra)]
    (cupy,) = cupys
    needs = cupy.removeprefix("cupy").removeprefix("-cuda").removesuffix("x")  # "13", or ""
    if needs and driver.cuda is not None and LEAST_CUDA <= driver.cuda < int(needs):
        found = f"{cupy} needs a newer driver than {driver.version}"
        return [*checks, Check("CuPy", False, found, f"pip uninstall -y {cupy} && {extra}")]
    checks += [_package(name, bounds, extra) for name, bounds in ON_GPU.items()]
    reinstall = f"pip uninstall -y {cupy} numba-cuda nvmath-python && {extra}"
    return checks + _in_subprocess("GPU", "xtrain.inspect.doctor.try_gpu", reinstall)


def _driver() -> Driver | None:
    """Query NVIDIA's driver through NVML (nvidia-ml-py); None if there is no driver."""
    try:
        import pynvml
    except ImportError:
        return _driver_without_nvml("the GPU's name needs nvidia-ml-py")
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        cuda = pynvml.nvmlSystemGetCudaDriverVersion() // 1000
        if not pynvml.nvmlDeviceGetCount():
            return Driver(version, "no GPU visible", cuda)
        first = pynvml.nvmlDeviceGetHandleByIndex(0)
        return Driver(version, pynvml.nvmlDeviceGetName(first), cuda)
    except pynvml.NVMLError as error:
        return _driver_without_nvml(f"NVML does not answer: {error}")


def _driver_without_nvml(reason: str) -> Driver | None:
    """Return the driver if NVML cannot be used but its device file or nvidia-smi exists."""
    if not Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is None:
        return None
    version = "unknown version"
    with contextlib.suppress(OSError):
        version = Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    return Driver(version, reason, None)


def try_gpu() -> Iterator[Check]:
    """Run a small kernel on the GPU, compare it with NumPy, and load training's libraries."""
    from ..device import cupy, device_name

    if cupy() is None:
        fix = "run nvidia-smi, and look at CUDA_VISIBLE_DEVICES"
        yield Check("GPU", False, "CuPy finds no GPU", fix)
        return
    runtime = cupy().cuda.runtime
    free, total = runtime.memGetInfo()
    capability = cupy().cuda.Device().compute_capability
    yield Check("GPU", True, f"{device_name('gpu')}, {runtime.getDeviceCount()} visible")
    found = f"{capability[:-1]}.{capability[-1]}"
    yield Check("compute capability", int(capability) >= 70, found, "use a GPU from 2018 or newer")
    found = f"{free / GB:.1f} of {total / GB:.1f} GB free"
    yield Check(
        "GPU memory", free >= LEAST_MEMORY, found, "end other programs: nvidia-smi lists them"
    )
    handle = cupy().cuda.device.get_cublas_handle()
    versions = {
        "CUDA runtime": runtime.runtimeGetVersion(),
        "driver's CUDA": runtime.driverGetVersion(),
        "NVRTC": ".".join(map(str, cupy().cuda.nvrtc.getVersion())),
        "cuBLAS": cupy().cuda.cublas.getVersion(handle),
    }
    yield Check("CUDA versions", True, ", ".join(f"{k} {v}" for k, v in versions.items()))
    yield _libraries()
    yield _nccl(runtime.getDeviceCount())
    yield Check("kernel on the GPU", *_run_kernel(cupy().asarray))


def _libraries() -> Check:
    """Check that the CUDA libraries can be found and loaded (cuda-pathfinder)."""
    try:
        from cuda import pathfinder
    except ImportError:
        found = "not checked: cuda-pathfinder is not installed"
        return Check("CUDA libraries", False, found, "pip install cuda-pathfinder")
    folders = {}
    missing = []
    for name in LIBRARIES:
        try:
            path = pathfinder.load_nvidia_dynamic_lib(name).abs_path
            folders[name] = "the system's path"
            if path:
                folders[name] = str(Path(path).parent)
        except pathfinder.DynamicLibNotFoundError:
            missing.append(name)
    places = "; ".join(
        f"{', '.join(n for n in folders if folders[n] == place)} in {place}"
        for place in dict.fromkeys(folders.values())
    )
    if missing:
        found = f"not found: {', '.join(missing)}"
    else:
        found = places
    return Check("CUDA libraries", not missing, found, EXTRA.format("gpu"))


def _nccl(gpus: int) -> Check:
    from ..errors import UserError
    from ..parallel.collectives import load_nccl

    try:
        return Check("NCCL", True, str(load_nccl().get_version()))
    except UserError as error:  # not needed with one GPU
        found = str(error).split(": `pip")[0]
        return Check("NCCL", False if gpus > 1 else None, found, "pip install nvidia-nccl-cu13")


# ----------------------------------------------------------------------------- MPI
def mpi() -> list[Check]:
    """Check mpi4py, its MPI library, and that the mpirun in PATH starts ranks that use it."""
    if _version("mpi4py") is None:
        found = "mpi4py is not installed: one process only"
        return [Check("MPI", None, found, EXTRA.format("mpi"))]
    checks = _in_subprocess("MPI", "xtrain.inspect.doctor.try_mpi", REINSTALL_MPI)
    if not all(check.ok for check in checks):
        return checks
    of_this_python = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    launcher = shutil.which("mpirun") or of_this_python  # in PATH: what a user starts ranks with
    if launcher is None:
        return [*checks, Check("mpirun", False, "not found", "pip install mpich")]
    two, *more = _ranks(launcher)
    another = None
    if of_this_python != launcher:
        another = of_this_python
    if two.ok is False and another and next(_ranks(another)).ok:
        fix = f'export PATH="{Path(another).parent}:$PATH", or start ranks with {another}'
        two = replace(two, fix=fix)
    return [*checks, two, *more]


def try_mpi() -> Iterator[Check]:
    """Load the MPI library, and check that /dev/shm is large enough for it."""
    from ..parallel.ranks import load_mpi, shared_memory_shortage

    library = load_mpi().Get_library_version()
    first = library.strip("\0 \n").splitlines()[0]
    yield Check("MPI", True, f"mpi4py {_version('mpi4py')}, {first}")
    space = machine.shared_memory()
    if space is not None:
        shortage, _, fix = shared_memory_shortage(library, os.environ, ranks=2).partition(": ")
        found = shortage or f"{space[1] / 1e6:.1f} of {space[0] / 1e6:.1f} MB of /dev/shm free"
        yield Check("shared memory", not shortage, found, fix)


def _ranks(launcher: str) -> Iterator[Check]:
    """Start two ranks, and one more rank than cores, which some launchers refuse."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    # One write, also with PYTHONUNBUFFERED: other ranks could print between two writes.
    code = "from mpi4py import MPI; print(f'ranks {MPI.COMM_WORLD.size}\\n', end='')"
    for name, n in (("two ranks", 2), ("more ranks than cores", cores + 1)):
        try:
            done = _run([launcher, "-n", str(n), sys.executable, "-c", code], timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            yield Check(name, False, f"{launcher}: {_first_line(error)}", REINSTALL_MPI)
            return
        output = done.stdout + done.stderr
        if output.count(f"ranks {n}") == n:
            yield Check(name, True, f"{launcher} starts {n}" + (", as root" if _is_root() else ""))
        else:
            yield Check(name, False if n == 2 else None, *_diagnose(output, launcher))


def _diagnose(output: str, launcher: str) -> tuple[str, str]:
    """Return why a launcher that printed `output` did not start the ranks: found, fix."""
    if "root" in output and "ALLOW_RUN_AS_ROOT" in output:
        both = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        return "Open MPI does not run as root", f"export {both}"
    if "slots" in output:
        return "Open MPI starts no more ranks than cores", "mpirun --oversubscribe"
    if "ranks 1\n" in output or "unsupported PMI version" in output:  # MPICH's words under PMIx
        return f"{launcher} belongs to a different MPI than mpi4py", REINSTALL_MPI
    lines = [line for line in output.splitlines() if line.strip()]
    return f"{launcher} fails: {lines[-1] if lines else 'no output'}", REINSTALL_MPI


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


# ----------------------------------------------------------------------------- subprocesses
def _run(
    command: list[str], timeout: float, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program and capture its output, which may be in any encoding."""
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout, env=env
    )


def _in_subprocess(name: str, trial: str, fix: str) -> list[Check]:
    """Return the checks that `trial` (module.function) makes in a subprocess.

    If it crashes or hangs, a failed check `name` follows.
    """
    code = f"import {__name__}, {trial.rpartition('.')[0]}; {__name__}.print_checks({trial})"
    # xtrain's folder comes last: an installed xtrain has other packages next to it, and those of
    # PYTHONPATH come first.
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    try:
        done = _run([sys.executable, "-c", code], SECONDS, environment)
    except subprocess.TimeoutExpired:
        return [Check(name, False, f"no answer within {SECONDS} s", fix)]
    checks = []
    for line in done.stdout.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            checks.append(Check(**json.loads(line)))
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        if errors:
            found = errors[-1].strip()
        else:
            found = f"it ended with {done.returncode}"
        checks.append(Check(name, False, found, fix))
    return checks


def print_checks(trial: Callable[[], Iterator[Check]]) -> None:
    """Print the checks of a trial as JSON lines, for the parent process."""
    for check in trial():
        print_text(json.dumps(asdict(check)), flush=True)


# ----------------------------------------------------------------------------- output
def show(checks: list[Check]) -> None:
    """Print the checks, and the fixes of those that failed."""
    marks = {True: "ok", False: "WRONG", None: "-"}
    width = max((len(c.name) for c in checks), default=0)
    for c in checks:
        print_text(f"{marks[c.ok]:6}{c.name:{width}}  {c.found}")
    wrong = [c for c in checks if c.ok is False]
    if wrong:
        print_text("\nto fix it:")
        for c in wrong:
            print_text(f"  {c.name}: {c.fix}")
    else:
        print_text("\nall is well")
