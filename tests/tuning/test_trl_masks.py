"""What is trained, against TRL's training templates, where TRL is installed: 16 families, 12 conversations.

TRL marks answers with {% generation %} in a copy of each family's template. Without these marks, and in the family's own
template where it writes the same text, xtrain must find the same answers. TRL trains white space after the end of a
turn too, and for some families the generation prompt; these are not compared.
"""

import functools
import re
from pathlib import Path

import pytest
import tokenizers

from xtrain.data.chat_template import ChatTemplate
from xtrain.data.conversations import Conversation
from xtrain.data.records import Record
from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError

trl = pytest.importorskip("trl")
from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

FOLDER = Path(trl.__file__).with_name("chat_templates")
FAMILIES = [
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "gptoss", "lfm2_v2", "llama3",
    "nemotron_3_nano", "phi3", "phi3_5", "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think",
]  # fmt: skip
SPECIAL = {"bos_token": "<|BOS|>", "eos_token": "<|EOS|>"}
TOOLS = [{"type": "function", "function": {"name": "mul", "description": "m", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "description": "x"}}, "required": ["a"]}}}]  # fmt: skip
CALL = {"type": "function", "id": "c1", "function": {"name": "mul", "arguments": {"a": 1}}}
RESULT = {"role": "tool", "name": "mul", "tool_call_id": "c1", "content": "2"}
user = lambda text: {"role": "user", "content": text}
says = lambda text, **more: {"role": "assistant", "content": text, **more}
TALK = [user("q1"), says("a1"), user("q2"), says("a2")]
CONVERSATIONS = {
    "one answer": (TALK[:2], None),
    "two answers": (TALK, None),
    "system": ([{"role": "system", "content": "Be kind."}, *TALK], None),
    "begins with the assistant": (TALK[1:], None),
    "ends with the user": (TALK[:3], None),
    "white space": ([user(" q "), says("  a1\n\n"), user("q2"), says("\na2 ")], None),
    "calls": ([user("q1"), says("", tool_calls=[CALL]), RESULT, says("two")], TOOLS),
    "calls with text": ([user("q1"), says("I call", tool_calls=[CALL]), RESULT, says("two")], TOOLS),
    "calls without content": ([user("q1"), says(None, tool_calls=[CALL]), RESULT, says("two")], TOOLS),
    "reasoning": ([user("q1"), says("<think>\nr1\n</think>\n\na1")], None),
    "reasoning twice": ([user("q1"), says("<think>\nr1\n</think>\n\na1")] * 2, None),
    "reasoning apart": ([user("q1"), says("a1", reasoning_content="r1")] * 2, None),
}  # fmt: skip


@functools.cache
def tokenizer(source):
    """Return one with the special tokens that a template writes."""
    backend = Tokenizer.train(["abc"], 257)._backend
    names = set(re.findall(r"<[|｜][^<>\s'\"]+[|｜]>|<(?:start|end)_of_turn>|</?think>", source))
    names |= set(SPECIAL.values())
    backend.add_special_tokens([tokenizers.AddedToken(x, special=True) for x in sorted(names)])
    return Tokenizer(backend)


def runs(text, is_trained):
    """Return the parts of the text that are trained, without white space after them."""
    marks = "".join("x" if x else " " for x in is_trained)
    return [text[m.start() : m.end()].rstrip() for m in re.finditer("x+", marks)]


def of_trl(source, messages, tools):
    """Return the text and what TRL trains of it; None if its template refuses."""
    try:
        (text,), (places,) = render_jinja_template(
            [messages], tools=tools, chat_template=source, return_assistant_tokens_mask=True, **SPECIAL
        )  # fmt: skip
    except Exception:  # any, of the template
        return None
    return text, runs(text, [any(a <= i < b for a, b in places) for i in range(len(text))])


@functools.cache
def chat_template(source):
    """Compiled once for all conversations."""
    return ChatTemplate(source, SPECIAL)


def of_xtrain(source, messages, tools, tokenizer):
    """Return the text, what xtrain trains of it, and the generation prompt; None if it refuses."""
    template = chat_template(source)
    record = Record(Path("x"), 1, {"messages": messages, "tools": tools})
    try:
        conversation = Conversation.of(record)
        _, is_trained = conversation.tokens(tokenizer, template)
    except UserError:
        return None
    text = template.render(conversation.messages, False, tools)
    _, places = tokenizer.encode_spans(text)
    marked = [x for x, (a, b) in zip(is_trained, places) for _ in range(a, b)]
    prompt = template.render([user("q")], True)
    if tools:  # what the template writes between a result and the answer
        prompt += template.render(conversation.messages[:3], True, tools)
    return text, runs(text, marked), prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_trl(family):
    original, marked = ((FOLDER / f"{family}{x}.jinja").read_text() for x in ("", "_training"))
    bare = re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", r"{%\1 set _ = 0 \2%}", marked)
    tokens = tokenizer(original + marked)
    compared = 0
    for name, (messages, tools) in CONVERSATIONS.items():
        theirs = of_trl(marked, messages, tools)
        for source in (bare, original):
            ours = of_xtrain(source, messages, tools, tokens)
            if theirs is None or ours is None or ours[0] != theirs[0]:
                continue
            compared += 1
            assert len(ours[1]) == len(theirs[1]), name
            for a, b in zip(ours[1], theirs[1]):
                assert b.endswith(a) and b.removesuffix(a) in ours[2], (name, a, b)
    assert compared >= 10
