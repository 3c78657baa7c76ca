"""Many streams with disconnects, in small; load.py has the full size."""

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from load import make_folder, run


def test_answers_are_right_and_nothing_leaks(tmp_path):
    print(run(make_folder(tmp_path), 60, 12))
