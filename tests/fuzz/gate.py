"""The gate between a caller and an engine, neither of which can be trusted: all of it but the sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from httptools import HttpResponseParser

from colocated_rl_agent.gate.call import Call, Malformed
from colocated_rl_agent.gate.data_port import MAX_WAITING, CallerConnection, DataPort
from colocated_rl_agent.gate.dialects import DIALECTS, GateRefusal, Native
from colocated_rl_agent.gate.entrance import Backend
from colocated_rl_agent.gate.gate import Gate
from colocated_rl_api.rungs import WeightVersion

TURNS = 12  # of the event loop, more than any of this takes without a socket
PIECE = 7
ENDINGS = {"finished", "aborted", "error", "client_gone"}
BODY = b'{"text": "a", "prompt": "a", "messages": [], "stream": %b}'


class FuzzedWire(asyncio.Transport):
    """A connection whose other end reads at once. sent: all that came out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_over = self.is_broken = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        assert not self.is_over
        self.sent += data

    def is_closing(self) -> bool:
        return self.is_over

    def close(self) -> None:
        self.is_over = True

    def abort(self) -> None:
        self.is_over = self.is_broken = True

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


class FuzzedLoop(asyncio.SelectorEventLoop):
    """Connects to nothing but `engine`, which is called with each protocol."""

    engine: Callable[[asyncio.Protocol], asyncio.Transport]

    async def create_connection(self, factory: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        protocol = factory()
        return self.engine(protocol), protocol


LOOP = FuzzedLoop()


async def _turn() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def _answers(port: DataPort, pieces: list[bytes]) -> bytes | None:
    """Return what a caller gets that sends these pieces, and then leaves; None if its connection was broken off."""
    wire, connection = FuzzedWire(), CallerConnection(port)
    connection.connection_made(wire)
    for piece in pieces:
        if wire.is_over:
            break
        connection.data_received(piece)
        await _turn()
    await _turn()
    connection.connection_lost(None)
    await _turn()
    assert not port.tasks
    return None if wire.is_broken else wire.sent


def gate_request(data: bytes) -> None:
    """Whatever comes, and in whichever pieces: the same requests are understood, and each gets one whole answer."""
    heard: list[list[tuple[str, str, bytes]]] = [[], []]

    async def listen(to: list[tuple[str, str, bytes]]) -> list[int]:
        async def handle(call: Call) -> None:
            try:
                body = await call.read()
            except Malformed as error:
                call.refuse(error.status, str(error))
            else:
                to.append((call.method, call.path, body))
                call.answer(200, b"%d" % len(body))

        pieces = [data] if to is heard[0] else [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
        answer = await _answers(DataPort(handle), pieces)
        if answer is None:  # its body never came
            return []
        return _statuses(answer, [method for method, _, _ in to])

    at_once, in_pieces = (LOOP.run_until_complete(listen(to)) for to in heard)
    if len(heard[0]) <= MAX_WAITING:  # more that come at once are too many, and one by one they are not
        assert heard[0] == heard[1], heard
        assert at_once == in_pieces, (at_once, in_pieces)


def _statuses(answer: bytes, methods: list[str]) -> list[int]:
    """Return the hundreds of each answer. Raises if they are not whole: one for each method and at most one more."""
    if "HEAD" in methods:  # its answer announces a body that never comes, which only who asked knows
        return []
    whole: list[int] = []

    class AnswerCounter:
        def on_message_complete(self) -> None:
            whole.append(parser.get_status_code() // 100)

    parser = HttpResponseParser(AnswerCounter())
    if answer:
        parser.feed_data(answer)
    whole = [hundreds for hundreds in whole if hundreds > 1]
    assert len(methods) <= len(whole) <= len(methods) + 1, (answer, methods)
    return whole


def gate_body(data: bytes) -> None:
    """A body is refused, or the engine gets one JSON object with the gate's id in it, and streams."""
    for dialect in DIALECTS:
        try:
            asked = dialect.request(data, 1000)
        except GateRefusal as refusal:
            _is_fault_of_caller(refusal)
            continue
        answer = json.loads(asked.body)
        assert answer["rid"] == asked.rid
        assert answer["stream"] is True
        for name in ("input_ids",) if dialect.path == Native.path else ("input_ids", "prompt"):
            ids = answer.get(name)
            assert not isinstance(ids, list) or all(type(one) is int and 0 <= one < 1000 for one in ids), ids


def _is_fault_of_caller(refusal: GateRefusal) -> None:
    assert refusal.status == 400
    str(refusal).encode()


def engine_answer(data: bytes) -> None:
    """Whatever an engine answers: its caller gets one answer, the gate settles, and what it held is free.

    The first byte chooses the route, whether the caller wants a stream, and whether the rest is all of the answer or
    its body.
    """
    choice, answer = (data[0] if data else 0), data[1:]
    options, route = divmod(choice, len(DIALECTS))
    dialect, streams = DIALECTS[route], bool(options & 1)
    if not options & 2:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer)
    LOOP.run_until_complete(_answered(dialect.path, answer, streams=streams))


async def _answered(path: str, answer: bytes, *, streams: bool) -> None:
    counted: list[tuple[str, int]] = []
    failed: list[BaseException] = []

    def engine(protocol: asyncio.Protocol) -> asyncio.Transport:
        wire = FuzzedWire()
        protocol.connection_made(wire)

        def speak() -> None:
            middle = len(answer) // 2
            for piece in (answer[:middle], answer[middle:]):
                if piece and not wire.is_over:
                    protocol.data_received(piece)
            LOOP.call_soon(LOOP.call_soon, protocol.connection_lost, None)

        LOOP.call_soon(speak)
        return wire

    async def abort(rid: str) -> None: ...

    async def serve(call: Call) -> None:
        try:
            await gate.serve(call)
        except Exception as error:
            failed.append(error)
            raise

    LOOP.engine = engine
    gate = Gate(count=lambda ending, tokens: counted.append((ending, tokens)))
    gate.open(Backend("http://engine:1", "i1", WeightVersion(1, 1), abort, vocabulary=1000))
    body = BODY % (b"true" if streams else b"false")
    head = f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    output = await _answers(DataPort(serve), [head + body])
    if failed:
        raise failed[0]
    if output is not None:  # after the beginning of an answer, breaking off is how an error is said
        _statuses(output, ["POST"])
    assert gate.in_flight == 0
    assert gate._held_bytes == 0
    gate.close()
    [(ending, tokens)] = counted
    assert ending in ENDINGS
    assert 0 <= tokens < 2**53, tokens
