"""Timelines and metrics name one holder of a pod's GPU between two rungs."""

from __future__ import annotations

import pytest

from colocated_rl_api import names
from colocated_rl_api.holders import PodHolder, holder_of
from colocated_rl_api.ladder import (
    DISAGGREGATED,
    LADDERS,
    MIXED,
    RESIDENT,
    ROLLOUT_ONLY,
    TIME_SLICED,
    TRAIN_ONLY,
    Ladder,
)
from colocated_rl_api.rungs import Rung

GPU, ENGINE, TRAINER = names.ROLE_GPU, names.ROLE_ENGINE, names.ROLE_TRAINER


@pytest.mark.parametrize("rung", Rung)
@pytest.mark.parametrize(("ladder", "holder"), [(ROLLOUT_ONLY, PodHolder.ROLLOUT), (TRAIN_ONLY, PodHolder.TRAINER)])
@pytest.mark.parametrize("role", [GPU, ENGINE, TRAINER])
def test_one_side_alone_has_the_gpu_all_the_time(rung: Rung, ladder: Ladder, holder: PodHolder, role: str) -> None:
    assert holder is holder_of(rung, None, ladder, role)


@pytest.mark.parametrize(
    ("rung", "towards", "holder"),
    [
        (Rung.UNKNOWN, Rung.RELEASED, PodHolder.ROLLOUT),
        (Rung.SERVING, None, PodHolder.ROLLOUT),
        (Rung.SERVING, Rung.SEALED, PodHolder.ROLLOUT),
        (Rung.SEALED, Rung.CLOSED, PodHolder.ROLLOUT),
        (Rung.DRAINED, Rung.SEALED, PodHolder.ROLLOUT),
        (Rung.CLOSED, Rung.SETTLED, PodHolder.SWITCH),
        (Rung.DRAINED, Rung.RELEASED, PodHolder.SWITCH),
        (Rung.RELEASED, Rung.TRAINED, PodHolder.TRAINER),
        (Rung.TRAINED, Rung.EXPORTED, PodHolder.TRAINER),
        (Rung.EXPORTED, Rung.OFFLOADED, PodHolder.TRAINER),
        (Rung.OFFLOADED, Rung.UPDATED, PodHolder.SWITCH),
        (Rung.RESTORED, Rung.SERVING, PodHolder.SWITCH),
    ],
)
def test_rollout_and_trainer_take_turns_with_a_switch_between_them(
    rung: Rung, towards: Rung | None, holder: PodHolder
) -> None:
    assert holder is holder_of(rung, towards, TIME_SLICED, GPU)


@pytest.mark.parametrize(
    ("rung", "shared", "engine"),
    [
        (Rung.SEALED, PodHolder.BOTH, PodHolder.ROLLOUT),
        (Rung.TRAINED, PodHolder.BOTH, PodHolder.ROLLOUT),
        (Rung.EXPORTED, PodHolder.ROLLOUT, PodHolder.ROLLOUT),
        (Rung.CLOSED, PodHolder.SWITCH, PodHolder.SWITCH),
        (Rung.UPDATED, PodHolder.SWITCH, PodHolder.SWITCH),
        (Rung.SERVING, PodHolder.ROLLOUT, PodHolder.ROLLOUT),
    ],
)
def test_engines_that_stay_serve_beside_the_trainers_up_to_the_update(
    rung: Rung, shared: PodHolder, engine: PodHolder
) -> None:
    assert (shared, engine) == (holder_of(rung, None, RESIDENT, GPU), holder_of(rung, None, DISAGGREGATED, ENGINE))


@pytest.mark.parametrize("rung", [Rung.UNKNOWN, *MIXED.rungs])
def test_of_a_mixed_job_an_engine_with_gpus_of_its_own_rolls_out_until_the_weights_are_there(rung: Rung) -> None:
    switches = rung in (Rung.OFFLOADED, Rung.RESTORED)
    holder = PodHolder.SWITCH if switches else PodHolder.ROLLOUT
    assert holder is holder_of(rung, None, MIXED, ENGINE)
    assert holder_of(rung, None, TIME_SLICED, GPU) is holder_of(rung, None, MIXED, GPU)


@pytest.mark.parametrize("ladder", [ladder for ladder in LADDERS if ladder.serves and ladder.trains])
def test_trainers_on_gpus_of_their_own_are_idle_at_the_top_alone(ladder: Ladder) -> None:
    held = {rung: holder_of(rung, None, ladder, TRAINER) for rung in ladder.rungs}
    assert PodHolder.IDLE is held.pop(ladder.top)
    assert {PodHolder.TRAINER} == set(held.values())
