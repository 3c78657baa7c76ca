"""From arrays to machine code: launches, compilation and its cache, overlapping kernels."""
