"""Round trip: weights in a Hugging Face folder, served by xtrain and by `transformers`, give the same tokens."""

import numpy as np
import pytest
import torch
import transformers
from cached import Cached
from safetensors.torch import load_file
from twins import DEVICE, GEMMA3, LLAMA3, random_model, small, twin

from xtrain import Engine, Transformer
from xtrain.formats.huggingface import save

WIDE = dict(vocab_size=97, dim=64, hidden_dim=96, n_layers=3, head_dim=16)
CONFIGS = {
    "llama": small(**WIDE, qk_norm=False),
    "llama, tied, no groups": small(**WIDE, qk_norm=False, tie_embeddings=True, n_kv_heads=4),
    "qwen3": small(**WIDE),
    "qwen3, tied, one key head": small(**WIDE, tie_embeddings=True, n_kv_heads=1),
    "qwen2": small(**WIDE, qk_norm=False, qkv_bias=True),
    "mistral": small(**WIDE, qk_norm=False, sliding_window=6),
    "qwen3, windows in some layers": small(**WIDE, sliding_window=6, full_attention_layers=(0,)),
    "gemma3": small(**WIDE, **GEMMA3, full_attention_layers=(1,), tie_embeddings=True),
    "gemma3, heads of 256": small(
        **(WIDE | GEMMA3 | dict(head_dim=256, query_pre_attn_scalar=256)),
        full_attention_layers=(1,),
        n_kv_heads=1,
    ),
    "llama3 scaling": small(**WIDE, qk_norm=False, rope_scaling=LLAMA3, rope_theta=500000.0),
    "linear scaling": small(**WIDE, rope_scaling={"rope_type": "linear", "factor": 2.0}),
}
PROMPTS = [[5, 17, 3], [96], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [50, 40]]


def load_theirs(folder, dtype=torch.float32):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=dtype, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return model.eval()


def greedy(theirs, prompt, new):
    """-> new tokens, and the logits of each step (new, V)"""
    ids = torch.tensor([prompt])
    out = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float().numpy()


def our_logits(model, prompt, tokens):
    """The logits with a KV cache, for the last prompt token and every new token."""
    cached = Cached(model, 1, model.config.context)
    logits = [cached.prefill([prompt], [0], [0])]
    logits += [cached.decode([t], [len(prompt) + i], [0]) for i, t in enumerate(tokens[:-1])]
    return np.concatenate(logits)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shard_bytes", [10**9, 30_000], ids=["one file", "sharded"])
def test_every_token_is_equal(config, shard_bytes, tmp_path):
    save(random_model(config), tmp_path, max_shard_bytes=shard_bytes)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (shard_bytes < 10**6)
    model = Transformer.from_pretrained(tmp_path, DEVICE, trainable=False)
    theirs = load_theirs(tmp_path)
    together = Engine(model, 3).generate(PROMPTS, 24)
    for prompt, tokens in zip(PROMPTS, together):
        expected, logits = greedy(theirs, prompt, 24)
        assert tokens == expected
        assert np.abs(our_logits(model, prompt, tokens) - logits).max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_files(dtype, tmp_path):
    """Both read them into float32, so every token must be equal."""
    config = CONFIGS["qwen3"]
    save(random_model(config), tmp_path)
    load_theirs(tmp_path, dtype).save_pretrained(tmp_path / "half", max_shard_size="40KB")
    files = list((tmp_path / "half").glob("*.safetensors"))
    assert len(files) > 2 and all(x.dtype == dtype for f in files for x in load_file(f).values())
    model = Transformer.from_pretrained(tmp_path / "half", DEVICE)
    theirs = load_theirs(tmp_path / "half")
    together = Engine(model, 4).generate(PROMPTS, 24)
    assert together == [greedy(theirs, prompt, 24)[0] for prompt in PROMPTS]


def test_dynamic_scaling_beyond_the_trained_length():
    """Prompts below and above it. The transformers model is new for each prompt: it remembers its longest sequence."""
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config = small(**WIDE, qk_norm=False, rope_scaling=scaling, max_seq_len=16)
    model = random_model(config)
    prompts = [[5, 17, 3], list(range(14)), list(range(30)), [7] * 17]
    assert Engine(model, 4).max_seq_len == 64
    together = Engine(model, 4).generate(prompts, 24)
    chunked = Engine(model, 4, prefill_tokens=8).generate(prompts, 24)
    for prompt, tokens, in_chunks in zip(prompts, together, chunked):
        expected, logits = greedy(twin(model), prompt, 24)
        assert tokens == expected == in_chunks
        assert np.abs(our_logits(model, prompt, tokens) - logits).max() <= 1e-4


def test_a_stop_token_as_in_transformers():
    model = random_model(CONFIGS["llama"])
    theirs = twin(model)
    free, _ = greedy(theirs, PROMPTS[0], 24)
    theirs.generation_config.eos_token_id = [free[9], 200]
    theirs.generation_config.pad_token_id = 0
    (tokens,) = Engine(model, 1).generate(PROMPTS[:1], 24, stop=[free[9], 200])
    assert tokens == greedy(theirs, PROMPTS[0], 24)[0] and len(tokens) <= 10
    assert tokens.reason == "stop"


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_bf16_picks_the_same_token_where_the_margin_is_clear(config, tmp_path):
    save(random_model(config), tmp_path)
    half = Transformer.from_pretrained(tmp_path, "gpu", "bf16", trainable=False)
    theirs = load_theirs(tmp_path)
    for prompt in PROMPTS:
        expected, logits = greedy(theirs, prompt, 24)
        ours = our_logits(half, prompt, expected)
        top = np.sort(logits, -1)
        clear = top[:, -1] - top[:, -2] > 0.1
        assert clear.sum() > 12
        assert np.array_equal(ours.argmax(-1)[clear], logits.argmax(-1)[clear])
