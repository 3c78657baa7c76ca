"""The simulator's errors and the wording of their messages."""

import linecache
import os
import re
import sys
import types
from typing import NamedTuple


def file_name(path: str) -> str:
    """Return the name of a file for a reader; "cell" for a cell of a notebook."""
    folder, file = os.path.split(path)
    if "ipykernel" in folder:
        return "cell"
    return file


class Site(NamedTuple):
    """A place in a kernel's source: one array access, one barrier, one call."""

    file: str
    line: int
    column: int
    function: str
    what: str  # the array's name, or the function called

    def __str__(self) -> str:
        return f"{file_name(self.file)}:{self.line}"

    @property
    def called(self) -> str:
        """The function called, without its module and its arguments."""
        return self.what.partition("(")[0].rpartition(".")[2]


class Kind(NamedTuple):
    """A kind of finding."""

    severity: (
        str  # "error": wrong on some GPU; "warning": defined on current GPUs, but rarely meant
    )
    reported: bool  # by default
    meaning: str


KINDS = {
    "error": Kind("error", True, "anything that Numba or a GPU refuses; a Python exception in the kernel"),
    "race": Kind("error", True, "two unordered accesses to one element, at least one a plain write"),
    "plain_and_atomic": Kind("error", True, "a plain read of an element that another thread changes by atomics, unordered"),
    "missing_acquire": Kind("error", True, "an access that only a fence after the thread's own atomic would order: PTX's acquire pattern"),
    "same_value_race": Kind("warning", True, "two unordered writes of the same value to one element"),
    "uninitialized": Kind("error", True, "a value that depends on shared or local memory that was never written"),
    "unwritten_global": Kind("error", True, "the same for global memory made by `simulator.empty` or `cuda.device_array`"),
    "out_of_bounds": Kind("error", True, "an index past the end, or further below zero than the axis is long"),
    "negative_index": Kind("warning", True, "a computed negative index: Numba counts it from the end"),
    "deadlock": Kind("error", True, "a barrier, warp function or waiting loop that threads never get past"),
    "exited_threads": Kind("warning", True, "a barrier or warp function that waits for threads that have exited"),
    "partial_warp": Kind("warning", True, "a mask that contains lanes that the block does not have"),
    "collective": Kind("error", True, "a warp function with an invalid mask, lane or type"),
    "async": Kind("error", True, "an asynchronous copy or product that is not waited for"),
    "stream": Kind("error", True, "work on two streams, or on a stream and the host, in no order"),
    "division_by_zero": Kind("error", True, "// or % of integers by zero"),
    "shift": Kind("error", True, "a shift by a negative number of bits, or by 64 or more"),
    "float_to_integer": Kind("error", True, "NaN, infinity or a float out of range converted to an integer"),
    "int16_overflow": Kind("warning", False, "a number of more than 16 bits converted to int16; on in pytest, as an error"),
    "order_dependent": Kind("warning", False, "a result or rounded sum that depends on the order of threads; on where several orders run"),
    "integer_overflow": Kind("warning", False, "a signed integer that does not fit the type it is converted to"),
    "bank_conflict": Kind("warning", False, "speed: lanes of a warp access different words of one bank of shared memory"),
    "uncoalesced": Kind("warning", False, "speed: lanes of a warp access many sectors of global memory"),
    "divergent_warp": Kind("warning", False, "speed: the threads that take a branch are spread over many warps"),
    "float64": Kind("warning", False, "speed: a float64 value is stored to an array of narrower floats"),
}  # fmt: skip


class Reported(frozenset):
    """The kinds of findings that are reported. allowed: "kind:array" for those that are not for one
    array. asked: the kinds that the program has enabled."""

    allowed: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()

    def covers(self, kind, sites) -> bool:
        """Is a finding of this kind at these places reported?"""
        if kind not in self or any(f"{kind}:{site.what}" in self.allowed for site in sites):
            return False
        return not any(kind in _allowed_at(site) for site in sites)


def reported_kinds(allow=(), enable=()) -> Reported:
    """Return the kinds that are reported: those that are on by default and those in `enable`,
    without those in `allow`. A string "kind:array" in `allow` is for one array of a kernel."""
    for kind in (*(k.partition(":")[0] for k in allow), *enable):
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not a kind of finding: use one of {', '.join(KINDS)}")
    kinds = {k for k, v in KINDS.items() if v.reported} | {*enable}
    reported = Reported(kinds - {*allow})
    reported.allowed = frozenset(k for k in allow if ":" in k)
    return reported


NUMBA = re.compile(r"[\\/]numba(_cuda|_cuda_mlir)?[\\/]")
COMMENT = re.compile(r"#\s*simulate:(.*)")
ALLOWED = re.compile(r"\s*allow\s+(\w+(?:\s*,\s*\w+)*)\s+because\s+\S")


def _allowed_at(site) -> list[str]:
    """The kinds in the comment `# simulate: allow race because ...` at a site's line, or where the
    brackets close that it opens."""
    depth = 1
    line = site.line
    comment = None
    while depth > 0 and comment is None:
        text = linecache.getline(site.file, line)
        depth += sum(map(text.count, "([{")) - sum(map(text.count, ")]}")) - (line == site.line)
        comment = COMMENT.search(text)
        line += 1
        if not text:
            break
    if comment is None:
        return []
    allowed = ALLOWED.match(comment[1])
    kinds = re.split(r"\s*,\s*", allowed[1]) if allowed else [comment[1].strip()]
    for kind in kinds:
        if kind not in KINDS:
            raise KernelError(
                f"{kind!r} at {site} allows nothing: write `# simulate: allow KIND because REASON`, "
                f"with one of {', '.join(KINDS)}",
                (site,),
            )
    return kinds


class KernelError(Exception):
    """A finding: a kernel did what a GPU forbids or leaves undefined, or what is rarely meant. The
    message names the kernel, the threads, the file and the lines.

    sites: the places in the source, in the order in which the message names them.
    kind: a key of KINDS. count: how often it was found at these places (simulator.check).
    thread: position in its block of the thread that did it; None if it is no single one.
    """

    kind = "error"
    severity = property(lambda self: KINDS[self.kind].severity)

    def __init__(self, message: str, sites: tuple = (), kind: str = "", thread: int | None = None):
        self.sites = tuple(sites)
        self.count = 1
        self.thread = thread
        self.kind = kind or self.kind
        width = max((len(str(site)) for site in self.sites), default=0)
        for file, line, name in dict.fromkeys((s.file, s.line, str(s)) for s in self.sites):
            text = linecache.getline(file, line).strip()
            message += f"\n    {name:<{width}}    {text}" if text else ""
        super().__init__(message)


class RaceError(KernelError):
    """A data race: two threads access the same element, at least one writes it, and nothing orders
    the accesses."""

    kind = "race"


class UninitializedError(KernelError):
    """A read of shared or local memory that was never written."""

    kind = "uninitialized"
    read: tuple | None = None  # the arguments of uninitialized()


class OutOfBoundsError(KernelError):
    """An index that is negative or past the end of its axis."""

    kind = "out_of_bounds"


class DeadlockError(KernelError):
    """A barrier or a warp function that some threads of the block do not reach."""

    kind = "deadlock"


class AsyncError(KernelError):
    """The result of an asynchronous copy or product is used, or its operands are changed, before it
    is known to be complete; or it reads data other than its descriptor describes.
    """

    kind = "async"


class CollectiveError(KernelError):
    """A warp function called with an invalid mask, lane or type."""

    kind = "collective"


def ranges(numbers) -> str:
    """[0, 1, 2, 5] -> "0-2, 5" """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def caller():
    """Return the thread whose kernel code runs now, and the Site of its current line; None outside
    a kernel.

    For reports from arithmetic, which does not know its thread.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_varnames[:1] == ("_t",):
            return frame.f_locals["_t"], Site(code.co_filename, frame.f_lineno, 0, code.co_name, "")
        frame = frame.f_back
    return None


# ----------------------------------------------------------------------------- wording
def where(thread, site) -> str:
    """ "in block_sum (called by rmsnorm_fwd_kernel), block (0, 0, 0)" """
    kernel = thread.block.launch.name
    caller = ""
    if site.function != kernel:
        caller = f" (called by {kernel})"
    return f"in {site.function}{caller}, block {thread.block.position}"


def element(site, index) -> str:
    """ "scratch[3]" """
    if not isinstance(index, tuple):
        index = (index,)
    text = ", ".join(map(str, index))
    if site.what.endswith(")"):
        return f"element {text} in {site.what}"
    return f"{site.what}[{text}]"


def race(space, then, did, second, does, site, index, kind="race") -> RaceError:
    """then: (mark, site) of the access whose thread `did` ("wrote") what thread `second` now `does`
    ("read")."""
    mark, old_site = then
    name = element(site, index)
    first = mark.thread
    it = "it"
    if old_site.what != site.what:  # a view, or two arguments that share memory
        it = f"{name}, the same memory as {old_site.what},"
        name = old_site.what
    place = where(second, site)
    a = f"{first}"
    b = f"{second}"
    if first.block is not second.block:
        place = f"between blocks {place.rpartition(', block')[0]}"
        a, b = (f"block {t.block.position} {t}" for t in (first, second))
    why, advice = _missing_order(space, first, second, kind)
    called = _call_of_numba(site)
    where_called = "".join(f", called at {s}" for s in called)
    if did == does and kind == "race" and "atomically" in did:
        advice = ": atomics of different widths on the same bytes are not atomic to each other"
    return RaceError(
        f"data race {place}: {a} {did} {name} at {old_site}, {b} {does} {it} at "
        f"{site}{where_called}, {why} ({space} memory){advice}",
        (old_site, site, *called),
        kind,
    )


def _call_of_numba(site) -> tuple:
    """Return (the program's line that calls the function at `site`), if this is one of Numba's own,
    such as that of a random number."""
    if not NUMBA.search(site.file):
        return ()
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_varnames[:1] == ("_t",) and not NUMBA.search(code.co_filename):
            return (Site(code.co_filename, frame.f_lineno, 0, code.co_name, ""),)
        frame = frame.f_back
    return ()


def _missing_order(space, first, second, kind):
    """Return what is missing between two accesses, and what to do."""
    fence = "threadfence"
    if space == "shared":
        fence = "threadfence_block"
    if kind == "missing_acquire":
        why = "and no fence follows the atomic that was to order them"
        return why, f": call cuda.{fence}() between that atomic and this access"
    advice = ""
    if kind == "same_value_race":
        advice = ": both write the same value"
    elif kind == "plain_and_atomic":
        advice = ": read it by an atomic, too"
    if first.atomic_on == second.atomic_on is not None:  # the one hands over to the other
        why = f"and no cuda.{fence}() precedes the atomic that was to order them"
    elif first.block is not second.block:
        why = "and blocks run in no order"
    elif first.warp == second.warp and (first.seen or second.seen):
        why = "with no syncwarp between them"
    else:
        why = "with no barrier between them"
    return why, advice


def early(thread, does, why, what, site) -> RaceError:
    """Return the error of a kernel that accesses `what` before the previous one has ended
    (early.py)."""
    return RaceError(
        f"data race between kernels {where(thread, site)}: {thread} {does} {what} at {site}, "
        f"{why}, and has not called wait_for_previous",
        (site,),
    )


def in_use(thread, busy, verb, site, index):
    """busy: (where the product was started, what the registers are to it: "the result of")."""
    old, role = busy
    return AsyncError(
        f"register in use {where(thread, site)}: {thread} {verb} {element(site, index)} at "
        f"{site}, {role} the product started at {old}, which may still be in flight: wait for it "
        "and name its result",
        (old, site),
    )


def uninitialized(thread, memory, key, site, index, later=None, use=None):
    """later: (mark, site) of another thread that writes the element before the next barrier, after
    this read.
    use: (what the value reaches, the Site there)
    """
    why = "that no thread has written"
    sites = [site]
    if memory.kind == "global":
        kind = "unwritten_global"
    else:
        kind = "uninitialized"
    if later is not None:
        why = f"that {later[0].thread} writes at {later[1]}, with no barrier between them"
        sites.append(later[1])
    used = ""
    if use is not None and later is None:
        what, place = use
        used = f"; the value reaches {what}"
        if (place.file, place.line) != (site.file, site.line):
            used += f" at {place}"
            sites.append(place)
    error = UninitializedError(
        f"uninitialized read {where(thread, site)}: {thread} reads {element(site, index)} at "
        f"{site}, {memory.kind} memory {why}{used}",
        tuple(sites),
        kind,
    )
    error.read = thread, memory, key, site, index
    return error


def endless(thread, site, iterations) -> KernelError:
    """Return the error of a while loop that has too many iterations."""
    return KernelError(
        f"endless loop {where(thread, site)}: {thread} starts iteration {iterations:,} of "
        f"{site.what} at {site}: either the loop never ends, or it waits for another thread; the "
        "simulator switches threads only at barriers, shuffles and votes",
        (site,),
    )


def read_only(thread, site, index):
    """Return the error of a write to an array that may not be written."""
    return KernelError(
        f"write to a read-only array {where(thread, site)}: {thread} writes "
        f"{element(site, index)} at {site}",
        (site,),
    )


def negative_index(thread, index, axis_index, size, site):
    """Return the error of a computed index that is negative but not below -size."""
    return OutOfBoundsError(
        f"negative index {where(thread, site)}: {thread} uses {element(site, index)} at {site}: "
        f"index {axis_index} is negative (Numba counts it from the end): it wraps around to "
        f"{int(axis_index) + size}",
        (site,),
        "negative_index",
    )


def numeric(thread, site, kind, text):
    """Arithmetic whose result is undefined or rarely meant."""
    return KernelError(f"{text} {where(thread, site)}: {thread} at {site}", (site,), kind)


def out_of_bounds(thread, a, index, site):
    """Return the error of an index that does not fit the array: OutOfBoundsError, or KernelError if
    it is not an integer."""
    if isinstance(index, tuple):
        axes = index
    else:
        axes = (index,)
    if len(axes) != a.ndim:
        reason = f"{len(axes)} indices for {a.ndim} axes"
    else:
        whole = range(a.ndim)
        bad = (i for i in whole if not isinstance(axes[i], slice) and not 0 <= axes[i] < a.dims[i])
        axis = next(bad, None)
        if axis is None:
            return KernelError(
                f"invalid index {where(thread, site)}: {thread} uses {element(site, index)} at "
                f"{site}: an index is an integer, so divide with // and not with /",
                (site,),
            )
        if axes[axis] < 0:
            reason = f"index {axes[axis]} is negative (Numba counts it from the end)"
        else:
            reason = f"index {axes[axis]} is past the end: the axis has {a.dims[axis]} elements"
        if a.memory.kind == "shared" and a.dims == (0,):
            reason = "the launch requests no dynamic shared memory (shared=)"
        if a.ndim > 1:
            reason = f"axis {axis}: {reason}"
    shape = ", ".join(map(str, a.dims))
    return OutOfBoundsError(
        f"out of bounds {where(thread, site)}: {thread} uses {element(site, index)} at {site}, "
        f"but its shape is ({shape}{',' * (a.ndim == 1)}): {reason}",
        (site,),
    )


def atomic_kind(thread, site, name, a, kinds):
    """Return the error of an atomic that Numba does not have for this dtype. kinds: those that it
    has."""
    kind = "bfloat16"
    if a.dtype.str != "|V2":
        kind = a.dtype
    return KernelError(
        f"cuda.atomic.{name} {where(thread, site)}: {site.what} is an array of {kind}, Numba "
        f"supports {', '.join(kinds)}",
        (site,),
    )


def no_integer(thread, site, vote):
    """Return the error of a vote of syncthreads_and, _or or _count that is not an integer."""
    kind = type(vote).__name__.lower().rstrip("_")
    return KernelError(
        f"{site.what} {where(thread, site)}: it takes an integer, this is a {kind}: write "
        f"cuda.{site.what}(int32(...))",
        (site,),
    )


def array_copied(thread, site):
    """a[1:3] = an array."""
    return KernelError(
        f"slice assignment {where(thread, site)}: {thread} stores an array to several elements of "
        f"{site.what} at {site}, which Numba does not compile: write a loop over the elements",
        (site,),
    )


def array_stored(thread, site, index, value):
    """a[i] = an array."""
    return KernelError(
        f"missing index {where(thread, site)}: {thread} stores an array of shape "
        f"{tuple(map(int, value.dims))} to {element(site, index)} at {site}: index the array on "
        "the right",
        (site,),
    )
