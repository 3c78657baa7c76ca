"""Writes records of benches that need no GPU. (_timing.py does for those that need one.)"""

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def append(line: dict[str, Any]) -> None:
    """Append a record to results/BENCH.jsonl, with load, commit and date. line["bench"]: BENCH.

    XTRAIN_RESULTS names another folder, XTRAIN_COMMIT another commit than the one checked out.
    """
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    line |= {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "gpu": None,
        "commit": os.environ.get("XTRAIN_COMMIT") or commit.stdout.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
    }
    folder = Path(os.environ.get("XTRAIN_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{line['bench']}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
