"""The action table: exact choices for exact views, and a model of a pod in which everything may fail at any point."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any, assert_never

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from colocated_rl_agent import actions as do
from colocated_rl_agent.facts import Rules, next_actions
from colocated_rl_agent.views import CUDA_GRAPH, KV_CACHE, TAGS, WEIGHTS, EngineView, PodView, RankView
from colocated_rl_api.job import Verify
from colocated_rl_api.ladder import (
    RESIDENT,
    SCORED_RESIDENT,
    SCORED_TIME_SLICED,
    TIME_SLICED,
    Ladder,
    Rung,
    WeightVersion,
)
from colocated_rl_api.member_wire import Endpoint, EngineState, Goal, PodTarget, Rendezvous, TagState, TrainerState

V0, V1, V2, V3 = (WeightVersion(step, 1) for step in range(4))
RULES = Rules(TIME_SLICED, settle_s=30.0, checkpoint_every=2, verify=Verify.PROBE)
NOW = 100.0


def next_action(pod: PodView, target: PodTarget | None, rules: Rules) -> do.Action | do.Wait:
    """Of a time-sliced pod, whose engine and trainers take turns."""
    (action,) = next_actions(pod, target, rules)
    return action


def make_target(version: WeightVersion, rung: Rung, *, goal: Goal = Goal.CLIMB) -> PodTarget:
    return PodTarget(
        epoch=1,
        goal=goal,
        step=version.step,
        lineage=version.lineage,
        rung=rung,
        rendezvous=Rendezvous(address="10.0.0.1", port=29500, world_size=1),
        batches=Endpoint(pod="rollout", address="10.0.0.2", port=8444),
    )


def make_engine(version: WeightVersion | None = V0) -> EngineView:
    return replace(EngineView(), state=EngineState.READY, incarnation="e1", version=version, agrees=True)


def drained_engine() -> EngineView:
    return make_engine().gate_closed().was_paused().was_flushed()


def make_rank(version: WeightVersion = V0, *, state: TrainerState = TrainerState.OFFLOADED) -> RankView:
    return RankView(
        0, state, "t1", version.lineage, step=version.step, exported=version, saved=version.step - version.step % 2
    )


def make_pod(
    *,
    engine: EngineView | None = None,
    rank: RankView | None = None,
    gate_open: bool = False,
    in_flight: int = 0,
    closed_at: float = NOW,
    whole: WeightVersion | None = V0,
    shards: int | None = None,
    terminating: bool = False,
    stale_exports: bool = False,
) -> PodView:
    return PodView(
        now=NOW,
        runner_known=True,
        terminating=terminating,
        gate_open=gate_open,
        in_flight=in_flight,
        closed_at=closed_at,
        engine=engine or make_engine(),
        ranks=(rank or make_rank(),),
        whole=whole,
        stale_exports=stale_exports,
        shards=shards,
    )


RELEASED = drained_engine().was_released()
WEIGHTS_BACK = RELEASED.was_resumed((WEIGHTS,))
UPDATED = WEIGHTS_BACK.was_updated(V1)
NEW_POD = make_pod(engine=EngineView(), rank=RankView(0), whole=None)
DOWN = make_pod(engine=RELEASED)
KEPT = ((), (WEIGHTS,), (CUDA_GRAPH,), (WEIGHTS, CUDA_GRAPH))  # of a time-sliced engine; never the KV cache


def down(rank: RankView, *, shards: int | None = None, whole: WeightVersion = V0) -> PodView:
    return replace(DOWN, ranks=(rank,), shards=shards, whole=whole)


def up(engine: EngineView) -> PodView:
    return make_pod(engine=engine, rank=make_rank(V1), whole=V1)


def onloaded(version: WeightVersion) -> RankView:
    return make_rank(version, state=TrainerState.ONLOADED)


@pytest.mark.parametrize(
    ("pod", "target", "expected"),
    [
        # down
        (make_pod(gate_open=True), (V1, Rung.SEALED), do.Wait()),
        (make_pod(gate_open=True), (V1, Rung.PAUSED), do.CloseGate()),
        (make_pod(in_flight=2), (V1, Rung.PAUSED), do.AbortAll(NOW + 30)),
        (make_pod(), (V1, Rung.CLOSED), do.Wait()),
        (make_pod(), (V1, Rung.PAUSED), do.Pause()),
        (make_pod(engine=make_engine().was_paused()), (V1, Rung.PAUSED), do.Wait()),
        (make_pod(engine=make_engine().was_paused()), (V1, Rung.DRAINED), do.Flush()),
        (make_pod(engine=drained_engine()), (V1, Rung.DRAINED), do.Wait()),
        (make_pod(engine=drained_engine()), (V1, Rung.RELEASED), do.Release()),
        (DOWN, (V1, Rung.RELEASED), do.Wait()),
        # training
        (NEW_POD, (V0, Rung.TRAINED), do.StartTrainers(1)),
        (DOWN, (V1, Rung.TRAINED), do.FetchShards(1)),
        (down(make_rank(), shards=1), (V1, Rung.TRAINED), do.Onload()),
        (down(onloaded(V0), shards=1), (V1, Rung.TRAINED), do.Train(1)),
        (down(replace(make_rank(V2), saved=None)), (V3, Rung.TRAINED), do.Save(2)),
        (down(replace(onloaded(V2), saved=None)), (V3, Rung.TRAINED), do.Offload()),
        (down(onloaded(V1)), (V1, Rung.TRAINED), do.Wait()),
        (down(replace(onloaded(V1), exported=None)), (V1, Rung.EXPORTED), do.Export(V1)),
        (replace(down(onloaded(V0)), crowded=True), (V0, Rung.EXPORTED), do.Wait()),
        (
            replace(down(replace(onloaded(V1), exported=None)), crowded=True),
            (V1, Rung.EXPORTED),
            do.RemoveExports(keep=V0),
        ),
        (down(onloaded(V1)), (V1, Rung.EXPORTED), do.VerifyExport(V1)),
        (down(onloaded(V1), whole=V1), (V1, Rung.EXPORTED), do.Wait()),
        (down(onloaded(V1), whole=V1), (V1, Rung.UPDATED), do.Offload()),
        (DOWN, (WeightVersion(1, 2), Rung.TRAINED), do.StopTrainers("lineage 2 is wanted")),
        # up
        (make_pod(engine=EngineView()), (V0, Rung.UPDATED), do.StartEngine(V0)),
        (make_pod(engine=EngineView().started("e", V0, start_by=NOW + 5)), (V0, Rung.UPDATED), do.AwaitEngine(NOW + 5)),
        (
            make_pod(engine=EngineView().started("e", V0, start_by=NOW)),
            (V0, Rung.UPDATED),
            do.KillEngine("it did not start in time", is_fault=True),
        ),
        (up(RELEASED), (V1, Rung.UPDATED), do.Resume((WEIGHTS,))),
        (up(WEIGHTS_BACK), (V1, Rung.UPDATED), do.Update(V1)),
        (up(UPDATED), (V1, Rung.UPDATED), do.Wait()),
        (up(UPDATED), (V1, Rung.SERVING), do.Resume((KV_CACHE, CUDA_GRAPH))),
        (up(UPDATED.was_resumed(TAGS)), (V1, Rung.SERVING), do.Flush()),
        (up(UPDATED.was_resumed(TAGS).was_flushed()), (V1, Rung.SERVING), do.Continue()),
        (up(replace(make_engine(V1), agrees=False)), (V1, Rung.SERVING), do.CheckProbe(V1)),
        (up(make_engine(V1)), (V1, Rung.SERVING), do.OpenGate(V1)),
        # at rest
        (make_pod(gate_open=True), (V0, Rung.SERVING), do.Wait()),
        (make_pod(gate_open=True), (V0, Rung.PAUSED), do.Wait()),
        (make_pod(gate_open=True, stale_exports=True), (V0, Rung.SERVING), do.RemoveExports(V0)),
        (
            make_pod(gate_open=True, engine=make_engine(V2), rank=replace(make_rank(V2), saved=0)),
            (V2, Rung.SERVING),
            do.Save(2),
        ),
        # no room for a checkpoint
        (
            replace(down(replace(make_rank(V2), saved=0)), keep_after=NOW + 5),
            (V3, Rung.TRAINED),
            do.Wait(until=NOW + 5),
        ),
        (replace(down(replace(make_rank(V2), saved=0)), keep_after=NOW), (V3, Rung.TRAINED), do.Save(2)),
        (
            replace(
                make_pod(gate_open=True, engine=make_engine(V2), rank=replace(make_rank(V2), saved=0)),
                keep_after=NOW + 5,
            ),
            (V2, Rung.SERVING),
            do.Wait(until=NOW + 5),
        ),
    ],
)
def test_next_action_is(pod: PodView, target: tuple[WeightVersion, Rung], expected: do.Action | do.Wait) -> None:
    assert expected == next_action(pod, make_target(*target), RULES)


@pytest.mark.parametrize("keeps", KEPT)
def test_only_what_was_given_up_is_taken_back(keeps: tuple[str, ...]) -> None:
    started = EngineView().started("e1", V0, start_by=NOW, keeps=keeps).answered(V0)
    released = started.gate_closed().was_paused().was_flushed().was_released()
    assert (V0 if WEIGHTS in keeps else None) == released.version, "kept weights are still those of their version"
    assert do.Wait() == next_action(make_pod(engine=released), make_target(V1, Rung.RELEASED), RULES)
    takes_weights = do.Update(V1) if WEIGHTS in keeps else do.Resume((WEIGHTS,))
    assert takes_weights == next_action(up(released), make_target(V1, Rung.UPDATED), RULES)
    updated = released.was_resumed(tuple({WEIGHTS} - set(keeps))).was_updated(V1)
    assert do.Wait() == next_action(up(updated), make_target(V1, Rung.UPDATED), RULES)
    rest = tuple(tag for tag in (KV_CACHE, CUDA_GRAPH) if tag not in keeps)
    assert do.Resume(rest) == next_action(up(updated), make_target(V1, Rung.SERVING), RULES)


BY_CHECKSUM = replace(RULES, verify=Verify.CHECKSUM)


def test_f52_gate_opens_only_on_weights_that_the_group_agreed_on() -> None:
    engine = replace(make_engine(V1), checksum="same", agrees=False)
    pod, target = up(engine), make_target(V1, Rung.SERVING)
    assert do.Wait() == next_action(pod, target, BY_CHECKSUM), "nobody has compared them yet"
    assert do.Wait() == next_action(replace(pod, agreed=(V0, "old")), target, BY_CHECKSUM)
    assert do.OpenGate(V1) == next_action(replace(pod, agreed=(V1, "same")), target, BY_CHECKSUM)
    killed = next_action(replace(pod, agreed=(V1, "other")), target, BY_CHECKSUM)
    assert isinstance(killed, do.KillEngine)
    assert killed.is_fault


def test_last_step_is_saved_though_no_checkpoint_is_due() -> None:
    """The number of steps may be lowered while the job runs: the job's file still says the old one."""
    pod = make_pod(gate_open=True, engine=make_engine(V1), rank=replace(make_rank(V1), saved=0))
    target = make_target(V1, Rung.SERVING)
    assert do.Wait() == next_action(pod, target, RULES)
    assert do.Save(1) == next_action(pod, target.model_copy(update={"is_last": True}), RULES)


def test_rank_0_leaves_the_model_once_the_last_step_is_saved() -> None:
    target = make_target(V2, Rung.SERVING)
    last = target.model_copy(update={"is_last": True})
    rank = replace(make_rank(V2), saved=2, can_finish=True)
    pod = make_pod(gate_open=True, engine=make_engine(V2), rank=rank)

    assert do.Wait() == next_action(pod, target, RULES), "the job goes on"
    assert do.Save(2) == next_action(replace(pod, ranks=(replace(rank, saved=1),)), last, RULES)
    assert do.Finish(V2) == next_action(pod, last, RULES)
    assert do.Finish(V2) == next_action(replace(pod, ranks=(replace(rank, finished=WeightVersion(2, 0)),)), last, RULES)
    for done in (replace(rank, finished=V2), replace(rank, can_finish=False), replace(rank, rank=1)):
        assert do.Wait() == next_action(replace(pod, ranks=(done,)), last, RULES)


def test_gate_of_a_lost_engine_closes_before_anything_else() -> None:
    pod = make_pod(engine=EngineView(), gate_open=True)
    assert do.CloseGate() == next_action(pod, make_target(V0, Rung.SERVING), RULES)
    assert do.CloseGate() == next_action(pod, None, RULES)


def test_nothing_is_done_while_the_runner_is_unknown() -> None:
    pod = replace(make_pod(), runner_known=False)
    action = next_action(pod, make_target(V1, Rung.RELEASED), RULES)
    assert isinstance(action, do.Wait)
    assert "RunnerUnreachable" == action.reason
    assert () == pod.facts().engines, "the operator is told that nothing is known"


def test_engine_that_does_not_settle_in_time_is_killed() -> None:
    action = next_action(make_pod(in_flight=1, closed_at=NOW - 30), make_target(V1, Rung.PAUSED), RULES)
    assert isinstance(action, do.KillEngine)


def test_released_engine_whose_trainer_died_waits_for_a_new_lineage() -> None:
    action = next_action(down(make_rank().gone(-9)), make_target(V1, Rung.TRAINED), RULES)
    assert do.Wait(reason="TrainerDied", message="trainer rank 0 of lineage 1 ended with code -9") == action


def test_engine_half_way_up_is_killed_when_its_trainers_must_start_again() -> None:
    pod = up(WEIGHTS_BACK)
    action = next_action(pod, make_target(WeightVersion(1, 2), Rung.TRAINED), RULES)
    assert isinstance(action, do.KillEngine)


def test_trainer_ahead_of_its_target_is_a_problem() -> None:
    action = next_action(down(make_rank(V2)), make_target(V1, Rung.TRAINED), RULES)
    assert isinstance(action, do.Wait)
    assert "TrainerAhead" == action.reason


def test_whole_export_is_checked_again_by_an_agent_that_did_not_see_it_made() -> None:
    pod = make_pod(engine=EngineView(), whole=None)
    assert do.VerifyExport(V0) == next_action(pod, make_target(V0, Rung.UPDATED), RULES)


@pytest.mark.parametrize("goal_or_signal", ["goal", "signal"])
def test_ending_pod_hands_back_samples_and_then_ends_everything(goal_or_signal: str) -> None:
    target = make_target(V0, Rung.SERVING, goal=Goal.STOP if goal_or_signal == "goal" else Goal.CLIMB)
    pod = make_pod(gate_open=True, in_flight=1, terminating=goal_or_signal == "signal")
    taken = []
    for _ in range(5):
        action = next_action(pod, target, RULES)
        taken.append(type(action))
        match action:
            case do.CloseGate():
                pod = replace(pod, gate_open=False, closed_at=NOW)
            case do.AbortAll():
                pod = replace(pod, in_flight=0)
            case do.KillEngine():
                pod = replace(pod, engine=EngineView())
            case do.StopTrainers():
                pod = replace(pod, ranks=(pod.ranks[0].gone(-9),))
            case do.EndPod(code=code):
                assert (0 if goal_or_signal == "goal" else 143) == code
            case other:
                raise AssertionError(f"{other} while the pod ends")
    assert [do.CloseGate, do.AbortAll, do.KillEngine, do.StopTrainers, do.EndPod] == taken


WAITS = replace(RULES, waits=True)


@pytest.mark.parametrize(
    ("since_closed_s", "in_flight", "expected"),
    [
        (0.0, 2, do.Wait(until=NOW + 20)),
        (19.0, 2, do.Wait(until=NOW + 1)),
        (19.0, 0, do.Pause()),
        (20.0, 2, do.AbortAll(NOW + 10)),
        (30.0, 2, do.KillEngine("2 requests were in flight 30 s after the gate closed", is_fault=True)),
    ],
)
def test_f86_responses_may_finish_where_the_job_waits_for_them(
    since_closed_s: float, in_flight: int, expected: do.Action | do.Wait
) -> None:
    pod = make_pod(in_flight=in_flight, closed_at=NOW - since_closed_s)
    assert expected == next_action(pod, make_target(V1, Rung.PAUSED), WAITS)


def test_f86_pod_that_ends_waits_for_no_response() -> None:
    for pod, target in (
        (make_pod(in_flight=2, terminating=True), None),
        (make_pod(in_flight=2), make_target(V1, Rung.PAUSED, goal=Goal.STOP)),
    ):
        assert do.AbortAll(NOW + 30) == next_action(pod, target, WAITS)


# ----------------------------------------------------------------------------------------------- with a reference
SCORED = replace(RULES, ladder=SCORED_TIME_SLICED)


def scored(rank: RankView, step: int) -> RankView:
    return replace(rank, scored=step)


@pytest.mark.parametrize(
    ("pod", "target", "expected"),
    [
        (DOWN, (V1, Rung.RELEASED), do.Wait()),
        (NEW_POD, (V0, Rung.SCORED), do.StartTrainers(1)),
        (DOWN, (V1, Rung.SCORED), do.FetchShards(1)),
        (down(make_rank(), shards=1), (V1, Rung.SCORED), do.Onload()),
        (down(onloaded(V0), shards=1), (V1, Rung.SCORED), do.Score(1)),
        (down(scored(onloaded(V0), 0), shards=1), (V1, Rung.SCORED), do.Score(1)),
        (down(scored(onloaded(V0), 1), shards=1), (V1, Rung.SCORED), do.Wait()),
        (down(scored(onloaded(V0), 1), shards=1), (V1, Rung.TRAINED), do.Train(1)),
        (down(onloaded(V0), shards=1), (V1, Rung.TRAINED), do.Score(1)),
        # steps that are done again, before the one that the group waits for
        (down(onloaded(V1), shards=2), (V3, Rung.SCORED), do.Score(2)),
        (down(scored(onloaded(V1), 2), shards=2), (V3, Rung.SCORED), do.Train(2)),
        (down(scored(replace(make_rank(V2), saved=None), 2)), (V3, Rung.SCORED), do.Save(2)),
        (down(onloaded(V2), shards=3), (V3, Rung.SCORED), do.Score(3)),
        (down(scored(onloaded(V2), 3), shards=3), (V3, Rung.SCORED), do.Wait()),
        # what need not be trained
        (down(onloaded(V1)), (V1, Rung.SCORED), do.Wait()),
    ],
)
def test_each_batch_is_scored_before_it_is_trained(
    pod: PodView, target: tuple[WeightVersion, Rung], expected: do.Action | do.Wait
) -> None:
    assert expected == next_action(pod, make_target(*target), SCORED)


def test_beside_rollout_it_is_the_same() -> None:
    rules = replace(RULES, ladder=SCORED_RESIDENT)
    pod = make_pod(gate_open=True, rank=onloaded(V0), shards=1)
    assert (do.Score(1), do.Wait()) == next_actions(pod, make_target(V1, Rung.SCORED), rules)
    pod = replace(pod, ranks=(scored(onloaded(V0), 1),))
    assert (do.Wait(), do.Wait()) == next_actions(pod, make_target(V1, Rung.SCORED), rules)
    assert (do.Train(1), do.Wait()) == next_actions(pod, make_target(V1, Rung.TRAINED), rules)


# --------------------------------------------------------------------------------------------- the resident ladder
IDLE = do.Wait()
BESIDE = replace(RULES, ladder=RESIDENT)
SERVING_V0 = make_pod(gate_open=True, rank=onloaded(V0))


def beside(pod: PodView, version: WeightVersion, rung: Rung) -> tuple[do.Action | do.Wait, ...]:
    """What the trainers do, and what the engine does beside them."""
    return next_actions(pod, make_target(version, rung), BESIDE)


def has_new_weights(**changes: Any) -> PodView:
    """V1 is there for an engine that serves V0."""
    return replace(make_pod(gate_open=True, rank=onloaded(V1), whole=V1), **changes)


UPDATED_IN_PLACE = drained_engine().was_updated(V1)


@pytest.mark.parametrize(
    ("pod", "target", "trainers", "engine"),
    [
        # start-up: an engine needs weights, which the trainers make
        (NEW_POD, (V0, Rung.SEALED), IDLE, IDLE),
        (NEW_POD, (V0, Rung.TRAINED), do.StartTrainers(1), IDLE),
        (replace(NEW_POD, ranks=(replace(make_rank(), exported=None),)), (V0, Rung.EXPORTED), do.Onload(), IDLE),
        (replace(NEW_POD, ranks=(onloaded(V0),)), (V0, Rung.EXPORTED), do.VerifyExport(V0), IDLE),
        (replace(NEW_POD, ranks=(onloaded(V0),), whole=V0), (V0, Rung.DRAINED), IDLE, IDLE),
        (replace(NEW_POD, ranks=(onloaded(V0),), whole=V0), (V0, Rung.UPDATED), IDLE, do.StartEngine(V0)),
        # training beside rollout
        (SERVING_V0, (V1, Rung.SEALED), IDLE, IDLE),
        (SERVING_V0, (V1, Rung.TRAINED), do.FetchShards(1), IDLE),
        (replace(SERVING_V0, shards=1), (V1, Rung.TRAINED), do.Train(1), IDLE),
        (has_new_weights(), (V1, Rung.EXPORTED), IDLE, IDLE),
        (has_new_weights(whole=V0), (V1, Rung.EXPORTED), do.VerifyExport(V1), IDLE),
        # an engine that is lost starts on what there is, whatever the trainers do
        (replace(SERVING_V0, gate_open=False, engine=EngineView()), (V1, Rung.SEALED), IDLE, do.StartEngine(V0)),
        (
            replace(SERVING_V0, gate_open=False, engine=EngineView(), shards=1),
            (V1, Rung.TRAINED),
            do.Train(1),
            do.StartEngine(V0),
        ),
        (
            replace(SERVING_V0, gate_open=False, engine=EngineView(), whole=None),
            (V1, Rung.SEALED),
            IDLE,
            do.VerifyExport(V0),
        ),
        (replace(SERVING_V0, gate_open=False), (V1, Rung.SEALED), IDLE, do.OpenGate(V0)),
        (
            replace(SERVING_V0, gate_open=False, engine=replace(make_engine(), agrees=False)),
            (V1, Rung.SEALED),
            IDLE,
            do.CheckProbe(V0),
        ),
        (has_new_weights(gate_open=False), (V1, Rung.EXPORTED), IDLE, do.OpenGate(V0)),
        # new weights
        (has_new_weights(), (V1, Rung.CLOSED), IDLE, do.CloseGate()),
        (has_new_weights(gate_open=False), (V1, Rung.SETTLED), IDLE, IDLE),
        (has_new_weights(gate_open=False, in_flight=2), (V1, Rung.PAUSED), IDLE, do.AbortAll(NOW + 30)),
        (has_new_weights(gate_open=False), (V1, Rung.PAUSED), IDLE, do.Pause()),
        (has_new_weights(gate_open=False, engine=make_engine().was_paused()), (V1, Rung.PAUSED), IDLE, IDLE),
        (has_new_weights(gate_open=False, engine=make_engine().was_paused()), (V1, Rung.DRAINED), IDLE, do.Flush()),
        (has_new_weights(gate_open=False, engine=drained_engine()), (V1, Rung.DRAINED), IDLE, IDLE),
        (has_new_weights(gate_open=False, engine=drained_engine()), (V1, Rung.UPDATED), IDLE, do.Update(V1)),
        (has_new_weights(gate_open=False, engine=UPDATED_IN_PLACE), (V1, Rung.UPDATED), IDLE, IDLE),
        (has_new_weights(gate_open=False, engine=UPDATED_IN_PLACE), (V1, Rung.SERVING), IDLE, do.Flush()),
        (
            has_new_weights(gate_open=False, engine=UPDATED_IN_PLACE.was_flushed()),
            (V1, Rung.SERVING),
            IDLE,
            do.Continue(),
        ),
        (has_new_weights(gate_open=False, engine=make_engine(V1)), (V1, Rung.SERVING), IDLE, do.OpenGate(V1)),
        # at rest, and a checkpoint from the device
        (has_new_weights(engine=make_engine(V1), stale_exports=True), (V1, Rung.SERVING), do.RemoveExports(V1), IDLE),
        (
            make_pod(gate_open=True, engine=make_engine(V2), rank=replace(onloaded(V2), saved=0), whole=V2),
            (V2, Rung.SERVING),
            do.Save(2),
            IDLE,
        ),
        (
            make_pod(gate_open=True, engine=make_engine(V2), rank=replace(onloaded(V2), saved=0), whole=V2),
            (V3, Rung.TRAINED),
            do.Save(2),
            IDLE,
        ),
    ],
)
def test_next_actions_of_a_resident_pod_are(
    pod: PodView,
    target: tuple[WeightVersion, Rung],
    trainers: do.Action | do.Wait,
    engine: do.Action | do.Wait,
) -> None:
    assert (trainers, engine) == beside(pod, *target)


def test_resident_engine_serves_older_weights_again_when_a_switch_is_given_up() -> None:
    """Its trainers died while it was drained: they take their time, and it has weights to serve."""
    pod = has_new_weights(gate_open=False, engine=drained_engine())
    assert do.Continue() == beside(pod, WeightVersion(1, 2), Rung.SEALED)[1]
    pod = replace(pod, engine=replace(UPDATED_IN_PLACE.was_flushed().was_continued(), agrees=False))
    assert do.CheckProbe(V1) == beside(pod, WeightVersion(1, 2), Rung.SEALED)[1], "or newer ones of the lineage before"


def test_h23_h25_resident_engine_that_is_paused_waits_for_its_group() -> None:
    """An agent that was restarted between Paused and Updated does not open its gate again."""
    pod = has_new_weights(gate_open=False, engine=make_engine().was_paused())
    assert (IDLE, IDLE) == beside(pod, V1, Rung.EXPORTED)


# ------------------------------------------------------------------------------------------ a pod in which all may fail
CANT_FAIL = (do.KillEngine, do.StopTrainers, do.CloseGate, do.OpenGate)


class Chance(Enum):
    """What may happen instead of the next action's plain success."""

    GOES_WELL = auto()
    FAILS = auto()  # the call is answered no, or not at all
    FAILS_AFTER_ITS_EFFECT = auto()  # the agent can't tell it from the one before
    ENGINE_DIES = auto()
    TRAINER_DIES = auto()
    BOTH_DIE = auto()
    AGENT_RESTARTS = auto()
    AGENT_RESTARTS_MEANWHILE = auto()  # the call had its effect, nobody wrote it down
    REQUESTS_COME = auto()
    TIME_PASSES = auto()


@dataclass
class Engine:
    """The truth about an engine process."""

    number: int
    version: WeightVersion | None
    up: bool = False
    paused: bool = False
    released: set[str] = field(default_factory=set)
    flushed_in: int = -1  # closing of the gate in which the last flush was


@dataclass
class World:
    """A pod, its operator, and the checks. `view` is what the agent believes, the rest is so."""

    view: PodView
    ladder: Ladder = TIME_SLICED
    keeps: tuple[str, ...] = ()
    epoch_version: WeightVersion = V0
    engine: Engine | None = None
    on_device: bool = False
    journal_version: WeightVersion | None = None
    closings: int = 0
    releases: set[tuple[int, int]] = field(default_factory=set)  # (engine, closing)
    started: int = 0
    pending: bool = False
    turns: int = 0
    last_waits: tuple[do.Action | do.Wait, ...] = ()

    @cached_property
    def rules(self) -> Rules:
        return replace(RULES, ladder=self.ladder)

    # ------------------------------------------------------------------------------------------------- the operator
    def target(self) -> PodTarget:
        """A trainer that died calls for a new lineage, unless the pod serves; else one barrier up."""
        at = self.epoch_version
        rung = self.ladder.standing(self.view.facts(), at)
        rank = self.view.ranks[0]
        if rung is not Rung.SERVING and rank.lineage == at.lineage and not rank.is_alive:
            self.epoch_version = at = WeightVersion(at.step, at.lineage + 1)
            rung = self.ladder.standing(self.view.facts(), at)
        return make_target(at, self.ladder.next_barrier(rung))

    # --------------------------------------------------------------------------------------------------- what happens
    def advance(self, chance: Chance) -> None:
        self.befall(chance)
        elapsed = 40.0 if chance is Chance.TIME_PASSES else 0.01
        self.view = replace(self.view, now=self.view.now + elapsed)
        choices = next_actions(self.view, self.target(), self.rules)
        actions = [choice for choice in choices if not isinstance(choice, do.Wait)]
        if not actions:
            self.last_waits = choices
            until = max((choice.until or 0.0 for choice in choices if isinstance(choice, do.Wait)), default=0.0)
            self.view = replace(self.view, now=max(self.view.now, until))
            return
        self.turns += 1
        action = actions[self.turns % len(actions)]
        self.check(action)
        before = self.view
        fails = chance in (Chance.FAILS, Chance.FAILS_AFTER_ITS_EFFECT) and not isinstance(action, CANT_FAIL)
        if chance is not Chance.FAILS or not fails:
            self.take_effect(action)
        if fails:
            self.view = before
            self.fail(action)
        if chance is Chance.AGENT_RESTARTS_MEANWHILE:
            self.pending = isinstance(action, do.Release | do.Resume | do.Update)
            self.agent_restarts()

    def fail(self, action: do.Action) -> None:
        if isinstance(action, do.StartEngine):
            self.engine = None
            self.set_engine(EngineView().gone(start_after=self.view.now + 1))
        elif isinstance(action, do.StartTrainers):
            self.set_rank(RankView(0).started("", action.lineage, start_by=0.0).gone(127))
        elif action.lane is do.Lane.ENGINE:
            self.set_engine(self.view.engine.broke("it failed", TAGS))
        elif isinstance(action, do.FetchShards):
            self.view = replace(self.view, fetch_after=self.view.now + 1)
        else:
            self.on_device = self.on_device or isinstance(action, do.Onload)
            self.set_rank(self.view.ranks[0].broke("it failed"))

    def befall(self, chance: Chance) -> None:
        """What happens to the pod by itself."""
        if chance in (Chance.ENGINE_DIES, Chance.BOTH_DIE):
            self.engine_dies()
        if chance in (Chance.TRAINER_DIES, Chance.BOTH_DIE):
            self.trainer_dies()
        if chance is Chance.AGENT_RESTARTS:
            self.agent_restarts()
        if chance is Chance.REQUESTS_COME and self.view.gate_open:
            assert self.engine is not None
            assert not self.engine.paused
            assert not self.engine.released
            self.view = replace(self.view, in_flight=3)

    def engine_dies(self) -> None:
        self.engine = None
        self.set_engine(EngineView())
        self.view = replace(self.view, in_flight=0)

    def trainer_dies(self) -> None:
        if self.view.ranks[0].is_alive:
            self.on_device = False
            self.set_rank(self.view.ranks[0].gone(-9))

    def agent_restarts(self) -> None:
        """As `engine.Engine.attach`: what the journal says, and what the engine can be asked."""
        self.closings += 1
        engine, view = self.engine, EngineView()
        if engine is not None:
            start_by, on = self.view.now + 30, self.journal_version or V0
            view = EngineView().started(str(engine.number), on, start_by=start_by, keeps=self.keeps)
            if engine.up:
                whole = not engine.released
                view = replace(
                    view.answered(V0),
                    version=engine.version,
                    paused=engine.paused,
                    drained=engine.paused and not whole,
                    flushed=False,
                    tags={**view.tags, **dict.fromkeys(engine.released, TagState.RELEASED)},
                )
            if self.pending:
                view = view.broke("the agent ended during a call", TAGS)
        self.pending = False
        self.view = replace(
            self.view,
            gate_open=False, in_flight=0, closed_at=self.view.now, engine=view, whole=None, shards=None,
        )  # fmt: skip

    def set_engine(self, engine: EngineView) -> None:
        self.view = replace(self.view, engine=engine)

    def set_rank(self, rank: RankView) -> None:
        self.view = replace(self.view, ranks=(rank,))

    # ------------------------------------------------------------------------------------------------------ the checks
    def check(self, action: do.Action) -> None:
        """What must be true of the pod, not of what the agent believes, when an action is taken."""
        engine = self.engine
        if self.ladder.serves_on:
            assert not isinstance(action, do.Release | do.Resume | do.Offload), "nothing leaves the device"
            is_well = self.view.engine.state is EngineState.READY and self.view.engine.broken is None
            if isinstance(action, do.CloseGate) and is_well:
                assert self.view.whole == self.epoch_version, "no gate closes before the new weights are there"
        if isinstance(action, do.Release):
            assert engine is not None
            assert not self.view.gate_open
            assert self.view.in_flight == 0
            assert engine.paused
            assert engine.flushed_in == self.closings, "drained since the gate last closed"
            assert not engine.released
            assert (engine.number, self.closings) not in self.releases, "once per incarnation and closing"
            self.releases.add((engine.number, self.closings))
        if isinstance(action, do.StartEngine | do.Resume):
            assert self.ladder.serves_on or not self.on_device, "no engine memory while a trainer is on the device"
        if isinstance(action, do.StartEngine | do.Update):
            assert self.view.whole == action.version
        if isinstance(action, do.Update):
            assert engine is not None
            assert not self.view.gate_open
            assert self.view.in_flight == 0
            assert engine.paused
            assert not self.ladder.serves_on or engine.flushed_in == self.closings, "drained since the gate closed"
        if isinstance(action, do.Resume):
            assert engine is not None
            assert set(action.tags) <= engine.released
        if isinstance(action, do.Onload | do.Score | do.Train | do.Export):
            is_off = engine is None or engine.released == set(TAGS) - set(self.keeps)
            assert self.ladder.serves_on or is_off, "no trainer while engine memory is mapped that it does not keep"
            assert self.ladder.serves_on or engine is None or KV_CACHE in engine.released
        if isinstance(action, do.Update):
            assert engine is not None
            assert WEIGHTS not in engine.released
        if isinstance(action, do.Continue | do.OpenGate):
            assert engine is not None
            assert not engine.released
            assert self.ladder.serves_on or engine.version == self.epoch_version
        if isinstance(action, do.OpenGate):
            assert action.version == self.view.engine.version
            assert engine is not None
            assert not engine.paused
            assert self.view.engine.agrees

    def take_effect(self, action: do.Action) -> None:  # noqa: C901 - a table
        engine, view, rank = self.engine, self.view.engine, self.view.ranks[0]
        match action:
            case do.CloseGate():
                self.closings += 1
                self.view = replace(self.view, gate_open=False, closed_at=self.view.now, engine=view.gate_closed())
            case do.OpenGate():
                self.view = replace(self.view, gate_open=True)
            case do.StartEngine(version=version):
                self.started += 1
                self.engine, self.journal_version = Engine(self.started, version), version
                start_by = self.view.now + 30
                self.set_engine(EngineView().started(str(self.started), version, start_by=start_by, keeps=self.keeps))
            case do.KillEngine():
                self.engine_dies()
            case do.StopTrainers():
                self.trainer_dies()
            case do.AbortAll():
                self.view = replace(self.view, in_flight=0)
            case do.StartTrainers(lineage=lineage):
                self.set_rank(RankView(0).started("t", lineage, start_by=self.view.now + 30))
            case do.AwaitTrainers():
                self.set_rank(rank.reported(state=TrainerState.OFFLOADED, step=0, saved=0))
            case do.FetchShards(step=step):
                self.view = replace(self.view, shards=step)
            case do.Onload():
                self.on_device = True
                self.set_rank(rank.reported(state=TrainerState.ONLOADED))
            case do.Offload():
                self.on_device = False
                self.set_rank(rank.reported(state=TrainerState.OFFLOADED))
            case do.Score(step=step):
                assert rank.step == step - 1
                self.set_rank(rank.reported(scored=step))
            case do.Train(step=step):
                assert not self.ladder.scores or rank.scored == step, "no batch is trained unscored"
                self.set_rank(rank.reported(step=step))
            case do.Export(version=version):
                self.set_rank(rank.reported(exported=version))
            case do.VerifyExport(version=version):
                self.view = replace(self.view, whole=version)
            case do.Save(step=step):
                self.set_rank(rank.reported(saved=step))
            case do.RemoveExports() | do.Finish() | do.EndPod():
                raise AssertionError(f"{action} is not expected here")
            case _:
                assert engine is not None
                self.set_engine(self.change_engine(action, engine, view))

    def change_engine(self, action: do.EngineAction, engine: Engine, view: EngineView) -> EngineView:
        match action:
            case do.AwaitEngine():
                engine.up = True
                assert engine.version is not None
                return view.answered(engine.version)
            case do.Pause():
                engine.paused = True
                return view.was_paused()
            case do.Flush():
                engine.flushed_in = self.closings if engine.paused else -1
                return view.was_flushed()
            case do.Release():
                engine.released = set(TAGS) - set(self.keeps)
                engine.version = engine.version if WEIGHTS in self.keeps else None
                return view.was_released()
            case do.Resume(tags=tags):
                engine.released -= set(tags)
                return view.was_resumed(tags)
            case do.Update(version=version):
                engine.version = version
                return view.was_updated(version)
            case do.Continue():
                engine.paused = False
                return view.was_continued()
            case do.CheckProbe():
                return view.agreed()
            case do.StartEngine() | do.KillEngine() | do.AbortAll():
                raise AssertionError(f"{action} is not a call that changes an engine")
            case _:
                assert_never(action)


@settings(max_examples=100)
@example({15: Chance.AGENT_RESTARTS, 19: Chance.TRAINER_DIES, 29: Chance.TRAINER_DIES}, 1)
@pytest.mark.parametrize(
    ("ladder", "keeps"),
    [*((TIME_SLICED, keeps) for keeps in KEPT), (RESIDENT, ()), (SCORED_TIME_SLICED, ()), (SCORED_RESIDENT, ())],
)
@given(st.dictionaries(st.integers(0, 70), st.sampled_from(Chance), max_size=8), st.integers(1, 3))
def test_pod_keeps_every_promise_and_arrives_whatever_fails_on_the_way(
    ladder: Ladder, keeps: tuple[str, ...], chances: dict[int, Chance], steps: int
) -> None:
    """chances: what happens at which action; all others go well."""
    world, action = World(NEW_POD, ladder, keeps), 0
    for step in range(steps + 1):
        world.epoch_version = WeightVersion(step, world.epoch_version.lineage)
        while ladder.standing(world.view.facts(), world.epoch_version) is not Rung.SERVING:
            world.advance(chances.get(action, Chance.GOES_WELL))
            action += 1
            assert action < 600, f"stuck below Serving: {world.last_waits}, {world.view}"
        world.view = replace(world.view, in_flight=2)
    assert WeightVersion(steps, world.epoch_version.lineage) == world.view.engine.version
