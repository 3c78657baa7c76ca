"""Some of Numba's own CUDA tests, from the installed package, under `--simulate-cuda`; conformance.py runs all of them."""

import signal
from importlib import util

import conformance
import pytest
from checks import only_all

# Module -> how many of its tests pass, at least. Most of the others ask for machine code.
FLOOR = {
    "cudapy.test_array": 19,
    "cudapy.test_atomics": 122,
    "cudapy.test_enums": 6,
    "cudapy.test_math": 45,
    "cudapy.test_operator": 13,
    "cudapy.test_record_dtype": 36,
    "cudapy.test_slicing": 3,
    "cudapy.test_sm": 16,
    "cudapy.test_vector_type": 4,
}


@pytest.mark.slow
@only_all
@pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="needs SIGPROF")
@pytest.mark.skipif(util.find_spec("numba_cuda") is not None, reason="numba-cuda has its own tests")
def test_numba_s_own_tests_pass():
    results = conformance.run([*FLOOR])
    passed = [test for test, (outcome, _) in results.items() if outcome == "passed"]
    failed = {test: why for test, (outcome, why) in results.items() if outcome == "failed"}
    for module, floor in FLOOR.items():
        found = sum(test.startswith(f"{module}::") for test in passed)
        assert found >= floor, (module, found, failed)


def test_what_is_not_counted():
    mistake, finding = next(iter(conformance.MISTAKES.items()))
    results = {
        "a::b": ("passed", ""),
        "a::c": ("failed", "AssertionError"),
        "a::d": ("failed", "NotImplementedError: inspect_asm: the simulator has no machine code"),
        "a::e": ("failed", f"UninitializedError: {finding}"),  # no known mistake
        mistake: ("failed", f"UninitializedError: {finding}"),
    }
    assert conformance.share(results) == 1 / 3
    assert conformance.share({mistake: ("failed", "TypeError: another reason")}) == 0
