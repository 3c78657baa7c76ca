"""xtrain: train and serve language models with GPU kernels that are all readable Python.

`import xtrain` alone imports nothing: a public name is imported when it is first used. So
`import xtrain.simulator` takes a hundredth of a second, and xtrain.kernels.primitives does not
import the model.
"""

import contextlib as _contextlib
import gc as _gc
import importlib as _importlib
import importlib.util as _importlib_util
import os as _os
import signal as _signal
import sys as _sys
from collections.abc import Iterator as _Iterator
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import machine as _machine
from . import version as _version

if _TYPE_CHECKING:
    from .config import ModelConfig, TrainConfig
    from .errors import UserError
    from .kernels.runtime.invariance import batch_invariant
    from .nn import functional
    from .nn.autograd import Tensor, no_grad
    from .nn.model import Transformer
    from .nn.optim import AdamW
    from .serving.engine import Engine

__version__ = _version.VERSION
__all__ = [
    "AdamW",
    "Engine",
    "ModelConfig",
    "Tensor",
    "TrainConfig",
    "Transformer",
    "UserError",
    "batch_invariant",
    "functional",
    "no_grad",
]
_HOMES = {  # the module of each name
    "AdamW": "xtrain.nn.optim",
    "Engine": "xtrain.serving.engine",
    "ModelConfig": "xtrain.config",
    "Tensor": "xtrain.nn.autograd",
    "TrainConfig": "xtrain.config",
    "Transformer": "xtrain.nn.model",
    "UserError": "xtrain.errors",
    "batch_invariant": "xtrain.kernels.runtime.invariance",
    "functional": "xtrain.nn.functional",
    "no_grad": "xtrain.nn.autograd",
}


@_contextlib.contextmanager
def _without_collection() -> _Iterator[None]:
    """Collect no garbage inside: an import makes little, and to search it again and again would
    take a fifth of the time."""
    collects = _gc.isenabled()
    _gc.disable()
    try:
        yield
    finally:
        if not _gc.get_freeze_count():  # else the program has frozen objects of its own
            _gc.freeze()  # moves all objects to the oldest generation, unseen,
            _gc.unfreeze()  # where they are part of a full collection again
        if collects:
            _gc.enable()


def _attribute(name: str) -> object:
    """Import a public name, or a module of xtrain.

    Raises ImportError if a package that it needs is missing or incompatible.
    """
    if name in _HOMES:
        try:
            with _without_collection():
                home = _importlib.import_module(_HOMES[name])
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ImportError(
                f"xtrain cannot be imported ({reason}): run `python -m xtrain.doctor`"
            ) from error
        globals()[name] = getattr(home, name, home)  # `functional` is the module itself
        return globals()[name]
    module = f"{__name__}.{name}"
    if name.startswith("_") or _importlib_util.find_spec(module) is None:
        raise AttributeError(f"module 'xtrain' has no attribute {name!r}")
    return _importlib.import_module(module)


globals()["__getattr__"] = _attribute  # type checkers do not see it: to them any name would exist


def __dir__() -> list[str]:
    """Return also the names that are imported when they are first used."""
    return sorted({*globals(), *__all__})


# While `xtrain train` or `python -m xtrain.train` is importing, Ctrl-C ends it without a traceback.
# cli.command_line takes over afterwards.
_program = _sys.argv[0] if _sys.argv else ""
if _program == "-m":
    _names = _sys.orig_argv
else:
    _names = [_os.path.basename(_program)]
if any(name.split(".")[0] == "xtrain" for name in _names):
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    if _shortage := _machine.little_address_space():
        print(f"xtrain: {_shortage}", file=_sys.stderr)
        raise SystemExit(2)
    # A command needs nearly everything. Without a package, `xtrain doctor` must still run.
    with _contextlib.suppress(ImportError), _without_collection():
        for _name in __all__:
            if _name != "Engine":  # training does without it
                _attribute(_name)
