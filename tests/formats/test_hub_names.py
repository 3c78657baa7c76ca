"""--model OWNER/NAME: every command that takes a model says how to get it from the Hub. Nothing is downloaded."""

import importlib
import sys
from pathlib import Path

import pytest
from runs import DATA

from xtrain.errors import UserError
from xtrain.formats.saved_runs import model_folder

NAME = "Qwen/Qwen3-0.6B"
HINT = (
    f"{NAME} does not exist: give the folder of a model or of a run (nothing is downloaded; if it is a model of the Hub: "
    f"`hf download {NAME}`, then try again)"
)
COMMANDS = {
    "generate": ["--model", NAME, "a prompt"],
    "chat": ["--model", NAME],
    "serve": ["--model", NAME],
    "evaluate": ["--model", NAME, "--tasks", str(DATA / "grammar.txt")],
    "compare": [NAME],
    "export": ["--model", NAME, "--gguf", "a.gguf"],
    "train": ["--init", NAME, "--data", str(DATA / "grammar.txt")],
    "finetune": ["--init", NAME, "--data", "chats.jsonl"],
    "reinforce": ["--init", NAME, "--data", "prompts.jsonl", "--task", "tasks:reward"],
}


@pytest.fixture(autouse=True)
def empty_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "tasks.py").write_text("def reward(prompt, answer):\n    return 1.0\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_how(command, capsys):
    main = importlib.import_module(f"xtrain.{command}").main
    assert main(COMMANDS[command]) == 2
    err = capsys.readouterr().err
    assert err == f"xtrain.{command}: {HINT}\n"


def test_without_the_library(monkeypatch):
    """`hf` comes with it, and so does the search of its cache."""
    for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("xtrain.formats.saved_runs.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # an import fails
    with pytest.raises(UserError, match=f"`pip install huggingface_hub && hf download {NAME}`"):
        model_folder(Path(NAME))


def test_a_misspelt_run_is_no_name_of_the_hub(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError) as caught:
        model_folder(Path("runs/tinny"))
    assert str(caught.value) == "runs/tinny does not exist: give the folder of a model or of a run"
