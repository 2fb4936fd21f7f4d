"""A job on prompts, rewards and filters of one's own, whose reward function is up to no good."""

from __future__ import annotations

import json
from typing import Any

import pytest
from e2e.conftest import OPERATOR_NAMESPACE, apply
from e2e.running_job import KubectlCall, RunningJob

from colocated_rl_api import names
from colocated_rl_api.ladder import SCORED_TIME_SLICED
from colocated_rl_api.rungs import Rung

pytestmark = pytest.mark.slow

DONE_S = 1200  # an engine and a trainer start, three steps
ROWS = 20  # of each source: one in ten is held out, and of the others the filter keeps half
STEPS = 3  # of 8 groups; the last of those that are left, one or two: judging the first one fails, whichever it is
OF_USERS = ("State the final answer", "Answer:", "CANARY")  # in each prompt, in good responses, in variables of pods


def test_job_trains_on_a_mix_and_its_reward_function_gets_no_keys_store_or_answer(kubectl: KubectlCall) -> None:
    job = apply(kubectl, "own-prompts.yaml")
    job.wait_for_condition("Complete", deadline_s=DONE_S)
    assert_ended_with_its_prompts(job)
    assert 0 <= job.status["rollout"]["reward"] <= 1
    assert job.status["rollout"]["filtered"]["making:odd"] > 0
    lines = of_rewards(job)
    made = {line["made"] for line in lines if "made" in line}
    assert made, "no row that the function made was rewarded"
    assert made <= {*range(ROWS)}
    found: dict[str, Any] = next(line["spied"] for line in lines if "spied" in line)
    assert not found.pop("target").startswith("HTTP"), "without a certificate there is no answer"
    [(link, generation)] = found.pop("agents").values()
    assert not link.startswith("HTTP"), "nor from an agent, for who would send it a target"
    assert "HTTP/1.1 401 Unauthorized" == generation
    assert {
        "files": [],
        "writable": [],
        "processes": [],
        "variables": [],
        "batch": "HTTP/1.1 401 Unauthorized",
    } == found
    assert_scored(job)
    assert_nothing_of_users_is_shown(job, kubectl)
    job.delete()


def assert_ended_with_its_prompts(job: RunningJob) -> None:
    status = job.status
    assert (STEPS, STEPS) == (status["step"], status["rollout"]["lastStep"])
    (done,) = (each["message"] for each in status["conditions"] if each["type"] == "Complete")
    assert done.startswith(f"all {STEPS} steps are done; the model is in ")
    *full, last = (line.fields["groups"] for line in job.rollout_lines("batch sealed"))
    assert [8, 8] == full
    assert last in (1, 2)
    assert 4 * sum((*full, last)) == status["rollout"]["samples"]["trained"]
    assert {"filtered", "failed", "trained"} >= {*status["rollout"]["samples"]}, "none is left"


def assert_scored(job: RunningJob) -> None:
    """Its reference saw each batch before the step, and the step measured how far the policy has gone."""
    for step in range(1, STEPS + 1):
        rungs = [Rung(line.fields["rung"]) for line in job.rungs(step)]
        assert sorted(rungs, key=SCORED_TIME_SLICED.place) == rungs, f"step {step}"
        assert {Rung.RELEASED, Rung.SCORED, Rung.TRAINED} <= {*rungs}, f"step {step}"
    actions = [line.fields["action"] for line in job.agent_lines("action ended")]
    assert ["Score", "Train"] * STEPS == [action for action in actions if action in ("Score", "Train")]
    first, *later = (line.fields["metrics"]["kl"] for line in job.agent_lines("step trained"))
    assert abs(first) < 1e-6, "the policy begins as its reference"
    assert all(0 < divergence for divergence in later), "and has moved since"


def assert_nothing_of_users_is_shown(job: RunningJob, kubectl: KubectlCall) -> None:
    """No prompt, response or variable reaches what admins read, although a reward function raises all of them."""
    rollout, operator = names.ROLLOUT_CONTAINER, ("-n", OPERATOR_NAMESPACE, "logs", "deploy/colocated-rl")
    shown = {
        "events": job.kubectl("get", "events", "-o", "json"),
        "status": json.dumps(job.status),
        "the operator's log": kubectl(*operator, "--tail=-1"),
        "the rollout controller's log": job.kubectl("logs", job.rollout_pod, "-c", rollout),
        **{pod: job.kubectl("logs", pod, "-c", names.AGENT_CONTAINER) for pod in job.gpu_pods},
    }
    assert [True, True] == [f"{part}Failed" in shown["the rollout controller's log"] for part in ("Verifier", "Filter")]
    assert not [(place, word) for place, text in shown.items() for word in OF_USERS if word in text]


def of_rewards(job: RunningJob) -> list[dict[str, Any]]:
    """Return what the two reward functions wrote into the log of their container."""
    log = job.kubectl("logs", job.rollout_pod, "-c", names.REWARDS_CONTAINER)
    return [json.loads(line) for line in log.splitlines() if line.startswith(('{"made"', '{"spied"'))]
