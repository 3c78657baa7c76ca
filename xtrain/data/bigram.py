"""A byte-bigram model: the baseline, in bits per byte, that a language model must beat."""

from typing import Any

import numpy as np

PRIOR = 16  # the unigram distribution counts as this many observations in each row of bigrams


def count_bigrams(raw: bytes, starts: Any, before: int = 0) -> np.ndarray:
    """Count how often byte b follows byte a, (256, 256) int64; byte 0 precedes a document.

    starts: documents begin at raw[i] for i in starts
    before: the byte that precedes raw[0] if no document begins there
    """
    following = np.frombuffer(raw, np.uint8)
    before_n = np.roll(following, 1)
    before_n[:1] = before
    starts = np.asarray(starts, np.int64)
    before_n[starts[starts < len(before_n)]] = 0
    counts = np.zeros(65536, np.int64)
    # bincount converts its input to int64: one block at a time bounds the memory
    block = 1 << 22
    for i in range(0, len(before_n), block):
        pairs = before_n[i : i + block].astype(np.uint16) << 8 | following[i : i + block]
        counts += np.bincount(pairs, minlength=65536)
    return counts.reshape(256, 256)


def bigram_bpb(train_AB: np.ndarray, val_AB: np.ndarray) -> float:
    """Return the bits per byte of a smoothed bigram model.

        P(b|a) = (n_ab + K P(b)) / (n_a + K)      P(b) = (n_b + 1) / (n + 256)      K = PRIOR

    train_AB, val_AB: (256, 256) counts from count_bigrams; n are those of train_AB
    """
    K = PRIOR
    unigram_B = (train_AB.sum(0) + 1) / (train_AB.sum() + 256)
    p_AB = (train_AB + K * unigram_B) / (train_AB.sum(1, keepdims=True) + K)
    return float(-(val_AB * np.log2(p_AB)).sum() / val_AB.sum())
