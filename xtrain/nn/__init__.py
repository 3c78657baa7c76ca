"""Autograd, ops, modules and the arena, the model, the optimizer, CUDA graphs, observers."""

from .arena import Arena
from .modules import Embedding, Linear, Module, Parameter, RMSNorm

__all__ = ["Arena", "Embedding", "Linear", "Module", "Parameter", "RMSNorm"]
