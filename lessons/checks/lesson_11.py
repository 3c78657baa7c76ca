"""Exercises of lesson 11: fusing."""

import numpy as np

from xtrain.kernels.residual import residual_rmsnorm_ref

from .attempt import exercise


@exercise(
    "11.1", "bytes_before_after",
    first_step="run separately, every kernel moves everything it reads and everything it writes. Fused into one: what must be read, and what must be written?",
    hints={"TypeError": "kernels, reads, writes and kept hold array names; sizes[name] is the bytes of one array."},
    kernel=False,
)  # fmt: skip
def bytes_before_after(e):
    cases = {
        "an addition, then a norm; h is needed later": (
            [(["x", "r"], ["h"]), (["h"], ["y"])], {"x": 8, "r": 8, "h": 8, "y": 8}, ["h", "y"],
        ),
        "the same, but h is not needed later": (
            [(["x", "r"], ["h"]), (["h"], ["y"])], {"x": 8, "r": 8, "h": 8, "y": 8}, ["y"],
        ),
        "x is read by both kernels": (
            [(["x"], ["s"]), (["s", "x"], ["y"])], {"x": 100, "s": 10, "y": 1000}, ["y"],
        ),
        "three kernels, different sizes": (
            [(["a"], ["b"]), (["b", "c"], ["d"]), (["d"], ["f"])], {"a": 1, "b": 20, "c": 300, "d": 4000, "f": 50000}, ["b", "f"],
        ),
    }  # fmt: skip

    def draw(rng):
        names = [chr(97 + i) for i in range(8)]
        chain = [([*rng.choice(names[:i], 2, replace=False)], [names[i]]) for i in range(3, 8)]
        chain = [([str(a) for a in reads], writes) for reads, writes in chain]
        sizes = {a: int(n) for a, n in zip(names, rng.integers(1, 500, 8))}
        return f"kernels {chain}, sizes {sizes}, kept d and h", (chain, sizes, ["d", "h"])

    for case, (kernels, sizes, kept) in e.cases(cases.items(), draw):
        got = e.call(list(kernels), dict(sizes), list(kept), case=case)
        got = e.several(got, "before", "after")
        reads = [a for r, _ in kernels for a in r]
        writes = [a for _, w in kernels for a in w]
        total = lambda names: sum(sizes[a] for a in names)
        inputs = set(reads) - set(writes)
        before, after = total(reads) + total(writes), total(inputs) + total(kept)
        e.need(
            got != (after, before),
            "The two numbers are in the wrong order: return the bytes of the separate kernels first.",
        )
        e.same("the first number, before,", np.float64(got[0]), np.float64(before), {
            "Only the reads were counted: writing moves bytes too.": np.float64(total(reads)),
            "Only the writes were counted: reading moves bytes too.": np.float64(total(writes)),
            "Every array was counted once. Run separately, the kernels move an array each time one of them reads or writes it.":
                np.float64(total(set(reads) | set(writes))),
        })  # fmt: skip
        e.same("the second number, after fusing,", np.float64(got[1]), np.float64(after), {
            "All produced arrays were counted as written: only `kept` must go to memory.": np.float64(total(inputs) + total(writes)),
            "That counts reads of arrays that the fused kernel itself produces. Those are in registers: count only reads of arrays that no kernel in the list writes.":
                np.float64(total(set(reads)) + total(kept)),
            "An input that two kernels read is counted twice: the fused kernel loads it once.":
                np.float64(total(a for a in reads if a in inputs) + total(kept)),
            "The writes are missing: add the arrays in `kept`.": np.float64(total(inputs)),
        })  # fmt: skip


@exercise(
    "11.2", "residual_rmsnorm_kernel",
    first_step="thread c loads x[n, c] and r[n, c] and keeps their sum in a variable h. The rest of the kernel needs only h.",
    allow=("block_sum",),
    hints={
        "RaceError": "Thread c of block n owns h[n, c] and y[n, c]; one thread, c == 0, writes rstd_N[n].",
        "DeadlockError": "block_sum contains barriers: all threads must call it, outside of any `if`.",
        "CollectiveError": "All threads of the block must call block_sum, so call it outside of any `if`.",
    },
)  # fmt: skip
def residual_rmsnorm_kernel(e):
    eps = np.float32(1e-2)
    fixed = (2, 64), (3, 96), (1, 32)
    for N, C in e.cases(fixed, lambda rng: (rng.integers(2, 5), 32 * rng.integers(1, 5))):
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
            "h was not written: later layers need it.": lambda got: not e.wrote(h).any(),
            "That is x alone: r was not added.": x64,
        }, rtol=1e-5)  # fmt: skip
        e.same("rstd", rstd, want_rstd, {
            "That is the rstd of x alone: sum the squares of x + r.": of_x,
            "The sum of squares was not divided by C.": 1 / np.sqrt(np.square(want_h).sum(1) + eps),
            "eps is missing under the square root.": 1 / np.sqrt(np.square(want_h).mean(1)),
            "That uses thread 0's own square only: block_sum(h * h, partial) sums over the threads of the block.":
                1 / np.sqrt(np.square(want_h[:, 0]) / C + eps),
        }, rtol=1e-4)  # fmt: skip
        e.same("y", y, want_y, {
            "The weight w is missing.": want_h * want_rstd[:, None],
            "rstd is missing in y: y = h rstd w.": want_h * w64,
            "y uses x instead of h: y = h rstd w.": x64 * want_rstd[:, None] * w64,
        }, rtol=1e-4)  # fmt: skip
        e.settle()
        e.need(
            not again,
            f"The numbers are right, but {e.name(h)} is read back from memory, and fusing should avoid that read. "
            "Keep the sum in a variable.",
        )
        e.need(
            loads == 2 * N * C // 32,
            f"The numbers are right, but {e.name(x)} or {e.name(r)} is read more than once. Keep the sum in a variable.",
        )


@exercise(
    "11.3", "swiglu_kernel",
    first_step="thread f of row n loads its gate, gu[n, f], and its up, F columns to the right. Then multiply silu(gate) by up.",
    hints={
        "OutOfBoundsError": "F need not be a multiple of 32: guard f < F. The gate is gu[n, f], the up is gu[n, F + f].",
        "RaceError": "n comes from blockIdx.x, f from blockIdx.y * 32 + threadIdx.x: one thread per element of y.",
    },
)  # fmt: skip
def swiglu_kernel(e):
    fixed = (2, 32, 1.0), (3, 40, 1.0), (2, 3, 1.0), (2, 5, 200.0)
    for N, F, size in e.cases(fixed, lambda rng: (*rng.integers((2, 20), (5, 90)), 1.0)):
        gu, y = e.normal(N, 2 * F, scale=size), e.blank(N, F)
        large = ", gates up to several hundred" * (size > 1)
        e.run((N, -(-F // 32)), 32, y, gu, case=f"{N} rows, F = {F}{large}")
        gu = np.asarray(gu).astype(np.float64)
        gate, up = gu[:, :F], gu[:, F:]
        s = 1 / (1 + np.exp(np.minimum(-gate, 700)))
        silu = lambda x: x / (1 + np.exp(np.minimum(-x, 700)))
        e.same("y", y, gate * s * up, {
            "exp(gate) overflows for a large gate, and inf / inf is NaN. In gate / (1 + exp(-gate)) an infinite denominator gives 0, as it should.":
                lambda got: size > 1 and not np.isfinite(got).all(),
            "Gate and up are swapped: the first F columns are the gate, and silu applies to the gate.": silu(up) * gate,
            "Gates and ups do not alternate: columns 0 to F - 1 are gates, F to 2 F - 1 are ups.": silu(gu[:, ::2]) * gu[:, 1::2],
            "The sign in exp is wrong: sigmoid(g) = 1 / (1 + exp(-g)).": gate * (1 - s) * up,
            "That is sigmoid(gate) up. silu(gate) is gate times sigmoid(gate).": s * up,
            "That is silu(gate); up is missing.": gate * s,
            "The whole of 1 + exp(-gate) is the denominator: gate / (float32(1.0) + math.exp(-gate)).": gate + np.exp(np.minimum(-gate, 700)) * up,
            "The last column is missing: the guard is f < F.":
                lambda got: not e.wrote(y)[:, -1].any() and e.wrote(y)[:, :-1].all(),
            "gu[n, F] is the up of column 0. The up of column f is F columns after its gate: gu[n, F + f].": gate * s * up[:, :1],
        }, rtol=1e-4, atol=1e-5)  # fmt: skip


def columns(p, targets, rows):
    """The wrong d that d[:, target] -= 1 produces from the probabilities, chunk by chunk."""
    d = p.copy()
    for i in range(0, len(d), rows):
        d[i : i + rows, targets[i : i + rows]] -= 1
    return d


@exercise(
    "11.4", "head_loss",
    first_step="loop over slices of at most `rows` rows: compute the slice's logits, its part of the loss, its gradient, and from that dx and its part of dw.",
    hints={"ValueError": "With R rows in a slice, the logits and their gradient d are (R, V), dx of the slice is (R, C) = d @ w, "
           "and dw is (V, C), d^T times the slice of x."},
    kernel=False,
)  # fmt: skip
def head_loss(e):
    fixed = (
        (6, 4, 5, 2, 1.0), (7, 3, 9, 3, 1.0), (4, 2, 3, 10, 1.0), (5, 3, 6, 2, 400.0), (512, 4, 512, 32, 1.0),
    )  # fmt: skip
    for N, C, V, rows, scale in e.cases(fixed, lambda rng: (*rng.integers(2, 12, 4), 1.0)):
        x = np.asarray(e.normal(N, C)).astype(np.float64) * scale
        w = np.asarray(e.normal(V, C)).astype(np.float64)
        targets = np.random.default_rng(N).integers(0, V, N)
        large = " large logits," if scale > 1 else ""
        case = f"{N} rows,{large} vocabulary {V}, {rows} rows at a time"
        got, peak = e.call_measured(x.copy(), w.copy(), targets, rows, case=case)
        loss, dx, dw = e.several(got, "loss", "dx", "dw")
        e.need(
            np.shape(dx) != (V, C) or N == V,
            "dx and dw are in the wrong order: return loss, dx, dw.",
        )
        z = x @ w.T
        z -= z.max(1, keepdims=True)
        n, p = np.arange(N), np.exp(z)
        p /= p.sum(1, keepdims=True)
        losses = -z[n, targets] + np.log(np.exp(z).sum(1))
        d = p / N
        d[n, targets] -= 1 / N
        e.need(
            np.isfinite(loss) and np.isfinite(np.asarray(dx)).all(),
            "The result is infinite or NaN. Subtract the largest logit of each row before exp, and compute a row's loss as log(sum of "
            "exp) minus the target's logit: a probability may round to 0, and its logarithm is minus infinity.",
        )
        last = slice((N - 1) // rows * rows, N)
        size = np.array([min(rows, N - i // rows * rows) for i in range(N)])[:, None]
        whole = N // rows * rows
        e.same("loss", np.float64(loss), losses.mean(), {
            "That is the sum over rows: return the mean, so divide by N.": np.float64(losses.sum()),
            "The loss includes only the last chunk: sum over chunks.": np.float64(losses[last].sum() / N),
            "The means of the chunks were summed: sum the losses of all rows, and divide by N once.": np.float64((losses / size[:, 0]).sum()),
            "Rows are missing: the last chunk may have fewer than `rows`.": np.float64(losses[:whole].sum() / N),
        }, rtol=1e-6)  # fmt: skip
        e.same("dx", dx, d @ w, {
            "The gradient of a chunk was divided by the number of rows in the chunk. The loss is the mean over all N rows: divide by N.": (d * N / size) @ w,
            "The gradient was not divided by N: the loss is a mean.": (d * N) @ w,
            "The 1 was subtracted in all rows of the chunk: d[:, target] selects whole columns. d[n, target] selects one element per row.":
                columns(p, targets, rows) @ w / N,
            "The one-hot part is missing: d = (softmax - [v == target]) / N.": (p / N) @ w,
        }, rtol=1e-5, atol=1e-9)  # fmt: skip
        e.same("dw", dw, d.T @ x, {
            "That is dw of the last chunk only: accumulate over chunks with +=.": d[last].T @ x[last],
        }, rtol=1e-5, atol=1e-9)  # fmt: skip
        e.need(
            N * V < 1e5 or peak < N * V * 8,
            f"The numbers are right, but {peak / 1e6:.1f} MB were in use at once, and all logits take {N * V * 8 / 1e6:.1f} MB. "
            "Hold the logits of only one chunk at a time, and free or reuse them before the next.",
        )
