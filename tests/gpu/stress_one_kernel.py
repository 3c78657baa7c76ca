"""100,000 decoding steps in one kernel, while another process trains on the same GPU. No step may hang or give another token.

    python tests/gpu/stress_one_kernel.py [--steps 100000] [--alone]

Every answer of the same request must be the same. A step that takes longer than a minute is taken for a deadlock: exit code 1.
--alone: without the training run.
"""

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np
import tyro

import xtrain

SHAPE = dict(
    vocab_size=49152, dim=576, n_layers=30, n_heads=9, n_kv_heads=3, hidden_dim=1536, max_seq_len=1024,
    qk_norm=False, tie_embeddings=True,
)  # fmt: skip
NEW = 400  # tokens of an answer
PATIENCE = 60.0  # seconds
TRAIN = """
import os
parent = os.getppid()
import numpy as np, xtrain
model = xtrain.Transformer(xtrain.ModelConfig(vocab_size=50304, dim=768, n_layers=6, n_heads=12, max_seq_len=512), 0, "gpu", "bf16")
ids = np.random.default_rng(0).integers(0, 50304, (8, 512))
while os.getppid() == parent:  # also if that was killed, or found a deadlock
    model.arena.zero_grad()
    model.loss(ids, ids).backward()
"""


@dataclass
class Options:
    steps: int = 100_000
    alone: bool = False


def watch(progress: list[float]) -> None:
    """End the process if nothing has happened for a minute: a kernel that waits forever cannot be interrupted."""
    while True:
        time.sleep(1)
        if time.monotonic() - progress[0] > PATIENCE:
            print(f"no step for {PATIENCE:.0f} seconds: a deadlock", flush=True)
            os._exit(1)


def main(o: Options) -> None:
    other = None if o.alone else subprocess.Popen([sys.executable, "-c", TRAIN])
    try:
        model = xtrain.Transformer(xtrain.ModelConfig(**SHAPE), 0, "gpu", "bf16")
        engine = xtrain.Engine(model, 4, 1024, reuse_prefix=False, one_kernel=True)
        prompts = [np.random.default_rng(b).integers(0, 49152, 64).tolist() for b in range(4)]
        expected: dict[int, list] = {}
        steps, progress, start = 0, [time.monotonic() + 300], time.monotonic()  # the first compiles
        threading.Thread(target=watch, args=(progress,), daemon=True).start()
        while steps < o.steps:
            b = 1 + steps // NEW % 4  # another batch size, another graph
            answers = [[] for _ in range(b)]
            for number, token in engine.stream(prompts[:b], NEW + 1):
                answers[number].append(token)
                progress[0] = time.monotonic()
            if expected.setdefault(b, answers) != answers:
                sys.exit(f"step {steps}: other tokens than before with {b} sequences")
            if other is not None and other.poll() is not None:
                sys.exit(f"the training run ended with {other.returncode}")
            steps += NEW
            if steps % (25 * NEW) == 0:
                print(f"{steps} steps, {time.monotonic() - start:.0f} s", flush=True)
        print(f"{steps} steps: no hang, the same tokens every time")
    finally:
        if other is not None:
            other.kill()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
