"""Some of Numba's own CUDA tests, from the installed package, under `--simulate-cuda`; conformance.py runs all of them."""

import signal

import conformance
import pytest

MODULES = ["test_array", "test_operator", "test_slicing"]


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs SIGALRM")
def test_numba_s_own_tests_pass():
    results = conformance.measure(MODULES)
    failed = {test: why for test, (outcome, why) in results.items() if outcome != "passed"}
    assert len(results) >= 30
    assert conformance.share(results) >= 0.96, failed
