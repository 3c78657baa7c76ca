"""Write the tables and charts of the README and of the site from bench/results.

So every number there has a record.

    python bench/tables.py            rewrite the text between <!-- results:NAME --> and
                                      <!-- results:end -->, and lessons/charts
    python bench/tables.py --check    exit 1 if a table or a chart differs from the records

A table or chart without records says "Not measured yet."
"""

import argparse
import functools
import json
import math
import statistics
import sys
from pathlib import Path

from _charts import CHARTS, gpu_name, raced
from _markdown import number, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "lessons").rglob("*.md"))]
CHART_FILES = ROOT / "lessons" / "charts"


def latest(bench: str, per_peer: bool = True, per_gpu: bool = False) -> list[dict]:
    """Return the newest line of every (name, shape, dtype, peer), in order of first appearance.

    per_peer: False: the newest line of every (name, shape, dtype), with any peer or none.
    per_gpu: the newest line of each GPU model, for tables that compare two lines with each other.
    """
    path = RESULTS / f"{bench}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    newest = {}
    for i, record in enumerate(map(json.loads, filter(str.strip, lines))):
        key = record["name"], record["shape"], record["dtype"], record["peer"] if per_peer else None
        key += (record["gpu"] if per_gpu else None,)
        newest[key] = {**record, "line": i}
    return list(newest.values())


# ----------------------------------------------------------------------------- training
def train() -> str:
    """Return for every step and GPU the newest comparison with PyTorch's fastest mode."""
    rows = []
    records = raced(latest)
    for r in records:
        peer = f"{r['peer_value']:,.0f} ({r['peer']})"
        ratio = f"{r['ratio']:.2f}"
        peaks = (r["peak_gb"], r.get("peer_peak_gb"))
        memory = " / ".join(number(gb or None, ".1f") for gb in peaks)
        shape = f"{r['name']}, {r['shape']}, {gpu_name(r)}"
        rows.append([shape, r["dtype"], f"{r['value']:,.0f}", peer, ratio, memory])
    header = ["train step", "precision", "xtrain, tokens/s", "PyTorch, same run", "ratio"]
    return table([*header, "peak GB, ours / theirs"], rows, records)


def train_short() -> str:
    """Return the table of the README: `train` without fp32, shapes and memory."""
    records = [r for r in raced(latest) if r["dtype"] != "fp32"]
    rows = []
    for r in records:
        speeds = [f"{r['value']:,.0f}", f"{r['peer_value']:,.0f}", f"{r['ratio']:.2f}"]
        rows.append([f"{r['name']}, {gpu_name(r)}", r["dtype"], *speeds])
    header = ["train step", "precision", "xtrain, tokens/s", "PyTorch's fastest, same run"]
    return table([*header, "ratio"], rows, records)


def precisions() -> str:
    """Return bf16 and fp32 side by side, where both were measured without a peer."""
    steps = {}
    for r in latest("bench_train", per_gpu=True):
        if not r["peer"]:
            steps.setdefault((r["name"], r["shape"], r["gpu"]), {})[r["dtype"]] = r
    rows = []
    records = []
    for (name, shape, _), pair in steps.items():
        if pair.keys() >= {"fp32", "bf16"}:
            fp32 = pair["fp32"]
            bf16 = pair["bf16"]
            records += [fp32, bf16]
            rows.append(
                [f"{name}, {shape}", *(f"{r['value']:,.0f}" for r in (fp32, bf16))]
                + [f"{bf16['value'] / fp32['value']:.2f}"]
                + [f"{r['peak_gb']:.1f}" for r in (fp32, bf16)]
            )
    header = ["train step", "fp32, tokens/s", "bf16, tokens/s", "ratio", "fp32, GB", "bf16, GB"]
    return table(header, rows, records)


def fp8() -> str:
    """Return the table of bench_train --precision bf16 fp8: whole steps, each with its newest run.

    Only steps of which both were measured.
    """
    steps: dict[tuple, dict[str, dict]] = {}
    for r in sorted(latest("bench_train", per_gpu=True), key=lambda r: r["line"]):
        steps.setdefault((r["name"], r["shape"], r["gpu"]), {})[r["dtype"]] = r
    rows = []
    records = []
    for (name, shape, gpu), by_dtype in steps.items():
        bf16 = steps.get((name.removesuffix(", head in fp8"), shape, gpu), {}).get("bf16")
        if "fp8" not in by_dtype or bf16 is None:
            continue
        r = by_dtype["fp8"]
        records += [bf16, r]
        rows.append(
            [f"{name}, {shape}", f"{bf16['value']:,.0f}", f"{r['value']:,.0f}"]
            + [f"{r['value'] / bf16['value']:.2f}"]
            + [number(r.get("torchao")), number(r["peer_value"])]
            + [" / ".join(number(x["peak_gb"], ".1f") for x in (bf16, r))]
        )
    header = ["train step", "bf16, tokens/s", "fp8, tokens/s", "ratio"]
    header += ["torchao float8 + compile", "PyTorch's fastest, same run", "peak GB, bf16 / fp8"]
    return table(header, rows, records)


def fp8_products() -> str:
    """Return the table of bench_fp8 products: those of a whole step."""
    records = [r for r in latest("bench_fp8") if "/products/" in r["name"]]
    rows = [
        [f"{model}, {r['shape']}, {part}", f"{r['peer_ms']:.2f}", f"{r['ms']:.2f}"]
        + [f"{r['value']:.0f}", f"{r['ratio']:.2f}"]
        for r in records
        for model, _, part in [r["name"].split("/")]
    ]
    header = ["products of a step", "bf16, ms", "fp8, ms", "fp8, TFLOP/s", "ratio"]
    return table(header, rows, records)


def fp8_losses() -> str:
    """Return the table of bench_fp8 losses: runs in fp8 next to bf16."""
    records = [r for r in latest("bench_fp8") if "/losses/" in r["name"] and r["dtype"] == "fp8"]
    rows = []
    for r in records:
        model, _, variant = r["name"].split("/")
        counts = (f"{r['counts'].get(f'fp8_{kind}', 0):,.0f}" for kind in ("clamped", "nonfinite"))
        losses = [f"{r[key]:.4f}" for key in ("bf16_end", "end")]
        rows.append([f"{model}, {r['shape']}, {variant}", *losses, f"{r['value']:+.2f} %", *counts])
    header = ["validation loss at the end", "bf16", "fp8", "difference", "numbers clamped"]
    return table([*header, "not finite"], rows, records)


def history() -> str:
    """Return the table of bench_history: a training step after each phase of development."""
    records = latest("bench_history")
    rows = [[r["name"], r["dtype"], f"{r['ms']:,.1f}", f"{r['value']:,.0f}"] for r in records]
    return table(["phase (dim384)", "precision", "ms a step", "tokens/s"], rows, records)


def head() -> str:
    """Return the table of bench_head: output head and loss in chunks of rows, time and memory."""
    records = latest("bench_head")
    rows = [
        [r["name"], r["shape"], r["dtype"], *(f"{r[k]:.2f}" for k in ("ms", "peak_gb"))]
        + [f"{r['value']:.0f}"]
        for r in records
    ]
    header = ["model, rows of a chunk", "shape", "precision", "ms", "GB", "TFLOP/s"]
    return table(header, rows, records)


TORCH = "torch DDP + compile"


def _job(r: dict) -> tuple[str, ...]:
    """Return the model, the number of GPUs and their kind, of a record of bench_ddp."""
    return (*r["name"].split(", ")[:2], r["gpu"])


def ddp(only: tuple[str, ...] = ()) -> str:
    """Return tokens per second and the share of linear scaling of each variant.

    PyTorch's where it was measured in the same run.
    only: keep the records whose names end with one of these; empty: all.
    """
    records = latest("bench_ddp", per_peer=False, per_gpu=True)
    records = [r for r in records if not r["name"].endswith(TORCH)]
    records = [r for r in records if not only or r["name"].endswith(only)]
    records.sort(key=_job)
    rows = []
    for r in records:
        value = r["peer_value"]
        share = r.get("peer_of_linear")
        peer = f"{value:,.0f}" if value else ""
        if value and share:
            peer += f" ({share:.0%})"
        exposed = f"{r['exposed_ms']:.2f}" if "exposed_ms" in r else ""
        rows.append(
            [f"{r['name']}, {gpu_name(r)}"]
            + [f"{r['ms']:.2f}", f"{r['value']:,.0f}", f"{r['of_linear']:.1%}", exposed]
            + [number(r.get("state_bytes"), ".1f"), peer]
        )
    header = ["model, GPUs, variant, card", "ms a step", "tokens/s", "of linear", "exposed ms"]
    header += ["bytes a parameter and GPU", "torch DDP + compile (of linear)"]
    return table(header, rows, records, "Up to four")


# ----------------------------------------------------------------------------- kernels
def attention(*parts: str) -> str:
    """Return TFLOP/s of some parts of bench_attention, one row per shape.

    Forward, and forward + backward. If both kernels of xtrain were measured, each has a column, and
    the one in use is bold.
    """
    chosen = [(p, r) for p in parts for r in latest("bench_attention") if r["name"].split()[0] == p]
    shapes: dict[tuple, dict] = {}
    for part, r in chosen:
        shapes.setdefault((part, r["shape"]), {})[r["name"].split()[1]] = r
    records = [r for _, r in chosen]
    two = any(r.get("wgmma_value") for r in records)
    ours = ["xtrain mma.sync", "xtrain wgmma"] if two else ["xtrain"]
    header = ["causal, bf16, TFLOP/s"]
    rows = []
    for direction in ("forward", "forward + backward"):
        header += [f"{direction}: {ours[0]}", *ours[1:], "torch flash", "torch cuDNN"]
    for (_, shape), directions in shapes.items():
        cells = [shape]
        for direction in ("fwd", "fwd+bwd"):
            cells += rates(directions.get(direction, {}), two)
        rows.append(cells)
    return table(header, rows, records)


def rates(r: dict, two: bool) -> list[str]:
    """Return the cells of one direction of a record r, {} for none.

    two: show both kernels of xtrain.
    """
    own = [number(r.get("value"), ".0f")]
    if two:
        used = r.get("kernels", "mma.sync")
        values = {"mma.sync": r.get("mma_sync_value"), "wgmma": r.get("wgmma_value")}
        values[used] = r.get("value")
        own = [number(x, ".0f") for x in values.values()]
        own = [f"**{x}**" if name == used and x != "-" else x for name, x in zip(values, own)]
    return own + [number(r.get(key) or None, ".0f") for key in ("peer_value", "cudnn_value")]


def kernels() -> str:
    """Return all of bench_kernels: the time, and the share that a copy of the same bytes takes."""
    rows = []
    records = latest("bench_kernels", per_peer=False)
    for r in records:
        peers = [number(r.get(f"torch_{key}_ms"), ".4f") for key in ("compile", "eager")]
        times = [f"{r['ms']:.4f}", f"{r['value']:,.0f}", f"{r['share']:.0%}"]
        rows.append([f"`{r['name']}`", r["shape"], r["dtype"], *times, *peers])
    header = ["kernel", "shape", "type", "ms", "GB/s", "copy's time, share"]
    return table([*header, "torch.compile, ms", "torch eager, ms"], rows, records)


def lessons() -> str:
    """Return the table of bench_lessons: the kernels that the lessons build."""
    rows = []
    records = latest("bench_lessons")
    for r in records:
        share = f"{r['copy_ms'] / r['ms']:.0%}" if r.get("copy_ms") else "-"
        value = [f"{r['ms']:.4f}", f"{r['value']:,.0f} {r['unit']}", share]
        rows.append([f"`{r['name']}`", r["shape"], r["dtype"], *value])
    header = ["kernel of a lesson", "shape", "type", "ms", "rate", "copy's time, share"]
    return table(header, rows, records)


# ----------------------------------------------------------------------------- serving
def decode() -> str:
    """Return the table of bench_decode: decoding speed and time to first token.

    Compared with transformers where measured. A row is one run.
    """
    runs: dict[tuple, dict] = {}
    records = [r for r in latest("bench_decode") if r["dtype"] == "bf16"]
    for r in records:
        runs.setdefault((r["name"], r["shape"]), {})[r["peer"]] = r
    rows = []
    shown = []
    for (name, shape), peers in runs.items():
        raced = [r for peer, r in peers.items() if peer]
        mine = max(raced or peers.values(), key=lambda r: r["line"])
        shown.append(mine)
        cells = [f"{name}, {shape}, {gpu_name(mine)}", f"{mine['value']:,.0f}"]
        cells.append(f"{mine['share_of_bound']:.0%}")
        theirs = [peers.get(f"transformers {kind}") for kind in ("plain", "compile")]
        cells += [f"{r['peer_value']:,.0f} ({r['ratio']:.2f} x)" if r else "-" for r in theirs]
        waits = [f"{mine['first_token_ms']:,.0f}"]
        waits += [number(r and r["peer_first_token_ms"]) for r in theirs]
        rows.append([*cells, " / ".join(waits), number(mine["peak_gb"], ".1f")])
    header = ["decoding, bf16", "xtrain, tokens/s", "of the memory bound", "transformers plain"]
    header += ["static cache + compile", "first token, ms: ours / plain / compile", "peak GB"]
    return table(header, rows, shown)


def quantized() -> str:
    """Return the table of bench_decode --weights: a byte per weight, next to bf16."""
    return in_codes("bf16 weights", "bench_decode", "bench_one_kernel")


def kv_codes() -> str:
    """Return the table of bench_decode --kv-cache: a byte per number, next to bf16."""
    return in_codes("keys and values in bf16", "bench_kv_codes")


def in_codes(peer: str, *benches: str) -> str:
    """Return the table of records that are compared with bf16."""
    rows = []
    records = [r for bench in benches for r in latest(bench) if r["peer"] == peer]
    for r in records:
        speed = f"{r['value']:,.0f} ({r['peer_value']:,.0f})"
        memory = number(r["peak_gb"], ".1f")
        what = f"{r['name']}, {r['shape']}, {r['dtype']}"
        rows.append([what, speed, f"{r['ratio']:.2f}", f"{r['share_of_bound']:.0%}", memory])
    header = ["decoding", f"tokens/s ({peer}, same run)", "ratio", "of the memory bound"]
    return table([*header, "peak GB"], rows, records)


def muon() -> str:
    """Return the table of bench_muon --time-only: a step with each optimizer."""
    steps: dict[str, dict] = {}
    records = [r for r in latest("bench_muon") if "/step/" in r["name"]]
    for r in records:
        preset, _, optimizer = r["name"].split("/")
        steps.setdefault(f"{preset}, {r['shape']}", {})[optimizer] = r
    rows = [
        [
            shape,
            f"{pair['adamw']['ms']:.2f}",
            f"{pair['muon']['ms']:.2f}",
            f"{pair['muon']['value']:.0f} %",
        ]
        for shape, pair in steps.items()
    ]
    return table(["train step, bf16", "AdamW, ms", "Muon, ms", "added"], rows, records)


def serve() -> str:
    """Return the table of bench_serve: many requests, prefill, a long prompt, the first prompt.

    A row is the newest run.
    """
    rows = []
    records = latest("bench_serve", per_peer=False)
    for r in sorted(records, key=lambda r: r["name"].split()[-2]):
        share = "-" if r.get("mfu") is None else f"{r['mfu']:.0%} of peak FLOP/s"
        if r.get("share_of_bound") is not None:
            nominal = r["share_of_nominal"]
            share = f"{r['share_of_bound']:.0%}, {nominal:.0%} of the memory bound"
        peer = "-" if r["peer"] is None else f"{r['peer']}: {r['peer_value']:,.1f}"
        rows.append([r["name"], r["shape"], f"{r['value']:,.1f} {r['unit']}", share, peer])
    return table(["serving, bf16", "work", "xtrain", "share", "compared with"], rows, records)


def finetune() -> str:
    """Return the table of bench_finetune: examples alone and packed, adapters."""
    rows = []
    records = latest("bench_finetune", per_peer=False)
    for r in records:
        peer = "-" if r["peer"] is None else f"{r['peer']}: {r['peer_value']:,.0f}"
        form = ",.1f" if r["unit"] == "GB" else ",.0f"
        planned = f", planned {r['plan_gb']:.1f}" if "plan_gb" in r else ""
        memory = number(r["peak_gb"], ".1f")
        value = f"{r['value']:{form}} {r['unit']}{planned}"
        rows.append([r["name"], r["shape"], value, number(r["ms"], ".1f"), memory, peer])
    header = ["fine-tuning, bf16", "work", "xtrain", "ms/step", "peak GB", "compared with"]
    return table(header, rows, records)


def reinforce() -> str:
    """Return the table of bench_reinforce: GRPO, batch-invariant and with the faster kernels."""
    rows = []
    records = latest("bench_reinforce")
    for r in records:
        drift = f"{r['ratio_error_max']:.2g} / {r['rollout_kl_max']:.2g}"
        rewards = f"{r['reward_first']:.2f} to {r['reward_last']:.2f}"
        step = f"{r['ms']:,.0f} ms, {r['value']:.0f} %"
        peer = f"{r['rollout_ms']:,.0f} / {r['transformers_generate_ms']:,.0f}"
        rows.append([r["name"], r["shape"], step, peer, drift, rewards])
    header = ["GRPO, bf16", "work", "a step, share of rollouts"]
    header += ["rollouts, ms: xtrain / transformers", "largest ratio error / KL", "reward"]
    return table(header, rows, records)


def start() -> str:
    """Return the table of bench_start: from the command to the first step."""
    records = latest("bench_start", per_peer=False)
    rows = [[r["name"], r["shape"], f"{r['value']:.1f}"] for r in records]
    return table(["`xtrain train`", "machine", "seconds to the first step"], rows, records)


def simulator() -> str:
    """Return the table of bench_simulator: next to Numba's simulator and to one process."""
    records = latest("bench_simulator")
    ratio = lambda r: f"{r['ratio']:.1f} x {r['peer']}"
    rows = [[r["name"], number(r["value"]), ratio(r)] for r in records]
    return table(["kernel", "CUDA threads a second", "compared with"], rows, records)


def browser() -> str:
    """Return the table of bench_browser: sizes and times of the lessons' pages."""
    records = latest("bench_browser")
    rows = [[r["name"], f"{r['value']:.1f} {r['unit']}"] for r in records]
    return table(["", "measured"], rows, records)


def server() -> str:
    """Return the table of bench_server: the engine behind HTTP."""
    # One row per kind: the name of a Poisson load contains its rate, which depends on the machine.
    kinds = {r["name"].split()[0]: r for r in latest("bench_server", per_peer=False)}
    rows = []
    records = list(kinds.values())
    for r in records:
        peer = "-" if r["peer"] is None else f"{r['peer']}: {r['peer_value']:,.0f}"
        first, last = (" / ".join(f"{x:,.0f}" for x in r[k]) for k in ("first_ms", "last_ms"))
        rows.append([r["name"], r["shape"], f"{r['value']:,.0f}", first, last, peer])
    header = ["clients", "work", "tokens/s", "first text, ms (median / 99 %)"]
    return table([*header, "whole answer, ms", "compared with"], rows, records)


def engine_kernels() -> str:
    """Return the table of bench_engine: the kernels of a decoding step, one by one."""
    rows = []
    records = [r for r in latest("bench_engine") if not r["name"].startswith("step")]
    for r in records:
        rate = f"{r['value']:,.0f} {r['unit']}" if r["unit"] != "us" else "-"
        share = number(r.get("share"), ".0%")
        ratio = number(r["ratio"], ".2f")
        ratio += f" x {r['peer']}" if r["peer"] else ""
        rows.append([f"`{r['name']}`", r["shape"], f"{1e3 * r['ms']:,.1f}", rate, share, ratio])
    header = ["kernel", "shape", "us", "rate", "copy's time, share", "compared with"]
    return table(header, rows, records)


def engine_step() -> str:
    """Return the table of bench_engine: all kernels of a step in one graph, and without overlap."""
    shapes: dict[str, dict] = {}
    records = [r for r in latest("bench_engine") if r["name"].startswith("step")]
    for r in records:
        shapes.setdefault(r["shape"], {})[r["name"]] = r
    rows = []
    for shape, pair in shapes.items():
        cells = [shape]
        for r in (pair.get("step", {}), pair.get("step_without_overlap", {})):
            cells += [number(r.get(key), f) for key, f in (("value", ",.0f"), ("share", ".0%"))]
        rows.append(cells)
    header = ["all kernels of a step", "tokens/s", "of the memory bound"]
    return table([*header, "without overlap", "of the memory bound"], rows, records)


# ----------------------------------------------------------------------------- in PyTorch
def torch_ops() -> str:
    """Return the ops of xtrain.torch at 8192 tokens, and how they compare with more tokens."""
    records = [r for r in latest("bench_torch", per_peer=False) if " N=" in r["shape"]]
    found: dict[tuple[str, str], dict[int, dict]] = {}
    for r in records:
        width, tokens = r["shape"].split(" N=")
        found.setdefault((width, r["name"].split()[0]), {})[int(tokens)] = r["all_ms"]
    rows = []
    for (width, name), by_tokens in found.items():
        ms = by_tokens.get(8192, {})
        times = [number(ms.get(k), ".3f") for k in ("xtrain", "liger", "compile")]
        ratios = []
        for tokens in (8192, 16384, 32768):
            ms = by_tokens.get(tokens, {})
            others = [t for k, t in ms.items() if k != "xtrain"]
            ratios.append(number(min(others) / ms["xtrain"] if others else None, ".2f"))
        rows.append([name, width, *times, " / ".join(ratios)])
    header = ["op, forward and backward", "width", "xtrain, ms", "Liger-Kernel", "torch.compile"]
    return table([*header, "fastest other / xtrain at 8 k / 16 k / 32 k tokens"], rows, records)


def torch_steps() -> str:
    """Return training steps of transformers models: time and memory of each variant."""
    records = [r for r in latest("bench_torch", per_peer=False) if r["name"].startswith("step ")]
    variants = {"xtrain": "apply", "xtrain + compile": "apply, compiled", "liger": "Liger-Kernel"}
    variants |= {"compile": "compiled", "plain": "plain"}
    rows = []
    for r in records:
        cells = []
        for key in variants:
            ms = r["all_ms"].get(key)
            cells.append("-" if ms is None else f"{ms:.1f} ms, {r['all_peak_gb'][key]:.1f} GB")
        rows.append([f"{r['name'].removeprefix('step ')}, {r['shape']}", *cells])
    return table(["training step, bf16", *variants.values()], rows, records)


# ----------------------------------------------------------------------------- compilers
PAIR = {"mlir": "numba-cuda-mlir", "numba": "numba-cuda"}


def _compared(card: str = "9.0") -> tuple[list[dict], list[tuple[str, dict, dict]]]:
    """Return records of bench_compilers, and (kernel, with mlir, with numba) of kernels in both.

    For this compute capability, and of the last run only: a new kernel changes the numbers of the
    signatures after it.
    """
    records = [r for r in latest("bench_compilers") if card in r["cards"]]
    pairs = []
    last = max(records, key=lambda r: r["line"], default={}).get("commit")
    records = [r for r in records if r["commit"] == last]
    for r in records:
        pair = r["cards"][card]
        both = [pair.get(compiler, {}) for compiler in PAIR]
        if all("ms" in m for m in both):
            pairs.append((f"`{r['name']}`, {r['shape']}", *both))
    return records, pairs


def compilers() -> str:
    """Return the table of bench_compilers: all kernels with each, by compute capability."""
    cards = sorted({c for r in latest("bench_compilers") for c in r["cards"]}, key=float)
    rows = []
    records = []
    for card in cards:
        card_records, pairs = _compared(card)
        records += card_records
        total = lambda key: [sum(pair[i][key] for pair in pairs) for i in (1, 2)]  # noqa: B023
        median = lambda key: statistics.median(a[key] / b[key] for _, a, b in pairs)  # noqa: B023
        local = [sum(pair[i]["local"] > 0 for pair in pairs) for i in (1, 2)]
        seconds = [f"{ms / 1e3:.0f}" for ms in total("ms")]
        rows.append(
            [card, f"{len(pairs)} of {len(card_records)}"]
            + [f"{a:,} / {b:,}" for a, b in (total("instructions"), total("registers"))]
            + [f"{median('instructions'):.2f}", f"{median('registers'):.2f}"]
            + [" / ".join(map(str, local)), " / ".join(seconds)]
        )
    header = ["compute capability", "compiled by both", "instructions, mlir / numba", "registers"]
    header += ["median ratio of instructions", "of registers", "kernels with local memory"]
    return table([*header, "seconds to compile"], rows, records, "Compiled on a")


def compilers_differ() -> str:
    """Return the table of bench_compilers: the ten kernels whose instructions differ most.

    By their ratio.
    """
    records, pairs = _compared()
    size = lambda pair: abs(math.log(pair[1]["instructions"] / pair[2]["instructions"]))
    rows = []
    for name, a, b in sorted(pairs, key=size, reverse=True)[:10]:
        cells = [f"{a[k]:,} / {b[k]:,}" for k in ("instructions", "registers", "local")]
        rows.append([name, f"{a['instructions'] / b['instructions']:.2f}", *cells])
    header = ["kernel, signature (compute capability 9.0)", "ratio", "instructions, mlir / numba"]
    header += ["registers", "bytes of local memory"]
    return table(header, rows, records, "Compiled on a")


TABLES = {
    "train": train,
    "train-short": train_short,
    "precisions": precisions,
    "fp8": fp8,
    "fp8-products": fp8_products,
    "fp8-losses": fp8_losses,
    "history": history,
    "head": head,
    "ddp": ddp,
    "ddp-best": functools.partial(ddp, ("one GPU", "copy fp32 ZeRO-1")),
    "attention": functools.partial(attention, "named", "random"),
    "attention-sweep": functools.partial(attention, "sweep"),
    "kernels": kernels,
    "lessons": lessons,
    "decode": decode,
    "serve": serve,
    "server": server,
    "finetune": finetune,
    "reinforce": reinforce,
    "quantized": quantized,
    "kv-codes": kv_codes,
    "muon": muon,
    "start": start,
    "simulator": simulator,
    "browser": browser,
    "engine-kernels": engine_kernels,
    "engine-step": engine_step,
    "torch-ops": torch_ops,
    "torch-steps": torch_steps,
    "compilers": compilers,
    "compilers-differ": compilers_differ,
}


def filled(text: str) -> str:
    """Return the page with current tables.

    Raises ValueError for a marker with an unknown table or without an end.
    """
    head, *rest = text.split("<!-- results:")
    parts = [head]
    inside = False
    for part in rest:
        name, _, after = part.partition(" -->")
        if name == "end" and inside:
            parts.append(f"<!-- results:end -->{after}")
        elif name in TABLES and not inside:
            parts.append(f"<!-- results:{name} -->\n{TABLES[name]()}\n")
        else:
            raise ValueError(f"the marker results:{name} names an unknown table or is misplaced")
        inside = name != "end"
    if inside:
        raise ValueError("a table has no <!-- results:end -->: add it")
    return "".join(parts)


def main(check: bool) -> int:
    current = {page: filled(page.read_text(encoding="utf-8")) for page in PAGES}
    current |= {CHART_FILES / f"{name}.svg": draw(latest) for name, draw in CHARTS.items()}
    code = 0
    for file, new in current.items():
        if file.exists() and file.read_text(encoding="utf-8") == new:
            continue
        if check:
            print(f"{file.name} differs from bench/results: run python bench/tables.py")
            code = 1
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_text(new, encoding="utf-8")
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    sys.exit(main(parser.parse_args().check))
