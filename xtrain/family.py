"""One dial for a family of models: --depth N decides the shape, the batch, the rate and how long.

    shape     N layers of width 64 N, N heads of 64 channels
    tokens    20 for each parameter, without the embedding (Hoffmann et al. 2022); of experts for
              those that compute one token
    batch     2^19 tokens at 2^31 training tokens, otherwise in proportion to tokens^0.383 (Bergsma
              et al. 2025), rounded to a power of two of sequences
    rate      6e-4 at width 768 and 2^19 tokens a step (GPT-3 125M: Brown et al. 2020), otherwise in
              proportion to 1 / width (Yang et al. 2022) and sqrt(batch) (Malladi et al. 2022)

These rules are published ones. bench/bench_depth.py compares the rate with its half and its double.
"""

import math
from typing import Any

WIDTH_PER_LAYER = 64
HEAD_DIM = 64
MAX_DEPTH = 128
SEQ_LEN = 1024
VOCAB_SIZE = 16384
TOKENS_PER_PARAMETER = 20
REFERENCE_TOKENS = 2**31
REFERENCE_BATCH = 2**19  # tokens
BATCH_EXPONENT = 0.383
REFERENCE_WIDTH = 768
REFERENCE_LR = 6e-4
FORWARD_TOKENS = 2**15  # in a forward pass, at most
WARMUP = 50  # a fiftieth of the steps


def shape(depth: int) -> dict[str, Any]:
    """Return the fields of ModelConfig, without vocab_size and max_seq_len."""
    return dict(
        dim=WIDTH_PER_LAYER * depth,
        n_layers=depth,
        n_heads=depth,
        head_dim=HEAD_DIM,
        hidden_dim=None,
    )


def parameters(model: Any) -> int:
    """Return the number of parameters of matrices, without the embedding. model: a ModelConfig.

    Of experts, those that compute one token.
    """
    attention = 2 * model.dim * model.head_dim * (model.n_heads + model.n_kv_heads)
    mlp = 3 * model.dim * model.hidden_dim
    if model.n_experts:
        experts = 3 * model.experts_per_token * model.expert_hidden_dim
        mlp = model.dim * (experts + model.n_experts)
    return model.n_layers * (attention + mlp) + model.dim * model.vocab_size


def options(model: Any, seq_len: int, batch: int | None, steps: int | None) -> dict[str, Any]:
    """Return the options of a run.

    model: a ModelConfig; batch: sequences, steps: None: as the rules say.
    """
    tokens = TOKENS_PER_PARAMETER * parameters(model)
    if batch is None:
        best = REFERENCE_BATCH * (tokens / REFERENCE_TOKENS) ** BATCH_EXPONENT
        batch = 2 ** max(0, round(math.log2(best / seq_len)))
    if steps is None:
        steps = math.ceil(tokens / (batch * seq_len))
    lr = REFERENCE_LR * REFERENCE_WIDTH / model.dim
    lr *= math.sqrt(batch * seq_len / REFERENCE_BATCH)
    return dict(
        seq_len=seq_len,
        vocab_size=model.vocab_size,
        batch=batch,
        micro_batch=math.gcd(batch, max(1, FORWARD_TOKENS // seq_len)),
        steps=steps,
        lr=float(f"{lr:.3g}"),
        warmup=steps // WARMUP,
        eval_every=-(-steps // 20),
        sample_every=-(-steps // 10),
        save_every=-(-steps // 10),
    )
