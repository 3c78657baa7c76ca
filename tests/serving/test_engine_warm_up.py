"""No request waits for a compiler: an engine knows at its start every kernel that a request may need."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import random_model, small

from xtrain import Engine, Transformer
from xtrain.kernels.runtime import launch as _launch
from xtrain.kernels.runtime.launch import note_launches
from xtrain.serving.runner import Runner
from xtrain.serving.speculation import Speculation
from xtrain.serving.warm_up import warm_up

WIDE = dict(vocab_size=64, dim=64, n_layers=2, head_dim=16, hidden_dim=96, max_seq_len=400)
MODELS = {
    "fp32": (small(**WIDE), "fp32", False),
    "fp32, batch-invariant": (small(**WIDE), "fp32", True),
    "bf16": (small(**WIDE), "bf16", False),
    "bf16, batch-invariant": (small(**WIDE), "bf16", True),
    "bf16, tied, without QK-norm": (small(**WIDE, qk_norm=False, tie_embeddings=True), "bf16", False),
}  # fmt: skip
every_model = pytest.mark.parametrize("model", MODELS)
MAX_BATCH = 12  # products of up to 8 rows and of more

length = st.one_of(st.integers(1, 20), st.integers(1, 399))
# (length of the prompt, max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, logprobs)
CHOICES = (
    [0.0, 0.8],
    [None, 1, 50],
    [1.0, 0.5],
    [0.0, 0.1],
    [1.0, 1.3],
    [None, {3: -1.0}],
    [None, 0, 5],
)
NAMES = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
)
request = st.tuples(length, st.integers(1, 6), *map(st.sampled_from, CHOICES))


def make(model, device, kind=Engine, **options):
    config, precision, batch_invariant = MODELS[model]
    weights = Transformer(config, None, device, precision, trainable=False)
    return kind(weights, MAX_BATCH, 400, batch_invariant, prefill_tokens=300, **options)


def every_shape(engine):
    engine.runner.every_shape(engine.sizes.prefill_tokens)


@functools.cache
def in_simulator(model):
    """-> an engine, and what it compiles at its start. Its kernels do not run, so all its tokens are 0."""
    engine = make(model, "sim")
    with note_launches() as known:
        every_shape(engine)
    return engine, known


def serve(engine, requests, cancelled):
    lengths, *options = map(list, zip(*requests))
    engine.logprobs([[2] * n for n in lengths if n > 1], top=len(requests) % 3)
    stream = engine.stream([[1] * n for n in lengths], **dict(zip(NAMES, options)))
    for i, (number, _) in enumerate(stream):
        if i % 3 == 0 and number in cancelled:
            stream.cancel(number)


@every_model
@settings(max_examples=8, deadline=None)
@given(requests=st.lists(request, min_size=1, max_size=20), cancelled=st.sets(st.integers(0, 19)))
def test_no_request_needs_another_kernel(model, requests, cancelled):
    engine, known = in_simulator(model)
    with note_launches() as needed:
        serve(engine, requests, cancelled)
    missing = [s.kernel.py_func.__name__ for key, s in needed.items() if key not in known]
    assert needed and not missing


@every_model
def test_every_number_of_rows(model):
    """One prompt of each length up to the longest prefill, which is above every number that kernels are chosen by."""
    engine, known = in_simulator(model)
    for n in [*range(1, 40), *range(40, 300, 7), 263, 264, 265, 299]:
        with note_launches() as needed:
            engine.generate([[1] * n], 1)
        assert needed and needed.keys() <= known.keys(), n


class Eager(Speculation):
    """Drafts whatever the time is."""

    def _count(self, drafts, B, size):
        return len(drafts)


class Drafting(Engine):
    speculation_type = Eager


@pytest.mark.parametrize("model", ["fp32", "bf16", "bf16, batch-invariant"])
@pytest.mark.parametrize("draft_model", [False, True])
def test_drafts_need_no_other_kernel(model, draft_model):
    config, precision, _ = MODELS[model]
    more = {}
    if draft_model:
        more["draft_model"] = Transformer(config, None, "sim", precision, trainable=False)
    engine = make(model, "sim", Drafting, speculate=3, **more)
    with note_launches() as known:
        for each in engine.runners:
            each.every_shape(engine.sizes.prefill_tokens)
    for n, options in ((1, {}), (2, {}), (5, dict(repetition_penalty=1.3, logprobs=2))):
        with note_launches() as needed:
            engine.generate([[1] * 20] * n, 9, **options)
        missing = [s.kernel.py_func.__name__ for key, s in needed.items() if key not in known]
        assert needed and not missing
    assert engine.scheduler.speculation.accepted_tokens


class Forgetful(Runner):
    """Compiles nothing for 3 rows."""

    def prefill_shape(self, n):
        return n == 3 or super().prefill_shape(n)

    def decode(self, b, *how):
        return b == 3 or super().decode(b, *how)


class ForgetfulEngine(Engine):
    runner_type = Forgetful


def test_a_forgotten_shape_is_found():
    """A product of 3 rows has a kernel of its own in float32."""
    engine = make("fp32", "sim", kind=ForgetfulEngine)
    with note_launches() as known:
        every_shape(engine)
    with note_launches() as needed:
        engine.generate([[1] * 3], 1)
    missing = {s.kernel.py_func.__name__ for key, s in needed.items() if key not in known}
    assert missing == {"gemv_plain_kernel"}


def refuse(*args, **options):
    raise AssertionError("must not be called here")


class NoShapes(Runner):
    def every_shape(self, prefill_tokens):
        pass


class NoShapesEngine(Engine):
    runner_type = NoShapes


def test_nothing_stays_of_the_warm_up():
    """On the CPU, where there is nothing to compile."""
    model = random_model(small(head_dim=16), device="cpu")
    engine, fresh = NoShapesEngine(model, 3, 40), Engine(model, 3, 40)
    assert engine.ready == ""
    engine.runner.graphed = refuse  # a graph would keep the addresses of what the warm-up frees
    ready = warm_up(engine)
    assert engine.runner.graphed is refuse
    engine.runner.graphed = None
    assert ready.startswith("0 kernels compiled, ready in ")
    assert (engine.steps, engine.scheduler.submitted, len(engine.trace)) == (0, 0, 0)
    assert engine.prefilled_tokens == engine.reused_tokens == engine.decoded_tokens == 0
    assert (
        engine.scheduler.pool.available
        == len(engine.scheduler.pool.free)
        == engine.scheduler.pool.size
    )
    prompts = [[0, 0, 5], [0, 0], [7] * 20, [3]]
    options = dict(max_new_tokens=8, temperature=[0, 1, 0, 1], seed=3)
    assert engine.generate(prompts, **options) == fresh.generate(prompts, **options)
    assert [s.admitted for s in engine.trace] == [s.admitted for s in fresh.trace]


@pytest.mark.gpu
@every_model
def test_no_request_waits_for_a_compiler(model, monkeypatch, tmp_path):
    """Neither Numba's nor CuPy's, and no machine code is read from the disk."""
    import cupy

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))  # empty
    engine = make(model, "gpu", warm_up=True)
    assert "kernels compiled, ready in" in engine.ready

    monkeypatch.setattr(_launch, "load_function", refuse)
    monkeypatch.setattr(cupy.cuda.compiler, "compile_using_nvrtc", refuse)
    draw = np.random.default_rng(0)
    for _ in range(6):
        n = int(draw.integers(1, 20))
        pick = lambda values: values[draw.integers(len(values))]
        rows = [
            (int(draw.integers(1, 399)), int(draw.integers(1, 12)), *map(pick, CHOICES))
            for _ in range(n)
        ]
        serve(engine, rows, set(draw.integers(0, 20, 3).tolist()))
