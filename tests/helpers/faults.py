"""Faults at the n-th call that changes the file system: an error, or the end of the process; disks that fail or are full."""

import builtins
import errno
import io
import os
import threading
from pathlib import Path

from xtrain import files
from xtrain.formats import huggingface
from xtrain.training import checkpoint

CALLS = ((os, "mkdir"), (os, "rename"), (os, "replace"), (os, "link"), (os, "unlink"), (os, "rmdir"),
         (os, "fsync"), (os, "open"), (io, "open"), (builtins, "open"), (files, "_exchange"))  # fmt: skip
KILL = -1


class Fault:
    """fault() is called instead of the n-th call below `folder`. count: calls so far.

    thread: only calls of another thread than the main one count.
    """

    def __init__(self, patch, folder: Path, n: int, fault, thread=False):
        self.folder, self.n, self.fault, self.thread, self.count = str(folder), n, fault, thread, 0
        for owner, name in CALLS:
            patch.setattr(owner, name, self._wrapped(getattr(owner, name), name))

    def _wrapped(self, call, name):
        def wrapper(*args, **more):
            if self._concerns(name, args, more):
                self.count += 1
                if self.count == self.n:
                    self.fault()
            return call(*args, **more)

        return wrapper

    def _concerns(self, name, args, more):
        if self.thread and threading.current_thread() is threading.main_thread():
            return False
        where = args[0] if args else None
        if name == "fsync":
            where = os.readlink(f"/proc/self/fd/{where}")
        # shutil.rmtree gives names inside the descriptor of a folder
        return more.get("dir_fd") is not None or str(where).startswith(self.folder)


def error(code):
    """A fault: the call raises this error."""

    def fault(*_):
        raise OSError(code, os.strerror(code))

    return fault


def killed_at(folder: Path, n: int, work, patch) -> bool:
    """Do work() in a process that ends, as if killed, before its n-th call. -> was there an n-th call?"""
    return killed(lambda: Fault(patch, folder, n, lambda: os._exit(9)), work)


def killed(prepare, work) -> bool:
    """Do prepare() and work() in another process. -> has it ended with os._exit(9)?"""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            prepare()
            work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9), code
    return code == 9


class SmallDisk:
    """A disk with `room` bytes for the checkpoints of a run. marks: bytes in use after every write."""

    def __init__(self, patch, run, room):
        self.folder, self.room, self.marks = run / "checkpoints", room, []
        for owner, name in ((Path, "write_bytes"), (Path, "write_text"), (checkpoint, "write_safetensors"),
                            (huggingface, "write_safetensors")):  # fmt: skip
            patch.setattr(owner, name, self.limited(getattr(owner, name)))

    def used(self):
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def limited(self, write):
        def wrapper(path, *args, **more):
            write(path, *args, **more)
            if self.folder in path.parents:
                self.marks.append(used := self.used())
                if used > self.room:
                    os.truncate(path, max(0, path.stat().st_size - (used - self.room)))
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return wrapper


class FailingDisk:
    """The n-th access below `folder` fails with an error, and with `stays` all later ones. count: accesses so far.

    code: of the error; KILL: the process ends instead, as if killed.
    access: "write" (changes of names, syncs, opens for writing, and every write, of which half the bytes arrive) or "read"
    (opens for reading, reads, lists of folders).
    """

    WRITES = ("mkdir", "rename", "replace", "link", "fsync")
    READS = ("scandir", "listdir")

    def __init__(self, patch, folder: Path, n: int, code: int, access="write", stays=False):
        self.folder, self.n, self.code, self.access, self.stays = (
            str(folder),
            n,
            code,
            access,
            stays,
        )
        self.count = 0
        for name in self.WRITES if access == "write" else self.READS:
            patch.setattr(os, name, self._wrapped(getattr(os, name), name))
        self.os_open, self.open = os.open, io.open
        patch.setattr(os, "open", self._os_open)
        patch.setattr(io, "open", self._open)
        patch.setattr(builtins, "open", self._open)

    def note(self, access):
        if access == self.access:
            self.count += 1
            if self.count == self.n or (self.stays and self.count > self.n):
                if self.code == KILL:
                    os._exit(9)
                raise OSError(self.code, os.strerror(self.code))

    def _is_here(self, path):
        return not isinstance(path, int) and os.fspath(path).startswith(self.folder)

    def _wrapped(self, call, name):
        def wrapper(*args, **more):
            path = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else [*args, "."][0]
            if self._is_here(path):
                self.note(self.access)
            return call(*args, **more)

        return wrapper

    def _os_open(self, path, flags, *args, **more):
        if self._is_here(path):
            self.note("write" if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else "read")
        return self.os_open(path, flags, *args, **more)

    def _open(self, path, mode="r", buffering=-1, *args, **more):
        if not self._is_here(path):
            return self.open(path, mode, buffering, *args, **more)
        writes = not {*"wax+"}.isdisjoint(mode)
        self.note("write" if writes else "read")
        file = _FailingFile(path, mode.replace("b", "").replace("t", ""))
        file.disk = self
        if buffering == 0:
            return file
        kind = io.BufferedRandom if "+" in mode else io.BufferedWriter if writes else io.BufferedReader  # fmt: skip
        return kind(file) if "b" in mode else io.TextIOWrapper(kind(file), *args, **more)


class _FailingFile(io.FileIO):
    def write(self, data):
        try:
            self.disk.note("write")
        except OSError:
            super().write(memoryview(data)[: len(data) // 2])
            raise
        return super().write(data)

    def readinto(self, buffer):
        self.disk.note("read")
        return super().readinto(buffer)

    def readall(self):
        self.disk.note("read")
        return super().readall()
