"""Every maker of batches keeps to the spec's present steps, and logs a line about each batch."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from colocated_rl_api.member_wire import Goal, RolloutTarget
from colocated_rl_rollout import sealer
from colocated_rl_rollout.sealer import Sealer, trainer_ranks
from colocated_rl_rollout.store.batches import BatchRecord
from colocated_rl_rollout.store.store import Store
from fakes.rollout import JOB_UID, make_spec

RECORD = BatchRecord(
    step=3, groups=1, samples=1, loss_tokens=1, reward_mean=0.123456, staleness={0: 1}, truncated=0, sha256=("digest",)
)


class Idle(Sealer):
    """Makes nothing, whenever it is woken."""

    rounds = 0

    async def run(self) -> None:
        while not self._draining:
            self.rounds += 1
            self._wake.clear()
            await self._wake.wait()


@pytest.fixture
def idle(tmp_path: Path) -> Idle:
    return Idle(make_spec(), Store(tmp_path, job_uid=JOB_UID), lambda: None, retry_s=1.0)


def target(last_step: int | None) -> RolloutTarget:
    return RolloutTarget(epoch=1, goal=Goal.CLIMB, trained_step=0, saved_step=0, engines=(), last_step=last_step)


def test_a_maker_that_applies_no_filters_has_no_problem_with_them(idle: Idle) -> None:
    assert idle.filter_problem is None


def test_the_last_step_is_the_one_that_was_named_last(idle: Idle) -> None:
    steps = make_spec().steps
    idle.tune(target(None))
    assert steps == idle.last_step
    idle.tune(target(steps + 2))
    idle.tune(target(None))
    assert steps + 2 == idle.last_step


async def test_a_sealer_runs_until_it_is_drained(idle: Idle) -> None:
    running = asyncio.create_task(idle.run())
    await asyncio.sleep(0)
    idle.wake()
    await asyncio.sleep(0)
    assert (2, False) == (idle.rounds, running.done())
    idle.drain()
    await asyncio.sleep(0)
    assert (2, True) == (idle.rounds, running.done())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_batch_waits_while_the_volume_is_full(idle: Idle, number: int) -> None:
    def refuse() -> str:
        raise OSError(number, "no room")

    assert None is await idle._written(3, refuse)
    assert idle._store.problem is not None
    assert "batch 3 could not be written" in idle._store.problem.message
    assert "written" == await idle._written(3, lambda: "written")
    assert idle._store.problem is None


async def test_an_error_of_a_volume_that_is_not_full_is_raised(idle: Idle) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "the disk is broken")

    with pytest.raises(OSError, match="the disk is broken"):
        await idle._written(3, fail)


@pytest.mark.parametrize(("devices", "ranks"), [(0, 2), (1, 2), (4, 8)])
def test_a_batch_is_dealt_to_one_rank_for_each_device_of_each_replica(devices: int, ranks: int) -> None:
    spec = make_spec()
    spec = spec.model_copy(update={"gpus": spec.gpus.model_copy(update={"count": devices})})
    assert (2, ranks) == (spec.replicas, trainer_ranks(spec))


def test_a_sealed_batch_is_logged_with_how_long_it_took(
    idle: Idle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(sealer, "time", SimpleNamespace(monotonic=lambda: 12.34567))
    idle._log_sealed(RECORD, 10.0)
    (line,) = caplog.records
    assert isinstance(line.args, dict)
    assert (0.1235, 2.346) == (line.args["reward_mean"], line.args["took_s"])
    assert "sha256" not in line.args
