"""Exercises of lesson 43: softmax as a program of blocks, layouts, the elements of a thread."""

import numpy as np

from .attempt import exercise
from .lesson_27 import judged


# ----------------------------------------------------------------------------- a program
class Memory:
    """x and y of R rows, and what a program did with them."""

    def __init__(self, e, x, row, BLOCK):
        self.e = e
        self.x = x
        self.row = row
        self.BLOCK = BLOCK
        self.y = np.full(x.shape, np.nan, np.float32)
        self.loaded, self.stored = np.zeros(x.size, bool), np.zeros(x.size, bool)
        self.store_called = False

    def program_id(self):
        return self.row

    def checked(self, name, offsets, mask):
        e, C = self.e, self.x.shape[1]
        offsets, mask = np.asarray(offsets), np.asarray(mask)
        e.need(offsets.shape == (self.BLOCK,) and offsets.dtype.kind in "iu", f"{name}: the offsets must be {self.BLOCK} whole numbers, one for each element of the block; got {offsets.dtype} of shape {offsets.shape}.")  # fmt: skip
        e.need(mask.shape == (self.BLOCK,) and mask.dtype.kind == "b", f"{name}: the mask must be {self.BLOCK} times True or False, got {mask.dtype} of shape {mask.shape}.")  # fmt: skip
        at = offsets[mask]
        first = self.row * C
        outside = at[(at < first) | (at >= first + C)]
        if len(outside):
            raise e.wrong(f"{name}: offset {outside[0]} is outside of row {self.row}, which is {first} to {first + C - 1}. Is it masked, and does a row begin at program_id() * C?")  # fmt: skip
        return offsets, mask

    def load(self, offsets, mask, other):
        offsets, mask = self.checked("load", offsets, mask)
        self.loaded[offsets[mask]] = True
        return np.where(mask, self.x.reshape(-1)[np.where(mask, offsets, 0)], np.float32(other))

    def store(self, offsets, values, mask):
        self.store_called = True
        offsets, mask = self.checked("store", offsets, mask)
        values = np.asarray(values, np.float32)
        self.e.need(values.shape in ((), (self.BLOCK,)), f"store: the values must be {self.BLOCK} numbers, one for each element of the block; got shape {values.shape}.")  # fmt: skip
        values = np.broadcast_to(values, (self.BLOCK,))
        self.stored[offsets[mask]] = True
        self.y.reshape(-1)[offsets[mask]] = values[mask]


def softmax(x, most=None, other=None, extra=0, sum_of=np.sum):
    """other: what stands in `extra` places beyond the row"""
    x = np.append(x.astype(np.float64), [other] * extra if other is not None else [])
    with np.errstate(all="ignore"):
        e = np.exp(x - (x.max() if most is None else most))
        return (e / sum_of(e))[: len(x) - (extra if other is not None else 0)]


@exercise(
    "43.1", "softmax_program",
    first_step="c = np.arange(BLOCK), and x = load(program_id() * C + c, c < C, other). Which `other` changes neither the maximum nor the sum?",
    hints={
        "TypeError": "load(offsets, mask, other), store(offsets, values, mask), program_id() and x.max() are functions: call them with ().",
        "NameError": "load, store and program_id are arguments here, and np computes: there is no tl.",
        "ValueError": "Offsets, values and mask are arrays of BLOCK elements: row r begins at offset r * C.",
    },
    kernel=False,
)  # fmt: skip
def softmax_program(e):
    fixed = [([[0.0, 1.0, 2.0]], 4), ([[-5.0, -6.0, -7.0], [1.0, 1.0, 1.0]], 4), ([[1.0, 2.0, 3.0, 4.0]] * 2, 4), ([[500.0, 499.0, -500.0]] * 3, 8), ([[-200.0], [-300.0], [-(2.0**100)]], 2)]  # fmt: skip

    def draw(rng):
        R, C = int(rng.integers(2, 4)), int(rng.integers(2, 12))
        return (rng.normal(size=(R, C)) * 3 - 4).round(2), 1 << (C - 1).bit_length()

    for x, BLOCK in e.cases(fixed, draw, times=2):
        x = np.array(x, np.float32)
        for row in range(len(x)):
            memory = Memory(e, x, row, BLOCK)
            C, mine = x.shape[1], x[row]
            e.call(memory.program_id, memory.load, memory.store, C, BLOCK, case=f"x {x.tolist()}, BLOCK {BLOCK}, program {row}")  # fmt: skip
            e.need(memory.store_called, "Nothing was stored: a program returns nothing, store(offsets, values, mask) writes to y.")  # fmt: skip
            loaded, stored = (
                memory.loaded.reshape(x.shape)[row],
                memory.stored.reshape(x.shape)[row],
            )
            e.need(stored.all(), f"Element {stored.argmin()} of the row was never stored: the mask must be True for every element of the row. Compare columns, c < C, not offsets.")  # fmt: skip
            beyond = dict(extra=BLOCK - C)
            mistakes = {
                f"Element {loaded.argmin()} of the row was never loaded: the mask must be True for every element of the row.": lambda got, loaded=loaded: not loaded.all(),
                "`other` is larger than every element of this row, so it is the maximum. Which number is never the largest?": lambda got, x=mine: x.max() < -150 and bool((got < 1e-3).all()),
                "Only NaN was stored: infinite - infinite and 0 / 0 are NaN. Is the row's largest element subtracted, without the places beyond the row?": lambda got: bool(np.isnan(got).all()),
                "The elements beyond the row are in the sum: exp(0 - m) is not 0. Which `other` adds nothing?": softmax(mine, other=0.0, **beyond),
                "The maximum is missing: exp of a large number is infinite. Subtract the row's largest element.": lambda got: bool(np.isnan(got).any()),
                "`other` must add nothing to the sum: exp of a very negative number, not of a large one.": softmax(mine, other=1.0, **beyond),
                "Divide by the sum of the row.": softmax(mine, sum_of=lambda e: 1.0),
                "The mean is not the sum.": lambda got, x=mine, C=C, BLOCK=BLOCK: any(np.allclose(got, n * softmax(x)) for n in (C, BLOCK)),
                "The logarithm of softmax was stored.": np.log(np.maximum(softmax(mine), 1e-300)),
                "Softmax is never negative: subtract the maximum from x, before exp.": lambda got: bool((got < 0).any()),
            }  # fmt: skip
            e.same("y[row]", memory.y[row].astype(np.float64), softmax(mine), mistakes, 1e-4, 1e-6)


# ----------------------------------------------------------------------------- layouts
def size(shape):
    return shape if isinstance(shape, int) else int(np.prod([size(s) for s in shape]))


def place(
    i, shape, stride, last=False, flat=False, divide=True, modulo=True, add=lambda a, b: a + b
):
    """The right answer. last: the last mode runs fastest"""
    if isinstance(shape, int):
        return i * stride
    total, modes = 0, list(zip(shape, stride))
    for s, d in reversed(modes) if last else modes:
        if flat and not isinstance(s, int):
            total += (i % size(s)) * first_of(d)
        else:
            coordinate = i % size(s) if modulo else i
            total = add(total, place(coordinate, s, d, last, flat, divide, modulo, add))
        i = i // size(s) if divide else i
    return total


def first_of(d):
    return d if isinstance(d, int) else first_of(d[0])


def coordinate(i, shape):
    if isinstance(shape, int):
        return i
    found = []
    for s in shape:
        found.append(coordinate(i % size(s), s))
        i //= size(s)
    return tuple(found)


def ones(shape):
    return 1 if isinstance(shape, int) else tuple(ones(s) for s in shape)


def text(layout):
    return f"{layout[0]}:{layout[1]}".replace(" ", "")


OFFSET = {
    "The LAST mode runs fastest here, as in NumPy: in CuTe the first one does.": lambda i, s, d: place(i, s, d, last=True),
    "After a mode, i // its size is what is left for the others.": lambda i, s, d: place(i, s, d, divide=False),
    "A mode may be a tuple, with an inner layout: call offset for it.": lambda i, s, d: place(i, s, d, flat=True),
    "The offset does not depend on i alone: use the strides.": lambda i, s, d: i,
    "These are the coordinates, added: use the strides.": lambda i, s, d: place(i, s, ones(s)),
    "The coordinate of a mode is i % its size.": lambda i, s, d: place(i, s, d, modulo=False),
    "This is the offset of the first mode only: add those of all modes.": lambda i, s, d: i % first_of(s) * first_of(d),
    "This is the offset of the last mode only: add those of all modes.": lambda i, s, d: place(i, s, d, add=lambda a, b: b),
}  # fmt: skip
LAYOUTS = [((2, 4), (4, 1)), ((4, (2, 3)), (2, (1, 8))), (5, 3), ((3,), (2,)), ((2, 2, 3), (1, 10, 100)), (((2, 2), (3, 2)), ((1, 4), (16, 64))), ((4, 2), (0, 1)), (((2, (2, 3)), 2), ((1, (2, 4)), 100))]  # fmt: skip


def whole(e, got):
    e.need(got is not None, "Nothing is returned: end with `return` and the offset.")
    e.need(np.ndim(got) == 0 and isinstance(got, (int, np.integer)), f"An offset is a whole number, got {got!r}." + " Divide with //." * isinstance(got, float))  # fmt: skip
    return int(got)


def random_layout(rng, depth=0):
    if depth == 2 or rng.random() < 0.3 * depth:
        return int(rng.integers(1, 5)), int(rng.integers(0, 9))
    modes = [random_layout(rng, depth + 1) for _ in range(int(rng.integers(2, 4)))]
    return tuple(m[0] for m in modes), tuple(m[1] for m in modes)


@exercise(
    "43.2", "offset",
    first_step="if shape is an integer: i * stride. Else the first mode s, d: i % size(s) is its coordinate, i // size(s) is left for the others.",
    allow=("offset", "size"),
    hints={
        "RecursionError": "For an integer shape the answer is i * stride, without a call.",
        "TypeError": "shape and stride are integers, or tuples of the same length, at any depth: isinstance(shape, int).",
        "IndexError": "A tuple may have any number of modes, also one.",
        "ValueError": "A tuple may have any number of modes, also one.",
        "AttributeError": "shape and stride are integers or tuples, which do not change: shape[0] is the first mode, shape[1:] the others.",
    },
    kernel=False,
)  # fmt: skip
def offset(e):
    layouts = [*LAYOUTS, *(random_layout(e.rng) for _ in range(5))]
    cases = [(f"i = {i}, layout {text(x)}", (i, *x)) for x in layouts for i in sorted({5 % size(x[0]), *range(0, size(x[0]), 3)})]  # fmt: skip

    def other(arguments, want, got):
        i, shape, _ = arguments
        return f"The coordinate of this element is {coordinate(i, shape)}: each number times its stride, added."

    judged(e, cases, lambda got: whole(e, got), place, OFFSET, other)


def elements(thread, threads, values):
    first = place(thread, *threads)
    return [first + place(v, *values) for v in range(size(values[0]))]


OWNED = {
    "The offset of the thread is missing: threads(t) + values(v).": lambda t, threads, values: elements(0, threads, values),
    "The thread's number is not its offset: threads(t).": lambda t, threads, values: [t + place(v, *values) for v in range(size(values[0]))],
    "The value's number is not its offset: values(v).": lambda t, threads, values: [place(t, *threads) + v for v in range(size(values[0]))],
    "threads and values are exchanged.": tuple(
        lambda t, threads, values, count=count: [place(v, *threads) + place(t, *values) for v in range(size(count(threads, values)[0]))]
        for count in (lambda threads, values: threads, lambda threads, values: values)
    ),
    "These are the values of all threads: one thread is asked for.": lambda t, threads, values: [place(u, *threads) + place(v, *values) for u in range(size(threads[0])) for v in range(size(values[0]))],
    "In the order of the values, not sorted.": lambda t, threads, values: sorted(elements(t, threads, values)),
    "There are size(values[0]) values, also if the shape is nested.": lambda t, threads, values: elements(t, threads, values)[: values[0] if isinstance(values[0], int) else len(values[0])],
}  # fmt: skip


@exercise(
    "43.3", "owned",
    first_step="offset(thread, *threads) is where the thread begins. The values v = 0, 1, ... add offset(v, *values).",
    allow=("offset", "size"),
    hints={"TypeError": "A layout is (shape, stride), both integers or tuples: offset(v, *values) passes both."},
    kernel=False,
)  # fmt: skip
def owned(e):
    fixed = [(3, (32, 1), (4, 32)), (3, (32, 4), (4, 1)), (5, (32, 2), ((2, 2), (1, 64))), (0, (8, 1), ((2, 2), (8, 1))), (6, ((4, 2), (2, 8)), ((2, 3), (1, 16))), (1, (4, 8), (3, -1)), (2, (4, 1), (1, 0))]  # fmt: skip
    for _ in range(5):
        threads, values = random_layout(e.rng), random_layout(e.rng)
        fixed.append((int(e.rng.integers(size(threads[0]))), threads, values))
    cases = [(f"thread {t}, threads {text(x)}, values {text(y)}", (t, x, y)) for t, x, y in fixed]

    def read(got):
        e.need(got is not None, "Nothing is returned: end with `return` and the list.")
        e.need(not hasattr(got, "__next__"), "A generator is returned: make a list of it.")
        e.need(np.ndim(got) == 1, f"Return a list of offsets, got {got!r}.")
        return [whole(e, x) for x in got]

    def other(arguments, want, got):
        if len(got) != len(want):
            return f"There are size(values[0]) values: {len(want)} here, not {len(got)}."
        t, threads, values = arguments
        v = next(v for v, (x, y) in enumerate(zip(got, want)) if x != y)
        return f"threads({t}) is {place(t, *threads)}, values({v}) is {place(v, *values)}: value {v} of the thread is at their sum."

    judged(e, cases, read, elements, OWNED, other)
