"""Exercises of lesson 7: the ops of a Llama-style model."""

import numpy as np

from xtrain.kernels.rope import rope_ref, rope_tables

from .attempt import exercise


def double(a):
    return np.asarray(a).astype(np.float64)


@exercise(
    "7.1", "rope_kernel",
    first_step="compute three indices for this thread: token n, head h, plane r. Its position is n % T; its two numbers are x[n, h, r] and x[n, h, r + R].",
    hints={
        "OutOfBoundsError": "There are R = D / 2 planes: thread r rotates the pair r and r + R, so r runs to R and not to D. "
        "And the tables have T rows: look up position n % T, not n.",
        "RaceError": "Each plane of each head of each token belongs to one thread, which writes two numbers.",
    },
)  # fmt: skip
def rope_kernel(e):
    fixed = (1, 3, 1, 4), (2, 3, 2, 8)
    draw = lambda rng: (*rng.integers((1, 2, 1), (4, 6, 4)), 2 * rng.integers(2, 7))
    for B, T, H, D in e.cases(fixed, draw):
        N, R = B * T, D // 2
        x, y = e.normal(N, H, D), e.blank(N, H, D)
        cos, sin = rope_tables(D, T, 100.0)
        as_sim = lambda a: np.array(a).view(type(x))
        e.run(
            (N, H),
            R,
            y,
            x,
            as_sim(cos),
            as_sim(sin),
            T,
            case=f"{B} sequences of {T} tokens, {H} heads of {D}",
        )
        at = np.arange(N) % T
        x64, c, s = double(x), double(cos), double(sin)
        want = rope_ref(x64, c, s, at)
        pairs = x64.copy()
        a, b = x64[..., 0::2], x64[..., 1::2]
        cn, sn = c[at][:, None], s[at][:, None]
        pairs[..., 0::2], pairs[..., 1::2] = a * cn - b * sn, b * cn + a * sn
        half = want.copy()
        half[..., R:] = np.nan
        other_sign = want.copy()
        other_sign[..., R:] = x64[..., R:] * cn - x64[..., :R] * sn
        first_sign = want.copy()
        first_sign[..., :R] = x64[..., :R] * cn + x64[..., R:] * sn
        e.same("y", y, want, {
            "It rotates in the wrong direction: y_r = x_r cos - x_(r+R) sin.": rope_ref(x64, c, s, at, -1),
            "Neighbours were paired, (0, 1), (2, 3), ... Here a plane is one number from each half of the head: r and r + R.": pairs,
            "The upper half was never written: each thread writes y[n, h, r] and y[n, h, r + R].": half,
            "The sign in the first line is wrong: y_r = x_r cos - x_(r+R) sin.": first_sign,
            "The sign in the second line is wrong: y_(r+R) = x_(r+R) cos + x_r sin.": other_sign,
            "The second line uses the result of the first: both need the old x_r and x_(r+R).":
                np.concatenate([want[..., :R], x64[..., R:] * cn + want[..., :R] * sn], -1),
            "Cosine and sine are swapped.": rope_ref(x64, s, c, at),
            "Only the first sequence was rotated: there are N = B T rows, and row n is at position n % T.":
                lambda got: B > 1 and not e.wrote(y)[T:].any(),
            "The planes were rotated, but not by the angles of their positions: row n needs row n % T of the tables, because positions "
            "start again at 0 in each sequence.":
                lambda got: np.allclose(got[0], want[0], 1e-4, 1e-5) and np.allclose(np.square(got).sum(2), np.square(want).sum(2), 1e-3),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip


@exercise(
    "7.2", "causal_softmax_kernel",
    first_step="row t sees the keys 0 .. t, so its loops end at t + 1. First find the maximum of scale * s over them, with block_max.",
    allow=("block_sum", "block_max"),
    hints={
        "DeadlockError": "All threads of the block must call block_max and block_sum: outside any `if` and outside the loop over keys.",
        "OutOfBoundsError": "Keys run from tid to the last key that row t sees, in steps of cuda.blockDim.x.",
        "RaceError": "Two threads write the same element of p: the step from a thread's key to its next is the number of threads in the block, "
        "cuda.blockDim.x.",
    },
)  # fmt: skip
def causal_softmax_kernel(e):
    fixed = (
        (4, 32, 1.0, 0.3),
        (5, 32, 300.0, 0.3),
        (3, 32, 1.0, -400.0),
        (33, 32, 1.0, 0.3),
        (33, 64, 1.0, 0.3),
    )
    draw = lambda rng: (rng.integers(6, 20), 32 * rng.integers(1, 3), 1.0, 0.3)
    for T, block, big, mean in e.cases(fixed, draw):
        S = T
        s, p, scale = e.normal(T, S, scale=big, mean=mean), e.blank(T, S), np.float32(0.5)
        e.run(
            T,
            block,
            p,
            s,
            scale,
            case=f"T = {T}"
            + ", scores up to several hundred" * (big > 1)
            + ", all scores near -400" * (mean < 0),
        )
        x = double(s) * 0.5
        mask = np.tri(T, S, dtype=bool)

        def softmax(x, mask):
            x = np.where(mask, x, -np.inf)
            p = np.exp(x - x.max(1, keepdims=True))
            return p / p.sum(1, keepdims=True)

        want = softmax(x, mask)
        unscaled = np.where(mask, np.asarray(s), -np.inf).max(1, keepdims=True)
        with np.errstate(all="ignore"):
            below = np.where(mask, np.exp(x.astype(np.float32) - unscaled), 0)
            below = np.where(mask, below / below.sum(1, keepdims=True), 0)
        hidden = np.where(mask, want, np.nan)
        strict = np.tri(T, S, -1, dtype=bool)
        strict[0, 0] = True
        e.same("p", p, want, {
            "Masked elements hold NaN because they were not written. Their probability is 0, and you must store that.": hidden,
            "Row t does not see itself: its keys are 0 to t, t included.":
                lambda got: T > 1 and np.allclose(got[1:], softmax(x, strict)[1:], 1e-4, 1e-5, equal_nan=True),
            "Row 0 must see one key, its own: the visible keys of row t end at t + 1.": lambda got: big == 1 and mean > 0 and not np.isfinite(got[0, 0]) and np.isfinite(got[1:]).all(),
            "Row t does not see itself: its keys are 0 to t, and t included.": lambda got: (np.diag(got) == 0).all(),
            "Every thread has subtracted its own maximum: top = block_max(top, partial) is the row's maximum; call it before exp.":
                mask / mask.sum(1, keepdims=True) if block >= T else np.empty(0),
            "All exp are 0, because no score was above the initial maximum: start at minus infinity, float32(-math.inf).":
                lambda got: mean < 0 and np.isnan(got[mask]).any(),
            "Elements after t hold something other than 0: row t does not see them.":
                lambda got: np.allclose(got[mask], want[mask], 1e-4) and not np.isnan(got).any(),
            "Every row sees all keys: row t may only look at keys up to t.": softmax(x, np.ones_like(mask)),
            "Row t sees one key too many: its keys are 0 to t, without t + 1.": softmax(x, np.tri(T, S, 1, dtype=bool)),
            "The scores were not scaled.": softmax(double(s), mask),
            "The maximum of s was subtracted from scale s: take the maximum of scale s, or multiply it by scale.": below,
            "exp overflows: subtract the maximum of the row first, which does not change the quotient.":
                lambda got: big > 1 and np.isnan(got[mask]).any(),
            "The row does not sum to 1: divide by the sum of exp over the visible keys.":
                lambda got: not np.isnan(got).any() and not np.allclose(got.sum(1), 1, 1e-3),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip


@exercise(
    "7.3", "cross_entropy",
    first_step="subtract the maximum of each row; then the loss of row n is log(sum of exp) minus the logit of its target.",
    kernel=False,
)  # fmt: skip
def cross_entropy(e):
    fixed = (3, 4, 1.0, False), (4, 5, 400.0, False), (6, 7, 1.0, True), (1, 3, 1.0, False)
    for N, V, big, ignore in e.cases(fixed, lambda rng: (*rng.integers(3, 9, 2), 1.0, True)):
        logits = np.array(double(e.normal(N, V, scale=big)))
        targets = e.rng.integers(0, V, N) if e.drawn else np.arange(N) * 3 % V
        if ignore:
            targets = np.where(np.arange(N) % 3 == 1, -100, targets)
        before, counted = logits.copy(), targets >= 0
        where = (
            f"logits ({N}, {V})"
            + (" up to several hundred" if big > 1 else "")
            + (", some targets -100" if ignore else "")
        )
        with np.errstate(all="ignore"):
            got = e.call(logits, targets.copy(), case=where)
        loss, gradient = e.several(got, "loss", "gradient")
        e.need(
            np.ndim(loss) == 0,
            f"The loss is one number, the mean over rows, but this has shape {np.shape(loss)}.",
        )
        e.need(
            np.array_equal(logits, before),
            "The input logits have been changed: work on a copy.",
        )
        x = before - before.max(1, keepdims=True)
        p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
        one = np.zeros_like(p)
        one[np.flatnonzero(counted), targets[counted]] = 1
        rows = np.log(np.exp(x).sum(1)) - x[np.arange(N), np.where(counted, targets, 0)]
        want = rows[counted].mean()
        loss = np.asarray(loss, np.float64)
        columns = (
            np.log(np.exp(x).sum(0)[np.where(counted, targets, 0)])
            - x[np.arange(N), np.where(counted, targets, 0)]
        )
        e.same("the loss", loss, np.asarray(want), {
            "exp or log has overflowed: subtract the maximum of each row before exp, and compute the loss as log(sum of exp) minus the "
            "target's x: a probability may round to 0, whose logarithm is minus infinity.":
                lambda got: big > 1 and not np.isfinite(got),
            "The probabilities of a row must sum to 1: the sum of exp runs over axis 1.": np.asarray(columns[counted].mean()),
            "Use the natural logarithm, np.log.": np.asarray(want / np.log(2)),
            "That is the sum over rows, not the mean.": np.asarray(rows[counted].sum()),
            "Rows with target -100 are included: leave them out of the sum and out of the count that it is divided by.":
                lambda got: ignore,
            "The sign is wrong: a loss is -log p, which is positive.": np.asarray(-want),
        }, rtol=1e-6)  # fmt: skip
        e.need(gradient is not None, "The gradient is None.")
        mean = (p - one) * counted[:, None] / counted.sum()
        spread = p.copy()
        spread[:, targets[counted]] -= 1
        e.same("the gradient", gradient, mean, {
            "The 1 of the target is missing: the gradient is p minus 1 at the target, p elsewhere.": p * counted[:, None] / counted.sum(),
            "It is not divided by the number of rows that count: the loss is a mean.": (p - one) * counted[:, None],
            "Rows with target -100 have a nonzero gradient; it must be 0.": lambda got: ignore and np.abs(np.asarray(got)[~counted]).max() > 1e-12,
            "The sign is wrong.": -mean,
            "1 was added at the target: the gradient is the predicted probabilities MINUS the true ones.": (p + one) * counted[:, None] / counted.sum(),
            "The 1 was subtracted in all rows: x[:, targets] means whole columns. One element per row is x[np.arange(N), targets].":
                spread * counted[:, None] / counted.sum(),
        }, rtol=1e-6, atol=1e-12)  # fmt: skip
