"""Ranks that end while others are being started."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from colocated_rl_agent.files.journal import Journal
from colocated_rl_agent.lanes.trainers import Trainers
from colocated_rl_agent.metrics import AgentMetrics
from colocated_rl_agent.planner.views import trainer_name
from colocated_rl_agent.runner.runner_link import ChildExited, RunnerEvent, RunnerLink
from colocated_rl_agent.settings import AgentSettings, Directories
from colocated_rl_api import names
from colocated_rl_api.member_wire import Rendezvous
from colocated_rl_member.server import Ports
from fakes.pod import make_job

HELLO = {"event": "hello", "protocol": 1, "runner": "r", "terminating": False, "children": []}


def exited(rank: int) -> dict[str, Any]:
    return {
        "event": "exited", "name": trainer_name(rank), "incarnation": f"i-{trainer_name(rank)}", "code": 1, "tail": [],
        "killed": False,
    }  # fmt: skip


async def test_no_rank_that_ends_before_the_answer_to_its_start_is_taken_for_alive(tmp_path: Path) -> None:
    """Another rank's end, read in the same turn, made the agent forget it: no runner says twice that a child is gone,
    and the pod's trainers were killed again and again without an end.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(HELLO).encode() + b"\n")
        while line := await reader.readline():
            asked = json.loads(line)
            told = [{"id": asked["id"], "ok": True, "incarnation": f"i-{asked['name']}"}]
            told += [exited(1), exited(0)] if asked["name"] == trainer_name(1) else []
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
            trainers.exited(event)
        attached.set()

    runner = RunnerLink(settings.runner_socket, on_event)
    journal = Journal(directories.state)
    trainers = Trainers(
        settings,
        runner=runner,
        journal=journal,
        metrics=AgentMetrics(CollectorRegistry()),
        changed=lambda: None,
        failed=lambda reason, message: None,
        made_good=lambda reason: None,
    )
    async with await asyncio.start_unix_server(serve, settings.runner_socket):
        link = asyncio.create_task(runner.run())
        await attached.wait()
        await trainers.start(1, Rendezvous(address="127.0.0.1", port=1, world_size=2))
        assert [False, False] == [view.is_alive for view in trainers.views]
        link.cancel()
        await served.wait()
    await trainers.close()
    journal.close()
