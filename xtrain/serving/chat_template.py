"""The chat template: the Jinja template that comes with a tokenizer and renders a conversation as text.

    chat_template.jinja, or chat_template in tokenizer_config.json: one text, or a list of {"name", "template"} of which
    "default" is used

It is rendered in Jinja's sandbox with the names that transformers defines for templates: messages, add_generation_prompt,
tools, documents, bos_token and the other special tokens, raise_exception(text), strftime_now(format), the filter tojson,
{% break %} and {% continue %}, and {% generation %} blocks.
"""

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from ..data.tokenizer import token_text
from ..errors import UserError
from ..json_files import read_json, reading

TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class ChatTemplate:
    """Renders a list of {"role": ..., "content": ...} as text.

    source: the Jinja template.  special_tokens: names such as "bos_token" and their texts.
    Raises UserError if Jinja cannot compile the template.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self.special_tokens = special_tokens
        try:
            self.template = environment.from_string(source)
        except Exception as error:  # third-party code: any error, also of Python's compiler
            raise UserError(f"the chat template cannot be read: {_one_line(error)}") from None

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """-> the text of the conversation

        messages: {"role": ..., "content": ...} each.  add_generation_prompt: end with the text that starts the model's answer.
        Raises UserError if the template rejects the messages or fails.
        """
        names = {"messages": messages, "tools": None, "documents": None, **self.special_tokens}
        try:
            text = self.template.render(**names, add_generation_prompt=add_generation_prompt)
            text.encode()  # ValueError for half a surrogate pair
            return text
        except Exception as error:  # any Python error, such as a KeyError of '{x}'.format()
            raise UserError(
                f"the model's chat template rejects this conversation: {_one_line(error)}"
            ) from None

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a Hugging Face folder; None if it has none. Raises UserError if it cannot be read."""
        file, path = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        config = read_json(path) if path.is_file() else {}
        source = config.get("chat_template")
        if file.is_file():
            with reading(file):
                source = file.read_text(encoding="utf-8", errors="replace")
        if isinstance(source, list):
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise UserError(
                f"{path}: chat_template must be a text or a list with one named default"
            )
        tokens = {name: token_text(config.get(name)) for name in TOKENS}
        return cls(source, {name: text for name, text in tokens.items() if text is not None})


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks the model's text for training; here it renders its content."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Replaces Jinja's own filter, which escapes characters for HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message):
    raise jinja2.TemplateError(message)


def _now(format):
    return datetime.datetime.now().strftime(format)


def _one_line(error):
    from_template = isinstance(error, jinja2.TemplateError) and str(error)
    text = str(error) if from_template else f"{type(error).__name__} {error}"
    return " ".join(text.split())[:300]
