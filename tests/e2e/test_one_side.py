"""Rollout alone records, and training alone trains what was recorded: two jobs, neither of which has both sides.

A third one goes on from a backup of the second, once that and its volumes are gone, also in another cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from documents.blocks import blocks, under
from e2e.conftest import NAMESPACE, CommandLine, apply, installed
from e2e.running_job import KubectlCall, RunningJob, wait_for
from e2e.terminal import RecordedTerminal

from colocated_rl_api import names

pytestmark = pytest.mark.slow

RECORD_S = 900  # an engine starts on two cores
TRAIN_S = 600
SUCCEEDED_S = 240  # kubelet may look at a pod once a minute
STEPS = 1000  # more than are recorded while somebody looks: a job that is complete shows no samples

PAGE = "docs/one-side.md"
BACKUP = "docs/runbooks/backup.md"
COPIER_IMAGE = "colocated-rl/rollout:dev"


@pytest.fixture(scope="module")
def recorded(kubectl: KubectlCall, terminal: RecordedTerminal) -> Iterator[RunningJob]:
    """Record a job by the page's commands, from the spec of a job that has both sides and no pods."""
    whole = apply(kubectl, "one-side.yaml")
    begin, look = under(PAGE, "Record")
    terminal(begin.replace("--steps 20", f"--steps {STEPS}"), sums=whole.name)
    running = RunningJob(kubectl, namespace=whole.namespace, name=f"{whole.name}-rollout")
    running.wait_for_step(1, deadline_s=RECORD_S)
    assert "response" in terminal(look, sums=whole.name)
    running.end_soon()
    running.wait_for_condition("Complete", deadline_s=RECORD_S)
    yield running
    for job in (running, whole):
        job.delete()


@pytest.fixture(scope="module")
def trained(recorded: RunningJob, kubectl: KubectlCall, terminal: RecordedTerminal) -> Iterator[RunningJob]:
    begin, of_a_claim = under(PAGE, "Replay")
    whole = recorded.name.removesuffix("-rollout")
    terminal(begin, sums=whole)
    assert "claimName: my-copies" in terminal(of_a_claim, sums=whole)
    running = RunningJob(kubectl, namespace=recorded.namespace, name=f"{recorded.name}-train")
    running.wait_for_condition("Complete", deadline_s=TRAIN_S)
    yield running
    running.delete()


def actions(job: RunningJob) -> set[str]:
    return {line.fields["action"] for line in job.agent_lines("action ended")}


def sealed(job: RunningJob) -> list[tuple[object, ...]]:
    columns = ("step", "samples", "loss_tokens", "reward_mean", "staleness")
    return [tuple(line.fields[name] for name in columns) for line in job.rollout_lines("batch sealed")]


def test_a_job_without_a_trainer_seals_its_batches(recorded: RunningJob) -> None:
    status, batches = recorded.status, [batch[0] for batch in sealed(recorded)]
    assert ("RolloutOnly", "0-1", 0) == tuple(status[n] for n in ("placement", "weightVersion", "restarts"))
    assert [*range(1, len(batches) + 1)] == batches
    assert recorded.get()["spec"]["steps"] <= status["step"] <= len(batches)
    assert "StartEngine" in actions(recorded)
    assert not {"StartTrainers", "Train", "Export", "Release"} & actions(recorded)


def test_a_pod_serves_its_samples_when_it_is_over(
    recorded: RunningJob, command_line: CommandLine, tmp_path: Path
) -> None:
    name, file = recorded.name, tmp_path / "samples.parquet"
    wait_for(
        "the rollout pod to have succeeded",
        lambda: "Succeeded" == recorded.pods(names.ROLE_ROLLOUT)[0]["status"]["phase"],
        deadline_s=SUCCEEDED_S,
        explain=recorded.describe,
    )
    with pytest.raises(AssertionError, match=f"kubectl crlj reader {name} makes one"):
        command_line("samples", name)
    assert "serves its samples" in command_line("reader", name)
    samples = json.loads(command_line("samples", name, "--state", "sealed", "--text", "--limit", "3", "-o", "json"))
    assert [3, True] == [len(samples), all(sample["response"] for sample in samples)]
    all_that_ended = command_line(
        "samples", name, "--follow", "--limit", "1000"
    )  # the newest came too late for a batch
    assert " sealed " in all_that_ended, "it ends by itself"
    command_line("samples", name, "--parquet", str(file))
    rows = pq.read_table(file).to_pylist()
    assert recorded.status["rollout"]["samples"]["sealed"] == sum(row["state"] == "sealed" for row in rows)
    assert command_line("reader", name) == command_line("reader", name), "it is the same pod"


def test_a_job_without_an_engine_trains_them(recorded: RunningJob, trained: RunningJob) -> None:
    """It trains the steps that the recording job counted at its end: perhaps more than were asked for by then, and
    perhaps fewer than were sealed.
    """
    status, steps = trained.status, recorded.status["step"]
    expected = (steps, "TrainOnly", f"{steps}-1", 0)
    assert expected == tuple(status[n] for n in ("step", "placement", "weightVersion", "restarts"))
    assert sealed(recorded)[:steps] == sealed(trained)
    assert {"StartTrainers", "Train", "Export", "Save"} <= actions(trained)
    assert not {"StartEngine", "OpenGate", "Release", "Update"} & actions(trained)


def test_it_trains_with_the_scores_of_a_reference_that_only_the_recording_job_had(
    recorded: RunningJob, trained: RunningJob
) -> None:
    assert ("OwnDevices", 1) == tuple(recorded.status["reference"][name] for name in ("placement", "replicas"))
    assert [] == trained.pods(names.ROLE_REFERENCE)
    divergence = {line.fields["step"]: line.fields["metrics"]["kl"] for line in trained.agent_lines("step trained")}
    assert abs(divergence[1]) < 1e-6, "the policy begins as its reference"
    assert 0 < divergence[trained.step], "and has moved since"


def figures(job: RunningJob) -> dict[int, object]:
    """Return the figures that each step computed: on a CPU equal to the bit for equal weights, moments and batch."""
    return {line.fields["step"]: line.fields["metrics"] for line in job.agent_lines("step trained")}


def copier(claim: str) -> str:
    (manifest,) = (block.text for block in blocks(BACKUP) if "kind: Pod" in block.text)
    return manifest.replace("CLAIM", claim).replace("busybox:1.37", COPIER_IMAGE)


@dataclass(frozen=True)
class LostJob:
    """A LostJob has trained all steps, and left copies of its checkpoints and of the recording in a folder.

    figures: of each step.
    """

    spec: dict[str, Any]
    figures: dict[int, object]

    @property
    def steps(self) -> int:
        return len(self.figures)

    @property
    def oldest(self) -> int:
        """Return the step of the oldest checkpoint."""
        return max(1, self.steps - int(self.spec["checkpoint"]["keep"]) + 1)


def copy_out(terminal: RecordedTerminal, claim: str, what: str, file: str) -> None:
    """Carry out the runbook's commands. what: is in the claim, instead of checkpoints."""
    (terminal.folder / "copier.yaml").write_text(copier(claim))
    for command in under(BACKUP, "Back up"):
        terminal(command.replace("step-*", what).replace("checkpoints.tar", file))


def copy_in(terminal: RecordedTerminal, kubectl: KubectlCall, claim: str, file: Path) -> None:
    """Make a claim, and fill it by the runbook's commands."""
    size = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    made = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim}, "spec": size}
    kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=json.dumps(made))
    (terminal.folder / "copier.yaml").write_text(copier(claim))
    for command in under(BACKUP, "Restore"):
        terminal(command.replace("checkpoints.tar", str(file)))


@pytest.fixture(scope="module")
def lost(trained: RunningJob, terminal: RecordedTerminal) -> LostJob:
    """Back the job up by the runbook's commands, and delete it with its volumes."""
    manifest = trained.get()
    found = LostJob(manifest["spec"], figures(trained))
    assert trained.step == found.steps
    former = f"{trained.name}-checkpoints-{trained.uid[:8]}"
    copy_out(terminal, former, "step-*", "checkpoints.tar")
    copy_out(terminal, manifest["spec"]["recorded"]["claimName"], "batches", "recording.tar")
    trained.delete()
    claims = [former, former.replace("checkpoints", "store")]
    wait_for("the job's end", lambda: not trained.kubectl("get", "pods", "-l", label(trained)).strip(), deadline_s=120)
    trained.kubectl("delete", "pvc", *claims)
    return found


def must_go_on(lost: LostJob, kubectl: KubectlCall, terminal: RecordedTerminal, checkpoints: Path) -> None:
    """Restore the checkpoints, and let another job go on from the oldest as if the lost one had never ended."""
    copy_in(terminal, kubectl, "restored", checkpoints)
    again = RunningJob(kubectl, namespace=NAMESPACE, name="again")
    restore = {"restoreFrom": {"claimName": "restored", "step": lost.oldest}}
    kind = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": again.name}}
    manifest = kind | {"spec": lost.spec | restore}
    again.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    again.wait_for_condition("Complete", deadline_s=TRAIN_S)
    assert (lost.steps, f"restored/step-{lost.oldest:08}") == (again.step, again.status["restoredFrom"])
    repeated = range(lost.oldest + 1, lost.steps + 1)
    assert {step: lost.figures[step] for step in repeated} == figures(again)
    again.delete()


@pytest.mark.release
def test_a_lost_job_goes_on_from_a_copy_of_its_checkpoints_as_if_it_had_never_ended(
    lost: LostJob, kubectl: KubectlCall, terminal: RecordedTerminal
) -> None:
    """The runbook's commands restore it. The lost job had trained all steps, the new job begins at the oldest copy."""
    must_go_on(lost, kubectl, terminal, terminal.folder / "checkpoints.tar")


@pytest.mark.release
def test_a_lost_job_goes_on_in_another_cluster(lost: LostJob, terminal: RecordedTerminal, tmp_path: Path) -> None:
    """The other cluster has a model and an operator of its own, and of the former one only the copies."""
    with installed(tmp_path / "c") as other:
        (folder := tmp_path / "terminal").mkdir()
        (folder / "kubeconfig").write_text(other.kubectl("config", "view", "--raw", "--minify", "--flatten"))
        there = RecordedTerminal.opened(folder, folder / "kubeconfig")
        there(f"kubectl config set-context --current --namespace={NAMESPACE}")
        copies = terminal.folder
        copy_in(there, other.kubectl, lost.spec["recorded"]["claimName"], copies / "recording.tar")
        must_go_on(lost, other.kubectl, there, copies / "checkpoints.tar")


def label(job: RunningJob) -> str:
    return f"{names.JOB_NAME_LABEL}={job.name}"
