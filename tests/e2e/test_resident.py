"""A job whose engine, trainer and reference all stay on the device, from its first climb to its end, with real ones.

It ends once it was looked at, however quick it is: at its end nothing is shared any more. Its model comes from a hub,
which is a pod of the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.conftest import HUB_MODEL, NAMESPACE, apply, hub_in_a_pod
from e2e.running_job import KubectlCall, RunningJob

from colocated_rl_api import names
from colocated_rl_api.batch import HEADER_KEY
from colocated_rl_api.ladder import RESIDENT
from colocated_rl_api.rungs import Rung
from fakes.hub import COMMIT

pytestmark = pytest.mark.slow  # `make test-slow`
START_S = 900  # an engine and a trainer start on two cores
STEPS_S = 600


CACHE = "hub-cache"
BATCH = 16 * 4  # samples
SCORED = f"""
import json, pathlib, re, urllib.request
from safetensors import safe_open
text = urllib.request.urlopen("http://127.0.0.1:{names.METRICS_PORT}/metrics", timeout=60).read().decode()
names = ('reference_answers_total{{ending="scored"}}', 'samples{{state="completed"}}', "sealed_step")
found = [re.search(rf"^colocate_rollout_{{re.escape(name)}} (.+)$", text, re.M) for name in names]
carries = {{}}
for path in pathlib.Path("{names.STATE_DIR}/batches").glob("*.safetensors"):
    with safe_open(path, "np") as shard:
        header = json.loads(shard.metadata()["{HEADER_KEY}"])
        carries[header["step"]] = [header["hasReference"], "reference_logp" in shard.keys()]
print(json.dumps([[int(float(each[1])) if each else 0 for each in found], carries]))
"""  # the rollout controller's figures first: batches that it names have their files


@pytest.fixture(scope="module")
def hub(kubectl: KubectlCall) -> Iterator[str]:
    size = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CACHE}, "spec": size}
    kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=json.dumps(claim))
    with hub_in_a_pod(kubectl) as address:
        yield address
    kubectl("-n", NAMESPACE, "delete", f"pvc/{CACHE}", "--wait=false")


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall, hub: str) -> Iterator[RunningJob]:
    source = {"name": HUB_MODEL, "revision": COMMIT, "endpoint": hub, "cacheClaimName": CACHE}
    running = apply(kubectl, "resident.yaml", model={"huggingFace": source})
    yield running
    running.delete()


def test_a_resident_job_completes_and_releases_nothing(job: RunningJob) -> None:
    job.wait_for_step(1, deadline_s=START_S)
    samples_are_scored_before_their_batch_is_sealed(job)
    seen: list[dict[str, Any]] = [job.status]
    job.end_soon()

    def look() -> bool:
        seen.append(job.status)
        return job.condition("Complete") == "True"

    job.wait_for("Complete", look, deadline_s=STEPS_S)
    assert {"Resident"} == {status["placement"] for status in seen}
    assert {None, *map(str, RESIDENT.rungs), str(Rung.UNKNOWN)} >= {status.get("rung") for status in seen}
    assert {"Switching", "Rollout", "Both", "Nobody"} >= {status["gpuHolder"] for status in seen}
    assert (f"{job.step}-1", 0) == (job.status["weightVersion"], job.status["restarts"])
    (sharing,) = [item for item in seen[0]["conditions"] if item["type"] == "GPUSharingReady"]
    assert ("True", "Resident") == (sharing["status"], sharing["reason"])


def samples_are_scored_before_their_batch_is_sealed(job: RunningJob) -> None:
    """While too few samples for the next batch are complete, some have scores; and each batch has its column."""

    def look() -> tuple[int, dict[str, list[bool]]] | None:
        (scored, completed, sealed), carries = json.loads(job.python(job.rollout_pod, names.ROLLOUT_CONTAINER, SCORED))
        return (sealed, carries) if completed < BATCH and scored > BATCH * sealed else None

    sealed, carries = job.wait_for("scores of a batch that is not complete", look, deadline_s=STEPS_S)
    assert str(sealed) in carries
    assert {(True, True)} == {tuple(each) for each in carries.values()}


def test_trainers_trained_with_scores_that_batches_brought(job: RunningJob) -> None:
    """The reference beside engine and trainer computed them, and in step 1 they are those of the trainer's own pass."""
    divergence = {line.fields["step"]: line.fields["metrics"]["kl"] for line in job.agent_lines("step trained")}
    assert {*range(1, job.step + 1)} == {*divergence}
    assert abs(divergence[1]) < 1e-6, "the policy begins as its reference"
    assert 0 < divergence[job.step], "and has moved since"
    assert "Score" not in {line.fields["action"] for line in job.agent_lines("action ended")}
    assert 1 == len(job.agent_lines("reference loaded"))
    assert "WithRollout" == job.status["reference"]["placement"]


def test_all_its_pods_have_the_model_of_the_hub(job: RunningJob) -> None:
    for pod in (job.pods(names.ROLE_GPU)[0]["metadata"]["name"], job.rollout_pod):
        (line,) = job.kubectl("logs", pod, "-c", names.MODEL_CONTAINER).splitlines()
        assert json.loads(line)["event"] in ("model fetched", "model found")


def test_it_leaves_its_model_beside_its_checkpoints(job: RunningJob) -> None:
    claim = f"{job.name}-checkpoints-{job.uid[:8]}"
    assert f"{claim}/model-{job.step:08}" == job.status["model"]
    (left,) = job.agent_lines("final model saved")
    assert f"{job.step}-1" == left.fields["version"]


def test_its_pod_climbed_the_resident_ladder_in_order_in_every_step(job: RunningJob) -> None:
    for step in range(1, job.step + 1):
        rungs = [Rung(line.fields["rung"]) for line in job.rungs(step)]
        assert sorted(rungs, key=RESIDENT.place) == rungs, f"step {step}: each is on that ladder, which has no Scored"
        assert {Rung.TRAINED, Rung.EXPORTED, Rung.UPDATED, Rung.SERVING} <= {*rungs}, f"step {step}"


def test_its_engine_took_each_version_drained(job: RunningJob) -> None:
    ended = job.agent_lines("action ended")
    actions = [line.fields["action"] for line in ended]
    assert not {"Release", "Resume", "Offload"} & {*actions}
    assert (1, job.step) == (actions.count("StartEngine"), actions.count("Update"))
    assert {0} == {line.fields["in_flight"] for line in ended if line.fields["action"] in ("Pause", "Flush", "Update")}


def test_rollout_went_on_across_steps_and_its_tokens_were_at_most_one_step_old(job: RunningJob) -> None:
    batches = job.rollout_lines("batch sealed")[: job.step]  # one more may be, for a step that is not wanted any more
    assert [*range(1, job.step + 1)] == [line.fields["step"] for line in batches]
    assert {"0", "1"} == {age for line in batches for age in line.fields["staleness"]}
