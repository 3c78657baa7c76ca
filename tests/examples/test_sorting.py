"""examples/sorting.py: what it writes can be trained, rewarded and evaluated."""

import json
from pathlib import Path

from xtrain.evaluation.benchmarks import KINDS
from xtrain.evaluation.tasks import read_task
from xtrain.reinforcement.rewards import Task

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_files_and_the_reward(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES.parent))
    task = Task("examples.sorting:reward")
    task.function.__globals__["main"](str(tmp_path))
    lines = {p.stem: [json.loads(x) for x in p.read_text().splitlines()] for p in tmp_path.glob("*.jsonl")}  # fmt: skip
    prompts = [{x["prompt"] for x in lines[name]} for name in ("chats", "prompts", "test")]
    assert [len(x) for x in prompts] == [1000, 4000, 200]  # nothing twice
    assert not prompts[2] & (prompts[0] | prompts[1])
    text = (tmp_path / "text.txt").read_text().splitlines()
    assert not {x.split("=")[0] + "=" for x in text} & prompts[2]
    up = [x["completion"].split() == sorted(x["completion"].split()) for x in lines["chats"]]
    assert 0.45 < sum(up) / len(up) < 0.56
    record = lines["test"][0]
    right = f" {record['answer']}"
    rewards = task.function(record, [right, right[::-1], "", right + " 9"])
    assert rewards == [1, record["answer"] == record["answer"][::-1], 0, 0]
    items = read_task(tmp_path / "test.jsonl", KINDS).items
    assert len(items) == 200 and items[0].target == record["answer"]
