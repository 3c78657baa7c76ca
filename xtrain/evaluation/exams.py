"""Each kind of item: its tokens, checked before anything is computed, and its metrics.

    Text        perplexity, bits per byte
    Choice      acc: the right choice has the highest log-probability; acc_norm: the highest one per
                character, without the delimiter (lm-eval's definitions; the first of several that
                are equal wins)
    Cloze       acc: each token of the continuation is the most likely one; perplexity: exp of -its
                mean log-probability (as lm-eval's LAMBADA)
    Question    exact_match: the generated answer is the right one; flexible_match: the same with
                what Question.flexible finds

Each metric has a standard error (results.py).
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UserError
from .perplexity import byte_windows
from .results import Metric, Result, perplexity, ratio
from .scorer import Score, Scorer, Tokens
from .tasks import Choice, Cloze, Item, Question, Task, Text


class Exam(ABC):
    """The items of a task, tokenized.

    longest: tokens of the longest sequence, of which the engine must hold all.
    n_sequences: how many are computed.

    The constructors raise UserError, which names file and line, for an item that does not fit into
    the context.
    """

    longest: int
    n_sequences: int

    @abstractmethod
    def result(self, scorer: Scorer) -> Result:
        """Compute. Raises UserError if the model's numbers are not numbers."""


class TextExam(Exam):
    """A text in windows of scorer.context tokens."""

    def __init__(self, task: Task, texts: Sequence[Text], scorer: Scorer, stride: int):
        self.task, (text,) = task, texts
        tokenizer = scorer.pretrained.tokenizer
        ids = tokenizer.encode_text(text.text)
        if len(ids) < 2:
            raise UserError(
                f"{text.where} has {len(ids)} token, and nothing precedes the first one: give a "
                "longer text"
            )
        self.windows = byte_windows(text.text, ids, tokenizer, scorer.context, stride)
        self.longest = min(len(ids), scorer.context)
        self.n_sequences = len(self.windows)

    def result(self, scorer: Scorer) -> Result:
        scores = scorer.score([w.tokens for w in self.windows])
        nlls = [-score.total for score in scores]
        counts = [len(w.tokens.continuation) for w in self.windows]
        in_bits = [nll / math.log(2) for nll in nlls]
        metrics = {"perplexity": perplexity(nlls, counts)}
        n_bytes = [w.n_bytes for w in self.windows]
        if sum(n_bytes):  # else there are only special tokens
            metrics["bits_per_byte"] = ratio(in_bits, n_bytes)
        rows = zip(nlls, counts, n_bytes)
        items = [{"nll": nll, "tokens": n, "bytes": b} for nll, n, b in rows]
        return Result(str(self.task.path), "text", sum(counts), metrics, items)


class ChoiceExam(Exam):
    """Choices after their prompts. The engine computes a prompt once."""

    def __init__(self, task: Task, items: Sequence[Choice], scorer: Scorer):
        self.task, self.items = task, items
        self.tokens = [
            [fitting(scorer, x, choice, f"choice {i}") for i, choice in enumerate(x.choices, 1)]
            for x in items
        ]
        self.longest = max(len(t) for row in self.tokens for t in row) - 1
        self.n_sequences = sum(map(len, self.tokens))

    def result(self, scorer: Scorer) -> Result:
        scores = iter(scorer.score([t for row in self.tokens for t in row]))
        judged = [self._judged(x, [next(scores) for _ in x.choices]) for x in self.items]
        metrics = {name: ratio([row[name] for row in judged]) for name in ("acc", "acc_norm")}
        return Result(str(self.task.path), self.task.kind, len(judged), metrics, judged)

    @staticmethod
    def _judged(item: Choice, scores: list[Score]) -> dict[str, Any]:
        totals = [score.total for score in scores]
        per_character = np.array(totals) / [len(choice) for choice in item.choices]
        return {
            "where": item.where,
            "answer": item.answer,
            "logprobs": totals,
            "acc": float(np.argmax(totals) == item.answer),
            "acc_norm": float(np.argmax(per_character) == item.answer),
        }


class ClozeExam(Exam):
    """Continuations after their prompts."""

    def __init__(self, task: Task, items: Sequence[Cloze], scorer: Scorer):
        self.task, self.items = task, items
        self.tokens = [fitting(scorer, x, x.continuation, "the continuation") for x in items]
        self.longest = max(map(len, self.tokens)) - 1
        self.n_sequences = len(items)

    def result(self, scorer: Scorer) -> Result:
        scores = scorer.score(self.tokens)
        metrics: dict[str, Metric] = {
            "acc": ratio([float(score.greedy) for score in scores]),
            "perplexity": perplexity([-score.total for score in scores]),
        }
        rows = [
            {"where": x.where, "logprob": score.total, "acc": float(score.greedy)}
            for x, score in zip(self.items, scores)
        ]
        return Result(str(self.task.path), self.task.kind, len(rows), metrics, rows)


class QuestionExam(Exam):
    """Prompts that the model continues greedily."""

    def __init__(
        self,
        task: Task,
        items: Sequence[Question],
        scorer: Scorer,
        max_new_tokens: int,
        chat_stop: frozenset[int] | None,
    ):
        self.task = task
        self.chat_stop = chat_stop
        self.items = items
        self.max_new_tokens = max_new_tokens
        _ = scorer.defaults  # a wrong generation_config.json is refused here
        self.prompts = [scorer.encode(x.prompt, x.is_chat) for x in items]
        for x, ids in zip(items, self.prompts):
            if len(ids) + max_new_tokens > scorer.context:
                raise UserError(
                    f"{x.where}: the prompt has {len(ids)} tokens and the answer may have "
                    f"{max_new_tokens}, the context {scorer.context}: give a smaller "
                    "--max-new-tokens, fewer --shots, or remove the line"
                )
        self.longest = max(map(len, self.prompts)) + max_new_tokens
        self.n_sequences = len(items)

    def result(self, scorer: Scorer) -> Result:
        texts = [""] * len(self.items)
        for stop in dict.fromkeys(x.stop for x in self.items):  # in order: the same bits each time
            numbers = [i for i, x in enumerate(self.items) if x.stop == stop]
            prompts = [self.prompts[i] for i in numbers]
            new = scorer.generate(prompts, self.max_new_tokens, stop, self.chat_stop)
            for i, text in zip(numbers, new):
                texts[i] = text
        rows: list[dict[str, Any]] = []
        for x, text in zip(self.items, texts):
            right = extracted(x, x.answer)
            if right is None:
                right = x.answer
            right = normalized(x, right)
            answer = extracted(x, text)
            match = answer is not None and normalized(x, answer) == right
            row = {"where": x.where, "text": text, "found": answer, "exact_match": float(match)}
            if x.flexible:
                last = re.findall(x.flexible, text)[-1:]
                row["flexible_match"] = float([right] == [normalized(x, y) for y in last])
            rows.append(row)
        metrics = {"exact_match": ratio([row["exact_match"] for row in rows])}
        if "flexible_match" in rows[0]:
            metrics["flexible_match"] = ratio([row["flexible_match"] for row in rows])
        return Result(str(self.task.path), self.task.kind, len(rows), metrics, rows)


def fitting(scorer: Scorer, item: Item, continuation: str, name: str) -> Tokens:
    """Return the tokens of an item and one continuation. Raises UserError if they are too many, or
    if the continuation has none."""
    tokens = scorer.encode_pair(item.prompt, item.delimiter + continuation, item.is_chat)
    if not tokens.continuation:
        raise UserError(
            f"{item.where}: {name} has no token of its own after the prompt: change the text or "
            "the delimiter"
        )
    if len(tokens) > scorer.context + 1:  # the last one is only predicted
        raise UserError(
            f"{item.where}: the prompt and {name} have {len(tokens)} tokens, the context only "
            f"{scorer.context}: shorten them, give fewer --shots, or remove the line"
        )
    return tokens


def extracted(item: Question, text: str) -> str | None:
    """Return the answer in a text: the first match of item.extract, of its first group if it has
    one; None if there is none."""
    if not item.extract:
        return text
    match = re.search(item.extract, text)
    if match is None:
        return None
    return match[1 if match.re.groups else 0]


def normalized(item: Question, answer: str | None) -> str:
    """Return an answer as it is compared."""
    answer = answer or ""
    for pattern in item.ignore:
        answer = re.sub(pattern, "", answer)
    if item.ignore_case:
        answer = answer.lower()
    return answer.strip()


def together(results: Sequence[Result]) -> Result:
    """Return the items of several files of one kind as one result; each item has the same
    weight."""
    items = [item for result in results for item in result.items]
    metrics = {name: ratio([item[name] for item in items]) for name in results[0].metrics}
    return Result(
        f"{len(results)} files", results[0].kind, sum(r.n for r in results), metrics, items=[]
    )
