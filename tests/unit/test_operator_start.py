"""These tests show which specification pods are made from, from one start of a group to the next."""

from __future__ import annotations

import json
from typing import Any

import pytest

from builders import OWN_ROLLOUT, make_job
from colocated_rl_api.job_status import ColocatedRLJobStatus, StartStatus
from colocated_rl_api.seats import ROLLOUT_SEAT, gpu_seat, role_of
from colocated_rl_operator.loop.start import pinned, recorded_images, start_with, with_digests
from colocated_rl_operator.manifests import belongings, resources
from colocated_rl_operator.manifests.resources import PodImages

OLD = PodImages(agent="reg:5000/rl/agent:1", rollout="rl/rollout:1", gpu="gpu", pull_policy="IfNotPresent")
NEW = PodImages(agent="reg:5000/rl/agent:2", rollout="rl/rollout:2", gpu="gpu", pull_policy="Always")
A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def running(seat: str, **ids: str) -> dict[str, Any]:
    """A pod as its node reports it. ids: imageID by container."""
    body = resources.pod(make_job(), seat, 0, OLD)
    statuses = [{"name": name, "imageID": value} for name, value in ids.items()]
    return body | {"status": {"initContainerStatuses": statuses[:1], "containerStatuses": statuses[1:]}}


def test_a_pod_that_is_made_again_has_the_images_of_its_start_whatever_the_chart_names_now() -> None:
    start = start_with(OLD, version="1.0")
    found = recorded_images(start, NEW)
    assert (OLD.agent, OLD.rollout, OLD.gpu, "Always") == (found.agent, found.rollout, found.gpu, found.pull_policy)
    assert NEW == recorded_images(None, NEW), "an older operator recorded nothing"


def test_a_record_of_another_version_is_read_as_far_as_it_is_known() -> None:
    start = StartStatus.model_validate({"images": {"agent": "x", "sidecar": "y"}, "pods": {"of": "a newer operator"}})
    found = recorded_images(start, OLD)
    assert ("x", OLD.rollout) == (found.agent, found.rollout)


def test_digests_are_those_that_nodes_reported_first_and_pods_made_again_run_them() -> None:
    status = ColocatedRLJobStatus(start=start_with(OLD, version="1.0"))
    first = running(gpu_seat(0), agent=f"reg:5000/rl/agent@{A}", gpu=f"docker-pullable://docker.io/library/gpu@{B}")
    with_status = with_digests(status, [first])
    later = with_digests(with_status, [running(gpu_seat(1), agent=f"reg:5000/rl/agent@{B}")])

    assert with_status == later, "a tag that was moved meanwhile is not what peers run"
    assert with_status.start is not None
    assert {"reg:5000/rl/agent:1": f"reg:5000/rl/agent@{A}", "gpu": f"gpu@{B}"} == with_status.start.digests
    again = pinned(resources.pod(make_job(), gpu_seat(1), 1, OLD), with_status.start)
    runner, agent = again["spec"]["initContainers"]
    assert (f"reg:5000/rl/agent@{A}",) * 2 == (runner["image"], agent["image"])
    assert f"gpu@{B}" == again["spec"]["containers"][0]["image"]
    again["status"] = {"containerStatuses": [{"name": "gpu", "imageID": f"docker.io/library/gpu@{B}"}]}
    assert with_status == with_digests(with_status, [again]), "what is named by its digest needs no other"


@pytest.mark.parametrize(
    "image_id", [A, f"docker.io/library/import-2026-01-01@{A}", f"mirror.example.com/rl/rollout@{A}", "rollout:1", ""]
)
def test_what_can_not_be_pulled_by_the_same_name_is_no_digest(image_id: str) -> None:
    status = ColocatedRLJobStatus(start=start_with(OLD, version="1.0"))
    pod = running(ROLLOUT_SEAT, rewards=image_id)
    assert status == with_digests(status, [pod])
    assert pod["spec"] == pinned(pod, status.start)["spec"]


def test_a_pod_made_from_the_record_is_the_pod_that_was_rendered() -> None:
    job = make_job(rollout=OWN_ROLLOUT, reference={"placement": "OwnDevices", "replicas": 1, "gpus": {"count": 1}})
    record = json.loads(json.dumps(belongings.start_record(job, belongings.start_parts(job, OLD))))
    parts = belongings.recorded_parts(job, record)
    assert parts is not None
    found = parts.templates
    for seat in job.seats.all:
        expected = resources.pod(job, seat, 3, OLD, avoids=("node-1",))
        assert expected == resources.seated(found[role_of(seat)], job, seat, 3, avoids=("node-1",))
    assert {"engine", "trainer", "reference", "rollout"} == set(found)


def test_equal_templates_have_one_record_and_others_another() -> None:
    job = make_job()
    old, again, new = (belongings.start_record(job, belongings.start_parts(job, each)) for each in (OLD, OLD, NEW))
    assert old == again
    assert old["metadata"]["name"] != new["metadata"]["name"]
    assert job.uid in old["metadata"]["name"]


def test_a_record_that_is_not_what_its_name_says_is_none() -> None:
    """A writer of a job's status could otherwise have pods of any form made by the name of an object of their own."""
    job = make_job()
    record = belongings.start_record(job, belongings.start_parts(job, OLD))
    changed = json.loads(json.dumps(record))
    changed["data"]["templates"]["gpu"]["spec"]["hostNetwork"] = True
    of_another = {**record, "metadata": {"name": record["metadata"]["name"].replace(job.uid, "f" * 36)}}
    for found in (changed, of_another, {"metadata": record["metadata"]}):
        assert belongings.recorded_parts(job, found) is None


def test_without_a_record_nothing_is_added_or_changed() -> None:
    status = ColocatedRLJobStatus()
    pod = running(gpu_seat(0), agent=f"reg:5000/rl/agent@{A}")
    assert (status, pod) == (with_digests(status, [pod]), pinned(pod, None))
