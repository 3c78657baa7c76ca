"""Lesson 32 on real ranks: the same functions as in the notebook, between processes.

    mpirun -n 4 python lessons/on_ranks.py                                     the solutions, on CPUs
    mpirun -n 4 python lessons/on_ranks.py my_lessons/32_model_parallel.py     yours
    mpirun -n 4 python lessons/on_ranks.py --device gpu                        one GPU per rank, with NCCL

Each function is first checked as in the notebook, because a mistake would make real ranks wait for each other for ever. Then it
runs on the ranks and is compared with the unsplit computation. Exit code 0: all agree; 1: some do not; 2: bad input.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

import numpy as np

import xtrain
from xtrain import lesson
from xtrain.cli import command, command_line, print_text, refuse_once
from xtrain.device import gpu_available, to_device, to_numpy
from xtrain.errors import UserError
from xtrain.parallel.ranks import Ranks, choose_gpu, connect
from xtrain.parallel.watchdog import AbortOnError

NAME = "lessons/on_ranks.py"


def load(path: Path | None):
    """-> the functions of the lesson, with those of the reader's file in place of the solutions"""
    text = lesson.lesson_file("32").read_text(encoding="utf-8")
    if path is None:
        own, file = lesson.tagged(text, "imports", "exercise", "solution"), "solutions.py"
    else:
        try:
            own, file = path.read_text(encoding="utf-8"), str(path.resolve())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{path} cannot be read ({error}): `xtrain lesson start 32` writes my_lessons/32_model_parallel.py"
            ) from None
    try:
        return lesson.load(f"{own}\n\n{lesson.tagged(text, 'model')}", file)
    except Exception as error:
        raise UserError(
            f"{path} cannot be read as Python: {type(error).__name__}: {error}"
        ) from None


class Trial:
    """The ranks, the reader's functions, and what each is compared with."""

    def __init__(self, ranks: Ranks, work, device: str, numbers: int):
        self.ranks, self.work, self.device, self.numbers = ranks, work, device, numbers
        self.gpu = device == "gpu"
        self.comm = lesson.ProcessRank(ranks, self.gpu)
        self.dtype, self.rtol = (np.float32, 1e-3) if self.gpu else (np.float64, 1e-9)
        self.solved = load(None)

    def on_device(self, a):
        return to_device(np.ascontiguousarray(a, self.dtype), self.device)

    def equal(self, got, want) -> bool:
        got, want = to_numpy(got), np.asarray(want)
        return got.shape == want.shape and bool(
            np.abs(got - want).max(initial=0) <= self.rtol * np.abs(want).max(initial=1)
        )

    def seconds(self, call, x) -> float:
        """The median of 5 calls, each on a new copy of x."""
        times = []
        for _ in range(6):
            copy = x.copy()
            self._synchronize()
            begin = time.perf_counter()
            call(copy)
            self._synchronize()
            times.append(time.perf_counter() - begin)
        return float(np.median(times[1:]))

    def _synchronize(self):
        if self.gpu:
            import cupy

            cupy.cuda.Device().synchronize()
        self.ranks.comm.Barrier()

    # ------------------------------------------------------------------------- one per exercise
    def ring_all_reduce(self):
        draw = lambda r: np.random.default_rng(r).standard_normal(self.numbers).astype(self.dtype)
        x, before = self.on_device(draw(self.ranks.rank)), self.comm.sent
        self.work.ring_all_reduce(self.comm, x)
        sent = self.comm.sent - before
        right = self.equal(x, sum(draw(r) for r in range(self.ranks.world)))
        bits = {*self.ranks.gather(hashlib.blake2b(to_numpy(x).tobytes()).hexdigest())}
        mine = self.seconds(lambda x: self.work.ring_all_reduce(self.comm, x), x)
        theirs = self.seconds(self.comm.all_reduce, x)
        return right and len(bits) == 1, (
            f"{self.numbers:,} numbers, {sent:,} sent; {mine * 1e3:.2f} ms, the library's all-reduce {theirs * 1e3:.2f} ms"
        )

    def split_mlp(self):
        random, (N, C, F) = np.random.default_rng(1), (33, 48, 101)
        x, w1, w2, dy = (random.standard_normal(s) / 7 for s in ((N, C), (F, C), (C, F), (N, C)))
        y, dx, dw1, dw2 = lesson.load_checks("lesson_32").mlp(x, w1, w2, dy)
        own = self.solved.part(F, self.ranks.world, self.ranks.rank)
        given = [self.on_device(a) for a in (x, w1[own], w2[:, own], dy)]
        got = self.work.split_mlp(self.comm, *given)
        return all(map(self.equal, got, (y, dx, dw1[own], dw2[:, own]))), "y, dx, dw1, dw2"

    def own_weights(self):
        """A Transformer of two layers, whose loss and gradients xtrain computes on one rank."""
        G = max(3, self.ranks.world)
        config = xtrain.ModelConfig(
            vocab_size=40, dim=24, n_layers=2, n_heads=2 * G, n_kv_heads=G, head_dim=4, hidden_dim=50, max_seq_len=16, qk_norm=False
        )  # fmt: skip
        model = xtrain.Transformer(config, seed=0, device="cpu")
        ids, targets = np.random.default_rng(0).integers(0, 40, (2, 3, 8)).astype(np.int32)
        loss, blocks, ends = self.work.step_on_a_rank(
            self.comm, model, ids, targets, self.dtype, self.device
        )
        whole = model.loss(ids, targets)
        whole.backward()
        want, want_ends = self.solved.named(model, np.float64, "grad")
        parts = [
            self.solved.own_weights(self.ranks.rank, self.ranks.world, w, 2 * G, G) for w in want
        ]
        pairs = [(w[name], v[name]) for w, v in zip(blocks, parts) for name in v]
        pairs += [(ends[name], want_ends[name]) for name in want_ends]
        # xtrain's model is in float32
        close = lambda a, b: np.abs(to_numpy(a) - b).max() <= 1e-4 * np.abs(b).max()
        right = all(close(a, b) for a, b in pairs) and abs(loss - whole.item()) < 1e-4
        return right, f"a Transformer: loss {loss:.5f}, xtrain's {whole.item():.5f}, all gradients"

    def fsdp_step(self):
        train = lambda work, comm, *how: work.train_shards(comm, 10, 3, 7, 13, *how)
        losses, weights, kept = train(self.work, self.comm, self.dtype, self.device)
        alone = lambda comm: train(self.solved, comm)
        one, unsharded, all_kept = lesson.run_ranks(1, alone)[0]
        right = all(map(self.equal, weights, unsharded)) and self.equal(np.array(losses), one)
        return right, f"10 steps: loss {losses[-1]:.5f}, unsharded {one[-1]:.5f}; {kept} of {all_kept} numbers per rank"  # fmt: skip


def compare(trial: Trial) -> bool:
    """Print one line per exercise, on rank 0. -> whether all agree"""
    ranks, all_right = trial.ranks, True
    for number, name in (
        ("32.1", "ring_all_reduce"),
        ("32.2", "split_mlp"),
        ("32.3", "own_weights"),
        ("32.4", "fsdp_step"),
    ):
        function = getattr(trial.work, name, None)
        passed = ranks.rank or (
            function is not None and lesson.verdict(number, function, seed=1).passed
        )
        if ranks.any(not passed):
            right, text = False, f"not right yet: `xtrain lesson check {number}` says what is wrong"
        else:
            right, text = getattr(trial, name)()
            right = not ranks.any(not right)
            text = f"{'equal to' if right else 'NOT equal to'} the unsplit computation. {text}"
        all_right &= right
        if ranks.rank == 0:
            print_text(f"{number} {name}: {text}", flush=True)
    return all_right


@command(NAME, one_process=False)
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=NAME, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, help="your solutions; default: the lesson's")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--numbers", type=int, default=1_000_003, help="in the array of 32.1")
    options = parser.parse_args(arguments)
    try:
        ranks = connect()
    except UserError as error:
        refuse_once(f"{NAME}: {error}")
        return 2
    right = False
    with AbortOnError(ranks, NAME) as guard:
        if options.device == "gpu":
            if ranks.any(not gpu_available()):
                raise UserError(
                    "a machine has no GPU that CuPy can use: omit --device gpu, or see `xtrain doctor`"
                )
            choose_gpu(ranks)
        if options.numbers < 1:
            raise UserError(f"--numbers {options.numbers}: at least 1")
        work = load(options.file)
        if ranks.rank == 0:
            print_text(f"{ranks.world} ranks, {options.device}", flush=True)
        trial = Trial(ranks, work, options.device, options.numbers)
        right = compare(trial)
        trial.comm.close()
    return guard.code or int(not right)


if __name__ == "__main__":
    sys.exit(command_line(main))
