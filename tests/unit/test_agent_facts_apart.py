"""The action table of pods with one side of a disaggregated job: an engine, or trainers beside whom none starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import make_target
from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.planner.next_actions import Rules, next_actions
from colocated_rl_agent.planner.views import EngineView, PodView, RankView
from colocated_rl_api.facts import EngineState, TrainerState
from colocated_rl_api.ladder import DISAGGREGATED
from colocated_rl_api.member_wire import PodTarget
from colocated_rl_api.rungs import Rung, WeightVersion

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)
OLDER, GIVEN_UP, AGAIN = WeightVersion(1, 1), WeightVersion(2, 1), WeightVersion(2, 2)
RULES = Rules(DISAGGREGATED, settle_s=30.0, checkpoint_every=1, probes=True)
NOW = 100.0
READY = replace(EngineView(), state=EngineState.READY, incarnation="e1", version=V0, agrees=True)
STARTING = EngineView().started("e1", V0, start_by=NOW + 30)


def target(
    rung: Rung, *, at: WeightVersion = V1, weights: WeightVersion | None = V0, is_last: bool = False
) -> PodTarget:
    return make_target(at, rung, weights=weights, is_last=is_last)


def engine_pod(
    engine: EngineView = READY, *, whole: WeightVersion | None = V0, gate_open: bool = True, verify_after: float = 0.0
) -> PodView:
    return PodView(
        *(NOW, True, False, gate_open, 0, NOW, engine, ()), whole=whole, verify_after=verify_after, stopped=False
    )


def trainer_pod(
    at: WeightVersion = V1,
    *,
    exported: WeightVersion | None = None,
    whole: WeightVersion | None = None,
    stale: bool = False,
    crowded: bool = False,
) -> PodView:
    rank = RankView(
        *(0, TrainerState.ONLOADED, "t", at.lineage), step=at.step, exported=exported, saved=0, can_finish=True
    )
    return PodView(
        *(NOW, True, False, False, 0, NOW, EngineView(), (rank,)),
        whole=whole,
        stale_exports=stale,
        crowded=crowded,
        shards=at.step,
        has_engine=False,
    )


def choice(pod: PodView, goal: PodTarget) -> do.Action | do.Wait:
    (only,) = next_actions(pod, goal, RULES)
    return only


# ---------------------------------------------------------------------------------------------------- pod of an engine
@pytest.mark.parametrize("rung", [Rung.SEALED, Rung.TRAINED, Rung.EXPORTED])
def test_engine_serves_on_while_others_train(rung: Rung) -> None:
    assert do.Wait() == choice(engine_pod(), target(rung))
    assert Rung.TRAINED is DISAGGREGATED.standing(engine_pod().facts(), V1)


def test_new_weights_are_read_beside_rollout_and_the_gate_closes_when_the_group_says() -> None:
    assert do.VerifyExport(V1) == choice(engine_pod(), target(Rung.EXPORTED, weights=V1))
    read = engine_pod(whole=V1)
    assert Rung.EXPORTED is DISAGGREGATED.standing(read.facts(), V1)
    assert do.Wait() == choice(read, target(Rung.EXPORTED, weights=V1))
    assert do.CloseGate() == choice(read, target(Rung.PAUSED, weights=V1))


def test_an_engine_opens_its_gate_before_new_weights_are_read() -> None:
    aim = target(Rung.EXPORTED, weights=V1)
    assert do.AwaitEngine(NOW + 30) == choice(engine_pod(STARTING, gate_open=False), aim)
    assert do.CheckProbe(V0) == choice(engine_pod(replace(READY, agrees=False), gate_open=False), aim)
    assert do.OpenGate(V0) == choice(engine_pod(gate_open=False), aim)


def test_a_paused_engine_for_which_all_wait_reads_first_and_opens_again_if_that_fails() -> None:
    """An agent that comes again behind a closed gate has not seen the export."""
    paused, aim = READY.gate_closed().was_paused(), target(Rung.UPDATED, weights=V1)
    assert do.VerifyExport(V1) == choice(engine_pod(paused, whole=None, gate_open=False), aim)
    assert do.Continue() == choice(engine_pod(paused, whole=None, gate_open=False, verify_after=NOW + 1), aim)


def test_a_torn_export_is_read_again_after_a_while() -> None:
    aim = target(Rung.EXPORTED, weights=V1)
    assert do.Wait(until=NOW + 1) == choice(engine_pod(verify_after=NOW + 1), aim)
    assert do.VerifyExport(V1) == choice(engine_pod(verify_after=NOW), aim)
    absent = engine_pod(EngineView(), whole=None, gate_open=False, verify_after=NOW + 1)
    assert do.Wait(until=NOW + 1) == choice(absent, target(Rung.EXPORTED))


@pytest.mark.parametrize("rung", [Rung.SEALED, Rung.EXPORTED, Rung.SERVING])
def test_an_engine_starts_on_what_all_serve_once_that_is_read(rung: Rung) -> None:
    absent = engine_pod(EngineView(), whole=None, gate_open=False)
    assert do.VerifyExport(V0) == choice(absent, target(rung))
    assert do.StartEngine(V0) == choice(replace(absent, whole=V0), target(rung))


def test_an_engine_serves_on_while_no_weights_are_named() -> None:
    assert do.Wait() == choice(engine_pod(), target(Rung.EXPORTED, weights=None))


def test_an_engine_without_weights_waits_for_some() -> None:
    absent = engine_pod(EngineView(), whole=None, gate_open=False)
    assert do.Wait() == choice(absent, target(Rung.EXPORTED, weights=None))
    assert do.StartEngine(V0) == choice(replace(absent, whole=V0), target(Rung.EXPORTED, weights=None))


def test_an_engine_never_starts_on_what_was_given_up() -> None:
    """It may have been removed to make room."""
    absent = engine_pod(EngineView(), whole=GIVEN_UP, gate_open=False)
    assert do.VerifyExport(OLDER) == choice(absent, target(Rung.EXPORTED, at=AGAIN, weights=OLDER))


def test_an_engine_does_not_go_back_behind_the_new_weights_that_it_has_read() -> None:
    """The operator names older weights while facts of trainers are missing."""
    absent = engine_pod(EngineView(), whole=V1, gate_open=False)
    assert do.Wait() == choice(absent, target(Rung.EXPORTED, weights=V0))
    assert do.StartEngine(V1) == choice(absent, target(Rung.UPDATED, weights=V0))


@pytest.mark.parametrize("rung", [Rung.SEALED, Rung.PAUSED, Rung.SERVING])
def test_an_engine_is_never_taken_back_to_older_weights(rung: Rung) -> None:
    newer = replace(READY, version=V1)
    for whole in (None, V0, V1):
        assert do.Wait() == choice(engine_pod(newer, whole=whole), target(rung, at=V1, weights=V0))
        assert do.Wait() == choice(engine_pod(newer, whole=whole), target(Rung.SEALED, at=AGAIN, weights=V0))


# ----------------------------------------------------------------------------------------------------- pod of trainers
def test_trainers_have_done_their_part_when_the_weights_are_written_and_touch_nothing_before_all_serve() -> None:
    done = trainer_pod(exported=V1, whole=V1, stale=True, crowded=True)
    assert Rung.SERVING is DISAGGREGATED.standing(done.facts(), V1)
    below = DISAGGREGATED.rungs[: DISAGGREGATED.place(Rung.SERVING) - 1]
    assert {do.Wait()} == {choice(done, target(rung, weights=V1, is_last=True)) for rung in below}
    assert do.RemoveExports(keep=V1) == choice(done, target(Rung.SERVING, weights=V1))
    assert do.Save(1) == choice(replace(done, stale_exports=False), target(Rung.SERVING, weights=V1))


def test_room_is_never_made_of_what_engines_serve() -> None:
    full = trainer_pod(AGAIN, whole=GIVEN_UP, crowded=True)
    assert do.RemoveExports(keep=OLDER) == choice(full, target(Rung.EXPORTED, at=AGAIN, weights=OLDER))
    assert do.Export(AGAIN) == choice(replace(full, crowded=False), target(Rung.EXPORTED, at=AGAIN, weights=OLDER))
    assert do.Export(AGAIN) == choice(full, target(Rung.EXPORTED, at=AGAIN, weights=None)), "nobody knows what they do"
    unknown = replace(full, crowded=None)
    assert do.Wait() == choice(unknown, target(Rung.EXPORTED, at=AGAIN, weights=OLDER)), "the volume has not answered"


def test_no_engine_starts_beside_trainers_and_no_trainer_beside_an_engine() -> None:
    for rung in DISAGGREGATED.rungs:
        for pod in (trainer_pod(exported=V1, whole=V1), trainer_pod(V0), trainer_pod()):
            assert not isinstance(choice(pod, target(rung, weights=V1)), do.StartEngine | do.AwaitEngine)
        for pod in (engine_pod(), engine_pod(whole=V1), engine_pod(EngineView(), gate_open=False)):
            assert not isinstance(choice(pod, target(rung, weights=V1)), do.TrainerAction | do.RemoveExports)


def test_a_pod_says_what_it_has_once_its_runner_is_known() -> None:
    for pod, engines, trainers in ((engine_pod(), 1, 0), (trainer_pod(), 0, 1)):
        facts = pod.facts()
        assert (engines, trainers) == (len(facts.engines), len(facts.trainers))
        unknown = replace(pod, runner_known=False).facts()
        assert Rung.UNKNOWN is DISAGGREGATED.standing(unknown, V1)
    assert V0 == engine_pod().facts().export


def test_weights_that_were_doubted_twice_get_no_third_engine() -> None:
    engine = READY.was_doubted(V0, "differs").gone().started("e2", V0, start_by=NOW + 5).answered(V0)
    rejected = engine.was_doubted(V0, "differs again").gone()
    pod = engine_pod(rejected, gate_open=False)
    assert do.Wait(reason="WeightsDiffer", message="differs again") == choice(pod, target(Rung.SERVING, at=V0))
