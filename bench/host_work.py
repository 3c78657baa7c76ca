"""The host's work for rollouts: calls and CPU time of an engine with free forward passes.

Needs no GPU.

    python bench/host_work.py

512 completions at temperature 1 with log-probabilities, of 1 to 11 tokens, for prompts of 7, 20 or
150 tokens that begin alike: 64 prompts with 8 completions each, or 512 prompts. Scheduler, blocks
and bookkeeping are the Engine's own. ms is the least of 9 runs, CPU time of this process.
"""

import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any

import emulated_engine
import numpy as np

COMPLETIONS = 512
NEW = 12
STOP = 1
LENGTHS = [1 + 7919 * i % 11 for i in range(COMPLETIONS)]  # tokens of each completion


class IdleRunner(emulated_engine.EmulatedRunner):
    """Its tokens are those that make each completion as long as LENGTHS says."""

    def _pass(self, host: float, gpu: float) -> None:
        pass

    def sample(self, logits: Any, ids: Any, batch: Any, *extras: bool) -> tuple:
        n = len(ids)
        return np.zeros(n, np.float32), np.zeros((n, 20), np.int32), np.zeros((n, 20), np.float32)

    def draw(self, logits: Any, b: int, *extras: bool) -> tuple:
        return self.sample(None, range(b), None, *extras)

    def read_ids_later(self, requests: list, slots: list[int]) -> Callable[[], list[int]]:
        drawn = [len(r.completion) + r.in_flight for r in requests]
        lengths = [LENGTHS[r.seed + (r.random_stream >> 32)] for r in requests]
        ids = [STOP if n == length else STOP + 1 for n, length in zip(drawn, lengths)]
        return lambda: ids


class IdleEngine(emulated_engine.EmulatedEngine):
    runner_type = IdleRunner


def rollouts(length: int, n: int) -> tuple[Callable[[], list], IdleEngine]:
    """Return a function that draws n completions of each prompt, and the engine."""
    rng = np.random.default_rng(1)
    prompts = [[5, *rng.integers(10, 300, length - 1).tolist()] for _ in range(COMPLETIONS // n)]
    engine = IdleEngine(COMPLETIONS, 256, prefill_interval=8, batch_invariant=True)
    seeds = list(range(0, COMPLETIONS, n))

    def work() -> list:
        engine.forget_prefixes()  # as after an update of the weights
        return engine.generate(
            prompts, NEW, temperature=1.0, seed=seeds, logprobs=0, n=n, stop={STOP}
        )

    return work, engine


def main() -> None:
    """Measure and print."""
    print("prompts  x  n  tokens of each  steps  prompt tokens computed    calls     ms")
    for n, length in ((8, 7), (8, 20), (8, 150), (1, 20)):
        work, engine = rollouts(length, n)
        work()
        steps = engine.steps
        computed = engine.prefilled_tokens
        times = []
        for _ in range(9):
            start = time.process_time()
            work()
            times.append(1e3 * (time.process_time() - start))
        profile = cProfile.Profile()
        profile.enable()
        work()
        profile.disable()
        calls = pstats.Stats(profile).total_calls
        print(
            f"{COMPLETIONS // n:7}  x {n:2}  {length:14}  {steps:5}  {computed:22}  {calls:7,}  "
            f"{min(times):5.1f}"
        )


if __name__ == "__main__":
    main()
