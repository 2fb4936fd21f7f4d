"""Define the shapes of the gateway's answers: OpenAI's, and an extension (`colocated_rl`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # the standard library's can't be read by pydantic before Python 3.12

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
TokenIds = Annotated[list[int], Field(description="with `return_token_ids` alone")]
Nothing = Annotated[list[Any], Field(max_length=0)]


class VersionSpan(TypedDict):
    """Tokens [start, end) were made by these weights; those in no span the policy did not write."""

    version: Annotated[str | None, Field(description="STEP-LINEAGE; null: the engine named none of the job's")]
    start: int
    end: int


class RoutedExperts(TypedDict):
    """These are the experts that each token of prompt and response went to, in each layer."""

    data: Annotated[str, Field(description="Base64 of int32, little-endian: rows times width, as the engine has them")]
    rows: Annotated[
        int, Field(description="a row for each token but the last; fewer where an engine was lost before it sent more")
    ]
    width: Annotated[int, Field(description="layers times experts of a token")]


class Extension(TypedDict):
    """The extension adds what OpenAI's answers lack. In a stream the last event with a choice has it."""

    interrupted: Annotated[bool, Field(description="cut off, and not resumed: `finish_reason` is `abort`")]
    segments: Annotated[int, Field(description="the pieces it was joined from")]
    weight_versions: list[VersionSpan]
    routed_experts: NotRequired[Annotated[RoutedExperts, Field(description="with `return_routed_experts` alone")]]


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CalledFunction(TypedDict):
    name: str
    arguments: Annotated[str, Field(description="JSON")]


class ToolCallEntry(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallPiece(ToolCallEntry):
    index: int


class Message(TypedDict):
    role: Literal["assistant"]
    content: str | None
    tool_calls: NotRequired[list[ToolCallEntry]]


class MessagePiece(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallPiece]]


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: Annotated[list[int] | None, Field(description="null of a part of a character")]
    top_logprobs: Nothing


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None
    text_offset: list[int]


class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: NotRequired[TokenIds]


class ChatPiece(TypedDict):
    index: int
    delta: MessagePiece
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[TokenIds]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    token_ids: NotRequired[TokenIds]


class TextPiece(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[TokenIds]


class _Head(TypedDict):
    id: str
    created: Annotated[int, Field(description="seconds since 1970")]
    model: str
    prompt_token_ids: NotRequired[TokenIds]


class _Whole(_Head):
    usage: Usage
    colocated_rl: Extension


class _Event(_Head):
    usage: NotRequired[
        Annotated[Usage | None, Field(description="with `stream_options.include_usage`: in a closing event, else null")]
    ]
    colocated_rl: NotRequired[Extension]


class ChatCompletion(_Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(_Event):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatPiece]


class TextCompletion(_Whole):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class TextCompletionChunk(_Event):
    object: Literal["text_completion"]
    choices: list[TextPiece]


class ModelCard(TypedDict):
    id: Annotated[str, Field(description="the job's name")]
    object: Literal["model"]
    created: int
    owned_by: str


class Models(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class HeldSession(TypedDict):
    id: str
    object: Literal["session"]
    turns: int
    reward: Annotated[float | None, Field(description="null until it is given, which ends the session")]
    group: str | None


class HeldSessions(TypedDict):
    object: Literal["list"]
    group_size: Annotated[int, Field(description="sessions with a reward that make a group")]
    data: list[HeldSession]


class SessionTrajectory(TypedDict):
    """Holds the path of the newest turn, as it would be trained. All but the prompt are of one length."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    loss_mask: Annotated[list[int], Field(description="0 for what the policy did not write")]
    logprobs: list[float]
    weight_versions: list[VersionSpan]


class ShownSession(HeldSession):
    paths: int
    trajectory: SessionTrajectory


class RewardedSession(TypedDict):
    id: str
    object: Literal["session"]
    reward: float
    group: str


class DeletedSession(TypedDict):
    id: str
    object: Literal["session"]
    deleted: Literal[True]


class ErrorDetail(TypedDict):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    error: ErrorDetail
