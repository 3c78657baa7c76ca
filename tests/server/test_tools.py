"""Tools: calls in the forms of Qwen, Llama and Mistral, whole and streamed, with arguments that are valid by their schema."""

import json
import random

import numpy as np
import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("llguidance")

import jsonschema  # noqa: E402
import pydantic  # noqa: E402
import tokenizers  # noqa: E402
from served import Served, make_folder  # noqa: E402
from serving import tokenizer_folder  # noqa: E402
from twins import random_model, small  # noqa: E402

from xtrain import Engine, UserError  # noqa: E402
from xtrain.data.tokenizer import Tokenizer  # noqa: E402
from xtrain.server.grammars import Grammars, Guide  # noqa: E402
from xtrain.server.reasoning import Reading  # noqa: E402
from xtrain.server.tool_answers import ToolStream, _merged  # noqa: E402
from xtrain.server.tools import Chosen, Tool, ToolUse, use_of  # noqa: E402
from xtrain.serving.text_stream import TextStream  # noqa: E402
from xtrain.serving.tool_calls import FORMS, form_of, read_calls  # noqa: E402

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"enum": [1, 7]}},
        "required": ["city"], "additionalProperties": False}  # fmt: skip
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Say", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": EMPTY, "strict": True}},
]
SCHEMAS = {"weather": CITY, "now": EMPTY}
EXAMPLES = {
    "hermes": 'Hi\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"<tool_call>", "b": [{}]}}\n</tool_call>\n'
              '<tool_call>\n{"name":"g","arguments":{}}\n</tool_call>',
    "llama": '{"name": "f", "parameters": {"a": "x}\\"<tool_call>", "b": [{}]}}; {"name": "g", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "x}\\"<tool_call>", "b": [{}]}},'
               ' {"name": "g", "arguments": {}, "id": "123456789"}]',
    "mistral_args": '[TOOL_CALLS]f[ARGS]{"a": "x}\\"<tool_call>", "b": [{}]}[TOOL_CALLS]g[ARGS]{}',
}  # fmt: skip


# ----------------------------------------------------------------------------- from text to calls
def read(text, use, rng):
    """-> (content, calls without their ids) of a text that arrives in pieces"""
    stream = ToolStream(use)
    content, deltas = "", []
    while text:
        n = rng.randint(1, 9)
        piece, text = text[:n], text[n:]
        new = stream.feed(piece, not text)
        content += new[0]
        deltas += new[1]
    calls = _merged(deltas)
    assert all(call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls) == stream.calls
    return content, [tuple(call["function"].values()) for call in calls]


@pytest.mark.parametrize("form", FORMS)
def test_calls_in_pieces(form):
    for seed in range(20):
        content, calls = read(EXAMPLES[form], ToolUse(form), random.Random(seed))
        assert calls == [("f", '{"a": "x}\\"<tool_call>", "b": [{}]}'), ("g", "{}")]
        assert content == ("Hi\n" if form == "hermes" else "")


@pytest.mark.parametrize("form", FORMS)
def test_calls_of_a_whole_text(form):
    content, calls = read_calls(EXAMPLES[form], form)
    assert content == ("Hi\n" if form == "hermes" else "")
    functions = [
        {"name": "f", "arguments": {"a": 'x}"<tool_call>', "b": [{}]}},
        {"name": "g", "arguments": {}},
    ]
    assert [call["function"] for call in calls] == functions
    assert [len(call["id"]) for call in calls] == [9, 9]
    for text in ("a", '{"name": 7', EXAMPLES[form][:30]):
        assert read_calls(text, form) == (text, [])


@pytest.mark.parametrize("form, text", [
    ("hermes", "a <tool_call> b"), ("hermes", "<tool_cal"), ("hermes", "<tool_call>" + "x" * 2000), ("hermes", "a < b"),
    ("llama", '{"a": 1}'), ("llama", " hello {"), ("llama", '{"name": 7' + " " * 2000), ("mistral", "[TOOL_CALLS] none"),
])  # fmt: skip
def test_a_text_that_is_no_call_is_content(form, text):
    for seed in range(5):
        assert read(text, ToolUse(form), random.Random(seed)) == (text, [])


def test_a_call_that_is_cut_off():
    calls = [("f", '{"a": "x')]
    for form, text in EXAMPLES.items():
        cut = text[: text.index('{"a": "x') + 8]
        assert read(cut, ToolUse(form), random.Random(0))[1] == calls


# ----------------------------------------------------------------------------- grammars
def tokenizer_of(tmp_path, special):
    """A tokenizer whose marks are tokens, special ones if wanted."""
    names = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]
    added = [tokenizers.AddedToken(name, special=special, normalized=False) for name in names]
    added.append(tokenizers.AddedToken("<think>", special=True))
    return Tokenizer.load(tokenizer_folder(tmp_path / "folder", added=added))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_required_and_named_calls_are_valid(tmp_path, form, special):
    tokenizer = tokenizer_of(tmp_path, special)
    eos = tokenizer.eos_token_id
    config = small(vocab_size=tokenizer.vocab_size, max_seq_len=1024, head_dim=16)
    engine = Engine(random_model(config), 8, 1024)
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    named = Chosen.model_validate({"type": "function", "function": {"name": "weather"}})
    found = set()
    for choice, one in (("required", False), ("required", True), (named, False)):
        use, guide = use_of(tools, choice, one, form, tokenizer, [eos])
        grammar = Grammars(tokenizer, [eos]).compiled(guide)
        answers = engine.generate(
            [[5]], 900, 1.5, stop=[eos], grammar=grammar, n=4, logit_bias={eos: 9}
        )
        for answer in answers:
            assert answer.reason == "stop"
            content, calls = read(text_of(answer, use, tokenizer), use, random.Random(0))
            assert not content and (len(calls) == 1 if one or use.forced else calls)
            for name, arguments in calls:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
                found.add((use.forced, name))
    assert {name for forced, name in found if forced} == {"weather"} and len(found) > 1


def text_of(answer, use, tokenizer):
    """The text that the server makes of tokens."""
    stream = TextStream(Reading(tools=use).showing_marks(tokenizer))
    return stream.feed(*answer) + stream.finish()


def allowed(constraint, tokenizer):
    row = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    constraint.masks_into([(constraint, row)])
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", [name for name in FORMS if name != "llama"])
def test_auto_holds_from_the_beginning_of_a_call(tmp_path, form, special):
    """Before it everything is allowed, and an end; then only a call of one of the functions."""
    tokenizer = tokenizer_of(tmp_path, special)
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    use, guide = use_of(tools, "auto", True, form, tokenizer, [tokenizer.eos_token_id])
    constraint = Grammars(tokenizer, [tokenizer.eos_token_id]).compiled(guide).start()
    for token in tokenizer.encode('x<think> {"name": [1] < '):
        assert token in allowed(constraint, tokenizer)
        constraint.accept(token)
    free = allowed(constraint, tokenizer)
    texts = {t for t, data in enumerate(tokenizer.token_bytes) if data.isascii()}
    assert free >= texts - tokenizer.added_ids and tokenizer.eos_token_id in free
    answer = [tokenizer.encode(FORMS[form].trigger)[0]]
    constraint.accept(answer[0])
    while constraint.ended is None:
        some = allowed(constraint, tokenizer)
        if tokenizer.eos_token_id in some:
            break
        answer.append(random.Random(len(answer)).choice(sorted(some)))
        constraint.accept(answer[-1])
    text = text_of(answer, use, tokenizer)
    content, ((name, arguments),) = read(text, use, random.Random(0))
    assert not content
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_auto_with_a_document(tmp_path, form, special):
    """Nothing but the document or calls; a mark inside the document is text."""
    tokenizer = tokenizer_of(tmp_path, special)
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    document = Guide.of_choice(['{"a": "[TOOL_CALLS]now[ARGS]{}"}', "yes"])
    eos = tokenizer.eos_token_id
    use, guide = use_of(tools, "auto", True, form, tokenizer, [eos], document)
    grammars = Grammars(tokenizer, [eos])
    calls = FORMS[form].open + FORMS[form].before.replace("NAME", "now")
    for text in ("yes", '{"a": "', calls):
        constraint = grammars.compiled(guide).start()
        for token in tokenizer.encode(text):
            assert token in allowed(constraint, tokenizer)
            constraint.accept(token)
    constraint = grammars.compiled(guide).start()
    assert tokenizer.encode("x")[0] not in allowed(constraint, tokenizer)
    for text in ('{"a": "[TOOL_CALLS]now[ARGS]{}"}', "yes", " ", "<tool"):
        for seed in range(5):
            assert read(text, use, random.Random(seed)) == (text, [])
    assert read(EXAMPLES[form].removeprefix("Hi"), use, random.Random(0))[1]


def test_llama_without_a_call_is_free(tmp_path):
    use, guide = use_of(
        [Tool.model_validate(TOOLS[0])], "auto", False, "llama", tokenizer_of(tmp_path, True), []
    )
    assert guide is None and use == ToolUse("llama")


def test_the_form_of_a_template():
    for form, template in {
        "hermes": "{% if tools %}<tool_call>", "mistral": "[TOOL_CALLS] [", "mistral_args": "[TOOL_CALLS]f[ARGS]",
        "llama": 'ipython {"name": function name, "parameters": dictionary}',
    }.items():  # fmt: skip
        assert form_of(template) == form
    for template in ("{{ messages }}", "<tool_call><function=f>"):
        with pytest.raises(UserError, match="shows no tools, or calls in a form"):
            form_of(template)


# ----------------------------------------------------------------------------- over HTTP
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% if m.role == 'tool' %} ({{ m.tool_call_id }}){% endif %}\n{% endfor %}"
)
HI = [{"role": "user", "content": "def f"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("model"), TEMPLATE, max_seq_len=2048)
    served = Served(folder, max_seq_len=2048)
    yield served
    served.close()


def ask(served, **options):
    defaults = {"model": "tiny", "messages": HI, "tools": TOOLS, "max_tokens": 900, "seed": 3}
    return served.client.chat.completions.create(**defaults | options)


END = {"0": 20}  # the tokenizer's end of text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_calls_whole_and_streamed(served, choice):
    options = dict(tool_choice=choice, logit_bias=END, n=2)
    streamed = {0: [], 1: []}
    reasons = {}
    for chunk in ask(served, stream=True, **options):
        for part in chunk.choices:
            reasons[part.index] = part.finish_reason or reasons.get(part.index)
            assert not part.delta.content
            for delta in part.delta.tool_calls or []:
                calls = streamed[part.index]
                if delta.id:
                    assert delta.index == len(calls) and delta.type == "function"
                    calls.append([delta.function.name, ""])
                calls[delta.index][1] += delta.function.arguments
    for part in ask(served, **options).choices:
        message = part.message
        assert message.content is None
        calls = [[call.function.name, call.function.arguments] for call in message.tool_calls]
        assert calls == streamed[part.index]
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        assert part.finish_reason == reasons[part.index]
        assert part.finish_reason == ("tool_calls" if choice == "required" else "stop")
        if choice != "required":
            assert [name for name, _ in calls] == ["now"]


def test_one_call(served):
    answer = ask(served, tool_choice="required", parallel_tool_calls=False, n=4).choices
    assert [len(choice.message.tool_calls) for choice in answer] == [1] * 4


SHORT = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}  # fmt: skip


def test_a_document_or_calls(served):
    """With response_format an answer of `auto` is one of the two, whole and streamed."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SHORT}}
    answers = ask(served, response_format=form, n=6, logit_bias=END).choices
    documents = [choice.message for choice in answers if not choice.message.tool_calls]
    for message in documents:
        jsonschema.validate(json.loads(message.content), SHORT)
    assert 0 < len(documents) < 6
    for choice in answers:
        for call in choice.message.tool_calls or []:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
            assert choice.message.content is None and choice.finish_reason == "tool_calls"
    texts = [""] * 6
    for chunk in ask(served, response_format=form, n=6, logit_bias=END, stream=True):
        for part in chunk.choices:
            texts[part.index] += part.delta.content or ""
    assert texts == [choice.message.content or "" for choice in answers]
    forced = ask(served, response_format=form, tool_choice="required", logit_bias=END).choices[0]
    assert forced.message.tool_calls and forced.message.content is None


def test_a_conversation_with_calls(served, monkeypatch):
    """The template reads tools, calls with their arguments as an object, and results."""
    texts = []
    template = served.p.template
    render = type(template)._render
    monkeypatch.setattr(
        type(template), "_render", lambda *args: texts.append(render(*args)) or texts[-1]
    )
    message = ask(served, tool_choice="required", parallel_tool_calls=False).choices[0].message
    (call,) = message.tool_calls
    results = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "42"}]}
    talk = [*HI, message.model_dump(), results]
    answer = ask(served, messages=talk, tool_choice="auto", max_tokens=5).choices[0]
    assert answer.message.content and not answer.message.tool_calls
    text = texts[-1]["text"]
    arguments = json.dumps(json.loads(call.function.arguments))
    assert f'"name": "{call.function.name}", "arguments": {arguments}' in text
    assert f"tool: 42 ({call.id})" in text and '"description": "Say"' in text
    ask(served, messages=talk, tool_choice="none", max_tokens=5)
    assert "description" not in texts[-1]["text"]
    plain = ask(served, tool_choice="none", max_tokens=9).choices[0].message.content
    without = served.client.chat.completions.create(model="tiny", messages=HI, max_tokens=9, seed=3)
    assert plain == without.choices[0].message.content


class Weather(pydantic.BaseModel):
    """Say the weather"""

    city: str = pydantic.Field(max_length=3)


def test_parse_returns_arguments(served):
    tool = openai.pydantic_function_tool(Weather)
    answer = served.client.chat.completions.parse(
        model="tiny", messages=HI, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


def function(**fields):
    return {"type": "function", "function": {"name": "f"} | fields}


@pytest.mark.parametrize("fields, says", [
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [function(name="a b")]}, "tools.0.function.name"),
    ({"tools": [function(), function()]}, "two tools have the same name"),
    ({"tools": [function(parameters={"not": {}}, strict=True)]}, "Unimplemented keys"),
    ({"tools": [function(parameters={"type": "nothing"})]}, "Invalid type"),
    ({"tools": [function()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "none of the tools"),
    ({"tools": [function()], "tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tools is missing: tool_choice needs some"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id belongs to a message of role tool"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [
        {"id": "a", "function": {"name": "f", "arguments": "{}"}}]}]}, "messages.0.tool_calls belong"),
    ({"messages": [{"role": "assistant"}]}, "messages.0.content is missing"),
])  # fmt: skip
def test_a_bad_request_is_a_sentence(served, fields, says):
    body = {"messages": HI, "max_tokens": 2} | fields
    answer = httpx.post(served.url + "/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and says in error["message"], error
    assert "\n" not in error["message"] and error["param"]


def test_keywords_that_grammars_do_not_know(served):
    """Without `strict` the rest of the schema holds."""
    schema = {"type": "object", "properties": {"a": {"const": 5, "not": {}}}, "required": ["a"], "additionalProperties": False}  # fmt: skip
    answer = ask(
        served,
        tools=[function(parameters=schema)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"a": 5}
