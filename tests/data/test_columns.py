"""Text in columns: the keys of a .parquet and a .arrow, and datasets as `save_to_disk` of the library datasets writes them."""

import json

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from parts import whole

from xtrain.data.documents import Documents
from xtrain.data.sources import Sources
from xtrain.errors import UserError

TABLE = pyarrow.table({"body": ["é", None, "b"], "id": [1, 2, 3], "a.b": ["x", "y", "z"]})


def write_arrow(path, table, is_file=False, rows=2):
    new = pyarrow.ipc.new_file if is_file else pyarrow.ipc.new_stream
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def saved(folder, table, shards=2):
    """What datasets 5.2 writes. (Its dataset_info.json has more, which is not read.)"""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    n = -(-len(table) // shards)
    for i, name in enumerate(names):
        write_arrow(folder / name, table.slice(i * n, n))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "fc8ba1a5fbe8bd1b", "_format_columns": None,
             "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None}  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    write_arrow(folder / "cache-0123.arrow", pyarrow.table({"text": ["of an old map()"]}))
    return folder


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
def test_the_key_of_a_column(tmp_path, name):
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(TABLE, path)
    else:
        write_arrow(path, TABLE, is_file=name == "file.arrow")
    assert whole(Documents(path, "body")) == ["é", "b"]
    assert whole(Documents(path, "a.b")) == ["x", "y", "z"]
    for key, reason in {
        "text": "has no column named text: choose with --text-key from body, id, a.b",
        "id": "the column id has the type int64, which is not text",
    }.items():
        texts = Documents(path, key)
        assert whole(texts) == [] and reason in texts.left_out[str(path)]


@pytest.mark.parametrize("is_file", [False, True])
def test_a_damaged_arrow_is_left_out(tmp_path, is_file):
    path = tmp_path / "a.arrow"
    write_arrow(path, pyarrow.table({"text": ["some text"] * 4000}), is_file, rows=1000)
    raw = path.read_bytes()
    for content in (raw[: len(raw) // 2], b"", b"ARROW1", b"no arrow", raw[:40]):
        path.write_bytes(content)
        texts = Documents(path)
        assert whole(texts) == []
        assert texts.left_out[str(path)].startswith(f"{path} cannot be read as arrow: ")


def test_many_batches_are_read_in_order(tmp_path):
    texts = [f"row {i}" for i in range(500)]
    write_arrow(tmp_path / "a.arrow", pyarrow.table({"text": texts}), rows=7)
    assert whole(Documents(tmp_path)) == texts


def test_a_saved_dataset(tmp_path):
    rows = [f"row {i}" for i in range(11)]
    folder = saved(tmp_path / "ds", pyarrow.table({"text": rows}), 3)
    assert (
        whole(Documents(folder)) == rows
    )  # in the order of the shards; not the cache, not the two .json
    (tmp_path / "a.txt").write_text("a file next to it")
    texts = Documents(tmp_path)
    assert whole(texts) == ["a file next to it", *rows] and (texts.files, texts.left_out) == (4, {})


def test_the_splits_of_a_saved_dataset(tmp_path):
    for name in ("train", "test", "validation"):
        saved(tmp_path / "ds" / name, pyarrow.table({"text": [f"{name} {i}" for i in range(3)]}))
    write = lambda *names: (tmp_path / "ds/dataset_dict.json").write_text(json.dumps({"splits": names}))  # fmt: skip
    write("train", "test", "validation")
    texts = Documents(tmp_path / "ds")
    assert whole(texts) == ["train 0", "train 1", "train 2"]
    assert texts.name == f"{tmp_path / 'ds'} (split train, not test, validation)"
    assert whole(Documents(tmp_path / "ds/test")) == ["test 0", "test 1", "test 2"]
    write("test")
    assert whole(Documents(tmp_path / "ds")) == ["test 0", "test 1", "test 2"]
    write("test", "validation")
    with pytest.raises(UserError, match=r"ds has the splits test, validation and no train: give the folder of one, such as .*ds/test"):  # fmt: skip
        Sources(tmp_path / "ds").find()


@pytest.mark.parametrize(
    "file, content, sentence",
    [
        ("state.json", "{}", "names no data files"),
        ("state.json", '{"_data_files": []}', "names no data files"),
        ("state.json", '{"_data_files": [{"filename": "../a.arrow"}]}', "names no data files"),
        ("state.json", '{"_data_files": [1]}', "names no data files"),
        ("state.json", "[", "state.json is damaged"),
        ("dataset_dict.json", '{"splits": ["../x"]}', "names no splits"),
        ("dataset_dict.json", "{}", "names no splits"),
    ],
)
def test_a_damaged_dataset(tmp_path, file, content, sentence):
    folder = saved(tmp_path / "ds", TABLE)
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=sentence):
        Sources(folder).find()


def test_a_selection_of_rows(tmp_path):
    """Old versions of datasets saved which rows of the file are meant."""
    folder = saved(tmp_path / "ds", TABLE)
    state = json.loads((folder / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="is a selection of rows"):
        Sources(folder).find()


def test_a_shard_that_is_gone_is_left_out(tmp_path):
    folder = saved(tmp_path / "ds", pyarrow.table({"text": ["a", "b"]}))
    (folder / "data-00000-of-00002.arrow").unlink()
    texts = Documents(folder)
    assert whole(texts) == ["b"] and "data-00000-of-00002.arrow does not exist" in str(
        texts.left_out
    )
