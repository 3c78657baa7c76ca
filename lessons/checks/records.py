"""Measurements in bench/results, by id. A lesson never types in a number that a machine measured.

id    bench/name/dtype, or bench/name/shape/dtype where one name was measured at several shapes
      bench_kernels/rmsnorm_fwd/fp32
"""

import json
import re
import subprocess
from pathlib import Path

from xtrain.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


def find(identity: str) -> dict:
    """The newest record with this id. Raises UserError when there is none, or when shapes leave a choice."""
    bench, *rest = identity.split("/")
    path = RESULTS / f"{bench}.jsonl"
    if not path.exists():
        names = ", ".join(sorted(p.stem for p in RESULTS.glob("*.jsonl")))
        raise UserError(
            f"no records of {bench!r} in {RESULTS}: there are {names or 'none; lessons need a checkout of xtrain'}"
        )
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    records = {}
    for number, record in enumerate(lines, 1):
        name, shape, dtype = record["name"], record["shape"], record["dtype"]
        if rest in ([name, dtype], [name, shape, dtype]):
            records[shape] = {**record, "file": str(path), "line": number}
    if len(records) == 1:
        return next(iter(records.values()))
    known = sorted({f"{bench}/{r['name']}/{r['shape']}/{r['dtype']}" for r in lines})
    near = [k for k in known if rest and k.split("/")[1] == rest[0]] or known
    what = "several records have" if records else "no record has"
    raise UserError(f"{what} the id {identity!r}; choose one of: {'; '.join(near[:20])}")


def machine(records: list[dict]) -> str:
    """ "Measured on one NVIDIA H200, 2026-11-21, commit c7517cb."; on as many as a name says: "dim384, 4 GPU, flat" """
    part = lambda key: ", ".join(sorted({str(r[key]) for r in records}))
    commits = [c for c in part("commit").split(", ") if c != "unknown"]
    commit = f", commit {', '.join(commits)}" if commits else ""
    counts = {int(n) for r in records for n in re.findall(r", (\d+) GPU\b", r["name"])} or {1}
    most = max(counts)
    many = "one" if most == 1 else f"{most}" if len(counts) == 1 else f"up to {most}"
    return f"Measured on {many} {part('gpu')}, {part('date')}{commit}."


def kernel_file(record: dict) -> Path | None:
    """The kernel file that a record is about: the one that defines a function of the record's name."""
    stem = re.sub(r"_(fwd|bwd|both|text|naive).*$", "", record["name"])
    folder = ROOT / "xtrain" / "kernels"
    if record["bench"] == "bench_lessons":
        return ROOT / "bench" / "bench_lessons.py"
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if re.search(rf"^def {re.escape(record['name'])}\b", source, re.M) or path.stem == stem:
            return path
    return None


def changed_since(record: dict) -> str | None:
    """A sentence when the kernel's file has changed since it was measured; None when not, or when git cannot tell.

    A record without a commit counts as measured where its line came into bench/results.
    """
    path = kernel_file(record)
    if path is None:
        return None
    commit = record["commit"]
    if commit == "unknown":
        blame = _git("blame", "--porcelain", f"-L{record['line']},{record['line']}", record["file"])
        commit = blame.split()[0] if blame else ""
    if not commit or set(commit) == {"0"} or _git("cat-file", "-t", commit) is None:
        return None
    relative = path.relative_to(ROOT)
    if _git("diff", "--quiet", commit, "--", str(relative)) is not None:
        return None
    return f"{relative} has changed since {record['name']} {record['dtype']} was measured ({commit[:7]})"


def _git(*arguments) -> str | None:
    """Its output, or None when it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
