"""Attempts at the exercises of lesson 6: see test_attempts.py."""


# %% 6.1 WRONG: where a is 0
def multiply(a, b):
    y = a.data * b.data
    return Tensor(y, [(a, lambda dy: dy * y / a.data), (b, lambda dy: dy * y / b.data)])


# %% 6.1 WRONG: is not among the parents
def multiply(a, b):
    return Tensor(a.data * b.data, [(a, lambda dy: dy * b.data)])


# %% 6.1 WRONG: Only one of the two paths
def multiply(a, b):
    functions = {a: lambda dy: dy * b.data, b: lambda dy: dy * a.data}
    return Tensor(a.data * b.data, list(functions.items()))


# %% 6.1 RIGHT: through the squares, as a graph of five Tensors
def multiply(a, b):
    def square(t):
        return Tensor(t.data**2, [(t, lambda dy: 2 * dy * t.data)])

    def less(s, t):
        return Tensor(s.data - t.data, [(s, lambda dy: dy), (t, lambda dy: -dy)])

    half = lambda t: Tensor(t.data / 2, [(t, lambda dy: dy / 2)])
    return half(less(less(square(add(a, b)), square(a)), square(b)))


# %% 6.2 RIGHT: b as a matrix of N equal rows, made by np.tile
def add_bias(x, b):
    N = x.shape[0]
    rows = Tensor(np.tile(b.data, (N, 1)), [(b, lambda dy: dy.sum(0))])
    return add(x, rows)


# %% 6.2 RIGHT: the sum over rows as a product with ones
def add_bias(x, b):
    ones = np.ones(len(x.data))
    return Tensor(x.data + b.data[None], [(b, lambda dy: ones @ dy), (x, lambda dy: dy * 1.0)])


# %% 6.2 WRONG: the shape of dy
def add_bias(x, b):
    return Tensor(x.data + b.data, [(x, lambda dy: dy), (b, lambda dy: dy)])


# %% 6.3 WRONG: ask whether it `is None`
def backward(root):
    root.grad = np.ones_like(root.data)
    todo = [root]
    while todo:
        t = max(todo, key=lambda t: t.order)
        todo.remove(t)
        for p, f in t.parents:
            g = f(t.grad)
            p.grad = p.grad + g if p.grad else g
            if p not in todo:
                todo.append(p)


# %% 6.3 WRONG: recursion limit
def backward(root):
    order, seen = [], set()

    def visit(t):
        if t not in seen:
            seen.add(t)
            for p, _ in t.parents:
                visit(p)
            order.append(t)

    visit(root)
    root.grad = np.ones_like(root.data)
    for t in reversed(order):
        for p, f in t.parents:
            g = f(t.grad)
            p.grad = g if p.grad is None else p.grad + g


# %% 6.3 RIGHT: counts how often each tensor is used, and processes it after its last use
def backward(root):
    uses, todo, found = {}, [root], {root}
    while todo:
        t = todo.pop()
        for p, _ in t.parents:
            uses[p] = uses.get(p, 0) + 1
            if p not in found:
                found.add(p)
                todo.append(p)
    root.grad = np.ones(root.shape)
    ready = [root]
    while ready:
        t = ready.pop()
        for p, f in t.parents:
            p.grad = f(t.grad) + (0 if p.grad is None else p.grad)
            uses[p] -= 1
            if not uses[p]:
                ready.append(p)


# %% 6.3 RIGHT: all tensors sorted by order, then one pass
def backward(root):
    all_of_them, todo = {root}, [root]
    while todo:
        for p, _ in todo.pop().parents:
            if p not in all_of_them:
                all_of_them.add(p)
                todo.append(p)
    for t in all_of_them:
        t.grad = np.zeros(t.shape)
    root.grad = np.ones(root.shape)
    for t in sorted(all_of_them, key=lambda t: -t.order):
        for p, f in t.parents:
            p.grad = p.grad + f(t.grad)
