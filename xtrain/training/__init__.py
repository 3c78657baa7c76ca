"""One training run: the step, the loop, checkpoints, logs, preemption, and advice when memory runs
out."""
