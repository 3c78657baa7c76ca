"""Fields of a request: what is not known is refused by name, what changes nothing is accepted."""

import json

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")

from pydantic import ValidationError  # noqa: E402

from xtrain.server import api  # noqa: E402
from xtrain.server.prepare import _invalid  # noqa: E402

HI = [{"role": "user", "content": "def f"}]
BODIES = {api.ChatRequest: {"messages": HI}, api.CompletionRequest: {"prompt": "def f"}}
# of OpenAI, vLLM, llama.cpp, SGLang, text-generation-inference: each with a value that asks for something
UNKNOWN = {
    "reasoning_effort": "low", "verbosity": "low", "audio": {"voice": "x"}, "prediction": {"type": "content"},
    "web_search_options": {}, "moderation": {"model": "x"}, "modalities": ["text", "audio"], "best_of": 2, "suffix": "x",
    "truncate_prompt_tokens": 5, "regex": "a",
    "chat_template": "x", "bad_words": ["x"], "skip_special_tokens": False,
    "include_stop_str_in_output": True, "logits_processors": ["x"], "length_penalty": 0.5, "use_beam_search": True,
    "repeat_penalty": 1.1, "grammar": "root ::= a", "n_predict": 5, "mirostat": 2, "typical_p": 0.5, "samplers": ["top_k"],
    "dry_multiplier": 0.8, "min_new_tokens": 1, "no_repeat_ngram_size": 3, "lora_path": "x", "cache_salt": "x",
    "max_new_tokens": 5, "do_sample": True, "options": {"num_ctx": 4096}, "num_ctx": 4096, "Temperature": 0,
}  # fmt: skip
SAME = {
    "user": "me", "safety_identifier": "x", "metadata": {"a": "b"}, "store": True, "service_tier": "flex",
    "parallel_tool_calls": False, "prompt_cache_key": "x", "prompt_cache_retention": "24h", "tools": [], "tool_choice": "none",
    "response_format": {"type": "text"}, "modalities": ["text"], "best_of": 1, "suffix": "", "chat_template_kwargs": {},
    "ignore_eos": False, "min_tokens": 0, "stop_token_ids": [], "repeat_penalty": 1.0, "skip_special_tokens": True,
    "anything": None,
}  # fmt: skip


def refusal(kind, body):
    """-> OpenAI's error object for a body"""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(body))
    error = _invalid(caught.value).error
    assert error.message.count("\n") == 0 and "Value error" not in error.message
    return error


@pytest.mark.parametrize("kind", BODIES)
def test_every_unknown_field_is_refused_by_name(kind):
    for name, value in UNKNOWN.items():
        error = refusal(kind, BODIES[kind] | {name: value})
        assert error.param == name
        assert error.message == f"{name} is not supported: leave it out"


@pytest.mark.parametrize("kind", BODIES)
def test_fields_that_change_nothing(kind):
    body = kind.model_validate(BODIES[kind] | SAME)
    assert body.options() == kind.model_validate(BODIES[kind]).options() == {}


def test_what_only_one_of_the_routes_has():
    chat, text = BODIES
    for name, value in {"echo": True, "add_special_tokens": True, "prompt": "x"}.items():
        assert refusal(chat, BODIES[chat] | {name: value}).param == name
    chat_only = {"max_completion_tokens": 5, "top_logprobs": 2, "chat_template_kwargs": {"x": 1}}
    for name, value in ({"messages": HI} | chat_only).items():
        assert refusal(text, BODIES[text] | {name: value}).param == name
    chat.model_validate(BODIES[chat] | {"echo": False, "add_special_tokens": False})


NESTED = [
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream_options": {}}, "stream_options"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"messages": [HI[0] | {"name": "Ann"}]}, "messages.0.name"),
    ({"messages": [HI[0], {"role": "assistant", "content": "x", "tool_calls": [{"id": "a"}]}]}, "messages.1.tool_calls.0.function"),
    ({"messages": [HI[0] | {"reasoning_content": "x"}]}, "messages.0.reasoning_content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]}, "messages.0.content.0.cache_control"),
]  # fmt: skip


@pytest.mark.parametrize("change, param", NESTED)
def test_nested_objects(change, param):
    error = refusal(api.ChatRequest, {"messages": HI} | change)
    assert error.param == param and error.message.startswith(param)


RANGES = {
    "temperature": [-1, 2.1, "hot"], "top_p": [0, 1.5], "top_k": [-2, 0.5], "min_p": [-0.1, 2], "seed": [-1, 2**63],
    "n": [0, 129], "presence_penalty": [-3], "frequency_penalty": [3], "repetition_penalty": [0, -1], "stop": ["", ["x"] * 17],
    "min_tokens": [-1, 0.5], "ignore_eos": ["yes"], "stop_token_ids": [1, ["a"], [1] * 129], "allowed_token_ids": [[], ["a"]],
    "prompt_logprobs": [-1, 21], "max_tokens": [0], "logit_bias": ["x", {"a": 1}, {str(i): 1 for i in range(301)}], "stream": ["maybe"],
}  # fmt: skip


@pytest.mark.parametrize("kind", BODIES)
def test_ranges_name_the_field(kind):
    for name, values in RANGES.items():
        for value in values:
            param = refusal(kind, BODIES[kind] | {name: value}).param
            assert param.split(".")[0] == name, (name, value)


@pytest.mark.parametrize("kind", BODIES)
def test_true_is_no_number_and_a_number_is_no_text(kind):
    for name in ("max_tokens", "temperature", "top_k", "n", "seed", "repetition_penalty"):
        assert refusal(kind, BODIES[kind] | {name: True}).param == name
        assert refusal(kind, BODIES[kind] | {name: "1"}).param == name
    assert refusal(kind, BODIES[kind] | {"stream": 1}).param == "stream"
    assert refusal(kind, BODIES[kind] | {"stop": 1}).param == "stop"
    kind.model_validate_json(json.dumps(BODIES[kind] | {"temperature": 1, "logit_bias": {"5": 1}}))


def test_the_error_is_about_the_item_that_is_wrong():
    for prompt, where in [
        ([1, 2, "a"], "prompt.2"),
        ([[1], [2, "a"]], "prompt.1.1"),
        ({}, "prompt"),
    ]:
        assert refusal(api.CompletionRequest, {"prompt": prompt}).param == where


def test_tools_are_named_before_what_belongs_to_them():
    tools = {"tool_choice": {"type": "function"}, "tools": [{"type": "function"}]}  # as instructor
    assert refusal(api.CompletionRequest, {"prompt": "x"} | tools).param == "tools"
    choice = {"tool_choice": {"type": "function", "function": {"name": "f"}}}
    assert refusal(api.ChatRequest, {"messages": HI} | choice).param == "tools"


# ----------------------------------------------------------------------------- with OpenAI's client
def test_the_client_sees_the_field(served):
    """Also for limits that depend on the model."""
    chat, text = served.client.chat.completions.create, served.client.completions.create
    wrong = [
        (chat, {"extra_body": {"grammar": "x"}}, "grammar"),
        (chat, {"reasoning_effort": "low"}, "reasoning_effort"),
        (chat, {"extra_body": {"min_tokens": 3}}, "min_tokens"),  # max_tokens is 2
        (chat, {"extra_body": {"stop_token_ids": [99999]}}, "stop_token_ids"),
        (chat, {"extra_body": {"chat_template_kwargs": {"unread": 1}}}, "chat_template_kwargs"),
        (text, {"extra_body": {"allowed_token_ids": [99999]}}, "allowed_token_ids"),
        (text, {"prompt": ["x" * 99] * 200, "extra_body": {"prompt_logprobs": 20}}, "prompt"),
        (chat, {"logit_bias": {"99999": 1}}, "logit_bias"),
        (chat, {"logit_bias": {"5": 1000}}, "logit_bias"),
        (chat, {"temperature": 1e-9}, "temperature"),
        (chat, {"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
        (text, {"prompt": "x" * 2000}, "prompt"),
        (text, {"prompt": [99999]}, "prompt"),
        (text, {"prompt": []}, "prompt"),
    ]
    for create, change, param in wrong:
        body = {"prompt": "def f"} if create is text else {"messages": HI}
        with pytest.raises(openai.BadRequestError) as caught:
            create(**{"model": "tiny", "max_tokens": 2} | body | change)
        assert caught.value.param == param, caught.value


def test_a_conversation_of_the_client_s_own_objects(served):
    """An answer goes back into `messages` as the client has it, with its empty fields."""
    options = dict(model="tiny", max_tokens=3, seed=1, user="me", metadata={"a": "b"}, store=False)
    create = served.client.chat.completions.create
    answer = create(messages=HI, **options).choices[0].message
    plain = {"role": "assistant", "content": answer.content}
    texts = [
        create(messages=[*HI, message, HI[0]], **options).choices[0].message.content
        for message in (answer, answer.model_dump(), answer.to_dict(), plain)
    ]
    assert texts == texts[:1] * 4
