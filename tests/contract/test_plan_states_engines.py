"""Every state of a job whose pod has several engines, and what the search of them notices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from builders import PLACED, TOGETHER, make_job
from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.planner import engines
from colocated_rl_agent.planner.engines import EngineChoice
from colocated_rl_agent.planner.views import PodView
from colocated_rl_api import ladder
from colocated_rl_api.ladder import Ladder
from colocated_rl_api.rungs import Placement
from colocated_rl_operator.planner.reasons import Cause
from fakes.explore import MOST_STATES, all_must_be_well, check, explore
from fakes.model import FAULTS
from fakes.model_pod import InvariantBroken
from fakes.several_engines import SeveralEngines, is_of_all

SEVERAL = [  # engines in a pod, deaths, of whom
    *((Placement.TIME_SLICED, 2, 1, (mortal,)) for mortal in ("connection", "deadline", "engine", "pod")),
    (Placement.RESIDENT, 2, 1, ("engine",)),
    (Placement.DISAGGREGATED, 2, 0, ()),
    (Placement.MIXED, 2, 0, ()),
    (Placement.ROLLOUT_ONLY, 2, 1, FAULTS),
]
SEVERAL_SLOW = [
    *((placement, 2, 1, (mortal,)) for placement in TOGETHER for mortal in ("agent", "call", "operator", "trainer")),
    (Placement.TIME_SLICED, 4, 0, ()),
    (Placement.TIME_SLICED, 2, 2, ("engine",)),
    (Placement.RESIDENT, 2, 2, ("engine",)),
    (Placement.DISAGGREGATED, 2, 1, ("engine",)),
]


@pytest.mark.parametrize(
    ("placement", "engines", "deaths", "of"),
    [
        *SEVERAL,
        *(pytest.param(*bounds, marks=pytest.mark.release) for bounds in SEVERAL_SLOW),
        pytest.param(Placement.ROLLOUT_ONLY, 3, 2, ("engine",), marks=pytest.mark.release),
    ],
)
def test_every_state_of_a_pod_with_several_engines_is_safe_and_leads_to_an_end(
    placement: Placement, engines: int, deaths: int, of: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(replicas=1, steps=1, checkpoint={"everySteps": 1}, **PLACED[placement])
    check(SeveralEngines(job, engines=engines, deaths=deaths, of=of), capsys)


def two_engines(*, deaths: int) -> SeveralEngines:
    job = make_job(replicas=1, steps=1, checkpoint={"everySteps": 1}, **PLACED[Placement.TIME_SLICED])
    return SeveralEngines(job, engines=2, deaths=deaths, of=("engine",))


@pytest.mark.release
def test_pod_that_sums_its_engines_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood below each of its engines, and stayed there."""
    monkeypatch.setattr(Ladder, "standing", lambda ladder, pod, at: ladder.stands(pod, at))
    assert {Cause.ALL_STEPS_DONE} != explore(two_engines(deaths=0), limit=MOST_STATES).ends.keys()


def test_trainers_beside_an_engine_that_starts_again_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator must count that engine, or the agent must ask it: without both, they share the devices."""
    monkeypatch.setattr(ladder, "_is_out", lambda engine, at: engine.failures > 0 and not engine.is_ready)
    explored = explore(two_engines(deaths=1), limit=MOST_STATES)
    all_must_be_well(explored)
    monkeypatch.setattr(engines, "_of_pod", _of_pod_as_one_engine_likes)
    with pytest.raises(InvariantBroken, match="while engine memory is mapped"):
        explore(two_engines(deaths=1), limit=MOST_STATES)


def _of_pod_as_one_engine_likes(
    views: Sequence[PodView], chosen: Sequence[Sequence[do.Action | do.Wait]]
) -> Iterator[EngineChoice]:
    for action in dict.fromkeys(action for actions in chosen for action in actions):
        if is_of_all(action):
            yield EngineChoice(0, action)
