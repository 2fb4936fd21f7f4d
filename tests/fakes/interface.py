"""Holds what a process answers against its OpenAPI document, which may say less of it but nothing else."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import cache, cached_property
from typing import Any

import httpx
from aiohttp import web
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from colocated_rl_rollout.controller import Controller
from colocated_rl_rollout.pages.interface import interface

NAME = "urn:document"


class Interface:
    def __init__(self, document: Mapping[str, Any]) -> None:
        closed = _closed(document)
        self._paths: dict[str, dict[str, Any]] = closed["paths"]
        self._patterns = {
            path: re.compile(re.sub(r"\\?\{\w+\\?\}", "[^/]+", re.escape(path))) for path in self._paths
        }  # those without a part that varies come first
        resource = DRAFT202012.create_resource(closed)
        self._registry: Registry[Any] = Registry().with_resource(NAME, resource)
        self._validators: dict[tuple[str, ...], Draft202012Validator] = {}

    @cached_property
    def routes(self) -> set[tuple[str, str]]:
        return {(method.upper(), path) for path, operations in self._paths.items() for method in operations}

    def check(self, method: str, path: str, status: int, media: str, body: bytes, asked: bytes = b"") -> None:
        """AssertionError unless that is an answer as the document has it; and what was asked, if it was taken."""
        found = min(
            (known for known, pattern in self._patterns.items() if pattern.fullmatch(path)),
            key=lambda known: "{" in known,
            default="",
        )
        if method.lower() not in self._paths.get(found, {}):
            assert status == (405 if found else 404)
            self._validate(("components", "schemas", "ErrorAnswer"), json.loads(body))
            return
        place = ("paths", found, method.lower())
        responses = self._paths[found][method.lower()]["responses"]
        response = str(status) if str(status) in responses else "default"
        assert media in responses[response]["content"], f"{media} with {status}"
        answer = (*place, "responses", response, "content", media, "schema")
        match media:
            case "application/json":
                self._validate(answer, json.loads(body))
            case "application/x-ndjson":
                for line in body.splitlines():
                    if line:
                        self._validate(answer, json.loads(line))
            case "text/event-stream":
                events = [event for event in body.split(b"\n\n") if event.startswith(b"data: {")]
                assert events
                for event in events:
                    event_body = json.loads(event.removeprefix(b"data: "))
                    refused = (*place, "responses", "default", "content", "application/json", "schema")
                    self._validate(refused if "error" in event_body else answer, event_body)
            case _:
                pass
        if status == 200 and asked:
            self._validate((*place, "requestBody", "content", "application/json", "schema"), json.loads(asked))

    def _validate(self, place: tuple[str, ...], value: Any) -> None:
        if place not in self._validators:
            pointer = "/".join(
                part.replace("~", "~0").replace("/", "~1").replace("{", "%7B").replace("}", "%7D") for part in place
            )
            self._validators[place] = Draft202012Validator({"$ref": f"{NAME}#/{pointer}"}, registry=self._registry)
        for error in self._validators[place].iter_errors(value):
            raise AssertionError(f"{'/'.join(place[1:3])} {error.json_path}: {error.message}"[:500])


@cache
def rollout_interface() -> Interface:
    return Interface(interface())


class Checked(httpx.AsyncBaseTransport):
    """A Checked transport serves a client of the rollout controller: it checks each answer against the document."""

    def __init__(self, **options: Any) -> None:
        self._inner = httpx.AsyncHTTPTransport(**options)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)

        def whole(body: bytes) -> None:
            media = response.headers["content-type"].partition(";")[0]
            asked = request.content if request.headers.get("content-type") == "application/json" else b""
            rollout_interface().check(request.method, request.url.path, response.status_code, media, body, asked)

        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Watched(response.stream, whole)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Watched(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, whole: Callable[[bytes], None]) -> None:
        self._stream = stream
        self._whole = whole

    async def __aiter__(self) -> AsyncIterator[bytes]:
        body = b""
        async for piece in self._stream:
            body += piece
            yield piece
        self._whole(body)

    async def aclose(self) -> None:
        await self._stream.aclose()


def routes_of(controller: Controller) -> set[tuple[str, str]]:
    """All that it serves on the pod's loopback and on its data port."""
    applications = (controller.member._pages, controller.member._data)
    return {route for served in applications for route in _routes(served)}


def _routes(served: object) -> Iterator[tuple[str, str]]:
    assert isinstance(served, web.Application)
    for route in served.router.routes():
        if route.method != "HEAD":  # which a GET brings along
            assert route.resource is not None
            yield route.method, route.resource.canonical


def _closed(schema: Any) -> Any:
    """Return the schema with no members but those that it names: no answer may have another one."""
    if isinstance(schema, dict):
        made = {name: _closed(value) for name, value in schema.items()}
        if isinstance(made.get("properties"), dict) and made.get("type") == "object":
            made.setdefault("additionalProperties", False)
        return made
    return [_closed(part) for part in schema] if isinstance(schema, list) else copy.copy(schema)
