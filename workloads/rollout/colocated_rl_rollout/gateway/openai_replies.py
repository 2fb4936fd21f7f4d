"""Write replies to clients of the gateway, in the shapes of OpenAI's API. Pure.

`whole` is a complete answer; `Pieces` is the same in events of a stream. An answer also has what OpenAI's lacks:
`colocated_rl` has the weights versions of its tokens, how many segments it was joined from, and whether it was
interrupted and not resumed, which is `finish_reason` "abort".
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colocated_rl_rollout.gateway.growing_text import CUT_OFF, KEPT, GrowingText, last_words, text_behind
from colocated_rl_rollout.gateway.openai_answers import (
    Extension,
    FinishReason,
    HeldSession,
    Message,
    SessionTrajectory,
    ShownSession,
    ToolCallEntry,
    Usage,
    VersionSpan,
)
from colocated_rl_rollout.gateway.openai_requests import CompletionRequest, Form
from colocated_rl_rollout.gateway.sessions import Session, tokens_of
from colocated_rl_rollout.rules.chat import Chat
from colocated_rl_rollout.rules.samples import NO_TOKENS, Finish, Tokens
from colocated_rl_rollout.rules.tool_calls import BEGIN, read_calls
from colocated_rl_rollout.rules.tool_calls import ToolCall as Call

EXTENSION = "colocated_rl"


@dataclass(frozen=True)
class CompletionReply:
    """Writes one completion. id: unique to it. created: seconds since 1970."""

    form: Form
    asked: CompletionRequest
    model: str
    created: int
    id: str

    # ------------------------------------------------------------------------------------------------- at once
    def whole(self, chat: Chat, tokens: Tokens, finish: Finish | None, extension: Extension) -> dict[str, Any]:
        text, calls = self.read(chat, tokens, finish)
        choice: dict[str, Any] = {"index": 0, "finish_reason": _reason(finish, calls)}
        if self.form.chat:
            choice["message"] = message_of(text, self.called(calls))
        else:
            choice["text"] = text
        choice["logprobs"] = self.logprobs(chat, tokens, 0, 0) if self.form.logprobs else None
        if self.form.token_ids:
            choice["token_ids"] = tokens.ids.tolist()
        return {
            **self.head("chat.completion" if self.form.chat else "text_completion"),
            "choices": [choice],
            "usage": self.usage(tokens),
            **({"prompt_token_ids": self.asked.prompt.tolist()} if self.form.token_ids else {}),
            EXTENSION: extension,
        }

    def read(self, chat: Chat, tokens: Tokens, finish: Finish | None) -> tuple[str, list[Call]]:
        """Return the text up to what stopped it, and tool calls."""
        text = visible(text_behind(chat, self.continued(chat), tokens.ids.tolist()), self.asked.stops)
        return read_calls(text) if self.form.tools and finish is Finish.STOP else (text, [])

    def continued(self, chat: Chat) -> list[int]:
        """Return the end of the text that the reply continues; a message begins by itself."""
        return [] if self.form.chat else last_words(chat, self.asked.prompt[-KEPT:].tolist())

    def called(self, calls: Sequence[Call]) -> list[ToolCallEntry]:
        return [
            {
                "id": f"call_{self.id}_{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(calls)
        ]

    def usage(self, tokens: Tokens) -> Usage:
        prompt, response = len(self.asked.prompt), len(tokens)
        return {"prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response}

    def head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.form.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def logprobs(self, chat: Chat, tokens: Tokens, first: int, offset: int) -> dict[str, Any]:
        """Return log-probabilities of the tokens from `first` on; offset: of their text."""
        ids, logp = tokens.ids[first:].tolist(), tokens.logp[first:].tolist()
        texts = [chat.token_text(token) for token in ids]
        if self.form.chat:
            content = [
                {"token": text, "logprob": value, "bytes": _bytes(text), "top_logprobs": []}
                for text, value in zip(texts, logp, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = list(accumulate(map(len, texts), initial=offset))[:-1]
        return {"tokens": texts, "token_logprobs": logp, "top_logprobs": None, "text_offset": offsets}


class Pieces:
    """Writes a reply in events, as its tokens arrive: text that a later token could still change is held back."""

    def __init__(self, reply: CompletionReply, chat: Chat) -> None:
        self._reply = reply
        self._chat = chat
        form, asked = reply.form, reply.asked
        self._marks = (*asked.stops, *((BEGIN,) if form.tools else ()))
        self._growing = GrowingText(chat, behind=reply.continued(chat))
        self._held = ""  # text that may become a mark
        self._is_marked = False  # all further text is sent at the end
        self._decoded = 0  # tokens
        self._sent = 0  # tokens that were sent
        self._length = 0  # characters that were sent
        self._offset = 0  # of the next token: a text has fewer characters than its tokens that are parts of one
        self._begun = False

    def more(self, tokens: Tokens) -> Iterator[dict[str, Any]]:
        """Return events for the tokens that arrived since the last ones."""
        new, self._decoded = tokens.ids[self._decoded :].tolist(), len(tokens)
        if self._is_marked:
            return
        text = self._held + self._growing.more(new)
        before = visible(text, self._marks)
        self._is_marked = len(before) < len(text)
        piece = before if self._is_marked else settled(text, self._marks)
        self._held = text[len(piece) :]
        if piece and visible(text, self._reply.asked.stops) == text:
            yield from self._event(piece, tokens)

    def rest(self, tokens: Tokens, finish: Finish | None, extension: Extension) -> Iterator[dict[str, Any]]:
        """Return events for the rest, and those that close the stream."""
        text, calls = self._reply.read(self._chat, tokens, finish)
        new = text[self._length :]
        if new or len(tokens) > self._sent or not self._begun:
            yield from self._event(new, tokens)
        if calls:
            called = [{"index": place, **call} for place, call in enumerate(self._reply.called(calls))]
            yield self._chunk({"delta": {"tool_calls": called}})
        closing = self._chunk(self._empty(), finish_reason=_reason(finish, calls))
        yield closing | {EXTENSION: extension}
        if self._reply.form.usage:
            yield {**self._chunk({}), "choices": [], "usage": self._reply.usage(tokens)}

    def _event(self, new: str, tokens: Tokens) -> Iterator[dict[str, Any]]:
        form = self._reply.form
        if form.chat and not self._begun:
            yield self._chunk({"delta": {"role": "assistant", "content": ""}})
        choice: dict[str, Any] = {"delta": {"content": new}} if form.chat else {"text": new}
        if form.logprobs:
            choice["logprobs"] = logprobs = self._reply.logprobs(self._chat, tokens, self._sent, self._offset)
            self._offset += sum(map(len, logprobs.get("tokens", ())))
        if form.token_ids:
            choice["token_ids"] = tokens.ids[self._sent :].tolist()
        event = self._chunk(choice)
        if form.token_ids and not self._begun:
            event["prompt_token_ids"] = self._reply.asked.prompt.tolist()
        self._length, self._sent, self._begun = self._length + len(new), len(tokens), True
        yield event

    def _empty(self) -> dict[str, Any]:
        return {"delta": {}} if self._reply.form.chat else {"text": ""}

    def _chunk(self, choice: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._reply.form.chat else "text_completion"
        return {
            **self._reply.head(kind),
            "choices": [{"index": 0, "logprobs": None, **choice, "finish_reason": finish_reason}],
            **({"usage": None} if self._reply.form.usage else {}),
        }


def listed(session: Session) -> HeldSession:
    """Return the entry of a session in the list of all sessions."""
    return {
        "id": session.id,
        "object": "session",
        "turns": len(session.turns),
        "reward": session.reward,
        "group": session.grouping,
    }


def shown(session: Session) -> ShownSession:
    """Return a session with its trajectory as it would be trained: the path of its newest turn."""
    path = session.turns[-1].path if session.turns else []
    tokens = tokens_of(path, after=len(path[0].context)) if path else NO_TOKENS
    mask = [0] * len(tokens)
    for span in tokens.spans:
        mask[span.start : span.end] = [1] * (span.end - span.start)
    trajectory: SessionTrajectory = {
        "prompt_token_ids": path[0].context.tolist() if path else [],
        "token_ids": tokens.ids.tolist(),
        "loss_mask": mask,
        "logprobs": tokens.logp.tolist(),
        "weight_versions": versions_of(tokens),
    }
    parents = {turn.parent.number for turn in session.turns if turn.parent}
    return {
        **listed(session),
        "paths": len(session.turns) - len(parents),
        "trajectory": trajectory,
    }


def message_of(text: str, calls: Sequence[ToolCallEntry]) -> Message:
    if calls:
        return {"role": "assistant", "content": text or None, "tool_calls": list(calls)}
    return {"role": "assistant", "content": text}


def extension(
    tokens: Tokens, finish: Finish | None, segments: int, experts: NDArray[np.int32] | None = None
) -> Extension:
    """Return the members that OpenAI's answers lack. experts: None where the client does not want them."""
    extension: Extension = {
        "interrupted": finish is None,
        "segments": segments,
        "weight_versions": versions_of(tokens),
    }
    if experts is not None:
        rows, width = experts.shape
        data = base64.b64encode(experts.astype("<i4", copy=False).tobytes()).decode()
        extension["routed_experts"] = {"data": data, "rows": rows, "width": width}
    return extension


def versions_of(tokens: Tokens) -> list[VersionSpan]:
    return [
        {"version": span.version and str(span.version), "start": span.start, "end": span.end} for span in tokens.spans
    ]


def visible(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def settled(text: str, marks: Sequence[str]) -> str:
    """Return the part of a growing text that no later token changes: before a mark, or what may become one."""
    before = visible(text, marks)
    held = 0 if len(before) < len(text) else max((_overlap(text, mark) for mark in marks), default=0)
    return before[: len(before) - held]


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of the text begin the mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def _reason(finish: Finish | None, calls: Sequence[Call]) -> FinishReason:
    if finish is None:
        return "abort"
    if calls:
        return "tool_calls"
    return "stop" if finish is Finish.STOP else "length"


def _bytes(text: str) -> list[int] | None:
    """Return the text's bytes, or None for part of a character, which its text does not have."""
    return None if CUT_OFF in text else list(text.encode())
