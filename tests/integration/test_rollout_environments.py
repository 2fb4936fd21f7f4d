"""An environment of verifiers, unchanged, against the gateway: its episodes are trained, and see no switch.

The real package plays, with its own chat program and tool servers, each a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load

from colocated_rl_api.ladder import WeightVersion
from fakes.gate import logp_of
from fakes.gateway import TOOLS_TEMPLATE, GatewayScene, gateway_running
from fakes.rollout import until
from setup.environments import FRAMEWORKS
from setup.layout import CHECKOUT
from setup.toolchain import clean_environment

EXAMPLE = CHECKOUT.root / "examples/environments"
PLAYED_S = 240.0
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


@asynccontextmanager
async def running(home: Path, *words: str | Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program of the frameworks' environment, as a person starts it. Nothing is downloaded: `uv` is the example's."""
    programs = CHECKOUT.python(FRAMEWORKS).parent
    with (home / "output").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=home,
            env={
                **clean_environment(),
                "HOME": str(home),
                "PATH": f"{EXAMPLE}:{programs}:{os.environ['PATH']}",
                "PYTHONPATH": str(EXAMPLE),
            },
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
    async with httpx.AsyncClient(verify=False, trust_env=False) as http:
        answers = [
            await http.get(url, params={"shard": shard}, headers={"Authorization": scene.job.tls.authorization})
            for shard in range(2)
        ]
    return [load(each.content) for each in answers]


async def test_episodes_of_an_environment_with_tools_are_trained_over_a_switch(tmp_path: Path) -> None:
    async with gateway_running(tmp_path, answer, template=TOOLS_TEMPLATE, **JOB) as scene:
        await scene.gate.open(V0, pace=20)
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
        assert facts.sealed is not None
        assert (1, 2) == (facts.sealed.groups, facts.sealed.samples)
        chat = scene.job.chat
        for columns in await batch(scene, 1):
            assert [1.0] == columns["reward"].tolist(), "as the environment says"
            ids, mask, logp = (columns[name] for name in ("tokens", "loss_mask", "behaviour_logp"))
            asked = re.findall(r"How many (\w+) and (\w+) are", chat.text(ids.tolist()))[0]
            trained, context = chat.text(ids[mask == 1].tolist()), chat.text(ids[mask == 0].tolist())
            assert list(asked) == re.findall(r'"thing": "(\w+)"', trained), "its calls are the policy's"
            told = re.findall(r"tool\n(\d+)", context)
            assert f"There are {int(told[0]) + int(told[1])}." in trained, "what the tools said is not"
            cut = 20 + 1  # an engine makes one more when it is interrupted
            versions = [V0] * cut + [V1] * (int(mask.sum()) - cut)
            made = zip(versions, ids[mask == 1].tolist(), strict=True)
            assert [logp_of(version, token) for version, token in made] == pytest.approx(logp[mask == 1].tolist())
