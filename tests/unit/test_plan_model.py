"""Everything that can happen to a small job, happens: `fakes.model`, explored until no state is left.

The bounds are the numbers of pods and of deaths; one step, a checkpoint after it, then the end. In every state the
invariants hold, and from every state the job can still complete or fail with a name. Beyond the bounds there are walks
at random; larger bounds, failure policies and engines that keep memory are in the contract layer. The seeded defects
show that a hole in plan, table, journal, fence or status write would be noticed.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import fakes.model
from builders import PLACED, TOGETHER, make_job
from colocated_rl_agent.planner import next_actions
from colocated_rl_agent.planner.actions import Offload, StartEngine, Wait
from colocated_rl_agent.planner.views import KV_CACHE, EngineView, PodView
from colocated_rl_api.ladder import Ladder
from colocated_rl_api.rungs import Placement, Rung
from colocated_rl_operator.planner import plan, targets
from colocated_rl_operator.planner.observation import Job, Observation
from fakes.explore import Search, all_must_be_well, bounds_of, explore, must_walk_to_the_end
from fakes.left_out import must_mean_the_same, searched
from fakes.model import JobModel, Shown
from fakes.model_pod import InvariantBroken, facts_of

MOST_STATES = 2_000_000
STATES_ANEW = 500


def job(replicas: int, placement: Placement = Placement.TIME_SLICED, *, reference: bool = False, **more: Any) -> Job:
    spec: dict[str, Any] = {"checkpoint": {"everySteps": 1}, "reference": {} if reference else None}
    return make_job(replicas=replicas, steps=1, **spec, **PLACED[placement], **more)


@cache
def walked(replicas: int, placement: Placement, *, deaths: int, reference: bool) -> JobModel:
    """One for all walks over the same states: it knows what it has planned."""
    return JobModel(job(replicas, placement, reference=reference), deaths=deaths, in_all_orders=True)


SMALL = [(1, 1, 0, False), (2, 0, 0, True), (1, 0, 1, False)]  # the contract layer has larger bounds
SMALL_APART = [(1, 0, 0, False), (1, 0, 0, True)]  # of one replica each: two pods, so larger bounds again
SMALL_ALONE = [*SMALL, (2, 0, 0, False), (1, 1, 0, True)]  # with few states, and nowhere else
BOUNDS = {
    Placement.TIME_SLICED: SMALL,
    Placement.RESIDENT: SMALL,
    Placement.DISAGGREGATED: SMALL_APART,
    Placement.MIXED: SMALL_APART,
    Placement.ROLLOUT_ONLY: SMALL_ALONE,
    Placement.TRAIN_ONLY: SMALL_ALONE,
}


@pytest.mark.parametrize(
    ("placement", "replicas", "deaths", "suspensions", "reference"),
    [(placement, *bounds) for placement in Placement for bounds in BOUNDS[placement]],
)
def test_every_state_is_safe_and_leads_to_an_end(
    replicas: int,
    deaths: int,
    suspensions: int,
    reference: bool,
    placement: Placement,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = JobModel(job(replicas, placement, reference=reference), deaths=deaths, suspensions=suspensions)
    explored = explore(model, limit=MOST_STATES)
    with capsys.disabled():
        sys.stdout.write(f"\n{bounds_of(model)}, {explored.words()}\n")
    all_must_be_well(explored)


@pytest.mark.parametrize("placement", TOGETHER)
def test_every_state_of_a_job_that_fails_and_is_retried_is_safe_and_leads_to_an_end(placement: Placement) -> None:
    once = job(1, placement, backoffLimit=0)
    explored = explore(JobModel(once, deaths=1, of=("trainer",), retries=1), limit=MOST_STATES)
    all_must_be_well(explored)


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize(("replicas", "deaths"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_walks_at_random_are_safe_and_end(replicas: int, deaths: int, seed: int, placement: Placement) -> None:
    must_walk_to_the_end(walked(replicas, placement, deaths=deaths, reference=seed % 2 == 1), seed=seed)


@pytest.mark.parametrize("placement", Placement)
def test_a_plan_depends_on_nothing_that_the_models_reports_leave_out(placement: Placement) -> None:
    """Reports that the model takes for the same get the same plan, whatever else they say."""
    rng, compared, model = random.Random(1), 0, walked(2, placement, deaths=3, reference=False)
    for _ in range(6):
        state = model.start()
        while following := model.successors(state):
            _, state = rng.choice(following)
            reports = [model.report(pod) if pod.alive else None for pod in state.pods]
            if tuple(reports) == state.operator.known:
                seen = model.observe(state)
                in_full = [facts_of(pod) if pod.alive else None for pod in state.pods]
                members = [replace(member, facts=full) for member, full in zip(seen.members, in_full, strict=False)]
                assert plan.plan(seen) == plan.plan(replace(seen, members=(*members, seen.members[-1])))
                compared += 1
    assert compared > 100


@pytest.mark.parametrize(
    ("placement", "replicas", "of"),
    [
        (Placement.TIME_SLICED, 2, ()),
        (Placement.TRAIN_ONLY, 2, ("connection",)),
    ],
)
def test_what_a_search_leaves_out_differs_in_nothing_from_what_it_looks_at(
    placement: Placement, replicas: int, of: tuple[str, ...]
) -> None:
    few, each = (searched(job(replicas, placement), of=of, in_all_orders=whole) for whole in (False, True))
    for search in (few, each):
        all_must_be_well(search.outcome())
    assert 2 * few.looked_at < each.looked_at
    must_mean_the_same(few, each)


@pytest.mark.parametrize("placement", Placement)
def test_what_is_remembered_of_other_states_is_what_follows_each(placement: Placement) -> None:
    search = Search(JobModel(job(2, placement, reference=True), deaths=1, suspensions=1), anew=1)
    search.look(STATES_ANEW)
    assert search.looked_at == STATES_ANEW


# --------------------------------------------------------------------------------------- the checks themselves can fail
def test_a_pod_that_shows_others_too_little_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no pod shows whether its rank has joined."""
    nobody = Shown.of(JobModel(job(2), deaths=0).start().pods[0])
    shown = Shown.of
    monkeypatch.setattr(Shown, "of", lambda pod: shown(pod)._replace(rank=nobody.rank))
    with pytest.raises(InvariantBroken, match="what is remembered differs from what is so"):
        Search(JobModel(job(2), deaths=0), anew=1).look(MOST_STATES)


def test_a_forgotten_journal_write_is_noticed() -> None:
    with pytest.raises(InvariantBroken, match=r"released twice|resumed twice|other weights"):
        explore(JobModel(job(1), deaths=1, has_journal=False), limit=MOST_STATES)


def test_a_call_that_failed_and_is_taken_for_one_that_was_never_made_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EngineView, "broke", lambda view, reason, unknown_tags=(): view)
    with pytest.raises(InvariantBroken, match=r"released twice|resumed twice|released before it was drained"):
        explore(JobModel(job(1), deaths=1, of=("call",)), limit=MOST_STATES)


def test_weights_that_an_engine_starts_on_after_two_were_not_shown_to_hold_them_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(next_actions, "_start", lambda pod, version: StartEngine(version))
    with pytest.raises(InvariantBroken, match="an engine starts on weights that two were not shown to hold"):
        explore(JobModel(job(1), deaths=2, of=("call",)), limit=MOST_STATES)


def test_a_target_of_an_older_epoch_that_is_let_in_is_noticed() -> None:
    with pytest.raises(InvariantBroken, match="was accepted after one of epoch"):
        explore(JobModel(job(1), deaths=1, has_fence=False), limit=MOST_STATES)


def test_an_epoch_that_is_recorded_over_another_leaders_is_noticed() -> None:
    with pytest.raises(InvariantBroken, match="stands for two decisions"):
        explore(JobModel(job(1), deaths=1, has_precondition=False), limit=MOST_STATES)


def straight_to_training(ladder: Ladder, after: Rung) -> Rung:
    """Return what `Ladder.next_barrier` does, without the barriers below Trained."""
    return Rung.SERVING if ladder.reaches(after, Rung.TRAINED) else Rung.TRAINED


def test_a_dropped_barrier_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ladder, "next_barrier", straight_to_training)
    with pytest.raises(InvariantBroken, match="a target asks for Trained"):
        explore(JobModel(job(2), deaths=0), limit=MOST_STATES)


def test_a_release_without_a_flush_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineView, "was_paused", lambda view: replace(view, paused=True, drained=True))
    with pytest.raises(InvariantBroken, match="released before it was drained"):
        explore(JobModel(job(1), deaths=0), limit=MOST_STATES)


def test_a_cache_that_is_kept_beside_a_trainer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes.model, "kept_tags", lambda offload: (KV_CACHE,))
    with pytest.raises(InvariantBroken, match="Onload while engine memory is mapped"):
        explore(JobModel(job(1), deaths=0), limit=MOST_STATES)


def test_an_export_that_nobody_verified_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_actions, "_may_rise", lambda pod, target, rules: rules.asks_for(target, Rung.UPDATED))
    with pytest.raises(InvariantBroken, match="an export that nobody has verified"):
        explore(JobModel(job(1), deaths=1, of=("agent",)), limit=MOST_STATES)


def test_a_state_without_a_way_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Observation, "trainer_died", property(lambda seen: False))
    monkeypatch.setattr(plan, "_deadline", lambda seen: seen.now + 1)
    explored = explore(JobModel(job(1), deaths=1, of=("trainer",)), limit=MOST_STATES)
    assert any("trainer 0 dies" in way for way in explored.hopeless)


# ------------------------------------------------------------------------------------------- and of the resident ladder
def forget_barrier(monkeypatch: pytest.MonkeyPatch, *, at: Rung, before: Rung) -> None:
    """An agent that is allowed as far as `at` goes on to the rung that the barrier comes before."""
    asks_for = next_actions.Rules.asks_for
    monkeypatch.setattr(
        next_actions.Rules,
        "asks_for",
        lambda rules, target, rung: asks_for(rules, target, at if rung is before else rung),
    )


def test_an_update_of_an_engine_that_nobody_drained_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineView, "was_paused", lambda view: replace(view, paused=True, drained=True))
    with pytest.raises(InvariantBroken, match="updated before it was drained"):
        explore(JobModel(job(1, Placement.RESIDENT), deaths=0), limit=MOST_STATES)


def test_a_gate_that_closes_before_every_pod_has_the_new_weights_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent closes it as soon as its own export is whole."""
    forget_barrier(monkeypatch, at=Rung.EXPORTED, before=Rung.CLOSED)
    with pytest.raises(InvariantBroken, match=r"a gate closes in epoch 2 before gpu-\d stood at Exported"):
        explore(JobModel(job(2, Placement.RESIDENT), deaths=0), limit=MOST_STATES)


def test_a_gate_that_opens_on_new_weights_before_every_engine_holds_them_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget_barrier(monkeypatch, at=Rung.UPDATED, before=Rung.SERVING)
    with pytest.raises(InvariantBroken, match=r"OpenGate led to Serving in epoch 1 before gpu-\d stood at Updated"):
        explore(JobModel(job(2, Placement.RESIDENT), deaths=0), limit=MOST_STATES)


def test_a_step_that_is_trained_before_every_reference_has_scored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent trains it whose own reference has scored."""
    forget_barrier(monkeypatch, at=Rung.SCORED, before=Rung.TRAINED)
    with pytest.raises(InvariantBroken, match=r"Train led to Trained in epoch 2 before gpu-\d stood at Scored"):
        explore(JobModel(job(2, Placement.RESIDENT, reference=True), deaths=0), limit=MOST_STATES)


def test_a_trainer_that_leaves_the_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_actions, "_rest", lambda pod, target, rules: Offload())
    with pytest.raises(InvariantBroken, match="Offload on the Resident ladder"):
        explore(JobModel(job(1, Placement.RESIDENT), deaths=0), limit=MOST_STATES)


# -------------------------------------------------------------------------------------------- and of the disaggregated
def test_old_weights_that_are_removed_while_an_engine_may_need_them_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainers remove them as soon as their own part is done."""
    monkeypatch.setattr(
        next_actions,
        "_train_alone",
        lambda pod, target, rules: (
            next_actions._rest(pod, target, rules)
            if rules.ladder.reaches(rules.standing(pod, target), target.rung)
            else next_actions._train(pod, target, rules) or Wait()
        ),
    )
    with pytest.raises(InvariantBroken, match="an export that is not there"):
        explore(JobModel(job(1, Placement.DISAGGREGATED), deaths=1, of=("engine",)), limit=MOST_STATES)


def test_a_gate_that_closes_before_trainers_have_left_their_devices_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine with devices of its own closes it as soon as it has read the weights."""
    monkeypatch.setattr(Ladder, "shuts_at", Rung.CLOSED)
    with pytest.raises(InvariantBroken, match=r"a gate closes in epoch \d before gpu-\d stood at Offloaded"):
        explore(JobModel(job(1, Placement.MIXED), deaths=0), limit=MOST_STATES)


def test_weights_that_a_pod_takes_before_another_has_written_them_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod takes what its own trainers report for what is written."""
    monkeypatch.setattr(PodView, "borrows", property(lambda view: False, lambda view, value: None), raising=False)
    with pytest.raises(InvariantBroken, match="VerifyExport on an export that is not there"):
        explore(JobModel(job(2, Placement.MIXED), deaths=0), limit=MOST_STATES)


def test_engines_that_get_weights_as_target_before_they_are_written_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "_weights", lambda seen, climb: climb.version)
    with pytest.raises(InvariantBroken, match="VerifyExport on an export that is not there"):
        explore(JobModel(job(1, Placement.DISAGGREGATED), deaths=0), limit=MOST_STATES)
