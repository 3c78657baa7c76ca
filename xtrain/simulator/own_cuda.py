"""`cuda` without Numba: the decorator, the names of kernels and the host functions of `numba.cuda`,
for a machine that has NumPy alone.

    from simulate_cuda import cuda
    from simulate_cuda.own_types import float32

Kernels decorated here always run in the simulator. Where Numba is not installed, `simulate` lets
code under test import this module as `numba.cuda` (`stand_in`). What compiles (`compile_ptx`,
`inspect_asm`) is not here.
"""

import functools
import itertools
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np

from . import dispatch, half, own_libdevice, own_types
from .device import HOST_FUNCTIONS, CudaSupportError
from .device_array import DeviceArray, host_view

__all__ = ["CudaSupportError", "In", "InOut", "Out", "Reduce", "declare_device", "jit", "reduce"]
HOME = f"{own_types.HOME}.cuda"
NO_RESULT = "CUDA kernel must have void return type."


# ----------------------------------------------------------------------------- kernels
class Dispatcher:
    """A function compiled with @cuda.jit. `kernel[grid, block, stream, shared](...)` runs it.

    py_func: the function. overloads: declared types of arguments -> dispatch.Overload.
    """

    __module__ = HOME

    def __init__(self, py_func, options: dict):
        functools.update_wrapper(self, py_func)
        self.py_func = py_func
        self.targetoptions = options
        self.extensions = [*options.get("extensions", ())]
        self.overloads: dict = {}
        self._can_compile = True

    compile = dispatch.compile
    compile_device = dispatch.compile_device
    configure = dispatch.configure

    def __getitem__(self, configuration):
        if not isinstance(configuration, tuple) or not 2 <= len(configuration) <= 4:
            raise ValueError("must specify at least the griddim and blockdim")
        return self.configure(*configuration)

    def __call__(self, *args):
        raise ValueError(
            f"{self.__name__} has no launch configuration: write {self.__name__}[blocks, "
            "threads](...), and call device functions in kernels only"
        )

    def forall(self, ntasks, tpb=0, stream=0, sharedmem=0) -> "ForAll":
        """Return a launch of at least `ntasks` threads."""
        if ntasks < 0:
            raise ValueError(f"Can't create ForAll with negative task count: {ntasks}")
        return ForAll(self, ntasks, tpb, stream, sharedmem)


class ForAll:
    """kernel.forall(n): a kernel that is launched with one thread for each of n tasks."""

    __module__ = HOME

    def __init__(self, dispatcher, ntasks, tpb, stream, sharedmem):
        self.dispatcher = dispatcher
        self.ntasks = ntasks
        self.thread_per_block = tpb
        self.stream = stream
        self.sharedmem = sharedmem

    __call__ = dispatch.forall


def jit(func_or_sig=None, device=False, link=(), **options):
    """@cuda.jit, @cuda.jit(device=True), @cuda.jit("void(float32[:])"), @cuda.jit([signatures]).

    Options that change only the compiled code have no effect. Raises NotImplementedError for code
    to be linked.
    """
    if link:
        raise NotImplementedError(f"the simulator does not run CUDA C: link={link}")
    options["device"] = device
    if func_or_sig is None:
        return functools.partial(Dispatcher, options=options)
    if isinstance(func_or_sig, FunctionType):
        return Dispatcher(func_or_sig, options)
    declared = [func_or_sig]
    if isinstance(func_or_sig, list):
        declared = func_or_sig

    def decorate(py_func):
        new = Dispatcher(py_func, options)
        for sig in declared:
            args, result = own_types.normalize_signature(sig)
            if not device and result not in (None, own_types.void):
                raise TypeError(NO_RESULT)
            new.compile_device(args, result)
        new._can_compile = False
        return new

    return decorate


def declare_device(name, sig):
    """Numba's way to name a function of CUDA C, which the simulator does not run."""
    raise NotImplementedError(f"the simulator does not run CUDA C: {name}")


def normalize_dimensions(griddim, blockdim) -> tuple:
    """Return the grid and the block as tuples of three ints."""
    return tuple(map(_three, (griddim, blockdim), ("griddim", "blockdim")))


def _three(dim, name):
    if not isinstance(dim, (tuple, list)):
        dim = (dim,)
    if len(dim) > 3:
        raise ValueError(f"{name} must be a sequence of 1, 2 or 3 integers, got {dim!r}")
    if not all(isinstance(n, (int, np.integer)) for n in dim):
        raise TypeError(f"{name} must be a sequence of integers, got {dim!r}")
    return (*dim, 1, 1)[:3]


# ----------------------------------------------------------------------------- arguments
class ArgHint:
    """What a launch copies of a host array."""

    def __init__(self, value):
        self.value = value


class In(ArgHint):
    """To the device only."""


class Out(ArgHint):
    """To the host only."""


class InOut(ArgHint):
    """To the device and back."""


class Reduce:
    """cuda.reduce(function): `sum_of = cuda.reduce(lambda a, b: a + b)`; `sum_of(x)`."""

    def __init__(self, functor):
        self.functor = functor

    def __call__(self, arr, size=None, res=None, init=0, stream=0):
        """Return the reduction of the first `size` elements of a one-dimensional array, written to
        res[0] if `res` is given and returned otherwise."""
        if arr.ndim != 1:
            raise TypeError("only support 1D array")
        host = host_view(arr)[:size]
        total = functools.reduce(self.functor, host, host.dtype.type(init))
        if res is None:
            return host.dtype.type(total)
        host_view(res)[:1] = total
        return None


reduce = Reduce


# ----------------------------------------------------------------------------- names of kernels
class Name:
    """What a kernel names, and only a kernel can use: cuda.syncthreads, cuda.float32x4."""

    __module__ = HOME

    def __init__(self, name: str, bare: bool = True):
        self.name = name
        self.bare = bare  # compiles after `from numba.cuda import NAME` too

    def __repr__(self):
        return f"cuda.{self.name}"

    def __call__(self, *args, **kwargs):
        raise TypeError(f"{self!r} can be used in a kernel only")


class Namespace:
    """cuda.atomic, cuda.shared: an object with names."""

    __module__ = HOME

    def __init__(self, name: str, members):
        for member in members:
            setattr(self, member, Name(f"{name}.{member}"))


_NAMES = """
activemask all_sync any_sync ballot_sync blockDim blockIdx brev cbrt clz eq_sync ffs fma grid
gridDim gridsize laneid lanemask_lt match_all_sync match_any_sync nanosleep popc selp
shfl_down_sync shfl_sync shfl_up_sync shfl_xor_sync syncthreads syncthreads_and syncthreads_count
syncthreads_or syncwarp threadIdx threadfence threadfence_block threadfence_system warpsize
"""
_NOT_BARE = """
activemask blockDim blockIdx brev cbrt clz ffs fma gridDim laneid lanemask_lt match_all_sync
match_any_sync nanosleep popc selp syncwarp threadIdx threadfence threadfence_block
threadfence_system warpsize
"""
_NAMESPACES = {
    "atomic": "add and_ cas compare_and_swap dec exch inc max min nanmax nanmin or_ sub xor",
    "cg": "this_grid",
    "const": "array_like",
    "local": "array",
    "shared": "array",
    "fp16": " ".join(half.NAMES),
}
_VECTORS = {  # base of cuda.int32x4 -> base of cuda.int4
    "int8": "char", "int16": "short", "int32": "int", "int64": "longlong",
    "uint8": "uchar", "uint16": "ushort", "uint32": "uint", "uint64": "ulonglong",
    "float32": "float", "float64": "double",
}  # fmt: skip


def _names() -> dict:
    names: dict = {name: Name(name, name not in _NOT_BARE.split()) for name in _NAMES.split()}
    names |= {name: Namespace(name, has.split()) for name, has in _NAMESPACES.items()}
    for base, n in itertools.product(_VECTORS, (1, 2, 3, 4)):
        names[f"{base}x{n}"] = names[f"{_VECTORS[base]}{n}"] = Name(f"{base}x{n}")
        if base in ("int64", "uint64"):
            names[_VECTORS[base].replace("longlong", "long") + str(n)] = names[f"{base}x{n}"]
    libdevice = ModuleType(f"{HOME}.libdevice")
    for name in own_libdevice.functions():
        short = name.removeprefix("__nv_")
        setattr(libdevice, short, Name(f"libdevice.{short}"))
    names["libdevice"] = libdevice
    return names


globals().update(_names())
globals().update(HOST_FUNCTIONS)
types = own_types
devicearray = SimpleNamespace(DeviceNDArray=DeviceArray)
cudadrv = SimpleNamespace(devicearray=devicearray)


def __getattr__(name):
    raise AttributeError(f"cuda.{name} needs Numba, which the simulator runs without here")


# ----------------------------------------------------------------------------- in the place of numba
def stand_in():
    """Let the program import this module as numba.cuda, and own_types as numba.types. Numba must
    not be installed."""
    this = sys.modules[__name__]
    vars(this)["random"] = sys.modules["numba.cuda.random"] = import_module(
        f"{__package__}.own_random"
    )
    config = SimpleNamespace(ENABLE_CUDASIM=0)  # as with Numba: frontends.py
    core = {"types": own_types, "config": config}
    support = {"as_dtype": own_types.as_dtype, "from_dtype": own_types.from_dtype}
    numba = _module("numba", **own_types.NAMED, **core, cuda=this)
    vars(numba).update(from_dtype=own_types.from_dtype, typeof=own_types.typeof)
    vars(numba)["__getattr__"] = _missing
    sys.modules["numba.cuda"] = this
    sys.modules["numba.types"] = sys.modules["numba.core.types"] = own_types
    sys.modules["numba.cuda.types"] = own_types
    sys.modules["numba.cuda.libdevice"] = vars(this)["libdevice"]
    numba.core = _module("numba.core", **core)
    numba.np = _module("numba.np", numpy_support=_module("numba.np.numpy_support", **support))


def _module(name: str, **members):
    """Return a new module, which `import name` finds."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=True)
    module.__spec__.has_location = True  # an ImportError then names this file
    module.__path__ = []
    vars(module).update(members)
    sys.modules[name] = module
    return module


def _missing(name):
    raise AttributeError(
        f"Numba is not installed, and numba.{name} is not a part of the simulator: it has "
        "numba.cuda and numba.types"
    )
