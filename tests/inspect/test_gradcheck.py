"""gradcheck: every op passes, planted mistakes fail, and the command reports them."""

import sys
from pathlib import Path

import numpy as np
import pytest
from public_api import public_ops

from xtrain import UserError
from xtrain.gradcheck import main as gradcheck_main
from xtrain.inspect import gradcheck
from xtrain.inspect.gradcheck import CASES, TOLERANCE, Draw, check, run
from xtrain.kernels.rope import rope_fwd
from xtrain.nn import functional as F
from xtrain.nn.autograd import Function
from xtrain.nn.deferred import ResidualRMSNorm


@pytest.mark.parametrize("op", CASES)
def test_every_op_against_finite_differences(op):
    found, failure = run(op)
    assert not failure, f"{op} is wrong; smallest failure: {failure}"
    assert all(error <= TOLERANCE for _, error in found.values())
    inputs = CASES[op][0]
    assert inputs is None or list(found) == [text.split(":")[0] for text in inputs.split(", ")]


def test_no_op_is_forgotten():
    fused = {"residual_rmsnorm", "add_norm_linear", "swiglu_linear", "geglu_linear"}  # deferred.py
    different = (public_ops().keys() | fused) ^ (CASES.keys() - {"transformer"})
    assert not different, f"{different}: add it to CASES in xtrain/inspect/gradcheck.py"


def test_the_same_numbers_every_time():
    assert run("residual_rmsnorm") == run("residual_rmsnorm")


# ----------------------------------------------------------------------------- planted mistakes
def _times(i, factor):
    return lambda right, ctx, *d: tuple(
        dx * factor if j == i else dx for j, dx in enumerate(_tuple(right(ctx, *d)))
    )


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)


def _swap(i, j):
    def wrong(right, ctx, *d):
        result = list(right(ctx, *d))
        result[i], result[j] = result[j], result[i]
        return tuple(result)

    return wrong


def _one_element(right, ctx, *d):
    result = right(ctx, *d)
    result[0].reshape(-1)[-1] *= 1.001
    return result


def _overwrites(right, ctx, *d):
    """The gradient of w overwrites the gradient before, and is not added to it."""
    ctx.grad_buffer(1, ctx.saved[1])[...] = 0
    return right(ctx, *d)


def _only_the_norm(right, ctx, dh, dy):
    return right(ctx, np.zeros_like(dh), dy)


PLANTED = {
    "a forgotten factor": ("scale", lambda right, ctx, dy: dy),
    "a factor too much": ("cross_entropy", _times(0, 1.0001)),
    "a wrong sign": ("silu", _times(0, -1)),
    "no gradient at all": ("rmsnorm", lambda right, ctx, dy: (None, right(ctx, dy)[1])),
    "dk and dv swapped": ("attention", _swap(1, 2)),
    "one element a thousandth off": ("linear", _one_element),
    "w overwritten, not added to": ("rmsnorm", _overwrites),
    "a skipped path": ("residual_rmsnorm", _only_the_norm),
    "the rotation not turned back": (
        "rope",
        lambda right, ctx, dy: rope_fwd(dy, *ctx.saved),
    ),
    "NaN": ("swiglu", _times(0, np.nan)),
    "a wrong layout": ("reshape", lambda right, ctx, dy: dy.T.copy().reshape(ctx.saved[0])),
}
CLASSES = dict(
    scale=F.Scale, cross_entropy=F.CrossEntropy, silu=F.SiLU, rmsnorm=F.RMSNorm, attention=F.Attention,
    linear=F.Linear, residual_rmsnorm=ResidualRMSNorm, rope=F.Rope, swiglu=F.SwiGLU, reshape=F.Reshape,
)  # fmt: skip


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_caught(mistake, monkeypatch):
    op, wrong = PLANTED[mistake]
    right = CLASSES[op].backward
    monkeypatch.setattr(
        CLASSES[op], "backward", staticmethod(lambda ctx, *d: wrong(right, ctx, *d))
    )
    _, failure = run(op)
    assert failure, f"{op} with {mistake} passed"


def test_the_smallest_failure_is_shown(monkeypatch, capsys):
    wrong = staticmethod(lambda ctx, dy: dy if dy.size > 2 else dy * ctx.saved[0])
    monkeypatch.setattr(F.Scale, "backward", wrong)
    assert gradcheck_main(["scale", "add"]) == 1
    out = capsys.readouterr().out
    assert "NO" in out and "scale is wrong; smallest failure: x (1, 7)" in out
    assert "add is wrong" not in out


# ----------------------------------------------------------------------------- a user's op
class Divide(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save(a, b)
        return a / b, a * b

    @staticmethod
    def backward(ctx, dquotient, dproduct):
        a, b = ctx.saved
        return dquotient / b + dproduct * b, dproduct * a - dquotient * a / b**2


def test_a_users_op_in_three_lines():
    a, b = np.random.default_rng(0).uniform(1, 2, (2, 3, 4))
    errors = check(Divide.apply, [a, b])
    assert len(errors) == 2 and max(errors) < 1e-6


@pytest.mark.parametrize("scale", [1e-12, 1e6])
def test_the_size_of_the_numbers_does_not_matter(scale):
    a, b = np.random.default_rng(0).uniform(1, 2, (2, 3, 4)) * scale
    f = lambda a, b: Divide.apply(a, b)[0]
    with pytest.raises(TypeError):  # the other output is None: Divide does not expect it
        check(f, [a, b])
    errors = check(Divide.apply, [a, b])
    assert max(errors) < 1e-6


def test_zero_inputs_and_flat_functions():
    assert check(lambda x: F.scale(x, 0.0), [np.ones((2, 3))]) == [0.0]
    assert max(check(F.add, [np.zeros(4), np.zeros(4)])) < 1e-6


def test_check_is_imported_as_documented():
    from xtrain.gradcheck import check as documented

    assert documented is check


def test_float32_is_refused():
    with pytest.raises(TypeError, match="float64"):
        check(F.silu, [np.ones(3, np.float32)])


# ----------------------------------------------------------------------------- the command
def test_the_command_prints_a_table(capsys):
    assert gradcheck_main(["add", "linear"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["op", "input", "shapes", "error", "tolerance", "ok"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["add", "a"],
        ["add", "b"],
        ["linear", "x"],
        ["linear", "w"],
        ["linear", "b"],
    ]


def test_an_unknown_op_is_one_sentence(capsys):
    assert gradcheck_main(["softmax"]) == 2
    captured = capsys.readouterr()
    assert "unknown op 'softmax'" in captured.err and "causal_softmax" in captured.err
    assert captured.err.count("\n") == 1 and not captured.out


def test_without_hypothesis(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert gradcheck_main(["add"]) == 2
    assert "pip install hypothesis" in capsys.readouterr().err
    with pytest.raises(UserError):
        run("add")


def test_it_stays_short():
    assert len(Path(gradcheck.__file__).read_text().splitlines()) < 275


def test_every_size_is_drawn_once():
    d = Draw(lambda values: values[-1])
    assert d.Q == (d.H + 2 * d.G) * d.D and d.M == 3 * 33 and d.H == 9
