"""This module passes the engine's pieces for one admitted request to its caller, without a task or a wait in between.

A caller that does not read pauses the engine's connection, which later goes on where it was; so does a large chunk,
most of which stays at the engine until the request has a turn here.
"""

from __future__ import annotations

from collections.abc import Callable

from colocated_rl_agent.gate.call import Call
from colocated_rl_agent.gate.data_port import CALLER_S
from colocated_rl_agent.gate.dialects import (
    DONE,
    EngineReply,
    GateRefusal,
    Request,
    error_status,
)
from colocated_rl_agent.gate.limiter import Limiter
from colocated_rl_agent.gate.upstream import UpstreamConnection

LARGE_BYTES = 64 * 1024  # an incomplete chunk of more bytes needs a turn
MAX_EVENT_BYTES = 64 * 1024 * 1024  # one chunk: all tokens of a sample with their log-probabilities
MAX_ERROR_BYTES = 64 * 1024
MAX_COMMENT_BYTES = 1024 * 1024  # of one stream: all that is no data
STREAM = "text/event-stream"


class Running:
    """A Running is one admitted request.

    hold: called with the reply and its size before, when it has grown. turns: for those that have a large chunk.
    """

    __slots__ = ("_connection", "_events", "_hold", "_is_large", "_turns", "asked", "call", "error", "reply")

    def __init__(
        self, call: Call, asked: Request, reply: EngineReply, hold: Callable[[EngineReply, int], None], turns: Limiter
    ) -> None:
        self._hold, self._turns = hold, turns
        self._events = ServerSentEvents()
        self._connection: UpstreamConnection | None = None
        self._is_large = False
        self.call = call
        self.asked = asked
        self.reply = reply
        self.error = bytearray()

    def begin(self, connection: UpstreamConnection) -> None:
        """Bind the request to the connection of its exchange."""
        self._connection = connection
        self.call.flows = self._flow

    def end(self) -> None:
        self.call.flows = self._connection = None
        self._turns.give_back(self)

    def take(self, status: int, pieces: list[bytes]) -> bool:
        """Pass on as one what came from the engine at once: with a slow caller, or on a busy core, that is cheaper.

        Returns whether there was an event. Raises GateRefusal for a piece that no engine sends, and for a long error.
        """
        if status != 200:
            self.error += b"".join(pieces)[: MAX_ERROR_BYTES - len(self.error)]
            if len(self.error) == MAX_ERROR_BYTES:
                raise self.refusal(status)
            return False
        reply, streams = self.reply, self.asked.streams
        given: list[bytes] = []
        before = reply.size
        events: list[bytes] = []
        for piece in pieces:
            events += self._events.feed(piece)
        for event in events:
            if event != DONE and (sent := reply.take(event)) is not None and streams:
                given.append(b"data: %b\n\n" % sent)  # noqa: PERF401 - a comprehension takes longer for one event
        if given:
            self.call.give(b"".join(given), STREAM)
        if reply.size != before:
            self._hold(reply, before)
        if self._is_large or self._events.pending > LARGE_BYTES:
            self._weigh(self._events.pending)
        return bool(events)

    def refusal(self, status: int) -> GateRefusal:
        """Return the engine's error as the caller gets it."""
        return GateRefusal(error_status(status), bytes(self.error).decode(errors="replace"))

    def _weigh(self, pending: int) -> None:
        """Ask for a turn if the pending chunk is large, or give it back once the chunk is whole."""
        self._is_large = pending > LARGE_BYTES
        if self._is_large:
            self._turns.ask(self, self._flow)
            self._turns.hold(self, pending)
            self._flow()
        else:
            self._turns.give_back(self)

    def _flow(self) -> None:
        """Pause or resume the engine's connection."""
        if self._connection is None:
            return
        if self.call.is_stalled or self._turns.waits(self):
            self._connection.pause()
        else:
            self._connection.resume()

    def finish(self) -> None:
        """Send the rest of the answer, which no longer holds up a switch. Raises GateRefusal."""
        self.call.wait_for_caller(CALLER_S)
        if not self.asked.streams:
            self.call.answer(200, self.reply.answer(), content_type=self.reply.content_type)
            return
        rest = self.reply.rest()
        if rest is not None:
            self.call.give(b"data: %b\n\n" % rest, STREAM)
        self.call.give(b"data: %b\n\n" % DONE, STREAM, ends=True)


class ServerSentEvents:
    """ServerSentEvents parses the data of whole events only: one that a broken connection cut off is dropped."""

    __slots__ = ("_buffer", "_comments", "_seen", "pending")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._comments = 0  # bytes that were no data
        self._seen = 0  # no event ends before it
        self.pending = 0  # bytes of an event that is not whole yet

    def feed(self, piece: bytes) -> list[bytes]:
        """Add a piece and return the events that are whole now. Raises GateRefusal for one that is too large."""
        is_whole = piece.startswith(b"data: ") and piece.endswith(b"\n\n") and not self.pending
        if is_whole and piece.find(b"\n") == len(piece) - 2:
            return [piece[6:-2]]  # exactly one event, as engines send them
        events = []
        buffer = self._buffer
        buffer += piece
        while (end := buffer.find(b"\n\n", self._seen)) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + 2]
            self._seen = 0
            if event.startswith(b"data: "):
                events.append(event[len(b"data: ") :])
            elif (comments := self._comments + end + 2) <= MAX_COMMENT_BYTES:
                self._comments = comments
            else:
                raise GateRefusal(502, f"the engine sent more than {MAX_COMMENT_BYTES} bytes that are no data")
        self.pending = len(buffer)
        self._seen = max(0, self.pending - 1)
        if self.pending > MAX_EVENT_BYTES:
            raise GateRefusal(502, f"the engine sent a chunk of more than {MAX_EVENT_BYTES} bytes")
        return events
