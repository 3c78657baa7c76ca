"""Five kills at random times, with kills.py. The record of a hundred kills is bench/results/kills.jsonl."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checks import only_slow

HERE = Path(__file__).parent


@pytest.mark.slow
@only_slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_five_kills():
    paths = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "kills.py"), "--kills", "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["exports"]["killed"] == 5
    assert found["kills"] == 5 and found["runs"] >= 1 and sum(found["kill_times_tenths"]) == 5


def test_the_record():
    """The record: a hundred kills, at least twenty of them while a checkpoint was being written."""
    lines = (HERE.parents[1] / "bench" / "results" / "kills.jsonl").read_text().splitlines()
    record = json.loads(lines[-1])
    assert record["kills"] >= 100 and record["in_writer"] >= 20
    assert sum(record["kill_times_tenths"]) == sum(record["writer_was"].values()) == record["kills"]
