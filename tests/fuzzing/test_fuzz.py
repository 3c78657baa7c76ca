"""A short fuzzing run, the files of earlier findings, and planted faults that the fuzzer must find.

The long run: `cd tests && python -m fuzzing`; its results are in bench/results/fuzz.jsonl.
"""

import ctypes
import json
import time

import pytest
from hypothesis import strategies as st

from fuzzing import TARGETS, drive
from fuzzing.files import CORPUS, changed_bytes, changed_json
from xtrain.data.shards import read_shard
from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError
from xtrain.formats import huggingface
from xtrain.formats.tensor_file import read_header

INPUTS = {
    "safetensors": 150, "config": 80, "tokenizer": 60, "shard": 150, "run_folder": 30, "arguments": 15,
    "train_options": 60, "model_shapes": 60, "shapes": 150,
}  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
def test_nothing_is_found(name, tmp_path):
    result = drive.fuzz(name, TARGETS[name], INPUTS[name], 20, tmp_path, seconds=10)
    assert result.finding is None, (result.finding, result.input)
    assert result.refused > 0 and result.inputs > 5
    assert result.worked > 0 or name == "model_shapes"


VALID = {
    "safetensors": (read_header, {"llama.safetensors", "empty.safetensors"}),
    "tokenizer": (Tokenizer.load, {"bytes.json", "pieces.json"}),
    "shard": (read_shard, {"two_bytes.bin", "four_bytes.bin"}),
    "config": (
        lambda path: huggingface.config_from_hf(json.loads(path.read_bytes())), {"llama.json", "llama3.json", "qwen3.json"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", VALID)
def test_the_corpus(kind):
    """The valid files work, those of earlier findings are refused."""
    read, valid = VALID[kind]
    found = {path.name for path in (CORPUS / kind).iterdir()}
    assert valid <= found
    for name in found:
        if name in valid:
            read(CORPUS / kind / name)
        else:
            with pytest.raises(UserError):
                read(CORPUS / kind / name)


# ----------------------------------------------------------------------------- planted faults
def no_end(value, folder):
    while value > 300:
        time.sleep(0.01)


def no_end_in_c(value, folder):
    if value > 300:
        sum(range(10**13))


def the_end(value, folder):
    if value > 300:
        ctypes.string_at(0)


def a_base_exception(value, folder):
    if value > 300:
        raise KeyboardInterrupt


PLANTED = {
    "an index": (lambda v, folder: [0] * 301 and ([0] * 301)[v], "IndexError"),
    "a hang": (no_end, "Hang"),
    "a hang in C": (no_end_in_c, "Hang: not even"),
    "a crash of the interpreter": (the_end, "SIGSEGV"),
    "no Exception": (a_base_exception, "KeyboardInterrupt"),
    "memory": (lambda v, folder: bytearray(v * 10**10 if v > 300 else 1), "MemoryError"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name, tmp_path, monkeypatch):
    monkeypatch.setattr(drive, "LIMIT", 0.3)
    call, said = PLANTED[name]
    make = lambda: drive.Target(st.integers(0, 1000), call)
    result = drive.fuzz(name, make, 300, 0, tmp_path)
    assert result.finding is not None and said in result.finding
    assert int(result.input) > 300 and (name != "an index" or int(result.input) == 301)


def test_a_fault_in_a_parser_is_found(tmp_path, monkeypatch):
    """One check of safetensors headers is removed."""
    from xtrain.formats import tensor_file

    monkeypatch.setattr(tensor_file, "_naturals", lambda x: isinstance(x, list))
    result = drive.fuzz("safetensors", TARGETS["safetensors"], 3000, 0, tmp_path, seconds=60)
    assert result.finding is not None and "Error" in result.finding


def test_the_time_limit(tmp_path):
    make = lambda: drive.Target(st.integers(), lambda v, folder: time.sleep(0.05))
    result = drive.fuzz("slow", make, 10**6, 0, tmp_path, seconds=2)
    assert result.finding is None and 0 < result.worked < 100


# ----------------------------------------------------------------------------- the changes
def test_changes_change():
    changes = [(kind, 2**15, 7) for kind in range(8)]
    for change in changes:
        assert changed_bytes(b"0123456789", [change]) != b"0123456789", change
    tree = {"a": [1, {"b": 2}], "c": "d"}
    kept = json.dumps(tree)
    assert any(json.dumps(changed_json(tree, [c])) != kept for c in changes)
    assert json.dumps(tree) == kept and changed_bytes(b"x", []) == b"x"
