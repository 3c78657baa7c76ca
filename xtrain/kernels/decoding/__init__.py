"""Kernels for serving only: the KV cache, matrix-vector products, sampling, packed prompts."""
