"""The two forms of an answer: /v1/chat/completions and /v1/completions.

Numbers that a client computes with:

usage           tokens of each prompt once, and of all answers, with the token that ended one;
                cached_tokens: those of a prompt that were in the cache when the first answer, or
                the log-probabilities of the prompt, began
finish_reason   "stop": an end token or a stop string, which the text does not contain; else "length"
tokens          all that were computed. The last ones may be cut off from the text by a stop string
text_offset     where a token begins in the text, in characters (code points): the index of the
                character that has its first byte. It is the length of the text, or beyond it, for
                a token that a stop string has cut off
name of a token its text; "bytes:\\xe2\\x82" (as at OpenAI) if its bytes are not whole characters;
                "token_id:7" (as in vLLM) for an id without a text, and for one whose name another
                token of the same `top_logprobs` has, where the chosen token has precedence
bytes           of the tokens of an answer are those of its text; None: the token is no text
top_logprobs    of completions: the chosen token is always among them
prompt_logprobs as in vLLM: for each token of the prompt but the first an object of tokens by their
                ids, the prompt's own first; `rank` is null for one that is not among the most
                likely ones that were asked for. In a stream they are part of the first event
"""

import codecs
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ..data.tokenizer import Tokenizer
from ..formats.texts import Texts
from ..serving.requests import TokenLogprobs
from ..serving.text_stream import text_bytes
from .api import CompletionRequest, Error, PromptDetails, Usage
from .engine_client import Job, Piece

# engine's reason -> OpenAI's
FINISH = {"stop": "stop", "length": "length", "full": "length", "scored": "length"}
LEAST = -9999.0  # for -inf, which JSON does not have
Event = dict[str, Any]  # of a stream
Pairs = Iterable[tuple[int, float]]  # tokens with their log-probabilities


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of a token, also of a special one; b"" for an unknown id."""
    if token < tokenizer.vocab_size:
        return tokenizer.token_bytes[token]
    return b""


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return what a client sees of a token: see above."""
    data = token_bytes(tokenizer, token)
    if not data:
        return f"token_id:{token}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + repr(data)[2:-1]


class Offsets:
    """The offsets of successive tokens in their text.   length: characters so far"""

    def __init__(self, length: int = 0):
        self.length = length
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, data: bytes) -> int:
        """Return the offset of the next token, which adds `data` to the text."""
        self.length += len(self.decoder.decode(data[:1]))
        offset = self.length
        unfinished = bool(self.decoder.getstate()[0])  # the last character that has begun
        if unfinished and not data:
            offset += 1
        elif data and not unfinished:
            offset -= 1
        self.length += len(self.decoder.decode(data[1:]))
        return offset


class Form:
    """One of OpenAI's two forms of an answer.

    name: of the model.
    n_prompt: tokens of the prompts, once take_prompts is called.
    usage_events: the events of a stream have a field `usage`.
    continuous_usage: which has the numbers so far.
    scored: the first event, or the whole answer, has log-probabilities of the prompts.
    first_job: the first one that computed the prompts.
    end_mark: what ends a stream.
    """

    end_mark = b"data: [DONE]\n\n"
    prefix = ""
    whole_object = ""
    chunk_object = ""
    n_prompt = 0
    first_job: Job

    def __init__(self, texts: Texts, name: str, body: Any, request_id: str):
        self.p = texts
        self.body = body
        options = body.stream_options
        self.usage_events = options is not None and options.include_usage
        self.continuous_usage = options is not None and options.continuous_usage_stats
        self.scored = body.prompt_top is not None
        self.once: dict[str, Any] = {}  # fields of the first event, or of a whole answer
        self.prompt_logprobs: list[Any] = []  # of each prompt, if wanted
        self.tokens = 0
        self.head = {
            "id": f"{self.prefix}-{request_id}",
            "created": int(time.time()),
            "model": name,
        }

    def take_prompts(
        self, prompts: Sequence[list[int]], scores: Sequence[list[TokenLogprobs]]
    ) -> None:
        """Take over the prompts, before the first piece.

        prompts: token ids.
        scores: if they are wanted, log-probabilities of all tokens but the first, for each prompt
        of several tokens.
        """
        self.n_prompt = sum(map(len, prompts))
        if self.body.prompt_logprobs is None:
            return
        remaining = iter(scores)
        for tokens in prompts:
            scored = next(remaining) if len(tokens) > 1 else []
            entries = [self._prompt_entry(t, *score) for t, score in zip(tokens[1:], scored)]
            self.prompt_logprobs.append([None, *entries])

    def _prompt_entry(self, token: int, own: float, top: Pairs) -> dict[str, Any]:
        """Return what prompt_logprobs says about a token."""
        ranked = list(top)[: self.body.prompt_logprobs]
        ranks = {other: i for i, (other, _) in enumerate(ranked, 1)}
        return {
            str(other): {
                "logprob": max(logprob, LEAST),
                "rank": ranks.get(other),
                "decoded_token": token_name(self.p.tokenizer, other),
            }
            for other, logprob in ({token: own} | dict(ranked)).items()
        }

    def logprobs(self, pieces: list[Piece]) -> Any:
        """Log-probabilities of the tokens of a sequence's pieces; None if there are none."""
        raise NotImplementedError

    def content(self, text: str, whole: bool) -> dict[str, Any]:
        """Return the part of a choice that has the text."""
        raise NotImplementedError

    def choice(self, pieces: list[Piece], whole: bool) -> dict[str, Any]:
        """Return what the client sees of some successive pieces of a sequence."""
        self.tokens += sum(len(piece.tokens) for piece in pieces)
        reason = pieces[-1].reason
        return {
            "index": pieces[0].index,
            **self.content("".join(p.text for p in pieces), whole),
            "logprobs": self.logprobs(pieces),
            "finish_reason": reason and FINISH[reason],
        }

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens so far."""
        counts = Usage(
            prompt_tokens=self.n_prompt,
            completion_tokens=self.tokens,
            total_tokens=self.n_prompt + self.tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=self.first_job.cached_tokens),
        )
        return counts.model_dump()

    def whole(self, pieces: list[Piece], n: int) -> dict[str, Any]:
        """Return an answer without streaming. n: sequences."""
        sequences = [[piece for piece in pieces if piece.index == i] for i in range(n)]
        choices = [self.choice(sequence, True) for sequence in sequences]
        content = {"object": self.whole_object, "choices": choices, "usage": self.usage()}
        return self.head | content | self.once

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an event of a stream."""
        event = {**self.head, "object": self.chunk_object, "choices": choices, **self.once}
        self.once = {}
        if self.usage_events:
            event["usage"] = self.usage() if self.continuous_usage else None
        return event

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice that opens a sequence in a stream, if there is one."""
        return None

    # the events of a stream, in this order
    def begin(self, n: int) -> list[Event]:
        """Return the events before the first piece. n: sequences."""
        firsts = filter(None, map(self.first, range(n)))
        return [self.chunk([first]) for first in firsts]

    def next(self, piece: Piece) -> list[Event]:
        """Return the events of a piece."""
        choice = self.choice([piece], False)
        if self.says(choice) or piece.reason or choice["logprobs"]:
            return [self.chunk([choice])]
        return []

    def says(self, choice: dict[str, Any]) -> bool:
        """Return True if a choice of a stream has something to say."""
        raise NotImplementedError

    def end(self) -> list[Event]:
        """Return the events after the last piece."""
        if self.usage_events:
            return [{**self.chunk([]), "usage": self.usage()}]
        return []

    def failed(self, error: Error) -> Event:
        """Return the event that takes the place of all that would follow."""
        return {"error": error.model_dump()}


class Chat(Form):
    """/v1/chat/completions"""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def take_prompts(
        self, prompts: Sequence[list[int]], scores: Sequence[list[TokenLogprobs]]
    ) -> None:
        """Put log-probabilities of the prompt into the answer. Arguments: see Form."""
        super().take_prompts(prompts, scores)
        if self.prompt_logprobs:
            self.once = {"prompt_logprobs": self.prompt_logprobs[0]}

    def content(self, text: str, whole: bool) -> dict[str, Any]:
        """Return the part of a choice that has the text."""
        message = {"role": "assistant", "content": text, "refusal": None}
        if whole:
            return {"message": message}
        return {"delta": {"content": text} if text else {}}

    def says(self, choice: dict[str, Any]) -> bool:
        """Return True if a choice of a stream has something to say."""
        return bool(choice["delta"])

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice that opens a sequence in a stream."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def logprobs(self, pieces: list[Piece]) -> Any:
        """Return {"content": [one entry per token]}."""
        entries = [
            self._entry(token, chosen) | {"top_logprobs": [self._entry(t, x) for t, x in top]}
            for piece in pieces
            for token, (chosen, top) in zip(piece.tokens, piece.logprobs)
        ]
        if not entries:
            return None
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = text_bytes(self.p.tokenizer, token)
        return {
            "token": token_name(self.p.tokenizer, token),
            "logprob": max(logprob, LEAST),
            "bytes": list(data) if data else None,
        }


class Text(Form):
    """/v1/completions"""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    source = "prompt"

    def __init__(self, texts: Texts, name: str, body: CompletionRequest, request_id: str):
        super().__init__(texts, name, body, request_id)
        self.n = body.n or 1
        self.offsets: dict[int, Offsets] = {}  # of each sequence
        self.echoes: list[tuple[str, Any]] = []  # (text, logprobs) of each prompt, if wanted

    def take_prompts(
        self, prompts: Sequence[list[int]], scores: Sequence[list[TokenLogprobs]]
    ) -> None:
        """Let each answer begin with its prompt, if that is wanted. Arguments: see Form."""
        super().take_prompts(prompts, scores)
        if not self.body.echo:
            return
        remaining = iter(scores)
        for prompt, tokens in zip(self.body.prompts, prompts):
            parts = [token_bytes(self.p.tokenizer, token) for token in tokens]
            text = b"".join(parts).decode("utf-8", "replace")
            # the tokenizer may put a begin token and a space in front of a text
            before = 0
            if isinstance(prompt, str) and text.endswith(prompt):
                before = len(text) - len(prompt)
            logprobs = None
            if self.body.scores_prompts:
                offsets = Offsets()
                starts = [max(0, offsets.next(part) - before) for part in parts]
                scored = next(remaining) if len(tokens) > 1 else []
                values = [(own, top[: self.body.logprobs]) for own, top in scored]
                logprobs = self._lists(tokens, [None, *values], starts)
            self.echoes.append((text[before:], logprobs))

    def content(self, text: str, whole: bool) -> dict[str, Any]:
        """Return the part of a choice that has the text."""
        return {"text": text}

    def says(self, choice: dict[str, Any]) -> bool:
        """Return True if a choice of a stream has something to say."""
        return bool(choice["text"])

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice that opens a sequence in a stream: the echo, and prompt_logprobs."""
        if not self.echoes and not self.prompt_logprobs:
            return None
        text, logprobs = self.echoes[index // self.n] if self.echoes else ("", None)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return choice | self._of_prompt(index)

    def _of_prompt(self, index: int) -> dict[str, Any]:
        if not self.prompt_logprobs:
            return {}
        return {"prompt_logprobs": self.prompt_logprobs[index // self.n]}

    def choice(self, pieces: list[Piece], whole: bool) -> dict[str, Any]:
        """Return what the client sees of some successive pieces of a sequence."""
        choice = super().choice(pieces, whole)
        if whole and self.echoes:
            text, logprobs = self.echoes[pieces[0].index // self.n]
            choice["text"] = text + choice["text"]
            if logprobs and choice["logprobs"]:
                both = {name: x + choice["logprobs"][name] for name, x in logprobs.items()}
                choice["logprobs"] = both
            else:
                choice["logprobs"] = logprobs
        if whole:
            choice |= self._of_prompt(pieces[0].index)
        return choice

    def logprobs(self, pieces: list[Piece]) -> Any:
        """Return lists with one value per token."""
        index = pieces[0].index
        if index not in self.offsets:
            echoed = len(self.echoes[index // self.n][0]) if self.echoes else 0
            self.offsets[index] = Offsets(echoed)
        tokens = [token for piece in pieces for token in piece.tokens]
        values = [value for piece in pieces for value in piece.logprobs]
        if not values:
            return None
        offsets = self.offsets[index]
        starts = [offsets.next(text_bytes(self.p.tokenizer, token)) for token in tokens]
        return self._lists(tokens, values, starts)

    def _lists(
        self, tokens: list[int], values: Sequence[TokenLogprobs | None], starts: list[int]
    ) -> dict[str, list[Any]]:
        """Return OpenAI's lists. values: of each token; None: nothing precedes it.  starts: their
        offsets."""
        lists: dict[str, list[Any]] = {
            "tokens": [token_name(self.p.tokenizer, token) for token in tokens],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": starts,
        }
        for token, value in zip(tokens, values):
            chosen = top = None
            if value is not None:
                chosen = max(value[0], LEAST)
                top = self._by_name(token, *value)
            lists["token_logprobs"].append(chosen)
            lists["top_logprobs"].append(top)
        return lists

    def _by_name(self, token: int, chosen: float, top: Pairs) -> dict[str, float]:
        """Return the most likely tokens and the chosen one, in order of their log-probability,
        under names of which no two are equal."""
        named = {token_name(self.p.tokenizer, token): token}
        values = dict(top) | {token: chosen}
        for other in values:
            own = token_name(self.p.tokenizer, other)
            if named.setdefault(own, other) != other:
                named[f"token_id:{other}"] = other
        order = sorted(named, key=lambda name: -values[named[name]])
        return {name: max(values[named[name]], LEAST) for name in order}
