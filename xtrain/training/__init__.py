"""One training run: the step, the loop, checkpoints, logs, stopping and what to do when memory runs out."""
