"""A model and its tokenizer as an examiner sees them: text in, log-probabilities or text out, many
at a time.

Prompt and continuation are divided as in lm-eval (lm_eval/api/model.py): the continuation's tokens
are those of both texts together after as many as the prompt alone has, and the prompt's are its
own, also where the first ones of both together differ. Spaces at the end of the prompt belong to
the continuation.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..cli import say
from ..device import free_cached
from ..errors import UserError
from ..formats.generation_config import GenerationDefaults
from ..serving.engine import Engine
from ..serving.options import KVCache
from ..serving.pretrained import Pretrained
from ..serving.text_generation import text_chunks
from ..serving.text_stream import TextStream

GREEDY = {"temperature": 0.0}
AT_A_TIME = 256  # sequences given to the engine; it computes max_batch of them at a time


@dataclass(frozen=True)
class Tokens:
    """A sequence of which the last tokens are scored."""

    context: list[int]
    continuation: list[int]

    def __len__(self) -> int:
        return len(self.context) + len(self.continuation)


@dataclass(frozen=True)
class Score:
    """What the model says about a continuation.

    total: the log-probability of all its tokens.
    greedy: is each of them the most likely one in its place?
    """

    total: float
    greedy: bool


@dataclass
class Scorer:
    """Scores and generates with one engine.

    context: tokens of a sequence, at most. The last one is only predicted, so a scored sequence may
    have one more.
    """

    pretrained: Pretrained
    context: int
    max_batch: int = 32
    batch_invariant: bool = False
    kv_cache: KVCache = "full"
    speculate: int = 0
    _engine: Engine | None = field(default=None, repr=False)

    # ------------------------------------------------------------------------- text to tokens
    def encode(self, text: str, is_chat: bool = False) -> list[int]:
        """Return the ids of a text that something follows. is_chat: the chat template has written
        it, with all special tokens."""
        return self.pretrained.tokenizer.encode_prompt(text, not is_chat)

    @property
    def begin_token(self) -> int:
        """Return the token that a text without anything before it follows: begin of text, else end
        of text. Raises UserError."""
        tokenizer = self.pretrained.tokenizer
        begin = tokenizer.bos_token_id
        if begin is None:
            begin = tokenizer.eos_token_id
        if begin is None:
            raise UserError(
                "the tokenizer has no token that begins or ends a text, so its first token cannot "
                "be scored: set bos_token in tokenizer_config.json"
            )
        return begin

    def encode_pair(self, prompt: str, continuation: str, is_chat: bool = False) -> Tokens:
        """Return the tokens of a prompt and of what follows it; after an empty prompt, begin_token
        is the context."""
        if not prompt:
            ids = self.pretrained.tokenizer.encode(continuation)
            if ids[:1] == [self.begin_token]:
                return Tokens(ids[:1], ids[1:])
            return Tokens([self.begin_token], ids)
        spaces = len(prompt) - len(prompt.rstrip())
        if spaces:
            prompt, continuation = prompt[:-spaces], prompt[-spaces:] + continuation
        context = self.encode(prompt, is_chat)
        whole = self.encode(prompt + continuation, is_chat)
        return Tokens(context, whole[len(context) :])

    # ------------------------------------------------------------------------- with the model
    @functools.cached_property
    def defaults(self) -> GenerationDefaults:
        """What the model's generation_config.json says, for generated answers; as in lm-eval's hf
        model. The user is told once. Raises UserError."""
        defaults = GenerationDefaults.of(self.pretrained.model.generation)
        for note in defaults.notes(GREEDY | {"max_new_tokens": 0}, GREEDY):
            say(note)
        return defaults

    def engine(self, longest: int) -> Engine:
        """Return an engine for sequences of `longest` tokens; the last one if it can serve them."""
        longest = min(max(longest, 2), self.context)
        if self._engine is None or self._engine.max_seq_len < longest:
            self._engine = None  # its cache is free before the next one is allocated
            self._engine = Engine(
                self.pretrained.model,
                self.max_batch,
                longest,
                self.batch_invariant,
                kv_cache=self.kv_cache,
                speculate=self.speculate,
            )
        return self._engine

    def close(self) -> None:
        """Free the engine's memory. The next sequences get another one, with the weights that the
        model then has."""
        self._engine = None
        free_cached(self.pretrained.model.device)

    def score(self, sequences: Sequence[Tokens]) -> list[Score]:
        """Return the log-probabilities of continuations. Raises UserError if one is not a
        number."""
        scores = []
        for part in _parts(sequences):
            engine = self.engine(max(map(len, part)) - 1)
            scored = engine.logprobs(
                [s.context for s in part], [s.continuation for s in part], top=1
            )
            for tokens, x in zip(part, scored):
                if np.isnan(x.logprobs).any():
                    raise UserError(
                        "the model computes log-probabilities that are not numbers (NaN): its "
                        "weights are damaged, use others"
                    )
                greedy = [row[0][0] for row in x.top] == tokens.continuation
                scores.append(Score(x.total, greedy))
        return scores

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        stop: Iterable[str],
        end: frozenset[int] | None = None,
        **options: Any,
    ) -> list[str]:
        """Return the texts after prompts, up to a stop string, an end token, max_new_tokens or the
        end of the context.

        end: the end tokens; None: those of a text.
        options: as Engine.stream has them; the model's defaults are the others. Without a
        temperature the most likely token is taken each time.
        Raises UserError if the logits are not numbers.
        """
        tokenizer = self.pretrained.tokenizer
        stop = list(stop)
        chosen = GREEDY | options | {"max_new_tokens": max_new_tokens}
        arguments = self.defaults.fill(chosen, GREEDY)
        if end is None:
            end = self.pretrained.answer_stop
        texts: list[str] = []
        for part in _parts(prompts):
            engine = self.engine(max(map(len, part)) + max_new_tokens)
            stream = engine.stream(part, stop=end, **arguments)
            for _ in text_chunks(stream, [TextStream(tokenizer, stop) for _ in part]):
                pass  # it ends sequences at stop strings
            for completion in stream.completions:
                if completion.reason == "nan":
                    raise UserError(
                        "the model computes logits that are not numbers (NaN): its weights are "
                        "damaged, use others"
                    )
                ids = [token for token in completion if token not in tokenizer.special_ids]
                texts.append(_cut(tokenizer.decode(ids), stop))
        return texts


def _parts(sequences: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (sequences[i : i + AT_A_TIME] for i in range(0, len(sequences), AT_A_TIME))


def _cut(text: str, stop: list[str]) -> str:
    """Return the text up to the first stop string."""
    ends = [text.find(s) for s in stop if s and s in text]
    return text[: min(ends, default=None)]
