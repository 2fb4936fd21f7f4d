"""The loss of a pod on a simulated clock, and the table of restarts that rates lead to."""

from __future__ import annotations

import pytest

from bench import restart
from bench.loss_at_size import LossOfPod, Simulated, Stages
from colocated_rl_operator.planner.silence import SILENCE_S

STAGES = Stages()


@pytest.mark.parametrize("pods", [2, 8])
def test_a_group_trains_again_once_each_stage_of_a_loss_is_over(pods: int) -> None:
    """The operator adds less than half a second to what pods take."""
    simulated = Simulated(pods)
    found = simulated.lose(silently=False)
    answers_s = STAGES.made + STAGES.answers
    least = LossOfPod(answers_s, answers_s + STAGES.loads, answers_s + STAGES.loads + STAGES.serves)
    least.trained = least.serves + STAGES.trains
    added = [after - before for after, before in zip(vars(found).values(), vars(least).values(), strict=True)]
    assert all(0 <= each < 0.5 for each in added), added
    assert (2, 2, 0) == (simulated.climb.step, simulated.climb.lineage, simulated.climb.restarts)


def test_a_node_that_falls_silent_costs_as_much_more_as_silence_is_waited_for() -> None:
    simulated = Simulated(2)
    found, deleted = simulated.lose(silently=True), Simulated(2).lose(silently=False)
    assert SILENCE_S == pytest.approx(found.trained - deleted.trained, abs=0.5)
    assert ("node of gpu-1",) == simulated.climb.tally.avoids


def test_the_table_of_restarts_is_that_of_its_rates() -> None:
    """Eight ranks of a pod convert 14 GB, at 1 GB/s each; the pod reads 84 GB and 14 GB at 7 GB/s."""
    assert (12.0, 2.0, 1.75) == restart.seconds(7e9, 1, restart.RestartRates(storage=7e9, core=1e9))
    assert "| together | | 16 s |" in restart.table(restart.RestartRates(storage=7e9, core=1e9))


def test_the_page_has_the_table_of_the_rates_that_it_names() -> None:
    assert restart.table(restart.RestartRates()) in restart.PAGE.read_text()
