"""Every state of a job of three pods, and what a search of them leaves out."""

from __future__ import annotations

import pytest

from builders import PLACED, make_job
from colocated_rl_api.rungs import Placement
from fakes.explore import check
from fakes.left_out import must_mean_the_same, searched
from fakes.model import MORTAL, JobModel

pytestmark = pytest.mark.slow
LARGEST = ("agent", "operator", "pod", "trainer")  # a minute or two each


@pytest.mark.release
def test_what_a_search_leaves_out_of_three_pods_differs_in_nothing_from_what_it_looks_at() -> None:
    """A pod that is made again stands behind those that were not."""
    job = make_job(replicas=3, steps=1, checkpoint={"everySteps": 1}, **PLACED[Placement.TRAIN_ONLY])
    few, each = (searched(job, of=("pod",), in_all_orders=whole) for whole in (False, True))
    must_mean_the_same(few, each)


@pytest.mark.parametrize(
    "mortal", [pytest.param(each, marks=[pytest.mark.release] if each in LARGEST else []) for each in MORTAL]
)
def test_every_state_of_three_pods_is_safe_and_leads_to_an_end(mortal: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One parameter for each that may die covers every case with one death."""
    job = make_job(replicas=3, steps=1, checkpoint={"everySteps": 1})
    check(JobModel(job, deaths=1, of=(mortal,)), capsys)
