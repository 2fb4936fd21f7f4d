"""What an engine's generation routes take and say: SGLang's own `/generate`, and the OpenAI routes. Pure.

A `Dialect` makes the engine's request out of a caller's: always streamed, with an id of the gate's own. A `Reply` takes
in what the engine says, chunk by chunk. It keeps all that was generated, so that a caller who did not ask for a stream
gets the whole, also when the stream broke off; and it says how the request ended. A reply that broke off, like one that
a switch aborted, is an answer with finish reason "abort"; an engine's own error is `Refused` with its status (H8).

What can't be told from an interrupted one or continued faithfully is refused: several prompts or samples in a request.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from colocated_rl_api.ladder import WeightVersion

MIN_INTERVAL = 16  # tokens between chunks
MOST_CHUNKS = 32  # of a request: chunks are cumulative, so that bytes would grow with the square of its length
DEFAULT_LIMIT = 128  # tokens, the engine's own
ABORTED_WHILE_COMPILING = "Aborted by AbortReq."  # the one abort of ours that carries an error status
ENGINE_LOST = {"type": "abort", "message": "the engine was lost"}
DONE = b"[DONE]"

_UNFINISHED = re.compile(rb'"finish_reason": ?null')
_JOINED = {"text", "content", "reasoning_content", "arguments"}  # strings that come in pieces


class Refused(Exception):
    """A request that the gate or the engine answers with an HTTP error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Reply(Protocol):
    """What the engine says to one request."""

    @property
    def outcome(self) -> str:
        """finished, aborted or error; aborted until the engine says otherwise."""

    @property
    def size(self) -> int:
        """Bytes that are held for it."""

    @property
    def tokens(self) -> int:
        """Generated so far, as far as the engine has said."""

    def take(self, event: bytes) -> bytes | None:
        """Note an event; what a caller who streams gets for it, if anything."""

    def forget(self) -> None:
        """Let go of what is held only for the case that the engine is lost."""

    def rest(self) -> bytes | None:
        """After the last event: what a caller who streams is still owed, because the engine broke off."""

    def answer(self) -> bytes:
        """The whole, for a caller who does not stream. Raises Refused."""


@dataclass(frozen=True)
class Request:
    """What the engine is asked."""

    rid: str
    body: bytes
    streams: bool  # the caller wants chunks
    wants_usage: bool = True  # and the closing chunk of the OpenAI routes that counts tokens
    wants_counts: bool = False  # in each chunk


class Dialect(Protocol):
    path: str

    def request(self, body: bytes) -> Request:
        """Raises Refused with 400."""

    def reply(self, request: Request, version: WeightVersion) -> Reply: ...


# ---------------------------------------------------------------------------------------------------- /generate
class Native:
    """SGLang's `/generate`. Chunks are cumulative: the last one is everything, and only that one is parsed."""

    path = "/generate"

    def request(self, body: bytes) -> Request:
        asked = _object(body)
        text, input_ids, sampling = asked.get("text"), asked.get("input_ids"), asked.get("sampling_params")
        if text is not None and not isinstance(text, str):
            raise Refused(400, "text must be one string: send each sample as a request of its own")
        if input_ids is not None and not _is_ids(input_ids):
            raise Refused(400, "input_ids must be one list of numbers: send each sample as a request of its own")
        if sampling is not None and not isinstance(sampling, dict):
            raise Refused(400, "sampling_params must be an object")
        sampling = sampling or {}
        if sampling.get("n", 1) != 1:
            raise Refused(400, "n must be 1: send each sample as a request of its own")
        rid = uuid.uuid4().hex
        spaced = {"stream_interval": _interval(sampling.get("max_new_tokens")), **sampling}
        body = _json({**asked, "rid": rid, "stream": True, "sampling_params": spaced})
        return Request(rid, body, streams=bool(asked.get("stream")))

    def reply(self, request: Request, version: WeightVersion) -> Reply:
        return NativeReply(request.rid, version)


def _interval(limit: object) -> int:
    """Tokens between chunks, of a request with this limit: as many are lost with an engine."""
    tokens = limit if isinstance(limit, int) else DEFAULT_LIMIT
    return max(MIN_INTERVAL, -(-tokens // MOST_CHUNKS))


class NativeReply:
    def __init__(self, rid: str, version: WeightVersion) -> None:
        self._rid = rid
        self._version = version
        self._last = b""
        self._refusal: Refused | None = None
        self._ended = False
        self._tokens = 0
        self.outcome = "aborted"

    @property
    def size(self) -> int:
        return len(self._last)

    @property
    def tokens(self) -> int:
        if self._ended:
            return self._tokens
        try:
            return len(self._state()["output_ids"])
        except Refused:
            return 0

    def take(self, event: bytes) -> bytes | None:
        if _UNFINISHED.search(event) is not None:
            self._last = event
            return event
        self._ended = True
        try:
            said = _event(event)
            state = last_state(said, rid=self._rid, version=self._version)
        except Refused as refusal:
            self._refusal, self.outcome = refusal, "error"
            return event
        self._last = event if state == said else _json(state)
        self._tokens = len(state["output_ids"])
        self.outcome = "aborted" if state["meta_info"]["finish_reason"]["type"] == "abort" else "finished"
        return self._last

    def forget(self) -> None:
        if not self._ended:
            self._last = b""

    def rest(self) -> bytes | None:
        return None if self._ended else _json(self._state())

    def answer(self) -> bytes:
        if self._refusal is not None:
            raise self._refusal
        return self._last if self._ended else _json(self._state())

    def _state(self) -> dict[str, Any]:
        said = _event(self._last) if self._last else {"text": "", "output_ids": []}
        return last_state(said, rid=self._rid, version=self._version)


def last_state(said: dict[str, Any], *, rid: str, version: WeightVersion) -> dict[str, Any]:
    """A finished answer from the last chunk; one that was cut off counts as aborted. Raises Refused."""
    _raise_error(said)
    with _understood():
        ids, told = [*said.get("output_ids", [])], {**said.get("meta_info", {})}
        version_of_none = {} if ids else {"weight_version": str(version)}  # of tokens the engine alone can say it
        meta: dict[str, Any] = {"id": rid, "completion_tokens": len(ids)} | version_of_none | told
        reason = meta.get("finish_reason") or ENGINE_LOST
        if reason["type"] == "abort" and reason.get("status_code") is not None:
            if reason.get("message") != ABORTED_WHILE_COMPILING:
                raise Refused(_http_error(reason["status_code"]), str(reason.get("message")))
            reason = {"type": "abort", "message": ABORTED_WHILE_COMPILING}
        return {**said, "output_ids": ids, "meta_info": {**meta, "finish_reason": reason}}


# ---------------------------------------------------------------------------------------------------- OpenAI routes
class OpenAI:
    """`/v1/completions` and `/v1/chat/completions`. Chunks are pieces, and are joined for a caller who wants the whole.

    prompt: the field that holds what to complete. whole: `object` of an answer that is not streamed.
    """

    def __init__(self, path: str, *, prompt: str, whole: str) -> None:
        self.path = path
        self._prompt = prompt
        self._whole = whole

    def request(self, body: bytes) -> Request:
        asked = _object(body)
        prompt, options = asked.get(self._prompt), asked.get("stream_options") or {}
        if isinstance(prompt, list) and self._prompt == "prompt" and not _is_ids(prompt):
            raise Refused(400, "prompt must be one string or one list of numbers: send each as a request of its own")
        if any(asked.get(name) not in (None, 1) for name in ("n", "best_of")):
            raise Refused(400, "n and best_of must be 1: send each sample as a request of its own")
        if not isinstance(options, dict):
            raise Refused(400, "stream_options must be an object")
        rid = uuid.uuid4().hex
        counts = {"include_usage": True, "continuous_usage_stats": True}  # an engine that is lost has told what it made
        asked |= {"rid": rid, "stream_options": {**options, **counts}}
        streams, asked["stream"] = bool(asked.get("stream")), True
        wants_usage, wants_counts = (bool(options.get(count)) for count in counts)
        return Request(rid, _json(asked), streams, wants_usage, wants_counts)

    def reply(self, request: Request, version: WeightVersion) -> Reply:
        return OpenAIReply(request, version, whole=self._whole)


class OpenAIReply:
    def __init__(self, request: Request, version: WeightVersion, *, whole: str) -> None:
        self._request = request
        self._head: dict[str, Any] = {"id": request.rid}
        self._choice: dict[str, Any] = {"index": 0}
        self._usage: dict[str, Any] = {}
        self._metadata = {"weight_version": str(version)}
        self._whole = whole
        self._refusal: Refused | None = None
        self.outcome = "aborted"
        self.tokens = 0
        self.size = 0

    def take(self, event: bytes) -> bytes | None:
        try:
            chunk = _event(event)
            _raise_error(chunk)
            with _understood():
                choices, usage = [*(chunk.pop("choices", None) or [])], chunk.pop("usage", None)
                self._usage = usage or self._usage
                self.tokens = int(self._usage.get("completion_tokens", self.tokens))
                for choice in choices:
                    self._keep(choice, len(event))
        except Refused as refusal:
            self._refusal, self.outcome = refusal, "error"
            return event
        if (reason := self._choice.get("finish_reason")) is not None:
            self.outcome = "aborted" if reason == "abort" else "finished"
        if not choices:
            return event if self._request.wants_usage else None
        self._head |= chunk
        if usage is None or self._request.wants_counts or not self._request.streams:
            return event
        return _json({**chunk, "choices": choices, "usage": None})

    def _keep(self, choice: dict[str, Any], size: int) -> None:
        """Of a choice that its caller gets piece by piece, how it ended."""
        if self._request.streams:
            choice = {"finish_reason": choice.get("finish_reason")}
        else:
            self.size += size
        join(self._choice, choice)

    def forget(self) -> None:
        """Nothing: all of it is the answer."""

    def rest(self) -> bytes | None:
        if self._refusal is not None or self._choice.get("finish_reason") is not None:
            return None
        piece: dict[str, Any] = {"text": ""} if self._whole == "text_completion" else {"delta": {}}
        return _json({**self._head, "choices": [{"index": 0, **piece, "finish_reason": "abort"}]})

    def answer(self) -> bytes:
        if self._refusal is not None:
            raise self._refusal
        choice = dict(self._choice)
        choice["finish_reason"] = choice.get("finish_reason") or "abort"
        if self._whole == "text_completion":
            choice.setdefault("text", "")
        else:
            choice["message"] = {"role": "assistant", "content": ""} | (choice.pop("delta", None) or {})
        return _json(
            {
                **self._head,
                "object": self._whole,
                "choices": [choice],
                "usage": self._usage or None,
                "metadata": self._metadata,
            }
        )


def join(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece of a streamed choice to what came before it."""
    for name, value in piece.items():
        held = whole.get(name)
        if value is None and held is not None:
            continue
        if held is None:
            whole[name] = value
        elif isinstance(value, str):
            whole[name] = held + value if name in _JOINED else value
        elif isinstance(value, dict):
            join(held, value)
        elif isinstance(value, list):
            _join_lists(held, value)
        else:
            whole[name] = value


def _join_lists(whole: list[Any], piece: list[Any]) -> None:
    """Entries that have an index, as tool calls do, are told by it; others come after one another."""
    for entry in piece:
        at = entry.get("index") if isinstance(entry, dict) else None
        before = next((held for held in whole if at is not None and held.get("index") == at), None)
        if before is None:
            whole.append(entry)
        else:
            join(before, entry)


DIALECTS: tuple[Dialect, ...] = (
    Native(),
    OpenAI("/v1/completions", prompt="prompt", whole="text_completion"),
    OpenAI("/v1/chat/completions", prompt="messages", whole="chat.completion"),
)


def _object(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(asked, dict):
        raise Refused(400, "the body must be an object")
    return asked


def _event(event: bytes) -> dict[str, Any]:
    """Raises Refused for what no engine says."""
    try:
        said = json.loads(event)
    except (ValueError, RecursionError) as error:
        raise Refused(502, f"the engine sent {len(event)} bytes that are not JSON") from error
    if not isinstance(said, dict):
        raise Refused(502, "the engine sent a chunk that is not an object")
    return said


def _raise_error(said: dict[str, Any]) -> None:
    """Raises Refused with the code of an error that came inside a stream."""
    error = said.get("error")
    if error is None:
        return
    code, message = (error.get("code"), error.get("message", error)) if isinstance(error, dict) else (None, error)
    raise Refused(_http_error(code), str(message))


def _http_error(code: object) -> int:
    return code if isinstance(code, int) and 400 <= code < 600 else 502


@contextmanager
def _understood() -> Iterator[None]:
    """Raises Refused for an event of another shape than those of the engine's routes."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise Refused(502, f"the engine sent something else than expected: {error!r}") from error


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
