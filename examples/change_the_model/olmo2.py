"""OLMo 2 (OLMo team 2024) in user code: a family that xtrain does not read, trained and served all the same.

python examples/change_the_model/olmo2.py FOLDER "a prompt"

It differs from a Llama in two places. The norms of a block stand behind attention and MLP, before the residual addition:
h + norm(attention(h)), h + norm(mlp(h)). And QK-norm runs over all heads of a row together, not over each head.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from xtrain import Engine, ModelConfig, Transformer, UserError
from xtrain.data.tokenizer import Tokenizer
from xtrain.nn import RMSNorm
from xtrain.nn.model import Attention, Block


# [start:attention]
class WideNormAttention(Attention):
    """One RMSNorm over the H query heads of a row, one over its G key heads."""

    def __init__(self, c):
        super().__init__(replace(c, qk_norm=False))
        self.q_norm = RMSNorm(c.n_heads * c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.n_kv_heads * c.head_dim, c.norm_eps)

    def attend(self, sequences, qkv):
        c = self.config
        q_NHD, k_NGD, v_NGD = sequences.split_heads(qkv, c.n_heads, c.n_kv_heads)
        q_NHD, k_NGD = wide(self.q_norm, q_NHD), wide(self.k_norm, k_NGD)
        rope = sequences.rope
        return sequences.attention(rope(q_NHD), rope(k_NGD), v_NGD, c.head_dim**-0.5)


def wide(norm, x_NHD):
    N, H, D = x_NHD.shape
    return norm(x_NHD.reshape(N, H * D)).reshape(N, H, D)


# [end:attention]


# [start:block]
class PostNormBlock(Block):
    """h = h + norm(attention(h)),  h = h + norm(mlp(h))"""

    def __init__(self, c):
        super().__init__(c)
        self.self_attn = WideNormAttention(c)
        del self.input_layernorm
        self.post_feedforward_layernorm = RMSNorm(c.dim, c.norm_eps)

    def __call__(self, h_NC, sequences):
        h_NC = h_NC + self.post_attention_layernorm(self.self_attn(h_NC, sequences))
        return h_NC + self.post_feedforward_layernorm(self.mlp(h_NC))


def olmo2(config, device="cpu", **options):
    """-> a new model. Its parameters have the names and shapes of transformers' Olmo2ForCausalLM."""
    model = Transformer(config, device=device, **options)
    model.model.layers = [PostNormBlock(config) for _ in model.model.layers]
    model.renew_arena()
    return model


# [end:block]


# [start:load]
def load(folder, device="cpu"):
    """-> the model of a folder that transformers or `save_pretrained` of Olmo2ForCausalLM has written"""
    c = json.loads(Path(folder, "config.json").read_text())
    if c.get("model_type") != "olmo2" or c.get("attention_bias"):
        raise UserError(f"{folder} is not an OLMo 2 model: give the folder of one")
    rope = c.get("rope_parameters") or c
    config = ModelConfig(
        vocab_size=c["vocab_size"],
        dim=c["hidden_size"],
        n_layers=c["num_hidden_layers"],
        n_heads=c["num_attention_heads"],
        n_kv_heads=c["num_key_value_heads"],
        hidden_dim=c["intermediate_size"],
        max_seq_len=c["max_position_embeddings"],
        rope_theta=rope["rope_theta"],
        norm_eps=c["rms_norm_eps"],
        tie_embeddings=c["tie_word_embeddings"],
        qk_norm=False,
    )
    model = olmo2(config, device)
    model.load_weights(folder)
    return model


# [end:load]


def main(folder, prompt, max_new_tokens=64):
    model, tokenizer = load(folder), Tokenizer.load(folder)
    stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    engine = Engine(model, max_batch=1)
    (answer,) = engine.generate([tokenizer.encode_prompt(prompt)], max_new_tokens, stop=stop)
    print(prompt + tokenizer.decode(answer))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
