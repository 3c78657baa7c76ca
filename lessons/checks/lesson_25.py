"""Exercises of lesson 25: targets of fine-tuning, a mask without leaks, LoRA's backward pass."""

import numpy as np

from .attempt import exercise

IGNORE = -100


@exercise(
    "25.1", "inputs_and_targets",
    first_step="the inputs are all tokens but the last. The target of input i is token i + 1.",
    kernel=False,
)  # fmt: skip
def inputs_and_targets(e):
    rng = np.random.default_rng(1)
    fixed = "0011", "01", "000110010111", "1111", "0110", "1"
    for flags in e.cases(fixed, lambda rng: "".join(map(str, rng.integers(0, 2, 12)))):
        trained = np.array([x == "1" for x in flags])
        ids = rng.permutation(np.arange(1, 40))[: len(trained)]
        got = e.call(ids.copy(), trained.copy(), case=f"ids {ids.tolist()}, trained {flags}")
        inputs, targets = e.several(got, "inputs", "targets")
        e.need(
            np.shape(inputs) != ids.shape,
            "The last token is not an input, because nothing follows it.",
        )
        e.same("inputs", inputs, ids[:-1], {
            "These are the targets' tokens: an input is the token BEFORE its target.": ids[1:],
            "IGNORE is written into the inputs: ids[:-1] and ids[1:] are views of the same array. Make the targets a new one, with np.where or .copy().":
                np.append(ids[0], np.where(trained[1:], ids[1:], IGNORE))[:-1],
        })  # fmt: skip
        after = np.where(trained[1:], ids[1:], IGNORE)
        e.same("targets", targets, after, {
            "This is the input itself: the target of an input is the token AFTER it.": np.where(trained[1:], ids[:-1], IGNORE),
            "The flag of the input decides here: what counts is whether the TARGET is trained, trained[i + 1].":
                np.where(trained[:-1], ids[1:], IGNORE),
            "The flags are the wrong way round: IGNORE stands where a token is NOT trained.": np.where(trained[1:], IGNORE, ids[1:]),
            "Nothing is moved: target i is token i + 1, and its flag is trained[i + 1].": np.where(trained[:-1], ids[:-1], IGNORE),
            "Every token is trained here: put IGNORE where trained is False.": ids[1:],
            "Targets that do not count are IGNORE, -100: 0 is a token.": np.where(trained[1:], ids[1:], 0),
        })  # fmt: skip


@exercise(
    "25.2", "mask_and_positions",
    first_step="query t may read the keys from starts[t] to t. Compare np.arange(T) as a row (keys) and as a column (queries).",
    kernel=False,
)  # fmt: skip
def mask_and_positions(e):
    fixed = (3,), (2, 3), (1, 1, 4), (5, 3, 1)
    for lengths in e.cases(fixed, lambda rng: tuple(rng.integers(1, 5, 5))):
        starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
        got = e.call(starts.copy(), case=f"starts {starts.tolist()}")
        may_see, positions = e.several(got, "may_see", "positions")
        T = len(starts)
        keys, queries = np.arange(T)[None], np.arange(T)[:, None]
        causal, own = keys <= queries, starts[None] == starts[:, None]
        e.need(
            may_see is not None and np.asarray(may_see).dtype == bool,
            "may_see must be an array of bool: the result of comparisons.",
        )
        e.same("may_see", np.asarray(may_see), causal & own, {
            "Queries and keys are the wrong way round: rows are queries, columns are keys.": (causal & own).T,
            "A query reads the conversations before its own: no key before starts[t].": causal,
            "A query reads keys after itself: the mask must be causal too.": own,
            "A token must see itself.": (keys < queries) & own,
            "The first token of a conversation is missing: keys begin AT starts[t].": causal & (keys > starts[:, None]),
        })  # fmt: skip
        e.same("positions", np.asarray(positions), np.arange(T) - starts, {
            "Positions count from the start of the conversation, not of the row.": np.arange(T),
            "Positions begin at 0.": np.arange(T) - starts + 1,
            "These are the starts: subtract them from the columns.": starts,
        })  # fmt: skip


@exercise(
    "25.3", "lora_backward",
    first_step="write u = x @ a.T and y = x @ w.T + f * u @ b.T, then go backwards: du from dy, then da from du.",
    hints={
        "ValueError": "The shapes of a product do not fit: dx (N, I), da (r, I) and db (O, r) have the shapes of x, a and b. Write the shape of "
        "each factor next to it.",
    },
    kernel=False,
)  # fmt: skip
def lora_backward(e):
    fixed = (2, 3, 4, 1, 1.0), (5, 4, 6, 2, 2.0), (3, 6, 6, 3, 0.5)
    for N, O, I, r, f in e.cases(fixed, lambda rng: (*rng.integers(2, 8, 4), rng.uniform(0.3, 3))):
        dy, x, w, a, b = (
            np.asarray(e.normal(*shape)).astype(np.float64)
            for shape in ((N, O), (N, I), (O, I), (r, I), (O, r))
        )
        given = [array.copy() for array in (dy, x, w, a, b)]
        got = e.call(*given, f, case=f"N = {N}, O = {O}, I = {I}, r = {r}, f = {f:g}")
        dx, da, db = e.several(got, "dx", "da", "db")
        u, du = x @ a.T, f * dy @ b
        e.same("dx", dx, dy @ w + du @ a, {
            "The adapters' part of dx is missing: x also goes through a and b.": dy @ w,
            "The frozen matrix is missing: it has no gradient, but dx goes through it.": du @ a,
            "The factor f is missing in the adapters' part of dx.": dy @ w + dy @ b @ a,
        })  # fmt: skip
        e.same("da", da, du.T @ x, {
            "The factor f is missing in da.": (dy @ b).T @ x,
        })  # fmt: skip
        e.same("db", db, f * dy.T @ u, {
            "The factor f is missing in db.": dy.T @ u,
            "The factor f is in db twice.": f * f * dy.T @ u,
        })  # fmt: skip
        unchanged = all(map(np.array_equal, given, (dy, x, w, a, b)))
        e.need(unchanged, "An input was changed: compute new arrays.")
