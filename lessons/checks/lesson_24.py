"""Exercises of lesson 24: the paged cache."""

import numpy as np

from xtrain.simulator import sim

from .attempt import exercise


@exercise(
    "24.1", "make_pool",
    first_step="which blocks are free, and how many sequences use each block? Keep both, and return three functions that change them.",
    hints={"IndexError": "Blocks are 0 to size - 1. If no block is free, allocate() returns None."},
    kernel=False,
)  # fmt: skip
def make_pool(e):
    rng = e.rng
    for size, steps in ((1, 12), (3, 30), (8, 200), (40, 400)):
        functions = e.call(size, case=f"{size} blocks")
        pool = e.several(functions, "allocate", "share", "release")
        e.need(all(map(callable, pool)), "allocate, share and release must be functions.")
        allocate, share, release = pool
        users, done = {}, []
        e.case(f"{size} blocks, none of them in use")
        for step in range(steps):
            done = done[-5:]
            e.where = f"{size} blocks, after {', '.join(done) or 'no call'}"
            # First fill the pool, then mix the calls at random.
            choice = rng.integers(3) if step > size + 1 else 0
            if choice == 0 or not users:
                block = e.ask(allocate)
                free = size - len(users)
                e.need(block is not None or not free,
                       f"allocate() returned None, although {free} of {size} blocks are free: a block is free again when the last "
                       "sequence has released it.")  # fmt: skip
                if block is None:
                    done.append("allocate() -> None")
                    continue
                e.need(np.ndim(block) == 0 and 0 <= block < size and int(block) == block,
                       f"allocate() returned {block!r}; blocks are 0 to {size - 1}.")  # fmt: skip
                e.need(block not in users,
                       f"allocate() returned block {block}, which {users.get(block)} sequence(s) still use: it is free only when all of "
                       "them have released it.")  # fmt: skip
                users[int(block)] = 1
                done.append(f"allocate() -> {block}")
            else:
                block = int(rng.choice(list(users)))
                call, change = (share, 1) if choice == 1 else (release, -1)
                e.ask(call, block)
                users[block] += change
                done.append(f"{'share' if change == 1 else 'release'}({block})")
                if not users[block]:
                    del users[block]


def attention(q, k, v, scale):
    s = k @ q * scale
    p = np.exp(s - s.max())
    return p @ v / p.sum()


def flat_all(x, table):
    """-> every place of the blocks in a table, in order"""
    return np.asarray(x).astype(np.float64)[table].reshape(-1, 32)


@exercise(
    "24.2", "paged_attention_kernel",
    first_step="lane d holds q[d]. For each position p: in which block is it, and at which offset? Then its score, warp_sum(q k) * scale.",
    allow=("warp_sum",),
    hints={
        "CollectiveError": "All 32 lanes must call warp_sum, once per key: all lanes loop over the same keys.",
        "DeadlockError": "All 32 lanes must call warp_sum: all lanes loop over the same keys.",
        "OutOfBoundsError below 0": "An entry of the table that no position needs is invalid here: read only table[p // S] for p < n.",
        "OutOfBoundsError": "Position p is in block table[p // S], at offset p % S; there are n positions.",
        "UninitializedError": "This place of the cache holds no key: position p is in block table[p // S], at offset p % S, and p < n.",
        "RaceError": "Lane d writes o[d], and nothing else.",
    },
)  # fmt: skip
def paged_attention_kernel(e):
    rng = e.rng
    cases = [(10, 4, 1.0), (4, 4, 1.0), (1, 4, 1.0), (17, 8, 1.0), (9, 3, 40.0), (8, 16, 1.0)]
    cases.append((int(rng.integers(5, 30)), int(rng.integers(2, 7)), 1.0))
    for n, S, big in cases:
        used = -(-n // S)
        R, M = used + 3, used + 2
        table = rng.permutation(R)[:used].astype(np.int32)
        if used > 1 and (table == np.arange(used)).all():
            table = table[::-1].copy()
        q = e.normal(32, scale=big)
        keys, values = (np.asarray(e.normal(n, 32)).astype(np.float64) for _ in "kv")
        if big > 1:
            # the largest score comes late, and is large
            keys[-2] = np.asarray(q) / 10
        k, v = e.normal(R, S, 32), e.normal(R, S, 32)  # first of other sequences
        for p in range(n):
            k[table[p // S], p % S], v[table[p // S], p % S] = keys[p], values[p]
        padded = sim(np.concatenate([table, np.full(M - used, -1, np.int32)]))
        o, scale = e.blank(32), np.float32(0.3)
        case = f"{n} keys in blocks of {S}, table {padded.tolist()}"
        e.run(
            1,
            32,
            o,
            q,
            k,
            v,
            padded,
            np.int64(n),
            scale,
            case=case + (", large scores" if big > 1 else ""),
        )
        wide = np.asarray(q).astype(np.float64)
        want = attention(wide, keys, values, 0.3)
        rows = lambda order: attention(wide, keys[order], values[order], 0.3)
        flat = lambda x: np.asarray(x).astype(np.float64).reshape(-1, 32)[:n]
        with np.errstate(all="ignore"):
            s = keys @ wide * 0.3
            raw = np.exp(s)
            unscaled = attention(wide, keys, values, 1.0)
            beyond = [flat_all(x, table) for x in (k, v)]
            mistakes = {
                "There are n keys: the places after them in the last block belong to no token yet.":
                    attention(wide, *beyond, 0.3) if n % S else np.empty(0),
                "The table is not used: these are the first n places of the cache. Position p is in block table[p // S].":
                    attention(wide, flat(k), flat(v), 0.3) if used > 1 else np.empty(0),
                "exp overflows: subtract the running maximum, as in lesson 13.":
                    lambda got: big > 1 and not np.isfinite(got).all(),
                "The last key is missing: there are n of them.": rows(slice(0, n - 1)) if n > 1 else np.empty(0),
                "The first key is missing: begin with p = 0.": rows(slice(1, n)) if n > 1 else np.empty(0),
                "Only the last block was attended to: m, l and the output go on from block to block.":
                    rows(slice((used - 1) * S, n)) if used > 1 else np.empty(0),
                "Only full blocks were attended to: the last block may hold fewer than S keys.":
                    rows(slice(0, n // S * S)) if n % S and n > S else np.empty(0),
                "The scores are not scaled: multiply them by scale.": unscaled,
                "Divide by the sum of the weights at the end.": want * (raw / np.exp(s.max())).sum() if n > 1 else np.empty(0),
                "NaN: l is 0 if no key is attended to, and there is at least one.": lambda got: np.isnan(got).any(),
            }  # fmt: skip
            m, running, acc = -np.inf, [], np.zeros(32)
            for score, value in zip(s, values):
                m = max(m, score)
                running.append(np.exp(score - m))
                acc = acc + running[-1] * value
            true = np.exp(s - s.max()).sum()
            why = "When a larger score appears, the running {} must be multiplied by exp(old m - new m)."
            mistakes[why.format("sum")] = want * true / sum(running)
            mistakes[why.format("output")] = acc / true
            mistakes[why.format("sum and output")] = acc / sum(running)
        e.same("o", o, want, mistakes, rtol=1e-3, atol=1e-4)


@exercise(
    "24.3", "block_names",
    first_step="cut the tokens into blocks of S. What decides the keys of a block: only its own tokens?",
    hints={
        "TypeError": "A list cannot be hashed or be a key of a dictionary: make it a tuple.",
        "ValueError": "A token may be any number up to the size of the vocabulary: bytes() takes numbers below 256 only.",
    },
    kernel=False,
)  # fmt: skip
def block_names(e):
    rng = e.rng

    def names(tokens, S):
        got = e.call(list(tokens), S, case=f"tokens {list(tokens)}, blocks of {S}")
        e.need(isinstance(got, list), f"Return a list of names; got {type(got).__name__}.")
        full = len(tokens) // S
        e.need(len(got) != -(-len(tokens) // S) or len(got) == full,
               "The last block is not full: it gets more tokens later, so it has no name yet.")  # fmt: skip
        e.need(len(got) == full, f"There are {full} full blocks and {len(got)} names.")
        try:
            set(got)
        except TypeError:
            raise e.wrong(
                "A name must be usable as a key of a dictionary: not a list or an array."
            ) from None
        return got

    def differ(a, b, i, S, why):
        x, y = names(a, S), names(b, S)
        e.where = f"{list(a)} and {list(b)}, blocks of {S}"
        e.need(x[i] != y[i], f"Block {i} of both has the same name. {why}")

    random = [int(t) for t in rng.integers(0, 50, 12)]
    for tokens, S in (
        ([], 4),
        ([5], 4),
        ([1, 2, 3, 4], 4),
        ([3, 1, 2, 0, 7, 9, 9], 3),
        (random, 4),
        (random[:11], 4),
    ):
        e.need(
            names(tokens, S) == names(list(tokens), S),
            "The same tokens have other names the second time.",
        )
        longer = [*tokens, 8, 8, 8, 8]
        x, y = names(tokens, S), names(longer, S)
        e.where = f"{list(tokens)} and {longer}, blocks of {S}"
        e.need(
            y[: len(x)] == x,
            "The first blocks hold the same tokens, but have other names: a name must not depend on later tokens.",
        )
    differ([1, 2, 3, 4], [9, 9, 3, 4], 1, 2,
           "The keys of a token depend on all tokens before it: the name must too, not only on the block's own tokens.")  # fmt: skip
    differ(
        [1, 2, 5, 6, 3, 4],
        [9, 9, 5, 6, 3, 4],
        2,
        2,
        "A token far before the block differs, too: chain the names.",
    )
    differ([1, 2, 3, 4], [2, 1, 3, 4], 1, 2, "The order of the tokens before matters.")
    differ(
        [1, 2, 5, 6, 3, 4], [5, 6, 1, 2, 3, 4], 2, 2, "The order of the blocks before matters, too."
    )
    differ([1, 2], [2, 1], 0, 2, "The order of the tokens matters.")
    for base in (10, 100, 256, 1000, 1024, 50257, 65536, 100_000):
        differ([0, base], [1, 0], 0, 2,
               "A token may be any number up to the size of the vocabulary, which is above 100,000 in today's models: two tokens must not look like another two.")  # fmt: skip
    differ(
        [1, 12],
        [11, 2],
        0,
        2,
        "Joined without a separator, 1 and 12 look like 11 and 2: keep the tokens apart.",
    )
    differ([3, 4], [3, 5], 0, 2, "All tokens of the block matter.")
    differ([4, 3], [5, 3], 0, 2, "All tokens of the block matter.")
    for i in range(8):
        other = [*range(i), 9, *range(i + 1, 10)]
        differ(range(10), other, 4, 2, "Every token before the block counts: chain the names.")
    same = names([7, 7, 7, 7, 7, 7], 2)
    e.where = "[7, 7, 7, 7, 7, 7], blocks of 2"
    e.need(
        len(set(same)) == 3,
        "These blocks hold the same tokens, but the tokens before them differ in number: three names.",
    )
    alike = names([*random, 1, 1, 1], 3), names([*random, 2, 2, 2], 3)
    e.where = f"{random} and three more tokens, blocks of 3"
    e.need(
        alike[0][:4] == alike[1][:4] and alike[0][4] != alike[1][4],
        "Exactly the blocks up to the first difference have equal names.",
    )


@exercise(
    "24.4", "next_place",
    first_step="is there room in the last block (n % S is not 0)? And does another sequence use that block?",
    hints={"IndexError": "A sequence without tokens has no block yet: n % S == 0 comes first."},
    kernel=False,
)  # fmt: skip
def next_place(e):
    rng = e.rng
    cases = [  # what, n, S, sequences that use the last block
        ("no token yet", 0, 4, 1),
        ("the last block is full and its own", 8, 4, 1),
        ("the last block is full and shared", 8, 4, 3),
        ("room in its own block", 6, 4, 1),
        ("room in a block that two use", 6, 4, 2),
        ("room in a block that three use", 5, 4, 3),
        ("one place left, shared", 7, 4, 2),
        ("blocks of one token", 3, 1, 2),
    ]
    S = int(rng.integers(3, 9))
    cases += [("a random length", int(rng.integers(1, 40)), S, int(users)) for users in (1, 2)]
    for what, n, S, users in cases:
        blocks = [int(b) for b in rng.permutation(60)]
        table, count = blocks[: -(-n // S)], [0] * 60
        for block in table:
            count[block] = 2  # earlier blocks are shared
        if table:
            count[table[-1]] = users
        before, counted = list(table), list(count)
        new, copied = blocks[-1], []

        def allocate(new=new, count=count):
            e.need(count[new] == 0, "allocate was called twice: one block is enough for one token.")
            count[new] = 1
            return new

        got = e.call(
            table, count, n, S, allocate, lambda to, source, c=copied: c.append((to, source)),
            case=f"{what}: n = {n}, S = {S}, table {before}, {users} sequence(s) use the last block",
        )  # fmt: skip
        e.need(
            isinstance(got, (tuple, list)) and len(got) == 2,
            f"Return two numbers, (block, offset); got {got!r}.",
        )
        block, offset = got
        shared = n % S and users > 1
        e.need(not shared or block != before[-1],
               f"Block {block} is used by {users} sequences: writing to it would change the others' keys. Copy it first.")  # fmt: skip
        e.need(
            offset == n % S,
            f"The offset is {offset}: token {n} is at offset n % S = {n % S} of its block.",
        )
        if n % S == 0:
            e.need(
                block == new, f"All blocks are full: token {n} needs a new block from allocate()."
            )
            e.need(
                not copied,
                "Nothing has to be copied: a full block is not written any more, so it can stay shared.",
            )
            want = [*before, new]
        elif shared:
            e.need(block == new, "A shared block is replaced by a new one, from allocate().")
            e.need(copied == [(new, before[-1])],
                   f"The new block needs what the shared one holds: copy({new}, {before[-1]}) once; got {copied or 'no call of copy'}.")  # fmt: skip
            want = [*before[:-1], new]
        else:
            e.need(
                count[new] == 0,
                "A block was allocated, although there is room in the sequence's own last block.",
            )
            e.need(
                block == before[-1] and not copied,
                f"Token {n} goes into block {before[-1]}, the last one: nothing is copied.",
            )
            want = before
        e.need(table == want, f"The table is {table} afterwards; it must be {want}.")
        e.need(new not in want or count[new] == 1,
               f"count[{new}] is {count[new]} afterwards, it must be 1: allocate has counted this sequence, and a block with a wrong count is never free again.")  # fmt: skip
        for b in set(before):
            left = counted[b] - (1 if shared and b == before[-1] else 0)
            e.need(count[b] == left,
                   f"count[{b}] is {count[b]} afterwards, it must be {left}: "
                   + ("the sequence uses the shared block no more." if left < counted[b] else "this block's users have not changed."))  # fmt: skip
