"""Writes the tables of the README from bench/results: every number there is a line here.

python bench/tables.py            rewrite what stands between <!-- results:NAME --> and <!-- results:end -->
python bench/tables.py --check    exit 1 when a table is not what the records say
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGES = [ROOT / "README.md"]


def latest(bench: str) -> list[dict]:
    """The newest line of every (name, shape, dtype) of one bench, in the order of first appearance."""
    path = RESULTS / f"{bench}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    newest = {}
    for record in map(json.loads, lines):
        newest[record["name"], record["shape"], record["dtype"], record["peer"]] = record
    return list(newest.values())


def table(header: list[str], rows: list[list[str]]) -> str:
    align = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, align, *rows])


def train() -> str:
    rows = []
    for r in latest("bench_train"):
        if not r["peer"]:
            continue
        peer, ratio = f"{r['peer_value']:,.0f} ({r['peer']})", f"{r['ratio']:.2f}"
        ours, theirs = (f"{gb:.1f}" if gb else "-" for gb in (r["peak_gb"], r.get("peer_peak_gb")))
        memory = f"{ours} / {theirs}"
        rows.append(
            [f"{r['name']}, {r['shape']}", r["dtype"], f"{r['value']:,.0f}", peer, ratio, memory]
        )
    header = [
        "train step",
        "precision",
        "xtrain, tokens/s",
        "PyTorch, same run",
        "ratio",
        "peak GB, ours / theirs",
    ]
    return table(header, rows) + "\n\n" + machine("bench_train")


def precisions() -> str:
    """bf16 beside fp32, where both were measured in one shape without a peer."""
    found = {}
    for r in latest("bench_train"):
        if not r["peer"]:
            found.setdefault((r["name"], r["shape"]), {})[r["dtype"]] = r
    rows = []
    for (name, shape), pair in found.items():
        if pair.keys() == {"fp32", "bf16"}:
            fp32, bf16 = pair["fp32"], pair["bf16"]
            rows.append(
                [f"{name}, {shape}", *(f"{r['value']:,.0f}" for r in (fp32, bf16))]
                + [f"{bf16['value'] / fp32['value']:.2f}"]
                + [f"{r['peak_gb']:.1f}" for r in (fp32, bf16)]
            )
    header = ["train step", "fp32, tokens/s", "bf16, tokens/s", "ratio", "fp32, GB", "bf16, GB"]
    return table(header, rows) + "\n\n" + machine("bench_train")


def history() -> str:
    rows = [
        [r["name"], r["dtype"], f"{r['ms']:,.1f}", f"{r['value']:,.0f}"]
        for r in latest("bench_history")
    ]
    return (
        table(["phase (dim384)", "precision", "ms a step", "tokens/s"], rows)
        + "\n\n"
        + machine("bench_history")
    )


def attention(*parts: str) -> str:
    """TFLOP/s of some parts of bench_attention: forward and forward + backward of a shape in one row."""
    shapes: dict[str, dict] = {}
    for r in latest("bench_attention"):
        part, direction = r["name"].split()
        if part in parts:
            shapes.setdefault(r["shape"], {})[direction] = r
    rows = []
    for shape, directions in shapes.items():
        cells = [shape]
        for direction in ("fwd", "fwd+bwd"):
            r = directions[direction]
            values = r["value"], r["peer_value"], r["cudnn_value"]
            cells += [f"{x:.0f}" if x else "-" for x in values]
        rows.append(cells)
    header = ["causal, bf16, TFLOP/s"]
    for direction in ("forward", "forward + backward"):
        header += [f"{direction}: xtrain", "torch flash", "torch cuDNN"]
    return table(header, rows) + "\n\n" + machine("bench_attention")


def ddp() -> str:
    """Tokens per second and the share of linear for each variant, with PyTorch's where it was measured beside."""
    records = latest("bench_ddp")
    if not records:
        return "Not measured yet."
    rows = []
    for r in records:
        peer = f"{r['peer_value']:,.0f} ({r['peer_of_linear']:.0%})" if r.get("peer") else ""
        exposed = f"{r['exposed_ms']:.2f}" if "exposed_ms" in r else ""
        rows.append(
            [r["name"], f"{r['ms']:.2f}", f"{r['value']:,.0f}", f"{r['of_linear']:.1%}", exposed]
            + [f"{r['state_bytes']:.1f}", peer]
        )
    header = ["model, GPUs, variant", "ms a step", "tokens/s", "of linear", "exposed ms"]
    header += ["bytes a parameter and GPU", "torch DDP + compile (of linear)"]
    return table(header, rows) + "\n\n" + machine("bench_ddp", "Up to four")


def machine(bench: str, count: str = "One") -> str:
    records = latest(bench)
    gpus = ", ".join(sorted({r["gpu"] for r in records}))
    dates = sorted({r["date"] for r in records})
    return (
        f"{count} {gpus}, {dates[0] if len(dates) == 1 else f'{dates[0]} to {dates[-1]}'}."
        if records
        else ""
    )


TABLES = {
    "train": train,
    "precisions": precisions,
    "history": history,
    "ddp": ddp,
    "attention": lambda: attention("named", "random"),
    "attention-sweep": lambda: attention("sweep"),
}


def filled(text: str) -> str:
    for name, make in TABLES.items():
        start = f"<!-- results:{name} -->"
        if start in text:
            before, rest = text.split(start, 1)
            after = rest.split("<!-- results:end -->", 1)[1]
            text = f"{before}{start}\n{make()}\n<!-- results:end -->{after}"
    return text


def main(check: bool) -> int:
    stale = [
        page
        for page in PAGES
        if filled(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")
    ]
    for page in stale:
        if check:
            print(f"{page.name} is not what bench/results says: run python bench/tables.py")
        else:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
