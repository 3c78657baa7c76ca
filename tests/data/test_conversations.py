"""The reader of conversations: forms of records, what is trained, prompts, and what is refused."""

import json
from pathlib import Path

import pytest
import tokenizers

from xtrain.data.chat_template import ChatTemplate
from xtrain.data.conversations import Conversation
from xtrain.data.records import Record
from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError

USER = {"role": "user", "content": "q1"}
ANSWER = {"role": "assistant", "content": "a1"}
CALL = {"type": "function", "function": {"name": "mul", "arguments": '{"a": 1}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "7"}
TOOLS = [{"type": "function", "function": {"name": "mul", "parameters": {}}}]
THINK = {"role": "assistant", "content": "<think>r1</think>a1"}
TALK = [USER, ANSWER, {"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"}]
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# As Qwen3: reasoning of earlier answers is removed, and that of the last one is always there, except on request.
FORGETS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last and '<think>' not in m.content %}<think></think>{% endif %}
{{- m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
# As DeepSeek-R1: the prompt begins reasoning that answers do not show, a tool's result ends with the answer, and a
# message with calls has no content.
BEGINS = """{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'tool' %}<|out|>{{ m.content }}
{%- elif m.content is none %}<|assistant|>{{ 'call ' + m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}<|end|>
{%- else %}{{ '<|/out|>' if messages[loop.index0 - 1].role == 'tool' else '<|assistant|>' }}{{ m.content.split('</think>')[-1] }}<|end|>
{%- endif %}{% endfor %}{% if messages[-1].role == 'tool' %}<|/out|>{% elif add_generation_prompt %}<|assistant|><think>
{% endif %}"""
# As Phi-3: the end of the text comes after the last message, unless an answer follows.
ENDS = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% else %}<|im_end|>{% endif %}"""
# As Llama 3: what begins the text is part of the first message. And the prompt is part of the loop, as in Zephyr.
LOOP = """{% for m in messages %}{{ '<|out|>' if loop.first }}<|{{ m.role }}|>{{ m.content }}<|end|>
{%- if loop.last and add_generation_prompt %}<|assistant|>{% endif %}{% endfor %}"""
# As Llama 3.1 with tools: the first message is written before the loop.
BEFORE = """<|user|>{{ messages[0].content }}<|end|>{% for m in messages[1:] %}<|{{ m.role }}|>{{ m.content }}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
# As Mistral: no generation prompt, and the text may end with a token that an answer ends with, too.
BARE = """{% for m in messages %}{{ '<|user|>' if m.role == 'user' }}{{ m.content }}{{ '<|end|>' if m.role == 'assistant' }}
{%- endfor %}<|end|>"""


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer.train(["a"], 257)._backend
    names = ["im_start", "im_end", "user", "assistant", "end", "out", "/out"]
    tokens = [f"<|{name}|>" for name in names] + ["<think>", "</think>"]
    backend.add_special_tokens([tokenizers.AddedToken(x, special=True) for x in tokens])
    return Tokenizer(backend)


def conversation(messages, **fields):
    return Conversation.of(Record(Path("x"), 1, {"messages": messages, **fields}))


def trained(tokenizer, source, messages, train="all", values=None, **fields):
    """Return the runs of trained text, of each part."""
    template = ChatTemplate(source, {}, values)
    found = []
    for part in conversation(messages, **fields).parts(train):
        ids, is_trained = part.tokens(tokenizer, template)
        assert tokenizer.decode(ids) == template.render(part.messages, False, part.tools)
        runs = [""]
        for token, ours in zip(ids, is_trained):
            if ours:
                runs[-1] += tokenizer.decode([token])
            elif runs[-1]:
                runs.append("")
        found.append([run for run in runs if run])
    return found


@pytest.mark.parametrize(
    "source, messages, expected",
    [
        (CHATML, TALK, ["a1<|im_end|>", "a2<|im_end|>"]),
        (CHATML, TALK[1:], ["a1<|im_end|>", "a2<|im_end|>"]),
        (CHATML, [USER, CALLS, RESULT, ANSWER], ['mul{"a": 1}<|im_end|>', "a1<|im_end|>"]),
        (FORGETS, TALK, ["a1<|im_end|>", "<think></think>a2<|im_end|>"]),
        (FORGETS, [USER, THINK, USER, THINK], ["a1<|im_end|>", "<think>r1</think>a1<|im_end|>"]),
        (BEGINS, TALK, ["a1<|end|>", "a2<|end|>"]),
        (BEGINS, TALK[1:], ["a1<|end|>", "a2<|end|>"]),
        (BEGINS, [USER, CALLS, RESULT, ANSWER], ['call mul{"a": 1}<|end|>', "a1<|end|>"]),
        (ENDS, TALK, ["a1<|end|>", "a2<|end|>\n<|im_end|>"]),
        (ENDS, TALK[:3], ["a1<|end|>"]),
        (LOOP, TALK, ["a1<|end|>", "a2<|end|>"]),
        (LOOP, TALK[1:], ["a1<|end|>", "a2<|end|>"]),
        (BEFORE, TALK, ["a1<|end|>", "a2<|end|>"]),
        (BARE, TALK, ["a1<|end|>", "a2<|end|><|end|>"]),
        (BARE, TALK[1:], ["a1<|end|>", "a2<|end|><|end|>"]),
    ],
)
def test_what_follows_the_generation_prompt_is_trained(tokenizer, source, messages, expected):
    assert trained(tokenizer, source, messages) == [expected]


def test_which_answers_are_trained(tokenizer):
    talk = [USER, THINK, USER, THINK]
    one = "<think>r1</think>a1<|im_end|>"
    assert trained(tokenizer, FORGETS, talk, "each") == [[one], [one]]
    assert trained(tokenizer, FORGETS, talk, "last") == [[one]]
    weighted = [TALK[0], TALK[1] | {"weight": 0}, *TALK[2:]]
    for train in ("all", "last", "each"):
        assert trained(tokenizer, CHATML, weighted, train) == [["a2<|im_end|>"]]
    weighted = [*TALK[:3], TALK[3] | {"weight": 0}]
    for train in ("all", "last", "each"):
        assert trained(tokenizer, CHATML, weighted, train) == [["a1<|im_end|>"]]


def test_values_of_the_template(tokenizer):
    """Of a record, or of all; what the prompt has then is not trained."""
    off = {"enable_thinking": False}
    for values, more in ((off, {}), (None, {"chat_template_kwargs": json.dumps(off)})):
        assert trained(tokenizer, FORGETS, TALK[:2], values=values, **more) == [["a1<|im_end|>"]]
    with pytest.raises(
        UserError, match=r"x line 1: .* 'enable_thinking'.*does not read this value"
    ):
        trained(tokenizer, CHATML, TALK, chat_template_kwargs=off)


@pytest.mark.parametrize(
    "record, expected",
    [
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
         [("system", "s"), ("user", "q"), ("assistant", "a")]),
        ({"instruction": "q", "input": "", "output": "a"}, [("user", "q"), ("assistant", "a")]),
        ({"instruction": "q", "input": " ", "output": "a"}, [("user", "q"), ("assistant", "a")]),
        ({"instruction": "q", "input": "i", "output": "a"}, [("user", "q\n\ni"), ("assistant", "a")]),
        ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
         [("user", "q1"), ("assistant", "a1"), ("user", "q1"), ("assistant", "a1")]),
        ({"prompt": [USER]}, [("user", "q1")]),
        ({"messages": [{"role": "human", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]},
                       {"role": "developer", "content": "d"}]}, [("user", "qr"), ("system", "d")]),
        ({"prompt": "q", "completion": "a"}, None),
        ({"text": "q"}, None),
        ({"prompt": "q", "instruction": None, "output": "a", "messages": None}, None),
    ],
)  # fmt: skip
def test_forms_of_records(record, expected):
    found = Conversation.of(Record(Path("x"), 1, record))
    if expected is None:
        assert found is None
    else:
        assert [(m["role"], m["content"]) for m in found.messages] == expected
        assert set(found.trained) <= {len(expected) - 1}, "nothing of the prompt"


def test_fields_that_only_other_rows_of_a_table_have():
    """A column of structs has all fields of all rows, null where a row lacks one. In JSON null is a value."""
    table = pytest.importorskip("pyarrow").Table
    tool = lambda name, key: {"function": {"name": name, "parameters": {key: {"type": "string"}}}}
    call = lambda name, key: {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {key: "1"}}}]}  # fmt: skip
    rows = [{"messages": [USER, call(f, key)], "tools": [tool(f, key)]} for f, key in ("fa", "gb")]
    for row, stored in zip(rows, table.from_pylist(rows).to_pylist()):
        assert stored != row
        found = Conversation.of(Record(Path("x"), 1, stored, "row"))
        assert (found.messages, found.tools) == (row["messages"], row["tools"])
        as_json = Conversation.of(Record(Path("x"), 1, stored))
        assert None in as_json.messages[1]["tool_calls"][0]["function"]["arguments"].values()


@pytest.mark.parametrize("function", [{"name": "mul"}, {"name": "mul", "arguments": None}])
def test_a_call_without_arguments(tokenizer, function):
    call = {"role": "assistant", "tool_calls": [{"function": function}]}
    assert trained(tokenizer, CHATML, [USER, call]) == [["mul{}<|im_end|>"]]


def test_prompts(tokenizer):
    """Answers at the end are left out; tools may be JSON, as tables have them."""
    template = ChatTemplate("{{ tools[0].function.name }}|" + CHATML, {})
    for tools in (TOOLS, json.dumps(TOOLS)):
        for messages in (TALK[:1], TALK[:2], [{"role": "human", "content": "q1"}]):
            ids = conversation(messages, tools=tools).prompt(tokenizer, template)
            want = "mul|<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.decode(ids) == want


@pytest.mark.parametrize(
    "messages, fields, words",
    [
        (TALK, {"tools": 7}, '"tools" must be a list of functions, or its JSON'),
        (TALK, {"tools": "["}, '"tools" must be a list of functions, or its JSON'),
        (TALK, {"chat_template_kwargs": []}, '"chat_template_kwargs" must be an object'),
        ([{"role": "assistant", "tool_calls": [7]}], {}, '"tool_calls" of message 1 must be a list'),
        ([{"role": "assistant", "tool_calls": {"name": "f"}}], {}, '"tool_calls" of message 1 must be'),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "message 1 has a part of the type 'image_url'"),
        ([{"role": "user", "content": [{"type": "image", "text": "x"}]}], {}, "has a part of the type 'image', but only"),
        ([{"role": "user", "content": ["q"]}], {}, "must be a string, not list"),
        ([ANSWER], {}, "has only messages of the assistant"),
        ([{"role": None, "content": "q"}], {}, 'message 1 needs "role" and "content"'),
        ([{"role": "user", "content": "q", "weight": "0"}], {}, "message 1 has the weight '0': give 0,"),
    ],
)  # fmt: skip
def test_what_is_refused(tokenizer, messages, fields, words):
    with pytest.raises(UserError, match=f"^x line 1:? .*{words}"):
        conversation(messages, **fields).prompt(tokenizer, ChatTemplate(CHATML, {}))


def test_a_template_that_renders_nothing(tokenizer):
    with pytest.raises(UserError, match=r"^x line 1: the chat template renders nothing"):
        conversation(TALK).prompt(tokenizer, ChatTemplate("{# messages #}", {}))
