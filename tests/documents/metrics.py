"""Every metric that a process of ours shows, read from the objects that they are made of; and its page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from colocated_rl_agent.metrics import AgentMetrics as AgentMetrics
from colocated_rl_agent.metrics import BelowTarget, ChildMemory, GpuSeconds, Unsaved
from colocated_rl_api.holders import PodHolder
from colocated_rl_member.metrics import ProblemGauge
from colocated_rl_operator.metrics import OperatorMetrics as OperatorMetrics
from colocated_rl_rollout.metrics import RolloutMetrics as RolloutMetrics
from colocated_rl_rollout.metrics import StalenessHistogram, StoreGauges
from colocated_rl_trainer.ref_policy.figures import ScoreCounts

HEAD = """\
<!-- Made by `make generate` from the metrics of operator, agent and rollout controller: change those instead. -->
# Metrics

Each process shows its own on port 9090 of its pod, `/metrics`, in plain HTTP: the operator (`metrics.port` of the chart
says which port), the agent of each GPU pod, the rollout controller, and a reference on devices of its own. The chart
brings monitors, [alerts](runbooks/index.md) and a dashboard for them: `monitoring` of [its values](values.md).

No metric names a job or a pod: Prometheus adds both when it scrapes. With the chart's PodMonitor they are the labels
`namespace`, `pod`, `colocatedrljob` and `role` (`gpu`, `rollout` and others). Names and labels are
[part of the interface](releases.md#what-is-stable).
"""


BUSY = "avg by (namespace, colocatedrljob, holder) (avg_over_time(gpu:colocate_gpu_utilization:by_holder[1d]))"
COST = "sum by (namespace, colocatedrljob, holder) (increase(colocate_gpu_seconds_total[30d])) / 3600"


class Family(NamedTuple):
    name: str  # as it is queried, without the endings of a histogram
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def series(self) -> set[str]:
        """Names that a query may have."""
        return {f"{self.name}_{end}" for end in ("bucket", "sum", "count")} if self.kind == "histogram" else {self.name}


def families() -> dict[str, list[Family]]:
    """Return the metric families by the process that has them."""
    return {
        "Operator": [*_held(OperatorMetrics(CollectorRegistry()))],
        "Agents and rollout controllers": [*_described(ProblemGauge())],
        "Agents": [
            *_held(AgentMetrics(CollectorRegistry())),
            *(
                family
                for each in (BelowTarget(), ChildMemory(), GpuSeconds(), Unsaved())
                for family in _described(each)
            ),
        ],
        "Rollout controllers": [
            *_held(RolloutMetrics(CollectorRegistry())),
            *(family for each in (StalenessHistogram(), StoreGauges(None)) for family in _described(each)),
        ],
        "References on devices of their own": [*_held(ScoreCounts(CollectorRegistry()))],
    }


def _held(metrics: object) -> Iterator[Family]:
    for each in vars(metrics).values():
        if isinstance(each, MetricWrapperBase):
            ending = "_total" if each._type == "counter" else ""
            yield Family(each._name + ending, str(each._type), tuple(each._labelnames), each._documentation)


def _described(collector: Collector) -> Iterator[Family]:
    for each in collector.describe():  # type: ignore[attr-defined]  # not part of the abstract class
        ending = "_total" if each.type == "counter" else ""
        yield Family(each.name + ending, each.type, tuple(each._labelnames), each.documentation)


def page() -> str:
    lines = [HEAD]
    for whose, metrics in families().items():
        lines += [f"## {whose}", "", "| metric | kind | labels | |", "|---|---|---|---|"]
        lines += [
            f"| `{each.name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)} | {each.meaning} |"
            for each in sorted(metrics)
        ]
        lines.append("")
    lines += [
        "Figures of `colocate_trainer_figure` are the trainer's own: [those of the default trainer]"
        "(trainer.md#metrics-of-a-step). Counters count since the process started.",
        "",
        "## What a job costs",
        "",
        "GPU hours of each job in a month, by who had the GPUs, as `kubectl crlj timeline` draws it. `holder` is",
        f"one of {', '.join(f'`{holder}`' for holder in PodHolder)} (also of [spares](failures.md#without-a-node)).",
        "With `placement: Both` a switch of engines with their own GPUs counts from when they have read new weights:",
        "",
        "```",
        COST,
        "```",
        "",
        "Without Prometheus, `kubectl crlj cost JOB` adds up what its pods have counted since their agents started, or",
        "logged where they have ended, and [says what sharing GPUs saved](cli.md#cost); without JOB, of all jobs.",
        "",
        "## How busy its GPUs are",
        "",
        "Where Prometheus scrapes NVIDIA's DCGM exporter, the chart's rules (`monitoring.rules`) record",
        "`gpu:colocate_gpu_utilization:by_holder`: for each device of a job's pods how busy it was in the last",
        "two minutes, from 0 to 1 (`DCGM_FI_DEV_GPU_UTIL`), and who had it for most of them. Labels are `namespace`,",
        "`pod`, `gpu`, `UUID`, `colocatedrljob` and `holder`. The exporter's names of pods may be in `pod` or, where",
        "its monitor has `honorLabels: false`, in `exported_pod`. A phase that is shorter than two minutes counts",
        "for the longer one beside it. What each holder used of the GPUs that it had:",
        "",
        "```",
        BUSY,
        "```",
    ]
    return "\n".join(lines) + "\n"
