"""Exercises of lesson 16: memory."""

from .attempt import exercise

FREE = [(0, 6), (10, 8), (20, 3), (40, 5), (60, 5)]


def some_blocks(rng):
    """Up to seven free blocks, sorted, which do not touch."""
    free, at = [], 0
    for gap, size in rng.integers(1, 9, (int(rng.integers(4, 8)), 2)).tolist():
        free.append((at + gap, size))
        at += gap + size
    return free


def taken(free, start, size, rest=True, front=True):
    """The list after taking `size` from the block at `start`. rest: the remainder stays free; front: the front part was taken"""
    new = []
    for at, s in free:
        if at != start:
            new.append((at, s))
        elif rest and s > size:
            new.append((at + size, s - size) if front else (at, s - size))
    return new


@exercise(
    "16.1", "take",
    first_step="which blocks are large enough, and which of them is the smallest?",
    kernel=False,
)  # fmt: skip
def take(e):
    fixed = (
        (FREE, 4),
        (FREE, 3),
        (FREE, 6),
        (FREE, 5),
        (FREE, 9),
        ([], 1),
        ([(2, 4)], 1),
    )
    for free, size in e.cases(fixed, lambda rng: (some_blocks(rng), rng.integers(1, 9)), times=5):
        given = list(free)
        got = e.call(given, size, case=f"free {free}, size {size}")
        e.need(
            given == list(free),
            f"The given list has changed to {given}: return a new one.",
        )
        e.need(
            isinstance(got, tuple) and len(got) == 2,
            f"Return two values, start and the new list; got {got!r}.",
        )
        start, new = got
        fits = [(s, at) for at, s in free if s >= size]
        if not fits:
            e.need(
                start is None and list(new) == list(free),
                f"No block is large enough: return (None, free), not {got}.",
            )
            continue
        best = min(fits)[1]
        first, worst = fits[0][1], max(fits, key=lambda x: x[0])[1]
        if start != best:
            said = f"start is {start}, expected {best}."
            e.need(
                start is not None,
                f"start is None, but the block at {best} is large enough (a block of exactly that size is, too).",
            )
            blocks = dict(free)
            e.need(
                start in blocks or start not in blocks.values(),
                f"{said} That is the size of a block, not its start: blocks are (start, size).",
            )
            larger = min([(s, at) for s, at in fits if s > size], default=(0, None))[1]
            e.need(
                blocks[best] > size or start != larger,
                f"{said} A block of exactly that size is large enough.",
            )
            e.need(
                start not in blocks or blocks[start] >= size,
                f"{said} The block at {start} has size {blocks.get(start)} only.",
            )
            last = max(at for s, at in fits if s == min(fits)[0])
            e.need(
                start != last or last in (first, worst),
                f"{said} Among equal blocks, take the first.",
            )
            e.need(
                start != first,
                f"{said} That is the first block that fits; best fit takes the smallest one that fits.",
            )
            e.need(
                start != worst,
                f"{said} That is the largest block; best fit takes the smallest one that fits.",
            )
            behind = best + blocks[best] - size
            e.need(start != behind, f"{said} Take the front of the block.")
            raise e.wrong(said)
        want = taken(free, best, size)
        if list(new) != want:
            said = f"the new list is {list(new)}, expected {want}."
            e.need(list(new) != list(free), f"{said} The block is still free.")
            e.need(
                list(new) != taken(free, best, size, rest=False),
                f"{said} The remainder of the block is lost: it must stay free.",
            )
            e.need(
                list(new) != taken(free, best, size, front=False),
                f"{said} Take the front of the block: the remainder begins at start + size.",
            )
            e.need(all(s > 0 for _, s in new), f"{said} Leave out a block of size 0.")
            e.need(sorted(new) != want, f"{said} Keep the list sorted by start.")
            raise e.wrong(said)


@exercise(
    "16.2", "give",
    first_step="insert the block so that the list stays sorted by start; which neighbours does it touch?",
    kernel=False,
)  # fmt: skip
def give(e):
    fixed = (
        ([(0, 2), (8, 2)], 4, 2), ([(0, 2), (8, 2)], 3, 4), ([(0, 2), (8, 2)], 2, 3), ([(0, 2), (8, 2)], 6, 2), ([(0, 2), (8, 2)], 2, 6), ([], 3, 1),
        ([(5, 5)], 0, 2),
    )  # fmt: skip

    def draw(rng):
        free = some_blocks(rng)
        i = int(rng.integers(1, len(free)))
        end = sum(free[i - 1])
        start = int(rng.integers(end, free[i][0]))
        return free, start, int(rng.integers(1, free[i][0] - start + 1))

    for free, start, size in e.cases(fixed, draw, times=5):
        given = list(free)
        got = e.call(given, start, size, case=f"free {free}, and ({start}, {size}) is returned")
        e.need(
            given == list(free),
            f"The given list has changed to {given}: return a new one.",
        )
        e.need(isinstance(got, list), f"Return the new list; got {got!r}.")
        e.need(
            all(isinstance(b, tuple) for b in got),
            f"Blocks are tuples (start, size); the list is {got}.",
        )
        loose = sorted([*free, (start, size)])
        want = []
        for at, s in loose:
            if want and sum(want[-1]) == at:
                want[-1] = (want[-1][0], want[-1][1] + s)
            else:
                want.append((at, s))
        if got == want:
            continue
        said = f"the list is {got}, expected {want}."
        e.need(sorted(got) != want, f"{said} Keep the list sorted by start.")
        e.need(
            len(got) >= len(want) or sum(s for _, s in got) < sum(s for _, s in want),
            f"{said} Between these blocks is memory that is in use: merge only blocks that touch.",
        )
        e.need(
            (start, size) in got or any(at <= start < at + s for at, s in got),
            f"{said} The returned block is missing.",
        )
        e.need(
            sum(s for _, s in got) >= sum(s for _, s in want),
            f"{said} Memory is lost: all memory that was free must stay free.",
        )
        before = any(sum(b) == start for b in free)
        after = any(start + size == at for at, _ in free)
        e.need(
            not (before and after),
            f"{said} It touches a free block on both sides: merge all three.",
        )
        e.need(not before, f"{said} A free block ends where this one begins: merge them.")
        e.need(not after, f"{said} A free block begins where this one ends: merge them.")
        raise e.wrong(said)


@exercise(
    "16.3", "peak",
    first_step="without `recompute`: what is alive when forward ends? With it: what is alive while backward is at layer i?",
    kernel=False,
)  # fmt: skip
def peak(e):
    fixed = (
        ([5, 7, 6], [1, 2, 1]),
        ([40, 5, 5], [3, 3, 3]),
        ([5, 5, 40], [3, 3, 3]),
        ([9], [2]),
        ([4, 30, 2, 2], [1, 6, 1, 5]),
    )
    for kept, inputs in e.cases(fixed, lambda rng: tuple(rng.integers(1, 40, (2, 7)).tolist())):
        for recompute in (False, True):
            got = e.call(
                list(kept),
                list(inputs),
                recompute,
                case=f"kept {kept}, inputs {inputs}, recompute {recompute}",
            )
            alive = [sum(inputs[: i + 1]) + kept[i] for i in range(len(kept))]
            want = max(alive) if recompute else sum(kept)
            if got == want:
                continue
            e.need(got is not None, "The function returns nothing: return the number of bytes.")
            said = f"you return {got}, expected {want}."
            mistakes = {
                "Without `recompute` nothing is discarded: all of `kept` is alive when forward ends.": None if recompute else max(alive),
                "Inputs are saved only where activations are not.": None if recompute else sum(kept) + sum(inputs),
                "With `recompute` the layers do not all hold their activations: only one layer at a time does.": sum(kept) if recompute else None,
                "Those are the activations of one layer alone: the inputs saved for backward are alive as well.":
                    max(kept) if recompute else None,
                "Those are the inputs alone: while backward is at a layer, its activations are alive as well.": sum(inputs) if recompute else None,
                "The inputs of later layers are already freed when backward reaches an earlier one.": sum(inputs) + max(kept) if recompute else None,
                "The layer's own input is still alive while its activations are recomputed from it.":
                    max(sum(inputs[:i]) + kept[i] for i in range(len(kept))) if recompute else None,
                "That is the number at the last layer; it may be larger at an earlier layer with more activations.": alive[-1] if recompute else None,
                "That is the number at the first layer, at the end of backward.": alive[0] if recompute else None,
            }  # fmt: skip
            for text, sign in mistakes.items():
                e.need(got != sign, f"{said}\n{text}")
            raise e.wrong(said)
