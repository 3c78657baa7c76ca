"""row_bits.py: a product whose rows depend on their number is noticed, and the answer is kept for one machine and version."""

import json

import numpy as np
import pytest
from checks import rng

from xtrain.kernels import row_bits

X = rng(1).standard_normal((row_bits.ROWS[-1], 70)).astype(np.float32)
W = rng(2).standard_normal((5, 70)).astype(np.float32)


def in_order(x):
    """Every row in the same order, whatever their number."""
    total = np.zeros((len(x), len(W)), np.float32)
    for k in range(x.shape[1]):
        total += x[:, k : k + 1] * W[:, k]
    return total


def split_below(rows):
    """A planted algorithm that splits the sum for few rows, as split-K does."""

    def compute(x):
        if len(x) >= rows:
            return in_order(x)
        half = np.where(np.arange(70) < 35, x, np.float32(0))
        return in_order(half) + in_order(x - half)

    return compute


@pytest.mark.parametrize("rows", [2, 20, 150, 2000])
def test_an_order_that_depends_on_the_number_of_rows_is_found(rows):
    product = lambda compute: lambda n: compute(X[:n])
    assert row_bits.agree(product(in_order), product(in_order), np.array_equal)
    assert not row_bits.agree(product(split_below(rows)), product(in_order), np.array_equal)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(row_bits, "_answers", {})
    return tmp_path / "row_bits"


def test_an_answer_is_kept_for_its_key_and_versions(cache, monkeypatch):
    asked = []
    ask = lambda key, versions, answer: row_bits.known(
        key, versions, lambda: bool(asked.append(key) or answer)
    )
    assert ask(("whole", 8, 16), (130,), True)
    assert not ask(("whole", 9, 16), (130,), False)
    assert ask(("whole", 8, 16), (130,), False)  # from memory
    monkeypatch.setattr(row_bits, "_answers", {})
    assert ask(("whole", 8, 16), (130,), False)  # from the file
    assert not ask(("whole", 9, 16), (130,), True)
    assert len(asked) == 2
    assert ask(("whole", 9, 16), (131,), True)  # another version: another question
    assert len(asked) == 3
    assert list(row_bits.failed()) == ["whole 9 16 130"]


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"same_bits": true}', '{"key": ["whole", 8], "same_bits": 1}']
)
def test_a_file_of_another_question_or_damaged_is_no_answer(cache, damage, monkeypatch):
    row_bits.known(("whole", 8), (), lambda: False)
    (file,) = cache.iterdir()
    assert json.loads(file.read_text()) == {"key": ["whole", 8], "same_bits": False}
    file.write_text(damage)
    monkeypatch.setattr(row_bits, "_answers", {})
    assert row_bits.known(("whole", 8), (), lambda: True)
    assert json.loads(file.read_text())["same_bits"] is True


def test_without_a_writable_folder_the_check_runs_again(cache, monkeypatch):
    cache.write_text("a file in place of the folder")
    assert row_bits.known(("whole", 8), (), lambda: True)
    monkeypatch.setattr(row_bits, "_answers", {})
    assert not row_bits.known(("whole", 8), (), lambda: False)
