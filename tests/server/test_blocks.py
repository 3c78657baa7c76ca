"""Reasoning, and the same answer in the shapes of OpenAI's two APIs and Anthropic's: whole, streamed, with OpenAI's client."""

import dataclasses
import json
import random
from types import SimpleNamespace

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("llguidance")

from pydantic import ValidationError  # noqa: E402
from served import TEMPLATE, Served, make_folder  # noqa: E402
from serving import TOKENIZER  # noqa: E402
from test_tools import EXAMPLES, TOOLS, allowed, tokenizer_of  # noqa: E402

from xtrain.server.api import ChatRequest, Error  # noqa: E402
from xtrain.server.block_answers import Messages, Responses  # noqa: E402
from xtrain.server.engine_client import Job, Piece  # noqa: E402
from xtrain.server.grammars import Grammars, Guide  # noqa: E402
from xtrain.server.messages import CountRequest, MessagesRequest  # noqa: E402
from xtrain.server.reasoning import Reading, Reasoning, ReasoningStream  # noqa: E402
from xtrain.server.responses import ResponsesRequest  # noqa: E402
from xtrain.server.tool_answers import ParsedChat  # noqa: E402
from xtrain.server.tools import ToolUse  # noqa: E402

THINK = Reasoning("<think>", "</think>", False)
BEGUN = dataclasses.replace(THINK, begun=True)
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
CUSTOM = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]


def pieces_of(text, rng):
    """-> parts of a text"""
    while text:
        n = rng.randint(1, 7)
        yield text[:n]
        text = text[n:]


# ----------------------------------------------------------------------------- reasoning
@pytest.mark.parametrize("marks, text, thought, content", [
    (THINK, "<think>\n\na <b </think \n</think>\n\nx</think> ", "a <b </think", "x</think> "),
    (THINK, " \n<think></think>x", "", "x"),
    (THINK, " <thin x", "", " <thin x"),
    (THINK, "<think> a </thi", "a </thi", ""),
    (THINK, "<th", "", "<th"),
    (THINK, "\nx<think>y</think>", "", "\nx<think>y</think>"),
    (BEGUN, "\na\n</think>\nx", "a", "x"),
    (BEGUN, "a\n", "a", ""),
    (BEGUN, "</think>", "", ""),
])  # fmt: skip
def test_reasoning_in_pieces(marks, text, thought, content):
    for seed in range(20):
        stream = ReasoningStream(marks)
        found = ["", ""]
        parts = [*pieces_of(text, random.Random(seed)), ""]
        for i, part in enumerate(parts):
            new = stream.feed(part, i == len(parts) - 1)
            found = [a + b for a, b in zip(found, new)]
        assert found == [thought, content], seed


def test_the_marks_of_a_template():
    assert Reasoning.of("{{ x }}", "<think>") is None
    assert Reasoning.of("x.split('</think>')", "assistant\n") == THINK
    assert Reasoning.of("x.split('</think>')", "assistant\n<think>\n") == BEGUN
    assert Reasoning.of("[/THINK]", "") == Reasoning("[THINK]", "[/THINK]", False)


@pytest.mark.parametrize("special", [False, True])
def test_a_document_follows_reasoning_that_has_begun(tmp_path, special):
    tokenizer = tokenizer_of(tmp_path, special)
    eos = tokenizer.eos_token_id
    marks = Reasoning("<tool_call>", "</tool_call>", True)  # tokens that it has
    guide = marks.before(Guide.of_regex("ab"), tokenizer)
    constraint = Grammars(tokenizer, [eos]).compiled(guide).start()
    for token in tokenizer.encode("x {</tool_cal b</tool_call>\n"):
        assert token in allowed(constraint, tokenizer) and eos not in allowed(constraint, tokenizer)
        constraint.accept(token)
    assert tokenizer.encode("x")[0] not in allowed(constraint, tokenizer)
    for token in tokenizer.encode("ab"):
        constraint.accept(token)
    assert constraint.ended == "stop" or allowed(constraint, tokenizer) == {eos}


# ----------------------------------------------------------------------------- shapes
def answer(kind, asked, text, finish="stop", marks=BEGUN, seed=0, stop=()):
    """-> (whole answer, events) of a text, or its pieces, that the model has written, and the tokens of a stop string"""
    reading = Reading(marks, ToolUse("hermes"))

    def form():
        body = asked.chat()
        new = kind(SimpleNamespace(tokenizer=TOKENIZER), "tiny", body, "7", reading, asked)
        new.first_job = Job([], TOKENIZER)
        new.n_prompt = 5
        return new

    parts = text
    if isinstance(text, str):
        parts = [*pieces_of(text, random.Random(seed)), ""]
    pieces = [Piece(0, x, TOKENIZER.encode(x)) for x in parts]
    pieces[-1].tokens += TOKENIZER.encode("".join(stop))
    pieces[-1].reason = finish
    one = form()
    events = [*one.begin(1), *[e for piece in pieces for e in one.next(piece)], *one.end()]
    return form().whole(pieces, 1), events


TEXT = "\nHm.\n</think>\n\n" + EXAMPLES["hermes"]
ARGUMENTS = {"a": 'x}"<tool_call>', "b": [{}]}
ASKED = ResponsesRequest.model_validate({"input": "x", "tools": FLAT, "instructions": "Rhyme"})
ASKED_MESSAGES = MessagesRequest.model_validate(
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stop_sequences": ["no", "ß"]}
)


def test_responses():
    for seed in range(9):
        whole, events = answer(Responses, ASKED, TEXT, seed=seed)
        thought, text, first, second = whole["output"]
        assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "Hm.")
        assert text["content"] == [
            {"type": "output_text", "text": "Hi\n", "annotations": [], "logprobs": []}
        ]
        assert (first["type"], first["name"]) == ("function_call", "f")
        assert json.loads(first["arguments"]) == ARGUMENTS and second["arguments"] == "{}"
        assert whole["status"] == "completed" and whole["instructions"] == "Rhyme"
        assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"]  # fmt: skip
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created"
        last = events[-1]
        assert last["type"] == "response.completed"
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        for item, same, other in zip(
            done, last["response"]["output"], whole["output"], strict=True
        ):
            for one in (item, same, other):
                one.pop("call_id", None)  # random
            assert item == same == other
        texts = {}
        for event in events:
            if event["type"].endswith(".delta"):
                i = event["output_index"]
                texts[i] = texts.get(i, "") + event["delta"]
        assert texts == {0: "Hm.", 1: "Hi\n", 2: first["arguments"], 3: "{}"}


def test_messages():
    for seed in range(9):
        whole, events = answer(Messages, ASKED_MESSAGES, TEXT, seed=seed)
        thought, text, first, second = whole["content"]
        assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
        assert text == {"type": "text", "text": "Hi\n"}
        assert first["input"] == ARGUMENTS and second["input"] == {}
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
        blocks = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
        assert blocks == ["thinking", "text", "tool_use", "tool_use"]
        assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2, 3]
        assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
        assert events[-2]["usage"] == whole["usage"]


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": '


def test_the_end_of_a_call_and_a_text_in_one_piece():
    """The engine's news of several steps are one piece."""
    parts = ["x</think>" + CALL, '"b"}}\n</tool_call>\nDone']
    for kind, asked in ((Responses, ASKED), (Messages, ASKED_MESSAGES)):
        whole, events = answer(kind, asked, parts)
        call, text = whole["output" if kind is Responses else "content"][-2:]
        assert call.get("input") or json.loads(call["arguments"]) == {"a": "b"}
        assert text.get("text") or text["content"][0]["text"] == "\nDone"
        deltas = [e["delta"] for e in events if e["type"].endswith("delta") and "index" in str(e)]
        assert str(deltas[-2:]).count("Done") == 1 and "Done" in str(deltas[-1])


def test_a_call_that_is_deeper_than_python_reads():
    whole, _ = answer(Messages, ASKED_MESSAGES, ["x</think>" + CALL + "[" * 5000], "length")
    assert (whole["content"][-1]["input"], whole["stop_reason"]) == ({}, "max_tokens")


@pytest.mark.parametrize("text, finish, stop, reason", [
    ("x</think>a", "stop", "", ("end_turn", None)), ("x</think>a", "stop", "ß!", ("stop_sequence", "ß")),
    ("x</think>a", "length", "", ("max_tokens", None)), ("x", "length", "", ("max_tokens", None)),
    ("x</think> ", "stop", "", ("end_turn", None)),
])  # fmt: skip
def test_how_an_answer_ends(text, finish, stop, reason):
    whole, events = answer(Messages, ASKED_MESSAGES, text, finish, stop=stop)
    assert (whole["stop_reason"], whole["stop_sequence"]) == reason
    assert (events[-2]["delta"]["stop_reason"], events[-2]["delta"]["stop_sequence"]) == reason
    whole, events = answer(Responses, ASKED, text, finish)
    assert whole["status"] == ("incomplete" if finish == "length" else "completed")
    assert events[-1]["type"] == f"response.{whole['status']}"


def test_an_empty_answer_has_a_text():
    whole, _ = answer(Responses, ASKED, "", marks=None)
    assert whole["output"][0]["content"][0]["text"] == ""
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    assert answer(Messages, ASKED_MESSAGES, "", marks=None)[0]["content"][0]["type"] == "text"


def test_chat():
    def form():
        texts = SimpleNamespace(tokenizer=TOKENIZER)
        new = ParsedChat(texts, "tiny", ASKED.chat(), "7", Reading(BEGUN))
        new.first_job = Job([], TOKENIZER)
        return new

    message = form().whole([Piece(0, "Hm.</think>Hi", [5], [], "stop")], 1)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hi")
    stream = form()
    parts = [Piece(0, text) for text in ("Hm", ".</thi", "nk>", "Hi")]
    deltas = [e["choices"][0]["delta"] for part in parts for e in stream.next(part)]
    assert deltas == [{"reasoning_content": "Hm"}, {"reasoning_content": "."}, {"content": "Hi"}]


# ----------------------------------------------------------------------------- bodies
def test_a_conversation_in_three_shapes():
    """The same messages for the chat template."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "system", "content": "Rhyme"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": "z"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "y", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"role": "user", "content": "z"},
    ]  # fmt: skip
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "y"},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}]},
            {"type": "text", "text": "z", "cache_control": {"type": "ephemeral"}}]},
    ]  # fmt: skip
    bodies = [
        ChatRequest.model_validate({"messages": chat}),
        ResponsesRequest.model_validate({"input": items, "instructions": "Rhyme"}).chat(),
        CountRequest.model_validate({"messages": turns, "system": "Rhyme"}).chat(),
    ]
    first, *others = [[message.plain() for message in body.messages] for body in bodies]
    assert others == [first, first]


def test_options_in_three_shapes():
    schema = {"type": "object", "properties": {"a": {"const": None}}}
    body = {"input": "x", "max_output_tokens": 5, "temperature": 0.5, "stream": True, "tools": FLAT,
            "tool_choice": {"type": "function", "name": "now"}, "parallel_tool_calls": False,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}}  # fmt: skip
    first = ResponsesRequest.model_validate(body).chat()
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "temperature": 0.5, "stream": True,
            "tools": CUSTOM, "tool_choice": {"type": "tool", "name": "now", "disable_parallel_tool_use": True},
            "output_config": {"format": {"type": "json_schema", "schema": schema}}}  # fmt: skip
    second = MessagesRequest.model_validate(body).chat()
    for chat in (first, second):
        assert (chat.max_completion_tokens or chat.max_tokens, chat.temperature, chat.stream) == (5, 0.5, True)  # fmt: skip
        assert chat.tool_choice.function.name == "now" and chat.parallel_tool_calls is False
        assert [tool.function.parameters for tool in chat.tools] == [
            tool["function"]["parameters"] for tool in TOOLS
        ]
        assert chat.guide() == Guide.of_schema(schema)
    for given, wanted in (("any", "required"), ("auto", "auto"), ("none", "none")):
        body["tool_choice"] = {"type": given}
        assert MessagesRequest.model_validate(body).chat().tool_choice == wanted
    body["thinking"] = {"type": "disabled"}
    chat = MessagesRequest.model_validate(body).chat()
    assert chat.chat_template_kwargs == {"enable_thinking": False}


# ----------------------------------------------------------------------------- over HTTP
@pytest.fixture(scope="module")
def served(tmp_path_factory):
    template = TEMPLATE + "{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"
    served = Served(make_folder(tmp_path_factory.mktemp("model"), template), "secret")
    yield served
    served.close()


def post(served, path, body, headers=None):
    return httpx.post(served.url + path, json=body, headers=headers or {"X-Api-Key": "secret"})


def test_the_answers_are_those_of_chat(served):
    options = {"model": "tiny", "temperature": 0.9, "seed": 3}
    talk = [{"role": "user", "content": "def f"}]
    chat = served.client.chat.completions.create(messages=talk, max_tokens=9, **options)
    text = chat.choices[0].message.content
    create = served.client.responses.create
    extra = {"extra_body": {"seed": 3}}
    same = {"model": "tiny", "temperature": 0.9, "max_output_tokens": 9, "input": "def f"}
    found = create(**same, **extra)
    assert found.output_text == text and found.status == "incomplete"
    assert found.usage.total_tokens == chat.usage.total_tokens
    events = list(create(**same, **extra, stream=True))
    assert events[-1].response.output_text == text
    assert events[-1].response.usage.input_tokens == chat.usage.prompt_tokens
    body = {"messages": talk, "max_tokens": 9, **options}
    (block,) = post(served, "/v1/messages", body).json()["content"]
    assert block == {"type": "text", "text": text}
    lines = post(served, "/v1/messages", body | {"stream": True}).text.split("\n\n")[:-1]
    names, data = zip(*(line.split("\n") for line in lines))
    events = [json.loads(x.removeprefix("data: ")) for x in data]
    assert [name.removeprefix("event: ") for name in names] == [e["type"] for e in events]
    assert (
        "".join(e["delta"].get("text", "") for e in events if "index" in e and "delta" in e) == text
    )
    count = post(served, "/v1/messages/count_tokens", {"messages": talk, "model": "tiny"}).json()
    assert count == {"input_tokens": chat.usage.prompt_tokens} and served.idle


def test_reasoning_that_the_prompt_begins(served):
    """The grammar of a document follows it; without a document the answer is reasoning until its mark."""
    preparation = served.server.config.app.state.server.preparers.preparation
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    form = {"response_format": {"type": "json_object"}}
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    for change, marks in (({}, THINK), (thinking, BEGUN)):
        prepared = preparation(ChatRequest, json.dumps(body | form | change).encode())
        assert prepared.reading.reasoning == marks
        assert ("thought" in prepared.requests[0].grammar.text) == marks.begun
    message = post(served, "/v1/chat/completions", body | thinking | {"seed": 1}, {"Authorization": "Bearer secret"})  # fmt: skip
    message = message.json()["choices"][0]["message"]
    assert message["reasoning_content"] and message["content"] == ""


@pytest.mark.parametrize("path, change, says", [
    ("/v1/responses", {"previous_response_id": "x"}, "previous_response_id is not supported"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
    ("/v1/responses", {"input": []}, "input"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0"),
    ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools.0"),
    ("/v1/responses", {"input": "x" * 3000}, "leaves no room"),
    ("/v1/messages", {"max_tokens": None}, "max_tokens"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content"),
    ("/v1/messages", {"messages": [{"role": "assistant", "content": "x"}]}, "the last one is the assistant's"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking"),
    ("/v1/messages", {"tool_choice": {"type": "any"}}, "tool_choice needs some"),
])  # fmt: skip
def test_a_bad_request_is_a_sentence(served, path, change, says):
    body = {"input": "x"} if "responses" in path else {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 2
    }  # fmt: skip
    found = post(served, path, body | change)
    error = found.json()["error"]
    assert found.status_code == 400 and says in error["message"], error
    assert "\n" not in error["message"] and error["type"] == "invalid_request_error"
    assert found.json().get("type") == ("error" if "messages" in path else None)


def test_errors_of_messages(served):
    found = post(served, "/v1/messages", {}, {"X-Api-Key": "other"})
    assert found.status_code == 401 and found.json()["error"]["type"] == "authentication_error"
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "model": "other"}
    found = post(served, "/v1/messages", body)
    assert found.status_code == 404 and found.json()["error"]["type"] == "not_found_error"
    assert post(served, "/v1/messages", body, {"Authorization": "Bearer secret"}).status_code == 404


def test_a_stream_that_fails():
    error = Error(message="gone", code="timeout", type="timeout_error")
    form = Responses(
        SimpleNamespace(tokenizer=TOKENIZER), "tiny", ASKED.chat(), "7", Reading(), ASKED
    )
    failed = form.failed(error)
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "timeout", "message": "gone"}
    form = Messages(
        SimpleNamespace(tokenizer=TOKENIZER), "tiny", ASKED.chat(), "7", Reading(), ASKED
    )
    assert form.failed(error)["error"] == {"type": "api_error", "message": "gone"}


def test_reasoning_belongs_to_the_assistant():
    with pytest.raises(ValidationError, match="belongs to a message of the assistant"):
        ChatRequest.model_validate(
            {"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}
        )
