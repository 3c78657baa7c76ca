"""Episodes: what the model draws for a prompt, in one turn or, with an environment, in several.

    prompt   | turn        | environment   | turn        | environment | turn        |
    given    | drawn       | given         | drawn       | given       | drawn       |
             | <------- at most --max-new-tokens, the environment's tokens included ---->

What is drawn is trained; what is given is masked. All conversations make a turn at the same time.
The prompt of a turn is the tokens before it, exactly those that were drawn, so the engine finds
their keys and values in its cache, and in batch-invariant mode the log-probabilities of every turn
have the bits that training computes for the whole row.

A turn ends at a token of the model's (`stop`) or at one of --stop-strings, which the environment does
not see. After a turn that a limit ends, the environment is not asked.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import UserError
from ..serving.engine import Engine
from ..serving.requests import Completion
from ..serving.text_stream import TextStream
from ..tuning.examples import Example
from .calls import CallError, Limits
from .environment import Environment, Messages, Turns
from .prompts import Prompt


class NotANumber(Exception):
    """The model's logits are NaN."""


@dataclass
class Episode:
    """One completion of a prompt.

    seed: of each turn, by its number.
    messages: the conversation, with the prompt.
    ids: tokens after the prompt.   drawn: of each, is it the model's?   logprobs: of each that is.
    text: of these tokens, without the token or string that ends the last turn.
    reason: why it ended: that of its last turn, or "turns".   failed: the environment has.
    """

    prompt: Prompt
    seed: Callable[[int], int]
    messages: Messages
    ids: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    turns: int = 0
    reason: str | None = None
    failed: bool = False

    @property
    def tokens(self) -> list[int]:
        """Return the whole sequence."""
        return self.prompt.ids + self.ids

    @property
    def n_drawn(self) -> int:
        """Return how many tokens the model has drawn."""
        return sum(self.drawn)

    def give(self, ids: Sequence[int]) -> None:
        """Append tokens of the environment."""
        self.ids += ids
        self.drawn += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def draw(self, turn: Completion) -> None:
        """Append a turn of the model."""
        self.ids += turn
        self.drawn += [True] * len(turn)
        self.logprobs += [x for x, _ in turn.logprobs or ()] or [0.0] * len(turn)
        self.reason = turn.reason
        self.turns += 1

    def example(self) -> Example:
        """Return the sequence; what was drawn is trained."""
        trained = np.zeros(len(self.tokens), bool)
        trained[len(self.prompt.ids) :] = self.drawn
        return Example(self.prompt.where, np.array(self.tokens, np.int32), trained)

    def drawn_row(self, T: int) -> np.ndarray:
        """Return the log-probability of each target of a row of T tokens, (T,) float32: 0 where
        none was drawn."""
        row = np.zeros(T, np.float32)
        start = len(self.prompt.ids) - 1
        row[start : start + len(self.ids)] = self.logprobs
        return row


class Player:
    """Plays episodes with an engine.

    stop: tokens, stop_strings: texts that end a turn.
    max_new_tokens, max_turns: of an episode.
    environment: None: an episode is one turn.
    """

    def __init__(
        self,
        engine: Engine,
        turns: Turns,
        stop_strings: Sequence[str],
        max_new_tokens: int,
        max_turns: int = 1,
        environment: Environment | None = None,
    ):
        self.engine = engine
        self.turns = turns
        self.stop_strings = stop_strings
        self.max_new_tokens = max_new_tokens
        self.max_turns = max_turns
        self.environment = environment

    def play(
        self,
        prompts: Sequence[Prompt],
        limits: Limits,
        failed: Callable[[CallError], None],
        n: int = 1,
        seed: Callable[..., int] = lambda *numbers: 0,
        **sampling: Any,
    ) -> list[Episode]:
        """Return n episodes per prompt, one prompt after the other. Raises calls.Interrupted,
        and NotANumber.

        limits: of a call of the environment.
        failed: is told its errors; it may raise.
        seed: of the first turns of a prompt by its number here; of a later turn by prompt, episode
            and turn.
        sampling: as in Engine.stream.
        """
        episodes = [
            Episode(x, functools.partial(seed, i, k), x.asked)
            for i, x in enumerate(prompts)
            for k in range(n)
        ]
        if not prompts:
            return []
        first = [seed(i) for i in range(len(prompts))]
        drawn = self._draw([x.ids for x in prompts], self.max_new_tokens, seed=first, n=n, **sampling)  # fmt: skip
        open_episodes = self._take(episodes, drawn)
        while self.environment is not None and open_episodes:
            asked = self._ask(self.environment, open_episodes, limits, failed)
            if not asked:
                break
            room = [self.max_new_tokens - len(x.ids) for x in asked]
            seeds = [x.seed(x.turns) for x in asked]
            drawn = self._draw([x.tokens for x in asked], room, seed=seeds, **sampling)
            open_episodes = self._take(asked, drawn)
        return episodes

    def _draw(self, prompts: list[list[int]], limit: int | list[int], **options: Any) -> list[Completion]:  # fmt: skip
        """Draw a turn after each of these tokens. limit: of its tokens."""
        options["stop"] = self.turns.stop
        if not self.stop_strings:
            return self.engine.generate(prompts, limit, **options)
        stream = self.engine.stream(prompts, limit, **options)
        texts = [TextStream(self.turns.tokenizer, self.stop_strings) for _ in stream.completions]
        lengths = [0] * len(texts)
        for i, token in stream:
            lengths[i] += 1
            texts[i].feed(token)
            if texts[i].stopped:
                stream.cancel(i)
        for text, turn, length in zip(texts, stream.completions, lengths):
            if text.stopped:  # a token more may have been drawn
                del turn[length:]
                if turn.logprobs is not None:
                    del turn.logprobs[length:]
                turn.reason = "stop"
        return stream.completions

    def _take(self, episodes: list[Episode], drawn: list[Completion]) -> list[Episode]:
        """Append a turn to each. Return those that an environment may continue."""
        if any(x.reason == "nan" for x in drawn):
            raise NotANumber
        for episode, turn in zip(episodes, drawn):
            said = self._said(turn)
            episode.text = self.turns.tokenizer.decode(episode.ids) + said
            episode.draw(turn)
            episode.messages.append(self.turns.message(episode.prompt, said))
        return [x for x in episodes if x.reason == "stop"]

    def _said(self, turn: Completion) -> str:
        """Return the text of a turn, without what ended it."""
        if turn[-1:] and turn[-1] in self.turns.stop:
            return self.turns.tokenizer.decode(turn[:-1])
        text = self.turns.tokenizer.decode(turn)
        if turn.reason != "stop":
            return text
        # a special token may stand inside: TextStream finds the string, for it leaves them out
        ends = [text.find(x) for x in self.stop_strings if x in text]
        return text[: min(ends, default=len(text))]

    def _ask(
        self,
        environment: Environment,
        episodes: list[Episode],
        limits: Limits,
        failed: Callable[[CallError], None],
    ) -> list[Episode]:
        """Append the environment's answers. Return the episodes in which the model speaks next."""
        continued = []
        replies = environment.replies([(x.prompt, x.messages) for x in episodes], limits)
        for x, reply in zip(episodes, replies):
            ids: list[int] = []
            if not isinstance(reply, CallError) and reply:
                try:
                    ids = self.turns.following(x.prompt, x.messages, reply, x.ids[-1])
                except UserError as error:
                    reply = environment.cannot_append(x.prompt.where, error)
            if isinstance(reply, CallError):
                x.failed = True
                failed(reply)
            elif reply and x.turns == self.max_turns:
                x.reason = "turns"
            elif reply and len(x.ids) + len(ids) >= self.max_new_tokens:
                x.reason = "length"
            elif reply:
                x.messages += reply
                x.give(ids)
                continued.append(x)
        return continued
