"""The gateway hands out which experts of a mixture each token went to in a real engine, and torch says the same.

A completion goes on over a switch. Each token is read by the weights that draw the next one; those before the switch,
which the engine reads again, keep what was said of them first.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from waiting import until

from colocated_rl_agent.drivers.sglang import SGLang
from colocated_rl_agent.gate.data_port import DataPort
from colocated_rl_agent.gate.entrance import Backend
from colocated_rl_agent.gate.gate import Gate
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.rungs import WeightVersion
from engines import ADMIN_KEY, engine_process
from fakes.engine_model import EXPERTS_OF_TOKEN, LAYERS, write_engine_export
from fakes.gateway import controller_running, extra
from fakes.rollout import JobOnDisk, make_spec
from fakes.sse import events

pytestmark = pytest.mark.slow

FLAG = "--enable-return-routed-experts"
VERSIONS = OLD, NEW = WeightVersion(0, 1), WeightVersion(1, 1)
PROMPT = [5, 6, 7, 8, 100, 101]
LIMIT = 1500  # so many that weights change within, however late this process is
BEFORE = 20  # tokens that are there when weights change
ROUNDING = 1e-4  # of what a router says of an expert
# the engine pins its memory of experts for a device's sake, by CUDA's library, also where there is no device
NOTHING_TO_PIN = """
import torch


class Runtime:
    @staticmethod
    def cudaHostRegister(*_):
        return 0

    cudaHostUnregister = cudaHostRegister


torch.cuda.cudart = Runtime
"""


@dataclass
class ExpertsScene:
    engine: SGLang
    gate: Gate
    exports: Path
    client: openai.AsyncOpenAI
    version: WeightVersion = OLD

    def open(self, version: WeightVersion) -> None:
        self.version = version
        self.gate.open(Backend(self.engine.url, str(version), version, self.engine.abort))

    async def switch(self, version: WeightVersion) -> None:
        self.gate.close()
        await self.engine.abort_all()
        await self.gate.settled()
        await self.engine.pause()
        await self.engine.flush()
        await self.engine.update(self.exports / str(version), version)
        await self.engine.continue_()
        self.open(version)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[ExpertsScene]:
    """A gateway over a gate and the real engine."""
    exports, root = tmp_path / "weights", tmp_path / "engine"
    for version in VERSIONS:
        write_engine_export(exports / str(version), version=version, seed=version.step, mixture=True)
    root.mkdir()
    job = JobOnDisk.write(tmp_path, make_spec(maxResponseTokens=LIMIT, engine={"args": [FLAG]}))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(exports / str(OLD) / name, tmp_path / "model" / name)
    gate = Gate()
    flags = ("--max-total-tokens", "8192", FLAG)
    data = DataPort(gate.serve, admits=job.tls.admits).listening("127.0.0.1", 0, job.tls.data_context)
    (root / "sitecustomize.py").write_text(NOTHING_TO_PIN)
    variables = {"PYTHONPATH": str(root)}
    with engine_process(exports / str(OLD), version=OLD, root=root, flags=flags, variables=variables) as it:
        await asyncio.to_thread(it.wait_until_up)
        async with aiohttp.ClientSession() as session, data as port:
            engine = SGLang(session, url=it.url, admin_key=ADMIN_KEY, call_s=60)
            endpoint = Endpoint(pod="job-gpu-0-0", address="127.0.0.1", port=port)
            async with controller_running(job, [endpoint]) as (_, _, client):
                scene = ExpertsScene(engine, gate, exports, client)
                scene.open(OLD)
                yield scene
            gate.close()


async def test_experts_that_the_gateway_reports_are_those_that_torch_finds(scene: ExpertsScene) -> None:
    extras = {"return_token_ids": True, "return_routed_experts": True}
    asking = asyncio.create_task(
        scene.client.completions.create(model="job", prompt=PROMPT, max_tokens=LIMIT, temperature=0, extra_body=extras)
    )
    await until(lambda: scene.gate.in_flight == 1)
    await beside(scene.engine, tokens=BEFORE)
    await scene.switch(NEW)
    completion = await asking
    (choice,) = completion.choices
    ids = [*PROMPT, *(choice.model_extra or {})["token_ids"]]
    report = extra(completion)

    spans = report["weight_versions"]
    assert [str(OLD), str(NEW)] == [span["version"] for span in spans]
    routed = {str(version): routed_by(scene.exports / str(version), ids[:-1]) for version in VERSIONS}
    drawn_by = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    read_by = [drawn_by[max(0, place + 1 - len(PROMPT))] for place in range(len(ids) - 1)]
    expected, is_clear = (
        np.stack([routed[version][which][place] for place, version in enumerate(read_by)]) for which in range(2)
    )
    experts = np.frombuffer(base64.b64decode(report["routed_experts"]["data"]), "<i4").reshape(expected.shape)
    is_told = (np.sort(experts) == expected).all(axis=-1)
    assert is_told[is_clear].all()
    for version in VERSIONS:
        is_as_by_it_alone = (routed[str(version)][0] == expected).all(axis=-1)
        assert not is_as_by_it_alone.all(), f"else it could not be told whether weights {version} had read every token"


async def beside(engine: SGLang, *, tokens: int) -> None:
    """Returns when a request that came later has so many."""
    limits = {"max_new_tokens": LIMIT, "ignore_eos": True, "stream_interval": 1}
    body = {"input_ids": PROMPT, "sampling_params": limits, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{engine.url}/generate", json=body) as answer:
        async for event in events(answer.content):
            if len(json.loads(event)["output_ids"]) >= tokens:
                return


def routed_by(weights: Path, ids: list[int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Experts of each token in each layer, ascending, and whether rounding can't change them.

    [tokens, layers, experts] and [tokens, layers].
    """
    model = AutoModelForCausalLM.from_pretrained(weights, local_files_only=True)
    with torch.no_grad():
        router_logits = torch.stack(model(torch.tensor([ids]), output_router_logits=True).router_logits, dim=1)
    assert (len(ids), LAYERS) == router_logits.shape[:2]
    ranked = router_logits.sort(dim=-1, descending=True)
    last, next_one = (ranked.values[..., place] for place in (EXPERTS_OF_TOKEN - 1, EXPERTS_OF_TOKEN))
    chosen = ranked.indices[..., :EXPERTS_OF_TOKEN].sort(dim=-1).values
    return chosen.numpy(), (last - next_one > ROUNDING).numpy()
