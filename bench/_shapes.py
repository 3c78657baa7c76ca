"""Shapes of published models, for ModelConfig: with random weights a bench needs no download.

Each bench adds `max_seq_len`.
"""

_QWEN3 = dict(
    vocab_size=151936, n_kv_heads=8, head_dim=128, norm_eps=1e-6, qk_norm=True, rope_theta=1e6
)
QWEN3_06B = dict(**_QWEN3, dim=1024, n_layers=28, n_heads=16, hidden_dim=3072, tie_embeddings=True)
QWEN3_8B = dict(**_QWEN3, dim=4096, n_layers=36, n_heads=32, hidden_dim=12288)
LLAMA_8B = dict(  # Llama-3.1-8B
    vocab_size=128256,
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    hidden_dim=14336,
    norm_eps=1e-5,
    rope_theta=5e5,
    qk_norm=False,
)
LLAMA_1B = dict(  # Llama-3.2-1B
    vocab_size=128256,
    dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    head_dim=64,
    hidden_dim=8192,
    norm_eps=1e-5,
    qk_norm=False,
    tie_embeddings=True,
)
TINYLLAMA = dict(  # TinyLlama-1.1B
    vocab_size=32000,
    dim=2048,
    n_layers=22,
    n_heads=32,
    n_kv_heads=4,
    hidden_dim=5632,
    norm_eps=1e-5,
    qk_norm=False,
)
SMOLLM2 = dict(  # SmolLM2-135M
    vocab_size=49152,
    dim=576,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    hidden_dim=1536,
    norm_eps=1e-5,
    rope_theta=1e5,
    qk_norm=False,
    tie_embeddings=True,
)
_GEMMA3 = dict(  # every sixth layer sees all keys
    head_dim=256,
    norm_eps=1e-6,
    qk_norm=True,
    rope_theta=1e6,
    local_rope_theta=1e4,
    query_pre_attn_scalar=256,
    sandwich_norms=True,
    gelu=True,
    scaled_embedding=True,
    tie_embeddings=True,
)
GEMMA3_1B = dict(
    **_GEMMA3,
    vocab_size=262144,
    dim=1152,
    n_layers=26,
    n_heads=4,
    n_kv_heads=1,
    hidden_dim=6912,
    sliding_window=512,
    full_attention_layers=(5, 11, 17, 23),
)
GEMMA3_4B = dict(
    **_GEMMA3,
    vocab_size=262208,
    dim=2560,
    n_layers=34,
    n_heads=8,
    n_kv_heads=4,
    hidden_dim=10240,
    sliding_window=1024,
    full_attention_layers=(5, 11, 17, 23, 29),
)
MIXTURE = dict(  # 16 experts of 0.1 B over all layers, 2 of a token
    vocab_size=32000,
    dim=1024,
    n_layers=16,
    n_heads=16,
    hidden_dim=2048,
    n_experts=16,
    experts_per_token=2,
)
# a dense model with the FLOPs of the two active experts
DENSE_AS_MIXTURE = MIXTURE | dict(hidden_dim=4096, n_experts=0, experts_per_token=0)
