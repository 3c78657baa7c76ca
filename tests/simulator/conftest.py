"""A browser for the tests of the stepper's page."""

import pytest
from chromium import PROGRAM, Browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if PROGRAM is None:
        pytest.skip(
            "needs Chromium"
        )  # nothing else runs the page's scripts; its text has tests without
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()
