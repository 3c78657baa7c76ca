"""Perplexity in windows: against the loop of transformers' guide, and against the definition."""

import json
import math

import pytest
import tokenizers
import torch
from evaluating import evaluate, results, theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import TOKENIZER, sentencepiece_tokenizer

from xtrain.data.tokenizer import Tokenizer
from xtrain.evaluation.perplexity import byte_windows, windows

TEXT = "def f(x):\n    return x + größe  # 日本語\n" * 9


def guide(folder, text, max_length, stride):
    """The loop of transformers' "Perplexity of fixed-length models". -> (sum of its windows' losses with the guide's number of
    tokens, the same with the number of tokens that each loss is the mean of)"""
    model, tokenizer = theirs(folder)
    input_ids_all = tokenizer(text, return_tensors="pt").input_ids
    seq_len = input_ids_all.size(1)
    sums, counts, prev_end_loc = [0.0, 0.0], [0, 0], 0
    for begin_loc in range(0, seq_len, stride):
        end_loc = min(begin_loc + max_length, seq_len)
        trg_len = end_loc - prev_end_loc
        input_ids = input_ids_all[:, begin_loc:end_loc]
        target_ids = input_ids.clone()
        target_ids[:, :-trg_len] = -100
        with torch.no_grad():
            loss = float(model(input_ids, labels=target_ids).loss)
        by_guide = int((target_ids != -100).sum()) - 1
        for i, n in enumerate((by_guide, int((target_ids[:, 1:] != -100).sum()))):
            sums[i] += loss * n if n else 0.0
            counts[i] += n
        prev_end_loc = end_loc
        if end_loc == seq_len:
            break
    return [math.exp(s / n) for s, n in zip(sums, counts)], counts


def test_the_guide_of_transformers(folder, tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    for context, stride in ((64, 64), (64, 17), (30, 1), (64, None)):
        more = ["--context", context] + ([] if stride is None else ["--stride", stride])
        (found,) = results(capsys, tmp_path, folder, file, *more)
        (by_guide, exact), counts = guide(folder, TEXT, context, stride or context // 2)
        metric = found["metrics"]["perplexity"]
        assert metric["value"] == pytest.approx(exact, rel=1e-5) and found["n"] == counts[1]
        if stride == context:  # the guide's number of tokens is then the right one
            assert metric["value"] == pytest.approx(by_guide, rel=1e-5)
        assert 0 < metric["stderr"] < metric["value"]
        bits = found["n"] * math.log2(exact)
        covered = sum(item["bytes"] for item in found["items"])
        assert found["metrics"]["bits_per_byte"]["value"] == pytest.approx(bits / covered, rel=1e-5)
        first = len(TOKENIZER.token_bytes[TOKENIZER.encode(TEXT)[0]])
        assert stride == context or covered == len(TEXT.encode()) - first


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_each_token_counts_once(n, context, data):
    stride = data.draw(st.integers(1, context))
    ids, seen = list(range(n)), []
    for w in windows(ids, context, stride):
        whole = w.context + w.continuation
        assert w.context and len(whole) <= context
        assert whole == ids[whole[0] : whole[0] + len(whole)] and whole[0] % stride == 0
        seen += w.continuation
    starts = range(0, max(1, n), stride) if stride == context else [0]
    assert seen == [i for i in ids if i not in starts]


def test_bytes_of_a_tokenizer_that_adds_a_space():
    content = sentencepiece_tokenizer()
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), "</s>")
    text = "def f größe"
    ids = tokenizer.encode_text(text)
    assert tokenizer.special_ids & set(ids)
    found = byte_windows(text, ids, tokenizer, 4, 2)
    assert sum(w.n_bytes for w in found) == len(text.encode())  # <s> is what is not scored


def test_texts_that_cannot_be_scored(folder, tmp_path, capsys):
    def refused(content, *more):
        file = tmp_path / "text.txt"
        file.write_bytes(content)
        code, out, err = evaluate(capsys, folder, file, *more)
        assert code == 2 and out == "" and err.count("\n") == 1
        return err

    assert "text.txt has no text" in refused(b" \n")
    assert "text.txt has 1 token" in refused(b"x")
    assert "text.txt is not UTF-8 (byte 1)" in refused(b"x\xff")
    assert "--stride must be from 1 to the context, 64" in refused(b"abc", "--stride", "65")
    assert "--context must be from 2 to 64" in refused(b"abc", "--context", "65")
