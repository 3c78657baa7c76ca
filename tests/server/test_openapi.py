"""Bodies drawn from /openapi.json, right and wrong: every answer is 200, or one sentence; nothing is left behind."""

import os

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("openai")

from checks import only_all  # noqa: E402
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from waiting import until  # noqa: E402

TEXT = st.text(max_size=8) | st.sampled_from(["def f", "x" * 3000, "\0", "tiny", "größe"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.sampled_from([-1, 0, 1, 2, 2**70, 0.5, 1e308]) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PLAIN = {"messages": [{"role": "user", "content": "def f"}], "input": "def f", "prompt": "def f"}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SHORT = st.sampled_from([1, 2, 3])  # so that an answer takes milliseconds


class Bodies:
    """Strategies from the schemas of a description."""

    def __init__(self, api):
        self.schemas = api["components"]["schemas"]
        self.names = {}
        self.fields = {}  # of each object, once
        for path, item in api["paths"].items():
            body = item["post"]["requestBody"]["content"]["application/json"]["schema"]
            self.names[path] = body["$ref"].rpartition("/")[2]

    def values(self, schema):
        """-> the values that a schema allows, and few large ones"""
        if schema is True:
            return ANYTHING
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return st.deferred(lambda: self.values(self.schemas[name]))
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return st.one_of(*map(self.values, schema[word]))
        if "enum" in schema or "const" in schema:
            return st.sampled_from(schema.get("enum") or [schema["const"]])
        return getattr(self, schema.get("type", "anything"))(schema)

    def anything(self, schema):
        return ANYTHING

    def null(self, schema):
        return st.none()

    def boolean(self, schema):
        return st.booleans()

    def integer(self, schema):
        low = schema.get("minimum", -2)
        high = schema.get("maximum", schema.get("exclusiveMaximum", 2**40) - 1)
        return st.integers(low, min(high, low + 9)) | st.integers(low, high)

    def number(self, schema):
        return st.floats(schema.get("minimum", -9), schema.get("maximum", 9))

    def string(self, schema):
        if "pattern" in schema:
            return st.sampled_from(["f", "now"])
        return TEXT.filter(lambda text: len(text) >= schema.get("minLength", 0))

    def array(self, schema):
        low = schema.get("minItems", 0)
        return st.lists(self.values(schema.get("items", {})), min_size=low, max_size=low + 2)

    def object(self, schema):
        if "properties" not in schema:
            keys = st.integers(0, 400).map(str) | TEXT
            return st.dictionaries(keys, self.values(schema.get("additionalProperties", {})), max_size=2)  # fmt: skip
        fields = self.fields.setdefault(id(schema), {})
        if not fields:
            for name, value in schema["properties"].items():
                fields[name] = SHORT if name in LIMITS else self.values(value)
        needed = [name for name in schema.get("required", ())]
        optional = sorted(fields.keys() - set(needed))
        some = st.lists(st.sampled_from(optional), max_size=3) if optional else st.just([])
        return some.flatmap(
            lambda names: st.fixed_dictionaries({n: fields[n] for n in [*needed, *names]})
        )

    @st.composite
    @staticmethod
    def of(draw, self):
        """-> path and body, half of them with one wrong value"""
        path = draw(st.sampled_from(sorted(self.names)))
        schema = self.schemas[self.names[path]]
        body = draw(self.object(schema))
        for name in LIMITS[:1] if "max_tokens" in schema["properties"] else ():
            body.setdefault(name, draw(SHORT))
        for name in sorted(PLAIN.keys() & body.keys()):
            if draw(st.booleans()):
                body[name] = PLAIN[name]
        if draw(st.booleans()):
            names = [name for name in schema["properties"] if name not in LIMITS]
            body[draw(st.sampled_from([*names, "unknown"]))] = draw(ANYTHING)
        return path, body


def test_the_description_has_every_field(served):
    api = httpx.get(served.url + "/openapi.json").json()
    assert api["openapi"].startswith("3.1") and "/v1/responses" in api["paths"]
    chat = api["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"] and chat["additionalProperties"] is False
    assert {"tools", "structured_outputs", "user", "n"} <= chat["properties"].keys()
    assert chat["properties"]["top_p"]["anyOf"][0]["exclusiveMinimum"] == 0
    assert chat["properties"]["best_of"] == {"enum": [None, 1]}


def fuzz(served, number, start):
    bodies = Bodies(httpx.get(served.url + "/openapi.json").json())
    pool = served.engine.scheduler.pool
    statuses = {}
    with httpx.Client(base_url=served.url, timeout=60) as client:

        @seed(start)
        @settings(
            max_examples=number,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(Bodies.of(bodies))
        def ask(case):
            path, body = case
            answer = client.post(path, json=body)
            statuses[path, answer.status_code] = statuses.get((path, answer.status_code), 0) + 1
            text = answer.text
            assert (
                "Traceback" not in text and "server_error" not in text and "api_error" not in text
            )
            if answer.status_code != 200:
                assert 400 <= answer.status_code < 500
                message = answer.json()["error"]["message"]
                assert message and "\n" not in message and len(message) < 1000, message

        ask()
    for path in bodies.names:
        assert statuses.get((path, 200)), (path, statuses)
    until(lambda: served.idle)
    assert pool.available == pool.size and not served.engine.scheduler.unfinished
    return statuses


def test_any_body(served):
    fuzz(served, 100, 0)


@only_all
@pytest.mark.slow
@pytest.mark.parametrize("part", range(int(os.environ.get("XTRAIN_FUZZ", "10000")) // 1000))
def test_many_bodies(served, part):
    fuzz(served, 1000, part + 1)
