"""A pod stands where its facts say, whatever brought it there."""

from __future__ import annotations

import pytest

from builders import CLOSED, absent_engine, absent_trainer, engine, released_engine, trainer
from colocated_rl_api.facts import EngineFacts, EngineState, GateFacts, PodFacts, TagState, TrainerFacts, TrainerState
from colocated_rl_api.ladder import (
    DISAGGREGATED,
    LADDERS,
    RESIDENT,
    ROLLOUT_ONLY,
    SCORED_TIME_SLICED,
    TIME_SLICED,
    Ladder,
)
from colocated_rl_api.rungs import Rung, WeightVersion

V0, V1, V2 = (WeightVersion(step, 1) for step in range(3))
OPEN = GateFacts(open=True, settled=False)
DONE = trainer(1, 1, exported=V1)  # offloaded
ON_DEVICE = DONE.model_copy(update={"state": TrainerState.ONLOADED})
RESTARTED = WeightVersion(1, 2)  # the same step of a later lineage


def pod(
    *engines: EngineFacts, trainers: tuple[TrainerFacts, ...] = (DONE,), gate: GateFacts = CLOSED, **more: object
) -> PodFacts:
    return PodFacts(epoch=1, gate=gate, engines=engines, trainers=trainers).model_copy(update=more)


def starting(on: WeightVersion, failures: int = 0) -> EngineFacts:
    return EngineFacts(name="engine-0", state=EngineState.STARTING, incarnation="e2", starts_on=on, failures=failures)


@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: f"{ladder.placement}, scores: {ladder.scores}")
def test_nothing_is_known_of_a_pod_without_facts_or_processes(ladder: Ladder) -> None:
    assert {Rung.UNKNOWN} == {ladder.standing(facts, V1) for facts in (None, pod(trainers=()))}


@pytest.mark.parametrize("ladder", [TIME_SLICED, RESIDENT])
def test_nothing_is_known_of_a_pod_of_which_one_side_is_missing_where_both_share_devices(ladder: Ladder) -> None:
    assert {Rung.UNKNOWN} == {ladder.standing(each, V1) for each in (pod(engine(V1), trainers=()), pod())}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (pod(starting(V1)), Rung.OFFLOADED),
        (pod(starting(V1), trainers=(ON_DEVICE,)), Rung.SETTLED),
        (pod(starting(V0)), Rung.SETTLED),
        (pod(starting(V2)), Rung.SETTLED),
        (pod(starting(RESTARTED)), Rung.SETTLED),
        (pod(engine(V0, starts_on=V1)), Rung.SETTLED),
        (pod(starting(V1), trainers=(DONE, ON_DEVICE)), Rung.SETTLED),
        (pod(absent_engine(), trainers=(DONE, ON_DEVICE)), Rung.EXPORTED),
        (pod(absent_engine(), trainers=(DONE, absent_trainer(1, 1))), Rung.RELEASED),
    ],
)
def test_an_engine_that_takes_turns_starts_once_the_trainers_are_off_the_device(
    facts: PodFacts, expected: Rung
) -> None:
    assert expected is TIME_SLICED.standing(facts, V1)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (pod(starting(V1)), Rung.DRAINED),
        (pod(starting(V1), gate=OPEN), Rung.EXPORTED),
        (pod(starting(V0), gate=OPEN), Rung.TRAINED),
        (pod(starting(RESTARTED), gate=OPEN), Rung.TRAINED),
        (pod(engine(V0), gate=OPEN), Rung.EXPORTED),
    ],
)
def test_no_gate_closes_for_new_weights_while_an_engine_starts_on_others(facts: PodFacts, expected: Rung) -> None:
    assert expected is RESIDENT.standing(facts, V1)
    apart = facts.model_copy(update={"trainers": (), "export": V1})
    assert expected is DISAGGREGATED.standing(apart, V1)


@pytest.mark.parametrize("ladder", [RESIDENT, DISAGGREGATED])
@pytest.mark.parametrize(
    ("gate", "paused", "serves"), [(OPEN, False, True), (OPEN, True, False), (CLOSED, False, False)]
)
def test_an_engine_with_the_new_weights_serves_once_it_goes_on_behind_an_open_gate(
    ladder: Ladder, gate: GateFacts, paused: bool, serves: bool
) -> None:
    trainers = () if ladder is DISAGGREGATED else (DONE,)
    stands = ladder.standing(pod(engine(V1, paused=paused), trainers=trainers, gate=gate), V1)
    assert stands is (Rung.SERVING if serves else Rung.UPDATED)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (pod(engine(V0), trainers=(), gate=OPEN), Rung.SERVING),
        (pod(engine(WeightVersion(0, 7)), trainers=(), gate=OPEN), Rung.SERVING),
        (pod(engine(V0), trainers=()), Rung.RELEASED),
        (pod(engine(V0, paused=True), trainers=(), gate=OPEN), Rung.RELEASED),
        (pod(engine(None), trainers=(), gate=OPEN), Rung.RELEASED),
        (pod(engine(V0, kv_cache=TagState.RELEASED), trainers=(), gate=OPEN), Rung.RELEASED),
        (pod(engine(V0, state=EngineState.STARTING), trainers=(), gate=OPEN), Rung.RELEASED),
    ],
)
def test_an_engine_that_only_records_serves_once_it_holds_weights(facts: PodFacts, expected: Rung) -> None:
    assert expected is ROLLOUT_ONLY.standing(facts, V1)


@pytest.mark.parametrize(
    ("other", "is_awaited"),
    [
        (absent_engine().model_copy(update={"failures": 1}), False),
        (absent_engine(), True),
        (starting(V1, failures=1), False),
        (starting(V1), True),
        (starting(V0, failures=1), True),
        (starting(RESTARTED, failures=1), True),
        (engine(V0, failures=1), True),
    ],
)
def test_an_engine_that_failed_is_not_awaited_beside_another_until_it_is_back(
    other: EngineFacts, is_awaited: bool
) -> None:
    for engines in (engine(V1), other), (other, engine(V1)):
        assert (TIME_SLICED.standing(pod(*engines, gate=OPEN), V1) is not Rung.SERVING) == is_awaited


@pytest.mark.parametrize("lineage", [1, 3])
@pytest.mark.parametrize("step", [0, 2])
def test_what_trainers_of_another_lineage_or_step_did_counts_for_nothing(lineage: int, step: int) -> None:
    at = WeightVersion(1, 2)
    for done in (WeightVersion(1, lineage), WeightVersion(step, 2)):
        rank = trainer(done.step, done.lineage, exported=done, scored=done.step)
        facts = pod(released_engine(), trainers=(trainer(1, 2, exported=at, scored=1), rank))
        assert Rung.RELEASED is SCORED_TIME_SLICED.standing(facts, at)


@pytest.mark.parametrize("lineage", [1, 3])
def test_scores_of_trainers_of_another_lineage_are_awaited_again(lineage: int) -> None:
    ranks = (trainer(0, 2, scored=1), trainer(0, lineage, scored=1))
    assert Rung.RELEASED is SCORED_TIME_SLICED.standing(pod(released_engine(), trainers=ranks), WeightVersion(1, 2))
    assert Rung.SCORED is SCORED_TIME_SLICED.standing(pod(released_engine(), trainers=ranks[:1]), WeightVersion(1, 2))


def test_engines_that_all_failed_are_waited_for() -> None:
    failed = absent_engine().model_copy(update={"failures": 1})
    assert Rung.OFFLOADED is TIME_SLICED.standing(pod(failed, failed), V1)


def test_a_pod_stands_where_its_lowest_engine_does() -> None:
    facts = pod(released_engine(), engine(V0, paused=True), trainers=(ON_DEVICE,))
    assert Rung.PAUSED is TIME_SLICED.standing(facts, V1)
