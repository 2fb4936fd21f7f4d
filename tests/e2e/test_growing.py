"""A job in two pods whose trainers leak host memory, that loses one, and goes on in three: real engines and ranks.

It ends once it was looked into, however quick it is: a complete job has no engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import yaml
from e2e.conftest import NAMESPACE, SCENARIOS
from e2e.running_job import KubectlCall, RunningJob, wait_for

from colocated_rl_operator.planner.reasons import Cause

pytestmark = pytest.mark.release  # `make test-slow`
START_S = 900  # engines and trainers of two pods, and of a third, start on two cores
STEPS_S = 600
NAME = "growing"
LEAKING_TRAINER = """
from colocated_rl_trainer.grpo.loop import GRPOTrainer
from colocated_rl_trainer.protocol.rank_server import serve
from colocated_rl_trainer.protocol.settings import TrainerConfig

class LeakingTrainer(GRPOTrainer):
    kept = []

    def train(self, step, path, watch):
        self.kept.append(bytearray(b"x") * (64 << 20))
        return super().train(step, path, watch)

serve(lambda settings: LeakingTrainer(settings, TrainerConfig.read(settings.config)))
"""


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall) -> Iterator[RunningJob]:
    manifest = yaml.safe_load((SCENARIOS / "two-pods.yaml").read_text())
    manifest["metadata"]["name"] = NAME
    manifest["spec"]["trainer"]["command"] = ["python3", "-c", LEAKING_TRAINER]
    del manifest["spec"]["checkpoint"]["inMemory"]  # a step that is saved is not in another pod's memory
    manifest["spec"]["failurePolicy"] = {"maxTrainerGrowth": "100Mi"}
    kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=yaml.safe_dump(manifest))
    running = RunningJob(kubectl, namespace=NAMESPACE, name=NAME)
    yield running
    running.delete()


def test_trainers_that_leak_start_again_between_two_steps(job: RunningJob) -> None:
    """Each has gained more than the limit after its third step; a checkpoint comes with every fourth."""
    job.wait_for_step(1, deadline_s=START_S)
    recycled = wait_for(
        "the trainers to start again",
        lambda: status if (status := job.status)["cause"] == Cause.TRAINERS_RECYCLED else None,
        deadline_s=STEPS_S,
        explain=job.describe,
    )
    job.wait_for_step(recycled["targetStep"] + 1, deadline_s=STEPS_S)
    assert 0 == job.status["restarts"]
    assert {2} == {*steps_trained(job, until=job.step).values()}, "each step once by each rank"
    assert 2 == len(job.agent_lines("engine started")), "engines went on"


def test_a_pod_that_is_deleted_while_its_group_rests_takes_no_step_with_it(job: RunningJob) -> None:
    """An evaluation keeps the group where it stands, behind a step of which no checkpoint is due."""
    whole = {"everySteps": 1, "sets": [{"name": "held-out", "samples": 512}], "deadlineSeconds": 900}
    job.change(evaluation=whole)
    survivor, victim = job.gpu_pods

    def rests() -> int | None:
        facts = job.member(victim)["facts"]
        step, saved = facts["trainers"][0]["step"], facts["trainers"][0]["saved"] or 0
        return step if facts["gate"]["open"] and step % 4 and saved < step else None

    step = wait_for("an evaluation to begin", rests, deadline_s=STEPS_S, explain=job.describe)
    before = job.status
    job.kubectl("delete", "pod", victim, "--wait=false")
    job.change(evaluation=whole | {"everySteps": 1000})
    job.wait_for_step(step + 1, deadline_s=START_S)
    assert (before["lineage"] + 1, 0) == (job.status["lineage"], job.status["restarts"])
    lines = [line for line in job.agent_lines("step trained") if line.pod == survivor]
    assert {1} == {*Counter(line.fields["step"] for line in lines).values()}, "no step is trained again"
    assert step in [line.fields["step"] for line in job.agent_lines("checkpoint saved")]


def test_a_job_that_runs_takes_a_third_rank_in_at_a_step_boundary(job: RunningJob) -> None:
    """The third pod's engine generates and its rank trains with the next step that it was there for."""
    job.wait_for_step(1, deadline_s=START_S)
    lineage, began = job.status["lineage"], job.step + 1  # former steps are in the log of a pod that is gone
    job.change(replicas=3)
    joined = wait_for(
        "three ranks to train a step",
        lambda: next((step for step, ranks in steps_trained(job, until=job.step).items() if ranks == 3), None),
        deadline_s=START_S,
        explain=job.describe,
    )
    job.wait_for_step(joined + 1, deadline_s=STEPS_S)
    done = job.step
    trained = {step: ranks for step, ranks in steps_trained(job, until=done).items() if step >= began}
    assert {step: 2 if step < joined else 3 for step in range(began, done + 1)} == trained
    assert [f"{NAME}-gpu-{replica}" for replica in range(3)] == [pod.rpartition("-")[0] for pod in job.gpu_pods]
    job.end_soon()
    job.wait_for_condition("Complete", deadline_s=STEPS_S)
    status = job.status
    assert (f"{job.step}-{status['lineage']}", 0) == (status["weightVersion"], status["restarts"])
    assert status["lineage"] > lineage
    assert {3} == {len({line.pod for line in job.agent_lines("engine started")})}


def steps_trained(job: RunningJob, *, until: int) -> Counter[int]:
    """Return how many ranks have trained each step, of those that are over."""
    steps = (int(line.fields["step"]) for line in job.agent_lines("step trained"))
    return Counter(step for step in steps if step <= until)
