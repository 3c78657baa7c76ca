"""python -m fuzzing [TARGET ...] [--inputs N] [--seconds S] [--seed S] [--record FILE]      (in tests/, with xtrain installed)"""

import argparse
import datetime
import platform
import sys
import tempfile
from pathlib import Path

from . import TARGETS
from .drive import fuzz, record


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzzing")
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; none: all")
    parser.add_argument("--inputs", type=int, default=100_000, help="for each target")
    parser.add_argument("--seconds", type=float, default=1e9, help="for each target, at most")
    parser.add_argument(
        "--limit", type=float, help="seconds for one input; the simulator needs 120"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="append a line of JSON for each target")
    o = parser.parse_args()
    failed = 0
    for name in o.targets or TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            result = fuzz(name, TARGETS[name], o.inputs, o.seed, Path(folder), o.seconds, o.limit)
        print(
            f"{name}: {result.inputs} inputs, {result.worked} worked, {result.refused} refused in {result.sentences} sentences, "
            f"{result.seconds} s: {result.finding or 'nothing found'}",
            flush=True,
        )
        if result.finding:
            failed += 1
            print(f"    input: {result.input}", flush=True)
        if o.record:
            today = datetime.date.today().isoformat()
            record(o.record, result, seed=o.seed, machine=platform.machine(), date=today)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
