"""Attempts at the exercises of lesson 23: see test_attempts.py."""


# %% 23.2 RIGHT: the larger of two recurrences, without lists of lists
def finish_time(tiles, load, compute, stages):
    loaded, done = 0.0, [0.0] * stages
    for i in range(tiles):
        loaded = max(loaded, done[i % stages]) + load
        done[i % stages] = max(loaded, done[(i - 1) % stages]) + compute
    return done[(tiles - 1) % stages]


# %% 23.2 WRONG: A load needs a free buffer
def finish_time(tiles, load, compute, stages):
    return load + tiles * compute if compute > load else tiles * load + compute
