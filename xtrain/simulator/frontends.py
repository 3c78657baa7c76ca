"""The packages that provide `@cuda.jit`: numba, with or without numba-cuda, numba-cuda-mlir, a copy
of Numba's parts, and the simulator itself (own_cuda.py), which needs NumPy alone.

One of them is enough, and all may be in use. No other file of this folder imports Numba: a Frontend
has what the simulator needs of one. numba-cuda-mlir takes most of a second to import, so it is a
frontend only once the program has imported it (`known`); `load_all`, for whole programs, imports
every frontend that is installed, and without Numba lets the program import own_cuda.py in its
place.
"""

import contextlib
import importlib
import os
import sys
from importlib import util
from importlib.abc import MetaPathFinder

NUMBA = "numba"
MLIR = "numba_cuda_mlir"
PACKAGES = (NUMBA, MLIR)  # numba is preferred
OWN = "numba_simulated"  # the module of own_cuda.py's classes begins so


class Frontend:
    """One of the packages.

    modules: what kernels know as `cuda`. parts: the package with Numba's dispatcher, cudadrv and
    api_util.
    libdevices, libdevice_functions: the modules of functions, and name -> (type of the result,
    parameters).
    """

    def __init__(self, package: str):
        if package == NUMBA:
            self.parts = _numba_cuda()
            self.modules: tuple = (self.parts,)
            self.types = _part("numba.core.types")
            core = "numba.core"
            numpy = "numba.np"
            typing = "numba.core.typing"
            self.libdevices: tuple = (_part("numba.cuda.libdevice"),)
        else:
            self.parts = _part("numba_cuda_mlir.numba_cuda")
            self.modules = (_part("numba_cuda_mlir.cuda"), self.parts)
            root = self.parts.__name__
            self.types = _part(f"{root}.types")
            core = f"{root}.core"
            numpy = f"{root}.np"
            typing = f"{root}.typing"
            libdevices = "numba_cuda_mlir.cuda.libdevice", f"{root}.libdevice"
            self.libdevices = tuple(map(_part, libdevices))
        self.package = package
        self.cuda = self.modules[0]
        root = self.parts.__name__
        self.normalize_signature = _part(f"{core}.sigutils").normalize_signature
        self.signature = _part(typing).signature
        typeof = _part(f"{typing}.typeof")
        self.typeof = lambda value: typeof.typeof(value, typeof.Purpose.argument)
        support = _part(f"{numpy}.numpy_support")
        self.as_dtype = support.as_dtype
        self.from_dtype = support.from_dtype
        self.libdevice_functions = _part(f"{root}.libdevicefuncs").functions
        hints = _part(f"{root}.args")
        self.ArgHint = hints.ArgHint
        self.In = hints.In
        self.Out = hints.Out
        self.api_util = _part(f"{root}.api_util")
        self.normalize_dimensions = _part(f"{root}.errors").normalize_kernel_dimensions
        for name in ("dispatcher", "cudadrv.devicearray", "cudadrv.devices", "cudadrv.driver"):
            _part(f"{root}.{name}")
        self.devicearray = self.parts.cudadrv.devicearray
        self.descriptor = None
        if package == MLIR:
            self.descriptor = _part("numba_cuda_mlir.descriptor")

    def writes_to_array(self, ufunc) -> bool:
        """Does a kernel compile `ufunc(x, out)` with an output array?"""
        if self.package == NUMBA:
            return ufunc in _part("numba.cuda.ufuncs").ufunc_db()
        return _part("numba_cuda_mlir.ufunc_db").is_supported_ufunc(ufunc)

    def fitting(self, dispatcher, given: tuple):
        """Return the declared types that a launch with arguments of the types `given` uses; None if
        there are none, or several."""
        fitting = [kinds for kinds in dispatcher.overloads if len(kinds) == len(given)]
        if hasattr(dispatcher, "_resolve_overload"):  # an MLIRDispatcher
            best, _ = dispatcher._resolve_overload(given, candidate_sig_args=fitting)
            if len(best) == 1:
                return best[0]
            return None
        for kinds in fitting:
            dispatcher.typingctx.install_possible_conversions(given, kinds)
        try:
            index = dispatcher.typingctx.tm.select_overload(given, fitting, True, False)
        except TypeError:
            return None
        return fitting[index]


class OwnFrontend:
    """own_cuda.py, with the attributes of a Frontend."""

    package = OWN

    def __init__(self):
        self.cuda = _part(f"{__package__}.own_cuda")
        self.types = _part(f"{__package__}.own_types")
        self.modules: tuple = (self.cuda,)
        self.libdevices: tuple = (self.cuda.libdevice,)
        self.libdevice_functions = _part(f"{__package__}.own_libdevice").functions()
        self.normalize_signature = self.types.normalize_signature
        self.signature = self.types.signature
        self.typeof = self.types.typeof
        self.as_dtype = self.types.as_dtype
        self.from_dtype = self.types.from_dtype
        self.ArgHint = self.cuda.ArgHint
        self.In = self.cuda.In
        self.Out = self.cuda.Out
        self.normalize_dimensions = self.cuda.normalize_dimensions

    def writes_to_array(self, ufunc) -> bool:
        """As Frontend.writes_to_array."""
        return ufunc.__name__ in _UFUNCS.split()

    def fitting(self, dispatcher, given: tuple):
        """As Frontend.fitting."""
        declared = [kinds for kinds in dispatcher.overloads if len(kinds) == len(given)]
        return self.types.fitting(declared, given)


_UFUNCS = """
arccos arccosh arcsin arcsinh arctan arctan2 arctanh bitwise_and bitwise_or bitwise_xor cos cosh
deg2rad degrees equal fmax fmin greater greater_equal hypot invert left_shift less less_equal log
log10 log2 logical_and logical_not logical_or logical_xor maximum minimum not_equal rad2deg radians
right_shift sin sinh tan tanh
"""


def _part(name: str):
    return importlib.import_module(name)


def _numba_cuda():
    """numba.cuda itself, also if NUMBA_ENABLE_CUDASIM asks for a simulator: this is the one."""
    if "numba.cuda.simulator_init" in sys.modules:
        raise RuntimeError(
            "numba.cuda was imported with NUMBA_ENABLE_CUDASIM=1 before this simulator was "
            "started, so it is Numba's own: start this one first"
        )
    with numbas_simulator_off():
        return _part("numba.cuda")


@contextlib.contextmanager
def numbas_simulator_off():
    """Inside, numba.cuda is imported as for a GPU, whatever NUMBA_ENABLE_CUDASIM says."""
    asked = os.environ.pop("NUMBA_ENABLE_CUDASIM", None)
    config = _part("numba.core.config")
    config.ENABLE_CUDASIM = 0  # stays 0: each @cuda.jit reads it
    try:
        yield
    finally:
        if asked is not None:
            os.environ["NUMBA_ENABLE_CUDASIM"] = asked  # for processes that the program starts


class Starter(MetaPathFinder):
    """A finder that starts the simulator when the program imports a frontend (cudasim.py)."""


def remove_starters():
    """The simulator starts now, and imports the frontends itself."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Starter)]


_known: dict[str, Frontend | OwnFrontend] = {}


def known() -> list[Frontend | OwnFrontend]:
    """Return the frontends that the program has imported, or the first one that is installed."""
    for package in PACKAGES:
        imported = sys.modules.get(f"{package}.cuda")
        if package not in _known and getattr(imported, "__name__", "") == f"{package}.cuda":
            _known[package] = Frontend(package)
    if OWN not in _known and f"{__package__}.own_cuda" in sys.modules:
        _known[OWN] = OwnFrontend()
    if not _known:
        load_all(1)
    return [*_known.values()]


def load_all(at_most: int = len(PACKAGES)):
    """Import the frontends that are installed. One that cannot be imported is left out: code that
    needs it cannot run either. Without Numba, own_cuda.py stands in for it."""
    error: ImportError | None = None
    for package in PACKAGES:
        if len(_known) < at_most and package not in _known and installed(package):
            try:
                _known[package] = Frontend(package)
            except ImportError as raised:
                error = error or raised
    if error is not None and not _known:
        raise error
    if OWN not in _known and not installed(NUMBA):
        _known[OWN] = OwnFrontend()
        _known[OWN].cuda.stand_in()


def installed(package: str) -> bool:
    """Can Python find the package? Not what stands in for it, or a None that hides it."""
    if package in sys.modules:
        return getattr(sys.modules[package], "__file__", None) is not None
    return util.find_spec(package) is not None


def first() -> Frontend | OwnFrontend:
    """Any frontend, for what they have in common."""
    return known()[0]


def of(thing) -> Frontend | OwnFrontend:
    """Return the frontend of a dispatcher or of a type, by its class."""
    package = type(thing).__module__.partition(".")[0]
    return next((f for f in known() if f.package == package), first())


def is_type(thing) -> bool:
    """Is this a type of Numba, such as numba.float32?"""
    return isinstance(thing, tuple(f.types.Type for f in _known.values()))


def is_number(thing) -> bool:
    """Is this the type of a number or a bool?"""
    return is_type(thing) and isinstance(thing, (of(thing).types.Number, of(thing).types.Boolean))


def is_integer(thing) -> bool:
    """Is this an integer type?"""
    return is_type(thing) and isinstance(thing, of(thing).types.Integer)


def is_cuda(thing) -> bool:
    """Is this a module that kernels know as `cuda`?"""
    return any(thing is module for f in _known.values() for module in f.modules)


def owns(function) -> bool:
    """Is this a function of one of the packages?"""
    return str(function.__module__).partition(".")[0] in PACKAGES


def needs_module(thing) -> bool:
    """Does Numba compile cuda.threadIdx, but not threadIdx, which is this object?"""
    return isinstance(thing, type) or not getattr(thing, "bare", True)


def has(name: str, thing) -> bool:
    """Is `thing` cuda.<name> of a frontend?"""
    modules = [m for f in _known.values() for m in f.modules]
    return any(hasattr(m, name) and getattr(m, name) is thing for m in modules)
