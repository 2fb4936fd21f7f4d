"""Make a pod that serves the samples of a job without pods: its rollout pod's image and volumes, the claim read-only.

Everything in it is of the job's newest start, as the ControllerRevision that the status names has it. The pod has no
label of the job's pods, so the operator takes it for none of them; it deletes the pod when the job gets pods again.
Else it ends by itself, and goes with the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from colocated_rl_api import names
from colocated_rl_cli.base.errors import NotReached, ObjectMissing, UsageError
from colocated_rl_cli.cluster.api import Api, Object
from colocated_rl_cli.cluster.pages import page
from colocated_rl_cli.evidence.evidence import is_at_rest

COMMAND = ("python3", "-P", "-m", "colocated_rl_rollout.pages.reader")
REQUESTS = {"cpu": "100m", "memory": "256Mi"}
MOUNTED = (names.STATE_DIR, names.MODEL_DIR, names.JOB_FILE.rpartition("/")[0], "/tmp")
OF_POD = ("image", "imagePullPolicy", "securityContext", "env")
ENDED = ("Succeeded", "Failed")
START_DEADLINE_S = 600.0  # its image may have to be pulled
POLL_S = 0.5


def reader_pod(job: Mapping[str, Any], record: Mapping[str, Any], *, minutes: int) -> Object:
    """Return the pod. record: the ControllerRevision of the job's newest start. minutes: after which it ends."""
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    whole = record["data"]["templates"][names.ROLE_ROLLOUT]
    template, digests = whole["spec"], job["status"]["start"].get("digests", {})
    taken = (names.ROLLOUT_CONTAINER, names.MODEL_CONTAINER)
    rollout, *fetching = (
        each | {"image": digests.get(each["image"], each["image"])}
        for each in (*template["containers"], *template.get("initContainers", ()))
        if each["name"] in taken
    )
    mounts = [
        each | ({"readOnly": True} if each["mountPath"] == names.STATE_DIR else {})
        for each in rollout["volumeMounts"]
        if each["mountPath"] in MOUNTED
    ]
    resources = {"requests": REQUESTS, "limits": rollout["resources"].get("limits", {})}
    container = {key: rollout[key] for key in OF_POD if key in rollout} | {
        "name": "reader",
        "command": [*COMMAND],
        "resources": resources,
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    used = {each["name"] for one in (*fetching, container) for each in one["volumeMounts"]}
    owner = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": name, "uid": uid}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-reader-{uid[:8]}",
            "labels": _others(whole["metadata"].get("labels")) | {names.READER_LABEL: name},
            "annotations": _others(whole["metadata"].get("annotations")),
            "ownerReferences": [owner],
        },
        "spec": {key: value for key, value in template.items() if key not in ("schedulingGates", "resourceClaims")}
        | {
            "initContainers": fetching,
            "containers": [container],
            "volumes": [each for each in template["volumes"] if each["name"] in used],
            "restartPolicy": "Never",
            "activeDeadlineSeconds": 60 * minutes,
            "terminationGracePeriodSeconds": 5,
        },
    }


def _others(words: Mapping[str, str] | None) -> dict[str, str]:
    """Return labels or annotations but for those by which operators and queues know the pods of a job."""
    own = (names.GROUP, "app.kubernetes.io", "kueue.x-k8s.io")
    return {key: value for key, value in (words or {}).items() if not key.partition("/")[0].endswith(own)}


async def start(api: Api, name: str, *, minutes: int) -> Object:
    """Make the pod, unless there is one, and wait until it answers. Return it. Raises CliError.

    minutes: after which a new one ends; one that is there already keeps its own.
    """
    job = await api.job(name)
    if not is_at_rest(job):
        raise UsageError(f"job {api.namespace}/{name} has pods of its own: kubectl crlj samples {name} asks them")
    found = await pods(api, name)
    for ended in (each for each in found if not _is_alive(each)):
        await api.delete_pod(ended["metadata"]["name"])
    pod = next(filter(_is_alive, found), None)
    if pod is None:
        pod = await _made(api, reader_pod(job, await _record(api, job), minutes=minutes))
    await _until_it_answers(api, pod["metadata"]["name"])
    return pod


async def pods(api: Api, name: str) -> Sequence[Object]:
    """Return the pod that reads for the job, if there is one, also once it has ended."""
    selector = {"labelSelector": f"{names.READER_LABEL}={name}"}
    found: Sequence[Object] = (await api.get(api.pods, what=f"readers of job {name}", query=selector))["items"]
    return found


def _is_alive(pod: Mapping[str, Any]) -> bool:
    return pod["status"].get("phase") not in ENDED and "deletionTimestamp" not in pod["metadata"]


async def _record(api: Api, job: Mapping[str, Any]) -> Object:
    revision = job.get("status", {}).get("start", {}).get("revision")
    what = f"the record of the newest start of job {api.namespace}/{job['metadata']['name']}"
    if not revision:
        raise ObjectMissing(f"{what}: there is none: it never started, or an earlier release started it")
    path = f"/apis/apps/v1/namespaces/{api.namespace}/controllerrevisions/{revision}"
    found: Object = await api.get(path, what=what)
    return found


async def _made(api: Api, pod: Object) -> Object:
    """Make the pod, also while an ended one of its name is being removed."""
    name, job = pod["metadata"]["name"], pod["metadata"]["labels"][names.READER_LABEL]
    give_up = time.monotonic() + START_DEADLINE_S
    while any(each["metadata"]["name"] == name for each in await pods(api, job)):
        _check_time(give_up, f"pod {name} that has ended is not removed")
        await asyncio.sleep(POLL_S)
    return await api.create_pod(pod)


async def _until_it_answers(api: Api, name: str) -> None:
    give_up = time.monotonic() + START_DEADLINE_S
    while True:
        pod: Object = await api.get(f"{api.pods}/{name}", what=f"pod {name}")
        why = f"pod {name} {_state_of(pod)}"
        phase = pod["status"].get("phase")
        if phase in ENDED:
            raise NotReached(f"{why}; the same command makes another")
        if phase == "Running":
            with contextlib.suppress(NotReached):
                await page(api, name, "/v1/progress")
                return
        _check_time(give_up, why)
        await asyncio.sleep(POLL_S)


def _state_of(pod: Mapping[str, Any]) -> str:
    """Return what a pod does, in words: of its containers that wait or have ended, or of its scheduling."""
    status = pod["status"]
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    states = [each["state"].get("terminated") or each["state"].get("waiting") or {} for each in containers]
    states += [each for each in status.get("conditions", ()) if each["status"] == "False"]
    said = next((each for each in states if each.get("reason") not in (None, "Completed", "PodInitializing")), status)
    words = (said.get("reason"), said.get("message", "").strip())
    return f"is {status.get('phase')}: {': '.join(filter(None, words)) or 'it does not answer yet'}"


def _check_time(give_up: float, why: str) -> None:
    if time.monotonic() > give_up:
        raise NotReached(f"{why} after {START_DEADLINE_S:.0f} s: kubectl describe pod shows more")
