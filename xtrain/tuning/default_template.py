r"""The chat template of a model that has none and is fine-tuned on conversations.

It is ChatML if the tokenizer has ChatML's tokens. If not, the tokenizer's end of text ends every
message and roles are words, so no token is added to the vocabulary:

    user\nHow are you?<|endoftext|>\nassistant\nFine.<|endoftext|>\n

It is saved with the tokenizer, as chat_template.jinja.
"""

import json

from ..formats.texts import Texts, texts_of

CHATML = ("<|im_start|>", "<|im_end|>")
SOURCE = r"""
{%- if tools %}
{{- raise_exception("xtrain's default template has no tools: add chat_template.jinja to the model") }}
{%- endif %}
{{- BEGIN }}
{%- for message in messages %}
{{- START + message['role'] + '\n' + message['content'] + END + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- START + 'assistant\n' }}
{%- endif %}
"""


def with_default_template(texts: Texts) -> Texts:
    """Return the texts with the default template, which is among the tokenizer's files, too. Raises
    UserError if the tokenizer has no end of text."""
    tokenizer = texts.tokenizer
    start, end = "", tokenizer.decode([tokenizer.eot_id])
    ids = [tokenizer.encode(token) for token in CHATML]
    if all(len(x) == 1 and x[0] in tokenizer.added_ids for x in ids):
        start, end = CHATML
    parts = {"BEGIN": tokenizer.decode(tokenizer.begin), "START": start, "END": end}
    source = SOURCE.strip()
    for name, text in parts.items():
        source = source.replace(name, json.dumps(text, ensure_ascii=False))
    return texts_of(texts.folder, tokenizer.with_chat_template(source), texts.stop)
