"""Almost valid files: those in tests/data/fuzz with small changes."""

import copy
import json
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from xtrain import Transformer
from xtrain.data.shards import read_shard
from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError
from xtrain.formats.manifest import verify
from xtrain.formats.tensor_file import read_header
from xtrain.report import record
from xtrain.report.page import page

from .drive import Refused, Target

CORPUS = Path(__file__).resolve().parents[2] / "tests" / "data" / "fuzz"
NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**30,
    -(2**63), 0.5, 1e-9, 1e308, -0.0,
)  # fmt: skip
VALUES = (
    *NUMBERS, None, True, False, "", "a", "F32", "F16", "BF16", "\x00", "é" * 50, "x" * 5000, [], [[]], {}, [1, 2], [0, 0],
    {"a": 1}, [None], "Infinity", "\ud800", "../x", "..", "NaN",
)  # fmt: skip
CHANGES = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1)), max_size=6
)


def changed_bytes(content: bytes, changes: list[tuple[int, int, int]]) -> bytes:
    """Each change: (kind, position in 1/65536 of the length, value)."""
    b = bytearray(content)
    for kind, where, what in changes:
        i = where * len(b) >> 16
        j = min(len(b), i + what % 37)
        if kind == 0 and b:
            b[i] ^= 1 << what % 8
        elif kind == 1 and b:
            b[i] = what % 256
        elif kind == 2:
            b[i:i] = bytes([what % 256]) * (1 + what % 5)
        elif kind == 3:
            del b[i:j]
        elif kind == 4:
            b[i:i] = b[i:j]
        elif kind == 5:
            del b[i:]
        elif kind == 6:  # overwrite with an integer
            size = (1, 2, 4, 8)[what % 4]
            b[i : i + size] = (int(NUMBERS[what % 22]) % 2 ** (8 * size)).to_bytes(size, "little")
        else:
            b += bytes([what % 256]) * (what % 9)
    return bytes(b)


def changed_json(tree, changes: list[tuple[int, int, int]]):
    """Replace values, delete keys, duplicate them under another name, or copy values between keys."""
    tree = copy.deepcopy(tree)
    for kind, where, what in changes:
        places = list(_places(tree))
        if not places:
            return copy.deepcopy(VALUES[what % len(VALUES)])
        holder, key = places[where * len(places) >> 16]
        if kind <= 3:
            holder[key] = copy.deepcopy(VALUES[what % len(VALUES)])
        elif kind == 4:
            del holder[key]
        elif kind == 5:
            other, name = places[what * len(places) >> 16]
            holder[key] = copy.deepcopy(other[name])
        elif kind == 6 and isinstance(holder, dict):
            holder[f"{key}_"] = copy.deepcopy(holder[key])
        elif isinstance(holder[key], (int, float)):
            holder[key] = holder[key] * (what % 5 - 2) + what % 3
    return tree


def _places(tree):
    for key in (
        list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    ):
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from _places(tree[key])


def dumped(tree) -> bytes:
    return json.dumps(tree).encode()


def refusing(call):
    """-> call for a Target: a UserError of one sentence counts as a refusal."""

    def called(value, folder):
        try:
            call(value, folder)
        except UserError as error:
            if "\n" in str(error).strip() or len(str(error)) > 20_000:
                raise AssertionError(f"not one sentence: {str(error)[:200]!r}") from error
            raise Refused(str(error)) from error

    return called


def seeds(folder: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / folder).iterdir())]


# ----------------------------------------------------------------------------- the targets
def safetensors() -> Target:
    """Changed bytes, or a valid file with a changed header."""
    files = seeds("safetensors")

    def call(value, folder):
        which, of_json, changes = value
        content = files[which]
        if of_json:
            n = int.from_bytes(content[:8], "little")
            try:
                header = dumped(changed_json(json.loads(content[8 : 8 + n]), changes))
                content = len(header).to_bytes(8, "little") + header + content[8 + n :]
            except ValueError:  # one of the damaged files in the corpus
                content = changed_bytes(content, changes)
        else:
            content = changed_bytes(content, changes)
        path = folder / "model.safetensors"
        path.write_bytes(content)
        for tensor in read_header(path).values():
            assert tensor.read_finite().shape == tensor.shape

    inputs = st.tuples(st.integers(0, len(files) - 1), st.booleans(), CHANGES)
    return Target(inputs, refusing(call))


def config() -> Target:
    """config.json of a folder with valid weights, loaded up to a forward pass."""
    configs = [json.loads(b) for b in seeds("config")]
    weights = CORPUS / "safetensors" / "llama.safetensors"

    def call(value, folder):
        which, as_bytes, changes = value
        tree = configs[which]
        content = (
            changed_bytes(dumped(tree), changes)
            if as_bytes
            else dumped(changed_json(tree, changes))
        )
        (folder / "config.json").write_bytes(content)
        if not (folder / "model.safetensors").exists():
            (folder / "model.safetensors").symlink_to(weights)
        model = Transformer.from_pretrained(folder, trainable=False)
        assert np.isfinite(model(np.array([[0, 1]])).numpy()).all() or True

    inputs = st.tuples(st.integers(0, len(configs) - 1), st.booleans(), CHANGES)
    return Target(inputs, refusing(call))


def tokenizer() -> Target:
    """tokenizer.json, or tokenizer_config.json; a tokenizer that loads must also encode and decode."""
    files = seeds("tokenizer")

    def call(value, folder):
        which, how, changes = value
        content = files[which]
        if how == 0:
            content = changed_bytes(content, changes)
        elif how == 1:
            content = dumped(changed_json(json.loads(content), changes))
        companion = folder / "tokenizer_config.json"
        companion.unlink(missing_ok=True)
        if how == 2:
            companion.write_bytes(
                dumped(changed_json({"eos_token": {"content": "<|endoftext|>"}}, changes))
            )
        (folder / "tokenizer.json").write_bytes(content)
        t = Tokenizer.load(folder)
        ids = t.encode("def x():\n  héllo 世界 <|endoftext|>")
        assert all(0 <= i < t.vocab_size for i in ids)
        t.decode(ids)
        "".join(t.stream(ids))

    inputs = st.tuples(st.integers(0, len(files) - 1), st.integers(0, 2), CHANGES)
    return Target(inputs, refusing(call))


def shard() -> Target:
    files = seeds("shard")

    def call(value, folder):
        which, changes = value
        path = folder / "tokens.bin"
        path.unlink(missing_ok=True)  # the previous file may still be memory-mapped
        path.write_bytes(changed_bytes(files[which], changes))
        assert len(read_shard(path))

    return Target(st.tuples(st.integers(0, len(files) - 1), CHANGES), refusing(call))


def run_folder() -> Target:
    """The files of a run that xtrain.report reads, and a manifest."""
    names = [
        "config.json",
        "metrics.jsonl",
        "timing.jsonl",
        "layers.jsonl",
        "samples.txt",
        "sentence.json",
        "manifest.json",
    ]
    files = {name: (CORPUS / "run" / name).read_bytes() for name in names}

    def call(value, folder):
        which, of_json, changes = value
        for name in names:
            if not (folder / name).exists():
                (folder / name).write_bytes(files[name])
        content, name = files[names[which]], names[which]
        if of_json and name.endswith(".json"):
            content = dumped(changed_json(json.loads(content), changes))
        elif of_json and name.endswith(".jsonl"):
            lines = [json.loads(line) for line in content.splitlines()]
            lines = changed_json(lines, changes)
            content = b"\n".join(map(dumped, lines if isinstance(lines, list) else [lines]))
        else:
            content = changed_bytes(content, changes)
        (folder / name).write_bytes(content)
        try:
            if name == "manifest.json":
                verify(folder)
            else:
                assert page([record.read(folder)]).count("<script") == 1  # its own
        finally:
            (folder / name).write_bytes(files[name])

    inputs = st.tuples(st.integers(0, len(names) - 1), st.booleans(), CHANGES)
    return Target(inputs, refusing(call))


TARGETS = {
    "safetensors": safetensors, "config": config, "tokenizer": tokenizer, "shard": shard, "run_folder": run_folder,
}  # fmt: skip
