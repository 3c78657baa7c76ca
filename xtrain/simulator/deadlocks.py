"""The report of a deadlock: where each group of threads waits, and for whom."""

from . import errors
from .errors import DeadlockError, Site
from .intrinsics import Waiting
from .source import BLOCK_BARRIERS, SPIN

EXITED = (
    "Threads that have exited count as arrived on compute capability 7.0 and later; on older GPUs "
    "the others wait forever"
)


def report(block, kind) -> DeadlockError:
    """kind: "deadlock" or "exited_threads", after which the block continues."""
    lines, sites = _groups(block)
    if kind == "exited_threads":
        why = "threads have exited before a barrier or warp function of the others"
        lines.append(EXITED)
    else:
        why = f"its {len(block.threads)} threads do not all reach the same barrier or warp function"
        if spinning(block):
            why = "a loop waits for a change of memory that no thread makes"
            lines += _last_changes(block)
        lines += _other_blocks(block.launch)
        if block.engines_in_use:
            lines += block.engines.report()
    head = f"{kind.replace('_', ' ')} in {block.launch.name}, block {block.position}: {why}"
    return DeadlockError("\n".join([head, *lines]), tuple(dict.fromkeys(sites)), kind)


def _groups(block):
    """Return a line for each group of threads that are at the same place, and the places."""
    places: dict[str, list] = {}
    sites = []
    for thread in block.threads:
        if thread.request is not None:
            name, site, args = thread.request
            mask = ""
            if args and of_warp(name) and not callable(name):
                mask = f" with mask {int(args[0]):#x}"
            calls = "".join(f", called at {line}" for line in _lines(thread)[-2::-1])
            place = f"wait in {site.what}{mask} at {site}{calls}"
            sites.append(site)
        elif thread.left is not None and thread.left.function == block.launch.name:
            place = f"have returned at {thread.left}"
            sites.append(thread.left)
        else:
            place = "have reached the end of the kernel"
        places.setdefault(place, []).append(thread)
    lines = [
        f"    {len(group)} threads ({errors.ranges(t.index for t in group)}) {place}"
        for place, group in places.items()
    ]
    return lines, sites


def _last_changes(block) -> list[str]:
    """Who last changed the elements for which the threads wait, such as the holder of a lock."""
    lines = {}
    for thread in spinning(block):
        if thread.atomic_on is None:
            continue
        memory, key = thread.atomic_on
        last = memory.atomics.get(key) or memory.old_atomics.get(key)
        if last is None:
            continue
        mark, site, _ = last
        by = mark.thread
        if not (by.request and by.request[0] == SPIN):  # its atomic was not a wait
            lines[memory, key] = (
                f"    the element of {site.what} for which they wait was last changed by block "
                f"{by.block.position} {by} at {site}"
            )
    return [*lines.values()]


def _other_blocks(launch) -> list[str]:
    """Lines on the blocks that have not started, or have returned."""
    lines = []
    if launch.not_started and launch.resident is not None:
        lines.append(
            f"    {launch.not_started} of {launch.blocks} blocks have not started: "
            f"{launch.resident} are resident at a time, and they wait. A block may wait only for "
            "blocks that are resident together with it"
        )
    if launch.returned is not None:
        lines.append(f"    block {launch.returned} has returned and never reaches grid.sync()")
    return lines


def of_warp(name) -> bool:
    """Is it the request of a function that the lanes of a warp call together?"""
    return name not in BLOCK_BARRIERS and name != SPIN and not isinstance(name, Waiting)


def spinning(block) -> list:
    """Return the threads that wait in a loop."""
    return [t for t in block.threads if t.request and t.request[0] == SPIN]


def generators(thread):
    """Yield the kernel's generator, then those of the device functions on its call stack."""
    generator = thread.generator
    while generator is not None:
        yield generator
        generator = generator.gi_yieldfrom


def _lines(thread):
    """Return the current line of each generator on the call stack."""
    return [
        str(Site(g.gi_code.co_filename, g.gi_frame.f_lineno, 0, "", "")) for g in generators(thread)
    ]
