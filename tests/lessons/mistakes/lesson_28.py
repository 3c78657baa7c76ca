"""Typical mistakes, planted in the solutions of lesson 28: (exercise, old, new, words of the answer)."""

ITERATION = "X = a * X + (b * A + c * A @ A) @ X"
NORM = "max(np.linalg.norm(G), 1e-7)"
STEP = "w * (1 - lr * decay) - lr * scale * orthogonalize(x)"
DECAY = "peak * (1 - np.sqrt(k / n)) if k > 0 else peak"
TALL = """        a, b, c = QUINTIC
        X = G / max(np.linalg.norm(G), 1e-7)
        for _ in range(steps):
            A = X.T @ X
            X = a * X + X @ (b * A + c * A @ A)
        return X
"""

MISTAKES = [
    ("28.1", "-U @ Vt", "U @ Vt", "This goes uphill"),
    ("28.1", "return -U @ Vt", "return G", "the gradient itself"),
    ("28.1", "return -U @ Vt", "return -G", "uphill and shorter"),
    ("28.1", "return -U @ Vt", "return -G / np.linalg.norm(G)", "in the Frobenius norm"),
    ("28.1", "return -U @ Vt", "return -G / np.linalg.norm(G, 2)", "only its largest singular value"),
    ("28.1", "return -U @ Vt", "return -np.sign(G)", "largest ELEMENT"),
    ("28.1", "-U @ Vt", "-U @ Vt.T", "already transposed"),
    ("28.1", "-U @ Vt", "-U @ Vt / np.sqrt(min(G.shape))", "no further division"),
    ("28.1", ", full_matrices=False", "", "with full_matrices=False U is"),
    ("28.1", "    U, _, Vt", "    G *= 2\n    U, _, Vt", "An input was changed"),
    ("28.2", f"G / {NORM}", "G / np.linalg.norm(G)", "a zero gradient has the norm 0"),
    ("28.2", NORM, "(np.linalg.norm(G) or 1)", "rounding errors do not become a step"),
    ("28.2", "    a, b, c", "    U, _, Vt = np.linalg.svd(G, full_matrices=False)\n    return U @ Vt\n    a, b, c", "the exact U V^T"),
    ("28.2", " + c * A @ A", "", "c A A is missing"),
    ("28.2", "range(steps)", "range(5)", "The number of iterations"),
    ("28.2", "QUINTIC", "1.5, -0.5, 0.0", "classical coefficients"),
    ("28.2", "np.linalg.norm(G)", "np.linalg.norm(G, 2)", "divided by the spectral norm"),
    ("28.2", "np.linalg.norm(G)", "(G**2).sum()", "take its root"),
    ("28.2", "return X", "return -X", "wrong sign"),
    ("28.2", "A = X @ X.T", "A = X.T @ X", "is for the other side"),
    ("28.2", "if G.shape[0] > G.shape[1]", "if G.shape[0] > 0", "transpose only if R > C"),
    ("28.2", f"X = G / {NORM}", f"G /= {NORM}\n    X = G", "An input was changed"),
    ("28.3", "(1 - mu) * (g - m)", "mu * (g - m)", "weight of the OLD mean"),
    ("28.3", "m = m + (1 - mu) * (g - m)", "m = mu * m + g", "take the mean"),
    ("28.3", "orthogonalize(x), m", "orthogonalize(x), x", "which looks one step ahead"),
    ("28.3", "orthogonalize(x), m", "orthogonalize(x), orthogonalize(m)", "only x is"),
    ("28.3", "- lr * scale", "+ lr * scale", "subtract the step"),
    ("28.3", "x = g + mu * (m - g)", "x = m", "x is the new m here"),
    ("28.3", "    m = m + (1 - mu) * (g - m)\n    x = g + mu * (m - g)\n", "    x = g + mu * (m - g)\n    m = m + (1 - mu) * (g - m)\n", "made from the OLD m"),
    ("28.3", "x = g + mu * (m - g)", "x = g", "The running mean is not used"),
    ("28.3", "orthogonalize(x)", "x", "Nothing is orthogonalised"),
    ("28.3", "scale = 0.2 * np.sqrt(max(w.shape))", "scale = 1.0", "The scale is missing"),
    ("28.3", "0.2 * np.sqrt", "np.sqrt", "0.2 is missing"),
    ("28.3", "0.2 * np.sqrt(max(w.shape))", "0.2", "sqrt(max(R, C)) is missing"),
    ("28.3", "max(w.shape)", "min(w.shape)", "SMALLER side"),
    ("28.3", "np.sqrt(max(w.shape))", "max(w.shape)", "The scale has no root"),
    ("28.3", "w * (1 - lr * decay)", "w", "There is no weight decay"),
    ("28.3", "(1 - lr * decay)", "(1 - decay)", "not multiplied by the learning rate"),
    ("28.3", STEP, "(w - lr * scale * orthogonalize(x)) * (1 - lr * decay)", "decayed after the step"),
    ("28.3", f"{STEP}, m", STEP, "Return 2 things"),
    ("28.3", "m = m + (1 - mu) * (g - m)", "m += (1 - mu) * (g - m)", "An input was changed"),
    ("28.4", "(step + 1)", "step", "The warm-up begins at 0"),
    ("28.4", "1 - np.sqrt(k / n)", "1 - k / n", "a straight line"),
    ("28.4", "(1 - np.sqrt(k / n))", "0.5 * (1 + np.cos(np.pi * k / n))", "half a cosine"),
    ("28.4", "1 - np.sqrt(k / n)", "np.sqrt(1 - k / n)", "which falls late"),
    ("28.4", "k = step - (steps - 1 - n)", "k = step - (steps - n)", "one step late"),
    ("28.4", "k = step - (steps - 1 - n)", "k = min(n, step - (steps - 2 - n))", "one step early"),
    ("28.4", f"return {DECAY}", "return peak", "There is no decay"),
    ("28.4", "    n = int(fraction * steps)\n    k = step - (steps - 1 - n)\n", "    n = steps - 1 - warmup\n    k = step - warmup\n", "right after the warm-up"),
    ("28.4", "    if step", "    peak = 1.0\n    if step", "The peak is missing"),
    ("28.4", " if k > 0 else peak", "", "has no root"),
    ("28.2", "G.shape[0] > G.shape[1]", "False", "a product is (7, 7)"),
    ("28.3", "x = g + mu * (m - g)", "x = g + mu * m", "running SUM"),
    ("28.4", "int(fraction * steps)", "int(np.ceil(fraction * steps))", "int() cuts off"),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("28.1", "    U, _, Vt", "    w, Q = np.linalg.eigh(G @ G.T) if G.shape[0] <= G.shape[1] else np.linalg.eigh(G.T @ G)\n    root = Q @ np.diag(w**-0.5) @ Q.T\n    return -root @ G if G.shape[0] <= G.shape[1] else -G @ root\n    U, _, Vt"),
    ("28.2", ITERATION, "X = (a * np.eye(len(A)) + b * A + c * A @ A) @ X"),
    ("28.2", NORM, "max(np.sqrt((G * G).sum()), 1e-7)"),
    ("28.3", "m + (1 - mu) * (g - m)", "mu * m + (1 - mu) * g"),
    ("28.4", DECAY, "peak * (1 - np.sqrt(max(k, 0) / max(n, 1)))"),
    ("28.2", "        return newton_schulz(G.T, steps).T\n", TALL),
]  # fmt: skip
