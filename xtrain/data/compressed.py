"""Files as they are read: plain, or .gz and .zst, unpacked on the way in bounded memory.

    with open_file(path) as file: ...       the bytes that were packed
    suffix(path)                            of the packed file: .jsonl for a.jsonl.gz

A few small blocks of a packed file are in memory: even a file made to grow a thousandfold needs no
more than some megabytes at a time.
"""

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..errors import UserError

# bytes of a packed file that are unpacked at once: .zst grows by at most 32768, .gz by 1032
BLOCK = 1 << 9
BUFFER = 1 << 18  # bytes unpacked


class BadFile(UserError):
    """What is wrong with one file of a text: the others can be used without it."""


class NotText(BadFile):
    """The content of a file is not UTF-8 text."""


def is_packed(path: Path) -> bool:
    return path.suffix in (".gz", ".zst")


def suffix(path: Path) -> str:
    """Return the suffix of a name, without that of a packed file."""
    if is_packed(path):
        return Path(path.stem).suffix
    return path.suffix


def open_file(path: Path) -> BinaryIO:
    """Open a file to read. A packed file cannot seek.

    Raises OSError; UserError if a package is missing; BadFile, also on reading, if the file is
    damaged.
    """
    if not is_packed(path):
        return open(path, "rb")
    if path.suffix == ".gz":
        make, errors = _gzip()
    else:
        make, errors = _zstd(path)
    return cast(BinaryIO, io.BufferedReader(_Unpacked(path, make, errors), BUFFER))


def _gzip() -> tuple[Callable[[], Any], type[Exception]]:
    return lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), zlib.error


def _zstd(path: Path) -> tuple[Callable[[], Any], type[Exception]]:
    """Return what makes a decompressor of one frame, and the error that it raises."""
    try:
        from compression import zstd  # Python 3.14

        return zstd.ZstdDecompressor, zstd.ZstdError
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"{path} is a .zst file, which needs zstandard before Python 3.14: pip install "
            "zstandard"
        ) from None
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError


class _Unpacked(io.RawIOBase):
    """The content of a packed file: of all its members (.gz) or frames (.zst), one after
    another."""

    def __init__(self, path: Path, make: Callable[[], Any], errors: type[Exception]):
        self.path = path
        self.make = make
        self.errors = errors
        self.file = open(path, "rb")  # noqa: SIM115
        self.member: Any = None  # the decompressor of the one that is being read
        self.unread = memoryview(b"")  # unpacked

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self.file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer. Raises OSError and BadFile."""
        while not self.unread and (block := self.file.read(BLOCK)):
            self.unread = memoryview(self._unpack(block))
        if not self.unread and self.member is not None:
            raise BadFile(f"{self.path} is cut off: its end is missing, copy or pack it again")
        n = min(len(buffer), len(self.unread))
        buffer[:n], self.unread = self.unread[:n], self.unread[n:]
        return n

    def _unpack(self, block: bytes) -> bytes:
        pieces = []
        try:
            while block:
                if self.member is None:
                    block = block.lstrip(b"\0")  # a .gz may be padded with zeros
                    if not block:
                        break
                    self.member = self.make()
                pieces.append(self.member.decompress(block))
                block = b""
                if self.member.eof:
                    block = self.member.unused_data
                if self.member.eof:
                    self.member = None
        except self.errors as error:
            what = "it cannot be unpacked"
            if str(error):
                what = str(error).splitlines()[0]
            raise BadFile(
                f"{self.path} is damaged or no {self.path.suffix} file ({what}): copy or pack it "
                "again"
            ) from None
        return b"".join(pieces)
