"""One pod with two real engines and a real trainer, in turns. One engine is killed while the other generates.

It ends once it was looked into, however quick it is: a complete job has no engines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from e2e.conftest import apply
from e2e.running_job import KubectlCall, RunningJob, wait_for

from colocated_rl_api.facts import EngineState
from colocated_rl_api.names import GPU_CONTAINER

pytestmark = pytest.mark.release  # `make test-slow`
START_S = 900  # two engines and a trainer start on two cores
STEPS_S = 600
KILLED = "engine-1"
CLOCK_S = 0.1  # a line's moment is that of its writing


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall) -> Iterator[RunningJob]:
    running = apply(kubectl, "several-engines.yaml")
    yield running
    running.delete()


def ready(job: RunningJob) -> set[str]:
    engines = job.member(job.gpu_pods[0])["facts"]["engines"]
    return {engine["name"] for engine in engines if engine["state"] == EngineState.READY}


def test_it_trains_on_while_one_of_its_engines_is_killed_and_comes_back(job: RunningJob) -> None:
    job.wait_for_step(1, deadline_s=START_S)
    assert {"engine-0", KILLED} == ready(job)
    step = job.step
    assert job.signal(job.gpu_pods[0], GPU_CONTAINER, command_contains=f"{KILLED}.yaml", signal="SIGKILL")
    wait_for("the loss", lambda: job.agent_lines("engine lost") or None, deadline_s=STEPS_S, explain=job.describe)
    job.wait_for_step(step + 2, deadline_s=STEPS_S)
    wait_for(
        "both engines",
        lambda: True if ready(job) == {"engine-0", KILLED} else None,
        deadline_s=STEPS_S,
        explain=job.describe,
    )


def test_f94_a_batch_that_is_full_waits_out_its_time_in_rollout(job: RunningJob) -> None:
    """The log says when gates opened after each batch. Its two engines fill one in less than half of that time."""
    sealed = {line.fields["step"]: line.ts for line in job.rollout_lines("batch sealed")}
    opened = [line.ts for line in job.rollout_lines("gate open")]
    least_s = job.get()["spec"]["rollout"]["minRolloutSeconds"]
    assert len(sealed) > 2
    for step in range(2, max(sealed) + 1):
        began = min(moment for moment in opened if moment > sealed[step - 1])
        assert sealed[step] - began >= least_s - CLOCK_S, f"step {step}"


def test_f91_what_a_switch_interrupted_reaches_the_engines_first(job: RunningJob) -> None:
    """Their own logs tell: a response that goes on has less left than a whole one.

    A group with older tokens goes before others with all its samples, also those that were cut before their first
    token, and two engines log at their own pace: so nothing new may come among the first half of those that go on.
    Where an engine was lost, its requests go on in the middle.
    """
    limit, came = job.get()["spec"]["rollout"]["maxResponseTokens"], received(job)
    opened = [line.ts for line in job.rollout_lines("gate open")]
    lost = [line.ts for line in job.agent_lines("engine lost")]
    seen = 0
    for since, until in pairwise([*opened, math.inf]):
        if not any(since <= moment < until for moment in lost):
            goes_on = [tokens < limit for moment, tokens in came if since <= moment < until]
            interrupted = sum(goes_on)
            assert all(goes_on[: (interrupted + 1) // 2]), "".join(".x"[each] for each in goes_on)
            seen += interrupted
    assert seen, "no switch interrupted anything"


def received(job: RunningJob) -> list[tuple[float, int]]:
    """Return when requests for samples came to engines, and how many tokens each could have; in that order."""
    found = []
    for line in job.kubectl("logs", job.gpu_pods[0], "-c", GPU_CONTAINER).splitlines():
        _, start, rest = line.partition('{"timestamp": ')
        if start and '"event": "request.received"' in rest:
            logged = json.loads(start + rest)
            sampling = logged["obj"]["sampling_params"]
            if "stop_token_ids" in sampling:  # the agent's own requests have none
                moment = datetime.fromisoformat(logged["timestamp"]).replace(tzinfo=UTC).timestamp()
                found.append((moment, int(sampling["max_new_tokens"])))
    return sorted(found)


def test_it_completes_without_a_restart(job: RunningJob) -> None:
    job.end_soon()
    job.wait_for_condition("Complete", deadline_s=STEPS_S)
    assert (f"{job.step}-1", 0) == (job.status["weightVersion"], job.status["restarts"])
    assert [KILLED] == [line.fields["engine"] for line in job.agent_lines("engine lost")]
    killed = [line.fields for line in job.agent_lines("engine killed") if line.fields["reason"] != "the pod ends"]
    assert {KILLED} >= {fields["engine"] for fields in killed}, [fields["reason"] for fields in killed]
    assert ["engine-0", KILLED, KILLED] == sorted(line.fields["engine"] for line in job.agent_lines("engine started"))


def test_its_engines_held_the_same_weights_in_each_version(job: RunningJob) -> None:
    held = job.checksums()
    assert {f"{step}-1" for step in range(job.step + 1)} == {*held}
    assert {1} == {len({*checksums}) for checksums in held.values()}
    assert 2 <= max(len(checksums) for checksums in held.values()), "each engine is asked"
