"""Where arrays meet the compiler: launch, compile and cache, overlap of kernels."""
