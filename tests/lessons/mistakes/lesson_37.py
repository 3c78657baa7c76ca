"""Typical mistakes, planted in the solutions of lesson 37: (exercise, old, new, words of the answer)."""

SOFT = "np.exp(-np.logaddexp(0, margins))"

MISTAKES = [
    ("37.1", "np.logaddexp(0, -m).mean()", "np.logaddexp(0, -m)", "return their mean"),
    ("37.1", "np.logaddexp(0, -m).mean()", "np.logaddexp(0, -m).sum()", "the sum over the pairs"),
    ("37.1", "np.logaddexp(0, -m).mean()", "-np.log(1 / (1 + np.exp(-m))).mean()", "exp overflows"),
    ("37.1", "m = chosen - rejected", "m = rejected - chosen", "pairs in the wrong order"),
    ("37.1", " / len(m)", "", "divide the slopes by n"),
    ("37.1", "slopes = -np", "slopes = np", "makes the loss smaller"),
    ("37.1", "slopes, -slopes", "slopes, slopes", "has the other sign"),
    ("37.1", "np.exp(-np.logaddexp(0, m))", "np.exp(-np.logaddexp(0, -m))", "pulls little"),
    ("37.2", "return p / p.sum()", "return p", "does not sum to 1"),
    ("37.2", "rewards[possible] / beta", "rewards[possible] * beta", "count MORE"),
    ("37.2", "rewards[possible] / beta", "rewards[possible]", "beta is missing"),
    ("37.2", "reference[possible] * np", "np", "The reference is missing"),
    ("37.2", " - scores.max()", "", "exp of a large reward"),
    ("37.2", "scores.max()", "(rewards / beta).max()", "exp of a large reward"),
    ("37.3", "beta * (now - reference)", "beta * now", "The reference is missing"),
    ("37.3", "rewards = beta * (now - reference)", "rewards = now - reference", "beta is missing"),
    ("37.3", "rewards[:, 0] - rewards[:, 1]", "rewards[:, 1] - rewards[:, 0]", "in the wrong order"),
    ("37.3", "-beta * np", "-np", "The factor beta is missing"),
    ("37.3", "[slopes, -slopes]", "[slopes, slopes]", "has the other sign"),
    ("37.3", SOFT, "1 / (1 + np.exp(-margins))", "pulls little"),
    ("37.3", "return np.logaddexp(0, -margins), ", "return np.logaddexp(0, -margins).mean(), ", "one for each pair"),
    ("37.4", " - gamma", "", "gamma is missing"),
    ("37.4", " - gamma", " + gamma", "BY gamma"),
    ("37.4", "beta * now / tokens", "beta * now", "The tokens are missing"),
    ("37.4", "1) / tokens", "1)", "the slopes by the means"),
    ("37.4", "-beta * np", "-np", "The factor beta is missing"),
    ("37.4", "rewards[:, 1] - gamma", "rewards[:, 1] - beta * gamma", "gamma is multiplied by beta"),
    ("37.4", "1) / tokens", "1) / tokens[:, ::-1]", "the tokens of the other answer"),
]  # fmt: skip
