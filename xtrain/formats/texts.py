"""What a model's folder says about texts: the tokenizer, the chat template, and which tokens end an
answer.

Every command asks here. Three sets of tokens end an answer: `stop` where transformers' generate
ends, `answer_stop` an answer to a prompt, `chat_stop` one in a conversation. Which tokens begin and
end a text: data/tokenizer.py.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

from ..data.chat_template import ChatTemplate
from ..data.tokenizer import Tokenizer
from ..errors import UserError
from .adapters import source_of
from .huggingface import as_ids, read_special_tokens
from .saved_runs import CONFIG

TOKENIZER = "tokenizer.json"
ANSWER = "ANSWER"  # a word that a template does not contain


@dataclass(frozen=True)
class Texts:
    """Everything in a folder but the model, as returned by `load_texts`.

    tokenizer: its special_ids are all tokens that are not text in this folder, also where
        tokenizer.json calls them text.
    stop: tokens that end a text, as in transformers.
    template: None if the folder has none.
    """

    folder: Path
    tokenizer: Tokenizer
    stop: frozenset[int]
    template: ChatTemplate | None

    @property
    def answer_stop(self) -> frozenset[int]:
        """Tokens that end an answer: also the end of a document."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            return self.stop
        return self.stop | {eos}

    @functools.cached_property
    def chat_stop(self) -> frozenset[int]:
        """Tokens that end an answer in a conversation: also the token that ends a turn."""
        return self.answer_stop | end_of_turn(self.template, self.tokenizer)


def load_texts(folder: Path) -> Texts:
    """Load what a Hugging Face folder says about texts. Raises UserError if anything is missing or
    damaged."""
    tokenizer = Tokenizer.load(source_of(folder, TOKENIZER), source_of(folder, CONFIG))
    stop = as_ids(read_special_tokens(folder).get("eos_token_id"))
    return texts_of(folder, tokenizer, stop)


def texts_of(folder: Path, tokenizer: Tokenizer, stop: frozenset[int]) -> Texts:
    """Return the Texts of a tokenizer.

    stop: ids that end a text; without any, the tokenizer's end of text does, and if it has none,
        only the limit of tokens. Raises UserError.
    """
    if not stop and tokenizer.eos_token_id is not None:
        stop = frozenset([tokenizer.eos_token_id])
    template = ChatTemplate.of(tokenizer.companions, folder)
    texts = Texts(folder, tokenizer, stop, template)
    control = texts.answer_stop
    # else it is known without a look at the template, which costs a process
    if tokenizer.added_ids - tokenizer.special_ids - control:
        control = texts.chat_stop
    return Texts(folder, tokenizer.with_special(control), stop, template)


def end_of_turn(template: ChatTemplate | None, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the token that the template writes after an assistant's message; none if there is no
    template, or if no token of its own ends the turn."""
    if template is None:
        return frozenset()
    question = {"role": "user", "content": "question"}
    talk = [question, {"role": "assistant", "content": ANSWER}]
    try:
        text = template.render(talk, add_generation_prompt=False)
    except UserError:  # a conversation that needs the template says why
        return frozenset()
    _, found, after = text.rpartition(ANSWER)
    if not found:
        return frozenset()
    return tokenizer.added_ids & frozenset(tokenizer.encode(after.lstrip())[:1])
