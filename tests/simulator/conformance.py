"""How many of Numba's own CUDA tests pass in the simulator: `python tests/simulator/conformance.py [MODULE ...]`.

The tests are those of the installed Numba, the packages cudapy and doc_examples of numba.cuda.tests. Counted are the ones that pass
under Numba's simulator (NUMBA_ENABLE_CUDASIM=1), and those that it skips because of where they import numba.cuda, which are all of
doc_examples; here they run unchanged with `--simulate-cuda`. Prints the share that passes and
the failures by reason. MODULE: cudapy.test_sm, doc_examples.test_matmul ...; without, all of them, in about ten minutes. A test
fails if it takes more than a minute of CPU time.

Not counted, because of how a test ends and not because of its name (OUTSIDE): a test that asks for machine code or for another process's
memory, which the simulator refuses in these words, and a test of Numba's simulator itself, which Numba skips without it.
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
# in the message with which a test that is not counted ends
OUTSIDE = "has no machine code", "cannot be shared with other processes", "Skipped: "


# ----------------------------------------------------------------------------- in the process that runs the tests
class Recorder:
    """A pytest plugin: runs the tests in `only`, if given, and writes one line of JSON for each to the file `out`."""

    def __init__(self, out: str, only: list[str] | None):
        self.out, self.only = out, only

    def pytest_collection_modifyitems(self, items):
        if self.only is not None:
            items[:] = [item for item in items if name(item) in self.only]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
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
            with open(self.out, "a", encoding="utf-8") as file:
                file.write(json.dumps([name(item), outcome, reason]) + "\n")
        return report


def too_slow(*_):
    raise TimeoutError(f"took more than {SECONDS} s of CPU time")


def name(item) -> str:
    """package.module::class::test"""
    module = ".".join(item.module.__name__.split(".")[-2:])
    return "::".join([module, *([item.cls.__name__] if item.cls else []), item.name])


def record(out: str, only: str, modules: list[str]):
    """Run the tests of some modules in this process."""
    chosen = json.loads(Path(only).read_text(encoding="utf-8")) if only else None
    simulated = ["-p", "xtrain.simulator.pytest_plugin", "--simulate-cuda"] if only else []
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", os.getcwd()]
    paths = [f"numba.cuda.tests.{m}" for m in modules]
    pytest.main([*options, *simulated, "--pyargs", *paths], [Recorder(out, chosen)])


# ----------------------------------------------------------------------------- in the process that counts
def run(modules: list[str], only: list[str] | None) -> dict[str, tuple[str, str]]:
    """test -> (outcome, reason), from processes of their own: one for each of many modules, so that none can stop the others."""
    results: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out, chosen = f"{folder}/results", f"{folder}/only" if only is not None else ""
        if only is not None:
            Path(chosen).write_text(json.dumps(only), encoding="utf-8")
        env = {**os.environ, "NUMBA_ENABLE_CUDASIM": "0" if only is not None else "1"}
        groups = [modules] if only is None or len(modules) < 10 else [[m] for m in modules]
        for group in groups:
            Path(out).write_text("", encoding="utf-8")
            call = [sys.executable, os.path.abspath(__file__), "--record", out, chosen, *group]
            try:
                subprocess.run(call, env=env, cwd=folder, capture_output=True, timeout=10 * SECONDS)
            except subprocess.TimeoutExpired:
                print(f"{group}: stopped after {10 * SECONDS} s", file=sys.stderr)
            for line in Path(out).read_text(encoding="utf-8").splitlines():
                test, outcome, reason = json.loads(line)
                results[test] = (outcome, reason)
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
    expected = run(modules, None).items()
    counted = [test for test, (outcome, why) in expected if outcome == "passed" or IMPORTS in why]
    within = [m for m in modules if any(test.startswith(f"{m}::") for test in counted)]
    found = run(within, counted)
    return {test: found.get(test, ("failed", "the test did not run")) for test in counted}


def reason(text: str) -> str:
    """The reason of a failure without what differs from test to test: names, numbers, places."""
    first = text.splitlines()[0] if text else ""
    first = re.sub(r"^[\w.]+\.(\w+)", r"\1", first)
    first = re.sub(r"\bin \w+( \(called by \w+\))?, block \([\d, ]+\)", "", first)
    return re.sub(r"\d+", "N", first)[:150]


def outside(why: str) -> bool:
    """Does a test that ended with this message need what no simulator has?"""
    return any(words in why for words in OUTSIDE)


def share(results: dict[str, tuple[str, str]]) -> float:
    """The share that passes, of the tests that need no real device."""
    counted = [outcome for outcome, why in results.values() if not outside(why)]
    return counted.count("passed") / max(len(counted), 1)


def main(modules: list[str]):
    results = measure(modules or all_modules())
    failed = {test: why for test, (outcome, why) in results.items() if outcome != "passed"}
    reasons = collections.defaultdict(list)
    for test, why in failed.items():
        reasons[reason(why)].append(test)
    for why, tests in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        print(f"{len(tests):4}  {why}\n      {', '.join(tests[:3])}")
    passed = len(results) - len(failed)
    device = sum(map(outside, failed.values()))
    of_others = f"{share(results):.1%} of the others"
    print(f"{passed} of {len(results)} pass, {device} need a real device: {of_others}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main(sys.argv[1:])
