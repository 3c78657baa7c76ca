"""The doctor finds what is wrong, prints the fix, and works in every broken installation."""

import configparser
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from checks import GPU

from xtrain import machine
from xtrain.doctor import main as doctor_main
from xtrain.inspect import doctor

ROOT = Path(doctor.__file__).parents[2]


def by_name(checks):
    return {check.name: check for check in checks}


def script(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def python(*arguments, path=(), **environment):
    """Run `python -m xtrain.doctor` with the folders `path` first on Python's path."""
    path = os.pathsep.join([*map(str, path), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "xtrain.doctor", *arguments],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, **environment}, timeout=120,
    )  # fmt: skip


# ----------------------------------------------------------------------------- this machine
def test_versions_are_those_of_the_package():
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split("\n")
    lines = [line.split("#")[0].strip() for line in lines if line.strip()]
    assert sorted(name + bounds for name, bounds in doctor.NEEDED.items()) == sorted(lines)
    for extra in ("gpu", "gpu12"):
        gpu = setup["options.extras_require"][extra]
        for package, bounds in doctor.ON_GPU.items():
            assert re.search(rf"^{package}(\[.*\])?{re.escape(bounds)}$", gpu, re.M), package


def test_this_machine(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "mpi", list)
    code = doctor_main(["--json"])
    said = json.loads(capsys.readouterr().out)
    checks = {c["name"]: c for c in said["checks"]}
    assert code == (not said["ok"]) and checks["kernel in the simulator"]["ok"], said
    assert checks["GPU"]["ok"] is (True if GPU else None)
    assert {"Python", "numpy", "numba", "free memory", "disk here", "disk of the cache"} <= set(
        checks
    )
    assert doctor_main([]) == code
    assert ("all is well" in capsys.readouterr().out) == said["ok"]


# ----------------------------------------------------------------------------- broken installations
def test_numba_does_not_import(tmp_path):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(
        "raise AttributeError('numpy.row_stack is gone')"
    )
    done = python("--json", path=[tmp_path])
    checks = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1 and "Traceback" not in done.stderr
    kernel = checks["kernel in the simulator"]
    assert kernel["ok"] is False
    assert "row_stack" in kernel["found"] and "pip install" in kernel["fix"]
    code = "import xtrain; xtrain.Transformer"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert "row_stack" in done.stderr and "python -m xtrain.doctor" in done.stderr


def test_a_package_is_missing_or_too_new(monkeypatch):
    versions = {name: re.findall("[0-9.]+", b)[0] for name, b in doctor.NEEDED.items()}
    versions |= {
        "numpy": "2.5.1",
        "threadpoolctl": None,
        "numba": "0.60.0+local",
        "rich": "no version",
    }
    monkeypatch.setattr(doctor, "_version", versions.get)
    checks = by_name(doctor.packages())
    wrong = {name for name, check in checks.items() if not check.ok}
    assert wrong == {"numpy", "threadpoolctl", "numba", "rich"}
    assert checks["numpy"].fix == "pip install 'numpy>=2.0,<2.5'"
    assert checks["threadpoolctl"].found == "not installed"


def test_versions_without_packaging(monkeypatch):
    """What is missing is still found, packaging among it; the others' versions are only shown."""
    versions = {**dict.fromkeys(doctor.NEEDED, "0.1"), "threadpoolctl": None, "packaging": None}
    monkeypatch.setattr(doctor, "_version", versions.get)
    for name in ("packaging", "packaging.specifiers"):
        monkeypatch.setitem(sys.modules, name, None)
    checks = by_name(doctor.packages())
    assert {name for name, check in checks.items() if not check.ok} == {
        "threadpoolctl",
        "packaging",
    }
    assert checks["packaging"].fix == "pip install 'packaging>=24'"
    assert "0.1 (not compared" in checks["numpy"].found


def test_doctor_imports_no_package_that_may_be_missing(tmp_path):
    """The table is printed even if none of the packages of setup.cfg can be imported."""
    names = [*doctor.NEEDED, "pynvml", "mpi4py"]
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    done = python("--json", path=[tmp_path])
    checks = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "no numpy here" in checks["kernel in the simulator"]["found"] and "Python" in checks


def test_no_room(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.machine, "free_memory", lambda: 10**8)
    assert by_name(doctor.memory())["free memory"].ok is False
    usage = type("usage", (), {"free": 10**6})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "not" / "yet"))
    checks = by_name(doctor.disk())
    assert checks["disk here"].ok is False and "XTRAIN_CACHE" in checks["disk of the cache"].fix
    (tmp_path / "not").write_text("a file\n")
    assert "not writable" in by_name(doctor.disk())["disk of the cache"].found


def test_pip_is_never_given_the_bare_name():
    """On PyPI `xtrain` is another project, which `pip install --force-reinstall 'xtrain[mpi]'` would install."""
    files = [*ROOT.glob("xtrain/**/*.py"), *ROOT.glob("lessons/**/*.md"), *ROOT.glob("*.md")]
    bare = re.compile(r"pip install [^`\n&#]*(?<![/\w.-])xtrain\b")
    said = [f"{f.name}: {m}" for f in files for m in bare.findall(f.read_text(encoding="utf-8"))]
    assert len(files) > 100 and said == []


DRIVERS = {
    "no driver": (None, {}, {"GPU": None}),
    "nothing installed": (("580.65.06", 13000), {}, {"driver": True, "CuPy": "pip install -e '.[gpu]'"}),
    "an old driver": (("470.1", 11040), {"cupy-cuda13x": "14"}, {"driver": False}),
    "CUDA 12": (("550.54", 12040), {}, {"CuPy": "pip install -e '.[gpu12]'"}),
    "too new for it": (
        ("550.54", 12040), {"cupy-cuda13x": "14"}, {"CuPy": "pip uninstall -y cupy-cuda13x && pip install -e '.[gpu12]'"}
    ),
    "twice": (
        ("580.1", 13000), {"cupy-cuda12x": "14", "cupy-cuda13x": "14"},
        {"CuPy": "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install -e '.[gpu]'"},
    ),
    "parts are missing": (
        ("580.1", 13000), {"cupy-cuda13x": "14", "numba-cuda": "0.20.0", "nvidia-ml-py": "13.580"},
        {
            "numba-cuda": "pip install -e '.[gpu]'", "nvmath-python": "pip install -e '.[gpu]'",
            "cuda-pathfinder": "pip install -e '.[gpu]'", "nvidia-ml-py": True,
        },
    ),
}  # fmt: skip


def fake_nvml(driver, gpus=1):
    """pynvml for a machine with this (version, CUDA version) of the driver; None: without one."""

    class NVMLError(Exception):
        pass

    def init():
        if driver is None:
            raise NVMLError("NVML Shared Library Not Found")

    return SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=init, nvmlSystemGetDriverVersion=lambda: driver[0],
        nvmlSystemGetCudaDriverVersion=lambda: driver[1], nvmlDeviceGetCount=lambda: gpus,
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetName=lambda handle: f"NVIDIA H200 {handle}",
    )  # fmt: skip


@pytest.mark.skipif(GPU, reason="there is a GPU")
@pytest.mark.parametrize("name", DRIVERS)
def test_drivers(monkeypatch, name):
    driver, versions, expected = DRIVERS[name]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(driver))
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(doctor, "_in_subprocess", lambda *_: [])
    checks = by_name(doctor.gpu())
    for check, what in expected.items():
        if isinstance(what, str):
            assert checks[check].ok is False and checks[check].fix.split("  #")[0] == what
        else:
            assert checks[check].ok is what


def test_the_driver_is_asked_through_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(("580.65.06", 13000)))
    assert doctor._driver() == doctor.Driver("580.65.06", "NVIDIA H200 0", 13)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(("580.65.06", 13000), gpus=0))
    assert doctor._driver() == doctor.Driver("580.65.06", "no GPU visible", 13)


@pytest.mark.skipif(GPU, reason="there is a GPU")
@pytest.mark.parametrize("pynvml", [None, fake_nvml(None)], ids=["missing", "no answer"])
def test_a_driver_without_nvml(monkeypatch, tmp_path, pynvml):
    """nvidia-smi shows that there is a driver; a missing nvidia-ml-py is a finding with its command."""
    script(tmp_path, "nvidia-smi", "exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    versions = {"cupy-cuda13x": "14", "numba-cuda": "0.30", "nvmath-python": "1", "cuda-pathfinder": "1.9"}  # fmt: skip
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(doctor, "_in_subprocess", lambda *_: [])
    checks = by_name(doctor.gpu())
    assert {name for name, check in checks.items() if not check.ok} == {"nvidia-ml-py"}
    assert checks["nvidia-ml-py"].fix.startswith("pip install -e '.[gpu]'")
    assert ("nvidia-ml-py" if pynvml is None else "not answer") in checks["driver"].found


LIBRARIES = {
    "all found": ({name: f"/usr/lib/cuda/lib{name}.so" for name in doctor.LIBRARIES}, True, "in /usr/lib/cuda"),
    "one is missing": ({name: "/usr/lib/a.so" for name in doctor.LIBRARIES if name != "nvvm"}, False, "not found: nvvm"),
    "loaded by name": (dict.fromkeys(doctor.LIBRARIES), True, "in the system's path"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries(monkeypatch, name):
    paths, ok, found = LIBRARIES[name]
    pathfinder = pytest.importorskip("cuda.pathfinder")

    def load(library):
        if library not in paths:
            raise pathfinder.DynamicLibNotFoundError(library)
        return SimpleNamespace(abs_path=paths[library])

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", load)
    check = doctor._libraries()
    assert check.ok is ok and found in check.found and check.fix.startswith("pip install")


def test_libraries_without_pathfinder(monkeypatch):
    cuda = pytest.importorskip("cuda")
    monkeypatch.delattr(cuda, "pathfinder", raising=False)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    check = doctor._libraries()
    assert check.ok is False and check.fix == "pip install cuda-pathfinder"


LAUNCHERS = {
    "as root": ("echo 'set OMPI_ALLOW_RUN_AS_ROOT, running as root is not recommended' >&2; exit 1", "export OMPI_ALLOW_RUN_AS_ROOT=1"),
    "no slots": ("echo 'There are not enough slots available' >&2; exit 1", "mpirun --oversubscribe"),
    "another MPI": ("echo 'ranks 1'; echo 'ranks 1'", "--force-reinstall"),
    "Open MPI's with MPICH": ("echo 'uses unsupported PMI version PMIx. Aborting.'; echo 'Exit code: 16' >&2; exit 16", "--force-reinstall"),
    "broken": ("echo 'libmpi.so: cannot open' >&2; exit 127", "--force-reinstall"),
    "silent": ("exit 3", "--force-reinstall"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers(tmp_path, name):
    text, fix = LAUNCHERS[name]
    check = next(doctor._ranks(str(script(tmp_path, "mpirun", text))))
    assert check.ok is False and fix in check.fix and check.found


@pytest.mark.mpi
def test_the_mpirun_in_path_is_that_of_another_mpi(tmp_path, monkeypatch):
    """It starts ranks that are alone; the mpirun next to Python starts ranks that see each other."""
    ours = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if ours is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("there is no mpirun next to this Python")
    assert doctor.mpi()[-1].ok is not False
    # without what a launcher tells them, ranks are as those of another library are: alone
    script(tmp_path, "mpirun", 'shift 2; "$@"; "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    checks = by_name(doctor.mpi())
    assert checks["MPI"].ok and checks["two ranks"].ok is False
    assert f"{tmp_path}/mpirun belongs to a different MPI" in checks["two ranks"].found
    assert f'export PATH="{Path(ours).parent}:$PATH"' in checks["two ranks"].fix


@pytest.mark.mpi
@pytest.mark.parametrize("megabytes, ok", [(16, False), (64, True)])
def test_shared_memory(megabytes, ok, monkeypatch):
    pytest.importorskip("mpi4py")
    size = megabytes * 2**20
    monkeypatch.setattr(machine, "shared_memory", lambda: (size, size))
    checks = by_name(doctor.try_mpi())
    if "MPICH" not in checks["MPI"].found:
        pytest.skip("only MPICH needs it")
    assert checks["shared memory"].ok is ok
    assert f"{size / 1e6:.1f}" in checks["shared memory"].found
    assert ok or "--shm-size" in checks["shared memory"].fix


def test_a_missing_launcher(tmp_path):
    (check,) = doctor._ranks(str(tmp_path / "none"))
    assert check.ok is False and "FileNotFoundError" in check.found


def test_a_rank_prints_its_number_in_one_write(monkeypatch):
    """Unbuffered, other ranks could print between two writes, and a working MPI would look broken."""
    written, code = [], []

    def launch(command, **_):
        code.append(command[-1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(doctor.subprocess, "run", launch)
    list(doctor._ranks("mpirun"))
    mpi = SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=SimpleNamespace(size=2)))
    monkeypatch.setitem(sys.modules, "mpi4py", mpi)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append))
    exec(code[0])
    assert [text for text in written if text] == ["ranks 2\n"]


# ----------------------------------------------------------------------------- trials that crash or hang
TRIALS = """
import os, time
from xtrain.inspect import doctor

def crash():
    yield doctor.Check("before", True, "fine")
    os.abort()

def hang():
    time.sleep(60)
    yield
"""


@pytest.mark.parametrize(
    "name, seconds, found",
    [("crash", 60, "ended with -6"), ("hang", 2, "no answer within 2 s")],
)
def test_trials_that_go_wrong(monkeypatch, tmp_path, name, seconds, found):
    (tmp_path / "trials.py").write_text(TRIALS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "SECONDS", seconds)
    checks = doctor._in_subprocess("a trial", f"trials.{name}", "the fix")
    assert checks[-1].ok is False and found in checks[-1].found and checks[-1].fix == "the fix"
    assert name != "crash" or checks[0] == doctor.Check("before", True, "fine")


def test_a_trial_imports_what_the_user_would(monkeypatch, tmp_path):
    """An installed xtrain has other packages next to it: these must not come before those of PYTHONPATH."""
    (tmp_path / "trials.py").write_text(
        "import sys\nfrom xtrain.inspect.doctor import Check\n"
        "def where(): yield Check('where', True, str(sys.path))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = doctor._in_subprocess("a trial", "trials.where", "the fix")
    assert check.found.index(str(tmp_path)) < check.found.index(f"'{ROOT}'")


def test_a_check_that_raises(monkeypatch, capsys):
    def memory():
        raise RuntimeError("no such thing\nand more")

    for name in ("simulator", "gpu", "mpi", "disk"):
        monkeypatch.setattr(doctor, name, list)
    monkeypatch.setattr(doctor, "memory", memory)
    assert doctor_main([]) == 1
    assert "RuntimeError: no such thing\n" in capsys.readouterr().out
