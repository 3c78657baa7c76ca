"""Model FLOP/s utilisation (MFU, Chowdhery et al. 2022): how much of the GPU's peak a training step
uses.

MFU = floating-point operations that the model's mathematics needs per second / peak of the GPU in
the precision in use. Per token these are 6 per matrix parameter (2 in the forward pass, 4 in the
backward; the embedding look-up needs none; 4 for a frozen matrix, which needs no gradient) and 12 L
H D T / 2 for causal attention; with a sliding window W < T, T / 2 becomes W - W^2 / 2T. Of E experts
K count, those that compute a token. Draft heads are trained on a forward pass alone; each multiplies
with the model's head.
"""

import math

from ..device import cupy
from ..formats.expert_files import active_share
from ..formats.huggingface import shapes_of
from ..nn.lora import frozen_shapes
from ..nn.model import Transformer

# Operations (a multiply-add counts as two) per multiprocessor and clock, by compute capability.
# From NVIDIA's architecture white papers.  FP32: on CUDA cores.  BF16: on tensor cores with float32
# accumulation, without sparsity. FP8: twice BF16.
FP32_OPS = {
    (7, 5): 128,
    (8, 0): 128,
    (8, 6): 256,
    (8, 9): 256,
    (9, 0): 256,
    (10, 0): 256,
    (12, 0): 256,
}
BF16_OPS = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 1024}
FP8_OPS = {cc: 2 * ops for cc, ops in BF16_OPS.items() if cc >= (8, 9)}
# CUdevice_attribute numbers
CAPABILITY_MAJOR = 75
CAPABILITY_MINOR = 76
CLOCK_KHZ = 13
MULTIPROCESSORS = 16


def flops_per_token(model: Transformer, T: float) -> float:
    """Return floating-point operations of forward and backward per token, for sequences of T
    tokens.

    Of rows that hold several documents, T is the mean over the tokens of the length of their
    document.
    """
    c = model.saved_config
    shapes = shapes_of(model)
    others = {name: x for name, x in frozen_shapes(model).items() if name not in shapes}
    trained, frozen = (
        sum(
            math.prod(x) * active_share(c, n)
            for n, x in some.items()
            if len(x) == 2 and "embed_tokens" not in n
        )
        for some in (shapes, others)
    )
    # the table is used as a matrix too
    head = 0
    if c.tie_embeddings:
        head = c.vocab_size * c.dim
    keys = 0.0  # twice the mean number that a query sees, over all layers
    for window in (c.window(i) for i in range(c.n_layers)):
        keys += T if not 0 < window < T else 2 * window - window * window / T
    heads = getattr(model, "draft_heads", None)
    if heads is not None:
        frozen -= 0 if c.tie_embeddings else c.vocab_size * c.dim
        head = 4 * len(heads.heads) * c.vocab_size * c.dim
        return 6 * trained + 2 * frozen + head + 2 * keys * c.n_heads * c.head_dim
    matrices = 6 * trained + 4 * frozen + (4 if model.adapter else 6) * head
    return matrices + 6 * keys * c.n_heads * c.head_dim


def peak_flops(precision: str) -> float | None:
    """Return peak of the current GPU at its highest clock, operations per second; None if the GPU
    is not in the tables.

    An H200 at 1.98 GHz: 67e12 in fp32, 1070e12 in bf16 (its datasheet assumes a lower clock:
    989e12). In fp8 that of fp8 products, though attention and the head are bf16. GeForce cards
    accumulate bf16 products in float32 at half the rate given here.
    """
    runtime = cupy().cuda.runtime
    device = runtime.getDevice()
    major, minor, clock_khz, multiprocessors = (
        runtime.deviceGetAttribute(attribute, device)
        for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR, CLOCK_KHZ, MULTIPROCESSORS)
    )
    ops = {"fp32": FP32_OPS, "bf16": BF16_OPS, "fp8": FP8_OPS}[precision].get((major, minor))
    return ops and float(ops) * multiprocessors * clock_khz * 1e3
