"""No request waits for a compiler: an engine knows at its start every kernel that a request may need."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_ahead import Drafting
from twins import random_model, small

from xtrain import Engine, Transformer
from xtrain.kernels.runtime import compile as _compile
from xtrain.kernels.runtime import launch as _launch
from xtrain.kernels.runtime.launch import note_launches
from xtrain.nn import quantized
from xtrain.nn.cuda_graph import EAGER_CALLS
from xtrain.nn.draft_heads import DraftHeads
from xtrain.nn.modules import Linear
from xtrain.serving.adapters import Adapters, SwitchedLinear
from xtrain.serving.runner import Runner
from xtrain.serving.warm_up import compile_ahead, every_launch, run_requests, warm_up
from xtrain.simulator import SimArray

WIDE = dict(vocab_size=64, dim=64, n_layers=2, head_dim=16, hidden_dim=96, max_seq_len=400)
EXACT = dict(batch_invariant=True)
WINDOWS = dict(
    sliding_window=40, full_attention_layers=(1,), no_rope_layers=(1,), tie_embeddings=True
)
MODELS = {
    "fp32": (small(**WIDE), "fp32", {}),
    "fp32, batch-invariant": (small(**WIDE), "fp32", EXACT),
    "bf16": (small(**WIDE), "bf16", {}),
    "bf16, batch-invariant": (small(**WIDE), "bf16", EXACT),
    "bf16, tied, windows, without QK-norm": (small(**WIDE, qk_norm=False, **WINDOWS), "bf16", {}),
    "int8": (small(**WIDE), "bf16", dict(weights="int8")),
    "prompt lookup": (small(**WIDE), "bf16", dict(speculate=4)),
    "prompt lookup, batch-invariant": (small(**WIDE), "bf16", dict(speculate=4, logprobs_of="sampled", **EXACT)),
    "draft model": (small(**WIDE | dict(n_layers=3)), "bf16", dict(speculate=4, draft_model="bf16")),
    "draft heads": (small(**WIDE), "bf16", dict(speculate=4, draft_model="heads")),
    "adapters": (small(**WIDE), "bf16", {}),
    "fp8 cache": (small(**WIDE | dict(head_dim=32)), "bf16", dict(kv_cache="fp8")),
}  # fmt: skip
every_model = pytest.mark.parametrize("model", MODELS)
MAX_BATCH = 12  # products of up to 8 rows and of more
# sequences at a time, tokens of a block, blocks: with few of them sequences are preempted
SIZES = [(1, 64, 7), (3, 16, 25), (MAX_BATCH, 16, 30), (MAX_BATCH, 64, 84)]


class Anything:
    """A constraint that allows every token."""

    ready, ended = True, None

    def start(self):
        return Anything()

    def accept(self, token):
        pass

    @staticmethod
    def masks_into(pairs):
        for _, row in pairs:
            row[:] = -1


length = st.one_of(st.integers(1, 20), st.integers(1, 399))
# of a request, besides its prompt
CHOICES = dict(
    temperature=[0.0, 0.8],
    top_k=[None, 1, 50],
    top_p=[1.0, 0.5],
    min_p=[0.0, 0.1],
    repetition_penalty=[1.0, 1.3],
    frequency_penalty=[0.0, 0.5],
    logit_bias=[None, {3: -1.0}],
    min_new_tokens=[0, 1],
    allowed_token_ids=[None, {0, 5}],
    logprobs=[None, 0, 5],
    grammar=[None, Anything()],
)
one_of = {name: st.sampled_from(values) for name, values in CHOICES.items()}
request = st.fixed_dictionaries(
    dict(
        first=st.integers(1, 3),
        shared=length,
        own=length,
        max_new_tokens=st.sampled_from([1, 2, 3, 30]),
    )
    | one_of
)
stream = st.fixed_dictionaries(
    dict(
        requests=st.lists(request, min_size=1, max_size=12),
        cancelled=st.sets(st.integers(0, 30)),
        n=st.integers(1, 3),
        top=st.sampled_from([None, 0, 2]),  # of the log-probabilities of the prompts
        adapted=st.booleans(),
    )
)


@functools.cache
def weights(model, device):
    config, precision, _ = MODELS[model]
    made = Transformer(config, None, device, precision, trainable=False)
    if model == "adapters":
        add_zeros(made)
    return made


def add_zeros(model):
    """Add an adapter of zeros to every matrix."""
    model.adapters = Adapters(["zeros"])
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, linear in [(n, m) for n, m in vars(module).items() if type(m) is Linear]:
                switched = SwitchedLinear(linear, model.adapters)
                width = linear.weight.shape[1]
                pairs = {
                    part: (np.zeros((4, width)), np.zeros((rows, 4)))
                    for part, rows in linear.weight.parts.items()
                }
                switched.pack([pairs], model.device, model.branch_dtype)
                setattr(module, name, switched)


def make(model, device, kind=Engine, max_batch=MAX_BATCH, **options):
    sizes = dict(max_batch=max_batch, max_seq_len=400, prefill_tokens=300)
    more = dict(MODELS[model][2])
    if more.get("draft_model") == "heads":
        more["draft_model"] = heads = DraftHeads(WIDE["dim"], 3)
        heads.arena = heads.make_arena(device, None, True, trainable=False)
    elif "draft_model" in more:
        more["draft_model"] = weights(more["draft_model"], device)
    return kind(weights(model, device), **sizes, **more, **options)


class ArrayOperations:
    """The operations on arrays of the device for which CuPy would compile a kernel, as (name, dtypes, axes).

    In the simulator these are NumPy's operations on SimArrays: indexing and ufuncs. CuPy compiles one
    kernel for each operation, for dtypes and numbers of axes; contiguity, and what only the branches for a GPU do, is
    not modelled.
    """

    def __init__(self, monkeypatch):
        self.found = set()
        get, put = SimArray.__getitem__, SimArray.__setitem__

        def getitem(array, index):
            result = get(array, index)
            if is_list(index):
                self.found.add(("take", array.dtype.name, array.ndim))
            return result

        def setitem(array, index, value):
            kinds = array.dtype.name, getattr(value, "dtype", np.dtype(type(value))).name
            if is_list(index):
                self.found.add(("scatter", *kinds, array.ndim))
            elif array.size:
                self.found.add(("copy", *kinds, np.ndim(get(array, index))))
            put(array, index, value)

        def ufunc(array, function, method, *inputs, out=(), **options):
            plain = [x.view(np.ndarray) if type(x) is SimArray else x for x in (*inputs, *out)]
            if function is not np.matmul:  # cuBLAS
                self.found.add((function.__name__, *(np.asarray(x).dtype.name for x in plain)))
            results = {"out": tuple(plain[len(inputs) :])} if out else {}
            result = getattr(function, method)(*plain[: len(inputs)], **results, **options)
            return result.view(SimArray) if isinstance(result, np.ndarray) else result

        for name, function in (("getitem", getitem), ("setitem", setitem), ("array_ufunc", ufunc)):
            monkeypatch.setattr(SimArray, f"__{name}__", function, raising=False)


def is_list(index):
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, (list, np.ndarray)) for part in parts)


@functools.cache
def in_simulator(model, max_batch=MAX_BATCH, block_tokens=64, n_blocks=84):
    """-> an engine, the kernels that it compiles at its start, and the operations that it runs before it is ready

    Its kernels do not run, so all its tokens are 0.
    """
    with pytest.MonkeyPatch.context() as patch, note_launches():
        patch.setattr(quantized, "check_finite", lambda *_: None)  # no kernel has quantized
        engine = make(model, "sim", max_batch=max_batch, block_tokens=block_tokens)
    scheduler = engine.make_scheduler
    limits, version = scheduler.args
    limits = dataclasses.replace(limits, n_blocks=n_blocks)
    engine.make_scheduler = functools.partial(scheduler.func, limits, version, **scheduler.keywords)
    with pytest.MonkeyPatch.context() as patch, note_launches() as more:
        operations = ArrayOperations(patch)
        launches = every_launch(engine)
        run_requests(engine)
    assert more.keys() <= launches.keys()
    if engine.scheduler.speculation is not None:  # every draft pays
        engine.scheduler.speculation._count = lambda drafts, B, size: len(drafts)
    return engine, launches, operations.found


def serve(engine, requests, cancelled, n, top, adapted):
    """Rounds of requests whose prompts begin with the same tokens, those of earlier rounds among them."""
    prompts = [([r["first"]] * r["shared"] + [4] * r["own"])[:393] for r in requests]
    if top is not None:
        engine.logprobs([p for p in prompts if len(p) > 1], top=top)
    options = {name: [r[name] for r in requests] for name in ("max_new_tokens", *CHOICES)}
    adapter = "zeros" if adapted and engine.model.adapters is not None else None
    stream = engine.stream(prompts, **options, n=n, adapter=adapter)
    for i, (number, _) in enumerate(stream):
        if i % 3 == 0 and number in cancelled:
            stream.cancel(number)


@every_model
@settings(max_examples=6, deadline=None)
@given(size=st.sampled_from(SIZES), stream=stream)
def test_no_request_waits_for_a_compilation(model, size, stream):
    """Nothing is launched, and no operation of CuPy runs, that was not prepared."""
    if model == "adapters":  # one engine
        size = SIZES[2]
    engine, known, prepared = in_simulator(model, *size)
    with pytest.MonkeyPatch.context() as patch, note_launches() as needed:
        operations = ArrayOperations(patch)
        serve(engine, **stream)
    missing = [s.kernel.py_func.__name__ for key, s in needed.items() if key not in known]
    assert needed and not missing
    assert operations.found and not operations.found - prepared


@pytest.mark.parametrize("model", [name for name in MODELS if name != "adapters"])
def test_every_number_of_rows(model):
    """One prompt of each length up to the longest prefill, which is above every number that kernels are chosen by."""
    engine, known, _ = in_simulator(model)
    for n in [*range(1, 40), *range(40, 300, 7), 263, 264, 265, 299]:
        with note_launches() as needed:
            engine.generate([[1] * n], 1)
        assert needed and needed.keys() <= known.keys(), n


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
    """Compiles nothing for 4 rows."""

    def prefill_shape(self, n):
        return n == 4 or super().prefill_shape(n)

    def decode(self, b, *how):
        return b == 4 or super().decode(b, *how)


class ForgetfulEngine(Engine):
    runner_type = Forgetful


def test_a_forgotten_shape_is_found():
    """A product of 4 rows has a kernel of its own in float32, and a prompt of 3 tokens has 4."""
    engine = make("fp32", "sim", kind=ForgetfulEngine)
    known = every_launch(engine)
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


def test_a_new_engine_compiles_what_requests_may_need(monkeypatch):
    """Every kernel once, in other processes; the engine itself stays as it is."""
    engine, known, _ = in_simulator("bf16")
    jobs = []
    monkeypatch.setattr(_launch, "start_compiling", jobs.extend)
    before = dict(vars(engine.runner))
    compile_ahead(engine)
    assert set(jobs) == {(s.kernel, s.types) for s in known.values()}
    assert len(set(jobs)) == len(jobs) and vars(engine.runner) == before


def test_nothing_stays_of_the_warm_up():
    """On the CPU, where there is nothing to compile. A graph of requests with penalties would keep the addresses of
    what the warm-up frees."""
    model = random_model(small(head_dim=16), device="cpu")
    engine, fresh = NoShapesEngine(model, 3, 40), Engine(model, 3, 40)
    assert engine.ready == ""
    captured = []
    engine.model.adapters = Adapters([])

    def graphed(variant):
        captured.append(variant)
        assert (
            model.adapters.rows is engine.runner.batch.device["adapter"]
        )  # whose address graphs keep
        return variant[0](*variant[1:])

    engine.runner.graphed = graphed
    ready = warm_up(engine)
    runner = engine.runner
    plain = [(runner.decode, size, False, False, False) for size in (3, 2, 1)]
    assert captured == [variant for variant in plain for _ in range(EAGER_CALLS + 1)]
    assert runner.graphed is graphed
    runner.graphed = None
    model.adapters = None
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
    for stream in drawn_streams():
        serve(engine, **stream)


@pytest.mark.gpu
def test_an_engine_compiles_every_kernel_once(monkeypatch, tmp_path):
    """In other processes; requests are computed at the same time."""
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(_launch, "_plans", {})
    monkeypatch.setattr(_compile, "_compile", refuse)
    written, write = [], _compile._write
    monkeypatch.setattr(
        _compile, "_write", lambda path, *code: written.append(path) or write(path, *code)
    )
    engine = make("bf16", "gpu")
    for stream in drawn_streams():
        serve(engine, **stream)
    assert written and len(set(written)) == len(written)


def drawn_streams():
    """Some streams of requests, without hypothesis."""
    draw = np.random.default_rng(0)
    pick = lambda values: values[draw.integers(len(values))]
    for top in (None, 0, None, 2, None, None):
        requests = [
            dict(
                first=int(draw.integers(1, 4)),
                shared=int(draw.integers(1, 200)),
                own=int(draw.integers(1, 200)),
                max_new_tokens=int(draw.integers(1, 12)),
            )
            | {name: pick(values) for name, values in CHOICES.items()}
            for _ in range(int(draw.integers(1, 20)))
        ]
        cancelled = set(draw.integers(0, 20, 3).tolist())
        n = int(draw.integers(1, 4))
        yield dict(requests=requests, cancelled=cancelled, n=n, top=top, adapted=n > 1)
