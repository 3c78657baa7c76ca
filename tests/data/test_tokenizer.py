"""The tokenizer: it loses nothing, gives the same file every time, and agrees with transformers."""

import json
import os
import shutil

import numpy as np
import pytest
import tokenizers
from faults import KILL, FailingDisk, killed
from hypothesis import given
from hypothesis import strategies as st
from serving import sentencepiece_tokenizer

from xtrain.data.chat_template import ChatTemplate
from xtrain.data.dataset import prepare
from xtrain.data.tokenizer import END_OF_TEXT, MIN_VOCAB, Tokenizer
from xtrain.errors import UserError

TEXTS = ["def add(a, b):\n    return a + b\n" * 3, "Größe, 你好, 🙂: ça va? Größe!\r\n\t" * 3]
TOKENIZER = Tokenizer.train(TEXTS, 300)


@given(st.text())
def test_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= i < TOKENIZER.vocab_size for i in ids)
    assert TOKENIZER.token_lengths[ids].sum() == len(text.replace(END_OF_TEXT, "").encode())


@given(st.lists(st.text(), max_size=5))
def test_batch_equals_one_by_one(texts):
    assert TOKENIZER.encode_batch(texts) == [TOKENIZER.encode(text) for text in texts]


@given(st.lists(st.integers(0, TOKENIZER.vocab_size + 5)))
def test_stream_equals_decode(ids):
    """Any ids, including half characters, bytes that are not UTF-8 and ids outside the vocabulary."""
    assert "".join(TOKENIZER.stream(ids)) == TOKENIZER.decode(ids)


def test_stream_holds_back_half_a_character():
    ids = [TOKENIZER.token_bytes.index(bytes([byte])) for byte in "a€b".encode()]
    assert list(TOKENIZER.stream(ids)) == ["a", "€", "b"]


def test_end_of_text():
    assert TOKENIZER.decode([TOKENIZER.eot_id]) == END_OF_TEXT
    assert TOKENIZER.encode("a" + END_OF_TEXT)[-1] == TOKENIZER.eot_id
    assert TOKENIZER.token_lengths[TOKENIZER.eot_id] == 0


def test_same_texts_same_file(tmp_path):
    for name in ("a", "b"):
        Tokenizer.train(TEXTS, 300).save(tmp_path / name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("what", ["", "tokenizer.json"])
def test_save_and_load(tmp_path, what):
    TOKENIZER.save(tmp_path)
    loaded = Tokenizer.load(tmp_path / what)
    assert loaded.sha256 == TOKENIZER.sha256
    assert (loaded.vocab_size, loaded.eot_id) == (TOKENIZER.vocab_size, TOKENIZER.eot_id)
    assert loaded.encode(TEXTS[1]) == TOKENIZER.encode(TEXTS[1])


def test_a_vocabulary_larger_than_any_is_one_sentence():
    """The library would panic."""
    with pytest.raises(UserError, match="--vocab-size must be at most 4194304, got 1000000000"):
        Tokenizer.train(TEXTS, 10**9)


def test_vocabulary_of_a_short_text_is_smaller_than_requested():
    assert Tokenizer.train(["ab"], 1000).vocab_size == MIN_VOCAB
    assert Tokenizer.train(TEXTS, MIN_VOCAB).vocab_size == MIN_VOCAB
    with pytest.raises(UserError, match="--vocab-size 256 is too small"):
        Tokenizer.train(TEXTS, 256)


def test_settings_of_a_server_do_not_cut_documents(tmp_path):
    TOKENIZER.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"truncation": cut}), "utf-8")
    assert Tokenizer.load(file).encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])


def test_end_of_text_of_another_tokenizer(tmp_path):
    TOKENIZER.save(tmp_path)
    file, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    file.write_text(file.read_text("utf-8").replace(END_OF_TEXT, "<|end_of_text|>"), "utf-8")
    config.unlink()
    assert Tokenizer.load(file).eot == "<|end_of_text|>"
    config.write_text('{"eos_token": {"content": "!"}}', "utf-8")
    assert Tokenizer.load(file).eot_id == TOKENIZER.encode("!")[0]


MORE = "additional_chat_templates/tool_use.jinja"


def test_companion_files_are_saved_with_a_tokenizer(tmp_path):
    """The names of special tokens and the chat template of another program's tokenizer."""
    TOKENIZER.save(tmp_path / "in")
    config = {"bos_token": {"content": "!"}, "eos_token": END_OF_TEXT, "chat_template": "{{ messages }}"}  # fmt: skip
    (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "in" / "chat_template.jinja").write_text("{{ bos_token }}", "utf-8")
    (tmp_path / "in" / MORE).parent.mkdir()
    (tmp_path / "in" / MORE).write_text("{{ tools }}", "utf-8")
    (tmp_path / "in" / "other.txt").write_text("not a companion")
    loaded = Tokenizer.load(tmp_path / "in")
    assert loaded.encode("!") == [loaded.bos_token_id] and loaded.eos_token_id == TOKENIZER.eot_id
    loaded.save(tmp_path / "out")
    for name in ("tokenizer_config.json", "chat_template.jinja", MORE):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    assert len(list((tmp_path / "out").iterdir())) == 4
    again = Tokenizer.load(tmp_path / "out")
    assert again.sha256 == loaded.sha256 != TOKENIZER.sha256, "! is now one token"
    (tmp_path / "in" / "tokenizer_config.json").write_text('{"bos_token": null}', "utf-8")
    assert Tokenizer.load(tmp_path / "in").bos_token_id is None
    assert TOKENIZER.bos_token_id == TOKENIZER.eot_id
    (tmp_path / "in" / "tokenizer_config.json").write_text("[", "utf-8")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is damaged"):
        Tokenizer.load(tmp_path / "in")


def test_added_tokens_of_a_byte_level_vocabulary_are_text():
    backend = tokenizers.Tokenizer.from_str(TOKENIZER._json().decode())
    backend.add_tokens(["<｜tool▁call｜>", "<0xZZ>"])
    tokenizer, text = Tokenizer(backend), "a<｜tool▁call｜>b<0xZZ>"
    assert "".join(tokenizer.stream(tokenizer.encode(text))) == text
    assert len(tokenizer.encode(text)) == 4


SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}


def test_sentencepiece_bytes():
    """The vocabulary format of Llama 2: spaces as U+2581, bytes as <0x..>."""
    backend = pytest.importorskip("tokenizers").Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "model": {
                    "type": "BPE",
                    "vocab": {"</s>": 0, "<0x0A>": 1, "▁a": 2, "é": 3},
                    "merges": [],
                    "byte_fallback": True,
                },
                "decoder": {
                    "type": "Sequence",
                    "decoders": [{"type": "ByteFallback"}, SPACES],
                },
            }
        )
    )
    tokenizer = Tokenizer(backend, "</s>")
    assert tokenizer.token_bytes[1:] == [b"\n", b" a", "é".encode()]
    np.testing.assert_array_equal(tokenizer.token_lengths, [0, 1, 2, 2])


WORDLEVEL = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": ""},
}


CTC = {"pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}


def with_decoder(decoder):
    """A BPE of three tokens."""
    model = {"type": "BPE", "vocab": {"</s>": 0, "a</w>": 1, "##b": 2}, "merges": []}
    return json.dumps({"model": model, "decoder": decoder}).encode()


def huge_id(i):
    return json.dumps({"model": {"type": "BPE", "vocab": {"</s>": i}, "merges": []}}).encode()


@pytest.mark.parametrize(
    "content, sentence",
    [
        (None, "there is no tokenizer at"),
        (b"", "is not a tokenizer.json"),
        (b"{}", "is not a tokenizer.json"),
        (b"\xff\x00", "is not a tokenizer.json"),
        (b"version https://git-lfs.github.com/spec/v1", "is a pointer of Git LFS"),
        (json.dumps(WORDLEVEL).encode(), "WordLevel tokenizer, xtrain needs BPE"),
        (with_decoder(None), "its decoder (None) does not write the texts of tokens one after the"),
        (with_decoder({"type": "WordPiece", "prefix": "##", "cleanup": False}), "(WordPiece) does"),
        (with_decoder({"type": "BPEDecoder", "suffix": "</w>"}), "its decoder (BPEDecoder) does"),
        (with_decoder({"type": "CTC"} | CTC), "its decoder (CTC) does not write the texts"),
        *((huge_id(n), "xtrain supports ids below 4194304") for n in (5_000_000, 4_000_000_000)),
    ],
)
def test_bad_tokenizer(tmp_path, content, sentence):
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as error:
        Tokenizer.load(file)
    assert sentence in str(error.value) and str(file) in str(error.value)


def test_a_tokenizer_without_an_end_of_text_cannot_train(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(TOKENIZER._json().replace(b"<|endoftext|>", b"<end>"))
    tokenizer = Tokenizer.load(file)
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b" and tokenizer.eos_token_id is None
    (tmp_path / "text.txt").write_text("some text " * 1000)
    with pytest.raises(UserError, match=r"no token '<\|endoftext\|>' to end a document with"):
        prepare(str(tmp_path / "text.txt"), 300, tmp_path / "cache", tokenizer=str(file))


@given(st.data())
def test_damaged_tokenizer_never_escapes(tmp_path_factory, data):
    """A damaged file either loads or raises UserError."""
    raw = bytearray(TOKENIZER._json())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "tokenizer.json"
    file.write_bytes(raw)
    try:
        Tokenizer.load(file).encode(TEXTS[0])
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("model_type", [None, "llama", "qwen3"])
def test_transformers_agrees(tmp_path, model_type):
    transformers = pytest.importorskip("transformers")
    TOKENIZER.save(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}), "utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = f"def ça():\n\n\treturn '你好'  # {END_OF_TEXT} \n"
    assert theirs(text)["input_ids"] == TOKENIZER.encode(text)
    assert theirs.decode(TOKENIZER.encode(text)) == text
    assert theirs.eos_token_id == TOKENIZER.eot_id and len(theirs) == TOKENIZER.vocab_size


@pytest.mark.parametrize("newer", [False, True])
def test_names_in_an_older_folder_are_those_of_transformers(tmp_path, newer):
    """special_tokens_map.json overrides tokenizer_config.json, unless that has added_tokens_decoder."""
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer.from_str(TOKENIZER._json().decode())
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    config |= {"added_tokens_decoder": {}} if newer else {}
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}}  # fmt: skip
    for name, content in (("tokenizer_config", config), ("special_tokens_map", names)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content), "utf-8")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}", "utf-8")
    ours, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    messages = [{"role": "user", "content": "x"}]
    text = ChatTemplate.load(tmp_path).render(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", None])  # fmt: skip
@pytest.mark.parametrize("level", ["bytes", "sentencepiece"])
def test_add_prefix_space_means_what_it_means_in_transformers(tmp_path, kind, level):
    """It depends on the class: the general one ignores the key, the others make the space from it."""
    transformers = pytest.importorskip("transformers")
    config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # fmt: skip
    if level == "bytes":
        content = TOKENIZER.content()
        config = {"tokenizer_class": kind, "eos_token": END_OF_TEXT}
    else:
        content = sentencepiece_tokenizer()
    texts = ["def f", "größe x", ""]
    if level == "bytes":
        texts.append(" def")
    elif kind in ("GPT2TokenizerFast", "Qwen2Tokenizer"):
        return  # transformers makes a byte-level tokenizer of it
    for in_json in (False, True):
        if level == "bytes":
            content["pre_tokenizer"]["add_prefix_space"] = in_json
        elif not in_json:
            prepend = content["normalizer"]["normalizers"].pop(0)
        else:
            content["normalizer"]["normalizers"].insert(0, prepend)
        (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
        for value in ("absent", None, False, True):
            more = {} if value == "absent" else {"add_prefix_space": value}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | more), "utf-8")
            if kind == "GPT2TokenizerFast" and value is None:
                continue  # transformers refuses it
            if (
                kind == "LlamaTokenizer"
                and level != "bytes"
                and not (in_json or type(value) is bool)
            ):
                continue  # transformers then adds the space, which SentencePiece did not
            ours = Tokenizer.load(tmp_path)
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
            for text in texts:
                ids = theirs(text, add_special_tokens=False)["input_ids"]
                assert ours.encode(text) == ids, (in_json, value, text)
                assert ours.decode(ids) == theirs.decode(ids)
            ours.save(tmp_path / "again")
            assert Tokenizer.load(tmp_path / "again").encode("def f") == ours.encode("def f")


def test_tokens_that_only_the_config_adds_are_refused(tmp_path):
    """Else the text of such a token would silently become the tokens of its characters."""
    TOKENIZER.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    added = {"0": {"content": END_OF_TEXT}, "300": {"content": "<|im_end|>"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": added}))
    with pytest.raises(UserError, match=r"adds \(<\|im_end\|>\): write both files again"):
        Tokenizer.load(tmp_path)


def test_tokens_with_other_characters_in_a_byte_level_vocabulary(tmp_path):
    content = json.loads(TOKENIZER._json())
    i = TOKENIZER.vocab_size
    content["model"]["vocab"] |= {"中 文": i, "é中": i + 1}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert "".join(tokenizer.stream([i, i + 1])) == tokenizer.decode([i, i + 1]) == "中 文é中"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_killed_while_saving(tmp_path):
    """Over another tokenizer: each file is the old or the new one, whole, and they change in one order."""
    other = Tokenizer.train(TEXTS[:1], 280)
    other.companions["chat_template.jinja"] = b"old " * 5_000
    new = Tokenizer.train(TEXTS, 300)
    new.companions["chat_template.jinja"] = b"new " * 5_000
    contents = {}
    for name, tokenizer in (("old", other), ("new", new)):
        tokenizer.save(tmp_path / name)
        contents[name] = {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
    assert contents["old"].keys() == contents["new"].keys() and len(contents["new"]) == 3
    n, killing, replaced, folder = 0, True, [], tmp_path / "here"
    while killing:
        n += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "old", folder)
        with pytest.MonkeyPatch.context() as patch:
            killing = killed(
                lambda n=n: FailingDisk(patch, folder, n, KILL), lambda: new.save(folder)
            )
        found = {name: (folder / name).read_bytes() for name in contents["new"]}
        replaced.append(sum(x == contents["new"][name] for name, x in found.items()))
        assert all(x in (contents["old"][k], contents["new"][k]) for k, x in found.items()), n
        Tokenizer.load(folder)
        new.save(folder)  # and removes what the kill has left
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == contents["new"], n
    # tokenizer_config.json is the same in both
    assert n >= 10 and replaced == sorted(replaced) and {*replaced} == {1, 2, 3}


# ----------------------------------------------------------------------------- errors of the library
def backtracking():
    """A tokenizer whose regular expression gives up on a row of letters a: a panic in the library."""
    content = json.loads(TOKENIZER._json())
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, content["pre_tokenizer"]],
    }
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))


def test_a_panic_while_encoding_is_one_sentence():
    tokenizer, text = backtracking(), "a" * 60 + "!"
    assert tokenizer.encode("b") == TOKENIZER.encode("b")
    for call in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode_more(text),
        lambda: tokenizer.encode_batch(["b", text]),
    ):
        with pytest.raises(UserError, match=r"the tokenizer cannot encode .*retry-limit") as error:
            call()
        assert "\n" not in str(error.value)


class PanicException(BaseException):
    """As pyo3's, which cannot be constructed."""


@pytest.mark.parametrize(
    "error", [PanicException("lost\nat line 1"), Exception("lost"), PanicException()]
)
def test_errors_of_the_library_are_one_sentence(error):
    class Backend:
        def fail(self, *_, **__):
            raise error

        encode = encode_batch_fast = decode = fail

    tokenizer = Tokenizer.train(TEXTS, 300)
    tokenizer._backend = Backend()
    for call in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(
            UserError, match=r"cannot encode th.* \((lost|PanicException)\): give other text"
        ):
            call("x")
    with pytest.raises(UserError, match=r"cannot decode these tokens \((lost|PanicException)\)"):
        tokenizer.decode([1])


@pytest.mark.parametrize("error", [KeyboardInterrupt, TypeError, MemoryError])
def test_other_errors_stay(error):
    class Backend:
        def encode(self, *_, **__):
            raise error

    tokenizer = Tokenizer.train(TEXTS, 300)
    tokenizer._backend = Backend()
    with pytest.raises(error):
        tokenizer.encode("x")
