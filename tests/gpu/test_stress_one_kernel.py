"""stress_one_kernel.py: its training run ends with it, also if it is killed. Needs no GPU."""

import os
import signal
import subprocess
import sys
import time

import pytest
import stress_one_kernel


@pytest.mark.skipif(sys.platform == "win32", reason="processes without a parent")
def test_the_training_run_ends_with_its_parent():
    """Left alone it would occupy the GPU, and keep open the output of a script that waits for its end."""
    here = stress_one_kernel.TRAIN.replace('"gpu", "bf16"', '"cpu"').replace("dim=768", "dim=24")
    starts = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {here!r}]).pid)"
    )
    hangs = "; sys.stdout.flush(); import time; time.sleep(600)"
    parent = subprocess.Popen(
        [sys.executable, "-c", starts + hangs], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        time.sleep(3)  # it is starting, or trains
        os.kill(child, 0)
        parent.kill()
        parent.communicate(timeout=120)  # ends when the child has closed the output, too
    finally:
        parent.kill()
        if parent.poll() is None or _lives(child):
            os.kill(child, signal.SIGKILL)


def _lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
