"""`kubectl crlj fault` against the real agent and the real runner: the CLI's own request, through a port-forward."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from colocated_rl_agent.faults import Faults
from colocated_rl_api import names
from colocated_rl_api.facts import EngineState, TrainerState
from colocated_rl_api.faults import PATH, FaultKind, InjectedFault
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_cli.base.errors import Exit
from colocated_rl_cli.parser import FAULTS
from fakes.cluster_api import ClusterApi
from fakes.kubectl import Played, play_kubectl
from fakes.pod import DEADLINE_S, Network, PodGroup, PodProcesses, make_job, network, pod

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)
TAKEN = {names.ENV_FAULTS: names.FAULTS_TAKEN}


@pytest.fixture
async def net(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    async with network(tmp_path_factory.mktemp("n")) as it:
        yield it


@asynccontextmanager
async def reached(it: PodProcesses, tmp_path: Path) -> AsyncIterator[Played]:
    """A cluster in which the job has this pod."""
    labels = {names.ROLE_LABEL: names.ROLE_GPU}
    listed = {"metadata": {"name": it.name, "labels": labels}, "status": {"phase": "Running"}}
    api = ClusterApi(jobs={"sums": {"metadata": {"name": "sums"}}}, pods=[listed], members={it.name: it.pages})
    with play_kubectl(api, tmp_path) as played:
        yield played


async def fault(played: Played, *words: str) -> tuple[int, str]:
    """`kubectl crlj fault sums`: its exit code, and what it printed."""
    command = (sys.executable, "-m", "colocated_rl_cli", "fault", "sums", *words)
    done = await asyncio.create_subprocess_exec(*command, env=played.environment, stdout=PIPE, stderr=STDOUT)
    printed, _ = await done.communicate()
    assert done.returncode is not None
    return done.returncode, printed.decode()


def test_the_command_line_knows_each_fault_and_no_other() -> None:
    assert [*FaultKind] == [*FAULTS]


async def test_f97_what_a_person_crashes_is_made_again_and_a_closed_gate_opens_later(
    net: Network, tmp_path: Path
) -> None:
    async with pod(net, make_job(), environment=TAKEN) as it, reached(it, tmp_path) as played:
        group = PodGroup([it])
        code, printed = await fault(played, FaultKind.ENGINE_CRASH)
        assert (Exit.NO_ANSWER, True) == (code, "no engine runs in this pod now" in printed)
        await group.climb(V0)
        assert it.now is not None
        first = it.now.engines[0].incarnation
        for body in ("{}", '{"kind": "flood"}', '{"kind": "gate-closed", "seconds": 0}'):
            async with net.session.post(f"http://127.0.0.1:{it.pages}{PATH}", data=body) as answer:
                assert 400 == answer.status

        assert Exit.FINE == (await fault(played, FaultKind.ENGINE_CRASH))[0]
        again = await it.until(
            lambda facts: facts.gate.open and facts.engines[0].incarnation != first, "another engine"
        )
        assert V0 == again.engines[0].version

        seen = len(it.facts)
        assert Exit.FINE == (await fault(played, FaultKind.GATE_CLOSED, "--seconds", "0.5"))[0]
        await it.until(
            lambda facts: facts.gate.open and not all(was.gate.open for was in it.facts[seen:]), "open again"
        )
        assert again.engines[0].incarnation == it.now.engines[0].incarnation

        assert Exit.FINE == (await fault(played, FaultKind.SLOW_WEIGHTS, "--seconds", "0.1"))[0]
        await group.climb(V1)
        assert Exit.FINE == (await fault(played, FaultKind.TRAINER_CRASH))[0]
        await it.until(lambda facts: facts.trainers[0].state is TrainerState.ABSENT, "without its trainer")
        assert 4 == it.log.read_text().count('"fault injected"')


async def test_f97_only_the_next_update_is_slow() -> None:
    nobody: Any = None  # a slow update is no process's
    faults = Faults(nobody, nobody, nobody, close_gate=lambda: None)
    await faults._inject(InjectedFault(kind=FaultKind.SLOW_WEIGHTS, seconds=600))
    slow = asyncio.create_task(faults.slow_weights())
    await asyncio.sleep(0)  # it has begun
    assert not slow.done()
    async with asyncio.timeout(DEADLINE_S):
        await faults.slow_weights()
    assert not slow.done()
    slow.cancel()


async def test_f97_an_update_that_is_slow_waits_once_and_is_done(net: Network, tmp_path: Path) -> None:
    async with pod(net, make_job(), environment=TAKEN) as it, reached(it, tmp_path) as played:
        group = PodGroup([it])
        await group.climb(V0)
        assert Exit.FINE == (await fault(played, FaultKind.SLOW_WEIGHTS, "--seconds", "600"))[0]
        await group.set_out(V1, Rung.UPDATED, after=Rung.OFFLOADED)
        assert "/update_weights_from_disk" not in await it.engine_calls()
        await it.restart_agent()  # nothing was begun, and the next agent knows of no fault
        await group.go_on(V1)
        assert it.now is not None
        assert (EngineState.READY, V1) == (it.now.engines[0].state, it.now.engines[0].version)


async def test_f97_without_the_charts_word_nothing_is_injected(net: Network, tmp_path: Path) -> None:
    async with pod(net, make_job()) as it, reached(it, tmp_path) as played:
        await PodGroup([it]).climb(V0)
        code, printed = await fault(played, FaultKind.ENGINE_CRASH)
        assert (Exit.NO_ANSWER, True) == (code, "faultInjection.enabled" in printed)
        code, printed = await fault(played, FaultKind.ENGINE_CRASH, "--pod", "another")
        assert (Exit.NO_ANSWER, True) == (code, f"another: no pod that runs can have this fault: {it.name}" in printed)
        assert it.now is not None
        assert EngineState.READY is it.now.engines[0].state
