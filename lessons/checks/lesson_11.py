"""Exercises of lesson 11: fusing."""

import tracemalloc

import numpy as np

from xtrain.kernels.residual import residual_rmsnorm_ref

from .attempt import exercise


@exercise(
    "11.1", "bytes_before_after",
    first_step="one by one, every kernel moves all that it reads and all that it writes. Fused: what must come in, what must go out?",
    hints={"TypeError": "kernels, reads, writes and kept hold names of arrays; the bytes of one are sizes[name]."},
    kernel=False,
)  # fmt: skip
def bytes_before_after(e):
    cases = {
        "an addition, then a norm; h is needed later": (
            [(["x", "r"], ["h"]), (["h"], ["y"])], {"x": 8, "r": 8, "h": 8, "y": 8}, ["h", "y"],
        ),
        "the same, h is not needed": (
            [(["x", "r"], ["h"]), (["h"], ["y"])], {"x": 8, "r": 8, "h": 8, "y": 8}, ["y"],
        ),
        "x is read by both kernels": (
            [(["x"], ["s"]), (["s", "x"], ["y"])], {"x": 100, "s": 10, "y": 1000}, ["y"],
        ),
        "three kernels, sizes differ": (
            [(["a"], ["b"]), (["b", "c"], ["d"]), (["d"], ["f"])], {"a": 1, "b": 20, "c": 300, "d": 4000, "f": 50000}, ["b", "f"],
        ),
    }  # fmt: skip
    for case, (kernels, sizes, kept) in cases.items():
        got = e.call(list(kernels), dict(sizes), list(kept), case=case)
        got = e.several(got, "before", "after")
        reads = [a for r, _ in kernels for a in r]
        writes = [a for _, w in kernels for a in w]
        total = lambda names: sum(sizes[a] for a in names)
        inputs = set(reads) - set(writes)
        before, after = total(reads) + total(writes), total(inputs) + total(kept)
        e.need(
            got != (after, before),
            "The two numbers are exchanged: first what the kernels move one after the other.",
        )
        e.same("the first number, before,", np.float64(got[0]), np.float64(before), {
            "Only what is read was counted: writing moves bytes too.": np.float64(total(reads)),
            "Only what is written was counted: reading moves bytes too.": np.float64(total(writes)),
            "Every array was counted once. One by one, an array is moved each time that a kernel reads or writes it.":
                np.float64(total(set(reads) | set(writes))),
        })  # fmt: skip
        e.same("the second number, after fusing,", np.float64(got[1]), np.float64(after), {
            "Everything that was made is written. Of that only `kept` must go to memory.": np.float64(total(inputs) + total(writes)),
            "That counts reading what the fused kernel itself has made. It is in registers: only arrays that no kernel of the list writes are read.":
                np.float64(total(set(reads)) + total(kept)),
            "An input that two kernels read is counted twice: the fused kernel loads it once.":
                np.float64(total(a for a in reads if a in inputs) + total(kept)),
            "What must be written is missing: the arrays in `kept`.": np.float64(total(inputs)),
        })  # fmt: skip


@exercise(
    "11.2", "residual_rmsnorm_kernel",
    first_step="thread c loads x[n, c] and r[n, c] and adds them into a variable h. That variable is all that the rest needs.",
    allow=("block_sum",),
    hints={
        "RaceError": "Thread c of block n owns h[n, c] and y[n, c]; one thread, c == 0, writes rstd_N[n].",
        "DeadlockError": "block_sum holds barriers: all threads call it, outside of any `if`.",
        "CollectiveError": "block_sum is for all threads of the block, so it stands outside of any `if`.",
    },
)  # fmt: skip
def residual_rmsnorm_kernel(e):
    eps = np.float32(1e-2)
    for N, C in ((2, 64), (3, 96), (1, 32)):
        x, r, w = e.normal(N, C), e.normal(N, C), e.normal(C)
        h, y, rstd = e.blank(N, C), e.blank(N, C), e.blank(N)
        case = f"{N} rows, {C} columns"
        trace = e.run(N, C, h, y, rstd, x, r, w, eps, case=case, trace=True)
        x64, r64, w64 = (np.asarray(a).astype(np.float64) for a in (x, r, w))
        want_h, want_y, want_rstd = residual_rmsnorm_ref(x64, r64, w64, float(eps))
        loads = sum(len(trace.requests(e.name(a))) for a in (x, r))
        again = trace.requests(e.name(h), write=False)
        of_x = 1 / np.sqrt(np.square(x64).mean(1) + eps)
        e.same("h", h, want_h, {
            "h was not written: the next block adds to it.": lambda got: not e.wrote(h).any(),
            "That is x alone: r was not added.": x64,
        }, rtol=1e-5)  # fmt: skip
        e.same("rstd", rstd, want_rstd, {
            "That is the norm of x alone: it is the sum x + r whose squares are added.": of_x,
            "The squares were added up but not divided by C.": 1 / np.sqrt(np.square(want_h).sum(1) + eps),
            "eps is missing under the root.": 1 / np.sqrt(np.square(want_h).mean(1)),
            "That is thread 0's own square alone: block_sum(h * h, partial) adds up the threads of the block.":
                1 / np.sqrt(np.square(want_h[:, 0]) / C + eps),
        }, rtol=1e-4)  # fmt: skip
        e.same("y", y, want_y, {
            "The weight w is missing.": want_h * want_rstd[:, None],
            "rstd is missing in y: y = h rstd w.": want_h * w64,
            "x stands where h belongs: y = h rstd w.": x64 * want_rstd[:, None] * w64,
        }, rtol=1e-4)  # fmt: skip
        e.need(
            not again,
            f"The numbers are right, but {e.name(h)} is read back from memory, which is what fusing should save. "
            "Keep the sum in a variable.",
        )
        e.need(
            loads == 2 * N * C // 32,
            f"The numbers are right, but {e.name(x)} or {e.name(r)} is read more than once. Keep the sum in a variable.",
        )


@exercise(
    "11.3", "swiglu_kernel",
    first_step="thread f of row n loads its gate, gu[n, f], and its up, which stands F columns further. Then silu(gate) times up.",
    hints={
        "OutOfBoundsError": "F need not be a multiple of 32: guard f < F. Gate is gu[n, f], up is gu[n, F + f].",
        "RaceError": "n comes from blockIdx.x, f from blockIdx.y * 32 + threadIdx.x: one thread per element of y.",
    },
)  # fmt: skip
def swiglu_kernel(e):
    for N, F in ((2, 32), (3, 40), (2, 3)):
        gu, y = e.normal(N, 2 * F), e.blank(N, F)
        e.run((N, -(-F // 32)), 32, y, gu, case=f"{N} rows, F = {F}")
        gu = np.asarray(gu).astype(np.float64)
        gate, up = gu[:, :F], gu[:, F:]
        s = 1 / (1 + np.exp(-gate))
        silu = lambda x: x / (1 + np.exp(-x))
        e.same("y", y, gate * s * up, {
            "Gate and up are swapped: the first F columns are the gate, and silu is taken of it.": silu(up) * gate,
            "Gate and up do not alternate: columns 0 to F - 1 are gate, F to 2 F - 1 are up.": silu(gu[:, ::2]) * gu[:, 1::2],
            "The sign in exp is wrong: sigmoid(g) = 1 / (1 + exp(-g)).": gate * (1 - s) * up,
            "That is sigmoid(gate) up. silu(gate) is gate times sigmoid(gate).": s * up,
            "That is silu(gate); up is missing.": gate * s,
            "1 + exp(-gate) is below the line as a whole: gate / (float32(1.0) + math.exp(-gate)).": gate + np.exp(-gate) * up,
            "The last column is missing: the guard is f < F.":
                lambda got: not e.wrote(y)[:, -1].any() and e.wrote(y)[:, :-1].all(),
            "gu[n, F] is the up of column 0. That of column f stands F columns after its gate: gu[n, F + f].": gate * s * up[:, :1],
        }, rtol=1e-4)  # fmt: skip


def columns(p, targets, rows):
    """What d[:, target] -= 1 makes of the probabilities, chunk by chunk."""
    d = p.copy()
    for i in range(0, len(d), rows):
        d[i : i + rows, targets[i : i + rows]] -= 1
    return d


@exercise(
    "11.4", "head_loss",
    first_step="a loop over slices of at most `rows` rows: logits of the slice, its part of the loss, its gradient, and from that dx and a share of dw.",
    hints={"ValueError": "With R rows in a slice: logits and their gradient d are (R, V), dx of the slice is (R, C) = d @ w, "
           "and dw is (V, C), d^T times the slice of x."},
    kernel=False,
)  # fmt: skip
def head_loss(e):
    for N, C, V, rows, scale in (
        (6, 4, 5, 2, 1.0), (7, 3, 9, 3, 1.0), (4, 2, 3, 10, 1.0), (5, 3, 6, 2, 400.0), (512, 4, 512, 32, 1.0),
    ):  # fmt: skip
        x = np.asarray(e.normal(N, C)).astype(np.float64) * scale
        w = np.asarray(e.normal(V, C)).astype(np.float64)
        targets = np.random.default_rng(N).integers(0, V, N)
        large = " large logits," if scale > 1 else ""
        case = f"{N} rows,{large} {V} words, {rows} rows at a time"
        tracemalloc.start()
        try:
            with np.errstate(all="ignore"):
                got = e.call(x.copy(), w.copy(), targets, rows, case=case)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        loss, dx, dw = e.several(got, "loss", "dx", "dw")
        e.need(np.shape(dx) != (V, C) or N == V, "dx and dw are exchanged: return loss, dx, dw.")
        z = x @ w.T
        z -= z.max(1, keepdims=True)
        n, p = np.arange(N), np.exp(z)
        p /= p.sum(1, keepdims=True)
        losses = -z[n, targets] + np.log(np.exp(z).sum(1))
        d = p / N
        d[n, targets] -= 1 / N
        e.need(
            np.isfinite(loss) and np.isfinite(np.asarray(dx)).all(),
            "The result is infinite or NaN. Subtract the largest logit of each row before exp; and take a row's loss as log(sum of "
            "exp) minus the target's logit: a probability may round to 0, whose logarithm is minus infinity.",
        )
        last = slice((N - 1) // rows * rows, N)
        size = np.array([min(rows, N - i // rows * rows) for i in range(N)])[:, None]
        whole = N // rows * rows
        e.same("loss", np.float64(loss), losses.mean(), {
            "That is the sum over rows; the mean is asked for: divide by N.": np.float64(losses.sum()),
            "Only the last chunk is in the loss: add up over chunks.": np.float64(losses[last].sum() / N),
            "The means of the chunks were added up: add up the losses of all rows, and divide by N once.": np.float64((losses / size[:, 0]).sum()),
            "Rows are missing: the last chunk may have fewer than `rows`.": np.float64(losses[:whole].sum() / N),
        }, rtol=1e-6)  # fmt: skip
        e.same("dx", dx, d @ w, {
            "The gradient of a chunk was divided by the rows of the chunk. It is the mean over all N rows: divide by N.": (d * N / size) @ w,
            "The gradient was not divided by N: the loss is a mean.": (d * N) @ w,
            "The 1 was subtracted in all rows of the chunk: d[:, target] means whole columns. One place per row is d[n, target].":
                columns(p, targets, rows) @ w / N,
            "The one-hot part is missing: d = (softmax - [v == target]) / N.": (p / N) @ w,
        }, rtol=1e-5, atol=1e-9)  # fmt: skip
        e.same("dw", dw, d.T @ x, {
            "That is the share of the last chunk: dw adds up over chunks, with +=.": d[last].T @ x[last],
        }, rtol=1e-5, atol=1e-9)  # fmt: skip
        e.need(
            N * V < 1e5 or peak < N * V * 8,
            f"The numbers are right, but {peak / 1e6:.1f} MB were in use at once, and all logits together take {N * V * 8 / 1e6:.1f} MB. "
            "Make the logits of one chunk only, and let go of them before the next.",
        )
