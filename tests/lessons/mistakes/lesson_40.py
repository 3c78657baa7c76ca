"""Typical mistakes, planted in the solutions of lesson 40: (exercise, old, new, words of the answer)."""

LOGS = "np.log(np.array(y) - floor)"
RATIO = "alpha * A / (beta * B)"
MEANS = "means = [sum(x) / len(x) for x in options]"
ERROR = "d.std(ddof=1) / np.sqrt(len(d))"

MISTAKES = [
    ("40.1", LOGS, "np.log(y)", "The floor is missing"),
    ("40.1", "float(-slope)", "float(slope)", "minus the slope"),
    ("40.1", "float(np.exp(intercept))", "float(intercept)", "a is exp(intercept)"),
    ("40.1", "np.polyfit(np.log(x)", "np.polyfit(x", "over log(x)"),
    ("40.1", LOGS, "np.array(y) - floor", "not in the logarithm"),
    ("40.1", "np.array(y) - floor", "y - floor", "x and y are lists"),
    ("40.1", "return float(np.exp(intercept)), float(-slope)", "return float(-slope), float(np.exp(intercept))", "Return a first"),
    ("40.2", "(beta / (alpha + beta))", "(alpha / (alpha + beta))", "MORE TOKENS"),
    ("40.2", RATIO, "A / B", "are missing in the first factor"),
    ("40.2", RATIO, "beta * B / (alpha * A)", "upside down"),
    ("40.2", "(C / 6)", "C", "the 6 is missing"),
    ("40.2", "C / (6 * N)", "C / N", "D follows from C"),
    ("40.2", "return N, C / (6 * N)", "return C / (6 * N), N", "Return N first"),
    ("40.2", "return N, C / (6 * N)", "return N", "One thing is returned"),
    ("40.3", MEANS, "means = sums", "Both are chosen by the sum"),
    ("40.3", "sums = [sum(x) for x in options]", "sums = [sum(x) / len(x) for x in options]", "Both are chosen by the mean"),
    ("40.3", "max(sums)), means.index(max(means))", "min(sums)), means.index(min(means))", "LEAST likely"),
    ("40.3", "sums.index(max(sums)), means.index(max(means))", "max(sums), max(means)", "return the indices"),
    ("40.3", "sums = [sum(x) for x in options]", "sums = np.array(options).sum(1).tolist()", "no rectangular array"),
    ("40.4", ERROR, "np.sqrt((np.var(a, ddof=1) + np.var(b, ddof=1)) / len(d))", "as if the questions were different"),
    ("40.4", "ddof=1", "ddof=0", "n - 1 belongs"),
    ("40.4", ERROR, "d.std(ddof=1)", "the deviation of one question"),
    ("40.4", ERROR, "d.std(ddof=1) / len(d)", "not by n"),
    ("40.4", ERROR, "d.var(ddof=1) / len(d)", "its root"),
    ("40.4", "np.array(a) - np.array(b)", "np.array(b) - np.array(a)", "not b - a"),
    ("40.4", "np.array(a) - np.array(b)", "np.abs(np.array(a) - np.array(b))", "lost their signs"),
    ("40.4", "np.array(a) - np.array(b)", "a - b", "a and b are lists"),
]  # fmt: skip

RIGHT = [
    ("40.1", LOGS, "np.log([v - floor for v in y])"),
    ("40.2", RATIO, "A / B * alpha / beta"),
    ("40.3", MEANS, "means = [float(np.mean(x)) for x in options]"),
    ("40.4", ERROR, "np.sqrt(((d - d.mean()) ** 2).sum() / (len(d) - 1) / len(d))"),
]  # fmt: skip
