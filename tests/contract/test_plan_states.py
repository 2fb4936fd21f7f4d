"""Every state of a job within larger bounds than the fast layer has time for (`tests/unit/test_plan_model.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from builders import IN_ONE_POD, MIXED_ROLLOUT, OWN_ROLLOUT, PLACED, RESIDENT_ROLLOUT, ROLLOUT, TOGETHER, make_job
from colocated_rl_agent.planner import next_actions
from colocated_rl_api.rungs import Placement
from colocated_rl_operator.planner import roster
from colocated_rl_operator.planner.observation import Observation
from fakes.explore import MOST_STATES, check, explore, must_walk_to_the_end
from fakes.left_out import must_mean_the_same, searched
from fakes.model import FAULTS, GROWING, LEAVING, MORTAL, ROOMLESS, SIGNALLED, JobModel
from fakes.model_pod import InvariantBroken

ELSEWHERE = [{"onCauses": ["PodFailed", "MemberSilent"], "action": "ReplacePodElsewhere"}]


@pytest.mark.parametrize("rollout", [ROLLOUT, RESIDENT_ROLLOUT], ids=["time-sliced", "resident"])
@pytest.mark.parametrize(
    ("replicas", "deaths", "of", "suspensions"),
    [
        *((2, 1, (mortal,), 0) for mortal in MORTAL),
        (2, 2, ("connection",), 0),
        pytest.param(2, 2, ("engine",), 0, marks=pytest.mark.release),
        (1, 1, MORTAL, 1),
        (2, 0, (), 1),
    ],
    ids=lambda value: "any" if value == MORTAL else "-".join(value) or "nobody" if isinstance(value, tuple) else None,
)
def test_every_state_is_safe_and_leads_to_an_end(
    replicas: int,
    deaths: int,
    of: tuple[str, ...],
    suspensions: int,
    rollout: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = make_job(replicas=replicas, steps=1, checkpoint={"everySteps": 1}, rollout=rollout)
    check(JobModel(job, deaths=deaths, of=of, suspensions=suspensions), capsys)


@pytest.mark.parametrize("placement", [Placement.TIME_SLICED, Placement.RESIDENT])
def test_every_state_of_a_job_that_fails_twice_and_is_retried_twice_is_safe_and_leads_to_an_end(
    placement: Placement, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(replicas=1, steps=1, checkpoint={"everySteps": 1}, backoffLimit=0, **PLACED[placement])
    check(JobModel(job, deaths=2, of=("agent", "pod", "trainer"), retries=2), capsys)


def test_what_a_search_leaves_out_where_nothing_is_trained_differs_in_nothing_from_what_it_looks_at() -> None:
    job = make_job(replicas=2, steps=1, checkpoint={"everySteps": 1}, **PLACED[Placement.ROLLOUT_ONLY])
    few, each = (searched(job, of=("pod",), in_all_orders=whole) for whole in (False, True))
    must_mean_the_same(few, each)


@pytest.mark.parametrize("rollout", [ROLLOUT, RESIDENT_ROLLOUT], ids=["time-sliced", "resident"])
@pytest.mark.parametrize(
    ("replicas", "deaths", "of"),
    [
        pytest.param(2, 1, ("trainer",), id="a-trainer"),
        pytest.param(2, 1, ("agent",), id="an-agent"),
        pytest.param(1, 2, MORTAL, id="any-two", marks=pytest.mark.release),
    ],
)
def test_every_state_of_a_job_with_a_reference_is_safe_and_leads_to_an_end(
    replicas: int, deaths: int, of: tuple[str, ...], rollout: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(replicas=replicas, steps=1, checkpoint={"everySteps": 1}, rollout=rollout, reference={})
    check(JobModel(job, deaths=deaths, of=of), capsys)


@pytest.mark.parametrize("offload", [["KVCache"], ["Weights", "KVCache"]], ids="-".join)
@pytest.mark.parametrize(("replicas", "deaths"), [(1, 1), (2, 0)])
def test_every_state_of_a_job_whose_engines_keep_memory_is_safe_and_leads_to_an_end(
    replicas: int, deaths: int, offload: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(replicas=replicas, steps=1, checkpoint={"everySteps": 1}, rollout=ROLLOUT | {"offload": offload})
    check(JobModel(job, deaths=deaths), capsys)


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize(("replicas", "deaths"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("reference", [False, True])
def test_walks_at_random_are_safe_and_end(replicas: int, deaths: int, reference: bool, placement: Placement) -> None:
    spec: dict[str, Any] = {**PLACED[placement], "reference": {} if reference else None}
    job = make_job(replicas=replicas, steps=1, checkpoint={"everySteps": 1}, **spec)
    model = JobModel(job, deaths=deaths, in_all_orders=True)  # knows what it has planned
    for seed in range(12):
        must_walk_to_the_end(model, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement", [Placement.TIME_SLICED, pytest.param(Placement.RESIDENT, marks=pytest.mark.release)]
)
def test_every_state_of_one_pod_in_which_any_two_things_die_or_fail_is_safe_and_leads_to_an_end(
    placement: Placement, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calls, before their effect or after it, and deadlines too: weights that two engines were not shown to hold."""
    job = make_job(replicas=1, steps=1, checkpoint={"everySteps": 1}, **PLACED[placement])
    check(JobModel(job, deaths=2, of=FAULTS), capsys)


@pytest.mark.parametrize("placement", [each for each in Placement if each is not Placement.ROLLOUT_ONLY])
def test_walks_of_one_pod_in_which_eight_things_die_or_fail_are_safe_and_end(placement: Placement) -> None:
    job = make_job(replicas=1, steps=3, checkpoint={"everySteps": 1}, backoffLimit=20, **PLACED[placement])
    model = JobModel(job, deaths=8, of=FAULTS, in_all_orders=True)  # knows what it has planned
    for seed in range(20):
        must_walk_to_the_end(model, seed=seed)


@pytest.mark.parametrize(
    "placement",
    [
        *(each for each in Placement if each not in (Placement.DISAGGREGATED, Placement.MIXED)),
        pytest.param(Placement.MIXED, marks=pytest.mark.release),
    ],
)
@pytest.mark.parametrize("action", ["RollBack", "RestartPod"])
def test_every_state_of_one_pod_under_a_failure_policy_is_safe_and_leads_to_an_end(
    action: str, placement: Placement, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = [{"onCauses": ["TrainerDied", "RungDeadlineExceeded"], "action": action}, *ELSEWHERE]
    spec: dict[str, Any] = {**PLACED[placement], "failurePolicy": {"rules": rules}}
    check(JobModel(make_job(replicas=1, steps=1, checkpoint={"everySteps": 1}, **spec), deaths=1), capsys)


@pytest.mark.parametrize("rollout", [ROLLOUT, RESIDENT_ROLLOUT], ids=["time-sliced", "resident"])
@pytest.mark.parametrize("action", ["RollBack", "RestartPod"])
def test_every_state_under_a_failure_policy_is_safe_and_leads_to_an_end(
    action: str, rollout: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    policy = {"rules": [{"onCauses": ["TrainerDied", "RungDeadlineExceeded"], "action": action}]}
    often = {"everySteps": 1}
    job = make_job(replicas=2, steps=1, checkpoint=often, rollout=rollout, failurePolicy=policy)
    check(JobModel(job, deaths=1, of=("trainer",)), capsys)


@pytest.mark.parametrize("placement", [*IN_ONE_POD, pytest.param(Placement.MIXED, marks=pytest.mark.release)])
@pytest.mark.parametrize(
    ("replicas", "deaths", "of"),
    [pytest.param(1, 2, (LEAVING, *MORTAL), marks=pytest.mark.release), (2, 1, (LEAVING,))],
    ids=["one-and-a-death", "two"],
)
def test_every_state_of_a_job_whose_node_gives_notice_is_safe_and_leads_to_an_end(
    replicas: int, deaths: int, of: tuple[str, ...], placement: Placement, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints are not due: that of the notice is the only one before the last."""
    job = make_job(replicas=replicas, steps=1, checkpoint={"everySteps": 100}, **PLACED[placement])
    check(JobModel(job, deaths=deaths, of=of), capsys)


@pytest.mark.parametrize(
    ("placement", "replicas", "deaths", "of"),
    [
        *((placement, 1, 1, (SIGNALLED,)) for placement in (*TOGETHER, Placement.TRAIN_ONLY)),
        pytest.param(Placement.TRAIN_ONLY, 2, 1, (SIGNALLED,), marks=pytest.mark.release),
        pytest.param(Placement.TIME_SLICED, 2, 1, (SIGNALLED,), marks=pytest.mark.release),
        pytest.param(Placement.DISAGGREGATED, 1, 1, (SIGNALLED,), marks=pytest.mark.release),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_every_state_of_a_job_whose_pods_end_by_a_signal_is_safe_and_leads_to_an_end(
    placement: Placement, replicas: int, deaths: int, of: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints are not due: the step at which the group stands is saved before the pod is gone, or is not."""
    job = make_job(replicas=replicas, steps=2, checkpoint={"everySteps": 100}, **PLACED[placement])
    check(JobModel(job, deaths=deaths, of=of), capsys)


@pytest.mark.parametrize("placement", [Placement.TIME_SLICED, Placement.RESIDENT])
@pytest.mark.parametrize(
    ("replicas", "steps", "deaths", "of", "suspensions"),
    [
        pytest.param(1, 1, 2, (GROWING, *MORTAL), 0, marks=pytest.mark.release),
        (1, 2, 1, (GROWING,), 1),
        (2, 2, 1, (GROWING,), 0),
        pytest.param(2, 1, 2, (GROWING, "trainer"), 0, marks=pytest.mark.release),
    ],
    ids=["one-and-a-death", "one-and-a-suspension", "two", "two-and-a-death"],
)
def test_every_state_of_a_job_whose_trainers_start_again_when_they_grow_is_safe_and_leads_to_an_end(
    replicas: int,
    steps: int,
    deaths: int,
    of: tuple[str, ...],
    suspensions: int,
    placement: Placement,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec: dict[str, Any] = {**PLACED[placement], "failurePolicy": {"maxTrainerGrowth": "20Gi"}}
    job = make_job(replicas=replicas, steps=steps, checkpoint={"everySteps": 1}, **spec)
    check(JobModel(job, deaths=deaths, of=of, suspensions=suspensions), capsys)


@pytest.mark.parametrize(
    ("placement", "steps", "every", "of"),
    [
        (Placement.TRAIN_ONLY, 2, 100, "pod"),
        pytest.param(Placement.TRAIN_ONLY, 3, 2, "trainer", marks=pytest.mark.release),
        pytest.param(Placement.TIME_SLICED, 2, 100, "trainer", marks=pytest.mark.release),
        pytest.param(Placement.RESIDENT, 2, 100, "trainer", marks=pytest.mark.release),
    ],
)
def test_every_state_of_a_job_that_keeps_steps_in_the_memory_of_two_pods_is_safe_and_leads_to_an_end(
    placement: Placement, steps: int, every: int, of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps between checkpoints are kept by all ranks together, and trainers go on from the newest that is there."""
    checkpoint = {"everySteps": every, "inMemory": {"sizeLimit": "1Gi"}}
    job = make_job(replicas=2, steps=steps, checkpoint=checkpoint, **PLACED[placement])
    check(JobModel(job, deaths=1, of=(of,)), capsys)


def test_a_rank_that_goes_on_while_another_keeps_a_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = next_actions._lacks_mirror
    monkeypatch.setattr(next_actions, "_lacks_mirror", lambda pod, *rest: not pod.ranks[0].rank and lacks(pod, *rest))
    checkpoint = {"everySteps": 100, "inMemory": {"sizeLimit": "1Gi"}}
    job = make_job(replicas=2, steps=2, checkpoint=checkpoint, **PLACED[Placement.TRAIN_ONLY])
    with pytest.raises(InvariantBroken, match="while others keep a step together"):
        explore(JobModel(job, deaths=0), limit=MOST_STATES)


ELASTIC: dict[str, Any] = {"elasticPolicy": {"minReplicas": 1}}
SLOW_TOGETHER = [pytest.param(each, marks=pytest.mark.release) for each in TOGETHER]


@pytest.mark.parametrize("placement", [Placement.ROLLOUT_ONLY, Placement.TRAIN_ONLY, *SLOW_TOGETHER])
def test_every_state_of_a_job_that_loses_a_node_and_gets_it_back_is_safe_and_leads_to_an_end(
    placement: Placement, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(replicas=2, steps=1, checkpoint={"everySteps": 1}, **ELASTIC, **PLACED[placement])
    check(JobModel(job, deaths=1, of=(ROOMLESS,)), capsys)


@pytest.mark.slow
def test_every_state_of_a_job_that_shrinks_and_grows_at_a_step_is_safe_and_leads_to_an_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = make_job(replicas=2, steps=2, checkpoint={"everySteps": 100}, **ELASTIC)
    check(JobModel(job, deaths=1, of=(ROOMLESS,)), capsys)


def test_every_state_of_a_job_that_loses_a_node_and_has_a_spare_is_safe_and_leads_to_an_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A pod's node or the spare's is lost, and comes back or does not: there is room for the group all the same."""
    job = make_job(replicas=2, spares=1, steps=1, checkpoint={"everySteps": 1}, **PLACED[Placement.TRAIN_ONLY])
    check(JobModel(job, deaths=1, of=(ROOMLESS,)), capsys)


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (lambda seen: seen.job.spare_seats, "gives its devices back, and a spare had room"),
        (lambda seen: () if seen.unplaced else seen.job.spare_seats, "spares give their room, and"),
    ],
    ids=["none gives it", "all give it"],
)
def test_spares_that_give_too_little_room_or_too_much_are_noticed(
    kept: Callable[[Observation], tuple[str, ...]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "spares_to_keep", kept)
    job = make_job(replicas=2, spares=2, steps=1, checkpoint={"everySteps": 1}, **PLACED[Placement.TRAIN_ONLY])
    with pytest.raises(InvariantBroken, match=words):
        explore(JobModel(job, deaths=1, of=(ROOMLESS,)), limit=MOST_STATES)


@pytest.mark.parametrize("placement", [*TOGETHER, Placement.TRAIN_ONLY])
def test_every_state_of_a_job_whose_replicas_a_person_changes_is_safe_and_leads_to_an_end(
    placement: Placement, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between the two steps; checkpoints are not due: that of the change is the only one before the last."""
    job = make_job(replicas=2, steps=2, checkpoint={"everySteps": 100}, **PLACED[placement])
    check(JobModel(job, deaths=0, of=(), resizes=1), capsys)


@pytest.mark.parametrize(
    ("trainers", "engines", "deaths", "suspensions", "spec"),
    [
        (1, 1, 0, 1, {}),
        (1, 1, 1, 0, {}),
        pytest.param(1, 1, 1, 0, {"reference": {}}, marks=pytest.mark.release),
        (1, 1, 1, 0, {"failurePolicy": {"rules": [{"onCauses": ["TrainerDied"], "action": "RollBack"}]}}),
        (1, 1, 1, 0, {"failurePolicy": {"rules": ELSEWHERE}}),
        (2, 1, 0, 0, {}),
        (1, 2, 0, 0, {"reference": {}}),
    ],
    ids=[
        "a-suspension",
        "a-death",
        "a-death-with-a-reference",
        "a-roll-back",
        "a-pod-elsewhere",
        "two-of-trainers",
        "two-of-engines",
    ],
)
def test_every_state_of_a_job_with_engines_in_pods_of_their_own_is_safe_and_leads_to_an_end(
    trainers: int,
    engines: int,
    deaths: int,
    suspensions: int,
    spec: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rollout = OWN_ROLLOUT | {"replicas": engines}
    job = make_job(replicas=trainers, steps=1, checkpoint={"everySteps": 1}, rollout=rollout, **spec)
    check(JobModel(job, deaths=deaths, suspensions=suspensions), capsys)


@pytest.mark.parametrize(
    ("gpus", "engines", "deaths", "suspensions", "spec"),
    [
        (1, 2, 0, 0, {}),
        pytest.param(1, 1, 1, 0, {}, marks=pytest.mark.release),
        pytest.param(1, 1, 1, 0, {"reference": {}}, marks=pytest.mark.release),
        pytest.param(1, 1, 0, 1, {}, marks=pytest.mark.release),
        pytest.param(2, 1, 0, 0, {}, marks=pytest.mark.release),
    ],
    ids=["two-of-engines", "a-death", "a-death-with-a-reference", "a-suspension", "two-with-trainers"],
)
def test_every_state_of_a_job_with_engines_of_both_kinds_is_safe_and_leads_to_an_end(
    gpus: int,
    engines: int,
    deaths: int,
    suspensions: int,
    spec: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rollout = MIXED_ROLLOUT | {"replicas": engines}
    job = make_job(replicas=gpus, steps=1, checkpoint={"everySteps": 1}, rollout=rollout, **spec)
    check(JobModel(job, deaths=deaths, suspensions=suspensions), capsys)
