"""Hold what was observed of a job, and derive the pod of each seat, members' facts and pods' rungs from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pydantic

from colocated_rl_api import names
from colocated_rl_api.facts import PodFacts, RolloutFacts
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.job_status import ColocatedRLJobStatus, Phase
from colocated_rl_api.member_wire import PodTarget
from colocated_rl_api.rungs import Rung
from colocated_rl_api.seats import is_spare
from colocated_rl_cli.base.errors import CliError
from colocated_rl_cli.evidence.records import ladder_of

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Evidence:
    """Holds what was observed of one job.

    states: page `/v1/state` by pod, or the error that prevented reading it. since: when each pod reached its rung, in
    seconds since the epoch. unread: what else could not be read, and why.
    """

    job: Object
    pods: Sequence[Object]
    events: Sequence[Object]
    states: Mapping[str, Any | CliError]
    now: datetime
    since: Mapping[str, float] = field(default_factory=dict)
    unread: Sequence[str] = ()


def seats_of(pods: Sequence[Object]) -> dict[str, Object]:
    """Map each seat to its pod: the newest attempt that has not ended. A pod without a role label has no seat."""
    found: dict[str, Object] = {}
    for pod in sorted(pods, key=_attempt):
        labels, phase = pod["metadata"]["labels"], pod.get("status", {}).get("phase")
        role = labels.get(names.ROLE_LABEL)
        seat = role if role == names.ROLE_ROLLOUT else f"{role}-{labels.get(names.REPLICA_LABEL)}"
        if role is None:
            continue
        if seat not in found or phase not in ("Succeeded", "Failed"):
            found[seat] = pod
    return found


def _attempt(pod: Object) -> int:
    """Return the attempt that the pod's label says; 0 for one that somebody else has labelled."""
    attempt: str = pod["metadata"]["labels"].get(names.ATTEMPT_LABEL, "")
    return int(attempt) if attempt.isdecimal() else 0


def is_over(job: Object) -> bool:
    """Return whether the job is complete or has failed, so that nothing more happens."""
    return job.get("status", {}).get("phase") in (Phase.COMPLETE, Phase.FAILED)


def is_at_rest(job: Object) -> bool:
    """Return whether the job is over, suspended or queued: it has no pods, or will have none before long."""
    is_queued = job.get("status", {}).get("phase") == Phase.QUEUED
    return is_over(job) or is_queued or bool(job["spec"].get("suspend"))


def steps_of(job: Object) -> int:
    """Return the step that the job ends with: spec.steps, or an earlier one with which its prompts end."""
    steps = int(job.get("spec", {}).get("steps", 1))
    rollout = (job.get("status") or {}).get("rollout") or {}
    return min(steps, int(rollout.get("lastStep", steps)))


def has_pages(pod: Object) -> bool:
    """Return whether the pod is a member, which has pages; a reference on devices of its own is not one."""
    return bool(pod["metadata"]["labels"].get(names.ROLE_LABEL) != names.ROLE_REFERENCE)


def facts_of(seen: Evidence) -> dict[str, PodFacts | RolloutFacts]:
    """Return the facts of each member whose page was read and understood, by pod."""
    found: dict[str, PodFacts | RolloutFacts] = {}
    for pod, state in seen.states.items():
        facts = state.get("facts") if isinstance(state, Mapping) else None
        if not isinstance(facts, Mapping):
            continue
        model = PodFacts if facts.get("type") == "podFacts" else RolloutFacts
        try:
            found[pod] = model.model_validate(facts)
        except pydantic.ValidationError:
            continue  # of another version: reported in the notes
    return found


def rungs_of(
    status: ColocatedRLJobStatus, seen: Evidence, facts: Mapping[str, PodFacts | RolloutFacts]
) -> dict[str, Rung]:
    """Return the rung of each pod on the climb to the newest epoch's version.

    Rungs come from members' pages, and from the status for pages that were not read. A page may be newer than the
    status, so its own target counts. A spare climbs nothing.
    """
    found = {pod.name: Rung(pod.rung) for pod in status.out_of_line if pod.rung in set(Rung)}
    for seat, pod in seats_of(seen.pods).items():
        name = pod["metadata"]["name"]
        known, target = facts.get(name), _target(seen.states.get(name))
        if not isinstance(known, PodFacts) or is_spare(seat):
            continue
        is_current = target is not None and target.epoch >= (status.epoch or 0) and known.epoch == target.epoch
        reached = ladder_of(seen.job).standing(known, target.version) if target is not None and is_current else None
        found[name] = reached or Rung.UNKNOWN
    return found


def spec_of(job: Object) -> ColocatedRLJobSpec | None:
    """Return the job's spec, or None if another version's fields make it unreadable."""
    try:
        return ColocatedRLJobSpec.model_validate(job["spec"])
    except pydantic.ValidationError:
        return None


def _target(state: Any) -> PodTarget | None:
    """Return the target on a GPU pod's page, or None."""
    try:
        return PodTarget.model_validate(state["target"])
    except (pydantic.ValidationError, TypeError, KeyError):
        return None  # it has none yet, or the page was not read
