"""A rollout controller, one gate that a test steers, and clients of its gateway.

It has no prompts of its own, unless a test starts the processes that make them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam, ChatCompletionToolParam
from prometheus_client import CollectorRegistry
from waiting import DEADLINE_S, until

from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.controller import Controller
from colocated_rl_rollout.rewards.rewards import TaskProcesses
from colocated_rl_rollout.settings import read_settings
from fakes.gate import FakeGate
from fakes.interface import Checked
from fakes.rollout import JobOnDisk, OperatorEnd, ScriptedConversation, SilentProcesses, make_spec
from fakes.tasks import task_processes

QUESTION: ChatCompletionMessageParam = {"role": "user", "content": "Where is it?"}
ANSWER = "In the north, where «ünïcode» is."
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"what": {}}}}}
]
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} Write <tool_call>{}</tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def openai_client(port: int) -> openai.AsyncOpenAI:
    """Return a client on the loopback of the rollout pod. It does not retry, so that a test sees the first answer."""
    http = httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S, transport=Checked())
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, http_client=http)


@dataclass
class GatewayScene:
    """A running controller, one gate, and clients."""

    job: JobOnDisk
    gate: FakeGate
    operator: OperatorEnd
    controller: Controller
    registry: CollectorRegistry
    client: openai.AsyncOpenAI  # on the pod's loopback

    async def ask(self, *messages: ChatCompletionMessageParam, **options: Any) -> ChatCompletion:
        completion = await self.client.chat.completions.create(model="job", messages=messages or [QUESTION], **options)
        assert isinstance(completion, ChatCompletion)
        return completion

    async def generating(self, count: int = 1) -> None:
        await until(lambda: self.gate.in_flight == count)

    async def switch(self, version: WeightVersion, *, pace: int | None = None) -> None:
        await self.gate.close()
        await until(lambda: self.gate.in_flight == 0)
        await self.gate.open(version, pace=pace)

    def figure(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"colocate_gateway_{name}", labels) or 0.0


@asynccontextmanager
async def controller_running(
    job: JobOnDisk,
    gates: Sequence[Endpoint],
    *,
    processes: TaskProcesses | None = None,
    registry: CollectorRegistry | None = None,
    arguments: Sequence[str] = (),
) -> AsyncIterator[tuple[Controller, OperatorEnd, openai.AsyncOpenAI]]:
    """One that was told of these engines, and a client on its pod's loopback."""
    settings = read_settings([*job.arguments, *arguments], job.environment)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        silent = SilentProcesses(job.spec, job.directory)
        controller = Controller(settings, session, processes or silent, registry or CollectorRegistry())
        serving = asyncio.create_task(controller.run())
        try:
            await until(lambda: controller.member.ports.control or serving.done())
            operator = await stack.enter_async_context(job.operator(controller.member.ports.control))
            await operator.send(1, gates)
            yield controller, operator, await stack.enter_async_context(openai_client(controller.member.ports.pages))
        finally:
            controller.drain()
            async with asyncio.timeout(DEADLINE_S):
                await serving


@asynccontextmanager
async def gateway_running(
    directory: Path,
    answer: Callable[[str], str | list[int]] = lambda question: ANSWER,
    *,
    template: str | None = None,
    arguments: Sequence[str] = (),
    tasks: Sequence[str] = (),
    **rollout: Any,
) -> AsyncIterator[GatewayScene]:
    """Run a gateway. tasks: the command of task processes; without it there are none."""
    job = JobOnDisk.write(directory, make_spec(**rollout))
    if template:
        (directory / "model" / "chat_template.jinja").write_text(template)
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        gate = FakeGate("job-gpu-0-0", job.tls, ScriptedConversation(directory / "model", answer))
        await stack.enter_async_context(gate.listening())
        processes: TaskProcesses | None = None
        if tasks:
            prompts = job.spec.rollout.prompts
            processes = await stack.enter_async_context(
                task_processes(prompts, directory, command=tasks, path=job.tasks)
            )
        running = controller_running(job, (gate.endpoint,), processes=processes, registry=registry, arguments=arguments)
        controller, operator, client = await stack.enter_async_context(running)
        yield GatewayScene(job, gate, operator, controller, registry, client)


def text_of(completion: ChatCompletion) -> str | None:
    content: str | None = completion.choices[0].message.content
    return content


def extra(answer: Any) -> dict[str, Any]:
    """Return the part of an answer that is not in OpenAI's API."""
    found: dict[str, Any] = answer.model_extra["colocated_rl"]
    return found
