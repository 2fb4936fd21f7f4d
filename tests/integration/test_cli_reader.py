"""`kubectl crlj reader` as a person starts it: the pod that it makes, what `samples` then asks, and how it ends."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from unit.test_rollout_followers import FollowersScene, serving
from unit.test_rollout_store import JOB, climb_to, completed_group, seal
from waiting import DEADLINE_S

from builders import make_job, make_manifest
from colocated_rl_api import names
from colocated_rl_api.facts import EvaluationResult
from colocated_rl_cli.base.errors import Exit
from colocated_rl_operator.manifests.belongings import start_parts
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_rollout.store.store import Store
from fakes.cluster_api import ClusterApi
from fakes.kubectl import Played, play_kubectl

UID = "0123456789abcdef"
READER = "sums-reader-01234567"
IMAGES = PodImages(agent="agent:1", rollout="rollout:1", gpu="gpu:1", pull_policy="IfNotPresent")
HUB = {"huggingFace": {"name": "us/small", "revision": "0" * 40}}
JOB_DIRECTORY = str(Path(names.JOB_FILE).parent)
OWN = {"labels": {"team": "a"}, "annotations": {"example.com/owner": "b"}}
DIGEST = "rollout@sha256:" + "a" * 64
LISTED = ("samples", "sums")
READ = ("reader", "sums", "--minutes", "5")


def record(**spec: Any) -> dict[str, Any]:
    templates = start_parts(make_job(podTemplates={"rollout": {"metadata": OWN}}, **spec), IMAGES).templates
    return {"data": {"templates": dict(templates)}}


@pytest.fixture
def api() -> ClusterApi:
    manifest = make_manifest("sums", replicas=1)
    status = {"phase": "Complete", "start": {"revision": "sums-pods", "digests": {"rollout:1": DIGEST}}}
    job = {**manifest, "metadata": {**manifest["metadata"], "uid": UID, "namespace": "default"}, "status": status}
    return ClusterApi(jobs={"sums": job}, records={"sums-pods": record()})


@pytest.fixture
def kubectl(api: ClusterApi, tmp_path: Path) -> Iterator[Played]:
    with play_kubectl(api, tmp_path) as played:
        yield played


@pytest.fixture
async def scene(api: ClusterApi, tmp_path: Path) -> AsyncIterator[FollowersScene]:
    """The pod serves this, once it is there."""
    store = Store(tmp_path / "store", job_uid=JOB)
    seal(store, [completed_group(store)])
    store.remember_climb(climb_to(1, epoch=2, took_s={"Sealed": 1.0, "Trained": 5.0, "Serving": 2.0}))
    for step in (0, 1):
        store.record_evaluation(EvaluationResult(step=step, samples=4, mean=0.25 + step / 2, stderr=0.1))
    completed_group(store)
    async with serving(store) as scene:
        api.members[READER] = scene.port
        yield scene


async def run(kubectl: Played, *words: str) -> tuple[int, str]:
    """Exit code, and everything that it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "colocated_rl_cli", *words), env=kubectl.environment, stdout=PIPE, stderr=PIPE
    )
    async with asyncio.timeout(DEADLINE_S):
        out, complaint = await process.communicate()
    return process.returncode or 0, (out + complaint).decode()


def made(api: ClusterApi) -> Mapping[str, Any]:
    (pod,) = api.pods
    return pod


async def test_its_pod_is_that_of_rollout_with_the_claim_read_only(
    api: ClusterApi, kubectl: Played, scene: FollowersScene
) -> None:
    code, said = await run(kubectl, *READ)
    assert 0 == code, said
    assert f"default/sums: pod {READER} serves its samples, for 5 min" in said
    pod, template = made(api), api.records["sums-pods"]["data"]["templates"][names.ROLE_ROLLOUT]["spec"]
    metadata, spec, (container,) = pod["metadata"], pod["spec"], pod["spec"]["containers"]
    assert [(names.KIND, "sums", UID)] == [(o["kind"], o["name"], o["uid"]) for o in metadata["ownerReferences"]]
    no_mesh = {"sidecar.istio.io/inject": "false"}
    assert OWN["labels"] | no_mesh | {f"{names.GROUP}/reader-of": "sums"} == metadata["labels"], "it is no job's pod"
    assert OWN["annotations"].items() <= metadata["annotations"].items()
    assert (DIGEST, 300, "Never") == (container["image"], spec["activeDeadlineSeconds"], spec["restartPolicy"])
    for same in ("securityContext", "automountServiceAccountToken"):
        assert template[same] == spec[same]
    assert template["containers"][0]["securityContext"] == container["securityContext"]
    mounts = {each["mountPath"]: each.get("readOnly", False) for each in container["volumeMounts"]}
    assert {names.STATE_DIR: True, names.MODEL_DIR: True, JOB_DIRECTORY: True, "/tmp": False} == mounts
    assert {"store", "model", "job", "tmp"} == {volume["name"] for volume in spec["volumes"]}
    assert [] == spec["initContainers"]


async def test_a_model_of_the_hub_is_fetched_before_it(api: ClusterApi, kubectl: Played, scene: FollowersScene) -> None:
    api.records["sums-pods"] = record(model=HUB)
    assert 0 == (await run(kubectl, *READ))[0]
    (fetching,) = made(api)["spec"]["initContainers"]
    assert (names.MODEL_CONTAINER, DIGEST) == (fetching["name"], fetching["image"])
    mounted = {mount["name"] for mount in fetching["volumeMounts"]}
    assert mounted <= {volume["name"] for volume in made(api)["spec"]["volumes"]}


async def test_samples_says_that_there_is_one_and_then_asks_it(
    api: ClusterApi, kubectl: Played, scene: FollowersScene
) -> None:
    code, said = await run(kubectl, *LISTED)
    assert (Exit.NO_ANSWER, True) == (code, "kubectl crlj reader sums makes one" in said)
    await run(kubectl, *READ)
    code, said = await run(kubectl, *LISTED)
    assert (0, True) == (code, "completed" in said)
    assert 0 == (await run(kubectl, *READ))[0]
    assert READER == made(api)["metadata"]["name"], "it is the same"


async def test_who_had_the_gpus_and_every_evaluation_come_from_it_once_pods_are_gone(
    api: ClusterApi, kubectl: Played, scene: FollowersScene
) -> None:
    job = api.jobs["sums"]
    job["spec"] |= {"suspend": True, "evaluation": {"everySteps": 1}}
    newest = {"step": 1, "name": "held-out", "mean": 0.75, "stderr": 0.1, "samples": 4}
    job["status"] |= {"phase": "Suspended", "placement": "TimeSliced", "evaluations": [newest]}
    for words in (("timeline", "sums"), ("eval", "sums")):
        code, said = await run(kubectl, *words)
        assert "kubectl crlj reader sums makes one" in said
        assert (Exit.NO_ANSWER if words[0] == "timeline" else 0) == code
    assert (True, False) == ("0.75" in said, "0.25" in said), "the status has the newest alone"
    await run(kubectl, *READ)
    code, said = await run(kubectl, "timeline", "sums")
    assert (0, True, True) == (code, "all pods from step 1  " in said, "NextStep" in said), said
    code, said = await run(kubectl, "eval", "sums", "-o", "json")
    assert [(0, 0.25), (1, 0.75)] == [(one["step"], one["mean"]) for one in json.loads(said)]


async def test_a_job_that_is_queued_has_one_too(api: ClusterApi, kubectl: Played, scene: FollowersScene) -> None:
    """It has no pods, and was said to have pods of its own."""
    api.jobs["sums"]["status"]["phase"] = "Queued"
    assert 0 == (await run(kubectl, *READ))[0]
    assert "completed" in (await run(kubectl, *LISTED))[1]


async def test_what_it_says_to_run_is_for_the_cluster_of_the_job(
    api: ClusterApi, kubectl: Played, scene: FollowersScene
) -> None:
    """They left the context out, and asked another cluster."""
    code, said = await run(kubectl, *READ, "--context", "gpu cluster", "--kubeconfig", "k")
    commands = [line for line in said.splitlines() if line.startswith("  kubectl ")]
    assert (0, 3) == (code, len(commands))
    assert all(" -n default --kubeconfig=k '--context=gpu cluster' " in command for command in commands)


async def test_one_that_has_ended_is_made_again(api: ClusterApi, kubectl: Played, scene: FollowersScene) -> None:
    await run(kubectl, *READ)
    api.pods[0]["status"] = {"phase": "Failed", "reason": "DeadlineExceeded"}
    assert 0 == (await run(kubectl, *READ))[0]
    assert {"phase": "Running"} == made(api)["status"]


async def test_one_that_is_there_keeps_its_end_and_says_so(
    api: ClusterApi, kubectl: Played, scene: FollowersScene
) -> None:
    await run(kubectl, *READ)
    assert "for 5 min from its start" in (await run(kubectl, "reader", "sums", "--minutes", "600"))[1]


async def test_a_job_with_pods_needs_none(api: ClusterApi, kubectl: Played) -> None:
    api.jobs["sums"]["status"]["phase"] = "Rollout"
    code, said = await run(kubectl, *READ)
    assert (Exit.USAGE, True, []) == (code, "has pods of its own: kubectl crlj samples sums" in said, api.pods)


async def test_a_job_of_an_earlier_release_has_no_record_to_make_it_of(api: ClusterApi, kubectl: Played) -> None:
    api.jobs["sums"]["status"]["start"] = {"revision": ""}
    code, said = await run(kubectl, *READ)
    assert (Exit.NO_ANSWER, True) == (code, "an earlier release started it" in said)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            {
                "phase": "Failed",
                "containerStatuses": [
                    {"state": {"terminated": {"reason": "Error", "message": "the job never began\n"}}}
                ],
            },
            "is Failed: Error: the job never began; the same command makes another",
        ),
        ({"phase": "Failed", "reason": "DeadlineExceeded"}, "is Failed: DeadlineExceeded; the same"),
    ],
)
async def test_a_pod_that_fails_says_why(api: ClusterApi, kubectl: Played, status: dict[str, Any], words: str) -> None:
    api.begins = status
    code, said = await run(kubectl, *READ)
    assert (Exit.NO_ANSWER, True) == (code, words in said), said
