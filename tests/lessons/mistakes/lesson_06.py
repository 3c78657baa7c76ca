"""Typical mistakes, planted in the solutions of lesson 6: (exercise, old, new, phrase in the answer)."""

MISTAKES = [
    ("6.1", "dy * b.data", "dy * a.data", "the OTHER factor"),
    ("6.1", "dy * b.data", "b.data", "dy is missing"),
    ("6.1", "(b, lambda dy: dy * a.data)", "", "not among the parents"),
    ("6.1", "return Tensor(a.data * b.data, [", "return (a.data * b.data, [", "Return a Tensor"),
    ("6.1", "Tensor(a.data * b.data,", "Tensor(a * b,", "its numbers are a.data and b.data"),
    ("6.1", "dy * b.data", "dy * b", "its numbers are a.data and b.data"),
    ("6.1", "(a.data * b.data,", "(a.data @ b.data,", "product is *, not @"),
    ("6.2", "dy.sum(0)", "dy[0]", "the first row of dy alone"),
    ("6.2", "dy.sum(0)", "dy.sum(0) * b.data", "b itself does not appear"),
    ("6.2", "dy.sum(0)", "dy", "has the shape of its own tensor"),
    ("6.2", "dy.sum(0)", "dy.mean(0)", "The mean over rows was taken"),
    ("6.2", "dy.sum(0)", "dy.sum(1)", "must have shape"),
    ("6.3", "parent.grad = contribution if parent.grad is None else parent.grad + contribution", "parent.grad = contribution", "ADDED to the first"),
    ("6.3", "root.grad = np.ones_like(root.data)", "root.grad = None", "set root.grad to ones"),
    ("6.3", "np.ones_like(root.data)", "root.data", "not as its value"),
    ("6.3", "np.ones_like(root.data)", "1.0", "in the shape of root.data"),
    (
        "6.3", "parent.grad = contribution if parent.grad is None else parent.grad + contribution",
        "if parent.grad is None:\n                parent.grad = contribution\n            else:\n                parent.grad += contribution",
        "changes it for all",
    ),
    ("6.3", "if id(parent) not in seen:", "if True:", "put it on the list only once"),
    ("6.3", "max(todo, key=lambda t: t.order)", "todo[0]", "newest first"),
    ("6.3", "    while todo:\n", "    for _ in range(1):\n", "the gradient is not passed on"),
    (
        "6.3", "    root.grad = np.ones_like(root.data)\n",
        "    def walk(t, dy):\n        t.grad = dy if t.grad is None else t.grad + dy\n        for parent, function in t.parents:\n"
        "            walk(parent, function(dy))\n    return walk(root, np.ones_like(root.data))\n",
        "not once for every path to it",
    ),
]  # fmt: skip
