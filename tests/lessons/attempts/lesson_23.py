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


# %% 23.3 RIGHT: by np.split
def mlp_shares(x_NC, w1_FC, w2_CF, ranks):
    parts = zip(np.split(w1_FC, ranks), np.split(w2_CF, ranks, axis=1))
    return [silu(x_NC @ a.T) @ b.T for a, b in parts]


# %% 23.3 WRONG: nothing is split
def mlp_shares(x_NC, w1_FC, w2_CF, ranks):
    return [silu(x_NC @ w1_FC.T) @ w2_CF.T / ranks] * ranks


# %% 23.4 RIGHT: as a sum of what is in memory
def fsdp_bytes(layers, layer_bytes, ranks, ahead):
    own = layers * layer_bytes / ranks
    gathered = 0 if ranks < 2 else sum(layer_bytes for _ in range(ahead + 1))
    return own + gathered
