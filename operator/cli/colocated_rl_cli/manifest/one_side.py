"""Write manifests of jobs that run one side of another job: rollout that records batches, or training on a recording.

The other job is only read. The new job has its own store and checkpoints, and drops the fields that one side alone
can't have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colocated_rl_api import names
from colocated_rl_api.job import JOB_NAME_MAX, Mode
from colocated_rl_cli.base.errors import UsageError
from colocated_rl_cli.base.yaml_text import written
from colocated_rl_cli.manifest.manifest import judge

OF_A_RUN = ("suspend", "recorded", "managedBy")  # fields that belong to the first job alone
OF_A_TOOL = (  # domains of labels by which tools know what they applied: they delete a copy that they did not apply
    "app.kubernetes.io", "applyset.kubernetes.io", "argoproj.io", "cattle.io", "fluxcd.io", "helm.sh", "k14s.io",
)  # fmt: skip


def rollout_only(job: Mapping[str, Any], *, name: str | None, steps: int | None) -> str:
    """Return the manifest of a job that records batches with the first job's initial model. Raises UsageError."""
    return _manifest(job, Mode.ROLLOUT_ONLY, name or _named(job, "rollout"), {"steps": steps or job["spec"]["steps"]})


def train_only(job: Mapping[str, Any], *, name: str | None, steps: int | None, recorded: str | None) -> str:
    """Return the manifest of a job that trains recorded batches as the first job does.

    recorded: CLAIM[:PATH] of the recording; None for the first job's own. Raises UsageError.
    """
    if recorded is None:
        recording, known = {"claimName": _store_of(job)}, job.get("status", {}).get("step")
    else:
        claim, _, path = recorded.partition(":")
        recording, known = {"claimName": claim, **({"path": path} if path else {})}, None
    spec = {"steps": steps or known or job["spec"]["steps"], "recorded": recording}
    return _manifest(job, Mode.TRAIN_ONLY, name or _named(job, "train"), spec)


def _store_of(job: Mapping[str, Any]) -> str:
    """Return the claim in which the job keeps all of its batches. Raises UsageError if it does not keep them."""
    metadata, spec = job["metadata"], job["spec"]
    if spec.get("mode") != Mode.ROLLOUT_ONLY and not spec.get("storage", {}).get("keepBatches"):
        raise UsageError(
            f"job {metadata['name']} keeps only batches that no checkpoint holds yet: let a job with "
            "spec.storage.keepBatches or one made by rollout-only record them, or name a recording: "
            "--recorded CLAIM:PATH"
        )
    return names.claim_name(metadata["name"], metadata["uid"], "store")


def _named(job: Mapping[str, Any], side: str) -> str:
    return f"{job['metadata']['name'][: JOB_NAME_MAX - len(side) - 1].rstrip('-')}-{side}"


def _manifest(job: Mapping[str, Any], mode: Mode, name: str, changes: Mapping[str, Any]) -> str:
    labels = job["metadata"].get("labels") or {}
    kept = {key: value for key, value in labels.items() if not key.partition("/")[0].endswith(OF_A_TOOL)}
    metadata = {"namespace": job["metadata"].get("namespace"), "labels": kept}
    left_out = (*OF_A_RUN, "evaluation" if mode is Mode.TRAIN_ONLY else "restoreFrom")
    spec = {key: value for key, value in job["spec"].items() if key not in left_out}
    document = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, **{key: value for key, value in metadata.items() if value}},
        "spec": {**spec, "mode": mode.value, **changes},
    }
    text = written(document, width=110)
    if faults := judge(text).faults:
        reasons = "; ".join(f"{fault.field}: {fault.message}" for fault in faults)
        raise UsageError(f"no job can be made of {job['metadata']['name']}: {reasons}")
    return text
