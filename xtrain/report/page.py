"""A run, or several, as one page of HTML: no scripts, nothing loaded from a network."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..data.tokenizer import Tokenizer
from ..errors import UserError
from ..files import cannot_write, write_whole
from ..nn.model import Transformer
from ..training import checkpoint
from . import comparison, record, sections, style
from .record import Record
from .sentence import MOST_TOKENS, look


@dataclass(frozen=True)
class Options:
    """Which runs to look at."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]  # folders of runs, such as runs/tiny
    out: Path | None = None  # the page; none: report.html in the run, compare.html beside the runs
    sentence: str | None = None  # show what the newest checkpoint makes of this text


def page(runs: list[Record]) -> str:
    """HTML of one run, or of several compared."""
    if len(runs) > 1:
        return style.page(" / ".join(run.name for run in runs), comparison.sections(runs))
    (run,) = runs
    parts = [
        make(run)
        for make in (
            sections.curves, sections.events, sections.sentence, sections.samples, sections.profile,
            sections.configuration,
        )
    ]  # fmt: skip
    return style.page(run.name, [sections.head(run), *parts])


def write(folders: list[Path], out: Path | None = None) -> Path:
    """-> the page that was written. Raises UserError."""
    runs = [record.read(folder) for folder in folders]
    if out is None:
        several = len(runs) > 1
        out = (
            folders[0].resolve().parent / "compare.html" if several else folders[0] / "report.html"
        )
    try:
        write_whole(out, page(runs).encode("utf-8", "replace"))
    except OSError as error:
        raise cannot_write(out, error) from error
    return out


# ----------------------------------------------------------------------------- at the end of training
def finish(folder: Path, run: Any, warn: Callable[[str], None]) -> None:
    """The sentence and the page of a run.Run that has just ended. What goes wrong here is a warning: the run is saved."""
    try:
        ((ids, _),) = run.corpus.val_batches(1, 1, min(MOST_TOKENS, run.config.seq_len))
        write_sentence(folder, look(run.model, run.corpus.tokenizer, ids[0].tolist(), run.done))
        write([folder])
    except (UserError, OSError, MemoryError) as error:
        warn(f"no report: {error}")


def write_sentence(folder: Path, content: dict[str, Any]) -> None:
    path = folder / "sentence.json"
    try:
        write_whole(path, (json.dumps(content) + "\n").encode())
    except OSError as error:
        raise cannot_write(path, error) from error


def ask(folder: Path, text: str, say: Callable[[str], None]) -> dict[str, Any]:
    """What the newest good checkpoint makes of a text. Raises UserError."""
    saved = checkpoint.newest(folder, say)
    tokenizer = Tokenizer.load(saved.folder)
    ids = tokenizer.encode(text)
    if not ids:
        raise UserError("--sentence is empty: give a text of at least one character")
    model = Transformer.from_pretrained(saved.folder, trainable=False)
    return look(model, tokenizer, ids, saved.step)


def _sentence_for(folder: Path, text: str | None, say: Callable[[str], None]) -> None:
    """Make sentence.json where it is wanted and can be had."""
    if text is None and (folder / "sentence.json").exists():
        return
    run = record.read(folder)
    wanted = text is not None
    if not wanted:
        if not checkpoint.folders(folder):
            return
        text = (
            run.samples[-1][1]
            if run.samples
            else str(run.part("train").get("sample_prompt") or " ")
        )
    try:
        write_sentence(folder, ask(folder, text, say))
    except UserError as error:
        if wanted:
            raise
        say(str(error))


def make(o: Options, say: Callable[[str], None]) -> Path:
    """What `xtrain.report` does. -> the page. Raises UserError."""
    if not o.runs:
        raise UserError("which run? Give one folder or more, such as runs/tiny")
    if o.sentence is not None and len(o.runs) > 1:
        raise UserError("--sentence is for one run: give one folder")
    if len(o.runs) == 1:
        record.read(o.runs[0])
        _sentence_for(o.runs[0], o.sentence, say)
    return write(list(o.runs), o.out)
