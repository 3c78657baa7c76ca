"""Folders with a small model and a tokenizer, and a function that runs `xtrain generate` on them."""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, trainers
from tokenizers.processors import TemplateProcessing
from twins import random_model, small

from xtrain.data.tokenizer import Tokenizer
from xtrain.generate import main

TEXT = ["def f(x):\n    return x + größe  # 日本語\n" * 50]
TOKENIZER = Tokenizer.train(TEXT, 300)
OPTIONS = ["--max-new-tokens", "24"]


def make_folder(folder, tokenizer=TOKENIZER, **changes):
    """Save a small random model and a tokenizer. -> the folder.  changes: fields of ModelConfig"""
    shape = dict(vocab_size=tokenizer.vocab_size + 7, max_seq_len=64, head_dim=16)
    random_model(small(**(shape | changes))).save_pretrained(folder, tokenizer)
    return folder


def run(capsys, *arguments):
    """Run `xtrain generate` in fp32. -> (exit code, stdout, stderr)"""
    capsys.readouterr()
    code = main(["--precision", "fp32", *map(str, arguments)])
    return code, *capsys.readouterr()


def sentencepiece_tokenizer():
    """A tokenizer.json like that of Llama 2: spaces are U+2581, one in front of every text; unknown characters become bytes."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    special, by_byte = ["<unk>", "<s>", "</s>"], [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special + by_byte, show_progress=False
    )
    backend.train_from_iterator(["def f(x): return x + y if x else 0"] * 50, trainer)
    begin = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.post_processor = begin
    content = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # the byte tokens are not special
    return content
