"""Products of fp8 matrices: cuBLASLt on a GPU; dequantized, numpy.matmul elsewhere.

    out (M, N) = a (M, K) b (N, K)^T s_a s_b        or out +=        sums are float32

One product of each kind in a linear layer, with the operands that fp8.py makes:

    y  = x w^T     fp8_matmul(y, x.rows, w.rows)
    dx = dy w      fp8_matmul(dx, dy.rows, w.columns)
    dw = dy^T x    fp8_matmul(dw, dy.columns, x.columns)

cuBLASLt is column-major, as cuBLAS is (gemm.py): out^T = b a^T, and b, row-major (N, K), is its
transposed first operand. It reads the scales on the GPU when the product runs. The algorithm of a
product is chosen once per shape, dtypes and accumulation, by cuBLASLt's heuristics. Products of
many tiles get no workspace, for the reason that gemm.py gives, unless none can do without.
FAST_ACCUM, which would keep partial sums in fewer bits, is off.
"""

import functools
import threading
from typing import Any

import numpy as np

from ..device import Array, cupy
from .fp8 import Operand, check_type, decode
from .gemm import TYPES, WORKSPACE, _handle, workspace_bytes
from .runtime.cost import product_cost
from .runtime.launch import (
    FLOATS,
    LaunchEvent,
    check,
    check_array,
    dtype_name,
    launch_observers,
    on_host,
    show_launch,
    wide,
)

ALIGNED = 16  # M, N, K and the addresses of scales are multiples of it
FP8_TYPES = {"e4m3": 28, "e5m2": 29}  # cudaDataType
COMPUTE_32F = 68
REAL_32F = 0
_ONE = np.ones(1, np.float32)
_ZERO = np.zeros(1, np.float32)
_lock = threading.Lock()  # for the plans, whose descriptions change from call to call
_plans: dict[tuple, "_Plan"] = {}
_handles: dict[int, int] = {}  # by device


def fp8_matmul(out_MN: Array, a: Operand, b: Operand, accumulate: bool = False) -> Array:
    """Set out (M, N) to a (M, K) b (N, K)^T, or add it to out with accumulate. Returns out.

    out: float32 or bf16, contiguous. M, N, K: multiples of 16. At most one operand is e5m2: no GPU
    multiplies two. Raises ValueError or TypeError.
    """
    for x in (a, b):
        check_type("fp8_matmul", x, Operand)
    check_array("fp8_matmul", "a", a.codes, (None, None), ("uint8",))
    M, K = a.codes.shape
    N = b.codes.shape[0]
    check_array("fp8_matmul", "b", b.codes, (None, K), ("uint8",))
    check_array("fp8_matmul", "out", out_MN, (M, N), FLOATS)
    for name, x in (("a", a), ("b", b)):
        check_array("fp8_matmul", f"the scale of {name}", x.scale_1, (1,))
    check(
        all(n and n % ALIGNED == 0 for n in (M, N, K)),
        f"fp8_matmul: {M} x {N} x {K}, expected multiples of {ALIGNED}",
    )
    check("e4m3" in (a.kind, b.kind), "fp8_matmul: two matrices of e5m2 cannot be multiplied")
    if isinstance(out_MN, np.ndarray):  # includes the simulator
        product = np.matmul(decode(a), decode(b).T)
        out_MN[...] = wide(out_MN) + product if accumulate else product
        return out_MN
    # raises TypeError for a mixture of devices
    on_host(out_MN, a.codes, b.codes, a.scale_1, b.scale_1)
    check(
        all(x.scale_1.data.ptr % ALIGNED == 0 for x in (a, b)),
        f"fp8_matmul: the address of a scale is not a multiple of {ALIGNED} bytes, "
        "which cuBLASLt needs",
    )
    if launch_observers:
        cost = functools.partial(product_cost, out_MN, a.codes, b.codes)
        event = LaunchEvent(f"product {M} x {N} x {K} fp8", True, cost)
        show_launch(event, functools.partial(_cublaslt, out_MN, a, b, accumulate))
    else:
        _cublaslt(out_MN, a, b, accumulate)
    return out_MN


class _Plan:
    """What cuBLASLt needs for products of one shape.

    Column-major d (m, n) = a (k, m)^T b (k, n), of dtypes td, ta, tb.
    """

    def __init__(self, lt: Any, handle: int, m, n, k, ta, tb, td, limit: int):
        self.lt = lt
        self.handle = handle
        self.description = lt.matmul_desc_create(COMPUTE_32F, REAL_32F)
        self._set(lt.MatmulDescAttribute.TRANSA, 1, np.int32)
        self._set(lt.MatmulDescAttribute.TRANSB, 0, np.int32)
        layouts = ((ta, k, m), (tb, k, n), (td, m, n))
        self.layouts = [
            lt.matrix_layout_create(t, rows, columns, rows) for t, rows, columns in layouts
        ]
        self.algorithm: Any = None
        for self.nbytes in dict.fromkeys((limit, WORKSPACE)):
            if self._choose():
                return
        raise RuntimeError(f"cuBLASLt has no fp8 product of {n} x {m} x {k} on this GPU")

    def _choose(self) -> bool:
        lt = self.lt
        a, b, d = self.layouts
        preference = lt.matmul_preference_create()
        limit = np.array([self.nbytes], np.uint64)
        algorithms = np.zeros(1, np.int32)
        attribute = int(lt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES)
        lt.matmul_preference_set_attribute(preference, attribute, limit.ctypes.data, limit.nbytes)
        self.algorithm = np.zeros(1, lt.matmul_heuristic_result_dtype)
        try:
            lt.matmul_algo_get_heuristic(
                self.handle,
                self.description,
                a,
                b,
                d,
                d,
                preference,
                1,
                self.algorithm.ctypes.data,
                algorithms.ctypes.data,
            )
        except lt.cuBLASLtError:  # NOT_SUPPORTED: none
            return False
        finally:
            lt.matmul_preference_destroy(preference)
        return bool(algorithms[0])

    def _set(self, attribute, value, dtype):
        array = np.array([value], dtype)
        self.lt.matmul_desc_set_attribute(
            self.description, int(attribute), array.ctypes.data, array.nbytes
        )

    def run(self, d, a: Operand, b: Operand, accumulate: bool, workspace: int, stream: int) -> None:
        attributes = self.lt.MatmulDescAttribute
        self._set(attributes.A_SCALE_POINTER, a.scale_1.data.ptr, np.uint64)
        self._set(attributes.B_SCALE_POINTER, b.scale_1.data.ptr, np.uint64)
        beta = _ONE if accumulate else _ZERO
        layout_a, layout_b, layout_d = self.layouts
        product = (_ONE.ctypes.data, a.codes.data.ptr, layout_a, b.codes.data.ptr, layout_b)
        out = (d.data.ptr, layout_d)
        options = (self.algorithm.ctypes.data, workspace, self.nbytes, stream)
        self.lt.matmul(
            self.handle, self.description, *product, beta.ctypes.data, *out, *out, *options
        )


def _cublaslt(out, a, b, accumulate):
    from nvmath.bindings import cublasLt as lt

    device = cupy().cuda.runtime.getDevice()
    context = _handle(device)
    stream = cupy().cuda.get_current_stream().ptr
    n, k = a.codes.shape
    m = b.codes.shape[0]
    types = FP8_TYPES[b.kind], FP8_TYPES[a.kind], TYPES[dtype_name(out.dtype)]
    key = device, m, n, k, *types, accumulate
    with _lock:
        if device not in _handles:
            _handles[device] = lt.create()
        if key not in _plans:
            limit = workspace_bytes(m, n, 1, context.multiprocessors)
            _plans[key] = _Plan(lt, _handles[device], m, n, k, *types, limit)
        plan = _plans[key]
        workspace = context.workspace(stream) if plan.nbytes else 0
        plan.run(out, b, a, accumulate, workspace, stream)
