"""These rules join segments into one response, the same way for rollout samples and for clients' turns. Pure.

The module reads tokens from an engine's answer and decides when a response has ended and when no further attempt is
made. It refuses an answer whose ids, log-probabilities and versions do not describe the same tokens: padding would
train on wrong tokens (H27), so the segment is dropped and its sample resumes from the tokens it had.
"""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.rules.samples import (
    NO_TOKENS,
    Finish,
    Span,
    Tokens,
)

ATTEMPTS_AT_MOST = 64  # of one response: each prefills again what is there (H34)
IDLE_ATTEMPTS_AT_MOST = 16  # in a row without a token (H6)
RESENT_AT_MOST = ATTEMPTS_AT_MOST // 2  # times its limit: what so many attempts resend of a response that grows evenly
NO_EXPERTS = np.empty((0, 0), np.int32)


class GarbledAnswer(ValueError):
    """The engine's answer contradicts itself or lacks a part. None of it is used."""


class UnversionedAnswer(GarbledAnswer):
    """The engine names no weight version of ours for some tokens, and the job does not accept such tokens."""


def read_answer(
    answer: Mapping[str, Any],
    *,
    columns: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None,
    accepts_unversioned: bool = False,
) -> tuple[Tokens, Finish | None]:
    """Read the tokens of one engine attempt, and how it finished, from the body of an answer with status 200.

    None: it was interrupted, by a switch or with its engine. columns: ids and log-probabilities, where the answer came
    in columns. accepts_unversioned: also read tokens for which the engine names no weight version of ours; their spans
    have None. Raises UnversionedAnswer, GarbledAnswer.
    """
    try:
        meta = answer["meta_info"]
        ids, logp = columns or _read_listed(answer.get("output_ids") or (), meta.get("output_token_logprobs") or ())
        tokens = Tokens(ids, logp, _read_spans(meta, len(ids))) if len(ids) else NO_TOKENS
        if tokens.unversioned and not accepts_unversioned:
            raise UnversionedAnswer(
                f"{tokens.unversioned} of {len(ids)} tokens have no weight version of the job, as after an update by "
                "hand: delete the engine's pod, so that it starts on the job's weights, or make a job with "
                "rollout.unversionedTokens: Accept"
            )
        finish = _read_finish(meta["finish_reason"])
    except GarbledAnswer:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError, ValueError) as error:  # may quote it
        raise GarbledAnswer(f"a part is missing or of another shape: {type(error).__name__}") from error
    if finish is not None and not len(tokens):
        raise GarbledAnswer(f"it ended with {finish} before its first token")
    if (tokens.ids < 0).any():  # an engine that overlaps its steps puts such ids in the places of tokens to come
        raise GarbledAnswer("a token id is below 0")
    if not np.isfinite(tokens.logp).all() or (tokens.logp > 1e-4).any():
        raise GarbledAnswer("a log-probability is not a finite number of at most 0")
    return tokens, finish


def _read_listed(
    ids: Sequence[int], logprobs: Sequence[Sequence[Any]]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    if [int(entry[1]) for entry in logprobs] != list(ids):
        raise GarbledAnswer(f"{len(ids)} ids, {len(logprobs)} log-probabilities, or not of the same tokens")
    return np.asarray(ids, np.int32), np.fromiter((entry[0] for entry in logprobs), np.float32, len(logprobs))


def read_preemptions(answer: Mapping[str, Any]) -> int:
    """Return how often the engine set the attempt aside for want of cache, and prefilled it again; 0: it does not say.

    verl calls it num_preempted, SGLang num_retractions.
    """
    count = answer["meta_info"].get("num_retractions")
    return max(0, count) if isinstance(count, int) else 0


def read_experts(answer: Mapping[str, Any], *, rows: int, width: int = 0) -> NDArray[np.int32]:
    """Read the experts of `rows` tokens: [rows, layers * experts], empty where the answer has none.

    width: how many each earlier token has, 0 without earlier tokens. Raises GarbledAnswer.
    """
    encoded = answer["meta_info"].get("routed_experts")
    if encoded is None:
        return NO_EXPERTS
    try:
        ids = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4")
    except (TypeError, ValueError) as error:
        raise GarbledAnswer("its routed experts are no numbers") from error
    if not rows or not ids.size or ids.size % rows:
        raise GarbledAnswer(f"{ids.size} numbers are no routed experts of {rows} tokens")
    if width and ids.size != rows * width:
        raise GarbledAnswer(f"tokens have {ids.size // rows} routed experts each, and those before them {width}")
    return ids.reshape(rows, ids.size // rows)


def join_experts(so_far: NDArray[np.int32], more: NDArray[np.int32]) -> NDArray[np.int32]:
    """Append the rows that an attempt added to those from before: only new rows were asked for (H28)."""
    parts = [rows for rows in (so_far, more) if len(rows)]
    return np.concatenate(parts) if parts else NO_EXPERTS


def _read_spans(meta: Mapping[str, Any], length: int) -> tuple[Span, ...]:
    """Read the spans of an answer, or the one version that a chunk names: weights change only while nothing runs."""
    listed = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": length}]
    spans = tuple(
        Span(_read_version(span["version"]), int(span["start"]), int(span["end"]))
        for span in listed
        if span["end"] != span["start"]
    )
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != length:
        raise GarbledAnswer(f"weight versions cover {ends[-1]} tokens of {length}, or with a gap")
    return spans


def _read_version(text: Any) -> WeightVersion | None:
    """Read a version; None where the engine has none, or one of its own such as "default" (H22)."""
    if text is None:
        return None
    if not isinstance(text, str):
        raise GarbledAnswer("a weight version is no text")
    try:
        return WeightVersion.parse(text)
    except ValueError:
        return None


def _read_finish(reason: Mapping[str, Any] | None) -> Finish | None:
    if reason is None:  # the last state before an engine was lost
        return None
    match reason["type"]:
        case "stop":
            return Finish.STOP
        case "length":
            return Finish.LENGTH
        case "abort" | "aborted":
            return None
        case _:
            raise GarbledAnswer("its finish reason is not known")


def join(so_far: Tokens, segment: Tokens) -> Tokens:
    """Join a response with the segment that an attempt added; neighbouring spans of one version become one.

    Tokens without a version stay in spans of their own.
    """
    return join_all([so_far, segment])


def join_all(segments: Iterable[Tokens]) -> Tokens:
    """Join any number of segments as `join` does."""
    parts = [segment for segment in segments if len(segment)]
    if not parts:
        return NO_TOKENS
    spans: list[Span] = []
    offset = 0
    for segment in parts:
        for span in segment.spans:
            last = spans[-1] if spans else None
            if last and last.version == span.version and last.end == span.start + offset:
                spans[-1] = Span(span.version, last.start, span.end + offset)
            else:
                spans.append(Span(span.version, span.start + offset, span.end + offset))
        offset += len(segment)
    match parts:
        case [only]:  # as of most responses: nothing is copied
            ids, logp = only.ids, only.logp
        case _:
            ids, logp = np.concatenate([part.ids for part in parts]), np.concatenate([part.logp for part in parts])
    return Tokens(ids, logp, tuple(spans))


def finish_of(tokens: Tokens, attempt: Finish | None, *, limit: int, end_ids: Collection[int]) -> Finish | None:
    """Return how a response has finished, or None; attempt: how the one finished that brought its last tokens.

    An abort hides an end in its last step (H49), and the limit hides an end token at the limit.
    """
    if not len(tokens):
        return None
    if attempt is Finish.STOP or int(tokens.ids[-1]) in end_ids:
        return Finish.STOP
    return Finish.LENGTH if attempt is Finish.LENGTH or len(tokens) >= limit else None


def remaining(tokens: Tokens, *, limit: int) -> int:
    """Return how many tokens the next attempt may add, so that the limit holds over all attempts."""
    return limit - len(tokens)


def exhausted(*, attempts: int, idle_attempts: int, resent: int, limit: int) -> tuple[str, str] | None:
    """Return reason and message when an unfinished response gets no further attempt, else None.

    resent: its tokens that were sent to attempts, each counted once per attempt. limit: of the response. Both in
    tokens.
    """
    if idle_attempts >= IDLE_ATTEMPTS_AT_MOST:
        return "NoProgress", f"{idle_attempts} attempts brought no token"
    if attempts >= ATTEMPTS_AT_MOST:
        return "TooManyAttempts", f"not ended after {attempts} attempts"
    if resent >= RESENT_AT_MOST * limit:
        return "TooManyTokensResent", f"not ended after {resent} tokens were sent again, with a limit of {limit}"
    return None


def cut(tokens: Tokens, length: int) -> Tokens:
    """Return the first `length` tokens."""
    spans = tuple(Span(span.version, span.start, min(span.end, length)) for span in tokens.spans if span.start < length)
    return Tokens(tokens.ids[:length], tokens.logp[:length], spans)


def stopped_at(ids: NDArray[np.int32], stops: Sequence[str], text_of: Callable[[list[int]], str]) -> int | None:
    """Return the number of tokens up to the end of the first stop string, or None without one.

    An engine looks for stop strings only in the tokens it generated: it misses one that spans two attempts. It stops
    at those that it finds: so the last tokens are looked at first, because each look decodes all before it.
    """

    def is_stopped(length: int) -> bool:
        text = text_of(ids[:length].tolist())
        return any(stop in text for stop in stops)

    if not stops or not is_stopped(len(ids)):
        return None
    last = 1
    while last < len(ids) and is_stopped(len(ids) - last):
        last *= 2
    return bisect_left(range(len(ids)), True, lo=max(0, len(ids) - last), key=is_stopped)
