"""Device functions for building kernels: reductions, 16-byte words, rows, tiles, tensor cores, PTX,
Hopper instructions.
"""
