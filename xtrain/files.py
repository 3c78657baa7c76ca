"""Files that survive a kill, a full disk and a power cut.

A file is either complete or absent, and it is on the disk before anything depends on it.
"""

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import UserError

# where folders cannot be locked: a work folder unchanged for this long counts as left by a dead
# process
STRAY_SECONDS = 3600
FULL = {errno.ENOSPC, errno.EDQUOT}  # a full disk: freeing space fixes it, so a run continues
LOCK_FILE = ".lock"  # in a folder that cannot be locked: the machine whose process uses it
# in the work folder of `replacing`
NEW = "new"
OLD = "old"


class DiskFull(UserError):
    """The disk is full."""


def cannot_write(path: Path, error: OSError, instead: str = "choose another --out") -> UserError:
    """Return the UserError for an OSError while writing path; DiskFull if the disk is full.

    instead: what the user can do, other than to free space.
    """
    if error.errno in FULL:
        return DiskFull(f"no space left to write {path}: make room or {instead}")
    return UserError(f"{path} cannot be written ({error.strerror or error}): {instead}")


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk. Raises OSError."""
    if os.name == "nt" and path.is_dir():  # Windows cannot sync a folder
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Call sync() on every file in a folder, then the folder. Raises OSError."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees the old content or the new one. Raises OSError."""
    with replaced(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield the name of a temporary file to write, which replaces `path` atomically at the end, if
    nothing was raised."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """Return BLAKE2b of a file's content, 128 bits, hexadecimal. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


# ----------------------------------------------------------------------------- locks
class Busy(Exception):
    """Another process holds the lock. The message, if any, says what to do."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a folder against other processes. -> is it locked? Raises Busy if another process holds
    the lock.

    The lock (flock) is on the folder itself and leaves no file; the kernel releases it when the
    process ends. Where flock is not supported (Windows, some network disks) the folder is not
    locked.
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    is_locked = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy from None
        except OSError:
            is_locked = False
        yield is_locked
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Lock as `locked` does, also where flock is not supported. Raises Busy, or OSError if the lock
    cannot be written.

    There, a socket excludes the other processes of this machine; the kernel releases it when the
    process ends. LOCK_FILE excludes other machines. A killed process leaves it behind: only its own
    machine knows that the process has ended, so on another one the user has to delete the file.
    """
    with contextlib.ExitStack() as stack:
        # a process on another machine, where flock is not supported, may have written LOCK_FILE
        if not stack.enter_context(locked(folder)) or (folder / LOCK_FILE).exists():
            machine = stack.enter_context(_machine_lock(folder))
            _write_lock_file(folder / LOCK_FILE, machine)
            stack.callback((folder / LOCK_FILE).unlink, missing_ok=True)
        yield


@contextlib.contextmanager
def _machine_lock(folder: Path) -> Iterator[str]:
    """Lock a folder against other processes of this machine. -> the machine that the lock is valid
    for. Raises Busy.

    The lock is a name in Linux's abstract socket namespace. Elsewhere nothing is locked: the result
    differs at every call.
    """
    host = platform.node()
    if sys.platform != "linux":
        yield f"{host} {os.getpid()} {time.time_ns()}"
        return
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    about = folder.stat()
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0xtrain {about.st_dev} {about.st_ino}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Busy from None
            raise
        # socket names belong to a network namespace, for example to a container
        yield f"{host} {boot} {os.stat('/proc/self/ns/net').st_ino}"


def _write_lock_file(path: Path, machine: str) -> None:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(machine)
    except FileExistsError:
        owner = path.read_text("utf-8", "replace")
        if owner != machine:  # else its process has ended: this one holds the machine's lock
            host = "an unknown machine"
            if owner.split():
                host = owner.split()[0]
            raise Busy(
                f"if the process on {host} that wrote {path} has ended, delete that file"
            ) from None


# ----------------------------------------------------------------------------- work folders
def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def work_folder(
    parent: Path, prefix: str = ".tmp-", discard: Callable[[Path], Any] = _remove
) -> Iterator[Path]:
    """Yield a new folder in `parent`, removed at the end unless the caller has renamed it.

    Work folders of killed processes, with the same prefix, are removed first.  discard(folder):
    removes one.
    """
    for stray in _work_folders(parent, prefix):
        _remove_if_dead(stray, discard)
    with contextlib.ExitStack() as stack:
        folder = None
        while folder is None:
            folder = _own_folder(parent, prefix, stack)
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):
                discard(folder)


def _work_folders(parent: Path, prefix: str) -> list[Path]:
    return [parent / name for name in os.listdir(parent) if name.startswith(prefix)]


def _own_folder(parent: Path, prefix: str, stack: contextlib.ExitStack) -> Path | None:
    """Make and lock a folder; the stack releases the lock. None if another process has removed
    it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with contextlib.suppress(Busy, FileNotFoundError):
        stack.enter_context(locked(folder))
        if folder.exists():
            return folder
    return None  # another process removed it before it was locked, as left by a dead process


def _remove_if_dead(stray: Path, discard: Callable[[Path], Any]) -> None:
    # OSError: another process has just removed it
    with contextlib.suppress(Busy, OSError), locked(stray) as is_locked:
        if is_locked or time.time() - stray.stat().st_mtime > STRAY_SECONDS:
            discard(stray)


# ----------------------------------------------------------------------------- replacing a folder
@contextlib.contextmanager
def replacing(folder: Path, is_stale: Callable[[str], Any]) -> Iterator[Path]:
    """Yield an empty folder, whose files replace those of `folder` at the end, all at once.

    Files of other names stay (as hard links where possible), unless is_stale(name). After an error
    or a kill, `folder` is as before; the next call removes what a kill has left next to it. At the
    end the files are on the disk. folder: without symbolic links. Raises UserError if writing
    fails.
    """
    if not folder.name:
        raise UserError(f"{folder} is the root of the disk: give a folder to write to")
    try:
        _check_replaceable(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        discard = functools.partial(_discard_export, folder=folder)
        with work_folder(folder.parent, _export_prefix(folder), discard) as work:
            new, old = work / NEW, work / OLD
            new.mkdir()
            yield new
            sync_folder(new)
            own = set(os.listdir(new))
            stays = lambda name: name not in own and not is_stale(name)
            if folder.exists():
                _link_others(folder, new, stays)
            publish(new, folder, old)
            for before in filter(Path.is_dir, (new, old)):
                for late in filter(stays, os.listdir(before)):  # written since _link_others
                    if not os.path.lexists(folder / late):
                        (before / late).rename(folder / late)
    except OSError as error:
        reason = error.strerror or error
        if isinstance(error, shutil.Error):  # of copytree: [(source, target, reason), ...]
            reason = f"{error.args[0][0][0]}: {error.args[0][0][2]}"
        raise UserError(f"{folder} cannot be written: {reason}") from None


def _check_replaceable(folder: Path) -> None:
    """Raises UserError if another folder cannot take the place of this one."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder to write to")
    # the shell that started this process would be left in a folder that is gone
    is_here = Path(os.path.realpath(".")).is_relative_to(folder)
    if is_here or os.path.ismount(folder):
        what = "is a mounted disk"
        if is_here:
            what = "is the current folder or contains it"
        raise UserError(
            f"{folder} {what}, so another cannot take its place: give a folder inside, such as "
            f"{folder / 'model'}"
        )
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _link_others(folder: Path, new: Path, stays: Callable[[str], bool]) -> None:
    """Link, or copy, the entries of `folder` that stay into `new`. Raises OSError."""

    def replaced(at: str, names: list[str]) -> set[str]:
        if Path(at) != folder:
            return set()
        return {name for name in names if not stays(name)}

    shutil.copytree(
        folder, new, symlinks=True, ignore=replaced, copy_function=_link, dirs_exist_ok=True
    )
    os.utime(new)  # copytree copies the times, too
    for path, _, _ in os.walk(new):
        sync(Path(path))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the disk has no links, or the file belongs to another user
        shutil.copy2(source, target)
        sync(Path(target))


def publish(new: Path, folder: Path, aside: Path) -> None:
    """Rename `new` to `folder`, and sync that. What `folder` was is then at `new` or `aside`.
    Raises OSError.

    Where the system cannot exchange two names (NFS, macOS, Windows), a kill between two renames
    leaves it at `aside`.
    """
    if not os.path.lexists(folder):
        new.rename(folder)
    elif not _exchange(new, folder):
        folder.rename(aside)
        try:
            new.rename(folder)
        except BaseException:
            aside.rename(folder)
            raise
    sync(folder.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names, atomically. -> False if the system cannot; nothing has changed then.
    Raises OSError."""
    if sys.platform != "linux":
        return False
    # AT_FDCWD, RENAME_EXCHANGE
    here = -100
    exchange = 2
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # an older C library
        return False
    if renameat2(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0:
        return True
    code = ctypes.get_errno()
    # EPERM: a sandbox that does not know the call
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code))


def _export_prefix(folder: Path) -> str:
    return f".{folder.name}.xtrain-"


def _discard_export(work: Path, folder: Path) -> None:
    """Remove the work folder of `replacing`, not before `folder` is restored."""
    _restore(work, folder)
    _remove(work)


def _restore(work: Path, folder: Path) -> None:
    # NEW and OLD exist only between the two renames of publish
    if (work / NEW).exists() and (work / OLD).exists() and not os.path.lexists(folder):
        (work / OLD).rename(folder)


def restore(folder: Path) -> None:
    """Bring a folder back that is missing because `replacing` was killed between two renames.

    If that process is alive, wait for its second rename, at most a second.
    """
    try:
        folder = folder.resolve()
    except UnicodeEncodeError:  # no file can have this name
        return
    deadline = time.monotonic() + 1
    alive = True
    with contextlib.suppress(OSError):  # the caller finds out that the folder is missing
        while alive and not folder.exists() and time.monotonic() < deadline:
            alive = False
            for work in _work_folders(folder.parent, _export_prefix(folder)):
                try:
                    with locked(work):
                        _restore(work, folder)
                except Busy:
                    alive = (work / OLD).exists()
            time.sleep(0.01 if alive else 0)


# ----------------------------------------------------------------------------- log files
class Journal:
    """An append-only file. Text that does not fit on a full disk is kept and written with the
    next."""

    def __init__(self, path: Path):
        self.path = path
        self.pending = b""
        # bytes written to the file
        self.size = 0
        if path.exists():
            self.size = path.stat().st_size

    def write(self, text: str) -> bool:
        """Append text. -> is all of it in the file? Raises UserError for any error but a full
        disk."""
        self.pending += text.encode()
        return self.flush()

    def flush(self) -> bool:
        """Write the pending text. -> is all of it in the file? Raises UserError as write() does."""
        if not self.pending:
            return True
        try:
            self._append()
        except OSError as error:
            if error.errno not in FULL:
                raise cannot_write(self.path, error) from error
            return False
        self.size = self.size + len(self.pending)
        self.pending = b""
        return True

    def _append(self) -> None:
        with open(self.path, "ab", buffering=0) as file:
            # another program may have truncated or extended it
            self.size = os.fstat(file.fileno()).st_size
            unwritten = memoryview(self.pending)
            try:
                while unwritten:
                    unwritten = unwritten[file.write(unwritten) :]
            except OSError:
                file.truncate(self.size)  # half a line must not look like a complete one
                raise
