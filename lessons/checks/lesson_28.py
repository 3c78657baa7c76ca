"""Exercises of lesson 28: the steepest step, Newton-Schulz, a step of Muon, warm-up, stable, decay."""

import re

import numpy as np

from .attempt import exercise
from .pieces import Products

CHANGED = "An input was changed: compute new arrays."
QUINTIC = (3.4445, -4.7750, 2.0315)


def iterated(x, steps, coefficients=QUINTIC, left=False):
    """The polynomial on a wide or square matrix. left: with the wrong Gram matrix, on a square one."""
    a, b, c = coefficients
    for _ in range(steps):
        A = x.T @ x if left else x @ x.T
        x = a * x + (b * A + c * A @ A) @ x
    return x


def elementwise(x, steps, all_of_it=False):
    """The polynomial with A * A for A A; all_of_it: with powers of the elements of x."""
    a, b, c = QUINTIC
    for _ in range(steps):
        A = x @ x.T
        x = a * x + b * x**3 + c * x**5 if all_of_it else a * x + (b * A + c * A * A) @ x
    return x


def not_finite(got):
    return not np.isfinite(got).all()


@exercise(
    "28.1", "steepest",
    first_step="U, s, Vt = np.linalg.svd(G, full_matrices=False). Which matrix has the same U and V, and singular values of 1?",
    hints={"ValueError": "The shapes do not fit: with full_matrices=False U is (R, min(R, C)) and Vt (min(R, C), C)."},
    kernel=False,
)  # fmt: skip
def steepest(e):
    rng = e.rng
    for R, C in ((3, 3), (3, 5), (6, 4), (int(rng.integers(3, 7)), 7)):
        G = rng.normal(size=(R, C))
        given = G.copy()
        got = e.call(given, case=f"G of shape ({R}, {C})")
        U, s, Vt = np.linalg.svd(G, full_matrices=False)
        e.same("D", got, -U @ Vt, {
            "This goes uphill: the step that LOWERS the loss is -U V^T.": U @ Vt,
            "This is the gradient itself: its singular values must become 1.": G,
            "This is the gradient, uphill and shorter: leave out the singular values.": -G,
            "This is steepest descent in the Frobenius norm: its singular values are not all 1.": -G / np.linalg.norm(G),
            "This is the gradient divided by its spectral norm: only its largest singular value is 1.": -G / s[0],
            "This is steepest descent when the largest ELEMENT is limited: its spectral norm is above 1.": -np.sign(G),
            "This has spectral norm 1 / sqrt(min(R, C)): singular values of 1 need no further division.": -U @ Vt / np.sqrt(len(s)),
            "svd returns V already transposed: U @ Vt.": lambda got: R == C and np.allclose(got, -U @ Vt.T),
        })  # fmt: skip
        e.need(np.array_equal(G, given), CHANGED)


@exercise(
    "28.2", "newton_schulz",
    first_step="for a wide G: X = G / its norm; then `steps` times A = X @ X.T and X = a X + (b A + c A A) X.",
    hints={"ValueError": "The shapes do not fit: X is (R, C), A = X @ X.T is (R, R) and multiplies X from the left.",
           "RecursionError": "newton_schulz(G.T) calls itself for ever: transpose only if R > C.",
           "NameError": "A name is missing: the coefficients are in QUINTIC."},
    kernel=False,
)  # fmt: skip
def newton_schulz(e):
    rng = e.rng
    k = int(rng.integers(2, 5))
    for R, C, steps, kind in ((3, 3, 5, ""), (2, 6, 5, ""), (7, k, 5, ""), (k, 8, 3, ""), (3, 4, 5, "zero"), (3, 4, 5, "tiny")):  # fmt: skip
        G = rng.normal(size=(R, C)) * {"zero": 0.0, "tiny": 1e-9}.get(kind, 4.0)
        given = G.copy().view(Products)
        note = {"zero": ", all zeros", "tiny": ", elements near 1e-9"}.get(kind, "")
        got = e.call(given, steps, case=f"G of shape ({R}, {C}){note}, {steps} steps")
        tall = R > C
        wide = G.T if tall else G
        norm = max(np.linalg.norm(wide), 1e-7)
        turned = lambda x, tall=tall: x.T if tall else x
        want = turned(iterated(wide / norm, steps))
        U, s, Vt = np.linalg.svd(G, full_matrices=False)
        spectral = max(s[0], 1e-7)
        unlimited = np.linalg.norm(G) < 1e-7
        e.same("X", got, want, {
            "0 / 0: a zero gradient has the norm 0. Divide by max(norm, 1e-7).": not_finite,
            "The norm is below 1e-7: divide by max(norm, 1e-7), so that rounding errors do not become a step.":
                lambda got: unlimited and np.any(got) and not np.allclose(got, want, rtol=1e-3),
            "This is the exact U V^T: the exercise is to come near it with products alone.": U @ Vt,
            "A = X^T X is for the other side: X (b A + c A A). From the left it must be X X^T.": turned(iterated(wide / norm, steps, left=True)) if R == C else G,
            "Powers of single elements: A A is a product of matrices, A @ A, not A * A or A**2.": turned(elementwise(wide / norm, steps)),
            "Powers of single elements: x^3 and x^5 stand for x x^T x and x x^T x x^T x, products of matrices.": turned(elementwise(wide / norm, steps, True)),
            "c A A is missing: this is a s + b s^3.": turned(iterated(wide / norm, steps, (*QUINTIC[:2], 0.0))),
            "The number of iterations is wrong: make `steps` of them.":
                lambda got: any(np.allclose(got, turned(iterated(wide / norm, n)), rtol=1e-5) for n in range(9) if n != steps),
            "These are the classical coefficients, 1.5 and -0.5: use QUINTIC.": turned(iterated(wide / norm, steps, (1.5, -0.5, 0.0))),
            "This is divided by the spectral norm. That is a good start, too, but needs a decomposition: divide by the Frobenius norm.":
                turned(iterated(wide / spectral, steps)),
            "This is divided by the sum of squares: take its root.": turned(iterated(wide / max(norm**2, 1e-7), steps)),
            "The result has the wrong sign: the sign of the step comes later.": -want,
        })  # fmt: skip
        e.need(np.array_equal(G, given), CHANGED)
        e.need(not tall or (R, R) not in given.shapes,
               f"The values are right, but a product is ({R}, {R}): for R > C the Gram matrix is (C, C), and smaller. Transpose G, or compute X^T X.")  # fmt: skip
    if re.search(r"\b(svd|eigh?|eigvalsh?)\b", e.code):
        e.remark(
            "A decomposition of each matrix would take longer than a training step: products alone give the same."
        )


@exercise(
    "28.3", "muon_step",
    first_step="the new running mean: m + (1 - mu) (g - m).",
    hints={"TypeError": "orthogonalize takes one matrix and returns one."},
    kernel=False,
)  # fmt: skip
def muon_step(e):
    rng = e.rng

    def orthogonalize(x):
        U, _, Vt = np.linalg.svd(x, full_matrices=False)
        return U @ Vt

    for R, C in ((2, 6), (3, 3), (7, 3), (int(rng.integers(3, 6)), 8)):
        w, m, g = (rng.normal(size=(R, C)) for _ in range(3))
        lr, mu, decay = rng.uniform(0.05, 0.2), rng.uniform(0.6, 0.9), rng.uniform(0.2, 0.5)
        given = [w.copy(), m.copy(), g.copy()]
        got = e.call(*given, lr, mu, decay, orthogonalize, case=f"matrices of shape ({R}, {C})")
        new_w, new_m = e.several(got, "w", "m")
        mean = m + (1 - mu) * (g - m)
        e.same("m", new_m, mean, {
            "The weights of old and new are exchanged: mu is the weight of the OLD mean.": m + mu * (g - m),
            "This is a sum, mu m + g, and grows to 1 / (1 - mu) times the gradient: take the mean.": mu * m + g,
            "m is not updated: return the new one.": m,
            "This is x, which looks one step ahead: return m.": g + mu * (mean - g),
            "m was orthogonalised: only x is.": orthogonalize(mean),
        })  # fmt: skip

        plain = 0.2 * np.sqrt(max(R, C))

        def step(x, scale=plain, keep=1 - lr * decay, w=w, lr=lr):
            return w * keep - lr * scale * orthogonalize(x)

        x = g + mu * (mean - g)
        e.same("w", new_w, step(x), {
            "This goes uphill: subtract the step.": step(-x),
            "x is the new m here, or is made from the OLD m, which is the same: Nesterov's g + mu (m - g) has the new one.": step(mean),
            "The running mean is not used: x = g + mu (m - g).": step(g),
            "Nothing is orthogonalised here.": w * (1 - lr * decay) - lr * plain * x,
            "The scale is missing: 0.2 sqrt(max(R, C)).": step(x, 1.0),
            "0.2 is missing in the scale.": step(x, np.sqrt(max(R, C))),
            "sqrt(max(R, C)) is missing in the scale.": step(x, 0.2),
            "The scale is 0.2 times the root of the number of elements: it is 0.2 sqrt(max(R, C)).": step(x, 0.2 * np.sqrt(R * C)),
            "The step is not multiplied by the learning rate.": step(x, plain / lr),
            "The decay is added: w shrinks, w (1 - lr decay).": step(x, keep=1 + lr * decay),
            "The scale has the root of the SMALLER side: it is max(R, C).": step(x, 0.2 * np.sqrt(min(R, C))),
            "The scale has no root: 0.2 sqrt(max(R, C)).": step(x, 0.2 * max(R, C)),
            "There is no weight decay: multiply w by 1 - lr decay.": step(x, keep=1.0),
            "The decay is not multiplied by the learning rate: 1 - lr decay.": step(x, keep=1 - decay),
            "x is mu m + g, Nesterov's step for a running SUM. m is a mean here: g + mu (m - g).": step(g + mu * mean),
            "The weights were decayed after the step: only the old w is multiplied by 1 - lr decay.":
                step(x, keep=1.0) * (1 - lr * decay),
        })  # fmt: skip
        e.need(all(map(np.array_equal, given, (w, m, g))), CHANGED)


@exercise(
    "28.4", "wsd",
    first_step="three cases: step < warmup; before the last n steps; in them. k = step - (steps - 1 - n) counts the last ones from 1.",
    hints={"ZeroDivisionError": "warmup may be 0: then there is no warm-up. And n may be 0, if fraction steps is below 1: then there is no decay."},
    kernel=False,
)  # fmt: skip
def wsd(e):
    rng = e.rng
    for steps, warmup, fraction in (
        (10, 2, 0.3),
        (50, 5, 0.2),
        (int(rng.integers(60, 90)), 0, 0.25),
        (8, 1, 0.1),
    ):
        peak = float(rng.uniform(0.5, 2.0))
        n = int(fraction * steps)
        case = f"steps = {steps}, warmup = {warmup}, fraction = {fraction}"
        got = [
            e.call(i, steps, peak, warmup, fraction, case=f"{case}, step = {i}")
            for i in range(steps)
        ]
        e.case(case)
        e.need(all(np.ndim(x) == 0 and x is not None for x in got), "Return one number.")

        def rates(shape, first=steps - 1 - n, n=n, up=1, warmup=warmup, peak=peak, steps=steps):
            rising = [peak * (i + up) / warmup for i in range(warmup)]
            t = [max(0.0, (i - first) / max(n, 1)) for i in range(warmup, steps)]
            return np.array(rising + [peak * shape(min(x, 1.0)) for x in t])

        later = int(fraction * (steps - warmup))
        rounded = int(np.ceil(fraction * steps))
        root, line = (lambda t: 1 - np.sqrt(t)), (lambda t: 1 - t)
        cosine = lambda t: 0.5 * (1 + np.cos(np.pi * t))
        e.same("rates", np.array(got, float), rates(root), {
            "NaN: k is negative before the decay, and has no root. There the rate is the peak.": not_finite,
            "The warm-up begins at 0: the first step would be lost. It is peak (step + 1) / warmup.": rates(root, up=0),
            "The decay is a straight line: it is 1 - sqrt(t).": rates(line),
            "The decay is half a cosine: it is 1 - sqrt(t).": rates(cosine),
            "This is sqrt(1 - t), which falls late: it is 1 - sqrt(t), which falls early.": rates(lambda t: np.sqrt(1 - t)),
            "The decay begins one step late, so the last step does not reach 0: k counts from 1.": rates(root, steps - n),
            "The decay begins one step early: k of the first of the last n steps is 1.": rates(root, steps - 2 - n),
            "n is a whole number of steps, int(fraction steps).": rates(root, steps - 1 - fraction * steps, fraction * steps),
            "n is rounded up or to the nearest: int() cuts off, so the decay has the whole steps that fit into fraction steps.":
                rates(root, steps - 1 - rounded, rounded) if rounded > n else np.empty(0),
            "n is a fraction of all steps, not only of those after the warm-up.": rates(root, steps - 1 - later, later),
            "There is no decay.": rates(lambda t: 1.0),
            "The decay begins right after the warm-up: between them the rate stays at the peak.":
                rates(root, warmup, max(steps - 1 - warmup, 1)),
            "The peak is missing: the rates are fractions of it.": rates(root) / peak,
        })  # fmt: skip
