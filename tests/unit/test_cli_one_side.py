"""These tests show what `rollout-only` and `train-only` make of a job."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from builders import UID, make_job, make_manifest
from colocated_rl_api.job import ColocatedRLJob, Mode
from colocated_rl_api.rungs import Placement
from colocated_rl_cli.base.errors import UsageError
from colocated_rl_cli.manifest import one_side


def job(name: str = "sums", *, step: int | None = None, **spec: Any) -> dict[str, Any]:
    """Return a job as the API server has it, with fields that one side must not have."""
    usual = {"evaluation": {}, "suspend": True, "managedBy": "rl.colocate.dev/operator", "steps": 9}
    manifest = make_manifest(name, **(usual | spec))
    manifest["metadata"] |= {"uid": UID, "labels": {"team": "sums"}, "resourceVersion": "7"}
    return manifest | {"status": {} if step is None else {"step": step}}


def made(text: str) -> ColocatedRLJob:
    return ColocatedRLJob.read(yaml.safe_load(text))


def test_a_recording_job_is_the_first_without_its_trainer() -> None:
    first = job(suspend=True)
    found = made(one_side.rollout_only(first, name=None, steps=None))
    assert ("sums-rollout", "default", Mode.ROLLOUT_ONLY) == (
        found.metadata.name,
        found.metadata.namespace,
        found.spec.mode,
    )
    assert (9, False, None) == (found.spec.steps, found.spec.suspend, found.spec.managed_by)
    assert found.spec.rollout == ColocatedRLJob.read({**first, "status": None}).spec.rollout
    assert found.spec.evaluation is not None, "it has engines"
    assert None is found.metadata.uid is found.metadata.resource_version
    assert {"team": "sums"} == (found.metadata.model_extra or {})["labels"], "such as the queue of the job"
    assert ("probe", 3) == (
        (again := made(one_side.rollout_only(first, name="probe", steps=3))).metadata.name, again.spec.steps
    )  # fmt: skip


@pytest.mark.parametrize(
    "label",
    [
        "app.kubernetes.io/instance", "argocd.argoproj.io/instance", "kustomize.toolkit.fluxcd.io/name",
        "applyset.kubernetes.io/part-of", "objectset.rio.cattle.io/hash", "kapp.k14s.io/app", "helm.sh/chart",
    ],
)  # fmt: skip
def test_a_tool_that_has_applied_the_first_job_does_not_take_the_new_one_for_its_own(label: str) -> None:
    """Argo CD deleted the new job with its next sync, because its label says that the job is of its application."""
    first = job()
    first["metadata"]["labels"] |= {label: "apps", "kueue.x-k8s.io/queue-name": "research", "example.com/cost": "7"}
    found = made(one_side.rollout_only(first, name=None, steps=None)).metadata.model_extra or {}
    assert {"team": "sums", "kueue.x-k8s.io/queue-name": "research", "example.com/cost": "7"} == found["labels"]
    first["metadata"]["labels"] = {label: "apps"}
    assert "labels" not in one_side.rollout_only(first, name=None, steps=None)


@pytest.mark.parametrize("keeps", [{"mode": "RolloutOnly"}, {"storage": {"keepBatches": True}}])
def test_a_training_job_trains_what_the_first_has_kept(keeps: dict[str, Any]) -> None:
    found = made(one_side.train_only(job(step=4, **keeps), name=None, steps=None, recorded=None))
    assert ("sums-train", Placement.TRAIN_ONLY, 4) == (found.metadata.name, found.spec.placement, found.spec.steps)
    assert found.spec.recorded is not None
    assert (make_job("sums").claim_name("store"), "batches") == (
        found.spec.recorded.claim_name,
        found.spec.recorded.path,
    )
    assert None is found.spec.evaluation


def test_only_a_job_with_trainers_goes_on_from_a_former_checkpoint() -> None:
    first = job(storage={"keepBatches": True}, restoreFrom={"claimName": "old"})
    assert made(one_side.rollout_only(first, name=None, steps=None)).spec.restore_from is None
    assert made(one_side.train_only(first, name=None, steps=None, recorded=None)).spec.restore_from is not None


def test_scores_of_a_reference_with_devices_of_its_own_come_with_the_recording() -> None:
    """The job that records has reference pods; the one that trains has neither them nor a rung for them."""
    first = job(step=4, reference={"placement": "OwnDevices", "replicas": 2}, storage={"keepBatches": True})
    recording = made(one_side.rollout_only(first, name=None, steps=None)).spec
    training = made(one_side.train_only(first, name=None, steps=None, recorded=None)).spec
    assert recording.reference == training.reference == ColocatedRLJob.read({**first, "status": None}).spec.reference
    assert (True, True, False) == (recording.seals_with_scores, training.seals_with_scores, training.ladder.scores)


def test_batches_that_the_first_does_not_keep_are_not_promised() -> None:
    with pytest.raises(UsageError, match="keepBatches or one made by rollout-only"):
        one_side.train_only(job(step=4), name=None, steps=None, recorded=None)
    found = made(one_side.train_only(job(step=4), name=None, steps=2, recorded="copies:of/sums"))
    assert found.spec.recorded is not None
    assert ("copies", "of/sums", 2) == (found.spec.recorded.claim_name, found.spec.recorded.path, found.spec.steps)


def test_the_name_of_the_new_job_is_one_and_what_is_no_job_is_not_written() -> None:
    long = "a" * 29 + "-" + "b" * 10
    assert f"{'a' * 29}-bb-rollout" == made(one_side.rollout_only(job(long), name=None, steps=None)).metadata.name
    with pytest.raises(UsageError, match=r"no job can be made of sums: .*metadata\.name: Sums must be"):
        one_side.rollout_only(job(), name="Sums", steps=None)
