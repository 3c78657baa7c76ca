"""The checks of several files, which begin in a second less each.   mpirun -n 4 python together.py FOLDER equality refusals"""

import importlib
import sys

from common import run_checks

if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    run_checks([c for name in names for c in importlib.import_module(name).CHECKS], folder)
