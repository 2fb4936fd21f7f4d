"""All targets, by the name of their corpus. They are imported when one is asked for: some take seconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

CORPUS = Path(__file__).parent / "corpus"
Target = Callable[[bytes], None]


class Place(NamedTuple):
    """A Place says where a target is defined, and which of our packages are watched for new paths through them."""

    module: str
    function: str
    packages: tuple[str, ...]
    longest: int = 4096  # bytes of an input


_API, _AGENT, _ROLLOUT, _TRAINER = (
    "colocated_rl_api",
    "colocated_rl_agent",
    "colocated_rl_rollout",
    "colocated_rl_trainer",
)
PLACES = {
    "gate_request": Place("fuzz.gate", "gate_request", (_AGENT,)),
    "gate_body": Place("fuzz.gate", "gate_body", (_AGENT,)),
    "engine_answer": Place("fuzz.gate", "engine_answer", (_AGENT,)),
    "generated": Place("fuzz.rollout", "generated", (_ROLLOUT,)),
    "chat_request": Place("fuzz.rollout", "chat_request", (_ROLLOUT,)),
    "chat_template": Place("fuzz.rollout", "chat_template", (_ROLLOUT,)),
    "task_line": Place("fuzz.rollout", "task_line", (_ROLLOUT,)),
    "rows_file": Place("fuzz.rollout", "rows_file", (_ROLLOUT,), 16384),
    "rows_table": Place("fuzz.rollout", "rows_table", (_ROLLOUT,)),
    "target": Place("fuzz.wires", "target", (_API, "colocated_rl_member")),
    "member_message": Place("fuzz.wires", "member_message", (_API,)),
    "member_frames": Place("fuzz.wires", "member_frames", ("colocated_rl_operator.clients",)),
    "runner_line": Place("fuzz.wires", "runner_line", ("colocated_rl_agent.runner",)),
    "trainer_status": Place("fuzz.wires", "trainer_status", (_API,)),
    "job_manifest": Place("fuzz.wires", "job_manifest", ("colocated_rl_cli",)),
    "job_file": Place("fuzz.wires", "job_file", (_API,)),
    "support_text": Place("fuzz.wires", "support_text", ("colocated_rl_cli",), 16384),
    "journal": Place("fuzz.files", "journal", (_AGENT,)),
    "export": Place("fuzz.files", "export", (_AGENT, _TRAINER)),
    "batch_shard": Place("fuzz.batch", "batch_shard", (_TRAINER,), 16384),
}


def load(name: str) -> Target:
    place = PLACES[name]
    target: Target = getattr(importlib.import_module(place.module), place.function)
    return target


def corpus(name: str) -> Iterator[Path]:
    yield from sorted((CORPUS / name).iterdir())
