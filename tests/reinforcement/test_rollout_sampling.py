"""Rollouts and training compute the same log-probabilities, whatever the sampling options: bit for bit."""

import sys
import types

import numpy as np
import pytest
import twins
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import SILENT, metrics

from xtrain import Engine, Transformer, batch_invariant
from xtrain.errors import UserError
from xtrain.kernels.decoding.sampling import UNCHANGED, Sampling
from xtrain.reinforce import reinforce
from xtrain.reinforcement.reinforce import ReinforceConfig

VOCAB = 90
OPTIONS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.6]),
    top_k=st.sampled_from([0, 1, 2, 17]),
    top_p=st.sampled_from([0.2, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
)


@pytest.fixture(scope="module")
def model():
    return twins.random_model(twins.small(vocab_size=VOCAB, max_seq_len=48), device="cpu")


def trained(model, prompt, answer, sampling, kept=None):
    """-> log-probabilities of the answer as training computes them"""
    ids = np.array([[*prompt, *answer]], np.int32)
    targets = np.full_like(ids, -100)
    targets[0, len(prompt) - 1 : -1] = answer
    with batch_invariant():
        logprobs = model.logprobs(ids, targets, None, sampling, kept).data
    return logprobs[0, len(prompt) - 1 : -1]


@settings(max_examples=25, deadline=None)
@given(OPTIONS, st.integers(0, 99))
def test_the_bits_are_those_of_the_rollouts(model, sampling, seed):
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, VOCAB, n).tolist() for n in (3, 11)]
    for logprobs_of, computed in (("sampled", sampling), ("model", UNCHANGED)):
        engine = Engine(model, 3, 40, True, logprobs_of=logprobs_of)
        answers = engine.generate(prompts, 8, **vars(sampling), seed=seed, logprobs=0, n=2)
        for prompt, answer in zip(np.repeat(np.array(prompts, object), 2), answers):
            drawn = np.array([x for x, _ in answer.logprobs], np.float32)
            assert np.array_equal(drawn, trained(model, prompt, answer, computed))
            if sampling.top_k == 1 and logprobs_of == "sampled":
                assert not drawn.any()  # the only token that is kept


def test_the_probabilities_of_the_kept_tokens_sum_to_one(model):
    """The ratio could be 1 although both sides are wrong in the same way."""
    prompt = [1, 2, 3]
    for sampling in (Sampling(0.7, top_k=4), Sampling(1.6, top_p=0.4), Sampling(2.0, min_p=0.5)):
        engine = Engine(model, 1, 40, True, logprobs_of="sampled")
        (answer,) = engine.generate([prompt], 1, **vars(sampling), logprobs=20)
        top = dict(answer.logprobs[0][1])
        kept = {t: x for t, x in top.items() if x > -np.inf}
        assert 1 < len(kept) < 20 and abs(np.exp(list(kept.values())).sum() - 1) < 1e-6
        own = dict(Engine(model, 1, 40, True).generate([prompt], 1, logprobs=20)[0].logprobs[0][1])
        mass = np.log(sum(np.exp(own[t] / sampling.temperature) for t in kept))
        for t, x in kept.items():
            assert abs(x - (own[t] / sampling.temperature - mass)) < 1e-5
            assert abs(trained(model, prompt, [t], sampling)[0] - x) < 1e-6


def test_kept_tokens_of_other_weights_are_a_constant(model):
    """A drawn token keeps a probability, although the weights have changed and would cut it off."""
    prompt, sampling = [5, 6, 7, 8], Sampling(1.0, top_k=2)
    engine = Engine(model, 1, 40, True, logprobs_of="sampled")
    (answer,) = engine.generate([prompt], 12, **vars(sampling), seed=3, logprobs=0)
    ids = np.array([[*prompt, *answer]], np.int32)
    targets = np.full_like(ids, -100)
    targets[0, len(prompt) - 1 : -1] = answer
    other = twins.random_model(twins.small(vocab_size=VOCAB, max_seq_len=48), seed=1, device="cpu")
    with batch_invariant():
        kept = model.kept_tokens(ids, targets, sampling)
    bits = np.unpackbits(kept.view(np.uint8), axis=2, bitorder="little")
    assert kept.shape == (1, 16, 3) and (bits.sum(2)[0, 3:-1] == 2).all()
    found = trained(other, prompt, answer, sampling, kept)
    assert np.isfinite(found).all() and (found < 0).all()
    assert np.array_equal(trained(model, prompt, answer, sampling, kept), trained(model, prompt, answer, sampling))  # fmt: skip


# ----------------------------------------------------------------------------- runs
def config_of(folder, out, **more):
    options = dict(
        init=str(folder), data=(str(folder / "prompts.jsonl"),), out=str(out), name="run", device="cpu", task="a_sampling_task:reward",
        group=4, batch=8, max_new_tokens=6, steps=2, lr=1e-2, save_every=0, eval_every=2, blas_threads=1,
    )  # fmt: skip
    return ReinforceConfig(**(options | more))


@pytest.mark.parametrize("logprobs_of", ["sampled", "model"])
def test_the_first_ratio_of_a_run_is_one(folder, tmp_path, monkeypatch, logprobs_of):
    """Also with a reference and a second update, which are renormalised over the same tokens."""
    reward = lambda record, texts: [len(set(text)) / 9 for text in texts]
    monkeypatch.setitem(sys.modules, "a_sampling_task", types.SimpleNamespace(reward=reward))
    options = dict(temperature=0.8, top_p=0.7, top_k=9, min_p=0.01, kl=0.1, updates=2)
    kept, logprobs = [], Transformer.logprobs
    note = lambda self, *arguments: kept.append(arguments[4]) or logprobs(self, *arguments)
    monkeypatch.setattr(Transformer, "logprobs", note)
    run = reinforce(config_of(folder, tmp_path, logprobs_of=logprobs_of, **options), SILENT)
    lines = [m for m in metrics(run) if "loss" in m]
    assert [m["ratio_error"] + m["rollout_kl"] for m in lines] == [0.0, 0.0]
    assert len(kept) == 6  # in each of two steps of the reference, and of two updates
    if logprobs_of == "sampled":
        assert all(np.array_equal(x, y) for x, y in zip(kept, (kept[:1] * 3 + kept[3:4] * 3)))
    else:
        assert kept == [None] * 6
    assert lines[0]["reference_kl"] == 0.0 < lines[1]["reference_kl"] < 1


def test_options_out_of_range_are_refused(folder, tmp_path):
    for options, words in (
        (dict(temperature=0.0), "--temperature 0 draws the same completion"),
        (dict(temperature=-1.0), "--temperature -1.0: expected 0"),
        (dict(top_p=0.0), "--top-p 0.0: expected more than 0"),
        (dict(top_k=5000), "--top-k 5000: expected 0 .off. to 1024"),
        (dict(min_p=2.0), "--min-p 2.0: expected"),
    ):
        with pytest.raises(UserError, match=words):
            config_of(folder, tmp_path, **options).validate()
