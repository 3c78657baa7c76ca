"""An Engine without a GPU whose steps take as long as on one (bench_server.py --emulate).

The scheduler, the blocks and the bookkeeping are the Engine's own. Its forward passes compute
nothing. Launching one takes CPU time in Python, which holds the interpreter's lock; then the
emulated GPU is busy for a while, and the host sleeps until it is done. The constants are those of
Qwen3-0.6B's shape on an H100. Every token of an answer is 1.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import xtrain
from xtrain.nn.autograd import Tensor
from xtrain.serving.runner import Runner

DECODE_LAUNCH = 1e-3  # seconds of the host: one CUDA graph, and the copies around it
PREFILL_LAUNCH = 25e-3  # 28 layers, about 400 launches
# seconds of the GPU: weights, and the keys of one sequence
DECODE_BASE = 1.6e-3
DECODE_EACH = 12e-6
PREFILL_EACH = 3e-6  # of one prompt token


class EmulatedModel(xtrain.Transformer):
    """A tiny model with the interface of one; it notes how many tokens a prefill pass has."""

    launched: Callable[[int], None] | None = None  # None: it is a real model

    def hidden(self, ids: Any, sequences: Any) -> Tensor:
        if self.launched is None:  # the constructor of Engine looks at its layers
            return super().hidden(ids, sequences)
        self.launched(len(ids))
        return Tensor(np.zeros((len(ids), self.config.dim), np.float32))

    def logits(self, x: Tensor) -> Tensor:
        return Tensor(np.zeros((len(x.data), 8), np.float32))


class EmulatedRunner(Runner):
    """Launches nothing, but takes the time."""

    run_ahead = True

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.gpu_done = 0.0
        self.now = time.perf_counter
        self.sleep = time.sleep

    def _pass(self, host: float, gpu: float) -> None:
        """Launch a forward pass: begins after the previous one, ends after its last launch."""
        begin = self.now()
        end = time.thread_time() + host
        while time.thread_time() < end:
            pass
        self.gpu_done = max(max(self.gpu_done, begin) + gpu, self.now() + gpu / 28)

    def launch_tokens(self, tokens: int) -> None:
        self._pass(PREFILL_LAUNCH, tokens * PREFILL_EACH)

    def decode_logits(self, b: int) -> tuple:
        self._pass(DECODE_LAUNCH, DECODE_BASE + b * DECODE_EACH)
        return (None,)

    def draw(self, logits: Any, b: int, *extras: bool) -> tuple:
        return ()

    def sample(self, *args: Any) -> tuple:
        return ()

    def read_ids_later(self, requests: list, slots: list[int]) -> Callable[[], list[int]]:
        done = self.gpu_done
        n = len(requests)

        def wait_for_ids() -> list[int]:
            self.sleep(max(0.0, done - self.now()))
            return [1] * n

        return wait_for_ids


class EmulatedEngine(xtrain.Engine):
    """Takes Engine's arguments without the model."""

    runner_type = EmulatedRunner

    def __init__(self, *args: Any, **options: Any):
        shape = dict(vocab_size=151936, dim=2, n_layers=1, n_heads=1, head_dim=2, hidden_dim=2)
        config = xtrain.ModelConfig(**shape, max_seq_len=2048)
        model = EmulatedModel(config, device="cpu", trainable=False)
        super().__init__(model, *args, prefill_tokens=8192, **options)
        model.launched = self.runner.launch_tokens
