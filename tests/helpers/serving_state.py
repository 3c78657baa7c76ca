"""What an engine without unfinished requests may still have."""

from xtrain.serving.blocks import block_key


def check_nothing_is_used(engine):
    """No request, slot or block is left over, and all that can be found of the cache is what its blocks hold."""
    assert not engine.scheduler.unfinished and not engine.scheduler.waiting
    assert not engine.scheduler.prefilling and not engine.scheduler.decoding
    assert not engine.runner.in_flight
    assert sorted(engine.scheduler.free_slots) == list(range(engine.max_batch))
    pool = engine.scheduler.pool
    assert pool.references == [0] * pool.size
    assert sorted([*pool.free, *pool.cached]) == list(range(pool.size)), "a block is lost or twice"
    assert pool._contents.keys() == pool.cached.keys()
    full = {c.key: block for block, c in pool._contents.items() if c.key is not None}
    assert full == pool._by_key
    places = {(c.previous, c.tokens[0]) for c in pool._contents.values()}
    assert places == pool._after.keys() and all(pool._after.values())
    for contents in pool._contents.values():
        key = block_key(contents.previous, contents.tokens)
        assert contents.key == (key if len(contents.tokens) == pool.S else None)
