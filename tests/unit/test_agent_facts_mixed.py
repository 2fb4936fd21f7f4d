"""The action table of the two kinds of pod of a mixed job: its engines take turns with trainers, or serve on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import MIXED_ROLLOUT, make_job, make_target
from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.planner.next_actions import next_actions
from colocated_rl_agent.planner.views import TAGS, EngineView, PodView, RankView
from colocated_rl_agent.settings import rules_for
from colocated_rl_api import names
from colocated_rl_api.facts import EngineState, TrainerState
from colocated_rl_api.ladder import MIXED
from colocated_rl_api.member_wire import PodTarget
from colocated_rl_api.rungs import Rung, WeightVersion

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)
SPEC = make_job(rollout=MIXED_ROLLOUT, weightSync={"verify": "Version"}).spec
BESIDE, APART = rules_for(SPEC, names.ROLE_GPU), rules_for(SPEC, names.ROLE_ENGINE)
NOW = 100.0
READY = replace(EngineView(), state=EngineState.READY, incarnation="e1", version=V0)
RELEASED = READY.was_paused().was_flushed().was_released()


def target(rung: Rung, *, weights: WeightVersion | None = V0) -> PodTarget:
    return make_target(V1, rung, weights=weights)


def apart(engine: EngineView = READY, *, whole: WeightVersion | None = V0, gate_open: bool = True) -> PodView:
    return PodView(*(NOW, True, False, gate_open, 0, NOW, engine, ()), whole=whole)


def beside(
    state: TrainerState,
    *,
    exported: WeightVersion | None = V1,
    whole: WeightVersion | None = V0,
    borrows: bool = True,
    verify_after: float = 0.0,
) -> PodView:
    """A pod whose trainers have made the step, behind an engine that has released."""
    rank = RankView(1, state, "t", V1.lineage, step=V1.step, exported=exported, saved=0)
    return PodView(
        *(NOW, True, False, False, 0, NOW, RELEASED, (rank,)),
        whole=whole,
        shards=V1.step,
        borrows=borrows,
        verify_after=verify_after,
    )


# ------------------------------------------------------------------------------------ an engine with devices of its own
@pytest.mark.parametrize("whole", [V0, V1])
@pytest.mark.parametrize("rung", MIXED.rungs[: MIXED.place(Rung.OFFLOADED)])
def test_an_engine_with_devices_of_its_own_is_not_touched_up_to_the_update(rung: Rung, whole: WeightVersion) -> None:
    (choice,) = next_actions(apart(whole=whole), target(rung), APART)
    assert do.Wait() == choice


def test_then_it_takes_the_new_weights_without_releasing_anything() -> None:
    aim, taken, pod = target(Rung.UPDATED, weights=V1), list[do.Action | do.Wait](), apart()
    for engine, gate_open, whole in (
        (READY, True, V0),
        (READY, True, V1),
        (READY.gate_closed(), False, V1),
        (READY.gate_closed().was_paused(), False, V1),
        (READY.gate_closed().was_paused().was_flushed(), False, V1),
        (READY.gate_closed().was_paused().was_flushed().was_updated(V1), False, V1),
    ):
        pod = apart(engine, whole=whole, gate_open=gate_open)
        taken += next_actions(pod, aim, APART)
    assert [do.VerifyExport(V1), do.CloseGate(), do.Pause(), do.Flush(), do.Update(V1), do.Wait()] == taken
    assert (do.Flush(),) == next_actions(pod, target(Rung.SERVING, weights=V1), APART)


def test_only_engines_beside_trainers_release_memory() -> None:
    assert (True, False) == (BESIDE.releases, APART.releases)


# --------------------------------------------------------------------------------------------- engines beside trainers
def test_weights_that_another_pod_wrote_are_compared_while_trainers_leave_the_device() -> None:
    made = beside(TrainerState.ONLOADED)
    assert Rung.EXPORTED is MIXED.standing(made.facts(), V1), "by what trainers report: rank 0's pod has compared them"
    assert (do.Wait(), do.Wait()) == next_actions(made, target(Rung.EXPORTED), BESIDE), "they may not be whole yet"
    assert (do.Offload(), do.VerifyExport(V1)) == next_actions(made, target(Rung.OFFLOADED), BESIDE)
    off = beside(TrainerState.OFFLOADED)
    assert Rung.EXPORTED is MIXED.standing(off.facts(), V1)
    assert (do.Wait(), do.VerifyExport(V1)) == next_actions(off, target(Rung.UPDATED), BESIDE)
    for other in (None, WeightVersion(V1.step, V1.lineage + 1)):
        seen = next_actions(replace(off, whole=other), target(Rung.UPDATED), BESIDE)
        assert (do.Wait(), do.VerifyExport(V1)) == seen, "whatever was compared before"
    assert (do.Resume(TAGS[:1]), do.Wait()) == next_actions(replace(off, whole=V1), target(Rung.UPDATED), BESIDE)


def test_weights_that_differ_on_their_way_are_read_again_after_a_while() -> None:
    pod = beside(TrainerState.OFFLOADED, verify_after=NOW + 1)
    assert (do.Wait(), do.Wait(until=NOW + 1)) == next_actions(pod, target(Rung.UPDATED), BESIDE)


def test_the_pod_that_writes_them_compares_them_before_it_says_that_they_are_there() -> None:
    made = beside(TrainerState.ONLOADED, borrows=False)
    assert Rung.TRAINED is MIXED.standing(made.facts(), V1)
    assert (do.VerifyExport(V1), do.Wait()) == next_actions(made, target(Rung.EXPORTED), BESIDE)


def test_room_is_never_made_of_what_engines_serve() -> None:
    """Engines with devices of their own do, and start on it again if they are lost."""
    rank = beside(TrainerState.ONLOADED, exported=None, whole=WeightVersion(1, 0), borrows=False)
    full = replace(rank, crowded=True)
    assert (do.RemoveExports(keep=V0), do.Wait()) == next_actions(full, target(Rung.EXPORTED), BESIDE)
