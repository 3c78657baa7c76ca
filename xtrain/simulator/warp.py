"""Warp functions, which the lanes of a warp call together: shuffles, votes, syncwarp."""

import functools
import operator

import numpy as np

from . import releases
from .errors import CollectiveError, ranges, where
from .half import BFloat16
from .memory import Mark
from .scalars import Int8, Int16, Int32, UInt8, UInt16, UInt32, unify
from .unset import Unset, plain

FULL = 0xFFFFFFFF
# Numba has shuffles of int32, int64, float32 and float64; other types are converted to one of
# these.
_SHUFFLED = {t: Int32 for t in (bool, np.bool_, Int8, Int16, UInt8, UInt16)} | {
    UInt32: np.int64,
    BFloat16: np.float32,
}


def run_collective(warp, waiting):
    """Run the warp functions for which all lanes of the mask have arrived, and return these lanes.

    waiting: the lanes of `warp` that wait in a warp function. Raises CollectiveError for a call
    that is always wrong.
    """
    groups: dict = {}
    for thread in waiting:
        name, site, args = thread.request
        if Unset in {*map(type, args)}:
            args = tuple(plain(a, site.what, site) for a in args)
            thread.request = name, site, args
        if name == "activemask":
            mask = _together(thread, waiting)
        else:
            if args and not callable(name):
                mask = int(args[0]) & FULL
            else:
                mask = FULL
        group = groups.get((name, mask))
        if group is None:
            _check_mask(thread, mask, warp)
            groups[name, mask] = [thread]
        else:
            group.append(thread)
    ready = []
    for (name, mask), lanes in groups.items():
        for thread in lanes:
            if not mask >> thread.lane & 1:
                raise _error(
                    thread,
                    f"mask {mask:#x} does not contain lane {thread.lane}, which calls the function",
                )
        missing = mask.bit_count() - len(lanes)
        if missing:
            exited = sum(mask >> t.lane & 1 for t in warp if t.request is None)
            if exited and missing == exited + _absent(mask, warp):
                block = lanes[0].block
                site = lanes[0].request[1]
                report = functools.partial(block.deadlock, "exited_threads")
                block.launch.report("exited_threads", (site,), report)
            missing -= exited + _absent(mask, warp)
        if not missing:
            replies = _call(name, lanes)
            for thread, reply in zip(lanes, replies):
                thread.reply = reply
            ready += lanes
            for observer in lanes[0].block.launch.observers:
                site = lanes[0].request[1]
                observer.meet(lanes, site.called if callable(name) else name, site)
    return ready


def _call(name, lanes):
    args = [t.request[2] for t in lanes]
    if callable(name):  # an intrinsic, see source.simulates
        return name(lanes, [t.request[1] for t in lanes], args)
    if name == "activemask":
        return [UInt32(_bits(lanes))] * len(lanes)
    if name == "syncwarp":
        return _syncwarp(lanes)
    if name.startswith("shfl"):
        return _shuffle(lanes, args, _SOURCES[name])
    return _VOTES[name](lanes, [a[1] for a in args])


def _together(thread, waiting) -> int:
    """Return the lanes that call activemask together: those that wait at the same call. A GPU may
    also split them."""
    site = thread.request[1]
    lanes = [t for t in waiting if t.request[:2] == ("activemask", site)]
    return _bits(lanes)


def _absent(mask, warp) -> int:
    """How many lanes of the mask does the block not have? They count as exited."""
    return (mask >> len(warp)).bit_count()


def _check_mask(thread, mask, warp):
    missing = [i for i in range(len(warp), 32) if mask >> i & 1]
    if missing:
        text = (
            f"mask {mask:#x} contains lanes {ranges(missing)}, but this warp has {len(warp)}: a "
            f"block of {thread.block.launch.threads} threads is not whole warps"
        )
        site = thread.request[1]
        thread.report("partial_warp", (site,), lambda: _error(thread, text, "partial_warp"))


def _error(thread, message, kind="collective"):
    site = thread.request[1]
    text = f"{site.what} {where(thread, site)}: {thread} at {site}: {message}"
    return CollectiveError(text, (site,), kind)


def _syncwarp(lanes):
    """Merge the clocks of the lanes: accesses before syncwarp are ordered before accesses after
    it."""
    known = [t.seen for t in lanes if t.seen is not None]
    joined = [max(clocks) for clocks in zip([0] * 32, *known)]
    for thread in lanes:
        joined[thread.lane] = thread.mark.clock
    for thread in lanes:
        clock = thread.mark.clock + 1
        thread.seen = [*joined]
        thread.seen[thread.lane] = clock
        thread.mark = Mark(thread, thread.mark.epoch, clock)
    releases.share(lanes)
    if lanes[0].block.engines_in_use:
        lanes[0].block.engines.meet(lanes)
    return [None] * len(lanes)


# The lane from which a shuffle reads; outside the warp, a lane gets its own value.
_SOURCES = {
    "shfl_sync": lambda lane, k: k % 32,
    "shfl_up_sync": operator.sub,
    "shfl_down_sync": operator.add,
    "shfl_xor_sync": operator.xor,
}


def _shuffle(lanes, args, source):
    values = {t.lane: a[1] for t, a in zip(lanes, args)}
    convert = _one_type(lanes, {type(v) for v in values.values()})
    replies = []
    for thread, (_, value, k) in zip(lanes, args):
        lane = source(thread.lane, int(k))
        if lane in values:
            value = values[lane]
        elif 0 <= lane < 32:
            text = (
                f"lane {thread.lane} reads from lane {lane}, which does not take part in this call"
            )
            make = functools.partial(_error, thread, text)
            thread.report("collective", (thread.request[1],), make)
        replies.append(value if convert is None else convert(value))
    return replies


def _one_type(lanes, kinds):
    """Return the type to which shuffled values are converted; None: unchanged. If some lanes hold
    int32 and others int64, Numba uses int64 in all lanes."""
    if len(kinds) == 1:
        return _SHUFFLED.get(*kinds)
    kind = functools.reduce(unify, kinds)
    whole = all(issubclass(k, (bool, np.bool_, np.integer)) for k in (*kinds, kind))
    if not whole:
        names = " and ".join(sorted(k.__name__.lower() for k in kinds))
        hint = f"Numba makes this variable {kind.__name__.lower()} in all lanes: cast it"
        raise _error(lanes[0], f"its lanes hold {names}: {hint}")
    return _SHUFFLED.get(kind, kind)


def _bits(lanes) -> int:
    return sum(1 << t.lane for t in lanes)


def _match_any(lanes, values):
    return [
        Int32(np.int64(_bits([t for t, v in zip(lanes, values) if v == mine]))) for mine in values
    ]


def _match_all(lanes, values):
    same = all(v == values[0] for v in values)
    return [(Int32(np.int64(_bits(lanes) if same else 0)), np.bool_(same))] * len(lanes)


def _same(value, lanes):
    return [value] * len(lanes)


_VOTES = {
    "all_sync": lambda lanes, values: _same(np.bool_(all(values)), lanes),
    "any_sync": lambda lanes, values: _same(np.bool_(any(values)), lanes),
    "eq_sync": lambda lanes, values: _same(np.bool_(all(values) or not any(values)), lanes),
    "ballot_sync": lambda lanes, values: _same(
        Int32(np.int64(_bits([t for t, v in zip(lanes, values) if v]))), lanes
    ),
    "match_any_sync": _match_any,
    "match_all_sync": _match_all,
}
