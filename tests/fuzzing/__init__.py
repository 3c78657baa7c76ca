"""Fuzzing: invalid and unusual inputs. `python -m fuzzing` (in tests/) runs many of them, test_fuzz.py a few."""

from . import files, ops, options

TARGETS = {**files.TARGETS, **options.TARGETS, **ops.TARGETS}
