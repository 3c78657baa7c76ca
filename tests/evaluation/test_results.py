"""Standard errors, against NumPy and a bootstrap; JSON."""

import json
import math

import numpy as np
import pytest

from xtrain import UserError
from xtrain.evaluation.results import Metric, Result, perplexity, ratio, write_json


def test_the_mean_has_the_standard_error_of_lm_eval():
    x = [1.0, 0.0, 0.0, 1.0, 1.0]
    found = ratio(x)
    assert found.value == 0.6
    assert found.stderr == pytest.approx(np.std(x, ddof=1) / math.sqrt(5))
    assert ratio([1.0]) == Metric(1.0, None)


def test_a_ratio_and_its_exponential_against_a_bootstrap():
    rng = np.random.default_rng(0)
    y = rng.integers(5, 20, 300).astype(float)
    x = 2 * y + rng.standard_normal(300) * 6
    picks = rng.integers(0, 300, (4000, 300))
    sampled = x[picks].sum(1) / y[picks].sum(1)
    assert ratio(x, y).value == pytest.approx(x.sum() / y.sum())
    assert ratio(x, y).stderr == pytest.approx(sampled.std(), rel=0.06)
    assert perplexity(x, y).value == pytest.approx(math.exp(x.sum() / y.sum()))
    assert perplexity(x, y).stderr == pytest.approx(np.exp(sampled).std(), rel=0.06)
    assert perplexity([900.0]).value == math.inf


def test_json(tmp_path):
    result = Result("a", "text", 1, {"perplexity": Metric(math.inf, None)}, [{"nll": 900.0}])
    write_json(tmp_path / "x.json", {"model": "größe"}, [result])
    content = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert content["results"][0]["metrics"]["perplexity"] == {"value": None, "stderr": None}
    with pytest.raises(UserError, match=r"x.json cannot be written \(Not a directory\)"):
        write_json(tmp_path / "x.json" / "x.json", {}, [])
