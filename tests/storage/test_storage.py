"""Whole jobs, all real, on volumes with an end and on volumes that are shared through a file system in user space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster import Cluster
from documents.blocks import under
from e2e.conftest import NAMESPACE, apply
from e2e.running_job import KubectlCall, RunningJob, wait_for
from e2e.terminal import RecordedTerminal
from full_disk import FILL

from colocated_rl_api import names

START_S = 900  # an engine and a trainer start on two cores
STEPS_S = 600
SMALL = {"size": "320Mi", "storageClassName": "sized"}  # XFS takes no less, and 80 MiB of it
LEFT_BYTES = 40 << 20  # less than the controller keeps for what it has accepted
PAGE = "docs/runbooks/store-near-full.md"
SHARED = {"size": "1Gi", "storageClassName": "network"}
MOUNTED = "import sys; print([line.split()[2] for line in open('/proc/mounts') if line.split()[1] == sys.argv[1]])"


@pytest.fixture(scope="module")
def small(kubectl: KubectlCall) -> Iterator[RunningJob]:
    job = apply(kubectl, "one-pod.yaml", storage={"volume": SMALL}, checkpoint={"everySteps": 1, "volume": SMALL})
    job.wait_for_step(1, deadline_s=START_S)
    yield job
    job.delete()


@pytest.fixture(scope="module")
def terminal(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> RecordedTerminal:
    opened = RecordedTerminal.opened(tmp_path_factory.mktemp("terminal"), cluster.kubeconfig)
    opened(f"kubectl config set-context --current --namespace={NAMESPACE}")
    return opened


def starts(job: RunningJob) -> dict[str, Any]:
    """Count the starts of each container, by pod."""
    pods = job.pods(names.ROLE_GPU, names.ROLE_ROLLOUT)
    return {
        pod["metadata"]["uid"]: {each["name"]: each["restartCount"] for each in pod["status"]["containerStatuses"]}
        for pod in pods
    }


def expand(job: RunningJob, terminal: RecordedTerminal, volume: str, size: str) -> None:
    """Type the command of the page with another size: the page's would have to be filled again."""
    [command] = under(PAGE, "What to do")
    claim = names.claim_name(job.name, names.JobUid(job.uid), volume)
    terminal(command.replace("20Gi", size), CLAIM=claim)


def wait_until_told(job: RunningJob, terminal: RecordedTerminal, word: str) -> None:
    def is_told() -> bool:
        return word in terminal("kubectl crlj explain JOB || true", JOB=job.name)  # it fails where something is wrong

    wait_for(word, is_told, deadline_s=STEPS_S, explain=job.describe)


def test_a_job_whose_store_is_nearly_full_goes_on_once_its_claim_is_expanded_as_the_runbook_says(
    small: RunningJob, terminal: RecordedTerminal
) -> None:
    before, pod = starts(small), small.rollout_pod
    small.python(pod, names.ROLLOUT_CONTAINER, FILL, names.STATE_DIR, str(LEFT_BYTES))
    wait_until_told(small, terminal, "StoreFull")
    *looks, _ = under(PAGE, "What to look at")  # and `explain`
    for look in looks:
        assert terminal(look, JOB=small.name, POD=pod)
    stood = small.step
    expand(small, terminal, "store", "500Mi")
    small.wait_for_step(stood + 2, deadline_s=STEPS_S)
    assert before == starts(small), "nothing restarts"
    assert 0 == small.status["restarts"]


def test_a_store_without_a_byte_left_loses_nothing(small: RunningJob, terminal: RecordedTerminal) -> None:
    """Its controller waits, or ends where it can commit nothing. Either says why, and goes on once there is room."""
    before, pod = starts(small), small.rollout_pod
    assert "No space left" in small.python(pod, names.ROLLOUT_CONTAINER, FILL, names.STATE_DIR, "0")
    wait_until_told(small, terminal, "volume is full")
    stood = small.step
    expand(small, terminal, "store", "600Mi")
    small.wait_for_step(stood + 2, deadline_s=STEPS_S)
    steps = [line.fields["step"] for line in small.agent_lines("step trained")]
    assert steps == [*range(1, len(steps) + 1)], "each step is trained once"
    assert 0 == small.status["restarts"]
    [gpu] = [pod["metadata"]["uid"] for pod in small.pods(names.ROLE_GPU)]
    assert before[gpu] == starts(small)[gpu]


def test_a_checkpoint_that_finds_no_room_is_written_once_its_claim_is_expanded(
    small: RunningJob, terminal: RecordedTerminal
) -> None:
    before, [pod] = starts(small), small.gpu_pods
    assert "No space left" in small.python(pod, names.GPU_CONTAINER, FILL, names.CHECKPOINT_DIR, "0")
    wait_until_told(small, terminal, "CheckpointNotWritten")
    stood = small.step
    expand(small, terminal, "checkpoints", "500Mi")
    small.wait_for_step(stood + 2, deadline_s=STEPS_S)
    assert before == starts(small), "nothing restarts"
    assert 0 == small.status["restarts"]
    small.end_soon()
    small.wait_for_condition("Complete", deadline_s=STEPS_S)


def test_weights_checkpoints_and_samples_lie_on_a_file_system_in_user_space(kubectl: KubectlCall) -> None:
    """Trainers start again there, and read what they had written."""
    checkpoint = {"everySteps": 1, "volume": SHARED}
    shared = {"volume": SHARED}
    job = apply(kubectl, "disaggregated.yaml", weightSync=shared, storage=shared, checkpoint=checkpoint)
    job.wait_for_step(2, deadline_s=START_S)
    engine = f"{job.name}-engine-0-0"
    assert "['fuse.network']" == job.python(engine, names.GPU_CONTAINER, MOUNTED, names.WEIGHTS_DIR).strip()
    lost = job.pods(names.ROLE_TRAINER)[0]["metadata"]["name"]
    job.kubectl("delete", "pod", lost, "--wait=false")
    wait_for(
        "weights of other trainers",
        lambda: job.status["weightVersion"].endswith("-2"),
        deadline_s=START_S,
        explain=job.describe,
    )
    job.end_soon()
    job.wait_for_condition("Complete", deadline_s=STEPS_S)
    job.delete()
