"""Some of Numba's own CUDA tests, from the installed package, under `--simulate-cuda`; conformance.py runs all of them."""

import signal

import conformance
import pytest

MODULES = ["cudapy.test_array", "cudapy.test_operator", "cudapy.test_slicing"]


@pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="needs SIGPROF")
def test_numba_s_own_tests_pass():
    results = conformance.measure(MODULES)
    failed = {test: why for test, (outcome, why) in results.items() if outcome != "passed"}
    assert len(results) >= 30
    assert conformance.share(results) >= 0.96, failed
