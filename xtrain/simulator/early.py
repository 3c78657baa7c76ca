"""A kernel that may begin before the one before it has ended: what its threads may do until they have waited.

On a GPU such a kernel is launched with overlap (kernels/_overlap.py) and calls wait_for_previous. Before that it may read what
the kernel before does not write, and write what the kernel before was not given. Here one launch follows the other all the same,
so a mistake would go unseen; EarlyThread looks for it. Waiting turns an EarlyThread into a Thread.

What came before the kernel before is done if that one let the next start when it had waited itself. If it did so earlier, the
next one must mind what the kernel before had to, too (Launch.last).
"""

from . import errors
from .thread import Thread

NEEDED = "which the kernel before may still need"


class EarlyThread(Thread):
    __slots__ = ()

    def _read(self, a, key, index, site):
        if a.memory.kind == "global":
            at = a.memory.base + key * a.memory.granule
            for name, base, granule, keys in self.block.launch.before:
                if (at - base) // granule in keys:
                    why = f"which {name} writes, the kernel before"
                    raise errors.early(self, "reads", why, errors.element(site, index), site)
        Thread._read(self, a, key, index, site)

    def _write(self, a, key, index, site):
        self._must_be_free(a, key, "writes", index, site)
        Thread._write(self, a, key, index, site)

    def _change(self, a, key, index, site):
        self._must_be_free(a, key, "changes", index, site)
        Thread._change(self, a, key, index, site)

    def _must_be_free(self, a, key, does, index, site):
        if a.memory.kind == "global":
            at = a.memory.base + key * a.memory.granule
            if _meets(self.block.launch.needed, at, at + a.memory.granule):
                raise errors.early(self, does, NEEDED, errors.element(site, index), site)


def _meets(ranges, low, high):
    return any(low < end and first < high for first, end in ranges)


def note_copy(thread, site, low, high, writes):
    """A copy (kernels/_hopper.py) reads or writes a tensor that lies in the bytes from low to high."""
    launch = thread.block.launch
    if type(thread) is EarlyThread:
        if writes and _meets(launch.needed, low, high):
            raise errors.early(thread, "writes", NEEDED, "a tensor", site)
        written = [each for each, wrote in launch.copies_before.items() if wrote]
        for _, base, granule, keys in launch.before:
            written += [(base + k * granule, base + (k + 1) * granule) for k in keys]
        if not writes and _meets(written, low, high):
            why = "which the kernel before writes"
            raise errors.early(thread, "reads", why, "a tensor", site)
    launch.copies[low, high] = writes or launch.copies.get((low, high), False)


def wait(thread, site):
    """What the simulator runs for wait_for_previous."""
    if type(thread) is EarlyThread:
        thread.__class__ = Thread
    thread.block.waited = True


def let_next(thread, site):
    """What it runs for let_next_start."""
    if type(thread) is EarlyThread:
        thread.block.launch.hasty = True
