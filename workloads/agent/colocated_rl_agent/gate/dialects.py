"""This module translates the engine's generation routes: SGLang's own `/generate` and the OpenAI routes. Pure.

A `Dialect` turns a caller's request into the engine's: always streamed, with an id of the gate's own. An `EngineReply`
takes the engine's answer chunk by chunk. It keeps everything generated, so that a caller without streaming gets the
whole answer even if the stream broke off; and it reports how the request ended. A reply that broke off, like one that
a switch aborted, is an answer with finish reason "abort"; an engine's own error is a `GateRefusal` with its status
(H8).

Requests with several prompts or samples are refused: they can't be recognized as interrupted or resumed exactly.

pydantic's parser reads and writes JSON: for a prompt of 1,000 ids it takes a third of the standard library's
time, for log-probabilities a sixth.
"""

from __future__ import annotations

import itertools
import math
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic_core import from_json, to_json

from colocated_rl_agent.gate.sampling import NATIVE, OPENAI, Kinds, misfit
from colocated_rl_api.columns import CONTENT_TYPE, pack
from colocated_rl_api.rungs import WeightVersion

MIN_INTERVAL = 16  # tokens between chunks
MOST_CHUNKS = 32  # per request: chunks are cumulative, so bytes would grow with the square of its length
DEFAULT_LIMIT = 128  # tokens, the engine's own default
ABORTED_WHILE_COMPILING = "Aborted by AbortReq."  # the only abort by the agent that carries an error status
ENGINE_LOST = {"type": "abort", "message": "the engine was lost"}
DONE = b"[DONE]"
JSON = "application/json"
BEGINNINGS = (4096, 1024, 256, 64)  # items of a prompt whose engine is remembered
MOST_TURNS = 32  # of a chat, likewise
MOST_TOKENS = 1 << 30  # of one answer
AS_OBJECTS = 4  # memory of parsed log-probabilities, in bytes of their JSON

OF_EACH_SAMPLE = (  # may be lists if a request has several samples; in a request for one, some kill the scheduler
    "return_logprob", "logprob_start_len", "top_logprobs_num", "return_sampling_mask", "sampling_logprobs_mode",
    "return_hidden_states", "lora_path", "lora_id", "custom_logit_processor", "extra_key", "bootstrap_host",
    "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
)  # fmt: skip

_UNFINISHED, _UNFINISHED_SPACED = b'"finish_reason":null', b'"finish_reason": null'
_JOINED = {"text", "content", "reasoning_content", "arguments"}  # strings that come in pieces


_process, _number = secrets.token_hex(8), itertools.count()


class GateRefusal(Exception):
    """The gate or the engine answers the request with an HTTP error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class EngineReply(Protocol):
    """An EngineReply accumulates the engine's answer to one request."""

    @property
    def ending(self) -> str:
        """Return finished, aborted or error; aborted until the engine reports otherwise."""

    @property
    def size(self) -> int:
        """Return the bytes held for this reply."""

    @property
    def content_type(self) -> str:
        """Return the media type of `answer`, once that was called."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens generated so far, as far as the engine has reported."""

    def take(self, event: bytes) -> bytes | None:
        """Record an event, and return what a streaming caller gets for it, or None."""

    def forget(self) -> None:
        """Free, for want of room, the bytes held only in case the engine is lost.

        Raises GateRefusal for a reply that must be held and keeps growing.
        """

    def rest(self) -> bytes | None:
        """Return what a streaming caller still gets after the last event because the engine broke off, or None."""

    def answer(self) -> bytes:
        """Return the whole answer, for a caller without streaming. Raises GateRefusal."""


@dataclass(frozen=True)
class Request:
    """A Request is what the gate sends to the engine."""

    rid: str
    body: bytes
    streams: bool  # the caller wants chunks
    wants_usage: bool = True  # the caller wants the last chunk of the OpenAI routes, which counts tokens
    wants_counts: bool = False  # the caller wants token counts in each chunk
    wants_columns: bool = False  # the caller reads an answer to /generate in columns
    beginnings: tuple[int, ...] = ()  # hashes of the prompt's beginnings, the longest first


class Dialect(Protocol):
    path: str

    def request(self, body: bytes, vocabulary: int | None = None, *, keyed: bool = False) -> Request:
        """Return the engine's request. vocabulary: token ids are below it; None: unknown. keyed: with the beginnings of
        its prompt. Raises GateRefusal (400).
        """

    def reply(self, request: Request, version: WeightVersion) -> EngineReply: ...


# ---------------------------------------------------------------------------------------------------- /generate
class Native:
    """Native translates SGLang's `/generate`. Chunks are cumulative: only the last, which has everything, is parsed."""

    path = "/generate"

    def request(self, body: bytes, vocabulary: int | None = None, *, keyed: bool = False) -> Request:
        asked = _object(body)
        _require_one_sample(asked)
        text, input_ids, sampling = asked.get("text"), asked.get("input_ids"), asked.get("sampling_params")
        if text is not None and not (text and isinstance(text, str)):
            raise GateRefusal(
                400, "text must be one string that is not empty: send each sample as a request of its own"
            )
        if input_ids is not None:
            _require_known(vocabulary, "input_ids", input_ids)
        if asked.get("input_embeds") is not None:
            raise GateRefusal(
                400, "input_embeds may be of several samples, and have no ids to go on from: send input_ids"
            )
        if sampling is not None and not isinstance(sampling, dict):
            raise GateRefusal(400, "sampling_params must be an object")
        sampling, streams = sampling or {}, _streams(asked)
        if sampling.get("n", 1) != 1 or sampling.get("beam_width") not in (None, 1):
            raise GateRefusal(400, "n and beam_width must be 1: send each sample as a request of its own")
        for name in ("positional_embed_overrides", "session_params"):
            if asked.get(name) is not None:
                raise GateRefusal(400, f"{name} are not taken")
        _spare_engine(asked, "logprob_start_len", least=-1)
        _spare_engine(asked, "top_logprobs_num", most=vocabulary)
        _require_borne(sampling, NATIVE)
        if sampling.get("min_new_tokens") and sampling.get("stop_token_ids"):
            _require_known(vocabulary, "stop_token_ids", sampling["stop_token_ids"])
        rid = _new_rid()
        spaced = {**sampling, "stream_interval": _interval(sampling.get("max_new_tokens"))}
        body = to_json({**asked, "rid": rid, "stream": True, "sampling_params": spaced})
        beginnings = _beginnings(input_ids if input_ids is not None else text) if keyed else ()
        return Request(rid, body, streams, beginnings=beginnings)

    def reply(self, request: Request, version: WeightVersion) -> EngineReply:
        return NativeReply(request.rid, version, in_columns=request.wants_columns)


def _beginnings(prompt: object) -> tuple[int, ...]:
    """Return hashes of the prompt's beginnings, the longest first: all of it, and those of BEGINNINGS items.

    Items are token ids or characters; a message of a chat is as one item, and all but the last are beginnings.
    """
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        shown = [str(item) for item in prompt[:MOST_TURNS]]
        return tuple(hash(tuple(shown[:count])) for count in range(len(shown), 0, -1))
    items = tuple(prompt) if isinstance(prompt, list) else str(prompt)
    return tuple(hash(items[:count]) for count in (len(items), *BEGINNINGS) if count <= len(items))


def _interval(limit: object) -> int:
    """Return the tokens between chunks for a request with this limit: at most so many are lost with an engine."""
    tokens = limit if isinstance(limit, int) else DEFAULT_LIMIT
    return max(MIN_INTERVAL, -(-tokens // MOST_CHUNKS))


class NativeReply:
    __slots__ = (
        "_ended", "_in_columns", "_last", "_refusal", "_rid", "_tokens", "_version", "content_type", "ending", "size",
    )  # fmt: skip

    def __init__(self, rid: str, version: WeightVersion, *, in_columns: bool = False) -> None:
        self._rid = rid
        self._version = version
        self._in_columns = in_columns
        self.content_type = JSON
        self._last = b""
        self._refusal: GateRefusal | None = None
        self._ended = False
        self._tokens = 0
        self.ending = "aborted"
        self.size = 0

    @property
    def tokens(self) -> int:
        if self._ended:
            return self._tokens
        try:
            return len(self._state()["output_ids"])
        except GateRefusal:
            return 0

    def take(self, event: bytes) -> bytes | None:
        if event.rfind(_UNFINISHED) >= 0 or event.rfind(_UNFINISHED_SPACED) >= 0:  # `in` takes three times as long
            self._last, self.size = event, len(event)
            return event
        self._ended = True
        try:
            sent = _event(event)
            state = last_state(sent, rid=self._rid, version=self._version)
        except GateRefusal as refusal:
            self._refusal, self.ending = refusal, "error"
            return event
        self._last = self._written(state, event if state == sent else None)
        self.size = len(self._last)
        self._tokens = len(state["output_ids"])
        self.ending = "aborted" if state["meta_info"]["finish_reason"]["type"] == "abort" else "finished"
        return self._last

    def forget(self) -> None:
        if not self._ended:
            self._last, self.size = b"", 0

    def rest(self) -> bytes | None:
        return None if self._ended else to_json(self._state())

    def answer(self) -> bytes:
        if self._refusal is not None:
            raise self._refusal
        return self._last if self._ended else self._written(self._state())

    def _written(self, state: dict[str, Any], as_sent: bytes | None = None) -> bytes:
        """Return the finished answer in the caller's form. as_sent: its JSON, if the engine sent just that."""
        if self._in_columns and (packed := pack(state)) is not None:
            self.content_type = CONTENT_TYPE
            return packed
        return to_json(state) if as_sent is None else as_sent

    def _state(self) -> dict[str, Any]:
        sent = _event(self._last) if self._last else {"text": "", "output_ids": []}
        return last_state(sent, rid=self._rid, version=self._version)


def last_state(sent: dict[str, Any], *, rid: str, version: WeightVersion) -> dict[str, Any]:
    """Return the finished answer from the last chunk; one cut off counts as aborted. Raises GateRefusal."""
    _raise_error(sent)
    with _understood():
        ids, meta_info = [*sent.get("output_ids", [])], {**sent.get("meta_info", {})}
        version_of_none = {} if ids else {"weight_version": str(version)}  # only the engine knows the version of tokens
        meta: dict[str, Any] = {"id": rid, "completion_tokens": len(ids)} | version_of_none | meta_info
        reason = meta.get("finish_reason") or ENGINE_LOST
        if reason["type"] == "abort" and reason.get("status_code") is not None:
            if reason.get("message") != ABORTED_WHILE_COMPILING:
                raise GateRefusal(error_status(reason["status_code"]), str(reason.get("message")))
            reason = {"type": "abort", "message": ABORTED_WHILE_COMPILING}
        return {**sent, "output_ids": ids, "meta_info": {**meta, "finish_reason": reason}}


# ---------------------------------------------------------------------------------------------------- OpenAI routes
class OpenAI:
    """OpenAI translates `/v1/completions` and `/v1/chat/completions`. Chunks are pieces, joined for a caller without
    streaming. whole: `object` of an answer that is not streamed.
    """

    def __init__(self, path: str, *, whole: str) -> None:
        self.path = path
        self._whole = whole

    def request(self, body: bytes, vocabulary: int | None = None, *, keyed: bool = False) -> Request:
        asked = _object(body)
        _require_one_sample(asked)
        options = asked.get("stream_options") or {}
        if any(asked.get(name) not in (None, 1) for name in ("n", "best_of")):
            raise GateRefusal(400, "n and best_of must be 1: send each sample as a request of its own")
        if not isinstance(options, dict):
            raise GateRefusal(400, "stream_options must be an object")
        _require_borne(asked, OPENAI)
        for name in ("logprobs", "top_logprobs"):
            _spare_engine(asked, name, most=vocabulary)
        for name in ("prompt", "input_ids", *(["stop_token_ids"] if asked.get("min_tokens") else [])):
            if asked.get(name) and not isinstance(asked[name], str):
                _require_known(vocabulary, name, asked[name])
        rid, streams = _new_rid(), _streams(asked)
        counts = {"include_usage": True, "continuous_usage_stats": True}  # a lost engine has reported its counts
        asked |= {"rid": rid, "stream_options": {**options, **counts}}
        asked["stream"] = True
        wants_usage, wants_counts = (bool(options.get(count)) for count in counts)
        prompt = asked.get("input_ids") or asked.get("prompt") or asked.get("messages")
        return Request(
            rid, to_json(asked), streams, wants_usage, wants_counts, beginnings=_beginnings(prompt) if keyed else ()
        )

    def reply(self, request: Request, version: WeightVersion) -> EngineReply:
        return OpenAIReply(request, version, whole=self._whole)


class OpenAIReply:
    content_type = JSON

    def __init__(self, request: Request, version: WeightVersion, *, whole: str) -> None:
        self._request = request
        self._head: dict[str, Any] = {"id": request.rid}
        self._choice: dict[str, Any] = {"index": 0}
        self._usage: dict[str, Any] = {}
        self._version = str(version)
        self._whole = whole
        self._refusal: GateRefusal | None = None
        self.ending = "aborted"
        self.tokens = 0
        self.size = 0
        self._smallest = sys.maxsize

    def take(self, event: bytes) -> bytes | None:
        try:
            chunk = _event(event)
            _raise_error(chunk)
            with _understood():
                choices, usage = [*(chunk.pop("choices", None) or [])], chunk.pop("usage", None)
                self._usage = usage or self._usage
                self.tokens = _count(self._usage.get("completion_tokens", self.tokens))
                for choice in choices:
                    self._keep(choice, len(event))
        except GateRefusal as refusal:
            self._refusal, self.ending = refusal, "error"
            return event
        if (reason := self._choice.get("finish_reason")) is not None:
            self.ending = "aborted" if reason == "abort" else "finished"
        if not choices:
            return event if self._request.wants_usage else None
        self._head |= chunk
        if usage is None or self._request.wants_counts or not self._request.streams:
            return event
        return to_json({**chunk, "choices": choices, "usage": None})

    def _keep(self, choice: dict[str, Any], size: int) -> None:
        """Add a piece of the choice; for a streaming caller keep only how it ended."""
        if self._request.streams:
            choice = {"finish_reason": choice.get("finish_reason")}
        else:  # the part that all events have in common is not held
            self._smallest = min(self._smallest, size)
            self.size += AS_OBJECTS * (size - self._smallest)
        join(self._choice, choice)

    def forget(self) -> None:
        """Raise GateRefusal if the choice is unfinished: nothing can be freed, as all of it is the answer."""
        if self._choice.get("finish_reason") is None:
            raise GateRefusal(
                429, "there is no room to hold this answer until its end: ask for a stream, or send it later"
            )

    def rest(self) -> bytes | None:
        if self._refusal is not None or self._choice.get("finish_reason") is not None:
            return None
        piece: dict[str, Any] = {"text": ""} if self._whole == "text_completion" else {"delta": {}}
        return to_json({**self._head, "choices": [{"index": 0, **piece, "finish_reason": "abort"}]})

    def answer(self) -> bytes:
        if self._refusal is not None:
            raise self._refusal
        choice = dict(self._choice)
        with _understood():
            scored = (choice.get("logprobs") or {}).get("content")
            if scored is not None and len(scored) != self.tokens:  # H27
                raise GateRefusal(
                    502,
                    f"the engine gave log-probabilities of {len(scored)} of {self.tokens} tokens: its streams of chats "
                    "have none of a character's first bytes; /generate has all",
                )
        choice["finish_reason"] = choice.get("finish_reason") or "abort"
        if self._whole == "text_completion":
            choice.setdefault("text", "")
        else:
            with _understood():
                choice["message"] = {"role": "assistant", "content": ""} | (choice.pop("delta", None) or {})
        spans = [{"version": self._version, "start": 0, "end": self.tokens}]  # they never change in flight
        return to_json(
            {
                **self._head,
                "object": self._whole,
                "choices": [choice],
                "usage": self._usage or None,
                "metadata": {"weight_version": self._version, "weight_versions": spans if self.tokens else []},
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
    """Join entries with an equal index, as tool calls have one, and append all others.

    Log-probabilities by token may have an "index" too, for the token of that text: it is a float, so it does not count.
    """
    for entry in piece:
        at = entry.get("index") if isinstance(entry, dict) else None
        if type(at) is int and (before := next((held for held in whole if held.get("index") == at), None)) is not None:
            join(before, entry)
        else:  # without a search: a long answer has many thousand log-probabilities
            whole.append(entry)


DIALECTS: tuple[Dialect, ...] = (
    Native(),
    OpenAI("/v1/completions", whole="text_completion"),
    OpenAI("/v1/chat/completions", whole="chat.completion"),
)


def _new_rid() -> str:
    """Return a request id of 32 characters that no other gate uses."""
    return f"{_process}{next(_number):016x}"


def _object(body: bytes) -> dict[str, Any]:
    try:
        asked = from_json(body)
    except ValueError as error:
        raise GateRefusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(asked, dict):
        raise GateRefusal(400, "the body must be an object")
    return asked


def _streams(asked: dict[str, Any]) -> bool:
    """Return whether the caller wants a stream; checked here because the engine always gets stream=true."""
    streams = asked.get("stream")
    if streams is not None and not isinstance(streams, bool):
        raise GateRefusal(400, "stream must be true or false")
    return bool(streams)


def _event(event: bytes) -> dict[str, Any]:
    """Parse one event. Raises GateRefusal if it is not a JSON object."""
    try:
        parsed = from_json(event)
    except ValueError as error:
        raise GateRefusal(502, f"the engine sent {len(event)} bytes that are not JSON") from error
    if not isinstance(parsed, dict):
        raise GateRefusal(502, "the engine sent a chunk that is not an object")
    return parsed


def _raise_error(parsed: dict[str, Any]) -> None:
    """Raise GateRefusal with the code of an error inside a stream, if there is one."""
    error = parsed.get("error")
    if error is None:
        return
    code, message = (error.get("code"), error.get("message", error)) if isinstance(error, dict) else (None, error)
    raise GateRefusal(error_status(code), str(message))


def error_status(code: object) -> int:
    """Return the status for a caller whose request failed at the engine with this one: 502 if that is no error's."""
    return code if isinstance(code, int) and 400 <= code < 600 else 502


@contextmanager
def _understood() -> Iterator[None]:
    """Raise GateRefusal for an event whose shape differs from those of the engine's routes."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise GateRefusal(502, f"the engine sent something else than expected: {error!r}") from error


def _count(tokens: object) -> int:
    """Return a number of tokens. Raises ValueError for anything else: it is added to a counter and shown."""
    if not isinstance(tokens, int) or not 0 <= tokens <= MOST_TOKENS:
        raise ValueError("no number of tokens")
    return tokens


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _require_one_sample(asked: dict[str, Any]) -> None:
    for name in asked.keys() & OF_EACH_SAMPLE:
        if isinstance(asked[name], list):
            raise GateRefusal(400, f"{name} is a list: send each sample as a request of its own")


def _spare_engine(asked: dict[str, Any], name: str, *, least: float = -math.inf, most: float | None = math.inf) -> None:
    """Raise GateRefusal for a number that kills the engine with all its requests. most: None: unknown.

    The engine converts text to a number, so values that are no numbers are refused too.
    """
    value = asked.get(name)
    if value is None:
        return
    if not isinstance(value, int | float) or not least <= value <= (math.inf if most is None else most):
        raise GateRefusal(400, f"{name} is no number that the engine bears")


def _require_borne(asked: dict[str, Any], kinds: Kinds) -> None:
    """Raise GateRefusal for a sampling parameter that kills the engine with all its requests."""
    if (name := misfit(asked, kinds)) is not None:
        raise GateRefusal(400, f"{name} is no value that the engine bears")


def _require_known(vocabulary: int | None, name: str, ids: Any) -> None:
    """Raise GateRefusal for token ids that the model does not know: one kills the engine with all its requests."""
    if not _is_ids(ids):
        raise GateRefusal(400, f"{name} must be one list of numbers: send each sample as a request of its own")
    if ids and vocabulary is not None and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise GateRefusal(400, f"{name} has an id that is not one of the {vocabulary} of the model")
