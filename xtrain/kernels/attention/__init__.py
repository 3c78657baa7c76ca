"""Attention: dispatch, GEMM attention, flash attention (fp32, bf16 with mma.sync, Hopper with wgmma
+ TMA), decoding, context."""
