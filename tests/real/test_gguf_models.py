"""A published GGUF file, and SentencePiece's vocabulary: what transformers reads from them, xtrain does."""

import json

import numpy as np
import pytest
from awkward_texts import texts
from fetch import GGUF
from published import FOLDER, NEEDS, SMOLLM2, answers

from xtrain import Engine
from xtrain.data.tokenizer import Tokenizer
from xtrain.formats.huggingface import open_weights
from xtrain.formats.saved_runs import model_folder
from xtrain.serving.pretrained import load

gguf = pytest.importorskip("gguf")
pytestmark = NEEDS


@pytest.mark.skipif(
    not (SMOLLM2 / GGUF).exists(), reason=f"needs {GGUF}: python tests/real/fetch.py"
)
def test_smollm2_in_q4_1(monkeypatch, tmp_path):
    """The folder has the weights that transformers dequantized from the same file."""
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path))
    _, theirs = open_weights(SMOLLM2)
    _, stored = open_weights(model_folder(SMOLLM2 / GGUF))
    assert stored.keys() == theirs.keys()
    assert all(np.array_equal(stored[name].read(), theirs[name].read()) for name in theirs)
    pair = [load(path, "cpu") for path in (SMOLLM2 / GGUF, SMOLLM2)]
    ours, folder = pair
    sample = texts(400, ["<|im_start|>", "<|im_end|>"])
    # transformers' reading of the file loses that each numeral is divided from the others
    sample = [text for text in sample if not any(map(str.isnumeric, text))]
    assert len(sample) > 50 and ours.tokenizer.encode(" ½") != folder.tokenizer.encode(" ½")
    assert ours.tokenizer.encode_batch(sample) == folder.tokenizer.encode_batch(sample)
    found = [answers(x, Engine(x.model, 2, 128), ["What is the capital of France?"]) for x in pair]
    assert found[0] == found[1] and "Paris" in ours.tokenizer.decode(found[0][0])


def test_sentencepiece_of_llama2(monkeypatch, tmp_path):
    """Llama 2's tokenizer as llama.cpp stores it: tokens and scores, without merges."""
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    published = Tokenizer.load(FOLDER / "llama2")
    content = json.loads((FOLDER / "llama2" / "tokenizer.json").read_text())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([*types, *[kinds.NORMAL] * (len(tokens) - len(types))])
    order: dict[str, int] = {}
    for i, pair in enumerate(content["model"]["merges"]):
        order.setdefault("".join(pair if isinstance(pair, list) else pair.split(" ")), i)
    writer.add_token_scores([-float(order.get(token, 1e9)) for token in tokens])
    for name, i in (("bos", 1), ("eos", 2), ("unk", 0)):
        getattr(writer, f"add_{name}_token_id")(i)
    writer.add_block_count(1)
    for name in (
        "embedding_length",
        "feed_forward_length",
        "head_count",
        "context_length",
    ):
        getattr(writer, f"add_{name}")(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = Tokenizer.load(model_folder(tmp_path / "a.gguf"))
    assert ours.begin == published.begin == [1]
    for text in texts(300, ["<s>", "</s>"]):
        assert ours.encode(text) == published.encode(text), text
        assert ours.decode(ours.encode(text)) == published.decode(published.encode(text))
