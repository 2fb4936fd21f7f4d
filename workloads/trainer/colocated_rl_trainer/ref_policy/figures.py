"""Define a reference's metrics for Prometheus. Their names are part of the interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)


class ScoreCounts:
    """Holds counts since the process started."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self.samples = Counter("colocate_reference_samples", "Samples scored", registry=registry)
        self.tokens = Counter(
            "colocate_reference_tokens", "Tokens of scored samples, prompts included", registry=registry
        )
        self.passes_s = Histogram(
            "colocate_reference_pass_seconds",
            "Time of the passes over what a device took at once",
            buckets=[0.01 * 4**power for power in range(8)],
            registry=registry,
        )
        self.failed = Counter("colocate_reference_failed_passes", "Passes that failed", registry=registry)
        self.waiting = Gauge("colocate_reference_waiting", "Samples that wait for a device", registry=registry)

    def count_waiting(self, waiting: Callable[[], int]) -> None:
        """Set the function that each scrape calls for the number of waiting samples."""
        self.waiting.set_function(waiting)

    @contextmanager
    def answering(self, tokens: int) -> Iterator[None]:
        """Count a sample and its tokens when the block ends without an error."""
        yield
        self.samples.inc()
        self.tokens.inc(tokens)

    def text(self) -> tuple[bytes, str]:
        """Return the page for a scrape, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
