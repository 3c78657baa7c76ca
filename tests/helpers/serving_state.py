"""What an engine without unfinished requests may still have."""

from xtrain.serving.blocks import block_key


def check_nothing_is_used(engine):
    assert not engine.runner.in_flight
    check_scheduler_is_empty(engine.scheduler)


def check_scheduler_is_empty(scheduler):
    """No request, slot or block is left over, and all that can be found of the cache is what its blocks hold."""
    assert not scheduler.unfinished and not scheduler.waiting
    assert not scheduler.prefilling and not scheduler.decoding
    assert sorted(scheduler.free_slots) == list(range(scheduler.limits.max_batch))
    pool = scheduler.pool
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
