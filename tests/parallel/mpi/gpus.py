"""The checks of equality.py on GPUs, eager and captured in a CUDA graph, with NCCL and with copy engines.

mpirun -n GPUS python gpus.py FOLDER [nccl] [copy] [NAMES OF CHECKS] [brief]
mpirun -n 2    python gpus.py FOLDER one            both ranks on one GPU: copies only, as NCCL refuses
"""

import itertools
import sys

import numpy as np
import zero3
from common import WORLD, run_checks
from equality import SHAPE, STAGES, make_run, some_steps

from xtrain.device import cupy, has_fp8
from xtrain.parallel import copy_collectives as peer
from xtrain.parallel.ranks import Ranks, choose_gpu

RANKS = Ranks(WORLD)
ONE = sys.argv[2:] == ["one"]
TRANSPORTS = [how for how in ("nccl", "copy") if how in sys.argv[2:]] or ["nccl", "copy"]
if ONE:
    TRANSPORTS = ["copy"]
# The head's matrix product has another shape with another number of sequences, so cuBLAS may add in another order.
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3, "fp8": 1e-2}


def run(folder, ranks, **options):
    result = some_steps(make_run(folder, ranks, batch=2 * RANKS.world, device="gpu", **options), 10)
    cupy().get_default_memory_pool().free_all_blocks()
    return result


def lay_out(folder):
    if ONE:
        peer.why_no_copies = lambda ranks: ""
    else:
        choose_gpu(RANKS)
    SHAPE.update(dim=128, n_heads=4, head_dim=32, hidden_dim=256, max_seq_len=64, n_kv_heads=4)


def every_stage(folder):
    for precision in ("fp32", "bf16"):
        kind = dict(precision=precision, seq_len=64)
        alone, _ = run(folder, None, **kind)
        for how, dp, zero in itertools.product(TRANSPORTS, STAGES, (0, 1)):
            bits = []
            for graph in (False, True):
                more = dict(dp=dp, zero=zero, graph=graph, transport=how, **kind)
                numbers, weights = run(folder, RANKS, **more)
                gap = np.abs(numbers[:, 0] / alone[:, 0] - 1).max()
                assert gap <= TOLERANCE[precision], f"{more}: the loss is {gap:.1e} off"
                bits.append(numbers.tobytes() + weights.tobytes())
            assert bits[0] == bits[1], f"{more}: the graph gives other bits"
            if RANKS.rank == 0:
                print(
                    f"{precision} {how} {dp} zero {zero}: largest gap of the loss {gap:.1e}",
                    flush=True,
                )


def bf16_communication(folder):
    for zero in () if ONE else (0, 1):  # NCCL's, whatever was asked for
        kind = dict(precision="bf16", seq_len=64, zero=zero)
        exact, rounded = (run(folder, RANKS, grad_comm=c, **kind)[0] for c in ("fp32", "bf16"))
        gap = np.abs(rounded[:, 0] / exact[:, 0] - 1).max()
        assert 0 < gap < 5e-3, gap


def accumulation(folder):
    alone, _ = run(folder, None, seq_len=64)
    for how, zero in itertools.product(TRANSPORTS, (0, 1)):
        numbers, _ = run(folder, RANKS, seq_len=64, micro_batch=1, zero=zero, transport=how)
        np.testing.assert_allclose(numbers[:, 0], alone[:, 0], rtol=1e-6)


def fp8(folder):
    """One scale per matrix on all ranks; the maxima are gathered inside the graph."""
    if not has_fp8():
        return
    kind = dict(precision="fp8", seq_len=64)
    alone, _ = run(folder, None, **kind)
    for how, zero in itertools.product(TRANSPORTS, (0, 1)):
        bits = []
        for graph in (False, True):
            numbers, weights = run(folder, RANKS, zero=zero, graph=graph, transport=how, **kind)
            gap = np.abs(numbers[:, 0] / alone[:, 0] - 1).max()
            assert gap <= TOLERANCE["fp8"], f"{how} zero {zero}: the loss is {gap:.1e} off"
            bits.append(numbers.tobytes() + weights.tobytes())
        assert bits[0] == bits[1], f"{how} zero {zero}: the graph gives other bits"


def muon(folder):
    """Whole matrices on their owners, and a moving average. Products of fewer matrices may be added in another order."""
    for precision in ("fp32", "bf16"):
        kind = dict(precision=precision, seq_len=64, optimizer="muon", ema=0.9)
        alone, _ = run(folder, None, **kind)
        for how in TRANSPORTS:
            bits = []
            for graph in (False, True):
                numbers, weights = run(folder, RANKS, zero=1, graph=graph, transport=how, **kind)
                gap = np.abs(numbers[:, 0] / alone[:, 0] - 1).max()
                assert gap <= 10 * TOLERANCE[precision], f"{precision} {how}: {gap:.1e} off"
                bits.append(numbers.tobytes() + weights.tobytes())
            assert bits[0] == bits[1], f"{precision} {how}: the graph gives other bits"


def zero_3(folder):
    """On two GPUs the losses and weights are the bits of ZeRO-1; on more a sum has another order."""
    kinds = [dict(recompute="none"), dict(recompute="block", tied=True, ema=0.9)]
    if "brief" not in sys.argv:
        mixture = dict(n_experts=4, experts_per_token=2, dense_layers=(0,), n_layers=3)
        kinds.append(dict(recompute="attention", mixture=mixture))
    for precision, kind, how in itertools.product(("fp32", "bf16"), kinds, TRANSPORTS):
        found = []
        for zero, graph in ((1, True), (3, False), (3, True)):
            more = dict(n_layers=5, clip=0, zero=zero, graph=graph, transport=how, check_ranks=1)
            batch = 2 * RANKS.world
            more = dict(batch=batch, device="gpu", precision=precision, seq_len=64) | more | kind
            found.append(zero3.some_steps(make_run(folder, RANKS, **more), 6))
            cupy().get_default_memory_pool().free_all_blocks()
        (one, w1), (eager, w3), (captured, w3_graph) = found
        assert np.array_equal(eager, captured), f"{kind}: the graph gives other bits"
        gap = np.abs(eager[:, 0] / one[:, 0] - 1).max()
        assert gap <= (0 if RANKS.world == 2 else TOLERANCE[precision]), (precision, kind, how, gap)
        for name, values in w1.items():
            assert np.array_equal(w3[name], w3_graph[name]), (precision, kind, how, name)
            same = np.array_equal(values, w3[name])
            assert same or RANKS.world > 2, (precision, kind, how, name)
        if RANKS.rank == 0:
            print(f"{precision} {how} {kind}: gap of the loss {gap:.1e}", flush=True)


def zero_3_between_steps(folder):
    """Replayed steps, and eager passes between them that use the same communicator, flags and buffers."""
    for how in TRANSPORTS:
        kind = dict(device="gpu", precision="bf16", seq_len=64, transport=how, graph=True)
        zero3.passes_between_steps(folder, RANKS.world, 9, **kind)
        cupy().get_default_memory_pool().free_all_blocks()


def zero_3_accumulates(folder):
    for how in TRANSPORTS:
        more = dict(batch=4 * RANKS.world, device="gpu", precision="bf16", seq_len=64, n_layers=3)
        more |= dict(micro_batch=1, transport=how)
        one, three = (
            zero3.some_steps(make_run(folder, RANKS, zero=z, **more), 5)[0] for z in (1, 3)
        )
        np.testing.assert_allclose(one[:, 0], three[:, 0], rtol=1e-3)


def interrupted(folder):
    """A run that was closed releases everything: the next one can share its memory again."""
    for _ in range(2):
        for how in TRANSPORTS:
            run(folder, RANKS, seq_len=64, bucket_mb=0.1, zero=1, transport=how)


CHECKS = [every_stage, bf16_communication, accumulation, fp8, muon, zero_3, zero_3_accumulates]
CHECKS += [zero_3_between_steps, interrupted]

if __name__ == "__main__":
    names = [check.__name__ for check in CHECKS]
    chosen = [CHECKS[names.index(name)] for name in sys.argv[2:] if name in names]
    run_checks([lay_out, *(chosen or CHECKS)], sys.argv[1])
