"""Typical mistakes, planted in the solutions of lesson 41: (exercise, old, new, words of the answer)."""

SIGN = "    codes[codes > 7] -= 16\n"
SCALE = "np.abs(groups).max(axis=2, keepdims=True) / most"
U = "np.linalg.cholesky(np.linalg.inv(H)).T"
DAMP = "    H += damp * np.diag(H).mean() * np.eye(len(H))\n"
WEIGHTS = "nearest(w * c, most) / c - w"

MISTAKES = [
    ("41.1", SIGN, "", "8 to 15 stand for negative"),
    ("41.1", "codes[:, ::2] = packed & 15\n    codes[:, 1::2] = packed >> 4", "codes[:, ::2] = packed >> 4\n    codes[:, 1::2] = packed & 15", "the FIRST of the two"),
    ("41.1", "codes > 7", "codes > 8", "already negative"),
    ("41.1", "-= 16", "-= 15", "subtract 16"),
    ("41.1", "np.int8", "np.uint8", "wraps around"),
    ("41.1", SIGN, "    codes -= 8\n", "an offset of 8"),
    ("41.1", "return codes", "return codes.astype(float)", "whole numbers"),
    ("41.1", "return codes", "return codes[:, ::2]", "must have the shape"),
    ("41.2", "np.abs(groups).max", "groups.max", "negative weights count"),
    ("41.2", SCALE, "np.abs(groups).max(axis=2, keepdims=True)", "divide by it"),
    ("41.2", SCALE, "np.abs(groups).max(axis=2, keepdims=True) / (most + 1)", "not by most + 1"),
    ("41.2", SCALE, "np.abs(groups).max(axis=(1, 2), keepdims=True) / most + 0 * groups[:, :, :1]", "each group has its own"),
    ("41.2", "np.where(scale > 0, scale, 1)", "np.where(scale > 0, scale, 1e-9)", "group of zeros is 1"),
    ("41.2", "np.rint(groups / scale)", "(groups / scale)", "Rounded toward 0"),
    ("41.2", "np.rint(groups / scale)", "np.floor(groups / scale)", "Rounded down"),
    ("41.2", "scale[:, :, 0]", "scale", "one per group"),
    ("41.2", ".astype(np.int8)", "", "whole numbers"),
    ("41.3", "        w[:, j + 1 :] -= e[:, None] * U[j, j + 1 :]\n", "", "No weight is corrected"),
    ("41.3", U, "np.linalg.cholesky(np.linalg.inv(H))", "No weight is corrected"),
    ("41.3", "-= e", "+= e", "the wrong sign"),
    ("41.3", U, "np.linalg.cholesky(H).T", "the INVERSE"),
    ("41.3", " / U[j, j]", "", "Divide by U[j, j]"),
    ("41.3", "np.clip(np.rint(w[:, j] / s), -most, most)", "np.rint(w[:, j] / s)", "limit it"),
    ("41.3", "damp * np.diag(H).mean() * np.eye", "damp * np.eye", "multiplied by the mean"),
    ("41.3", "return codes", "return codes * scale", "whole numbers"),
    ("41.4", "np.argmin", "np.argmax", "LARGEST error"),
    ("41.4", "powers[int(np.argmin(errors))]", "int(np.argmin(errors))", "return the power"),
    ("41.4", "((x @ (" + WEIGHTS + ").T) ** 2).sum()", "((" + WEIGHTS + ") ** 2).sum()", "multiplied by x"),
    ("41.4", WEIGHTS, "nearest(w * c, most) - w", "Divide by c after"),
    ("41.4", "powers[int(np.argmin(errors))]", "errors", "Return one power"),
]  # fmt: skip

RIGHT = [
    ("41.1", SIGN, "    codes = (codes ^ 8) - 8\n"),
    ("41.2", "np.rint(groups / scale)", "np.clip(np.round(groups / scale), -most, most)"),
    ("41.3", U, "np.linalg.inv(np.linalg.cholesky(H[::-1, ::-1])[::-1, ::-1])"),
    ("41.4", WEIGHTS, "(nearest(c * w, most) - c * w) / c"),
]  # fmt: skip
