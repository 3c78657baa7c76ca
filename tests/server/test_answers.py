"""Numbers and offsets of the server's answers, against arithmetic on a plain forward pass of the same model."""

import json

import numpy as np
import pytest

pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from served import Served  # noqa: E402
from serving import sentencepiece_tokenizer  # noqa: E402
from twins import random_model, small  # noqa: E402

from xtrain.server.answers import Offsets, token_name  # noqa: E402

PROMPTS = ["größe: 1 € = 日本", "def 🙂"]
NEW = dict(max_tokens=40, temperature=1.3, seed=5, logprobs=5)
HI = [{"role": "user", "content": "größe"}]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model with a tokenizer like that of Llama 2: <0x61> and a have the same text, <s> begins every text."""
    folder = tmp_path_factory.mktemp("llama")
    content = sentencepiece_tokenizer()
    config = small(vocab_size=len(content["model"]["vocab"]), max_seq_len=256, head_dim=16)
    random_model(config, 5, device="cpu").save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    served = Served(folder)
    yield served
    served.close()


def completions(served, **options):
    return served.client.completions.create(model="tiny", **options)


def merged(events, n):
    """-> the choices of a stream put together, and its usage"""
    choices, usage = [{"text": "", "finish_reason": None} for _ in range(n)], None
    for event in events:
        usage = event.usage or usage
        for part in event.choices:
            choice = choices[part.index]
            choice["text"] += part.text
            choice["finish_reason"] = part.finish_reason or choice["finish_reason"]
            if part.logprobs:
                lists = choice.setdefault("logprobs", {})
                for name, values in part.logprobs.to_dict().items():
                    lists.setdefault(name, []).extend(values)
    return choices, usage


def log_probabilities(served, ids):
    """-> row i: log-probabilities of the token after ids[i]"""
    logits = np.asarray(served.p.model(np.array([ids])).data, np.float64).reshape(len(ids), -1)
    logits = logits[:, : served.p.model.config.vocab_size]
    top = logits.max(1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))


def parts_of(served, ids, special=False):
    """-> the bytes that each token adds to a text"""
    tokenizer = served.p.tokenizer
    hidden = () if special else tokenizer.special_ids
    return [b"" if i in hidden else tokenizer.token_bytes[i] for i in ids]


def starts_of(parts):
    """-> for each part, the index of the character of its first byte; by strict decoding, so that it is not the library's way"""
    data, character = b"".join(parts), []
    while len(character) < len(data):
        rest = data[len(character) :]
        try:
            good, bad = rest.decode(), 0
        except UnicodeDecodeError as error:
            good, bad = rest[: error.start].decode(), error.end - error.start
        for c in good:
            character += [character[-1] + 1 if character else 0] * len(c.encode())
        character += [character[-1] + 1 if character else 0] * bad
    sizes = np.cumsum([0, *map(len, parts)])
    length = len(data.decode("utf-8", "replace"))
    return [character[i] if part else character[i - 1] + 1 if i else 0 for part, i in zip(parts, sizes)], length  # fmt: skip


def check_lists(served, lists, context, ids, top, text, start=0, special=False):
    """Check the lists of /v1/completions for the tokens `ids` after `context`.  start: of their text in `text`"""
    rows = log_probabilities(served, [*context, *ids])[len(context) - 1 : -1]
    names = [token_name(served.p.tokenizer, i) for i in ids]
    assert lists["tokens"] == names
    chosen = [row[i] for row, i in zip(rows, ids)]
    assert np.allclose(lists["token_logprobs"], chosen, atol=1e-4)
    for row, i, name, shown in zip(rows, ids, names, lists["top_logprobs"]):
        most = sorted(row, reverse=True)[:top]
        want = most if row[i] >= most[-1] else [*most, row[i]]
        assert np.allclose(list(shown.values()), want, atol=1e-4)  # in order, none is missing
        assert shown[name] == pytest.approx(row[i], abs=1e-4)
    starts, _ = starts_of(parts_of(served, ids, special))
    assert lists["text_offset"] == [start + x for x in starts]
    for name, offset, i in zip(names, lists["text_offset"], ids):
        hidden = i in served.p.tokenizer.special_ids
        if offset < len(text) and not hidden and not name.startswith("bytes:"):
            rest = text[offset:]
            assert rest.startswith(name) or name.startswith(rest)  # the last one may be cut


# ----------------------------------------------------------------------------- completions
def test_completions_of_several_prompts_and_samples(served):
    """Random bytes: characters over several tokens, bytes that are no characters, end tokens."""
    options = dict(prompt=PROMPTS, n=2, **NEW)
    whole = completions(served, **options)
    prompts = [served.p.tokenizer.encode_prompt(text) for text in PROMPTS]
    answers = served.engine.generate(prompts, 40, 1.3, seed=5, n=2, stop=served.p.stop)
    for i, (choice, ids) in enumerate(zip(whole.choices, answers)):
        assert choice.index == i and choice.finish_reason == ids.reason
        text = b"".join(parts_of(served, ids)).decode("utf-8", "replace")
        assert choice.text == text
        check_lists(served, choice.logprobs.to_dict(), prompts[i // 2], ids, 5, text)
    assert any(name.startswith("bytes:") for c in whole.choices for name in c.logprobs.tokens)
    usage = whole.usage
    assert usage.prompt_tokens == sum(map(len, prompts))
    assert usage.completion_tokens == sum(map(len, answers))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    events = completions(served, **options, stream=True, stream_options={"include_usage": True})
    streamed, counted = merged(events, 4)
    assert counted == usage.model_copy(
        update={"prompt_tokens_details": counted.prompt_tokens_details}
    )
    for found, choice in zip(streamed, whole.choices):
        want = choice.to_dict()
        assert {**found, "index": want["index"]} == want


def test_offsets_of_random_bytes():
    rng = np.random.default_rng(0)
    alphabet = [*"aé€🙂".encode(), 0xFF, 0xE2, 0x80]
    for _ in range(300):
        parts = [bytes(rng.choice(alphabet, rng.integers(1, 4)).tolist()) for _ in range(8)]
        parts.append(b"")  # a control token, such as the end token
        offsets = Offsets()
        starts, length = starts_of(parts)
        assert [offsets.next(part) for part in parts] == starts and starts[-1] == length


def test_what_a_stop_string_cuts_off(served):
    """The tokens stay in the lists, and in the usage; their offsets point behind the text."""
    options = dict(prompt=PROMPTS[0], **NEW)
    (free,) = completions(served, **options).choices
    prompt = served.p.tokenizer.encode_prompt(PROMPTS[0])
    (ids,) = served.engine.generate([prompt], 40, 1.3, seed=5, stop=served.p.stop)
    for first, last in ((4, 6), (9, 10), (13, 17)):
        stop = free.text[first:last]
        cut = free.text.index(stop)
        texts = [b"".join(parts_of(served, ids[:k])).decode("utf-8", "ignore") for k in range(41)]
        answer = completions(served, **options, stop=["never", stop])
        (choice,) = answer.choices
        assert choice.text == free.text[:cut] and choice.finish_reason == "stop"
        used = answer.usage.completion_tokens
        assert used == len(choice.logprobs.tokens) <= len(ids)
        assert stop in free.text[: starts_of(parts_of(served, ids[:used]))[1]]
        assert not any(stop in text for text in texts[:used])
        check_lists(served, choice.logprobs.to_dict(), prompt, ids[:used], 5, choice.text)
        events = completions(served, **options, stop=[stop], stream=True)
        (streamed,), _ = merged(events, 1)
        assert {**streamed, "index": 0} == choice.to_dict()


def test_a_stop_string_that_an_unfinished_character_completes(served):
    """At the limit of tokens its bytes become U+FFFD, which is the stop string."""
    options = dict(prompt="def", temperature=0, logit_bias={}, max_tokens=1)
    euro = served.p.tokenizer.token_bytes.index("€".encode()[:1])
    options |= {"logit_bias": {str(euro): 100}}
    (choice,) = completions(served, **options).choices
    assert (choice.text, choice.finish_reason) == ("�", "length")
    (choice,) = completions(served, **options, stop=["�"]).choices
    assert (choice.text, choice.finish_reason) == ("", "stop")


def test_equal_texts_of_different_tokens(llama):
    tokenizer = llama.p.tokenizer
    texts = [token_name(tokenizer, i) for i in range(tokenizer.vocab_size)]
    assert len({*texts}) < len(texts) - 10  # <0x61> and a
    (choice,) = completions(llama, prompt="def f", **NEW | {"logprobs": 20}).choices
    prompt = tokenizer.encode_prompt("def f")
    (ids,) = llama.engine.generate([prompt], 40, 1.3, seed=5, stop=llama.p.stop)
    lists = choice.logprobs.to_dict()
    check_lists(llama, lists, prompt, ids, 20, choice.text)
    named = [name for top in lists["top_logprobs"] for name in top if name.startswith("token_id:")]
    rows = log_probabilities(llama, [*prompt, *ids])[len(prompt) - 1 :]
    assert named
    for row, top in zip(rows, lists["top_logprobs"]):
        for name, value in top.items():
            if name.startswith("token_id:"):
                assert value == pytest.approx(row[int(name.removeprefix("token_id:"))], abs=1e-4)


# ----------------------------------------------------------------------------- echo
@pytest.mark.parametrize("name", ["served", "llama"])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_is_what_lm_eval_reads(request, name, stream):
    """Its `local-completions` sums token_logprobs[context:-1] of one new token, and compares with the largest of each."""
    served = request.getfixturevalue(name)
    texts = ["def f", "x größe(x):"]
    options = dict(prompt=texts, echo=True, max_tokens=1, logprobs=2, temperature=0)
    if stream:
        choices, _ = merged(completions(served, **options, stream=True), 2)
    else:
        answer = completions(served, **options)
        assert answer.usage.completion_tokens == 2
        choices = [choice.to_dict() for choice in answer.choices]
    for text, choice in zip(texts, choices):
        prompt = served.p.tokenizer.encode_prompt(text)
        ((new,),) = served.engine.generate([prompt], 1)
        added = b"".join(parts_of(served, [new])).decode("utf-8", "replace")
        assert choice["text"] == text + added
        lists = choice["logprobs"]
        assert {len(values) for values in lists.values()} == {len(prompt) + 1}
        rows = log_probabilities(served, prompt)
        assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
        want = [rows[i - 1, prompt[i]] for i in range(1, len(prompt))]
        assert np.allclose(lists["token_logprobs"][1:-1], want, atol=1e-4)
        greedy = [rows[i - 1].argmax() == prompt[i] for i in range(1, len(prompt))]
        found = zip(lists["token_logprobs"][1:-1], lists["top_logprobs"][1:-1])
        assert [x == max(top.values()) for x, top in found] == greedy
        # without <s> and the space in front of the text
        decoded = b"".join(parts_of(served, prompt, special=True)).decode()
        shift = len(decoded) - len(text)
        starts, _ = starts_of(parts_of(served, prompt, special=True))
        assert lists["text_offset"][:-1] == [max(0, x - shift) for x in starts]
        assert lists["text_offset"][-1] == len(text)


def test_echo_without_log_probabilities_and_of_one_token(served):
    options = dict(prompt=[5], max_tokens=2, temperature=0)
    (plain,) = completions(served, **options, logprobs=0).choices
    assert len(plain.logprobs.top_logprobs[0]) == 1
    (echo,) = completions(served, **options, echo=True).choices
    assert echo.text == served.p.tokenizer.token_bytes[5].decode() + plain.text
    assert echo.logprobs is None
    (both,) = completions(served, **options, echo=True, logprobs=0).choices
    assert both.logprobs.token_logprobs == [None, *plain.logprobs.token_logprobs]
    assert both.text == echo.text


def test_a_stop_string_in_an_echoed_prompt_ends_nothing(served):
    options = dict(prompt="x stop def", max_tokens=3, temperature=0, echo=True, logprobs=0)
    (free,) = completions(served, **options).choices
    (choice,) = completions(served, **options, stop=["stop"]).choices
    assert choice == free and choice.text.startswith("x stop def")


def test_special_tokens_around_a_text(llama):
    with_begin = completions(llama, prompt="def f", max_tokens=4, temperature=0)
    without = completions(
        llama, prompt="def f", max_tokens=4, temperature=0, extra_body={"add_special_tokens": False}
    )
    assert with_begin.usage.prompt_tokens == without.usage.prompt_tokens + 1
    ids = llama.p.tokenizer.encode("def f")
    plain = completions(llama, prompt=ids, max_tokens=4, temperature=0)
    assert without.choices[0].text == plain.choices[0].text != with_begin.choices[0].text


# ----------------------------------------------------------------------------- chat
def test_a_chat_in_numbers(served):
    options = dict(model="tiny", messages=HI, n=2, logprobs=True, top_logprobs=4)
    options |= dict(max_tokens=40, temperature=1.3, seed=5)
    create = served.client.chat.completions.create
    whole = create(**options)
    prompt = served.p.tokenizer.encode(served.p.template.render(HI))
    answers = served.engine.generate([prompt], 40, 1.3, seed=5, n=2, stop=served.p.chat_stop)
    assert whole.usage.prompt_tokens == len(prompt)
    assert whole.usage.completion_tokens == sum(map(len, answers))
    for choice, ids in zip(whole.choices, answers):
        assert choice.finish_reason == ids.reason
        rows = log_probabilities(served, [*prompt, *ids])[len(prompt) - 1 : -1]
        entries = choice.logprobs.content
        assert np.allclose([x.logprob for x in entries], [r[i] for r, i in zip(rows, ids)], atol=1e-4)  # fmt: skip
        data = b"".join(bytes(x.bytes or []) for x in entries)
        assert data.decode("utf-8", "replace") == choice.message.content
        for entry, row, i in zip(entries, rows, ids):
            assert entry.token == token_name(served.p.tokenizer, i)
            assert (entry.bytes is None) == (i in served.p.tokenizer.special_ids)
            shown = [x.logprob for x in entry.top_logprobs]
            assert np.allclose(shown, sorted(row, reverse=True)[:4], atol=1e-4)
    streamed = [{"text": "", "entries": [], "reason": None} for _ in range(2)]
    usages = []
    events = create(**options, stream=True, stream_options={"include_usage": True})
    for event in events:
        usages.append(event.to_dict().get("usage", "no field"))
        for part in event.choices:
            found = streamed[part.index]
            found["text"] += part.delta.content or ""
            found["entries"] += part.logprobs.content if part.logprobs else []
            found["reason"] = part.finish_reason or found["reason"]
    for found, choice in zip(streamed, whole.choices):
        assert found["text"] == choice.message.content
        assert found["entries"] == choice.logprobs.content
        assert found["reason"] == choice.finish_reason
    assert usages.pop() == whole.usage.to_dict() and {*usages} == {None}
