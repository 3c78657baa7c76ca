"""Numbers that go wrong: what counts as wrong, a loss that jumps, and the op that a NaN came from.

A step whose loss or gradient norm is not finite changes nothing (kernels/skip.py decides that on the device). After
--max-skips of them in a row the run stops. The weights are then still those that the first of them met, so that step can be
done again, op by op, with a look at each result: `first_nonfinite`.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..nn.model import Transformer
from ..nn.observers import watch_ops

SPIKE_WINDOW, SPIKE_LEAST = 50, 20  # losses that a new one is compared with: at most, at least
PIECE = 1 << 24  # elements looked at together: bounds the temporary memory
BITS = {  # of a floating point number, as a whole number: what is left without the sign; infinity (and NaN is more)
    "float32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float64": (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}


def unsound(loss: float, norm: float) -> str | None:
    """Why a step was skipped, None if it was not."""
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            return f"the {name} is {value}"
    return None


def spike(before: list[float], loss: float, limit: float) -> float | None:
    """How many standard deviations a loss lies above the mean of those before, if that is more than `limit` (0: never).

    The deviation counts as at least a thousandth of the mean: a loss that hardly moves would make much of nothing.
    """
    window = before[-SPIKE_WINDOW:]
    if not limit or len(window) < SPIKE_LEAST:
        return None
    mean = statistics.fmean(window)
    z = (loss - mean) / max(statistics.pstdev(window, mean), 1e-3 * abs(mean), 1e-9)
    return z if z > limit else None


# ----------------------------------------------------------------------------- where it came from
class _Found(Exception):
    pass


def first_nonfinite(model: Transformer, step: Callable[[], Any]) -> str | None:
    """step() does forward and backward, eagerly. -> the first place that holds NaN or infinity, None if there is none.

    Weights first, then every op in the order of computation: what forward gives, the gradients that backward gives
    (those of parameters as far as they are added up). `model` needs a list of layers, model.model.layers.
    """
    model.arena.refresh()  # the bf16 copy, if there is one
    names = _names(model)
    for name, array in names.values():
        if found := count_nonfinite(array):
            return f"the weights {name}, before the step ({found})"

    def look(op, way, layer, given, results):
        for result in results:
            if found := count_nonfinite(result):
                used = [names[id(x)][0] for x in given if id(x) in names]
                weights = f" with {', '.join(used)}" if used else ""
                raise _Found(f"{layer or 'outside the layers'}, {op}{weights}, {way} ({found})")

    try:
        with watch_ops(model, _no_note, look):
            step()
    except _Found as found:
        return str(found)
    return None


@contextlib.contextmanager
def _no_note(op: str, way: str, layer: str) -> Iterator[None]:
    yield


def _names(model):
    """id of an array that ops are given -> (name of the parameter, the array)"""
    names = {}
    for prefix, p in model.storage():
        name = prefix + (
            next(iter(p.parts)) if len(p.parts) == 1 else "{" + ",".join(p.parts) + "}"
        )
        for array in (p.value, p.data):
            names[id(array)] = (name, array)
    return names


def count_nonfinite(x: Any) -> str | None:
    """ "3 NaN and 1 infinite of 64 values", or None; anything but an array of floating point numbers is fine."""
    if not hasattr(x, "strides") or x.dtype.name not in BITS:
        return None
    word, magnitude, infinity = BITS[x.dtype.name]
    flat = (x if x.flags.c_contiguous else x.copy()).reshape(-1).view(word)
    bad = infinite = 0
    for i in range(0, flat.size, PIECE):
        bits = flat[i : i + PIECE] & magnitude
        bad += int((bits >= infinity).sum())
        infinite += int((bits == infinity).sum())
    return f"{bad - infinite} NaN and {infinite} infinite of {flat.size} values" if bad else None
