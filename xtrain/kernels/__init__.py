"""One file per op: the maths, a NumPy reference, the kernels, their launchers. Arrays only."""
