"""The text of --help: every option with what its comment in the source says, in groups."""

import ast
import dataclasses
import inspect
import io
import shutil
import sys
import textwrap
import tokenize
from pathlib import Path
from typing import Any, get_type_hints

from typing_extensions import Doc

from .option_fields import Option, options_of

GROUPED = 34  # options: a command with more has them in groups
GROUPS = {
    "the data": "data text-key strict-data verify-data vocab-size tokenizer val-data val-share mix train-answers "
    "bad-records too-long pack show chat-template chat-template-kwargs",
    "the model": "preset depth dim layers heads kv-heads head-dim hidden-dim qk-norm tie-embeddings init change "
    "lora lora-alpha lora-targets lora-rank-pattern lora-alpha-pattern lora-rslora lora-dora "
    "lora-bias lora-modules-to-save lora-init weights draft-heads",
    "rollouts": "group max-new-tokens stop-strings environment max-turns temperature top-p top-k min-p logprobs-of "
    "exact off-policy rollout-batch rollouts-every",
    "rewards": "task reward-weights reward-timeout reward-errors",
    "the algorithm": "algorithm updates clip-ratio clip-ratio-high kl reference scale-rewards mask-truncated "
    "dynamic-sampling",
    "distillation": "teacher teacher-weight teacher-top-k teacher-kl",
    "preferences": "loss beta label-smoothing target-margin desirable-weight undesirable-weight",
    "how long": "steps epochs batch micro-batch seq-len stop-at time-limit",
    "the learning rate": "lr warmup schedule min-lr-ratio decay-fraction decay-shape",
    "the optimizer": "optimizer weight-decay clip beta1 beta2 eps ema max-skips spike-z seed",
    "experts": "experts experts-per-token expert-hidden-dim balance-loss router-z-loss expert-bias expert-bias-rate",
    "validation and samples": "eval-every eval-batches eval-tasks eval-tasks-every eval-items sample-every "
    "sample-prompt sample-tokens",
    "the run's folder": "name out save-every keep best patience resume allow-change log",
    "the device": "device precision fp8-head blas-threads recompute graph debug",
    "several ranks": "zero dp bucket-mb grad-comm transport check-ranks watchdog",
}  # fmt: skip
OTHERS = "options"  # the group of those that no group names
COLUMN = 28  # where the texts begin
WIDEST = 120  # columns of a terminal that are used
CONFIG_TEXT = (
    "read options from a .toml or .json file, or those of a run (runs/NAME); the command line wins"
)
TYPES = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "{true,false}"}


def help_text(kind: type, prog: str, description: str | None) -> str:
    """Return the text of --help.

    Where no terminal is, an option is one line, as for grep. kind: the dataclass of the options.
    """
    options = options_of(kind)
    texts = texts_of(kind)
    width = sys.maxsize
    if sys.stdout.isatty():
        width = min(shutil.get_terminal_size().columns, WIDEST)
    positional = [option for option in options.values() if option.positional]
    usage = " ".join([f"usage: {prog} [OPTIONS]", *map(_invocation, positional)])
    lines = [usage, "", (description or inspect.getdoc(kind) or "").strip(), ""]
    for title, names in grouped(options).items():
        lines += [f"{title}:"]
        if title == OTHERS:
            lines += _entry("-h, --help", "print this text", width)
            lines += _entry("--config FILE", CONFIG_TEXT, width)
        for option in (options[name] for name in names):
            lines += _entry(_invocation(option), texts[option.field] + _default(option), width)
        lines += [""]
    return "\n".join(lines).rstrip("\n")


def grouped(options: dict[str, Option]) -> dict[str, list[str]]:
    """Return {title: names of options}, the options without a group first."""
    groups: dict[str, list[str]] = {OTHERS: []}
    if len(options) > GROUPED:
        groups |= {title: names.split() for title, names in GROUPS.items()}
    named = {name for names in groups.values() for name in names}
    groups[OTHERS] = [name for name in options if name not in named]
    present = {t: [name for name in names if name in options] for t, names in groups.items()}
    return {title: names for title, names in present.items() if names or title == OTHERS}


def _invocation(option: Option) -> str:
    value = TYPES[option.kind]
    if option.choices:
        value = "{" + ",".join(map(str, option.choices)) + "}"
    if option.positional:
        value = option.name.upper()
    if option.values == "all":
        value += " ..."
    if option.positional:
        return value
    if option.values == "flag":
        return f"--{option.name}, --no-{option.name}"
    return f"--{option.name} {value}"


def _default(option: Option) -> str:
    if option.default is dataclasses.MISSING:
        return " (required)"
    if option.default is False or option.default in (None, "", (), []):
        return ""
    shown = option.default
    if isinstance(shown, tuple):
        shown = " ".join(shown)
    elif isinstance(shown, str) and shown.strip() != shown:
        shown = repr(shown)
    return f" (default: {shown})"


def _entry(invocation: str, text: str, width: int) -> list[str]:
    """Return the lines of one option."""
    first = f"  {invocation}".ljust(COLUMN - 2) + "  "
    lines = textwrap.wrap(text, max(width - COLUMN, 20))
    if len(first) > COLUMN and len(first) + len(lines[0]) > width:
        return [first.rstrip(), *(" " * COLUMN + line for line in lines)]
    return [first + lines[0], *(" " * COLUMN + line for line in lines[1:])]


def texts_of(kind: type) -> dict[str, str]:
    """Return {field: its text}: of its Doc, else the string or comment that stands at its
    definition; "" if there is none."""
    texts = dict.fromkeys((field.name for field in dataclasses.fields(kind)), "")
    for part in reversed(kind.__mro__):
        if dataclasses.is_dataclass(part):
            texts |= {name: text for name, text in _comments(part).items() if text}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Doc):
                texts[name] = mark.documentation
    return texts


def _comments(part: Any) -> dict[str, str]:
    """Return what the source of one class says about its fields: a string below the field, else a
    comment on its line, else the comments above it."""
    try:
        source = textwrap.dedent(inspect.getsource(part))
    except (OSError, TypeError):  # a class without a file
        return {}
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines = source.splitlines()
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for node, following in zip(body, [*body[1:], None]):
        if not isinstance(node, ast.AnnAssign):
            continue
        above: list[str] = []
        n = node.lineno - 1
        while n in comments and lines[n - 1].lstrip().startswith("#"):
            above.insert(0, comments[n])
            n -= 1
        text = comments.get(node.end_lineno or 0, " ".join(above))
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        texts[ast.unparse(node.target)] = text
    return texts
