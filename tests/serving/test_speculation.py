"""Speculative decoding: in batch-invariant mode answers and log-probabilities are those of plain decoding, bit for bit,
whatever the drafts are; and the rule of how many tokens to draft."""

import functools
from dataclasses import asdict

import pytest
from checks import SLOW, rng
from hypothesis import given, settings
from hypothesis import strategies as st
from run_ahead import AheadRunner, Drafting
from serving_state import check_nothing_is_used
from test_engine_batch_invariant import GPU_SHAPES, gpu_model, prompts_with_common_beginnings
from test_engine_constraints import Modulo
from twins import random_model, small

from xtrain import Engine, UserError
from xtrain.server.engine_loop import Figures
from xtrain.serving import draft_model, scheduler, speculation, verifying
from xtrain.serving import engine as engine_module
from xtrain.serving.requests import make_requests
from xtrain.serving.speculation import History, PromptLookup, Speculation

VOCAB = 61
CONFIG = small(head_dim=8, n_layers=1, max_seq_len=64)
KINDS = ("right", "wrong", "half", "random", "lookup", "model")


@functools.cache
def model():
    return random_model(CONFIG, device="cpu")


class Guesses(PromptLookup):
    """Drafts of one of KINDS. answers: of plain decoding, by (prompt, random stream)."""

    def __init__(self, kind, answers):
        self.kind = kind
        self.answers = answers
        self.random = rng(1)

    def chances(self, request, n):
        return super().chances(request, n) if self.kind == "lookup" else [1.0] * n

    def draft(self, requests, lengths):
        if self.kind == "lookup":
            return super().draft(requests, lengths)
        return [self.guess(r, n) for r, n in zip(requests, lengths)]

    def guess(self, request, n):
        if self.kind == "random":
            return self.random.integers(0, VOCAB, n).tolist()
        done = len(request.completion)
        right = self.answers[tuple(request.prompt), request.random_stream][done : done + n]
        wrong = [(token + 1) % VOCAB for token in right]
        i = {"right": n, "wrong": 0, "half": self.random.integers(0, n + 1)}[self.kind]
        return (right + [0] * n)[:i] + (wrong + [0] * n)[i:n]


class DraftingAhead(Drafting):
    runner_type = AheadRunner


def answers_of(completions, prompts, n=1):
    """The answers of plain decoding as Guesses reads them; prompt i uses random stream i, its samples others"""
    streams = [(i, sample) for i in range(len(prompts)) for sample in range(n)]
    return {
        (tuple(prompts[i]), i + (sample << 32)): list(completion)
        for (i, sample), completion in zip(streams, completions)
    }


def everything(completions):
    return [(list(x), x.reason, x.logprobs) for x in completions]


def memory(sizes, kind):
    """A draft model needs as much as the model."""
    if kind == "model" and "cache_bytes" in sizes:
        return dict(cache_bytes=2 * sizes["cache_bytes"])
    return {}


def compare(prompts, new, kind, most=4, plain=None, ahead=False, served=None, **options):
    """Generate with drafts and without. -> the engine with drafts.  served: another model than `model()`"""
    served = served or model()
    sizes = dict(max_batch=3, batch_invariant=True) | (plain or {})
    drafts = dict(speculate=most, draft_model=served if kind == "model" else None)
    drafting = DraftingAhead if ahead else Drafting
    engine = drafting(served, **sizes | memory(sizes, kind), **drafts)
    wanted = Engine(served, **sizes).generate(prompts, new, **options)
    if kind != "model":
        known = answers_of(wanted, prompts, options.get("n", 1))
        engine.scheduler.speculation.drafter = Guesses(kind, known)
    for _ in range(2):  # the second time with a cache that has been used
        got = engine.generate(prompts, new, **options)
        assert everything(got) == everything(wanted)
        engine.step()
        check_nothing_is_used(engine)
    return engine


PROMPTS = [[1, 2, 3, 4] * 5, [7, 8, 9] * 6 + [1], [1, 2, 3, 4] * 4 + [5], list(range(30))]
RULES = dict(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
REPEATS = dict(logit_bias={7: 3.0}, repetition_penalty=0.9)


@settings(max_examples=40 if SLOW else 12, deadline=None)
@given(st.data())
def test_any_drafts_and_any_options(data):
    draw = data.draw
    S = 16
    one = Engine(model(), 1, block_tokens=S).cache.block_bytes
    length = st.integers(1, 40)
    prompts = [
        [int(t) for t in rng(i, draw(st.integers(0, 3))).integers(0, draw(st.sampled_from([2, VOCAB])), n)]
        for i, n in enumerate(draw(st.lists(length, min_size=1, max_size=4)))
    ]  # fmt: skip
    several = lambda *values: [draw(st.sampled_from(values)) for _ in prompts]
    options = dict(
        temperature=several(0.0, 0.4, 1.5), top_k=several(None, 5), top_p=several(1.0, 0.8),
        min_p=several(0.0, 0.05), stop=range(0, draw(st.sampled_from([1, VOCAB])), 7),
        logprobs=several(None, None, 0, 3), n=draw(st.integers(1, 2)),
        allowed_token_ids=several(None, None, set(range(20))), logit_bias=several(None, {3: 5.0}),
        grammar=several(None, None, None, Modulo(3, 9, vocab=VOCAB)),
    )  # fmt: skip
    if draw(st.booleans()):
        options |= {name: several(x, OFF) for (name, x), OFF in zip(RULES.items(), (1.0, 0.0, 0.0))}
    new = several(1, 5, 24)
    options["min_new_tokens"] = [draw(st.integers(0, n)) for n in new]
    plain = dict(
        max_batch=draw(st.integers(1, 4)), block_tokens=S, max_seq_len=64, cache_bytes=draw(st.integers(4, 12)) * one,
        prefill_tokens=draw(st.integers(3, 70)), reuse_prefix=draw(st.booleans()),
    )  # fmt: skip
    kind = draw(st.sampled_from(KINDS))
    most = draw(st.integers(1, 9))
    compare(prompts, new, kind, most, plain, draw(st.booleans()), **options)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind, most", [("right", 4), ("half", 7), ("lookup", 5)])
def test_what_is_known_to_happen_here(kind, most, ahead):
    """Preemption, shared blocks, samples, and fewer steps than tokens."""
    one = Engine(model(), 1, block_tokens=16).cache.block_bytes
    plain = dict(block_tokens=16, cache_bytes=8 * one, max_batch=4)
    options = dict(temperature=0.4, n=2, logprobs=1) | REPEATS
    engine = compare(PROMPTS, 24, kind, most, plain, ahead, **options)
    figures = engine.scheduler.speculation.figures()
    assert figures.items() <= asdict(Figures.of(engine)).items()
    assert 0 < figures["drafts"] <= figures["drafted_tokens"]
    assert 0 < figures["accepted_tokens"] <= figures["drafted_tokens"]
    assert kind != "right" or figures["accepted_tokens"] == figures["drafted_tokens"]
    assert engine.scheduler.preemptions and engine.reused_tokens
    alone = compare(PROMPTS[:1], 31, "right", most, ahead=ahead)
    assert alone.steps < 2 * 31 / most + 10


@pytest.mark.parametrize("plain", [dict(), dict(kv_cache="fp8")], ids=["fast", "fp8"])
def test_the_usual_promise_in_the_fast_mode(plain):
    """The same tokens, unless two logits are as good as equal."""
    engine = Drafting(model(), 3, speculate=5, **plain)
    answers = Engine(model(), 3, **plain).generate(PROMPTS, 24, **REPEATS)
    assert engine.generate(PROMPTS, 24, **REPEATS) == answers
    assert engine.scheduler.speculation.accepted_tokens


def test_speculate_is_checked():
    for wrong in (-1, 1.5, 1000):
        with pytest.raises(UserError, match="speculate must be a whole number from 0 to"):
            Engine(model(), speculate=wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", GPU_SHAPES.values(), ids=GPU_SHAPES)
def test_on_a_gpu(shape, precision):
    """With cuBLAS and CUDA graphs, which are captured in the first of these steps."""
    served = gpu_model(precision, False, **shape)
    prompts = prompts_with_common_beginnings(3, [300, 310, 1, 64, 257], 1000)
    for kind, options in (
        ("half", dict(temperature=1.0, logprobs=2)),
        ("right", dict(temperature=1.0, n=2, **RULES)),
        ("model", dict(seed=3)),
        ("lookup", dict(logit_bias={7: 30.0}, logprobs=0)),
    ):
        plain = dict(max_batch=4, max_seq_len=1024)
        engine = compare(prompts, 60, kind, 7, plain, served=served, **options)
        assert engine.scheduler.speculation.accepted_tokens


# ----------------------------------------------------------------------------- a draft model
class Corrupts(draft_model.DraftModel):
    """One draft of three begins with another token than the model has drawn. wanted: right tokens so far."""

    wanted = 0

    def _first(self, requests):
        super()._first(requests)
        ids = self.runner.batch.ids
        for slot in [request.slot for request in requests if request.length % 3 == 0]:
            ids[slot] = (ids[slot] + 1) % VOCAB
        return ids.copy()

    def draft(self, requests, lengths):
        drafts = super().draft(requests, lengths)
        self.wanted += sum(len(x) for r, x in zip(requests, drafts) if r.length % 3)
        return drafts


def drafting_model(monkeypatch, ahead=False, temperature=1.5):
    """Drafts of the model itself, corrupted, with preemption. -> accepted tokens, and how many should be"""
    monkeypatch.setattr(engine_module, "DraftModel", Corrupts)
    one = sum(Engine(model(), 1, block_tokens=16).cache.block_bytes for _ in range(2))
    plain = dict(block_tokens=16, cache_bytes=8 * one, max_batch=4, prefill_tokens=7)
    sizes = plain | dict(batch_invariant=True, speculate=4, draft_model=model())
    engine = (DraftingAhead if ahead else Drafting)(model(), **sizes)
    options = dict(temperature=temperature, seed=3)
    wanted = Engine(model(), 4, batch_invariant=True).generate(PROMPTS, 24, **options)
    for _ in range(2):
        assert everything(engine.generate(PROMPTS, 24, **options)) == everything(wanted)
        engine.step()
        check_nothing_is_used(engine)
    assert engine.scheduler.preemptions and engine.reused_tokens
    return engine.scheduler.speculation.accepted_tokens, engine.scheduler.speculation.drafter.wanted


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_model(monkeypatch, ahead):
    accepted, wanted = drafting_model(monkeypatch, ahead)
    assert accepted == wanted > 40


NOTE, STATE = Corrupts._note, Corrupts._state


def keeps_the_old_blocks(self, request):
    if request.history is not None:
        request.history.blocks = request.blocks
    return STATE(self, request)


STALE = {
    "the last draft is never computed": ("_note", staticmethod(lambda r, draft: NOTE(r, [*draft, -1]))),
    "blocks of before a preemption": ("_state", keeps_the_old_blocks),
}  # fmt: skip


@pytest.mark.parametrize("planted", STALE.values(), ids=STALE)
def test_a_stale_cache_of_the_draft_model_is_found(monkeypatch, planted):
    monkeypatch.setattr(Corrupts, *planted)
    accepted, wanted = drafting_model(monkeypatch)
    assert accepted < wanted


def test_another_draft_model_adapts_its_lengths():
    """A model that is mostly wrong drafts less and less; times are constant."""
    other = random_model(small(head_dim=16, n_layers=2, max_seq_len=80), 5, "cpu")
    engine = Engine(model(), 2, batch_invariant=True, speculate=6, draft_model=other)
    speculation = engine.scheduler.speculation
    speculation.times.seconds = lambda verifying, size: 1 + 0.1 * size * verifying
    assert engine.generate(PROMPTS, 30) == Engine(model(), 2, batch_invariant=True).generate(
        PROMPTS, 30
    )
    figures = speculation.figures()
    assert 0 < figures["drafted_tokens"] < 3 * figures["drafts"]


def test_a_draft_model_that_does_not_fit():
    more_tokens = random_model(small(head_dim=8, vocab_size=62), device="cpu")
    short = random_model(small(head_dim=8, max_seq_len=20), device="cpu")
    for options, why in (
        (dict(draft_model=model()), "a draft model drafts nothing: set speculate"),
        (dict(draft_model=more_tokens, speculate=2), "has 62 tokens on the cpu, the model 61 on"),
        (dict(draft_model=short, speculate=2), "supports sequences of 20 tokens"),
    ):
        with pytest.raises(UserError, match=why):
            Engine(model(), **options)


# ----------------------------------------------------------------------------- planted faults
class Forgets(scheduler.Scheduler):
    """Keys and values of all drafts count as cached."""

    def _take_verified(self, new, pairs):
        super()._take_verified(new, pairs)
        for request, draft in zip(new.requests, new.drafts):
            request.cached_tokens += len(draft) - speculation.count_accepted(draft, new.drawn[0])


def one_more(draft, drawn):
    return min(speculation.count_accepted(draft, drawn) + 1, len(draft))


def no_steps(self, slots, lengths, steps):
    """The random numbers of all rows of a sequence are those of the first one."""
    WRITE(self, slots, lengths, [min(steps)] * len(steps))


WRITE = verifying.DecodeBatch.write_counters
PLANTED = {
    "one token too many": (scheduler, "count_accepted", one_more),
    "the cache is not rolled back": (Drafting, "scheduler_type", Forgets),
    "one random number for all rows": (verifying.DecodeBatch, "write_counters", no_steps),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found(monkeypatch, planted):
    monkeypatch.setattr(*planted)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        compare(PROMPTS, 24, "half", temperature=1.0)


def test_a_wrong_draft_that_counts_for_penalties_is_found(monkeypatch):
    compare(PROMPTS, 24, "half", **RULES)
    monkeypatch.setattr(verifying, "without_wrong", lambda slots, drawn, drafts: slots)
    with pytest.raises(AssertionError):
        compare(PROMPTS, 24, "half", **RULES)


# ----------------------------------------------------------------------------- what is drafted
def indexed(tokens):
    history = History(tokens)
    history.index(len(tokens))
    return history


def test_prompt_lookup():
    history = indexed([1, 2, 3, 4, 9, 5, 3, 4])
    assert history.predict(3) == [9, 5, 3] and history.matched == 2
    for token in (9, 5):
        history.append(token)
    assert history.predict(6) == [3, 4, 9, 5, 3, 4] and history.matched == 4
    assert history.rates[2].value > 0.5
    history.append(60)
    assert history.predict(3) == [] and history.chances(3) == []
    again = indexed([7] * 3)
    assert again.predict(4) == [7, 7, 7, 7]
    assert indexed([5]).predict(4) == [] and indexed([5, 6, 5]).predict(4) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.data())
def test_a_prompt_is_indexed_in_pieces(tokens, data):
    """Tokens may arrive in between."""
    n = data.draw(st.integers(1, len(tokens)))
    pieces = History(tokens[:n])
    for token in tokens[n:]:
        pieces.index(data.draw(st.integers(0, 9)))
        assert pieces.indexed == len(pieces.tokens) or pieces.predict(3) == []
        pieces.append(token)
    while pieces.index(7):
        pass
    whole = indexed(tokens)
    assert (pieces.tokens, pieces.after) == (whole.tokens, whole.after)
    assert pieces.predict(9) == whole.predict(9)


def test_no_step_indexes_a_long_prompt(monkeypatch):
    monkeypatch.setattr(speculation, "INDEXED", 10)
    long, short = one_request(), one_request([7])
    long.prompt = [1, 2] * 20
    lookup = PromptLookup()
    for indexed_tokens in ((10, None), (20, None), (30, None), (40, 0), (40, 3)):
        lookup.prepare([long, short][: 1 if indexed_tokens[1] is None else 2])
        found = [None if r.history is None else r.history.indexed for r in (long, short)]
        assert tuple(found) == indexed_tokens
    assert lookup.draft([long, short], [4, 0]) == [[1, 2, 1, 2], []]


class Cancels(Guesses):
    """Cancels the request while its drafts are verified."""

    def draft(self, requests, lengths):
        drafts = super().draft(requests, lengths)
        for request in requests:
            request.completion.end("cancelled")
        return drafts


@pytest.mark.parametrize("kind, accepted", [(Guesses, 2), (Cancels, 0)])
def test_what_an_answer_does_not_get_is_not_accepted(kind, accepted):
    plain = Engine(model(), 1, batch_invariant=True)
    (answer,) = plain.generate(PROMPTS[:1], 9, temperature=1.5, seed=2)
    assert answer[2] not in answer[:2]
    engine = Drafting(model(), 1, batch_invariant=True, speculate=5)
    engine.scheduler.speculation.drafter = kind("right", answers_of([answer], PROMPTS))
    stream = engine.stream(PROMPTS[:1], 9, temperature=1.5, seed=2, stop=[answer[2]])
    assert len(list(stream)) == 1 + accepted
    figures = engine.scheduler.speculation.figures()
    assert figures == dict(drafts=1, drafted_tokens=5, accepted_tokens=accepted)


def one_request(completion=(), in_flight=0):
    (request,) = make_requests([[1, 2]], CONFIG, 64, (), 0, max_new_tokens=30)
    request.room = 30
    request.completion[:] = completion
    request.in_flight = in_flight
    return request


class Sure(Guesses):
    def seconds(self, n):
        return 0.0

    def __init__(self, p):
        self.p = p

    def chances(self, request, n):
        return [self.p**i for i in range(1, n + 1)]


class Predicted(Sure):
    """As prompt lookup: the token in flight must be right, too."""

    def chances(self, request, n):
        return super().chances(request, n + request.in_flight)[request.in_flight :]


def rule(p, seconds, most=7):
    """A Speculation that has measured steps: {0: plain, rows: verifying}"""
    chosen = Speculation(Sure(p), most)
    for rows, time in seconds.items():
        for _ in range(speculation.UNTIMED + 1):
            chosen.times.last = 0.0
            chosen.times.arrived(rows > 0, rows or 1, time)
    return chosen


def test_a_step_has_a_largest_number_of_rows(monkeypatch):
    requests = [one_request() for _ in range(3)]
    three = rule(0.9, {0: 1.0})
    three.times.of[False, 4] = three.times.of[False, 1]
    for most, drafted in ((24, 21), (8, 5), (3, 0), (2, 0)):
        monkeypatch.setattr(speculation, "MOST_ROWS", most)
        assert sum(three.lengths(requests, 4)) == drafted


def test_how_many_tokens_are_drafted():
    r = one_request()
    assert rule(0.9, {}).lengths([r], 1) == [0]  # first a plain step is measured
    assert rule(0.9, {0: 1.0}).lengths([r], 1) == [7]
    assert rule(0.9, {0: 1.0, 2: 1.1, 4: 1.2, 8: 9.0}).lengths([r], 1) == [3]
    assert rule(0.1, {0: 1.0, 2: 1.2, 4: 1.3, 8: 1.4}).lengths([r], 1) == [0]
    assert rule(0.3, {0: 1.0, 2: 1.2, 4: 1.5, 8: 2.0}).lengths([r], 1) == [1]
    slow = rule(0.9, {0: 1.0, 2: 1.0})
    slow.drafter.seconds = lambda n: 0.5 * n  # 1 + 0.9 + 0.81 + 0.73 tokens in 2.5
    assert slow.lengths([r], 1) == [3]
    # The most probable drafts of all sequences: 8 rows are cheap, 16 are not.
    many = rule(0.5, {0: 1.0, 8: 1.1, 16: 3.0})
    many.times.of[False, 4] = many.times.of[False, 1]
    assert many.lengths([one_request() for _ in range(4)], 4) == [1, 1, 1, 1]
    # A time that was measured long ago is measured again.
    old = rule(0.9, {0: 1.0, 2: 9.0}, 1)
    assert old.lengths([r], 1) == [0]
    for _ in range(speculation.FORGOTTEN + 1):
        old.times.arrived(False, 1, old.times.last + 1.0)
    assert old.lengths([r], 1) == [1]
    old.times.arrived(True, 2, old.times.last + 1.1)
    assert old.times.seconds(True, 2) == pytest.approx(1.1)
    # An end is near, and a token in flight must be predicted first.
    assert rule(0.9, {0: 1.0}).lengths([one_request([5] * 28)], 1) == [1]
    assert rule(0.9, {0: 1.0}).lengths([one_request([5] * 29)], 1) == [0]
    assert rule(0.9, {0: 1.0}).lengths([one_request([5] * 27, 1)], 1) == [1]
    ahead = rule(0.4, {0: 1.0, 2: 1.2}, 1)
    ahead.drafter = Predicted(0.4)
    assert ahead.lengths([one_request([5])], 1) == [1] and ahead.lengths(
        [one_request([5], 1)], 1
    ) == [0]
