"""NUMBA_ENABLE_CUDASIM=1 python script.py: with the distribution simulate-cuda installed, this
simulator starts where Numba's own would.

simulate_cuda.pth calls `install` when Python starts and the variable is set. Nothing is imported
then; the simulator starts when the program imports numba.cuda or numba_cuda_mlir.cuda. If Numba is
not installed, it starts with the first import of numba.
"""

import os
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec

from .frontends import Starter, numbas_simulator_off

VARIABLE = "NUMBA_ENABLE_CUDASIM"
WATCHED = ("numba.cuda", "numba_cuda_mlir.cuda")


def enabled() -> bool:
    """Does the environment ask for a simulator?"""
    return os.environ.get(VARIABLE, "0").strip() not in ("", "0")


def install():
    """Start the simulator with the first import of a package with CUDA kernels. Python may read a
    .pth file twice: the second call does nothing."""
    if any(isinstance(finder, _WithNumba) for finder in sys.meta_path):
        return
    # pytest warns of plugins that were imported before it, but for those with this word
    sys.modules[__package__].__doc__ += "PYTEST_DONT_REWRITE"
    sys.meta_path.insert(0, _WithNumba())
    sys.meta_path.append(_WithoutNumba())


def _start():
    from . import host

    host.start()


class _WithNumba(Starter):
    """Finds what the other finders find, and starts the simulator once it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name not in WATCHED:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                spec.loader = _Starting(spec.loader)
                return spec
        return None


class _Starting(Loader):
    """Imports a module, and then starts the simulator."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        if module.__name__ == "numba.cuda":
            with numbas_simulator_off():
                self.loader.exec_module(module)
        else:
            self.loader.exec_module(module)
        _start()


class _WithoutNumba(Starter, Loader):
    """The last finder: no other has found numba."""

    def find_spec(self, name, path=None, target=None):
        if name != "numba":
            return None
        return ModuleSpec(name, self)

    def create_module(self, spec):
        _start()  # own_cuda.stand_in
        return sys.modules["numba"]

    def exec_module(self, module):
        pass
