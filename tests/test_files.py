"""Files: complete or absent, appended without half lines; folders that only one process writes."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults import error
from rich.console import Console
from runs import assert_same_run, checkpoints, run

from xtrain import files
from xtrain.errors import UserError
from xtrain.files import (
    Busy,
    DiskFull,
    Journal,
    cannot_write,
    digest,
    locked,
    owned,
    write_whole,
)
from xtrain.training.run_log import RunLog

ROOT = Path(__file__).resolve().parents[1]


class Disk:
    """A disk with `room` free bytes; a write that does not fit is cut, as on a real disk."""

    def __init__(self, monkeypatch, room, code=errno.ENOSPC):
        self.room, self.code = room, code
        monkeypatch.setattr(files, "open", self.open, raising=False)

    def open(self, path, mode, buffering=-1):
        file = open(path, mode, buffering=buffering)  # noqa: SIM115
        if mode != "ab":
            return file
        disk = self

        class Limited:
            def write(self, data):
                fits = min(len(data), disk.room)
                if not fits:
                    raise OSError(disk.code, os.strerror(disk.code))
                disk.room -= fits
                return file.write(data[:fits])

            __enter__ = lambda self: self
            __exit__ = lambda self, *_: file.close()
            fileno = lambda self: file.fileno()
            truncate = lambda self, n: file.truncate(n)

        return Limited()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_journal_keeps_what_a_full_disk_refuses(tmp_path, monkeypatch, code):
    path = tmp_path / "a.jsonl"
    path.write_text("old\n")
    journal = Journal(path)
    assert journal.write("one\n")
    disk = Disk(monkeypatch, 6, code)
    assert not journal.write("two and more\n"), "half of it would fit"
    assert path.read_text() == "old\none\n"
    assert not journal.write("three\n") and not journal.flush()
    assert path.read_text() == "old\none\n"
    disk.room = 100
    assert journal.write("four\n") and journal.flush()
    assert path.read_text() == "old\none\ntwo and more\nthree\nfour\n"


def test_a_journal_on_a_broken_disk(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "a")
    Disk(monkeypatch, 0, errno.EIO)
    with pytest.raises(UserError, match="a cannot be written"):
        journal.write("x")


def test_a_journal_that_was_truncated(tmp_path):
    journal = Journal(tmp_path / "a")
    journal.write("one\n")
    (tmp_path / "a").write_text("")
    journal.write("two\n")
    (tmp_path / "a").unlink()
    journal.write("three\n")
    assert (tmp_path / "a").read_text() == "three\n"


def test_a_journal_that_was_extended(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "a")
    journal.write("one\n")
    with open(tmp_path / "a", "a", encoding="utf-8") as file:
        file.write("a note\n")
    journal.write("two\n")
    Disk(monkeypatch, 3)
    assert not journal.write("three\n")
    assert (tmp_path / "a").read_text() == "one\na note\ntwo\n"


def test_logs_of_a_run_on_a_full_disk(tmp_path, monkeypatch):
    """From step 6 to 9 nothing can be written. The run continues; at its end every line is in the files."""
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    kind = dict(steps=12, save_every=4, eval_every=5, sample_every=7)
    whole = run(tmp_path / "a", **kind)
    disk, step = Disk(monkeypatch, 10**9), RunLog.step

    def room_for(self, numbers, timing, ended):
        disk.room = 0 if 6 <= numbers.step <= 9 else 10**9
        step(self, numbers, timing, ended)

    monkeypatch.setattr(RunLog, "step", room_for)
    console = Console(record=True, width=1000)
    full = run(tmp_path / "b", console, **kind)
    text = console.export_text()
    assert text.count("the lines are kept until there is") == 1
    assert "no space left for a checkpoint of step 8; training continues" in text
    assert checkpoints(full) == ["step-000004", "step-000012"]
    assert_same_run(whole, full)


def test_a_full_disk_is_reported_once_though_one_file_has_room(tmp_path, monkeypatch):
    disk, told = Disk(monkeypatch, 0), []
    book = RunLog.__new__(RunLog)
    book.folder, book.full, book.warn = tmp_path, False, told.append
    book.files = {name: Journal(tmp_path / name) for name in "ab"}
    for disk.room in (0, 100, 0, 100, 0):
        book.append("a" if disk.room else "b", "line\n")
    assert len(told) == 1
    disk.room = 100
    assert book.flush()
    for disk.room in (100, 0):
        book.append("b", "line\n")
    assert len(told) == 2, "full again"


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signals here")
@pytest.mark.parametrize("code, ends", [(0, 0), (2, -signal.SIGTERM)])
def test_a_signal_after_the_end_is_no_failure(code, ends):
    """Python and MPI take a while to shut down: a signal during that time must not change the exit code."""
    script = (
        "import atexit, os, signal, sys; from xtrain.cli import command_line\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGTERM)\n"
        f"sys.exit(command_line(lambda: {code}))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == ends


def test_write_whole(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_whole(path, b"one")
    write_whole(path, b"two")

    def refuse(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError):
        write_whole(path, b"three")
    assert path.read_bytes() == b"two" and os.listdir(tmp_path) == ["a"]


def test_digest(tmp_path):
    import hashlib

    (tmp_path / "a").write_bytes(b"abc" * 10**6)
    assert digest(tmp_path / "a") == hashlib.blake2b(b"abc" * 10**6, digest_size=16).hexdigest()


def test_a_killed_process_releases_its_lock(tmp_path):
    """And not before it is killed."""
    code = (
        "import sys, pathlib, threading; from xtrain.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1])) as is_locked: print(is_locked, flush=True); threading.Event().wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"True\n"
    with pytest.raises(Busy), locked(tmp_path):
        pass
    process.kill()
    process.communicate()
    with locked(tmp_path) as is_locked:
        assert is_locked
    assert os.listdir(tmp_path) == []


NO_FLOCK = {"ENOLCK": errno.ENOLCK, "ENOTSUP": errno.ENOTSUP, "ENOSYS": errno.ENOSYS, "Windows": None}  # fmt: skip
OWNER = """
import fcntl, os, pathlib, sys, threading
from xtrain import files
if sys.argv[2] == "None":
    sys.modules["fcntl"] = None
else:
    def flock(*_): raise OSError(int(sys.argv[2]), "no locks here")
    fcntl.flock = flock
with files.owned(pathlib.Path(sys.argv[1])):
    print("owned", flush=True)
    threading.Event().wait()
"""


def without_flock(patch, code):
    if code is None:
        patch.setitem(sys.modules, "fcntl", None)
    else:
        patch.setattr("fcntl.flock", error(code))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's sockets")
@pytest.mark.parametrize("code", NO_FLOCK.values(), ids=NO_FLOCK)
def test_one_owner_without_flock(tmp_path, monkeypatch, code):
    """Two processes of one machine exclude each other; a killed one is known to be dead."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), str(code)], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"owned\n"
    without_flock(monkeypatch, code)
    for _ in range(2):
        with pytest.raises(Busy), owned(tmp_path):
            pass
    process.kill()
    process.communicate()
    assert os.listdir(tmp_path) == [".lock"]
    with owned(tmp_path), pytest.raises(Busy), owned(tmp_path):
        pass
    assert os.listdir(tmp_path) == []
    with pytest.raises(ZeroDivisionError), owned(tmp_path):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("owner", ["node7 5a3e 4026531840", "", "\xff \n"])
def test_an_owner_on_another_machine(tmp_path, monkeypatch, owner):
    """Whether it is alive cannot be known here: the user decides."""
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    folder = run(tmp_path, steps=2, stop_at=1)
    (folder / ".lock").write_text(owner)
    for code in (None, errno.ENOLCK):
        with monkeypatch.context() as patch:
            if code:
                without_flock(patch, code)
            with pytest.raises(UserError, match=r"being written by another process: .*has ended, delete that file$"):  # fmt: skip
                run(tmp_path, steps=2, resume=True)
    assert (folder / ".lock").read_text() == owner
    (folder / ".lock").unlink()
    run(tmp_path, steps=2, resume=True)
    assert checkpoints(folder)[-1] == "step-000002" and not (folder / ".lock").exists()


@pytest.mark.parametrize("code", NO_FLOCK.values(), ids=NO_FLOCK)
def test_two_resumes_without_flock(tmp_path, monkeypatch, code):
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    without_flock(monkeypatch, code)
    folder = run(tmp_path, steps=2, stop_at=1)
    with owned(folder), pytest.raises(UserError, match="being written by another process"):
        run(tmp_path, steps=2, resume=True)
    run(tmp_path, steps=2, resume=True)


def test_messages():
    full, other = (
        cannot_write(Path("x"), OSError(code, os.strerror(code)))
        for code in (errno.ENOSPC, errno.EROFS)
    )
    assert isinstance(full, DiskFull) and "no space left to write x: make room" in str(full)
    assert not isinstance(other, DiskFull) and "Read-only file system" in str(other)
