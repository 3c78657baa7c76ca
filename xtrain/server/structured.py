"""The fields of a body that say what an answer must be, and what they mean.

response_format        OpenAI's: text, json_object, json_schema. A schema always holds, also without
                       `strict`
structured_outputs     vLLM's: json, regex, choice, grammar (Lark or GBNF) or json_object
guided_json, ...       their names in vLLM before 0.12
"""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import UserError
from .grammars import Guide

MAX_CHOICES = 10_000
ANY_OBJECT = {"type": "object"}


class Part(BaseModel):
    """An object that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class JsonSchema(Part):
    """OpenAI's description of a schema. Name and description are for OpenAI's models."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def guide(self) -> Guide | None:
        """Return what the answer must be; None: anything. Raises UserError."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Guide.of_schema(ANY_OBJECT)
        if self.json_schema is None:
            raise UserError("response_format json_schema needs the field json_schema")
        schema = self.json_schema.schema_
        return Guide.of_schema({} if schema is None else schema)


class StructuredOutputs(Part):
    """vLLM's structured_outputs: exactly one of these."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = None
    json_object: bool | None = None

    def guides(self) -> list[Guide]:
        """Return what the answer must be. Raises UserError."""
        guides = []
        if self.json_ is not None:
            guides.append(Guide.of_schema(_parsed(self.json_)))
        if self.regex is not None:
            guides.append(Guide.of_regex(self.regex))
        if self.choice is not None:
            guides.append(Guide.of_choice(self.choice))
        if self.grammar is not None:
            guides.append(Guide.of_lark(self.grammar))
        if self.json_object:
            guides.append(Guide.of_schema(ANY_OBJECT))
        return guides


class Structured(BaseModel):
    """The fields of both kinds of requests."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    guided_grammar: str | None = None

    @property
    def guide_field(self) -> str | None:
        """Return the name of the first of these fields that is given."""
        return next((n for n in Structured.model_fields if getattr(self, n) is not None), None)

    def guide(self) -> Guide | None:
        """Return what the answer must be; None: anything. Raises UserError."""
        older = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        guides = older.guides()
        if self.structured_outputs is not None:
            guides += self.structured_outputs.guides()
        if self.response_format is not None:
            guides += filter(None, [self.response_format.guide()])
        if len(guides) > 1:
            raise UserError(
                "response_format, structured_outputs and guided_* give several forms for one "
                "answer: give one"
            )
        return next(iter(guides), None)


def _parsed(schema: str | dict[str, Any]) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the JSON schema is not JSON: {error}") from None
