"""The pytest plugin: `pytest --simulate-cuda` runs every Numba CUDA kernel of the code under test in the simulator."""

import contextlib
from pathlib import Path

import pytest


def pytest_addoption(parser):
    group = parser.getgroup("simulate-cuda")
    group.addoption(
        "--simulate-cuda",
        action="store_true",
        help="run every @cuda.jit kernel in a simulator that reports races, deadlocks, bounds and uninitialized reads; no GPU needed",
    )
    group.addoption(
        "--cuda-report",
        metavar="FILE.html",
        help="with --simulate-cuda: write each launch that has a mistake as a page to step through: FILE.html, FILE-2.html, ...",
    )
    group.addoption(
        "--cuda-processes",
        metavar="N",
        type=int,
        default=1,
        help="with --simulate-cuda: run the blocks of a launch in N processes if they are independent",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Before the first conftest.py, which may import the code under test."""
    options, active = early_config.known_args_namespace, contextlib.ExitStack()
    if options.simulate_cuda:
        try:
            from . import host  # imports numba.cuda

            active.enter_context(host.simulate(processes=options.cuda_processes))
        except (RuntimeError, ValueError) as error:
            raise pytest.UsageError(str(error)) from None
        early_config.add_cleanup(active.close)
        if options.cuda_report:
            host.dispatch.failed = []
    elif options.cuda_report:
        raise pytest.UsageError("--cuda-report is for --simulate-cuda: add it")
    elif options.cuda_processes != 1:
        raise pytest.UsageError("--cuda-processes is for --simulate-cuda: add it")


def pytest_sessionfinish(session):
    config = session.config
    if config.option.simulate_cuda and config.option.cuda_report:
        from . import host

        first, said = (
            Path(config.option.cuda_report),
            config.pluginmanager.get_plugin("terminalreporter"),
        )
        worker = getattr(config, "workerinput", {}).get(
            "workerid", ""
        )  # of xdist: writes its own pages
        for number, stepper in enumerate(host.dispatch.failed or (), 1):
            name = "-".join(filter(None, [first.stem, worker, str(number) if number > 1 else ""]))
            page = stepper.save(first.with_name(f"{name}{first.suffix or '.html'}"))
            if said is not None:
                said.line(f"\n{page}: {str(stepper.error).splitlines()[0]}")
        host.dispatch.failed = None


def pytest_report_header(config):
    if config.option.simulate_cuda:
        return "simulate-cuda: kernels run in the simulator"
    return None
