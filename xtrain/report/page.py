"""One HTML page about a run or several runs; it loads nothing from a network."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ..data.tokenizer import Tokenizer
from ..errors import UserError
from ..files import cannot_write, write_whole
from ..formats import saved_runs
from ..nn.model import Transformer
from ..option_fields import POSITIONAL
from . import comparison, record, sections, style
from .record import Record
from .sentence import MOST_TOKENS, look


@dataclass(frozen=True)
class Options:
    """The options of `xtrain.report`."""

    runs: Annotated[tuple[Path, ...], POSITIONAL]  # folders of runs, such as runs/tiny
    out: Path | None = None  # the page; none: RUN/report.html, or compare.html next to the runs
    # show the newest checkpoint's attention and next tokens for this text
    sentence: str | None = None
    # serve the page of one run at 127.0.0.1, and refresh it while the run trains
    live: bool = False
    port: int = 8790  # of --live; 0: any that is free

    def validate(self) -> None:
        """Raise UserError if options do not fit together."""
        if not self.runs:
            raise UserError("no run was given: give one or more folders, such as runs/tiny")
        if self.live and (len(self.runs) > 1 or self.out is not None or self.sentence is not None):
            raise UserError("--live is for one run, without --out and --sentence: give one folder")
        if not 0 <= self.port < 65536:
            raise UserError(f"--port must be from 0 to 65535, got {self.port}")
        if self.sentence is not None and len(self.runs) > 1:
            raise UserError("--sentence is for one run: give one folder")


def page(runs: list[Record]) -> str:
    """Return the HTML of one run, or of several runs compared."""
    if len(runs) > 1:
        return style.page(" / ".join(run.name for run in runs), comparison.sections(runs))
    (run,) = runs
    return style.page(run.name, sections_of(run))


def sections_of(run: Record) -> list[str]:
    """Return the sections of the page of one run that have something to show, as HTML."""
    body = [
        section(run)
        for section in (
            sections.rewards,
            sections.preferences,
            sections.curves,
            sections.events,
            sections.fp8,
            sections.sentence,
            sections.samples,
            sections.rollouts,
            sections.profile,
            sections.configuration,
        )
    ]
    # The head comes last: it lists what the other sections could not read.
    return [sections.head(run), *body]


def write(folders: list[Path], out: Path | None = None) -> Path:
    """Write the page of these runs and return its path. Raises UserError."""
    runs = [record.read(folder) for folder in folders]
    if out is None:
        several = len(runs) > 1
        if several:
            out = folders[0].resolve().parent / "compare.html"
        else:
            out = folders[0] / "report.html"
    try:
        write_whole(out, page(runs).encode("utf-8", "replace"))
    except OSError as error:
        raise cannot_write(out, error) from error
    return out


# ----------------------------------------------------------------------------- end of training
def finish(folder: Path, run: Any, warn: Callable[[str], None]) -> None:
    """Write sentence.json and the page of a training run that has just ended.

    An error is only a warning: the run is saved. With ZeRO-3 no rank has the whole model to look
    at: `xtrain report` reads it from the checkpoint.
    """
    try:
        if run.parallel.zero == 3:
            write([folder])
            return
        (arrays,) = run.corpus.val_batches(1, 1, min(MOST_TOKENS, run.config.seq_len))
        ids, _, *starts = (x for x in arrays if x is not None)
        if starts:  # the first of several documents
            ids = ids[:, starts[0][0] == 0]
        write_sentence(folder, look(run.model, run.corpus.tokenizer, ids[0].tolist(), run.done))
        write([folder])
    except (UserError, OSError, MemoryError) as error:
        warn(f"no report: {error}")


def write_sentence(folder: Path, content: dict[str, Any]) -> None:
    """Write sentence.json. Raises UserError.

    content: as from sentence.look
    """
    path = folder / "sentence.json"
    try:
        write_whole(path, (json.dumps(content) + "\n").encode())
    except OSError as error:
        raise cannot_write(path, error) from error


def look_at_text(folder: Path, text: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the newest undamaged checkpoint of a run on a text and return sentence.json's content.

    Raises UserError.
    """
    saved = saved_runs.newest(folder, say)
    tokenizer = Tokenizer.load(saved.folder)
    ids = tokenizer.encode(text)
    if not ids:
        raise UserError("--sentence is empty: give a text of at least one character")
    change = record.read(folder).section("train").get("change")
    model = Transformer.from_pretrained(saved.folder, trainable=False, change=change)
    return look(model, tokenizer, ids, saved.step)


def _update_sentence(folder: Path, text: str | None, say: Callable[[str], None]) -> None:
    """Write sentence.json for `text`.

    Without a text: for the last sample, if the file is missing and there is a checkpoint.
    """
    if text is not None:
        write_sentence(folder, look_at_text(folder, text, say))
        return
    if (folder / "sentence.json").exists() or not saved_runs.folders(folder):
        return
    run = record.read(folder)
    prompt = str(run.section("train").get("sample_prompt") or " ")
    try:
        if run.samples:
            sample = run.samples[-1][1]
        else:
            sample = prompt
        write_sentence(folder, look_at_text(folder, sample, say))
    except UserError as error:
        say(str(error))


def write_requested(o: Options, say: Callable[[str], None]) -> Path:
    """Write the page for the given options and return its path. Raises UserError."""
    o.validate()
    if len(o.runs) == 1:
        record.read(o.runs[0])
        _update_sentence(o.runs[0], o.sentence, say)
    return write(list(o.runs), o.out)
