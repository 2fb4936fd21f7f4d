"""Puts together what one pass sees: the job as read, the pods as watched, the members as they answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pydantic

from colocated_rl_api import names
from colocated_rl_api.job import ColocatedRLJobSpec, ColocatedRLJobStatus
from colocated_rl_api.ladder import WeightVersion
from colocated_rl_api.logs import log
from colocated_rl_operator.case import Case, Pods
from colocated_rl_operator.errors import JobInvalid
from colocated_rl_operator.kube import Body
from colocated_rl_operator.members import Address, Answer, Members
from colocated_rl_operator.observation import ROLLOUT_SEAT, Climb, Job, Member, Memory, Observation, PodPhase, remember
from colocated_rl_operator.observation import gpu_seat as seat_of
from colocated_rl_operator.reasons import Cause

LOG = logging.getLogger(__name__)

_QUIET = ("PodInitializing", "ContainerCreating")  # a container that is merely on its way


def observe(case: Case, job: Job, *, pods: Pods, members: Members, now: float, at: datetime) -> Observation:
    """now: monotonic. at: the same moment on the wall clock."""
    assert case.status is not None, "look first"
    status = case.status
    is_over = status.completion_time is not None
    bodies = pods.of(case.uid)
    members.keep(case.uid, () if is_over else [address for pod in bodies if (address := _address(pod))])
    answers = members.answers(case.uid)
    seen = remember(
        Observation(
            now=now,
            job=job,
            members=tuple(_member(pod, answers.get(pod["metadata"]["name"]), now, at) for pod in bodies),
            climb=_climb(status),
            trained_step=status.step or 0,
            served=WeightVersion.parse(status.weight_version) if status.weight_version else None,
            is_over=is_over,
            memory=case.memory,
        )
    )
    _log_rungs(seen, case.memory)
    case.memory = seen.memory
    return seen


def _log_rungs(seen: Observation, before: Memory) -> None:
    """Rungs that the whole group has reached since the last pass."""
    reached, climb = seen.memory.reached, seen.climb
    known = before.reached if before.epoch == seen.memory.epoch else {}
    fresh = [rung for rung in reached if rung not in known]
    if climb is None or not fresh:
        return
    took_s = round(seen.now - max(known.values(), default=seen.memory.epoch_at), 6)
    version, rung = str(climb.version), max(fresh)
    log(LOG, "rung reached", epoch=climb.epoch, step=climb.step, version=version, rung=rung, took_s=took_s)


def read_job(body: Mapping[str, Any]) -> Job:
    """Raises JobInvalid, which names the field, its value and what is expected."""
    metadata = body["metadata"]
    try:
        spec = ColocatedRLJobSpec.model_validate_json(json.dumps(body["spec"]))
    except pydantic.ValidationError as error:
        raise JobInvalid("; ".join(_complaint(item) for item in error.errors(include_url=False)[:5])) from error
    return Job(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        created=_time(metadata["creationTimestamp"]),
        spec=spec,
    )


def _complaint(error: Any) -> str:
    field_path = ".".join(str(part) for part in ("spec", *error["loc"]))
    return f"{field_path} is {json.dumps(error.get('input'), default=str)[:120]}: {error['msg']}"


def _climb(status: ColocatedRLJobStatus) -> Climb | None:
    if status.epoch is None or status.target_step is None or status.lineage is None or status.cause is None:
        return None
    return Climb(
        epoch=status.epoch,
        step=status.target_step,
        lineage=status.lineage,
        group=status.group or "",
        cause=Cause(status.cause),
        restarts=status.restarts or 0,
    )


def _member(pod: Body, answer: Answer | None, now: float, at: datetime) -> Member:
    metadata, status = pod["metadata"], pod.get("status", {})
    ends = metadata.get("deletionTimestamp")
    return Member(
        seat=_seat(pod),
        attempt=int(metadata["labels"][names.ATTEMPT_LABEL]),
        name=metadata["name"],
        uid=metadata["uid"],
        phase=PodPhase(status.get("phase", "Pending")),
        created_at=now + (_time(metadata["creationTimestamp"]) - at).total_seconds(),
        address=status.get("podIP"),
        ends_at=None if ends is None else now + (_time(ends) - at).total_seconds(),
        trouble=_trouble(status),
        silent_since=answer.silent_since if answer else None,
        highest_epoch=answer.highest_epoch if answer else 0,
        facts=answer.facts if answer else None,
    )


def _seat(pod: Body) -> str:
    labels = pod["metadata"]["labels"]
    return ROLLOUT_SEAT if labels[names.ROLE_LABEL] == names.ROLE_ROLLOUT else seat_of(int(labels[names.REPLICA_LABEL]))


def _address(pod: Body) -> Address | None:
    """Of a member that should answer: its pod runs. While one starts, silence says nothing."""
    metadata, status = pod["metadata"], pod.get("status", {})
    if status.get("phase") != PodPhase.RUNNING or not status.get("podIP") or metadata.get("deletionTimestamp"):
        return None
    return Address(metadata["name"], metadata["uid"], metadata["labels"][names.ROLE_LABEL], status["podIP"])


def _trouble(status: Body) -> str | None:
    """Why the pod's containers don't run, if there is a reason to tell."""
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, *_QUIET):
            return f"{container['name']}: {waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"not scheduled: {condition.get('message', condition.get('reason', ''))}"
    if status.get("phase") == PodPhase.FAILED:
        return f"failed: {status.get('reason', '')} {status.get('message', '')}".rstrip(": ")
    return None


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
