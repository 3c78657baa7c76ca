"""Exercises of lesson 32: a ring all-reduce, tensor parallelism, sharded weights. The ranks of an attempt are threads."""

import weakref
from itertools import pairwise

import numpy as np

from .attempt import Wrong, exercise
from .ranks import RankError, run_ranks

STUCK = "Every rank must make the same calls in the same order: do not put them in an `if` or a loop that differs between ranks."


def double(a):
    return np.asarray(a).astype(np.float64)


def part(n, world, rank):
    return slice(n * rank // world, n * (rank + 1) // world)


def on_ranks(e, world, arguments, wrap=lambda comm: comm):
    """Run the reader's function on ranks. arguments(rank): the arguments after comm. -> results, communicators"""
    comms = [None] * world

    def work(comm):
        comms[comm.rank] = comm
        try:
            with e.on_rank(comm.rank):
                return e.call(wrap(comm), *arguments(comm.rank))
        except Wrong as wrong:
            where = "" if "rank" in str(wrong).split("\n", 1)[-1] else f"\n  On rank {comm.rank}."
            raise Wrong(f"{wrong}{where}") from None

    try:
        return run_ranks(world, work), comms
    except RankError as error:  # all ranks wait
        raise e.wrong(f"{error}\n{STUCK}") from None


# ----------------------------------------------------------------------------- 32.1
UNEVEN = "The last elements are unchanged: world does not divide n here. The chunks are part(n, world, i), of different sizes."


class ExchangeOnly:
    """A communicator without collectives, which notes to whom it sends."""

    def __init__(self, comm, partners, e):
        self._comm, self._partners = comm, partners
        self.rank, self.world = comm.rank, comm.world
        self._e = e

    def exchange(self, send, to, receive, source):
        for name, a in (("send", send), ("receive", receive)):
            if not isinstance(a, np.ndarray):
                raise RankError(f"exchange: `{name}` must be an array, not {type(a).__name__}")
        self._partners.update({(self.rank, to), (source, self.rank)})
        self._comm.exchange(send, to, receive, source)

    def all_reduce(self, *_):
        raise self._e.wrong("use comm.exchange only: here you write the all-reduce yourself")

    all_gather = reduce_scatter = all_reduce


def ring(given, minus=1, halves=2, adds=(True, False)):
    """The result of a ring all-reduce with a mistake, a row per rank.

    minus: in the first half, the chunk received in step s is r - s - minus. adds: are chunks added, in each half?
    """
    world, x = len(given), np.array([double(g) for g in given])
    n, steps = x.shape[1], range(len(given) - 1)
    plan = [(s, 0, minus, adds[0]) for s in steps]
    plan += [(s, 1, 0, adds[1]) for s in steps if halves == 2]
    for s, begin, minus, add in plan:
        before = x.copy()
        for r in range(world):
            sent = before[r - 1][part(n, world, (r - 1 + begin - s) % world)]
            own = x[r][part(n, world, (r - s - minus) % world)]
            if own.shape != sent.shape:
                return np.full_like(x, np.nan)
            own[...] = own + sent if add else sent
    return x


def passed_on(given):
    """Whole arrays, each summed in place before it is passed on."""
    x = np.array([double(g) for g in given])
    for _ in range(len(given) - 1):
        x = x + np.roll(x, 1, axis=0)
    return x


def counted(e, world, n, rank, at):
    """How often the result x[at] on this rank contains each rank's number; None if it is not a sum of them."""
    base = 32.0
    x = [np.full(n, base**r) for r in range(world)]
    try:
        on_ranks(e, world, lambda r: (x[r],), lambda comm: ExchangeOnly(comm, set(), e))
    except Wrong:
        return None
    value, times = x[rank][at], []
    if not 0 <= value < base ** (world + 1):  # also NaN
        return None
    for r in reversed(range(world)):
        times.insert(0, int(value // base**r))
        value -= times[0] * base**r
    return None if value or max(times) >= base else times


def what_it_contains(e, world, n, rank, at):
    times = counted(e, world, n, rank, at)
    if times is None:
        return ""
    if set(times) == {1}:
        return "It contains a number of every rank once, but of another element: a chunk was stored in the place of another one."
    said = ", ".join(f"of rank {r} {k} times" for r, k in enumerate(times) if k != 1)
    return (
        f"It contains the number {said}; it should contain each rank's number once. In each step a rank passes on the chunk that it received in "
        "the step before. The first half has world - 1 steps that add, the second half world - 1 steps that store."
    )


@exercise(
    "32.1", "ring_all_reduce",
    first_step="in step 0 rank r sends chunk r to rank r + 1, and receives chunk r - 1 from rank r - 1, all modulo world. What does it do with what it receives?",
    hints={
        "RankError": "In a step, the chunk that a rank receives is the one that its left neighbour sends. Chunks may have different sizes: "
        "receive into np.empty_like(chunk). Take every index modulo world.",
        "ValueError": "Chunks may have different sizes: receive into np.empty_like(chunk), and take every chunk index modulo world.",
    },
    kernel=False,
)  # fmt: skip
def ring_all_reduce(e):
    draw = lambda rng: (rng.integers(2, 7), rng.integers(7, 40))
    fixed = (4, 8), (3, 9), (2, 4), (1, 5), (3, 7), (4, 2)
    for world, n in e.cases(fixed, draw, times=3):
        given = [np.array(e.normal(n)) for _ in range(world)]
        x, partners = [g.copy() for g in given], set()
        e.case(f"{world} ranks, {n} elements")
        _, comms = on_ranks(
            e, world, lambda r: (x[r],), lambda comm: ExchangeOnly(comm, partners, e)
        )
        want = sum(map(double, given))
        halves = {
            "The array is unchanged: work in place, x_n[...] = ...": np.array(given),
            "That is the mean: return the sum.": np.array([want / world] * world),
            "The second half is missing: each rank has one complete chunk. It must travel around the ring once more, and be stored.":
                ring(given, halves=1),
            "In the second half, store what you receive: it is already the sum. Here it was added.": ring(given, adds=(True, True)),
            "Chunk c is rank c's own on every rank: nothing was added. Either the first half stores what it should ADD, or the second half begins with "
            "chunk r, where the complete one is chunk r + 1.": ring(given, adds=(False, False)),
            "Either the first half has one step too few, where world - 1 are needed; or what is received was added to the chunk that was just sent. In step s, rank r sends chunk r - s and receives chunk r - s - 1.":
                ring(given, minus=0),
            "Whole sums are passed on: what rank r sends contains its own numbers and those that it received, so some are added again and again. "
            "Pass on one chunk at a time.": passed_on(given),
        }  # fmt: skip
        for r in range(world):
            mistakes = {text: sign[r] for text, sign in halves.items() if world > 1}
            fits = np.isclose(x[r], want, rtol=1e-5, atol=1e-5)
            if not fits.all():
                known = any(np.allclose(x[r], sign, 1e-5, 1e-5) for sign in mistakes.values())
                rest = n % world
                same = rest and np.array_equal(x[r][-rest:], given[r][-rest:])
                uneven = same and not fits[-rest:].any() and fits[:-rest].all()
                text = (
                    UNEVEN
                    if uneven
                    else ""
                    if known
                    else what_it_contains(e, world, n, r, int(np.argmin(fits)))
                )
                mistakes[text] = lambda got, text=text: bool(text)
            e.same(f"x on rank {r}", x[r], want, mistakes, rtol=1e-5, atol=1e-5)
        for r in range(1, world):
            e.need(np.array_equal(x[r], x[0]),
                   f"The sums are right, but rank {r} does not have the same bits as rank 0: they added in different orders. Let each chunk be "
                   "summed along one path, and then copied.")  # fmt: skip
        far = [(a, b) for a, b in partners if (b - a) % world not in (0, 1, world - 1)]
        e.need(not far, f"Rank {far and far[0][0]} sends to rank {far and far[0][1]}: in a ring each rank sends only to a neighbour.")  # fmt: skip
        least, most = 2 * (n - n // world), max(comm.sent for comm in comms)
        e.need(most <= least, f"The sums are right, but a rank sends {most} numbers where {least} are enough: send chunks, not whole arrays, "
               "and each half has world - 1 steps.")  # fmt: skip


# ----------------------------------------------------------------------------- 32.2
def silu(x):
    return x / (1 + np.exp(-x))


def silu_slope(x):
    s = 1 / (1 + np.exp(-x))
    return s + x * s * (1 - s)


def mlp(x, w1, w2, dy, act=silu, slope=silu_slope):
    h = x @ w1.T
    a = act(h)
    dh = (dy @ w2) * slope(h)
    return a @ w2.T, dh @ w1, dh.T @ x, dy.T @ a


@exercise(
    "32.2", "split_mlp",
    first_step="write the forward pass of an ordinary MLP with the given weights. The result is only this rank's share of y: which collective completes it?",
    hints={
        "ValueError": "w1 is (F, C), w2 is (C, F), with this rank's F hidden units: h = x @ w1.T is (N, F), y = silu(h) @ w2.T is (N, C). The weights are "
        "already divided.",
        "RankError": "Only y and dx have the same shape on all ranks: weights and hidden units are the rank's own, and are not reduced.",
    },
    kernel=False,
)  # fmt: skip
def split_mlp(e):
    draw = lambda rng: (*rng.integers(2, 6, 2), rng.integers(5, 16), rng.integers(2, 6))
    fixed = (3, 4, 6, 2), (3, 4, 6, 1), (2, 5, 9, 3), (3, 3, 7, 3)
    for N, C, F, world in e.cases(fixed, draw, times=2):
        x, w1, w2, dy = (double(e.normal(*s)) for s in ((N, C), (F, C), (C, F), (N, C)))
        units = [part(F, world, r) for r in range(world)]
        given = [(x.copy(), w1[u].copy(), w2[:, u].copy(), dy.copy()) for u in units]
        e.case(f"x ({N}, {C}), {F} hidden units on {world} ranks")
        results, comms = on_ranks(e, world, lambda r: given[r])
        own = [mlp(x, w1[u], w2[:, u], dy) for u in units]
        Y, DX, DW1, DW2 = mlp(x, w1, w2, dy)
        plain = mlp(x, w1, w2, dy, act=lambda h: h)
        straight = [mlp(x, w1[u], w2[:, u], dy, slope=np.ones_like) for u in units]
        at_a = [mlp(x, w1[u], w2[:, u], dy, slope=lambda h: silu_slope(silu(h))) for u in units]
        even = len({u.stop - u.start for u in units}) == 1
        summed = lambda i: sum(o[i] for o in own) if even else np.empty(0)
        added = silu(sum(x @ w1[u].T for u in units)) if even else None
        again = [part(u.stop - u.start, world, r) for r, u in enumerate(units)]
        twice = [mlp(x, w1[u][a], w2[:, u][:, a], dy)[0] for u, a in zip(units, again)]
        da = sum(dy @ w2[:, u] for u in units) if even else None
        dh = (
            [da * silu_slope(x @ w1[u].T) @ w1[u] for u in units]
            if even and world > 1
            else [np.empty(0)] * world
        )
        mixed = [added @ w2[:, u].T for u in units] if even and world > 1 else [np.empty(0)] * world
        several = world > 1
        for r, result in enumerate(results):
            y, dx, dw1, dw2 = e.several(result, "y", "dx", "dw1", "dw2")
            names = ("x_NC", "w1_FC", "w2_CF", "dy_NC")
            for name, a, b in zip(names, given[r], (x, w1[units[r]], w2[:, units[r]], dy)):
                e.need(np.array_equal(a, b), f"{name} has changed on rank {r}. comm.all_reduce works in place: call it on new arrays only, not on an argument.")  # fmt: skip
            slopes = {
                "silu_slope is missing: dh = (dy @ w2) * silu_slope(h).": straight,
                "silu_slope is taken at silu(h): it is the slope at h.": at_a,
            }
            for name, got, want in (("dw1", dw1, DW1), ("dw2", dw2, DW2)):
                e.need(not several or np.shape(got) != want.shape, f"{name} has shape {np.shape(got)}, the whole weight: each rank computes with its own hidden units only, "
                       "so weights are never gathered.")  # fmt: skip
            e.same(f"y on rank {r}", y, Y, {
                "The weights were divided a second time: the arguments are already this rank's own.":
                    lambda got, twice=twice: several and np.allclose(got, sum(twice)),
                "This is this rank's share: y is the sum over all hidden units, so all-reduce the shares.": own[r][0] if several else np.empty(0),
                "That is the mean over the ranks: the shares are added.": Y / world if several else np.empty(0),
                "silu is missing between the two products.": plain[0],
                "The hidden units of the ranks are added, but they are different units: each rank keeps its own, and only the shares of y are added.":
                    lambda got, r=r, mixed=mixed: any(np.shape(m) == got.shape and np.allclose(got, m) for m in (mixed[r], sum(mixed))),
                "y was summed over the ranks twice.": Y * world if several else np.empty(0),
            }, rtol=1e-7, atol=1e-9)  # fmt: skip
            e.same(f"dx on rank {r}", dx, DX, {
                "dx is not reduced: every hidden unit depends on x, and this rank has only its own. All-reduce dh @ w1: that is f's backward.":
                    own[r][1] if several else np.empty(0),
                "dx is too large by the number of ranks: dy is the gradient of the whole y and is whole on every rank, so it must not be summed; and dx only once.":
                    DX * world if several else np.empty(0),
                "That is the mean over the ranks: the contributions to dx are added.": DX / world if several else np.empty(0),
                "dy @ w2 is summed over the ranks: it is the gradient of this rank's own hidden units. Sum dh @ w1 instead.":
                    lambda got, r=r, dh=dh: any(np.shape(d) == got.shape and np.allclose(got, d) for d in (dh[r], sum(dh))),
                **{text: sum(o[1] for o in wrong) for text, wrong in slopes.items()},
            }, rtol=1e-7, atol=1e-9)  # fmt: skip
            for name, i, got, axis in (("dw1", 2, dw1, 0), ("dw2", 3, dw2, 1)):
                want = (DW1[units[r]], DW2[:, units[r]])[axis]
                e.same(f"{name} on rank {r}", got, want, {
                    f"{name} is summed over the ranks, but they have different hidden units: their gradients do not belong together.":
                        summed(i) if several else np.empty(0),
                    f"{name} is too large by the number of ranks: dy is whole on every rank and must not be summed.": want * world if several else np.empty(0),
                    f"{name} is too small by the number of ranks: nothing is averaged here.": want / world if several else np.empty(0),
                    "dw2 belongs to the second product, whose input is silu(h), not h.": plain[3][:, units[r]] if i == 3 else np.empty(0),
                    **{text: wrong[r][i] for text, wrong in slopes.items() if i == 2},
                }, rtol=1e-7, atol=1e-9)  # fmt: skip
            least = 4 * -(-N * C // world) * (world - 1)
            e.need(comms[r].sent <= least, f"The results are right, but rank {r} sends {comms[r].sent} numbers where {least} are enough: two all-reduces of (N, C), "
                   "one in forward and one in backward. Neither weights nor hidden units are sent.")  # fmt: skip


# ----------------------------------------------------------------------------- 32.3
@exercise(
    "32.3", "own_weights",
    first_step="which key heads does the rank own? part(G, world, rank). Each has D rows in k_proj and v_proj, and belongs to H / G query heads.",
    hints={
        "KeyError": "The names are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, input_layernorm, post_attention_layernorm.",
    },
    kernel=False,
)  # fmt: skip
def own_weights(e):
    def draw(rng):
        G = rng.integers(2, 6)
        return rng.integers(1, G + 1), G * rng.integers(1, 4), G, *rng.integers(2, 5, 2), rng.integers(5, 14)  # fmt: skip

    #        world, H, G, D, C, F
    fixed = (2, 8, 4, 2, 16, 6), (1, 2, 2, 2, 3, 4), (3, 6, 3, 2, 12, 9), (3, 8, 4, 3, 7, 10), (2, 3, 3, 4, 12, 12)  # fmt: skip
    for world, H, G, D, C, F in e.cases(fixed, draw, times=4):
        shapes = {
            "q_proj": (H * D, C), "k_proj": (G * D, C), "v_proj": (G * D, C), "o_proj": (C, H * D), "gate_proj": (F, C), "up_proj": (F, C),
            "down_proj": (C, F), "input_layernorm": (C,), "post_attention_layernorm": (C,),
        }  # fmt: skip
        w = {name: np.array(e.normal(*shape)) for name, shape in shapes.items()}
        for rank in range(world):
            case = f"rank {rank} of {world}, {H} query heads, {G} key heads of width {D}, C = {C}, F = {F}"
            got = e.call(rank, world, {n: a.copy() for n, a in w.items()}, H, G, case=case)
            e.need(isinstance(got, dict), f"Return a dict, not {type(got).__name__}.")
            for name, a in w.items():
                e.need(name in got, f"{name} is missing in the result. (The norms are whole on every rank.)")  # fmt: skip
                _one_weight(e, name, got[name], a, rank, world, H, G, D)
            more = sorted(map(str, got.keys() - w.keys()))
            e.need(not more, f"The result has {', '.join(more)} in addition: keep the names of w.")


def _one_weight(e, name, got, a, rank, world, H, G, D):
    if "norm" in name:
        e.need(np.shape(got) == a.shape, f"{name} has shape {np.shape(got)}, expected {a.shape}: a norm needs all C numbers of a token, so its weight is whole on every rank.")  # fmt: skip
        return e.same(name, got, a)
    axis = int(name in ("o_proj", "down_proj"))
    number = {"q_proj": H, "o_proj": H, "k_proj": G, "v_proj": G}.get(name)  # of heads
    take = lambda where, axis=axis: a[:, where] if axis else a[where]

    def own(r):
        if number is None:
            return part(a.shape[axis], world, r)
        heads, width = part(G, world, r), D * number // G
        return slice(heads.start * width, heads.stop * width)

    want, things = take(own(rank)), "columns" if axis else "rows"
    if number:
        alone = part(number, world, rank)
        signs = {
            "Whole groups: a rank's query heads are those that use its key heads, keys.start * (H // G) to keys.stop * (H // G) - 1.":
                take(slice(alone.start * D, alone.stop * D)),
            f"A head is cut in two: divide the heads, not the {things}, and then take all D {things} of each head.": take(part(number * D, world, rank)),
            f"A head has D = {D} {things}, and here it has one.": take(slice(own(rank).start // D, own(rank).stop // D)),
            "These are every world-th head: a rank has neighbouring ones.": take([h * D + d for h in range(rank, number, world) for d in range(D)]),
        }  # fmt: skip
    else:
        signs = {
            "These are every world-th hidden unit: a rank has neighbouring ones, part(F, world, rank).": take(slice(rank, None, world)),
        }  # fmt: skip
    if number == H:
        used = [h for h in range(H) if h % G in range(G)[part(G, world, rank)]]
        signs["Query heads g H / G to (g + 1) H / G - 1 use key head g: they are neighbours, not every G-th head."] = take(
            [h * D + d for h in used for d in range(D)])  # fmt: skip
    signs[f"The whole of {name} is there: this rank needs only a part of it."] = a
    right = "its inputs are the COLUMNS, w[:, ...]" if axis else "its outputs are the ROWS, w[...]"
    signs[f"It is divided along the wrong axis: weights are (out, in), {right}."] = a[own(rank)] if axis else a[:, own(rank)]  # fmt: skip
    wrong_way = part(a.shape[1 - axis], world, rank)
    signs[f"It is cut along the wrong axis: weights are (out, in), {right}."] = a[wrong_way] if axis else a[:, wrong_way]  # fmt: skip
    for r in range(world):
        signs.setdefault(f"This is the part of rank {r}, of {world}.", take(own(r)))
    for text, sign in signs.items():
        e.need(np.array_equal(sign, want) or not np.array_equal(got, sign), f"{name}: {text}")
    e.same(name, got, want)


# ----------------------------------------------------------------------------- 32.4
def layer(x, w):
    return np.tanh(x @ w.T)


def flatten(w, world):
    flat = np.zeros(-(-w.size // world) * world)
    flat[: w.size] = w.reshape(-1)
    return flat


def gradients(weights, x, t, count, back=None, order=-1, slope_of_back=False, outputs=False):
    """-> loss, [dw]. back: other weights, with which backward passes the gradient on. order=1: it begins with the first layer.

    slope_of_back: the slopes that are passed on are those of `back` too. outputs: backward takes a layer's output for its input.
    """
    inputs = [x]
    for w in weights:
        inputs.append(layer(inputs[-1], w))
    error = inputs[-1] - t
    inputs = inputs[1:] if outputs else inputs[:-1]
    dy, found = 2 * error / count, []
    for x, w, b in list(zip(inputs, weights, back or weights))[::order]:
        dh = dy * (1 - layer(x, w) ** 2)
        found.append(dh.T @ x)
        if slope_of_back:
            dh = dy * (1 - layer(x, b) ** 2)
        dy = dh @ b
    return (error**2).sum() / count, found[::order]


class AdamW:
    """In place, on any part of the weights."""

    def __init__(self, like):
        self.state = [[np.zeros_like(a), np.zeros_like(a), 0] for a in like]

    def __call__(self, l, w, g):
        m, v, steps = self.state[l]
        self.state[l][2] = steps = steps + 1
        m += 0.1 * (g - m)
        v += 0.01 * (g * g - v)
        w *= 1 - 0.02 * 0.1
        w -= 0.02 * m / (1 - 0.9**steps) / (np.sqrt(v / (1 - 0.99**steps)) + 1e-8)


class Gathering:
    """A communicator that counts how many gathered layers are alive."""

    def __init__(self, comm, e):
        self._comm, self._e, self._alive = comm, e, []
        self.rank, self.world = comm.rank, comm.world
        self.reduce_scatter, self.exchange = comm.reduce_scatter, comm.exchange
        self.gathered = 0

    def all_gather(self, shard):
        self.gathered += 1
        whole = self._comm.all_gather(shard)
        self._alive = [a for a in self._alive if a() is not None] + [weakref.ref(whole)]
        self._e.need(len(self._alive) <= 2, f"On rank {self.rank}, {len(self._alive)} layers are in memory as a whole at the same time. Keep the inputs of the layers, "
                    "not their weights: gather each layer again in backward.")  # fmt: skip
        return whole

    def all_reduce(self, x):
        self._e.need(isinstance(x, np.ndarray) and x.ndim > 0, "all_reduce works in place, on an array: make the loss an array of one number, (error**2).sum().reshape(1).")  # fmt: skip
        self._e.need(self.world == 1 or np.size(x) == 1, f"all_reduce of {np.size(x)} numbers: each rank needs only its part of the gradient. reduce_scatter sends half as much.")  # fmt: skip
        return self._comm.all_reduce(x)


@exercise(
    "32.4", "fsdp_step",
    first_step="forward: for every shard, w = square(comm.all_gather(shard), C), then the next input is layer(input, w). Keep the inputs.",
    hints={
        "ValueError": "A shard and a gathered layer are flat: square(comm.all_gather(shard), C) is (C, C), and flatten(dw, comm.world) is flat again.",
        "RankError": "reduce_scatter needs flatten(dw, comm.world), and the loss is reduced as an array of one number.",
    },
    kernel=False,
)  # fmt: skip
def fsdp_step(e):
    draw = lambda rng: (rng.integers(3, 6), rng.integers(2, 6), rng.integers(1, 4, rng.integers(2, 5)).tolist())  # fmt: skip
    fixed = (3, 4, [2, 2, 2]), (3, 3, [4]), (2, 3, [1, 2]), (4, 3, [1, 2, 3])
    for layers, C, rows in e.cases(fixed, draw, times=2):
        world, count = len(rows), sum(rows) * C
        e.case(f"{layers} layers ({C}, {C}), {world} ranks with {', '.join(map(str, rows))} rows")
        _train(e, layers, C, rows, world, count)


def _train(e, layers, C, rows, world, count):
    weights = [double(e.normal(C, C, mean=0.1)) for _ in range(layers)]
    x, t = (double(e.normal(sum(rows), C)) for _ in range(2))
    ends = np.cumsum([0, *rows])
    own = [(x[a:b], t[a:b]) for a, b in pairwise(ends)]
    n = -(-C * C // world)
    cut = lambda w, r: flatten(w, world)[n * r : n * (r + 1)]
    shards = [[cut(w, r).copy() for w in weights] for r in range(world)]
    optimizers, whole, start = [AdamW(s) for s in shards], AdamW(weights), None
    for step in range(2):
        loss, want = gradients(weights, x, t, count)
        later = [w.copy() for w in weights]
        after = AdamW(weights)
        after.state = [[m.copy(), v.copy(), k] for m, v, k in whole.state]
        for l in range(layers):
            after(l, later[l], want[l])
        updated_first = [
            gradients(weights, x, t, count, later, slope_of_back=s)[1] for s in (False, True)
        ]
        of_outputs = gradients(weights, x, t, count, outputs=True)[1]
        per_rank = [gradients(weights, *o, count) for o in own]
        own_count = [gradients(weights, *o, len(o[0]) * C)[1] for o in own]
        forwards = gradients(weights, x, t, count, order=1)[1]
        stale = gradients(start, x, t, count)[1] if start else None
        done = [[0] * layers for _ in range(world)]

        def update_of(
            r, want=want, per_rank=per_rank, own_count=own_count, done=done,
            updated_first=updated_first, stale=stale, forwards=forwards, of_outputs=of_outputs,
        ):  # fmt: skip
            def update(l, shard, g):
                e.need(isinstance(l, int | np.integer) and 0 <= l < layers, f"update was called for layer {l}: layers are 0 to {layers - 1}.")  # fmt: skip
                e.need(isinstance(shard, np.ndarray) and np.shares_memory(shard, shards[r][l]),
                       f"update({l}, ...) on rank {r}: its second argument must be shards[{l}] itself, which it changes in place.")  # fmt: skip
                e.need(np.shape(g) != (C, C), f"update gets the whole dw of layer {l}: a rank updates only its shard, with comm.reduce_scatter(flatten(dw, comm.world)).")  # fmt: skip
                e.need(np.shape(g) == (n,), f"The gradient of layer {l} on rank {r} has shape {np.shape(g)}, its shard {(n,)}: reduce_scatter the flat gradient, flatten(dw, comm.world).")  # fmt: skip
                here = lambda grads: cut(grads[l], r)
                signs = {
                    "This is the gradient of this rank's rows alone: reduce_scatter adds those of all ranks.": here(per_rank[r][1]),
                    "This is the mean over the ranks. The loss is divided by the count of the WHOLE batch, so the ranks' gradients are added.": here(want) / world,
                    "Each rank divided by the number of its own targets: divide by `count`, the number in the whole batch.": cut(sum(o[l] for o in own_count), r),
                    "The gradient is not divided by `count`.": here(want) * count,
                    "The factor 2 of the derivative of a square is missing.": here(want) / 2,
                    "The sign is wrong: the error is y - t.": -here(want),
                    "dy was computed with weights that had already been updated. Finish with a layer's old weights before you update its shard.": here(updated_first[0]),
                    "dy was computed with weights that had already been updated. Finish with the old weights of a layer before you update its shard.":
                        here(updated_first[1]),
                    "layer_bwd(dy, x, w) takes the layer's INPUT x: layer l has inputs[l], where inputs[0] is x_NC.": here(of_outputs),
                    "Backward goes from the last layer to the first.": here(forwards),
                    "This gradient belongs to the weights before the last step: the layers must be gathered again, from the new shards.":
                        here(stale) if stale else np.empty(0),
                }  # fmt: skip
                signs = {
                    text: a for text, a in signs.items() if a.shape == (n,) and not np.allclose(a, here(want))
                }  # fmt: skip
                for other in range(world):
                    if other != r and not np.allclose(cut(want[l], other), here(want)):
                        signs[f"This is the part of rank {other}."] = cut(want[l], other)
                e.same(f"the gradient of layer {l} on rank {r}", g, here(want), signs, rtol=1e-7, atol=1e-10)  # fmt: skip
                done[r][l] += 1
                optimizers[r](l, shard, g)

            return update

        arguments = lambda r: (shards[r], own[r][0].copy(), own[r][1].copy(), count, update_of(r))
        gathering = []

        def wrapped(comm, gathering=gathering):
            gathering.append(Gathering(comm, e))
            return gathering[-1]

        results, _ = on_ranks(e, world, arguments, wrapped)
        for r in range(world):
            for l, k in enumerate(done[r]):
                e.need(k == 1, f"On rank {r}, update was called {k} times for layer {l}: once per layer and step.")  # fmt: skip
            e.need(
                results[r] is not None, "Nothing is returned: return the loss of the whole batch."
            )
            value = np.asarray(results[r])
            e.need(value.size == 1, f"The loss has shape {value.shape}: return one number.")
            e.same("the loss", value.reshape(()), np.float64(loss), {
                "This is the share of one rank's rows: all-reduce it.": np.float64(per_rank[r][0]) if world > 1 else np.empty(0),
                "This is the mean over the ranks: each share is already divided by `count`.": np.float64(loss / world) if world > 1 else np.empty(0),
                "The loss is not divided by `count`.": np.float64(loss * count),
            }, rtol=1e-7)  # fmt: skip
        fewest = min(comm.gathered for comm in gathering)
        e.need(fewest >= 2 * layers - 2, f"The results are right, but {fewest} layers were gathered for forward and backward of {layers}: copies of whole layers stayed in memory. "
               "Keep the inputs of the layers, not their weights: gather each layer again in backward.")  # fmt: skip
        start = [w.copy() for w in weights]
        for l in range(layers):
            whole(l, weights[l], want[l])
            for r in range(world):
                e.same(f"shard {l} of rank {r} after step {step}", shards[r][l], cut(weights[l], r), {
                    "The shard is unchanged: update changes it in place.": cut(start[l], r),
                }, rtol=1e-6, atol=1e-8)  # fmt: skip


# ----------------------------------------------------------------------------- 32.5
@exercise(
    "32.5", "fsdp_bytes",
    first_step="each rank permanently stores 1 / ranks of the weights of every layer. How many whole layers must be in memory at the same time?",
    kernel=False,
)  # fmt: skip
def fsdp_bytes(e):
    fixed = (
        (4, 100, 1, 0),
        (32, 800, 8, 0),
        (32, 800, 8, 1),
        (10, 64, 4, 2),
    )
    draw = lambda rng: (
        rng.integers(5, 90),
        64 * rng.integers(1, 90),
        2 ** rng.integers(1, 7),
        rng.integers(0, 4),
    )
    for layers, size, ranks, ahead in e.cases(fixed, draw, times=5):
        got = e.call(
            layers,
            size,
            ranks,
            ahead,
            case=f"{layers} layers of {size} bytes, {ranks} rank{'s' * (ranks > 1)}, {ahead} gathered ahead",
        )
        want = layers * size // ranks + (1 + ahead) * size if ranks > 1 else layers * size
        if got == want:
            continue
        e.need(got is not None and np.ndim(got) == 0, "Return one number.")
        say = f"It returns {got}; expected {want}."
        if got == layers * size:
            say += " This is everything on every rank: data parallelism without sharding."
        elif got == layers * size // ranks:
            say += " To compute a layer, all its weights must be in memory: gathered from all ranks, used, and freed."
        elif ahead and got == layers * size // ranks + size:
            say += " While a layer is computed, the next ones are already gathered: they need memory too."
        elif ranks > 1 and got == layers * size / ranks + (1 + ahead) * size * (ranks - 1) / ranks:
            say += " A gathered layer is a whole new array, which includes a copy of the rank's own part: layer_bytes each."
        elif got == layers * size / ranks + ahead * size and ahead:
            say += " The layer that is being computed is in memory as a whole, in addition to those gathered ahead."
        elif ranks > 1 and got == layers * size / ranks + (1 + ahead) * size / ranks:
            say += " A gathered layer is whole: it takes layer_bytes, not a part of them."
        elif ranks == 1:
            say += " A single rank already has all weights; nothing is gathered."
        raise e.wrong(say)
