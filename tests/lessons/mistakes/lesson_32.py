"""Typical mistakes, planted in the solutions of lesson 32: (exercise, old, new, words of the answer)."""

FIRST = """    for step in range(world - 1):
        own = chunk(rank - step - 1)
        received = np.empty_like(own)
        comm.exchange(chunk(rank - step), right, received, left)
        own += received
"""
SECOND = """    for step in range(world - 1):
        comm.exchange(chunk(rank + 1 - step), right, chunk(rank - step), left)
"""
BACKWARD = """        w = square(comm.all_gather(shards[l]), C)
        dy, dw = layer_bwd(dy, inputs[l], w)
        update(l, shards[l], comm.reduce_scatter(flatten(dw, comm.world)))
"""
SCATTERED = "comm.reduce_scatter(flatten(dw, comm.world))"
COPIES = """    C = x_NC.shape[1]
    inputs, weights = [x_NC], []
    for shard in shards:
        weights.append(square(comm.all_gather(shard), C).copy())
        inputs.append(layer(inputs[-1], weights[-1]))
    error = inputs.pop() - t_NC
    dy = 2 * error / count
    for l in reversed(range(len(shards))):
        dy, dw = layer_bwd(dy, inputs[l], weights[l])
        update(l, shards[l], comm.reduce_scatter(flatten(dw, comm.world)))
    return comm.all_reduce((error**2).sum().reshape(1) / count)[0]
"""

MISTAKES = [
    ("32.1", SECOND, "", "The second half is missing"),
    ("32.1", FIRST, "", "expected"),
    ("32.1", FIRST + SECOND, "    return x_n * 1.0\n", "work in place"),
    ("32.1", "        own += received\n", "        own[...] = received\n", "stores what it should ADD"),
    ("32.1", "own = chunk(rank - step - 1)", "own = chunk(rank - step)", "was added to the chunk that was just sent"),
    ("32.1", "chunk(rank + 1 - step), right, chunk(rank - step), left", "chunk(rank - step), right, chunk(rank - step - 1), left", "the complete one is chunk r + 1"),
    ("32.1", FIRST, FIRST.replace("world - 1", "world"), "each half has world - 1 steps"),
    ("32.1", SECOND, SECOND.replace("chunk(rank - step), left)", "got := np.empty_like(chunk(rank - step)), left)\n        chunk(rank - step)[...] += got"), "it is already the sum"),
    ("32.1", SECOND, SECOND + "    x_n /= world\n", "That is the mean"),
    ("32.1", "comm.exchange(chunk(rank - step), right, received, left)", "comm.exchange(chunk(rank - step), left, received, right)", "contains"),
    ("32.1", FIRST + SECOND, "    for _ in range(world - 1):\n        got = np.empty_like(x_n)\n        comm.exchange(x_n, right, got, left)\n        x_n += got\n",
     "some are added again and again"),
    ("32.1", FIRST + SECOND, "    got, mine = np.empty_like(x_n), x_n.copy()\n    for _ in range(world - 1):\n        comm.exchange(mine, right, got, left)\n"
     "        x_n += got\n        mine = got.copy()\n", "the same bits"),
    ("32.1", FIRST + SECOND, "    parts = [x_n.copy() for _ in range(world)]\n    for i in range(1, world):\n"
     "        comm.exchange(x_n, (rank + i) % world, parts[(rank - i) % world], (rank - i) % world)\n    x_n[...] = sum(parts)\n", "only to a neighbour"),
    ("32.1", FIRST + SECOND, "    parts = [x_n.copy() for _ in range(world)]\n    for i in range(1, world):\n"
     "        comm.exchange(parts[(rank - i + 1) % world], right, parts[(rank - i) % world], left)\n    x_n[...] = sum(parts)\n", "send chunks, not whole arrays"),
    ("32.1", FIRST + SECOND, "    comm.all_reduce(x_n)\n", "use comm.exchange only"),
    ("32.1", "received = np.empty_like(own)", "received = np.empty_like(chunk(0))", "Chunks may have different sizes"),
    ("32.1", "    for step in range(world - 1):\n        own", "    for step in range(world - 1 - (rank == 0)):\n        own", "rank"),
    ("32.1", "i % world", "i", "modulo world"),
    ("32.2", "comm.all_reduce(a_NF @ w2_CF.T)", "a_NF @ w2_CF.T", "all-reduce the shares"),
    ("32.2", "comm.all_reduce(a_NF @ w2_CF.T)", "comm.all_reduce(a_NF @ w2_CF.T) / comm.world", "the shares are added"),
    ("32.2", "comm.all_reduce(dh_NF @ w1_FC)", "dh_NF @ w1_FC", "dx is not reduced"),
    ("32.2", "    dh_NF = ", "    dy_NC = comm.all_reduce(dy_NC.copy())\n    dh_NF = ", "must not be summed"),
    ("32.2", "    dh_NF = ", "    comm.all_reduce(dy_NC)\n    dh_NF = ", "works in place"),
    ("32.2", "a_NF = silu(h_NF)", "a_NF = h_NF", "silu is missing"),
    ("32.2", " * silu_slope(h_NF)", "", "silu_slope is missing"),
    ("32.2", "silu_slope(h_NF)", "silu_slope(a_NF)", "the slope at h"),
    ("32.2", "dh_NF.T @ x_NC,", "comm.all_reduce(dh_NF.T @ x_NC),", "do not belong together"),
    ("32.2", "dy_NC.T @ a_NF", "comm.all_reduce(dy_NC.T @ a_NF)", "do not belong together"),
    ("32.2", "dy_NC.T @ a_NF", "dy_NC.T @ h_NF", "whose input is silu(h)"),
    ("32.2", "dh_NF.T @ x_NC,", "dh_NF.T @ x_NC / comm.world,", "nothing is averaged"),
    ("32.2", "y_NC = comm", "comm.all_reduce(dh_NF := np.zeros((99, 9)))\n    y_NC = comm", "Neither weights nor hidden units are sent"),
    ("32.2", "(dy_NC @ w2_CF) * ", "comm.all_reduce(dy_NC @ w2_CF) * ", "dy @ w2 is summed over the ranks"),
    ("32.2", "    h_NF = x_NC", "    mine = part(len(w1_FC), comm.world, comm.rank)\n    w1_FC, w2_CF = w1_FC[mine], w2_CF[:, mine]\n    h_NF = x_NC", "divided a second time"),
    ("32.2", "    h_NF = x_NC", "    w1_FC, w2_CF = comm.all_gather(w1_FC), comm.all_gather(w2_CF.T.copy()).T\n    comm.all_reduce = lambda x: x\n    h_NF = x_NC", "weights are never gathered"),
    ("32.2", "return y_NC, dx_NC,", "return y_NC,", "4 things"),
    ("32.3", "slice(keys.start * (H // G), keys.stop * (H // G))", "slice(part(H, world, rank).start * D, part(H, world, rank).stop * D)", "Whole groups"),
    ("32.3", "keys = slice(heads.start * D, heads.stop * D)", "keys = part(G * D, world, rank)", "A head is cut in two"),
    ("32.3", "keys = slice(heads.start * D, heads.stop * D)", "keys = heads", "here it has one"),
    ("32.3", 'rows = {"q_proj": queries, "k_proj": keys,', 'strided = [h * D + d for h in range(rank, G, world) for d in range(D)]\n    rows = {"q_proj": queries, "k_proj": strided,', "every world-th head"),
    ("32.3", '"o_proj": queries, ', "", "The whole of o_proj is there"),
    ("32.3", 'columns = {"o_proj": queries, ', 'rows["o_proj"] = queries\n    columns = {', "its inputs are the COLUMNS"),
    ("32.3", 'units = part(w["up_proj"].shape[0], world, rank)', "units = slice(rank, None, world)", "every world-th hidden unit"),
    ("32.3", "own = dict(w)", "own = {n: a[part(len(a), world, rank)] if a.ndim == 1 else a for n, a in w.items()}", "a norm needs all C numbers"),
    ("32.3", "own = dict(w)", "own = {}", "is missing in the result"),
    ("32.3", "heads = part(G, world, rank)", "heads = part(G, world, world - 1 - rank)", "the part of rank"),
    ("32.4", SCATTERED, "flatten(dw, comm.world)[part(shards[l].size * comm.world, comm.world, comm.rank)]", "this rank's rows alone"),
    ("32.4", SCATTERED, SCATTERED + " / comm.world", "the ranks' gradients are added"),
    ("32.4", SCATTERED, "comm.all_reduce(flatten(dw, comm.world))[part(shards[l].size * comm.world, comm.world, comm.rank)]", "sends half as much"),
    ("32.4", SCATTERED, "dw", "update gets the whole dw"),
    ("32.4", SCATTERED, "comm.reduce_scatter(dw)", "needs flatten(dw, comm.world)"),
    ("32.4", "dy = 2 * error / count", "dy = 2 * error / error.size", "the number of its own targets"),
    ("32.4", "dy = 2 * error / count", "dy = 2 * error", "not divided by `count`"),
    ("32.4", "dy = 2 * error / count", "dy = error / count", "The factor 2"),
    ("32.4", "dy = 2 * error / count", "dy = -2 * error / count", "the error is y - t"),
    ("32.4", "    inputs = [x_NC]\n    for shard in shards:\n        w = square(comm.all_gather(shard), C)\n",
     "    inputs = [x_NC]\n    whole = [square(comm.all_gather(s), C) for s in shards]\n    for w in whole:\n", "in memory as a whole at the same time"),
    ("32.4", BACKWARD, "        w = square(comm.all_gather(shards[l]), C)\n        _, dw = layer_bwd(dy, inputs[l], w)\n        slope = dy * (1 - layer(inputs[l], w) ** 2)\n"
     "        update(l, shards[l], comm.reduce_scatter(flatten(dw, comm.world)))\n        dy = slope @ square(comm.all_gather(shards[l]), C)\n", "had already been updated"),
    ("32.4", "    C = x_NC.shape[1]\n", "    C = x_NC.shape[1]\n    kept = fsdp_step.__dict__.setdefault(comm.rank, {})\n    if len(kept) != len(shards):\n        kept.clear()\n    old = [kept.get(l, s) for l, s in enumerate(shards)]\n"
     "    kept.update({l: s.copy() for l, s in enumerate(shards)})\n    new, shards = shards, old\n", "must be shards[2] itself"),
    ("32.4", "update(l, shards[l], ", "update(l, shards[l].copy(), ", "itself, which it changes in place"),
    ("32.4", "update(l, shards[l], ", "(lambda *a: comm.rank or update(*a))(l, shards[l], ", "update was called 0 times"),
    ("32.4", "for l in reversed(range(len(shards)))", "for l in range(len(shards))", "from the last layer to the first"),
    ("32.4", "comm.all_reduce(loss)[0]", "comm.all_reduce(loss.sum())", "on an array"),
    ("32.4", "comm.all_reduce(loss)[0]", "loss[0]", "the share of one rank's rows"),
    ("32.4", "comm.all_reduce(loss)[0]", "comm.all_reduce(loss)[0] / comm.world", "already divided by `count`"),
    ("32.4", ".reshape(1) / count", ".reshape(1)", "The loss is not divided"),
    ("32.4", "    return comm.all_reduce(loss)[0]", "    comm.all_reduce(loss)", "Nothing is returned"),
    ("32.4", "square(comm.all_gather(shard), C)", "square(shard, C)", "A shard and a gathered layer are flat"),
    ("32.5", " + (1 + ahead) * layer_bytes", "", "all its weights must be in memory"),
    ("32.5", "(1 + ahead)", "1", "they need memory too"),
    ("32.5", "layers * layer_bytes // ranks", "layers * layer_bytes", "expected"),
    ("32.5", "    if ranks == 1:\n        return layers * layer_bytes\n", "", "nothing is gathered"),
    ('32.5', '(1 + ahead) * layer_bytes', '(1 + ahead) * layer_bytes * (ranks - 1) // ranks', 'a whole new array'),
    ("32.4", "    C = x_NC.shape[1]\n", COPIES, "copies of whole layers stayed in memory"),
]  # fmt: skip

RIGHT = [  # unusual, but correct
    ("32.1", "right, left = (rank + 1) % world, (rank - 1) % world", "right, left = (rank - 1) % world, (rank + 1) % world\n    rank = -rank"),
    ("32.2", "comm.all_reduce(dh_NF @ w1_FC)", "comm.all_reduce(1.0 * (dh_NF @ w1_FC))"),
    ("32.4", BACKWARD, "        dy, dw = layer_bwd(dy, inputs[l], square(comm.all_gather(shards[l]), C))\n        update(l, shards[l], comm.reduce_scatter(flatten(dw, comm.world)))\n"),
]  # fmt: skip
