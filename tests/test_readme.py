"""The README's numbers are those of bench/results, and its example runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_tables_come_from_the_records():
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "tables.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_examples_run(tmp_path):
    """One after the other: the later ones use what the first has made."""
    example = "".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S))
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my-model" / "model.safetensors").exists()
