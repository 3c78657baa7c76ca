"""Typical mistakes, planted in the solutions of lesson 23: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("23.1", "    mbarrier_wait(base, 0)\n", "", "mbarrier_wait(base, 0)"),
    ("23.1", "    wait_for_product(acc)\n", "", "wait_for_product(acc)"),
    ("23.1", "mbarrier_arrive_expect_tx(base, 2 * TILE_BYTES)", "mbarrier_arrive_expect_tx(base, TILE_BYTES)", "mbarrier_"),
    ("23.1", "mbarrier_arrive_expect_tx(base, 2 * TILE_BYTES)", "mbarrier_arrive_expect_tx(base, 3 * TILE_BYTES)", "2 * TILE_BYTES"),
    ("23.1", "        mbarrier_arrive_expect_tx(base, 2 * TILE_BYTES)\n", "", "mbarrier_arrive_expect_tx"),
    ("23.1", "    cuda.syncthreads()\n", "", "cuda.syncthreads()"),
    ("23.1", "describe(base + Q), describe(base + K)", "describe(base + K), describe(base + Q)", "This is k q^T"),
    ("23.1", "describe(base + Q), describe(base + K)", "describe(base + Q), describe(base + Q)", "This is q q^T"),
    ("23.1", "16 * w + g + 8 * (i // 2), 8 * j + 2 * t + i % 2", "16 * w + g + 8 * (i % 2), 8 * j + 2 * t + i // 2", "are swapped"),
    ("23.1", "16 * w + g", "g", "must be written by one thread"),
    ("23.2", "done[i - stages] if i >= stages else 0", "0", "needs a free buffer"),
    ("23.2", "done[i - stages] if i >= stages else 0", "done[-1] if done else 0", "runs everything in sequence"),
    ("23.2", "    return done[-1]", "    return tiles * max(load, compute)", "cannot overlap with anything"),
    ('23.2', 'max(loaded[-1] if loaded else 0, free)', 'free', 'load i - 1 has ended'),
    ('23.2', 'max(loaded[i], done[-1] if done else 0)', 'loaded[i]', 'computation i - 1 has ended'),
    ('23.1', 'acc[4 * j + i]', 'acc[8 * i + j]', 'are adjacent in acc'),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("23.1", "        mbarrier_init(base, 1)\n", "        mbarrier_init(base, 2)\n        mbarrier_arrive(base)\n"),
]  # fmt: skip
