"""Fields of vLLM and OpenAI that change an answer or report about it: alone, in streams, with several answers and penalties."""

import json

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")

GREEDY = {"prompt": "def f", "temperature": 0, "max_tokens": 12, "repetition_penalty": 1.2}
HI = [{"role": "user", "content": "def f"}]


def post(served, path, **body):
    answer = httpx.post(served.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(served, **change):
    """-> the choices, which a stream has too"""
    body = GREEDY | change
    answer = post(served, "/v1/completions", **body)
    streamed = [{"text": "", "tokens": []} for _ in answer["choices"]]
    with httpx.stream(
        "POST", served.url + "/v1/completions", json=body | {"stream": True}
    ) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    one = streamed[choice["index"]]
                    one["text"] += choice["text"]
                    one["finish_reason"] = choice["finish_reason"]
                    one["tokens"] += (choice["logprobs"] or {}).get("tokens", [])
    for choice, other in zip(answer["choices"], streamed, strict=True):
        tokens = (choice["logprobs"] or {}).get("tokens", [])
        assert other == {
            "text": choice["text"], "finish_reason": choice["finish_reason"], "tokens": tokens
        }  # fmt: skip
    return answer["choices"], answer["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def greedy(served):
    """-> ids of the plain answer to GREEDY"""
    prompt = served.p.tokenizer.encode_prompt("def f")
    (ids,) = served.engine.generate([prompt], 12, repetition_penalty=1.2, stop=served.p.stop)
    assert len(ids) == 12 and len(set(ids)) > 6
    return ids


def test_stop_token_ids_end_an_answer_and_are_not_in_its_text(served, greedy):
    decode = served.p.tokenizer.decode
    end = greedy[6]
    place = greedy.index(end)
    (choice,), tokens = complete(served, stop_token_ids=[end], logprobs=0)
    assert choice["text"] == decode(greedy[:place]) and choice["finish_reason"] == "stop"
    assert tokens == place + 1 == len(choice["logprobs"]["tokens"])
    (choice,), _ = complete(served, stop_token_ids=[end], stop=["\0"])  # token by token
    assert choice["text"] == decode(greedy[:place])
    choices, _ = complete(served, stop_token_ids=[end], n=2)
    assert [choice["text"] for choice in choices] == [decode(greedy[:place])] * 2


def test_min_tokens_and_ignore_eos(served, greedy):
    (eos,) = served.p.stop
    at_once = {"logit_bias": {str(eos): 100}}
    (choice,), tokens = complete(served, **at_once)
    assert (choice["text"], choice["finish_reason"], tokens) == ("", "stop", 1)
    choices, tokens = complete(served, **at_once, min_tokens=5, n=2, seed=1, temperature=1)
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 2 and tokens == 12
    (choice,), tokens = complete(served, **at_once, ignore_eos=True)
    assert (choice["finish_reason"], tokens) == ("length", 12)
    body = {"ignore_eos": True, "stop_token_ids": [greedy[0]], "min_tokens": 9}
    (choice,), tokens = complete(served, **body, logprobs=0)
    assert tokens > 9 and choice["text"][:1] != served.p.tokenizer.decode(greedy[:1])


def test_a_stop_string_counts_after_the_minimum(served, greedy):
    text = served.p.tokenizer.decode(greedy)
    letter = text[0]
    (choice,), _ = complete(served, stop=[letter])
    assert choice["text"] == ""
    (choice,), tokens = complete(served, stop=[letter], min_tokens=1)
    rest = text.find(letter, 1)
    assert choice["text"] == (text if rest < 0 else text[:rest]) and tokens > 1


def test_allowed_token_ids(served, greedy):
    """Log-probabilities stay those of the model."""
    allowed = sorted(set(range(40, 60)))
    (choice,), _ = complete(served, allowed_token_ids=allowed, logprobs=0)
    prompt = served.p.tokenizer.encode_prompt("def f")
    options = dict(repetition_penalty=1.2, stop=served.p.stop, logprobs=0)
    (want,) = served.engine.generate([prompt], 12, allowed_token_ids=set(allowed), **options)
    assert set(want) <= set(allowed) and choice["text"] == served.p.tokenizer.decode(want)
    (scores,) = served.engine.logprobs([prompt], [want])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(scores.logprobs.tolist(), abs=1e-5)


# ----------------------------------------------------------------------------- prompts
def test_prompt_logprobs(served):
    tokenizer = served.p.tokenizer
    prompt = tokenizer.encode_prompt("def f(x):")
    (scores,) = served.engine.logprobs([prompt], top=3)

    def check(found):
        assert found[0] is None and len(found) == len(prompt)
        places = zip(prompt[1:], scores.logprobs.tolist(), scores.top, found[1:], strict=True)
        for token, logprob, top, place in places:
            assert next(iter(place)) == str(token)
            assert place[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-5)
            ranked = {entry["rank"]: name for name, entry in place.items() if entry["rank"]}
            assert [ranked[i] for i in (1, 2, 3)] == [str(t) for t, _ in top]
            assert place[str(token)]["decoded_token"] == tokenizer.decode([token])

    fields = {"max_tokens": 2, "prompt_logprobs": 3}
    body = fields | {"prompt": ["def f(x):", "x"], "n": 2, "echo": True, "logprobs": 1}
    choices = post(served, "/v1/completions", **body)["choices"]
    check(choices[1]["prompt_logprobs"])
    assert choices[2]["prompt_logprobs"] == [None]
    assert all(len(x) <= 2 for x in choices[0]["logprobs"]["top_logprobs"][1:])
    with served.client.completions.create(
        model="tiny", prompt="def f(x):", max_tokens=2, stream=True, extra_body=fields
    ) as stream:
        check(next(iter(stream)).choices[0].prompt_logprobs)
    chat = served.client.chat.completions.create
    prompt = tokenizer.encode("user: def f\n")
    (scores,) = served.engine.logprobs([prompt], top=3)
    check(chat(model="tiny", messages=HI, extra_body=fields).prompt_logprobs)
    with chat(model="tiny", messages=HI, stream=True, n=2, extra_body=fields) as stream:
        first, *others = stream
    check(first.prompt_logprobs)
    assert not any(hasattr(chunk, "prompt_logprobs") for chunk in others)


def test_cached_tokens(served):
    prompts = ["x + größe" * 20 + str(i) for i in range(2)]
    create = served.client.completions.create
    options = dict(model="tiny", max_tokens=1, seed=1)
    cached = lambda usage: usage.prompt_tokens_details.cached_tokens
    first = create(prompt=prompts[0], n=3, **options).usage
    assert cached(first) == 0  # although two of three answers have not computed the prompt
    again = create(prompt=prompts, **options).usage
    assert first.prompt_tokens - 64 <= cached(again) < again.prompt_tokens
    last = None
    usage = {"include_usage": True, "continuous_usage_stats": True}
    counts = []
    for chunk in create(
        prompt=prompts[0], **options | {"max_tokens": 5}, stream=True, stream_options=usage
    ):
        last = chunk.usage
        counts.append(last.completion_tokens)
    assert first.prompt_tokens - 64 <= cached(last) and counts == sorted(counts) and counts[-1] == 5
    scored = create(prompt=prompts[0], echo=True, logprobs=0, **options).usage
    assert cached(scored) == 0  # the log-probabilities of the prompt needed all of it


def test_values_of_the_chat_template(served):
    ask = lambda **values: post(
        served, "/v1/chat/completions", messages=HI, max_tokens=2, chat_template_kwargs=values
    )["usage"]["prompt_tokens"]
    assert ask(enable_thinking=False) > ask(enable_thinking=True) == ask()


# ----------------------------------------------------------------------------- the tokenizer
def test_tokenize_and_detokenize(served):
    tokenizer = served.p.tokenizer
    for text in ("def f(größe)", "x + " * 10_000):  # the second one in another process
        found = post(served, "/tokenize", model="tiny", prompt=text, return_token_strs=True)
        tokens = tokenizer.encode_prompt(text)
        assert found == {
            "count": len(tokens), "max_model_len": 256, "tokens": tokens,
            "token_strs": [tokenizer._backend.id_to_token(t) for t in tokens],
        }  # fmt: skip
        assert post(served, "/detokenize", tokens=tokens) == {"prompt": tokenizer.decode(tokens)}
    chat = {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}
    found = post(served, "/tokenize", **chat)
    assert tokenizer.decode(found["tokens"]) == "user: def f\nx + " and found["token_strs"] is None
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ):
        error = httpx.post(served.url + path, json=body)
        assert error.status_code in (400, 404) and error.json()["error"]["param"] == param


def test_bodies_of_benchmarks(served):
    """As vllm bench serve and guidellm send them."""
    common = {
        "model": "tiny",
        "prompt": "def f",
        "max_tokens": 6,
        "stream": True,
        "ignore_eos": True,
    }
    vllm = {"temperature": 0.0, "repetition_penalty": 1.0, "logprobs": None}
    usage = {"include_usage": True}
    for body in (
        common | vllm | {"stream_options": usage},
        common | {"stop": None, "stream_options": usage | {"continuous_usage_stats": True}},
    ):
        text = httpx.post(served.url + "/v1/completions", json=body).text
        *_, last, done, _ = text.split("\n\n")
        assert json.loads(last[6:])["usage"]["completion_tokens"] == 6 and done == "data: [DONE]"
    (card,) = httpx.get(served.url + "/v1/models").json()["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", "tiny", 256)
