"""The parts of xtrain.simulator. To read: errors, scalars, memory, thread, source, warp, block."""
