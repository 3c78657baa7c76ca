"""Exercises of lesson 23: beyond one card and one kind of kernel."""

import numpy as np

from .attempt import exercise


def silu(x):
    return x / (1 + np.exp(-x))


@exercise(
    "23.1", "mlp_shares",
    first_step="rank r owns some of the hidden numbers: rows of w1, and the columns of w2 that belong to the SAME hidden numbers.",
    kernel=False,
)  # fmt: skip
def mlp_shares(e):
    for N, C, F, ranks in ((3, 4, 6, 1), (3, 4, 6, 2), (2, 5, 12, 4), (2, 6, 6, 3)):
        x, w1, w2 = (np.asarray(e.normal(*s)).astype(np.float64) for s in ((N, C), (F, C), (C, F)))
        got = e.call(
            x, w1, w2, ranks, case=f"x ({N}, {C}), w1 ({F}, {C}), w2 ({C}, {F}), {ranks} ranks"
        )
        e.need(
            isinstance(got, list) and len(got) == ranks,
            f"Return a list with one array for each of the {ranks} ranks.",
        )
        want = silu(x @ w1.T) @ w2.T
        part = F // ranks
        mine = slice(0, part)
        first = silu(x @ w1[mine].T) @ w2[:, mine].T
        e.need(
            np.shape(got[0]) == (N, C),
            f"The share of rank 0 has shape {np.shape(got[0])}: each is (N, C), as large as the result, and they are added up.",
        )
        total = sum(np.asarray(s) for s in got)
        e.need(
            ranks == 1 or not np.allclose(got[0], want),
            "Every rank computes the whole: nothing is divided. Rank r may use F / ranks rows of w1 and columns of w2.",
        )
        inputs = (
            sum(silu(x[:, s] @ w1[:, s].T) @ w2.T for s in _slices(C, ranks))
            if C % ranks == 0
            else None
        )
        e.same("the sum of the shares", total, want, {
            "w1 was divided along its inputs. The sum over inputs would have to be complete BEFORE silu, which does not add up: "
            "silu(a + b) is not silu(a) + silu(b).": inputs if inputs is not None else np.empty(0),
            "silu is missing between the two products.": (x @ w1.T) @ w2.T,
            "The columns of w2 do not belong to the rows of w1: both are r F / ranks to (r + 1) F / ranks.":
                lambda got: np.allclose(np.shape(got), (N, C)),
        }, rtol=1e-6)  # fmt: skip
        e.same("the share of rank 0", np.asarray(got[0]), first, rtol=1e-6)


def _slices(n, parts):
    return [slice(i * n // parts, (i + 1) * n // parts) for i in range(parts)]


@exercise(
    "23.2", "fsdp_bytes",
    first_step="each rank keeps 1 / ranks of every layer's weights for good. How many whole layers must be there at one moment?",
    kernel=False,
)  # fmt: skip
def fsdp_bytes(e):
    for layers, size, ranks, ahead in (
        (4, 100, 1, 0),
        (32, 800, 8, 0),
        (32, 800, 8, 1),
        (10, 64, 4, 2),
    ):
        got = e.call(
            layers,
            size,
            ranks,
            ahead,
            case=f"{layers} layers of {size} bytes, {ranks} ranks, {ahead} gathered ahead",
        )
        want = layers * size // ranks + (1 + ahead) * size if ranks > 1 else layers * size
        if got == want:
            continue
        e.need(got is not None and np.ndim(got) == 0, "Return one number.")
        say = f"It says {got}; expected {want}."
        if got == layers * size:
            say += " That is everything on every rank: data parallel without sharding."
        elif got == layers * size // ranks:
            say += " To compute a layer, its whole weights must be there: gathered from all ranks, used, and dropped."
        elif ahead and got == layers * size // ranks + size:
            say += " While a layer is computed the next ones are gathered already: they take memory, too."
        elif ranks == 1:
            say += " A single rank has all of it anyway; nothing is gathered."
        raise e.wrong(say)


@exercise(
    "23.3", "finish_time",
    first_step="two lists, when each load ends and when each computation ends. Tile i needs a free buffer: computation i - stages must be over.",
    kernel=False,
)  # fmt: skip
def finish_time(e):
    for tiles, load, compute, stages in (
        (3, 2.0, 3.0, 1),
        (3, 2.0, 3.0, 2),
        (4, 3.0, 1.0, 2),
        (5, 1.0, 2.0, 3),
        (1, 2.0, 3.0, 4),
    ):
        got = e.call(
            tiles,
            load,
            compute,
            stages,
            case=f"{tiles} tiles, load {load:g}, compute {compute:g}, {stages} buffers",
        )
        loaded, done = [], []
        for i in range(tiles):
            begin = max(loaded[-1] if loaded else 0, done[i - stages] if i >= stages else 0)
            loaded.append(begin + load)
            done.append(max(loaded[i], done[-1] if done else 0) + compute)
        if got is not None and np.ndim(got) == 0 and np.isclose(float(got), done[-1]):
            continue
        e.need(
            got is not None and np.ndim(got) == 0,
            "Return one number, the time at which the last computation ends.",
        )
        say = f"It says {got:g}; expected {done[-1]:g}."
        if np.isclose(got, tiles * (load + compute)):
            say += " That is one after the other. With several buffers the next tile is loaded while this one is computed."
        elif np.isclose(got, tiles * max(load, compute)):
            say += " The first load cannot overlap anything: nobody has something to compute yet."
        elif np.isclose(got, load + tiles * compute) or np.isclose(got, tiles * load + compute):
            say += " A load needs a free buffer: tile i waits until the computation of tile i - stages is over."
        raise e.wrong(say)
