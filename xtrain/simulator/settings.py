"""What `simulate` was given, for each thread of the host."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """The keywords of `run` for every launch; see `simulate`."""

    allow: tuple[str, ...] = ()
    enable: tuple[str, ...] = ()
    raised: tuple[str, ...] = ()
    processes: int = 1
    schedules: int = 1
    seed: int | None = None
    tracks_unwritten: bool = False  # report unwritten elements of cuda.device_array

    def keywords(self) -> dict[str, Any]:
        """As `run` takes them."""
        given = dict(vars(self))
        del given["tracks_unwritten"]
        return given


_active: list[tuple[int, Settings]] = []  # (thread of the host, what it was given)


def current() -> Settings:
    """Return the settings of this thread of the host; without its own, those of the main thread."""
    active = [*_active]
    for wanted in (threading.get_ident(), threading.main_thread().ident):
        for thread, settings in reversed(active):
            if thread == wanted:
                return settings
    return Settings()


@contextlib.contextmanager
def using(settings: Settings) -> Iterator[None]:
    """Inside, these are the settings of this thread."""
    entry = threading.get_ident(), settings
    _active.append(entry)
    try:
        yield
    finally:
        _active.remove(entry)
