"""Inputs that nobody would give on purpose. `python -m fuzzing` (in tests/) runs many of them, test_fuzz.py a few."""

from . import files, ops, options

TARGETS = {**files.TARGETS, **options.TARGETS, **ops.TARGETS}
