"""What the simulator reports, and how it says where."""

import linecache
import os
from typing import NamedTuple


class Site(NamedTuple):
    """A place in a kernel's source: one array access, one barrier, one call."""

    file: str
    line: int
    function: str
    what: str  # the array's name, or the function called

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


class KernelError(Exception):
    """A kernel did what a GPU forbids or leaves undefined. The message names kernel, threads, file and line.

    sites: the places, as Site tuples, in the order in which the message names them.
    """

    def __init__(self, message: str, sites: tuple = ()):
        self.sites = tuple(sites)
        width = max((len(str(site)) for site in self.sites), default=0)
        for site in dict.fromkeys((site.file, site.line, str(site)) for site in self.sites):
            text = linecache.getline(site[0], site[1]).strip()
            message += f"\n    {site[2]:<{width}}    {text}" if text else ""
        super().__init__(message)


class RaceError(KernelError):
    """Two threads touch one element, at least one writes, and nothing orders them."""


class UninitializedError(KernelError):
    """A read of shared or local memory that was never written."""


class OutOfBoundsError(KernelError):
    """An index below zero or past the end of its axis."""


class DeadlockError(KernelError):
    """A barrier or a warp function that some threads of the block do not reach."""


class CollectiveError(KernelError):
    """A warp function called with a mask, a lane or a type that it cannot have."""


def ranges(numbers) -> str:
    """[0, 1, 2, 5] -> "0-2, 5" """
    runs = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)
