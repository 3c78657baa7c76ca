"""safetensors files: the same as those of the format's own library, and every kind of damage."""

import json
import struct
import time

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import rng
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from xtrain import Tensor, UserError
from xtrain.formats.tensor_file import read_header, write_safetensors

SHAPES = {"w": (3, 5), "norm": (4,), "scalar": (), "nothing": (0, 7), "größe": (2, 1, 2)}


@pytest.fixture
def tensors():
    return {name: rng(i).standard_normal(s).astype(np.float32)
            for i, (name, s) in enumerate(SHAPES.items())}  # fmt: skip


@pytest.fixture
def path(tensors, tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {name: Tensor(array) for name, array in tensors.items()})
    return path


def refused(path, *words):
    with pytest.raises(UserError) as caught:
        read_header(path)
    message = str(caught.value)
    assert all(word in message for word in (path.name, *words)), message
    assert "\n" not in message and len(message) < 1000


def header_of(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path, header, data):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def same(a, b):
    return a.dtype == b.dtype == np.float32 and a.shape == b.shape and np.array_equal(a, b)


def test_round_trip(path, tensors):
    stored, library = read_header(path), load_file(path)
    assert list(stored) == list(tensors) and library.keys() == tensors.keys()
    assert all(same(stored[name].read(), tensors[name]) for name in tensors)
    assert all(same(library[name].numpy(), tensors[name]) for name in tensors)


def test_the_data_is_aligned_and_the_bytes_are_reproducible(path, tensors):
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert length % 8 == 0
    again = path.with_name("again")
    write_safetensors(again, {name: Tensor(array) for name, array in tensors.items()})
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_files_of_the_library(dtype, tensors, path):
    theirs = {name: torch.from_numpy(array).to(dtype) for name, array in tensors.items()}
    save_file(theirs, path)
    stored = read_header(path)
    assert all(same(stored[name].read(), theirs[name].float().numpy()) for name in tensors)


def test_every_bfloat16(path):
    bits = np.arange(1 << 16, dtype=np.uint16)
    save_file({"x": torch.from_numpy(bits).view(torch.bfloat16)}, path)
    got, expected = read_header(path)["x"].read(), bits.view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(got, expected, equal_nan=True)


def test_every_truncation(path):
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        refused(path, "cut short")
    path.write_bytes(data + b"x")
    refused(path, "is damaged")


def test_flipped_bits_in_the_header(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    for bit in range(0, 8 * (8 + length), 7):  # a step of 7 reaches every bit of a byte
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        # a changed name or order of a shape is not detected here: load compares them with the config
        try:
            for tensor in read_header(path).values():
                tensor.read()
        except UserError as error:
            assert "\n" not in str(error)


WRONG_VALUES = {
    "dtype": (5, "F8_E4M3", None, ["F32"]),
    "shape": ([-4], "4", None, [2**62, 4], [4.0], [[4]], [1] * 10**4, [True] * 4, [2**70, 0]),
    "data_offsets": ([16, 0], [0], [-16, 0], "0", None, [0, 2**62], [0.0, 16.0], [2**70, 2**70 + 16]),
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG_VALUES)
def test_wrong_values_in_a_header(key, path):
    header, data = header_of(path)
    for value in WRONG_VALUES[key]:
        write_header(path, header | {"norm": header["norm"] | {key: value}}, data)
        refused(path, "norm")


def test_tensors_that_overlap_or_leave_a_hole(path):
    header, data = header_of(path)
    first = header["w"]["data_offsets"]
    for start in (first[0] + 4, first[1] - 4):
        offsets = [start, start + 16]
        write_header(path, header | {"norm": header["norm"] | {"data_offsets": offsets}}, data)
        refused(path, "does not begin where another tensor ends")


def test_a_name_twice(path):
    header, data = header_of(path)
    text = json.dumps(header).replace('"scalar"', '"norm"').encode()
    write_header(path, text, data)
    refused(path, "its JSON is not valid (norm occurs twice)")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype_is_kept(dtype, path, tensors):
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    narrow = {name: array.astype(dtype) for name, array in tensors.items()}
    write_safetensors(path, {name: Tensor(array) for name, array in narrow.items()})
    library, stored = load_file(path), read_header(path)
    for name, array in narrow.items():
        assert np.array_equal(library[name].float().numpy(), array.astype(np.float32))
        assert same(stored[name].read(), array.astype(np.float32))


def test_malformed_headers(path):
    header, data = header_of(path)
    for entry in ("x", None, [], {}):
        write_header(path, header | {"norm": entry}, data)
        refused(path, "describes norm wrongly")
    write_header(path, header | {"evil\n" + "x" * 10**5: {}}, data)
    refused(path, r"describes evil\nxxx")
    for text, words in (
        (b"[]", "must hold a JSON object"),
        (b"{" * 10**5, "its JSON is not valid"),
        (b"\xff", "its JSON is not valid"),
    ):
        write_header(path, text, data)
        refused(path, words)
    path.write_bytes(struct.pack("<Q", 2**64 - 1) + data)
    refused(path, "its header claims 18446744073709551615 bytes")
    with open(path, "wb") as file:  # a header of 100 MB: refused before it is read
        file.write(struct.pack("<Q", 100 << 20))
        file.truncate(101 << 20)
    refused(path, "its header claims 104857600 bytes")


def test_a_file_that_shrinks_while_it_is_read(path):
    stored = read_header(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="was shortened"):
        stored["größe"].read()
    path.unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        stored["w"].read()


@given(st.data())
def test_any_header_is_read_or_refused_in_one_sentence(tmp_path_factory, data):
    """Headers of valid and invalid entries, with repeated names and any bytes between them."""
    value = st.sampled_from(
        ["F32", "BF16", "x\ny", [0], [1], [0, 4], [4, 8], [2**62], -1, None, {}]
    )
    field = st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__"])
    entry = st.dictionaries(field, value) | st.just(
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    )
    entries = data.draw(st.lists(st.tuples(st.text(max_size=3), entry), max_size=4))
    body = ", ".join(f"{json.dumps(name)}: {json.dumps(e)}" for name, e in entries)
    header = f"{{{body}}}".encode()
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(header)))
        header = header[:at] + data.draw(st.binary(max_size=3)) + header[at:]
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    write_header(path, header, data.draw(st.sampled_from([b"", b"\0" * 4, b"\0" * 8])))
    try:
        names = read_header(path).keys()
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    else:
        assert names <= {name for name, _ in entries}


def test_a_repeated_name_in_a_large_header_takes_no_time(path):
    """0.7 MB of names: comparing each with all others took a minute."""
    names = [f"layer {i}" for i in range(40_000)]
    text = "{" + ", ".join(f'"{name}": 1' for name in [*names, names[-1]]) + "}"
    write_header(path, text.encode(), b"")
    start = time.process_time()
    refused(path, "layer 39999 occurs twice")
    assert time.process_time() - start < 5


def test_every_bfloat16_that_is_not_finite(tmp_path):
    """As bf16, in which the file has them, and as float32."""
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"w": Tensor(values)})
    (stored,) = read_header(path).values()
    for dtype in (values.dtype, np.float32):
        for low in range(0, 1 << 16, 128):  # one sign and exponent
            some = stored.rows(low, 128, "w")
            if np.isfinite(values[low].astype(np.float32)):
                assert (
                    some.read_finite(dtype).tobytes() == values[low:][:128].astype(dtype).tobytes()
                )
                continue
            for single in (some, some.rows(0, 1, "w"), some.rows(127, 1, "w")):
                with pytest.raises(UserError, match="not finite"):
                    single.read_finite(dtype)
