"""How many of Numba's own CUDA tests pass in the simulator: `python tests/simulator/conformance.py [MODULE ...]`.

The tests are those of the installed Numba, the packages cudapy and doc_examples of numba.cuda.tests. Counted are the ones that
pass under Numba's simulator (NUMBA_ENABLE_CUDASIM=1), and those of doc_examples, which it skips because of where they import
numba.cuda; here they run unchanged with `--simulate-cuda`. A test fails if it takes more than a minute of CPU time. Prints the
share that passes and the failures by reason.

MODULE: cudapy.test_sm, doc_examples.test_matmul ...; without, all of them, in about ten minutes.

Not counted are tests that end with one of the messages in OUTSIDE, whatever their names are: they need a real device. Not counted
either are the tests whose kernel has a mistake, which the simulator finds (MISTAKES).
"""

import collections
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from importlib import util
from pathlib import Path

import pytest

SECONDS = 60  # of CPU time for one test
PACKAGES = "numba.cuda.tests.cudapy", "numba.cuda.tests.doc_examples"
IMPORTS = "import at non-top-level"  # why Numba's simulator skips all tests of doc_examples
OUTSIDE = (
    "has no machine code",  # asks for PTX, or links CUDA C
    "cannot be shared with other processes",
    "stride semantics differ for transpose",  # is about Numba's simulator, without which Numba skips it
)
# Test -> the finding with which it ends. Each was read: the kernel does what the finding says.
UNWRITTEN = "shared memory that no thread has written; the value reaches a store"
MISTAKES = {
    # stores elements of a shared array that the kernel never writes
    "cudapy.test_freevar::TestFreeVar::test_freevar": UNWRITTEN,
    "cudapy.test_sm::TestSharedMemoryIssue::test_issue_2393": UNWRITTEN,
    "cudapy.test_sm_creation::TestSharedMemoryCreation::test_global_constants": UNWRITTEN,
    "cudapy.test_sm_creation::TestSharedMemoryCreation::test_global_build_tuple": UNWRITTEN,
    "cudapy.test_sm_creation::TestSharedMemoryCreation::test_global_constant_tuple": UNWRITTEN,
    # threads 13 to 31 all execute y[i] += x[i] // y[i] for every i
    "cudapy.test_exception::TestException::test_raise_causing_warp_diverge": "data race in problematic",
    # reads shape[-2] of an array with one axis, without debug=True
    "cudapy.test_exception::TestException::test_exception": "IndexError in foo",
}


# ----------------------------------------------------------------------------- in the process that runs the tests
class Recorder:
    """A pytest plugin: runs the tests in `only`, if given, and writes one line of JSON for each to the file `out`."""

    def __init__(self, out: str, only: list[str] | None):
        self.out, self.only, self.test = out, only, ""

    def pytest_collection_modifyitems(self, items):
        if self.only is not None:
            items[:] = [item for item in items if name(item) in self.only]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        self.test = name(item)
        signal.signal(signal.SIGPROF, too_slow)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "call" or not report.passed:
            error = call.excinfo
            reason = "" if error is None else error.exconly().strip()
            # a test that Numba expects to fail on a real GPU only
            outcome = "passed" if reason == "Failed: Unexpected success" else report.outcome
            self.write(name(item), outcome, reason)
        return report

    def pytest_runtest_logreport(self, report):
        """The test that a failed part (subTest) belongs to has failed."""
        if report.failed and hasattr(report, "context"):
            self.write(self.test, report.outcome, report.longreprtext.splitlines()[-1])

    def write(self, test, outcome, reason):
        with open(self.out, "a", encoding="utf-8") as file:
            file.write(json.dumps([test, outcome, reason]) + "\n")


def too_slow(*_):
    raise TimeoutError(f"took more than {SECONDS} s of CPU time")


def name(item) -> str:
    """package.module::class::test"""
    module = ".".join(item.module.__name__.split(".")[-2:])
    return "::".join([module, *([item.cls.__name__] if item.cls else []), item.name])


def record(out: str, only: str, modules: list[str]):
    """Run the tests of some modules in this process."""
    chosen = json.loads(Path(only).read_text(encoding="utf-8"))
    here = os.environ["NUMBA_ENABLE_CUDASIM"] == "0"
    simulated = ["-p", "xtrain.simulator.pytest_plugin", "--simulate-cuda"] if here else []
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", os.getcwd()]
    paths = [f"numba.cuda.tests.{m}" for m in modules]
    pytest.main([*options, *simulated, "--pyargs", *paths], [Recorder(out, chosen)])


# ----------------------------------------------------------------------------- in the process that counts
def run(modules: list[str], numbas: bool = False, only=None) -> dict[str, tuple[str, str]]:
    """test -> (outcome, reason). numbas: under Numba's simulator. only: the names of the tests to run.

    Many modules have a process each, so that none can stop the others.
    """
    results: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out, chosen = Path(f"{folder}/results"), Path(f"{folder}/only")
        chosen.write_text(json.dumps(only), encoding="utf-8")
        env = {**os.environ, "NUMBA_ENABLE_CUDASIM": str(int(numbas))}
        groups = [modules] if numbas or len(modules) < 10 else [[m] for m in modules]
        for group in groups:
            out.write_text("", encoding="utf-8")
            call = [sys.executable, __file__, "--record", str(out), str(chosen), *group]
            try:
                subprocess.run(call, env=env, cwd=folder, capture_output=True, timeout=30 * SECONDS)
            except subprocess.TimeoutExpired:
                print(f"{group}: stopped after {30 * SECONDS} s", file=sys.stderr)
            for line in out.read_text(encoding="utf-8").splitlines():
                test, *result = json.loads(line)
                if results.get(test, "")[:1] != ("failed",):
                    results[test] = tuple(result)
    return results


def all_modules() -> list[str]:
    found = []
    for package in PACKAGES:
        spec = util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        stems = [p.stem for p in Path(spec.submodule_search_locations[0]).glob("test_*.py")]
        found += [f"{package.rpartition('.')[2]}.{stem}" for stem in sorted(stems)]
    return found


def measure(modules: list[str]) -> dict[str, tuple[str, str]]:
    """test -> (outcome, reason), for each test that passes under Numba's simulator."""
    expected = run(modules, numbas=True).items()
    counted = [test for test, (outcome, why) in expected if outcome == "passed" or IMPORTS in why]
    within = [m for m in modules if any(test.startswith(f"{m}::") for test in counted)]
    found = run(within, only=counted)
    return {test: found.get(test, ("failed", "the test did not run")) for test in counted}


def reason(text: str) -> str:
    """The reason of a failure without what differs from test to test: names, numbers, places."""
    first = text.splitlines()[0] if text else ""
    first = re.sub(r"^[\w.]+\.(\w+)", r"\1", first)
    first = re.sub(r"\bin \w+( \(called by \w+\))?, block \([\d, ]+\)", "", first)
    return re.sub(r"\d+", "N", first)[:150]


def outside(test: str, why: str) -> bool:
    """Does a test that ended with this message need what no simulator has, or did the simulator find its mistake?"""
    found = test in MISTAKES and MISTAKES[test] in why
    return found or any(words in why for words in OUTSIDE)


def share(results: dict[str, tuple[str, str]]) -> float:
    """The share that passes, of the tests that need no real device and whose kernels are right."""
    counted = [outcome for test, (outcome, why) in results.items() if not outside(test, why)]
    return counted.count("passed") / max(len(counted), 1)


def main(modules: list[str]):
    results = measure(modules or all_modules())
    failed = {test: why for test, (outcome, why) in results.items() if outcome != "passed"}
    reasons = collections.defaultdict(list)
    for test, why in failed.items():
        reasons[reason(why)].append(test)
    for why, tests in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        mark = "not counted: " if outside(tests[0], failed[tests[0]]) else ""
        print(f"{len(tests):4}  {mark}{why}\n      {', '.join(tests[:3])}")
    counted = [test for test in results if not outside(test, results[test][1])]
    passed = len(results) - len(failed)
    print(
        f"{passed} of {len(counted)} pass: {share(results):.1%}; {len(results) - len(counted)} are not counted"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main(sys.argv[1:])
