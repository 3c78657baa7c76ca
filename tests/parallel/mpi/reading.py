"""Rank 0 reads a text for ever, the other ranks wait.   mpirun -n 2 python reading.py FILE

FILE: is written when rank 0 begins.
"""

import sys
import time
from pathlib import Path

from xtrain.parallel import watchdog
from xtrain.parallel.ranks import connect

if __name__ == "__main__":
    watchdog.START_SECONDS = 3.0
    ranks = connect()
    with watchdog.AbortOnError(ranks, "reading"):
        ranks.on_rank_0(lambda: (Path(sys.argv[1]).touch(), time.sleep(1000)))
