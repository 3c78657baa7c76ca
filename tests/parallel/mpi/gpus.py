"""The checks of equality.py on GPUs, eager and captured in a CUDA graph, with NCCL and with copy engines.

mpirun -n GPUS python gpus.py FOLDER [nccl] [copy]
mpirun -n 2    python gpus.py FOLDER one            both ranks on one GPU: copies only, as NCCL refuses
"""

import itertools
import sys

import numpy as np
from common import WORLD, run_checks
from equality import SHAPE, STAGES, make_run, ten_steps

from xtrain.device import cupy, has_fp8
from xtrain.parallel import copy_collectives as peer
from xtrain.parallel.ranks import Ranks, choose_gpu

RANKS = Ranks(WORLD)
ONE = sys.argv[2:] == ["one"]
TRANSPORTS = ["copy"] if ONE else sys.argv[2:] or ["nccl", "copy"]
# The head's matrix product has another shape with another number of sequences, so cuBLAS may add in another order.
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3, "fp8": 1e-2}


def run(folder, ranks, **options):
    result = ten_steps(make_run(folder, ranks, batch=2 * RANKS.world, device="gpu", **options))
    cupy().get_default_memory_pool().free_all_blocks()
    return result


def every_stage(folder):
    if ONE:
        peer.why_no_copies = lambda ranks: ""
    else:
        choose_gpu(RANKS)
    SHAPE.update(dim=128, n_heads=4, head_dim=32, hidden_dim=256, max_seq_len=64, n_kv_heads=4)
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


def interrupted(folder):
    """A run that was closed releases everything: the next one can share its memory again."""
    for _ in range(2):
        for how in TRANSPORTS:
            run(folder, RANKS, seq_len=64, bucket_mb=0.1, zero=1, transport=how)


if __name__ == "__main__":
    run_checks([every_stage, bf16_communication, accumulation, fp8, muon, interrupted], sys.argv[1])
