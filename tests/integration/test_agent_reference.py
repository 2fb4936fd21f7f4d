"""Pods of a job with a reference: real agents, real runners; engine and trainer are fakes that may be slow, or die."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from waiting import until

from builders import TOGETHER
from colocated_rl_api.facts import TrainerState
from colocated_rl_api.ladder import ladder_for
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from fakes.pod import Network, PodGroup, PodProcesses, make_job, network, pod

V0, V1, V2 = (WeightVersion(step, 1) for step in range(3))
ROLLOUTS: dict[Placement, dict[str, Any]] = {Placement.TIME_SLICED: {}, Placement.RESIDENT: {"offload": []}}
on_both_ladders = pytest.mark.parametrize("placement", TOGETHER)


@pytest.fixture
async def net(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    async with network(tmp_path_factory.mktemp("n")) as it:
        yield it


def scored_job(placement: Placement = Placement.TIME_SLICED, **changes: Any) -> Any:
    return make_job(**{"rollout": ROLLOUTS[placement], "reference": {}} | changes)


def trainer_routes(it: PodProcesses) -> list[str]:
    return (it.directories.sockets / "asked").read_text().split()


def kept(it: PodProcesses) -> list[str]:
    return sorted(path.name for path in it.directories.batches.glob("*.scores"))


async def rung_seconds(it: PodProcesses) -> str:
    async with it.net.session.get(f"http://127.0.0.1:{it.metrics}/metrics") as answer:
        return await answer.text()


@on_both_ladders
async def test_every_batch_is_scored_once_before_it_is_trained(net: Network, placement: Placement) -> None:
    async with pod(net, scored_job(placement)) as it:
        group = PodGroup([it])
        await group.climb(V0)
        assert "score" not in trainer_routes(it), "nothing is trained at a start"
        for version in (V1, V2):
            await group.climb(version)
            rungs, ladder = it.standings(version, epoch=group.epoch), ladder_for(placement, scores=True)
            assert rungs == [rung for rung in ladder.rungs if rung in rungs]
            assert Rung.SCORED in rungs
            scores = [f"batch-{version.step}-0.scores"]
            await until(lambda: scores == kept(it))  # noqa: B023 - it is waited for here; they go with their batch
        assert ["score", "train"] * 2 == [route for route in trainer_routes(it) if route in ("score", "train")]
        assert 'colocate_rung_seconds_count{rung="Scored"} 2.0' in await rung_seconds(it)


@on_both_ladders
async def test_nobody_trains_before_every_pod_has_scored(net: Network, placement: Placement) -> None:
    job = scored_job(placement, replicas=2)
    async with pod(net, job) as fast, pod(net, job, replica=1) as slow:
        group = PodGroup([fast, slow])
        await group.climb(V0)
        slow.trainer_fault("score", "slow")
        await group.climb(V1, to=Rung.SCORED)
        for it in (fast, slow):
            assert "train" not in trainer_routes(it)
        assert slow.now is not None
        assert slow.now.took_s[Rung.SCORED] > 0.9
        await group.go_on(V1)


async def test_agent_that_restarts_while_a_batch_is_scored_goes_on_with_it(net: Network) -> None:
    async with pod(net, scored_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        it.trainer_fault("score", "held")
        await group.set_out(V1, Rung.SCORED, after=Rung.RELEASED)
        await it.until(lambda facts: facts.trainers[0].state is TrainerState.SCORING, "scoring")
        before = it.now
        await it.restart_agent()
        await it.until(lambda facts: bool(facts.trainers), "attached")
        it.trainer_goes_on()
        await group.climb(V1)
        assert before is not None
        assert it.now is not None
        assert before.trainers[0].incarnation == it.now.trainers[0].incarnation, "its trainer goes on"
        assert (1, 1) == (it.now.trainers[0].step, it.now.trainers[0].scored)


async def test_trainer_that_dies_while_it_scores_is_reported_and_the_next_lineage_scores_again(net: Network) -> None:
    async with pod(net, scored_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        it.trainer_fault("score", "crash")
        await group.set_out(V1, Rung.SCORED, after=Rung.RELEASED)
        gone = await it.until(lambda facts: facts.trainers[0].exit_code is not None, "dead")
        assert gone.problem is not None
        assert "TrainerDied" == gone.problem.reason
        again = WeightVersion(1, 2)
        await group.climb(again)
        assert it.now is not None
        assert (2, 1, 1) == (it.now.trainers[0].lineage, it.now.trainers[0].step, it.now.trainers[0].scored)


async def test_trainer_that_cannot_score_is_refused_where_there_is_a_reference(net: Network) -> None:
    async with pod(net, scored_job()) as it:
        it.trainer_fault("load", "unscoring")
        group = PodGroup([it])
        await group.set_out(V0, Rung.SCORED, after=Rung.RELEASED)
        gone = await it.until(lambda facts: facts.trainers[0].exit_code is not None, "stopped")
        assert gone.problem is not None
        assert "the job has a reference: give its loop a `score`" in gone.problem.message


async def test_trainer_that_cannot_score_trains_where_there_is_none(net: Network) -> None:
    async with pod(net, make_job()) as it:
        it.trainer_fault("load", "unscoring")
        await PodGroup([it]).climb(V0)
        assert it.now is not None
        assert it.now.problem is None


async def test_rollout_goes_on_beside_the_reference_where_both_are_resident(net: Network) -> None:
    async with pod(net, scored_job(Placement.RESIDENT)) as it:
        group = PodGroup([it])
        await group.climb(V0)
        it.trainer_fault("score", "hang")
        await group.set_out(V1, Rung.SCORED, after=Rung.SEALED)
        await it.until(lambda facts: facts.trainers[0].state is TrainerState.SCORING, "scoring")
        status, answer = await it.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 2})
        assert (200, "0-1") == (status, answer["meta_info"]["weight_version"])
