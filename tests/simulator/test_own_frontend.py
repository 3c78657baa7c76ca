"""The simulator's own `cuda` and types, which stand in for Numba where it is not installed, against Numba's.

test_frontends.py runs a program with them and NumPy alone.
"""

import numpy as np
import pytest
from numba import cuda as numbas
from numba import types
from numba.core import sigutils
from numba.core.typing.typeof import typeof
from numba.cuda import fp16, libdevicefuncs
from numba.cuda import random as numbas_random

from xtrain.simulator import (
    RaceError,
    expressions,
    frontends,
    own_libdevice,
    own_random,
    own_types,
    run,
    simulate,
)
from xtrain.simulator import own_cuda as cuda
from xtrain.simulator.cudasim import enabled
from xtrain.simulator.thread import Thread


def test_every_name_that_the_simulator_runs_is_there():
    public = {name for name in dir(numbas) if not name.startswith("_")}
    names = {n for n in public if hasattr(Thread, n) or n in expressions.PARAMETERS}
    vectors = {f"{base}x{n}" for base in cuda._VECTORS for n in (1, 2, 3, 4)}
    assert len(names) > 30 and vectors <= public
    for name in names | vectors | {"atomic", "shared", "local", "const", "cg", "jit", "to_device"}:
        assert hasattr(cuda, name), name
    for name in names:
        bare = frontends.needs_module(getattr(numbas, name))
        assert frontends.needs_module(getattr(cuda, name)) == bare, name
    atomics = {name for name in dir(numbas.atomic) if not name.startswith("_")}
    assert atomics <= {*dir(cuda.atomic)}
    halves = {name for name in dir(fp16) if name.startswith("h")}
    assert len(halves) > 20 and halves <= {*dir(cuda.fp16)}


def test_libdevice_has_numbas_signatures():
    def described(functions):
        return {
            name: [str(returns), *((str(p.ty), p.is_ptr) for p in parameters)]
            for name, (returns, parameters) in functions.items()
        }

    assert described(own_libdevice.functions()) == described(libdevicefuncs.functions)


def test_what_needs_numba_says_so():
    with pytest.raises(AttributeError, match=r"cuda\.compile_ptx needs Numba"):
        cuda.compile_ptx  # noqa: B018
    with pytest.raises(TypeError, match=r"cuda\.syncthreads can be used in a kernel only"):
        cuda.syncthreads()
    with pytest.raises(NotImplementedError, match="CUDA C"):
        cuda.jit(link=["a.cu"])


def test_a_launch_runs_in_the_simulator_next_to_numba():
    @cuda.jit("void(float32[:], int64)")
    def put(x, step):
        i = cuda.threadIdx.x
        x[i // step] = i

    x = np.zeros(8, np.float32)
    put[1, 8](x, 1)
    assert x.tolist() == list(range(8))
    with pytest.raises(RaceError, match="data race in put"):
        put[1, 8](x, 2)
    with pytest.raises(ValueError, match=r"write put\[blocks, threads\]"):
        put(x, 1)
    with pytest.raises(TypeError, match="No matching definition"):
        put[1, 8](x.astype(np.int8), 1)
    with pytest.raises(TypeError, match="must have void return type"):
        cuda.jit("int32(int32)")(lambda x: x)


SIGNATURES = [
    "void(float32[:], int32)",
    "float64(complex64[:, ::1], bool_[::1, :])",
    "(f4[::1], i8)",
    "int32(uint8)",
]


@pytest.mark.parametrize("text", SIGNATURES)
def test_signatures_are_read_as_numba_reads_them(text):
    def described(declared):
        args, result = declared
        return [*map(str, args), str(result)]

    numba = sigutils.normalize_signature(text)
    assert described(own_types.normalize_signature(text)) == described(numba)


@pytest.mark.parametrize(
    "value",
    [1, 2**63, True, 1.5, 2j, np.float32(1), np.uint8(3), np.bool_(True), (1, 2.0), None]
    + [np.zeros((2, 3)), np.zeros((3, 2), np.int8).T, np.zeros((4, 4), np.complex64)[:, ::2]],
    ids=str,
)
def test_values_have_numbas_types(value):
    own = own_types.typeof(value)
    numba = typeof(value)
    if isinstance(value, np.ndarray):
        assert (own.dtype.name, own.ndim, own.layout) == (
            numba.dtype.name,
            numba.ndim,
            numba.layout,
        )
    elif not isinstance(value, tuple):
        assert own.name == numba.name
    assert own == own_types.typeof(value) and hash(own) == hash(own_types.typeof(value))


ARGUMENTS = ["int32", "int64", "uint8", "uint64", "float32", "float64", "complex64", "bool_"]
DECLARED = [("int32", "float32"), ("float64", "int64"), ("float32", "float64", "complex128")]


@pytest.mark.parametrize("given", ARGUMENTS)
@pytest.mark.parametrize("declared", DECLARED, ids=str)
def test_a_launch_chooses_the_signature_that_numba_chooses(given, declared):
    def chosen(frontend, jit, kinds):
        kernel = jit([frontend.types.void(getattr(kinds, d)) for d in declared])(lambda x: None)
        found = frontend.fitting(kernel, (getattr(kinds, given),))
        return found and str(found[0])

    own = chosen(frontends.OwnFrontend(), cuda.jit, own_types)
    with_numba = frontends.Frontend("numba")
    with simulate():  # declared signatures compile otherwise
        assert own == chosen(with_numba, numbas.jit, types)


def _drawing(jit, module):
    """A kernel that draws a number of each kind."""
    uniform32 = module.xoroshiro128p_uniform_float32
    uniform64 = module.xoroshiro128p_uniform_float64
    normal32 = module.xoroshiro128p_normal_float32
    normal64 = module.xoroshiro128p_normal_float64

    @jit
    def draw(o, states):
        o[0] = uniform32(states, 3)
        o[1] = uniform64(states, 3)
        o[2] = normal32(states, 3)
        o[3] = normal64(states, 3)

    return draw


def test_random_numbers_are_numbas():
    own = own_random.create_xoroshiro128p_states(5, seed=2**40 + 1, subsequence_start=2)
    states = np.zeros(5, numbas_random.xoroshiro128p_dtype)
    numbas_random.init_xoroshiro128p_states_cpu(states, 2**40 + 1, 2)
    assert own.copy_to_host().tolist() == states.tolist()
    results = [np.zeros(4), np.zeros(4)]
    run(_drawing(cuda.jit, own_random), 1, 1, results[0], states.copy())
    run(_drawing(numbas.jit, numbas_random), 1, 1, results[1], states.copy())
    assert results[0].tolist() == results[1].tolist() and 0 < results[0][0] < 1


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False), (None, False)])
def test_numbas_variable_is_read_as_a_number(monkeypatch, value, on):
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    if value is not None:
        monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", value)
    assert enabled() == on
