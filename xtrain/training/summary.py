"""What a run prints at its end: how it ended, and commands to continue with."""

import os
import shlex
import subprocess
from pathlib import Path

from rich.console import Console

from ..device import memory_peak_bytes
from ..formats.saved_runs import named_best
from ..nn.draft_heads import HeadedTransformer
from .preemption import StopRequest
from .run import Run


def print_summary(console: Console, run: Run, folder: Path, stop: StopRequest) -> None:
    """Print how the run ended, its peak memory and the next commands."""
    finished = run.done == run.config.steps
    last = named_best(folder) or folder / "checkpoints" / f"step-{run.done:06d}"
    peak = memory_peak_bytes(run.model.device)
    if peak:
        console.print(f"peak GPU memory {peak / 1e9:.2f} GB", highlight=False)
    if run.skipped:
        console.print(f"{run.skipped} steps were skipped", highlight=False)
    reason = ""
    if stop.reason or run.ended:
        reason = f" ({stop.reason or run.ended})"
    state = "done"
    if not finished:
        state = f"stopped after step {run.done}{reason}"
    if stop.reason:
        page = f"python -m xtrain.report {quote(folder)}"
    else:
        page = str(folder / "report.html")
    lines = [
        f"{state}. What next:",
        *([] if finished else [f"continue this run         {_how_to_continue(run, folder)}"]),
        f"look at the run           {page}",
        *_how_to_use(run, folder, last),
    ]
    console.print(*lines, sep="\n  ", markup=False, highlight=False, soft_wrap=True)


def _how_to_use(run: Run, folder: Path, last: Path) -> list[str]:
    change = run.model.change
    # a combination of features, such as --expert-bias, is built from config.json
    built_from_config = run.model.variation in ("", run.model.saved_config.features)
    if not built_from_config and not change:
        return [
            "use it from Python        build the model again, then "
            f"model.load_weights({str(last)!r})"
        ]
    prompt = quote(run.config.sample_prompt or "Once upon")
    option = ""
    if change:
        option = f" --change {quote(change)}"
    if isinstance(run.model, HeadedTransformer) and run.model.draft_heads:
        model = f"--model {quote(run.model.base)}{option}"
        draft = f"--speculate {len(run.model.draft_heads.heads)} --draft {quote(folder)}"
        return [f"guess tokens ahead        python -m xtrain.generate {model} {draft} {prompt}"]
    argument = ""
    if change:
        argument = f", change={change!r}"
    python = f"xtrain.Transformer.from_pretrained({str(last)!r}{argument})"
    if run.config.answers:
        model = f"--model {quote(folder)}{option}"
        return [
            f"chat with it              python -m xtrain.chat {model}",
            f"measure how good it is    python -m xtrain.evaluate {model} --tasks FILE",
            f"use it from Python        {python}",
        ]
    return [
        "train on your own text    python -m xtrain.train --data FILE_OR_FOLDER",
        f"train further             python -m xtrain.train --init {quote(last)}{option} --data "
        "FILE_OR_FOLDER",
        f"generate text             python -m xtrain.generate --model {quote(folder)}{option} "
        f"{prompt}",
        f"use it from Python        {python}",
    ]


def _how_to_continue(run: Run, folder: Path) -> str:
    done, c = run.done, run.config
    if type(run).__module__.split(".")[0] != "xtrain":  # a class of the user
        return "the same program with resume=True"
    if c.out == "runs":
        out = ""
    else:
        out = f" --out {quote(c.out)}"
    steps = ""
    if done > c.steps:
        steps = f" --steps N --allow-change steps, N larger than {done}"
    return f"{run.program}{out} --name {quote(folder.relative_to(c.out))} --resume{steps}"


def quote(text: str | Path) -> str:
    """Quote one word for the shell of this machine."""
    if os.name == "nt":
        return subprocess.list2cmdline([str(text)])
    return shlex.quote(str(text))
