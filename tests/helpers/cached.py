"""A paged KV cache without an engine: the forward passes of serving, with the blocks in shuffled order."""

import numpy as np
from checks import rng, to_host

from xtrain.device import to_device
from xtrain.kernels.runtime.invariance import batch_invariant
from xtrain.nn.autograd import inference
from xtrain.serving.paged_cache import PagedCache
from xtrain.serving.prefill_rows import PrefillRows, unpack


class Cached:
    """`sequences` sequences of up to `capacity` tokens, in blocks of S."""

    def __init__(self, model, sequences, capacity, invariant=False, S=16, kind="full"):
        self.model, self.invariant = model, invariant
        self.cache = PagedCache(model, capacity, S, kind)
        M = -(-capacity // S)
        self.cache.allocate(sequences * M + 1)
        order = rng(5).permutation(sequences * M + 1)[1:]
        self.blocks = order.reshape(sequences, M).astype(np.int32)

    def prefill(self, prompts, history, sequences, wanted=None, prompt_length=None):
        """-> logits (W, V) of the last token of each wanted prompt, on the host; None: all"""
        lengths = [len(p) for p in prompts]
        last = np.cumsum(lengths) - 1
        rows = PrefillRows(
            np.concatenate(prompts).tolist(), lengths, history, [self.blocks[s] for s in sequences],
            last[slice(None) if wanted is None else wanted].tolist(),
        )  # fmt: skip
        sizes = rows.sizes(self.cache.S, self.cache.kind != "full")
        there = unpack(to_device(rows.pack(sizes), self.model.device), sizes)
        longest = prompt_length or max(h + n for h, n in zip(history, lengths))
        return self.logits(there.ids_N, self.cache.prefill(there, sizes.T, longest))

    def decode(self, ids, lengths, sequences):
        """-> logits (B, V) on the host. A sequence below 0 is an idle entry."""
        tables = np.stack(
            [np.full_like(self.blocks[0], -1) if s < 0 else self.blocks[s] for s in sequences]
        )
        lengths = [-1 if s < 0 else n for n, s in zip(lengths, sequences)]
        there = lambda x: to_device(np.array(x, np.int32), self.model.device)
        rows = self.cache.decode(there(lengths), there(tables), there(range(len(ids) + 1)))
        return self.logits(there(ids), rows)

    def logits(self, ids, rows):
        with inference(), batch_invariant(self.invariant):
            logits = self.model.logits(self.model.hidden(ids, rows))
        return to_host(logits.data)[:, : self.model.config.vocab_size]
