"""A job with engines of both kinds, all real: one takes turns with its trainer, one has a pod and devices of its own.

Its trainer is stopped in a step, for long enough to see who generates meanwhile. An oracle judges what it has trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster import Cluster
from e2e.oracle import Witness, judge
from e2e.running_job import KubectlCall, RunningJob, wait_for
from e2e.test_kills import await_rung, under_faults

from colocated_rl_api import names
from colocated_rl_api.facts import PodFacts, TrainerState
from colocated_rl_api.ladder import MIXED
from colocated_rl_api.rungs import Rung

pytestmark = pytest.mark.release
START_S = 900  # two engines and a trainer start on two cores
STEPS_S = 600
TOKENS_S = 30.0
MAX_STALENESS = 8  # batches that may be made ahead: enough to do until somebody looks
AT_WORK = (TrainerState.ONLOADED, TrainerState.TRAINING)
READ_TOKENS = f"""
import urllib.request as u
text = u.urlopen('http://127.0.0.1:{names.METRICS_PORT}/metrics', timeout=60).read().decode()
print(sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith('colocate_gate_tokens_total')))
"""


@pytest.fixture(scope="module")
def witness(
    cluster: Cluster | None, kubectl: KubectlCall, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Witness]:
    def of_both_kinds(spec: dict[str, Any]) -> None:
        spec["replicas"] = 1
        spec["rollout"] |= {"placement": "Both", "replicas": 1, "maxStaleness": MAX_STALENESS}
        spec["weightSync"] = {"volume": {"size": "256Mi"}}
        del spec["checkpoint"]["inMemory"]

    exports = tmp_path_factory.mktemp("exports")
    with under_faults(cluster, kubectl, "mixed", of_both_kinds, exports=exports) as witness:
        yield witness


@pytest.fixture
def job(witness: Witness) -> RunningJob:
    return witness.job


def facts(job: RunningJob, pod: str) -> PodFacts:
    return PodFacts.model_validate(job.member(pod)["facts"])


def test_one_generates_while_the_trainer_has_the_device_of_the_other(cluster: Cluster, job: RunningJob) -> None:
    beside, apart = f"{job.name}-gpu-0-0", f"{job.name}-engine-0-0"

    def signal(which: str) -> None:
        assert 1 == job.signal(beside, names.GPU_CONTAINER, command_contains="colocated_rl_trainer", signal=which)

    def generated() -> float:
        return float(job.python(apart, names.AGENT_CONTAINER, READ_TOKENS))

    def is_stopped_at_work() -> bool:
        """Return whether the step had not ended before the signal came, which took a second."""
        await_rung(cluster, job, Rung.RELEASED)
        signal("SIGSTOP")
        (trainer,) = facts(job, beside).trainers
        if trainer.state not in AT_WORK:
            signal("SIGCONT")
        return trainer.state in AT_WORK

    wait_for("a trainer at work", is_stopped_at_work, deadline_s=STEPS_S, explain=job.describe)
    try:
        before, (engine,) = generated(), facts(job, beside).engines
        assert (False, True) == (facts(job, beside).gate.open, engine.is_released)
        wait_for("tokens", lambda: generated() > before, deadline_s=TOKENS_S, explain=job.describe)
        stands = facts(job, apart)
        (version,) = {each.version for each in stands.engines}
        assert stands.gate.open
        assert version is not None
        assert version.step == job.status["targetStep"] - 1, "weights of the step before"
        assert facts(job, beside).trainers[0].state in AT_WORK
    finally:
        signal("SIGCONT")


def test_it_completes_and_every_token_is_of_the_weights_that_it_names(witness: Witness, job: RunningJob) -> None:
    job.end_soon()
    job.wait_for_condition("Complete", deadline_s=STEPS_S)
    status = job.status
    assert ("Mixed", f"{job.step}-1", 0) == tuple(status[name] for name in ("placement", "weightVersion", "restarts"))
    judge(witness, world=1, max_staleness=MAX_STALENESS)


def test_only_the_one_beside_the_trainer_gave_memory_back(job: RunningJob) -> None:
    of_engine = {"StartEngine", "Pause", "Flush", "Update", "Continue", "VerifyExport", "CheckProbe", "AwaitEngine"}
    lines = job.agent_lines("action ended")
    apart = {line.fields["action"] for line in lines if "-engine-" in line.pod}
    assert {"StartEngine", "Pause", "Flush", "Update", "Continue"} <= apart
    assert apart <= of_engine | {"AbortAll", "KillEngine", "EndPod"}
    beside = {line.fields["action"] for line in lines if "-gpu-" in line.pod}
    assert {"Release", "Resume", "Update", "Train", "Export", "Offload"} <= beside
    removed = {line.pod for line in lines if line.fields["action"] == "RemoveExports"}
    assert {f"{job.name}-gpu-0-0"} == removed


def test_the_other_was_interrupted_once_the_trainer_had_left_its_device(job: RunningJob) -> None:
    of_all = job.agent_lines()
    for step in range(1, job.step + 1):
        of_step = [line for line in of_all if line.fields.get("step") == step]
        lines = [line for line in of_step if line.event == "rung reached"]
        for pod in ("-gpu-", "-engine-"):
            rungs = [Rung(line.fields["rung"]) for line in lines if pod in line.pod]
            assert sorted(rungs, key=MIXED.place) == rungs, f"step {step}"
        (left,) = [line.ts for line in lines if "-gpu-" in line.pod and line.fields["rung"] == Rung.OFFLOADED]
        paused = [
            line.ts - line.fields["took_s"]
            for line in of_step
            if "-engine-" in line.pod and (line.event, line.fields.get("action")) == ("action ended", "Pause")
        ]
        assert len(paused) == 1
        assert left <= paused[0], f"step {step}"


def test_both_held_the_same_weights_of_each_version(job: RunningJob) -> None:
    held = {version: {*checksums} for version, checksums in job.checksums().items()}
    assert {1} == {len(checksums) for checksums in held.values()}
    assert len(held) == len(set.union(*held.values()))
