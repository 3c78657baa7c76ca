"""Typical mistakes, planted in the solutions of lesson 19: (exercise, old, new, words of the answer)."""

SCORE = "        x = warp_sum(q * k_ND[i, d]) * scale\n"
WHOLE = """        x = float32(0.0)
        for c in range(32):
            x += q_D[c] * k_ND[i, c] * scale
"""
INIT = "    m, total, acc = float32(-math.inf), float32(0.0), float32(0.0)\n"

MISTAKES = [
    ("19.1", "* scale", "", "not scaled"),
    ("19.1", "float32(-math.inf)", "float32(0.0)", "start with minus infinity"),
    ("19.1", "last = first + chunk if first + chunk < n else n", "first, last = 0, n", "use only its own keys"),
    ("19.1", "total = total * keep + p", "total = total + p", "the running l must be multiplied by exp(old m - new m)"),
    ("19.1", "acc = acc * keep + p * v_ND[i, d]", "acc = acc + p * v_ND[i, d]", "like l"),
    ("19.1", "acc_SD[s, d] = acc", "acc_SD[s, d] = acc / total", "leave the division to the merge"),
    ("19.2", "    share_S = np.exp(m_S - m_S.max())\n", "    share_S = np.ones_like(m_S)\n", "expected"),
    ("19.2", "(share_S * l_S).sum()", "l_S.sum()", "l was not rescaled"),
    ("19.2", " / (share_S * l_S).sum()", "", "Divide by the sum"),
    ("19.2", "np.exp(m_S - m_S.max())", "np.exp(m_S)", "exp overflows"),
    ("19.3", "min(most, -(-n // chunk))", "-(-n // chunk)", "at most 32 are allowed"),
    ("19.3", "min(most, -(-n // chunk))", "1", "where"),
    ("19.3", "min(begin + size, n)", "begin + size", "all keys from 0"),
    ('19.1', 'warp_sum(', '(', 'This is the product of one channel'),
    ('19.1', '* v_ND[i, d]', '* k_ND[i, d]', 'times the VALUES'),
    ('19.2', '    share_S = np.exp(m_S - m_S.max())\n', '    share_S = np.ones_like(m_S)\n', 'Neither sum was rescaled'),
    ('19.2', 'np.exp(m_S - m_S.max())', 'np.exp(m_S.max() - m_S)', 'not M - m_i'),
    ("19.2", "m_S.max()", "m_S[0]", "the largest m first"),
    ("19.1", SCORE, WHOLE, "several lanes read the same number"),
    ("19.1", "    for i in range(first, last):\n", f"    for i in range(n):\n{SCORE}        if i // chunk != s:\n            continue\n", "block s must read only the keys of part s"),
]  # fmt: skip

UNTRUE = [  # words that the answer must not contain
    ("19.2", "return (share", "return np.nan * (share", "exp overflows"),
    ("19.2", "m_S.max()", "m_S.mean()", "an empty part has l = 0"),
    ("19.1", SCORE, WHOLE, "of part s"),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("19.1", INIT, INIT + 2 * f"    for i in range(first, last):\n{SCORE}        m = max(m, x)\n"),
]  # fmt: skip
