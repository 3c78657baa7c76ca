"""Which keys a causal query sees: all of its past, the last `window` of them, or those of its own
document.

    query t sees the keys first(t) .. t + past                           past = S - T
    key s is seen by the queries s - past .. last(s)

first and last never decrease. So the first query of a tile has the earliest key, the last key of a
tile the latest query: a block of threads needs one bound for its range of tiles, and one more
comparison per score in the tiles that a bound cuts.

    KIND             first(t)                       last(s)
    0                0                              T - 1
    window W > 0     max(t + past - W + 1, 0)       min(s - past + W - 1, T - 1)
                     a sliding window (Beltagy et al. 2020)
    BY_ARRAY         first_BT[b, t]                 last_BS[b, s]
                     several documents in a row; T = S

KIND is a constant of a kernel's code: without bounds, kernels are compiled as if this file did not
exist.
"""

import functools
from dataclasses import dataclass

import numpy as np

from ...device import Array
from ..primitives.ptx import device, kernel
from ..runtime.compiler import cuda, int32, int64
from ..runtime.launch import check, check_array, empty, launch, on_host

BY_ARRAY = -1
BLOCK = 256  # threads


@dataclass(frozen=True)
class KeyBounds:
    """What a launcher of attention needs to know. At most one of the two kinds is given;
    document_bounds has both in its arrays.

    window: keys that a query sees, itself among them.
    first_BT, last_BS: int32; see document_bounds.
    """

    window: int = 0
    first_BT: Array | None = None
    last_BS: Array | None = None

    @property
    def kind(self) -> int:
        """The constant KIND of the kernels"""
        return self.window if self.first_BT is None else BY_ARRAY

    def first(self, like: Array) -> Array:
        """first_BT, flat; `like` for a kernel that does not read it"""
        return like if self.first_BT is None else self.first_BT.reshape(-1)

    def last(self, like: Array) -> Array:
        """last_BS, flat; `like` for a kernel that does not read it"""
        return like if self.last_BS is None else self.last_BS.reshape(-1)

    def first_key(self, b: int, T: int, S: int) -> np.ndarray:
        """On the CPU -> first(t) of sequence b, (T,)"""
        if self.first_BT is not None:
            return self.first_BT[b]
        return np.maximum(np.arange(T) + S - T - self.window + 1, 0) if self.window else np.zeros(T)

    def hidden(self, T: int, S: int) -> np.ndarray:
        """On the CPU -> (B, T, S) bool: the keys before first(t); B is 1 if all sequences have the
        same"""
        first_BT = self.first_key(0, T, S)[None] if self.first_BT is None else self.first_BT
        return np.arange(S) < first_BT[..., None]


UNBOUNDED = KeyBounds()


def check_bounds(op: str, bounds: KeyBounds, B: int, T: int, S: int, causal: bool) -> None:
    """Raise ValueError or TypeError if the bounds do not fit (B, T) queries and S keys."""
    if bounds is UNBOUNDED:
        return
    check(causal, f"{op}: bounds need a causal mask")
    check(bounds.window >= 0, f"{op}: a window of {bounds.window} keys, at least 1 is needed")
    if bounds.first_BT is not None:
        check(T == S, f"{op}: documents need as many keys as queries, got {S} and {T}")
        for name, x in (("first", bounds.first_BT), ("last", bounds.last_BS)):
            check_array(op, name, x, (B, T), ("int32",))


# ----------------------------------------------------------------------------- device functions
@functools.cache
def make_first_key(KIND: int):
    """Return first_key(first, i, t, past): the first key that query t sees. i: index in `first` of
    the sequence's query 0"""

    @device
    def nothing(first, i, t, past):
        return int32(0)

    @device
    def by_window(first, i, t, past):
        return int32(max(t + past - int32(KIND - 1), 0))

    @device
    def by_array(first, i, t, past):
        return int32(first[i + t])

    if KIND == 0:
        return nothing
    return by_array if KIND == BY_ARRAY else by_window


@functools.cache
def make_last_query(KIND: int):
    """Return last_query(last, i, s, T, past): the last query that sees key s; T - 1 if all from s -
    past on do"""

    @device
    def nothing(last, i, s, T, past):
        return int32(T - 1)

    @device
    def by_window(last, i, s, T, past):
        return int32(min(s - past + int32(KIND - 1), T - 1))

    @device
    def by_array(last, i, s, T, past):
        return int32(last[i + s])

    if KIND == 0:
        return nothing
    return by_array if KIND == BY_ARRAY else by_window


# ----------------------------------------------------------------------------- bounds of documents
def document_bounds_ref(starts_BT, window=0):
    """document_bounds in NumPy -> first (B, T), last (B, T), positions (B, T), int32"""
    T = starts_BT.shape[1]
    t = np.arange(T)
    first_BT = np.maximum(starts_BT, t - window + 1) if window else starts_BT
    last_BT = [np.searchsorted(row, t, side="right") - 1 for row in first_BT]
    positions_BT = t - starts_BT
    bounds = (first_BT, last_BT, positions_BT)
    return tuple(np.asarray(x, np.int32).reshape(starts_BT.shape) for x in bounds)


@kernel(BLOCK)
def document_bounds_kernel(first_N, last_N, positions_N, starts_N, T, window):
    """Grid ceil(N / BLOCK), N = B T. One thread per token; `last` by binary search: the last t with
    first(t) <= s."""
    n = int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x
    if n >= first_N.size:
        return
    s = int32(n % T)
    row = n - s
    mine = int32(starts_N[n])
    recent = int32(s - window + 1)
    first_N[n] = recent if window > 0 and recent > mine else mine
    positions_N[n] = int32(s - mine)
    # first(low) <= s < first(high), if there were one
    low = s
    high = int32(T)
    while high - low > 1:
        middle = int32((low + high) >> 1)
        start = int32(starts_N[row + middle])
        late = int32(middle - window + 1)
        if window > 0 and late > start:
            start = late
        if start <= s:
            low = middle
        else:
            high = middle
    last_N[n] = low


def document_bounds(starts_BT: Array, window: int = 0) -> tuple[KeyBounds, Array]:
    """Of rows that hold several documents -> the bounds of attention, and each token's position in
    its document (B T,) int32.

    starts (B, T) int32: where in the row the document of each token begins; it never decreases, and
    starts[b, t] <= t.
    window: of a sliding window, 0 for none. The values are not checked on a GPU.
    """
    op = "document_bounds"
    check_array(op, "starts", starts_BT, (None, None), ("int32",))
    check(window >= 0, f"{op}: a window of {window} keys")
    B, T = starts_BT.shape
    if on_host(starts_BT):
        t = np.arange(T)
        fits = (starts_BT >= 0).all() and (starts_BT <= t).all()
        ordered = (np.diff(starts_BT, axis=1) >= 0).all()
        check(
            bool(fits and ordered), f"{op}: starts must not decrease, and lie in 0 .. t for token t"
        )
        first_BT, last_BT, positions_BT = document_bounds_ref(starts_BT, window)
        return KeyBounds(0, first_BT, last_BT), positions_BT.reshape(-1)
    first, last, positions = (empty(starts_BT, B * T, np.int32) for _ in range(3))
    grid = -(-B * T // BLOCK)
    flat = first, last, positions, starts_BT.reshape(-1)
    launch(document_bounds_kernel, grid, BLOCK, *flat, np.int32(T), np.int32(window))
    return KeyBounds(0, first.reshape(B, T), last.reshape(B, T)), positions
