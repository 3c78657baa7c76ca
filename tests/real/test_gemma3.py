"""A random Gemma 3 with its published tokenizer and chat template answers as in transformers."""

import shutil

import torch
import transformers
from published import FOLDER, NEEDS, SYSTEM

from xtrain import Engine
from xtrain.serving.pretrained import load

pytestmark = NEEDS


def test_a_conversation(tmp_path):
    """test_tokenizers.py compares tokens and template."""
    shutil.copytree(FOLDER / "gemma3", tmp_path, dirs_exist_ok=True)
    # of 270M and 1B: a token less than the tokenizer has
    config = transformers.Gemma3TextConfig(
        vocab_size=262144, hidden_size=16, intermediate_size=24, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        query_pre_attn_scalar=8, sliding_window=8, max_position_embeddings=128, initializer_range=0.5, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    loaded = load(tmp_path, "cpu")
    talk = [SYSTEM, {"role": "user", "content": "Wie hoch ist der Große Arber?"}]
    ids = loaded.tokenizer.encode(loaded.template.render(talk))
    assert ids[0] == config.bos_token_id
    assert loaded.chat_stop >= {*loaded.tokenizer.encode("<end_of_turn>")}
    with torch.no_grad():
        full = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    (answer,) = Engine(loaded.model, 1).generate([ids], 12, stop=loaded.chat_stop)
    assert answer == full[0, len(ids) :].tolist() and len(set(answer)) > 5
