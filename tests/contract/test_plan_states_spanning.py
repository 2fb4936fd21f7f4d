"""Every state of a job with one engine over two pods, wherever its engines stand, with parts of it that end."""

from __future__ import annotations

import sys

import pytest

from builders import PLACED
from colocated_rl_api.rungs import Placement
from fakes.explore import MOST_STATES, all_must_be_well
from fakes.spanning import SpanningJob

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("placement", "deaths"),
    [
        (Placement.TIME_SLICED, 1),
        pytest.param(Placement.RESIDENT, 1, marks=pytest.mark.release),
        pytest.param(Placement.DISAGGREGATED, 1, marks=pytest.mark.release),
        (Placement.ROLLOUT_ONLY, 2),
    ],
)
def test_every_state_of_a_job_whose_engine_loses_parts_is_safe_and_leads_to_an_end(
    placement: Placement, deaths: int, capsys: pytest.CaptureFixture[str]
) -> None:
    explored = SpanningJob(**PLACED[placement]).explore(deaths=deaths, limit=MOST_STATES)
    with capsys.disabled():
        sys.stdout.write(f"\n{placement}, one engine over two pods, parts that end: {deaths}, {explored.words()}\n")
    all_must_be_well(explored)
