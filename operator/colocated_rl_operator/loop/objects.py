"""Create, repair and delete the job's objects and pods at the API server.

The job stalls when the API server refuses an object or keeps failing at one, and when a volume is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto

from colocated_rl_api import names
from colocated_rl_api.failure import FailureCause
from colocated_rl_api.logs import log
from colocated_rl_api.member_wire import Goal
from colocated_rl_api.names import PodUid
from colocated_rl_api.pod_template import PodDefaults, PodTemplate
from colocated_rl_api.seats import ROLLOUT_SEAT, role_of
from colocated_rl_operator.clients.authority import Keyholder, secret_files
from colocated_rl_operator.clients.errors import (
    ApiError,
    ApiUnreachable,
    Conflict,
    NotAdmitted,
    NotFound,
    VolumeLost,
    first,
)
from colocated_rl_operator.clients.kube import Body
from colocated_rl_operator.loop.doors import Doors
from colocated_rl_operator.loop.job_state import JobState, list_again
from colocated_rl_operator.loop.record import News
from colocated_rl_operator.loop.reporting import set_stall
from colocated_rl_operator.loop.start import pinned, recorded_images, start_with
from colocated_rl_operator.manifests import belongings, resources
from colocated_rl_operator.manifests.confinement import users_of_range
from colocated_rl_operator.manifests.gangs import NEEDS
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.planner.actions import CreatePod, DeletePod, PodAction
from colocated_rl_operator.planner.observation import Job, Observation, PodPhase, RefusedPod, with_pod
from colocated_rl_operator.planner.plan import Plan
from colocated_rl_operator.planner.reasons import Reason
from colocated_rl_operator.planner.status import Stall

LOG = logging.getLogger(__name__)

AT_ONCE = 16  # calls to the API server for one job
STALL_RETRY_S = 30.0
FAILS_S = 30.0  # a failure of the API server that lasts so long is reported like a refusal
NAME_RETRY_S = 1.0
IS_ENDING = "object is being deleted"  # the server's message for a name that will be free
UNFIT = {"key": names.UNFIT_TAINT, "value": FailureCause.BAD_DEVICE, "effect": "NoSchedule"}
NO_DRY_RUN = "does not support dry run"  # its message where it may not call a webhook, which then judges the pod itself
NO_IMAGE_VOLUMES = (
    "this cluster has no image volumes, which need Kubernetes 1.35, or the feature gate ImageVolume before: its API "
    "server leaves them out of pods. Make a job without them, whose model is on a claim"
)
NO_CLAIMS = (
    "this cluster has no dynamic resource allocation, which needs Kubernetes 1.34: its API server leaves claims out of "
    "pods, which would get no device. Make a job without gpus.resourceClaimTemplateName, whose devices are counted"
)


async def apply_plan(state: JobState, seen: Observation, decided: Plan, doors: Doors) -> float | None:
    """Make the job's objects, then its pods, which need them all. Return after how many seconds to try again.

    What was refused is tried again after STALL_RETRY_S, or once something else is to be done or a pod has made room. It
    is not in each pass, in which many jobs without room would take the turns of all others' calls.
    """
    changes: Sequence[PodChange] = ()
    asked, stalled_for_s = _asked_for(seen, decided), seen.now - state.stalled_at
    if state.stall is not None and asked == state.stalled_on and stalled_for_s < STALL_RETRY_S:
        return STALL_RETRY_S - stalled_for_s
    try:
        makes_pods = any(isinstance(action, CreatePod) for action in decided.pods)
        if state.tried_of != seen.job.generation and not seen.members:
            await _try_pods(seen.job, doors)
            state.tried_of = seen.job.generation
        await _end_readers(seen.job, decided, doors)
        if makes_pods:
            await _record_start(state, seen, doors)
            await _make_objects(seen.job, doors, has_begun=bool(state.status.lineage))
        if makes_pods or _apply_in_s(state, seen, decided, doors) == 0:
            await _apply_objects(state, seen, doors)
            await _make_client_keys(seen.job, doors, has_begun=bool(state.status.lineage))
            state.objects_of, state.applied_at = _objects_of(seen.job), doors.clock()
        changes = await _change_pods(state, seen.job, decided, doors)
    except* VolumeLost as errors:
        set_stall(state, Stall(Reason.VOLUME_LOST, str(first(errors))), action="MakeNoPods")
    except* NotAdmitted as errors:
        set_stall(state, refusal_of(first(errors)), action="CreateObjects")
    except* ApiUnreachable as errors:
        if not is_lasting(state, first(errors), doors):
            raise
        set_stall(state, refusal_of(first(errors)), action="CreateObjects")
    else:
        state.stall = None
    if state.stall is not None:
        state.stalled_on, state.stalled_at = asked, seen.now
        return STALL_RETRY_S
    if PodChange.NAME_TAKEN in changes:
        return NAME_RETRY_S
    return _apply_in_s(state, seen, decided, doors)


def _asked_for(seen: Observation, decided: Plan) -> object:
    """Return what the API server is asked for, and beside which pods, to compare it with what was asked for before."""
    changed = frozenset(action.seat if isinstance(action, CreatePod) else action.uid for action in decided.pods)
    ended = (PodPhase.SUCCEEDED, PodPhase.FAILED)  # and take no room of a quota
    return _objects_of(seen.job), changed, frozenset(pod.uid for pod in seen.members if pod.phase not in ended)


def _apply_in_s(state: JobState, seen: Observation, decided: Plan, doors: Doors) -> float | None:
    """Return the seconds until objects are applied; None for not at all.

    Another process has applied those of pods that this one found. They have time, or a take-over of hundreds of jobs
    would make thousands of calls before the last job has targets. A repair waits for the end of a switch.
    """
    if not _goes_on(seen, decided):
        return None
    if state.objects_of is None and seen.members:
        return max(0.0, state.applies_at - doors.clock())
    if state.objects_of != _objects_of(seen.job):
        return 0.0
    if set(decided.standings.values()) != {seen.job.ladder.top}:
        return None
    return max(0.0, state.applied_at + doors.repair_s - doors.clock())


async def end_budget(job: Job, decided: Plan, doors: Doors) -> None:
    """Let all pods of a group go that ends with the new epoch. The next start applies the budget as it was."""
    if decided.climb is not None and decided.climb.cause.goal is Goal.STOP:
        with contextlib.suppress(ApiError):
            await doors.kube.apply(job.namespace, belongings.disruption_budget(job, ends=True))


def _objects_of(job: Job) -> tuple[int, int]:
    return job.generation, job.replicas


def _goes_on(seen: Observation, decided: Plan) -> bool:
    """Return whether members go on. Those that stop need no objects, and the refusal of one would keep their pods."""
    stops = decided.climb is not None and decided.climb.cause.goal is Goal.STOP
    return not (seen.rests or decided.is_over or stops)


def is_lasting(state: JobState, error: ApiUnreachable, doors: Doors) -> bool:
    """Return whether to report the error to people: a webhook is down, the server panics; not if it is merely away."""
    is_same = error.status is not None and state.failure == str(error)
    return is_same and state.failing_s(doors.clock()) >= FAILS_S


def refusal_of(error: ApiError) -> Stall:
    return Stall(Reason.OBJECT_REFUSED, str(error))


async def _end_readers(job: Job, decided: Plan, doors: Doors) -> None:
    """Delete the job's readers before a rollout pod is made, which may need their claim on another node."""
    if not any(isinstance(action, CreatePod) and action.seat == ROLLOUT_SEAT for action in decided.pods):
        return
    for reader in await doors.kube.list_readers(job.namespace, job.name):
        name, uid = reader["metadata"]["name"], reader["metadata"]["uid"]
        if job.uid not in [owner["uid"] for owner in reader["metadata"].get("ownerReferences", ())]:
            continue  # somebody's pod that merely has the label
        with contextlib.suppress(NotAdmitted):  # it ends by itself, and most claims are mounted without it going
            await doors.kube.delete_pod(job.namespace, name, uid=uid)
            log(LOG, "reader deleted", pod=name, reason="its job has pods again")


async def _record_start(state: JobState, seen: Observation, doors: Doors) -> None:
    """Record what pods are made of if there are none yet. Raises StaleEpoch, ApiError.

    The record is looked up before it is made: a quota that is used up refuses an object before the server sees that it
    exists.
    """
    if seen.members:
        return
    job, before = seen.job, state.status.start
    record = belongings.start_record(job, belongings.start_parts(job, await _images_for(job, doors)))
    name = record["metadata"]["name"]
    start = start_with(doors.images, version=doors.version, revision=name)
    if await _read_record(job, name, doors) is None:
        with contextlib.suppress(Conflict):
            await doors.kube.create_revision(job.namespace, record)
    if before != start:
        await state.record.commit(state.status.model_copy(update={"start": start}))
    if before is not None and before.revision not in ("", name):
        await _delete_former_gang(job, before.revision, record["data"].get("gang"), doors)
        await doors.kube.delete_revision(job.namespace, before.revision)


async def _delete_former_gang(job: Job, revision: str, present: Body | None, doors: Doors) -> None:
    """Delete the PodGroup of a former start. One that the operator may no longer delete goes with its job."""
    record = await _read_record(job, revision, doors)
    parts = belongings.recorded_parts(job, record) if record else None
    if parts is not None and parts.gang is not None and parts.gang != present:
        with contextlib.suppress(NotAdmitted):
            await doors.kube.delete_group(job.namespace, parts.gang)


async def _load_parts(state: JobState, job: Job, doors: Doors) -> None:
    """Load what pods of this start are made of: as recorded, or as this operator renders what no record has."""
    start = state.status.start
    name = start.revision if start else ""
    if state.parts is not None and name and name == state.parts_of:
        return
    record = await _read_record(job, name, doors) if name else None
    parts = belongings.recorded_parts(job, record) if record else None
    if name and parts is None:
        reason = "pods are made as this operator renders them"
        log(LOG, "record of pod templates lost", logging.WARNING, reason=reason)
    if parts is None or not parts.templates.keys() >= {*map(role_of, job.seats.all)}:
        rendered = belongings.start_parts(job, recorded_images(start, await _images_for(job, doors)))
        parts = replace(parts, templates={**rendered.templates, **parts.templates}) if parts else rendered
    state.parts, state.parts_of = parts, name


async def _apply_gang(state: JobState, job: Job, doors: Doors) -> None:
    """Make the PodGroup of the job's gang. Raises NotAdmitted if the cluster has none, or not as asked.

    The API server drops fields whose feature gate is off, and says nothing: pods would be placed without them.
    """
    if state.parts is None or (group := state.parts.gang) is None:
        return
    version = group["apiVersion"]
    needs = f"PodGroup of {version} needs {NEEDS.get(version, 'what serves it')}"
    try:
        made = await doors.kube.apply(job.namespace, group)
    except NotFound as error:
        raise NotAdmitted(f"{error}: {needs}; or choose another spec.scheduling.gang", error.status) from error
    if dropped := sorted(key for key in group["spec"] if key not in made.get("spec", {})):
        raise NotAdmitted(f"the API server drops {', '.join(dropped)} of PodGroup {group['metadata']['name']}: {needs}")


async def _images_for(job: Job, doors: Doors) -> PodImages:
    """Return what the job's pods are made of, with users of its namespace where it has those. Raises NotAdmitted."""
    if not doors.users_of_namespaces:
        return doors.images
    namespace = await doors.kube.read_namespace(job.namespace)
    try:
        return replace(doors.images, users=users_of_range(namespace["metadata"].get("annotations", {})))
    except ValueError as error:
        raise NotAdmitted(
            "pods of jobs have users of their namespace (namespaceUsers in the values of the operator's chart), and in "
            f"{job.namespace} {error}"
        ) from error


async def _read_record(job: Job, name: str, doors: Doors) -> Body | None:
    try:
        return await doors.kube.read_revision(job.namespace, name)
    except NotFound:
        return None


async def _try_pods(job: Job, doors: Doors) -> None:
    """Have the server judge one pod of each role in a dry run. Raises NotAdmitted.

    This happens before any pod is made, also while the job is suspended. Later a quota would have no room for it.
    What an older server leaves out of the answer would be missing in each pod.
    """
    if objection := doors.images.gangs.objection(job):
        raise NotAdmitted(objection)
    images = await _images_for(job, doors)
    for role, seat in {role_of(seat): seat for seat in job.seats.all}.items():
        body = resources.pod(job, seat, 0, images)
        _check_profile(job, role, body, doors)
        newer, defaults = _newer_parts(body), doors.images.profiles.defaults(job, role)
        is_own = job.spec.pod_templates.of(role) == PodTemplate() and defaults == PodDefaults()
        if is_own and images == doors.images and not newer:
            continue  # all of it is the operator's own, and every server has it
        try:
            kept = await doors.kube.create_pod(job.namespace, body, dry_run=True)
        except Conflict:
            continue  # such a pod exists: it was judged before
        except NotAdmitted as error:
            if NO_DRY_RUN not in str(error):
                raise
            continue
        for lacks in newer - _newer_parts(kept):
            raise NotAdmitted(lacks)


def _newer_parts(pod: Body) -> set[str]:
    """Return, for each part of the pod that an older server leaves out without a word, what such a server lacks."""
    spec = pod["spec"]
    claims = {NO_CLAIMS for _ in spec.get("resourceClaims", ())}
    return claims | {NO_IMAGE_VOLUMES for volume in spec.get("volumes", ()) if "image" in volume}


def _check_profile(job: Job, role: str, body: Body, doors: Doors) -> None:
    """Raise NotAdmitted if the job may not have its profile, or the pod has what that does not allow."""
    if refused := "; ".join(doors.images.profiles.refusals(job, role, body["spec"])):
        raise NotAdmitted(refused)


async def _make_objects(job: Job, doors: Doors, *, has_begun: bool) -> None:
    """Make the claims that the job does not have yet. Raises VolumeLost.

    has_begun: the job has run before. Then a refusal is no news: where a quota is used up, the server refuses an object
    before it sees that it exists, and pods report what is missing. Then volumes are looked up and never made: on empty
    ones, pods would begin again what is recorded as done.
    """
    held = belongings.irreplaceable(job) if has_begun else {}
    claims = {claim["metadata"]["name"]: claim for claim in belongings.claims(job)}
    lost = [name for name in held if await _is_gone(job, claims.pop(name), doors)]
    if lost:
        raise VolumeLost(
            "; ".join(f"claim {name} is gone, and with it {held[name]}" for name in lost)
            + ". It was not deleted by the operator, which creates no empty one in its place. Restore it under its "
            "name with its data, from a released PersistentVolume or a snapshot, and the job continues; or create "
            "another job, which starts from its spec.model"
        )

    for claim in claims.values():
        try:
            await doors.kube.create_claim(job.namespace, claim)
        except Conflict:
            pass  # its name contains the job's UID
        except NotAdmitted:
            if not has_begun:
                raise


async def _make_client_keys(job: Job, doors: Doors, *, has_begun: bool) -> None:
    """Make the Secret for clients in other pods, and another one when authorities or token have changed.

    A used-up quota hides that it is there, and a job that has begun does not wait for it.
    """
    client = Keyholder(job.uid, "", names.ROLE_ROLLOUT, job.token_name)
    mark = doors.keyring.mark(client)
    files = {
        names.CA_FILE: doors.keyring.authority.trusted_pem,
        names.DATA_TOKEN_FILE: doors.keyring.token(client),
    }
    try:
        await doors.kube.create_secret(job.namespace, belongings.client_keys(job, mark=mark, files=files))
    except Conflict:
        pass  # its name has the mark
    except NotAdmitted as error:
        if not has_begun:
            raise
        log(LOG, "client keys refused", logging.WARNING, reason=str(error))


async def _make_keys(state: JobState, job: Job, limit: asyncio.Semaphore, doors: Doors) -> None:
    """Make the keys of each pod that waits for them. The pod owns them, so it is made first; kubelet waits meanwhile.

    A pod that a queue holds back gets them later: they don't last for ever.
    """
    known = {pod["metadata"]["uid"]: pod for pod in doors.pods.of(job.uid)}
    state.keyed &= known.keys()

    async def make(uid: PodUid, pod: Body, name: str, seat: str) -> None:
        holder = Keyholder(job.uid, pod["metadata"]["name"], role_of(seat), job.token_name)
        files = secret_files(doors.keyring.keys(holder))
        body = belongings.pod_keys(job, name=name, pod=holder.pod, pod_uid=uid, role=holder.role, files=files)
        async with limit:
            with contextlib.suppress(Conflict):  # a leader before this one has made them
                await doors.kube.create_secret(job.namespace, body)
        state.keyed.add(uid)

    async with asyncio.TaskGroup() as group:
        for uid in known.keys() - state.keyed:
            pod = known[uid]
            name, place = resources.keys_of(pod), resources.seat_and_attempt(job, pod["metadata"]["name"])
            if name is None or place is None or pod.get("status", {}).get("phase", "Pending") != "Pending":
                state.keyed.add(uid)
            elif not (pod["metadata"].get("deletionTimestamp") or pod["spec"].get("schedulingGates")):
                group.create_task(make(uid, pod, name, place[0]))


async def _is_gone(job: Job, claim: Body, doors: Doors) -> bool:
    """Return whether the claim is gone; False also where a used-up quota hides it."""
    try:
        await doors.kube.create_claim(job.namespace, claim, dry_run=True)
    except (Conflict, NotAdmitted):
        return False
    return True


async def _apply_objects(state: JobState, seen: Observation, doors: Doors) -> None:
    job = seen.job
    await _load_parts(state, job, doors)
    try:
        await _apply_gang(state, job, doors)
    except NotAdmitted as error:
        if not seen.members:
            raise
        log(LOG, "pod group refused", logging.WARNING, reason=str(error))  # it was made before these pods
    for body in belongings.applied(job, operator_namespace=doors.namespace, egress=doors.egress):
        await doors.kube.apply(job.namespace, body)


class PodChange(Enum):
    """A change has one of these outcomes. A name that a foreign pod has raises NotAdmitted instead."""

    DONE = auto()
    NAME_TAKEN = auto()  # by a pod that is ending, of a deleted job most likely


async def _change_pods(state: JobState, job: Job, decided: Plan, doors: Doors) -> Sequence[PodChange]:
    """Change all pods at once, then what follows from that. A pod that is refused holds up nothing else.

    Raises NotAdmitted if one was refused, at the end; a group of other errors after every pod had its turn.
    """
    limit = asyncio.Semaphore(AT_ONCE)
    calls = (_change_pod(state, job, action, limit, doors) for action in decided.pods)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    await _make_keys(state, job, limit, doors)
    refused = [each for each in outcomes if isinstance(each, NotAdmitted)]
    if failed := [each for each in outcomes if isinstance(each, Exception) and each not in refused]:
        raise ExceptionGroup("pods not changed", failed)
    if any(isinstance(action, DeletePod) for action in decided.pods):
        await list_again(state, doors.kube, doors.pods)
    await _taint_nodes(state, decided, doors)
    if refused:
        raise refused[0]
    return [each for each in outcomes if isinstance(each, PodChange)]


async def _change_pod(
    state: JobState,
    job: Job,
    action: PodAction,
    limit: asyncio.Semaphore,
    doors: Doors,
) -> PodChange:
    async with limit:
        match action:
            case CreatePod() if action.seat not in job.seats:
                return await _create_dispensable_pod(state, job, action, doors)
            case CreatePod():
                return await _create_pod(state, job, action, doors)
            case DeletePod():
                await _delete_pod(state, job, action, doors)
                return PodChange.DONE


async def _create_dispensable_pod(state: JobState, job: Job, action: CreatePod, doors: Doors) -> PodChange:
    """Make a pod that the group can do without. A refusal of it does not stall the job, which is reported elsewhere."""
    try:
        return await _create_pod(state, job, action, doors)
    except NotAdmitted as error:
        state.refused[action.seat] = RefusedPod(doors.clock() + STALL_RETRY_S, str(error))
        log(LOG, "pod refused", logging.WARNING, reason=str(error))
        return PodChange.DONE


async def _create_pod(state: JobState, job: Job, action: CreatePod, doors: Doors) -> PodChange:
    assert state.parts is not None, "_load_parts comes first"
    for uid, stray in doors.pods.strays(job.uid).items():  # else it would keep its devices, and nobody see it
        await doors.kube.delete_pod(job.namespace, stray, uid=uid)
        doors.pods.deleted(job.uid, uid)
    template = state.parts.templates[role_of(action.seat)]
    role, pod_name = role_of(action.seat), resources.pod_name(job, action.seat, action.attempt)
    mark = doors.keyring.mark(Keyholder(job.uid, pod_name, role, job.token_name))
    nonce, avoids = secrets.token_hex(8), action.avoids
    body = resources.seated(template, job, action.seat, action.attempt, avoids=avoids, nonce=nonce, keys_mark=mark)
    body = pinned(body, state.status.start)
    _check_profile(job, role, body, doors)
    name = body["metadata"]["name"]
    try:
        doors.pods.put(await doors.kube.create_pod(job.namespace, body))
        state.memory = with_pod(state.memory, action.seat, action.attempt, at=doors.clock())
    except Conflict as error:
        await list_again(state, doors.kube, doors.pods)  # perhaps ours, and the watch has not reported it yet
        if name in {pod["metadata"]["name"] for pod in doors.pods.of(job.uid)}:
            return PodChange.DONE
        if IS_ENDING in str(error):
            message = f"another pod of the name {name}, most likely of a deleted job, has not ended"
            state.refused[action.seat] = RefusedPod(doors.clock() + 2 * NAME_RETRY_S, message)
            return PodChange.NAME_TAKEN
        raise NotAdmitted(f"{error}, and is no pod of this job: delete it", error.status) from error
    log(LOG, "pod created", pod=name)
    return PodChange.DONE


async def _taint_nodes(state: JobState, decided: Plan, doors: Doors) -> None:
    """Taint the node of each pod with a bad device, once for each pod: a person may have removed the taint since."""
    for action in decided.taints if doors.taints_nodes else ():
        state.taints.setdefault(action.uid, action.node)
    for uid, node in state.taints.items():
        if node is None:
            continue
        try:
            if await doors.kube.taint_node(node, UNFIT):
                log(LOG, "node tainted", logging.WARNING, node=node)
                message = (
                    f"node {node} has a bad device and is tainted: {names.UNFIT_TAINT}={UNFIT['value']}:NoSchedule"
                )
                state.record.note(None, News("Warning", Reason.NODE_TAINTED, message, action="TaintNode"))
        except (NotFound, NotAdmitted) as error:
            log(LOG, "taint refused", logging.WARNING, node=node, reason=str(error))
        state.taints[uid] = None


async def _delete_pod(state: JobState, job: Job, action: DeletePod, doors: Doors) -> None:
    await doors.kube.delete_pod(job.namespace, action.name, uid=action.uid, grace_s=action.grace_s)
    level = logging.WARNING if action.is_fault else logging.INFO
    log(LOG, "pod deleted", level, pod=action.name, reason=action.why)
    if action.is_fault:
        state.record.note(None, News("Warning", Reason.POD_DELETED, action.why, action="DeletePod"))
