"""Seconds from starting `xtrain train` on a GPU to its first step, with and without a kernel cache.

    python bench/bench_start.py [--preset dim384] [--text PATH]

Each row is a new process, measured until it prints its first step. The text has been tokenized
before (by a run on the CPU), so reading it is a matter of milliseconds. `cold` has empty caches of
xtrain's and of CuPy's kernels; `one at a time` as well, but compiles each kernel when it first
runs; `warm` has the caches that the row above has filled. value: seconds, ms the same.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _timing import record

ONE_AT_A_TIME = "from xtrain.training.run import Run; Run.is_stateless = lambda run: False; "


def seconds_to_first_step(text, preset, folder, before="", more=()):
    """Start a run, end it at its first step. -> seconds"""
    arguments = ["--data", text, "--preset", preset, "--vocab-size", "4096", "--steps", "3"]
    arguments += ["--out", str(folder / "runs"), "--name", f"run{time.time_ns()}"]
    code = f"{before}import sys; sys.argv[0] = 'xtrain.train'; "
    code += "from xtrain.train import main; sys.exit(main())"
    environment = os.environ | {
        "XTRAIN_CACHE": str(folder / "cache"),
        "CUPY_CACHE_DIR": str(folder / "cupy"),
        "PYTHONUNBUFFERED": "1",
    }
    # Installed packages have their bytecode; a clone gets it at its first start, unless this
    # forbids it.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, *more],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    for line in child.stdout:
        lines.append(line)
        if line.startswith("step 1/"):
            seconds = time.perf_counter() - start
            child.kill()
            child.communicate()
            return seconds
    raise SystemExit("".join(lines))


def empty(folder):
    """Remove the caches of kernels; the tokens stay."""
    for path in (folder / "cache" / "kernels", folder / "cupy"):
        shutil.rmtree(path, ignore_errors=True)


def main():
    """Measure the three rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="dim384")
    parser.add_argument(
        "--text", default=str(Path(asyncio.__file__).parent), help="a file or folder"
    )
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds_to_first_step(o.text, "tiny", folder, more=["--device", "cpu"])  # tokenizes
        rows = {}
        for row, before in (("one at a time", ONE_AT_A_TIME), ("cold", "")):
            empty(folder)
            rows[row] = seconds_to_first_step(o.text, o.preset, folder, before)
        rows["warm"] = statistics.median(
            seconds_to_first_step(o.text, o.preset, folder) for _ in range(3)
        )
    for row, seconds in rows.items():
        if row == "cold":
            peer = dict(peer="one at a time", peer_value=rows["one at a time"])
        else:
            peer = {}
        record(
            "bench_start",
            f"{o.preset}/{row}",
            shape=f"{os.cpu_count()} cores",
            dtype="bf16",
            ms=1e3 * seconds,
            value=seconds,
            unit="s to the first step",
            **peer,
        )


if __name__ == "__main__":
    main()
