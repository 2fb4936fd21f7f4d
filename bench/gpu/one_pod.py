"""One pod's processes through switches of one device, and what was in use on it at each moment.

The product's agent, runner and default trainer, each a process of its own as in a pod; `fakes.pod` plays the operator
and the rollout controller, whose batches are random samples of full length. No cluster, no kubelet.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from bench.gpu.hand_over import SHARED_MEMORY
from bench.gpu.models import TrainedModel
from bench.gpu.switches import MeasuredSwitch, Proof
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_trainer.conformance.shards import Example, write_shards
from fakes.device import FakeDevice
from fakes.pod import Network, PodGroup, PodProcesses, make_job, network

DEADLINE_S = 900.0  # of each part of a switch: 7 billion parameters are exported, hashed and loaded in it
READ_S = 60.0
REQUESTS, NEW_TOKENS = 4, 16  # that the engine serves before each switch
PROMPT = 32  # tokens of a sample
GROUP = 4  # samples
SHARE = 0.8  # of the device, for the engine
ENGINE = "from bench.gpu.engine import main\nmain()\n"
READ = """
import json
from colocated_rl_agent.runner.runner import read_devices
print(json.dumps([device["used_bytes"] for device in read_devices() or ()]))
"""


class DeviceUnread(Exception):
    """The driver's library does not say what is in use on the device."""


@dataclass
class OnePod:
    """A pod whose engine and trainer share one device.

    is_cpu: the device is a stand-in, of which its processes say what they hold. has_sglang: the engine is SGLang, and
    not that of the tests.
    """

    model: TrainedModel
    is_cpu: bool
    has_sglang: bool
    steps: int

    def job(self) -> dict[str, Any]:
        program = "bench.gpu.trainer_on_cpu" if self.is_cpu else "colocated_rl_trainer"
        flags = ["--device", "cpu" if self.is_cpu else "cuda", "--mem-fraction-static", str(SHARE)]
        samples = self.model.samples
        return {
            "steps": self.steps,
            "gpus": {"count": 1},
            "model": {"claim": {"name": "model"}},
            "rollout": {
                "engine": {"args": flags},
                "batchSize": samples // GROUP,
                "groupSize": GROUP,
                "maxPromptTokens": PROMPT,
                "maxResponseTokens": self.model.length - PROMPT,
            },
            "trainer": {"command": ["python3", "-m", program], "config": self.model.config},
            "checkpoint": {"everySteps": 1_000_000},  # the switch is measured, not the volume
            "weightSync": {"sizeLimit": "1Ti"},  # the volume is the machine's own memory
            "switch": {name: int(DEADLINE_S) for name in ("engineCallSeconds", "engineStartSeconds")}
            | {"trainerStartSeconds": int(DEADLINE_S), "trainerProgressSeconds": int(DEADLINE_S)},
        }

    def batch(self, request: web.Request) -> bytes:
        """Return the shard of a step: random samples of full length, each token as likely as any."""
        step, chance = int(request.match_info["step"]), random.Random(request.match_info["step"])
        tokens = range(2, self.model.vocabulary)
        expected = -self.model.entropy
        samples = [
            Example(
                prompt=chance.choices(tokens, k=PROMPT),
                response=chance.choices(tokens, k=self.model.length - PROMPT),
                logp=[expected] * (self.model.length - PROMPT),
                reward=float(number % 2),
                group=number // GROUP,
                token_step=step - 1,
            )
            for number in range(self.model.samples)
        ]
        with tempfile.TemporaryDirectory() as folder:
            (file,) = write_shards(Path(folder), samples, step=step, split=1)
            return file.read_bytes()

    @asynccontextmanager
    async def processes(self, root: Path, model: Path, weights: Path) -> AsyncIterator[PodProcesses]:
        """Start them, with the model and new weights in these directories. Whatever happens, they end."""
        async with network(root, batch=self.batch) as net:
            it = self._laid_out(net, model, weights)
            await it.start_agent()
            await it.start_runner()
            try:
                yield it
            finally:
                await it.stop()

    def _laid_out(self, net: Network, model: Path, weights: Path) -> PodProcesses:
        it = PodProcesses(
            net,
            make_job(**self.job()),
            device=FakeDevice(net.root) if self.is_cpu else None,
            children={} if self.is_cpu else {name: text for name, text in os.environ.items() if name != "PATH"},
            engine=None if self.has_sglang else ENGINE,
        )
        it.lay_out()
        for directory, elsewhere in ((it.directories.model, model), (it.directories.weights, weights)):
            directory.rmdir()
            directory.symlink_to(elsewhere)
        return it

    def trained_s(self, it: PodProcesses, step: int) -> float:
        """Return the seconds of a step, as the trainer wrote them into the log."""
        for line in reversed(it.log.read_text().splitlines()):
            if line.startswith("[trainer-0] {"):
                event = json.loads(line.partition(" ")[2])
                if event["event"] == "step trained" and event["step"] == step:
                    return float(event["took_s"])
        raise LookupError(f"the trainer's log has no step {step}")


async def used_bytes(it: PodProcesses) -> int:
    """Return what is in use on the device, by a process of its own that has no context there. Raises DeviceUnread."""
    environment = {**os.environ, **(it.device.environment if it.device else {})}
    read = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READ, env=environment, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(READ_S):
        output, _ = await read.communicate()
    used = json.loads(output or "[]")
    if len(used) < 1 or used[0] is None:
        raise DeviceUnread("libnvidia-ml.so.1 names no device, or not what is in use: see `nvidia-smi`")
    return int(used[0])


async def one_switch(pod: OnePod, it: PodProcesses, group: PodGroup, step: int) -> MeasuredSwitch:
    """Serve some requests, then train a step and come back to serving."""
    for _ in range(REQUESTS):
        limits = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        status, answer = await it.generate(input_ids=list(range(2, 2 + PROMPT)), sampling_params=limits)
        if status != 200:
            raise AssertionError(f"a request was answered with {status}: {answer}")
    version = WeightVersion(step, 1)
    serving, began = await used_bytes(it), time.monotonic()
    await group.climb(version, Rung.RELEASED)
    released = await used_bytes(it)
    await group.go_on(version, Rung.EXPORTED)
    trained = await used_bytes(it)
    await group.go_on(version, Rung.OFFLOADED)
    offloaded = await used_bytes(it)
    await group.go_on(version)
    took_s = time.monotonic() - began
    facts = it.now
    assert facts is not None
    return MeasuredSwitch(
        serving=serving,
        released=released,
        trained=trained,
        offloaded=offloaded,
        served_again=await used_bytes(it),
        took_s=took_s,
        step_s=pod.trained_s(it, step),
        tokens=pod.model.samples * pod.model.length,
        processes=(facts.engines[0].incarnation, facts.trainers[0].incarnation),
    )


async def prove(
    pod: OnePod,
    model: Path,
    *,
    peak_flops: float,
    told: Callable[[int, MeasuredSwitch], None],
    within_s: float | None = None,
    deadline_s: float = DEADLINE_S,
) -> Proof:
    """Make the switches and return what they showed, also if they ended early.

    told: of each, as it is done. within_s: no switch begins after so many seconds.
    """
    done: list[MeasuredSwitch] = []
    released_by, ended, started, began = "SGLang", None, 0, time.monotonic()
    with (
        tempfile.TemporaryDirectory() as root,
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as weights,
    ):
        async with pod.processes(Path(root), model, Path(weights)) as it:
            try:
                await it.link()
                group = PodGroup([it], deadline_s=deadline_s)
                await group.climb(WeightVersion(0, 1))
                started = len(it.facts)  # until then the agent waits for processes that are being started
                if not pod.has_sglang:
                    released_by = (await server_info(it))["released_by"]
                for step in range(1, pod.steps + 1):
                    if within_s is not None and time.monotonic() - began > within_s:
                        raise TimeoutError(f"the {within_s:.0f} s that it had are over")
                    done.append(await one_switch(pod, it, group, step))
                    told(step, done[-1])
            except (AssertionError, TimeoutError, LookupError, OSError, DeviceUnread) as error:
                ended = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                print(f"{error}\n{it.story()}", file=sys.stderr)
            problems = {facts.problem.reason for facts in it.facts[started:] if facts.problem}
    return Proof(
        name=pod.model.name,
        asked=pod.steps,
        switches=tuple(done),
        flops=pod.model.flops,
        peak_flops=peak_flops,
        released_by=released_by,
        ended=ended,
        problems=tuple(sorted(problems)),
    )


async def server_info(it: PodProcesses) -> Mapping[str, Any]:
    async with it.net.session.get(f"http://127.0.0.1:{it.engine}/server_info") as answer:
        found: dict[str, Any] = await answer.json()
        return found
