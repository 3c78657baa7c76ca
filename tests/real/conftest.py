"""Time and memory of each test: XTRAIN_RECORD=FILE pytest -n 0 tests/real appends a line for each to the file.

The memory is that of the process: with what earlier tests of the same file have loaded.
"""

import datetime
import json
import os
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    file = os.environ.get("XTRAIN_RECORD")
    if not file or Path(__file__).parent not in item.path.parents:
        return (yield)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak (Linux)
    wall = time.perf_counter()
    cpu = time.process_time()
    result = yield
    line = {
        "bench": "real",
        "name": item.name.removeprefix("test_"),
        "seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "peak_mb": peak_mb(),
        "gpu": None,
        "machine": f"{os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("numpy", "tokenizers", "transformers")},
        "commit": subprocess.getoutput("git rev-parse --short HEAD"),
        "date": datetime.date.today().isoformat(),
    }
    with open(file, "a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")
    return result


def peak_mb():
    """Return the peak of this process's memory since it was cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return round(int(kilobytes) / 1000)
