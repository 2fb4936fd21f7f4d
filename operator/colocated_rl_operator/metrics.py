"""Define the operator's metrics. Every label has a bound: none holds names of jobs, pods or nodes.

| metric | meaning |
|---|---|
| colocated_rl_operator_leader | 1 while this process leads |
| colocated_rl_operator_jobs{phase} | jobs by phase, as reported last |
| colocated_rl_operator_longest_in_phase_seconds{phase} | of the job there longest; Pending and Queued are one |
| colocated_rl_operator_jobs_stalled{reason} | jobs that wait for a person: InvalidSpec, ObjectRefused, VolumeLost |
| colocated_rl_operator_jobs_near_backoff_limit | jobs whose failures have used more than half of backoffLimit |
| colocated_rl_operator_certificate_expiry_timestamp_seconds{certificate} | end: authority, or members' first |
| colocated_rl_operator_members_outdated | connected members that should have other keys than they have |
| colocated_rl_operator_members_connected | connections to members that have reported |
| colocated_rl_operator_member_connections_lost_total | connections that ended without the operator's wish |
| colocated_rl_operator_pass_seconds | one pass of a job's loop, API calls included |
| colocated_rl_operator_plan_seconds | the plan alone |
| colocated_rl_operator_barrier_seconds | from a member's newest fact to the next targets; no API call between |
| colocated_rl_operator_switch_seconds | from the raise of an epoch to all gates open, training excluded |
| colocated_rl_operator_epochs_raised_total{cause} | epochs by cause |
| colocated_rl_operator_targets_sent_total | targets sent |
| colocated_rl_operator_api_requests_total{verb,resource,code} | answers of the API server; code 0: none came |
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from colocated_rl_api.job_status import Phase
from colocated_rl_operator.planner.reasons import Cause, Reason

PREFIX = "colocated_rl_operator_"
FAST = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
WAITS = frozenset({Phase.PENDING, Phase.QUEUED})  # a job without room goes from one to the other, and back, for ever
STALLS = (Reason.INVALID_SPEC, Reason.OBJECT_REFUSED, Reason.VOLUME_LOST)
SLOW = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


class OperatorMetrics:
    def __init__(self, registry: CollectorRegistry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry
        self._clock = clock
        self.leader = Gauge(PREFIX + "leader", "1 while this process leads", registry=registry)
        self.connected = Gauge(PREFIX + "members_connected", "Members that have reported", registry=registry)
        self.outdated = Gauge(PREFIX + "members_outdated", "Members that should have other keys", registry=registry)
        self.lost = Counter(PREFIX + "member_connections_lost", "Connections lost", registry=registry)
        self.pass_s = Histogram(PREFIX + "pass_seconds", "One pass of a job's loop", buckets=FAST, registry=registry)
        self.plan_s = Histogram(PREFIX + "plan_seconds", "The plan alone", buckets=FAST, registry=registry)
        self.barrier_s = Histogram(
            PREFIX + "barrier_seconds", "Newest fact to next targets", buckets=FAST, registry=registry
        )
        self.switch_s = Histogram(
            PREFIX + "switch_seconds", "Switch, training excluded", buckets=SLOW, registry=registry
        )
        self.raised = Counter(PREFIX + "epochs_raised", "Epochs by cause", ["cause"], registry=registry)
        for cause in Cause:
            self.raised.labels(cause)  # Prometheus sees a first increase only of what was there before
        self.targets = Counter(PREFIX + "targets_sent", "Targets sent", registry=registry)
        self.requests = Counter(
            PREFIX + "api_requests", "Answers of the API server", ["verb", "resource", "code"], registry=registry
        )
        self._jobs = Gauge(PREFIX + "jobs", "Jobs by phase", ["phase"], registry=registry)
        self._jobs_stalled = Gauge(
            PREFIX + "jobs_stalled", "Jobs that go on only when a person acts, by why", ["reason"], registry=registry
        )
        self._near_limit = Gauge(
            PREFIX + "jobs_near_backoff_limit", "Jobs that have used more than half of backoffLimit", registry=registry
        )
        self.certificate_expiry = Gauge(
            PREFIX + "certificate_expiry_timestamp_seconds", "End, by Unix time", ["certificate"], registry=registry
        )
        self._states: dict[str, tuple[Phase | None, Reason | None, bool]] = {}
        self._since: dict[str, tuple[Phase | None, float]] = {}
        self.longest = Gauge(
            PREFIX + "longest_in_phase_seconds",
            "Of the job there longest; Pending and Queued are one",
            ["phase"],
            registry=registry,
        )
        for phase in Phase:
            self.longest.labels(phase.value).set_function(partial(self._longest_in, phase))
        self._update_gauges()

    def count_request(self, verb: str, resource: str, code: int) -> None:
        self.requests.labels(verb, resource, str(code)).inc()

    def count_job(
        self, uid: str, phase: Phase | None, stalled: Reason | None = None, *, is_near_limit: bool = False
    ) -> None:
        """Count a job. stalled: why a person must act, of `STALLS`; None when nobody has to."""
        state = phase, stalled, is_near_limit
        before, since = self._since.get(uid, ("", 0.0))
        goes_on = before == phase or {before, phase} <= WAITS
        self._since[uid] = phase, since if goes_on else self._clock()
        if self._states.get(uid) != state:
            self._states[uid] = state
            self._update_gauges()

    def forget_job(self, uid: str) -> None:
        self._since.pop(uid, None)
        if self._states.pop(uid, None) is not None:
            self._update_gauges()

    def _longest_in(self, phase: Phase) -> float:
        now = self._clock()
        return max((now - since for stands, since in [*self._since.values()] if stands is phase), default=0.0)

    def _update_gauges(self) -> None:
        phases = Tally(phase for phase, _, _ in self._states.values())
        for phase in Phase:
            self._jobs.labels(phase.value).set(phases[phase])
        stalls = Tally(stalled for _, stalled, _ in self._states.values())
        for stalled in STALLS:
            self._jobs_stalled.labels(stalled.value).set(stalls[stalled])
        self._near_limit.set(sum(is_near for _, _, is_near in self._states.values()))
