"""xtrain: train and serve language models with GPU kernels that are all readable Python."""

__version__ = "0.1.0"
