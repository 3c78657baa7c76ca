r"""Chat templates by name, for --chat-template, and that of a model that has none.

chatml       <|im_start|>user\n ... <|im_end|>\n
llama3       <|start_header_id|>user<|end_header_id|>\n\n ... <|eot_id|>
phi3         <|user|>\n ... <|end|>\n
gemma        <start_of_turn>user\n ... <end_of_turn>\n; the user's turn begins with the system message
deepseek-r1  <｜User｜> ...; answers keep their reasoning. The template of DeepSeek-R1-Distill removes
             it, also from the answer that is trained
plain        user\n ... <|endoftext|>\n, with the tokenizer's end of text: roles are words

They have no tools. A template is saved with the tokenizer, as chat_template.jinja.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..data.chat_template import template_values
from ..data.tokenizer import Tokenizer
from ..errors import UserError
from ..formats.texts import Texts, load_texts, texts_of

SOURCE = r"""
{%- if tools %}
{{- raise_exception("the template NAME has no tools: give a file to --chat-template") }}
{%- endif %}
{%- set turns = TURNS %}
{{- BEGIN }}
{%- for message in messages %}
{%- set role = message['role'] %}
{%- set content = message['content'] %}
{%- if role not in turns %}
{{- raise_exception("the template NAME has no role " + role) }}
{%- endif %}
{%- if message['tool_calls'] %}
{{- raise_exception("the template NAME has no tools: give a file to --chat-template") }}
{%- endif %}
{%- if not (MERGES and loop.previtem and loop.previtem['role'] == 'system') %}
{{- turns[role][0] }}
{%- endif %}
{%- if message['reasoning_content'] %}
{{- '<think>\n' + message['reasoning_content'] + '\n</think>\n\n' }}
{%- endif %}
{{- (content | trim if TRIMS else content) + turns[role][1] }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- turns['assistant'][0] + BEGUN }}
{%- else %}
{{- LAST }}
{%- endif %}
"""
Roles = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Turns:
    """How a template writes a conversation.

    roles: what is before and after the text of a message.
    trims: white space around a text is removed.
    merges: a system message and the one after it are one turn.
    begun: what a prompt has of the answer.
    ends: the text ends with the tokenizer's end of text.
    """

    roles: Roles
    trims: bool = False
    merges: bool = False
    begun: str = ""
    ends: bool = False

    @property
    def text(self) -> str:
        """All that is around the messages."""
        return "".join(text for pair in self.roles.values() for text in pair)

    def missing(self, tokenizer: Tokenizer) -> list[str]:
        """Return the tokens of the template that a tokenizer does not have."""
        tokens = dict.fromkeys(re.findall(r"<[^<>\s]+>", self.text))
        return [token for token in tokens if not _is_token(token, tokenizer)]

    def source(self, name: str, tokenizer: Tokenizer) -> str:
        """Return the Jinja template. Raises UserError if the tokenizer lacks one of its tokens."""
        for token in self.missing(tokenizer):
            raise UserError(
                f"the tokenizer has no token {token}, which the chat template {name} needs: choose "
                "another one, or add the tokens with xtrain finetune --chat-template chatml"
            )
        values = {
            "TURNS": self.roles,
            "BEGIN": tokenizer.decode(tokenizer.begin),
            "MERGES": self.merges,
            "TRIMS": self.trims,
            "BEGUN": self.begun,
            "LAST": tokenizer.eot if self.ends else "",
        }
        texts = {word: json.dumps(value, ensure_ascii=False) for word, value in values.items()}
        texts["NAME"] = name
        words = rf"\b({'|'.join(texts)})\b"
        return re.sub(words, lambda found: texts[found[0]], SOURCE.strip())


def _is_token(text: str, tokenizer: Tokenizer) -> bool:
    ids = tokenizer.encode(text)
    return len(ids) == 1 and ids[0] in tokenizer.added_ids


def _same(header: str, end: str, **names: str) -> Roles:
    """Return the roles of a template that writes them alike. names: of roles, in place of ROLE."""
    if not names:
        names = {role: role for role in ("system", "user", "assistant", "tool")}
    return {role: (header.replace("ROLE", name), end) for role, name in names.items()}


NAMED = {
    "chatml": Turns(_same("<|im_start|>ROLE\n", "<|im_end|>\n")),
    "llama3": Turns(
        _same("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>"), trims=True
    ),
    "phi3": Turns(
        _same("<|ROLE|>\n", "<|end|>\n", system="system", user="user", assistant="assistant"),
        ends=True,
    ),
    "gemma": Turns(
        _same("<start_of_turn>ROLE\n", "<end_of_turn>\n", user="user", assistant="model")
        | {"system": ("<start_of_turn>user\n", "\n\n")},
        trims=True,
        merges=True,
    ),
    "deepseek-r1": Turns(
        {
            "system": ("", ""),
            "user": ("<｜User｜>", ""),
            "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        },
        begun="<think>\n",
    ),
}


def template_source(choice: str, tokenizer: Tokenizer) -> str:
    """Return the Jinja template that --chat-template chooses. Raises UserError.

    choice: a name in NAMED, "plain", or a file.
    """
    if choice == "plain":
        turns = Turns(_same("ROLE\n", tokenizer.decode([tokenizer.eot_id]) + "\n"))
        return turns.source(choice, tokenizer)
    if choice in NAMED:
        return NAMED[choice].source(choice, tokenizer)
    try:
        return Path(choice).read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise UserError(
            f"--chat-template {choice} is not a file in UTF-8: give one, or one of "
            f"{', '.join((*NAMED, 'plain'))}"
        ) from None


def chosen_texts(config: Any, folder: Path, adds_tokens: bool = False) -> Texts:
    """Return what a model's folder says about texts, with the template and its values that
    --chat-template and --chat-template-kwargs choose. Raises UserError.

    config: a FinetuneConfig or ReinforceConfig.
    adds_tokens: if the tokenizer does not have those of chatml, they are added to it.
    """
    texts = load_texts(folder)
    new = NAMED["chatml"].missing(texts.tokenizer)
    if adds_tokens and config.chat_template == "chatml" and new:
        texts = texts_of(folder, texts.tokenizer.with_tokens(new), texts.stop)
    if config.chat_template is not None:
        texts = with_template(texts, config.chat_template)
    values = template_values(config.chat_template_kwargs)
    if not values:
        return texts
    if texts.template is None:
        raise UserError(
            "--chat-template-kwargs needs a chat template, which the model does not have: give one "
            "with --chat-template"
        )
    return replace(texts, template=texts.template.with_values(values))


def with_template(texts: Texts, choice: str) -> Texts:
    """Return the texts with the template that --chat-template chooses, which is among the
    tokenizer's files, too. Raises UserError."""
    source = template_source(choice, texts.tokenizer)
    tokenizer = texts.tokenizer.with_chat_template(source)
    chosen = texts_of(texts.folder, tokenizer, texts.stop)
    assert chosen.template is not None
    chosen.template.check()
    return chosen


def with_default_template(texts: Texts) -> Texts:
    """Return the texts with the default template: chatml if the tokenizer has its tokens, else
    plain. Raises UserError if the tokenizer has no end of text."""
    return with_template(texts, "plain" if NAMED["chatml"].missing(texts.tokenizer) else "chatml")
