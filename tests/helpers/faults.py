"""Faults at the n-th call that changes the file system: an error, or the end of the process; and a disk that becomes full."""

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
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            Fault(patch, folder, n, lambda: os._exit(9))
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
