"""Tests marked `gpu` run only where there is one."""

import pytest

from xtrain import device


def pytest_collection_modifyitems(items):
    if not device.gpu_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
