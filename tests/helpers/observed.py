"""An engine that keeps the logits it draws from, and their comparison with the training forward, bit for bit."""

import numpy as np
from checks import to_host

from xtrain import Engine, batch_invariant
from xtrain.device import to_device
from xtrain.kernels.decoding.logprobs import token_logprobs
from xtrain.serving.runner import Runner


class ObservedRunner(Runner):
    """logits: those from which it has drawn, (V,) float32, by request id and number of the token."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.logits = {}

    def note(self, requests, rows):
        logits = to_host(self.last)[:, : self.model.config.vocab_size]
        for request, row in zip(requests, rows):
            # A preempted request may have drawn this token already, in a step whose result was discarded: the same bits.
            key = request.request_id, len(request.completion) + request.in_flight - 1
            assert np.array_equal(self.logits.setdefault(key, logits[row].copy()), logits[row])

    def sample(self, logits, *rest):
        self.last = logits.copy()
        return super().sample(logits, *rest)

    def draw_first_tokens(self, requests, logits):
        super().draw_first_tokens(requests, logits)
        self.note(requests, range(len(requests)))

    def launch_decoding(self, requests, grown):
        super().launch_decoding(requests, grown)
        self.note(requests, [r.slot for r in requests])


class Observed(Engine):
    runner_type = ObservedRunner

    def __init__(self, *args, **options):
        super().__init__(*args, batch_invariant=True, graph=False, **options)
        self.logits = self.runner.logits


def trained_logits(model, sequences):
    """-> (len, V) of each sequence, from a forward pass that records gradients, all in one batch; the rest is filled up."""
    longest = max(map(len, sequences))
    ids = np.array([[*s, *[0] * (longest - len(s))] for s in sequences])
    with batch_invariant():
        logits = model(ids)
    assert logits.dtype == np.float32
    return [row[: len(s)] for row, s in zip(to_host(logits.data), sequences)]


def check(model, engine, prompts, completions, first_id=0):
    """Compare the logits that an Observed engine drew from, and the log-probabilities that it and Engine.logprobs return."""
    trained = trained_logits(model, [[*p, *c] for p, c in zip(prompts, completions)])
    everything = zip(prompts, completions, trained, engine.logprobs(prompts, completions, top=2))
    for i, (prompt, completion, logits, scores) in enumerate(everything):
        logits_NV = logits[len(prompt) - 1 : -1]
        assert len(completion) == len(logits_NV) > 0
        for n, row in enumerate(logits_NV):
            got = engine.logits[first_id + i, n]
            assert np.array_equal(got, row), (i, n, np.abs(got - row).max())
        arrays = (np.ascontiguousarray(logits_NV), np.array(completion, np.int32))
        found = token_logprobs(*(to_device(x, model.device) for x in arrays), 2)
        chosen, ids, values = (to_host(x).tolist() for x in found)
        tops = [list(zip(*pair)) for pair in zip(ids, values)]
        assert scores.logprobs.tolist() == chosen and scores.top == tops
        assert completion.logprobs in (None, list(zip(chosen, tops)))


def tight(model, n_blocks, S, max_seq_len, **options):
    """An engine whose cache has `n_blocks` blocks."""
    one = Engine(model, 1, max_seq_len, block_tokens=S).cache.block_bytes
    return Observed(
        model, max_seq_len=max_seq_len, block_tokens=S, cache_bytes=n_blocks * one, **options
    )
