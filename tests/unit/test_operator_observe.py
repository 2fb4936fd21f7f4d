"""These tests show how one pass reads a job's pods from the API server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from builders import CREATED, UID, facts_at, make_climb, make_job, make_member
from colocated_rl_api import names
from colocated_rl_api.failure import FailureCause
from colocated_rl_api.job_status import ColocatedRLJobStatus, Condition, ConditionStatus, StartStatus
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_api.seats import ROLLOUT_SEAT
from colocated_rl_operator.clients.authority import Authority, Keyring
from colocated_rl_operator.clients.events import About, Events
from colocated_rl_operator.clients.kube import Kube
from colocated_rl_operator.clients.members import Members
from colocated_rl_operator.loop.job_queue import Queue
from colocated_rl_operator.loop.job_state import RELIST_S, JobState, refresh_pods
from colocated_rl_operator.loop.nodes import Nodes
from colocated_rl_operator.loop.observe import observe
from colocated_rl_operator.loop.pods import Pods
from colocated_rl_operator.loop.record import Record
from colocated_rl_operator.loop.start import with_digests
from colocated_rl_operator.manifests import resources
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.planner.notices import NodeSigns
from colocated_rl_operator.planner.observation import Job, Member, Observation
from colocated_rl_operator.planner.reasons import Cause
from fakes.api_server import FakeApiServer

Body = dict[str, Any]
NOBODY = "127.0.0.1"
V2 = WeightVersion(2, 1)


def make_pod(name: str = "sums-rollout-0", version: int = 1, **parts: Any) -> Body:
    """Make a pod as the API server has it. parts: of metadata or status."""
    labels = {"rl.colocate.dev/job-uid": UID}
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": f"uid of {name}",
        "labels": labels,
        "creationTimestamp": "2999-01-01T00:00:00Z",  # by a clock that nobody believes
        "resourceVersion": str(version),
        "ownerReferences": [{"uid": UID, "controller": True}],
    }
    status = {"phase": "Running", "podIP": NOBODY}
    for key, value in parts.items():
        (status if key.endswith("tatuses") or key in ("phase", "conditions", "reason", "message") else metadata)[
            key
        ] = value
    return {"metadata": metadata, "spec": {"nodeName": "node-1"}, "status": status}


KEYRING = Keyring(Authority.new(), b"k" * 32)


class ObserveScene:
    """One job, as the process holds it between passes."""

    def __init__(self, api: FakeApiServer, kube: Kube, members: Members) -> None:
        self.api, self.kube, self.members, self.pods = api, kube, members, Pods()
        self.queue, self.nodes = Queue(), Nodes(NodeSigns(leaving_taints=frozenset({"spot-notice"})))
        self.case = JobState(
            Record(About("default", "sums", UID), kube, Events(kube, instance="test"), failed=lambda: None)
        )
        self.case.record.take({"metadata": {"resourceVersion": "1"}})
        self.pods.know(UID, namespace="default")

    def see(self, *pods: Body, now: float = 0.0) -> tuple[Member, ...]:
        for pod in pods:
            self.pods.put(pod)
        return self.observe(make_job(), now=now).members

    def observe(self, job: Job, *, now: float = 100.0, at: datetime = CREATED) -> Observation:
        return observe(
            self.case,
            job,
            pods=self.pods,
            members=self.members,
            queue=self.queue,
            nodes=self.nodes,
            keyring=KEYRING,
            now=now,
            at=at,
        )

    def only(self, *pods: Body, now: float = 0.0) -> Member:
        [member] = self.see(*pods, now=now)
        return member


@pytest.fixture
async def scene() -> AsyncIterator[ObserveScene]:
    async with (
        FakeApiServer() as api,
        Kube(api.access) as kube,
        Members(KEYRING.operator_context(), lambda job_uid, *, hurry=True: None) as members,
    ):
        yield ObserveScene(api, kube, members)


def test_failures_that_an_older_operator_recorded_count_as_if_all_were_of_the_present_step(scene: ObserveScene) -> None:
    status = {"epoch": 9, "targetStep": 7, "lineage": 2, "cause": "TrainerDied", "restarts": 2}
    scene.case.record.take({"metadata": {"resourceVersion": "1"}, "status": status})
    climb = scene.observe(make_job()).climb
    assert climb is not None
    assert ((7, 7), 2, 0) == (climb.tally.counted, climb.restarts, climb.retries)


# ------------------------------------------------------------------------------------------------------- what is wrong
def container(name: str, *, restarts: int = 0, last: Body | None = None, **state: Body) -> Body:
    return {"name": name, "restartCount": restarts, "state": state, "lastState": {"terminated": last} if last else {}}


ENDED = {"exitCode": 1, "reason": "Error", "message": "log line\nno task is called chain_some\n"}


@pytest.mark.parametrize("kind", ["initContainerStatuses", "containerStatuses"])
@pytest.mark.parametrize(
    ("reported", "is_starting"),
    [
        ({"started": False, "state": {"running": {}}}, True),
        ({"started": True, "state": {"running": {}}}, False),
        ({"started": False, "state": {"terminated": {"exitCode": 0}}}, False),
        ({"state": {"running": {}}}, False),
    ],
    ids=["its probe has not passed", "started", "an init container that ended", "a node that does not report it"],
)
def test_a_pod_starts_until_each_container_that_runs_has_passed_its_startup_probe(
    scene: ObserveScene, kind: str, reported: Body, is_starting: bool
) -> None:
    statuses: Body = {kind: [container("rewards", running={}) | {"started": True}, container("rollout") | reported]}
    assert is_starting == scene.only(make_pod(**statuses)).is_starting


CRASHING = {"reason": "CrashLoopBackOff", "message": "back-off"}


def test_a_sidecar_of_the_job_is_the_pods_trouble_until_the_pod_runs_and_its_own_from_then_on(
    scene: ObserveScene,
) -> None:
    """It decides neither whether a silent member is waited for, nor whether a reference answers."""
    logs = container("logs", restarts=3, last=ENDED, waiting=CRASHING) | {"ready": False, "started": False}
    own = [container(name, running={}) | {"ready": True, "started": True} for name in ("agent", "gpu")]
    waiting = scene.only(make_pod(phase="Pending", initContainerStatuses=[logs]))
    assert (waiting.trouble or "").startswith("logs: CrashLoopBackOff, 3 restarts")
    not_ready = {"type": "Ready", "status": "False", "reason": "ContainersNotReady"}
    running: Body = {"initContainerStatuses": [logs, own[0]], "containerStatuses": own[1:], "conditions": [not_ready]}
    member = scene.only(make_pod(version=2, **running))
    assert (None, False, True) == (member.trouble, member.is_starting, member.is_ready)
    again = [container("logs", restarts=4, last=ENDED, running={}) | {"started": False}, own[0]]
    member = scene.only(make_pod(version=3, **running | {"initContainerStatuses": again}))
    assert (None, False) == (member.trouble, member.is_starting)


@pytest.mark.parametrize(
    ("own", "condition"),
    [
        ({"ready": False}, {"status": "False", "reason": "ContainersNotReady"}),
        ({"ready": True}, {"status": "False"}),
        ({"ready": True}, {"status": "Unknown", "reason": "NodeStatusUnknown"}),
    ],
    ids=["a container of the operator's is not", "its node is lost", "its node is not heard"],
)
def test_a_pod_is_not_ready_for_any_other_reason(scene: ObserveScene, own: Body, condition: Body) -> None:
    """The control plane leaves what a lost node last reported of its containers."""
    conditions = [{"type": "Ready"} | condition]
    statuses = [container("gpu", running={}) | own]
    assert not scene.only(make_pod(containerStatuses=statuses, conditions=conditions)).is_ready


def test_a_crash_loop_is_reported_with_the_containers_last_words(scene: ObserveScene) -> None:
    """Kubelet's own words say how long it waits, and not why."""
    back_off = {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container=rollout pod=..."}
    crashing = container("rollout", restarts=3, last=ENDED, waiting=back_off)
    trouble = scene.only(make_pod(containerStatuses=[crashing])).trouble
    assert (
        "rollout: CrashLoopBackOff, 3 restarts, last ended with code 1: log line\nno task is called chain_some"
        == trouble
    )


def test_a_pod_that_fetches_its_model_says_so_and_since_when(scene: ObserveScene) -> None:
    fetching = container("model", running={"startedAt": "2026-11-01T10:00:00Z"})
    trouble = scene.only(make_pod(initContainerStatuses=[fetching])).trouble
    assert "model: is fetching the model since 2026-11-01T10:00:00Z" == trouble
    assert scene.only(make_pod(initContainerStatuses=[container("model", terminated={"exitCode": 0})])).trouble is None


def test_an_end_without_a_word_is_reported_with_its_reason(scene: ObserveScene) -> None:
    killed = container("gpu", restarts=1, last={"exitCode": 137, "reason": "OOMKilled"}, waiting={"reason": "Error"})
    assert (
        "gpu: Error, 1 restarts, last ended with code 137 (OOMKilled)"
        == scene.only(make_pod(containerStatuses=[killed])).trouble
    )


def test_only_the_gpu_container_is_asked_for_its_memory(scene: ObserveScene) -> None:
    """A container that a webhook had put before it, killed once, hid each later end of it."""
    killed = {"exitCode": 137, "reason": "OOMKilled"}
    beside = container("injected", restarts=7, last=killed, running={})
    assert 0 == scene.only(make_pod(containerStatuses=[beside])).memory_kills
    ours = container("gpu", restarts=1, last=killed, running={})
    assert 1 == scene.only(make_pod(version=2, containerStatuses=[beside, ours])).memory_kills


def test_an_end_for_memory_counts_once_from_its_end_through_kubelet_s_back_off_to_its_restart(
    scene: ObserveScene,
) -> None:
    """In the back-off it counted no longer, and the death of its trainers was taken for one of another cause."""
    killed = {"exitCode": 137, "reason": "OOMKilled"}
    ends = [
        container("gpu", restarts=1, last=killed, running={}),  # an earlier end
        container("gpu", restarts=1, last=killed, terminated=killed),
        container("gpu", restarts=1, last=killed, waiting={"reason": "CrashLoopBackOff"}),
        container("gpu", restarts=2, last=killed, running={}),
    ]
    pods = [make_pod(version=number, containerStatuses=[each]) for number, each in enumerate(ends, 1)]
    assert [1, 2, 2, 2] == [scene.only(pod).memory_kills for pod in pods]


def test_a_container_that_runs_again_is_in_trouble_until_its_member_answers(scene: ObserveScene) -> None:
    """It looks like any other in between two crashes."""
    containers = [container("rollout", restarts=3, last=ENDED, running={})]
    pod = make_pod(containerStatuses=containers)
    assert scene.only(pod).trouble is not None
    scene.case.restarts[pod["metadata"]["uid"]] = 3  # it answered after the third
    assert scene.only(make_pod(version=2, containerStatuses=containers)).trouble is None


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"containerStatuses": [container("gpu", waiting={"reason": "ErrImagePull", "message": "no such image"})]},
         "gpu: ErrImagePull: no such image"),
        ({"containerStatuses": [container("gpu", waiting={"reason": "ContainerCreating"})]}, None),
        ({"initContainerStatuses": [container("runner", terminated={"exitCode": 0})]}, None),
        ({"conditions": [{"type": "PodScheduled", "status": "False", "message": 'claim "model" not found'}]},
         'not scheduled: claim "model" not found'),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "failed: Evicted low on memory"),
    ],
)  # fmt: skip
def test_kubelets_words_are_passed_on(scene: ObserveScene, parts: Body, expected: str | None) -> None:
    assert expected == scene.only(make_pod(**parts)).trouble


@pytest.mark.parametrize("kind", ["DisruptionTarget", "TerminationTarget"])
def test_who_takes_a_pod_away_says_so_in_a_condition(scene: ObserveScene, kind: str) -> None:
    """The second is Kueue's, of a pod that it preempts and then deletes."""
    taken = make_pod(conditions=[{"type": kind, "status": "True"}], deletionTimestamp="2000-01-01T00:00:00Z")
    assert FailureCause.POD_EVICTED is scene.only(taken).fate


@pytest.mark.parametrize(
    "reason",
    [
        "EvictionByEvictionAPI",
        "PreemptionByScheduler",
        "DeletionByTaintManager",
        "TerminationByKubelet",
        "DeletionByPodGC",
    ],
)
@pytest.mark.parametrize("phase", ["Running", "Failed"])
def test_a_disruption_is_one_whoever_it_is_that_takes_the_pod_away(
    scene: ObserveScene, reason: str, phase: str
) -> None:
    """It is one also before the pod is deleted, and where its node ended it, so that it stays."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    assert FailureCause.POD_EVICTED is scene.only(make_pod(phase=phase, conditions=[condition])).fate


@pytest.mark.parametrize(
    ("reason", "fate"),
    [
        ("Evicted", FailureCause.POD_EVICTED),
        ("Preempting", FailureCause.POD_EVICTED),
        ("NodeShutdown", FailureCause.POD_EVICTED),
        ("Terminated", FailureCause.POD_EVICTED),
        ("UnexpectedAdmissionError", FailureCause.POD_FAILED),
        ("OutOfnvidia.com/gpu", FailureCause.POD_FAILED),
        ("", FailureCause.POD_FAILED),
    ],
)
def test_a_pod_that_its_node_ended_is_distinguished_from_one_that_failed(
    scene: ObserveScene, reason: str, fate: FailureCause
) -> None:
    """The nodes here set no condition."""
    assert fate is scene.only(make_pod(phase="Failed", reason=reason)).fate


@pytest.mark.parametrize(
    "message",
    [
        'Usage of EmptyDir volume "scratch" exceeds the limit "100Gi". ',
        'Container gpu exceeded its local ephemeral storage limit "50Gi". ',
        "Pod ephemeral local storage usage exceeds the total limit of containers 50Gi. ",
    ],
)
def test_a_pod_that_its_node_evicts_for_what_it_wrote_has_failed_by_itself(scene: ObserveScene, message: str) -> None:
    """Otherwise a job that fills its disk in each step would be restarted for ever, and none of it would count."""
    filled = scene.only(make_pod(phase="Failed", reason="Evicted", message=message))
    assert (FailureCause.POD_FAILED, f"failed: Evicted {message}".strip()) == (filled.fate, filled.trouble)
    low = "The node was low on resource: ephemeral-storage. Container gpu was using 4Gi, request is 1Gi. "
    assert (
        FailureCause.POD_EVICTED is scene.only(make_pod(version=2, phase="Failed", reason="Evicted", message=low)).fate
    )


def with_device(health: str, **said: str) -> dict[str, Any]:
    """The status of a GPU container with two devices, of which the second has that health."""
    devices = [{"resourceID": "GPU-0", "health": "Healthy"}, {"resourceID": "GPU-1", "health": health, **said}]
    return {"name": "gpu", "allocatedResourcesStatus": [{"name": "nvidia.com/gpu", "resources": devices}]}


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        (with_device("Unhealthy", message="XID 79"), "nvidia.com/gpu GPU-1 is Unhealthy: XID 79"),
        (with_device("Unhealthy"), "nvidia.com/gpu GPU-1 is Unhealthy"),
        (with_device("Unknown"), None),
        (with_device("Healthy"), None),
        ({"name": "gpu"}, None),
    ],
)
def test_a_device_is_bad_that_its_node_reports_as_unhealthy(
    scene: ObserveScene, container: dict[str, Any], expected: str | None
) -> None:
    alive = make_pod(containerStatuses=[container])
    assert expected == scene.only(alive).ill_device
    ended = scene.only(make_pod(version=2, phase="Failed", containerStatuses=[container]))
    assert (FailureCause.BAD_DEVICE if expected else FailureCause.POD_FAILED) is ended.fate


def test_a_pod_that_somebody_deletes_has_no_fate_however_it_ends(scene: ObserveScene) -> None:
    since = "2000-01-01T00:00:00Z"
    assert scene.only(make_pod(phase="Failed", deletionTimestamp=since)).fate is None
    over = [{"type": "DisruptionTarget", "status": "False"}]
    assert scene.only(make_pod(version=2, conditions=over, deletionTimestamp=since)).fate is None


def test_a_pod_has_the_notice_that_its_node_gives_until_the_node_takes_it_back(scene: ObserveScene) -> None:
    """Nothing of the pod itself changes meanwhile."""
    taint = {"key": "spot-notice", "effect": "NoSchedule"}
    node: dict[str, Any] = {"metadata": {"name": "node-1"}, "spec": {"taints": [taint]}}
    assert scene.only(make_pod()).notice is None
    scene.nodes.put(node, now=5.0)
    notice = scene.only().notice
    assert notice is not None
    assert ("taint spot-notice", 5.0) == (notice.message, notice.since)
    scene.nodes.put(node | {"spec": {}}, now=6.0)
    assert scene.only().notice is None


def test_a_pod_with_a_scheduling_gate_waits_in_a_queue(scene: ObserveScene) -> None:
    pod = make_pod("sums-gpu-0-0", phase="Pending")
    gated = pod | {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}
    assert scene.only(gated).is_gated
    assert not scene.only(make_pod("sums-gpu-0-0", version=2)).is_gated


# -------------------------------------------------------------------------------------------------------------- moments
def test_a_pod_is_placed_once_kubelet_has_taken_it_on(scene: ObserveScene) -> None:
    """The scheduler gives pods to a node for as long as nobody has noticed that it is lost."""
    given = {"spec": {"nodeName": "node-1"}, "status": {"phase": "Pending"}}
    assert not scene.only(make_pod() | given).is_placed
    taken = {"status": {"phase": "Pending", "startTime": "2026-01-01T00:00:00Z"}}
    assert scene.only(make_pod(version=2) | given | taken).is_placed


def test_the_grace_of_an_ending_pod_is_counted_from_when_its_end_was_seen(scene: ObserveScene) -> None:
    """A clock that was ahead of the API server's took a pod's grace away from it."""
    assert 50.0 == scene.only(make_pod(), now=50.0).created_at
    ending = make_pod(version=2, deletionTimestamp="2000-01-01T00:00:00Z", deletionGracePeriodSeconds=60)
    assert 160.0 == scene.only(ending, now=100.0).ends_at
    assert (50.0, 160.0) == (scene.only(now=110.0).created_at, scene.only(now=110.0).ends_at)


def test_seats_are_read_off_names_whatever_happened_to_labels(scene: ObserveScene) -> None:
    seats = {(member.seat, member.attempt) for member in scene.see(make_pod("sums-gpu-1-2"), make_pod())}
    assert {("gpu-1", 2), (ROLLOUT_SEAT, 0)} == seats


def test_a_pod_that_somebody_else_put_under_the_job_is_nobodys(scene: ObserveScene) -> None:
    assert () == scene.see(make_pod("sums-debug"))


def test_a_pod_of_another_namespace_is_nobodys_whatever_it_says(scene: ObserveScene) -> None:
    """Its author, of another namespace, took a seat of the job by the pod's name, for good."""
    foreign = make_pod("sums-gpu-0-999999999", namespace="theirs")
    assert ["gpu-0"] == [member.seat for member in scene.see(make_pod("sums-gpu-0-3"), foreign)]
    scene.pods.replace(UID, [foreign], known={})
    assert [] == [pod for pod in scene.pods.of(UID) if pod["metadata"]["namespace"] != "default"]
    scene.pods.lose(UID, make_pod("sums-gpu-0-3", namespace="theirs"))
    assert {} == scene.pods.strays(UID)


# -------------------------------------------------------------------------------------------------- what the watch says
def test_an_older_state_changes_nothing_and_a_late_answer_brings_nobody_back(scene: ObserveScene) -> None:
    """A list that was under way while a pod went put it back, for good."""
    pods = scene.pods
    pods.put(make_pod(version=5, phase="Running"))
    pods.put(make_pod(version=4, phase="Pending"))
    assert ["Running"] == [pod["status"]["phase"] for pod in pods.of(UID)]
    pods.remove(UID, make_pod()["metadata"]["uid"])
    pods.put(make_pod(version=5))
    assert [] == pods.of(UID)


def test_a_complete_list_counts_though_its_versions_are_older(scene: ObserveScene) -> None:
    """Versions begin again after a restore of etcd: pods stayed as they were known, for good."""
    pods, uid = scene.pods, make_pod()["metadata"]["uid"]
    pods.put(make_pod(version=900))
    pods.replace(UID, [make_pod(version=3, phase="Failed")], known=pods.known(UID))
    assert ["Failed"] == [pod["status"]["phase"] for pod in pods.of(UID)]
    pods.remove(UID, uid)
    pods.replace(UID, [make_pod(version=4)], known=pods.known(UID))
    assert ["Running"] == [pod["status"]["phase"] for pod in pods.of(UID)]
    pods.replace(UID, [], known=pods.known(UID))
    assert [] == pods.of(UID)


def test_a_list_takes_nothing_back_that_became_known_while_it_was_under_way(scene: ObserveScene) -> None:
    pods, other = scene.pods, "sums-gpu-0-0"
    pods.put(make_pod(version=5))
    pods.put(make_pod(other, version=5))
    known = pods.known(UID)
    pods.put(make_pod(version=6, phase="Failed"))
    pods.remove(UID, names.PodUid(f"uid of {other}"))
    pods.put(make_pod("sums-gpu-1-0", version=7))
    pods.replace(UID, [make_pod(version=5), make_pod(other, version=5)], known=known)
    assert {"sums-rollout-0": "Failed", "sums-gpu-1-0": "Running"} == {
        pod["metadata"]["name"]: pod["status"]["phase"] for pod in pods.of(UID)
    }


async def test_pods_are_seen_again_half_a_minute_after_a_restore_of_etcd(scene: ObserveScene) -> None:
    """No state of a pod counted until the versions had come back to where they were."""
    scene.pods.put(make_pod(version=10**9))
    scene.case.is_waiting = True
    await refresh_pods(scene.case, scene.kube, scene.pods, now=1000.0)
    assert [] == scene.pods.of(UID)
    restored = await scene.kube.create_pod("default", make_pod())
    await refresh_pods(scene.case, scene.kube, scene.pods, now=1000.0 + RELIST_S)
    assert [restored["metadata"]["resourceVersion"]] == [
        pod["metadata"]["resourceVersion"] for pod in scene.pods.of(UID)
    ]


def test_of_a_whole_pod_the_cache_keeps_what_is_read_of_it_and_little_else(scene: ObserveScene) -> None:
    """All that the server sends of 10,000 pods took more memory than their members' connections."""
    job, images = make_job(), PodImages("agent:1", "rollout:1", "gpu:1", "Never")
    pod = resources.seated(resources.pod_template(job, names.ROLE_GPU, images), job, "gpu-0", 0, nonce="a1b2")
    ran = [{"name": names.GPU_CONTAINER, "imageID": f"gpu@sha256:{'a' * 64}"}]
    whole = pod | {
        "metadata": make_pod()["metadata"] | pod["metadata"] | {"managedFields": [{"fieldsV1": pod["spec"]}]},
        "spec": pod["spec"] | {"nodeName": "node-1"},
        "status": {"phase": "Running", "podIP": NOBODY, "containerStatuses": ran},
    }
    scene.pods.put(whole)
    (kept,) = scene.pods.of(UID)
    assert len(json.dumps(kept)) < len(json.dumps(whole)) / 4
    assert resources.keys_of(whole) == resources.keys_of(kept) is not None
    status = ColocatedRLJobStatus(start=StartStatus())
    assert with_digests(status, [whole]) == with_digests(status, [kept]) != status
    put = scene.pods.known(UID)
    scene.pods.replace(UID, [whole], known=put)
    assert [kept] == scene.pods.of(UID)


def test_pods_of_jobs_without_a_loop_are_not_kept(scene: ObserveScene) -> None:
    scene.pods.put(make_pod())
    scene.pods.forget(UID)
    scene.pods.put(make_pod(version=2))
    assert [] == scene.pods.of(UID)
    assert {} == scene.pods._pods


async def test_a_pod_whose_end_the_watch_missed_is_missed_half_a_minute_after_its_member(scene: ObserveScene) -> None:
    """A rollout pod that had gone unnoticed kept its seat until the operator restarted."""
    scene.pods.put(make_pod())
    await refresh_pods(scene.case, scene.kube, scene.pods, now=1000.0)
    scene.case.is_waiting = True
    await refresh_pods(scene.case, scene.kube, scene.pods, now=999.0 + RELIST_S)
    assert 1 == len(scene.pods.of(UID)), "members that are away for a moment cost no list"
    await refresh_pods(scene.case, scene.kube, scene.pods, now=1000.0 + RELIST_S)
    assert [] == scene.pods.of(UID)


def ended_status(started: datetime, ended: datetime) -> ColocatedRLJobStatus:
    failed = Condition(
        type="Failed", status=ConditionStatus.TRUE, reason="DeadlineExceeded", message="", last_transition_time=ended
    )
    return ColocatedRLJobStatus(start_time=started, conditions=[failed])


async def test_moments_of_the_record_are_those_of_this_process_clock(scene: ObserveScene) -> None:
    """They survive a restart, which the monotonic clock does not."""
    started, ended = CREATED - timedelta(seconds=50), CREATED - timedelta(seconds=20)
    scene.case.record.status = ended_status(started, ended)
    seen = scene.observe(make_job(), now=100.0)
    assert (50.0, 80.0) == (seen.started_at, seen.finished_at)
    assert scene.observe(make_job(suspend=True), now=100.0).started_at is None
    scene.case.record.status = ColocatedRLJobStatus()
    seen = scene.observe(make_job(), now=100.0)
    assert (100.0, None) == (seen.started_at, seen.finished_at)


@pytest.mark.parametrize("hours", [1, -1, 24 * 365, -24 * 365])
async def test_a_wall_clock_that_is_set_moves_no_deadline_that_runs(scene: ObserveScene, hours: int) -> None:
    """An hour forward ended jobs by activeDeadlineSeconds and ttlSecondsAfterFinished, an hour back kept them."""
    started, ended = CREATED - timedelta(seconds=50), CREATED - timedelta(seconds=20)
    scene.case.record.status = ended_status(started, ended)
    scene.observe(make_job(), now=100.0)
    seen = scene.observe(make_job(), now=101.0, at=CREATED + timedelta(hours=hours))
    assert (50.0, 80.0) == (seen.started_at, seen.finished_at)


async def test_a_time_that_lies_ahead_was_written_by_a_clock_that_was_set_back(scene: ObserveScene) -> None:
    ahead = CREATED + timedelta(hours=1)
    scene.case.record.status = ended_status(ahead, ahead)
    seen = scene.observe(make_job(), now=100.0)
    assert (100.0, 100.0) == (seen.started_at, seen.finished_at)


def aged(uid: str, age_s: float) -> Job:
    return replace(make_job(), uid=names.JobUid(uid), created=CREATED - timedelta(seconds=age_s))


async def test_a_job_is_queued_from_when_its_pods_did_not_come_until_it_comes_back(scene: ObserveScene) -> None:
    queued = {"epoch": 3, "target_step": 1, "lineage": 1}
    for cause, is_queued in ((Cause.PODS_NOT_READY, True), (Cause.RESUMED, False)):
        scene.case.record.status = ColocatedRLJobStatus(**queued, cause=cause)
        assert not scene.observe(aged(UID, 10)).has_elder, "it is not its own"
        assert is_queued is scene.queue.has_elder(aged("younger", 9))
        assert not scene.queue.has_elder(aged("older", 11))


def test_of_two_jobs_of_one_second_always_the_same_is_older() -> None:
    queue, jobs = Queue(), [aged(uid, 0) for uid in "ab"]
    for job in jobs:
        queue.note(job, is_queued=True)
    assert [False, True] == [queue.has_elder(job) for job in jobs]


def test_nothing_of_a_members_former_report_is_left_when_it_sends_more() -> None:
    before, now, climb = facts_at(Rung.TRAINED, V2), facts_at(Rung.EXPORTED, V2), make_climb(2)
    member = make_member("gpu-0", facts=before, highest_epoch=1)
    assert Rung.TRAINED is member.standing(TIME_SLICED, climb)
    assert member.trainers
    fresh = make_member("gpu-0", facts=now, highest_epoch=2)
    later = member.reporting(now, highest_epoch=2, silent_since=None)
    assert fresh == later
    assert (Rung.EXPORTED, fresh.trainers) == (later.standing(TIME_SLICED, climb), later.trainers)
