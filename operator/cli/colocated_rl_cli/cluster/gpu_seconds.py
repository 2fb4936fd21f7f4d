"""Add up who had the GPUs of a job, from the counters of its agents, or the logs of pods that have ended."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from colocated_rl_api import names
from colocated_rl_api.holders import PodHolder
from colocated_rl_api.rungs import Placement
from colocated_rl_api.seats import is_spare
from colocated_rl_cli.base.errors import CliError
from colocated_rl_cli.cluster.api import Api, Object
from colocated_rl_cli.cluster.pages import of_each, text_page
from colocated_rl_cli.evidence.gpu_hours import HOUR_S, GpuHours
from colocated_rl_cli.evidence.records import ladder_of, read_line

_LINE = re.compile(r'^colocate_gpu_seconds_total\{holder="(?P<holder>[^"]+)"\} (?P<seconds>[0-9.e+-]+)$', re.MULTILINE)

SHARES = (Placement.TIME_SLICED, Placement.RESIDENT, Placement.MIXED)  # in pods of role gpu
Logged = Callable[[Object, Sequence[Object]], Mapping[str, float]]
"""Returns the seconds of a device by holder, from the log lines of its pod's agent."""


async def gpu_hours(api: Api, job: Object, logged: Logged) -> GpuHours:
    """Read what each GPU pod of a job has counted, or logged if it has ended. Raises CliError where none answers."""
    pods = {
        str(pod["metadata"]["name"]): pod
        for pod in await api.pods_of(job["metadata"]["name"])
        if pod["metadata"]["labels"].get(names.ROLE_LABEL) in names.GPU_ROLES
        and pod.get("status", {}).get("phase") != "Pending"
    }
    found = await of_each(pods, lambda name: _seconds_of(api, job, pods[name], logged))
    failures = {pod: error for pod, error in found.items() if isinstance(error, CliError)}
    if failures and len(failures) == len(pods):
        raise next(iter(failures.values()))
    known = {pod: seconds for pod, seconds in found.items() if pod not in failures}
    notes = tuple(f"without pod {pod}: {error}" for pod, error in sorted(failures.items()))
    shared = None
    if ladder_of(job).placement in SHARES:
        shared = _hours(
            seconds
            for pod, seconds in known.items()
            if pods[pod]["metadata"]["labels"][names.ROLE_LABEL] == names.ROLE_GPU
        )
    return GpuHours(_hours(known.values()), notes, shared)


def _hours(of_pods: Iterable[Mapping[str, float]]) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for of_pod in of_pods:
        for holder, held in of_pod.items():
            seconds[holder] += held
    return {str(holder): seconds[holder] / HOUR_S for holder in PodHolder if seconds[holder]}


async def _seconds_of(api: Api, job: Object, pod: Object, logged: Logged) -> Mapping[str, float]:
    name, seconds = str(pod["metadata"]["name"]), defaultdict[str, float](float)
    if pod.get("status", {}).get("phase") == "Running":
        for line in _LINE.finditer(await text_page(api, name, "/metrics", port=names.METRICS_PORT)):
            seconds[line["holder"]] += float(line["seconds"])
        return seconds
    text = await api.log(name, names.AGENT_CONTAINER)
    lines = [line for line in map(read_line, text.splitlines()) if line is not None]
    labels = pod["metadata"]["labels"]
    devices, held = _devices(job["spec"], labels[names.ROLE_LABEL]), logged(job, lines)
    if is_spare(f"{labels[names.ROLE_LABEL]}-{labels.get(names.REPLICA_LABEL)}"):  # as its agent counts
        held = {PodHolder.IDLE: sum(held.values())}
    return {holder: each * devices for holder, each in held.items()}


def _devices(spec: Object, role: str) -> int:
    """Return the devices of a pod, as the job says it: the log does not."""
    own = spec.get("rollout", {}).get("gpus") if role == names.ROLE_ENGINE else None
    return int((own or spec.get("gpus", {})).get("count", 1))
