"""Which ways to compute a product give every row the same bits: checked once per machine, not assumed.

In batch-invariant mode the bits of a row of y = x w^T must not depend on the number of rows. Rows
computed FIXED_ROWS at a time (gemm.py) have this property by construction, but a product of 8192
rows is then 32 products. cuBLAS without a workspace does not split K: on one H200, at all of 25
shapes, a product of any number of rows has the bits of the divided one, and those are the bits of
one chain of tensor-core instructions, 16 columns of K after the other (decoding/gemv_chain.py).
Nothing in cuBLAS's documentation promises that. So for each shape, dtype and GPU the first product
compares a few numbers of rows with the division. The answer is kept in memory and in
$XTRAIN_CACHE/row_bits, with the versions of cuBLAS and the driver in its key, because another
version may choose another algorithm. A shape that fails keeps the division; `xtrain doctor` lists
such shapes.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..device import Array, cache_folder

# Numbers of rows that are compared: around the sizes at which libraries change their algorithm.
ROWS = (1, 3, 8, 16, 33, 64, 128, 200, 512, 1000, 4096)
PERIOD = 65537  # of the random numbers in a test matrix; prime, so that rows and columns differ
_lock = threading.Lock()
_answers: dict[tuple, bool] = {}


def test_matrix(rows: int, columns: int) -> np.ndarray:
    """Return a (rows, columns) float32 matrix of random numbers that repeat with PERIOD."""
    numbers = np.random.default_rng(rows + columns).standard_normal(PERIOD, dtype=np.float32)
    return np.resize(numbers, (rows, columns))


def agree(
    compute: Callable[[int], Array],
    divided: Callable[[int], Array],
    equal: Callable[[Array, Array], bool],
    numbers_of_rows: tuple[int, ...] = ROWS,
) -> bool:
    """Return whether compute(n) has the bits of the first n rows of the divided product.

    compute, divided: n -> the product of the first n test rows.
    equal: whether two arrays have the same bits.
    """
    expected = divided(max(numbers_of_rows))
    return all(equal(compute(n), expected[:n]) for n in numbers_of_rows)


def known(key: tuple, versions: tuple, check: Callable[[], bool]) -> bool:
    """Return the answer for `key`, from memory, the cache, or check(), which is called once.

    key: of the kind of product, its shape and dtypes, and the GPU.
    versions: of what computes it; another version is another question.
    """
    full_key = (*key, *versions)
    with _lock:
        if full_key not in _answers:
            path = _path(full_key)
            answer = _read(path, full_key)
            if answer is None:
                answer = check()
                _write(path, full_key, answer)
            _answers[full_key] = answer
        return _answers[full_key]


def failed() -> Iterator[str]:
    """Yield the products in the cache that depend on the number of rows, as text."""
    for path in sorted(_folder().glob("*.json")):
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and record.get("same_bits") is False:
            yield " ".join(map(str, record.get("key", ())))


# ----------------------------------------------------------------------------- the cache on disk
def _folder() -> Path:
    return cache_folder() / "row_bits"


def _path(full_key: tuple) -> Path:
    digest = hashlib.sha256(repr(full_key).encode()).hexdigest()
    return _folder() / f"{digest[:32]}.json"


def _read(path: Path, full_key: tuple) -> bool | None:
    """Return the answer in the file; None if it is missing, damaged or of another key."""
    try:
        record: Any = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("key") != list(full_key):
        return None
    answer = record.get("same_bits")
    return answer if isinstance(answer, bool) else None


def _write(path: Path, full_key: tuple, answer: bool) -> None:
    """Write the answer; without a folder that can be written, the next process checks again."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"key": list(full_key), "same_bits": answer}))
        temporary.replace(path)
    except OSError:
        return
