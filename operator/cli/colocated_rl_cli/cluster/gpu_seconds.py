"""Add up who had the GPUs of a job, from the counters of its agents."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from colocated_rl_api import names
from colocated_rl_api.holders import PodHolder
from colocated_rl_cli.base.errors import CliError
from colocated_rl_cli.cluster.api import Api
from colocated_rl_cli.cluster.pages import of_each, text_page

_LINE = re.compile(r'^colocate_gpu_seconds_total\{holder="(?P<holder>[^"]+)"\} (?P<seconds>[0-9.e+-]+)$', re.MULTILINE)
_HOUR_S = 3600.0


class GpuHours(NamedTuple):
    """Holds the hours of all GPUs by holder, and why pods are missing in them."""

    held: dict[str, float]
    notes: tuple[str, ...]

    @property
    def total(self) -> float:
        return sum(self.held.values())

    @property
    def apart(self) -> float:
        """Return the hours that rollout and training would hold on GPUs of their own, as many for each side.

        They work at the same time then, and both sides are held for as long as the longer one works. Nothing is lost to
        switches, and no weights move: it is the least that such a job can cost.
        """
        both = self.held.get(PodHolder.BOTH, 0.0)
        return 2 * max(self.held.get(side, 0.0) + both for side in (PodHolder.ROLLOUT, PodHolder.TRAINER))


async def gpu_hours(api: Api, job: str) -> GpuHours:
    """Read the counters of each GPU pod, since the start of its agent. Raises CliError where no pod answers."""
    pods = [
        str(pod["metadata"]["name"])
        for pod in await api.pods_of(job)
        if pod["metadata"]["labels"].get(names.ROLE_LABEL) in names.GPU_ROLES
    ]
    found = await of_each(pods, lambda pod: text_page(api, pod, "/metrics", port=names.METRICS_PORT))
    failures = {pod: error for pod, error in found.items() if isinstance(error, CliError)}
    if failures and len(failures) == len(pods):
        raise next(iter(failures.values()))
    seconds: defaultdict[str, float] = defaultdict(float)
    for pod in found.keys() - failures.keys():
        for line in _LINE.finditer(found[pod]):
            seconds[line["holder"]] += float(line["seconds"])
    held = {str(holder): seconds[holder] / _HOUR_S for holder in PodHolder if seconds[holder]}
    return GpuHours(held, tuple(f"without pod {pod}: {error}" for pod, error in sorted(failures.items())))
