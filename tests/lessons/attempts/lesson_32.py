"""Attempts at the exercises of lesson 32: see test_attempts.py."""


# %% 32.1 RIGHT: chunks of np.array_split, to the left, and each rank ends with its own chunk complete
def ring_all_reduce(comm, x_n):
    R, me = comm.world, comm.rank
    chunks = np.array_split(x_n, R)
    for s in range(1, R):
        buffer = chunks[(me + s + 1) % R].copy()
        comm.exchange(chunks[(me + s) % R], (me - 1) % R, buffer, (me + 1) % R)
        chunks[(me + s + 1) % R] += buffer
    for s in range(R - 1):
        comm.exchange(chunks[(me + s) % R], (me - 1) % R, chunks[(me + s + 1) % R], (me + 1) % R)


# %% 32.1 RIGHT: one loop over both halves
def ring_all_reduce(comm, x_n):
    n, R = x_n.size, comm.world
    for s in range(2 * R - 2):
        send, own = (x_n[part(n, R, (comm.rank - s - i) % R)] for i in (0, 1))
        got = np.empty_like(own)
        comm.exchange(send, (comm.rank + 1) % R, got, (comm.rank - 1) % R)
        own[...] = own + got if s < R - 1 else got


# %% 32.1 WRONG: the sum
def ring_all_reduce(comm, x_n):
    n, R = x_n.size // comm.world, comm.world
    for s in range(R - 1):
        a, b = (comm.rank - s) % R, (comm.rank - s - 1) % R
        got = np.empty_like(x_n[:n])
        comm.exchange(x_n[a * n : a * n + n], (comm.rank + 1) % R, got, (comm.rank - 1) % R)
        x_n[b * n : b * n + n] += got
    for s in range(R - 1):
        a, b = (comm.rank + 1 - s) % R, (comm.rank - s) % R
        comm.exchange(
            x_n[a * n : a * n + n], (comm.rank + 1) % R, x_n[b * n : b * n + n], (comm.rank - 1) % R
        )
    x_n /= R


# %% 32.1 WRONG: It contains the number of rank
def ring_all_reduce(comm, x_n):
    R, me = comm.world, comm.rank
    got, to_send = np.empty_like(x_n), x_n.copy()
    for _ in range(R - 2):  # one rank too few
        comm.exchange(to_send, (me + 1) % R, got, (me - 1) % R)
        x_n += got
        to_send[...] = got


# %% 32.1 WRONG: is nan; expected
def ring_all_reduce(comm, x_n):
    x_n[...] = np.nan


# %% 32.1 WRONG: no rank can continue
def ring_all_reduce(comm, x_n):
    if comm.rank:
        got = np.empty_like(x_n)
        comm.exchange(x_n, 0, got, 0)


# %% 32.2 RIGHT: reduce-scatter and all-gather, which is an all-reduce
def split_mlp(comm, x_NC, w1_FC, w2_CF, dy_NC):
    def total(v):
        n = -(-v.size // comm.world) * comm.world
        flat = np.zeros(n)
        flat[: v.size] = v.ravel()
        return comm.all_gather(comm.reduce_scatter(flat))[: v.size].reshape(v.shape)

    h = np.einsum("nc,fc->nf", x_NC, w1_FC)
    s = 1 / (1 + np.exp(-h))
    dh = (dy_NC @ w2_CF) * (s + h * s * (1 - s))
    return total(h * s @ w2_CF.T), total(dh @ w1_FC), dh.T @ x_NC, dy_NC.T @ (h * s)


# %% 32.2 WRONG: The hidden units of the ranks are added
def split_mlp(comm, x_NC, w1_FC, w2_CF, dy_NC):
    h = comm.all_reduce(x_NC @ w1_FC.T)
    y = silu(h) @ w2_CF.T
    dh = (dy_NC @ w2_CF) * silu_slope(h)
    return y, dh @ w1_FC, dh.T @ x_NC, dy_NC.T @ silu(h)


# %% 32.3 RIGHT: with axes for heads
def own_weights(rank, world, w, H, G):
    C = len(w["input_layernorm"])
    mine, units = part(G, world, rank), part(len(w["up_proj"]), world, rank)
    own = {n: a for n, a in w.items() if "norm" in n}
    for n in ("q_proj", "k_proj", "v_proj"):
        own[n] = w[n].reshape(G, -1, C)[mine].reshape(-1, C)
    own["o_proj"] = w["o_proj"].reshape(C, G, -1)[:, mine].reshape(C, -1)
    own["down_proj"] = w["down_proj"].T[units].T
    return own | {n: w[n][units] for n in ("gate_proj", "up_proj")}


# %% 32.3 WRONG: its inputs are the COLUMNS
def own_weights(rank, world, w, H, G):
    own = {}
    for name, a in w.items():
        heads = {"q": H, "k": G, "v": G, "o": H}.get(name[0], 0) if name[1:] == "_proj" else 0
        D = len(w["k_proj"]) // G
        mine = part(G, world, rank)
        size = D * heads // G if heads else 0
        rows = slice(mine.start * size, mine.stop * size) if size else part(len(a), world, rank)
        own[name] = a if "norm" in name else a[rows]
    return own


# %% 32.4 RIGHT: updates after the backward loop, weights by reshape
def fsdp_step(comm, shards, x_NC, t_NC, count, update):
    C, R, inputs, found = x_NC.shape[1], comm.world, [x_NC], {}
    gathered = lambda l: comm.all_gather(shards[l])[: C * C].reshape(C, C)
    for l in range(len(shards)):
        inputs += [np.tanh(inputs[l] @ gathered(l).T)]
    dy = (inputs[-1] - t_NC) * (2 / count)
    for l in range(len(shards) - 1, -1, -1):
        w = gathered(l)
        dh = dy * (1 - inputs[l + 1] ** 2)
        dy, dw = dh @ w, dh.T @ inputs[l]
        padded = np.pad(dw.ravel(), (0, R * len(shards[l]) - C * C))
        found[l] = comm.reduce_scatter(padded)
    for l, g in found.items():
        update(l, shards[l], g)
    total = comm.all_gather(np.array([np.sum((inputs[-1] - t_NC) ** 2)]))
    return sum(total) / count


# %% 32.4 WRONG: layers are in memory as a whole
def fsdp_step(comm, shards, x_NC, t_NC, count, update):
    C, inputs, kept = x_NC.shape[1], [x_NC], []
    for shard in shards:
        kept.append(square(comm.all_gather(shard), C))
        inputs.append(layer(inputs[-1], kept[-1]))
    error = inputs.pop() - t_NC
    dy = 2 * error / count
    for l in reversed(range(len(shards))):
        dy, dw = layer_bwd(dy, inputs[l], kept[l])
        update(l, shards[l], comm.reduce_scatter(flatten(dw, comm.world)))
    return comm.all_reduce(np.array([(error**2).sum() / count]))[0]


# %% 32.4 WRONG: This is the gradient of this rank's rows alone
def fsdp_step(comm, shards, x_NC, t_NC, count, update):
    C, inputs = x_NC.shape[1], [x_NC]
    for shard in shards:
        inputs.append(layer(inputs[-1], square(comm.all_gather(shard), C)))
    error = inputs.pop() - t_NC
    dy = 2 * error / count
    for l in reversed(range(len(shards))):
        dy, dw = layer_bwd(dy, inputs[l], square(comm.all_gather(shards[l]), C))
        n = shards[l].size
        update(l, shards[l], flatten(dw, comm.world)[comm.rank * n : comm.rank * n + n])
    return comm.all_reduce(np.array([(error**2).sum() / count]))[0]


# %% 32.5 RIGHT: as a sum of what is in memory
def fsdp_bytes(layers, layer_bytes, ranks, ahead):
    own = layers * layer_bytes / ranks
    gathered = 0 if ranks < 2 else sum(layer_bytes for _ in range(ahead + 1))
    return own + gathered
