"""An environment of verifiers, unchanged: its episodes are trained, and see no switch. A client plays it against the
gateway, or the job does.

The real package plays, with its own chat program and tool servers, each a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load
from waiting import until

from colocated_rl_api.facts import RolloutFacts
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.rules.samples import SampleState
from colocated_rl_rollout.tasks.task_server import COMMAND
from fakes.gate import logp_of
from fakes.gateway import TOOLS_TEMPLATE, GatewayScene, gateway_running
from setup.environments import FRAMEWORKS
from setup.layout import CHECKOUT
from setup.toolchain import clean_environment

EXAMPLE = CHECKOUT.root / "examples/environments"
PLAYED_S = 600.0  # a minute of two processors, which others use too
PACE = 20  # tokens, before the first attempt of a turn waits for the switch
V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)
JOB: dict[str, Any] = {"batchSize": 1, "groupSize": 2, "maxPromptTokens": 2000, "maxResponseTokens": 400}


def answer(question: str) -> str:
    """Looks up both things, one in each turn, and adds them up."""
    things = re.findall(r"How many (\w+) and (\w+) are there", question)[-1]
    found = [int(number) for number in re.findall(r"tool\n(\d+)", question)]
    if len(found) < len(things):
        return (
            f'<tool_call>\n{{"name": "shelves_count", "arguments": {{"thing": "{things[len(found)]}"}}}}\n</tool_call>'
        )
    return f"There are {sum(found)}."


def surroundings(home: Path, *modules: str | Path) -> dict[str, str]:
    """Return the environment of a process of the frameworks: the example, and these modules."""
    return {
        "HOME": str(home),
        "PATH": f"{EXAMPLE}:{CHECKOUT.python(FRAMEWORKS).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(map(str, [EXAMPLE, *modules])),
    }


def task_command(home: Path, *modules: Path) -> tuple[str, ...]:
    """Return the command of task processes in an image with verifiers, the example, and these modules."""
    ours = (CHECKOUT.root / "operator", CHECKOUT.root / "workloads/rollout", *modules)
    around = (f"{name}={value}" for name, value in surroundings(home, *ours).items())
    return "/usr/bin/env", *around, str(CHECKOUT.python(FRAMEWORKS)), *COMMAND[1:]


@asynccontextmanager
async def running(home: Path, *words: str | Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program of the frameworks' environment, as a person starts it. Nothing is downloaded: `uv` is the example's."""
    with (home / "output").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=home,
            env={**clean_environment(), **surroundings(home)},
            stderr=asyncio.subprocess.STDOUT,
            stdout=output,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def address(scene: GatewayScene) -> str:
    return f"http://127.0.0.1:{scene.controller.member.ports.pages}/v1"


async def batch(scene: GatewayScene, step: int) -> list[dict[str, NDArray[np.generic]]]:
    """All its shards."""
    url = f"https://127.0.0.1:{scene.controller.member.ports.data}/v1/batches/{step}"
    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=PLAYED_S) as http:
        answers = [
            await http.get(url, params={"shard": shard}, headers={"Authorization": scene.job.tls.authorization})
            for shard in range(2)
        ]
    return [load(each.content) for each in answers]


async def test_episodes_of_an_environment_with_tools_are_trained_over_a_switch(tmp_path: Path) -> None:
    async with gateway_running(tmp_path, answer, template=TOOLS_TEMPLATE, **JOB) as scene:
        await scene.gate.open(V0, pace=PACE)
        config = tmp_path / "stockroom.toml"
        config.write_text((EXAMPLE / config.name).read_text() + "limit = 1\n")
        play = (CHECKOUT.python(FRAMEWORKS), EXAMPLE / "play.py", config, "--gateway", address(scene))
        async with running(tmp_path, *play, "--passes", "1") as program:
            await until(lambda: scene.gate.in_flight == 2 or program.returncode is not None, PLAYED_S)
            assert program.returncode is None, (tmp_path / "output").read_text()
            await scene.switch(V1)  # in the middle of a turn of both episodes
            facts = await scene.operator.until(lambda facts: facts.sealed is not None, PLAYED_S)
            async with asyncio.timeout(PLAYED_S):
                assert 0 == await program.wait(), (tmp_path / "output").read_text()
        assert_sealed(facts)
        for columns in await batch(scene, 1):
            assert_trained(scene, columns)


def assert_sealed(facts: RolloutFacts) -> None:
    assert facts.sealed is not None
    assert (1, 2) == (facts.sealed.groups, facts.sealed.samples)


def assert_trained(scene: GatewayScene, columns: dict[str, NDArray[np.generic]]) -> None:
    """One episode of the example, whose first turn a switch cut off."""
    chat = scene.job.chat
    assert [1.0] == columns["reward"].tolist(), "as the environment says"
    ids, mask, logp = (columns[name] for name in ("tokens", "loss_mask", "behaviour_logp"))
    asked = re.findall(r"How many (\w+) and (\w+) are", chat.text(ids.tolist()))[0]
    trained, context = chat.text(ids[mask == 1].tolist()), chat.text(ids[mask == 0].tolist())
    assert list(asked) == re.findall(r'"thing": "(\w+)"', trained), "its calls are the policy's"
    tool_answers = re.findall(r"tool\n(\d+)", context)
    assert f"There are {int(tool_answers[0]) + int(tool_answers[1])}." in trained, "what the tools said is not"
    cut = PACE + 1  # an engine makes one more when it is interrupted
    versions = [V0] * cut + [V1] * (int(mask.sum()) - cut)
    made = zip(versions, ids[mask == 1].tolist(), strict=True)
    assert [logp_of(version, token) for version, token in made] == pytest.approx(logp[mask == 1].tolist())


STOCKROOM: dict[str, Any] = {
    "name": "stockroom",
    "config": {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 8}},
    "size": 12,
    "heldOutPercent": 40,
}


def playing(directory: Path, template: str | None = TOOLS_TEMPLATE) -> AbstractAsyncContextManager[GatewayScene]:
    """A job whose prompts are the example's tasks."""
    job = {**JOB, "prompts": {"environment": STOCKROOM}}
    return gateway_running(directory, answer, template=template, tasks=task_command(directory), **job)


@pytest.mark.release  # it starts verifiers anew, a minute or two of a processor
async def test_a_job_plays_its_environment_by_itself_and_evaluates_it(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        await scene.operator.send(1, (scene.gate.endpoint,), last_step=1)  # nothing is played for another
        await scene.gate.open(V0, pace=PACE)
        await until(lambda: scene.gate.in_flight == 2, PLAYED_S)
        await scene.switch(V1)  # in the middle of a turn of both episodes
        assert_sealed(await scene.operator.until(lambda facts: facts.sealed is not None, PLAYED_S))
        for columns in await batch(scene, 1):
            assert_trained(scene, columns)
            assert 2.0 in columns["figures"][0], "a metric of the environment: it looks up both things"
        await scene.operator.send(1, (scene.gate.endpoint,), trained_step=1, evaluate=1, last_step=1)
        facts = await scene.operator.until(lambda facts: facts.evaluated, PLAYED_S)
        [result] = facts.evaluated
        assert (1, 2, 1.0, 0.0) == (
            result.step,
            result.samples,
            result.mean,
            result.stderr,
        )
        assert 2 == scene.figure("sessions_ended_total", ending="evaluated")


@pytest.mark.release  # it starts verifiers anew, a minute or two of a processor
async def test_an_episode_that_the_model_can_not_play_fails_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "colocated_rl_rollout.worker")
    async with playing(tmp_path, template=None) as scene:
        await scene.gate.open(V0)
        await until(lambda: scene.controller._store.reasons, PLAYED_S)
        assert {(SampleState.FAILED, "EpisodeFailed")} == {*scene.controller._store.reasons}
    reason = next(record.args for record in caplog.records if record.message == "sample replaced")
    assert isinstance(reason, dict)
    words = "ProviderError (HTTP 400); its newest turn was refused: 400 unsupported_value (tools)"
    assert reason["message"].startswith(words)
