"""Some of Numba's own CUDA tests, from the installed package, under `--simulate-cuda`; conformance.py runs all of them."""

import signal

import conformance
import pytest

# Module -> how many of its tests pass, at least. Numba may add tests.
FLOOR = {
    "cudapy.test_array": 18,
}


@pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="needs SIGPROF")
def test_numba_s_own_tests_pass():
    results = conformance.run([*FLOOR])
    passed = [test.partition("::")[0] for test, (outcome, _) in results.items() if outcome == "passed"]
    failed = {t: why for t, (outcome, why) in results.items() if outcome == "failed"}
    for module, floor in FLOOR.items():
        assert passed.count(module) >= floor, (module, failed)
