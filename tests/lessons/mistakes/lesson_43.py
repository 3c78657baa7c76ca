"""Typical mistakes, planted in the solutions of lesson 43: (exercise, old, new, words of the answer)."""

LOAD = "load(program_id() * C + c, c < C, -np.inf)"
STORE = "store(program_id() * C + c, e / e.sum(), c < C)"
INNER = "offset(i % size(s), s, d)"

MISTAKES = [
    ("43.1", "-np.inf", "0.0", "are in the sum"),
    ("43.1", "np.exp(x - x.max())", "np.exp(x)", "The maximum is missing"),
    ("43.1", "e / e.sum()", "e", "Divide by the sum"),
    ("43.1", "e / e.sum()", "e / e.mean()", "The mean is not the sum"),
    ("43.1", LOAD, "load(c, c < C, -np.inf)", "outside of row"),
    ("43.1", LOAD, "load(program_id() * BLOCK + c, c < C, -np.inf)", "outside of row"),
    ("43.1", "e / e.sum(), c < C", "e / e.sum(), c < BLOCK", "outside of row"),
    ("43.1", "    " + STORE, "    return e / e.sum()", "Nothing was stored"),
    ("43.1", "np.arange(BLOCK)", "np.arange(C)", "one for each element of the block"),
    ("43.1", "e / e.sum()", "e / (e.sum() / C)", "The mean is not the sum"),
    ("43.1", "-np.inf", "-100", "larger than every element"),
    ("43.1", "np.exp(x - x.max())", "np.exp(x) - x.max()", "before exp"),
    ("43.1", "np.arange(BLOCK)", "tl.arange(0, BLOCK)", "there is no tl"),
    ("43.2", INNER, "offset(i // size(s), s, d)", "The coordinate of this element is (1, 1)"),
    ("43.2", "i //= size(s)", "i /= size(s)", "Divide with //"),
    ("43.2", "    total = 0\n", "    total = shape.pop(0)\n", "shape[1:] the others"),
    ("43.2", "        i //= size(s)\n", "", "what is left for the others"),
    ("43.2", "zip(shape, stride)", "zip(reversed(shape), reversed(stride))", "The LAST mode"),
    ("43.2", "total += ", "total = ", "of the last mode only"),
    ("43.2", "    if isinstance(shape, int):\n        return i * stride\n", "", "isinstance(shape, int)"),
    ("43.2", "return total", "total", "Nothing is returned"),
    ("43.3", "[first + ", "[", "The offset of the thread is missing"),
    ("43.3", "offset(thread, *threads)", "thread", "not its offset: threads(t)"),
    ("43.3", "offset(v, *values)", "v", "not its offset: values(v)"),
    ("43.3", "size(values[0])", "len(values[0])", "len()"),
    ("43.3", "[first + offset(v, *values) for v in range(size(values[0]))]", "sorted(first + offset(v, *values) for v in range(size(values[0])))", "not sorted"),
    ("43.3", "offset(v, *values)", "offset(v, values)", "*pair passes the elements"),
    ("43.3", "return [first + offset(v, *values) for v in range(size(values[0]))]", "yield from values", "A generator is returned"),
    ("43.3", "first + offset", "first * offset", "values(0) is 0: value 0 of the thread is at their sum"),
    ("43.3", "offset(thread, *threads)", "threads(thread)", "A tuple is called like a function"),
]  # fmt: skip

RIGHT = [
    ("43.1", LOAD, "np.where(c < C, load(program_id() * C + c, c < C, 0.0), -np.inf)"),
    ("43.2", "isinstance(shape, int)", "not isinstance(shape, tuple)"),
    ("43.3", "[first + offset(v, *values) for v in range(size(values[0]))]", "list(map(lambda v: offset(v, *values) + first, range(size(values[0]))))"),
    ("43.3", "[first + offset(v, *values) for", "[offset(thread + size(threads[0]) * v, (threads[0], values[0]), (threads[1], values[1])) for"),
]  # fmt: skip
