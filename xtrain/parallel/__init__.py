"""Training on several ranks: MPI, collectives, data parallelism, ZeRO-1 and 3, what ends hanging jobs."""
