"""Engines that run ahead without a GPU: a step is launched before the ids of the previous one are read."""

from xtrain import Engine
from xtrain.serving.runner import Runner


class AheadRunner(Runner):
    run_ahead = True


class AheadEngine(Engine):
    runner_type = AheadRunner
