"""In the place of ml_dtypes, which has no build for a browser: its types by name, so that the library can be imported.

They have a size and no arithmetic. What computes in bf16 or fp8 raises a TypeError of NumPy.
"""

import numpy as np


def _type(name, size):
    return type(name, (), {"dtype": np.dtype([(name, f"V{size}")])})


bfloat16 = _type("bfloat16", 2)
float8_e4m3fn = _type("float8_e4m3fn", 1)
float8_e5m2 = _type("float8_e5m2", 1)
