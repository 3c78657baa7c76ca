"""Typical mistakes, planted in the solutions of lesson 10: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("10.1", "        machine.synchronize()\n", "", "synchronize() first"),
    ("10.1", "    for _ in range(3):\n        run()\n", "", "The first call compiles"),
    ("10.1", "np.median(spans)", "np.mean(spans)", "This is the mean"),
    ("10.1", "np.median(spans)", "np.min(spans)", "the time of a single run"),
    ("10.1", "np.median(spans)", "np.sum(spans)", "the sum over all repeats"),
    (
        "10.1", "        begin = machine.record()\n        run()\n        end = machine.record()\n        machine.synchronize()\n"
        "        spans.append(machine.elapsed_us(begin, end))",
        "        begin = machine.clock()\n        run()\n        spans.append(machine.clock() - begin)", "how long LAUNCHING takes",
    ),
    (
        "10.1", "        begin = machine.record()\n        run()\n        end = machine.record()\n        machine.synchronize()\n"
        "        spans.append(machine.elapsed_us(begin, end))",
        "        begin = machine.clock()\n        run()\n        machine.synchronize()\n        spans.append(machine.clock() - begin)",
        "still in the queue",
    ),
    ("10.1", "elapsed_us(begin, end)", "elapsed_us(end, begin)", "pass the earlier event"),
    ("10.2", "(until - first)", "(max(spans)[1] - first)", "the LATEST end"),
    ("10.3", "i < w_n.size", "i < w_n.size - 1", "The last element was left out"),
    ("10.3", "lr_1[0] * ", "lr_1 * ", "every array needs its index"),
    ("10.2", "max(start, until)", "start", "counted twice"),
    ("10.2", "sorted(spans)", "list(spans)", "sort them by start"),
    ("10.2", "until = max(until, end)", "until = end", "must not move `until` back"),
    ("10.2", " / (until - first)", "", "not its share"),
    ("10.2", " / (until - first)", " / until", "begin at the first start"),
    ("10.3", "lr_1[0]", "lr_1[i]", "lr_1 has a single element"),
    ("10.3", "w_n[i] -= lr_1[0] * g_n[i]", "w_n[i] += lr_1[0] * g_n[i]", "step against the gradient"),
    ("10.3", "lr_1[0] * ", "", "lr is missing"),
    ("10.3", "lr_1[0] * ", "0.5 * ", "do not hard-code a number"),
    ("10.3", "    if i < w_n.size:\n", "    if True:\n", "threads past the end"),
    ("10.1", "        begin = machine.record()\n        run()\n", "        run()\n        begin = machine.record()\n", "No time has passed"),
    ("10.2", "busy += max(0, end - max(start, until))", "busy += end - max(start, until)", "not a negative time"),
    ("10.3", "cuda.blockDim.x", "32", "was never written"),
    ("10.1", "machine.elapsed_us(begin, end)", "1e-5", "the real computer's clock"),
    ("10.2", "return busy", "return 100 * busy", "That is a percentage"),
]  # fmt: skip
