"""Pieces of a text: their tokens are those of the whole text, for every kind of tokenizer whose parts are known."""

import functools
import json
from random import Random

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from xtrain.data import pieces
from xtrain.data.pieces import Cutter, chunks
from xtrain.data.tokenizer import END_OF_TEXT, Tokenizer

TEXT = """It's 3.14159 o'clock, she'LL say: "déjà-vu"!! don't\r\n\r\n\tdef größe(x_1):\n        return x**2 // 1000000
你好，世界。これは文です。한국어도 있습니다.  Привет, мир ... ½ ²³ Ⅷ a.b/c\n/d/e\n\n\n  http://x.org/?a=1&b=2\n"""
ADDED = [
    AddedToken("<|im_end|>", rstrip=True),
    AddedToken("<mask>", lstrip=True),
    AddedToken("a word", normalized=True),
    AddedToken("line\nbreak", normalized=False),
    AddedToken("x", single_word=True),
    AddedToken("    ", normalized=False),
    AddedToken("\n\n", normalized=True),
]
WORDS = [*" \n\t.,'!/。，①½²3aZé你ー가Ωा̈▁\r\x01\u00a0\u2028\u3000", "  ", "\n\n", "'s", "don't", "12345", "word",
         "größe", " x ", "x", "<|im_end|>", "<mask>", "a word", "a", "line\nbreak", "    ", "क़", "각", "ᄀ", "ᅡ", "K", END_OF_TEXT]  # fmt: skip


def training_texts():
    """Random neighbours: merges of everything that a pre-tokenizer leaves together, so that a wrong cut shows."""
    random = Random(0)
    return [TEXT] * 5 + ["".join(random.choices(WORDS, k=50)) for _ in range(400)]


SPLIT = lambda regex: pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")
RAW_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SEQUENCE = pre_tokenizers.Sequence
BYTE_LEVEL = {
    "xtrain": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefix space": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "gpt2 split": (None, SEQUENCE([SPLIT(GPT2), RAW_BYTES])),
    "llama3": (None, SEQUENCE([SPLIT(GPT4), RAW_BYTES])),
    "qwen": (normalizers.NFC(), SEQUENCE([SPLIT(GPT4.replace("{1,3}", "")), RAW_BYTES])),
    "o200k": (None, SEQUENCE([SPLIT(O200K), RAW_BYTES])),
    "deepseek": (normalizers.Sequence([]), SEQUENCE([*map(SPLIT, DEEPSEEK), RAW_BYTES])),
    "smollm": (None, SEQUENCE([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])),
    "tiktoken": (
        None,
        SEQUENCE([pre_tokenizers.Split(tokenizers.Regex(GPT4), "removed", invert=True), RAW_BYTES]),
    ),
}
SPACE = normalizers.Replace(" ", "▁")
SENTENCEPIECE = {
    "llama2": (normalizers.Sequence([normalizers.Prepend("▁"), SPACE]), None),
    "gemma": (SPACE, pre_tokenizers.Split(" ", "merged_with_previous")),
    "mistral": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "metaspace": (None, pre_tokenizers.Metaspace(prepend_scheme="always", split=True)),
    "no prefix": (None, pre_tokenizers.Metaspace(prepend_scheme="never", split=True)),
}
KNOWN = [*BYTE_LEVEL, *SENTENCEPIECE, "a token over a space"]


def a_tokenizer(normalizer, pre_tokenizer, added=(), **more):
    """A tokenizer with these parts, trained on TEXT."""
    backend = tokenizers.Tokenizer(models.BPE(**more))
    backend.normalizer = normalizer or normalizers.Sequence([])
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    byte_level = pre_tokenizer is not None and "ByteLevel" in str(pre_tokenizer)
    backend.decoder = decoders.ByteLevel() if byte_level else decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=5000,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(training_texts(), trainer)
    backend.add_special_tokens(list(added[:2]))
    backend.add_tokens(list(added[2:]))
    return backend


def a_sentencepiece_tokenizer(normalizer, pre_tokenizer, added=()):
    """As converted from SentencePiece: the merges were learned with words, the pre-tokenizer does not split."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    learned = a_tokenizer(None, pre_tokenizers.Metaspace(), unk_token="<unk>")
    spec = json.loads(learned.to_str())
    merges = spec["model"]["merges"]
    # runs of spaces are tokens of Llama 2
    merges += [["▁", "▁"], ["▁▁", "▁▁"]]
    words = {"▁▁", "▁▁▁▁", "▁", "\n", "<unk>", *bytes_}
    vocab = dict(spec["model"]["vocab"])
    for word in sorted(words - vocab.keys()):
        vocab[word] = len(vocab)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [tuple(m) for m in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )  # fmt: skip
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")])
    backend.add_special_tokens([END_OF_TEXT, *added[:2]])
    backend.add_tokens(list(added[2:]))
    return backend


@functools.cache
def tokenizer(name, with_added=False):
    added = ADDED if with_added else ()
    if name == "a token over a space":
        return Tokenizer(joined_words(["x▁"]))
    if name in SENTENCEPIECE:
        return Tokenizer(a_sentencepiece_tokenizer(*SENTENCEPIECE[name], added))
    return Tokenizer(a_tokenizer(*BYTE_LEVEL[name], added))


def cut(tok, text, part=3):
    """The pieces of one document that arrives in parts."""
    cutter, found = Cutter(tok.rule), []
    for i in range(0, len(text), part):
        found += cutter.add(text[i : i + part], False)
    found += cutter.add("", True)
    assert [ends for _, ends in found] == [False] * (len(found) - 1) + [True]
    return [piece for piece, _ in found]


def assert_same_ids(tok, text, found):
    ids = [i for piece in found for i in tok.encode(piece)]
    assert ids == tok.encode(text), found


TEXTS = st.lists(st.sampled_from(WORDS) | st.characters(codec="utf-8"), max_size=40).map("".join)


@pytest.mark.parametrize("with_added", [False, True])
@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS, piece=st.integers(1, 12), part=st.integers(1, 9))
@example(text="a \n\n b", piece=1, part=2)
@example(text="x<|im_end|> b  <mask> a word", piece=1, part=2)
@example(text="。\n你好。\n\n你", piece=1, part=1)
@example(text="a ", piece=1, part=1)
@example(text="a▁ b▁  c", piece=2, part=3)
@example(text="a.。b,，c", piece=1, part=2)
@example(text="a x b x c", piece=1, part=2)
def test_tokens_of_the_pieces_are_those_of_the_text(name, with_added, text, piece, part):
    tok, normal = tokenizer(name, with_added), pieces.PIECE
    # the rule was made for PIECE characters
    pieces.PIECE = piece
    try:
        found = cut(tok, text, part)
    finally:
        pieces.PIECE = normal
    assert_same_ids(tok, text, found)
    if not tok.rule.drops_space:
        assert "".join(found) == text


@pytest.mark.parametrize("name", KNOWN)
def test_ordinary_text_is_cut_everywhere(name, monkeypatch):
    """Otherwise the test above would prove nothing."""
    monkeypatch.setattr(pieces, "PIECE", 20)
    text = "Some words, a line\nand 12 numbers. " * 20
    found = cut(tokenizer(name), text)
    assert len(found) > 15 and max(map(len, found)) < 40
    assert_same_ids(tokenizer(name), text, found)


def test_no_cut_in_a_token_over_a_space(monkeypatch):
    tok = tokenizer("a token over a space")
    monkeypatch.setattr(pieces, "PIECE", 1)  # the rule was made for PIECE characters
    assert "x▁" in [tok.decode([i]).replace(" ", "▁") for i in tok.encode("a x b")]
    words = " word" * 5
    found = cut(tok, f"a{words} x b{words}")
    assert ["".join(found), found[0]] == [f"a{words} x b{words}", "a"] and " x b" not in found
    assert any(" word x b word" in piece for piece in found) and len(found) > 4
    assert_same_ids(tok, "".join(found), found)


def test_line_breaks_in_a_regular_expression():
    """DeepSeek's file has them, where others have their escape sequences."""
    steps = [SPLIT(x.replace(r"\r", "\r").replace(r"\n", "\n")) for x in DEEPSEEK]
    there = Tokenizer(a_tokenizer(None, SEQUENCE([*steps, RAW_BYTES])))
    assert there.rule.places is tokenizer("deepseek").rule.places is not None


@pytest.mark.parametrize("name", ["xtrain", "llama3", "qwen", "o200k", "deepseek", "smollm"])
@pytest.mark.parametrize("text", ["你好，世界。" * 50, "名前\n" * 100, "word\n" * 100])
def test_text_without_spaces_is_cut(name, text, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 20)
    found = cut(tokenizer(name), text)
    assert max(map(len, found)) < 40
    assert_same_ids(tokenizer(name), text, found)


UNKNOWN = {
    "another regular expression": lambda: a_tokenizer(None, SEQUENCE([SPLIT(r"\S+ \S+|\s+"), RAW_BYTES])),
    "another normalizer": lambda: a_tokenizer(normalizers.Lowercase(), BYTE_LEVEL["xtrain"][1]),
    "no pre-tokenizer": lambda: a_tokenizer(None, RAW_BYTES),
    "dropout": lambda: a_tokenizer(None, BYTE_LEVEL["xtrain"][1], dropout=0.5),
    "many merges over spaces": lambda: joined_words([f"{c}▁" for c in pre_tokenizers.ByteLevel.alphabet()]),
}  # fmt: skip


def joined_words(tokens):
    """Like Gemma's, with tokens that begin with a character and continue with a space."""
    spec = json.loads(a_sentencepiece_tokenizer(*SENTENCEPIECE["gemma"]).to_str())
    for token in tokens:
        spec["model"]["vocab"][token] = len(spec["model"]["vocab"])
        spec["model"]["merges"].insert(0, list(token))
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_tokenizers_get_whole_documents(name, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 5)
    monkeypatch.setattr(pieces, "LONGEST", 100)
    tok = Tokenizer(UNKNOWN[name]())
    assert tok.rule.places is None
    assert cut(tok, "go on " * 16) == ["go on " * 16]
    long = cut(tok, "go on\n" * 100)
    assert "".join(long) == "go on\n" * 100 and max(map(len, long)) <= 100
    assert all(piece.endswith("\n") for piece in long)


def test_a_text_without_places_is_cut_at_the_limit(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 10)
    monkeypatch.setattr(pieces, "LONGEST", 50)
    found = cut(tokenizer("xtrain"), "x" * 235)
    assert list(map(len, found)) == [50, 50, 50, 50, 35]


def test_added_tokens_longer_than_a_piece():
    backend = a_tokenizer(None, BYTE_LEVEL["xtrain"][1])
    backend.add_tokens(["long " * pieces.PIECE])
    assert Tokenizer(backend).rule.places is None


@given(st.text(), st.integers(1, 20))
def test_chunks(text, limit):
    found = list(chunks(text, limit))
    assert "".join(found) == text
    assert all(0 < len(chunk) <= limit for chunk in found) or text == ""


def test_chunks_are_cut_after_lines_and_before_words():
    assert list(chunks("ab\ncd ef", 5)) == ["ab\n", "cd ef"]
    assert list(chunks("ab cd ef", 5)) == ["ab", " cd", " ef"]
    assert len(list(chunks("x" * 10_000_000, 1000))) == 10_000  # one huge line: linear time
