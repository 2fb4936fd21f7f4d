"""Define the rollout controller's metrics for Prometheus. Their names are part of the interface.

Counters count since the process started; what must survive a restart is in the store, and shown as a gauge.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from shutil import disk_usage

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from colocated_rl_api.facts import EvaluationResult
from colocated_rl_rollout.rules.samples import Sample, SampleState
from colocated_rl_rollout.store.store import Store

RATE_WINDOW_S = 30.0
ALERTED_DISCARDS = ("TooStale", "SessionTooStale")


class RolloutMetrics:
    """Holds the metrics that worker and gateway add to."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tokens = Counter("colocate_rollout_tokens", "Tokens generated", registry=registry)
        self.unversioned_tokens = Counter(
            "colocate_rollout_unversioned_tokens",
            "Tokens that were kept though an engine named no weight version of the job for them",
            registry=registry,
        )
        self.attempts = Counter(
            "colocate_rollout_attempts", "Engine attempts by how they ended", ["ending"], registry=registry
        )
        self.resent_tokens = Counter(
            "colocate_rollout_resent_tokens", "Tokens prefilled again because an attempt was resumed", registry=registry
        )
        self.preemptions = Counter(
            "colocate_rollout_preemptions",
            "Times that an engine set a request aside for want of cache, and prefilled it again",
            registry=registry,
        )
        self.discarded_tokens = Counter(
            "colocate_rollout_discarded_tokens",
            "Generated tokens that will not be trained",
            ["reason"],
            registry=registry,
        )
        for reason in ALERTED_DISCARDS:
            self.discarded_tokens.labels(reason)  # Prometheus sees a first increase only of what was there before
        self.prompts_left_out = Counter(
            "colocate_rollout_prompts_left_out",
            "Prompts that train nothing, each time that they come up",
            ["reason"],
            registry=registry,
        )
        self.response_tokens = Histogram(
            "colocate_rollout_response_tokens",
            "Length of finished responses",
            buckets=[2**power for power in range(3, 18)],
            registry=registry,
        )
        self.sealed_tokens = Histogram(
            "colocate_rollout_sealed_response_tokens",
            "Length of responses in sealed batches; on average as long as finished ones, or training has a bias",
            buckets=[2**power for power in range(3, 18)],
            registry=registry,
        )
        self.sealed_staleness = StalenessHistogram()
        registry.register(self.sealed_staleness)
        self.turns = Counter(
            "colocate_gateway_turns", "Completions for clients by how they ended", ["ending"], registry=registry
        )
        self.parked_turns = Gauge(
            "colocate_gateway_parked", "Completions for clients that wait for an engine", registry=registry
        )
        self.resumed_turns = Counter(
            "colocate_gateway_resumed",
            "Attempts that went on with a client's interrupted completion",
            registry=registry,
        )
        self.sessions = Gauge(
            "colocate_gateway_sessions", "Sessions of clients that are open, or wait for their group", registry=registry
        )
        self.sessions_ended = Counter(
            "colocate_gateway_sessions_ended", "Sessions of clients by how they ended", ["ending"], registry=registry
        )
        self.staleness_wait = Gauge(
            "colocate_rollout_staleness_wait_seconds",
            "Since sealing, with groups enough, waits for one that would pass the staleness limit; 0: it does not",
            registry=registry,
        )
        self.unscored = Gauge(
            "colocate_rollout_unscored_samples",
            "Finished samples that wait for the scores of a reference; no batch takes them before",
            registry=registry,
        )
        self.reference_answers = Counter(
            "colocate_rollout_reference_answers", "Attempts to have a sample scored", ["ending"], registry=registry
        )
        self.refused_requests = Counter(
            "colocate_gateway_refused",
            "Requests of clients that were answered with an error",
            ["status"],
            registry=registry,
        )

    def count_discarded(self, samples: Iterable[Sample], reason: str) -> None:
        """Count what engines generated for samples that will not be trained."""
        self.discarded_tokens.labels(reason).inc(sum(sample.tokens.generated for sample in samples))


class StalenessHistogram(Collector):
    """This histogram shows the tokens of sealed batches by staleness, in steps. A batch adds all its counts at once."""

    LIMITS = (0, 1, 2, 3, 4, 6, 8, 16)

    def __init__(self) -> None:
        self._tokens: Tally[int] = Tally()

    def add(self, tokens: Mapping[int, int]) -> None:
        """Add so many tokens of each staleness."""
        self._tokens.update(tokens)

    def describe(self) -> Iterator[HistogramMetricFamily]:
        return self.collect()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        below = [sum(count for age, count in self._tokens.items() if age <= limit) for limit in self.LIMITS]
        family = HistogramMetricFamily(
            "colocate_rollout_sealed_token_staleness", "Staleness of tokens in sealed batches, in steps"
        )
        buckets = [(str(float(limit)), count) for limit, count in zip(self.LIMITS, below, strict=True)]
        whole = sum(age * count for age, count in self._tokens.items())
        family.add_metric([], [*buckets, ("+Inf", self._tokens.total())], whole)
        yield family


class StoreGauges(Collector):
    """These gauges show the store at the moment of the scrape: samples by state, the newest batch, its volume."""

    def __init__(self, store: Store | None, evaluated: Callable[[], Iterable[EvaluationResult]] = lambda: ()) -> None:
        """Register the gauges. store: None only to `describe`. evaluated: returns the newest result of each set."""
        self._store = store
        self._evaluated = evaluated

    def describe(self) -> Iterator[GaugeMetricFamily]:
        for name, meaning, *labels in _STORE_GAUGES:
            yield GaugeMetricFamily(f"colocate_rollout_{name}", meaning, labels=labels)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if (store := self._store) is None:
            return
        volume, batch, evaluated = disk_usage(store.batch_directory.parent), store.sealed, [*self._evaluated()]
        values: dict[str, list[tuple[list[str], float | None]]] = {
            "samples": [([state], store.counts[state]) for state in SampleState],
            "samples_ended": [([state, reason], count) for (state, reason), count in store.reasons.items()],
            "sealed_step": [([], store.next_step - 1)],
            "batch_reward": [([], batch.reward_mean if batch else None)],
            "batch_staleness": [([], batch.staleness_mean if batch else None)],
            "evaluation_reward": [([one.name], one.mean) for one in evaluated],
            "evaluation_reward_stderr": [([one.name], one.stderr) for one in evaluated],
            "evaluation_reward_best": [([one.name], one.best) for one in evaluated],
            "evaluation_reward_best_of": [
                ([one.name, str(each.answers)], each.mean) for one in evaluated for each in one.best_of
            ],
            "store_size_bytes": [([], volume.total)],
            "store_free_bytes": [([], volume.free)],
        }
        for family, points in zip(self.describe(), values.values(), strict=True):
            for labels, value in points:
                if value is not None:
                    family.add_metric(labels, value)
            yield family


_STORE_GAUGES = (
    ("samples", "Samples by state; they add up to admitted", "state"),
    ("samples_ended", "Samples that ended without training", "state", "reason"),
    ("sealed_step", "Newest sealed batch"),
    ("batch_reward", "Mean reward of the newest batch"),
    ("batch_staleness", "Mean staleness of its tokens, in steps"),
    ("evaluation_reward", "Mean reward of the newest evaluation of each set", "set"),
    ("evaluation_reward_stderr", "Standard error of the mean reward", "set"),
    ("evaluation_reward_best", "Mean of the best answer to each prompt, where there are several", "set"),
    ("evaluation_reward_best_of", "Of the best of so many answers: pass@k where rewards are 0 or 1", "set", "answers"),
    ("store_size_bytes", "Of the store's volume"),
    ("store_free_bytes", "Of the store's volume"),
)


class TokenRate:
    """Measures tokens per second over the last RATE_WINDOW_S, of attempts that ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._events: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, tokens: int) -> None:
        self._events.append((self._clock(), tokens))
        self._sum += tokens

    def read(self) -> float | None:
        """Return the rate, or None where no time has passed yet."""
        now = self._clock()
        while self._events and self._events[0][0] < now - RATE_WINDOW_S:
            self._sum -= self._events.popleft()[1]
        window = min(RATE_WINDOW_S, now - self._started)
        return self._sum / window if window > 0 else None
