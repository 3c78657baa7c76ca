"""The fixtures of the tests that need a server: a tiny model's folder, and the server in a thread."""

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from served import make_folder  # here: without its packages the tests are skipped

    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(folder):
    from served import Served

    served = Served(folder)
    yield served
    served.close()
