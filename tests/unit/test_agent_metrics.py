"""These tests read what an agent exports to Prometheus."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from colocated_rl_agent.metrics import AgentMetrics, BelowTarget, GpuSeconds, Unsaved
from colocated_rl_api.holders import PodHolder
from colocated_rl_api.rungs import Rung


def test_figures_of_a_step_are_those_of_the_last_one_by_rank() -> None:
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)

    metrics.step_trained(0, {"loss": 0.5, "kl": 0.1})
    metrics.step_trained(1, {"loss": 0.5})
    metrics.step_trained(0, {"loss": 0.25})

    def value(rank: int, figure: str) -> float | None:
        return registry.get_sample_value("colocate_trainer_figure", {"rank": str(rank), "figure": figure})

    assert [0.25, None, 0.5] == [value(0, "loss"), value(0, "kl"), value(1, "loss")]


@pytest.mark.parametrize(
    ("held", "growth"),
    [([1, 2, 3, 4, 5], None), ([10, 13, 16, 19, 22, 25], 3.0), ([7] * 30, 0.0), ([9] * 40 + list(range(9, 33)), 1.0)],
    ids=["too few", "grows", "stays", "only the newest count"],
)
def test_growth_of_memory_is_the_slope_over_the_newest_switches(held: list[int], growth: float | None) -> None:
    registry = CollectorRegistry()
    memory = AgentMetrics(registry).child_memory
    for value in held:
        memory.measured("engine-0", "first", value)
    found = {
        name: registry.get_sample_value(f"colocate_child_memory_{name}", {"child": "engine-0"})
        for name in ("bytes", "growth_bytes")
    }
    assert {"bytes": held[-1], "growth_bytes": growth if growth is None else pytest.approx(growth)} == found


def test_growth_of_memory_begins_anew_with_another_process() -> None:
    registry = CollectorRegistry()
    memory = AgentMetrics(registry).child_memory
    for switch in range(8):
        memory.measured("trainer-0", "first", 100 * switch)
    memory.measured("trainer-0", "second", 5)
    assert 5 == registry.get_sample_value("colocate_child_memory_bytes", {"child": "trainer-0"})
    assert registry.get_sample_value("colocate_child_memory_growth_bytes", {"child": "trainer-0"}) is None


def test_rung_below_the_target_is_shown_while_the_pod_stands_there() -> None:
    registry = CollectorRegistry()
    standing: tuple[Rung, float] | None = (Rung.SETTLED, 12.5)
    registry.register(BelowTarget(lambda: standing))

    def value() -> float | None:
        return registry.get_sample_value("colocate_below_target_seconds", {"rung": "Settled"})

    assert 12.5 == value()
    standing = None
    assert value() is None


def test_what_a_loss_of_the_trainers_would_cost_is_shown_once_they_have_loaded() -> None:
    registry = CollectorRegistry()
    at_risk: tuple[int, float] | None = None
    registry.register(Unsaved(lambda: at_risk))

    def values() -> list[float | None]:
        return [registry.get_sample_value(f"colocate_unsaved_{unit}") for unit in ("steps", "seconds")]

    assert [None, None] == values()
    at_risk = (3, 90.5)
    assert [3, 90.5] == values()


def test_seconds_of_the_devices_go_to_whoever_had_them_meanwhile() -> None:
    registry, now = CollectorRegistry(), 100.0
    held = GpuSeconds(8, clock=lambda: now)
    registry.register(held)

    def seconds() -> dict[str, float | None]:
        found = {each: registry.get_sample_value("colocate_gpu_seconds_total", {"holder": each}) for each in PodHolder}
        return {str(holder): value for holder, value in found.items() if value}

    assert {} == seconds()
    now += 10
    held.hold(PodHolder.ROLLOUT)
    now += 3
    held.hold(PodHolder.ROLLOUT)
    now += 2
    assert {"start-up": 80.0, "rollout": 40.0} == seconds()
    held.hold(PodHolder.SWITCH)
    now += 0.5
    held.hold(PodHolder.TRAINER)
    assert {"start-up": 80.0, "rollout": 40.0, "switch": 4.0} == seconds()
