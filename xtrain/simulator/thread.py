"""One CUDA thread: the functions and attributes of `numba.cuda` that do not wait for other threads.

source.py rewrites a kernel so that `cuda.threadIdx.x` becomes `_t.threadIdx.x`,
`cuda.atomic.add(...)` becomes `_t.atomic_add(...)` and `a[i]` becomes `_t.load(a, i, site)`, where
_t is the running Thread. Each method has the name and the meaning of its function in numba.cuda.
Loads and stores: accesses.py.
"""

import functools
import itertools
import operator
import sys
from typing import Any

import numpy as np

from . import errors, releases
from .accesses import Accesses
from .arrays import Array
from .memory import Mark
from .names import NAMESPACES
from .scalars import Int32, UInt32, UInt64, unify
from .schedules import PAUSES
from .twins import TWINS, twin
from .unset import Unset, carries, plain

FAILED = object()  # the result of a compare-and-swap that leaves the element as it is
MAX_TURNS = 100_000_000  # iterations of one while loop of one thread: less than a minute
CHECK_TURNS = 100_000  # iterations between two checks whether a loop still changes its variables
SPIN_TURNS = 100  # iterations of a loop that accesses memory before other threads run


class Dim3:
    """A position or a size with three axes, as int32."""

    __slots__ = ("x", "y", "z")

    def __init__(self, x, y, z):
        self.x = Int32(x)
        self.y = Int32(y)
        self.z = Int32(z)

    def __iter__(self):
        return iter((self.x, self.y, self.z))

    def __str__(self):
        return f"({self.x}, {self.y}, {self.z})"


class Thread(Accesses):
    """One thread of one block.

    block: the running Block; index: position in the block; lane, warp: index % 32, index // 32
    mark: this thread since its last synchronization
    seen: the clocks that it knows of the lanes of its warp (memory.py); None before the first
    syncwarp
    view: what it has acquired; sync: its fences and pending acquisitions, or None (releases.py)
    atomic_on: the (memory, key) of its last atomic
    state_at_spin: (site of the loop, local variables) when it last let others run in a waiting loop
    generator, request, reply: the running kernel, what it waits for, and the result to send to it
    left: the Site of the return statement that ended it
    pauses: how often it has let others run before an atomic (schedules.py)
    state: a dict for simulated intrinsics, which keep state between calls in it
    """

    __slots__ = (
        "_state",
        "atomic_on",
        "block",
        "blockDim",
        "blockIdx",
        "generator",
        "gridDim",
        "index",
        "instruction",
        "lane",
        "laneid",
        "left",
        "mark",
        "pauses",
        "reply",
        "request",
        "seen",
        "state_at_spin",
        "sync",
        "threadIdx",
        "view",
        "warp",
    )  # fmt: skip
    warpsize = Int32(32)

    def __init__(self, block, index, position):
        self.block = block
        self.index = index
        self.threadIdx = position
        self.warp, self.lane = divmod(index, 32)
        self.laneid = Int32(self.lane)
        self.blockIdx = block.position
        self.blockDim = block.launch.block
        self.gridDim = block.launch.grid
        self.mark = Mark(self, block.epoch, 1)
        self.request: Any = None
        self.generator = self.reply = self.seen = self.left = self.sync = None
        self._state = self.state_at_spin = self.atomic_on = None
        self.pauses = 0
        self.view = releases.NOTHING
        self.instruction = ""  # the simulated intrinsic that is running

    def intrinsic(self, function, site, *args):
        """Call a simulated intrinsic. A value that was never written is reported where it reads
        it."""
        if Unset in map(type, args):
            args = tuple(plain(a, "an instruction", site) for a in args)
        self.block.eager = True
        self.instruction = function.__qualname__
        try:
            return function(self, site, *args)
        finally:
            self.block.eager = False
            self.instruction = ""

    @property
    def state(self) -> dict:
        """State of simulated intrinsics, created at the first use."""
        if self._state is None:
            self._state = {}
        return self._state

    def __str__(self):
        flat = self.blockDim.y == self.blockDim.z == 1
        if flat:
            return f"thread {self.index}"
        return f"thread {self.threadIdx}"

    def report(self, kind, sites, make):
        """Report a finding: see Launch.report."""
        self.block.launch.report(kind, sites, make)

    # ------------------------------------------------------------------------- overlapping kernels: early.py
    def wait_for_previous(self):
        """Simulate griddepcontrol.wait."""
        self.block.waited = True

    def let_next_start(self):
        """Simulate griddepcontrol.launch_dependents."""

    def note_copy(self, site, low, high, writes):
        """Record an asynchronous copy (kernels/primitives/hopper.py) that accesses a tensor in the
        bytes [low, high)."""
        copies = self.block.launch.copies
        copies[low, high] = writes or copies.get((low, high), False)

    # ------------------------------------------------------------------------- atomics
    def _atomic(self, site, a, index, name, change, **how):
        """a[index] = change(a[index]) as one access, unless this is FAILED. Returns the old value.
        how: acquires, releases (releases.atomic)."""
        kinds = _ATOMIC_KINDS.get(name, _WHOLE)
        if a.dtype.name not in kinds:
            raise errors.atomic_kind(self, site, name, a, kinds)
        k = a.locate(index)
        if k is None:
            try:
                k = self._find(a, index, site)
            except TypeError:
                raise errors.out_of_bounds(self, a, index, site) from None
            if type(k) is not int:  # out of bounds
                return k
        old = a.flat[k]
        new = change(old)
        keys = a.keys(k)
        for key in keys:
            self._change(a, key, index, site, keys, writes=new is not FAILED, **how)
        if new is not FAILED:
            a.flat[k] = new
            self.block.launch.changes += bool(new != old)
        if a.wrap is None:
            return old
        return a.wrap(old)

    def strong_load(self, site, a, index, acquires=False):
        """a[index] as an atomic that only reads."""
        k = a.locate(index)
        if k is None:
            raise errors.out_of_bounds(self, a, index, site)
        keys = a.keys(k)
        for key in keys:
            self._change(a, key, index, site, keys, writes=False, acquires=acquires)
        if a.wrap is None:
            return a.flat[k]
        return a.wrap(a.flat[k])

    def atomic_cas(self, site, a, index, old, new):
        old, new = (a.dtype.type(plain(x, "an atomic", site)) for x in (old, new))
        return self._atomic(site, a, index, "cas", lambda now: new if now == old else FAILED)

    def atomic_compare_and_swap(self, site, a, old, new):
        return self.atomic_cas(site, a, 0, old, new)

    def threadfence(self):
        releases.fence(self, releases.GPU)

    threadfence_system = threadfence

    def threadfence_block(self):
        releases.fence(self)

    # ------------------------------------------------------------------------- positions
    def grid(self, ndim):
        """Return the thread's position in the grid: int64, or a tuple of ndim int64."""
        if ndim == 1:
            return np.int64(int(self.blockIdx.x) * int(self.blockDim.x) + int(self.threadIdx.x))
        axes = zip(self.blockIdx, self.blockDim, self.threadIdx)
        position = tuple(np.int64(b) * n + t for b, n, t in axes)[: int(ndim)]
        if ndim > 1:
            return position
        return position[0]

    def gridsize(self, ndim):
        size = tuple(np.int64(g) * n for g, n in zip(self.gridDim, self.blockDim))[: int(ndim)]
        return size if ndim > 1 else size[0]

    def lanemask_lt(self):
        return UInt32((1 << self.lane) - 1)

    # ------------------------------------------------------------------------- functions as values
    def apply(self, site, f, *args, **keywords):
        """Call a function that is a value: a generator, because the function may wait for other
        threads."""
        if getattr(f, "__self__", None) is self and f.__name__.partition("_")[0] in NAMESPACES:
            return f(site, *args, **keywords)  # cuda.atomic.add
        if hasattr(f, "py_func"):
            translated = self.block.launch.translate(f.py_func)
            result = translated.function(self, *args, **keywords)
            if translated.waits:
                result = yield from result
            return result
        return twin(f)(*args, **keywords)

    def ufunc(self, site, f, *args):
        """A NumPy function of arrays with an output array: f(x, out)."""
        *inputs, out = args
        for index in np.ndindex(out.dims):
            values = [self._broadcast(x, index, site) for x in inputs]
            self.store(out, index, f(*values), site)

    def _broadcast(self, x, index, site):
        if not isinstance(x, Array):
            return x
        index = index[len(index) - x.ndim :]
        return self.load(x, tuple(i if n > 1 else 0 for i, n in zip(index, x.dims)), site)

    def this_grid(self):
        """cuda.cg.this_grid(); source.py rewrites its sync()."""
        return self.block.launch.grid

    # ------------------------------------------------------------------------- arithmetic
    def selp(self, condition, a, b):
        if type(condition) is Unset:
            return Unset(_of(b), condition.read)
        return a if condition else b

    @carries
    def fma(self, a, b, c):
        """a * b + c, rounded once. In float32 the product is exact in float64 and only the addition
        is rounded twice."""
        scalar = functools.reduce(unify, map(type, (a, b, c)))
        return scalar(np.float64(a) * np.float64(b) + np.float64(c))

    @carries
    def cbrt(self, x):
        return np.cbrt(x)

    @carries
    def popc(self, x):
        return _integer(x)(_bits(x).bit_count())

    @carries
    def clz(self, x):
        return _integer(x)(8 * x.itemsize - _bits(x).bit_length())

    @carries
    def ffs(self, x):
        bits = _bits(x)
        return UInt32((bits & -bits).bit_length())

    @carries
    def brev(self, x):
        width = 64 if type(x) is UInt64 else 32
        bits = _bits(x) & (2**width - 1)
        return (UInt64 if width == 64 else UInt32)(int(f"{bits:0{width}b}"[::-1], 2))

    def nanosleep(self, ns):
        pass

    def pause(self, site):
        """Does the thread let others run now? For schedules.py."""
        schedule = self.block.launch.schedule
        if self.pauses == PAUSES or not schedule.pauses():
            return False
        self.pauses += 1
        self.state_at_spin = site, None
        return True

    def turns(self, site, waits, stores, only_waits):
        """Return a function that a while loop calls in each iteration.

        It returns True, or False where the thread lets others run first (SPIN): every SPIN_TURNS
        iterations of a loop that accesses memory (`waits`), every iteration if they all do the same
        (`only_waits`). Raises KernelError if the loop never ends. stores: the loop writes memory.
        """
        if only_waits:
            every = 1
        elif waits:
            every = SPIN_TURNS
        else:
            every = CHECK_TURNS

        def counted():
            left = MAX_TURNS
            if waits and self.block.launch.schedule is not None and self.pause(site):
                yield False
            while left > 0:
                turns = min(every, left)
                yield from itertools.repeat(True, turns - 1)
                left -= turns
                if stores:
                    state = None
                else:
                    state = _state_of(sys._getframe(1))
                if waits:
                    self.state_at_spin = site, state
                yield not waits
                if not waits and turns == CHECK_TURNS and state == _state_of(sys._getframe(1)):
                    raise errors.endless(self, site, MAX_TURNS - left + 1)
            raise errors.endless(self, site, MAX_TURNS + 1)

        return counted().__next__


def _state_of(frame):
    """Return the local variables of a thread. Numbers are compared by value, all else by
    identity."""
    values = []
    for name, x in frame.f_locals.items():
        value: Any = id(x)
        if isinstance(x, np.generic):
            value = x.tobytes()
        elif isinstance(x, (int, float)):
            value = x
        values.append((name, type(x), value))
    return values


def _of(x):
    return x.value if type(x) is Unset else x


def _bits(x) -> int:
    return int(operator.index(x)) & (256**x.itemsize - 1)


def _integer(x):
    if isinstance(x, np.integer):
        return type(x)
    return Int32


_ATOMICS = {
    "add": operator.add,
    "sub": operator.sub,
    "max": lambda old, value: value if value > old else old,  # NaN stays, and is not stored
    "min": lambda old, value: value if value < old else old,
    "nanmax": TWINS[max],
    "nanmin": TWINS[min],
    "and_": operator.and_,
    "or_": operator.or_,
    "xor": operator.xor,
    "exch": lambda old, value: value,
    "inc": lambda old, top: old + type(old)(1) if old < top else type(old)(0),
    "dec": lambda old, top: old - type(old)(1) if 0 < old <= top else top,
}


# The dtypes for which Numba has each atomic; _WHOLE for the ones that are not listed.
_ATOMIC_KINDS: dict[str, tuple[str, ...]] = dict.fromkeys(("inc", "dec"), ("uint32", "uint64"))
_WHOLE = ("int32", "int64", "uint32", "uint64")
_ATOMIC_KINDS |= dict.fromkeys(
    ("add", "sub", "max", "min", "nanmax", "nanmin"), (*_WHOLE, "float32", "float64")
)


def _atomic_method(name, change):
    def atomic(self, site, a, index, value, **how):
        value = a.dtype.type(plain(value, "an atomic", site))
        return self._atomic(site, a, index, name, lambda old: change(old, value), **how)

    return atomic


for _name, _change in _ATOMICS.items():
    setattr(Thread, f"atomic_{_name}", _atomic_method(_name, _change))
