"""Exercises of lesson 6: a define-by-run autograd."""

import itertools

import numpy as np

from .attempt import exercise

_clock = itertools.count()


class Tensor:
    """The notebook's Tensor: an array, its gradient, its parents."""

    def __init__(self, data, parents=()):
        self.data, self.parents, self.grad = np.asarray(data, np.float64), list(parents), None
        self.order = next(_clock)

    @property
    def shape(self):
        return self.data.shape


def run_backward(root):
    """A correct engine, used to check single ops."""
    root.grad = np.ones_like(root.data)
    todo, seen = [root], {id(root)}
    while todo:
        node = max(todo, key=lambda t: t.order)
        todo.remove(node)
        for parent, function in node.parents:
            contribution = function(node.grad)
            parent.grad = contribution if parent.grad is None else parent.grad + contribution
            if id(parent) not in seen:
                seen.add(id(parent))
                todo.append(parent)


def made(e, out, tensors):
    """Check that an op returns a Tensor with one parent per input tensor."""
    e.need(
        hasattr(out, "parents") and hasattr(out, "data"),
        f"Return a Tensor, not {type(out).__name__}: Tensor(value, [(parent, function), ...]).",
    )
    for parent in out.parents:
        e.need(
            isinstance(parent, tuple) and len(parent) == 2 and callable(parent[1]),
            "Each entry of parents is a pair: (the tensor, a function from dy to its gradient).",
        )
    known = [id(t) for t, _ in out.parents]
    e.need(
        all(id(t) in known for t in tensors),
        "One of the input tensors is not among the parents, so it would never get a gradient.",
    )


@exercise(
    "6.1", "multiply",
    first_step="the value is a.data * b.data. Its parents are a and b, each with a function from dy to the gradient of that parent.",
    hints={"TypeError": "A Tensor is not an array: its numbers are a.data and b.data.",
           "ValueError": "The element-by-element product is *, not @."},
    kernel=False,
)  # fmt: skip
def multiply(e):
    a, b = (Tensor(e.normal(2, 3)) for _ in range(2))
    out = e.call(a, b, case="two tensors (2, 3)")
    made(e, out, (a, b))
    e.same("the value", out.data, a.data * b.data)
    dy = np.asarray(e.normal(2, 3), np.float64)
    for name, parent, want, other in (("a", a, b.data, a.data), ("b", b, a.data, b.data)):
        function = next(f for t, f in out.parents if t is parent)
        e.same(f"the gradient of {name}", e.ask(function, dy), dy * want, {
            f"That is dy times {name} itself. The derivative of a b with respect to {name} is the OTHER factor.": dy * other,
            "dy is missing: multiply the derivative of this op by the incoming gradient.": want,
        })  # fmt: skip
    x = Tensor([3.0])
    out = e.call(x, x, case="x times itself, x = 3")
    e.ask(run_backward, out)
    e.same("the gradient of x", x.grad, np.array([6.0]), {
        "Only one of the two paths to x was recorded: x must appear twice among the parents of x * x.": np.array([3.0]),
    })  # fmt: skip


@exercise(
    "6.2", "add_bias",
    first_step="the value is x.data + b.data, where NumPy broadcasts b to every row. So each b[c] is used N times, and gets the sum of N gradients.",
    hints={"TypeError": "A Tensor is not an array: its numbers are x.data and b.data."},
    kernel=False,
)  # fmt: skip
def add_bias(e):
    for N, C in ((3, 4), (1, 2), (5, 5)):
        x, b = Tensor(e.normal(N, C)), Tensor(e.normal(C))
        out = e.call(x, b, case=f"x ({N}, {C}), b ({C})")
        made(e, out, (x, b))
        e.same("the value", out.data, x.data + b.data)
        dy = np.asarray(e.normal(N, C), np.float64)
        of = {id(t): f for t, f in out.parents}
        e.same("the gradient of x", e.ask(of[id(x)], dy), dy)
        got = e.ask(of[id(b)], dy)
        e.need(
            np.shape(got) != (N, C),
            "The gradient of b has the shape of dy. A gradient has the shape of its own tensor: each b[c] is used N times, so sum over the rows.",
        )
        e.same("the gradient of b", got, dy.sum(0), {
            "The mean over rows was taken. b[c] is used in every row, so its gradients add up: it is a sum.": dy.mean(0) if N > 1 else np.empty(0),
            "The sum runs over the columns: b has one number per column, so sum over the rows.": dy.sum(1) if N == C else np.empty(0),
            "That is the first row of dy alone: b[c] is used in every row.": dy[0],
            "b itself does not appear: the derivative of x + b with respect to b is 1.": dy.sum(0) * b.data,
        })  # fmt: skip


@exercise(
    "6.3", "backward",
    first_step="set root.grad to ones. Then, while there are tensors left to process, take the one with the largest `order`.",
    hints={"TypeError": "A grad is None until it is set: set root.grad to ones at the start, and do not add the first gradient of a parent "
           "to None.",
           "AttributeError": "A Tensor has data, parents, grad and order; each parent is a pair (tensor, function).",
           "RecursionError": "One nested call per op exceeds Python's recursion limit: use a loop and a list."},
    kernel=False,
)  # fmt: skip
def backward(e):
    calls = []

    def op(value, *parents):
        counted = lambda f: lambda dy: (calls.append(1), f(dy))[1]
        return Tensor(value, [(t, counted(f)) for t, f in parents])

    double = lambda t: op(2 * t.data, (t, lambda dy: 2 * dy))
    add = lambda a, b: op(a.data + b.data, (a, lambda dy: dy), (b, lambda dy: dy))
    mul = lambda a, b: op(a.data * b.data, (a, lambda dy: dy * b.data), (b, lambda dy: dy * a.data))

    x = Tensor([1.0, 2.0])
    y = double(double(x))
    e.call(y, case="a chain, y = 2 (2 x)")
    e.need(
        x.grad is not None,
        "x.grad is still None: the gradient is not passed on from parent to parent.",
    )
    e.need(
        np.shape(y.grad) == (2,),
        "The gradient of the root must be ones, in the shape of root.data.",
    )
    e.same("x.grad", x.grad, np.array([4.0, 4.0]), {
        "The gradient of the root must start as ones, not as its value.": 4 * y.data,
        "It ended after one step: the parents of parents get a gradient too.": np.array([2.0, 2.0]),
    })  # fmt: skip

    x, w = Tensor([3.0]), Tensor([2.0])
    y = add(mul(x, w), x)
    e.call(y, case="y = x w + x with x = 3, w = 2: x is used twice")
    e.same("x.grad", x.grad, np.array([3.0]), {
        "Only one of the two paths to x counts: a second gradient is ADDED to the first.":
            lambda got: np.allclose(got, 1.0) or np.allclose(got, 2.0),
    })  # fmt: skip

    x, w = Tensor([3.0]), Tensor([2.0])
    e.call(add(add(x, w), x), case="y = (x + w) + x")
    e.same("x.grad", x.grad, np.array([2.0]))
    e.same("w.grad", w.grad, np.array([1.0]), {
        "`add` passes dy on unchanged, so several tensors share the same array, and += changes it for all. Make a new one: grad = grad + contribution.":
            np.array([2.0]),
    })  # fmt: skip

    for name, join in (("a + 8 a", add), ("8 a + a", lambda a, b: add(b, a))):
        x = Tensor([3.0])
        a = double(x)
        y = join(a, double(double(double(a))))  # a short path to a, and a long one
        e.call(y, case=f"y = {name} with a = 2 x: a is reached by a short path and by a long one")
        e.same("x.grad", x.grad, np.array([18.0]), {
            "A tensor was processed twice, once for each path to it: put it on the list only once.": np.array([36.0]),
            "A tensor was processed before its gradient was complete: take the tensors newest first, by `order`, "
            "so that every op that used it has been processed.": lambda got: True,
        })  # fmt: skip

    x = Tensor([1.0])
    y = x
    for _ in range(14):
        y = add(y, y)
    calls.clear()
    e.call(y, case="x doubled 14 times by y = y + y")
    e.same("x.grad", x.grad, np.array([2.0**14]))
    e.need(
        len(calls) <= 28,
        f"Correct, but backward called {len(calls):,} functions where 28 are enough: process every tensor once, after all its "
        "gradients have arrived, and not once for every path to it.",
    )

    x = Tensor([1.0])
    y = x
    for _ in range(3000):
        y = op(y.data, (y, lambda dy: dy))
    e.call(y, case="a chain of 3000 ops, which exceeds Python's recursion limit: use a loop")
    e.same("x.grad", x.grad, np.array([1.0]))
