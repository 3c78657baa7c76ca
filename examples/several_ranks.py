"""Data parallelism by hand: every rank computes on its share of the batch, the gradients are summed, all make the same step.

    mpirun -n 2 python examples/several_ranks.py

xtrain.ddp does the same with buckets that travel while backward runs, checkpoints and a watchdog.
"""

import numpy as np
from mpi4py import MPI

import xtrain

B, T, VOCAB, STEPS = 8, 32, 64, 30


def main() -> float:
    comm = MPI.COMM_WORLD
    config = xtrain.ModelConfig(vocab_size=VOCAB, dim=32, n_layers=2, n_heads=2, max_seq_len=T)
    model = xtrain.Transformer(config, seed=0, device="cpu")  # the same seed: the same weights
    optimizer = xtrain.AdamW(model, lr=3e-3)
    batches = np.random.default_rng(0)
    for _ in range(STEPS):
        start = batches.integers(0, VOCAB, (B, 1))
        ids = (start + np.arange(T + 1)) % VOCAB  # count upwards: easy to learn
        mine = ids[comm.rank :: comm.size]
        inv_count = np.array([1 / (B * T)], np.float32)  # of the whole batch
        model.zero_grad()
        loss = model.loss(mine[:, :-1], mine[:, 1:], inv_count)
        loss.backward()
        comm.Allreduce(MPI.IN_PLACE, model.arena.grads)  # one array holds all gradients
        optimizer.step()
    total = comm.allreduce(loss.item())
    digests = comm.allgather(model.arena.weights.tobytes())
    if comm.rank == 0:
        print(f"{comm.size} ranks, loss {total:.4f}, identical weights: {len(set(digests)) == 1}")
    return total


if __name__ == "__main__":
    main()
