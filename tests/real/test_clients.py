"""Published clients, unchanged, against a tiny model: every one is answered; texts with a seed are the same for all."""

import json
import subprocess
from pathlib import Path

import pytest
from fetch import CLIENTS, default_folder

pytest.importorskip("openai")
pytest.importorskip("llguidance")

import jsonschema
from server.served import Served, make_folder

FOLDER = default_folder() / CLIENTS
HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not FOLDER.exists(), reason=f"needs clients in {FOLDER}: python tests/real/fetch.py"
    ),
]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}},
    "required": ["city"],
}
PERSON = {"type": "object", "required": ["name", "age"], "additionalProperties": False,
          "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer", "minimum": 0, "maximum": 9}}}  # fmt: skip
OTHER = {  # what differs from the rules of kind()
    "anthropic count": 8,
    "anthropic error": "there is no model 'other' here: use 'tiny'",
    "litellm anthropic": "length",
}


def kind(value):
    """-> "text", or what a value is valid as"""
    if isinstance(value, str):
        return "text"
    schema = PERSON if "name" in value else CITY
    jsonschema.validate(value, schema)
    return "person" if schema is PERSON else "city"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("model"), TEMPLATE, max_seq_len=2048)
    served = Served(folder, max_seq_len=2048)
    yield served
    served.close()


@pytest.mark.parametrize("command, number", [
    ([FOLDER / "bin/python", HERE / "clients.py"], 23),
    (["node", HERE / "clients.mjs"], 9),
])  # fmt: skip
def test_clients(served, command, number):
    run = subprocess.run([*command, served.url, FOLDER], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    failed = {name: value for name, value in found.items() if str(value).startswith("Error")}
    assert not failed and len(found) == number
    text = served.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "def f"}], max_tokens=8, seed=3
    ).choices[0].message.content  # fmt: skip
    for name, value in found.items():
        if name in OTHER:
            assert value == OTHER[name]
        elif kind(value) == "text":
            assert value == text, name
    assert {kind(value) for name, value in found.items() if name not in OTHER} == {"text", "person", "city"}  # fmt: skip
    assert served.idle
