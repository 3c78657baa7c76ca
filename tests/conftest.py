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
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
