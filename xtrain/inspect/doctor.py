"""What this machine has for xtrain, what is missing or does not fit together, and the command that fixes it."""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import machine

# package: (least version, first version that does not fit any more); of setup.cfg, a test compares them
NEEDED = {
    "numpy": ("2.0", "2.5"), "numba": ("0.61", None), "ml_dtypes": ("0.5", None), "safetensors": ("0.5", None),
    "tokenizers": ("0.20", None), "tyro": ("1.0", None), "rich": ("13", None),
    "jinja2": ("3.1.6", None), "matplotlib": ("3.8.4", None),
}  # fmt: skip
ON_GPU = {"numba-cuda": "0.24", "nvmath-python": "0.6"}
# Never by the name alone: on PyPI `xtrain` is another project.
EXTRA = "pip install -e '.[{}]'  # in the checkout"
AGAIN_MPI = "pip install --force-reinstall mpi4py mpich"
TEXT = {"encoding": "utf-8", "errors": "replace"}  # of what other programs say, whatever the locale
DRIVERS = {
    13: 580,
    12: 525,
}  # CUDA's major version: the oldest Linux driver for it (NVIDIA's release notes)
GB = 1e9
LEAST_MEMORY, LEAST_DISK = 1 * GB, 2 * GB
SECONDS = (
    180  # for a trial in a process of its own: the first kernel on a GPU takes some to compile
)


@dataclass(frozen=True)
class Check:
    """ok None: not there, and not needed. mend: a command, or what to do."""

    name: str
    ok: bool | None
    found: str
    mend: str = ""


def examine() -> list[Check]:
    """All checks. None of them raises."""
    checks: list[Check] = []
    for look in (python, packages, memory, disk, simulator, gpu, mpi):
        try:
            checks += look()
        except Exception as error:
            checks.append(Check(look.__name__, False, _first_line(error), "please report this"))
    return checks


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


# ----------------------------------------------------------------------------- Python and its packages
def python() -> Iterator[Check]:
    """Is Python new enough?"""
    version = platform.python_version()
    ok = sys.version_info >= (3, 11)
    yield Check("Python", ok, f"{version}, {platform.platform()}", "install Python 3.11 or newer")


def packages() -> Iterator[Check]:
    """Is every package there, in a version that works?"""
    for name, (least, first_bad) in NEEDED.items():
        wanted = f"{name}>={least}" + (f",<{first_bad}" if first_bad else "")
        found = _version(name)
        ok = found is not None and _numbers(least) <= _numbers(found)
        ok = ok and (first_bad is None or _numbers(found) < _numbers(first_bad))
        yield Check(name, ok, found or "not installed", f"pip install '{wanted}'")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0); what follows the numbers does not matter here."""
    found = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(map(int, found[0].split("."))) if found else ()


# ----------------------------------------------------------------------------- room
def memory() -> Iterator[Check]:
    """Is there memory to train in?"""
    free = machine.free_memory()
    if free is not None:
        mend = "end other programs, or train with a smaller --batch or --preset"
        yield Check("free memory", free >= LEAST_MEMORY, f"{free / GB:.1f} GB", mend)


def disk() -> Iterator[Check]:
    """Is there room where runs and the cache go, and may we write there?"""
    from ..device import cache_folder

    for name, folder, mend in (
        ("disk here", Path.cwd(), "make room, or give another folder with --out"),
        ("disk of the cache", cache_folder(), "make room, or set XTRAIN_CACHE to another folder"),
    ):
        there = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(there).free
        writable = there.is_dir() and os.access(there, os.W_OK)
        found = f"{free / GB:.1f} GB free in {folder}" + ("" if writable else ", not writable")
        yield Check(name, writable and free >= LEAST_DISK, found, mend)


# ----------------------------------------------------------------------------- kernels
def simulator() -> list[Check]:
    """Does a kernel run in the simulator? Tried in a process of its own, as a crash must not end the doctor."""
    return _apart(
        "kernel in the simulator",
        "xtrain.inspect.doctor.try_simulator",
        "pip install --force-reinstall 'numba>=0.61' 'numpy>=2.0,<2.5'",
    )


def try_simulator() -> Iterator[Check]:
    """One small kernel in the simulator, compared with NumPy."""
    from ..simulator import sim

    yield Check("kernel in the simulator", *_run_kernel(sim))


def _run_kernel(to_device: Callable) -> tuple[bool, str, str]:
    """RMSNorm of a few numbers against its reference. -> ok, found, mend"""
    import numpy as np

    from ..device import to_numpy
    from ..kernels.rmsnorm import rmsnorm_fwd

    x_NC, w_C = np.linspace(-2, 3, 2 * 64, dtype=np.float32).reshape(2, 64), np.ones(64, np.float32)
    expected, _ = rmsnorm_fwd(x_NC, w_C, 1e-5)
    got, _ = rmsnorm_fwd(to_device(x_NC), to_device(w_C), 1e-5)
    error = float(np.abs(np.asarray(to_numpy(got)) - expected).max())
    return error < 1e-5, f"compiled and run, largest error {error:.0e}", "please report this"


# ----------------------------------------------------------------------------- GPU
def gpu() -> list[Check]:
    """Driver, cards, CUDA libraries, a kernel compiled and run, NCCL; nothing of it is missing without a driver."""
    driver = _driver()
    if driver is None:
        return [
            Check(
                "GPU",
                None,
                "no NVIDIA driver: everything runs on the CPU",
                "install NVIDIA's driver if there is a GPU",
            )
        ]
    name, version = driver
    major = next((cuda for cuda, least in DRIVERS.items() if _numbers(version) >= (least,)), None)
    extra = "gpu12" if major == 12 else "gpu"
    install = EXTRA.format(extra)
    checks = [
        Check(
            "driver",
            major is not None,
            f"{version} ({name})",
            "update NVIDIA's driver to 580 or newer",
        )
    ]
    cupys = [p for p in ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x") if _version(p)]
    if len(cupys) > 1:
        mend = f"pip uninstall -y {' '.join(cupys)} && {install}"
        return [
            *checks,
            Check("CuPy", False, f"installed more than once: {', '.join(cupys)}", mend),
        ]
    if not cupys:
        return [*checks, Check("CuPy", False, "not installed: the GPU is not used", install)]
    wrong = re.search(r"cuda(\d+)x", cupys[0])
    if major is not None and wrong and int(wrong[1]) > major:
        mend = f"pip uninstall -y {cupys[0]} && {install}"
        checks.append(Check("CuPy", False, f"{cupys[0]} needs a newer driver than {version}", mend))
        return checks
    for package, least in ON_GPU.items():
        found = _version(package)
        ok = found is not None and _numbers(found) >= _numbers(least)
        checks.append(Check(package, ok, found or "not installed", install))
    again = f"pip uninstall -y {cupys[0]} numba-cuda nvmath-python && {install}"
    return checks + _apart("GPU", "xtrain.inspect.doctor.try_gpu", again)


def _driver() -> tuple[str, str] | None:
    """-> (name of the first GPU, version of the driver)"""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
            done = subprocess.run(query, capture_output=True, **TEXT, timeout=30)
            line = done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else ""
            if "," in line:
                name, version = line.rsplit(",", 1)
                return name.strip(), version.strip()
    with contextlib.suppress(OSError, AttributeError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        return "nvidia-smi does not answer", re.search(r"Module.*?\s(\d+\.[\d.]+)", text)[1]
    return None


def try_gpu() -> Iterator[Check]:
    """One small kernel on the GPU, compared with NumPy, and the libraries that training calls."""
    from ..device import cupy, device_name

    if cupy() is None:
        yield Check(
            "GPU", False, "CuPy sees no GPU", "nvidia-smi, and look at CUDA_VISIBLE_DEVICES"
        )
        return
    runtime = cupy().cuda.runtime
    free, total = runtime.memGetInfo()
    capability = cupy().cuda.Device().compute_capability
    name = f"{device_name('gpu')}, {runtime.getDeviceCount()} in sight"
    yield Check("GPU", True, name)
    yield Check(
        "compute capability",
        int(capability) >= 70,
        f"{capability[:-1]}.{capability[-1]}",
        "use a GPU of 2018 or newer",
    )
    yield Check(
        "GPU memory",
        free >= LEAST_MEMORY,
        f"{free / GB:.1f} of {total / GB:.1f} GB free",
        "nvidia-smi shows who has the rest",
    )
    handle = cupy().cuda.device.get_cublas_handle()
    libraries = {
        "CUDA runtime": runtime.runtimeGetVersion(),
        "driver's CUDA": runtime.driverGetVersion(),
        "NVRTC": ".".join(map(str, cupy().cuda.nvrtc.getVersion())),
        "cuBLAS": cupy().cuda.cublas.getVersion(handle),
    }
    yield Check("CUDA libraries", True, ", ".join(f"{k} {v}" for k, v in libraries.items()))
    yield _nccl(runtime.getDeviceCount())
    yield Check("kernel on the GPU", *_run_kernel(cupy().asarray))


def _nccl(gpus: int) -> Check:
    from ..errors import UserError
    from ..parallel.collectives import load_nccl

    try:
        return Check("NCCL", True, str(load_nccl().get_version()))
    except UserError as error:  # one GPU needs none
        found = str(error).split(": `pip")[0]
        return Check("NCCL", False if gpus > 1 else None, found, "pip install nvidia-nccl-cu13")


# ----------------------------------------------------------------------------- MPI
def mpi() -> list[Check]:
    """mpi4py, its library, and a launcher that starts ranks."""
    if _version("mpi4py") is None:
        return [
            Check(
                "MPI",
                None,
                "mpi4py is not installed: one process only",
                EXTRA.format("mpi"),
            )
        ]
    checks = _apart("MPI", "xtrain.inspect.doctor.try_mpi", AGAIN_MPI)
    if not all(check.ok for check in checks):
        return checks
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if launcher is None:
        return [*checks, Check("mpirun", False, "there is no mpirun", "pip install mpich")]
    return [*checks, *_ranks(launcher)]


def try_mpi() -> Iterator[Check]:
    """Load the MPI library, in a process of its own."""
    from mpi4py import MPI

    library = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
    yield Check("MPI", True, f"mpi4py {_version('mpi4py')}, {library}")


def _ranks(launcher: str) -> Iterator[Check]:
    """Two ranks, and as many as would be started on a machine with more cores: does the launcher refuse?"""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for name, n in (("two ranks", 2), ("more ranks than cores", cores + 1)):
        # in one write, also with PYTHONUNBUFFERED: ranks may write between two of them
        code = "from mpi4py import MPI; print(f'ranks {MPI.COMM_WORLD.size}\\n', end='')"
        try:
            done = subprocess.run(
                [launcher, "-n", str(n), sys.executable, "-c", code],
                capture_output=True,
                **TEXT,
                timeout=60,
            )
        except (OSError, subprocess.SubprocessError) as error:
            yield Check(
                name,
                False,
                f"{launcher}: {_first_line(error)}",
                AGAIN_MPI,
            )
            return
        said = done.stdout + done.stderr
        if said.count(f"ranks {n}") == n:
            yield Check(name, True, f"{launcher} starts {n}" + (", as root" if _root() else ""))
        else:
            yield Check(name, False if n == 2 else None, *_why(said, launcher))


def _why(said: str, launcher: str) -> tuple[str, str]:
    """What a launcher said -> found, mend"""
    if "root" in said and "ALLOW_RUN_AS_ROOT" in said:
        both = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        return "Open MPI does not run as root", f"export {both}"
    if "slots" in said:
        return "Open MPI starts no more ranks than cores", "mpirun --oversubscribe"
    if "ranks 1" in said:
        return (
            f"{launcher} belongs to another MPI than mpi4py",
            AGAIN_MPI,
        )
    lines = [line for line in said.splitlines() if line.strip()]
    return (
        f"{launcher} fails: {lines[-1] if lines else 'without a word'}",
        AGAIN_MPI,
    )


def _root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


# ----------------------------------------------------------------------------- in a process of its own
def _apart(name: str, trial: str, mend: str) -> list[Check]:
    """The checks of `trial`, module.function; a failed one for a process that ended otherwise."""
    code = f"import {__name__}, {trial.rpartition('.')[0]}; {__name__}.tell({trial})"
    # last: where xtrain is installed there are other packages too, and the user's own come before them
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            **TEXT,
            timeout=SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return [Check(name, False, f"no answer within {SECONDS} s", mend)]
    checks = []
    for line in done.stdout.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            checks.append(Check(**json.loads(line)))
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [
            f"it ended with {done.returncode}"
        ]
        checks.append(Check(name, False, lines[-1].strip(), mend))
    return checks


def tell(trial: Callable[[], Iterator[Check]]) -> None:
    """Print checks as JSON lines, for the process that started this one."""
    for check in trial():
        print(json.dumps(asdict(check)), flush=True)


# ----------------------------------------------------------------------------- command line
def show(checks: list[Check]) -> None:
    """Print checks, and below them what mends those that failed."""
    marks = {True: "ok", False: "WRONG", None: "-"}
    width = max((len(c.name) for c in checks), default=0)
    for c in checks:
        print(f"{marks[c.ok]:6}{c.name:{width}}  {c.found}")
    wrong = [c for c in checks if c.ok is False]
    if wrong:
        print("\nto mend it:")
        for c in wrong:
            print(f"  {c.name}: {c.mend}")
    else:
        print("\nall is well")
