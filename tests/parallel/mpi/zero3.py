"""ZeRO-3 makes the steps of ZeRO-1.

mpirun -n 3 python together.py FOLDER zero3
"""

import json
import tracemalloc

import numpy as np
from common import WORLD, divided, options, some_ranks, wait
from equality import SHAPE, make_run
from resume import EMA_FILES, FILES, SILENT, loaded_state, losses, train_on, wrong_on_rank

from xtrain.config import ModelConfig
from xtrain.device import to_numpy
from xtrain.errors import UserError
from xtrain.nn import functional as F
from xtrain.nn.model import Transformer
from xtrain.nn.sharded_arena import Share
from xtrain.parallel import ddp
from xtrain.report import page
from xtrain.train import train
from xtrain.training import loop


def weights_of(run):
    """-> {name: array} of the whole model, on rank 0"""
    with run.parallel.full_moments(run.optimizer) as whole:
        if run.ranks.rank:
            return {}
        weights = run.model.arena.weights
        weights = whole.weights if weights is None else weights
        return {name: to_numpy(x).copy() for name, x in run.model.views(weights)}


def some_steps(run, steps=3, between=lambda run: None):
    """-> losses and norms of the steps, the weights after them on rank 0

    between: is called with the run after each step.
    """
    numbers = []
    for _ in range(steps):
        result = run.step()
        loss, norm = (float(to_numpy(x)[0]) for x in (result.loss, result.grad_norm))
        numbers.append([*run.ranks.sum([loss]), norm])
        run.parallel.compare_weights(run.optimizer, run.done)
        between(run)
    weights = weights_of(run)
    run.close()
    return np.array(numbers), weights


def compare(folder, n, exact=True, **kind):
    """On n ranks: exact: the losses and weights are the same bits."""
    ranks = some_ranks(n)
    if ranks is not None:
        kind = dict(batch=6, check_ranks=1, **kind)
        (one, w1), (three, w3) = (
            some_steps(make_run(folder, ranks, zero=z, **kind)) for z in (1, 3)
        )
        assert w1.keys() == w3.keys()
        if exact:
            assert np.array_equal(one[:, 0], three[:, 0]), (kind, one, three)
            for name, values in w1.items():
                assert np.array_equal(values, w3[name]), (kind, name)
        np.testing.assert_allclose(one, three, rtol=2e-6, err_msg=str(kind))
        for name, values in w1.items():
            np.testing.assert_allclose(values, w3[name], atol=2e-5, err_msg=f"{kind} {name}")
    wait()


def the_steps_of_zero_1(folder):
    compare(folder, 2, clip=0, n_layers=3)
    compare(folder, 2, clip=0, recompute="block", tied=True, ema=0.9)
    compare(folder, 2, clip=0, recompute="attention", some_ignored=True, n_layers=1)
    mixture = dict(n_experts=4, experts_per_token=2, dense_layers=(0,), n_layers=3)
    compare(folder, 2, clip=0, mixture=mixture, recompute="block")


def clipped_with_the_same_division(folder):
    """The norm is a sum over shares: of the same shares it is the same bits, on three ranks too."""
    ours, buckets = [], ddp.buckets
    ddp.buckets = lambda *_: ours
    for n, clip in ((2, 0.1), (3, 1.0)):
        ranks = some_ranks(n)
        if ranks is not None:
            shape = ModelConfig(vocab_size=320, **SHAPE)
            units = Transformer(shape, None, "cpu", share=Share(0, n)).arena.units
            ours[:] = [(unit.start, unit.end) for unit in units]
        # with three ranks the arena of ZeRO-1 has no padding between the layers
        compare(folder, n, exact=n == 2, clip=clip)
    ddp.buckets = buckets


def accumulated(folder):
    """The ranks are summed before the micro-batches, so the last bits differ."""
    compare(folder, 2, exact=False, micro_batch=1)
    compare(folder, 3, exact=False, micro_batch=1, recompute="block")


def only_two_layers_are_whole(folder):
    """Making the model takes a third of its bytes, two layers and what lies outside of them."""
    shape = ModelConfig(
        vocab_size=128, dim=64, n_layers=16, n_heads=4, head_dim=16, hidden_dim=256, max_seq_len=16
    )
    tracemalloc.start()
    model = Transformer(shape, 0, "cpu", world=3, share=Share(1, 3))
    now, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    arena = model.arena
    layer = arena.layers[0].weights.nbytes
    outside = sum(unit.weights.nbytes for unit in arena.whole)
    # master and summed gradients; weights and gradients of two layers; those outside the layers
    expected = (4 * arena.size + 16 * layer) / 3 + 2 * 2 * layer + 2 * outside
    assert 16 * layer > 0.9 * 4 * arena.size, "most of the model is layers"
    assert expected < now < 1.05 * expected, (now, expected)
    assert most < now + 3 * layer, "there is never a whole copy"
    assert expected < 0.6 * 2 * 4 * arena.size, "less than whole weights and gradients"
    for p in arena.layers[3].parameters:
        for read in (lambda p=p: p.data, lambda p=p: p.value, lambda p=p: p.grad):
            try:
                read()
            except UserError as error:
                assert "--zero 3" in str(error), error
            else:
                raise AssertionError("values of a layer that is not gathered were read")


def validation_and_samples(folder):
    """All ranks take part; the last batch has rows for some of them only."""
    found = {}
    for zero in (1, 3):
        ranks = some_ranks(3)
        run = make_run(folder, ranks, batch=9, eval_batches=40, zero=zero)
        rows = [len(ids) for ids, _ in run.corpus.val_batches(40, 9, 16)]
        assert rows[-1] < 9, rows
        run.step()
        numbers = run.validate()
        if zero == 3 or ranks.rank == 0:
            found[zero] = (*numbers, run.sample())
        run.close()
    if WORLD.rank == 0:
        np.testing.assert_allclose(found[3][:2], found[1][:2], rtol=1e-6)
        assert found[3][2] == found[1][2]
    wait()


def passes_between_steps(folder, n=2, steps=4, **kind):
    """A validation, a sample and a checkpoint change no bit of the steps: they leave nothing behind."""

    def between(run):
        run.validate()
        if run.done % 2:
            run.sample()
            weights_of(run)

    ranks = some_ranks(n)
    if ranks is not None:
        kind = dict(batch=2 * n, zero=3, n_layers=5, check_ranks=1, eval_batches=1) | kind
        (numbers, w), (again, w_again) = (
            some_steps(make_run(folder, ranks, **kind), steps, what)
            for what in (lambda run: None, between)
        )
        assert np.array_equal(numbers, again), (kind, numbers, again)
        for name, values in w.items():
            assert np.array_equal(values, w_again[name]), (kind, name)
    wait()


def elastic(folder):
    """3 ranks with ZeRO-3, 2 with ZeRO-1, 2 with ZeRO-3, one rank: the losses of one rank."""
    kind = dict(ema=0.9, batch=12)
    if WORLD.rank == 0:
        whole = losses(train(options(folder / "alone", steps=6, **kind), SILENT))
    at = dict(out=folder / "elastic", steps=6, **kind)
    for n, zero, stop in ((3, 3, 2), (2, 1, 3), (2, 3, 4), (3, 0, 5), (1, 3, 6)):
        run = train_on(n, options(**at, zero=zero, stop_at=stop, resume=stop > 2))
        if stop == 2:
            loaded_state(at["out"] / "run", dict(ema=0.9), [(2, (3,)), (3, (3, 0))])
    if WORLD.rank == 0:
        np.testing.assert_allclose(losses(run), whole, rtol=1e-6)


def resumed_exactly(folder):
    kind = dict(zero=3, steps=6, eval_every=3, ema=0.9, save_every=2)
    whole = train_on(2, options(folder / "whole", **kind))
    parts = dict(out=folder / "parts", **kind)
    train_on(2, options(**parts, stop_at=4))
    halves = train_on(2, options(**parts, resume=True))
    if WORLD.rank == 0:
        names = [f"checkpoints/step-000006/{name}" for name in (*FILES, *EMA_FILES, "state.json")]
        for name in ("metrics.jsonl", "samples.txt", "layers.jsonl", *names):
            assert (whole / name).read_bytes() == (halves / name).read_bytes(), name


def its_report(folder):
    """Rank 0 writes it alone, without the model, of which it has a share; `xtrain report` completes it."""
    ranks = some_ranks(2)
    if ranks is not None:
        run = loop.train(
            options(folder / "report", zero=3, steps=2),
            SILENT,
            divided(ranks),
            write_report=page.finish,
        )
        if ranks.rank == 0:
            assert (run / "report.html").exists() and not (run / "sentence.json").exists()
            page.write_requested(page.Options((run,)), print)
            assert (run / "sentence.json").exists()
    wait()


def a_bad_step(folder):
    with wrong_on_rank(1, F.Embedding, (3,), np.nan):
        run = train_on(2, options(folder / "skip", steps=5, check_ranks=1, zero=3))
    if WORLD.rank == 0:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "skipped" in line] == [3], lines
    with wrong_on_rank(1, F.Attention, (4, 5, 6), np.inf):
        try:
            train_on(2, options(folder / "named", steps=9, max_skips=2, zero=3))
            assert WORLD.rank == 2
        except UserError as error:
            assert "rank 1: layer 0, Attention, forward (0 NaN and 1 infinite" in str(error), error
            wait()


def a_flipped_bit_is_noticed(folder):
    """In the share of one rank, of which no other has a copy."""
    ranks = some_ranks(2)
    if ranks is not None:
        run = make_run(folder, ranks, zero=3, check_ranks=1)
        run.step()
        if ranks.rank == 1:
            run.model.arena.master.view(np.int32)[5] ^= 1
        try:
            run.step()
        except UserError as error:
            assert "optimizer state of rank 1" in str(error), error
        else:
            raise AssertionError("a changed weight was not noticed")
    wait()


CHECKS = [
    the_steps_of_zero_1, clipped_with_the_same_division, accumulated, only_two_layers_are_whole,
    validation_and_samples, passes_between_steps, elastic, resumed_exactly, its_report, a_bad_step,
    a_flipped_bit_is_noticed,
]  # fmt: skip
