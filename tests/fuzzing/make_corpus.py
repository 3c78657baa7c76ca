"""Make the valid files in tests/data/fuzz:   python -m fuzzing.make_corpus      (in tests/)

The other files there are earlier findings, named for what is wrong with them.
"""

import json
from pathlib import Path

import numpy as np

import xtrain
from xtrain.data.shards import write_shard
from xtrain.data.tokenizer import Tokenizer
from xtrain.formats import huggingface
from xtrain.formats.manifest import write_manifest
from xtrain.formats.tensor_file import write_safetensors

from .files import CORPUS

SHAPE = dict(
    vocab_size=16,
    dim=4,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=2,
    hidden_dim=4,
    max_seq_len=16,
)
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def models() -> None:
    llama = xtrain.ModelConfig(**SHAPE, qk_norm=False)
    (CORPUS / "safetensors").mkdir(parents=True, exist_ok=True)
    tensors = dict(xtrain.Transformer(llama).named_parameters())
    write_safetensors(CORPUS / "safetensors" / "llama.safetensors", tensors)
    empty = {
        "a": xtrain.Tensor(np.zeros((0, 3), np.float32)),
        "b": xtrain.Tensor(np.ones(3, np.float16)),
    }
    write_safetensors(CORPUS / "safetensors" / "empty.safetensors", empty)
    scaled = xtrain.ModelConfig(**SHAPE, qk_norm=False, rope_scaling=LLAMA3)
    tied = xtrain.ModelConfig(**SHAPE, qk_norm=True, tie_embeddings=True)
    for name, config in (("llama", llama), ("llama3", scaled), ("qwen3", tied)):
        put(
            CORPUS / "config" / f"{name}.json",
            json.dumps(huggingface.config_to_hf(config)).encode(),
        )


def tokenizers() -> None:
    own = Tokenizer.train(["def f(x):\n    return x + 1\n" * 3], 262)
    own.save(CORPUS / "made")
    made = CORPUS / "made" / "tokenizer.json"
    content = json.loads(made.read_bytes())
    put(CORPUS / "tokenizer" / "bytes.json", json.dumps(content).encode())
    tokens = [*(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a", "</s>"]
    content["model"] |= {
        "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [["▁", "a"]], "byte_fallback": True, "unk_token": None,
    }  # fmt: skip
    content["added_tokens"] = [dict(content["added_tokens"][0], id=259, content="</s>")]
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    steps = [{"type": "ByteFallback"}, spaces]
    content |= {"pre_tokenizer": None, "decoder": {"type": "Sequence", "decoders": steps}}
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    put(CORPUS / "tokenizer" / "pieces.json", json.dumps(content).encode())
    for path in (CORPUS / "made").iterdir():
        path.unlink()
    (CORPUS / "made").rmdir()


def shards() -> None:
    (CORPUS / "shard").mkdir(exist_ok=True)
    ids = np.arange(40) % 256
    write_shard(CORPUS / "shard" / "two_bytes.bin", ids, 256)
    write_shard(CORPUS / "shard" / "four_bytes.bin", ids, 1 << 17)


def run() -> None:
    folder = CORPUS / "run"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    lines = lambda records: "".join(json.dumps(r) + "\n" for r in records).encode()
    steps = range(1, 6)
    metrics = [{"step": i, "loss": 6.0 - i / 3, "grad_norm": 1.5, "lr": 1e-3} for i in steps]
    metrics += [
        {"step": 6, "loss": None, "grad_norm": None, "lr": 1e-3, "skipped": "the loss is nan"}
    ]
    metrics += [
        {"step": 5, "val_loss": 4.4, "val_bpb": 2.1},
        {"step": 4, "loss": 9.0, "spike": 7.1},
    ]
    put(folder / "metrics.jsonl", lines(metrics))
    put(
        folder / "layers.jsonl",
        lines([{"step": i, "embedding": 0.1, "layer 0": 0.2, "head": 1.0} for i in steps]),
    )
    timing = {
        "tokens_per_s": 1e4,
        "ms": 5.0,
        "mfu": None,
        "phases_ms": {"data": 1.0, "forward": 2.0},
        "memory_bytes": 10**8,
    }
    put(folder / "timing.jsonl", lines([{"step": i, **timing} for i in steps]))
    put(folder / "samples.txt", b"--- step 5\ndef f(x):\n    return x\n")
    config = {
        "train": {"steps": 6, "lr": 1e-3, "data": None},
        "model": SHAPE,
        "data": {"bigram_bpb": 3.5},
    }
    put(
        folder / "config.json",
        json.dumps({**config, "machine": {"device": "CPU"}, "versions": {}}).encode(),
    )
    maps = {"mean": [[1.0, 0.0], [0.5, 0.5]], "heads": {"0": [[1.0, 0.0], [0.5, 0.5]]}, "of": 1}
    following = [{"top": [["b", 0.9]], "real": 0.9}, {"top": [["c", 0.8]], "real": None}]
    sentence = {
        "step": 6,
        "tokens": ["a", "b"],
        "attention": {"layer 0": maps},
        "layers": 1,
        "next": following,
    }
    put(folder / "sentence.json", json.dumps(sentence).encode())
    write_manifest(folder, {})


if __name__ == "__main__":
    models()
    tokenizers()
    shards()
    run()
