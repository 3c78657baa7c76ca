"""token_masks.py: tokens without a bit get -inf, the others and everything around them stay as they are."""

import ml_dtypes
import numpy as np
import pytest
from checks import normal, planted_bugs, to_host, to_kernel, with_planted_bug

from xtrain.kernels.decoding import token_masks
from xtrain.kernels.decoding.token_masks import TOKENS, mask_logits
from xtrain.simulator import KernelError, sim

put_both = pytest.mark.parametrize("put", [np.array, to_kernel], ids=["reference", "kernel"])


def masks_of(allowed, words):
    """A row of bits for each list of tokens."""
    masks = np.zeros((len(allowed), words), np.uint32)
    for row, tokens in zip(masks, allowed):
        for token in tokens:
            row[token // 32] |= np.uint32(1 << (token % 32))
    return masks.view(np.int32)


@put_both
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("vocab, columns", [(1, 1), (31, 40), (50, 64), (TOKENS + 33, TOKENS + 64)])
def test_equals_the_definition(put, dtype, vocab, columns):
    """Rows share a slot's mask, have none, or allow nothing; padded columns are left alone."""
    rng = np.random.default_rng(vocab)
    allowed = [[], range(vocab), [vocab - 1], np.flatnonzero(rng.random(vocab) < 0.3).tolist()]
    slots = [3, -1, 0, 2, 1, 3]
    x = normal(0, len(slots), columns, scale=3.0).astype(dtype)
    want = x.copy()
    for row, slot in zip(want, slots):
        if slot >= 0:
            row[[v for v in range(vocab) if v not in set(allowed[slot])]] = -np.inf
    on_device = put(x)
    masks = put(masks_of(allowed, -(-vocab // 32) + 1))
    mask_logits(on_device, masks, put(np.array(slots, np.int32)), vocab)
    np.testing.assert_array_equal(to_host(on_device), want)


def test_bad_values():
    x = np.zeros((2, 40), np.float32)
    masks = np.zeros((2, 1), np.int32)
    slots = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="masks of 1 words, expected at least 2"):
        mask_logits(x, masks, slots, 40)
    with pytest.raises(ValueError, match="a vocabulary of 41, the logits have 40 columns"):
        mask_logits(x, masks, slots, 41)
    with pytest.raises(ValueError, match="slots has shape"):
        mask_logits(x, masks, slots[:1], 32)


@planted_bugs
@pytest.mark.parametrize("old, new", [
    ("r = int64(slots_B[b])", "r = b"),
    ("if r < 0", "if r < -1"),
    ("int32(v & 31)", "int32(v & 15)"),
    ("b * columns + v", "b * vocab + v"),
    ("min(start + TOKENS, vocab)", "start + TOKENS"),
])  # fmt: skip
def test_planted_bugs_are_found(old, new):
    with (
        with_planted_bug([token_masks], "make_mask_kernel", old, new),
        pytest.raises((KernelError, AssertionError)),
    ):
        test_equals_the_definition(lambda x: sim(np.array(x)), np.float32, 50, 64)
