"""The parts of xtrain.simulator, in reading order: errors, scalars, memory, thread, source, warp, block."""
