"""The gateway serves OpenAI's API to agents and any other client, over the engines of the job.

    POST /v1/chat/completions, /v1/completions      streamed or not
    GET  /v1/models, /v1/models/ID
    all of them also below /v1/sessions/ID, or with a header X-Session-ID: turns of one session (`sessions`)
    GET /v1/sessions; GET, DELETE /v1/sessions/ID, POST /v1/sessions/ID/reward

A client sees no switch: while the engines are off its request waits, and an interrupted completion resumes (`turns`).
Every error has OpenAI's shape. Every read is bounded, and every write to a client has a deadline: a client that does
not send or read is disconnected, and its work ends at the engine.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from colocated_rl_api.job import ROUTED_EXPERTS
from colocated_rl_rollout.clients import (
    CLIENT_S,
    ClientGone,
    in_thread,
    reading,
    send_within_deadline,
    wait_until_set,
    write_within_deadlines,
)
from colocated_rl_rollout.gateway.openai_answers import Extension
from colocated_rl_rollout.gateway.openai_replies import (
    CompletionReply,
    Pieces,
    extension,
    listed,
    message_of,
    shown,
)
from colocated_rl_rollout.gateway.openai_requests import (
    Body,
    ChatBody,
    Conversation,
    Form,
    RequestRefused,
    TextBody,
    asked,
    prompt_of,
    read_body,
    read_chat,
    read_reward,
    text_prompt_of,
)
from colocated_rl_rollout.gateway.sessions import (
    RecordedTurn,
    Session,
    Sessions,
    prompt_after,
    setting_of,
)
from colocated_rl_rollout.gateway.turns import RETRY_S, Turn, Turns
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.rules.chat import Chat, as_rendered

ReadT = TypeVar("ReadT")
MAX_REQUEST_BYTES = 8 * 1024 * 1024
READING_BYTES = 16 * MAX_REQUEST_BYTES  # of bodies at a time
THREADS_AT_MOST = 3  # of at least five that the process has: the others write batches and make prompts
SESSION_HEADER = "X-Session-ID"
SESSION_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
SILENCE_S = 15.0  # of a stream whose request waits or whose text is held back; then a comment keeps it alive
COMMENT = b": waiting for an engine\n\n"
DONE = b"data: [DONE]\n\n"


class Gateway:
    """Serves the routes. limit, temperature: of a request that sets none; the first also bounds the others, the second
    may change. longest: tokens of a session's path, which is trained in one piece. says_experts: engines report where
    they route tokens to. replays_experts: training repeats that.
    """

    def __init__(
        self,
        *,
        model: str,
        chat: Chat,
        turns: Turns,
        sessions: Sessions,
        metrics: RolloutMetrics,
        limit: int,
        longest: int,
        temperature: float,
        created: int,
        says_experts: bool,
        replays_experts: bool,
    ) -> None:
        self._model = model
        self._chat = chat
        self._turns = turns
        self._sessions = sessions
        self._metrics = metrics
        self._limit = limit
        self._longest = longest
        self.temperature = temperature
        self._created = created
        self._says_experts = says_experts
        self._replays_experts = replays_experts
        self._reading = Reading(READING_BYTES)
        self._threads = asyncio.Semaphore(THREADS_AT_MOST)

    def routes(self) -> list[web.RouteDef]:
        session = "/v1/sessions/{session}"
        return [
            *(
                route
                for root in ("/v1", session)
                for route in (
                    web.post(f"{root}/chat/completions", self._answering(self._serve_chat)),
                    web.post(f"{root}/completions", self._answering(self._serve_text)),
                    web.get(f"{root}/models", self._answering(self._serve_models)),
                    web.get(root + "/models/{model:.{1,512}}", self._answering(self._serve_model)),
                )
            ),
            web.get("/v1/sessions", self._answering(self._serve_sessions)),
            web.get(session, self._answering(self._serve_session)),
            web.delete(session, self._answering(self._delete_session)),
            web.post(f"{session}/reward", self._answering(self._serve_reward)),
        ]

    def _answering(
        self, serve: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Wrap a handler: answer a refusal in the shape of OpenAI's API."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await send_within_deadline(request, await self._answer(serve, request))
            except ClientGone as gone:
                return gone.response

        return answer

    async def _answer(
        self, serve: Callable[[web.Request], Awaitable[web.StreamResponse]], request: web.Request
    ) -> web.StreamResponse:
        try:
            return await serve(request)
        except RequestRefused as refused:
            self._metrics.refused_requests.labels(refused.status).inc()
            self._sessions.refuse(_named(request), refused)
            return web.json_response(refused.body(), status=refused.status, headers=headers_of(refused))

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
        body, form, conversation, setting = await self._read(request, self._read_chat)
        with self._session(request) as session:
            now = _as_now(session) if session else None
            prompt, parent = await self._in_thread(partial(self._prompt_of, conversation, now))
            place = TurnPlace(session, parent, conversation.messages, setting) if session else None
            return await self._complete(request, body, form, prompt, place)

    def _read_chat(self, data: bytes) -> tuple[ChatBody, Form, Conversation, str]:
        """Return what a chat asks for, and its setting; slow, so call it in a thread. Raises RequestRefused."""
        body, form = read_body(ChatBody, data, model=self._model)
        conversation = read_chat(body, self._chat)
        return body, form, conversation, setting_of(conversation)

    def _prompt_of(
        self, conversation: Conversation, session: Session | None
    ) -> tuple[tuple[int, ...], RecordedTurn | None]:
        """Return the prompt and the turn it continues; slow, so call it in a thread. Raises RequestRefused."""
        parent = session.match(conversation) if session else None
        if parent is not None and (ids := prompt_after(parent, conversation, self._chat)) is not None:
            return ids, parent
        return prompt_of(conversation, self._chat), None

    async def _serve_text(self, request: web.Request) -> web.StreamResponse:
        body, form = await self._read(request, partial(read_body, TextBody, model=self._model))
        with self._session(request) as session:
            prompt = await self._in_thread(partial(text_prompt_of, body, self._chat))
            place = TurnPlace(session, session.match_ids(prompt), (), "") if session else None
            return await self._complete(request, body, form, prompt, place)

    # ------------------------------------------------------------------------------------------------- sessions
    @contextmanager
    def _session(self, request: web.Request) -> Iterator[Session | None]:
        """Hold a turn's session while the turn lasts; None for a turn that belongs to none. Raises RequestRefused."""
        if "session" not in request.match_info and SESSION_HEADER not in request.headers:
            yield None
            return
        session = self._sessions.begin(_session_name(request))
        try:
            yield session
        finally:
            self._sessions.end(session)

    async def _serve_sessions(self, _: web.Request) -> web.Response:
        held = [listed(session) for session in self._sessions]
        return web.json_response({"object": "list", "group_size": self._sessions.group_size, "data": held})

    async def _serve_session(self, request: web.Request) -> web.Response:
        now = _as_now(self._sessions.find(_session_name(request)))
        return web.Response(body=await self._in_thread(partial(_shown, now)), content_type="application/json")

    async def _delete_session(self, request: web.Request) -> web.Response:
        name = _session_name(request)
        await self._sessions.delete(name)
        return web.json_response({"id": name, "object": "session", "deleted": True})

    async def _serve_reward(self, request: web.Request) -> web.Response:
        name = _session_name(request)
        given = await self._read(request, read_reward)
        await self._sessions.reward(name, given.reward, given.group, given.figures)
        return web.json_response({"id": name, "object": "session", "reward": given.reward, "group": given.group})

    # ------------------------------------------------------------------------------------------------- a request
    async def _read(self, request: web.Request, read: Callable[[bytes], ReadT]) -> ReadT:
        """Read and parse the body of a request. Raises RequestRefused."""
        if request.content_type != "application/json":
            raise RequestRefused(415, "the body is JSON: Content-Type: application/json")
        if request.headers.get("Content-Encoding", "identity") != "identity":  # a few bytes may become any number
            raise RequestRefused(415, "the body comes as it is: without a Content-Encoding")
        size = MAX_REQUEST_BYTES if request.content_length is None else request.content_length
        async with self._reading.of(min(size, MAX_REQUEST_BYTES)):
            return await self._in_thread(partial(read, await _body(request)))

    async def _in_thread(self, work: Callable[[], ReadT]) -> ReadT:
        """Run in one of a few threads: long conversations take their time, and there may be hundreds of them."""
        return await in_thread(work, places=self._threads)

    async def _complete(
        self, request: web.Request, body: Body, form: Form, prompt: tuple[int, ...], place: TurnPlace | None
    ) -> web.StreamResponse:
        longest = self._longest if place is not None else None
        asking = asked(body, prompt, limit=self._limit, temperature=self.temperature, longest=longest)
        if place is not None and asking.temperature != self.temperature:
            message = (
                f"temperature is {asking.temperature}, and the job's {self.temperature}: turns of a session use that"
            )
            raise RequestRefused(400, message, param="temperature", code="unsupported_value")
        if asking.experts and not self._says_experts:
            message = f"return_routed_experts: the job's engines don't say them without {ROUTED_EXPERTS} in engine.args"
            raise RequestRefused(400, message, param="return_routed_experts", code="unsupported_value")
        reply = CompletionReply(form, asking, self._model, int(time.time()), uuid.uuid4().hex)
        engine = place.parent.engine if place and place.parent else None
        is_own = place is not None and place.session.turned is not None
        replays = is_own and self._replays_experts
        with self._turns.begin(
            asking,
            streams=form.streams,
            asked_bytes=form.asked_bytes,
            engine=engine,
            is_own=is_own,
            replays=replays,
        ) as turn:
            if form.streams:
                return await self._stream(Stream(request), reply, turn, place)
            await turn.wait_done()
            await self._record(place, reply, turn)
            whole = reply.whole(self._chat, turn.tokens, turn.finish, extension_of(turn))
            return web.json_response(whole)

    async def _stream(
        self, stream: Stream, reply: CompletionReply, turn: Turn, place: TurnPlace | None
    ) -> web.StreamResponse:
        pieces = Pieces(reply, self._chat)
        while not turn.ended:
            turn.grew.clear()
            await stream.send(pieces.more(turn.so_far))
            if not await wait_until_set(turn.grew, SILENCE_S - stream.silent_s):  # text may be held back for long
                await stream.write(COMMENT)
        try:
            await turn.wait_done()
            await self._record(place, reply, turn)
        except RequestRefused as refused:
            if not stream.begun:
                raise
            self._metrics.refused_requests.labels(refused.status).inc()
            if place is not None:
                self._sessions.refuse(place.session.id, refused)
            await stream.send([refused.body()])
        else:
            await stream.send(pieces.rest(turn.tokens, turn.finish, extension_of(turn)))
            await stream.write(DONE)
        return await stream.end()

    async def _record(self, place: TurnPlace | None, reply: CompletionReply, turn: Turn) -> None:
        """Make the turn of a session durable, before its client receives its end. Raises RequestRefused."""
        if place is None:
            return
        text, calls = reply.read(self._chat, turn.tokens, turn.finish)
        messages = [*place.messages, as_rendered(message_of(text, reply.called(calls)))] if reply.form.chat else []
        await self._sessions.record(
            place.session,
            place.parent,
            messages,
            place.setting,
            prompt=turn.asked.prompt,
            tokens=turn.tokens,
            finish=turn.finish,
            engine=turn.engine,
            experts=turn.replayed,
        )


@dataclass(frozen=True)
class TurnPlace:
    """Gives the place of a turn in its session."""

    session: Session
    parent: RecordedTurn | None
    messages: tuple[Mapping[str, Any], ...]
    setting: str


class Reading:
    """Bounds the bytes of bodies being received, first come, first served. A client that is slow to send takes no more
    than its own share, and nobody waits for room for longer than a client may take.
    """

    def __init__(self, most_bytes: int, wait_s: float = CLIENT_S) -> None:
        self._free_bytes = most_bytes
        self._wait_s = wait_s
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()  # its holder is the next one

    @asynccontextmanager
    async def of(self, size_bytes: int) -> AsyncIterator[None]:
        """Reserve room for a body while it is read. Raises RequestRefused."""
        try:
            async with asyncio.timeout(self._wait_s), self._turn:
                while self._free_bytes < size_bytes:
                    self._freed.clear()
                    await self._freed.wait()
                self._free_bytes -= size_bytes
        except TimeoutError as error:
            message = "too many large bodies are on their way: send it later"
            raise RequestRefused(429, message, code="too_many_requests", retry_s=RETRY_S) from error
        try:
            yield
        finally:
            self._free_bytes += size_bytes
            self._freed.set()


class Stream:
    """Sends events to one client. It begins with the first event: until then a refusal has its own status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

        self._written_at = asyncio.get_running_loop().time()

    @property
    def silent_s(self) -> float:
        return asyncio.get_running_loop().time() - self._written_at

    @property
    def begun(self) -> bool:
        return self._response.prepared

    async def send(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            await self.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")

    async def write(self, text: bytes) -> None:
        """Send a piece of the answer. Raises ClientGone."""
        if not self.begun:
            async with reading(self._request, self._response):
                await self._response.prepare(self._request)
        await write_within_deadlines(self._request, self._response, text)
        self._written_at = asyncio.get_running_loop().time()

    async def end(self) -> web.StreamResponse:
        """End the answer. Raises ClientGone."""
        async with reading(self._request, self._response):
            await self._response.write_eof()
        return self._response


def extension_of(turn: Turn) -> Extension:
    return extension(turn.tokens, turn.finish, turn.segments, turn.experts if turn.asked.experts else None)


def _as_now(session: Session) -> Session:
    """Return a copy for a thread, which must not see another turn arrive."""
    return replace(session, turns=list(session.turns))


def _shown(session: Session) -> bytes:
    """Encode a session; call it in a thread, because a session may have millions of tokens."""
    return json.dumps(shown(session)).encode()


def _named(request: web.Request) -> str:
    """Return the name of the request's session, empty where it has none."""
    return str(request.match_info.get("session") or request.headers.get(SESSION_HEADER, ""))


def _session_name(request: web.Request) -> str:
    """Return the valid name of the request's session. Raises RequestRefused."""
    name = _named(request)
    if not SESSION_NAME.fullmatch(name):
        raise RequestRefused(400, "a session is named by up to 128 of A-Z, a-z, 0-9, '.', '_', ':', '@' and '-'")
    return name


def headers_of(refused: RequestRefused) -> dict[str, str]:
    """Return Retry-After where a retry helps, and stop clients from retrying by themselves where it does not."""
    if refused.retry_s is not None:
        return {"Retry-After": str(refused.retry_s)}
    return {"X-Should-Retry": "false"} if refused.status == 409 or refused.status >= 500 else {}


async def _body(request: web.Request) -> bytes:
    """Read the body within its bounds. Raises RequestRefused."""
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
