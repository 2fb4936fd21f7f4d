"""The runner link is the agent's end of the runner's socket: it reports and changes the GPU container's processes.

It connects, and reconnects for as long as it lives: the agent starts before the GPU container does, and either may be
restarted alone. Without a connection the state of the children is unknown, and every call raises. `runner.py` describes
the protocol.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from colocated_rl_api.logs import in_words, log

LOG = logging.getLogger(__name__)

CALL_DEADLINE_S = 10.0  # the runner answers at once; only a stalled container is slower
RECONNECT_S = 0.1
KILLED = -9  # exit code of SIGKILL, which an ending container also sends to its remaining processes
REAP_S = 30.0  # from SIGKILL to an empty process group; a device driver can hold on to a process
MAX_LINE_BYTES = 4 * 1024 * 1024


class RunnerError(Exception):
    """RunnerError
    ├─ RunnerUnreachable  no connection, or no answer: the outcome is unknown until the next hello
    └─ RunnerRefused      the runner did nothing, and its message has the reason
    """


class RunnerUnreachable(RunnerError):
    pass


class RunnerRefused(RunnerError):
    def __init__(self, error: str, message: str) -> None:
        super().__init__(f"{error}: {message}")
        self.error = error


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ChildExited(_Message):
    event: Literal["exited"]
    name: str
    incarnation: str
    code: int
    tail: tuple[str, ...]
    killed: bool  # on request, and its leader lived until then

    @property
    def was_killed(self) -> bool:
        """Return whether the request ended it. Else it ended by itself, or somebody else killed it."""
        return self.killed and self.code == KILLED


class ChildStatus(_Message):
    """Describes the newest incarnation of a name."""

    name: str
    incarnation: str
    running: bool
    code: int | None = None
    tail: tuple[str, ...] = ()
    killed: bool = False

    @property
    def exit(self) -> ChildExited | None:
        """Return the event of its exit, which this agent may have missed; None while it runs."""
        if self.running or self.code is None:
            return None
        return ChildExited(
            event="exited",
            name=self.name,
            incarnation=self.incarnation,
            code=self.code,
            tail=self.tail,
            killed=self.killed,
        )


class RunnerHello(_Message):
    event: Literal["hello"]
    protocol: int
    runner: str
    terminating: bool
    children: tuple[ChildStatus, ...]


class RunnerTerminating(_Message):
    event: Literal["terminating"]
    children_end_in_s: float


class RunnerLost(_Message):
    """The connection is gone; what became of the children is unknown until the next hello."""

    event: Literal["lost"] = "lost"
    reason: str


class Device(_Message):
    index: int
    total_bytes: int | None  # None: it is lost
    used_bytes: int | None
    fault: str | None = None  # that was not there when its container began


RunnerEvent = RunnerHello | ChildExited | RunnerTerminating | RunnerLost
_event: TypeAdapter[RunnerHello | ChildExited | RunnerTerminating] = TypeAdapter(
    RunnerHello | ChildExited | RunnerTerminating
)


def read_message(line: bytes) -> RunnerHello | ChildExited | RunnerTerminating | dict[str, Any]:
    """Return an event, or the answer to a call. Raises ValueError, RecursionError."""
    message = json.loads(line)
    if isinstance(message, dict) and "event" in message:
        return _event.validate_python(message)
    if not (isinstance(message, dict) and isinstance(message.get("id"), int) and isinstance(message.get("ok"), bool)):
        raise ValueError("neither an event nor an answer")
    return message


class RunnerLink:
    """A RunnerLink calls the runner and passes on its events.

    on_event: called on the event loop with every event, in order. call_s: deadline of an answer.
    """

    def __init__(self, path: Path, on_event: Callable[[RunnerEvent], None], *, call_s: float = CALL_DEADLINE_S) -> None:
        self._path = path
        self._on_event = on_event
        self._call_s = call_s
        self._writer: asyncio.StreamWriter | None = None
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def run(self) -> None:
        """Hold a connection until cancelled."""
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._path, limit=MAX_LINE_BYTES)
            except OSError:
                await asyncio.sleep(RECONNECT_S)
                continue
            try:
                reason = await self._read(reader)
            finally:
                self._writer.close()
                self._writer = None
                for answer in self._answers.values():
                    if not answer.done():
                        answer.set_exception(RunnerUnreachable("the runner's connection was lost during a call"))
                self._answers.clear()
            self._on_event(RunnerLost(reason=reason))
            await asyncio.sleep(RECONNECT_S)

    async def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str | None],
        *,
        secrets: Sequence[str] = (),
        devices: Sequence[int] = (),
    ) -> str:
        """Start a child and return its incarnation. devices: those it sees, by index; all of the container if empty.

        Raises RunnerError; after RunnerUnreachable it may run anyway, and after a cancellation, so a start without an
        answer closes the connection: the next hello reports the children.
        """
        fields = {"argv": list(argv), "env": dict(env), "secrets": list(secrets), "devices": list(devices)}
        try:
            answer = await self._call("start", name=name, **fields)
        except (RunnerUnreachable, asyncio.CancelledError):
            if self._writer is not None:
                self._writer.close()
            raise
        return str(answer["incarnation"])

    async def stop(self, name: str, *, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after grace_s. The exit comes as an event."""
        await self._call("stop", name=name, grace_s=grace_s)

    async def kill(self, name: str) -> None:
        """Send SIGKILL to the whole process group. The exit comes as an event."""
        await self._call("kill", name=name)

    async def devices(self) -> tuple[Device, ...]:
        """Return memory and faults of each GPU; empty if no driver tells."""
        answer = await self._call("devices")
        return tuple(Device.model_validate(device) for device in answer["devices"] or ())

    async def memory(self) -> dict[str, int]:
        """Return the bytes of host memory that each running child holds, by name."""
        answer = await self._call("memory")
        return {str(name): int(held) for name, held in answer["memory"].items()}

    async def exit(self, code: int) -> None:
        """End all children, then the runner."""
        await self._call("exit", code=code)

    async def _call(self, op: str, **fields: Any) -> dict[str, Any]:
        if self._writer is None:
            raise RunnerUnreachable(f"{op}: the runner is not connected at {self._path}")
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._call_s):
                self._writer.write(json.dumps({"id": number, "op": op, **fields}).encode() + b"\n")
                await self._writer.drain()
                result: dict[str, Any] = await answer
        except (TimeoutError, ConnectionError) as error:
            raise RunnerUnreachable(f"{op}: no answer of the runner in {self._call_s:g} s") from error
        finally:
            self._answers.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # mark it as retrieved, also if the sending failed
        if not result["ok"]:
            raise RunnerRefused(result["error"], result["message"])
        return result

    async def _read(self, reader: asyncio.StreamReader) -> str:
        """Dispatch lines until the connection ends, and return why it ended."""
        while True:
            try:
                line = await reader.readline()
            except (OSError, ValueError) as error:
                return in_words(error)
            if not line:
                return "the connection ended"
            try:
                message = read_message(line)
            except (ValueError, RecursionError) as error:
                return f"the runner sent {len(line)} bytes that are no message: {type(error).__name__}"
            if not isinstance(message, dict):
                self._on_event(message)
            elif (answer := self._answers.get(message["id"])) is not None and not answer.done():
                answer.set_result(message)
            else:
                log(LOG, "runner reply dropped", reason=f"nobody waits for request {message['id']}")
