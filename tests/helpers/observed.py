"""An engine that keeps the logits it draws from, and their comparison with the training forward, bit for bit."""

import numpy as np
from checks import to_host

from xtrain import Engine, batch_invariant
from xtrain.serving.engine import _step_of


class Observed(Engine):
    """logits: those from which the engine has drawn, (V,) float32, by request id and number of the token."""

    def __init__(self, *args, **options):
        super().__init__(*args, batch_invariant=True, graph=False, **options)
        self.logits = {}

    def note(self, requests, rows):
        logits = to_host(self.last)[:, : self.config.vocab_size]
        for request, row in zip(requests, rows):
            # A preempted request may have drawn this token already, in a step whose result was discarded: the same bits.
            key = request.request_id, _step_of(request) - 1
            assert np.array_equal(self.logits.setdefault(key, logits[row].copy()), logits[row])

    def _sample(self, logits, *rest):
        self.last = logits.copy()
        super()._sample(logits, *rest)

    def _draw_first_tokens(self, requests, logits):
        super()._draw_first_tokens(requests, logits)
        self.note(requests, range(len(requests)))

    def _launch(self, requests, step):
        super()._launch(requests, step)
        self.note(requests, [r.slot for r in requests])


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def trained_logits(model, sequences):
    """-> (len, V) of each sequence, from a forward pass that records gradients, all in one batch; the rest is filled up."""
    longest = max(map(len, sequences))
    ids = np.array([[*s, *[0] * (longest - len(s))] for s in sequences])
    with batch_invariant():
        logits = model(ids)
    assert logits.dtype == np.float32
    return [row[: len(s)] for row, s in zip(to_host(logits.data), sequences)]


def check(model, engine, prompts, completions, first_id=0):
    sequences = [[*p, *c] for p, c in zip(prompts, completions)]
    for i, (prompt, logits) in enumerate(zip(prompts, trained_logits(model, sequences))):
        assert completions[i]
        for n, token in enumerate(completions[i]):
            got, want = engine.logits[first_id + i, n], logits[len(prompt) - 1 + n]
            assert np.array_equal(got, want), (i, n, np.abs(got - want).max())
            assert log_softmax(got)[token] == log_softmax(want)[token]


def tight(model, n_blocks, S, max_seq_len, **options):
    """An engine whose cache has `n_blocks` blocks."""
    one = Engine(model, 1, max_seq_len, block_tokens=S).cache.block_bytes
    return Observed(
        model, max_seq_len=max_seq_len, block_tokens=S, cache_bytes=n_blocks * one, **options
    )
