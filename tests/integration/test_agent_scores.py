"""Pods with a reference beside the engine: agent, runner and reference are real, engine and trainer are fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray

from colocated_rl_agent.drivers.reference import Scored
from colocated_rl_api import names
from colocated_rl_api.facts import TrainerState
from colocated_rl_api.reference_wire import SCORE_PATH, ScoreError
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_member.data import DataClient
from colocated_rl_trainer.state.weights import load_model
from fakes.pod import JOB_UID, PodGroup, PodProcesses, make_job, network
from fakes.tiny_model import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

V0, V1 = (WeightVersion(step, 1) for step in range(2))
REFERENCE = "colocated_rl_trainer.ref_policy"  # in its command line
PROMPT, RESPONSE = [5, 6, 7], [8, 9, 10, 11]
TEMPERATURE = 0.75
BESIDE = {
    "mode": "RolloutOnly",
    "rollout": {"placement": "OwnDevices", "replicas": 1},
    "reference": {"placement": "WithRollout"},
}


RESIDENT: dict[str, Any] = {"rollout": {"offload": []}, "reference": {"placement": "WithRollout"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pod(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PodProcesses]:
    async with processes(tmp_path_factory.mktemp("n"), names.ROLE_ENGINE, **BESIDE) as it:
        yield it


@asynccontextmanager
async def processes(root: Path, role: str, **spec: Any) -> AsyncIterator[PodProcesses]:
    async with network(root) as net:
        it = PodProcesses(net, make_job(**spec), environment={names.ENV_ROLE: role})
        it.lay_out()
        write_tiny_model(it.directories.model)
        await it.start_agent()
        await it.start_runner()
        try:
            await it.link()
            yield it
        finally:
            await it.stop()


async def score(pod: PodProcesses, query: str = f"start={len(PROMPT)}&temperature={TEMPERATURE}") -> Scored:
    client = DataClient(pod.net.session, pod.net.tls, JOB_UID)
    sample = np.array(PROMPT + RESPONSE, "<i4").tobytes()
    async with client.request("POST", pod.endpoint, f"{SCORE_PATH}?{query}", data=sample) as answer:
        return Scored(answer.status, await answer.read())


def own_forward(model: Path) -> NDArray[np.float32]:
    ids = torch.tensor([PROMPT + RESPONSE])
    with torch.no_grad():
        logits = load_model(model)(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
    logp = torch.log_softmax(logits / TEMPERATURE, -1).gather(-1, ids[0, len(PROMPT) :, None])
    return np.asarray(logp.squeeze(-1).numpy())


async def test_samples_are_scored_at_the_gate_by_the_model_as_the_job_began_with_it(pod: PodProcesses) -> None:
    """They are so before the engine serves, too: the two have nothing to do with each other."""
    await pod.until(lambda facts: facts.reference_ready is True, "a reference that is ready")
    status, body = await score(pod)
    assert 200 == status
    np.testing.assert_allclose(np.frombuffer(body, "<f4"), own_forward(pod.directories.model), rtol=1e-5, atol=1e-5)
    status, body = await score(pod, "start=99&temperature=1.0")
    assert (400, "BadRequest") == (status, ScoreError.model_validate_json(body).error)


async def test_reference_that_is_killed_comes_again_and_the_engine_serves_on(pod: PodProcesses) -> None:
    await pod.until(lambda facts: facts.reference_ready is True, "a reference that is ready")
    group = PodGroup([pod])
    await group.climb(V0)
    assert pod.now is not None
    [engine] = pod.now.engines
    seen = len(pod.facts)
    pod.kill(REFERENCE)
    lost = await pod.until(lambda facts: facts.reference_ready is False, "a reference that is gone")
    assert lost.problem is not None
    assert ("ReferenceFailed", True) == (lost.problem.reason, "ended with code -9" in lost.problem.message)
    status, body = await score(pod)
    assert (503, "Starting") == (status, ScoreError.model_validate_json(body).error)
    back = await pod.until(lambda facts: facts.reference_ready is True, "a reference that is back")
    assert back.problem is None
    assert 200 == (await score(pod)).status
    assert {(engine.incarnation, 0, True)} == {
        (each.incarnation, each.failures, facts.gate.open) for facts in pod.facts[seen:] for each in facts.engines
    }


async def test_engine_that_dies_leaves_the_reference_alone(pod: PodProcesses) -> None:
    before = pod.command(REFERENCE), len(pod.facts)
    pod.kill("launch_server")
    await pod.until(lambda facts: not facts.gate.open, "closed")
    assert 200 == (await score(pod)).status
    await PodGroup([pod]).climb(WeightVersion(0, 2))
    assert {True} == {facts.reference_ready for facts in pod.facts[before[1] :]}


async def test_an_agent_that_restarts_finds_the_reference(pod: PodProcesses) -> None:
    pid = pod._child(REFERENCE)[0]
    await pod.restart_agent()
    await pod.until(lambda facts: facts.reference_ready is True, "a reference that is found")
    assert 200 == (await score(pod)).status
    assert pid == pod._child(REFERENCE)[0]


async def test_samples_are_scored_beside_a_step_that_its_death_does_not_touch(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Engine, trainer and reference all stay on the device: nothing blocks, as in tunix's published pipeline."""
    async with processes(tmp_path_factory.mktemp("r"), names.ROLE_GPU, **RESIDENT) as pod:
        await pod.until(lambda facts: facts.reference_ready is True, "a reference that is ready")
        group = PodGroup([pod])
        await group.climb(V0)
        pod.trainer_fault("train", "held")
        await group.set_out(V1, Rung.TRAINED, after=Rung.SEALED)
        await pod.until(lambda facts: facts.trainers[0].state is TrainerState.TRAINING, "training")
        seen = len(pod.facts)
        status, body = await score(pod)
        assert 200 == status
        np.testing.assert_allclose(np.frombuffer(body, "<f4"), own_forward(pod.directories.model), rtol=1e-5, atol=1e-5)

        pod.kill(REFERENCE)
        lost = await pod.until(lambda facts: facts.reference_ready is False, "a reference that is gone")
        assert lost.problem is not None
        assert "ReferenceFailed" == lost.problem.reason
        assert 503 == (await score(pod)).status
        during = pod.facts[seen:]
        assert {(TrainerState.TRAINING, 0)} == {(rank.state, rank.step) for each in during for rank in each.trainers}
        assert {(0, True)} == {(engine.failures, each.gate.open) for each in during for engine in each.engines}

        pod.trainer_goes_on()
        await group.go_on(V1)
        assert pod.now is not None
        [rank], [engine] = pod.now.trainers, pod.now.engines
        assert (1, 1, None, V1) == (rank.lineage, rank.step, rank.scored, engine.version)
        assert {rank.incarnation} == {each.trainers[0].incarnation for each in during}
        assert Rung.SCORED not in pod.standings(V1, epoch=group.epoch)


async def test_it_ends_with_its_pod_and_nothing_is_wrong_with_that(pod: PodProcesses) -> None:
    group = PodGroup([pod])
    group.epoch = max(facts.epoch for facts in pod.facts)
    seen = len(pod.facts)
    await group.stop()
    await pod.until(lambda facts: facts.stopped, "stopped")
    assert [] == [facts.problem for facts in pod.facts[seen:] if facts.problem]
    assert 0 == await pod.runner.wait()
