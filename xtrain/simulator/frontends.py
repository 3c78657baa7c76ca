"""The packages that provide `@cuda.jit`: numba, with or without numba-cuda, and numba-cuda-mlir, a
copy of Numba's parts.

One of them is enough, and both may be in use. No other file of this folder imports them: a Frontend
has what the simulator needs of one. numba-cuda-mlir takes most of a second to import, so it is a
frontend only once the program has imported it (`known`); `load_all`, for whole programs, imports
every frontend that is installed.
"""

import importlib
import sys
from importlib import util

NUMBA = "numba"
MLIR = "numba_cuda_mlir"
PACKAGES = (NUMBA, MLIR)  # numba is preferred


class Frontend:
    """One of the packages.

    modules: what kernels know as `cuda`. parts: the package with Numba's dispatcher, cudadrv and
    api_util.
    libdevices, libdevice_functions: the modules of functions, and name -> (type of the result,
    parameters).
    """

    def __init__(self, package: str):
        if package == NUMBA:
            config = _part("numba.core.config")
            if getattr(config, "ENABLE_CUDASIM", False):
                raise RuntimeError(
                    "NUMBA_ENABLE_CUDASIM is set, so Numba's own simulator has taken the place of "
                    "numba.cuda: unset it"
                )
            self.parts = _part("numba.cuda")
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
        """The declared types that a launch with arguments of the types `given` uses; None if there
        are none, or several."""
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


def _part(name: str):
    return importlib.import_module(name)


_known: dict[str, Frontend] = {}


def known() -> list[Frontend]:
    """The frontends that the program has imported, or the first one that is installed."""
    for package in PACKAGES:
        if package not in _known and f"{package}.cuda" in sys.modules:
            _known[package] = Frontend(package)
    if not _known:
        load_all(1)
    return [*_known.values()]


def load_all(at_most: int = len(PACKAGES)):
    """Import the frontends that are installed. One that cannot be imported is left out: code that
    needs it cannot run either."""
    error: ImportError | None = None
    for package in PACKAGES:
        if len(_known) < at_most and package not in _known and util.find_spec(package) is not None:
            try:
                _known[package] = Frontend(package)
            except ImportError as raised:
                error = error or raised
    if not _known:
        text = (
            "neither numba nor numba-cuda-mlir is installed: install the one that your kernels "
            "import"
        )
        raise error or ImportError(text)


def first() -> Frontend:
    """Any frontend, for what they have in common."""
    return known()[0]


def of(thing) -> Frontend:
    """The frontend of a dispatcher or of a type, by its class."""
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


def has(name: str, thing) -> bool:
    """Is `thing` cuda.<name> of a frontend?"""
    modules = [m for f in _known.values() for m in f.modules]
    return any(hasattr(m, name) and getattr(m, name) is thing for m in modules)
