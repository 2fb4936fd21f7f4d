"""A whole job that trains adapters (LoRA): two pods with a real engine and a trainer rank each, and a reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.conftest import apply
from e2e.running_job import KubectlCall, RunningJob, wait_for

from colocated_rl_operator.manifests.confinement import RESTRICTED

pytestmark = pytest.mark.release  # `make test-slow`
COMPLETE_S = 1200  # two engines and trainers start on two cores, three steps
LOOK_S = 120
STEPS = 3
RANK, ALPHA = 4, 8
LOOKER = "looks-at-lora"
LOOK = """
import json, sys
from pathlib import Path
import numpy
from safetensors.numpy import load_file

origin, left, checkpoint = (Path(word) for word in sys.argv[1:4])
def tensors(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}

begin, end, adapter = tensors(origin), tensors(left), tensors(left / "adapter")
scale = float(sys.argv[4])
added = {}  # by the name of the weight
for name, first in adapter.items():
    if ".lora_A." in name:
        second = adapter[name.replace(".lora_A.", ".lora_B.")]
        weight = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        added[weight] = scale * second.astype("float64") @ first.astype("float64")
print(json.dumps({
    "names": begin.keys() == end.keys(),
    "ranks": sorted({min(tensor.shape) for tensor in adapter.values()}),
    "unadapted": [name for name in begin.keys() - added.keys() if not numpy.array_equal(begin[name], end[name])],
    "apart": {name: float(abs(begin[name] + delta - end[name]).max()) for name, delta in added.items()},
    "moved": {name: float(abs(delta).max()) for name, delta in added.items()},
    "config": json.loads((left / "adapter/adapter_config.json").read_text()),
    "adapterBytes": sum(tensor.nbytes for tensor in adapter.values()),
    "modelBytes": sum(tensor.nbytes for tensor in begin.values()),
    "checkpointBytes": sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()),
}))
"""


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall) -> Iterator[RunningJob]:
    running = apply(kubectl, "lora.yaml")
    running.wait_for_condition("Complete", deadline_s=COMPLETE_S)
    yield running
    running.delete()


@pytest.fixture(scope="module")
def left(job: RunningJob) -> Iterator[dict[str, Any]]:
    """Yield what a pod finds in the job's volume that has the model beside it."""
    claim, model = job.status["model"].split("/")
    paths = ["/model", f"/left/{model}", f"/left/step-{STEPS:08}"]
    container = {
        "name": "look",
        "image": "colocated-rl/rollout:dev",
        "command": ["python3", "-c", LOOK, *paths, str(ALPHA / RANK)],
        "securityContext": RESTRICTED,
        "volumeMounts": [
            {"name": "model", "mountPath": "/model", "readOnly": True},
            {"name": "left", "mountPath": "/left", "readOnly": True},
        ],
    }
    claims = {"model": "arithmetic-model", "left": claim}
    spec = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": name, "persistentVolumeClaim": {"claimName": each}} for name, each in claims.items()],
        "securityContext": {"runAsUser": 65532, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": LOOKER}, "spec": spec}
    job.kubectl("apply", "-f", "-", stdin=json.dumps(pod))

    def phase() -> str:
        return job.kubectl("get", "pod", LOOKER, "-o", "jsonpath={.status.phase}")

    wait_for("a look into the volume", lambda: phase() in ("Succeeded", "Failed"), deadline_s=LOOK_S)
    output = job.kubectl("logs", LOOKER)
    assert "Succeeded" == phase(), output
    yield json.loads(output)
    job.kubectl("delete", "pod", LOOKER, "--wait=false")


def test_it_completes_and_both_engines_take_each_version_and_hold_the_same(job: RunningJob) -> None:
    assert (STEPS, f"{STEPS}-1", 0) == (job.step, job.status["weightVersion"], job.status["restarts"])
    actions = [line.fields["action"] for line in job.agent_lines("action ended")]
    assert [2, 2 * STEPS] == [actions.count(name) for name in ("StartEngine", "Update")]
    held = {version: {*checksums} for version, checksums in job.checksums().items()}
    assert {f"{step}-1" for step in range(STEPS + 1)} == {*held}
    assert STEPS + 1 == len(set.union(*held.values())), "each version has weights of its own, alike in both engines"


def test_engines_sample_as_the_trainers_compute_with_adapters_beside_the_weights(job: RunningJob) -> None:
    """Engines have the sum in one tensor. In float32 the two differ by rounding, and by nothing else."""
    steps = {line.fields["step"]: line.fields["metrics"] for line in job.agent_lines("step trained")}
    assert {*range(1, STEPS + 1)} == {*steps}
    assert max(metrics["mismatch_mean"] for metrics in steps.values()) < 1e-4
    assert min(metrics["gradient_norm"] for metrics in steps.values()) > 0


def test_its_reference_is_the_model_without_adapters(job: RunningJob) -> None:
    steps = {line.fields["step"]: line.fields["metrics"]["kl"] for line in job.agent_lines("step trained")}
    assert abs(steps[1]) < 1e-6, "the policy begins as its reference"
    assert min(steps[2], steps[3]) > 1e-3, "and moves away from it"


def test_it_leaves_the_sum_of_model_and_adapters_and_the_adapters_beside_it(left: dict[str, Any]) -> None:
    assert (RANK, ALPHA, [RANK]) == (left["config"]["r"], left["config"]["lora_alpha"], left["ranks"])
    assert (True, []) == (left["names"], left["unadapted"]), "no other tensor is changed by a bit"
    assert max(left["apart"].values()) < 1e-6
    assert min(left["moved"].values()) > 1e-4, "each adapter was trained"


def test_its_checkpoints_hold_adapters_and_not_the_model(left: dict[str, Any]) -> None:
    """Parameters and two moments."""
    assert 3 * left["adapterBytes"] < left["checkpointBytes"] < left["modelBytes"]
