"""How segments become one response. Pure.

Owns what is read from an engine's answer, and when a response is at its end. Refuses an answer whose ids,
log-probabilities and versions do not describe the same tokens: padding would train on wrong tokens (H27), so the
segment is dropped and its sample goes on from what it had.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from colocated_rl_api.ladder import WeightVersion
from colocated_rl_rollout.samples import NO_TOKENS, Finish, Span, Tokens


class GarbledAnswer(ValueError):
    """The engine's answer contradicts itself or lacks a part. Nothing of it is used."""


class Ending(StrEnum):
    """Why an engine attempt ended, whatever the engine calls it."""

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"  # by a switch, or with its engine


def read_answer(answer: Mapping[str, Any]) -> tuple[Tokens, Ending]:
    """Tokens of one engine attempt and why it ended, from the body of an answer with status 200.

    Raises GarbledAnswer.
    """
    try:
        meta = answer["meta_info"]
        ids: Sequence[int] = answer.get("output_ids") or ()
        logprobs: Sequence[Sequence[Any]] = meta.get("output_token_logprobs") or ()
        if [int(entry[1]) for entry in logprobs] != list(ids):
            raise GarbledAnswer(f"{len(ids)} ids, {len(logprobs)} log-probabilities, or not of the same tokens")
        logp = np.fromiter((entry[0] for entry in logprobs), np.float32, len(logprobs))
        tokens = Tokens(np.asarray(ids, np.int32), logp, _read_spans(meta, len(ids))) if ids else NO_TOKENS
        ending = _read_ending(meta["finish_reason"])
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise GarbledAnswer(f"a part is missing or of another shape: {error!r}") from error
    except ValueError as error:
        raise error if isinstance(error, GarbledAnswer) else GarbledAnswer(str(error)) from error
    if ending is not Ending.INTERRUPTED and not len(tokens):
        raise GarbledAnswer(f"it ended with {ending} before its first token")
    if not np.isfinite(tokens.logp).all() or (tokens.logp > 1e-4).any():
        raise GarbledAnswer("a log-probability is not a finite number of at most 0")
    return tokens, ending


def _read_spans(meta: Mapping[str, Any], length: int) -> tuple[Span, ...]:
    """Spans of a finished answer, or the one version that a chunk names: weights change only while nothing runs."""
    listed = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": length}]
    spans = tuple(
        Span(WeightVersion.parse(span["version"]), span["start"], span["end"])
        for span in listed
        if span["end"] > span["start"]
    )
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != length:
        raise GarbledAnswer(f"weight versions cover {ends[-1]} tokens of {length}, or with a gap")
    return spans


def _read_ending(reason: Mapping[str, Any] | None) -> Ending:
    if reason is None:  # the last state before an engine was lost
        return Ending.INTERRUPTED
    match reason["type"]:
        case "stop":
            return Ending.STOP
        case "length":
            return Ending.LENGTH
        case "abort" | "aborted":
            return Ending.INTERRUPTED
        case other:
            raise GarbledAnswer(f"finish reason {other!r} is not known")


def join(so_far: Tokens, segment: Tokens) -> Tokens:
    """One response from what was there and what an attempt added; neighbouring spans of one version become one."""
    if not len(segment):
        return so_far
    if not len(so_far):
        return segment
    offset = len(so_far)
    spans = list(so_far.spans)
    for span in segment.spans:
        if span.version == spans[-1].version:
            spans[-1] = Span(span.version, spans[-1].start, span.end + offset)
        else:
            spans.append(Span(span.version, span.start + offset, span.end + offset))
    return Tokens(np.concatenate([so_far.ids, segment.ids]), np.concatenate([so_far.logp, segment.logp]), tuple(spans))


def finish_of(tokens: Tokens, ending: Ending, *, limit: int, end_ids: Collection[int]) -> Finish | None:
    """How a response has ended, if it has, when the attempt that brought its last tokens ended as `ending`.

    An abort hides an end in its last step (H49), and the limit hides an end token at the limit.
    """
    if not len(tokens):
        return None
    if ending is Ending.STOP or int(tokens.ids[-1]) in end_ids:
        return Finish.STOP
    return Finish.LENGTH if ending is Ending.LENGTH or len(tokens) >= limit else None


def remaining(tokens: Tokens, *, limit: int) -> int:
    """Tokens that the next attempt may add, so that the limit holds over all attempts. Tokens."""
    return limit - len(tokens)
