"""The wall clock of a running process is set an hour forward and back, as NTP may do: nothing expires, all goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from integration.test_rollout_process import lines, running
from real_world import open_real_world
from waiting import until

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_operator.clients.cluster import ClusterAccess
from fakes.gate import FakeGate
from fakes.pod import PodGroup, make_job, network, pod
from fakes.preloaded import HOUR_S, WallClock
from fakes.rollout import JobOnDisk, WorkedSums, make_spec
from fakes.tasks import task_server
from real_operator import JOBS

TESTS = Path(__file__).parents[1]
JOB_S = 120.0
PATCH = "application/merge-patch+json"


@pytest.fixture
def clock(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> WallClock:
    """Return the clock of all processes that a test starts."""
    clock = WallClock(tmp_path_factory.mktemp("clock"))
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    return clock


def test_a_process_has_the_clock_that_a_test_sets(clock: WallClock) -> None:
    clock.set(-HOUR_S)
    program = "import datetime, time; print(time.time(), datetime.datetime.now().timestamp())"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    now = datetime.now(UTC)
    for seconds in map(float, output.split()):
        assert timedelta(0) <= now - timedelta(hours=1) - datetime.fromtimestamp(seconds, UTC) < timedelta(minutes=5)


async def test_an_agent_whose_clock_is_set_serves_on_and_takes_the_operators_next_connection(
    tmp_path_factory: pytest.TempPathFactory, clock: WallClock
) -> None:
    async with network(tmp_path_factory.mktemp("n")) as net, pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(WeightVersion(0, 1))
        for step, ahead_s in ((1, HOUR_S), (2, -HOUR_S)):
            clock.set(ahead_s)
            await it.unlink()
            await it.link()
            await group.climb(WeightVersion(step, 1))
            assert 200 == (await it.generate(input_ids=[1], sampling_params={"max_new_tokens": 2}))[0]
        assert 1 == len({facts.engines[0].incarnation for facts in it.facts if not facts.engines[0].is_absent})
        assert [] == [facts.problem for facts in it.facts if facts.problem]


async def test_a_rollout_controller_whose_clock_is_set_seals_on_and_discards_nothing(
    tmp_path: Path, clock: WallClock
) -> None:
    job = JobOnDisk.write(tmp_path, make_spec())
    async with AsyncExitStack() as stack:
        stack.enter_context(task_server(tmp_path, path=job.tasks))
        gate = FakeGate("job-gpu-0-0", job.tls, WorkedSums(job.directory / "model"))
        await stack.enter_async_context(gate.listening())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        controller = await stack.enter_async_context(running(job))
        await controller.operator.send(1, [gate.endpoint])
        await gate.open(WeightVersion(0, 1), pace=4)
        await until(lambda: gate.in_flight == 6)
        for step, ahead_s in ((1, HOUR_S), (2, -HOUR_S)):
            clock.set(ahead_s)
            await gate.close()
            await gate.open(WeightVersion(step - 1, 1))
            async with job.operator(controller.control_port) as operator:
                await operator.send(step, [gate.endpoint], trained_step=step - 1)
                await operator.until(lambda facts, step=step: facts.sealed and facts.sealed.step == step)  # type: ignore[misc]
            assert 200 == (await job.fetch(session, controller.data_port, f"/v1/batches/{step}?shard=0"))[0]
        assert [] == lines(controller.log, "gate lost")
        sealed = lines(controller.log, "batch sealed")
        assert ([6, 6], 6) == ([line["samples"] for line in sealed], sealed[0]["resumed_samples"])


def test_certificates_of_a_running_job_are_renewed_again_and_again_and_no_connection_ends(
    tmp_path: Path, clock: WallClock
) -> None:
    """A job's certificate lasted five years, nothing renewed it, and nobody was told when it would end.

    Those of a clock that was months ahead for a moment stayed, and no new connection took them for valid.
    """
    program = [sys.executable, "-m", "fakes.aging_job", str(tmp_path), "21", "42", "63", "0"]
    output = subprocess.run(program, capture_output=True, text=True, cwd=TESTS, timeout=JOB_S, check=True).stdout
    *after, end = json.loads(output.splitlines()[-1])
    for each in after:
        assert (True, 0) == (each["same_links"], each["lost"])
        assert 29.5 < each["days_left"] < 30.5
    assert {"restarts": 0, "trained": {"1": [1, 2, 3]}} == end


@pytest.mark.cluster
async def test_an_operator_whose_clock_is_set_ends_no_job_and_deletes_none(
    access: ClusterAccess, tmp_path: Path, clock: WallClock
) -> None:
    """It keeps its Lease too, and whoever is asked again about the job has looked at its deadlines."""
    spec = {"replicas": 2, "steps": 2, "activeDeadlineSeconds": 2 * HOUR_S, "ttlSecondsAfterFinished": 2 * HOUR_S}
    async with open_real_world(access, tmp_path, spec) as world, world.operator() as operator:

        async def look_again(**changes: int) -> None:
            changed = await world.api.call("PATCH", f"{JOBS}/sums", {"spec": changes}, PATCH)
            generation = changed["metadata"]["generation"]
            await world.until(lambda: world.status.get("observedGeneration") == generation)

        world.stay_in_rollout()
        await world.until(lambda: world.status.get("phase") == "Rollout")
        for number, ahead_s in enumerate((3 * HOUR_S, -3 * HOUR_S)):
            clock.set(ahead_s)
            await look_again(backoffLimit=7 + number)
            assert "Rollout" == world.status["phase"]
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
        for number, ahead_s in enumerate((3 * HOUR_S, -3 * HOUR_S)):
            clock.set(ahead_s)
            await look_again(ttlSecondsAfterFinished=2 * HOUR_S - 1 - number)
            assert world.is_complete
        assert [1] == list(world.group.trained_in)
        assert 1 == len(operator.logged("lease taken"))
        assert [] == operator.logged("process aborted")
