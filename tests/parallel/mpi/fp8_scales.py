"""fp8 training on two ranks: the same scales and weights on both, near those of one rank; resume.

mpirun -n 2 python together.py FOLDER fp8_scales

The model computes with NumPy arrays in bf16, as in tests/nn/test_fp8_training.py.
"""

import json

import numpy as np
from common import divided, options, some_ranks, wait
from rich.console import Console

from xtrain.config import ModelConfig
from xtrain.data.dataset import prepare
from xtrain.errors import UserError
from xtrain.formats import saved_runs
from xtrain.formats.tensor_file import read_header
from xtrain.nn.fp8 import SPACING
from xtrain.nn.model import Transformer
from xtrain.parallel.collectives import HostCollectives
from xtrain.train import train
from xtrain.training import loop
from xtrain.training.run import Run

Transformer._check_precision = lambda *_: None
SILENT = Console(quiet=True)
SHAPE = dict(dim=128, n_layers=2, n_heads=2, head_dim=64, hidden_dim=128, max_seq_len=64)
KIND = dict(precision="fp8", batch=4, seq_len=64, bucket_mb=0.2)
KINDS = (dict(dp="naive"), dict(dp="overlap"), dict(zero=0), dict(zero=1), dict(zero=1, optimizer="muon"))  # fmt: skip


def make_run(folder, ranks, micro=None, **more):
    """ranks None: a single process."""
    world = ranks.world if ranks else 1
    config = options(folder, micro_batch=micro or 4 // world, **KIND, **more)
    corpus = prepare(config.data, config.vocab_size)
    shape = ModelConfig(vocab_size=corpus.vocab_size, **SHAPE)
    model = Transformer(shape, 5, "cpu", "fp8", world=world)
    return Run(config, model, corpus, divided(ranks))


def steps(run, n=3):
    """-> losses, scales and counts after each step. The ranks are compared after each step."""
    losses, scales, counts = [], [], []
    for _ in range(n):
        result = run.step()
        losses += run.ranks.sum([float(result.loss[0])])
        scales.append(run.model.fp8.scale_S.copy())
        counts.append(run.ranks.sum(result.fp8_counts.astype(float).tolist()))
        if run.ranks.world > 1:
            run.parallel.compare_weights(run.optimizer, run.done)
    if run.ranks.world > 1:
        run.close()
    return losses, np.array(scales), np.array(counts)


def both_ranks_have_the_scales_of_the_whole_batch(folder):
    alone = steps(make_run(folder, None, micro=2))
    for kind in KINDS:
        losses, scales, counts = steps(make_run(folder, some_ranks(2), **kind))
        optimizer = kind.get("optimizer")
        expected = (
            steps(make_run(folder, None, micro=2, optimizer=optimizer))[0]
            if optimizer
            else alone[0]
        )
        np.testing.assert_allclose(losses, expected, rtol=3e-3)
        # after the first step: of every w exactly; of qkv x in layer 0, which depends on no fp8 product, but for the rounding of
        # the embedding to bf16, which ZeRO-1 keeps in place of float32
        weights = slice(SPACING, None, 3 * SPACING)
        np.testing.assert_array_equal(scales[0][weights], alone[1][0][weights], str(kind))
        np.testing.assert_allclose(scales[0][0], alone[1][0][0], rtol=2**-8, err_msg=str(kind))
        assert np.abs(scales[0] / alone[1][0] - 1).max() < 0.3
        assert counts.shape == alone[2].shape and not counts[:, 1::2].any()


def a_scale_that_differs_is_noticed(folder):
    """Without the maxima of the other rank the scales of activations differ."""
    all_gather = HostCollectives.all_gather

    def without_maxima(collectives, array, a, b, **options):
        if array.dtype != np.int32:
            all_gather(collectives, array, a, b, **options)

    HostCollectives.all_gather = without_maxima
    try:
        steps(make_run(folder, some_ranks(2), zero=1))
    except UserError as error:
        assert "after step 1 the parameters of rank 1 differ" in str(error), error
    else:
        raise AssertionError("not noticed")
    finally:
        HostCollectives.all_gather = all_gather


def a_number_that_is_not_finite_keeps_the_scale_on_all_ranks(folder):
    """It is counted once for each rank that met it, and both ranks skip the step."""
    ranks = some_ranks(2)
    run = make_run(folder, ranks, zero=1, check_ranks=1)
    run.step()
    before = run.model.fp8.scale_S.copy()

    def spoiled(*_):
        slot = run.model.model.layers[1].mlp.down_proj.weight.fp8.x
        slot.largest_1[0] = 0x7F800000  # infinity
        slot.counts_2[1] += 1

    backward = run.parallel.stage.backward
    if ranks.rank == 1:
        run.parallel.stage.backward = lambda *given: (spoiled(), backward(*given))
    counts = run.step().fp8_counts.reshape(-1, 2)
    at = SPACING * 3 * 7  # layer 1, down_proj, x
    after = run.model.fp8.scale_S
    assert after[at] == before[at] and (after != before).any()
    assert run.model.fp8.kinds[9] == "down_proj x" and counts[9, 1] == ranks.rank
    run.close()


def train_on(n, config):
    ranks = some_ranks(n)
    run = (
        None
        if ranks is None
        else loop.train(config, SILENT, divided(ranks), write_report=lambda *_: None)
    )
    wait()
    return run


def optimizer_file(run, step):
    return run / "checkpoints" / f"step-{step:06d}" / "optimizer.safetensors"


def resuming(folder):
    """Exact with as many ranks; with another number from the same scales, with losses that agree within the rounding of codes."""
    shape = dict(dim=128, heads=2, head_dim=64, hidden_dim=128, layers=1, vocab_size=300)
    for zero in (0, 1):
        kind = dict(KIND, **shape, steps=6, zero=zero, check_ranks=1, fp8_head=zero == 1)
        whole = train_on(2, options(folder / f"whole{zero}", **kind))
        at = dict(out=folder / f"parts{zero}", **kind)
        train_on(2, options(**at, stop_at=3))
        parts = train_on(2, options(**at, resume=True))
        if some_ranks(1) is not None:
            for name in ("metrics.jsonl", "samples.txt"):
                assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
            assert optimizer_file(whole, 6).read_bytes() == optimizer_file(parts, 6).read_bytes()
            lines = [json.loads(x) for x in (whole / "metrics.jsonl").read_text().splitlines()]
            losses = [x["loss"] for x in lines if "loss" in x]
            assert len(losses) == 6 and all(x["fp8_nonfinite"] == 0 for x in lines if "loss" in x)
        other = dict(out=folder / f"one{zero}", **kind)
        train_on(2, options(**other, stop_at=3))
        one = train_on(1, options(**other, resume=True))
        if some_ranks(1) is not None:
            stored = read_header(saved_runs.newest(one).folder / "optimizer.safetensors")
            assert stored["fp8.scale"].shape == (3 * (4 + zero) * SPACING,)
            lines = [json.loads(x) for x in (one / "metrics.jsonl").read_text().splitlines()]
            again = [x["loss"] for x in lines if "loss" in x]
            assert again[:3] == losses[:3]
            np.testing.assert_allclose(again, losses, rtol=3e-3)
        wait()
    if some_ranks(1) is not None:  # and from one rank to two
        train(options(folder / "two", **kind | dict(zero=None, check_ranks=0), stop_at=3), SILENT)
    two = train_on(2, options(folder / "two", **kind | dict(zero=None), resume=True))
    if two is not None and some_ranks(1) is not None:
        assert optimizer_file(two, 6).exists()


CHECKS = [
    both_ranks_have_the_scales_of_the_whole_batch,
    a_scale_that_differs_is_noticed,
    a_number_that_is_not_finite_keeps_the_scale_on_all_ranks,
    resuming,
]
