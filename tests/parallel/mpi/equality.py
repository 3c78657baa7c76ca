"""4 ranks x batch 2 equal 2 ranks x batch 4 and 1 rank x batch 8, whatever the stage.

mpirun -n 4 python together.py FOLDER equality
"""

import itertools
import time

import numpy as np
from common import divided, options, some_ranks, wait

from xtrain.config import ModelConfig
from xtrain.data.dataset import prepare
from xtrain.device import to_device, to_numpy
from xtrain.errors import UserError
from xtrain.kernels.muon import newton_schulz_flops
from xtrain.nn import deferred, functions, loss_functions
from xtrain.nn.model import Transformer
from xtrain.nn.modules import Module
from xtrain.nn.optim import AdamW, Muon
from xtrain.nn.sharded_arena import Share
from xtrain.parallel.collectives import HostCollectives
from xtrain.parallel.ddp import buckets
from xtrain.parallel.zero import ShardedAdamW, ShardedMuon, whole_matrices
from xtrain.training.run import Run

STAGES = ("naive", "flat", "overlap", "bucket")
SHAPE = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48, max_seq_len=16)


def make_run(
    folder,
    ranks,
    batch=8,
    recompute="none",
    tied=False,
    some_ignored=False,
    mixture=None,
    n_layers=2,
    **more,
):
    """A run of a small model. ranks None: a single process.  more: options."""
    world = ranks.world if ranks else 1
    micro = more.pop("micro_batch", batch // world)
    config = options(folder, batch=batch, micro_batch=micro, **more)
    corpus = prepare(config.data, config.vocab_size)
    shape = (
        SHAPE
        | {"n_layers": n_layers}
        | (mixture or {})
        | {"vocab_size": corpus.vocab_size, "tie_embeddings": tied}
    )
    shape = ModelConfig(**shape)
    share = Share(ranks.rank, world) if config.zero == 3 and ranks else None
    options_of_model = config.device, config.precision, recompute, world
    model = Transformer(shape, 5, *options_of_model, share=share)
    run = Run(config, model, corpus, divided(ranks))
    if some_ignored:  # a different number on every rank
        next_batch = run.loader.next_batch
        run.loader.next_batch = lambda: ignore(*next_batch())
    return run


def ignore(ids, targets):
    return ids, np.where((targets % 3 == 0) | (ids % 5 == 0), -100, targets)


def some_steps(run, steps=5):
    """-> losses and norms of the steps, the final weights. The ranks are compared after each step."""
    numbers = []
    for _ in range(steps):
        result = run.step()
        loss, norm = (float(to_numpy(x)[0]) for x in (result.loss, result.grad_norm))
        numbers.append([*run.ranks.sum([loss]), norm])
        if run.ranks.world > 1:
            run.parallel.compare_weights(run.optimizer, run.done)
    if run.ranks.world > 1:
        if run.config.sharded:
            run.optimizer.restore()
        run.close()
    return np.array(numbers), to_numpy(run.model.arena.weights).copy()


def compare(folder, worlds, variants, **kind):
    """-> {(world, variant): weights}. The losses of every world and variant must equal those of one rank."""
    found, expected = {}, None
    for n in worlds:
        ranks = some_ranks(n)
        if ranks is not None:
            expected = some_steps(make_run(folder, None, **kind)) if expected is None else expected
            for name, variant in variants.items():
                numbers, weights = some_steps(make_run(folder, ranks, **kind, **variant))
                np.testing.assert_allclose(
                    numbers[:, 0], expected[0][:, 0], rtol=1e-6, err_msg=f"{n} ranks, {name}"
                )
                np.testing.assert_allclose(numbers[:, 1], expected[0][:, 1], rtol=1e-4)
                found[n, name] = weights
        wait()
    return found


def every_stage_with_and_without_zero(folder):
    variants = {f"{dp} {zero}": dict(dp=dp, zero=zero) for dp in STAGES for zero in (0, 1)}
    found = compare(folder, (2, 4), variants)
    for (n, name), weights in found.items():
        reference = found[n, "naive 0"]
        if n == 2 and name.endswith("0"):  # a sum of two numbers has one value
            assert np.array_equal(weights, reference), name
        np.testing.assert_allclose(weights, reference, atol=2e-5, err_msg=f"{n} ranks, {name}")


def accumulation(folder):
    variants = {
        f"{dp} {zero}": dict(dp=dp, zero=zero, micro_batch=1)
        for dp in ("naive", "bucket")
        for zero in (0, 1)
    }
    compare(folder, (4,), variants)


def tied_embeddings_recompute_and_ignored_targets(folder):
    variants = {
        f"{dp} {zero}": dict(dp=dp, zero=zero) for dp, zero in (("overlap", 0), ("bucket", 1))
    }
    compare(folder, (4,), variants, tied=True)
    compare(folder, (4,), variants, recompute="block")
    compare(folder, (4,), variants, some_ignored=True)


class Sometimes(Module):
    """A module that is left out where skips() is true."""

    def __init__(self, module, skips):
        self.module = module
        self.skips = skips

    def __call__(self, x_NC):
        return x_NC * 1.0 if self.skips() else self.module(x_NC)


def a_rank_that_skips_layers(folder):
    """Its slices are complete in another order, and collectives are matched by their order."""
    ranks = some_ranks(2)
    if ranks is not None:
        found = []
        for how in (dict(dp="flat"), dict(dp="overlap"), dict(zero=0), dict(zero=1)):
            run = make_run(folder, ranks, n_layers=3, bucket_mb=0.01, **how)
            for layer in run.model.model.layers[1:]:
                skips = lambda run=run: ranks.rank == 1 and run.done % 3 != 1
                layer.mlp = Sometimes(layer.mlp, skips)
            found.append(some_steps(run))
        for numbers, _ in found[1:]:
            np.testing.assert_allclose(numbers[:, 0], found[0][0][:, 0], rtol=1e-6)
    wait()


def three_ranks(folder):
    """Not a power of two, so the arena is padded."""
    compare(folder, (3,), {"bucket 1": dict(zero=1), "bucket 0": dict(zero=0)}, batch=6)


def muon(folder):
    """Every rank makes the same update from the summed gradients, or with ZeRO-1 that of its own matrices."""
    variants = {
        f"{dp} {zero}": dict(dp=dp, zero=zero) for dp in ("naive", "bucket") for zero in (0, 1)
    }
    found = compare(folder, (2, 3), variants, optimizer="muon", batch=6)
    for (n, name), weights in found.items():
        reference = found[n, "naive 0"]
        if n == 2 and name.endswith("0"):  # a sum of two numbers has one value
            assert np.array_equal(weights, reference), name
        np.testing.assert_allclose(weights, reference, atol=2e-5, err_msg=f"{n} ranks, {name}")


def experts(folder):
    """The z-loss is a mean over the rows, however they are divided; the balance loss is not one."""
    kind = dict(mixture=dict(n_experts=4, experts_per_token=2), balance_loss=0.0, router_z_loss=0.1)
    variants = {
        f"{dp} {zero}": dict(dp=dp, zero=zero) for dp, zero in (("naive", 0), ("bucket", 1))
    }
    found = compare(folder, (2,), variants, **kind, micro_batch=2)
    found |= compare(folder, (2,), {"muon": dict(zero=1)}, **kind, optimizer="muon")
    biased = kind | {"mixture": kind["mixture"] | {"expert_bias": True}}
    compare(folder, (2,), {"biased": dict(zero=0)}, **biased, expert_bias_rate=0.01)
    if found:
        np.testing.assert_allclose(found[2, "bucket 1"], found[2, "naive 0"], atol=2e-5)
    ranks = some_ranks(2)
    if ranks is not None:
        some_steps(make_run(folder, ranks, **kind | {"balance_loss": 0.1}))  # equal on both ranks


def matrices_stay_whole(folder):
    """Three ranks share the matrices, about evenly: from equal gradients the weights, moments and averages of one process."""
    ranks = some_ranks(3)
    if ranks is None:
        return
    config = ModelConfig(vocab_size=40, **SHAPE)
    alone, shared = (Transformer(config, 0, "cpu", world=3) for _ in range(2))
    collectives = HostCollectives(ranks, shared.arena)
    slices, collectives.pieces = whole_matrices(shared, 3, 20_000)
    edges = sorted(slices)
    assert edges[0][0] == 0 and edges[-1][1] == shared.arena.grads.size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
    options = dict(lr=1e-2, ema_decay=0.9)
    plain = Muon(alone, **options)
    sharded = ShardedMuon(shared, collectives=collectives, slices=slices, guarded=True, **options)
    work = [
        B.size * newton_schulz_flops(*shape) for optimizer in (sharded, plain) for shape, B, _ in optimizer.batches
    ]  # fmt: skip
    own = sum(work[: len(sharded.batches)])
    largest = max(newton_schulz_flops(*shape) for shape, *_ in plain.batches)
    all_ranks = ranks.gather(own)
    assert sum(all_ranks) == sum(work) - own and max(all_ranks) - min(all_ranks) <= largest
    for step in range(3):
        gradients = np.random.default_rng(step).standard_normal(plain.m.size, np.float32)
        for optimizer in (plain, sharded):
            optimizer.arena.grads[...] = gradients
            optimizer.step()
        assert np.array_equal(shared.arena.weights, alone.arena.weights)
    moments = sharded.gather_moments(lambda: None)
    if ranks.rank == 0:
        for name in ("m", "v", "ema"):
            assert np.array_equal(getattr(moments, name), getattr(plain, name)), name


def bf16_communication_stays_close(folder):
    ranks = some_ranks(2)
    if ranks is not None:
        exact, _ = some_steps(make_run(folder, ranks), 10)
        for zero in (0, 1):
            rounded, _ = some_steps(make_run(folder, ranks, grad_comm="bf16", zero=zero), 10)
            gap = np.abs(rounded[:, 0] / exact[:, 0] - 1).max()
            assert 0 < gap < 2e-3, gap


def validation_is_global(folder):
    ranks = some_ranks(4)
    alone = make_run(folder, None, eval_batches=2).validate()
    for more in ({}, {"micro_batch": 1}):
        mine = make_run(folder, ranks, eval_batches=2, **more).validate()
        np.testing.assert_allclose(mine, alone, rtol=1e-6)


def without_communication_ranks_part(folder):
    ranks = some_ranks(2)
    if ranks is not None:
        run = make_run(folder, ranks, dp="none", check_ranks=2)
        run.step()
        try:
            run.step()
        except UserError as error:
            assert "after step 2" in str(error) and "rank 1" in str(error), error
        else:
            raise AssertionError("different parameters were not noticed")


def a_flipped_bit_is_noticed(folder):
    """In the weights or moments of one rank, before any step, whichever rank owns it. With ZeRO-1 other ranks have no copy of
    some of it, and the all-gather makes a wrong weight identical everywhere.
    """
    ranks = some_ranks(2)
    if ranks is None:
        return
    for every, steps in ((1, 1), (3, 2)):
        plain, _ = some_steps(make_run(folder, ranks, zero=1))
        guarded, _ = some_steps(make_run(folder, ranks, zero=1, check_ranks=every))
        assert np.array_equal(plain, guarded)
        places = [
            (0, "m", 3),
            (1, "v", -5),
            (0, "w", 0),
            (0, "w", -1),
            (1, "w", 77),
            (1, "w", -200),
        ]
        muon = dict(optimizer="muon", ema=0.9)
        cases = [({}, *place) for place in places] + [(muon, 0, "e", 5), (muon, 1, "m", -70)]
        for kind, rank, name, index in cases:
            run = make_run(folder, ranks, zero=1, check_ranks=every, **kind)
            for _ in range(steps):
                run.step()
            if ranks.rank == rank:
                o, w = run.optimizer, run.model.arena.weights
                array = {"m": o.m, "v": o.v, "w": w, "e": o.ema}[name]
                array.view(np.int32)[index] ^= 1
            try:
                for _ in range(every):
                    run.step()
            except UserError as error:
                assert f"state of rank {rank} are not what its last update wrote (1 of 2" in str(
                    error
                ), error
                assert run.done in (2, 3)
            else:
                raise AssertionError(f"a flipped bit of {name} was not noticed")
    run = make_run(folder, ranks, zero=1, check_ranks=1)
    for i in range(3):  # assigned weights, and a checkpoint in between, are no damage
        run.step()
        run.snapshot({})
        weight = next(iter(run.model.storage()))[1]
        weight.data = weight.data * (1 + i)


class EarlyNeighbour(HostCollectives):
    """As copy engines may: a rank that has passed `gather_1` writes its new weights to ranks that are still there."""

    def gather_1(self, own_1):
        gathered = super().gather_1(own_1)
        self.neighbours_weight ^= 1
        return gathered


def masters_exist_once(folder):
    """ZeRO-1 in bf16: float32 weights on their owners only; the steps are those of one process, bit for bit. (Simulator.)"""
    ranks = some_ranks(2)
    for kinds in ((AdamW, ShardedAdamW), (Muon, ShardedMuon)) if ranks else ():
        _masters_exist_once(ranks, *kinds)


def _masters_exist_once(ranks, kind, sharded_kind):
    shape = dict(vocab_size=16, dim=8, n_layers=1, n_heads=1, head_dim=16, hidden_dim=8)
    config = ModelConfig(max_seq_len=8, tie_embeddings=True, **shape)
    plain, sharded = (Transformer(config, 0, "sim", "bf16", world=2) for _ in range(2))
    arena = sharded.arena
    collectives = EarlyNeighbour(ranks, arena)
    slices = buckets(arena.n_decay, arena.grads.size, 2, 4000)
    if kind is Muon:
        slices, collectives.pieces = whole_matrices(sharded, 2, 4000)
    share = dict(collectives=collectives, slices=slices, guarded=kind is AdamW)
    options = dict(lr=1e-2, ema_decay=0.99 if kind is Muon else 0)
    optimizers = kind(plain, **options), sharded_kind(sharded, **share, **options)
    assert arena.weights is None
    assert sum(ranks.gather(optimizers[1].master.size)) == arena.grads.size
    a, b = next((a, b) for a, b in slices if a < arena.n_decay)
    first = collectives.own(arena.grads, a, b, 1 - ranks.rank)[0][0]
    collectives.neighbours_weight = arena.half.view(np.uint16)[first : first + 1]

    def update(optimizer):
        hyper = to_device(optimizer.advance(), arena.kind[0])
        if optimizer is optimizers[1] and kind is AdamW:
            optimizer.clip(1.0)
        optimizer.apply(hyper)

    for step in range(2 if kind is AdamW else 1):  # a step takes seconds
        gradients = np.random.default_rng(step).standard_normal(arena.grads.size, np.float32)
        for optimizer in optimizers:
            optimizer.arena.grads[...] = gradients
            update(optimizer)
        assert np.array_equal(
            arena.half[: arena.n_decay].view(np.uint16),
            plain.arena.half[: arena.n_decay].view(np.uint16),
        )
        norms = plain.arena.weights[arena.n_decay :]
        assert np.array_equal(optimizers[1].norms, norms)
        ranks.check_identical(optimizers[1].in_use(), step)
        if step == 0:  # a checkpoint
            before, master = optimizers[1].gather_moments(lambda: None), optimizers[1].master
            optimizers[1].restore()
            assert np.array_equal(arena.weights, plain.arena.weights)
            for (_, p), (_, q) in zip(sharded.storage(), plain.storage()):
                assert np.array_equal(p.data, q.data)
            optimizers[1].release()
            assert arena.weights is None and optimizers[1].master is master
            assert ranks.rank or np.array_equal(before.m, optimizers[0].m)
            if kind is Muon:
                assert ranks.rank or np.array_equal(before.ema, optimizers[0].ema)
                return
    assert to_numpy(optimizers[1].changed).tolist() == [0]
    if ranks.rank == 1:  # a flipped bit of a master, which no other rank has
        optimizers[1].master.view(np.int32)[5] ^= 1
    update(optimizers[1])
    assert to_numpy(optimizers[1].changed).tolist() == [ranks.rank]


class SlowLink(HostCollectives):
    """Every message takes DELAY, one after the other, as on a slow link, without any work for the cores."""

    DELAY = 0.02
    free = 0.0  # when the link has sent all that was given to it

    def _started(self, *request):
        self.free = max(self.free, time.perf_counter()) + self.DELAY
        super()._started(*request)

    def start_gather(self, own_1):
        before = self.free
        gathered = super().start_gather(own_1)
        self.free = before  # one number takes no time
        return gathered

    def join(self):
        time.sleep(max(0.0, self.free - time.perf_counter()))
        super().join()


def overlap_is_real(folder):
    """With a delay per bucket, a step takes less time than computation plus communication."""
    ranks = some_ranks(2)
    if ranks is None:
        return
    fused = deferred.AddNormLinear, deferred.SwiGLULinear
    products = [functions.Linear, *fused, loss_functions.LinearCrossEntropy]
    fast = [op.backward for op in products]

    def slowed(backward):
        return staticmethod(lambda ctx, *dy: time.sleep(0.01) or backward(ctx, *dy))

    for op, backward in zip(products, fast):
        op.backward = slowed(backward)
    seconds, messages = {}, {}
    for dp in ("none", "bucket", "overlap"):
        run = make_run(folder, ranks, dp=dp, bucket_mb=0.03, zero=0)
        run.parallel.collectives.__class__ = SlowLink
        run.step()
        times = []
        for _ in range(3):
            started = time.perf_counter()
            run.step()
            times.append(time.perf_counter() - started)
        seconds[dp], messages[dp] = ranks.sum([min(times)])[0] / 2, len(run.parallel.stage.slices)
    for op, backward in zip(products, fast):
        op.backward = staticmethod(backward)
    for dp in ("bucket", "overlap"):
        communication = messages[dp] * SlowLink.DELAY
        hidden = seconds["none"] + communication - seconds[dp]
        assert messages[dp] >= 4 and hidden > 0.2 * communication, (seconds, messages)


CHECKS = [
    every_stage_with_and_without_zero,
    accumulation,
    tied_embeddings_recompute_and_ignored_targets,
    a_rank_that_skips_layers,
    three_ranks,
    muon,
    experts,
    matrices_stay_whole,
    bf16_communication_stays_close,
    validation_is_global,
    without_communication_ranks_part,
    a_flipped_bit_is_noticed,
    masters_exist_once,
    overlap_is_real,
]
