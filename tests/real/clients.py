"""Published clients, unchanged, against a server of a tiny model:   python clients.py URL

Runs in the environment of fetch.py. Prints a JSON object: for each attempt what it returned, or "Error: ...".
"""

import json
import os
import sys
import tempfile
import warnings

import pydantic

warnings.simplefilter("ignore")
URL = sys.argv[1]
HI = [{"role": "user", "content": "def f"}]
TOOL = {"name": "weather", "description": "the weather"}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "function": TOOL | {"parameters": CITY}}


class Person(pydantic.BaseModel):
    """A person"""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=3)
    age: int = pydantic.Field(ge=0, le=9)


found = {}


def attempt(name):
    """-> a decorator that calls a function, and keeps what it returns"""

    def call(function):
        try:
            found[name] = function()
        except Exception as error:
            found[name] = f"Error: {type(error).__name__}: {error}"[:600]

    return call


def openai_client():
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0)
    extra = {"extra_body": {"seed": 3}}
    flat = {"type": "function", **FUNCTION["function"]}

    @attempt("openai responses")
    def _():
        return client.responses.create(model="tiny", input="def f", max_output_tokens=8, **extra).output_text  # fmt: skip

    @attempt("openai responses stream")
    def _():
        stream = client.responses.create(
            model="tiny", input="def f", max_output_tokens=8, stream=True, **extra
        )
        return "".join(e.delta for e in stream if e.type == "response.output_text.delta")

    @attempt("openai responses parse")
    def _():
        parse = client.responses.parse
        return parse(
            model="tiny", input="x", text_format=Person, **extra
        ).output_parsed.model_dump()

    @attempt("openai responses tools")
    def _():
        choice = {"type": "function", "name": "weather"}
        with client.responses.stream(
            model="tiny", input="x", tools=[flat], tool_choice=choice, **extra
        ) as stream:
            (call,) = [e for e in stream if e.type == "response.function_call_arguments.done"]
            (item,) = stream.get_final_response().output
            assert call.arguments == item.arguments
        output = {"type": "function_call_output", "call_id": item.call_id, "output": "42"}
        talk = [*HI, item.model_dump(exclude={"parsed_arguments"}), output]
        client.responses.create(model="tiny", input=talk, max_output_tokens=3)
        return json.loads(item.arguments)


def anthropic_client():
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="x", max_retries=0)
    options = dict(model="tiny", messages=HI, max_tokens=900, extra_body={"seed": 3})
    tools = [TOOL | {"input_schema": CITY}]

    @attempt("anthropic")
    def _():
        answer = client.messages.create(**options | {"max_tokens": 8})
        assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 8
        return answer.content[0].text

    @attempt("anthropic stream")
    def _():
        with client.messages.stream(**options | {"max_tokens": 8}) as stream:
            text = "".join(stream.text_stream)
            assert stream.get_final_text() == text
        return text

    @attempt("anthropic tools")
    def _():
        choice = {"type": "any", "disable_parallel_tool_use": True}
        answer = client.messages.create(**options, tools=tools, tool_choice=choice)
        (block,) = answer.content
        assert answer.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "42"}
        turns = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]  # fmt: skip
        client.messages.create(**options | {"messages": HI + turns, "max_tokens": 3}, tools=tools)
        return block.input

    @attempt("anthropic stream tools")
    def _():
        choice = {"type": "tool", "name": "weather"}
        with client.messages.stream(**options, tools=tools, tool_choice=choice) as stream:
            return stream.get_final_message().content[0].input

    @attempt("anthropic count")
    def _():
        return client.messages.count_tokens(model="tiny", messages=HI).input_tokens

    @attempt("anthropic error")
    def _():
        try:
            client.messages.create(**options | {"model": "other"})
        except anthropic.NotFoundError as error:
            return error.body["error"]["message"]


def instructor_client():
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="x")
    for mode in ("TOOLS", "JSON_SCHEMA"):

        @attempt(f"instructor {mode}")
        def _(mode=mode):
            patched = instructor.from_openai(client, mode=instructor.Mode[mode])
            return patched.chat.completions.create(
                model="tiny", messages=HI, response_model=Person, max_retries=0, seed=3, max_tokens=900
            ).model_dump()  # fmt: skip


def langchain_client():
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    options = dict(base_url=f"{URL}/v1", api_key="x", model="tiny", max_tokens=900, max_retries=0)
    model = ChatOpenAI(**options, seed=3)
    for method in ("function_calling", "json_schema"):

        @attempt(f"langchain {method}")
        def _(method=method):
            return model.with_structured_output(Person, method=method).invoke("x").model_dump()

    @attempt("langchain tools")
    def _():
        bound = model.bind_tools([FUNCTION], tool_choice="weather")
        whole = None
        for chunk in bound.stream("x"):
            whole = chunk if whole is None else whole + chunk
        (call,) = whole.tool_calls
        talk = [HumanMessage("x"), AIMessage("", tool_calls=[call]), ToolMessage("42", tool_call_id=call["id"])]  # fmt: skip
        model.bind_tools([FUNCTION]).invoke(talk, max_tokens=3)
        return call["args"]

    @attempt("langchain responses")
    def _():
        other = ChatOpenAI(**options, use_responses_api=True, output_version="responses/v1")
        return other.with_structured_output(Person, method="json_schema").invoke("x").model_dump()


def llm_client():
    os.environ["LLM_USER_PATH"] = tempfile.mkdtemp()
    from llm.default_plugins.openai_models import Chat

    @attempt("llm")
    def _():
        model = Chat("tiny", model_name="tiny", api_base=f"{URL}/v1", supports_schema=True)
        model.key = "x"
        return model.prompt("def f", max_tokens=8, seed=3, stream=True).text()

    @attempt("llm schema")
    def _():
        model = Chat("tiny", model_name="tiny", api_base=f"{URL}/v1", supports_schema=True)
        model.key = "x"
        return json.loads(model.prompt("x", schema=Person, seed=3, stream=False).text())


def litellm_client():
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    options = dict(messages=HI, max_tokens=900, api_key="x", num_retries=0)
    same = options | dict(model="openai/tiny", api_base=f"{URL}/v1", seed=3)

    @attempt("litellm")
    def _():
        return litellm.completion(**same | {"max_tokens": 8}).choices[0].message.content

    @attempt("litellm stream")
    def _():
        chunks = litellm.completion(**same | {"max_tokens": 8}, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    @attempt("litellm schema")
    def _():
        return json.loads(litellm.completion(**same, response_format=Person).choices[0].message.content)  # fmt: skip

    @attempt("litellm tools")
    def _():
        choice = {"type": "function", "function": {"name": "weather"}}
        answer = litellm.completion(**same, tools=[FUNCTION], tool_choice=choice)
        return json.loads(answer.choices[0].message.tool_calls[0].function.arguments)

    @attempt("litellm anthropic")
    def _():
        # this interface has no seed: a drawn token may end the text
        greedy = options | {"max_tokens": 8, "temperature": 0}
        answer = litellm.completion(**greedy, model="anthropic/tiny", api_base=URL)
        return answer.choices[0].finish_reason


openai_client()
anthropic_client()
instructor_client()
langchain_client()
llm_client()
litellm_client()
print(json.dumps(found))
os._exit(0)  # some of them leave threads that wait
