"""A kernel that may begin before the one before it has ended: what its threads may do until they have waited.

On a GPU such a kernel is launched with overlap (kernels/_overlap.py) and calls wait_for_previous. Before that it may read what
the kernel before does not write, and it may write nothing: the kernel before may still read it. Here one launch follows the
other all the same, so a mistake would go unseen; EarlyThread looks for it. Waiting turns an EarlyThread into a Thread.
"""

from . import errors
from .thread import Thread


class EarlyThread(Thread):
    __slots__ = ()

    def _read(self, a, key, index, site):
        if a.memory.kind == "global":
            at = a.memory.base + key * a.memory.granule
            for name, base, granule, keys in self.block.launch.before:
                if (at - base) // granule in keys:
                    why = f"which {name} writes, the kernel before"
                    raise errors.early(self, "reads", why, site, index)
        Thread._read(self, a, key, index, site)

    def _write(self, a, key, index, site):
        if a.memory.kind == "global":
            why = "which the kernel before may still need"
            raise errors.early(self, "writes", why, site, index)
        Thread._write(self, a, key, index, site)

    def _change(self, a, key, index, site):
        if a.memory.kind == "global":
            why = "which the kernel before may still need"
            raise errors.early(self, "changes", why, site, index)
        Thread._change(self, a, key, index, site)


def wait(thread, site):
    """What the simulator runs for wait_for_previous."""
    if type(thread) is EarlyThread:
        thread.__class__ = Thread
    thread.block.waited = True
