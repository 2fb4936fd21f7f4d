"""A job whose engine has a pod of its own beside two of trainers, all real, and in it a reference. Both are lost once.

Its users are of a namespace's range, and beside its engine a container fails again and again.

It ends once it has done a step without a loss, however quick it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.conftest import apply
from e2e.running_job import KubectlCall, RunningJob, wait_for

from colocated_rl_api import names
from colocated_rl_api.ladder import DISAGGREGATED
from colocated_rl_api.rungs import Rung

pytestmark = pytest.mark.slow

START_S = 900  # an engine and two trainers start on two cores
STEPS_S = 900  # another engine too
IDS = "import json, os; print(json.dumps([os.getuid(), os.getgid(), open('/opt/note/user').read().strip()]))"


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall) -> Iterator[RunningJob]:
    running = apply(kubectl, "disaggregated.yaml")
    yield running
    running.delete()


def test_a_job_with_engines_in_pods_of_their_own_completes_though_one_is_lost(job: RunningJob) -> None:
    job.wait_for_step(1, deadline_s=START_S)
    found = json.loads(job.python(f"{job.name}-engine-0-0", names.GPU_CONTAINER, IDS))
    assert [1000660000, 1000670000, "1000660000"] == found, "of the range, in the job's own container too"
    lose_the_reference(job)
    job.kubectl("delete", "pod", f"{job.name}-engine-0-0", "--wait=false")
    made_again = [f"{job.name}-engine-0-1"]
    wait_for("another engine's pod", lambda: made_again == engines(job), deadline_s=START_S, explain=job.describe)
    fail_beside_the_engine(job)
    job.change(steps=job.status["targetStep"] + 1)  # it comes back in an earlier one than the last
    job.wait_for_condition("Complete", deadline_s=STEPS_S)
    status = job.status
    assert ("Disaggregated", f"{job.step}-1", 0) == tuple(
        status[name] for name in ("placement", "weightVersion", "restarts")
    )
    assert made_again == engines(job)
    assert 2 == len(job.pods(names.ROLE_TRAINER))


def lose_the_reference(job: RunningJob) -> None:
    """Kill the reference's process: it comes again, and nothing else of its pod has noticed."""
    pod = f"{job.name}-engine-0-0"

    def loaded() -> int:
        return len([line for line in job.lines(pod, names.AGENT_CONTAINER) if line.event == "reference loaded"])

    def engine() -> dict[str, Any]:
        found: dict[str, Any] = job.member(pod)["facts"]["engines"][0]
        return {name: found[name] for name in ("incarnation", "failures")}

    before = loaded(), engine()
    assert 1 == job.signal(pod, names.GPU_CONTAINER, command_contains="ref_policy", signal="SIGKILL")
    wait_for("the reference again", lambda: loaded() > before[0], deadline_s=START_S, explain=job.describe)
    assert before[1] == engine()


def fail_beside_the_engine(job: RunningJob) -> None:
    """Have the sidecar of the engine's pod fail, now and at each of its starts: the job goes on beside it."""

    def state() -> dict[str, Any]:
        [pod] = job.pods(names.ROLE_ENGINE)
        status = pod["status"]
        containers = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
        return {each["name"]: each for each in containers}

    def is_up() -> bool:
        return state().get(names.GPU_CONTAINER, {}).get("ready", False) is True

    wait_for("a GPU container that runs", is_up, deadline_s=START_S, explain=job.describe)
    job.python(engines(job)[0], names.GPU_CONTAINER, "open('/opt/note/fail', 'w').close()")
    wait_for(
        "a sidecar that fails", lambda: state()["fails"]["restartCount"] > 0, deadline_s=START_S, explain=job.describe
    )


def test_what_failed_beside_the_engine_ended_nothing_else(job: RunningJob) -> None:
    [engine] = job.pods(names.ROLE_ENGINE)
    status = engine["status"]
    restarts = {
        each["name"]: each["restartCount"] for each in (*status["initContainerStatuses"], *status["containerStatuses"])
    }
    assert restarts.pop("fails") > 0
    assert {"writes": 0, "runner": 0, "agent": 0, "gpu": 0} == restarts


def engines(job: RunningJob) -> list[str]:
    return [pod["metadata"]["name"] for pod in job.pods(names.ROLE_ENGINE)]


def test_trainers_never_touched_an_engine_nor_engines_a_trainer(job: RunningJob) -> None:
    of_engine = {"StartEngine", "Pause", "Flush", "Update", "Continue"}
    of_trainers = {"StartTrainers", "Train", "Export", "Save"}
    for line in job.agent_lines("action ended"):
        assert line.fields["action"] not in (of_trainers if "-engine-" in line.pod else of_engine), line
    assert not {"Release", "Resume", "Offload"} & {line.fields["action"] for line in job.agent_lines("action ended")}


def test_gates_closed_only_for_weights_that_were_written(job: RunningJob) -> None:
    """This is checked in the last step, because an engine that comes back in an earlier one starts on its weights."""
    lines = list(job.rungs(job.step))
    written = [line.ts for line in lines if "-trainer-" in line.pod and line.fields["rung"] == Rung.SERVING]
    engine = [line for line in lines if "-engine-" in line.pod]
    left = [line.ts for line in engine if DISAGGREGATED.reaches(Rung(line.fields["rung"]), Rung.CLOSED)]
    assert 2 == len(written)
    assert max(written) < min(left)
    rungs = [Rung(line.fields["rung"]) for line in engine]
    assert sorted(rungs, key=DISAGGREGATED.place) == rungs
    assert {Rung.EXPORTED, Rung.UPDATED, Rung.SERVING} <= {*rungs}


def test_batches_came_to_the_trainers_with_the_references_scores_of_them(job: RunningJob) -> None:
    """The reference beside the engine computed them, and in step 1 they are those of the trainer's own forward pass."""
    trained = job.agent_lines("step trained")
    divergence = {line.fields["step"]: line.fields["metrics"]["kl"] for line in trained}
    assert {*range(1, job.step + 1)} == {*divergence}
    assert abs(divergence[1]) < 1e-6, "the policy begins as its reference"
    assert 0 < divergence[job.step], "and has moved since"
    assert not [line for line in job.agent_lines("action ended") if line.fields["action"] == "Score"]
    assert Rung.SCORED not in {Rung(line.fields["rung"]) for line in job.agent_lines("rung reached")}
    assert "WithRollout" == job.status["reference"]["placement"]


def test_weights_were_written_once_for_all(job: RunningJob) -> None:
    removed = {line.pod for line in job.agent_lines("action ended") if line.fields["action"] == "RemoveExports"}
    assert {f"{job.name}-trainer-0-0"} == removed


def test_it_leaves_its_model_beside_its_checkpoints(job: RunningJob) -> None:
    assert f"{job.name}-checkpoints-{job.uid[:8]}/model-{job.step:08}" == job.status["model"]
