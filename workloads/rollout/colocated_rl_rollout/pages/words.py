"""Turn the tokens of a sample into words: its prompt, its response, and which weights drew which part of that."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from colocated_rl_rollout.gateway.growing_text import Decoder, GrowingText
from colocated_rl_rollout.store.transcripts import Transcript

CONTEXT = -2  # where a token has -1 of weights without a version, and otherwise their step


class SpanShown(TypedDict):
    """Shows tokens of a response that follow one another and that the same weights drew."""

    step: Annotated[int | None, Field(description="of the weights; null: of no version of the job, or not trained")]
    trained: Annotated[bool, Field(description="written by the policy, and not too old to be trained")]
    tokens: int
    text: Annotated[str, Field(description="all of them together are the response")]


def in_words(transcript: Transcript, decoder: Decoder) -> dict[str, Any]:
    """Return `prompt`, `response` and `spans` of a sample, as far as it has tokens."""
    return {
        "prompt": decoder.text(transcript.prompt.tolist()) if len(transcript.prompt) else None,
        "response": decoder.text(transcript.response.tolist()) if len(transcript.response) else None,
        "spans": spans(transcript, decoder),
    }


def spans(transcript: Transcript, decoder: Decoder) -> list[SpanShown]:
    """Return the response in pieces, each by the same weights.

    A character whose bytes are of two pieces is in the second; text that a decoder holds back is in the last.
    """
    if not len(transcript.response):
        return []
    drawn_by = np.where(transcript.written, transcript.token_step, CONTEXT)
    ends = [*(np.flatnonzero(np.diff(drawn_by)) + 1).tolist(), len(drawn_by)]
    growing, found = GrowingText(decoder), list[SpanShown]()
    for start, end in zip([0, *ends], ends, strict=False):
        step = int(drawn_by[start])
        found.append(
            {
                "step": step if step >= 0 else None,
                "trained": step != CONTEXT,
                "tokens": end - start,
                "text": growing.more(transcript.response[start:end].tolist()),
            }
        )
    shown = sum(len(each["text"]) for each in found)
    found[-1]["text"] += decoder.text(transcript.response.tolist())[shown:]
    return found
