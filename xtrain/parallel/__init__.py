"""Training on several ranks: MPI, collectives, data parallelism, ZeRO-1, the watchdog."""
