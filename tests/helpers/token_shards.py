"""Small token shards for tests."""

import numpy as np

from xtrain.data.shards import write_shard


def shard(folder, tokens, vocab_size=50_000, name="a.bin"):
    """Write one shard. -> its path"""
    write_shard(folder / name, np.asarray(tokens), vocab_size)
    return folder / name
