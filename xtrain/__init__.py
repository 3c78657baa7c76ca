"""xtrain: train and serve language models with GPU kernels that are all readable Python."""

import gc as _gc
import os as _os
import signal as _signal
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import machine as _machine
from . import version as _version

if _TYPE_CHECKING:
    from .serving.engine import Engine

__version__ = _version.VERSION

# While `xtrain train` or `python -m xtrain.train` is importing, Ctrl-C ends it without a traceback.
# cli.command_line takes over afterwards.
_program = _sys.argv[0] if _sys.argv else ""
if _program == "-m":
    _names = _sys.orig_argv
else:
    _names = [_os.path.basename(_program)]
_importing = any(name.split(".")[0] == "xtrain" for name in _names)
if _importing and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
if _importing and (_shortage := _machine.little_address_space()):
    print(f"xtrain: {_shortage}", file=_sys.stderr)
    raise SystemExit(2)

# What an import makes stays: to search it for garbage, again and again, would take a fifth of the
# time.
_collects = _gc.isenabled()
_gc.disable()
try:
    from .config import ModelConfig, TrainConfig
    from .errors import UserError
    from .kernels.runtime.invariance import batch_invariant
    from .nn import functional
    from .nn.autograd import Tensor, no_grad
    from .nn.model import Transformer
    from .nn.optim import AdamW
except Exception as error:  # a package is missing or incompatible; `xtrain.doctor` must still run
    _reason = f"{type(error).__name__}: {error}"

    def _missing(name: str) -> object:
        if name in __all__:
            raise ImportError(
                f"xtrain cannot be imported ({_reason}): run `python -m xtrain.doctor`"
            )
        raise AttributeError(name)

    globals()["__getattr__"] = _missing  # type checkers do not see it: to them any name would exist
else:

    def _engine(name: str) -> object:
        """The Engine is imported when it is first used: training does without it."""
        if name != "Engine":
            raise AttributeError(f"module 'xtrain' has no attribute {name!r}")
        from .serving.engine import Engine

        globals()["Engine"] = Engine
        return Engine

    globals()["__getattr__"] = _engine
finally:
    if not _gc.get_freeze_count():  # else the program has frozen objects of its own
        _gc.freeze()  # moves all objects to the oldest generation, unseen,
        _gc.unfreeze()  # where they are part of a full collection again
    if _collects:
        _gc.enable()


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


def __dir__() -> list[str]:
    """Return also the names that are imported when they are first used."""
    return sorted({*globals(), *__all__})
