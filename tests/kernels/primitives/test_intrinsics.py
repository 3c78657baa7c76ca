"""An intrinsic is described once: the code for compilers, and the Python implementation that the simulator runs."""

import pytest

from xtrain.kernels.primitives import codes, hopper, intrinsics, ptx, tensor_cores, words
from xtrain.kernels.runtime.compiler import types
from xtrain.simulator.intrinsics import INTRINSICS


def intrinsics_of(module):
    return {name: value for name, value in vars(module).items() if hasattr(value, "_defn")}


@pytest.mark.parametrize(
    "module, at_least", [(ptx, 13), (words, 12), (codes, 3), (tensor_cores, 20), (hopper, 18)]
)
def test_every_intrinsic_is_simulated(module, at_least):
    found = intrinsics_of(module)
    assert len(found) >= at_least, sorted(found)
    missing = [name for name, value in found.items() if value not in INTRINSICS]
    assert not missing, f"the simulator cannot run {missing}"


def test_made_intrinsics_are_simulated():
    product = hopper.make_wgmma(64, None, hopper.along_rows(64, 8192))
    for made in (
        product,
        hopper.make_wgmma_wait(64, 0),
        hopper.make_hold(64),
        hopper.make_setmaxnreg(24, False),
    ):
        assert made in INTRINSICS


def test_name_and_source_are_those_of_the_description():
    """The cache of compiled kernels tells intrinsics apart by module and name; lessons show the source."""
    assert tensor_cores.mma_bf16.__qualname__ == "mma_bf16"
    assert tensor_cores.mma_bf16.__module__ == tensor_cores.__name__
    assert "C (16, 8) float32" in tensor_cores.mma_bf16.__doc__
    names = {
        hopper.make_wgmma_wait(n, pending).__qualname__ for n in (64, 128) for pending in (0, 1)
    }
    assert len(names) == 4


def test_types():
    """Declared types are fixed, others are those of the call; a LITERAL parameter takes constants only."""
    array = types.Array(types.uint16, 1, "C")
    signature, _ = ptx.store1._defn(None, array, types.int32, types.float64)
    assert signature == types.void(array, types.int32, types.float32)
    signature, _ = tensor_cores.pack_bf16._defn(None, types.float32, types.int64)
    assert signature == types.uint32(types.float32, types.float32)
    assert tensor_cores.cp_async_wait._defn(None, types.int64) is None
    signature, _ = tensor_cores.cp_async_wait._defn(None, types.IntegerLiteral(2))
    assert signature.args == (types.IntegerLiteral(2),)


def test_bf16_arrays_are_uint16():
    for kind, expected in ((types.uint16, True), (types.float32, False)):
        assert intrinsics.Operand(types.Array(kind, 1, "C"), None).is_bf16 is expected
