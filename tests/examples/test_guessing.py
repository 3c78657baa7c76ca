"""examples/guessing.py: a model that has read games plays them with the environment, and the bits agree."""

from pathlib import Path

from runs import SILENT, metrics

from xtrain.config import TrainConfig
from xtrain.reinforce import reinforce
from xtrain.reinforcement.environment import Environment
from xtrain.reinforcement.reinforce import ReinforceConfig
from xtrain.train import train

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_few_steps_of_the_game(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES.parent))
    example = Environment("examples.guessing:reply").function.__globals__
    example["main"](str(tmp_path))
    said = lambda text: [{"role": "assistant", "content": text}]
    answers = [example["reply"]({"number": 2}, said(text)) for text in ("1", "3\n", "2", "4", "no")]
    assert answers == ["higher\n", "lower\n", None, None, None]
    texts = ["2", "1\nhigher\n2", "1\nhigher\n3", ""]
    assert example["reward"]({"number": 2}, texts) == [1, 1, 0, 0]
    common = dict(out=str(tmp_path), device="cpu", blas_threads=1, save_every=0, sample_every=0)
    shape = dict(vocab_size=300, dim=32, layers=1, heads=2, seq_len=32)
    base = train(TrainConfig(data=str(tmp_path / "text.txt"), name="base", steps=80, batch=16, lr=4e-3, warmup=2, eval_every=0, **shape, **common), SILENT)  # fmt: skip
    run = reinforce(
        ReinforceConfig(
            init=str(base), data=(str(tmp_path / "prompts.jsonl"),), task="examples.guessing:reward",
            environment="examples.guessing:reply", max_turns=2, stop_strings=("\n",), max_new_tokens=12, group=16, batch=32,
            steps=3, lr=3e-3, eval_every=0, **common,
        ), SILENT,
    )  # fmt: skip
    lines = [m for m in metrics(run) if "loss" in m]
    assert [m["ratio_error"] + m["rollout_kl"] for m in lines] == [0.0] * 3
    assert all(1 < m["turns"] <= 2 and 0 < m["reward"] < 1 for m in lines)
