"""Speculative decoding: tokens per second with drafts, compared with plain decoding.

    python bench/bench_speculation.py [--only none lookup acceptance draft heads]
                                      [--models 8B 0.6B]
                                      [--batch 1 8 32] [--most 7] [--fast] [--layers N]

Both engines run by turns in one process, on the same random weights in bf16 (the shapes of
bench_serve.py), greedy, in batch-invariant mode, or with --fast in the fast one. The shape of
Qwen3-8B serves one sequence, that of Qwen3-0.6B the batches. `value`: tokens per second with drafts,
from the moment when all sequences have their first token; `peer`: without. `same`: the sequences
whose tokens are those of plain decoding: all of them in batch-invariant mode. `accepted`: of the
drafted tokens. `step_ms`: the shortest steps measured, plain ones by sequences and verifying ones by
rows.

Random weights do not repeat a text, so what repeats is given:

lookup      prompt lookup, which also knows a document: the answer of plain decoding, in which 5 % of
            the tokens are others, as in an edited file
acceptance  a drafter that knows the answer of plain decoding, and gives its next token with
            probability p, else another one; drafting takes no time. The curve over p
draft       8B alone: a draft model of the shape of Qwen3-0.6B computes its drafts, which are replaced
            as above, to force the acceptance. The curve over p
heads       8B alone: draft heads, untrained, compute the drafts, which are replaced in the same way
none        prompt lookup on a text that does not repeat: must not be slower than 0.97 x
"""

import gc
import time
from dataclasses import dataclass, field
from typing import Literal

import bench_serve
import numpy as np
import tyro
from _timing import record

import xtrain
from xtrain.device import free_cached
from xtrain.nn.draft_heads import DraftHeads
from xtrain.serving.speculation import History

PARTS = ["none", "lookup", "acceptance", "draft", "heads"]
NAMES = {"8B": "Qwen3-8B", "0.6B": "Qwen3-0.6B"}


@dataclass
class Options:
    only: list[Literal["none", "lookup", "acceptance", "draft", "heads"]] = field(
        default_factory=lambda: list(PARTS)
    )
    models: list[Literal["8B", "0.6B"]] = field(default_factory=lambda: ["8B", "0.6B"])
    batch: list[int] = field(default_factory=lambda: [1, 8, 32])  # of the 0.6B shape
    p: list[float] = field(default_factory=lambda: [0.0, 0.3, 0.5, 0.7, 0.9, 1.0])
    most: int = 7  # drafted tokens of a sequence
    context: int = 512  # tokens of a prompt
    new: int = 384  # of an answer
    edited: float = 0.05  # share of the document's tokens that are others than the answer's
    rounds: int = 3  # the median counts
    fast: bool = False
    layers: int | None = None  # fewer: for a quick look


def random_model(o, size):
    return bench_serve.random_model(bench_serve.Options(layers=o.layers), size)


class Knows:
    """A drafter that knows the answers, and is right with probability p."""

    def seconds(self, n):
        return 0.0

    def __init__(self, prompts, answers, p, vocab):
        self.p = p
        self.drafts = {}
        for i, (prompt, answer) in enumerate(zip(prompts, answers)):
            rng = np.random.default_rng(i)
            wrong = rng.random(len(answer)) >= p
            self.drafts[tuple(prompt)] = ((np.array(answer) + wrong) % vocab).tolist()

    def prepare(self, requests):
        pass

    def chances(self, request, n):
        return [self.p**i for i in range(1, n + 1)] if self.p else []

    def draft(self, requests, lengths):
        known = [self.drafts[tuple(request.prompt)] for request in requests]
        done = [len(request.completion) for request in requests]
        return [answer[i : i + n] for answer, i, n in zip(known, done, lengths)]


def run(engine, prompts, new, documents=None):
    """Return the answers, and tokens per second after all have their first token."""
    stream = engine.stream(prompts, new)
    if documents is not None:
        for request, document in zip(stream.requests, documents):
            request.history = History(document + request.prompt)
    first = None
    for _ in stream:
        if first is None and all(stream.completions):
            first = time.perf_counter()
            generated = sum(map(len, stream.completions))
    generated = sum(map(len, stream.completions)) - generated
    return stream.completions, generated / (time.perf_counter() - first)


def force(drafter, knows):
    """Let a DraftModel return, and remember, other drafts than those that it computes."""
    computed = drafter.draft

    def draft(requests, lengths):
        drafts = knows.draft(requests, [len(x) for x in computed(requests, lengths)])
        for request, tokens in zip(requests, drafts):
            if tokens:
                drafter._note(request, tokens)
        return drafts

    drafter.draft = draft


def compare(o, model, what, size, prompts, p=None, edited=None, draft_model=None):
    """Measure both engines, and record the medians."""
    B = len(prompts)
    arguments = (model, B, o.context + o.new, not o.fast)
    plain = xtrain.Engine(*arguments, reuse_prefix=False)
    more = dict(speculate=o.most, draft_model=draft_model)
    drafts = xtrain.Engine(*arguments, reuse_prefix=False, **more)
    speculation = drafts.scheduler.speculation
    answers, _ = run(plain, prompts, o.new)
    documents = None
    if edited is not None:
        documents = []
        for i, answer in enumerate(answers):
            rng = np.random.default_rng(i)
            other = rng.integers(0, model.config.vocab_size, len(answer))
            chosen = np.where(rng.random(len(answer)) < edited, other, np.array(answer))
            documents.append(chosen.tolist())
    if p is not None:
        knows = Knows(prompts, answers, p, model.config.vocab_size)
        if draft_model is None:
            speculation.drafter = knows
        else:
            force(speculation.drafter, knows)
    for _ in range(2):  # compiles, captures the graphs, measures the steps
        run(drafts, prompts, o.new, documents)
    before = speculation.figures()
    speeds = []
    for _ in range(o.rounds):
        got, value = run(drafts, prompts, o.new, documents)
        speeds.append((value, run(plain, prompts, o.new)[1]))
    value, peer = np.median(speeds, axis=0)
    since = {name: n - before[name] for name, n in speculation.figures().items()}
    times = speculation.times
    steps = {}
    for verifying, rows in sorted(times.of):
        seconds = times.seconds(verifying, rows)
        if seconds is not None:
            kind = "verify" if verifying else "plain"
            steps[f"{kind} {rows}"] = round(1e3 * seconds, 3)
    if draft_model is not None:
        steps["draft one token"] = round(1e3 * speculation.drafter.seconds(1), 3)
    line = record(
        "bench_speculation",
        f"{what} {NAMES[size]}{' fast' if o.fast else ''}",
        shape=f"B={B} {o.context}+{o.new}",
        dtype="bf16",
        ms=1e3 * B / value,
        value=value,
        unit="tokens/s",
        peer="plain decoding",
        peer_value=peer,
        accepted=round(since["accepted_tokens"] / max(since["drafted_tokens"], 1), 3),
        drafted=since["drafted_tokens"],
        same=sum(list(a) == list(b) for a, b in zip(got, answers)),
        step_ms=steps,
    )
    shown = ("accepted", "drafted", "same", "step_ms")
    print("   ", {name: line[name] for name in shown}, flush=True)
    del plain, drafts, speculation
    gc.collect()
    free_cached("gpu")


def main(o: Options) -> None:
    for size in o.models:
        model = random_model(o, size)
        for B in [1] if size == "8B" else o.batch:
            rng = np.random.default_rng(B)
            prompts = rng.integers(0, model.config.vocab_size, (B, o.context)).tolist()
            if "none" in o.only:
                compare(o, model, "no repetition", size, prompts)
            if "lookup" in o.only:
                compare(o, model, "prompt lookup", size, prompts, edited=o.edited)
            if "acceptance" in o.only:
                for p in o.p:
                    compare(o, model, f"acceptance {p:g}", size, prompts, p)
            if "draft" in o.only and size == "8B":
                draft_model = random_model(o, "0.6B")
                for p in o.p:
                    what = f"draft model, acceptance {p:g}"
                    compare(o, model, what, size, prompts, p, draft_model=draft_model)
                del draft_model
            if "heads" in o.only and size == "8B":
                heads = DraftHeads(model.config.dim, o.most)
                heads.arena = heads.make_arena("gpu", 0, bf16=True, trainable=False)
                for p in o.p:
                    what = f"draft heads, acceptance {p:g}"
                    compare(o, model, what, size, prompts, p, draft_model=heads)
                del heads
        del model
        gc.collect()
        free_cached("gpu")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
