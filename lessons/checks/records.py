"""Measurements in bench/results, by id. A lesson never hard-codes a number that was measured.

id    bench/name/dtype, or bench/name/shape/dtype if a name was measured with several shapes
      bench_kernels/rmsnorm_fwd/fp32; a * stands for any text: bench_server/poisson*/bf16
"""

import json
import re
import subprocess
from pathlib import Path

from xtrain.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


def find(identity: str) -> dict:
    """The newest record with this id. Raises UserError if there is none, or if records of several shapes match."""
    return _all(identity)[-1]


def together(identities: list[str]) -> list[dict]:
    """One record of each id, all of one GPU, so that they can be compared: the newest where that is possible.

    The GPU is the one that was used last among those with a record of every id. If no GPU has them all,
    each is the newest of its id. Raises UserError as find does.
    """
    found = [_all(i) for i in identities]
    common = set.intersection(*({r["gpu"] for r in records} for records in found))
    if not common:
        return [records[-1] for records in found]
    gpu = max((r for records in found for r in records if r["gpu"] in common), key=_age)["gpu"]
    return [[r for r in records if r["gpu"] == gpu][-1] for records in found]


def _age(record: dict) -> tuple[str, str, int]:
    return record["date"], record["file"], record["line"]


def _all(identity: str) -> list[dict]:
    """All records with this id, oldest first; at least one, and all of one shape."""
    bench, _, wanted = identity.partition("/")
    begin, star, end = wanted.partition("*")
    path = RESULTS / f"{bench}.jsonl"
    if not path.exists():
        names = ", ".join(sorted(p.stem for p in RESULTS.glob("*.jsonl")))
        raise UserError(
            f"no records of {bench!r} in {RESULTS}: available are {names or 'none; run the lessons from a checkout of xtrain'}"
        )
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    records: dict[str, list[dict]] = {}
    for number, record in enumerate(lines, 1):
        name, shape, dtype = record["name"], record["shape"], record["dtype"]
        known_as = (f"{name}/{dtype}", f"{name}/{shape}/{dtype}")
        like = star and any(i.startswith(begin) and i.endswith(end) for i in known_as)
        if wanted in known_as or like:
            records.setdefault(shape, []).append({**record, "file": str(path), "line": number})
    if len(records) == 1:
        return next(iter(records.values()))
    known = sorted({f"{bench}/{r['name']}/{r['shape']}/{r['dtype']}" for r in lines})
    near = [k for k in known if wanted and k.split("/")[1] == wanted.split("/")[0]] or known
    what = "several records have" if records else "no record has"
    raise UserError(f"{what} the id {identity!r}; choose one of: {'; '.join(near[:20])}")


def machine(records: list[dict]) -> str:
    """ "Measured on one NVIDIA H200, 2026-11-21, commit c7517cb."; the number comes from names like "dim384, 4 GPU, flat" """
    part = lambda key: ", ".join(sorted({str(r[key]) for r in records}))
    commits = [c for c in part("commit").split(", ") if c != "unknown"]
    commit = f", commit {', '.join(commits)}" if commits else ""
    counts = {int(n) for r in records for n in re.findall(r", (\d+) GPU\b", r["name"])} or {1}
    most = max(counts)
    many = "one" if most == 1 else f"{most}" if len(counts) == 1 else f"up to {most}"
    return f"Measured on {many} {part('gpu')}, {part('date')}{commit}."


def kernel_file(record: dict) -> Path | None:
    """The source file that a record measures: the one that defines a function with the record's name."""
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
    """A sentence if the kernel's file has changed since the measurement; None if not, or if git cannot tell.

    A record without a commit counts as measured in the commit that added its line to bench/results.
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
    """The output of a git command, or None if it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
