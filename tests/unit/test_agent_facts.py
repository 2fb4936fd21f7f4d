"""The action table: exact choices for exact views, and every state of a pod (`fakes.model`) whose calls may fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import PLACED, ROLLOUT, make_job, make_target
from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.planner.next_actions import ORDER_S, Rules, next_actions
from colocated_rl_agent.planner.views import (
    CUDA_GRAPH,
    KV_CACHE,
    TAGS,
    WEIGHTS,
    EngineView,
    PodView,
    RankView,
)
from colocated_rl_api.facts import EngineState, TrainerState
from colocated_rl_api.ladder import (
    RESIDENT,
    ROLLOUT_ONLY,
    SCORED_RESIDENT,
    SCORED_TIME_SLICED,
    TIME_SLICED,
)
from colocated_rl_api.member_wire import Goal, PodTarget
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from fakes.explore import all_must_be_well, explore
from fakes.model import FAILING, JobModel

V0, V1, V2, V3 = (WeightVersion(step, 1) for step in range(4))
RULES = Rules(TIME_SLICED, settle_s=30.0, checkpoint_every=2, probes=True)
NOW = 100.0
NEW_POD = PodView(
    now=NOW,
    runner_known=True,
    terminating=False,
    gate_open=False,
    in_flight=0,
    closed_at=NOW,
    engine=EngineView(),
    ranks=(RankView(0),),
)


def next_action(pod: PodView, target: PodTarget | None, rules: Rules) -> do.Action | do.Wait:
    """Return the action of a time-sliced pod, whose engine and trainers take turns."""
    (action,) = next_actions(pod, target, rules)
    return action


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
HALF_BACK = replace(WEIGHTS_BACK, version=V0)
NOT_RELEASED_TWICE = "it is neither whole nor released, and nothing is released twice behind one closed gate"
DOWN = make_pod(engine=RELEASED)


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
        (make_pod(engine=HALF_BACK), (V1, Rung.RELEASED), do.KillEngine(NOT_RELEASED_TWICE)),
        (make_pod(engine=replace(HALF_BACK, released=False)), (V1, Rung.RELEASED), do.KillEngine(NOT_RELEASED_TWICE)),
        (make_pod(engine=RELEASED.was_resumed(TAGS)), (V1, Rung.RELEASED), do.KillEngine(NOT_RELEASED_TWICE)),
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


@pytest.mark.parametrize("keeps", [(), (WEIGHTS,), (CUDA_GRAPH,), (WEIGHTS, CUDA_GRAPH)])
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


BY_CHECKSUM = replace(RULES, probes=False, compares=True)


def test_f52_gate_opens_only_on_weights_that_the_group_agreed_on() -> None:
    engine = replace(make_engine(V1), checksum="same", agrees=False)
    pod, target = up(engine), make_target(V1, Rung.SERVING)
    assert do.Wait() == next_action(pod, target, BY_CHECKSUM), "nobody has compared them yet"
    assert do.Wait() == next_action(replace(pod, agreed=(V0, "old")), target, BY_CHECKSUM)
    assert do.OpenGate(V1) == next_action(replace(pod, agreed=(V1, "same")), target, BY_CHECKSUM)
    killed = next_action(replace(pod, agreed=(V1, "other")), target, BY_CHECKSUM)
    assert isinstance(killed, do.KillEngine)
    assert killed.is_fault


DOUBTED = make_engine(V1).was_doubted(V1, "differs by 0.084 nats")
REJECTED = DOUBTED.gone().started("e2", V1, start_by=NOW + 5).answered(V1).was_doubted(V1, "differs again").gone()


def test_an_engine_that_was_doubted_is_killed_and_started_again_on_the_same_export() -> None:
    assert DOUBTED.rejected is None
    target = make_target(V1, Rung.SERVING)
    assert do.KillEngine("differs by 0.084 nats") == next_action(up(DOUBTED), target, RULES)
    assert do.StartEngine(V1) == next_action(up(DOUBTED.gone()), target, RULES)


def test_weights_that_were_doubted_twice_get_no_third_engine() -> None:
    """An engine that held the right weights, in 16 bits, was killed and started again for ever."""
    waits = do.Wait(reason="WeightsDiffer", message="differs again")
    pod = up(REJECTED)
    assert waits == next_action(pod, make_target(V1, Rung.SERVING), RULES)
    assert waits == next_action(replace(pod, now=NOW + 1e6), make_target(V1, Rung.UPDATED), RULES)
    (engine,) = pod.facts().engines
    assert engine.rejected is not None
    assert (V1, "differs again") == (engine.rejected.version, engine.rejected.message)


def test_weights_of_the_next_lineage_get_an_engine_again() -> None:
    again = WeightVersion(1, 2)
    pod = make_pod(engine=REJECTED, rank=make_rank(again), whole=again)
    assert do.StartEngine(again) == next_action(pod, make_target(again, Rung.UPDATED), RULES)
    engine = REJECTED.started("e3", again, start_by=NOW + 5)
    assert engine.rejected is None
    assert engine.answered(again).was_doubted(again, "differs").rejected is None, "these were doubted once"


def test_an_engine_whose_checksum_differs_is_doubted_for_it() -> None:
    pod = up(replace(make_engine(V1), checksum="mine"))
    killed = next_action(replace(pod, agreed=(V1, "other")), make_target(V1, Rung.SERVING), BY_CHECKSUM)
    assert isinstance(killed, do.KillEngine)
    assert V1 == killed.doubts


def test_an_engine_that_ended_of_the_check_counts_as_doubted() -> None:
    gone = make_engine(V1).gone().was_doubted(V1, "no answer")
    assert gone.is_absent
    assert gone.broken is None
    assert V1 == gone.doubted


def test_last_step_is_saved_though_no_checkpoint_is_due() -> None:
    """The number of steps may be lowered while the job runs: the job's file still says the old one."""
    pod = make_pod(gate_open=True, engine=make_engine(V1), rank=replace(make_rank(V1), saved=0))
    target = make_target(V1, Rung.SERVING)
    assert do.Wait() == next_action(pod, target, RULES)
    assert do.Save(1) == next_action(pod, target.model_copy(update={"is_last": True}), RULES)


def test_a_step_that_the_operator_asks_to_save_is_saved_unless_it_is_the_model_that_the_job_began_with() -> None:
    for version, expected in ((V1, do.Save(1)), (WeightVersion(0, 1), do.Wait())):
        pod = make_pod(gate_open=True, engine=make_engine(version), rank=replace(make_rank(version), saved=None))
        target = make_target(version, Rung.SERVING)
        assert do.Wait() == next_action(pod, target, RULES)
        assert expected == next_action(pod, target.model_copy(update={"saves": True}), RULES)


def mirroring(version: WeightVersion = V1, **more: object) -> RankView:
    """A rank of a job that keeps steps in memory, with no checkpoint of this one."""
    return replace(replace(make_rank(version), saved=0, can_mirror=True), **more)  # type: ignore[arg-type]


def test_a_step_without_a_checkpoint_is_kept_in_memory_once() -> None:
    target = make_target(V1, Rung.SERVING)
    pod = make_pod(gate_open=True, engine=make_engine(V1), rank=mirroring())
    assert do.RemoveExports(V1) == next_action(replace(pod, stale_exports=True), target, RULES)
    assert do.Mirror(1) == next_action(pod, target, RULES)
    saves = target.model_copy(update={"saves": True})
    assert do.Mirror(1) == next_action(pod, saves, RULES), "another pod may not know of it yet, and keep the step"
    assert do.Save(1) == next_action(replace(pod, ranks=(mirroring(mirrored=1),)), saves, RULES)
    for rank in (mirroring(mirrored=1), mirroring(can_mirror=False), mirroring(saved=1)):
        assert do.Wait() == next_action(replace(pod, ranks=(rank,)), target, RULES)
    before = WeightVersion(0, 1)
    ahead = replace(pod, ranks=(mirroring(V2),), engine=make_engine(V2))
    assert do.Save(2) == next_action(ahead, make_target(V2, Rung.SERVING), RULES), "its checkpoint is due"
    for saved in (0, None):
        start = make_pod(gate_open=True, rank=mirroring(before, saved=saved))
        assert do.Wait() == next_action(start, make_target(V0, Rung.SERVING), RULES), "the job's model is there anyway"


@pytest.mark.parametrize(
    ("rank", "at", "expected"),
    [
        (mirroring(), V2, do.Mirror(1)),
        (mirroring(state=TrainerState.ONLOADED), V2, do.Offload()),
        (mirroring(mirrored=1), V2, do.FetchShards(2)),
        (mirroring(), V3, do.FetchShards(2)),
    ],
    ids=["late", "late, on the device", "is kept", "a step that is repeated"],
)
def test_the_step_before_is_kept_in_memory_before_the_next_begins(
    rank: RankView, at: WeightVersion, expected: do.Action
) -> None:
    """All pods of a group decide alike, whatever each has seen: its ranks keep a step together, or train together."""
    assert expected == next_action(down(rank), make_target(at, Rung.TRAINED), RULES)


def test_rank_0_leaves_the_model_once_the_last_step_is_saved() -> None:
    target = make_target(V2, Rung.SERVING)
    last = target.model_copy(update={"is_last": True})
    rank = replace(make_rank(V2), saved=2, can_finish=True)
    pod = make_pod(gate_open=True, engine=make_engine(V2), rank=rank)

    assert do.Wait() == next_action(pod, target, RULES), "the job goes on"
    assert do.Save(2) == next_action(replace(pod, ranks=(replace(rank, saved=1),)), last, RULES)
    assert do.SaveModel(V2) == next_action(pod, last, RULES)
    assert do.SaveModel(V2) == next_action(
        replace(pod, ranks=(replace(rank, finished=WeightVersion(2, 0)),)), last, RULES
    )
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


STANDS = make_rank(V1)  # behind step 1, of which there is no checkpoint
ENDS = make_pod(engine=EngineView(), rank=STANDS, whole=V1, terminating=True)
STOP = do.StopTrainers("the pod ends")


def asks_to_save(version: WeightVersion = V1, *, goal: Goal = Goal.CLIMB, saves: bool = True) -> PodTarget:
    return make_target(version, Rung.SERVING, goal=goal).model_copy(update={"saves": saves})


@pytest.mark.parametrize(
    ("changes", "target", "expected"),
    [
        ({}, asks_to_save(), do.Save(1)),
        ({"engine": make_engine(V1)}, asks_to_save(), do.KillEngine("the pod ends")),
        ({"gate_open": True}, asks_to_save(), do.CloseGate()),
        ({"ranks": (replace(STANDS, can_mirror=True, mirrored=0),)}, asks_to_save(), do.Mirror(1)),
        ({"ranks": (replace(STANDS, can_mirror=True, mirrored=1),)}, asks_to_save(), do.Save(1)),
        ({"ranks": (replace(STANDS, saved=1),)}, asks_to_save(), STOP),
        ({"ranks": (replace(STANDS, state=TrainerState.ONLOADED),)}, asks_to_save(), STOP),
        ({"ranks": (make_rank(V0),)}, asks_to_save(), STOP),
        ({}, asks_to_save(WeightVersion(1, 2)), STOP),
        ({"ranks": (replace(STANDS, lineage=2),)}, asks_to_save(), STOP),
        ({"ranks": (make_rank(V0),)}, asks_to_save(V0), STOP),
        ({"ranks": (replace(make_rank(V0), saved=None),)}, asks_to_save(V0), STOP),
        ({"keep_after": NOW + 1}, asks_to_save(), STOP),
        ({"keep_after": NOW}, asks_to_save(), do.Save(1)),
        ({}, asks_to_save(saves=False), do.Wait(until=NOW + 3.0)),
        ({"now": NOW + ORDER_S}, asks_to_save(saves=False), STOP),
        ({"now": NOW + ORDER_S + 1}, asks_to_save(saves=False), STOP),
        ({"now": NOW + ORDER_S}, asks_to_save(), do.Save(1)),
        ({"ranks": (replace(STANDS, saved=1),)}, asks_to_save(saves=False), STOP),
        ({"ranks": ()}, asks_to_save(), do.EndPod(143)),
        ({}, None, STOP),
    ],
)
def test_pod_that_ends_saves_the_step_at_which_all_rest_if_it_is_asked_to(
    changes: dict[str, Any], target: PodTarget | None, expected: do.Action | do.Wait
) -> None:
    """Never a step that others may be beyond: nobody begins before the operator has asked all."""
    pod = replace(ENDS, signalled_at=NOW, **changes)
    assert expected == next_action(pod, target, RULES)


def test_pod_of_a_job_that_stops_saves_nothing() -> None:
    pod = replace(ENDS, signalled_at=NOW)
    assert next_action(pod, asks_to_save(goal=Goal.STOP), RULES) == STOP
    assert next_action(replace(pod, terminating=False), asks_to_save(goal=Goal.STOP), RULES) == STOP


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
def test_weights_that_were_rejected_beside_training_wait_for_the_next() -> None:
    pod = make_pod(engine=REJECTED, rank=onloaded(V1), whole=V1)
    waits = do.Wait(reason="WeightsDiffer", message="differs again")
    assert waits == beside(pod, V2, Rung.TRAINED)[1]
    assert Rung.DRAINED is RESIDENT.standing(replace(pod, ranks=(onloaded(V2),), whole=V2).facts(), V2), "nobody waits"
    written = replace(pod, ranks=(onloaded(V2),), whole=V2)
    assert do.StartEngine(V2) == beside(written, V2, Rung.UPDATED)[1]


IDLE = do.Wait()
BESIDE = replace(RULES, ladder=RESIDENT)
SERVING_V0 = make_pod(gate_open=True, rank=onloaded(V0))


def beside(pod: PodView, version: WeightVersion, rung: Rung) -> tuple[do.Action | do.Wait, ...]:
    """Return the trainers' action, and the engine's beside it."""
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


@pytest.mark.parametrize(
    ("placement", "rollout", "reference"),
    [
        (Placement.TIME_SLICED, {}, False),
        (Placement.TIME_SLICED, {}, True),
        (Placement.TIME_SLICED, {"offload": ["KVCache", "CUDAGraph"]}, False),
        (Placement.TIME_SLICED, {"offload": ["KVCache", "Weights"]}, False),
        (Placement.TIME_SLICED, {"offload": ["KVCache"]}, False),
        (Placement.RESIDENT, {"offload": []}, False),
        (Placement.RESIDENT, {"offload": []}, True),
    ],
)
def test_pod_keeps_every_promise_and_arrives_whatever_fails_on_the_way(
    placement: Placement, rollout: dict[str, Any], reference: bool
) -> None:
    """Any call, before its effect or after it, or a deadline; any two of them, and what else may end, in contract."""
    spec: dict[str, Any] = {"checkpoint": {"everySteps": 1}, "reference": {} if reference else None}
    job = make_job(replicas=1, steps=1, **spec, **PLACED[placement] | {"rollout": ROLLOUT | rollout})
    all_must_be_well(explore(JobModel(job, deaths=1, of=FAILING), limit=100_000))


# ------------------------------------------------------------------------- one case for each small change of the table
LATE = NOW - 1
STARTING = EngineView().started("e", V0, start_by=NOW + 5)


@pytest.mark.parametrize(
    ("pod", "target", "expected"),
    [
        (down(make_rank(WeightVersion(0, 2))), (V1, Rung.TRAINED), do.StopTrainers("lineage 1 is wanted")),
        (
            make_pod(gate_open=True, engine=replace(make_engine(), broken="it died")),
            (V0, Rung.SERVING),
            do.CloseGate(),
        ),
        (make_pod(gate_open=True, engine=make_engine().was_paused()), (V0, Rung.SERVING), do.CloseGate()),
        (
            make_pod(engine=EngineView().started("e", V0, start_by=LATE)),
            (V0, Rung.UPDATED),
            do.KillEngine("it did not start in time", is_fault=True),
        ),
        (
            down(replace(make_rank(), step=None, start_by=NOW)),
            (V0, Rung.TRAINED),
            do.StopTrainers("its checkpoint was not loaded in time"),
        ),
        (
            down(replace(make_rank(), step=None, start_by=LATE)),
            (V0, Rung.TRAINED),
            do.StopTrainers("its checkpoint was not loaded in time"),
        ),
        (
            down(replace(make_rank(), step=None, start_by=NOW + 5)),
            (V0, Rung.TRAINED),
            do.AwaitTrainers(NOW + 5),
        ),
        (replace(DOWN, fetch_after=NOW), (V1, Rung.TRAINED), do.FetchShards(1)),
        (replace(DOWN, fetch_after=NOW + 5), (V1, Rung.TRAINED), do.Wait(until=NOW + 5)),
        (
            make_pod(engine=replace(EngineView(), start_after=NOW)),
            (V0, Rung.UPDATED),
            do.StartEngine(V0),
        ),
        (
            make_pod(engine=replace(EngineView(), start_after=NOW + 5)),
            (V0, Rung.UPDATED),
            do.Wait(until=NOW + 5),
        ),
        # trainers off the devices that have not made these weights: the engine may not rise
        (make_pod(engine=RELEASED, rank=make_rank(V0), whole=V1), (V1, Rung.UPDATED), do.FetchShards(1)),
        (down(replace(make_rank(V1), lineage=0), whole=V1), (V1, Rung.UPDATED), do.StopTrainers("lineage 1 is wanted")),
        (down(replace(make_rank(V1), lineage=2), whole=V1), (V1, Rung.UPDATED), do.StopTrainers("lineage 1 is wanted")),
        # an engine that maps memory, or starts on other weights, may not either
        (up(drained_engine()), (V1, Rung.UPDATED), do.Release()),
        (up(replace(drained_engine(), starts_on=V1)), (V1, Rung.UPDATED), do.Release()),
        (
            up(EngineView().started("e", V0, start_by=NOW + 5)),
            (V1, Rung.UPDATED),
            do.KillEngine("it starts on 0-1, and 1-1 can't be served yet"),
        ),
        (
            up(EngineView().started("e", V2, start_by=NOW + 5)),
            (V1, Rung.UPDATED),
            do.KillEngine("it starts on 2-1, and 1-1 can't be served yet"),
        ),
        # checkpoints: of the target's step, by idle trainers, and no older one after a newer
        (
            make_pod(gate_open=True, engine=make_engine(V2), rank=replace(make_rank(V0), saved=None)),
            (V2, Rung.SERVING),
            do.Wait(),
        ),
        (
            make_pod(gate_open=True, engine=make_engine(V2), rank=replace(make_rank(V3), saved=None)),
            (V2, Rung.SERVING),
            do.Wait(),
        ),
        (
            make_pod(gate_open=True, engine=make_engine(V2), rank=replace(onloaded(V2), saved=None)),
            (V2, Rung.SERVING),
            do.Wait(),
        ),
        (
            make_pod(gate_open=True, engine=make_engine(V2), rank=replace(make_rank(V2), saved=4)),
            (V2, Rung.SERVING),
            do.Wait(),
        ),
    ],
)
def test_next_action_is_no_other(
    pod: PodView, target: tuple[WeightVersion, Rung], expected: do.Action | do.Wait
) -> None:
    assert expected == next_action(pod, make_target(*target), RULES)


@pytest.mark.parametrize("late_s", [30, 31])
def test_engine_that_settles_too_late_is_killed_however_late_that_is_seen(late_s: float) -> None:
    action = next_action(make_pod(in_flight=1, closed_at=NOW - late_s), make_target(V1, Rung.PAUSED), RULES)
    assert isinstance(action, do.KillEngine)


@pytest.mark.parametrize("missing", ["rendezvous", "batches"])
def test_trainers_wait_for_all_that_they_need_of_a_target(missing: str) -> None:
    target = make_target(V1, Rung.TRAINED).model_copy(update={missing: None})
    for pod in (NEW_POD, DOWN):
        assert isinstance(next_action(pod, target, RULES), do.Wait)


def test_dead_ranks_are_named_by_the_first_of_them() -> None:
    ranks = (replace(make_rank(), rank=2).gone(-9), replace(make_rank(), rank=3).gone(1))
    action = next_action(replace(DOWN, ranks=ranks), make_target(V1, Rung.TRAINED), RULES)
    assert do.Wait(reason="TrainerDied", message="trainer rank 2 of lineage 1 ended with code -9") == action


def test_a_checksum_of_newer_weights_judges_no_older_ones() -> None:
    engine = replace(make_engine(V1), checksum="same", agrees=False)
    pod = replace(up(engine), agreed=(V2, "newer"))
    assert do.Wait() == next_action(pod, make_target(V1, Rung.SERVING), BY_CHECKSUM)
    killed = next_action(replace(pod, agreed=(V1, "other")), make_target(V1, Rung.SERVING), BY_CHECKSUM)
    assert isinstance(killed, do.KillEngine)
    assert "its weights 1-1 have checksum same, those of most engines other" == killed.reason


def test_weights_of_an_earlier_step_get_an_engine_after_newer_ones_were_rejected() -> None:
    again = WeightVersion(0, 2)
    pod = make_pod(engine=REJECTED, rank=make_rank(again), whole=again)
    assert do.StartEngine(again) == next_action(pod, make_target(again, Rung.UPDATED), RULES)


@pytest.mark.parametrize(
    ("settle_s", "waits", "wait_s"), [(30, False, 0), (30, True, 20), (20, True, 10), (12, True, 6), (100, True, 90)]
)
def test_responses_may_finish_until_what_is_left_is_time_for_an_abort(
    settle_s: float, waits: bool, wait_s: float
) -> None:
    assert wait_s == replace(RULES, settle_s=settle_s, waits=waits).wait_s


@pytest.mark.parametrize(("step", "is_due"), [(0, False), (1, False), (2, True), (3, False), (4, True)])
def test_checkpoints_are_due_every_so_many_steps_and_not_before_the_first(step: int, is_due: bool) -> None:
    assert is_due is RULES.checkpoint_is_due(step)


ALONE = Rules(ROLLOUT_ONLY, settle_s=30.0, checkpoint_every=2, probes=True)


@pytest.mark.parametrize(
    ("engine", "rung", "expected"),
    [
        (EngineView(), Rung.RELEASED, do.Wait()),
        (EngineView(), Rung.SERVING, do.StartEngine(V0)),
        (STARTING, Rung.SERVING, do.AwaitEngine(NOW + 5)),
        (make_engine(), Rung.SERVING, do.OpenGate(V0)),
        (make_engine(), Rung.RELEASED, do.Wait()),
    ],
)
def test_engine_of_a_job_that_only_records_starts_and_serves(
    engine: EngineView, rung: Rung, expected: do.Action | do.Wait
) -> None:
    pod = replace(make_pod(engine=engine), ranks=())
    assert (expected,) == next_actions(pod, make_target(V0, rung), ALONE)


BESIDE = replace(RULES, ladder=RESIDENT)


@pytest.mark.parametrize(
    ("pod", "rung", "expected"),
    [
        (make_pod(engine=EngineView().started("e", V2, start_by=NOW + 5)), Rung.CLOSED, do.AwaitEngine(NOW + 5)),
        (make_pod(engine=EngineView().started("e", V0, start_by=NOW + 5)), Rung.CLOSED, do.AwaitEngine(NOW + 5)),
        (make_pod(engine=EngineView().started("e", V1, start_by=NOW + 5)), Rung.CLOSED, do.Wait()),
        (make_pod(engine=EngineView().started("e", V1, start_by=NOW + 5)), Rung.UPDATED, do.AwaitEngine(NOW + 5)),
        (make_pod(engine=EngineView(), whole=V2), Rung.TRAINED, do.StartEngine(V2)),
        (make_pod(engine=EngineView(), whole=V1), Rung.TRAINED, do.Wait()),
        (
            replace(
                make_pod(engine=EngineView(), whole=None),
                ranks=(make_rank(V0), replace(make_rank(V0), rank=1, exported=None)),
            ),
            Rung.TRAINED,
            do.Wait(),
        ),
        (make_pod(engine=EngineView(), whole=None), Rung.TRAINED, do.VerifyExport(V0)),
    ],
)
def test_engine_beside_a_trainer_starts_on_weights_that_it_may_serve_by_then(
    pod: PodView, rung: Rung, expected: do.Action | do.Wait
) -> None:
    assert expected == next_actions(pod, make_target(V1, rung), BESIDE)[-1]
