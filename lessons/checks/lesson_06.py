"""Exercises of lesson 6: a define-by-run autograd."""

import itertools

import numpy as np

from .attempt import exercise

_clock = itertools.count()


class Tensor:
    """The notebook's Tensor: an array, its gradient, its parents."""

    writable = ("grad",)  # see process.py

    def __init__(self, data, parents=()):
        self.data, self.parents, self.grad = np.asarray(data, np.float64), list(parents), None
        self.order = next(_clock)

    @property
    def shape(self):
        return self.data.shape


def run_backward(root, dy=None):
    """A correct engine, used to check single ops. dy: the gradient of the root; None: ones.

    It follows the graph and not `order`: the reader's own Tensors have another clock.
    """
    done, todo, newest_last = set(), [(root, False)], []
    while todo:
        node, parents_done = todo.pop()
        if parents_done:
            newest_last.append(node)
        elif id(node) not in done:
            done.add(id(node))
            todo += [(node, True), *((parent, False) for parent, _ in node.parents)]
    root.grad = np.ones_like(root.data) if dy is None else dy
    for node in reversed(newest_last):
        for parent, function in node.parents:
            contribution = function(node.grad)
            parent.grad = contribution if parent.grad is None else parent.grad + contribution


def gradients(e, out, dy, *tensors):
    """-> the gradients of an op's inputs, after checks that it returned a Tensor which leads to them."""
    e.need(
        hasattr(out, "parents") and hasattr(out, "data"),
        f"Return a Tensor, not {type(out).__name__}: Tensor(value, [(parent, function), ...]).",
    )
    for parent in out.parents:
        e.need(
            isinstance(parent, tuple) and len(parent) == 2 and callable(parent[1]),
            "Each entry of parents is a pair: (the tensor, a function from dy to its gradient).",
        )
    e.ask(run_backward, out, dy)
    e.need(
        all(t.grad is not None for t in tensors),
        "One of the input tensors is not among the parents, so it would never get a gradient.",
    )
    return [t.grad for t in tensors]


@exercise(
    "6.1", "multiply",
    first_step="the value is a.data * b.data. Its parents are a and b, each with a function from dy to the gradient of that parent.",
    hints={"TypeError": "A Tensor is not an array: its numbers are a.data and b.data.",
           "ValueError": "The element-by-element product is *, not @; and one function per parent returns one array."},
    kernel=False,
)  # fmt: skip
def multiply(e):
    for shape in e.cases(((2, 3), (4,)), lambda rng: tuple(rng.integers(2, 5, 3))):
        a, b = (Tensor(e.normal(*shape)) for _ in range(2))
        a.data[0], b.data[-1] = 0, 0  # the derivative is also right where a factor is 0
        dy = np.asarray(e.normal(*shape), np.float64)
        out = e.call(a, b, case=f"two tensors {shape}, in which some elements are 0")
        got = gradients(e, out, dy, a, b)
        e.same("the value", out.data, a.data * b.data)
        for name, grad, want, own in (("a", got[0], b.data, a.data), ("b", got[1], a.data, b.data)):
            e.same(f"the gradient of {name}", grad, dy * want, {
                f"That is dy times {name} itself. The derivative of a b with respect to {name} is the OTHER factor.": dy * own,
                "dy is missing: multiply the derivative of this op by the incoming gradient.": want,
                f"0 / 0 is NaN: where {name} is 0, the other factor is not y / {name}. Use the other factor itself.":
                    lambda got: np.isnan(got).any(),
                "Only the derivative belongs here, not the value: the factor is the other tensor's data.": dy * a.data * b.data,
            })  # fmt: skip
    x = Tensor([3.0, -2.0])
    out = e.call(x, x, case="x times itself, x = 3, -2")
    (got,) = gradients(e, out, np.ones(2), x)
    e.same("the gradient of x", got, 2 * x.data, {
        "Only one of the two paths to x was recorded: x must appear twice among the parents of x * x.": x.data,
    })  # fmt: skip


@exercise(
    "6.2", "add_bias",
    first_step="the value is x.data + b.data, where NumPy broadcasts b to every row. So each b[c] is used N times, and gets the sum of N gradients.",
    hints={"TypeError": "A Tensor is not an array: its numbers are x.data and b.data."},
    kernel=False,
)  # fmt: skip
def add_bias(e):
    for N, C in e.cases(((3, 4), (1, 2), (5, 5), (0, 3)), lambda rng: rng.integers(2, 8, 2)):
        x, b = Tensor(e.normal(N, C)), Tensor(e.normal(C))
        dy = np.asarray(e.normal(N, C), np.float64)
        out = e.call(x, b, case=f"x ({N}, {C}), b ({C})")
        of_x, got = gradients(e, out, dy, x, b)
        e.same("the value", out.data, x.data + b.data)
        e.same("the gradient of x", of_x, dy)
        e.need(
            np.shape(got) != (N, C),
            "The gradient of b has the shape of dy. A gradient has the shape of its own tensor: each b[c] is used N times, so sum over the rows.",
        )
        e.same("the gradient of b", got, dy.sum(0), {
            "The mean over rows was taken. b[c] is used in every row, so its gradients add up: it is a sum.": dy.mean(0) if N > 1 else np.empty(0),
            "The sum runs over the columns: b has one number per column, so sum over the rows.": dy.sum(1) if N == C else np.empty(0),
            "That is the first row of dy alone: b[c] is used in every row.": dy[0] if N else np.empty(0),
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

    for shape in ((1,), (2, 3)):
        x, w = Tensor(np.full(shape, 3.0)), Tensor(np.full(shape, 2.0))
        y = add(mul(x, w), x)
        e.call(y, case=f"y = x w + x with x = 3, w = 2 of shape {shape}: x is used twice")
        e.same("x.grad", x.grad, np.full(shape, 3.0), {
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
    for _ in range(1050):
        y = op(y.data, (y, lambda dy: dy))
    e.call(y, case="a chain of 1050 ops, which exceeds Python's recursion limit: use a loop")
    e.same("x.grad", x.grad, np.array([1.0]))

    leaves = [Tensor(e.rng.normal(size=3)) for _ in range(3)]
    nodes, names = list(leaves), ["a", "b", "c"]
    for _ in range(int(e.rng.integers(4, 7))):
        i, j = (int(k) for k in e.rng.integers(len(nodes), size=2))
        join, sign = ((add, "+"), (mul, "*"))[int(e.rng.integers(2))]
        nodes.append(join(nodes[i], nodes[j]))
        names.append(f"({names[i]} {sign} {names[j]})")
    e.call(nodes[-1], case=f"y = {names[-1]}, three elements each")
    got = [t.grad for t in leaves]
    for t in nodes:
        t.grad = None
    run_backward(nodes[-1])
    for name, mine, leaf in zip(names, got, leaves):
        if leaf.grad is None:
            e.need(
                mine is None or not np.any(mine),
                f"y does not depend on {name}, so it has no gradient.",
            )
        else:
            e.same(f"{name}.grad", mine, leaf.grad)
