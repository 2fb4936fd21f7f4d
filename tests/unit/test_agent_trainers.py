"""Ranks that end while others are being started, or while nobody hears of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from colocated_rl_agent.drivers.base import NotRetriable
from colocated_rl_agent.files.journal import Journal
from colocated_rl_agent.lanes.trainers import Trainers
from colocated_rl_agent.metrics import AgentMetrics
from colocated_rl_agent.planner.views import trainer_name
from colocated_rl_agent.runner.runner_link import KILLED, ChildExited, ChildStatus, RunnerEvent, RunnerLink
from colocated_rl_agent.settings import AgentSettings, Directories
from colocated_rl_api import names
from colocated_rl_api.member_wire import Rendezvous
from colocated_rl_member.server import Ports
from fakes.pod import make_job

HELLO = {"event": "hello", "protocol": 1, "runner": "r", "terminating": False, "children": []}
RENDEZVOUS = Rendezvous(address="127.0.0.1", port=1, world_size=2)
TAIL = ("Traceback (most recent call last):", '  File "loop.py", line 7', "ValueError: of a sample")


def incarnation(rank: int) -> str:
    return f"i-{trainer_name(rank)}"


def exited(rank: int) -> dict[str, Any]:
    return {
        "event": "exited", "name": trainer_name(rank), "incarnation": incarnation(rank), "code": 1, "tail": [],
        "killed": False,
    }  # fmt: skip


def status(rank: int, *, code: int | None = None, killed: bool = False) -> ChildStatus:
    """Return the newest process of a rank, which runs if there is no code."""
    return ChildStatus(
        name=trainer_name(rank),
        incarnation=incarnation(rank),
        running=code is None,
        code=code,
        tail=TAIL if code is not None else (),
        killed=killed,
    )


@dataclass
class LaneOfTwo:
    """The lane of two ranks, and the runner that starts them. ends: exits that it tells with the answer to a start."""

    trainers: Trainers
    failed: list[tuple[str, str]]
    ends: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    async def attach(self, *children: ChildStatus) -> None:
        await self.trainers.attach({child.name: child for child in children})

    @property
    def alive(self) -> list[bool]:
        return [view.is_alive for view in self.trainers.views]


@pytest.fixture
async def lane(tmp_path: Path) -> AsyncIterator[LaneOfTwo]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(HELLO).encode() + b"\n")
        while line := await reader.readline():
            asked = json.loads(line)
            told = [{"id": asked["id"], "ok": True, "incarnation": f"i-{asked['name']}"}]
            told += it.ends.get(asked["name"], [])
            writer.write(b"".join(json.dumps(each).encode() + b"\n" for each in told))
        writer.close()
        served.set()

    directories = Directories.below(tmp_path)
    for directory in (directories.state, directories.sockets):
        directory.mkdir(parents=True)
    settings = AgentSettings(
        "p", names.PodUid("u"), 0, make_job(gpus={"count": 2}), directories, Ports(), engine_port=30000
    )
    attached, served = asyncio.Event(), asyncio.Event()

    def on_event(event: RunnerEvent) -> None:
        if isinstance(event, ChildExited):
            it.trainers.exited(event)
        attached.set()

    runner = RunnerLink(settings.runner_socket, on_event)
    journal = Journal(directories.state)
    failed: list[tuple[str, str]] = []
    trainers = Trainers(
        settings,
        runner=runner,
        journal=journal,
        metrics=AgentMetrics(CollectorRegistry()),
        changed=lambda: None,
        failed=lambda reason, message: failed.append((reason, message)),
        made_good=lambda reason: None,
    )
    it = LaneOfTwo(trainers, failed)
    async with await asyncio.start_unix_server(serve, settings.runner_socket):
        link = asyncio.create_task(runner.run())
        await attached.wait()
        yield it
        link.cancel()
        await served.wait()
    await trainers.close()
    journal.close()


async def test_no_rank_that_ends_before_the_answer_to_its_start_is_taken_for_alive(lane: LaneOfTwo) -> None:
    """Another rank's end, read in the same turn, made the agent forget it: no runner says twice that a child is gone,
    and the pod's trainers were killed again and again without an end.
    """
    lane.ends[trainer_name(1)] = [exited(1), exited(0)]
    await lane.trainers.start(1, RENDEZVOUS)
    assert [False, False] == lane.alive


async def test_last_words_of_a_rank_that_ends_while_the_runner_is_not_connected_are_reported(lane: LaneOfTwo) -> None:
    await lane.trainers.start(1, RENDEZVOUS)
    await lane.attach(status(0, code=1), status(1))
    assert [False, True] == lane.alive
    assert [("TrainerDied", f"rank 0 ended with code 1; last words: {' | '.join(TAIL)}")] == lane.failed
    await lane.attach(status(0, code=1), status(1))
    assert 1 == len(lane.failed), "once"


async def test_rank_that_is_known_to_have_ended_stays_what_it_was_when_the_runner_is_connected_again(
    lane: LaneOfTwo,
) -> None:
    """The reason why it would end again was forgotten: the job went on, up to backoffLimit, instead of failing."""
    await lane.trainers.start(1, RENDEZVOUS)
    lane.trainers._refused(0, "train", NotRetriable("the gradient is nan"))
    await lane.attach(status(0, code=1), status(1))
    first = lane.trainers.views[0]
    assert (1, 1, "the gradient is nan") == (first.lineage, first.exit_code, first.not_retriable)
    await lane.attach(status(0, code=1), status(1))
    await lane.attach()
    assert first == lane.trainers.views[0]
    assert KILLED == lane.trainers.views[1].exit_code, "it ended with its container"


async def test_rank_of_which_no_record_is_known_is_gone_with_its_container(lane: LaneOfTwo) -> None:
    """The answer to its start was lost. The agent stopped it again and again, though nothing ran any more."""
    await lane.attach(status(0))
    assert [True, False] == lane.alive
    assert "not known to this agent's journal" in (lane.trainers.views[0].broken or "")
    await lane.attach()
    assert [False, False] == lane.alive
