"""From arrays to machine code: kernel launches, compilation, the machine-code cache, overlapping
kernels.
"""
