"""The description of the API at /openapi.json, made from the models that read the bodies."""

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..version import VERSION
from .api import Body, Error

REF = "#/components/schemas/{model}"


def description(answered: Mapping[str, type[Body]], counted: Mapping[str, type[Body]]) -> Any:
    """Return the description of the routes that have a body. answered: they may stream."""
    routes = {**answered, **counted}
    kinds: Any = [(kind, "validation") for kind in (*routes.values(), Error)]
    refs, schemas = models_json_schema(kinds, ref_template=REF)

    def operation(path: str, kind: type[Body]) -> dict[str, Any]:
        wanted = {"application/json": {"schema": refs[kind, "validation"]}}
        answer: dict[str, Any] = {"application/json": {}}
        if path in answered:
            answer["text/event-stream"] = {}
        return {
            "operationId": path.removeprefix("/").replace("/", "_"),
            "summary": (kind.__doc__ or "").partition("\n")[0],
            "requestBody": {"required": True, "content": wanted},
            "responses": {
                "200": {"description": "the answer", "content": answer},
                "4XX": {"description": "one sentence that says what is wrong"},
            },
            "security": [{}, {"key": []}],
        }

    return {
        "openapi": "3.1.0",
        "info": {"title": "xtrain serve", "version": VERSION},
        "paths": {path: {"post": operation(path, kind)} for path, kind in routes.items()},
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def route(answered: Mapping[str, type[Body]], counted: Mapping[str, type[Body]]) -> Route:
    """Return the route of /openapi.json. It needs no API key."""
    content = description(answered, counted)

    async def openapi(http: HttpRequest) -> Response:
        return JSONResponse(content)

    return Route("/openapi.json", openapi)
