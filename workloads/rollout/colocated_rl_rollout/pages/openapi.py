"""Make OpenAPI documents from the types that parse requests and shape answers.

`Operation` describes what one route takes and answers, `document` writes a table of them down. Names, bounds and
meanings are those of the types. Tests compare the table with the routes that are served, and answers with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

HTML = "text/html"
JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"
SCHEMAS = "#/components/schemas/{model}"


class Route(NamedTuple):
    method: str
    path: str  # {name} for what varies


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Describes one route. answers: type of a 200's body by media type, a schema where it has no type; for events, of
    each.

    refusals: meaning and type by status, or by "default" for all others; None: a line of text.
    parameters: as the document has them, beside `query`. rest: further members as the document has them.
    """

    tag: str
    summary: str
    answers: Mapping[str, Any]
    refusals: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    parameters: tuple[Mapping[str, Any], ...] = ()
    headers: Mapping[str, Any] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)


def document(operations: Mapping[Route, Operation], **rest: Any) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document. rest: its other members."""
    schemas = _Schemas()
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in operations.items():
        paths.setdefault(route.path, {})[route.method.lower()] = _described(route, operation, schemas)
    components = {**rest.pop("components", {}), "schemas": dict(sorted(schemas.named.items()))}
    return {"openapi": "3.1.0", **rest, "paths": paths, "components": components}


class _Untitled(GenerateJsonSchema):
    """Omits the titles that only repeat a field's name."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


class _Schemas:
    """Collects the schemas that are referred to by name. Types of one name would collide: a test checks for that."""

    def __init__(self) -> None:
        self.named: dict[str, Any] = {}

    def of(self, kind: Any, *, answers: bool) -> Mapping[str, Any]:
        if isinstance(kind, Mapping):
            return kind
        mode: JsonSchemaMode = "serialization" if answers else "validation"
        inputs, schemas = TypeAdapter.json_schemas(
            [(0, mode, TypeAdapter(kind))], ref_template=SCHEMAS, schema_generator=_Untitled
        )
        for name, schema in schemas.get("$defs", {}).items():
            if self.named.setdefault(name, schema) != schema:
                raise ValueError(f"two schemas are named {name}")
        return inputs[0, mode]


def _described(route: Route, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tags": [operation.tag],
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "summary": operation.summary,
        **operation.rest,
    }
    if parameters := [*operation.parameters, *(_queried(operation.query) if operation.query else ())]:
        described["parameters"] = parameters
    if operation.body:
        content = {JSON: {"schema": schemas.of(operation.body, answers=False)}}
        described["requestBody"] = {"required": True, "content": content}
    answer = {media: {"schema": schemas.of(kind, answers=True)} for media, kind in operation.answers.items()}
    described["responses"] = {"200": {"description": "OK", "content": answer}}
    if operation.headers:
        described["responses"]["200"]["headers"] = operation.headers
    for status, (meaning, kind) in operation.refusals.items():
        content = {JSON: {"schema": schemas.of(kind, answers=True)}} if kind else {TEXT: {"schema": {"type": "string"}}}
        described["responses"][status] = {"description": meaning, "content": content}
    return described


def _queried(query: type[BaseModel]) -> list[dict[str, Any]]:
    """Return a query's fields as parameters. Schemas that they refer to are inlined."""
    schema = query.model_json_schema(schema_generator=_Untitled)
    named = schema.get("$defs", {})

    def inlined(part: Any) -> Any:
        if isinstance(part, dict) and "$ref" in part:
            return inlined(named[part["$ref"].rpartition("/")[2]])
        if isinstance(part, dict):
            return {name: inlined(value) for name, value in part.items()}
        return [inlined(value) for value in part] if isinstance(part, list) else part

    return [
        {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": inlined(field)}
        for name, field in schema["properties"].items()
    ]
