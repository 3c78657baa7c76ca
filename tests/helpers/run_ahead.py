"""Engines that run ahead without a GPU: a step is launched before the ids of the previous one are read; or that always draft."""

from xtrain import Engine
from xtrain.serving.runner import Runner
from xtrain.serving.speculation import Speculation


class AheadRunner(Runner):
    run_ahead = True


class AheadEngine(Engine):
    runner_type = AheadRunner


class Eager(Speculation):
    """Drafts whatever the time is."""

    def _count(self, drafts, B, size):
        return len(drafts)


class Drafting(Engine):
    speculation_type = Eager
