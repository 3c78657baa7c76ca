"""Looking at a machine, a model and a training step."""
