"""xtrain without the modules, signals and functions that Windows or macOS lack: they are removed here."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CODE = """
import importlib, multiprocessing, os, pkgutil, shutil, signal, subprocess, sys, time
from types import SimpleNamespace
import numba.cuda, numpy  # they check their platform themselves

ABSENT = "fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in ABSENT:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Absent())
shutil.disk_usage = lambda path: SimpleNamespace(free=10**12)  # it would call os.statvfs
LESS = {
    signal: "SIGUSR1 SIGUSR2 SIGHUP SIGKILL SIGPIPE SIGALRM",
    os: "fork sysconf getuid geteuid setsid getpgid killpg posix_fallocate sched_getaffinity statvfs getloadavg",
    time: "clock_gettime CLOCK_BOOTTIME",
}
for module, names in LESS.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

from xtrain.train import main
out = sys.argv[1]
code = main([
    "--preset", "tiny", "--steps", "2", "--batch", "2", "--seq-len", "32", "--vocab-size", "300", "--data", sys.argv[2], "--out", out,
    "--device", "cpu",
])
assert code == 0, code
import xtrain
for module in pkgutil.walk_packages(xtrain.__path__, "xtrain."):
    if not module.name.endswith(("__main__", "mlir_code", "mlir_changes")):  # the last two need numba-cuda-mlir
        importlib.import_module(module.name)
"""


def test_training_and_every_module_without_posix(tmp_path):
    text = ROOT / "tests" / "data" / "grammar.txt"
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path), str(text)], capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*/checkpoints/step-000002"))
