"""Typical mistakes, planted in the solutions of lesson 8: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("8.1", "lr / c1 * m / (math.sqrt(v) / root2 + eps)", "lr * m / (math.sqrt(v) + eps)", "bias corrections are missing"),
    ("8.1", "        if i < n_decay:\n            w -= lr * weight_decay * w\n", "        w -= lr * weight_decay * w\n", "Every element decays"),
    ("8.1", "            w -= lr * weight_decay * w", "            w -= weight_decay * w", "not multiplied by lr"),
    ("8.1", "(math.sqrt(v) / root2 + eps)", "math.sqrt(v / (root2 * root2) + eps)", "after the root"),
    ("8.1", "m += (float32(1.0) - beta1) * (g - m)", "m = beta1 * m + g", "m grows too fast"),
    ("8.1", "(float32(1.0) - beta2) * (g * g - v)", "(float32(1.0) - beta2) * (g - v)", "g SQUARED"),
    ("8.1", "        v_n[i] = v\n", "", "v is unchanged"),
    ("8.2", "(step + 1) / warmup", "step / warmup", "A step with rate 0 is wasted"),
    ("8.2", "min_ratio + (1 - min_ratio) * 0.5", "0.5", "not at 0"),
    ("8.2", "(step - warmup) / max(1, steps - 1 - warmup)", "step / (steps - 1)", "its progress is 0 at step == warmup"),
    ("8.2", "steps - 1 - warmup", "steps - warmup", "Progress is (step - warmup)"),
    ("8.3", "min(1.0, limit / norm)", "limit / norm", "never above 1"),
    ("8.3", "math.sqrt(sum(float((g * g).sum()) for g in gradients))", "sum(math.sqrt(float((g * g).sum())) for g in gradients)", "adds the norms"),
    ("8.3", "math.sqrt(sum(float((g * g).sum()) for g in gradients))", "sum(float((g * g).sum()) for g in gradients)", "The root is missing"),
    ("8.3", "math.sqrt(sum(float((g * g).sum()) for g in gradients))", "max(float(abs(g).max()) for g in gradients)", "largest element"),
]  # fmt: skip
