"""The cost of a launch: the bytes that it must move and its floating-point operations.

The author of a kernel declares them next to the kernel, by the names of the kernel's own
parameters:

    declare_cost(adamw_kernel, in_place=("w_n", "m_n", "v_n"))

Without a declaration a kernel moves each distinct array argument once, and its operations are
unknown. Costs are evaluated only when an observer asks for them: LaunchEvent.cost in launch.py.

A multiply-add counts as two operations, causal attention over a square as half of it.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...device import Array


@dataclass(frozen=True)
class Cost:
    """The cost of one launch; None if unknown.

    nbytes: bytes read plus bytes written.
    flops: floating-point operations.
    """

    nbytes: int | None
    flops: float | None


@dataclass(frozen=True)
class _Declaration:
    in_place: tuple[int, ...] = ()
    sized_like: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    nbytes: Callable[..., int | None] | None = None
    flops: Callable[..., float | None] | None = None


def declare_cost(
    kernel: Any,
    *,
    in_place: Sequence[str] = (),
    sized_like: Mapping[str, Sequence[str]] | None = None,
    nbytes: Callable[..., int | None] | None = None,
    flops: Callable[..., float | None] | None = None,
) -> None:
    """Declare what a launch of this @cuda.jit kernel costs, where the default does not hold.

    in_place: parameters whose arrays are both read and overwritten: they count twice.
    sized_like: parameter -> others. For a view into a packed array, of which the kernel touches as
        many bytes as the others have together.
    nbytes, flops: functions of all arguments of the kernel, for everything else; nbytes replaces
        the two above.
    Raises ValueError for a name that is not a parameter of the kernel.
    """
    names = list(inspect.signature(kernel.py_func).parameters)

    def positions(parameters: Sequence[str]) -> tuple[int, ...]:
        if unknown := [name for name in parameters if name not in names]:
            raise ValueError(f"{kernel.py_func.__name__} has no parameter {unknown[0]}")
        return tuple(names.index(name) for name in parameters)

    sizes = sized_like or {}
    kernel.declared_cost = _Declaration(
        in_place=positions(in_place),
        sized_like={i: positions(sizes[names[i]]) for i in positions(list(sizes))},
        nbytes=nbytes,
        flops=flops,
    )


def kernel_cost(kernel: Any, args: Sequence[Any]) -> Cost:
    """Return the cost of a launch of `kernel` with these arguments, arrays, then scalars."""
    declared = getattr(kernel, "declared_cost", _Declaration())
    flops = declared.flops and declared.flops(*args)
    if declared.nbytes is not None:
        return Cost(declared.nbytes(*args), flops)
    sizes = _distinct(args)
    for view, others in declared.sized_like.items():
        sizes[args[view].data.ptr] = sum(args[i].nbytes for i in others)
    return Cost(sum(sizes.values()) + sum(args[i].nbytes for i in declared.in_place), flops)


def distinct_bytes(*args: Any) -> int:
    """Return the bytes of the arrays among a kernel's arguments, each address once."""
    return sum(_distinct(args).values())


def _distinct(args):
    return {a.data.ptr: a.nbytes for a in args if not isinstance(a, np.generic)}


def attention_flops(
    products: int, elements: int, T: int, S: int, causal: bool, window: int = 0
) -> float:
    """Return the operations of `products` matrix products of (T, D) by (D, S) for each head.

    elements: B T H D.
    window: keys that a query sees at most, if above 0. With several documents in a row (below 0)
        these are upper bounds.
    """
    keys = int(S) * (0.5 if causal and T == S else 1.0)
    if 0 < window < S:
        hidden = S - window  # keys outside the last query's window; the first queries have none
        keys -= hidden * (hidden / (2 * int(T)) if T == S else 1.0)
    return products * 2.0 * elements * keys


def product_cost(out: Array, a: Array, b: Array) -> Cost:
    """Return the cost of out = a b, matrices (M, K) by (K, N) or batches: each array once."""
    batch = out.shape[0] if out.ndim == 3 else 1
    K = math.isqrt(a.size * b.size // (out.size * batch))  # (M K) (K N) / (M N) = K^2
    return Cost(a.nbytes + b.nbytes + out.nbytes, 2.0 * out.size * K)
