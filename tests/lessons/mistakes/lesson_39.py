"""Typical mistakes, planted in the solutions of lesson 39: (exercise, old, new, words of the answer)."""

SHARE = "1 - len(set(grams)) / len(grams)"
MIN = "((a[:, None] * grams[None, :] + b[:, None]) % prime).min(axis=1)"
KEYS = "(i, *part.tolist())"
ADD = "        seen.update(keys)"
EPOCHS = "share * total / n"

MISTAKES = [
    ("39.1", SHARE, "len(set(grams)) / len(grams)", "the share of different n-grams"),
    ("39.1", SHARE, "sum(grams.count(x) > 1 for x in grams) / len(grams)", "has not occurred before"),
    ("39.1", " + 1)]", ")]", "The last n-gram is missing"),
    ("39.1", "range(len(tokens) - n + 1)", "range(len(tokens))", "fewer than n tokens are none"),
    ("39.1", "range(len(tokens) - n + 1)", "range(0, len(tokens) - n + 1, n)", "one begins at every token"),
    ("39.1", " if grams else 0.0", "", "has no n-grams: return 0.0"),
    ("39.1", "tuple(tokens[i : i + n])", "tokens[i : i + n]", "cannot be in a set"),
    ("39.1", f"return {SHARE} if grams else 0.0", SHARE.replace("len(grams)", "max(len(grams), 1)"), "Nothing is returned"),
    ("39.2", ".min(axis=1)", ".max(axis=1)", "take the smallest"),
    ("39.2", MIN, "(a[:, None] * grams[None, :] + b[:, None]).min(axis=1) % prime", "first % prime"),
    ("39.2", " + b[:, None]", "", "b is missing"),
    ("39.2", ".min(axis=1)", ".argmin(axis=1)", "the place of the smallest"),
    ("39.2", ".min(axis=1)", ".min()", "one for each hash function"),
    ("39.2", ".min(axis=1)", ".min(axis=0)", "one for each hash function"),
    ("39.2", MIN, "(a * grams.min() + b) % prime", "first % prime"),
    ("39.3", "any(", "all(", "one is enough"),
    ("39.3", KEYS, "tuple(part.tolist())", "DIFFERENT bands"),
    ("39.3", ADD, "            seen.update(keys)", "Bands of a dropped document count"),
    ("39.3", "not any(", "any(", "These are the documents that are dropped"),
    ("39.3", "np.split(row, bands)", "np.split(row, len(row) // bands)", "the number of bands"),
    ("39.3", "np.split(row, bands)", "row.reshape(-1, bands).T", "NEIGHBOURING"),
    ("39.3", KEYS, "part.tolist()", "cannot be in a set"),
    ("39.3", "kept.append(d)", "kept.append(row)", "Return a list of indices"),
    ("39.4", "n**alpha", "n", "use size ** alpha"),
    ("39.4", "n**alpha", "n * alpha", "a power, not a factor"),
    ("39.4", "power / sum(powers)", "power", "The sum of p must be 1"),
    ("39.4", "power / sum(powers)", "power / sum(tokens)", "not by the sum of the sizes"),
    ("39.4", EPOCHS, "share * total", "These are the tokens of each source"),
    ("39.4", EPOCHS, "total / n", "The share of the source is missing"),
    ("39.4", EPOCHS, "share * total / sum(tokens)", "not of all sources together"),
    ("39.4", EPOCHS, "n / (share * total)", "upside down"),
    ("39.4", EPOCHS, "share * total // n", "need not be whole"),
    ("39.4", "return p, ", "return ", "must be a list of numbers"),
]  # fmt: skip

RIGHT = [
    ("39.1", SHARE, "(len(grams) - len(set(grams))) / len(grams)"),
    ("39.2", MIN, "np.min((np.outer(a, grams) + b[:, None]) % prime, 1)"),
    ("39.3", KEYS, "(i, part.tobytes())"),
    ("39.4", "n**alpha", "np.exp(alpha * np.log(n))"),
]  # fmt: skip
