"""A group may stand still for as long as its members may take, and the plan says who stood where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import PLACED, engine, facts_at, make_climb, make_job, make_observation, rollout_facts
from colocated_rl_api.facts import EngineFacts, EngineState, GateFacts, Problem
from colocated_rl_api.ladder import RESIDENT, ROLLOUT_ONLY, SCORED_TIME_SLICED, TIME_SLICED, Ladder, ladder_for
from colocated_rl_api.rungs import Placement, Rung
from colocated_rl_operator.planner.observation import remember
from colocated_rl_operator.planner.plan import patience_s, plan

# Deadlines of the members that tell sums apart: one of each in seconds.
SWITCH = {
    "settleSeconds": 1,
    "engineCallSeconds": 10,
    "engineStartSeconds": 300,
    "trainerStartSeconds": 1000,
    "trainerProgressSeconds": 5000,
}


@pytest.mark.parametrize(
    ("ladder", "barrier", "members_s"),
    [
        (TIME_SLICED, Rung.SEALED, 0),
        (TIME_SLICED, Rung.PAUSED, 1 + 10),
        (TIME_SLICED, Rung.DRAINED, 30),
        (TIME_SLICED, Rung.RELEASED, 30),
        (SCORED_TIME_SLICED, Rung.SCORED, 1000 + 5000),
        (TIME_SLICED, Rung.TRAINED, 1000 + 5000),
        (TIME_SLICED, Rung.EXPORTED, 10_000),
        (RESIDENT, Rung.EXPORTED, 10_000),
        (ladder_for(Placement.TIME_SLICED, scores=False, spans=True), Rung.OFFLOADED, 5000),
        (TIME_SLICED, Rung.UPDATED, 5000 + 300 + 20),
        (TIME_SLICED, Rung.SERVING, 5000),
        (ROLLOUT_ONLY, Rung.SERVING, 300 + 40),
    ],
)
def test_a_group_may_stand_still_for_half_a_minute_longer_than_its_members_wait(
    ladder: Ladder, barrier: Rung, members_s: int
) -> None:
    assert members_s + 30 == patience_s(ladder, barrier, make_job(switch=SWITCH).spec.switch)


@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("ladder", [ladder_for(each, scores=False) for each in Placement])
def test_a_barrier_that_members_reach_at_their_own_pace_leaves_them_their_own_time(ladder: Ladder, spans: bool) -> None:
    """Only the batch, which the rollout controller seals beforehand, is there at once."""
    switch = make_job(switch=SWITCH).spec.switch
    climbed = ladder_for(ladder.placement, scores=False, spans=spans)
    at_once = {each for each in climbed.barriers if patience_s(climbed, each, switch) == 30}
    assert at_once <= {Rung.SEALED}


def test_calls_to_engines_may_take_longer_than_a_save_of_the_trainer() -> None:
    switch = make_job(switch=SWITCH | {"engineCallSeconds": 2000}).spec.switch
    assert 4 * 2000 + 30 == patience_s(TIME_SLICED, Rung.SERVING, switch)


def test_a_group_that_stood_still_is_named_with_what_its_slowest_pods_report() -> None:
    climb = make_climb(1)
    pods = [facts_at(rung, climb.version) for rung in (Rung.RELEASED, Rung.TRAINED, Rung.RELEASED)]
    pods[0] = pods[0].model_copy(update={"problem": Problem(reason="RankLost", message="x" * 300)})
    seen = make_observation(make_job(replicas=3), [*pods], climb=climb, rollout=rollout_facts(sealed=1))
    patience = patience_s(TIME_SLICED, Rung.TRAINED, seen.job.spec.switch)
    decided = plan(remember(replace(seen, now=seen.now + patience + 5)))
    assert decided.message.startswith(f"sums-gpu-0-0 ({'x' * 200}), sums-gpu-2-0 stayed at Released for 2735 s")


@pytest.mark.parametrize("ladder", [TIME_SLICED, RESIDENT])
@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_that_is_lost_after_long_rollout_has_all_the_time_to_start_again(
    ladder: Ladder, engines: int
) -> None:
    """Its deadline ran from when the group had begun to serve: all trainers were restarted with it."""
    at = make_climb(1).version
    up = facts_at(Rung.SERVING, at, ladder=ladder)
    others = (engine(at, name="engine-1"),) if engines > 1 else ()
    rollout = PLACED[ladder.placement]["rollout"] | {"engine": {"perPod": engines}}
    serving = up.model_copy(update={"engines": (*up.engines, *others)})
    seen = make_observation(
        make_job(replicas=1, rollout=rollout), [serving], climb=make_climb(1), rollout=rollout_facts(sealed=1)
    )
    gone = EngineFacts(name="engine-0", state=EngineState.ABSENT, failures=1, shut=True)
    starting = gone.model_copy(update={"state": EngineState.STARTING, "incarnation": "e2", "starts_on": at})
    back = up.engines[0].model_copy(update={"failures": 1, "shut": True})
    for lost, after_s in ((None, 5000), (gone, 5000), (starting, 60), (back, 60)):
        is_open = engines > 1 or lost is None
        facts = serving.model_copy(
            update={
                "engines": (lost or up.engines[0], *others),
                "gate": GateFacts(open=is_open, settled=not is_open),
            }
        )
        members = tuple(replace(each, facts=facts) if each.pod_facts else each for each in seen.members)
        seen = remember(replace(seen, now=seen.now + after_s, members=members))
        assert not plan(seen).raises


def test_a_group_that_rests_has_no_deadline() -> None:
    climb = make_climb(1)
    pods = [facts_at(Rung.SERVING, climb.version)] * 2
    seen = make_observation(make_job(), [*pods], climb=climb, rollout=rollout_facts(sealed=1))
    patience = patience_s(TIME_SLICED, Rung.SERVING, seen.job.spec.switch)
    for late_s in (patience, patience + 1):
        later = plan(remember(replace(seen, now=seen.now + late_s)))
        assert (False, None) == (later.raises, later.wake_at)
