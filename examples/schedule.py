"""A schedule of your own: constant, then linearly to zero. Text, checkpoints, --resume, metrics and the report stay.

python examples/schedule.py FILE_OR_FOLDER [STEPS]
"""

import sys
from pathlib import Path

from xtrain import TrainConfig
from xtrain.train import train
from xtrain.training.run import Run


class ConstantThenDown(Run):
    def learning_rate(self) -> float:
        """Of the next step; self.done steps have been made."""
        c = self.config
        return c.lr * min(1.0, 5 * (1 - self.done / c.steps))  # the last fifth goes down


def main(data: str, steps: int = 100, out: str = "runs") -> Path:
    config = TrainConfig(preset="tiny", data=data, steps=steps, out=out, name="schedule")
    return train(config, make_run=ConstantThenDown)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:3]))
