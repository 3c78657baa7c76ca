"""The model that every test of reinforcement learning starts from."""

import json

import pytest
import twins

from xtrain.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model, and prompts.jsonl in its folder."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.train(["def f(x):\n    return x + 1\n" * 50], 290)
    config = twins.small(vocab_size=tokenizer.vocab_size, max_seq_len=48, qk_norm=False)
    twins.random_model(config, device="cpu").save_pretrained(path, tokenizer)
    lines = [{"prompt": f"def {'f(x' * n}", "n": n} for n in range(1, 9)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return path
