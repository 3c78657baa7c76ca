"""The pytest plugin: `pytest --simulate-cuda` runs every Numba CUDA kernel of the code under test in the simulator."""

import pytest


def pytest_addoption(parser):
    group = parser.getgroup("simulate-cuda")
    group.addoption(
        "--simulate-cuda",
        action="store_true",
        help="run every @cuda.jit kernel in a simulator that reports races, deadlocks, bounds and uninitialized reads; no GPU needed",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Before the first conftest.py, which may import the code under test."""
    if early_config.known_args_namespace.simulate_cuda:
        try:
            from . import host  # imports numba.cuda
        except RuntimeError as error:
            raise pytest.UsageError(str(error)) from None
        host.start()
        early_config.add_cleanup(host.stop)


def pytest_report_header(config):
    if config.option.simulate_cuda:
        return "simulate-cuda: kernels run in the simulator"
    return None
