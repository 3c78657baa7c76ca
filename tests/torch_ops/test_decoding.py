"""Sampling and log-probabilities of xtrain.torch."""

import pytest
import torch
from torch_cases import on, random

import xtrain.torch as xt
from xtrain.kernels.decoding.sampling import sample_ref

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
places = pytest.mark.parametrize("place", ["cpu", "simulator", GPU])


def logits(place, B=3, V=24):
    return (3 * random(1, B, V)).to("cuda" if place == "cuda" else "cpu")


@places
def test_sampling(place):
    x = logits(place)
    with on(place):
        greedy = xt.sample(x, temperature=0.0)
        ids = xt.sample(
            x, temperature=torch.tensor([0.5, 1.0, 2.0]), top_k=8, top_p=0.9, seed=5, step=2
        )
    assert ids.dtype == torch.int32
    assert torch.equal(greedy.long(), x.argmax(-1))
    rows = zip(x.cpu().numpy(), (0.5, 1.0, 2.0), range(3))
    assert ids.tolist() == [sample_ref(row, t, 8, 0.9, 5, b, 2) for row, t, b in rows]


@places
def test_log_probabilities(place):
    x = logits(place)
    tokens = torch.tensor([3, 0, 23], device=x.device)
    with on(place):
        logprobs, ids, values = xt.token_logprobs(x, tokens, top=2)
    expected = x.log_softmax(-1)
    torch.testing.assert_close(logprobs, expected.gather(1, tokens[:, None])[:, 0])
    best = expected.topk(2)
    assert torch.equal(ids.long(), best.indices)
    torch.testing.assert_close(values, best.values)


@pytest.mark.parametrize("place", ["cpu", GPU])
def test_opcheck(place):
    x = logits(place)
    ints = torch.zeros(3, dtype=torch.int32, device=place)
    ones = torch.ones(3, device=place)
    arguments = (x, ones, ints, ones, 0 * ones, ints.long(), ints.long(), ints)
    torch.library.opcheck(torch.ops.xtrain.sample.default, arguments)
    torch.library.opcheck(torch.ops.xtrain.token_logprobs.default, (x, ints, 2))


def test_mistakes():
    with pytest.raises(ValueError, match=r"^top_p 0: expected more than 0 and at most 1 \(off\)$"):
        xt.sample(logits("cpu"), top_p=0)
    with pytest.raises(
        RuntimeError, match=r"^xtrain::token_logprobs has no gradient: call it inside"
    ):
        xt.token_logprobs(logits("cpu").requires_grad_(), torch.arange(3))[0].sum().backward()
