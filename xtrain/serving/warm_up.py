"""Compile every kernel that a request may need before the first request, so that none waits for a
compiler."""

import time
from typing import Any

from ..device import free_cached
from ..kernels.runtime.launch import compile_noted, note_launches


def warm_up(engine: Any) -> str:
    """Compile the kernels of an idle Engine, which is as new afterwards. Return one line for the
    user.

    Numba's kernels are compiled in parallel. CuPy compiles its kernels when they first run, so some
    requests run.
    """
    start = time.perf_counter()
    runner = engine.runner
    with note_launches() as launches:
        for each in engine.runners:
            each.every_shape(engine.sizes.prefill_tokens)
    n_compiled = compile_noted(launches)
    free_cached(engine.model.device)
    runner.cache.copy_blocks([0], [0], 1)
    runner.batch.ids[:1] = runner.batch.ids[[0]]
    graphed = runner.graphed
    runner.graphed = None  # a graph would keep the addresses of the short lists
    runner.penalties = runner.empty_penalties(8)  # short lists
    prompt = [0] * min(2, engine.max_seq_len - 1)
    options = dict(repetition_penalty=2.0, logit_bias={0: 1.0}, logprobs=1)
    for n in (1, 2):
        engine.generate([prompt], 2, **options, n=n)
    engine.logprobs([[0]], [[0]], 1)
    runner.forget()
    engine.scheduler = engine.make_scheduler()
    runner.penalties = None  # lists are allocated when a request needs them
    runner.graphed = graphed
    return f"{n_compiled} kernels compiled, ready in {time.perf_counter() - start:.1f} s"
