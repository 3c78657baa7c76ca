"""Attempts at the exercises of lesson 40: see test_attempts.py."""


# %% 40.1 RIGHT: the normal equations by hand
def fit_power(x, y, floor):
    u, v = np.log(x), np.log(np.asarray(y) - floor)
    du = u - u.mean()
    b = -(du @ (v - v.mean())) / (du @ du)
    return np.exp(v.mean() + b * u.mean()), b


# %% 40.1 RIGHT: lstsq, base ten
def fit_power(x, y, floor):
    M = np.stack([np.ones(len(x)), np.log10(x)], 1)
    c, m = np.linalg.lstsq(M, np.log10(np.array(y) - floor), rcond=None)[0]
    return 10**c, -m


# %% 40.1 WRONG: log10 and exp
def fit_power(x, y, floor):
    m, c = np.polyfit(np.log10(x), np.log10(np.array(y) - floor), 1)
    return np.exp(c), -m


# %% 40.1 WRONG: the first and the last point
def fit_power(x, y, floor):
    b = np.log((y[0] - floor) / (y[-1] - floor)) / np.log(x[-1] / x[0])
    return (y[0] - floor) * x[0] ** b, b


# %% 40.1 WRONG: is not the logarithm of y - floor
def fit_power(x, y, floor):
    m, c = np.polyfit(np.log(x), np.log(y) - floor, 1)
    return np.exp(c), -m


# %% 40.2 RIGHT: by bisection of the derivative
def best_size(C, A, alpha, B, beta):
    low, high = 0.0, np.log(C)
    for _ in range(200):
        n = (low + high) / 2
        N = np.exp(n)
        D = C / 6 / N
        if alpha * A * N**-alpha > beta * B * D**-beta:
            low = n
        else:
            high = n
    return N, C / 6 / N


# %% 40.2 RIGHT: in logarithms
def best_size(C, A, alpha, B, beta):
    n = (np.log(alpha * A) - np.log(beta * B) + beta * np.log(C / 6)) / (alpha + beta)
    return float(np.exp(n)), float(C / 6 * np.exp(-n))


# %% 40.2 WRONG: 20 tokens per parameter
def best_size(C, A, alpha, B, beta):
    N = (C / 120) ** 0.5
    return N, 20 * N


# %% 40.2 WRONG: the same number of parameters
def best_size(C, A, alpha, B, beta):
    return (C / 6) ** 0.5, (C / 6) ** 0.5


# %% 40.2 WRONG: 6 N D is
def best_size(C, A, alpha, B, beta):
    N = (alpha * A / (beta * B)) ** (1 / (alpha + beta)) * (C / 6) ** (beta / (alpha + beta))
    D = (beta * B / (alpha * A)) * N
    return N, D


# %% 40.3 RIGHT: max with a key
def choose(options):
    n = range(len(options))
    return max(n, key=lambda i: sum(options[i])), max(n, key=lambda i: np.mean(options[i]))


# %% 40.3 RIGHT: argmax of arrays
def choose(options):
    s = np.array([np.sum(x) for x in options])
    k = np.array([len(x) for x in options])
    return np.argmax(s), np.argmax(s / k)


# %% 40.3 WRONG: Of equally good options
def choose(options):
    s = m = 0
    for i, x in enumerate(options):
        if sum(x) >= sum(options[s]):
            s = i
        if sum(x) / len(x) >= sum(options[m]) / len(options[m]):
            m = i
    return s, m


# %% 40.3 WRONG: Only the first token
def choose(options):
    first = [x[0] for x in options]
    i = first.index(max(first))
    return i, i


# %% 40.3 WRONG: A mean of probabilities
def choose(options):
    s = [sum(x) for x in options]
    m = [np.mean(np.exp(x)) for x in options]
    return s.index(max(s)), m.index(max(m))


# %% 40.4 RIGHT: with the statistics module
def compare(a, b):
    import statistics

    d = [x - y for x, y in zip(a, b)]
    return statistics.mean(d), statistics.stdev(d) / len(d) ** 0.5


# %% 40.4 RIGHT: from the counts of plus and minus
def compare(a, b):
    n = len(a)
    plus = sum(x > y for x, y in zip(a, b))
    minus = sum(x < y for x, y in zip(a, b))
    mean = (plus - minus) / n
    return mean, ((plus + minus - n * mean**2) / (n - 1) / n) ** 0.5


# %% 40.4 WRONG: that of the first model alone
def compare(a, b):
    a, b = np.array(a), np.array(b)
    return (a - b).mean(), a.std(ddof=1) / np.sqrt(len(a))


# %% 40.4 WRONG: divide by n
def compare(a, b):
    d = np.array(a) - np.array(b)
    return d.sum(), d.std(ddof=1) / np.sqrt(len(d))


# %% 40.4 WRONG: difference must be one number
def compare(a, b):
    d = np.array(a) - np.array(b)
    return d, d.std(ddof=1) / np.sqrt(len(d))


# %% 40.1 WRONG: log2 and exp do not fit
def fit_power(x, y, floor):
    s, i = np.polyfit(np.log2(x), np.log2(np.array(y) - floor), 1)
    return np.exp(i), -s


# %% 40.1 WRONG: mean slope between neighbours
def fit_power(x, y, floor):
    u, v = np.log(x), np.log(np.array(y) - floor)
    s = np.mean(np.diff(v) / np.diff(u))
    return np.exp(v.mean() - s * u.mean()), -s


# %% 40.2 WRONG: exponent of the first factor
def best_size(C, A, alpha, B, beta):
    N = (alpha * A / (beta * B)) * (C / 6) ** (beta / (alpha + beta))
    return N, C / 6 / N


# %% 40.4 WRONG: belongs into the deviation alone
def compare(a, b):
    d = np.array(a) - np.array(b)
    return d.mean(), d.std(ddof=1) / np.sqrt(len(d) - 1)


# %% 40.4 WRONG: two standard errors
def compare(a, b):
    d = np.array(a) - np.array(b)
    return d.mean(), 2 * d.std(ddof=1) / np.sqrt(len(d))
