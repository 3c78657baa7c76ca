"""Programmatic dependent launch: what the threads of a kernel may access before they have waited
for the previous kernel.

On a GPU such a kernel is launched with overlap (kernels/runtime/overlap.py) and calls
wait_for_previous. Before that call it may read what the previous kernel does not write, and write
what is not an argument of the previous kernel. The simulator runs the launches one after the other,
so a mistake would not change the result: EarlyThread checks each access instead. wait_for_previous
turns an EarlyThread into a Thread.

If the previous kernel called let_next_start after its own wait, all kernels before it have ended.
If it called let_next_start earlier, they may still run, and the accesses are checked against them
too (Launch.previous_writes).
"""

from . import errors
from .thread import Thread

NEEDED = "which the previous kernel may still need"


class EarlyThread(Thread):
    """A thread that has not called wait_for_previous yet."""

    __slots__ = ()
    after_wait: type[Thread] = Thread

    def _read(self, a, key, index, site):
        if a.memory.kind == "global":
            at = a.memory.base + key * a.memory.granule
            for name, base, granule, keys in self.block.launch.previous_writes:
                if (at - base) // granule in keys:
                    why = f"which {name} writes, the previous kernel"
                    raise errors.early(self, "reads", why, errors.element(site, index), site)
        return Thread._read(self, a, key, index, site)

    def _write(self, a, key, index, site, *value):
        self._must_be_free(a, key, "writes", index, site)
        Thread._write(self, a, key, index, site, *value)

    def _change(self, a, key, index, site, keys, **how):
        self._must_be_free(a, key, "changes", index, site)
        Thread._change(self, a, key, index, site, keys, **how)

    def _must_be_free(self, a, key, does, index, site):
        if a.memory.kind == "global":
            at = a.memory.base + key * a.memory.granule
            if _overlaps(self.block.launch.previous_extents, at, at + a.memory.granule):
                raise errors.early(self, does, NEEDED, errors.element(site, index), site)

    def wait_for_previous(self):
        self.__class__ = self.after_wait
        self.block.waited = True

    def let_next_start(self):
        self.block.launch.let_next_early = True

    def note_copy(self, site, low, high, writes):
        launch = self.block.launch
        if writes and _overlaps(launch.previous_extents, low, high):
            raise errors.early(self, "writes", NEEDED, "a tensor", site)
        written = [extent for extent, wrote in launch.previous_copies.items() if wrote]
        for _, base, granule, keys in launch.previous_writes:
            written += [(base + k * granule, base + (k + 1) * granule) for k in keys]
        if not writes and _overlaps(written, low, high):
            why = "which the previous kernel writes"
            raise errors.early(self, "reads", why, "a tensor", site)
        Thread.note_copy(self, site, low, high, writes)


def _overlaps(ranges, low, high):
    return any(low < end and first < high for first, end in ranges)
