"""More walks of a simulated group than the fast layer has time for (`tests/unit/test_plan_properties.py`)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from builders import IN_ONE_POD
from colocated_rl_api.rungs import Placement
from fakes.walks import (
    ANY_WALK,
    COMPARING_WALK,
    ELASTIC_WALK,
    FAULTS,
    RETRIED_WALK,
    ROUNDS,
    SPARED_WALK,
    WALK_UNDER_A_POLICY,
    must_end,
    must_end_elastic,
    must_end_with_mirrors,
    must_end_with_spares,
    must_go_on_in_the_room_of_spares,
    must_go_on_when_told,
    must_heal,
    must_repeat_one_step_at_most,
    must_serve_the_same_weights,
)


@given(**ANY_WALK)
@settings(max_examples=100)
def test_every_walk_ends_and_no_invariant_breaks(**chosen: Any) -> None:
    must_end(**chosen)


@given(**COMPARING_WALK)
@settings(max_examples=30)
def test_f52_every_walk_of_a_job_that_compares_engines_ends_and_none_serves_other_weights(**chosen: Any) -> None:
    must_serve_the_same_weights(**chosen)


@given(**ELASTIC_WALK)
@settings(max_examples=60)
def test_every_walk_of_an_elastic_job_ends_and_no_invariant_breaks(**chosen: Any) -> None:
    must_end_elastic(**chosen)


@given(**SPARED_WALK)
@settings(max_examples=60)
def test_every_walk_of_a_job_with_spares_ends_and_no_invariant_breaks(**chosen: Any) -> None:
    must_end_with_spares(**chosen)


@pytest.mark.parametrize("spares", [1, 2])
@pytest.mark.parametrize("placement", IN_ONE_POD)
def test_a_job_goes_on_in_the_room_of_its_spares_for_good(placement: Placement, spares: int) -> None:
    must_go_on_in_the_room_of_spares(placement, spares=spares)


@given(**ANY_WALK)
@settings(max_examples=40)
def test_every_walk_of_a_job_that_keeps_steps_in_memory_ends_and_no_invariant_breaks(**chosen: Any) -> None:
    if chosen["placement"] is not Placement.ROLLOUT_ONLY:
        must_end_with_mirrors(**chosen)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(("placement", "replicas"), [(Placement.TIME_SLICED, 3), (Placement.RESIDENT, 2)])
def test_one_fault_takes_back_no_step_that_is_in_memory(kind: str, placement: Placement, replicas: int) -> None:
    for after_rounds in range(5, 150, 9):
        must_repeat_one_step_at_most(kind, after_rounds=after_rounds, placement=placement, replicas=replicas)


@given(**RETRIED_WALK)
@settings(max_examples=40)
def test_a_job_that_failed_goes_on_to_its_end_each_time_that_it_is_told_to(**chosen: Any) -> None:
    must_go_on_when_told(**chosen)


@given(**WALK_UNDER_A_POLICY)
@settings(max_examples=40)
def test_every_walk_under_any_policy_ends_and_no_invariant_breaks(**chosen: Any) -> None:
    must_end(**chosen)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("placement", IN_ONE_POD)
def test_one_fault_in_any_round_is_healed(kind: str, placement: Placement) -> None:
    for after_rounds in range(0, ROUNDS[placement], 2):
        must_heal(kind, after_rounds=after_rounds, placement=placement)
