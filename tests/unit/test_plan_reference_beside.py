"""Plan, pods and status of a job whose reference shares the engines' devices (`reference.placement: WithRollout`).

The engines have devices of their own, or share the trainers' and release nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from builders import (
    OWN_ROLLOUT,
    RESIDENT_ROLLOUT,
    condition,
    engine_at,
    facts_at,
    make_climb,
    make_job,
    make_observation,
    plan_past_pods_deadline,
    rollout_facts,
    status_of,
    trainers_at,
)
from colocated_rl_api import names
from colocated_rl_api.ladder import DISAGGREGATED, RESIDENT, Ladder
from colocated_rl_api.member_wire import RolloutTarget
from colocated_rl_api.rungs import ReferencePlacement, Rung, WeightVersion
from colocated_rl_operator.manifests import belongings, resources
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.planner.observation import Job, Observation, remember
from colocated_rl_operator.planner.plan import plan
from colocated_rl_operator.planner.reasons import Cause, ConditionType
from colocated_rl_operator.planner.status import SCORING, SHARING

V1 = WeightVersion(1, 1)
IMAGES = PodImages(agent="agent:1", rollout="rollout:1", gpu="gpu:1", pull_policy="IfNotPresent")


@dataclass(frozen=True)
class Beside:
    """Holds a kind of job whose engines stay on their devices. spec: two pods with engines. others: its other pods."""

    spec: dict[str, Any]
    ladder: Ladder
    role: str  # of the pods with engines
    others: tuple[str, ...] = ()

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(f"{self.role}-{replica}" for replica in range(2))

    def make(self, **spec: Any) -> Job:
        return make_job(**self.spec | {"reference": {"placement": "WithRollout"}} | spec)

    def seen_with(self, *ready: bool | None, **options: Any) -> Observation:
        """All stand at the top of (1, 1), epoch 1. ready: of the reference in each pod with an engine."""
        whole = facts_at(Rung.SERVING, V1, ladder=RESIDENT) if self is RESIDENT_JOB else engine_at(Rung.SERVING, V1)
        pods = [whole.model_copy(update={"reference_ready": each}) for each in ready]
        usual: dict[str, Any] = {
            "climb": make_climb(1, cause=Cause.NEXT_STEP), "rollout": rollout_facts(trained=1, unscored=3),
            "served": V1,
        }  # fmt: skip
        others = [trainers_at(Rung.SERVING, V1) for _ in self.others]
        return make_observation(self.make(), [*others, *pods], **usual | options)


APART_JOB = Beside(
    {"replicas": 1, "rollout": OWN_ROLLOUT | {"replicas": 2}}, DISAGGREGATED, names.ROLE_ENGINE, ("trainer-0",)
)
RESIDENT_JOB = Beside({"replicas": 2, "rollout": RESIDENT_ROLLOUT}, RESIDENT, names.ROLE_GPU)
of_both_kinds = pytest.mark.parametrize("kind", [APART_JOB, RESIDENT_JOB], ids=lambda kind: kind.ladder.placement)


@of_both_kinds
def test_it_has_no_rung_and_no_pods_and_engine_pods_score(kind: Beside) -> None:
    job = kind.make()
    assert (kind.ladder, True) == (job.ladder, job.spec.seals_with_scores)
    assert Rung.SCORED not in job.ladder.rungs
    assert (*kind.others, *kind.engines, "rollout") == job.seats.all
    assert ((), kind.engines) == (job.reference_seats, job.scoring_seats)
    recorded = kind.make(mode="TrainOnly", recorded={"claimName": "recording"})
    assert ((), True) == (recorded.scoring_seats, recorded.spec.seals_with_scores), "its batches have the scores"
    assert kind.engines == kind.make(mode="RolloutOnly").scoring_seats


def test_its_devices_are_those_of_the_engines() -> None:
    own = APART_JOB.make(gpus={"count": 8}, rollout=APART_JOB.spec["rollout"] | {"gpus": {"count": 2}})
    assert (2, 2) == (own.spec.reference_gpus.count, own.spec.engine_gpus.count)
    assert 8 == RESIDENT_JOB.make(gpus={"count": 8}).spec.reference_gpus.count


@pytest.mark.parametrize(
    ("kind", "role"), [(APART_JOB, "engine"), (APART_JOB, "trainer"), (RESIDENT_JOB, "gpu"), (RESIDENT_JOB, "rollout")]
)
def test_no_pod_is_another_for_it(kind: Beside, role: str) -> None:
    """A process of the GPU container shares its devices, whichever way they were given to it."""
    without = make_job(**kind.spec)
    assert resources.pod_template(without, role, IMAGES) == resources.pod_template(kind.make(), role, IMAGES)
    policies = [
        [each["metadata"]["name"] for each in belongings.applied(job, operator_namespace="o")]
        for job in (without, kind.make())
    ]
    assert policies[0] == policies[1]


@of_both_kinds
def test_rollout_asks_the_engine_pods_whether_they_are_ready_or_not(kind: Beside) -> None:
    targets = plan(kind.seen_with(True, False)).targets.values()
    (rollout,) = [each for each in targets if isinstance(each, RolloutTarget)]
    assert rollout.engines == rollout.references
    assert [(f"sums-{seat}-0", names.DATA_PORT) for seat in kind.engines] == [
        (each.pod, each.port) for each in rollout.references
    ]


def test_a_pod_that_waits_to_join_the_group_is_not_asked_yet() -> None:
    """Its reference has started, but rollout is told only of pods of the group."""
    job = RESIDENT_JOB.make(replicas=3).sized(2)
    assert (("gpu-2",), RESIDENT_JOB.engines) == (job.waiting_seats, job.scoring_seats)


@of_both_kinds
def test_steps_go_on_while_none_is_ready(kind: Beside) -> None:
    decided = plan(kind.seen_with(False, False, rollout=rollout_facts(sealed=2, trained=1)))
    assert decided.climb is not None
    assert (2, 1, Cause.NEXT_STEP) == (decided.climb.step, decided.climb.lineage, decided.climb.cause)
    assert () == decided.pods, "a process is the agent's to start again"


@of_both_kinds
def test_status_counts_them_and_says_who_is_waited_for(kind: Beside) -> None:
    status = status_of(kind.seen_with(True, False))
    assert status.reference is not None
    found = status.reference
    assert (ReferencePlacement.WITH_ROLLOUT, 1, 2, 3) == (
        found.placement, found.ready_replicas, found.replicas, found.unscored,
    )  # fmt: skip
    assert ("False", f"{kind.engines[1]} (pod Running, its reference is not ready)") == condition(
        status, ConditionType.PODS_READY
    )
    assert "True" == condition(status, ConditionType.READY)[0]
    _, sharing = condition(status, ConditionType.GPU_SHARING_READY)
    assert SHARING[kind.ladder.placement][1] + SCORING[ReferencePlacement.WITH_ROLLOUT] == sharing
    assert "True" == condition(status_of(kind.seen_with(True, True)), ConditionType.PODS_READY)[0]


@of_both_kinds
def test_a_pod_that_does_not_answer_is_waited_for_as_a_member(kind: Beside) -> None:
    seen, seat = kind.seen_with(True, True), kind.engines[1]
    silent = replace(seen.current[seat], facts=None, silent_since=0.0)
    others = tuple(member for member in seen.members if member.seat != seat)
    lost = remember(replace(seen, members=(*others, silent)))
    assert (seat,) == lost.absent
    assert f"{seat} (pod Running, no connection)" in condition(status_of(lost), ConditionType.PODS_READY)[1]


@of_both_kinds
def test_devices_are_not_held_for_ever_for_one_that_never_comes(kind: Beside) -> None:
    missing = kind.seen_with(True, False)
    decided = plan_past_pods_deadline(missing)
    assert decided.climb is not None
    assert Cause.PODS_NOT_READY is decided.climb.cause
    assert f"{kind.engines[1]} (pod Running, its reference is not ready)" in decided.message


@of_both_kinds
def test_an_agent_that_knows_of_no_reference_is_none_that_scores(kind: Beside) -> None:
    """Nobody else's facts have it."""
    assert (kind.engines[1],) == kind.seen_with(True, None).absent
