"""Structured output: documents of random schemas are valid, whatever the sampling; OpenAI's client parses them."""

import builtins
import json
import pickle
import random
import re
import string

import numpy as np
import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("llguidance")

import jsonschema  # noqa: E402
import pydantic  # noqa: E402
from serving import TOKENIZER, sentencepiece_tokenizer, tokenizer_folder  # noqa: E402
from twins import random_model, small  # noqa: E402

from xtrain import Engine, UserError  # noqa: E402
from xtrain.data.tokenizer import Tokenizer  # noqa: E402
from xtrain.server.grammars import Grammars, Guide  # noqa: E402

HI = [{"role": "user", "content": "def f"}]
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
EOS = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def engine():
    return Engine(random_model(small(vocab_size=307, max_seq_len=1024, head_dim=16)), 8, 1024)


@pytest.fixture(scope="module")
def grammars():
    return pickle.loads(pickle.dumps(Grammars(TOKENIZER, [EOS])))


def text_of(answer):
    return TOKENIZER.decode([t for t in answer if t != EOS])


# ----------------------------------------------------------------------------- random schemas
def random_schema(rng, depth=3):
    """A schema whose documents are short."""
    leaf = [number, text, enum, lambda rng: {"type": rng.choice(["boolean", "null"])}]
    if depth:
        leaf += [tree(kind, depth - 1) for kind in (array, obj, union)] * 2
    return rng.choice(leaf)(rng)


def tree(kind, depth):
    return lambda rng: kind(rng, depth)


def number(rng):
    low = rng.randint(-300, 300)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}


def text(rng):
    low = rng.randint(0, 2)
    return rng.choice([
        {"type": "string", "minLength": low, "maxLength": low + 3},
        {"type": "string", "pattern": rng.choice([r"^[a-f]{2,4}$", r"^\d{1,3}(\.\d)?$", "^(ja|nö)$"])},
        {"type": "string", "format": rng.choice(["date", "ipv4", "uuid", "ipv6"])},
    ])  # fmt: skip


def enum(rng):
    values = [
        rng.randint(-9, 9),
        "größe",
        'a "quote"',
        "<|endoftext|>",
        None,
        True,
        [1, {"a": []}],
        1.5,
    ]
    return rng.choice([{"enum": rng.sample(values, 3)}, {"const": rng.choice(values)}])


def array(rng, depth):
    low = rng.randint(0, 1)
    schema = {"type": "array", "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth)]
    return schema | {"items": random_schema(rng, depth)}


def obj(rng, depth):
    names = rng.sample(string.ascii_lowercase, rng.randint(0, 3))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: random_schema(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}  # fmt: skip


def union(rng, depth):
    return {"anyOf": [random_schema(rng, depth) for _ in range(2)]}


def test_documents_of_random_schemas_are_valid(engine, grammars):
    """Next to sequences without a grammar; with penalties, bias, several answers and a seed."""
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(40)]
    guides = [grammars.compiled(Guide.of_schema(schema)) for schema in schemas]
    options = dict(
        temperature=[rng.choice([0.0, 0.7, 2.0]) for _ in schemas],
        repetition_penalty=[rng.choice([1.0, 1.4]) for _ in schemas],
        frequency_penalty=[rng.choice([0.0, 1.0]) for _ in schemas],
        logit_bias=[rng.choice([None, {EOS: 100.0}, {123: 3.0}]) for _ in schemas],
    )
    for column in options.values():
        column.append(column[0])
    prompts = [[1 + i % 200] for i in range(len(schemas))]
    answers = engine.generate(
        [*prompts, [7]], 900, seed=5, stop=[EOS], grammar=[*guides, None], n=2, **options
    )
    for i, schema in enumerate(schemas):
        for answer in answers[2 * i : 2 * i + 2]:
            assert answer.reason == "stop", (schema, text_of(answer))
            document = json.loads(text_of(answer))
            jsonschema.validate(document, schema, format_checker=FORMATS)
    again = engine.generate([prompts[3]], 900, 1.0, seed=[5], stop=[EOS], grammar=guides[3])
    same = engine.generate([prompts[3]], 900, 1.0, seed=[5], stop=[EOS], grammar=guides[3])
    assert again == same


@pytest.mark.parametrize("guide, expected", [
    (Guide.of_regex("(ab|cd){2}x?"), "(ab|cd){2}x?"),
    (Guide.of_choice(["größe", "a\n\"b\"", "<|endoftext|>"]), "größe|a\n\"b\"|<[|]endoftext[|]>"),
    (Guide.of_lark('start: "x" /[0-9]{1,3}/ start | "y"'), "(x[0-9]{1,3})*y"),
    (Guide.of_lark('root ::= "f(" [a-c] ")"'), r"f\([a-c]\)"),
])  # fmt: skip
def test_regex_choice_and_grammars(engine, grammars, guide, expected):
    grammar = grammars.compiled(guide)
    for seed in range(5):
        (answer,) = engine.generate([[1]], 99, 2.0, seed=seed, stop=[EOS], grammar=grammar)
        assert re.fullmatch(expected, text_of(answer)) and answer.reason == "stop"


def test_the_tokenizer_of_llama_2(tmp_path):
    """It puts a space in front of every text that it tokenizes: what a grammar forces has none."""
    folder = tokenizer_folder(tmp_path / "folder")
    (folder / "tokenizer.json").write_text(json.dumps(sentencepiece_tokenizer()))
    tokenizer = Tokenizer.load(folder)
    constraint = Grammars(tokenizer, [2]).compiled(Guide.of_schema({"const": "if x else"})).start()
    found = b""
    while constraint.ended is None:
        row = np.zeros(-(-tokenizer.vocab_size // 32), "int32")
        constraint.masks_into([(constraint, row)])
        token = next(t for t in range(tokenizer.vocab_size) if row[t // 32] >> (t % 32) & 1)
        found += tokenizer.token_bytes[token]
        constraint.accept(token)
    assert found == b'"if x else"' and constraint.ended == "stop"


# ----------------------------------------------------------------------------- over HTTP
class Point(pydantic.BaseModel):
    x: int = pydantic.Field(ge=0, le=99)
    label: str = pydantic.Field(max_length=3)


class Path(pydantic.BaseModel):
    points: list[Point] = pydantic.Field(max_length=1)
    closed: bool


def ask(served, **options):
    return served.client.chat.completions.create(
        **{"model": "tiny", "messages": HI, "max_tokens": 240, "seed": 3} | options
    )


def test_parse_returns_a_model(served):
    parse = served.client.chat.completions.parse
    answer = parse(model="tiny", messages=HI, response_format=Path, seed=1, n=2)
    assert all(isinstance(choice.message.parsed, Path) for choice in answer.choices)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]


SHORT = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("fields", [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SHORT, "strict": True}}},
    {"extra_body": {"structured_outputs": {"json": SHORT}}},
    {"extra_body": {"structured_outputs": {"json": json.dumps(SHORT)}}},
    {"extra_body": {"guided_json": SHORT}},
    {"extra_body": {"guided_regex": r'\{"a": (1|22)\}'}},
    {"extra_body": {"structured_outputs": {"regex": r'\{"a": (1|22)\}'}}},
    {"extra_body": {"structured_outputs": {"choice": ['{"a": 1}', '{"a": 22}']}}},
    {"extra_body": {"structured_outputs": {"grammar": 'start: "{\\"a\\": " ("1" | "22") "}"'}}},
])  # fmt: skip
def test_every_field(served, fields):
    """Whole and streamed, as a chat and as a completion; the log-probabilities are among the allowed tokens."""
    answer = ask(served, logprobs=True, **fields).choices[0]
    jsonschema.validate(json.loads(answer.message.content), SHORT)
    assert answer.finish_reason == "stop"
    assert any(token.logprob == 0 for token in answer.logprobs.content)
    stream = ask(served, stream=True, **fields)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.message.content
    body = {"prompt": "def f", "max_tokens": 200, **fields.get("extra_body", fields)}
    answer = httpx.post(served.url + "/v1/completions", json=body).json()
    jsonschema.validate(json.loads(answer["choices"][0]["text"]), SHORT)


def test_an_object(served):
    """The shortest that follows a bias towards its end."""
    end = {str(served.p.tokenizer.encode("}")[0]): 100}
    answer = ask(served, response_format={"type": "json_object"}, logit_bias=end).choices[0]
    assert json.loads(answer.message.content) == {}
    assert ask(served, response_format={"type": "text"}).choices[0].finish_reason


@pytest.mark.parametrize("fields, says", [
    ({"response_format": {"type": "json_schema"}}, "needs the field json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"guided_json": "{"}, "the JSON schema is not JSON"),
    ({"guided_json": "3"}, "a JSON schema must be an object"),
    ({"guided_json": {"type": "integer", "multipleOf": 0}}, "invalid multiple of"),
    ({"guided_json": {"not": {}}}, "Unimplemented keys"),
    ({"guided_json": {"not": {}, "x-guidance": {"lenient": True}}}, "Unimplemented keys"),
    ({"guided_regex": "["}, "unclosed character class"),
    ({"guided_grammar": "start: x"}, "unknown name"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"regexp": "x"}}, "structured_outputs.regexp"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "give one"),
])  # fmt: skip
def test_a_bad_form_is_a_sentence(served, fields, says):
    body = {"messages": HI, "max_tokens": 5} | fields
    answer = httpx.post(served.url + "/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and says in error["message"], error
    assert "\n" not in error["message"]
    assert error["param"].split(".")[0] in fields and served.idle


def test_fields_that_forbid_what_a_grammar_needs(served):
    """Otherwise no token would be left: the end token before the minimum, or another one."""
    for fields in ({"min_tokens": 3}, {"allowed_token_ids": [5]}):
        body = {"prompt": "x", "guided_regex": "a", "max_tokens": 5} | fields
        answer = httpx.post(served.url + "/v1/completions", json=body).json()
        assert answer["error"]["param"] == next(iter(fields)), answer


def test_without_the_package(monkeypatch):
    import_module = builtins.__import__

    def refuse(name, *arguments):
        if name == "llguidance":
            raise ImportError(name)
        return import_module(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"need llguidance, .*: pip install -e '.\[serve\]'"):
        Guide.of_regex("a")
