"""The kernels of fp8.py and fp8_norm.py compile without a GPU, in the registers that their launch bounds leave."""

import ml_dtypes
import numpy as np
from every_signature import launch_fp8
from offline import check_registers, compiled, nvvm, signatures

from xtrain.kernels import fp8
from xtrain.kernels.fp8_norm import WIDEST, fp8_norm
from xtrain.simulator import sim

__all__ = ["nvvm"]
CARDS = [(8, 9), (9, 0)]
WIDTHS = (768, 1152, 2048, 2560, 5120, WIDEST)


def test_kernels_of_codes(monkeypatch, nvvm, tmp_path):
    found = signatures(monkeypatch, launch_fp8)
    found = [pair for pair in found if pair[0].py_func.__module__ == fp8.__name__]
    assert len(found) == 2 * 4 * 2 + 2
    for kernel, signature in found:
        ptx = compiled(monkeypatch, kernel, signature, CARDS, in_registers=CARDS)
        if kernel.py_func.__name__ == "fp8_kernel":
            check_registers(tmp_path, ptx[9, 0], fp8.BLOCK, 3, (9, 0))
        writes = "st.global.v4" in ptx[9, 0]
        converts = [kind for kind in fp8.DTYPES if f"cvt.rn.satfinite.{kind}x2.f32" in ptx[9, 0]]
        assert len(converts) == int(writes), kernel


def launch_norms():
    """Call the launcher once for every kernel that it can choose, with these widths."""
    T = fp8.TILE
    for C in WIDTHS:
        for add in (True, False):
            state = (np.ones(1, np.float32), np.zeros(1, np.int32), np.zeros(2, np.int64))
            x, w = (sim(np.ones(n, np.float32)) for n in ((T, C), C))
            r = sim(np.ones((T, C), ml_dtypes.bfloat16)) if add else None
            fp8_norm(x, r, w, 0.01, fp8.Slot(*map(sim, state), "e4m3"), True)


def test_kernels_of_norms(monkeypatch, nvvm, tmp_path):
    found = signatures(monkeypatch, launch_norms)
    found = [pair for pair in found if pair[0].py_func.__name__ == "fp8_norm_kernel"]
    assert len(found) == len(WIDTHS) * 4
    for kernel, signature in found:
        ptx = compiled(monkeypatch, kernel, signature, CARDS, in_registers=CARDS)
        check_registers(tmp_path, ptx[9, 0], *kernel.targetoptions["launch_bounds"], (9, 0))
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx[9, 0]) is ("st.global.v4" in ptx[9, 0])
