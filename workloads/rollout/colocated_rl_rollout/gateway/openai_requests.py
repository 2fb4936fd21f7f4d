"""This module defines the requests that clients of the gateway may send, in the words of OpenAI's API. Pure.

A parameter has its effect, or it requests nothing, or the request is refused: none is changed, and none is ignored that
would change a completion. Requests that cannot resume exactly over a switch are refused, and so is sampling that
log-probabilities don't describe. Extensions: `resume: false` (an interrupted completion is returned as it is),
`return_token_ids`, `return_routed_experts`, `chat_template_kwargs`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, cast

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from colocated_rl_member.connection import error_body
from colocated_rl_rollout.rules.chat import (
    SPECIAL_TOKENS,
    Chat,
    Unrenderable,
    as_rendered,
)
from colocated_rl_rollout.rules.tool_calls import FORM, reads_calls_of
from colocated_rl_rollout.tasks.task_wire import Figures, RewardValue

MESSAGES_AT_MOST = 4096
MEMBERS_AT_MOST = 4096  # of one object
PARTS_AT_MOST = 2**19  # objects and lists of one request: an empty one takes 50 times the memory of its text
TOKENS_AT_MOST = 2**31 - 1
CHARACTERS_OF_A_TOKEN = 8  # of what a client sends, twice as many as texts have: what is longer counts for more tokens
SEVERAL = "each completion is a request of its own: send several requests"
SAMPLING = "log-probabilities would not describe how the tokens were drawn"
GRAMMAR = "constrained decoding can't be continued faithfully over a switch"
STRICT = "constrains nothing: a call is what the policy wrote"
ENDS = "a response ends where the policy ends it, at its limit, or at a text in stop"
ABSENT = "it is not offered here"
ONLY: dict[str, tuple[Sequence[Any], str]] = {
    "n": ([1], SEVERAL),
    "best_of": ([1], SEVERAL),
    "top_p": ([1], SAMPLING),
    "top_k": ([-1, 0], SAMPLING),
    "min_p": ([0], SAMPLING),
    "frequency_penalty": ([0], SAMPLING),
    "presence_penalty": ([0], SAMPLING),
    "repetition_penalty": ([1], SAMPLING),
    "logit_bias": ([{}], SAMPLING),
    "response_format": ([{"type": "text"}], GRAMMAR),
    "tool_choice": (["auto", "none"], GRAMMAR),
    "parallel_tool_calls": ([True], GRAMMAR),
    "top_logprobs": ([0], "log-probabilities are of the tokens that were drawn alone"),
    "length_penalty": ([1], SAMPLING),
    "use_beam_search": ([False], SAMPLING),
    "min_tokens": ([0], ENDS),
    "ignore_eos": ([False], ENDS),
    "stop_token_ids": ([[]], ENDS),
    "skip_special_tokens": ([True], ABSENT),
    "spaces_between_special_tokens": ([True], ABSENT),
    "include_stop_str_in_output": ([False], ABSENT),
    "add_generation_prompt": ([True], ABSENT),
    "continue_final_message": ([False], ABSENT),
    "echo": ([False], ABSENT),
    "suffix": ([""], ABSENT),
    "modalities": ([["text"]], ABSENT),
    "service_tier": (["auto", "default"], ABSENT),
    **{name: ([], ABSENT) for name in ("audio", "prediction", "reasoning_effort", "verbosity", "web_search_options")},
    **{name: ([], "use tools") for name in ("functions", "function_call")},
}
"""Parameters of which only these values, and null, are taken, because they ask for nothing; and why no others."""
OF_TEMPLATE: dict[str, tuple[Sequence[Any], str]] = {
    "add_generation_prompt": ([True], "a prompt ends where the policy's answer begins"),
    "messages": ([], "write them in messages of the request"),
    "tools": ([], "write them in tools of the request"),
    "documents": ([], ABSENT),
    **{name: ([], "it is the tokenizer's") for name in SPECIAL_TOKENS},
}
"""The same of what `chat_template_kwargs` may have: these the rendering sets itself."""
INSTEAD = {
    "stop": "a text, or a list of up to 16; of 1 to 256 characters each, not token ids",
    "prompt": "one text, or the token ids of one; several prompts are several requests",
    "logprobs": "true in a chat, 0 in a completion: log-probabilities are of the tokens that were drawn alone",
    "messages": "each message has a role and text, which may be in parts of type text",
    "max_tokens": "a whole number, 1 at least",
    "max_completion_tokens": "a whole number, 1 at least",
    "temperature": "a number from 0 to 2",
    "seed": "a whole number from 0 up",
    "stream_options": "only include_usage can be true",
    "tools": "functions, each with a name",
}
"""A refusal of another value names these."""
WITHOUT_EFFECT = {
    "user", "metadata", "store", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
}  # fmt: skip
"""These parameters are about the caller, not about the completion."""


KNOWN = {*ONLY, *INSTEAD, *WITHOUT_EFFECT, "model", "chat_template_kwargs"}


class RequestRefused(Exception):
    """The request is answered with an error in the shape of OpenAI's API. retry_s: the time until a retry."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_s = retry_s

    @property
    def in_short(self) -> str:
        """Return the reason for anybody but the client, whose own words the message may quote."""
        param = self.param if self.param in KNOWN else None
        return " ".join(filter(None, (str(self.status), self.code, param and f"({param})")))

    def body(self) -> dict[str, Any]:
        return error_body(self.status, str(self), param=self.param, code=self.code)


@dataclass(frozen=True, slots=True, eq=False)
class CompletionRequest:
    """Describes a completion that a client requests. It never changes: each attempt is made from it."""

    prompt: NDArray[np.int32]
    limit: int
    temperature: float
    stops: tuple[str, ...] = ()
    seed: int | None = None
    resume: bool = True
    experts: bool = False  # return the experts that tokens were routed to


@dataclass(frozen=True, slots=True)
class Form:
    """Describes the form of the reply. tools: look for calls. usage: send it in a closing event of a stream.

    asked_bytes: of the request, which is held as long as the reply takes.
    """

    chat: bool
    streams: bool = False
    usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    tools: bool = False
    asked_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Holds what a chat's prompt is rendered from. options: of the template."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


# Lists fail fast: each fault found is kept, and takes a thousand times the memory of its item in the body.
class ContentPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class OpenPart(BaseModel):
    """Members that are not named here are the template's."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(ContentPart):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextPart(ContentPart):
    type: Literal["text"]
    text: str


class ToolFunction(OpenPart):
    name: str = Field(min_length=1, max_length=256)
    strict: bool | None = Field(default=None, description=STRICT)


class Tool(OpenPart):
    type: Literal["function"]
    function: ToolFunction


class GivenFunction(OpenPart):
    name: str
    arguments: str | dict[str, Any] = ""


class GivenCall(OpenPart):
    function: GivenFunction


class GivenMessage(OpenPart):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[GivenCall], Field(fail_fast=True)] | None = None


def _with_what_is_taken_and_not_read(schema: dict[str, Any]) -> None:
    """Add to the schema, for its readers, what a request may have beside the fields of its model."""
    schema["properties"] |= {name: {"enum": [*taken, None], "description": why} for name, (taken, why) in ONLY.items()}
    schema["properties"] |= {name: {"description": "has no effect"} for name in sorted(WITHOUT_EFFECT)}


_Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Body(ContentPart):
    model_config = ConfigDict(json_schema_extra=_with_what_is_taken_and_not_read)

    model: str
    max_tokens: int | None = Field(default=None, ge=1, le=TOKENS_AT_MOST)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16, fail_fast=True)] | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    resume: bool | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    logprobs: object = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatBody(Body):
    messages: list[GivenMessage] = Field(min_length=1, max_length=MESSAGES_AT_MOST, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=TOKENS_AT_MOST)
    logprobs: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_Ids = Annotated[list[int], Field(fail_fast=True)]
_OneText = Annotated[list[str], Field(min_length=1, max_length=1, fail_fast=True)]  # some libraries send lists
_OneOfIds = Annotated[list[_Ids], Field(min_length=1, max_length=1, fail_fast=True)]


class TextBody(Body):
    prompt: str | _Ids | _OneText | _OneOfIds
    logprobs: int | None = Field(default=None, ge=0, le=0)

    @property
    def only_prompt(self) -> str | list[int]:
        """Return the prompt, also where it is in a list of one."""
        is_listed = isinstance(self.prompt, list) and isinstance(next(iter(self.prompt), None), str | list)
        return cast(str | list[int], self.prompt[0] if is_listed else self.prompt)


class SessionReward(ContentPart):
    """This is the reward of a session, and the group in which it is compared: sessions of one task share one."""

    reward: RewardValue
    group: str = Field(min_length=1, max_length=256)
    figures: Figures = Field(
        default={}, description="what else is known of the session, in numbers by name: they reach the batch"
    )


BodyT = TypeVar("BodyT", bound=Body)


def read_body(kind: type[BodyT], text: bytes, *, model: str) -> tuple[BodyT, Form]:
    """Return the parsed request and the form of its reply. Raises RequestRefused."""
    sent = _read_object(text)
    may_call = sent.get("tool_choice") != "none"
    _take_out(ONLY, sent)
    try:
        body = kind.model_validate({name: value for name, value in sent.items() if name not in WITHOUT_EFFECT})
    except pydantic.ValidationError as error:
        raise _refused(error) from error
    if body.model != model:
        message = f"there is no model {_short(body.model)}: this job's is {model}"
        raise RequestRefused(404, message, param="model", code="model_not_found")
    if body.stream_options is not None and not body.stream:
        raise RequestRefused(400, "stream_options are of a stream: with stream: true alone", param="stream_options")
    return body, _form_of(body, may_call=may_call, asked_bytes=len(text))


def _read_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object strictly: readers differ on a name that stands twice, or a number that is none."""

    def once(members: list[tuple[str, Any]]) -> dict[str, Any]:
        read = dict(members)
        if len(members) > MEMBERS_AT_MOST:
            raise RequestRefused(400, f"an object has {len(members)} members, and may have {MEMBERS_AT_MOST}")
        if len(read) < len(members):
            names = [name for name, _ in members]
            twice = next(name for name in names if names.count(name) > 1)
            raise RequestRefused(400, f"{_short(twice)} stands twice in one object: write it once", param=twice[:200])
        return read

    def none(number: str) -> float:
        raise RequestRefused(400, f"the body is not JSON: {number} is no number there")

    if text.count(b"{") + text.count(b"[") > PARTS_AT_MOST:  # also in texts: arguments of calls are read as JSON
        raise RequestRefused(400, f"the body has more than {PARTS_AT_MOST} of {{ and [: make it shorter")
    try:
        sent = json.loads(text, object_pairs_hook=once, parse_constant=none)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"the body is not JSON: {error}"[:300]) from error
    if not isinstance(sent, dict):
        raise RequestRefused(400, "the body is not a JSON object")
    return sent


def read_reward(text: bytes) -> SessionReward:
    """Parse the body of a reward. Raises RequestRefused."""
    try:
        return SessionReward.model_validate(_read_object(text))
    except pydantic.ValidationError as error:
        raise _refused(error) from error


def _take_out(only: Mapping[str, tuple[Sequence[Any], str]], sent: dict[str, Any], place: str = "") -> None:
    """Remove parameters that request nothing from `sent`. Raises RequestRefused."""
    for name, (taken, why) in only.items():
        value = sent.pop(name, None)
        if value is not None and not any(_is_same(value, nothing) for nothing in taken):
            message = f"{place}{name} can't be {_short(value)}: {why}"
            raise RequestRefused(400, message, param=place + name, code="unsupported_value")


def _form_of(body: Body, *, may_call: bool, asked_bytes: int) -> Form:
    return Form(
        chat=isinstance(body, ChatBody),
        streams=bool(body.stream),
        usage=bool(body.stream_options and body.stream_options.include_usage),
        logprobs=body.logprobs is not None and body.logprobs is not False,
        token_ids=bool(body.return_token_ids),
        tools=isinstance(body, ChatBody) and bool(body.tools) and may_call,
        asked_bytes=asked_bytes,
    )


def read_chat(body: ChatBody, chat: Chat) -> Conversation:
    """Return the input from which the prompt is rendered. Raises RequestRefused."""
    _check_stops(body, chat)
    if body.tools and chat.tools_fault:
        raise RequestRefused(400, chat.tools_fault, param="tools", code="unsupported_value")
    if body.tools and not reads_calls_of(chat.tools_template):
        message = f"the model's chat template takes no tools, or has them called in another form than {FORM}"
        raise RequestRefused(400, message, param="tools", code="unsupported_value")
    options = dict(body.chat_template_kwargs or {})
    _take_out(OF_TEMPLATE, options, "chat_template_kwargs.")
    return Conversation(
        tuple(as_rendered(message.model_dump()) for message in body.messages),
        tuple(tool.model_dump(exclude_unset=True) for tool in body.tools) if body.tools else None,
        options,
    )


def prompt_of(conversation: Conversation, chat: Chat) -> tuple[int, ...]:
    """Render the prompt of a conversation. Raises RequestRefused."""
    try:
        text = chat.rendered(conversation.messages, tools=conversation.tools, options=conversation.options)
        return _not_empty(chat.encode(text), "messages")
    except Unrenderable as error:
        raise RequestRefused(
            400, f"the model's chat template refuses this: {error.detail}", param="messages"
        ) from error


def text_prompt_of(body: TextBody, chat: Chat) -> tuple[int, ...]:
    """Return the prompt of a text completion as ids. Raises RequestRefused."""
    _check_stops(body, chat)
    prompt = body.only_prompt
    if isinstance(prompt, list):
        if any(not 0 <= token < chat.vocabulary for token in prompt):
            raise RequestRefused(400, f"prompt has ids outside of 0 to {chat.vocabulary - 1}", param="prompt")
        return _not_empty(tuple(prompt), "prompt")
    try:
        return _not_empty(chat.encode(prompt, special=True), "prompt")
    except Unrenderable as error:
        raise RequestRefused(400, f"the prompt can't be read: {error.detail}", param="prompt") from error


def asked(
    body: Body, prompt: tuple[int, ...], *, limit: int, temperature: float, longest: int | None = None
) -> CompletionRequest:
    """Return the completion that a body requests. limit, temperature: the job's, used where the client sets none.
    longest: prompt and reply together, of a turn of a session. Raises RequestRefused.
    """
    name, wanted = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        if wanted not in (None, body.max_completion_tokens):
            message = (
                f"max_tokens is {wanted}, and max_completion_tokens {body.max_completion_tokens}: send one of them"
            )
            raise RequestRefused(400, message, param="max_tokens", code="invalid_value")
        name, wanted = "max_completion_tokens", body.max_completion_tokens
    if wanted is not None and wanted > limit:
        message = f"{name} is {wanted}, and the job's maxResponseTokens {limit}: ask for at most that"
        raise RequestRefused(400, message, param=name, code="invalid_value")
    if longest is not None:
        limit = min(limit, longest - len(prompt))
        if limit < (1 if wanted is None else wanted):
            message = (
                f"the session's {len(prompt)} tokens leave room for {max(limit, 0)}: it may have maxPromptTokens and "
                f"maxResponseTokens, together {longest}, as every sample that is trained"
            )
            raise RequestRefused(400, message, code="context_length_exceeded")
    return CompletionRequest(
        np.array(prompt, np.int32),
        limit if wanted is None else wanted,
        temperature if body.temperature is None else body.temperature,
        body.stops,
        body.seed,
        body.resume is not False,
        bool(body.return_routed_experts),
    )


def _check_stops(body: Body, chat: Chat) -> None:
    if hidden := next((stop for stop in body.stops if chat.never_in_text(stop)), None):
        message = (
            f"stop can't be {_short(hidden)}: a special token is in no text; those that end a response do so anyway"
        )
        raise RequestRefused(400, message, param="stop", code="unsupported_value")


def _not_empty(ids: tuple[int, ...], param: str) -> tuple[int, ...]:
    if not ids:
        raise RequestRefused(400, f"{param} has no token", param=param)
    return ids


def _refused(error: pydantic.ValidationError) -> RequestRefused:
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    field = errors[0]["loc"][:1]
    first = max((each for each in errors if each["loc"][:1] == field), key=lambda each: len(each["loc"]))
    place = ".".join(str(part) for part in first["loc"] if not _KIND.match(str(part)))[:200]
    if first["type"] == "extra_forbidden":
        message = f"{place} is not a parameter that is known here"
        return RequestRefused(400, message, param=place, code="unknown_parameter")
    instead = f"; write {value}" if (value := INSTEAD.get(str(*field))) else ""
    return RequestRefused(400, f"{place}: {first['msg'][:500]}{instead}", param=place)


_KIND = re.compile(r"(str|int|constrained-str|(list|dict)\[.*\])$")  # names which of several types a value was tried as


def _is_same(value: Any, other: Any) -> bool:
    """Compare values as JSON does: to Python true is 1."""
    return bool(value == other) and isinstance(value, bool) is isinstance(other, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
