"""The fields of messages that a template sees are those that transformers shows it."""

import pytest

from xtrain import UserError
from xtrain.data.chat_template import ChatTemplate
from xtrain.data.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

SOURCE = """{% for m in messages %}
{{ m.role }}: {{ m.content }}, {{ 'content' in m }}, {{ m.reasoning_content }}, {{ m.thinking }}
{% endfor %}"""
MESSAGES = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "reasoning_content": None},
    {"role": "assistant", "content": "b", "reasoning": "c"},
    {"role": "assistant", "content": "d", "thinking": "e"},
    {"role": "assistant", "content": "f", "reasoning_content": "g", "thinking": "h"},
]


def test_values_that_a_template_reads():
    """As transformers passes them; a client's names cannot take the place of ours."""
    source = SOURCE + "{{ enable_thinking }} {{ source }} {{ effort }}"
    backend = Tokenizer.train(["a"], 257)._backend
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source)
    ours = ChatTemplate(source, {})
    for values in ({"enable_thinking": False}, {"source": "{{ 1 + 1 }}", "effort": ["low", 2]}, {}):
        want = theirs.apply_chat_template(MESSAGES, tokenize=False, **values)
        assert ours.render(MESSAGES, values=values) == want
    for name in ("messages", "add_generation_prompt", "enable", "enable.thinking", "other"):
        with pytest.raises(UserError, match=f"'{name}': the model's chat template does not read"):
            ours.render(MESSAGES, values={name: []})


def test_fields_of_messages():
    backend = Tokenizer.train(["a"], 257)._backend
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=SOURCE)
    text = ChatTemplate(SOURCE, {}).render(MESSAGES)
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False)
    assert "None" not in text and "b, True, c, c" in text


def test_calls_in_every_form():
    """Their arguments may be an object or JSON, for a template that writes either; without "content" it is empty,
    and `is none`."""
    source = """{% for m in messages %}{{ m.content + '|' }}{{ m.content is none }}|{{ m.content is not none }}
{% for c in m.tool_calls %}{{ '|' + c.function.arguments }}|{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"""
    for form, arguments in (
        ('{"a":["\u00e4"]}', '{"a":["\u00e4"]}'),
        ({"a": ["\u00e4"]}, '{"a": ["\u00e4"]}'),
    ):
        call = {"type": "function", "function": {"name": "f", "arguments": form}}
        for content in ({}, {"content": None}):
            message = {"role": "assistant", **content, "tool_calls": [call]}
            text = ChatTemplate(source, {}).render([message])
            assert text == f"|True|False\n|{arguments}|{arguments}"
    said = {"role": "assistant", "content": "x", "tool_calls": []}
    assert ChatTemplate(source, {}).render([said]) == "x|False|True\n"
