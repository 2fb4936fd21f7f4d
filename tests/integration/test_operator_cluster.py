"""The operator process against a real API server: kopf, the Lease, server-side apply, deletion, take-over.

Pods are real objects that no node runs (it is cordoned): `FakeKubelet` plays their kubelet, with members on loopback.
The namespace of the job enforces the restricted pod security profile.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from cluster import kubernetes_release
from contract.api_server import Helm, Kubectl
from documents.blocks import under
from real_world import CANDIDATE, DEADLINE_S, LEASE, LEASE_PATH, SECRETS, RealWorld, open_real_world

import quick_yaml
from builders import make_job, make_manifest
from colocated_rl_api import names
from colocated_rl_api.bounded_json import MOST_VALUES, REFUSED
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.member_wire import Goal, PodTarget, RolloutTarget
from colocated_rl_api.rungs import Rung
from colocated_rl_cli.cluster.reader import reader_pod
from colocated_rl_operator.clients.authority import SECRET_NAME, Authority, Keyholder, Keyring, secret_files
from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.clients.kube import APPLY
from colocated_rl_operator.manifests import resources
from colocated_rl_operator.planner.reasons import Reason
from fakes.group import GpuPod
from fakes.member import FakeMember
from real_operator import JOBS, NAMESPACE, OPERATORS, PODS, Body, RealOperator, kubeconfig_of
from setup.layout import CHECKOUT

pytestmark = pytest.mark.cluster

SPEC: Body = {"replicas": 2, "steps": 3, "checkpoint": {"everySteps": 2}, "evaluation": {"everySteps": 2}}
CLAIMS = f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims"
QUOTAS = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
MERGE = "application/merge-patch+json"
CRD = CHECKOUT.root / "crds/colocatedrljobs.yaml"
LONG_LEASE = LEASE | {"LEASE_DURATION_S": "600"}  # only who is given it gets it in a test's time


@pytest.fixture
async def world(
    request: pytest.FixtureRequest, access: ClusterAccess, operators: ClusterAccess, tmp_path: Path
) -> AsyncIterator[RealWorld]:
    """Operators have the account of the chart. Indirect parameters replace parts of the job's spec."""
    spec = SPEC | getattr(request, "param", {})
    async with open_real_world(access, tmp_path, spec, operators=operators) as world:
        yield world


# ---------------------------------------------------------------------------------------------------------------- whole
async def test_a_job_completes_under_the_real_operator(world: RealWorld) -> None:
    async with world.operator() as operator:
        await world.until(lambda: world.is_complete)
        events = await told_up_to(world, Reason.COMPLETED)
        assert 0 == await operator.end()
    assert {1: [1, 2, 3]} == world.group.trained_in
    climbs = list(world.group.stood.values())[:-1]
    assert all({Rung.SERVING} == set(stood.values()) for stood in climbs)
    assert [names.FINALIZER] == world.job["metadata"]["finalizers"]
    assert {} == world.job["metadata"].get("annotations", {})
    assert ("True", "Completed") == (world.condition("Ready")["status"], world.condition("Ready")["reason"])
    assert world.job["metadata"]["generation"] == world.status["observedGeneration"]
    assert ["FirstStart", "NextStep", "NextStep", "NextStep", "AllStepsDone", "Completed"] == events
    assert not operator.logged("pass not finished, trying again")


async def test_pods_have_users_of_the_range_that_is_in_the_annotations_of_their_namespace(world: RealWorld) -> None:
    """The operator has the chart's account, with its right to read namespaces. This one enforces `restricted`."""
    prefix, path = "openshift.io/sa.scc.", f"/api/v1/namespaces/{NAMESPACE}"
    given = {f"{prefix}uid-range": "1000660000/10000", f"{prefix}supplemental-groups": "1000670000/10000"}
    await world.api.call("PATCH", path, {"metadata": {"annotations": given}}, MERGE)
    world.stay_in_rollout()
    try:
        async with world.operator(LEASE | {"NAMESPACE_USERS": "true"}):
            await world.until(lambda: world.status.get("phase") == "Rollout")
            pods = [pod["spec"] for pod in await world.api.all(PODS)]
    finally:
        await world.api.call("PATCH", path, {"metadata": {"annotations": dict.fromkeys(given)}}, MERGE)
    assert {1000670000} == {spec["securityContext"][group] for spec in pods for group in ("runAsGroup", "fsGroup")}
    asked = [
        each["securityContext"].get("runAsUser", spec["securityContext"]["runAsUser"])
        for spec in pods
        for each in (*spec["initContainers"], *spec["containers"])
    ]
    assert {1000660000, 1000660001, 1000660002} == {*asked}


QUOTA: Body = {  # without a generation, which ours have
    "type": "QuotaReserved", "status": "True", "reason": "Admitted", "message": "by a controller of the cluster",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}  # fmt: skip


async def test_the_condition_of_another_controller_survives_a_whole_job(world: RealWorld) -> None:
    """It is applied before an operator comes, changed under a running job, and in the end still its controller's."""

    async def apply(*conditions: Body) -> None:
        whose = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": "sums"}}
        path = f"{JOBS}/sums/status?fieldManager=quota"
        await world.api.call("PATCH", path, whose | {"status": {"conditions": conditions}}, APPLY)

    world.stay_in_rollout()
    await apply(QUOTA | {"status": "False"})
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        assert QUOTA | {"status": "False"} == world.condition("QuotaReserved")
        await apply(QUOTA)
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
    assert QUOTA == world.condition("QuotaReserved")
    owners = {
        entry["manager"]: set(entry["fieldsV1"]["f:status"].get("f:conditions", {}))
        for entry in world.job["metadata"]["managedFields"]
        if "f:status" in entry["fieldsV1"]
    }
    theirs, ours = 'k:{"type":"QuotaReserved"}', 'k:{"type":"Complete"}'
    assert {names.FIELD_MANAGER, "quota"} == set(owners)
    assert [(True, False), (False, True)] == [
        (theirs in each, ours in each) for _, each in sorted(owners.items())[::-1]
    ]
    await apply()
    await world.until(lambda: {} == world.condition("QuotaReserved"))


async def told_up_to(world: RealWorld, reason: Reason) -> list[str]:
    """Reasons of what operators told of the job, oldest first, once it is among them: some time after the status."""
    async with asyncio.timeout(DEADLINE_S):
        while reason not in (reasons := await events_of(world)):  # noqa: ASYNC110 - it is for a server that is asked
            await asyncio.sleep(0.1)
    return reasons


async def events_of(world: RealWorld) -> list[str]:
    events = await world.api.all(f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events")
    return [
        event["reason"]
        for event in sorted(events, key=lambda event: str(event["eventTime"]))
        if event.get("reportingController") == f"{names.GROUP}/operator"
        if event["regarding"].get("uid") == world.job["metadata"]["uid"]
    ]


AsyncKubectl = Callable[..., Coroutine[None, None, str]]


@pytest.fixture
def kubectl(world: RealWorld) -> AsyncKubectl:
    """The command itself, beside the members of this process."""
    run = Kubectl(CHECKOUT.localcluster, world.kubeconfig)
    return lambda *words, **options: asyncio.to_thread(run, *words, **options)


async def seen_by_kubectl(world: RealWorld, kubectl: AsyncKubectl, condition: str) -> None:
    """It waits for the condition; afterwards the test's own watch has told of it too."""
    await kubectl("wait", f"--for=condition={condition}", f"{names.SHORT_NAME}/sums", f"--timeout={DEADLINE_S:.0f}s")
    await world.until(lambda: world.condition(condition).get("status") == "True")


async def claims_of(world: RealWorld, uid: str) -> list[Body]:
    claims = await world.api.all(CLAIMS)
    return [claim for claim in claims if claim["metadata"].get("labels", {}).get(names.JOB_UID_LABEL) == uid]


@asynccontextmanager
async def two_operators_in_a_switch(world: RealWorld, lease: Mapping[str, str] = LEASE) -> AsyncIterator[RealOperator]:
    """The leader, beside a standby, while one pod holds up the second step. It ends complete, by the standby."""
    world.stay_in_rollout()
    async with world.operator(lease) as leader:
        await world.until(lambda: leader.logged("lease taken"))
        async with world.operator(lease) as standby:
            await world.until(lambda: standby.logged(CANDIDATE))
            await go_on_to_a_switch(world)
            yield leader
            world.kubelet.release("gpu-1")
            await world.until(lambda: world.is_complete)
            assert standby.logged("lease taken")
    assert {1: [1, 2, 3]} == world.group.trained_in


async def go_on_to_a_switch(world: RealWorld) -> None:
    """Returns in the second step, which one pod holds up: not for long, or the group is taken for one that hangs."""
    world.kubelet.hold("gpu-1", under=lambda target: isinstance(target, PodTarget) and target.step == 2)
    world.kubelet.release("rollout")
    await world.until(lambda: world.status.get("phase") == "Switching" and world.status["targetStep"] == 2)


def stay_at(world: RealWorld, rung: Rung, *, step: int) -> None:
    """One pod goes on from there only when it is let go, and no batch is sealed for a later step."""

    def is_there(target: PodTarget | RolloutTarget) -> bool:
        return isinstance(target, PodTarget) and target.step == step and stands(world, rung, step=step)

    world.kubelet.hold("gpu-1", under=is_there)
    world.kubelet.hold("rollout", under=lambda target: target.type == "rolloutTarget" and target.trained_step == step)
    world.kubelet.wake_all()  # who was held somewhere else


def stands(world: RealWorld, rung: Rung, *, step: int) -> bool:
    pod = world.kubelet.of_seat("gpu-1").pod
    assert isinstance(pod, GpuPod)
    at = pod.target
    return at is not None and at.step == step and pod.rung is rung


def has_taken_over(world: RealWorld, operator: RealOperator, epoch: int) -> bool:
    return bool(operator.logged("lease taken")) and world.status["epoch"] > epoch


EVERY_RUNG = {"steps": len(TIME_SLICED.rungs)}


@pytest.mark.parametrize("world", [EVERY_RUNG], indirect=True, ids=["time-sliced"])
async def test_an_operator_that_is_killed_in_any_rung_is_taken_over_by_the_standby(world: RealWorld) -> None:
    """One step for each rung; nothing is done twice, no pod is made again, no trainer starts again."""
    world.stay_in_rollout()
    async with AsyncExitStack() as operators:
        leader = await operators.enter_async_context(world.operator())
        await world.until(lambda: world.status.get("phase") == "Rollout")
        pods = set(world.kubelet.members)
        standby = await operators.enter_async_context(world.operator())
        for step, rung in enumerate(TIME_SLICED.rungs, start=1):
            await world.until(partial(standby.logged, CANDIDATE))  # at rest: on a rung the group may not stay for long
            stay_at(world, rung, step=step)
            await world.until(partial(stands, world, rung, step=step))
            epoch = max(world.group.stood)
            await leader.kill()
            await world.let_lease_run_out()
            leader, standby = standby, await operators.enter_async_context(world.operator())
            await world.until(partial(has_taken_over, world, leader, epoch))
            assert stands(world, rung, step=step)
            world.kubelet.release("gpu-1")
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
    assert {1: list(range(1, 1 + len(TIME_SLICED.rungs)))} == world.group.trained_in
    assert (pods, 1, 0) == (set(world.kubelet.members), world.status["lineage"], world.status["restarts"])


async def test_of_two_leaders_only_the_one_with_the_newer_epoch_moves_the_group(world: RealWorld) -> None:
    """Somebody deletes the Lease, and its holder has no reason to look."""
    unaware = {"LEASE_DURATION_S": "600", "LEASE_RENEW_DEADLINE_S": "500", "LEASE_RETRY_S": "400"}
    world.stay_in_rollout()
    async with world.operator(unaware) as first:
        await world.until(lambda: first.logged("lease taken"))
        async with world.operator() as second:
            await world.until(lambda: second.logged(CANDIDATE))
            await go_on_to_a_switch(world)
            await world.api.call("DELETE", LEASE_PATH)
            await world.until(lambda: second.logged("epoch raised"))
            world.kubelet.release("gpu-1")
            await world.until(lambda: world.is_complete)
            assert first.process.returncode is None
        raised = [[line["epoch"] for line in each.logged("epoch raised")] for each in (first, second)]
        assert max(raised[0]) < min(raised[1]), "the first one waits for a renewal that it does not get"
    assert {1: [1, 2, 3]} == world.group.trained_in
    assert (1, 0) == (world.status["lineage"], world.status["restarts"])


async def test_a_leader_that_was_stopped_in_the_middle_of_a_switch_wakes_up_and_changes_nothing(
    world: RealWorld,
) -> None:
    async with two_operators_in_a_switch(world) as leader:
        before = world.status["epoch"]
        leader.process.send_signal(signal.SIGSTOP)
        await world.let_lease_run_out()
        await world.until(lambda: world.status["epoch"] > before)
        taken_over = world.status["epoch"]
        leader.process.send_signal(signal.SIGCONT)
        await world.until(lambda: leader.logged("process aborted"))
        assert 1 == await leader.process.wait()
        assert (taken_over, 2) == (world.status["epoch"], world.status["targetStep"])


async def test_an_operator_that_ends_in_the_middle_of_a_switch_hands_over_at_once(world: RealWorld) -> None:
    async with two_operators_in_a_switch(world, LONG_LEASE) as leader:
        before = world.status["epoch"]
        assert 0 == await leader.end()
        assert 2 == world.status["targetStep"]
        await world.until(lambda: world.status["epoch"] > before)  # the standby's


async def test_a_restart_writes_no_object_again_and_keeps_the_authority(world: RealWorld) -> None:
    async def objects() -> dict[str, str]:
        core, policies = "/api/v1", "/apis/networking.k8s.io/v1"
        found = [await world.api.call("GET", f"{core}/namespaces/{OPERATORS}/secrets/{SECRET_NAME}")]
        of_jobs = f"{core}/namespaces/{NAMESPACE}/configmaps", f"{policies}/namespaces/{NAMESPACE}/networkpolicies"
        for path in (*of_jobs, BUDGETS):
            everything = await world.api.all(path)
            found += [item for item in everything if world.job["metadata"]["uid"] in str(item["metadata"])]
        assert len(found) == 6
        return {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in found}

    world.stay_in_rollout()
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        before = await objects()
    world.kubelet.release("rollout")
    async with world.operator():
        await world.until(lambda: world.is_complete)
    written = {name for name, version in (await objects()).items() if version != before[name]}
    assert {f"sums-{world.job['metadata']['uid']}"} == written, "the disruption budget, when the group ends"


async def test_a_deleted_job_leaves_retained_volumes_alone_and_nothing_else_of_itself(world: RealWorld) -> None:
    world.stay_in_rollout()
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        uid = world.job["metadata"]["uid"]
        await world.api.call("DELETE", f"{JOBS}/sums")
        await world.until(lambda: not world.job)
        await world.until(lambda: not world.kubelet.members)
        assert all(pod.stopped for pod in world.group.pods)
    ours = await claims_of(world, uid)
    assert {f"sums-store-{uid[:8]}", f"sums-checkpoints-{uid[:8]}"} == {claim["metadata"]["name"] for claim in ours}
    assert all("ownerReferences" not in claim["metadata"] for claim in ours)


async def test_a_job_whose_members_are_dead_goes_all_the_same(world: RealWorld) -> None:
    world.stay_in_rollout()
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        world.kubelet.end_all()
        await world.api.call("DELETE", f"{JOBS}/sums")
        await world.until(lambda: not world.job)
    assert not await world.api.all(PODS)


async def test_a_job_that_was_deleted_while_no_operator_ran_is_released_by_the_next_one(world: RealWorld) -> None:
    world.stay_in_rollout()
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
    await world.api.call("DELETE", f"{JOBS}/sums")
    assert world.job, "the finalizer holds it"
    async with world.operator():
        await world.until(lambda: not world.job)
        await world.until(lambda: not world.kubelet.members)


async def test_a_job_is_suspended_and_resumed_by_kubectl(world: RealWorld, kubectl: AsyncKubectl) -> None:
    """It is suspended as by a queue, and waited for as by a user."""
    world.stay_in_rollout()
    job = f"{names.SHORT_NAME}/sums"
    async with world.operator():
        await seen_by_kubectl(world, kubectl, "Ready")
        started = world.status["startTime"]
        await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": true}}')
        await seen_by_kubectl(world, kubectl, "Suspended")
        assert not await world.api.all(PODS)
        assert all(pod.stopped for pod in world.group.pods)
        assert 2 == len(await claims_of(world, world.job["metadata"]["uid"]))
        await read_by_people(world)
        await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": false}}')
        world.kubelet.release("rollout")
        await seen_by_kubectl(world, kubectl, "Complete")
    assert (2, 0) == (world.status["lineage"], world.status["restarts"])
    assert started <= world.status["startTime"]
    assert "False" == world.condition("Suspended")["status"]
    others = (pod["metadata"] for pod in await world.api.all(PODS) if names.ROLE_LABEL not in pod["metadata"]["labels"])
    assert ["somebodys"] == [pod["name"] for pod in others], "the reader went as the job got pods"
    await world.api.call("DELETE", f"{PODS}/somebodys")


async def read_by_people(world: RealWorld) -> None:
    """Make the pod of `kubectl crlj reader`, and one that somebody merely gave its label."""
    record = await world.api.call("GET", f"{REVISIONS}/{world.status['start']['revision']}")
    reader = reader_pod(world.job, record, minutes=60)
    somebodys = {**reader, "metadata": {"name": "somebodys", "labels": reader["metadata"]["labels"]}}
    for pod in (reader, somebodys):
        await world.api.call("POST", PODS, pod)


MORE_MEMORY = {
    "gpus": {"resources": {"limits": {"memory": "48Gi"}}},
    "rollout": {"engine": {"args": ["--mem-fraction-static=0.5"]}},
    "checkpoint": {"everySteps": 1},
    "weightSync": {"sizeLimit": "3Gi"},
}


async def test_an_out_of_memory_is_answered_by_suspend_edit_and_resume(world: RealWorld, kubectl: AsyncKubectl) -> None:
    """On its fifth day a job needed more memory than its pods had, and a new job would have begun with its model."""
    job = f"{names.SHORT_NAME}/sums"

    def edit(spec: Body) -> Coroutine[None, None, str]:
        return kubectl("patch", job, "--type=merge", "--patch", json.dumps({"spec": spec}))

    async def refusal(spec: Body) -> str:
        with pytest.raises(AssertionError) as refused:
            await edit(spec)
        return str(refused.value)

    world.kubelet.hold("rollout", under=begins_step_2)
    async with world.operator():
        await world.until(lambda: world.status.get("step") == 1 and world.status["phase"] == "Rollout")
        message = await refusal(MORE_MEMORY)
        for field in ("gpus.resources", "rollout.engine.args", "checkpoint.everySteps", "weightSync.sizeLimit"):
            assert f"{field} can't change while the job runs: set suspend to true, change it" in message
        await edit({"suspend": True})
        await seen_by_kubectl(world, kubectl, "Suspended")
        await edit(MORE_MEMORY)
        message = await refusal({"gpus": {"count": 1}})
        assert "gpus.count can't change once the job exists: make a new job with the new value" in message
        await edit({"suspend": False})
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
    pods = {pod["metadata"]["name"]: pod["spec"] for pod in await world.api.all(PODS)}
    gpu = next(each for each in pods["sums-gpu-0-1"]["containers"] if each["name"] == names.GPU_CONTAINER)
    assert "48Gi" == gpu["resources"]["limits"]["memory"]
    weights = next(each for each in pods["sums-gpu-0-1"]["volumes"] if each["name"] == "weights")
    assert "3Gi" == weights["emptyDir"]["sizeLimit"]
    config = await world.api.call("GET", f"/api/v1/namespaces/{NAMESPACE}/configmaps/{config_name(world)}")
    read = json.loads(config["data"][names.JOB_FILE.rpartition("/")[2]])["spec"]
    assert (["--mem-fraction-static=0.5"], 1) == (read["rollout"]["engine"]["args"], read["checkpoint"]["everySteps"])
    assert {1: [1], 2: [1, 2, 3]} == world.group.trained_in


def config_name(world: RealWorld) -> str:
    metadata = world.job["metadata"]
    return resources.config_name(replace(make_job(metadata["name"]), uid=metadata["uid"]))


REVISIONS = f"/apis/apps/v1/namespaces/{NAMESPACE}/controllerrevisions"
DIGEST = f"colocated-rl/agent@sha256:{'a' * 64}"


def begins_step_2(target: PodTarget | RolloutTarget) -> bool:
    return isinstance(target, RolloutTarget) and target.goal is Goal.CLIMB and target.trained_step == 1


def next_version(folder: Path) -> dict[str, str]:
    """An operator of other images, whose code gives an agent more memory."""
    package = folder / "colocated_rl_operator"
    shutil.copytree(CHECKOUT.root / "operator/colocated_rl_operator", package)
    rendering = package / "manifests/resources.py"
    now = rendering.read_text()
    rendering.write_text(now.replace('memory="2Gi"', 'memory="3Gi"'))
    assert now != rendering.read_text()
    images = {f"{part.upper()}_IMAGE": f"colocated-rl/{part}:next" for part in ("agent", "rollout", "gpu")}
    return images | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


async def form_of(world: RealWorld, name: str) -> Body:
    """Return what its containers are made of, but for its keys; images by the tag that they were started with."""
    pod = await world.api.call("GET", f"{PODS}/{name}")
    spec: Body = json.loads(json.dumps(pod["spec"]).replace(DIGEST, "colocated-rl/agent:dev"))
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "tls"]
    for container in (*spec["initContainers"], *spec["containers"]):
        container["env"] = [each for each in container.get("env", ()) if each["name"] != names.ENV_REPLICA]
    return spec


def agent_of(spec: Body) -> tuple[str, str]:
    agent = next(each for each in spec["initContainers"] if each["name"] == names.AGENT_CONTAINER)
    return agent["image"], agent["resources"]["limits"]["memory"]


async def test_a_pod_made_again_after_an_upgrade_is_what_its_peers_are_until_the_group_starts_anew(
    world: RealWorld, kubectl: AsyncKubectl, tmp_path: Path
) -> None:
    job, upgrade = f"{names.SHORT_NAME}/sums", next_version(tmp_path / "next")
    world.kubelet.hold("rollout", under=begins_step_2)
    async with world.operator():
        await world.until(lambda: world.status.get("step") == 1 and world.status["phase"] == "Rollout")
        ran: Body = {"name": "agent", "image": "colocated-rl/agent:dev", "imageID": f"docker.io/{DIGEST}"}
        ran |= {"ready": True, "restartCount": 0}
        await world.api.call(
            "PATCH", f"{PODS}/sums-gpu-0-0/status", {"status": {"initContainerStatuses": [ran]}}, MERGE
        )
    first = world.status["start"]["revision"]
    async with world.operator(LEASE | upgrade):
        await world.until(lambda: world.status["cause"] == "OperatorRestarted")
        await world.api.call("DELETE", f"{PODS}/sums-gpu-1-0")
        await world.until(lambda: world.status["cause"] == "PodReplaced")
        peer, again = await form_of(world, "sums-gpu-0-0"), await form_of(world, "sums-gpu-1-1")
        assert (peer, ("colocated-rl/agent:dev", "2Gi")) == (again, agent_of(again))
        assert {"colocated-rl/agent:dev": DIGEST} == world.status["start"]["digests"]
        with pytest.raises(AssertionError, match="field is immutable"):
            await world.api.call("PATCH", f"{REVISIONS}/{first}", {"data": {"templates": {}}}, MERGE)
        await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": true}}')
        await seen_by_kubectl(world, kubectl, "Suspended")
        await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": false}}')
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
    assert ("colocated-rl/agent:next", "3Gi") == agent_of(await form_of(world, "sums-gpu-1-2"))
    start = world.status["start"]
    assert ("colocated-rl/agent:next", None) == (start["images"]["agent"], start.get("digests") or None)
    uid = world.job["metadata"]["uid"]
    kept = [each["metadata"]["name"] for each in await world.api.all(REVISIONS) if uid in each["metadata"]["name"]]
    assert [start["revision"]] == kept != [first]


async def test_a_volume_that_somebody_deleted_is_missed_and_not_begun_anew(
    world: RealWorld, kubectl: AsyncKubectl
) -> None:
    """The operator may not read claims: what the server says to a dry run of making one tells whether it is there."""
    world.stay_in_rollout()
    job, uid = f"{names.SHORT_NAME}/sums", world.job["metadata"]["uid"]
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": true}}')
        await seen_by_kubectl(world, kubectl, "Suspended")
        claims = {claim["metadata"]["name"]: claim["spec"] for claim in await claims_of(world, uid)}
        await kubectl("delete", "persistentvolumeclaims", *claims, f"--timeout={DEADLINE_S:.0f}s")
        await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": false}}')
        await world.until(lambda: world.condition("Stalled").get("reason") == "VolumeLost")
        assert all(f"claim {claim} is gone" in world.condition("Stalled")["message"] for claim in claims)
        assert not await claims_of(world, uid)
        for name, spec in claims.items():
            await world.api.call("POST", CLAIMS, {"metadata": {"name": name}, "spec": spec})
        world.kubelet.release("rollout")
        await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"backoffLimit": 5}}')  # it looks at once
        await world.until(lambda: world.is_complete)
    assert (2, "False") == (world.status["lineage"], world.condition("Stalled")["status"])


GROWS = {"size": "1Gi", "storageClassName": "grows"}
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"


@pytest.mark.parametrize(
    "world", [{"storage": {"volume": GROWS}, "checkpoint": {"everySteps": 2, "volume": GROWS}}], indirect=True
)
async def test_claims_that_somebody_makes_larger_stay_so_and_cost_their_job_nothing(world: RealWorld) -> None:
    """In use, and with a pod that is made again meanwhile: the operator neither resets their size nor stalls for it."""
    body = {"metadata": {"name": "grows"}, "provisioner": "nobody", "allowVolumeExpansion": True}
    await world.api.call("POST", CLASSES, body)
    try:
        world.stay_in_rollout()
        async with world.operator():
            await world.until(lambda: world.status.get("phase") == "Rollout")
            claims = await claims_of(world, world.job["metadata"]["uid"])
            larger = {"spec": {"resources": {"requests": {"storage": "2Gi"}}}}
            for claim in claims:
                path = f"{CLAIMS}/{claim['metadata']['name']}"
                await world.api.call("PATCH", f"{path}/status", {"status": {"phase": "Bound"}}, MERGE)
                await world.api.call("PATCH", path, larger, MERGE)
            await world.api.call("DELETE", f"{PODS}/{world.kubelet.of_seat('gpu-1').server.hello.pod}")
            await world.until(lambda: world.status["cause"] == "PodReplaced" and world.status["readyReplicas"] == 2)
            world.kubelet.release("rollout")
            await world.until(lambda: world.is_complete)
        found = await claims_of(world, world.job["metadata"]["uid"])
        assert 2 <= len(found) == len(claims)
        assert ["2Gi"] * len(found) == [claim["spec"]["resources"]["requests"]["storage"] for claim in found]
        assert ("False", 0) == (world.condition("Stalled")["status"], world.status["restarts"])
        assert [1, 2, 3] == sorted({step for steps in world.group.trained_in.values() for step in steps})
    finally:
        await world.api.call("DELETE", f"{CLASSES}/grows")


async def test_a_job_that_has_used_up_its_quota_is_made_whole_and_goes_on_after_a_suspension(
    world: RealWorld, kubectl: AsyncKubectl
) -> None:
    """The server refuses claims and Secrets for the quota before it says that they are there, and no pod was made.

    Each pod that is made needs one more Secret, and the server counts those of pods that are gone minutes longer.
    """
    world.stay_in_rollout()
    job = f"{names.SHORT_NAME}/sums"
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        uid = world.job["metadata"]["uid"]
        secrets = [secret for secret in await world.api.all(SECRETS) if uid in str(secret["metadata"])]
        made_again = len(("gpu-1", "gpu-0", "gpu-1", "rollout"))
        hard = {"count/secrets": str(len(secrets) + made_again), "count/persistentvolumeclaims": "0"}
        await world.api.call("POST", QUOTAS, {"metadata": {"name": "full"}, "spec": {"hard": hard}})
        try:
            counted = ("--for=jsonpath={.status.used}", f"--timeout={DEADLINE_S:.0f}s")
            await kubectl("wait", "resourcequota/full", *counted)
            await world.api.call("DELETE", f"{PODS}/{world.kubelet.of_seat('gpu-1').server.hello.pod}")
            await world.until(lambda: world.status["cause"] == "PodReplaced" and world.status["readyReplicas"] == 2)
            await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": true}}')
            await seen_by_kubectl(world, kubectl, "Suspended")
            await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": false}}')
            world.kubelet.release("rollout")
            await world.until(lambda: world.is_complete)
        finally:
            await world.api.call("DELETE", f"{QUOTAS}/full")
    assert {3: [1, 2, 3]} == world.group.trained_in
    assert "False" == world.condition("Stalled")["status"]


INJECTED = """
[JSONPatch{op: "add", path: "/metadata/labels/team", value: "research"},
 JSONPatch{op: "add", path: "/metadata/annotations/injected", value: "true"},
 JSONPatch{op: "add", path: "/spec/tolerations/-", value: Object.spec.tolerations{key: "spot", operator: "Exists"}},
 JSONPatch{op: "add", path: "/spec/containers/0", value: Object.spec.containers{name: "mesh", image: "mesh",
   securityContext: Object.spec.containers.securityContext{allowPrivilegeEscalation: false,
     capabilities: Object.spec.containers.securityContext.capabilities{drop: ["ALL"]}}}}]
"""


@asynccontextmanager
async def policy(world: RealWorld, kind: str, **spec: Any) -> AsyncIterator[None]:
    """Install a policy of the server's own admission for pods of the job's namespace, until the context ends."""
    group = "/apis/admissionregistration.k8s.io/v1"
    plural = f"{kind.lower()[:-1]}ies"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    body = {"failurePolicy": "Fail", "matchConstraints": {"resourceRules": [rule]}, **spec}
    actions = {"validationActions": ["Deny"]} if kind.startswith("Validating") else {}
    await world.api.call("POST", f"{group}/{plural}", {"metadata": {"name": "theirs"}, "spec": body})
    binding = {"metadata": {"name": "theirs"}, "spec": {"policyName": "theirs", **actions}}
    await world.api.call("POST", f"{group}/{kind.lower()}bindings", binding)
    try:
        yield
    finally:
        await world.api.call("DELETE", f"{group}/{kind.lower()}bindings/theirs")
        await world.api.call("DELETE", f"{group}/{plural}/theirs")


async def in_force(world: RealWorld, is_so: Callable[[Body], bool]) -> None:
    """Servers take up a policy a moment after they have stored it."""
    restricted = {"runAsNonRoot": True, "runAsUser": 1, "seccompProfile": {"type": "RuntimeDefault"}}
    closed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    body = {
        "metadata": {"name": "trial", "labels": {"a": "b"}, "annotations": {"a": "b"}},
        "spec": {"securityContext": restricted, "containers": [{"name": "a", "image": "a", "securityContext": closed}]},
    }
    async with asyncio.timeout(DEADLINE_S):
        while True:
            url = f"{world.api.access.server}{PODS}?dryRun=All"
            async with world.api.session.post(url, json=body, headers=world.api.access.headers()) as answer:
                if is_so(await answer.json()):
                    return


@pytest.mark.since_kubernetes(1, 36)  # policies that mutate
async def test_what_a_policy_puts_into_pods_is_left_there(world: RealWorld) -> None:
    """Labels, annotations, tolerations and containers, of a mesh or a queue: nothing is made again for them."""
    mutation = {"patchType": "JSONPatch", "jsonPatch": {"expression": INJECTED}}
    async with policy(world, "MutatingAdmissionPolicy", mutations=[mutation], reinvocationPolicy="Never"):
        await in_force(world, lambda pod: "injected" in pod["metadata"].get("annotations", {}))
        async with world.operator() as operator:
            await world.until(lambda: world.is_complete)
        pods = await world.api.all(PODS)
    assert ["sums-gpu-0-0", "sums-gpu-1-0", "sums-rollout-0"] == sorted(pod["metadata"]["name"] for pod in pods)
    assert all("mesh" == pod["spec"]["containers"][0]["name"] for pod in pods)
    assert (0, 1) == (world.status["restarts"], world.status["lineage"])
    assert not operator.logged("pod deleted")


@pytest.mark.parametrize(
    ("change", "pod"),
    [
        ({"labels": {names.MANAGED_BY_LABEL: None}}, "sums-gpu-1-1"),
        ({"labels": {names.JOB_UID_LABEL: None}}, "sums-gpu-1-0"),
        ({"ownerReferences": None}, "sums-gpu-1-0"),
    ],
    ids=["label of the watch", "label of the job", "owner"],
)
async def test_a_pod_from_which_somebody_takes_what_makes_it_ours_costs_its_job_no_step(
    world: RealWorld, change: Body, pod: str
) -> None:
    """Another pod without its labels came into its seat beside it, and it kept its devices for as long as the job."""
    world.stay_in_rollout()
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        await world.api.call("PATCH", f"{PODS}/sums-gpu-1-0", {"metadata": change}, MERGE)
        await world.until(lambda: pod in {member.server.hello.pod for member in world.kubelet.members.values()})
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
    assert [1, 2, 3] == sorted({step for steps in world.group.trained_in.values() for step in steps})
    assert {"sums-gpu-0-0", pod, "sums-rollout-0"} == {each["metadata"]["name"] for each in await world.api.all(PODS)}


async def test_a_policy_that_denies_pods_is_quoted_and_the_job_goes_on_without_it(world: RealWorld) -> None:
    words = "a pod needs a cost center"
    async with AsyncExitStack() as operators:
        async with policy(world, "ValidatingAdmissionPolicy", validations=[{"expression": "false", "message": words}]):
            await in_force(world, lambda answer: words in answer.get("message", ""))
            await operators.enter_async_context(world.operator())
            await world.until(lambda: words in world.condition("Stalled").get("message", ""))
            assert "ObjectRefused" == world.condition("Stalled")["reason"]
        await in_force(world, lambda answer: answer["kind"] == "Pod")
        patch = {"spec": {"backoffLimit": 7}}  # an edit is an occasion to try again; else it is half a minute
        await world.api.call("PATCH", f"{JOBS}/sums", patch, MERGE)
        await world.until(lambda: world.is_complete)
    assert ("False", 0) == (world.condition("Stalled")["status"], world.status["restarts"])


def limits(**limits: Mapping[str, str]) -> Body:
    """Return the spec of a LimitRange for containers."""
    return {"limits": [{"type": "Container", **limits}]}


@asynccontextmanager
async def limited(world: RealWorld, plural: str, spec: Body) -> AsyncIterator[None]:
    """Limit the job's namespace, and wait until the server does so; until the context ends."""
    path = f"/api/v1/namespaces/{NAMESPACE}/{plural}"
    await world.api.call("POST", path, {"metadata": {"name": "theirs"}, "spec": spec})
    try:
        await in_force(world, lambda answer: "exceeded quota" in answer.get("message", "") or has_limits(answer))
        yield
    finally:
        await world.api.call("DELETE", f"{path}/theirs")


def has_limits(pod: Body) -> bool:
    return any(container["resources"].get("limits") for container in pod.get("spec", {}).get("containers", ()))


@pytest.mark.parametrize(
    ("plural", "spec", "words"),
    [
        ("resourcequotas", {"hard": {"count/pods": "0"}}, "exceeded quota: theirs"),
        ("limitranges", limits(max={"memory": "64Mi"}), "maximum memory usage per Container is 64Mi"),
        ("limitranges", limits(default={"cpu": "1m"}), "must be less than or equal to cpu limit"),
    ],
    ids=["quota", "maximum", "default below a request"],
)
async def test_what_a_namespace_has_no_room_for_is_quoted_and_the_job_goes_on_once_it_has(
    world: RealWorld, plural: str, spec: Body, words: str
) -> None:
    async with AsyncExitStack() as operators:
        async with limited(world, plural, spec):
            await operators.enter_async_context(world.operator())
            await world.until(lambda: words in world.condition("Stalled").get("message", ""))
            stalled = world.condition("Stalled")
            assert ("True", "ObjectRefused") == (stalled["status"], stalled["reason"])
            assert not await world.api.all(PODS)
        await in_force(world, lambda answer: answer["kind"] == "Pod" and not has_limits(answer))
        await world.api.call("PATCH", f"{JOBS}/sums", {"spec": {"backoffLimit": 7}}, MERGE)  # an occasion to try again
        await world.until(lambda: world.is_complete)
    assert ("False", 0) == (world.condition("Stalled")["status"], world.status["restarts"])


async def test_limits_that_a_namespace_puts_into_pods_are_left_there(world: RealWorld) -> None:
    async with limited(world, "limitranges", limits(default={"cpu": "8", "memory": "9Gi"})):
        async with world.operator() as operator:
            await world.until(lambda: world.is_complete)
        pods = await world.api.all(PODS)
    assert ["sums-gpu-0-0", "sums-gpu-1-0", "sums-rollout-0"] == sorted(pod["metadata"]["name"] for pod in pods)
    given = [
        container["resources"]["limits"]
        for pod in pods
        for container in (*pod["spec"]["initContainers"], *pod["spec"]["containers"])
    ]
    assert {"8"} == {each["cpu"] for each in given}
    assert "9Gi" in {each["memory"] for each in given}
    assert ("False", 0, 1) == (world.condition("Stalled")["status"], world.status["restarts"], world.status["lineage"])
    assert not operator.logged("pod deleted")


@pytest.mark.parametrize("lost", [(), ("lost",)], ids=["all there", "one lost"])
async def test_a_job_of_a_namespace_that_is_named_runs_by_the_rights_of_the_chart_in_it_alone(
    access: ClusterAccess, tmp_path: Path, lost: tuple[str, ...]
) -> None:
    """No right is cluster-wide with `watch.namespaces`.

    lost: namespaces that are named and where it has no rights any more. While that was so in the first, it never led.
    """
    variables = {"WATCH_NAMESPACES": ",".join((*lost, NAMESPACE)), "LEASE_NAME": "colocated-rl"}
    (tmp_path / "admin").mkdir()
    (admin := tmp_path / "admin/kubeconfig").write_text(kubeconfig_of(access))
    kubectl = Kubectl(CHECKOUT.localcluster, admin)
    named = {"watch.namespaces[0]": NAMESPACE, "crds.install": "false", "rbac.aggregate": "false"}
    sets = [word for name, value in named.items() for word in ("--set", f"{name}={value}")]
    files = [word for name in ("rbac", "serviceaccount") for word in ("--show-only", f"templates/{name}.yaml")]
    rights = Helm(CHECKOUT.localcluster)(
        "template", "colocated-rl", CHECKOUT.root / "charts/colocated-rl", "--namespace", OPERATORS, *sets, *files
    )
    assert {"ServiceAccount", "Role", "RoleBinding"} == {body["kind"] for body in quick_yaml.load_all(rights)}
    await asyncio.to_thread(kubectl, "apply", "-f", "-", stdin=rights)
    try:
        token = await asyncio.to_thread(kubectl, "-n", OPERATORS, "create", "token", "colocated-rl")
        theirs = replace(access, token_file=None, fixed_token=token.strip(), certificate_pem=None)
        async with open_real_world(access, tmp_path, SPEC, operators=theirs) as world:
            async with world.operator(LEASE | variables) as operator:
                await world.until(lambda: world.is_complete)
                assert 0 == await operator.end()
            elsewhere = f"{access.server}/api/v1/namespaces/{OPERATORS}/pods"
            for url, status in ((f"{access.server}{PODS}", 200), (elsewhere, 403)):
                async with world.api.session.get(url, headers=theirs.headers()) as answer:
                    assert status == answer.status
        assert bool(lost) == any("forbidden" in str(line) for line in operator.lines)
        assert {1: [1, 2, 3]} == world.group.trained_in
    finally:
        lease = f"lease/{variables['LEASE_NAME']}"
        await asyncio.to_thread(kubectl, "-n", OPERATORS, "delete", lease, "--ignore-not-found")
        await asyncio.to_thread(kubectl, "delete", "-f", "-", stdin=rights)


CLAIMED = {"gpus": {"count": 1, "resourceClaimTemplateName": "one"}}
FROM_IMAGE = {"model": {"image": {"reference": "registry.example.com/small"}}}


@pytest.mark.parametrize(
    ("world", "since", "words"),
    [(CLAIMED, (1, 34), "no dynamic resource allocation"), (FROM_IMAGE, (1, 35), "no image volumes")],
    ids=["claims", "image"],
    indirect=["world"],
)
async def test_a_job_runs_or_says_what_its_release_of_kubernetes_does_not_have(
    world: RealWorld, since: tuple[int, int], words: str
) -> None:
    async with world.operator():
        await world.until(lambda: world.is_complete or world.condition("Stalled").get("status") == "True")
    assert (kubernetes_release() >= since) == world.is_complete
    assert world.is_complete or (words in world.condition("Stalled")["message"] and not await world.api.all(PODS))


async def test_a_job_comes_back_with_fewer_pods(world: RealWorld, kubectl: AsyncKubectl) -> None:
    world.stay_in_rollout()
    job, fewer = f"{names.SHORT_NAME}/sums", '{"spec": {"replicas": 1}}'
    async with world.operator():
        await seen_by_kubectl(world, kubectl, "Ready")
        await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": true}}')
        await seen_by_kubectl(world, kubectl, "Suspended")
        await world.until(lambda: not world.kubelet.members)
        await kubectl("patch", job, "--type=merge", "--patch", fewer)
        world.group.resize(1)
        assert 1 == world.group.job.spec.replicas
        await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": false}}')
        world.kubelet.release("rollout")
        await seen_by_kubectl(world, kubectl, "Complete")
        await world.until(lambda: world.status["readyReplicas"] == 0)  # its pod has ended
        pods = await world.api.all(PODS)
    assert ["sums-gpu-0", "sums-rollout"] == sorted(pod["metadata"]["name"].rpartition("-")[0] for pod in pods)
    assert 2 == world.status["lineage"]


async def test_a_finished_job_goes_with_its_pods_after_its_time_and_leaves_its_volumes(world: RealWorld) -> None:
    uid = world.job["metadata"]["uid"]
    patch = {"spec": {"ttlSecondsAfterFinished": 1}}
    await world.api.call("PATCH", f"{JOBS}/sums", patch, MERGE)
    async with world.operator():
        await world.until(lambda: not world.job)
        await world.until(lambda: not world.kubelet.members)
    assert ["Complete", None] == world.phases[-2:]
    assert 2 == len(await claims_of(world, uid))


async def test_a_job_of_another_controller_is_left_alone(world: RealWorld) -> None:
    theirs = make_manifest("theirs", **SPEC, managedBy="kueue.x-k8s.io/multikueue")
    await world.api.call("POST", JOBS, theirs)
    async with world.operator():
        await world.until(lambda: world.is_complete)
        [job] = [job for job in await world.api.all(JOBS) if job["metadata"]["name"] == "theirs"]
        assert ({"observedGeneration": -1}, None) == (job["status"], job["metadata"].get("finalizers"))
        assert not [pod for pod in await world.api.all(PODS) if "theirs" in pod["metadata"]["name"]]
        await world.api.call("DELETE", f"{JOBS}/theirs")
        assert not [job for job in await world.api.all(JOBS) if job["metadata"]["name"] == "theirs"]


EXCESS = {"deep": "[" * 5000 + "]" * 5000, "large": json.dumps([{}] * 300_000)}
"""The API server takes these as a trainer's configuration: more levels than Python reads, and a megabyte of objects."""


async def raw_call(world: RealWorld, method: str, path: str, text: str | None = None) -> tuple[int, str]:
    """The status and the text of the API server's answer, which Python may not be able to parse."""
    headers = {**world.api.access.headers(), "Content-Type": "application/json"}
    data = None if text is None else io.BytesIO(text.encode())
    url = world.api.access.server + path
    async with world.api.session.request(method, url, data=data, headers=headers) as answer:
        return answer.status, await answer.text()


async def test_a_job_that_nobody_can_read_is_refused_and_costs_no_other_job_its_operator(world: RealWorld) -> None:
    """It ended the operator, and each one after it, which reads the jobs of everybody at once."""
    elsewhere = f"/apis/{names.API_VERSION}/namespaces/{OPERATORS}/{names.PLURAL}"

    call = partial(raw_call, world)

    async def is_refused(kind: str) -> bool:
        _, text = await call("GET", f"{elsewhere}/{kind}")
        return "spec.trainer is" in text and REFUSED in text

    async def make(kind: str) -> None:
        job = make_manifest(kind, **SPEC, trainer={"config": {"x": "EXCESS"}})
        job["metadata"]["namespace"] = OPERATORS
        assert 201 == (await call("POST", elsewhere, json.dumps(job).replace('"EXCESS"', EXCESS[kind])))[0]

    await make("deep")
    async with world.operator() as operator:
        await make("large")
        async with asyncio.timeout(DEADLINE_S):
            while not (await is_refused("deep") and await is_refused("large")):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.1)
        await world.until(lambda: world.is_complete)
        assert 0 == await operator.end()
    async with world.operator():
        for kind in EXCESS:
            await call("DELETE", f"{elsewhere}/{kind}")
        async with asyncio.timeout(DEADLINE_S):
            while {404} != {(await call("GET", f"{elsewhere}/{kind}"))[0] for kind in EXCESS}:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.1)


CROWDED = {f"a{number}": "" for number in range(MOST_VALUES + 2)}
DEEP_FIELDS = '{"f:a":' * 3000 + "{}" + "}" * 3000
MUCH = ",".join(['{"name":"a"}'] * 200_000)


async def test_pods_that_nobody_can_read_cost_no_job_its_operator(world: RealWorld) -> None:
    """One ended the operator, and each one after it; a dozen took more than its memory. Whoever may make a pod in one
    namespace decides what is in it: anything that the API server takes, with the label by which it is watched.
    """
    pods = f"/api/v1/namespaces/{OPERATORS}/pods"
    jobs = f"/apis/{names.API_VERSION}/namespaces/{OPERATORS}/{names.PLURAL}"
    managed = {"manager": "a", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1", "fieldsV1": "DEEP"}

    async def make(name: str) -> None:
        is_deep = name.startswith("deep")
        metadata: Body = {"labels": {names.MANAGED_BY_LABEL: names.MANAGED_BY}}
        metadata |= {"managedFields": [managed]} if is_deep else {}
        containers = [{"name": "a", "image": "a", "env": [] if is_deep else ["MUCH"]}]
        spec = {"nodeSelector": {"there-is": "none"}, "containers": containers}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": spec}
        text = json.dumps(pod).replace('"DEEP"', DEEP_FIELDS).replace('"MUCH"', MUCH)
        assert 201 == (await raw_call(world, "POST", pods, text))[0]

    async def is_suspended() -> bool:
        found = await world.api.call("GET", f"{jobs}/crowded")
        return bool(found["status"].get("phase") == "Suspended")

    crowded = make_manifest("crowded", **SPEC, suspend=True)
    crowded["metadata"] |= {"namespace": OPERATORS, "labels": CROWDED, "annotations": CROWDED}
    before = ["deep-0", *(f"large-{number}" for number in range(5))]
    meanwhile = ["deep-1", *(f"large-{number}" for number in range(5, 10))]
    try:
        for name in before:
            await make(name)
        await world.api.call("POST", jobs, crowded)
        async with world.operator() as operator:
            for name in meanwhile:
                await make(name)
            await world.until(lambda: world.is_complete)
            async with asyncio.timeout(DEADLINE_S):
                while not await is_suspended():  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.1)
            assert peak_bytes(operator.process.pid) < 384 * 1024**2, "it may have 512 MiB"
            assert 0 == await operator.end()
    finally:
        for name in (*before, *meanwhile):
            await raw_call(world, "DELETE", f"{pods}/{name}", '{"gracePeriodSeconds": 0}')
        await world.api.call("PATCH", f"{jobs}/crowded", {"metadata": {"finalizers": None}}, MERGE)
        await world.api.call("DELETE", f"{jobs}/crowded")


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had at once."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


async def test_kubectl_waits_for_a_failure(world: RealWorld, kubectl: AsyncKubectl) -> None:
    patch = {"spec": {"backoffLimit": 0}}
    await world.api.call("PATCH", f"{JOBS}/sums", patch, MERGE)
    world.kubelet.hold("gpu-1", under=lambda target: isinstance(target, PodTarget) and target.step == 1)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Switching")
        member = world.kubelet.of_seat("gpu-0")
        assert isinstance(member.pod, GpuPod)
        world.group.trainer_dies(member.pod)
        member.wake()
        world.kubelet.release("gpu-1")
        await seen_by_kubectl(world, kubectl, "Failed")
        await seen_by_kubectl(world, kubectl, "Stalled")
    assert "BackoffLimitExceeded" == world.condition("Failed")["reason"]


async def test_helm_waits_until_the_job_serves(world: RealWorld, tmp_path: Path) -> None:
    """Helm reads kstatus. The job exists before, and helm takes it over; its generation stays."""
    chart = tmp_path / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("{apiVersion: v2, name: sums, version: 0.0.1}")
    (chart / "templates/job.yaml").write_text(yaml.safe_dump(make_manifest(**SPEC)))
    helm = Helm(CHECKOUT.localcluster, world.kubeconfig)
    options = ("--take-ownership", "--force-conflicts", "--wait", "--timeout", f"{2 * DEADLINE_S:.0f}s")
    world.stay_in_rollout()
    world.kubelet.hold("gpu-1", under=lambda target: isinstance(target, PodTarget))
    installing = asyncio.create_task(asyncio.to_thread(helm, "install", "sums", chart, *options))
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Starting")
        await world.until(lambda: "meta.helm.sh/release-name" in world.job["metadata"].get("annotations", {}))
        assert not installing.done()
        world.kubelet.release("gpu-1")
        async with asyncio.timeout(DEADLINE_S):
            await installing
        await world.until(lambda: world.condition("Ready").get("status") == "True")


HEIRS = "heirs"  # a namespace


async def test_two_releases_that_watch_one_namespace_do_not_fight_over_its_job_and_a_third_takes_it_over(
    world: RealWorld, tmp_path: Path
) -> None:
    """The third is in a namespace of its own, to which the authority was copied as the page says: no pod is lost."""
    first, third = f"{OPERATORS}/colocated-rl-operator", f"{HEIRS}/colocated-rl-operator"
    world.stay_in_rollout()
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        another = world.operator(LEASE | {"LEASE_NAME": "another"}, kubeconfig=world.kubeconfig)
        async with another as other:
            await world.until(lambda: other.logged("lease taken"))
            await told_up_to(world, Reason.ANOTHER_OPERATOR)
            assert not other.logged("epoch raised")
        assert first == world.status["operator"]
        members = dict(world.kubelet.members)
        await world.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": HEIRS}})
        copy = under("docs/multi-tenancy.md", "Another operator for the same jobs")
        named = [each.replace("colocated-rl-system", OPERATORS).replace("team-a-rl", HEIRS) for each in copy]
        await typed(world, tmp_path, named)
        settings = LEASE | {"OPERATOR_NAMESPACE": HEIRS, "TAKE_OVER": first}
        async with world.operator(settings, kubeconfig=world.kubeconfig) as heir:
            await world.until(lambda: heir.logged("job taken over"))
            assert members == world.kubelet.members
            world.kubelet.release("rollout")
            await world.until(lambda: world.is_complete)
            await world.until(lambda: operator.logged("epoch raised"))
    assert (third, "3-1") == (world.status["operator"], world.status["weightVersion"])
    await world.api.call("DELETE", f"/api/v1/namespaces/{HEIRS}")


@pytest.mark.parametrize("world", [{"backoffLimit": 0}], indirect=True, ids=["backoffLimit 0"])
@pytest.mark.parametrize("is_drained", [False, True], ids=["deleted", "drained"])
async def test_an_evicted_pod_is_replaced_while_the_other_goes_on(world: RealWorld, is_drained: bool) -> None:
    world.stay_in_rollout()
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        name = world.kubelet.of_seat("gpu-1").server.hello.pod
        if is_drained:
            await evict(world, name)
        else:
            await world.api.call("DELETE", f"{PODS}/{name}")
        await world.until(lambda: world.status.get("cause") == "PodReplaced")
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
    assert (0, "3-2") == (world.status["restarts"], world.status["weightVersion"])


BUDGETS = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"


async def evict(world: RealWorld, pod: str) -> None:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    await world.api.call("POST", f"{PODS}/{pod}/eviction", eviction)


async def become_ready(world: RealWorld, *pods: str) -> None:
    """Kubelet reports the pods as ready, and the disruption controller comes to allow one eviction."""
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    for pod in pods:
        await world.api.call("PATCH", f"{PODS}/{pod}/status", ready, MERGE)
    budget = f"{BUDGETS}/sums-{world.job['metadata']['uid']}"
    async with asyncio.timeout(DEADLINE_S):
        while (await world.api.call("GET", budget))["status"].get("disruptionsAllowed") != 1:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("world", [{"backoffLimit": 0}], indirect=True, ids=["backoffLimit 0"])
async def test_drains_of_two_nodes_at_once_take_one_pod_of_the_job_at_a_time(world: RealWorld) -> None:
    """The next one goes once the successor of the one before is ready. A pod that is not ready may always go."""
    world.stay_in_rollout()
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        await become_ready(world, "sums-gpu-0-0", "sums-gpu-1-0", "sums-rollout-0")
        await evict(world, "sums-gpu-0-0")
        for other in ("sums-gpu-1-0", "sums-rollout-0"):
            with pytest.raises(AssertionError, match="violate the pod's disruption budget"):
                await evict(world, other)
        await world.until(lambda: world.status.get("cause") == "PodReplaced" and world.status["readyReplicas"] == 2)
        with pytest.raises(AssertionError, match="violate the pod's disruption budget"):
            await evict(world, "sums-gpu-1-0")
        await become_ready(world, "sums-gpu-0-1")
        await evict(world, "sums-gpu-1-0")
        await world.until(lambda: world.status.get("lineage") == 3)
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
    assert (0, "3-3") == (world.status["restarts"], world.status["weightVersion"])


NODES = "/api/v1/nodes"
SIGNS = LEASE | {"BAD_NODE_CONDITIONS": "GPUHealthy=False", "LEAVING_NODE_TAINTS": "spot-notice", "TAINT_NODES": "true"}
RARELY_SAVED = {"backoffLimit": 0, "checkpoint": {"everySteps": 100}}


@pytest.mark.parametrize("world", [RARELY_SAVED], indirect=True, ids=["backoffLimit 0"])
@pytest.mark.parametrize("sign", ["taint", "condition"])
async def test_a_pod_leaves_a_node_that_gives_notice_and_no_step_is_trained_twice(world: RealWorld, sign: str) -> None:
    """Step 1 is in no checkpoint that was due: a node that is about to go leaves time for one, bad devices do not.

    The one with bad devices is tainted.
    """
    notices = {
        "taint": ("", {"spec": {"taints": [{"key": "spot-notice", "effect": "NoSchedule"}]}}),
        "condition": ("/status", {"status": {"conditions": [{"type": "GPUHealthy", "status": "False"}]}}),
    }
    world.kubelet.hold("rollout", under=lambda target: isinstance(target, RolloutTarget) and target.trained_step > 0)
    await world.api.call("POST", NODES, {"metadata": {"name": "leaving"}})
    try:
        async with world.operator(SIGNS):
            await world.until(lambda: world.status.get("phase") == "Rollout" and world.status["step"] == 1)
            target = {"target": {"apiVersion": "v1", "kind": "Node", "name": "leaving"}}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "sums-gpu-1-0"}}
            await world.api.call("POST", f"{PODS}/sums-gpu-1-0/binding", binding | target)
            part, notice = notices[sign]
            await world.api.call("PATCH", f"{NODES}/leaving{part}", notice, MERGE)
            await world.until(lambda: world.status.get("lineage") == 2)
            world.kubelet.release("rollout")
            await world.until(lambda: world.is_complete)
            node = await world.api.call("GET", f"{NODES}/leaving")
    finally:
        await world.api.call("DELETE", f"{NODES}/leaving")
    taints = {f"{taint['key']}={taint.get('value', '')}:{taint['effect']}" for taint in node["spec"]["taints"]}
    unfit = "rl.colocate.dev/unfit=BadDevice:NoSchedule"
    assert (sign == "condition") is (unfit in taints)
    failures = world.status["failures"]
    assert ("PodEvicted" if sign == "taint" else "BadDevice", ["leaving"]) == (
        failures["cause"],
        failures["avoidedNodes"],
    )
    assert (0, 1) == (world.status["restarts"], failures["podRestarts"])
    assert ({1: [1], 2: [2, 3]} if sign == "taint" else {1: [1], 2: [1, 2, 3]}) == world.group.trained_in


ONE_GPU = {"backoffLimit": 0, "gpus": {"count": 1, "resources": {"limits": {"memory": "8Gi"}}}}


@pytest.mark.since_kubernetes(1, 36)
@pytest.mark.parametrize("world", [ONE_GPU], indirect=True, ids=["backoffLimit 0"])
async def test_a_pod_whose_device_its_node_reports_as_unhealthy_is_replaced(world: RealWorld) -> None:
    device = {"resourceID": "GPU-1", "health": "Unhealthy", "message": "XID 79"}
    gpu = {"name": "gpu", "image": "colocated-rl/gpu:dev", "imageID": "", "ready": True, "restartCount": 0}
    world.stay_in_rollout()
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        gpu |= {"allocatedResourcesStatus": [{"name": "nvidia.com/gpu", "resources": [device]}]}
        await world.api.call("PATCH", f"{PODS}/sums-gpu-1-0/status", {"status": {"containerStatuses": [gpu]}}, MERGE)
        await world.until(lambda: world.status.get("cause") == "PodReplaced" and world.status["lineage"] == 2)
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
    assert ("BadDevice", 0) == (world.status["failures"]["cause"], world.status["restarts"])
    assert {"sums-gpu-0-0", "sums-gpu-1-1", "sums-rollout-0"} == {
        each["metadata"]["name"] for each in await world.api.all(PODS)
    }


async def test_who_answers_in_a_members_place_is_sent_nothing(world: RealWorld, tmp_path: Path) -> None:
    """A pod's address is another's now, who has the job's own keys; or keys that somebody else has made."""
    world.stay_in_rollout()
    async with world.operator(LEASE | {"LOG_LEVEL": "DEBUG"}) as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        lost = world.kubelet.of_seat("gpu-1")
        world.kubelet.end(lost.pod.uid)
        await world.until(lambda: operator.logged("member lost") and not lost.listens)
        own = world.kubelet.directory_of(lost.server.hello.pod)
        await passes_for_nobody(world, operator, lost, uid="another pod's", keys=own, because="unknown member")
        holder = Keyholder(world.job["metadata"]["uid"], lost.server.hello.pod, names.ROLE_GPU)
        forgery = secret_files(Keyring(Authority.new(), b"k" * 32).keys(holder))
        forged = write_keys(forgery, tmp_path / "forged")
        await passes_for_nobody(world, operator, lost, uid=lost.pod.uid, keys=forged, because="CERTIFICATE_VERIFY")
        await world.api.call("DELETE", f"{PODS}/{lost.server.hello.pod}")
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
        assert not operator.logged("pass not finished, trying again")


async def test_a_leader_reports_that_it_leads_and_until_when_once_it_has_its_authority(world: RealWorld) -> None:
    """One whose authority was damaged led nobody, and no alert knew of it."""
    path, authority = f"/api/v1/namespaces/{OPERATORS}/secrets", Authority.new()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def reported(metric: str) -> float | None:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        name = f"colocated_rl_operator_{metric} "
        return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), None)

    files = {name: base64.b64encode(data).decode() for name, data in authority.files().items()}
    secret = {"metadata": {"name": SECRET_NAME}, "data": {**files, names.CA_FILE: base64.b64encode(b"torn").decode()}}
    await world.api.call("DELETE", f"{path}/{SECRET_NAME}")
    await world.api.call("POST", path, secret)
    expiry = 'certificate_expiry_timestamp_seconds{certificate="authority"}'
    async with world.operator({**LEASE, "METRICS_PORT": str(port)}) as operator:
        await world.until(lambda: operator.logged("authority not read, trying again"))
        assert (0, None) == (await reported("leader"), await reported(expiry))
        await world.api.call("PATCH", f"{path}/{SECRET_NAME}", {"data": files}, "application/merge-patch+json")
        await world.until(lambda: world.status.get("phase") is not None)
        assert (1, authority.expires.timestamp()) == (await reported("leader"), await reported(expiry))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_job_gets_on_with_another_authority_as_the_runbook_says(
    world: RealWorld, kubectl: AsyncKubectl
) -> None:
    """Members end while connections to them come and go; of some asyncio says that nobody had closed them."""
    world.stay_in_rollout()
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
    await world.api.call("DELETE", f"/api/v1/namespaces/{OPERATORS}/secrets/{SECRET_NAME}")
    async with world.operator() as operator:
        await world.until(lambda: operator.logged("authority made"))
        [command] = under("docs/runbooks/operations.md", "The operator's authority is lost")
        program, *words = shlex.split(command.replace("JOB", "sums"))
        assert "kubectl" == program
        await kubectl(*words)
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
    assert (0, "3-2") == (world.status["restarts"], world.status["weightVersion"])
    gc.collect()  # and says it here, in no other test


async def typed(world: RealWorld, directory: Path, commands: Sequence[str]) -> None:
    """Run commands of a page in a shell, with kubectl of this cluster."""
    (directory / "bin").mkdir(exist_ok=True)
    program = directory / "bin/kubectl"
    program.write_text(f'#!/bin/sh\nexec {CHECKOUT.localcluster} kubectl "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "KUBECONFIG": str(world.kubeconfig)}
    words = ["bash", "-e", "-o", "pipefail", "-c", "\n".join(commands)]
    run = partial(subprocess.run, words, cwd=directory, env=environment, stdin=subprocess.DEVNULL, timeout=DEADLINE_S)
    done = await asyncio.to_thread(run, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr


REFERENCE_APART = {"reference": {"placement": "OwnDevices", "replicas": 1}}


@pytest.mark.parametrize("world", [REFERENCE_APART], indirect=True, ids=["with a reference"])
async def test_authority_and_token_are_replaced_under_a_running_job_as_the_runbook_says(
    world: RealWorld, tmp_path: Path
) -> None:
    """Every job lost all its pods for another authority, and its token could not be replaced at all."""

    def held(what: str) -> set[str]:
        keys = [member.server.hello.keys for member in world.kubelet.members.values()]
        return {getattr(each, what) for each in keys if each is not None}

    async def renewed(what: str, before: set[str]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(held(what)) > 1 or held(what) == before:  # noqa: ASYNC110 - nobody is told of renewed keys
                await asyncio.sleep(0.05)

    async def references() -> set[str]:
        return {
            each["metadata"]["uid"] for each in await world.api.all(PODS) if "reference" in each["metadata"]["name"]
        }

    world.stay_in_rollout()
    async with world.operator(LEASE | {"KEYS_CHECK_S": "0.2"}) as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        members, first_references, secrets = (
            dict(world.kubelet.members),
            await references(),
            await world.api.all(SECRETS),
        )
        assert {*world.kubelet.members, *first_references} == {
            owner["uid"] for each in secrets for owner in each["metadata"]["ownerReferences"] if owner["kind"] == "Pod"
        }
        page = under("docs/runbooks/ca-rotation.md", "Replace the authority")
        commands = [each.replace("colocated-rl-system", OPERATORS) for each in page]
        issuers = [held("issuer")]
        for number in (5, 2, 1):
            before = held("trusts")
            await typed(world, tmp_path, commands[:number])
            await renewed("trusts", before)
            issuers.append(held("issuer"))
            commands = commands[number:]
        assert [] == commands
        assert (issuers[0], issuers[2]) == (issuers[1], issuers[3])
        assert issuers[0] != issuers[2]
        command, *_ = under("docs/runbooks/ca-rotation.md", "A leaked job")
        before = held("token")
        await typed(world, tmp_path, [command.replace("JOB", "sums")])
        await renewed("token", before)
        assert members == world.kubelet.members
        assert [] == operator.logged("member lost")
        async with asyncio.timeout(DEADLINE_S):
            while len(now := await references()) != 1 or now == first_references:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.1)
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
    assert (0, 1) == (world.status["restarts"], world.status["lineage"])


def write_keys(files: Mapping[str, str], directory: Path) -> Path:
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


async def passes_for_nobody(
    world: RealWorld, operator: RealOperator, lost: FakeMember, *, uid: str, keys: Path, because: str
) -> None:
    """Run an impostor at the address of a member that is lost, until the operator reports why it is rejected."""
    hello, pod = lost.server.hello, GpuPod("gpu-1", 0, uid)
    place: dict[str, Any] = {"host": lost.server.ports.host, "control": names.CONTROL_PORT, "tls": keys}
    impostor = FakeMember(world.group, pod, name=hello.pod, job_uid=hello.job_uid, **place)
    async with asyncio.TaskGroup() as tasks:
        life = tasks.create_task(impostor.live(lambda: None))
        await world.until(lambda: any(because in line.get("reason", "") for line in operator.lines))
        life.cancel()
    assert [] == impostor.seen


# ------------------------------------------------------------------------------------------------------- another CRD
def later_crd() -> Body:
    """A field with a default more, and a bound below what a job of these tests has."""
    definition: Body = quick_yaml.load(CRD.read_text())
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    spec["addedLater"] = {"type": "integer", "default": 5, "minimum": 0, "maximum": 9}
    spec["steps"]["maximum"] = 2
    return definition


async def test_a_running_job_goes_on_under_another_crd_and_back_under_its_own(
    world: RealWorld, kubectl: AsyncKubectl, tmp_path: Path
) -> None:
    """A new leader stalled it: it refused the field that the server had put into the job."""
    manifest, later = tmp_path / "job.yaml", tmp_path / "crd.yaml"
    manifest.write_text(yaml.safe_dump(make_manifest(**SPEC)))
    later.write_text(yaml.safe_dump(later_crd()))
    job, install = f"{names.SHORT_NAME}/sums", ("apply", "--server-side", "--force-conflicts", "--filename")
    try:
        world.stay_in_rollout()
        async with world.operator():
            await world.until(lambda: world.status.get("phase") == "Rollout")
            pods = set(world.kubelet.members)
            await kubectl("apply", "--filename", manifest)
            await kubectl(*install, later)
            await kubectl("wait", "--for=jsonpath={.spec.addedLater}=5", job, "--timeout=60s")
            stay_at(world, Rung.SERVING, step=1)
            await world.until(lambda: world.status.get("step") == 1 and world.status["phase"] == "Rollout")
            assert "unchanged" in await kubectl("apply", "--filename", manifest)
            patch = ("patch", job, "--type=merge", "--patch")
            await kubectl(*patch, '{"spec": {"podsReadyDeadlineSeconds": 600}}')
            with pytest.raises(AssertionError, match=r"spec\.steps: .* should be less than or equal to 2"):
                await kubectl(*patch, '{"spec": {"steps": 4}}')
        async with world.operator():
            stay_at(world, Rung.SERVING, step=2)
            await world.until(lambda: world.status.get("step") == 2 and world.status["phase"] == "Rollout")
            await kubectl(*install, CRD)
            await world.until(lambda: "addedLater" not in world.job["spec"])
            world.kubelet.release("gpu-1")
            world.kubelet.release("rollout")
            await world.until(lambda: world.is_complete)
        assert "unchanged" in await kubectl("apply", "--filename", manifest)
    finally:
        await kubectl(*install, CRD)
    assert {1: [1, 2, 3]} == world.group.trained_in
    assert (pods, 0) == (set(world.kubelet.members), world.status["restarts"])
