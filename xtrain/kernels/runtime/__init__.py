"""Where arrays meet the compiler: kernel launches, compilation, the machine-code cache, overlapping kernels."""
