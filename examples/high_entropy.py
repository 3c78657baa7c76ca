"""An algorithm of your own for `xtrain reinforce`: GRPO on the fifth of the tokens with the highest entropy (Wang et al. 2025).

xtrain reinforce --algorithm examples.high_entropy:ALGORITHM --init FOLDER --data prompts.jsonl --task my_task:reward

The quantile is that of a micro-batch.
"""

# [start:algorithm]
from dataclasses import replace

import numpy as np

from xtrain.reinforcement.grpo import GRPO, of_tokens
from xtrain.reinforcement.surrogate import Objective


def of_high_entropy(tokens):
    losses, slopes = of_tokens(tokens)
    high = tokens.entropies >= np.quantile(tokens.entropies, 0.8)
    return Objective(losses * high, slopes * high)


ALGORITHM = replace(GRPO, objective=of_high_entropy, entropies=True)
# [end:algorithm]
