"""The options of an engine: described once, for help(Engine) and for the commands."""

import inspect
import subprocess
import sys
from dataclasses import fields
from typing import get_type_hints

import pytest
from twins import random_model, small

from xtrain import Engine
from xtrain.evaluation.run import Options as EvaluateOptions
from xtrain.server.listen import Options as ServeOptions
from xtrain.serving.conversation import Options as ChatOptions
from xtrain.serving.options import EngineOptions, SharedOptions, engine_arguments
from xtrain.serving.text_generation import Options as GenerateOptions

COMMANDS = [ChatOptions, EvaluateOptions, GenerateOptions, ServeOptions]
NAMES = [field.name for field in fields(EngineOptions)]


def test_the_arguments_of_an_engine_are_its_options():
    parameters = inspect.signature(Engine).parameters
    assert sorted(parameters) == sorted(["model", *NAMES])
    for field in fields(EngineOptions):
        assert parameters[field.name].default == field.default
    model = random_model(small(head_dim=16, n_layers=1), device="cpu")
    options = Engine(model, 2, 20, True, block_tokens=16).options
    assert options == EngineOptions(2, 20, batch_invariant=True, block_tokens=16)
    with pytest.raises(TypeError, match="max_bach"):
        Engine(model, max_bach=2)


@pytest.mark.parametrize("name", NAMES)
def test_help_describes_each_option(name):
    lines = [line for line in Engine.__doc__.splitlines() if line.startswith(f"{name}: ")]
    assert len(lines) == 1 and len(lines[0]) > len(name) + 15


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__module__)
def test_commands_share_types_and_texts(command):
    engine = get_type_hints(EngineOptions, include_extras=True)
    theirs = get_type_hints(command, include_extras=True)
    shared = engine.keys() & theirs.keys()
    assert issubclass(command, SharedOptions) and shared >= {x.name for x in fields(SharedOptions)}
    assert {name: engine[name] for name in shared} == {name: theirs[name] for name in shared}


def test_the_arguments_that_a_command_passes_on():
    options = ChatOptions(model="folder", max_seq_len=30, kv_cache="fp8")
    expected = {field.name: field.default for field in fields(SharedOptions)}
    expected |= dict(max_seq_len=30, kv_cache="fp8")
    assert engine_arguments(options) == expected


def test_a_command_shows_the_text():
    command = [sys.executable, "-m", "xtrain.serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = " ".join(done.stdout.replace("│", " ").split())
    assert "sequences at a time; the others wait (default: 32)" in text
    assert "auto: the GPU if there is one (default: auto)" in text
