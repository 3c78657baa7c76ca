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


# %% 32.1 WRONG: world does not divide n here
def ring_all_reduce(comm, x_n):
    world, rank = comm.world, comm.rank
    right, left, size = (rank + 1) % world, (rank - 1) % world, x_n.size // world
    chunk = lambda i: x_n[i % world * size : i % world * size + size]
    for step in range(world - 1):
        received = np.empty_like(chunk(0))
        comm.exchange(chunk(rank - step), right, received, left)
        chunk(rank - step - 1)[...] += received
    for step in range(world - 1):
        comm.exchange(chunk(rank + 1 - step), right, chunk(rank - step), left)


# %% 32.1 WRONG: one step too few
def ring_all_reduce(comm, x_n):
    world, rank = comm.world, comm.rank
    right, left = (rank + 1) % world, (rank - 1) % world
    chunk = lambda i: x_n[part(x_n.size, world, i % world)]
    for step in range(world - 2):
        received = np.empty_like(chunk(rank - step - 1))
        comm.exchange(chunk(rank - step), right, received, left)
        chunk(rank - step - 1)[...] += received
    for step in range(world - 1):
        comm.exchange(chunk(rank + 1 - step), right, chunk(rank - step), left)


# %% 32.2 RIGHT: both sums in one call
def split_mlp(comm, x_NC, w1_FC, w2_CF, dy_NC):
    h_NF = x_NC @ w1_FC.T
    dh_NF = (dy_NC @ w2_CF) * silu_slope(h_NF)
    both = comm.all_reduce(np.stack([silu(h_NF) @ w2_CF.T, dh_NF @ w1_FC]))
    return *both, dh_NF.T @ x_NC, dy_NC.T @ silu(h_NF)


# %% 32.3 WRONG: not every G-th head
def own_weights(rank, world, w, H, G):
    keys, D = part(G, world, rank), w["k_proj"].shape[0] // G
    query = [h * D + d for h in range(H) if h % G in range(G)[keys] for d in range(D)]
    rows, units = slice(keys.start * D, keys.stop * D), part(len(w["up_proj"]), world, rank)
    own = {"q_proj": query, "k_proj": rows, "v_proj": rows, "gate_proj": units, "up_proj": units}
    own = {name: w[name][where] for name, where in own.items()}
    own |= {"o_proj": w["o_proj"][:, query], "down_proj": w["down_proj"][:, units]}
    return own | {name: w[name] for name in w if "norm" in name}


# %% 32.3 WRONG: down_proj: It is cut along the wrong axis
def own_weights(rank, world, w, H, G):
    keys, D, n = part(G, world, rank), w["k_proj"].shape[0] // G, H // G
    rows, units = slice(keys.start * D, keys.stop * D), part(len(w["up_proj"]), world, rank)
    query = slice(rows.start * n, rows.stop * n)
    own = {"q_proj": query, "k_proj": rows, "v_proj": rows, "gate_proj": units, "up_proj": units}
    own["down_proj"] = part(len(w["down_proj"]), world, rank)
    own = {name: w[name][where] for name, where in own.items()}
    return own | {"o_proj": w["o_proj"][:, query]} | {n: w[n] for n in w if "norm" in n}


# %% 32.4 WRONG: weights that had already been updated
# as the attempt above, but:
# -         dy, dw = layer_bwd(dy, inputs[l], square(comm.all_gather(shards[l]), C))
# -         n = shards[l].size
# -         update(l, shards[l], flatten(dw, comm.world)[comm.rank * n : comm.rank * n + n])
# +         _, dw = layer_bwd(dy, inputs[l], square(comm.all_gather(shards[l]), C))
# +         update(l, shards[l], comm.reduce_scatter(flatten(dw, comm.world)))
# +         dy, _ = layer_bwd(dy, inputs[l], square(comm.all_gather(shards[l]), C))


# %% 32.4 WRONG: takes the layer's INPUT x
def fsdp_step(comm, shards, x_NC, t_NC, count, update):
    C, outputs = x_NC.shape[1], []
    for shard in shards:
        outputs.append(layer(outputs[-1] if outputs else x_NC, square(comm.all_gather(shard), C)))
    error = outputs[-1] - t_NC
    dy = 2 * error / count
    for l in reversed(range(len(shards))):
        dy, dw = layer_bwd(dy, outputs[l], square(comm.all_gather(shards[l]), C))
        update(l, shards[l], comm.reduce_scatter(flatten(dw, comm.world)))
    return comm.all_reduce(np.array([(error**2).sum() / count]))[0]


# %% 32.5 WRONG: not a part of them
def fsdp_bytes(layers, layer_bytes, ranks, ahead):
    own = layers * layer_bytes / ranks
    return own + (1 + ahead) * layer_bytes / ranks if ranks > 1 else own
