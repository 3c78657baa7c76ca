"""Exercises of lesson 8: the optimizer, the schedule, clipping."""

import numpy as np

from xtrain.kernels.adamw import adamw_hyper, adamw_ref

from .attempt import exercise


def double(a):
    return np.asarray(a).astype(np.float64)


@exercise(
    "8.1", "adamw_kernel",
    first_step="one element per thread, as in lesson 1. Load w, m, v and g into variables; write five lines of formula; store w, m and v.",
    hints={"OutOfBoundsError": "The last block has threads past the end: guard with i < w_n.size."},
)  # fmt: skip
def adamw_kernel(e):
    lr, beta1, beta2, eps, decay = 0.1, 0.9, 0.95, 1e-3, 0.5
    fixed = (6, 4, 1, 32), (40, 0, 3, 16), (33, 33, 2, 32)
    draw = lambda rng: (n := rng.integers(34, 90), rng.integers(2, n), rng.integers(2, 9), 16)
    for n, n_decay, step, block in e.cases(fixed, draw):
        w, g = e.normal(n), e.normal(n)
        m, v = e.normal(n), np.abs(e.normal(n)).view(type(w))
        if step == 1:
            m, v = np.zeros_like(m), np.zeros_like(v)
        c1, root2 = 1 - beta1**step, np.sqrt(1 - beta2**step)
        before = [double(a) for a in (w, m, v, g)]
        w64, m64, v64, g64 = before
        want = [a.copy() for a in (w64, m64, v64)]
        adamw_ref(
            want[0], g64.copy(), want[1], want[2], np.ones(1), adamw_hyper(lr, beta1, beta2, step, np.float64),
            n_decay, beta1, beta2, eps, decay,
        )  # fmt: skip
        numbers = [np.float32(x) for x in (lr, c1, root2)]
        rest = [np.float32(x) for x in (beta1, beta2, eps, decay)]
        e.run(
            -(-n // block),
            block,
            w,
            m,
            v,
            g,
            *numbers,
            np.int64(n_decay),
            *rest,
            case=f"n = {n}, decay on the first {n_decay}, step {step}",
        )
        e.same("m", m, want[1], {
            "m is unchanged: store it, because the next step needs it.": m64,
            "m follows g too fast: it moves (1 - beta1) of the way to g, not beta1 of it.": m64 + beta1 * (g64 - m64),
            "The decay was added to the gradient, so it is averaged and divided too (Adam with L2). AdamW subtracts it from w directly.":
                beta1 * m64 + (1 - beta1) * (g64 + decay * w64 * (np.arange(n) < n_decay)) if n_decay else np.empty(0),
            "m grows too fast: the new term is (1 - beta1) g, not g.": beta1 * m64 + g64,
            "The betas are swapped.": beta2 * m64 + (1 - beta2) * g64,
        }, rtol=1e-4)  # fmt: skip
        e.same("v", v, want[2], {
            "v is unchanged: store it, because the next step needs it.": v64,
            "v follows g^2 too fast: it moves (1 - beta2) of the way to g^2, not beta2 of it.": v64 + beta2 * (g64**2 - v64),
            "v is the running mean of g SQUARED.": beta2 * v64 + (1 - beta2) * g64,
            "The betas are swapped.": beta1 * v64 + (1 - beta1) * g64**2,
        }, rtol=1e-4)  # fmt: skip
        m1, v1 = want[1], want[2]
        kept = np.where(np.arange(n) < n_decay, w64 * (1 - lr * decay), w64)
        size = np.sqrt(v1) / root2
        e.same("w", w, want[0], {
            "The bias corrections are missing: m and v started at zero, so divide by c1 and by root2.": kept - lr * m1 / (np.sqrt(v1) + eps),
            "m is not corrected: it started at zero, so divide it by c1.": kept - lr * m1 / (size + eps),
            "v is not corrected: it started at zero, so divide its root by root2.": kept - lr / c1 * m1 / (np.sqrt(v1) + eps),
            "root2 is already the root of the correction: divide sqrt(v) by it, not v.":
                kept - lr / c1 * m1 / (np.sqrt(v1 / root2) + eps),
            "sqrt(v) was divided by root2 + eps: eps is added to the quotient, sqrt(v) / root2 + eps.":
                kept - lr / c1 * m1 / (np.sqrt(v1) / (root2 + eps)),
            "eps is missing: add it to sqrt(v) / root2.": kept - lr / c1 * m1 / size,
            "The root of v is missing.": kept - lr / c1 * m1 / (v1 / root2 + eps),
            "The step uses the old m and v: update them first.":
                kept - lr / c1 * m64 / (np.sqrt(v64) / root2 + eps),
            "One element too many decays: the condition is i < n_decay.":
                np.where(np.arange(n) <= n_decay, w64 * (1 - lr * decay), w64) - lr / c1 * m1 / (size + eps),
            "Every element decays: only the first n_decay (the matrices) do, norms do not.":
                w64 * (1 - lr * decay) - lr / c1 * m1 / (size + eps) if n_decay < n else np.empty(0),
            "Nothing decays: elements below n_decay are multiplied by 1 - lr weight_decay.":
                w64 - lr / c1 * m1 / (size + eps) if n_decay else np.empty(0),
            "Add eps after the root, not under it.": lambda got: any(
                np.allclose(got, kept - lr / c1 * m1 / s, 1e-4, 1e-6) for s in (np.sqrt(v1 / root2**2 + eps), np.sqrt(v1 + eps) / root2)),
            "The decay came after the step: apply the decay first, to the old w, then the step.":
                (w64 - lr / c1 * m1 / (size + eps)) * (kept / w64) if n_decay else np.empty(0),
            "The step goes uphill: subtract it.": kept + lr / c1 * m1 / (size + eps),
            "The decay is not multiplied by lr.": np.where(np.arange(n) < n_decay, w64 * (1 - decay), w64) - lr / c1 * m1 / (size + eps),
        }, rtol=1e-4)  # fmt: skip


@exercise(
    "8.2", "learning_rate",
    first_step="there are two cases. During the warm-up the rate is peak times (step + 1) / warmup. After it, half a cosine.",
    hints={"ZeroDivisionError": "warmup may be 0, and there may be only one step after the warm-up, whose progress is 0: divide by "
           "max(1, steps - 1 - warmup)."},
    kernel=False,
)  # fmt: skip
def learning_rate(e):
    fixed = (
        (10, 1.0, 4, 0.1),
        (7, 0.5, 0, 0.0),
        (5, 1.0, 4, 0.1),
        (100, 3e-4, 10, 0.1),
    )
    draw = lambda rng: (
        rng.integers(12, 40),
        rng.uniform(0.1, 2),
        rng.integers(1, 9),
        rng.uniform(0, 0.5),
    )
    for steps, peak, warmup, ratio in e.cases(fixed, draw):
        rates = []
        for step in range(steps):
            case = f"step {step} of {steps}, peak {peak:g}, warmup {warmup}, min_ratio {ratio:g}"
            rate = e.call(step, steps, peak, warmup, ratio, case=case)
            e.need(rate is not None and np.ndim(rate) == 0, "Return a number, in every case.")
            rates.append(float(rate))
            last = max(1, steps - 1 - warmup)
            want = peak * (step + 1) / max(1, warmup)
            if step >= warmup:
                want = peak * (
                    ratio + (1 - ratio) * 0.5 * (1 + np.cos(np.pi * (step - warmup) / last))
                )
            if np.isclose(rate, want, rtol=1e-9):
                continue
            progress = (step - warmup) / last
            say = f"The rate is {rate:.4g}; expected {want:.4g}."
            if step == 0 and warmup and rate == 0:
                say += " A step with rate 0 is wasted: the first rate is peak / warmup."
            elif step < warmup:
                say += (
                    f" The warm-up is a straight line that reaches the peak at step {warmup - 1}."
                )
            elif rate > peak * (1 + 1e-9):
                say += (
                    " The rate must never exceed the peak. The warm-up has ended at step == warmup; from there 0.5 * (1 + cos) runs from 1 to 0, "
                    "and the rate is peak times (min_ratio + (1 - min_ratio) * that)."
                )
            elif np.isclose(
                rate, peak * (ratio + (1 - ratio) * 0.5 * (1 - np.cos(np.pi * progress)))
            ):
                say += " It rises where it should fall: 1 + cos runs from 2 to 0."
            elif np.isclose(rate, peak * 0.5 * (1 + np.cos(np.pi * progress))):
                say += " The cosine must end at min_ratio * peak, not at 0."
            elif step == warmup and rate < peak:
                say += " The cosine starts when the warm-up is over: its progress is 0 at step == warmup."
            elif step == steps - 1:
                say += " At the last step, steps - 1, the progress is 1."
            elif np.isclose(rate, peak):
                say += " After the warm-up the rate must fall."
            elif np.isclose(rate, peak * (1 - (1 - ratio) * progress)):
                say += " That is a straight line, but it should be half a cosine."
            else:
                say += " Progress is (step - warmup) / (steps - 1 - warmup), from 0 to 1."
            raise e.wrong(say)


@exercise(
    "8.3", "clip_factor",
    first_step="compute ONE norm over all arrays together: the root of the sum of all squares.",
    hints={"ValueError": "The arrays have different shapes: loop over the list and add up the sum of squares of each array."},
    kernel=False,
)  # fmt: skip
def clip_factor(e):
    shapes = (3, 4), (5,), (2, 2)
    fixed = (1.0, 1.0, shapes), (1e-3, 1.0, shapes), (5.0, 2.0, shapes), (5.0, 1.0, ((4,), (0, 3)))
    draw = lambda rng: (
        3.0,
        rng.uniform(0.5, 2),
        tuple(tuple(rng.integers(1, 5, 2)) for _ in range(rng.integers(1, 6))),
    )
    for scale, limit, shapes in e.cases(fixed, draw):
        arrays = [double(e.normal(*s, mean=0.0, scale=scale)) for s in shapes]
        copies = [a.copy() for a in arrays]
        norm = np.sqrt(sum((a**2).sum() for a in arrays))
        want = min(1.0, limit / norm)
        got = e.call(
            arrays,
            limit,
            case=f"gradients {', '.join(map(str, shapes))} of norm {norm:.3g} together, limit {limit:g}",
        )
        e.need(
            not isinstance(got, (list, tuple, type(None))) and np.ndim(got) == 0,
            "Return one number, the factor for all gradients, or 1.0 if the norm is within the limit.",
        )
        e.need(
            all(np.array_equal(a, b) for a, b in zip(arrays, copies)),
            "The gradients have been changed: return the factor, and the optimizer multiplies by it as it reads them.",
        )
        e.same("the factor", np.asarray(float(got)), np.asarray(want), {
            "A small gradient must stay unchanged: the factor is never above 1.": lambda got: got > 1 and want == 1,
            "That adds the norms of the arrays: add the squares, and take the root once.":
                np.asarray(min(1.0, limit / sum(np.sqrt((a**2).sum()) for a in arrays))),
            "The root is missing: the norm is the root of the sum of squares.": np.asarray(min(1.0, limit / norm**2)),
            "The gradient is longer than the limit, so the factor is below 1: limit / norm.": lambda got: got == 1 and want < 1,
            "That uses only the longest array: all arrays together are one long vector.":
                np.asarray(min(1.0, limit / max(np.sqrt((a**2).sum()) for a in arrays))),
            "That adds up absolute values. The norm is the root of the sum of squares.":
                np.asarray(min(1.0, limit / sum(np.abs(a).sum() for a in arrays))),
            "That is the norm; the factor is limit / norm.": np.asarray(norm),
            "That looks at the largest element, not at the norm.": np.asarray(min(1.0, limit / max(np.abs(a).max(initial=0) for a in arrays))),
            "The factor is too large, so the norm was too small: it is the root of the SUM of all squares of all arrays.":
                lambda got: got > want and want < 1,
        }, rtol=1e-5)  # fmt: skip
