"""Global memory that nothing has written yet: a bit per byte of each array made by `empty` or named
in `mark_unwritten`.

The bits outlive a launch. A kernel's writes clear them, and so does an assignment `a[...] = x` to a
SimArray on the host; other writes on the host need `mark_written`.
"""

import weakref

import numpy as np

# id of an array that owns memory -> (weak reference to it, bool per byte: unwritten)
_marked: dict = {}


def extent(a):
    """Return the addresses of the first byte of an array and of the byte after its last."""
    low = high = a.__array_interface__["data"][0]
    if a.size == 0:
        return low, low
    for n, stride in zip(a.shape, a.strides):
        low = low + min(0, (n - 1) * stride)
        high = high + max(0, (n - 1) * stride)
    return low, high + a.itemsize


def _owner(a):
    while isinstance(a.base, np.ndarray):
        a = a.base
    return a


def _address(a) -> int:
    return a.__array_interface__["data"][0]


def mark_unwritten(a):
    """Declare the memory of a contiguous array unwritten, and return the array: a kernel that uses
    an element before one has been written is reported as `unwritten_global`.
    """
    owner = _owner(a)
    entry = _marked.get(id(owner))
    if entry is None or entry[0]() is not owner:
        key = id(owner)
        reference = weakref.ref(owner, lambda _: _marked.pop(key, None))
        entry = _marked[key] = reference, np.zeros(owner.nbytes, bool)
    entry[1][_span(a, owner)] = True
    return a


def mark_written(a):
    """Declare an array, or a view, written."""
    if _marked:
        owner = _owner(a)
        entry = _marked.get(id(owner))
        if entry is not None and entry[0]() is owner:
            entry[1][_span(a, owner)] = False


def _span(a, owner):
    """Return the bytes from the first to the last byte of a, in the memory of its owner."""
    low, high = extent(a)
    return slice(low - _address(owner), high - _address(owner))


class Unwritten:
    """The unwritten keys of one Memory."""

    def __init__(self, owner, bits, base, granule):
        self.owner, self.bits = owner, bits
        self.shift = base - _address(owner)
        self.granule = granule

    def __contains__(self, key):
        at = self.shift + key * self.granule
        return bool(0 <= at < len(self.bits) and self.bits[at])

    def remove(self, keys):
        """These keys have been written."""
        if keys:
            at = self.shift + np.fromiter(keys, np.int64, len(keys)) * self.granule
            for byte in range(self.granule):
                self.bits[at + byte] = False


def of(a, base, granule):
    """Return the Unwritten of an array's memory; None if nothing in it is unwritten."""
    if not _marked:
        return None
    owner = _owner(a)
    entry = _marked.get(id(owner))
    if entry is None or entry[0]() is not owner or not entry[1].any():
        return None
    return Unwritten(owner, entry[1], base, granule)
