"""Distillation: the reference against calculus and PyTorch, the kernels against the reference, what is untouched."""

import numpy as np
import pytest
import torch
from checks import rng, to_host, to_kernel

from xtrain.kernels import distillation as module
from xtrain.kernels.cast import BFLOAT16
from xtrain.kernels.distillation import distillation, distillation_ref

V = 11


def case(N, P, K, dtype=np.float32, seed=0):
    """-> logits, targets, ids, log-probabilities of a teacher; the first of several targets is ignored"""
    draw = rng(seed, N, P)
    logits = 2 * draw.standard_normal((N, P))
    targets = draw.integers(0, V, N).astype(np.int32)
    if N > 1:
        targets[0] = -100
    other = 2 * draw.standard_normal((N, V))
    other -= np.log(np.exp(other).sum(1, keepdims=True))
    ids = np.argsort(-other, 1)[:, :K].astype(np.int32)
    return logits.astype(dtype), targets, ids, np.take_along_axis(other, ids, 1)


def torch_loss(logits, targets, ids, teacher, weight, reverse):
    """Written from the definition: K tokens and the rest are K + 1 categories."""
    s = torch.log_softmax(logits[:, :V], -1)
    rest = torch.ones_like(s, dtype=torch.bool).scatter(1, ids, False)
    s_rest = torch.log((torch.exp(s) * rest).sum(1, keepdim=True))
    t_rest = torch.log(1 - torch.exp(teacher).sum(1, keepdim=True))
    s_all = torch.cat([s.gather(1, ids), s_rest], 1)
    t_all = torch.cat([teacher, t_rest], 1)
    p, q = (s_all, t_all) if reverse else (t_all, s_all)
    kl = (torch.exp(p) * (p - q)).sum(1)
    cross = torch.nn.functional.cross_entropy(logits[:, :V], targets, reduction="none")
    return (((1 - weight) * cross + weight * kl) * (targets != -100)).sum()


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_reference_is_that_of_torch_in_float64(weight, reverse):
    logits, targets, ids, teacher = case(6, 13, 4, np.float64)
    loss, d = distillation_ref(logits, targets, ids, teacher, V, np.array([0.25]), weight, reverse)
    x = torch.tensor(logits, requires_grad=True)
    theirs = [torch.tensor(y) for y in (targets.astype(np.int64), ids.astype(np.int64), teacher)]
    want = torch_loss(x, *theirs, weight, reverse)
    (0.25 * want).backward()
    assert abs(loss.sum() - want.item()) < 1e-12 and loss[0] == 0
    np.testing.assert_allclose(d, x.grad.numpy(), atol=1e-12)


def test_a_student_that_is_its_teacher_has_no_kl():
    logits, targets, ids, _ = case(5, V, 4, np.float64)
    own = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    teacher = np.take_along_axis(own, ids, 1)
    for reverse in (False, True):
        loss, d = distillation_ref(logits, targets, ids, teacher, V, np.ones(1), 1.0, reverse)
        assert abs(loss).max() < 1e-12 and abs(d).max() < 1e-12


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("N, P, K", [(1, 11, 1), (5, 13, 4)])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["fp32", "bf16"])
def test_kernels_against_the_reference(N, P, K, dtype, reverse, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 2)  # several blocks
    logits, targets, ids, teacher = case(N, P, K)
    x = to_kernel(logits.astype(dtype))
    exact = to_host(x).astype(np.float64)
    arrays = [
        to_kernel(y) for y in (targets, ids, teacher.astype(np.float32), np.array([0.5], "f4"))
    ]
    more = arrays[:3] + [V, arrays[3], 0.4, reverse]
    loss, gradient = distillation(x, *more)
    want, d = distillation_ref(exact, targets, ids, teacher, V, 0.5, 0.4, reverse)
    assert gradient is x
    np.testing.assert_allclose(to_host(loss), want, rtol=2e-5, atol=2e-5)
    tolerance = 2e-6 if dtype == np.float32 else 8e-3
    np.testing.assert_allclose(to_host(x).astype(np.float64), d, atol=tolerance)
    again = to_kernel(logits.astype(dtype))
    without, none = distillation(again, *more, with_gradient=False)
    assert none is None and np.array_equal(to_host(without), to_host(loss))
    assert np.array_equal(to_host(again), logits.astype(dtype)), "the logits stay"


def test_wrong_arguments():
    logits, targets, ids, teacher = case(3, 13, 4)
    right = [logits, targets, ids, teacher, V, np.ones(1, np.float32), 0.5]
    for place, value, words in (
        (1, targets[:2], "targets have shape"),
        (2, ids[:, :0], "0 tokens of the teacher"),
        (3, teacher[:, :2], "teacher"),
        (4, 14, "vocabulary 14"),
        (6, 1.5, "weight 1.5"),
    ):
        arguments = [*right[:place], value, *right[place + 1 :]]
        with pytest.raises((ValueError, TypeError), match=words):
            distillation(*arguments)
    with pytest.raises(ValueError, match="target 12 in row 1"):
        distillation(logits, np.array([1, 12, 2], np.int32), *right[2:])
