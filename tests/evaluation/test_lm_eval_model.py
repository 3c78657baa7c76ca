"""lm-eval with the model "xtrain": the numbers of its "hf" model on the same weights. Its part is skipped without lm-eval."""

import json
import sys
from types import SimpleNamespace

import pytest
from evaluating import logprobs, theirs

from xtrain import UserError
from xtrain.evaluation import lm_eval_model
from xtrain.evaluation.lm_eval_model import XtrainModel, generation_options, register

LONG = "def f(x):\n    return x + größe  # 日本語\n" * 9  # several contexts of 64 tokens
PAIRS = [
    ("def f", "(x):"), ("def f", " return"), ("return ", "größe"), ("", "def f(x)"), (LONG, " x + y"), ("x\n", "\n"),
    ("<|endoftext|>def", " f"),
]  # fmt: skip
TEXTS = [LONG, "x", "def f(x):", LONG[:120], LONG[:121], "<|endoftext|>def f"]
GREEDY = [
    ("def f", {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}),
    ("größe", {"until": "x", "max_gen_toks": 20}),
    (LONG, {"until": [], "max_new_tokens": 9, "temperature": 0.0}),
    ("return", {"max_gen_toks": 12}),
]


def requests(arguments):
    return [SimpleNamespace(args=a if isinstance(a, tuple) else (a,)) for a in arguments]


def test_without_lm_eval(folder):
    """The definitions, with log_softmax of transformers."""
    mine, (model, tokenizer) = XtrainModel(str(folder), dtype="float32"), theirs(folder)
    found = mine.loglikelihood(requests([("def f", " return")]))
    ids, n = tokenizer("def f return").input_ids, len(tokenizer("def f").input_ids)
    rows = logprobs(model, ids)[n - 1 :]
    assert found[0][0] == pytest.approx(rows[range(len(rows)), ids[n:]].sum(), abs=1e-4)
    assert found[0][1] == bool((rows.argmax(1) == ids[n:]).all())
    begin, ids = tokenizer.bos_token_id, tokenizer("def f(x):").input_ids
    rows = logprobs(model, [begin, *ids])
    (total,) = mine.loglikelihood_rolling(requests(["def f(x):"]))
    assert total == pytest.approx(rows[range(len(rows)), ids].sum(), abs=1e-4)
    with pytest.raises(UserError, match="max_gen_toks 256 leaves no room for a prompt"):
        mine.generate_until(requests([("x", {})]))
    with pytest.raises(UserError, match="has no chat template: leave --apply_chat_template out"):
        mine.apply_chat_template([{"role": "user", "content": "x"}])
    with pytest.raises(UserError, match="dtype 'int8' is not supported"):
        XtrainModel(str(folder), dtype="int8")
    with pytest.raises(UserError, match="max_length must be from 2 to 64, got 65"):
        XtrainModel(str(folder), max_length=65)


def test_generation_options():
    assert generation_options({}) == ([], 256, {})
    assert generation_options({"until": "a", "max_tokens": 3, "temperature": 0.7}) == (
        ["a"], 3, {"temperature": 0.7},
    )  # fmt: skip
    greedy = {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "top_k": None}
    assert generation_options(greedy) == ([], 256, {})
    assert generation_options({"do_sample": True, "top_k": 3})[2] == {"top_k": 3, "temperature": 1}
    with pytest.raises(UserError, match="generation option 'num_beams' is not supported"):
        generation_options({"num_beams": 4})


def test_lm_eval_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(UserError, match=r"lm-eval is missing.*pip install -e '.\[eval\]'"):
        register()
    assert lm_eval_model.main([]) == 2


# ----------------------------------------------------------------------------- with lm-eval
@pytest.fixture(scope="module")
def both(folder):
    """-> our model and lm-eval's hf model"""
    registry = pytest.importorskip("lm_eval.api.registry")
    assert register() is register() is registry.get_model("xtrain")
    mine = registry.get_model("xtrain").create_from_arg_string(f"pretrained={folder},dtype=float32")
    hf = registry.get_model("hf").create_from_arg_string(
        f"pretrained={folder},dtype=float32", {"device": "cpu", "batch_size": 2}
    )
    return mine, hf


def test_the_numbers_of_hf(both):
    mine, hf = both
    for (a, greedy), (b, is_greedy) in zip(*(m.loglikelihood(requests(PAIRS)) for m in both)):
        assert a == pytest.approx(b, abs=1e-3) and greedy == is_greedy
    found, want = (m.loglikelihood_rolling(requests(TEXTS)) for m in both)
    assert found == pytest.approx(want, rel=1e-5)
    found, want = (m.generate_until(requests(GREEDY)) for m in both)
    assert found == want and all(text for text in found[1:])
    assert mine.max_length == hf.max_length and mine.max_gen_toks == hf.max_gen_toks


def test_a_task(both, folder, tmp_path):
    """The whole of lm-eval, on local tasks of all three kinds."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    rows = [
        {"q": p.strip() or "x", "choices": ["return x", " (x)", "größe"], "answer": i % 3}
        for i, (p, _) in enumerate(PAIRS[:4])
    ]
    data = tmp_path / "data.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    head = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test",
        "doc_to_text": "{{q}}",
    }  # fmt: skip
    tasks = {
        "choice": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "answer",
                   "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
        "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}",
                    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]},
        "until": {"output_type": "generate_until", "doc_to_target": "{{q}}", "metric_list": [{"metric": "exact_match"}],
                  "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}},
    }  # fmt: skip
    for name, content in tasks.items():
        text = json.dumps({"task": f"mine_{name}", **head, **content})  # JSON is YAML
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    found = [
        lm_eval.simple_evaluate(
            model=model, tasks=[f"mine_{name}" for name in tasks], bootstrap_iters=0, log_samples=False,
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        )["results"]
        for model in both
    ]  # fmt: skip
    assert len(found[0]) == 3
    for name, numbers in found[1].items():
        for key, value in numbers.items():
            same = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert found[0][name][key] == same, (name, key)
