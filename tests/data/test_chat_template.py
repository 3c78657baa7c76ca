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
    {"role": "assistant", "content": None, "tool_calls": [{"id": None}], "reasoning_content": None},
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
