"""Define the agent's metrics for Prometheus. Their names are part of the interface."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from statistics import linear_regression

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from colocated_rl_api.holders import PodHolder
from colocated_rl_api.rungs import Rung

CALL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)  # idle: 1-30 ms; with 1 s sleeps
RUNG_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)  # from a closing gate to a training step


class AgentMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "colocate_gate_requests", "Requests let in, by how they ended", ["ending"], registry=registry
        )
        self.tokens = Counter(
            "colocate_gate_tokens", "Tokens handed back, by how their request ended", ["ending"], registry=registry
        )
        self._ended: dict[str, tuple[Counter, Counter]] = {}
        self.in_flight = Gauge("colocate_gate_in_flight", "Requests let in that have not ended", registry=registry)
        self.rung_seconds = Histogram(
            "colocate_rung_seconds",
            "Time from the rung before",
            ["rung"],
            buckets=RUNG_BUCKETS_S,
            registry=registry,
        )
        self.barrier_wait_seconds = Counter(
            "colocate_barrier_wait_seconds",
            "Time that the pod had nothing left to do until it was sent to the next rung",
            registry=registry,
        )
        self.call_seconds = Histogram(
            "colocate_engine_call_seconds", "Calls of a switch", ["call"], buckets=CALL_BUCKETS_S, registry=registry
        )
        self.incarnations = Counter("colocate_incarnations", "Processes started", ["child"], registry=registry)
        self.step_figures = Gauge(
            "colocate_trainer_figure",
            "Of the last trained step, as the trainer names it",
            ["rank", "figure"],
            registry=registry,
        )
        self.replaced = Counter("colocate_engine_replaced", "Engines that died or had to be killed", registry=registry)
        self.checkpoint_write_seconds = Histogram(
            "colocate_checkpoint_write_seconds",
            "Until a checkpoint is durable",
            buckets=RUNG_BUCKETS_S,
            registry=registry,
        )
        self.mirror_seconds = Histogram(
            "colocate_mirror_seconds",
            "Until the memory of pods has a step that no checkpoint has",
            buckets=RUNG_BUCKETS_S,
            registry=registry,
        )
        self.child_memory = ChildMemory()
        registry.register(self.child_memory)
        self.trainer_load_seconds = Histogram(
            "colocate_trainer_load_seconds",
            "From the start of trainers until checkpoint or model is read, ranks that wait for each other included",
            buckets=RUNG_BUCKETS_S,
            registry=registry,
        )

    def show_in_flight(self, count: Callable[[], int]) -> None:
        self.in_flight.set_function(count)

    def step_trained(self, rank: int, figures: Mapping[str, float]) -> None:
        """Show the figures of a step; those that the trainer did not measure this time are left out."""
        self.step_figures.remove_by_labels({"rank": str(rank)})
        for name, value in figures.items():
            self.step_figures.labels(str(rank), name).set(value)

    def request_ended(self, ending: str, tokens: int) -> None:
        counters = self._ended.get(ending)
        if counters is None:  # to look one up takes longer than to count
            counters = self._ended[ending] = self.requests.labels(ending), self.tokens.labels(ending)
        requests_, tokens_ = counters
        requests_.inc()
        tokens_.inc(tokens)


class ChildMemory(Collector):
    """Tracks the host memory of engine and trainers after each switch, and by how much it grows from one to the next.

    The growth is the slope of a line through the newest SWITCHES values (least squares), so that one large batch is no
    growth; of FEWEST at least, all of one process.
    """

    SWITCHES, FEWEST = 24, 6
    GROWTH_STEP = 64 << 20  # less is no news for the operator

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, deque[int]]] = {}  # by child, with its incarnation
        self._first: dict[str, int] = {}  # by child, of the same incarnation

    def measured(self, child: str, incarnation: str, held: int) -> None:
        """Take the bytes that a child holds after a switch."""
        if (known := self._held.get(child)) is None or known[0] != incarnation:
            known = self._held[child] = incarnation, deque[int](maxlen=self.SWITCHES)
            self._first[child] = held
        known[1].append(held)

    def grown(self, child: str) -> int:
        """Return by how many bytes the child has grown since the first switch of its process, in whole GROWTH_STEPs."""
        known = self._held.get(child)
        grown = known[1][-1] - self._first[child] if known else 0
        return max(0, grown // self.GROWTH_STEP * self.GROWTH_STEP)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(
            "colocate_child_memory_bytes", "Host memory of a process and all it started, after the last switch",
            labels=["child"],
        )  # fmt: skip
        yield GaugeMetricFamily(
            "colocate_child_memory_growth_bytes", "By how much that grows with each switch", labels=["child"]
        )

    def collect(self) -> Iterator[GaugeMetricFamily]:
        memory, growth = self.describe()
        for child, (_, held) in self._held.items():
            memory.add_metric([child], held[-1])
            if len(held) >= self.FEWEST:
                growth.add_metric([child], linear_regression(range(len(held)), list(held)).slope)
        yield memory
        yield growth


class BelowTarget(Collector):
    """A BelowTarget gives the seconds that the pod has stood on a rung below its target; none once it is there.

    standing: the rung and the seconds on it, or None.
    """

    def __init__(self, standing: Callable[[], tuple[Rung, float] | None] = lambda: None) -> None:
        self._standing = standing

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(
            "colocate_below_target_seconds", "Since the pod came to the rung where it stands below its target",
            labels=["rung"],
        )  # fmt: skip

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for family in self.describe():
            if (standing := self._standing()) is not None:
                family.add_metric([standing[0]], standing[1])
            yield family


class Unsaved(Collector):
    """Cost of a loss of the trainers; nothing while none has loaded.

    at_risk: steps that no checkpoint holds, and seconds since the first of them began; or None.
    """

    def __init__(self, at_risk: Callable[[], tuple[int, float] | None] = lambda: None) -> None:
        self._at_risk = at_risk

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("colocate_unsaved_steps", "Steps that trainers have done since the newest checkpoint")
        yield GaugeMetricFamily("colocate_unsaved_seconds", "Since the first of them began; 0: there are none")

    def collect(self) -> Iterator[GaugeMetricFamily]:
        steps, seconds = self.describe()
        if (at_risk := self._at_risk()) is not None:
            steps.add_metric([], at_risk[0])
            seconds.add_metric([], at_risk[1])
        yield steps
        yield seconds


class GpuSeconds(Collector):
    """Seconds since the agent's start, times the pod's devices, by who had them."""

    def __init__(
        self, gpus: int = 0, holder: PodHolder = PodHolder.START, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gpus = gpus
        self._clock = clock
        self._holder = holder
        self._since = clock()
        self._held = dict.fromkeys(PodHolder, 0.0)

    def hold(self, holder: PodHolder) -> None:
        """Record who has the devices from now on."""
        now = self._clock()
        self._held[self._holder] += (now - self._since) * self._gpus
        self._holder, self._since = holder, now

    def describe(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(
            "colocate_gpu_seconds", "Seconds of the pod's devices, by who had them", labels=["holder"]
        )

    def collect(self) -> Iterator[CounterMetricFamily]:
        self.hold(self._holder)
        for family in self.describe():
            for holder, seconds in self._held.items():
                family.add_metric([holder], seconds)
            yield family
