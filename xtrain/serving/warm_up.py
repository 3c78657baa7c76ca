"""Compile every kernel that a request may need before it is needed.

What these kernels are is not written down anywhere: the launchers choose them from dtypes and
shapes. So a new engine runs forward passes of every kind of shape in which nothing is launched but
noted (Runner.every_shape). The kernels that are not in the cache on disk are then compiled in
processes, several at a time:

    Engine(warm_up=True)    the constructor waits for them, as `xtrain serve` does
    Engine()                requests are computed at once; a step that launches a kernel which is
                            still being compiled waits for that one
"""

import copy
import time
from typing import Any

from ..device import free_cached
from ..kernels.runtime.launch import (
    Specialization,
    compile_noted,
    note_launches,
    start_compiling_noted,
)


def compile_ahead(engine: Any) -> None:
    """Begin to compile the kernels of a new Engine on a GPU, which stays as it is."""
    start_compiling_noted(every_launch(engine))
    free_cached(engine.model.device)


def warm_up(engine: Any) -> str:
    """Compile the kernels of a new Engine, and capture CUDA graphs. Return one line for the user.

    CuPy compiles its kernels in this process when they first run, so some requests run while
    other processes compile those of Numba.
    """
    start = time.perf_counter()
    launches = every_launch(engine)
    n_compiled = start_compiling_noted(launches)
    with note_launches() as more:
        run_requests(engine)
    compile_noted(launches | more)
    free_cached(engine.model.device)
    for runner in engine.runners:
        runner.every_graph()
    return f"{n_compiled} kernels compiled, ready in {time.perf_counter() - start:.1f} s"


def every_launch(engine: Any) -> dict[tuple, Specialization]:
    """Return what requests may launch and has not been compiled. Changes nothing."""
    with note_launches() as launches:
        for runner in engine.runners:
            with_few_layers(runner).every_shape(engine.sizes.prefill_tokens)
    return launches


def with_few_layers(runner: Any) -> Any:
    """Return a copy of a Runner whose model shares the weights and has one layer of each kind, as
    they launch the same kernels; all layers of a model with a variation."""
    runner = copy.copy(runner)
    runner.graphed = None  # nothing is launched
    if runner.verifier is not None:
        runner.verifier = copy.copy(runner.verifier)
        runner.verifier.runner = runner
    if runner.model.variation:
        return runner
    first_of_kind: dict[tuple, Any] = {}
    for i, layer in enumerate(runner.model.model.layers):
        attention = layer.self_attn
        first_of_kind.setdefault((i == 0, attention.rotary, attention.window), layer)
    runner.model = copy.copy(runner.model)
    runner.model.model = copy.copy(runner.model.model)
    runner.model.model.layers = list(first_of_kind.values())
    return runner


def run_requests(engine: Any) -> None:
    """Let requests call all of CuPy's operations that a step may, while launches are noted. The
    engine is as new afterwards."""
    runner = engine.runner
    runner.cache.copy_blocks([0], [0], 1)
    runner.batch.ids[:1] = runner.batch.ids[[0]]
    graphed = [each.graphed for each in engine.runners]
    for each in engine.runners:  # a graph would launch nothing that is only noted
        each.graphed = None
    runner.penalties = runner.empty_penalties(8)  # short lists
    prompt = [0] * min(2, engine.max_seq_len - 1)
    options = dict(repetition_penalty=2.0, logit_bias={0: 1.0}, logprobs=1)
    for n in (1, 2):
        engine.generate([prompt], 2, **options, n=n)
    engine.logprobs([[0]], [[0]], 1)
    runner.forget()
    engine.scheduler = engine.make_scheduler()
    runner.penalties = None  # lists are allocated when a request needs them
    for each, before in zip(engine.runners, graphed):
        each.graphed = before
