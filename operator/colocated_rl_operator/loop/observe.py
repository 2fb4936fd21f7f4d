"""Build the observation of one pass from the job as read, the pods as watched and the members' reports."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import pydantic

from colocated_rl_api import names
from colocated_rl_api.bounded_json import MOST_LEVELS
from colocated_rl_api.engines import refusals
from colocated_rl_api.failure import FailureCause
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.job_status import ColocatedRLJobStatus, FailuresStatus
from colocated_rl_api.logs import log
from colocated_rl_api.pod_template import QUEUE_LABELS
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.seats import ROLLOUT_SEAT, role_of
from colocated_rl_operator.clients.authority import LEAF_LIFE, RENEWED_BEFORE, Keyholder, Keyring
from colocated_rl_operator.clients.errors import JobInvalid
from colocated_rl_operator.clients.kube import Body
from colocated_rl_operator.clients.members import Address, MemberReport, Members
from colocated_rl_operator.loop.job_queue import Queue
from colocated_rl_operator.loop.job_state import JobState, PodRecord
from colocated_rl_operator.loop.nodes import Nodes
from colocated_rl_operator.loop.pods import Pods
from colocated_rl_operator.manifests import resources
from colocated_rl_operator.manifests.gangs import is_in_gang
from colocated_rl_operator.planner.observation import (
    Climb,
    FailureTally,
    Job,
    Member,
    Memory,
    Observation,
    PodPhase,
    remember,
)
from colocated_rl_operator.planner.reasons import Cause

LOG = logging.getLogger(__name__)

MAX_WORDS = 400  # of a container's last message
_TAKEN_AWAY = ("DisruptionTarget", "TerminationTarget")  # set by Kubernetes; set by Kueue on a pod that it preempts
_OVER_ITS_LIMIT = (  # in the words of a kubelet that evicts a pod for what it wrote itself, and sets no condition then
    *("Usage of EmptyDir volume", "exceeded its local ephemeral storage limit"),
    "ephemeral local storage usage exceeds the total limit",
)
_ENDED_BY_NODE = ("Evicted", "Preempting", "NodeShutdown", "Shutdown", "Terminated", "NodeLost")  # a node's reasons
_QUIET = ("PodInitializing", "ContainerCreating")  # a container that is merely on its way


def observe(
    state: JobState,
    job: Job,
    *,
    pods: Pods,
    members: Members,
    queue: Queue,
    nodes: Nodes,
    keyring: Keyring,
    now: float,
    at: datetime,
) -> Observation:
    """Return what this pass sees. now, at: the same moment, monotonic and by the wall clock.

    Raises JobInvalid if a newer operator wrote the record and this one can't read it.
    """
    status, job_uid = state.status, state.about.uid
    ended_at = status.ended_at
    is_over = ended_at is not None
    records = _pod_records(state, job, pods)
    addresses = () if is_over else tuple(each.address for each in records if each.address is not None)
    members.keep(job_uid, addresses, token_name=job.token_name)
    answers, climb = members.answers(job_uid), _climb(status)
    job = state.job = job.led_by(climb)  # kept, with its seats
    queue.note(job, is_queued=climb is not None and climb.cause is Cause.PODS_NOT_READY)
    seen = remember(
        Observation(
            now=now,
            job=job,
            members=tuple(_noted(_member(state, each, answers.get(each.name), now), nodes) for each in records),
            climb=climb,
            trained_step=(status.step or 0) if job.ladder.trains else 0,
            served=WeightVersion.parse(status.weight_version) if status.weight_version else None,
            is_over=is_over,
            started_at=None if job.spec.suspend else _moment(state, status.start_time, now, at) or now,
            finished_at=_moment(state, ended_at, now, at),
            has_elder=queue.has_elder(job),
            outdated=_outdated(job, records, keyring, at),
            refused={seat: each for seat, each in state.refused.items() if now < each.until},
            hindrance=state.stall.message if state.stall else "",
            memory=state.memory,
        )
    )
    _log_rungs(seen, state.memory)
    state.memory = seen.memory
    return seen


def _outdated(job: Job, records: list[PodRecord], keyring: Keyring, at: datetime) -> frozenset[str]:
    """Return the pods of a reference whose keys are of a former authority or token, or end before long."""
    found = set()
    for each in records:
        role, metadata = role_of(each.seat), each.pod["metadata"]
        if role == names.ROLE_REFERENCE and resources.keys_of(each.pod) is not None:
            mark = keyring.mark(Keyholder(job.uid, each.name, role, job.token_name))
            renewed_at = _time(metadata["creationTimestamp"]) + LEAF_LIFE - RENEWED_BEFORE
            if at >= renewed_at or metadata.get("annotations", {}).get(names.KEYS_ANNOTATION) != mark:
                found.add(each.name)
    return frozenset(found)


def _moment(state: JobState, recorded: datetime | None, now: float, at: datetime) -> float | None:
    """Convert a recorded time to the monotonic clock; None for none.

    Only once in this process, so that a wall clock that is set moves no deadline that runs; and never into the future,
    where a clock that was set back would have it.
    """
    if recorded is None:
        return None
    return state.moments.setdefault(recorded, now - max(0.0, (at - recorded).total_seconds()))


def _log_rungs(seen: Observation, before: Memory) -> None:
    """Log the highest rung that the whole group has reached since the last pass."""
    reached, climb = seen.memory.reached, seen.climb
    known = before.reached if before.epoch == seen.memory.epoch else {}
    fresh = [rung for rung in reached if rung not in known]
    if climb is None or not fresh:
        return
    took_s = round(seen.now - max(known.values(), default=seen.memory.epoch_at), 6)
    version, rung = str(climb.version), max(fresh, key=seen.job.ladder.place)
    log(LOG, "rung reached", epoch=climb.epoch, step=climb.step, version=version, rung=rung, took_s=took_s)


def read_job(body: Mapping[str, Any]) -> Job:
    """Return the job. Raises JobInvalid, which names the field, its value and what is expected.

    Unknown fields are ignored: they belong to a newer CRD, most likely as its defaults. The server refuses all others.
    Of the job's labels, those of a queue are read with the spec: another value counts from the next change of the spec.
    """
    metadata = body["metadata"]
    try:
        spec = ColocatedRLJobSpec.model_validate_json(json.dumps(body["spec"]), extra="ignore")
    except pydantic.ValidationError as error:
        raise JobInvalid("; ".join(_complaint(item) for item in error.errors(include_url=False)[:5])) from error
    except RecursionError as error:
        raise JobInvalid(f"spec is nested more than {MOST_LEVELS} levels deep") from error
    if refused := [f"spec.{'.'.join(map(str, field))}: {words}" for field, words in refusals(spec)]:
        raise JobInvalid("; ".join(refused[:5]))
    job = Job(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        created=_time(metadata["creationTimestamp"]),
        spec=spec,
        token_name=token_name(metadata),
        queue_labels={label: value for label in QUEUE_LABELS if (value := (metadata.get("labels") or {}).get(label))},
    )
    if job.queue and spec.not_queued:
        raise JobInvalid("; ".join(f"spec.{field}: {words}" for field, words in spec.not_queued.items()))
    return job


def token_name(metadata: Mapping[str, Any]) -> str:
    return str((metadata.get("annotations") or {}).get(names.DATA_TOKEN_ANNOTATION, ""))


def _complaint(error: Any) -> str:
    """Describe one error of the spec. A rule over several fields names their values itself."""
    field_path, value = ".".join(str(part) for part in ("spec", *error["loc"])), error.get("input")
    words = error["msg"].removeprefix("Value error, ")
    if isinstance(value, Mapping):
        return f"{field_path}: {words}"
    return f"{field_path} is {json.dumps(value, default=str)[:120]}: {words}"


def _climb(status: ColocatedRLJobStatus) -> Climb | None:
    if status.epoch is None or status.target_step is None or status.lineage is None or status.cause is None:
        return None
    causes = {str(cause): cause for cause in Cause}
    if status.cause not in causes:
        raise JobInvalid(f"status.cause is {status.cause}, which this operator does not know: run the newer one again")
    return Climb(
        epoch=status.epoch,
        step=status.target_step,
        lineage=status.lineage,
        group=status.group or "",
        cause=causes[status.cause],
        tally=_tally(status.failures or FailuresStatus(), restarts=status.restarts or 0, step=status.target_step),
        retries=status.retries or 0,
        replicas=status.group_replicas,
    )


def _tally(failures: FailuresStatus, *, restarts: int, step: int) -> FailureTally:
    """Return the record of failures. One of an older operator has their number alone: as if all were of this step."""
    return FailureTally(
        *(failures.pod_restarts, failures.step_retries, failures.step or 0, failures.tries),
        *(failures.cause, failures.action, failures.rule),
        pod=failures.pod,
        avoids=tuple(failures.avoided_nodes),
        counted=tuple(failures.counted_steps) or (step,) * restarts,
    )


def _pod_records(state: JobState, job: Job, pods: Pods) -> list[PodRecord]:
    """Return a record of each pod of the job: the former one where nothing changed."""
    before, state.pod_records = state.pod_records, {}
    for pod in pods.of(state.about.uid):
        metadata = pod["metadata"]
        record = before.get(metadata["uid"])
        if record is not None and record.pod is pod:
            state.pod_records[metadata["uid"]] = record
        elif place := resources.seat_and_attempt(job, metadata["name"]):
            state.pod_records[metadata["uid"]] = PodRecord(pod, metadata["name"], *place, _address(pod, place[0]))
    return list(state.pod_records.values())


def _member(state: JobState, record: PodRecord, answer: MemberReport | None, now: float) -> Member:
    if record.member is None or record.answer is not answer:
        facts = answer.facts if answer else None
        member = record.member
        if member is None or (member.facts is None) != (facts is None):
            member = _read_pod(state, record, now, is_heard=facts is not None)
        silent_since, highest_epoch = (answer.silent_since, answer.highest_epoch) if answer else (None, 0)
        record.member = member.reporting(facts, highest_epoch=highest_epoch, silent_since=silent_since)
        record.answer = answer
    return record.member


def _noted(member: Member, nodes: Nodes) -> Member:
    """Return the member with the notice that its node gives now."""
    notice = nodes.notice_of(member.node)
    return member if notice is member.notice else replace(member, notice=notice)


def _read_pod(state: JobState, record: PodRecord, now: float, *, is_heard: bool) -> Member:
    """Return a member without its own facts.

    Moments are those at which this process first saw the pod and its deletion: no other clock counts.
    """
    metadata, status = record.pod["metadata"], record.pod.get("status", {})
    uid = metadata["uid"]
    restarts = sum(container.get("restartCount", 0) for container in _operators_containers(status))
    if is_heard or (role_of(record.seat) == names.ROLE_REFERENCE and _is_ready(status)):
        state.restarts[uid] = restarts
    ends_at = None
    if metadata.get("deletionTimestamp"):
        ends_at = state.ending_since.setdefault(uid, now) + metadata.get("deletionGracePeriodSeconds", 0)
    return Member(
        seat=record.seat,
        attempt=record.attempt,
        name=record.name,
        uid=uid,
        phase=PodPhase(status.get("phase", "Pending")),
        created_at=state.first_seen.setdefault(uid, now),
        address=status.get("podIP"),
        ends_at=ends_at,
        is_ready=_is_ready(status),
        is_gated=bool(record.pod["spec"].get("schedulingGates")),
        is_in_gang=is_in_gang(record.pod),
        is_accepted="startTime" in status,
        node=record.pod["spec"].get("nodeName"),
        fate=_fate(status, is_deleted=ends_at is not None),
        ill_device=_bad_device(status),
        memory_kills=_memory_kills(status),
        trouble=_trouble(status, is_restarting=restarts > state.restarts.get(uid, 0)),
        is_starting=_is_starting(status),
    )


def _fate(status: Body, *, is_deleted: bool) -> FailureCause | None:
    """Return why the pod is lost, if the cluster reports it. A deleted pod may end as Failed for that alone."""
    is_taken_away = any(
        item["type"] in _TAKEN_AWAY and item["status"] == "True" for item in status.get("conditions", ())
    )
    is_at_fault = any(words in status.get("message", "") for words in _OVER_ITS_LIMIT)
    if is_taken_away or (status.get("reason") in _ENDED_BY_NODE and not is_at_fault):
        return FailureCause.POD_EVICTED
    if status.get("phase") != PodPhase.FAILED or is_deleted:
        return None
    return FailureCause.BAD_DEVICE if _bad_device(status) else FailureCause.POD_FAILED


def _bad_device(status: Body) -> str | None:
    """Return resource, id and, where there is one, message of the first device that the node reports as Unhealthy.

    Unknown, as while a device plugin restarts, says nothing of the device.
    """
    for container in status.get("containerStatuses", ()):
        for resource in container.get("allocatedResourcesStatus", ()):
            for device in resource.get("resources", ()):
                if device.get("health") == "Unhealthy":
                    words = f"{resource['name']} {device['resourceID']} is Unhealthy: {device.get('message', '')}"
                    return words.rstrip(": ")[:MAX_WORDS]
    return None


def _memory_kills(status: Body) -> int:
    """Return how often the GPU container has ended if it last did for its memory. A webhook's containers don't count.

    While it waits for its restart, in kubelet's back-off too, the restart is not counted yet.
    """
    for container in status.get("containerStatuses", ()):
        state, last = container.get("state", {}), container.get("lastState", {})
        ended = state.get("terminated") or last.get("terminated") or {}
        if container["name"] == names.GPU_CONTAINER and ended.get("reason") == "OOMKilled":
            return int(container.get("restartCount", 0)) + ("running" not in state)
    return 0


def _is_ready(status: Body) -> bool:
    """Return whether the node reports the pod ready, or no more than that containers of others in it are not."""
    ready: Body = next((item for item in status.get("conditions", ()) if item["type"] == "Ready"), {})
    if ready.get("status") == "True":
        return True
    own = _operators_containers(status)
    return ready.get("reason") == "ContainersNotReady" and bool(own) and all(each.get("ready") for each in own)


def _is_starting(status: Body) -> bool:
    """Return whether a container runs and has not passed its startup probe."""
    return any(
        "running" in each.get("state", {}) and each.get("started") is False for each in _operators_containers(status)
    )


def _address(pod: Body, seat: str) -> Address | None:
    """Return the address of a member that should answer: its pod runs. While a pod starts, silence means nothing.

    A GPU pod that is deleted answers as long as it runs: its trainers may still save their last step.
    """
    metadata, status = pod["metadata"], pod.get("status", {})
    if role_of(seat) == names.ROLE_REFERENCE:
        return None  # no member
    if status.get("phase") != PodPhase.RUNNING or not status.get("podIP"):
        return None
    if metadata.get("deletionTimestamp") and seat == ROLLOUT_SEAT:
        return None
    has_own_keys = resources.keys_of(pod) is not None
    return Address(metadata["name"], metadata["uid"], role_of(seat), status["podIP"], has_own_keys=has_own_keys)


def _trouble(status: Body, *, is_restarting: bool) -> str | None:
    """Return why a container does not run, or keeps failing: kubelet's message and the container's last one.

    One of others than the operator, such as a sidecar of the job's, is the pod's trouble as long as the pod waits for
    it to start. Later the member answers for the pod.
    """
    is_waiting = status.get("phase") == PodPhase.PENDING
    for container in _containers(status) if is_waiting else _operators_containers(status):
        if trouble := _container_trouble(container, is_restarting=is_restarting):
            return trouble
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"not scheduled: {condition.get('message', condition.get('reason', ''))}"
    if status.get("phase") == PodPhase.FAILED:
        return f"failed: {status.get('reason', '')} {status.get('message', '')}".rstrip(": ")
    return None


def _containers(status: Body) -> tuple[Body, ...]:
    return (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))


def _operators_containers(status: Body) -> tuple[Body, ...]:
    """Return those of the operator: others are the job's own or a webhook's, and say nothing of the member."""
    return tuple(each for each in _containers(status) if each["name"] in names.CONTAINERS)


def _container_trouble(container: Body, *, is_restarting: bool) -> str | None:
    name, state = container["name"], container.get("state", {})
    reason = state.get("waiting", {}).get("reason")
    is_loud = reason not in (None, *_QUIET)
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated") or {}
    if ended.get("exitCode") and (is_restarting or "running" not in state):
        why = f"{reason}, " if is_loud else ""
        return f"{name}: {why}{container.get('restartCount', 0)} restarts, last {_end_of(ended)}"
    if name == names.MODEL_CONTAINER and "running" in state:
        return f"{name}: is fetching the model since {state['running'].get('startedAt', 'a moment ago')}"
    return f"{name}: {reason}: {state['waiting'].get('message', '')}".rstrip(": ") if is_loud else None


def _end_of(terminated: Body) -> str:
    """Describe how a container ended. Its last message is the end of its log, see `resources`."""
    reason, words = terminated.get("reason"), terminated.get("message", "").strip()
    ending = f"ended with code {terminated['exitCode']}" + (f" ({reason})" if reason not in (None, "Error") else "")
    return f"{ending}: {words[-MAX_WORDS:]}" if words else ending


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
