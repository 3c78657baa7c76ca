"""Standard output that is unread, full or closed: a run continues, other commands end with one message or none."""

import io
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from rich.progress import Progress
from runs import DATA
from signals import default_signals_in_child

from xtrain import cli
from xtrain.cli import Output, command_line
from xtrain.console import PrintableConsole

TRAIN = [
    "train", "--data", str(DATA / "grammar.txt"), "--preset", "tiny", "--steps", "4", "--batch", "2", "--seq-len", "32",
    "--vocab-size", "320", "--eval-every", "2", "--sample-every", "2", "--sample-tokens", "3", "--name", "run",
]  # fmt: skip
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full (Linux)")


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(autouse=True)
def no_functions(monkeypatch):
    """Earlier tests have called functions, whose threads `command_line` would end with this process."""
    monkeypatch.setattr(cli, "may_hang", threading.Event())


def command(output, *arguments):
    """-> exit code, stderr"""
    done = subprocess.run(
        [sys.executable, "-m", f"xtrain.{arguments[0]}", *arguments[1:]],
        stdout=output, stderr=subprocess.PIPE, text=True, timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.fixture
def unread():
    """A pipe whose reading end is closed."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def test_a_run_does_not_need_a_reader(tmp_path, unread):
    assert command(unread, *TRAIN, "--out", str(tmp_path)) == (0, "")
    assert (tmp_path / "run/checkpoints/step-000004").is_dir()
    assert (tmp_path / "run/report.html").exists()


@needs_full
def test_a_run_on_a_full_disk_for_its_output(tmp_path):
    with open(FULL, "w") as full:
        assert command(full, *TRAIN, "--out", str(tmp_path)) == (0, "")
    assert (tmp_path / "run/checkpoints/step-000004").is_dir()


@pytest.mark.parametrize("arguments", [["lesson", "list"], ["train", "--help"]], ids=" ".join)
def test_other_commands_end_without_a_message(unread, arguments):
    assert command(unread, *arguments) == (141, "")


@needs_full
def test_other_commands_report_a_full_disk():
    with open(FULL, "w") as full:
        code, said = command(full, "lesson", "list")
    assert (
        code == 1 and said == "xtrain: standard output cannot be written: No space left on device\n"
    )


def test_every_command_line_ends_this_way():
    for path in (Path(__file__).resolve().parents[1] / "xtrain").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "__main__" in text and "def main(" in text:
            assert "sys.exit(command_line(main))" in text, path.name


# ----------------------------------------------------------------------------- streams of other kinds
def in_ascii():
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


def test_characters_outside_the_encoding_become_question_marks(monkeypatch):
    monkeypatch.setattr(sys, "stdout", in_ascii())
    output = Output()
    assert output.write("a 日本 \udcff z\n") == 9
    output.flush()
    assert sys.stdout.buffer.getvalue() == b"a ?? ? z\n" and not output.refused
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # has no encoding
    output.write("日")
    assert sys.stdout.getvalue() == "日"


def test_other_commands_write_question_marks_too(monkeypatch):
    monkeypatch.setattr(sys, "stdout", in_ascii())
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process continues
    assert command_line(lambda: print("日") or 0) == 0
    assert sys.stdout.buffer.getvalue() == b"?\n"


@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v is Linux's")
@pytest.mark.parametrize("program", ["xtrain train", "xtrain.train"])
def test_too_little_address_space_for_the_libraries(program):
    script = f"ulimit -v 300000; exec {sys.executable} -m {program}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("xtrain: the limit of 307 MB of address space is too low")
    assert done.stderr.count("\n") == 1


def test_out_of_memory_prints_no_traceback(capsys):
    def main():
        raise MemoryError("Unable to allocate 9 GB")

    assert command_line(main) == 2
    said = capsys.readouterr().err
    assert said.startswith("xtrain: out of memory: Unable to allocate 9 GB (in ")
    assert said.count("\n") == 1


def test_ctrl_c_prints_no_traceback(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert command_line(interrupted) == 130
    assert capsys.readouterr().err == "\nxtrain: interrupted\n"


def test_ctrl_c_while_a_command_imports(tmp_path):
    """A command ends silently, like a C program; a program that imports xtrain keeps Python's behaviour."""
    first = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    (tmp_path / "numpy.py").write_text(first)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[1])])
    script = tmp_path / "xtrain-as-installed" / "xtrain"
    script.parent.mkdir()
    script.write_text("from xtrain.__main__ import entry\nentry()\n")
    for arguments, words in (
        (["-m", "xtrain.generate"], ""),
        (["-m", "xtrain", "generate"], ""),
        ([str(script), "generate"], ""),
        (["-c", "from xtrain import Transformer"], "Keyboard"),
    ):
        command, env = [sys.executable, *arguments], os.environ | {"PYTHONPATH": path}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, preexec_fn=default_signals_in_child
        )
        assert done.returncode == -signal.SIGINT and words in done.stderr
        assert words or not done.stderr


def test_ctrl_c_is_an_exception_once_a_command_runs():
    before, seen = signal.signal(signal.SIGINT, signal.SIG_DFL), []
    try:
        assert command_line(lambda: seen.append(signal.getsignal(signal.SIGINT)) or 2) == 2
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.default_int_handler]


def test_streams_that_are_closed(monkeypatch):
    """Python sets them to None."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)

    def talk():
        assert not sys.stdin.isatty() and sys.stdin.readline() == ""
        return sys.stdout.write("x") + sys.stderr.write("y")

    assert command_line(talk) == 2


def test_a_notebook_gets_plain_lines():
    """Where rich finds Jupyter it would warn that ipywidgets is missing, and not write to the file."""
    output = io.StringIO()
    console = PrintableConsole(file=output, force_jupyter=True, force_terminal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Progress(console=console, transient=True) as progress:
            progress.add_task("reading the text")
            console.print("[bold]step 1[/]")
    assert output.getvalue().split() == ["step", "1"]
