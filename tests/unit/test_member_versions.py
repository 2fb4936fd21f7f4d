"""In an upgrade parts meet newer ones: members an operator and their job's file, an operator the CRD."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

from builders import make_job, make_manifest
from colocated_rl_api.job import ColocatedRLJobSpec, Evaluation
from colocated_rl_api.member_wire import (
    Endpoint,
    Goal,
    JobFile,
    PodTarget,
    Rendezvous,
    RolloutTarget,
    read_from_operator,
)
from colocated_rl_api.rungs import Rung
from colocated_rl_operator.loop.observe import read_job
from colocated_rl_operator.manifests.belongings import config

NEWER = {"aFieldOfTomorrow": {"with": ["parts"]}, "another": 1}


def newer(value: Any) -> Any:
    """The same, with fields that nobody knows yet in every object."""
    if isinstance(value, dict):
        return {key: newer(item) for key, item in value.items()} | NEWER
    return [newer(item) for item in value] if isinstance(value, list) else value


def test_a_job_file_of_a_newer_operator_is_read_as_far_as_it_is_known() -> None:
    """An agent that was started again in its old pod could not read the file that an upgraded operator had written."""
    (text,) = (text for name, text in config(make_job())["data"].items() if name == "job.json")
    known = JobFile.read(text.encode())
    content = json.loads(text)
    for part in ("gpus", "rollout", "trainer", "switch", "checkpoint", "storage"):
        content["spec"][part] |= NEWER
    content["spec"]["rollout"]["sampling"] |= NEWER
    assert known == JobFile.read(json.dumps(content | {"spec": content["spec"] | NEWER} | NEWER).encode())


@pytest.mark.parametrize(
    "target",
    [
        PodTarget(
            epoch=3,
            goal=Goal.CLIMB,
            step=2,
            lineage=1,
            rung=Rung.PAUSED,
            rendezvous=Rendezvous(address="10.0.0.1", port=29500, world_size=2),
            batches=Endpoint(pod="sums-rollout-0", address="10.0.0.2", port=7444),
        ),
        RolloutTarget(
            epoch=3,
            goal=Goal.CLIMB,
            trained_step=1,
            saved_step=0,
            engines=(Endpoint(pod="sums-gpu-0-0", address="10.0.0.1", port=7444),),
            evaluation=Evaluation.model_validate({"everySteps": 2}),
        ),
    ],
    ids=["pod", "rollout"],
)
def test_a_target_of_a_newer_operator_is_read_as_far_as_it_is_known(target: PodTarget | RolloutTarget) -> None:
    """`evaluation` is a part of the resource, which is strict elsewhere: the link was closed over it."""
    assert target == read_from_operator(json.dumps(newer(target.model_dump(mode="json", by_alias=True))))


def test_a_job_of_a_newer_crd_is_read_as_far_as_it_is_known() -> None:
    """A default that the new CRD put into every job stalled those of an operator that was not upgraded yet."""
    job = make_job()
    metadata = {"namespace": job.namespace, "name": job.name, "uid": job.uid, "generation": job.generation}
    spec = make_manifest()["spec"]
    body = {"metadata": metadata | {"creationTimestamp": job.created.isoformat()}, "spec": spec | NEWER}
    for part in ("gpus", "rollout"):
        body["spec"][part] = spec.get(part, {}) | NEWER
    assert job.spec == read_job(body).spec


def test_what_people_write_is_read_strictly_all_the_same() -> None:
    with pytest.raises(pydantic.ValidationError, match="aFieldOfTomorrow"):
        ColocatedRLJobSpec.model_validate(make_manifest()["spec"] | NEWER)
