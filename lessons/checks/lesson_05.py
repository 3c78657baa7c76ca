"""Exercises of lesson 5: the backward pass by hand, and how to check it."""

import numpy as np

from xtrain.kernels.rmsnorm import rmsnorm_bwd_ref, rmsnorm_ref

from .attempt import exercise

EPS = 1e-2


def double(a):
    return np.asarray(a).astype(np.float64)


@exercise(
    "5.1", "linear_bwd",
    first_step="write down the shapes: dx has the shape of x, (N, I). Which product of dy (N, O) and w (O, I) has it?",
    hints={"ValueError": "Look at the shapes: in a @ b the last axis of a and the first axis of b have the same size, and disappear. "
           "For dx this is O, for dw it is N."},
    kernel=False,
)  # fmt: skip
def linear_bwd(e):
    fixed = (2, 3, 4), (5, 1, 2), (3, 3, 3), (1, 4, 3)
    for N, I, O in e.cases(fixed, lambda rng: rng.integers(2, 7, 3)):
        x, w, dy = double(e.normal(N, I)), double(e.normal(O, I)), double(e.normal(N, O))
        got = e.call(dy, x, w, case=f"x ({N}, {I}), w ({O}, {I})")
        dx, dw = e.several(got, "dx", "dw")
        shapes = tuple(np.shape(dx)), tuple(np.shape(dw))
        e.need(
            shapes != ((O, I), (N, I)) or N == O,
            "dx and dw are swapped: return dx first.",
        )
        want = dy @ w
        e.same("dx", dx, want, {
            "That is dy w^T. For a square w the shapes match, but the sum is wrong: it runs over outputs, the FIRST axis of w.":
                dy @ w.T if I == O else np.empty(0),
            "That is y itself, the forward product.": x @ w.T if I == O else np.empty(0),
        })  # fmt: skip
        e.same("dw", dw, dy.T @ x, {
            "That is the transpose of dw: dw has one row per output, like w.": (x.T @ dy) if I == O else np.empty(0),
            "The mean over rows was taken, but every row contributes to dw, so it is the sum.": dy.T @ x / N if N > 1 else np.empty(0),
            "That is the contribution of the last row alone: sum over all rows.": np.outer(dy[-1], x[-1]),
        })  # fmt: skip


@exercise(
    "5.2", "rmsnorm_bwd",
    first_step="with xhat = x r and g = dy w: dw is the sum over rows of dy xhat. For dx, r depends on x as well.",
    hints={"ValueError": "One number per row has shape (N,). To multiply each row by its own number, make it a column: rstd_N[:, None] is (N, 1)."},
    kernel=False,
)  # fmt: skip
def rmsnorm_bwd(e):
    for N, C in e.cases(((2, 4), (3, 5), (1, 1)), lambda rng: rng.integers(2, 9, 2)):
        x, w, dy = double(e.normal(N, C)), double(e.normal(C)), double(e.normal(N, C))
        rstd = rmsnorm_ref(x, w, EPS)[1]
        got = e.call(dy, x, w, rstd, case=f"x ({N}, {C})")
        dx, dw = e.several(got, "dx", "dw")
        want_dx, want_dw = rmsnorm_bwd_ref(dy, x, w, rstd)
        r, g = rstd[:, None], dy * w
        xhat = x * r
        e.same("dx", dx, want_dx, {
            "That treats r as a constant. But r depends on every x of the row, so a second term is missing.": r * g,
            "The second term has a sum over columns where it needs a mean: dr/dx_c = -r^3 x_c / C.":
                r * (g - xhat * (g * xhat).sum(1, keepdims=True)) if C > 1 else np.empty(0),
            "The sign of the second term is wrong: a larger x makes r smaller.":
                r * (g + xhat * (g * xhat).mean(1, keepdims=True)),
            "w is missing: the gradient with respect to x r is g = dy w.":
                r * (dy - xhat * (dy * xhat).mean(1, keepdims=True)),
            "The mean is taken over rows; each row has its own mean, over its columns: axis 1.":
                lambda got: N > 1 and np.allclose(got, r * (g - xhat * (g * xhat).mean(0))),
            "The mean is taken over the whole array; each row has its own mean, over its columns: axis 1.":
                lambda got: N > 1 and np.allclose(got, r * (g - xhat * (g * xhat).mean())),
            "Both terms are correct, but the factor r in front of the bracket is missing.": g - xhat * (g * xhat).mean(1, keepdims=True),
            "The second term uses x where it needs xhat = x r.": r * (g - x * (g * xhat).mean(1, keepdims=True)),
            "The second term was not multiplied by r.": r * g - xhat * (g * xhat).mean(1, keepdims=True),
        })  # fmt: skip
        e.need(
            np.shape(dw) == (C,),
            f"dw has shape {np.shape(dw)}, but it must be ({C},), like w: one number per column, the sum over all rows (axis 0).",
        )
        e.same("dw", dw, want_dw, {
            "That is the sum of dy x: y = xhat w, so the factor of w is xhat = x r.": (dy * x).sum(0),
            "dw contains w: y is linear in w, so w itself does not appear.": (g * xhat).sum(0),
            "The mean over rows was taken, but every row contributes to dw, so it is the sum.": (dy * xhat).mean(0) if N > 1 else np.empty(0),
        })  # fmt: skip


@exercise(
    "5.3", "gradient_error",
    first_step="up = f(x + step * v), down = f(x - step * v): the slope along v is their difference over 2 step. And what should it be?",
    hints={"ValueError": "gradient and v have several axes. Their inner product is one number: (gradient * v).sum()."},
    kernel=False,
)  # fmt: skip
def gradient_error(e):
    x, v = double(e.normal(4, 5)), double(e.normal(4, 5, mean=0.0))
    f, gradient = (lambda x: float(np.sum(np.sin(x) + x**3))), np.cos(x) + 3 * x**2
    points = []

    def recording_f(z):
        e.need(
            isinstance(z, np.ndarray) and z.dtype == np.float64,
            "f was called with something other than a float64 array: in float32 the difference is lost in rounding errors.",
        )
        points.append(z.copy())
        return f(z)

    mine = x.copy()
    error = e.call(recording_f, mine, gradient, v, 1e-5, case="a correct gradient")
    e.need(error is not None and np.ndim(error) == 0, "Return one number, the relative error.")
    e.need(
        np.array_equal(mine, x),
        "x has changed: use x + step * v, a new array, and not x += ...",
    )
    error = float(error)
    e.need(len(points) > 0, "f was never called.")
    e.need(
        all(not np.array_equal(z, x) for z in points),
        "f was called at x itself: that is the one-sided difference, whose error is of order step instead of step squared. "
        "Take f(x + step v) and f(x - step v).",
    )
    moved = [np.allclose(abs(z - x), abs(1e-5 * v), rtol=1e-3, atol=1e-12) for z in points]
    e.need(
        all(moved),
        "f was called at a point other than x + step v and x - step v: all elements move at once, each by step times its own v.",
    )
    e.need(
        error >= 0,
        f"The error is {error:.3g}, which is negative: take the absolute value of the difference.",
    )
    e.need(
        error < 1e-7,
        f"A correct gradient gets the error {error:.3g}, but it should be below 1e-7. Divide by 2 step, and compare with "
        "sum(gradient * v), not with the gradient's sum.",
    )
    error = float(
        e.call(recording_f, x.copy(), -gradient, v, 1e-5, case="minus the correct gradient")
    )
    e.need(
        error > 0.5,
        f"A gradient with the wrong sign gets the error {error:.3g}, but it should be 1 or more: divide abs(numeric - analytic) "
        "by the size of a slope.",
    )
    wrong = gradient.copy()
    wrong[2, 3] *= 1.05
    error = float(
        e.call(
            recording_f, x.copy(), wrong, v, 1e-5, case="a gradient with one element 5 % too large"
        )
    )
    slope = (gradient * v).sum()
    want = abs((gradient - wrong)[2, 3] * v[2, 3]) / abs(slope)
    e.need(
        error > want / 10,
        f"A wrong gradient gets the error {error:.3g}, but it should be near {want:.3g}."
        + " Take the absolute value." * (error < 0),
    )
    for factor, what in ((1e6, "f a million times larger"), (-1.0, "f with the opposite sign")):
        scaled = e.call(
            lambda z: factor * recording_f(z),
            x.copy(),
            factor * wrong,
            v,
            1e-5,
            case=f"the same, {what}",
        )
        e.need(
            float(scaled) < 1,
            f"With {what} the error is {scaled:.3g}: divide by the size of the slope, so that the error is relative.",
        )
        e.need(
            factor > 0 or float(scaled) > want / 10,
            f"Both slopes have changed sign, and the error is {scaled:.3g}; before, it was {error:.3g}. "
            "The larger of two slopes is max(abs(numeric), abs(analytic)).",
        )
    for factor in (100, 0.01):
        case = f"{factor} times the correct gradient"
        error = float(e.call(recording_f, x.copy(), factor * gradient, v, 1e-5, case=case))
        e.need(
            error < 1.01,
            f"The error is {error:.3g}: divide by the LARGER of the two slopes, which gives 0.99.",
        )
    n = int(e.rng.integers(3, 9))
    x, v, c = (double(e.normal(n, mean=0.0)) for _ in range(3))
    wrong = 2 * c * x * (1 + e.rng.uniform(0.05, 0.5, n))
    true, given = (2 * c * x * v).sum(), (wrong * v).sum()
    got = e.call(
        lambda z: float((c * z * z).sum()),
        x,
        wrong,
        v,
        1e-3,
        case=f"a wrong gradient of shape ({n},)",
    )
    e.need(got is not None and np.ndim(got) == 0, "Return one number, the relative error.")
    error, sizes = abs(true - given), (abs(true), abs(given))  # of the slopes; their sum is as good
    e.need(
        0.999 * error / sum(sizes) < got < 1.001 * error / max(sizes),
        f"The error is {got:.4g}; expected {error / max(sizes):.4g}: the slopes are {true:.4g} and {given:.4g}. The gradient may have any shape, "
        "and step may be any small number.",
    )


@exercise(
    "5.4", "rmsnorm_bwd_dx_kernel",
    first_step="each thread sums g xhat over its own columns, with g = dy w and xhat = x r; block_sum gives the sum of the row.",
    allow=("block_sum",),
    hints={
        "DeadlockError": "All threads must call block_sum: outside any `if`, and once per row, not once per column.",
        "OutOfBoundsError": "Columns go from tid to C in steps of cuda.blockDim.x.",
    },
)  # fmt: skip
def rmsnorm_bwd_dx_kernel(e):
    fixed = (2, 64, 64), (3, 100, 32), (2, 7, 64)
    draw = lambda rng: (*rng.integers((2, 30), (5, 150)), 32 * rng.integers(1, 4))
    for N, C, block in e.cases(fixed, draw):
        x, w, dy, dx = e.normal(N, C), e.normal(C), e.normal(N, C), e.blank(N, C)
        x64, w64, dy64 = map(double, (x, w, dy))
        rstd = rmsnorm_ref(x64, w64, EPS)[1]
        r, g = rstd[:, None], dy64 * w64
        xhat = x64 * r
        short = np.array(rstd.astype(np.float32)).view(type(x))
        case = f"{N} rows, {C} columns"
        trace = e.run(N, block, dx, dy, x, w, short, case=case, trace=True)
        lost = np.where(np.arange(C) % 64 < block, g * xhat, 0).mean(1, keepdims=True)
        e.same("dx", dx, rmsnorm_bwd_ref(dy64, x64, w64, rstd)[0], {
            "That is only the first term, r g: the mean of g xhat over the row is missing.": r * g,
            "The sum of g xhat was not divided by C.": r * (g - xhat * (g * xhat).sum(1, keepdims=True)),
            "The step from one column of a thread to its next is the number of threads in the block, cuda.blockDim.x, not 64.":
                lambda got: block < 64 and np.allclose(got[:, :block], (r * (g - xhat * lost))[:, :block], 1e-4, 1e-5),
            f"The columns from {block} on were never written: continue in steps of cuda.blockDim.x.":
                lambda got: block < C and np.isnan(got[:, block:]).all() and not np.isnan(got[:, :block]).any(),
            "The sum uses x where it needs xhat = x r.": r * (g - xhat * (g * x64).mean(1, keepdims=True)),
            "dx was written with += : it holds NaN before you write it. Write the gradient of an activation with = .":
                lambda got: e.wrote(dx).all() and np.isnan(got).all(),
            "That is the mean over each thread's own columns: block_sum(acc, partial) adds up the threads of the block.":
                lambda got: C == 64 and np.allclose(got, r * (g - xhat * (g * xhat) / C), 1e-4, 1e-5),
            "Both terms are correct, but the factor rstd in front of the bracket is missing.": g - xhat * (g * xhat).mean(1, keepdims=True),
            "w is missing in the sum: the mean is of g xhat, with g = dy w.":
                r * (g - xhat * (dy64 * xhat).mean(1, keepdims=True)),
            "w is missing in the first term: g = dy w.": r * (dy64 - xhat * (g * xhat).mean(1, keepdims=True)),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip
        e.divided(trace, x, N * min(block, C))
