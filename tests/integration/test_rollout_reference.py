"""The rollout controller with a reference on devices of its own: batches are sealed with its scores, none without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from integration.test_rollout_controller import BATCH, V0, Batch, ControllerScene, processes, running
from numpy.typing import NDArray
from real_reference import RunningReference
from waiting import until

from colocated_rl_api.job import Reference
from colocated_rl_api.rungs import ReferencePlacement
from colocated_rl_rollout.rewards.rewards import TaskProcesses
from colocated_rl_trainer.state.weights import load_model
from fakes.reference import FakeReference, reference_logp
from fakes.rollout import JobOnDisk, make_spec
from fakes.tiny_model import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

__all__ = ["processes"]  # a fixture

SAMPLES = 2 * BATCH
ADMITTED = 2 * SAMPLES  # no more than that without a step, for maxStaleness


def make_job(directory: Path, **rollout: Any) -> JobOnDisk:
    spec = make_spec(**rollout)
    return JobOnDisk.write(
        directory,
        spec.model_copy(update={"reference": Reference(placement=ReferencePlacement.OWN_DEVICES, replicas=2)}),
    )


@pytest.fixture
def job(tmp_path: Path) -> JobOnDisk:
    return make_job(tmp_path)


@pytest_asyncio.fixture(loop_scope="module")
async def references(job: JobOnDisk) -> AsyncIterator[list[FakeReference]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(FakeReference(f"job-reference-{replica}-0", job.tls).listening())
            for replica in range(2)
        ]


async def begin(
    scene: ControllerScene, *references: FakeReference | RunningReference, epoch: int = 1, **target: Any
) -> None:
    await scene.target(epoch, references=tuple(each.endpoint for each in references), **target)


def said_of(batch: Batch) -> NDArray[np.float32]:
    """Column by column, of tokens that are trained."""
    return np.concatenate([shard["reference_logp"][shard["loss_mask"] == 1] for shard in batch.columns])


def expected_of(batch: Batch, temperature: float = 1.0) -> NDArray[np.float32]:
    tokens = np.concatenate([shard["tokens"][shard["loss_mask"] == 1] for shard in batch.columns])
    return reference_logp(tokens, temperature)


async def test_a_batch_is_sealed_with_the_references_scores_of_its_tokens(
    job: JobOnDisk, references: list[FakeReference], processes: TaskProcesses
) -> None:
    async with running(job, processes) as scene:
        await begin(scene, *references)
        await scene.open(V0)
        facts = await scene.sealed(1)
        batch = await scene.batch(1)
    assert facts.problem is None
    assert all(header.has_reference for header in batch.headers)
    assert expected_of(batch).tolist() == said_of(batch).tolist()
    for shard in batch.columns:
        assert not shard["reference_logp"][shard["loss_mask"] == 0].any()
    assert all(reference.asked for reference in references)


async def test_what_is_finished_waits_for_a_reference_until_the_bounds_of_rollout_stop_it(
    job: JobOnDisk, references: list[FakeReference], processes: TaskProcesses
) -> None:
    """It streams: all that is finished is scored by the time that a first batch is wanted. And nothing is lost."""
    async with running(job, processes) as scene:
        await begin(scene)
        await scene.open(V0)
        facts = await scene.operator.until(lambda facts: facts.unscored == ADMITTED)
        assert (ADMITTED, None) == (facts.samples.get("completed"), facts.sealed)
        assert facts.problem is not None
        assert ("ReferenceUnavailable", True) == (facts.problem.reason, "none of its pods" in facts.problem.message)

        await begin(scene, references[0])
        await scene.sealed(1)
        facts = await scene.operator.until(lambda facts: facts.unscored == 0)
        assert (None, SAMPLES) == (facts.problem, facts.samples["sealed"])
        assert ADMITTED == len(references[0].asked)


async def test_a_reference_that_is_lost_at_its_work_costs_no_sample(
    job: JobOnDisk, references: list[FakeReference], processes: TaskProcesses
) -> None:
    async with running(job, processes) as scene:
        references[0].hold()
        references[1].is_down = True
        await begin(scene, *references)
        await scene.open(V0)
        await until(lambda: references[0].at_once > 0)
        references[1].is_down = False
        await begin(scene, references[1])
        facts = await scene.sealed(1)
        batch = await scene.batch(1)
    assert {"sealed", "completed", "running", "admitted", "scoring"} >= {*facts.samples}, "none failed"
    assert expected_of(batch).tolist() == said_of(batch).tolist()


async def test_other_temperature_is_one_of_scores_too(
    job: JobOnDisk, references: list[FakeReference], processes: TaskProcesses
) -> None:
    """A trainer divides its logits by the batch's: what was scored at another is asked anew."""
    async with running(job, processes) as scene:
        references[0].faults.extend([503] * 3)
        references[0].hold()
        await begin(scene, references[0])
        await scene.open(V0)
        await scene.samples(completed=ADMITTED)
        await begin(scene, references[0], temperature=0.5)
        await until(lambda: scene.controller._sealer.temperature == 0.5)  # type: ignore[attr-defined]
        references[0].release()
        await scene.sealed(1)
        batch = await scene.batch(1)
    assert {0.5} == {header.temperature for header in batch.headers}
    assert expected_of(batch, 0.5).tolist() == said_of(batch).tolist()


async def test_a_restart_asks_again_for_what_was_scored_and_not_sealed(
    job: JobOnDisk, references: list[FakeReference], processes: TaskProcesses
) -> None:
    async with running(job, processes) as scene:
        references[0].hold()
        await begin(scene, references[0])
        await scene.open(V0)
        await scene.samples(completed=ADMITTED)  # and its end waits for no answer
    references[0].release()
    async with running(job, processes) as scene:
        await begin(scene, references[0], epoch=2)
        facts = await scene.sealed(1)
        batch = await scene.batch(1)
    assert SAMPLES == facts.samples["sealed"]
    assert expected_of(batch).tolist() == said_of(batch).tolist()


async def test_what_a_filter_keeps_from_training_is_not_scored(tmp_path: Path, processes: TaskProcesses) -> None:
    """The fake engine gives every sample of a group the same answer: groups are filtered as long as they may be."""
    job = make_job(tmp_path, filters=["EqualRewards"], maxFilteredPerBatch=4)
    async with running(job, processes) as scene, FakeReference("job-reference-0-0", job.tls).listening() as reference:
        await begin(scene, reference)
        await scene.open(V0)
        await scene.samples(sealed=SAMPLES, completed=ADMITTED - SAMPLES)
        facts = await scene.operator.until(lambda facts: facts.unscored == 0)
    assert facts.samples["filtered"] >= 2 * 4, "as many groups before the first batch, and perhaps more after it"
    assert ADMITTED == len(reference.asked)


async def test_scores_of_a_real_reference_are_its_models_own_forward(
    job: JobOnDisk, tmp_path: Path, processes: TaskProcesses
) -> None:
    model = write_tiny_model(tmp_path / "weights" / "tiny", vocabulary=512, positions=512)
    (tmp_path / "trainer.json").write_text('{"threads": 1}')
    files = {"model": model, "config": tmp_path / "trainer.json", "tls": tmp_path / "tls"}
    with RunningReference(tmp_path, tmp_path / "job.json", **files) as reference:
        async with running(job, processes) as scene:
            await begin(scene, reference)  # it is still loading, and says so
            await scene.open(V0)
            await asyncio.to_thread(reference.await_ready)
            await scene.sealed(1)
            batch = await scene.batch(1)
        assert reference.process.poll() is None
    own = await asyncio.to_thread(own_forward, model, batch)
    np.testing.assert_allclose(said_of(batch), own, rtol=1e-5, atol=1e-5)
    assert np.std(own) > 0


def own_forward(model: Path, batch: Batch) -> NDArray[np.float32]:
    """Return the log-probabilities of trained tokens, sample by sample."""
    loaded, found = load_model(model), []
    for shard in batch.columns:
        start = 0
        for end in shard["sample_end"].tolist():
            ids = torch.tensor(shard["tokens"][start:end]).long()[None]
            with torch.no_grad():
                logits = loaded(input_ids=ids).logits[0, :-1]
            logp = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None]).squeeze(-1).numpy()
            found.append(logp[shard["loss_mask"][start:end][1:] == 1])
            start = end
    return np.concatenate(found)
