"""The pytest plugin: `pytest --simulate-cuda` runs every Numba CUDA kernel of the code under test
in the simulator."""

import contextlib
from pathlib import Path

import pytest

from .cudasim import enabled

STRICT = "negative_index", "int16_overflow"  # warnings that fail a test


# option -> its value without --simulate-cuda
UNUSED: dict[str, object] = {
    "report": None,
    "allow": [],
    "enable": [],
    "processes": 1,
    "schedules": 1,
    "seed": None,
}


def pytest_addoption(parser):
    group = parser.getgroup("simulate-cuda")
    group.addoption(
        "--simulate-cuda",
        action="store_true",
        default=enabled(),
        help="run every @cuda.jit kernel in a simulator that reports races, deadlocks, bounds and "
        "uninitialized reads; no GPU needed; NUMBA_ENABLE_CUDASIM=1 does the same",
    )
    group.addoption(
        "--cuda-report",
        metavar="FILE.html",
        help="with --simulate-cuda: write each launch that has a mistake as a page to step "
        "through: FILE.html, FILE-2.html, ...",
    )
    for option, does in (("allow", "do not report"), ("enable", "report also")):
        group.addoption(
            f"--cuda-{option}",
            metavar="KINDS",
            action="append",
            default=[],
            help=f"with --simulate-cuda: {does} these kinds of findings, such as same_value_race,negative_index",
        )
    group.addoption(
        "--cuda-processes",
        metavar="N",
        type=int,
        default=1,
        help="with --simulate-cuda: run the blocks of a launch in N processes if they are independent",
    )

    group.addoption(
        "--cuda-schedules",
        metavar="N",
        type=int,
        default=1,
        help="with --simulate-cuda: run every launch in N orders of its blocks and warps",
    )
    group.addoption(
        "--cuda-seed",
        metavar="SEED",
        type=int,
        default=None,
        help="with --simulate-cuda: run every launch in the order of this seed, which a finding names",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Before the first conftest.py, which may import the code under test."""
    options = early_config.known_args_namespace
    active = contextlib.ExitStack()
    if options.simulate_cuda:
        allow = ",".join(options.cuda_allow)
        enable = ",".join(options.cuda_enable)
        try:
            from . import host  # imports numba.cuda

            kinds = _kinds(allow), [*STRICT, *_kinds(enable)]
            more = {"raised": STRICT, "processes": options.cuda_processes}
            more |= {"schedules": options.cuda_schedules, "seed": options.cuda_seed}
            active.enter_context(host.simulate(*kinds, **more))
        except (RuntimeError, ImportError, ValueError) as error:
            raise pytest.UsageError(str(error)) from None
        early_config.add_cleanup(active.close)
        if options.cuda_report:
            host.dispatch.failed = []
    for option, default in UNUSED.items():
        if getattr(options, f"cuda_{option}") != default and not options.simulate_cuda:
            raise pytest.UsageError(f"--cuda-{option} is for --simulate-cuda: add it")


def _kinds(text: str) -> list[str]:
    return [kind for kind in text.split(",") if kind]


def pytest_sessionfinish(session):
    config = session.config
    if config.option.simulate_cuda and config.option.cuda_report:
        from . import host

        first = Path(config.option.cuda_report)
        said = config.pluginmanager.get_plugin("terminalreporter")
        # a worker of xdist writes its own pages
        worker = getattr(config, "workerinput", {}).get("workerid", "")
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
