"""Define the metrics that every member reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from colocated_rl_api.facts import Problem


class ProblemGauge(Collector):
    """The problem that the member reports, as in its facts; nothing while there is none."""

    def __init__(self, problem: Callable[[], Problem | None] = lambda: None) -> None:
        self._problem = problem

    def describe(self) -> Iterator[GaugeMetricFamily]:
        meaning = "1 while the member reports this problem, or waits for something with this reason"
        yield GaugeMetricFamily("colocate_problem", meaning, labels=["reason"])

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for family in self.describe():
            if (problem := self._problem()) is not None:
                family.add_metric([problem.reason], 1)
            yield family
