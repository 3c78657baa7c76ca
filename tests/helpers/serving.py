"""Folders with a small model and a tokenizer, and a function that runs `xtrain generate` on them."""

import itertools
import json

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, trainers
from tokenizers.processors import TemplateProcessing
from twins import random_model, set_weights, small, weights

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


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokenizer(text="def f(x):\n    return x + 1\n"):
    """Train a tokenizer that has the special tokens of CHATML."""
    backend = Tokenizer.train([text * 50], 290)._backend
    names = ("<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names])
    return Tokenizer(backend)


def chat_folder(folder, tokenizer, **changes):
    """Save a small random model of the CPU with the template CHATML. -> the folder"""
    config = small(vocab_size=tokenizer.vocab_size, qk_norm=False, **changes)
    random_model(config, device="cpu").save_pretrained(folder, tokenizer)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def tokenizer_folder(folder, vocabulary=(), added=(), around=None, template=None, **config):
    """Save TOKENIZER with changes. -> the folder

    vocabulary: tokens that are only in the vocabulary.  added: AddedTokens.
    around: such as "<s> $A </s>".  config: of tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    content = TOKENIZER.content()
    for token in vocabulary:
        content["model"]["vocab"][token] = len(content["model"]["vocab"])
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.add_tokens(list(added))
    if around:
        names = [name for name in around.split() if name != "$A"]
        special = [(name, backend.token_to_id(name)) for name in names]
        backend.post_processor = TemplateProcessing(single=around, special_tokens=special)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def make_parrot(folder, tokens, **changes):
    """Save a model after each of whose tokens (ids) the next one of `tokens` is the most likely, whatever came before."""
    tokenizer = Tokenizer.load(folder)
    shape = dict(vocab_size=tokenizer.vocab_size, dim=128, head_dim=16, max_seq_len=128)
    model = random_model(small(**(shape | changes)))
    values = weights(model)
    table = values["model.embed_tokens.weight"]
    head = np.zeros_like(table)
    for before, after in itertools.pairwise(tokens):
        head[after] += table[before]
    for name, tensor in model.named_parameters():
        if name == "lm_head.weight":
            set_weights(tensor, head)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            set_weights(tensor, np.zeros_like(values[name]))
        elif tensor.ndim == 1:
            set_weights(tensor, np.ones_like(values[name]))
    model.save_pretrained(folder)
    return folder
