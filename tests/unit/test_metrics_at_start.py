"""What Prometheus finds before anything has happened: `increase` leaves out what a series had when it first came."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry
from unit.test_documents import RULES

from colocated_rl_operator import metrics as of_operator
from colocated_rl_operator.planner.reasons import Cause
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
