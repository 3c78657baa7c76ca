"""NaN and infinity in training: which steps are skipped, losses that jump, and the op in which a
NaN appeared first.

A step whose loss or gradient norm is not finite changes nothing (kernels/skip_nonfinite.py decides
this on the device). After --max-skips such steps in a row the run stops. The weights are then still
those before the first of them, so `first_nonfinite` can repeat the step op by op and check every
result.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..nn.model import Transformer
from ..nn.observers import Op, observe_ops
from ..nn.sharded_arena import ShardedArena

# number of earlier losses that a new one is compared with: at most, at least
SPIKE_WINDOW = 50
SPIKE_LEAST = 20
CHUNK = 1 << 24  # elements checked at a time: bounds the temporary memory
# dtype: (unsigned integer of its size, mask that clears the sign, bits of infinity; the bits of NaN
# are larger)
BITS = {
    "float32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float64": (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}


def unsound(loss: float, norm: float) -> str | None:
    """Return why the device skipped the step with this loss and gradient norm; None if it did
    not."""
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            return f"the {name} is {value}"
    return None


def spike(before: list[float], loss: float, limit: float) -> float | None:
    """Return how many standard deviations a loss lies above the mean of the losses before it, or
    None if at most `limit`.

    limit 0: always None. The standard deviation counts as at least a thousandth of the mean:
    otherwise a tiny change of an almost constant loss would be a spike.
    """
    window = before[-SPIKE_WINDOW:]
    if not limit or len(window) < SPIKE_LEAST:
        return None
    mean = statistics.fmean(window)
    z = (loss - mean) / max(statistics.pstdev(window, mean), 1e-3 * abs(mean), 1e-9)
    return z if z > limit else None


# ----------------------------------------------------------------------------- the first value that is not finite
class _Found(Exception):
    pass


def first_nonfinite(model: Transformer, step: Callable[[], Any]) -> str | None:
    """Find the first array with NaN or infinity in a step -> its description, None if all are
    finite.

    step: runs forward and backward eagerly. The weights are checked first, then the results of
    every op in the order of
    computation: outputs of forward, gradients from backward (for parameters the sums so far).
    """
    model.arena.refresh()  # the bf16 copy, if there is one
    names = _names(model)
    # with ZeRO-3 the other ranks wait for this one's part of the step
    to_the_end = isinstance(model.arena, ShardedArena)
    places: list[str] = []
    logprobs: list[Any] = []
    for name, array in names.values():
        if counts := count_nonfinite(array):
            places.append(f"the weights {name}, before the step ({counts})")
    if places and not to_the_end:
        return places[0]

    @contextlib.contextmanager
    def check(op: Op) -> Iterator[None]:
        yield
        # an op without a name is a layer: it returns results of its ops, which were checked
        for array in computed(op, logprobs) if op.name and not places else ():
            if counts := count_nonfinite(array):
                used = [names[id(x)][0] for x in op.inputs if id(x) in names]
                weights = ""
                if used:
                    weights = f" with {', '.join(used)}"
                where = op.layer or "outside the layers"
                places.append(f"{where}, {op.name}{weights}, {op.way} ({counts})")
                if not to_the_end:
                    raise _Found

    with contextlib.suppress(_Found), observe_ops(check):
        step()
    return places[0] if places else None


def computed(op: Op, logprobs: list[Any]) -> tuple:
    """Return the outputs of an op, without the log-probabilities of rows that have no target, which
    are NaN.

    logprobs: arrays of them in this step, which grows.
    """
    if op.way == "forward" and op.name == "LinearLogprobs":
        logprobs += op.outputs
        has_target_N = op.inputs[2] >= 0
        return tuple(x[has_target_N] for x in op.outputs)
    if op.name == "Reshape" and any(op.inputs[0] is x for x in logprobs):  # the same again
        return ()
    return op.outputs


def _names(model):
    """id of an array that ops receive -> (name of the parameter, the array)"""
    names = {}
    for prefix, p in model.storage():
        name = prefix + (
            next(iter(p.parts)) if len(p.parts) == 1 else "{" + ",".join(p.parts) + "}"
        )
        if p.unit is not None and p.unit.is_layer:  # with ZeRO-3
            names[id(p._data)] = (name, p.unit.share_of(p.offset, p.size))
            continue
        for array in (p.value, p.data):
            names[id(array)] = (name, array)
    return names


def count_nonfinite(x: Any) -> str | None:
    """Return "3 NaN and 1 infinite of 64 values", or None if all are finite. Objects that are not
    floating-point arrays pass."""
    if not hasattr(x, "strides") or x.dtype.name not in BITS:
        return None
    word, magnitude, infinity = BITS[x.dtype.name]
    flat = (x if x.flags.c_contiguous else x.copy()).reshape(-1).view(word)
    bad = infinite = 0
    for i in range(0, flat.size, CHUNK):
        bits = flat[i : i + CHUNK] & magnitude
        bad += int((bits >= infinity).sum())
        infinite += int((bits == infinity).sum())
    if bad:
        return f"{bad - infinite} NaN and {infinite} infinite of {flat.size} values"
    return None
