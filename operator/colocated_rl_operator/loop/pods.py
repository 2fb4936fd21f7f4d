"""Cache the newest known state of each pod, from the watch or from our own calls, whichever is newer.

Versions order two states only for as long as the API server's store goes forward. After a restore of
etcd they begin again below those that are known, so a complete list counts whatever its versions are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from colocated_rl_api import names
from colocated_rl_api.names import JobUid, PodUid
from colocated_rl_operator.clients.kube import Body, version_of
from colocated_rl_operator.clients.pod_text import brief


class Pods:
    """The cache holds the newest known state of each pod of the known jobs, by job and pod UID, as `brief` has it.

    A pod of another namespace than its job's is none of them, whoever it names as its owner: people of one namespace
    may make what they like there, and an owner is of the same namespace (Kubernetes, garbage collection).
    """

    def __init__(self) -> None:
        self._namespaces: dict[JobUid, str] = {}
        self._pods: dict[JobUid, dict[PodUid, Body | None]] = {}  # None: gone, and a late answer does not bring it back
        self._strays: dict[JobUid, dict[PodUid, str]] = {}  # names: lost by the watch, perhaps not by the server

    def know(self, job_uid: JobUid, *, namespace: str) -> None:
        self._namespaces[job_uid] = namespace
        self._pods.setdefault(job_uid, {})

    def forget(self, job_uid: JobUid) -> None:
        self._namespaces.pop(job_uid, None)
        self._pods.pop(job_uid, None)
        self._strays.pop(job_uid, None)

    def put(self, pod: Body) -> None:
        """Cache a pod, unless the known state is newer: the watch may lag behind our own calls."""
        pods, uid = self._pods.get(job) if (job := self._job_of(pod)) else None, pod["metadata"]["uid"]
        if pods is None:
            return
        known = pods.get(uid, pod)
        if known is not None and version_of(known) <= version_of(pod):
            pods[uid] = brief(pod)

    def known(self, job_uid: JobUid) -> dict[PodUid, Body | None]:
        """Return the known state of each pod, for `replace`."""
        return dict(self._pods.get(job_uid, {}))

    def replace(self, job_uid: JobUid, listed: Sequence[Body], *, known: Mapping[PodUid, Body | None]) -> None:
        """Take a complete list of pods. What has become known after `known`, which is from before it, may be newer."""
        pods = self._pods.get(job_uid)
        if pods is None:
            return
        ours = {pod["metadata"]["uid"]: pod for pod in listed if self._job_of(pod) == job_uid}
        for uid in pods.keys() | ours.keys():
            if pods.get(uid) is known.get(uid):
                pods[uid] = brief(ours[uid]) if uid in ours else None
            elif uid in ours:
                self.put(ours[uid])

    def remove(self, job_uid: JobUid, uid: PodUid) -> None:
        if job_uid in self._pods:
            self._pods[job_uid][uid] = None

    def lose(self, job_uid: JobUid, pod: Body) -> None:
        """Remove a pod that the watch has lost: it is gone, or somebody took the label off by which it is watched."""
        metadata = pod["metadata"]
        if self._namespaces.get(job_uid) != metadata["namespace"]:
            return
        self.remove(job_uid, metadata["uid"])
        if not metadata.get("deletionTimestamp"):
            self._strays.setdefault(job_uid, {})[metadata["uid"]] = metadata["name"]

    def strays(self, job_uid: JobUid) -> dict[PodUid, str]:
        """Return the names, by UID, of lost pods that nobody was seen to delete, until `deleted` is called for them."""
        return dict(self._strays.get(job_uid, {}))

    def deleted(self, job_uid: JobUid, uid: PodUid) -> None:
        """Note that the server has no such pod any more, or ends it."""
        self._strays.get(job_uid, {}).pop(uid, None)

    def _job_of(self, pod: Body) -> JobUid | None:
        job_uid = job_of(pod)
        is_there = job_uid is not None and self._namespaces.get(job_uid) == pod["metadata"]["namespace"]
        return job_uid if is_there else None

    def of(self, job_uid: JobUid) -> list[Body]:
        return [pod for pod in self._pods.get(job_uid, {}).values() if pod is not None]


def job_of(pod: Body) -> JobUid | None:
    """Return the UID of the job that controls the pod; None for a pod that merely looks like one of ours."""
    metadata = pod["metadata"]
    job_uid: JobUid | None = metadata.get("labels", {}).get(names.JOB_UID_LABEL)
    owners = (owner["uid"] for owner in metadata.get("ownerReferences", ()) if owner.get("controller"))
    return job_uid if job_uid in owners else None
