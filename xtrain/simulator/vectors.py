"""Vector types: cuda.float32x4(x, y, z, w), or float4. Their components are .x, .y, .z and .w."""

import itertools
from collections import namedtuple

import numpy as np

_BASES = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"


def _vector(name, n, convert):
    """Return what makes a vector of n components from numbers and other vectors."""
    kind = namedtuple(name, ["x", "y", "z", "w"][:n])

    def make(*parts):
        numbers = [v for part in parts for v in (part if isinstance(part, tuple) else (part,))]
        if len(numbers) != n:
            raise TypeError(f"{name} takes {n} components, got {len(numbers)}")
        return kind(*map(convert, numbers))

    return make


def table(frontend, cast) -> dict:
    """Vector type of `cuda` -> what makes one. cast: scalars.cast."""
    makers = {}
    for base, n in itertools.product(_BASES.split(), (1, 2, 3, 4)):
        name = f"{base}x{n}"
        for cuda in frontend.modules:
            if hasattr(cuda, name):
                makers[getattr(cuda, name)] = _vector(name, n, cast(np.dtype(base)))
    return makers
