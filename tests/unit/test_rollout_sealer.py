"""Every maker of batches keeps to the spec's present steps, and logs a line about each batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from colocated_rl_api.member_wire import Goal, RolloutTarget
from colocated_rl_rollout import sealer
from colocated_rl_rollout.sealer import Sealer
from colocated_rl_rollout.store.batches import BatchRecord
from colocated_rl_rollout.store.store import Store
from fakes.rollout import JOB_UID, make_spec

RECORD = BatchRecord(
    step=3, groups=1, samples=1, loss_tokens=1, reward_mean=0.123456, staleness={0: 1}, truncated=0, sha256=("digest",)
)


class Idle(Sealer):
    """Makes nothing."""

    async def run(self) -> None:
        await self._wake.wait()


@pytest.fixture
def idle(tmp_path: Path) -> Idle:
    return Idle(make_spec(), Store(tmp_path, job_uid=JOB_UID), lambda: None, retry_s=1.0)


def target(last_step: int | None) -> RolloutTarget:
    return RolloutTarget(epoch=1, goal=Goal.CLIMB, trained_step=0, saved_step=0, engines=(), last_step=last_step)


def test_the_last_step_is_the_one_that_was_named_last(idle: Idle) -> None:
    steps = make_spec().steps
    idle.tune(target(None))
    assert steps == idle.last_step
    idle.tune(target(steps + 2))
    idle.tune(target(None))
    assert steps + 2 == idle.last_step


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
