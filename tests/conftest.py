"""Tests marked `gpu` run only where there is one."""

import os

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # small matrices: threads that wait for each other cost more

import pytest

from xtrain import device


def pytest_collection_modifyitems(items):
    if not device.gpu_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                # speed, memory and real streams: what the simulator cannot show. Values are tested without the mark
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_xdist_auto_num_workers(config):
    """What `-n auto` in setup.cfg means: the whole suite on all cores (8 share a GPU well), a part of it in this process."""
    part = config.option.keyword or config.option.markexpr or config.args_source.name == "ARGS"
    return 0 if part else min(8, os.cpu_count() or 1)
