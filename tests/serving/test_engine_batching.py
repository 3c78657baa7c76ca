"""Continuous batching: scheduling, why sequences end, invalid requests, and the state after a failure."""

import itertools
import sys

import numpy as np
import pytest
from checks import GPU
from run_ahead import AheadRunner
from twins import random_model, small

from xtrain import Engine, UserError
from xtrain.serving import engine, paged_cache, runner, scheduler
from xtrain.serving.options import PREFILL_INTERVAL
from xtrain.serving.requests import REASONS

CONFIG = small(head_dim=16)
FILES = {module.__file__ for module in (engine, runner, scheduler)}


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


@pytest.fixture(autouse=True, params=["as it is", "ahead"])
def way(request, monkeypatch):
    """Run every test twice: also as on a GPU, where a step is launched before the ids of the previous one arrive, with idle
    entries in the batch, and where new requests wait for several steps."""
    if request.param == "ahead":
        monkeypatch.setattr(Engine, "runner_type", AheadRunner)
        monkeypatch.setitem(PREFILL_INTERVAL, "cpu", PREFILL_INTERVAL["gpu"])
    return request.param


def test_steps_run_ahead(model, way):
    served = Engine(model, 2)
    stream = served.stream([[1, 2], [3], [4]], 6)
    for _ in range(4):
        next(stream)
    assert len(served.runner.in_flight) == (1 if served.runner.run_ahead else 0)
    assert served.runner.run_ahead == (way == "ahead" or model.device == "gpu")
    list(stream)
    assert not served.runner.in_flight


def state(served):
    """-> active requests, number of pending requests, free slots, after the step that removes cancelled requests"""
    assert served.step() == []
    return (
        served.scheduler.decoding,
        len(served.scheduler.waiting),
        sorted(served.scheduler.free_slots),
    )


def happened(served, what):
    """-> [(step number, entry)] of one field of the trace"""
    return [(step.number, entry) for step in served.trace for entry in getattr(step, what)]


# ----------------------------------------------------------------------------- scheduling
def test_a_pending_prompt_is_admitted_at_the_step_after_a_slot_frees(model):
    served = Engine(model, 2, prefill_interval=1)
    prompts, wanted = [[1, 2], [3], [4, 5, 6], [7], [8, 9]], [3, 9, 2, 5, 1]
    out = served.generate(prompts, wanted)
    assert [len(x) for x in out] == wanted and all(x.reason == "length" for x in out)
    admitted, ended = dict(), dict()
    for step, (name, slot) in happened(served, "admitted"):
        admitted[name] = (step, slot)
    for step, (name, reason) in happened(served, "ended"):
        ended[name] = step
        assert reason == "length"
    assert admitted[0][0] == admitted[1][0] == 0
    free = sorted(ended.values())
    for i, name in enumerate((2, 3, 4)):  # first come, first served, without delay
        assert admitted[name][0] == free[i] + 1
    # One token at admission, then one in every step: sequences do not wait for each other.
    for name, n in enumerate(wanted):
        steps, first = [s for s, x in happened(served, "decoded") if x == name], admitted[name][0]
        assert steps == list(range(first + 1, first + n))
        assert ended[name] == first + n - 1 + served.runner.run_ahead  # its last token arrives
    assert all(len(step.decoded) <= 2 for step in served.trace)
    alone = [Engine(model, 1).generate([p], n)[0] for p, n in zip(prompts, wanted)]
    assert out == alone


@pytest.mark.parametrize("interval", [1, 4])
def test_sequences_that_decode_wait_for_a_prefill_once_in_an_interval(model, interval):
    served = Engine(model, 3, prefill_interval=interval)
    prompts, wanted = [[i, i + 1] for i in range(1, 13)], [3, 9, 2, 5, 1, 7, 4, 4, 8, 2, 3, 6]
    out = served.generate(prompts, wanted)
    admitted = [s for s in served.trace if s.admitted]
    between = [b.number - a.number for a, b in itertools.pairwise(admitted)]
    # Sooner only if nothing was left to decode.
    early = [b for a, b in itertools.pairwise(admitted) if b.number - a.number < interval]
    assert not any(s.decoded for s in early) and all(s.prefilled for s in admitted)
    assert (min(between) == 1) == (interval == 1), between
    assert len(admitted) < len(prompts) - 2 or interval == 1
    assert out == Engine(model, 1).generate(prompts, wanted)


def test_an_idle_engine_admits_at_once(model):
    served = Engine(model, 2, prefill_interval=100)
    for _ in range(2):
        before = served.steps
        served.generate([[1, 2]], 3)
        assert served.steps - before == 3 + served.runner.run_ahead


def test_all_pending_prompts_are_prefilled_together(model):
    served = Engine(model, 4)
    served.generate([[1, 2], [3], [4, 5, 6], [7]], 3)
    assert [step.prefilled for step in served.trace] == [7, 0, 0] + [0] * served.runner.run_ahead
    assert served.prefilled_tokens == 7 and served.decoded_tokens == 4 * 2


def test_tokens_are_returned_as_they_are_generated(model):
    served = Engine(model, 2)
    stream = served.stream([[1, 2], [3], [4]], [2, 4, 2])
    seen = list(stream)
    assert [[t for i, t in seen if i == n] for n in range(3)] == [
        list(c) for c in stream.completions
    ]
    if not served.runner.run_ahead:
        assert [i for i, _ in seen] == [0, 1, 0, 1, 1, 2, 1, 2]
    first = next(iter(served.stream([[1, 2]], 4)))
    assert first == (0, stream.completions[0][0])


def test_two_streams_share_an_engine(model):
    served = Engine(model, 2)
    a, b = served.stream([[1, 2], [3]], 6), served.stream([[4, 5], [6]], 6)
    seen = {0: [], 1: []}
    while len(seen[0]) + len(seen[1]) < 24:
        for n, stream in enumerate((a, b)):
            token = next(stream, None)
            seen[n] += [token] if token else []
    expected = Engine(model, 4).generate([[1, 2], [3], [4, 5], [6]], 6)
    assert a.completions + b.completions == expected


# ----------------------------------------------------------------------------- why sequences end
def test_a_full_cache_ends_one_sequence_and_the_others_continue(model):
    served = Engine(model, 2, 12)
    long, short = served.generate([[1] * 9, [2, 3]], 9)
    assert long.reason == "full" and len(long) == 3
    assert short.reason == "length" and len(short) == 9
    assert set(REASONS) >= {"full", "length"} and "full" in REASONS["full"]
    assert short == Engine(model, 1).generate([[2, 3]], 9)[0]
    assert long == Engine(model, 1).generate([[1] * 9], 3)[0]
    assert served.generate([[1] * 11], 5)[0].reason == "full"  # room for a single token


def test_a_stop_token_ends_a_sequence(model):
    free = Engine(model, 2).generate([[1, 2], [3]], 10)
    stop = free[0][4]
    out = Engine(model, 2).generate([[1, 2], [3]], 10, stop=[stop, 60])
    for got, without in zip(out, free):
        n = next((i + 1 for i, token in enumerate(without) if token in (stop, 60)), 10)
        assert got == without[:n] and got.reason == (
            "stop" if n < 10 or got[-1] == stop else "length"
        )


def test_cancelling_and_leaving_early_free_the_slots(model):
    served = Engine(model, 2)
    stream = served.stream([[1, 2], [3], [4]], 10)
    for number, _ in stream:
        if number == 0:
            stream.cancel(0)
    assert [c.reason for c in stream.completions] == ["cancelled", "length", "length"]
    assert len(stream.completions[0]) == 1 and state(served) == ([], 0, [0, 1])
    stream = served.stream([[1, 2], [3], [4]], 10)
    next(stream)
    assert len(served.scheduler.decoding) == 2 and len(served.scheduler.waiting) == 1
    stream.close()
    assert state(served) == ([], 0, [0, 1])
    assert [c.reason for c in stream.completions] == ["cancelled"] * 3
    stream = served.stream([[1, 2]], 10)
    next(stream)
    del stream
    assert state(served) == ([], 0, [0, 1])
    assert served.generate([[3]], 4) == Engine(model, 1).generate([[3]], 4)


def test_a_stream_that_was_never_started(model):
    served = Engine(model, 1, 20)
    closed, cancelled = served.stream([[1, 2]], 5), served.stream([[1], [2]], 3)
    closed.close()
    cancelled.cancel(0)
    assert closed.completions[0].reason == "cancelled" and list(closed) == []
    assert [number for number, _ in cancelled] == [1, 1, 1]
    assert (
        served.scheduler.submitted == 1
        and served.prefilled_tokens == 1
        and served.scheduler.free_slots == [0]
    )


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_cancelling_in_the_middle_of_a_step(model, monkeypatch, when):
    """As when a deleted stream is garbage-collected while another one computes."""
    served = Engine(model, 3)
    forgotten = served.stream([[1, 2], [8]], 10)
    for _ in range(4):
        next(forgotten)
    compute = getattr(served.cache, when)

    def interrupted(*args):
        forgotten.cancel(0)
        return compute(*args)

    monkeypatch.setattr(served.cache, when, interrupted)
    assert served.generate([[3], [4, 5]], 6) == Engine(model, 2).generate([[3], [4, 5]], 6)
    list(forgotten)
    assert [c.reason for c in forgotten.completions] == ["cancelled", "length"]
    assert forgotten.completions[1] == Engine(model, 1).generate([[8]], 10)[0]
    assert sorted(served.scheduler.free_slots) == [0, 1, 2] and not served.scheduler.decoding


def test_nan_logits_end_the_sequence(way):
    if way == "ahead" and not GPU:
        pytest.skip("the embedding on the CPU refuses the id -1 of the step that runs ahead")
    model = random_model(CONFIG)
    name, tensor = next(iter(model.named_parameters()))
    values = tensor.data.copy()
    values[7] = np.nan  # the embedding of token 7
    tensor.data = values
    bad, good = Engine(model, 2).generate([[1, 7], [3]], 5)
    assert name == "model.embed_tokens.weight" and bad == [] and bad.reason == "nan"
    assert len(good) >= 1 and good.reason in ("length", "nan")


# ----------------------------------------------------------------------------- invalid arguments
REFUSED = [
    (dict(prompts=[[1], []]), "prompt 1 is empty"),
    (dict(prompts=[[1, 61]]), "prompt 0 holds the token 61: ids must be from 0 to 60"),
    (dict(prompts=[[-1]]), "holds the token -1"),
    (dict(prompts=[[1] * 20]), "prompt 0 has 20 tokens, which leaves no room"),
    (dict(prompts=[1, 2]), "prompt 0 must be a list of token ids, got 1"),
    (dict(prompts=None), "prompts must be a list of lists of token ids, got NoneType"),
    (dict(prompts=[[1.5]]), "must be a list of token ids, got [1.5]"),
    (dict(prompts=["12"]), "must be a list of token ids, got '12'"),
    (dict(max_new_tokens=0), "max_new_tokens must be a positive whole number, got 0"),
    (dict(max_new_tokens=[1, 2]), "max_new_tokens has 2 values for 1 prompts"),
    (dict(temperature=-1), "temperature"),
    (dict(temperature=float("nan")), "temperature"),
    (dict(temperature="hot"), "temperature must be a number, got 'hot'"),
    (dict(top_k=-1, temperature=1), "top_k"),
    (dict(top_p=0), "top_p"),
    (dict(top_p=1.5), "top_p"),
    (dict(seed=-1), "seed must be a whole number from 0"),
    (dict(seed=2**63), "seed must be"),
    (dict(stop=["x"]), "stop must hold token ids"),
    (dict(stop="12"), "stop must hold token ids, got '12'"),
    (dict(temperature=1e39), "temperature inf: expected 0 (greedy), or a finite number"),
    (dict(temperature=10**400), "sampling: int too large"),
    (dict(temperature=1.0, top_p=1e-50), "top_p 0.0: expected more than 0"),
    (dict(min_p=1.5), "min_p 1.5: expected 0 (off) to 1"),
    (dict(min_p="0"), "min_p must be a number, got '0'"),
    (dict(repetition_penalty=0), "repetition_penalty 0: expected more than 0"),
    (dict(repetition_penalty=float("nan")), "repetition_penalty nan"),
    (dict(repetition_penalty=10**400), "repetition_penalty 1000"),
    (dict(presence_penalty=float("inf")), "presence_penalty inf: expected -100 to 100"),
    (dict(presence_penalty=None), "presence_penalty must be a number, got None"),
    (dict(frequency_penalty=[1, 2]), "frequency_penalty has 2 values for 1 prompts"),
    (dict(logit_bias={61: 1}), "logit_bias holds the token 61: ids must be from 0 to 60"),
    (dict(logit_bias={1: 101}), "logit_bias 101: expected -100 to 100"),
    (dict(logit_bias={1: float("nan")}), "logit_bias nan"),
    (dict(logit_bias={"1": 1}), "logit_bias must be a dict from token ids to numbers"),
    (dict(logit_bias=5), "logit_bias must be a dict"),
    (dict(logprobs=21), "logprobs must be a whole number from 0 to 20, or None, got 21"),
    (dict(logprobs=True), "logprobs must be"),
    (dict(logprobs=1.0), "logprobs must be"),
]  # fmt: skip


@pytest.mark.parametrize("options, words", REFUSED, ids=[words for _, words in REFUSED])
def test_invalid_requests(model, options, words):
    served = Engine(model, 2, 20)
    with pytest.raises(UserError) as caught:
        served.generate(**({"prompts": [[1, 2]]} | options))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not served.trace and len(served.scheduler.free_slots) == 2


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(max_batch=0), "max_batch must be a positive whole number, got 0"),
        (dict(max_batch=2.0), "max_batch"),
        (dict(max_seq_len=1), "max_seq_len 1 must be at least 2 and at most 48"),
        (dict(max_seq_len=49), "at most 48, the longest sequence of the model"),
        (dict(prefill_tokens=0), "prefill_tokens"),
        (dict(prefill_interval=0), "prefill_interval"),
        (dict(max_batch=True), "max_batch must be a positive whole number, got True"),
        (dict(max_seq_len="40"), "max_seq_len must be a positive whole number, got '40'"),
        (dict(max_seq_len=40.0), "max_seq_len must be"),
        (dict(block_tokens=24), "block_tokens must be 16, 32, 64"),
        (dict(gpu_memory=1.5), "gpu_memory must be a share"),
        (dict(cache_bytes=100), "room for 0 tokens, one sequence may have 48: choose a smaller"),
        (
            dict(model="folder"),
            r"model must be a Transformer, got str: make one with Transformer.from_pretrained",
        ),
    ],
)
def test_invalid_engines(model, options, words):
    with pytest.raises(UserError, match=words):
        Engine(**({"model": model} | options))


@pytest.mark.skipif(GPU, reason="on a GPU, gpu_memory limits the cache")
def test_free_memory_limits_the_cache_of_a_cpu(model, monkeypatch):
    """Linux grants more than it has: without the limit a full cache would get the process killed."""
    whole = Engine(model, 8, block_tokens=16).cache
    for blocks in (24, 5):
        free = int((blocks + 0.5) * whole.block_bytes / paged_cache.HOST_SHARE)
        monkeypatch.setattr(paged_cache, "free_memory", lambda free=free: free)
        assert Engine(model, 8, block_tokens=16).cache.n_blocks == min(blocks, whole.n_blocks)
    monkeypatch.setattr(paged_cache, "free_memory", lambda: 2 * whole.block_bytes)
    with pytest.raises(UserError, match="room for 16 tokens, one sequence may have 48: choose a"):
        Engine(model, 8, block_tokens=16)


def test_ctrl_c_while_waiting_for_ids(model, monkeypatch):
    """It ends the stream that is being iterated; another stream of the same engine loses no token.

    Both streams begin together: after a prefill interval of a GPU, the first would have ended before it waits for ids."""
    alone = Engine(model, 2).generate([[4, 5, 6]], 12)
    served = Engine(model, 2, prefill_interval=1)
    first, second = served.stream([[1, 2]], 12), served.stream([[4, 5, 6]], 12)
    next(first), next(second), next(first), next(second)
    real, left = served.runner.read_ids_later, [1]

    def read_ids_later(*args):
        then = real(*args)

        def wait():
            if left.pop() if left else 0:
                raise KeyboardInterrupt
            return then()

        return wait

    served.step()  # collects the step in flight, if there is one
    monkeypatch.setattr(served.runner, "read_ids_later", read_ids_later)
    with pytest.raises(KeyboardInterrupt):
        list(first)
    list(second)
    assert (
        second.completions == alone
        and not served.scheduler.decoding
        and not served.runner.in_flight
    )


def interrupt_at(model, at, visit):
    """Ctrl-C before line `at` of the engine runs for the `visit`-th time. -> the lines that ran; the state afterwards"""
    served, lines = Engine(model, 4), []
    second = served.stream([[4, 5, 6]], 4, presence_penalty=1.0, logprobs=1)
    first = served.stream([[1, 2], [3]], 2, n=2)
    next(second)

    def watch(frame, event, _):
        file = frame.f_code.co_filename
        if file not in FILES:
            return None
        if event == "line":
            line = (file, frame.f_lineno)
            lines.append(line)
            if line == at and lines.count(at) == visit:
                sys.settrace(None)
                raise KeyboardInterrupt
        return watch

    before = sys.gettrace()
    try:
        sys.settrace(watch)
        list(first)
    except KeyboardInterrupt:
        first.close()
    finally:
        sys.settrace(before)
    list(second)
    assert all(completion.reason for completion in first.completions)
    assert len(second.completions[0].logprobs) == len(second.completions[0])
    return lines, (second.completions[0], *state(served))


def test_ctrl_c_between_any_two_statements(way):
    """It ends the stream that is being iterated. Another stream of the same engine loses no token, and no slot is lost."""
    model = random_model(small(head_dim=16, n_layers=1), device="cpu")
    alone = Engine(model, 2).generate([[4, 5, 6]], 4, presence_penalty=1.0)
    expected = (alone[0], [], 0, [0, 1, 2, 3])
    lines, result = interrupt_at(model, None, 0)
    assert result == expected and len(set(lines)) > 100
    chosen = sorted(set(lines))
    if way != "ahead":  # a third of the last times
        chosen = chosen[::3]
    for line in chosen:
        visit = 1 if way == "ahead" else lines.count(line)  # the first or the last time
        ran, result = interrupt_at(model, line, visit)
        assert ran.count(line) == visit and result == expected, f"line {line}, time {visit}"


def test_prompts_in_any_container(model):
    want = Engine(model, 2, 20).generate([[1, 2], [3, 4]], 5)
    for prompts in (
        ((1, 2), (3, 4)),
        np.array([[1, 2], [3, 4]]),
        (iter(x) for x in ([1, 2], [3, 4])),
    ):
        assert Engine(model, 2, 20).generate(prompts, np.array(5), np.array(0.0)) == want


def test_no_memory_for_the_cache(model, monkeypatch):
    def full(*args):
        raise MemoryError("Unable to allocate")

    monkeypatch.setattr(paged_cache, "empty_kv_cache", full)
    with pytest.raises(
        UserError, match=r"not enough memory for a KV cache of 0.00 GB \(2 blocks of 64 tokens\)"
    ):
        Engine(model, 2)


def test_a_cache_larger_than_any_memory(monkeypatch):
    model = random_model(CONFIG, device="cpu")
    with pytest.raises(UserError, match=r"max_batch must be at most 65536, got 10{15}$"):
        Engine(model, 10**15)
    monkeypatch.setattr(paged_cache, "empty_kv_cache", lambda *_: np.empty(2**60))
    with pytest.raises(UserError, match=r"not enough memory for a KV cache of .* GB \(7 blocks of"):
        Engine(model, 7)


def test_a_failure_in_the_middle_loses_no_slot(model, monkeypatch):
    served = Engine(model, 2)
    expected = served.generate([[1, 2], [3]], 4)
    prefill = served.cache.prefill

    def fails(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(served.cache, "prefill", fails)
    with pytest.raises(KeyboardInterrupt):
        served.generate([[1, 2], [3], [4]], 4)
    assert state(served) == ([], 0, [0, 1])
    monkeypatch.setattr(served.cache, "prefill", prefill)
    assert served.generate([[1, 2], [3]], 4) == expected
