"""Autograd, ops, modules and the arena, the model, the optimizer, CUDA graphs, observers."""

from .modules import Arena, Embedding, Linear, Module, Parameter, RMSNorm

__all__ = ["Arena", "Embedding", "Linear", "Module", "Parameter", "RMSNorm"]
