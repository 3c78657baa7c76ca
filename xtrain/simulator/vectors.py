"""Vector types: cuda.float32x4(x, y, z, w), or float4. Their components are .x, .y, .z and .w."""

from collections import namedtuple

import numpy as np
from numba.cuda import stubs


def _vector(name, n, convert):
    """What makes a vector of n components from numbers and other vectors."""
    kind = namedtuple(name, ["x", "y", "z", "w"][:n])

    def make(*parts):
        numbers = [v for part in parts for v in (part if isinstance(part, tuple) else (part,))]
        if len(numbers) != n:
            raise TypeError(f"{name} takes {n} components, got {len(numbers)}")
        return kind(*map(convert, numbers))

    return make


def table(cast) -> dict:
    """Vector type of numba.cuda -> what makes one. cast: scalars.cast."""
    found = {}
    for stub in stubs._vector_type_stubs:
        base, n = stub.__name__.rsplit("x", 1)
        found[stub] = _vector(stub.__name__, int(n), cast(np.dtype(base)))
    return found
