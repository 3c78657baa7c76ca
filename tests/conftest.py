"""Skip tests marked `gpu` on machines without a GPU; choose the number of test processes."""

import os

# for small matrices, threads cost more time than they save
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from xtrain import device


def pytest_collection_modifyitems(items):
    if not device.gpu_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                # the mark is for speed, memory and real streams; values are tested in the simulator, too
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_xdist_auto_num_workers(config):
    """`-n auto` in setup.cfg: run the whole suite on all cores (at most 8: they share a GPU), parts of it in one process."""
    part = config.option.keyword or config.option.markexpr or config.args_source.name == "ARGS"
    return 0 if part else min(8, os.cpu_count() or 1)
