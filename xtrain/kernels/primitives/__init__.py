"""Device functions for building kernels: reductions, words, rows, tiles, PTX, tensor cores."""
