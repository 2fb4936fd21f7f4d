"""Prometheus finds these series before anything has happened: `increase` leaves out
what a series had when it first came.
"""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry
from unit.test_documents import RULES

from colocated_rl_api.job_status import Phase
from colocated_rl_operator import metrics as of_operator
from colocated_rl_operator.planner.reasons import Cause, Reason
from colocated_rl_rollout import metrics as of_rollout


def test_the_first_tokens_that_are_too_old_are_an_increase() -> None:
    """They were not, so the alert did not fire on them."""
    registry = CollectorRegistry()
    of_rollout.RolloutMetrics(registry)
    [rule] = [rule for rule in RULES if rule["alert"] == "ColocatedRLStalenessAtLimit"]
    [reasons] = re.findall(r'colocate_rollout_discarded_tokens_total{reason=~"([^"]+)"}', rule["expr"])
    for reason in reasons.split("|"):
        assert 0 == registry.get_sample_value("colocate_rollout_discarded_tokens_total", {"reason": reason})


def test_the_first_epoch_of_each_cause_is_an_increase() -> None:
    registry = CollectorRegistry()
    of_operator.OperatorMetrics(registry)
    for cause in Cause:
        assert 0 == registry.get_sample_value("colocated_rl_operator_epochs_raised_total", {"cause": cause})


def test_every_cause_that_ends_a_job_as_failed_is_an_alert() -> None:
    [rule] = [rule for rule in RULES if rule["alert"] == "ColocatedRLJobFailed"]
    [causes] = re.findall(r'colocated_rl_operator_epochs_raised_total{cause=~"([^"]+)"}', rule["expr"])
    assert {cause.value for cause in Cause if cause.is_failure} == set(causes.split("|"))


def test_the_longest_wait_is_of_the_job_that_has_stood_in_the_phase_longest() -> None:
    registry, now = CollectorRegistry(), 100.0
    metrics = of_operator.OperatorMetrics(registry, clock=lambda: now)

    def longest(phase: Phase) -> float | None:
        return registry.get_sample_value("colocated_rl_operator_longest_in_phase_seconds", {"phase": phase})

    assert 0 == longest(Phase.QUEUED)
    metrics.count_job("a", Phase.QUEUED)
    now += 60
    metrics.count_job("b", Phase.QUEUED)
    metrics.count_job("a", Phase.QUEUED, Reason.OBJECT_REFUSED)
    now += 30
    assert (90, 0) == (longest(Phase.QUEUED), longest(Phase.STARTING))
    metrics.count_job("a", Phase.STARTING)
    now += 10
    assert (40, 10) == (longest(Phase.QUEUED), longest(Phase.STARTING))
    metrics.forget_job("b")
    assert 0 == longest(Phase.QUEUED)


def test_a_job_that_finds_no_room_waits_for_longer_than_until_it_tries_again() -> None:
    """It was Pending for podsReadyDeadlineSeconds and Queued for minutes, by turns: ColocatedRLJobWaits never fired."""
    registry, now = CollectorRegistry(), 0.0
    metrics = of_operator.OperatorMetrics(registry, clock=lambda: now)
    for _ in range(2):
        metrics.count_job("a", Phase.PENDING)
        now += 1800
        metrics.count_job("a", Phase.QUEUED)
        now += 60
    longest = "colocated_rl_operator_longest_in_phase_seconds"
    assert 3720 == registry.get_sample_value(longest, {"phase": Phase.QUEUED})
    metrics.count_job("a", Phase.STARTING)
    metrics.count_job("a", Phase.PENDING)
    assert 0 == registry.get_sample_value(longest, {"phase": Phase.PENDING})


def test_jobs_near_their_backoff_limit_count_until_it_is_far_again_or_they_are_gone() -> None:
    registry = CollectorRegistry()
    metrics = of_operator.OperatorMetrics(registry)

    def near() -> float | None:
        return registry.get_sample_value("colocated_rl_operator_jobs_near_backoff_limit")

    assert 0 == near()
    metrics.count_job("a", Phase.ROLLOUT, is_near_limit=True)
    metrics.count_job("b", Phase.ROLLOUT, is_near_limit=True)
    metrics.count_job("c", Phase.ROLLOUT)
    assert 2 == near()
    metrics.count_job("a", Phase.ROLLOUT)
    assert 1 == near()
    metrics.forget_job("b")
    assert 0 == near()
