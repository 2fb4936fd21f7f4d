"""The gateway: OpenAI's API for agents and any other client, over the engines of the job.

    POST /v1/chat/completions, /v1/completions      streamed or not
    GET  /v1/models, /v1/models/ID

A client sees no switch: while the engines are off its request waits, and a completion that was cut off goes on
(`turns`). Every error has OpenAI's shape. Nothing is read without a bound, and no client is waited for without a
deadline: one that does not send or read is hung up on, and its work ended at the engine.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

from colocated_rl_rollout.chat import Chat
from colocated_rl_rollout.metrics import Metrics
from colocated_rl_rollout.openai_replies import Pieces, Reply
from colocated_rl_rollout.openai_requests import (
    Asked,
    ChatBody,
    Form,
    RequestRefused,
    TextBody,
    asked,
    prompt_of,
    read_body,
    read_chat,
    text_prompt_of,
)
from colocated_rl_rollout.turns import Turn, Turns

MAX_REQUEST_BYTES = 8 * 1024 * 1024
READING_AT_MOST = 16  # bodies at a time
CLIENT_S = 30.0  # for a client to send its body, or to read an event
SILENCE_S = 15.0  # of a stream whose request waits; a comment says that somebody is there
COMMENT = b": waiting for an engine\n\n"
DONE = b"data: [DONE]\n\n"


class Gateway:
    """limit, temperature: of a request that does not say; the first also bounds the others, the second may change."""

    def __init__(
        self, *, model: str, chat: Chat, turns: Turns, metrics: Metrics, limit: int, temperature: float, created: int
    ) -> None:
        self._model = model
        self._chat = chat
        self._turns = turns
        self._metrics = metrics
        self._limit = limit
        self.temperature = temperature
        self._created = created
        self._reading = asyncio.Semaphore(READING_AT_MOST)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self._answering(self._serve_chat)),
            web.post("/v1/completions", self._answering(self._serve_text)),
            web.get("/v1/models", self._answering(self._serve_models)),
            web.get("/v1/models/{model:.{1,512}}", self._answering(self._serve_model)),
        ]

    def _answering(
        self, serve: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """With a refusal as OpenAI's API says it."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await serve(request)
            except RequestRefused as refused:
                self._metrics.refused_requests.labels(refused.status).inc()
                return web.json_response(refused.body(), status=refused.status, headers=headers_of(refused))
            except ClientGone as gone:
                return gone.response

        return answer

    # ------------------------------------------------------------------------------------------------- routes
    async def _serve_models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._listed()]})

    async def _serve_model(self, request: web.Request) -> web.Response:
        if request.match_info["model"] != self._model:
            raise RequestRefused(404, f"this job's model is {self._model}", param="model", code="model_not_found")
        return web.json_response(self._listed())

    def _listed(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._created, "owned_by": "colocated-rl"}

    async def _serve_chat(self, request: web.Request) -> web.StreamResponse:
        def read(text: bytes) -> tuple[Asked, Form]:
            body, form = read_body(ChatBody, text, model=self._model)
            prompt = prompt_of(read_chat(body, self._chat), self._chat)
            return asked(body, prompt, limit=self._limit, temperature=self.temperature), form

        return await self._complete(request, *await self._read(request, read))

    async def _serve_text(self, request: web.Request) -> web.StreamResponse:
        def read(text: bytes) -> tuple[Asked, Form]:
            body, form = read_body(TextBody, text, model=self._model)
            prompt = text_prompt_of(body, self._chat)
            return asked(body, prompt, limit=self._limit, temperature=self.temperature), form

        return await self._complete(request, *await self._read(request, read))

    # ------------------------------------------------------------------------------------------------- a request
    async def _read(self, request: web.Request, read: Callable[[bytes], tuple[Asked, Form]]) -> tuple[Asked, Form]:
        """What is asked; in a thread, because templates and tokenizers take their time. Raises RequestRefused."""
        if request.content_type != "application/json":
            raise RequestRefused(415, "the body is JSON: Content-Type: application/json")
        async with self._reading:
            return await asyncio.to_thread(read, await _body(request))

    async def _complete(self, request: web.Request, asked: Asked, form: Form) -> web.StreamResponse:
        reply = Reply(form, asked, self._model, int(time.time()), uuid.uuid4().hex)
        with self._turns.begin(asked, streams=form.streams) as turn:
            if form.streams:
                return await self._stream(Stream(request), reply, turn)
            await turn.end()
            whole = reply.whole(self._chat, turn.tokens, turn.finish, segments=turn.segments)
            return web.json_response(whole)

    async def _stream(self, stream: Stream, reply: Reply, turn: Turn) -> web.StreamResponse:
        pieces = Pieces(reply, self._chat)
        while not turn.ended:
            turn.grew.clear()
            await stream.tell(pieces.more(turn.so_far))
            if not await _soon(turn.grew, SILENCE_S):
                await stream.write(COMMENT)
        if turn.refused is not None:
            if not stream.begun:
                raise turn.refused
            self._metrics.refused_requests.labels(turn.refused.status).inc()
            await stream.tell([turn.refused.body()])
        else:
            await stream.tell(pieces.rest(turn.tokens, turn.finish, segments=turn.segments))
            await stream.write(DONE)
        return await stream.end()


class ClientGone(Exception):
    """The client does not read its stream any more."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__()
        self.response = response


class Stream:
    """Server-sent events to one client. Begins with the first of them: until then a refusal has its own status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

    @property
    def begun(self) -> bool:
        return self._response.prepared

    async def tell(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            await self.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")

    async def write(self, text: bytes) -> None:
        """Raises ClientGone."""
        try:
            async with asyncio.timeout(CLIENT_S):
                if not self.begun:
                    await self._response.prepare(self._request)
                await self._response.write(text)
        except (OSError, TimeoutError) as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone(self._response) from error

    async def end(self) -> web.StreamResponse:
        await self._response.write_eof()
        return self._response


def headers_of(refused: RequestRefused) -> dict[str, str]:
    """Retry-After where trying again helps; and clients that try again by themselves are told where it doesn't."""
    if refused.retry_s is not None:
        return {"Retry-After": str(refused.retry_s)}
    return {"X-Should-Retry": "false"} if refused.status >= 500 else {}


async def _body(request: web.Request) -> bytes:
    """Raises RequestRefused."""
    body = bytearray()
    try:
        async with asyncio.timeout(CLIENT_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > MAX_REQUEST_BYTES:
                    raise RequestRefused(413, f"the body is larger than {MAX_REQUEST_BYTES} bytes")
    except TimeoutError as error:
        raise RequestRefused(408, f"the body did not come within {CLIENT_S:.0f} s") from error
    except web.RequestPayloadError as error:
        raise RequestRefused(400, f"the body is broken: {error}") from error
    return bytes(body)


async def _soon(event: asyncio.Event, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
