"""The doctor finds what is wrong, says what mends it, and survives every patient."""

import configparser
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from checks import GPU

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
    """python -m xtrain.doctor, with folders that come first on Python's path."""
    path = os.pathsep.join([*map(str, path), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "xtrain.doctor", *arguments],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, **environment}, timeout=120,
    )  # fmt: skip


# ----------------------------------------------------------------------------- here
def test_versions_are_those_of_the_package():
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split("\n")
    lines = [line.split("#")[0].strip() for line in lines if line.strip()]
    bounds = {n: f"{n}>={a}" + (f",<{b}" if b else "") for n, (a, b) in doctor.NEEDED.items()}
    assert sorted(bounds.values()) == sorted(lines)
    gpu = setup["options.extras_require"]["gpu"]
    for package, least in doctor.ON_GPU.items():
        assert re.search(rf"^{package}(\[.*\])?>={least}$", gpu, re.M), package


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


# ----------------------------------------------------------------------------- patients
def test_numba_does_not_import(tmp_path):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(
        "raise AttributeError('numpy.row_stack is gone')"
    )
    done = python("--json", path=[tmp_path])
    checks = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1 and "Traceback" not in done.stderr
    kernel = checks["kernel in the simulator"]
    assert (
        kernel["ok"] is False and "row_stack" in kernel["found"] and "pip install" in kernel["mend"]
    )
    code = "import xtrain; xtrain.Transformer"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert "row_stack" in done.stderr and "python -m xtrain.doctor" in done.stderr


def test_a_package_is_missing_or_too_new(monkeypatch):
    versions = {name: least for name, (least, _) in doctor.NEEDED.items()}
    versions |= {"numpy": "2.5.1", "tyro": None, "numba": "0.60.0+local"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    checks = by_name(doctor.packages())
    assert {name for name, check in checks.items() if not check.ok} == {"numpy", "tyro", "numba"}
    assert (
        checks["numpy"].mend == "pip install 'numpy>=2.0,<2.5'"
        and checks["tyro"].found == "not installed"
    )


def test_no_room(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.machine, "free_memory", lambda: 10**8)
    assert by_name(doctor.memory())["free memory"].ok is False
    usage = type("usage", (), {"free": 10**6})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "not" / "yet"))
    checks = by_name(doctor.disk())
    assert checks["disk here"].ok is False and "XTRAIN_CACHE" in checks["disk of the cache"].mend
    (tmp_path / "not").write_text("a file\n")
    assert "not writable" in by_name(doctor.disk())["disk of the cache"].found


def test_pip_is_never_given_the_bare_name():
    """On PyPI `xtrain` is another project: `pip install --force-reinstall 'xtrain[mpi]'` would bring that one."""
    files = [*ROOT.glob("xtrain/**/*.py"), *ROOT.glob("lessons/**/*.md"), *ROOT.glob("*.md")]
    bare = re.compile(r"pip install [^`\n&#]*(?<![/\w.-])xtrain\b")
    said = [f"{f.name}: {m}" for f in files for m in bare.findall(f.read_text(encoding="utf-8"))]
    assert len(files) > 100 and said == []


DRIVERS = {
    "no driver": ("exit 9", {}, {"GPU": None}),
    "nothing installed": ("echo 'NVIDIA H200, 580.65'", {}, {"driver": True, "CuPy": "pip install -e '.[gpu]'"}),
    "an old driver": ("echo 'Tesla, 470.1'", {"cupy-cuda13x": "14"}, {"driver": False}),
    "CUDA 12": ("echo 'A100, 550.54'", {}, {"CuPy": "pip install -e '.[gpu12]'"}),
    "too new for it": (
        "echo 'A100, 550.54'", {"cupy-cuda13x": "14"}, {"CuPy": "pip uninstall -y cupy-cuda13x && pip install -e '.[gpu12]'"}
    ),
    "twice": (
        "echo 'H200, 580.1'", {"cupy-cuda12x": "14", "cupy-cuda13x": "14"},
        {"CuPy": "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install -e '.[gpu]'"},
    ),
    "parts are missing": (
        "echo 'H200, 580.1'", {"cupy-cuda13x": "14", "numba-cuda": "0.20.0"},
        {"numba-cuda": "pip install -e '.[gpu]'", "nvmath-python": "pip install -e '.[gpu]'"},
    ),
}  # fmt: skip


@pytest.mark.skipif(GPU, reason="there is a GPU")
@pytest.mark.parametrize("name", DRIVERS)
def test_drivers(monkeypatch, tmp_path, name):
    tool, versions, expected = DRIVERS[name]
    script(tmp_path, "nvidia-smi", tool)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(doctor, "_apart", lambda *_: [])
    checks = by_name(doctor.gpu())
    for check, what in expected.items():
        if isinstance(what, str):
            assert checks[check].ok is False and checks[check].mend.split("  #")[0] == what
        else:
            assert checks[check].ok is what


LAUNCHERS = {
    "as root": ("echo 'set OMPI_ALLOW_RUN_AS_ROOT, running as root is not recommended' >&2; exit 1", "export OMPI_ALLOW_RUN_AS_ROOT=1"),
    "no slots": ("echo 'There are not enough slots available' >&2; exit 1", "mpirun --oversubscribe"),
    "another MPI": ("echo 'ranks 1'; echo 'ranks 1'", "--force-reinstall"),
    "broken": ("echo 'libmpi.so: cannot open' >&2; exit 127", "--force-reinstall"),
    "silent": ("exit 3", "--force-reinstall"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers(tmp_path, name):
    text, mend = LAUNCHERS[name]
    check = next(doctor._ranks(str(script(tmp_path, "mpirun", text))))
    assert check.ok is False and mend in check.mend and check.found


def test_a_launcher_that_is_not_there(tmp_path):
    (check,) = doctor._ranks(str(tmp_path / "none"))
    assert check.ok is False and "FileNotFoundError" in check.found


def test_a_rank_says_its_number_in_one_write(monkeypatch):
    """Unbuffered, two writes are torn apart by those of other ranks, and a healthy MPI would look broken."""
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


# ----------------------------------------------------------------------------- what takes the interpreter with it
PATIENTS = """
import os, time
from xtrain.inspect import doctor

def end_at_once():
    yield doctor.Check("before", True, "fine")
    os.abort()

def never_end():
    time.sleep(60)
    yield
"""


@pytest.mark.parametrize(
    "name, seconds, said",
    [("end_at_once", 60, "ended with -6"), ("never_end", 2, "no answer within 2 s")],
)
def test_trials_that_go_wrong(monkeypatch, tmp_path, name, seconds, said):
    (tmp_path / "patients.py").write_text(PATIENTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "SECONDS", seconds)
    checks = doctor._apart("a trial", f"patients.{name}", "mend")
    assert checks[-1].ok is False and said in checks[-1].found and checks[-1].mend == "mend"
    assert name != "end_at_once" or checks[0] == doctor.Check("before", True, "fine")


def test_a_trial_finds_what_the_user_would(monkeypatch, tmp_path):
    """Installed, xtrain lies among other packages: these must not come before those of PYTHONPATH."""
    (tmp_path / "patients.py").write_text(
        "import sys\nfrom xtrain.inspect.doctor import Check\n"
        "def where(): yield Check('where', True, str(sys.path))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = doctor._apart("a trial", "patients.where", "mend")
    assert check.found.index(str(tmp_path)) < check.found.index(f"'{ROOT}'")


def test_a_look_that_raises(monkeypatch, capsys):
    def memory():
        raise RuntimeError("no such thing\nand more")

    for name in ("simulator", "gpu", "mpi", "disk"):
        monkeypatch.setattr(doctor, name, list)
    monkeypatch.setattr(doctor, "memory", memory)
    assert doctor_main([]) == 1
    assert "RuntimeError: no such thing\n" in capsys.readouterr().out
