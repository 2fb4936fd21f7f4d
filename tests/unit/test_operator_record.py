"""These tests show what is recorded of a job, in which order, and what is not recorded at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from builders import UID
from colocated_rl_api.job_status import ColocatedRLJobStatus
from colocated_rl_operator.clients.errors import (
    ApiUnreachable,
    Conflict,
    NotAdmitted,
    StaleEpoch,
)
from colocated_rl_operator.clients.events import About, Events
from colocated_rl_operator.loop.record import News, Record
from colocated_rl_operator.planner.reasons import Cause

DEADLINE_S = 60.0


class HeldApiServer:
    """A job on an API server that answers when it may. `written`: steps and notes of events, as they were accepted."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = {"metadata": {"uid": UID, "resourceVersion": "1"}, "status": {"epoch": 1, "step": 0}}
        self.written: list[int | str] = []
        self.faults: list[Exception] = []
        self.failed = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()
        self.rests: list[float] = []

    async def read_job(self, namespace: str, name: str) -> dict[str, Any]:
        return self.job

    async def write_status(
        self, namespace: str, name: str, *, resource_version: str, status: dict[str, Any]
    ) -> dict[str, Any]:
        await self._turn()
        if resource_version != self.job["metadata"]["resourceVersion"]:
            raise Conflict("another version")
        self.change(status=status)
        self.written.append(status["step"])
        return self.job

    async def create_event(self, namespace: str, event: dict[str, Any]) -> dict[str, Any]:
        await self._turn()
        self.written.append(event["note"])
        return event

    async def repeat_event(self, namespace: str, name: str, series: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    async def rest(self, seconds: float) -> None:
        self.rests.append(seconds)

    async def _turn(self) -> None:
        await self.answers.wait()
        if self.faults:
            raise self.faults.pop(0)

    def change(self, **parts: Any) -> None:
        metadata = self.job["metadata"]
        self.job = {**self.job, **parts, "metadata": {**metadata, "resourceVersion": metadata["resourceVersion"] + "1"}}


@pytest.fixture
def server() -> HeldApiServer:
    return HeldApiServer()


@pytest.fixture
async def record(server: HeldApiServer) -> AsyncIterator[Record]:
    events = Events(server, instance="test")
    record = Record(About("default", "sums", UID), server, events, failed=server.failed.set, rest=server.rest)
    record.take(server.job)
    yield record
    await record.close()


def at(step: int, *, epoch: int = 1) -> ColocatedRLJobStatus:
    return ColocatedRLJobStatus(epoch=epoch, step=step)


def news(note: str) -> News:
    return News("Normal", Cause.NEXT_STEP, note, action="RaiseEpoch")


async def until(record: Record) -> None:
    """All that is noted has been written."""
    async with asyncio.timeout(DEADLINE_S):
        while record._writing is not None and not record._writing.done():
            await asyncio.wait((record._writing,))


async def under_way() -> None:
    """Whatever can go on without an answer has gone on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_was_overtaken_before_its_turn_is_never_written(server: HeldApiServer, record: Record) -> None:
    server.answers.clear()
    record.note(at(1))
    await under_way()
    for step in (2, 3, 4):
        record.note(at(step))
    assert at(4) == record.status
    server.answers.set()
    await until(record)
    assert [1, 4] == server.written


async def test_an_event_comes_after_the_status_that_it_tells_of(server: HeldApiServer, record: Record) -> None:
    server.answers.clear()
    record.note(at(1), news("one"))
    await under_way()
    record.note(at(2), news("two"))
    server.answers.set()
    await until(record)
    assert [1, 2, "one", "two"] == server.written


async def overtaking(server: HeldApiServer, record: Record) -> asyncio.Task[None]:
    """An epoch, 3, that is to be written while a status, 1, is under way and another, 2, waits; no answer comes yet."""
    server.answers.clear()
    record.note(at(1))
    await under_way()
    record.note(at(2))
    committing = asyncio.create_task(record.commit(at(3, epoch=2)))
    await under_way()
    return committing


async def test_an_epoch_is_written_after_what_is_under_way_and_instead_of_what_waits(
    server: HeldApiServer, record: Record
) -> None:
    committing = await overtaking(server, record)
    assert not committing.done()
    server.answers.set()
    await committing
    await until(record)
    assert [1, 3] == server.written
    assert at(3, epoch=2) == record.status


async def test_a_change_of_the_spec_in_between_is_no_obstacle(server: HeldApiServer, record: Record) -> None:
    server.change(spec={"steps": 9})
    await record.commit(at(1, epoch=2))
    assert [1] == server.written


async def test_an_epoch_that_somebody_else_raised_is_not_written_over(server: HeldApiServer, record: Record) -> None:
    server.change(status={"epoch": 2, "step": 0})
    with pytest.raises(StaleEpoch):
        await record.commit(at(1, epoch=2))
    assert [] == server.written


@pytest.mark.parametrize(("status", "rests"), [(None, [1] * 7), (500, [1, 1, 2, 4, 8, 10, 10])])
async def test_the_newest_status_is_tried_again_until_the_server_is_back(
    server: HeldApiServer, record: Record, status: int | None, rests: list[float]
) -> None:
    server.faults = [ApiUnreachable("away", status)] * 7
    record.note(at(1), news("one"))
    await until(record)
    assert [1, "one"] == server.written
    assert rests == server.rests
    record.check()


@pytest.mark.parametrize("error", [NotAdmitted("a rule"), StaleEpoch("somebody else"), TypeError("a bug")])
async def test_what_can_not_be_written_is_the_loops_to_know(
    server: HeldApiServer, record: Record, error: Exception
) -> None:
    server.faults = [error]
    record.note(at(1))
    async with asyncio.timeout(DEADLINE_S):
        await server.failed.wait()
    assert at(0) == record.status  # so that the next report is a difference again
    with pytest.raises(type(error)):
        record.check()
    record.check()  # said once


async def test_what_an_epoch_overtook_in_vain_is_not_taken_for_written(server: HeldApiServer, record: Record) -> None:
    """It stood for the newest status, and was not written before something else changed."""
    committing = await overtaking(server, record)
    server.faults = [ApiUnreachable("away"), ApiUnreachable("away")]
    server.answers.set()
    with pytest.raises(ApiUnreachable):
        await committing
    await until(record)
    assert ([], at(0)) == (server.written, record.status)


async def test_what_is_noted_is_still_written_when_the_process_ends(server: HeldApiServer, record: Record) -> None:
    record.note(at(1), news("one"))
    await record.close()
    assert [1, "one"] == server.written


async def test_a_job_that_another_operator_has_is_not_taken_from_it(server: HeldApiServer, record: Record) -> None:
    server.change(status={"epoch": 1, "step": 0, "operator": "others/lease"})
    with pytest.raises(StaleEpoch, match="operator others/lease has sums"):
        await record.commit(at(1).model_copy(update={"operator": "ours/lease"}))
    assert [] == server.written


THEIRS = {"type": "QuotaReserved", "status": "True", "reason": "Admitted", "message": "", "lastTransitionTime": "now"}


async def test_conditions_of_another_controller_are_kept_as_they_are_and_not_read(
    server: HeldApiServer, record: Record
) -> None:
    """Theirs may say less than ours do, such as no generation; the newest that they wrote is written back."""
    server.change(status={**server.job["status"], "conditions": [THEIRS]})
    newer = THEIRS | {"status": "False"}
    await record.commit(at(1, epoch=2))
    assert [THEIRS] == server.job["status"]["conditions"]
    server.change(status={**server.job["status"], "conditions": [newer]})
    record.note(at(2, epoch=2))
    await until(record)
    assert (2, [newer]) == (server.job["status"]["step"], server.job["status"]["conditions"])
    server.change(status={**server.job["status"], "conditions": []})  # they took it back
    await record.commit(at(3, epoch=2))
    assert ([], []) == (server.job["status"]["conditions"], record.status and record.status.conditions)
