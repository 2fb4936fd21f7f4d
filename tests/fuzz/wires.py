"""Messages between operator, members and trainers, and what people write for the operator."""

from __future__ import annotations

import json
import math
from itertools import product
from typing import Any

from pydantic import ValidationError

from colocated_rl_agent.runner.runner_link import read_message
from colocated_rl_api.facts import PodFacts
from colocated_rl_api.ladder import ladder_for
from colocated_rl_api.member_wire import (
    Hello,
    JobFile,
    Keys,
    PodTarget,
    Refusal,
    RolloutTarget,
    from_member,
    read_from_operator,
)
from colocated_rl_api.rungs import Placement, WeightVersion
from colocated_rl_api.trainer_wire import TrainerStatus
from colocated_rl_api.wire import Wire
from colocated_rl_cli.manifest.manifest import judge
from colocated_rl_cli.support.scrubbing import scrub, scrub_text
from colocated_rl_member.fence import EpochFence
from colocated_rl_operator.clients.errors import ContractBroken
from colocated_rl_operator.clients.link import read_frame

SECRET = "hunter2x9"
LADDERS = [ladder_for(placement, scores=scores) for placement, scores in product(Placement, (False, True))]


def target(data: bytes) -> None:
    """A message is unreadable or says the same after another journey; a target is refused or admitted."""
    try:
        read = read_from_operator(data)
    except ValidationError:
        return
    assert read == read_from_operator(read.model_dump_json(by_alias=True))
    if isinstance(read, Keys):
        return
    pods = EpochFence(PodTarget, highest_epoch=7, remember_epoch=lambda epoch: None)
    admitted = pods.admit(read)
    assert isinstance(admitted, Refusal) is (isinstance(read, RolloutTarget) or read.epoch < 7)
    assert pods.highest_epoch == (read.epoch if isinstance(admitted, PodTarget) else 7)


def member_message(data: bytes) -> None:
    """A message of a member is unreadable or stands on some rung; it has no number that a status could not have."""
    try:
        read = from_member.validate_json(data)
    except ValidationError:
        return
    _travels(read)
    if isinstance(read, PodFacts):
        for ladder in LADDERS:
            ladder.standing(read, WeightVersion(1, 1))
    elif isinstance(read, Hello):
        str(read)


def member_frames(data: bytes) -> None:
    """Check that a member's bytes give the same frames in whichever pieces they come, or break the contract."""
    read: list[list[bytes | None]] = []
    for piece in (len(data) or 1, 3):
        frames: list[bytes | None] = []
        rest, at = b"", 0
        for begin in range(0, len(data), piece):
            rest += data[begin : begin + piece]
            try:
                while (frame := read_frame(rest, at)) is not None:
                    frames.append(frame.payload)
                    assert at < frame.end <= len(rest)
                    at = frame.end
            except ContractBroken:
                frames.append(None)
                break
        read.append(frames)
    assert read[0] == read[1]


def runner_line(data: bytes) -> None:
    try:
        read = read_message(data)
    except (ValueError, RecursionError):
        return
    if isinstance(read, dict):
        assert isinstance(read["id"], int)
    else:
        assert read == read_message(read.model_dump_json().encode())


def trainer_status(data: bytes) -> None:
    try:
        read = TrainerStatus.model_validate_json(data)
    except ValidationError:
        return
    _travels(read)


def job_file(data: bytes) -> None:
    try:
        read = JobFile.read(data)
    except ValidationError:
        return
    assert read == JobFile.read(read.model_dump_json(by_alias=True).encode())


def job_manifest(data: bytes) -> None:
    """A file of manifests is judged, whatever is in it, with places that are in it."""
    text = data.decode(errors="replace")
    for fault in judge(text).faults:
        assert 1 <= fault.place.line <= text.count("\n") + text.count("\r") + text.count("\x85") + 3
        fault.message.encode()


def support_text(data: bytes) -> None:
    """Whatever a log holds before it, a secret with a name is not in a support archive."""
    text = data.decode(errors="replace").replace(SECRET, "")
    assert SECRET not in scrub_text(f"{text}\npassword: {SECRET}\n")
    json.dumps(scrub({"log": text, "password": SECRET}))


def _travels(message: Wire) -> None:
    again = json.loads(message.model_dump_json(by_alias=True))
    assert message == type(message).model_validate(again)
    for number in _numbers(again):
        assert math.isfinite(number)


def _numbers(value: Any) -> list[float]:
    match value:
        case dict():
            return [number for part in value.values() for number in _numbers(part)]
        case list():
            return [number for part in value for number in _numbers(part)]
        case float():
            return [value]
        case _:
            return []
