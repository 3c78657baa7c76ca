"""The tables of lessons/simulator.md: what they say runs does run, and what they say is refused is refused."""

import numpy as np
import pytest
import simulator_support as support

from xtrain.simulator import KINDS, KernelError


@pytest.mark.parametrize("feature", support.RUNS)
def test_it_runs(feature):
    body, want = support.RUNS[feature]
    got, found = support.findings(body)
    assert found == []
    x = np.arange(8, dtype=np.float32)
    np.testing.assert_allclose(got, eval(want, {"x": x, "np": np}), rtol=1e-6)


@pytest.mark.parametrize("what", support.REFUSED)
def test_it_is_refused(what):
    body, words = support.REFUSED[what]
    _, found = support.findings(body, threads=1)
    assert isinstance(found[-1], KernelError) and found[-1].kind == "error"
    assert words in str(found[-1])


def test_every_kind_of_finding_is_in_the_table():
    assert all(f"| `{kind}` |" in support.tables() for kind in KINDS)


def test_the_page_has_the_current_tables():
    text = support.PAGE.read_text(encoding="utf-8")
    assert text == support.page(), "run python tests/simulator/simulator_support.py"
