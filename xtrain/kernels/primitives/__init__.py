"""Device functions that kernels are made of: reductions, 16-byte words, rows, tiles, tensor cores, PTX, Hopper instructions."""
