"""What a run prints: the progress line of a terminal, and lines without one."""

import io
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.table import Table

from xtrain.console import PrintableConsole
from xtrain.training.run_log import RunLog, StepNumbers

CONFIG = SimpleNamespace(steps=20000, spike_z=6.0, log=())
NUMBERS = StepNumbers(12345, 10.1234, 0.543, 3e-3, extra={"reward": 0.5})
TIMING = {"tokens_per_s": 1_029_802.0, "mfu": 0.41}
MOST_IMPORTANT = ["step 12345/20000", "loss 10.1234", "1,029,802 tok/s", "ETA"]


def progress_line(folder, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    log = RunLog(folder, CONFIG, {"step": 12344}, console)
    log.step(NUMBERS, TIMING, 0.0)
    with console.capture() as captured:
        console.print(log.progress.get_renderable())
    return captured.get().rstrip("\n")


@pytest.mark.parametrize(
    "width, more, less",
    [
        (60, [], ["reward", "━"]),
        (80, ["reward 0.5", "━"], ["lr", "grad norm"]),
        (100, ["reward 0.5", "grad norm 0.543"], ["lr", "MFU"]),
        (160, ["reward 0.5", "grad norm 0.543", "lr 3.00e-03", "MFU 41.0 %"], []),
    ],
)
def test_a_narrow_terminal_drops_the_less_important_numbers(tmp_path, width, more, less):
    line = progress_line(tmp_path, width)
    assert len(line) <= width and "…" not in line and line.endswith(":--")
    assert [text for text in [*MOST_IMPORTANT, *more] if text not in line] == []
    assert [text for text in less if text in line] == []


def test_without_a_terminal_the_time_left_is_in_days_and_hours(tmp_path):
    file = io.StringIO()
    log = RunLog(tmp_path, CONFIG, {}, PrintableConsole(file=file))
    log.started = time.perf_counter() - 4000 * 9.0
    log.step(replace(NUMBERS, step=4000), TIMING, 0.0)
    assert file.getvalue().endswith("  ETA 1 day, 16:00:00\n")


def test_without_a_terminal_a_line_stays_a_line(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    file = io.StringIO()
    console = PrintableConsole(file=file)
    log = RunLog(tmp_path, CONFIG, {}, console)
    log.measured(5, {}, "a sentence of many words " * 30)
    log.sample(5, "def f():")
    table = Table("file")
    table.add_row("a-long-name-" * 40)
    console.print(table)
    lines = file.getvalue().splitlines()
    assert "a sentence of many words " * 30 in lines[0]
    assert "a-long-name-" * 40 in lines[-2]
    assert max(map(len, lines[1:4])) <= 100  # the rules around a sample
    monkeypatch.setenv("COLUMNS", "40")
    assert PrintableConsole(file=file).width == 40
