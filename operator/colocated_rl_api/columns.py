"""An answer in columns: tokens and their log-probabilities as arrays, between a gate and the rollout controller.

JSON takes 44 bytes for a token with its log-probability, and its parser makes a list of three objects of it; at a
switch, all engines answer at once. A caller that sends `HEADER: COLUMNS` gets its whole answer in this form, with
content type CONTENT_TYPE, if it has a log-probability for each token; if not, or from an older gate, in JSON:

    number of tokens, bytes of the head      two unsigned 32-bit integers
    head                                     the engine's answer as JSON, without text, ids and log-probabilities
    ids                                      a 32-bit integer for each token
    log-probabilities                        a 32-bit float for each token, nats

All numbers are little-endian.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

CONTENT_TYPE = "application/vnd.colocate.columns"
HEADER, COLUMNS = "Colocate-Answer", "columns"
HEADER_READ = HEADER.lower().encode()  # as a parser gives it
_SIZES = struct.Struct("<II")
_ITEM_BYTES = 4


class Columns(NamedTuple):
    """Columns are an answer that was read. ids: int32. logp: float32. Both are little-endian bytes."""

    head: dict[str, Any]
    ids: memoryview
    logp: memoryview


def pack(answer: Mapping[str, Any]) -> bytes | None:
    """Return the engine's answer in columns; None if it has not one log-probability for each of its tokens."""
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        return None
    ids, scored = answer.get("output_ids"), meta.get("output_token_logprobs")
    try:
        logps, tokens, *_ = zip(*scored, strict=True) if scored else ((), ())
        if list(tokens) != ids:
            return None
        columns = _little_endian(array("i", tokens)), _little_endian(array("f", logps))
    except (TypeError, ValueError, OverflowError):  # what is no number, or has another shape: the reader's to judge
        return None
    meta = {name: value for name, value in meta.items() if name != "output_token_logprobs"}
    rest = {name: value for name, value in answer.items() if name not in ("text", "output_ids")}
    head = to_json(rest | {"meta_info": meta})
    return b"".join((_SIZES.pack(len(tokens), len(head)), head, *columns))


def unpack(data: bytes | bytearray) -> Columns:
    """Read an answer in columns. Raises ValueError for anything else."""
    view = memoryview(data)
    if len(view) < _SIZES.size:
        raise ValueError("it has no sizes")
    tokens, size = _SIZES.unpack_from(view)
    ids = _SIZES.size + size
    logp = ids + tokens * _ITEM_BYTES
    if len(view) != logp + tokens * _ITEM_BYTES:
        raise ValueError(f"{len(view)} bytes are not {tokens} tokens behind a head of {size}")
    head = from_json(bytes(view[_SIZES.size : ids]))
    if not isinstance(head, dict):
        raise ValueError("its head is no object")
    return Columns(head, view[ids:logp], view[logp:])


def _little_endian(column: array[Any]) -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()
