"""Before its first step a run on a GPU compiles all kernels of that step, several at a time."""

import types

import numpy as np
import pytest
from checks import GPU
from twins import small

from xtrain import Transformer
from xtrain.config import TrainConfig, resolve
from xtrain.data.batches import Shuffled
from xtrain.kernels.runtime import launch
from xtrain.kernels.runtime.launch import note_launches
from xtrain.nn.model import Block
from xtrain.training.run import Run

SHAPE = dict(vocab_size=64, dim=16, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=16)


class Loader(Shuffled):
    """Random tokens."""

    def next_batch(self):
        rows = len(self.next_windows())
        draw = np.random.default_rng(self.position)
        return tuple(draw.integers(0, 64, (rows, self.T)).astype(np.int32) for _ in range(2))


def make_run(device, precision="fp32", **options):
    config = TrainConfig(preset="tiny", steps=9, batch=4, seq_len=16, precision=precision, graph=False, **options)  # fmt: skip
    corpus = types.SimpleNamespace(loader=lambda B, T, seed, rank, world: Loader(9, B, T, seed, rank, world))  # fmt: skip
    model = Transformer(small(**SHAPE), 0, device, precision)
    return Run(resolve(config, True)[0], model, corpus)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": "muon"}, {"ema": 0.9}, {"micro_batch": 1, "recompute": True}],
    ids=str,
)
def test_a_noted_step_finds_every_kernel_and_changes_nothing(precision, options):
    run = make_run("sim", precision=precision, **options)
    arena, optimizer, batch = run.model.arena, run.optimizer, run.next_batch()

    def state():
        arrays = arena.weights, optimizer.m, optimizer.v, run.skips_in_a_row
        return [x.tobytes() for x in arrays], arena.version.count, optimizer.t, run.done

    arena.version.count += 1  # as after an assignment: the bf16 copy is out of date
    before = state()
    found = run.noted_step(batch)
    assert state() == before
    if precision == "bf16":
        assert arena.half_version == arena.version.count
        np.testing.assert_array_equal(arena.half, arena.weights.astype(arena.half.dtype))
    with note_launches() as needed:
        run.step()
    assert needed and found.keys() == needed.keys()


class Counting(Block):
    """A block that keeps state."""


def test_a_users_module_may_keep_state():
    assert make_run("sim").is_stateless()
    run = make_run("sim")
    run.model.model.layers[1].__class__ = Counting
    assert not run.is_stateless()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_the_first_step_compiles_nothing_more(precision, monkeypatch):
    runs = [make_run("gpu", precision=precision) for _ in range(2)]
    runs[0].to_compile = False
    monkeypatch.setattr(launch, "_plans", {})
    results = [[float(x.loss[0]) for x in (run.step(), run.step())] for run in runs[:1]]
    needed = set(launch._plans)
    monkeypatch.setattr(launch, "_plans", {})
    launch.compile_noted(runs[1].noted_step(runs[1].next_batch()))
    assert set(launch._plans) == needed
    runs[1].loader.position, runs[1].to_compile = 0, False
    results.append([float(x.loss[0]) for x in (runs[1].step(), runs[1].step())])
    assert results[0] == results[1]
