"""Plan, pods and status of a job whose reference shares the engines' devices (`reference.placement: WithRollout`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import (
    OWN_ROLLOUT,
    condition,
    engine_at,
    make_climb,
    make_job,
    make_observation,
    plan_past_pods_deadline,
    rollout_facts,
    status_of,
    trainers_at,
)
from colocated_rl_api import names
from colocated_rl_api.ladder import DISAGGREGATED
from colocated_rl_api.member_wire import RolloutTarget
from colocated_rl_api.rungs import Placement, ReferencePlacement, Rung, WeightVersion
from colocated_rl_operator.manifests import belongings, resources
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.planner.observation import Job, Observation, remember
from colocated_rl_operator.planner.plan import plan
from colocated_rl_operator.planner.reasons import Cause, ConditionType
from colocated_rl_operator.planner.status import SCORING, SHARING

V1 = WeightVersion(1, 1)
BESIDE: dict[str, Any] = {"rollout": OWN_ROLLOUT | {"replicas": 2}, "reference": {"placement": "WithRollout"}}
IMAGES = PodImages(agent="agent:1", rollout="rollout:1", gpu="gpu:1", pull_policy="IfNotPresent")
ENGINES = ("engine-0", "engine-1")


def make_beside(**spec: Any) -> Job:
    return make_job(replicas=1, **BESIDE | spec)


def seen_with(*ready: bool | None, **options: Any) -> Observation:
    """All stand at the top of (1, 1), epoch 1. ready: of the reference in each engine pod."""
    pods = [engine_at(Rung.SERVING, V1).model_copy(update={"reference_ready": each}) for each in ready]
    usual: dict[str, Any] = {
        "climb": make_climb(1, cause=Cause.NEXT_STEP), "rollout": rollout_facts(trained=1, unscored=3), "served": V1,
    }  # fmt: skip
    return make_observation(make_beside(), [trainers_at(Rung.SERVING, V1), *pods], **usual | options)


def test_it_has_no_rung_and_no_pods_and_engine_pods_score() -> None:
    job = make_beside()
    assert (DISAGGREGATED, True) == (job.ladder, job.spec.seals_with_scores)
    assert ("trainer-0", *ENGINES, "rollout") == job.seats.all
    assert ((), ENGINES) == (job.reference_seats, job.scoring_seats)
    recorded = make_beside(mode="TrainOnly", recorded={"claimName": "recording"})
    assert ((), True) == (recorded.scoring_seats, recorded.spec.seals_with_scores), "its batches have the scores"
    assert ENGINES == make_beside(mode="RolloutOnly").scoring_seats


def test_its_devices_are_those_of_the_engines() -> None:
    job = make_beside(gpus={"count": 8}, rollout=BESIDE["rollout"] | {"gpus": {"count": 2}})
    assert (2, 2) == (job.spec.reference_gpus.count, job.spec.engine_gpus.count)


@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_no_pod_is_another_for_it(role: str) -> None:
    """A process of the GPU container shares its devices, whichever way they were given to it."""
    without = make_job(replicas=1, rollout=BESIDE["rollout"])
    assert resources.pod_template(without, role, IMAGES) == resources.pod_template(make_beside(), role, IMAGES)
    policies = [
        [each["metadata"]["name"] for each in belongings.applied(job, operator_namespace="o")]
        for job in (without, make_beside())
    ]
    assert policies[0] == policies[1]


def test_rollout_asks_the_engine_pods_whether_they_are_ready_or_not() -> None:
    (rollout,) = [each for each in plan(seen_with(True, False)).targets.values() if isinstance(each, RolloutTarget)]
    assert rollout.engines == rollout.references
    assert [("sums-engine-0-0", names.DATA_PORT), ("sums-engine-1-0", names.DATA_PORT)] == [
        (each.pod, each.port) for each in rollout.references
    ]


def test_steps_go_on_while_none_is_ready() -> None:
    decided = plan(seen_with(False, False, rollout=rollout_facts(sealed=2, trained=1)))
    assert decided.climb is not None
    assert (2, 1, Cause.NEXT_STEP) == (decided.climb.step, decided.climb.lineage, decided.climb.cause)
    assert () == decided.pods, "a process is the agent's to start again"


def test_status_counts_them_and_says_who_is_waited_for() -> None:
    status = status_of(seen_with(True, False))
    assert status.reference is not None
    found = status.reference
    assert (ReferencePlacement.WITH_ROLLOUT, 1, 2, 3) == (
        found.placement, found.ready_replicas, found.replicas, found.unscored,
    )  # fmt: skip
    assert ("False", "engine-1 (pod Running, its reference is not ready)") == condition(
        status, ConditionType.PODS_READY
    )
    assert "True" == condition(status, ConditionType.READY)[0]
    _, sharing = condition(status, ConditionType.GPU_SHARING_READY)
    assert SHARING[Placement.DISAGGREGATED][1] + SCORING[ReferencePlacement.WITH_ROLLOUT] == sharing
    assert "True" == condition(status_of(seen_with(True, True)), ConditionType.PODS_READY)[0]


def test_a_pod_that_does_not_answer_is_waited_for_as_a_member() -> None:
    seen = seen_with(True, True)
    silent = replace(seen.current["engine-1"], facts=None, silent_since=0.0)
    others = tuple(member for member in seen.members if member.seat != "engine-1")
    lost = remember(replace(seen, members=(*others, silent)))
    assert ("engine-1",) == lost.absent
    assert "engine-1 (pod Running, no connection)" in condition(status_of(lost), ConditionType.PODS_READY)[1]


def test_devices_are_not_held_for_ever_for_one_that_never_comes() -> None:
    missing = seen_with(True, False)
    decided = plan_past_pods_deadline(missing)
    assert decided.climb is not None
    assert Cause.PODS_NOT_READY is decided.climb.cause
    assert "engine-1 (pod Running, its reference is not ready)" in decided.message


def test_an_agent_that_knows_of_no_reference_is_none_that_scores() -> None:
    """Nobody else's facts have it."""
    assert ("engine-1",) == seen_with(True, None).absent
