"""xtrain: train and serve language models with GPU kernels that are all readable Python."""

from .autograd import Tensor, no_grad
from .config import ModelConfig, TrainConfig, UserError
from .engine import Engine
from .model import Transformer
from .optim import AdamW

__version__ = "0.1.0"
__all__ = [
    "AdamW",
    "Engine",
    "ModelConfig",
    "Tensor",
    "TrainConfig",
    "Transformer",
    "UserError",
    "no_grad",
]
