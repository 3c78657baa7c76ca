"""JSON files of other programs: valid content is returned, anything else is one sentence, in linear time."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain import json_files
from xtrain.errors import UserError
from xtrain.json_files import load_json, parse_json

PATH = Path("folder/file.json")
TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.text(), TREES))
def test_objects_are_read(tree):
    assert parse_json(json.dumps(tree).encode(), PATH) == tree


@given(st.binary() | st.text().map(str.encode) | TREES.map(lambda tree: json.dumps(tree).encode()))
def test_other_content_is_one_sentence(content):
    try:
        assert isinstance(parse_json(content, PATH), dict)
    except UserError as error:
        assert "\n" not in str(error) and str(PATH) in str(error)


@given(st.dictionaries(st.text(), TREES, min_size=1), st.data())
def test_a_key_that_occurs_twice(tree, data):
    pairs = [(name, json.dumps(value)) for name, value in tree.items()]
    name = data.draw(st.sampled_from(sorted(tree)))
    pairs.insert(data.draw(st.integers(0, len(pairs))), (name, "1"))
    text = "{" + ", ".join(f"{json.dumps(n)}: {value}" for n, value in pairs) + "}"
    for nested in (text, f'{{"a": [{text}]}}'):
        with pytest.raises(UserError, match="occurs twice") as error:
            parse_json(nested.encode(), PATH)
        assert json_files.listed([name]) in str(error.value)


def test_the_keys_are_not_compared_with_each_other():
    """The number of comparisons, because a time depends on the machine: 500 keys have 124,750 pairs."""
    compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    pairs = [(Name(f"key {i}"), i) for i in [*range(500), 499]]
    with pytest.raises(ValueError, match="key 499 occurs twice"):
        json_files._without_duplicates(pairs)
    assert compared < 5000


def test_ten_times_the_keys_take_about_ten_times_as_long():
    """In quadratic time they would take a hundred times as long."""

    def seconds(n):
        keys = ", ".join(f'"key {i}": 1' for i in [*range(n), n - 1])
        text, best = f"{{{keys}}}".encode(), 1e9
        for _ in range(5):
            start = time.process_time()
            with pytest.raises(UserError):
                parse_json(text, PATH)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(10_000) < 40 * max(seconds(1000), 1e-4)


def test_numbers_of_many_digits_and_deep_nesting():
    assert load_json('{"a": ' + "7" * 10_000 + "}") == {"a": 7 * (10**10_000 - 1) // 9}
    for text, words in (
        ("[" * 10**5 + "]" * 10**5, "^it is nested too deeply$"),
        ("7" * 10**6, "^a number has more than 100000 digits$"),
        ("7" * 10_000 + "]", "Extra data"),
    ):
        with pytest.raises(ValueError, match=words):
            load_json(text)
