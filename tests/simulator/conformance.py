"""How many of Numba's own CUDA tests pass in the simulator: `python tests/simulator/conformance.py [MODULE ...]`.

The tests are those of the installed Numba, numba.cuda.tests.cudapy. Counted are the ones that pass under Numba's simulator
(NUMBA_ENABLE_CUDASIM=1); here they run unchanged with `--simulate-cuda`. Prints the share that passes and the failures by reason.
MODULE: test_sm, test_atomics ...; without, all of them, in about ten minutes. A test fails
if it takes more than a minute.
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

SECONDS = 60  # for one test
NO_MACHINE_CODE = "has no machine code"  # in the message of an inspect_asm
PACKAGE = "numba.cuda.tests.cudapy"


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
        signal.signal(signal.SIGALRM, too_slow)
        signal.alarm(SECONDS)
        try:
            return (yield)
        finally:
            signal.alarm(0)

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
    raise TimeoutError(f"took more than {SECONDS} s")


def name(item) -> str:
    """module::class::test"""
    module = item.module.__name__.rpartition(".")[2]
    return "::".join([module, *([item.cls.__name__] if item.cls else []), item.name])


def record(out: str, only: str, modules: list[str]):
    """Run the tests of some modules in this process."""
    chosen = json.loads(Path(only).read_text(encoding="utf-8")) if only else None
    simulated = ["-p", "xtrain.simulator.pytest_plugin", "--simulate-cuda"] if only else []
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        os.getcwd(),
        *simulated,
    ]
    pytest.main(
        [*options, "--pyargs", *(f"{PACKAGE}.{m}" for m in modules)], [Recorder(out, chosen)]
    )


# ----------------------------------------------------------------------------- in the process that counts
def run(modules: list[str], only: list[str] | None) -> dict[str, tuple[str, str]]:
    """test -> (outcome, reason), from processes of their own: one for each of many modules, so that none can stop the others."""
    results: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out, chosen = f"{folder}/results", f"{folder}/only" if only is not None else ""
        if only is not None:
            Path(chosen).write_text(json.dumps(only), encoding="utf-8")
        env = {**os.environ, "NUMBA_ENABLE_CUDASIM": "0" if only is not None else "1"}
        groups = [modules] if only is None or len(modules) < 4 else [[m] for m in modules]
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
    spec = util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    return sorted(p.stem for p in Path(spec.submodule_search_locations[0]).glob("test_*.py"))


def measure(modules: list[str]) -> dict[str, tuple[str, str]]:
    """test -> (outcome, reason), for each test that passes under Numba's simulator."""
    counted = [test for test, (outcome, _) in run(modules, None).items() if outcome == "passed"]
    within = [m for m in modules if any(test.startswith(f"{m}::") for test in counted)]
    found = run(within, counted)
    return {test: found.get(test, ("failed", "the test did not run")) for test in counted}


def reason(text: str) -> str:
    """The reason of a failure without what differs from test to test: names, numbers, places."""
    first = text.splitlines()[0] if text else ""
    first = re.sub(r"^[\w.]+\.(\w+)", r"\1", first)
    first = re.sub(r"\bin \w+( \(called by \w+\))?, block \([\d, ]+\)", "", first)
    return re.sub(r"\d+", "N", first)[:150]


def share(results: dict[str, tuple[str, str]]) -> float:
    """The share that passes, of the tests that do not ask for machine code."""
    counted = [outcome for outcome, why in results.values() if NO_MACHINE_CODE not in why]
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
    device = sum(NO_MACHINE_CODE in why for why in failed.values())
    print(
        f"{passed} of {len(results)} pass, {device} ask for machine code: {share(results):.1%} of the others"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main(sys.argv[1:])
