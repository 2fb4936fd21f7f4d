"""No prompt, response or answer in what operators of a cluster read: logs, facts, status, metrics, a support archive.

Each place that other people's words come from has a word of its own here. A real controller runs through success and
failure with real task processes; then all that it said is searched for these words.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from waiting import until

from builders import make_manifest
from colocated_rl_api import names
from colocated_rl_api.facts import RolloutFacts
from colocated_rl_api.logs import JsonLines
from colocated_rl_api.member_wire import JobFile, from_member
from colocated_rl_api.prompts import endpoints_of
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_cli import __main__ as program
from colocated_rl_rollout.rewards.reward_endpoint import RewardEndpoint
from colocated_rl_rollout.rules.samples import SampleState
from colocated_rl_rollout.tasks.task_server import COMMAND
from fakes.cluster_api import ClusterApi, page
from fakes.gate import FakeGate, GateFault
from fakes.gateway import controller_running
from fakes.kubectl import play_kubectl
from fakes.rollout import JOB_UID, JobOnDisk, OperatorEnd, ScriptedConversation, make_spec
from fakes.tasks import task_processes

CANARIES = {
    name: f"CANARY{name}"
    for name in ("Prompt", "Response", "Answer", "Endpoint", "Verifier", "Engine", "Raised", "GivenUp", "Turn")
}
REWARDS = f"""
def score(response, row):
    if "good" in row["prompt"]:
        return 0.5
    raise ValueError(f"{CANARIES["Verifier"]}: {{response}} is not {{row['answer']}}")
"""
VERIFIER_LINE = 5
VERIFIERS = f"""
from contextlib import asynccontextmanager
from types import SimpleNamespace
from . import utils

class EvalClientConfig(SimpleNamespace): pass
class ModelContext(SimpleNamespace): pass
class SamplingConfig(SimpleNamespace): pass

class Stockroom:
    taskset = [
        SimpleNamespace(data=SimpleNamespace(number=n, model_dump=lambda n=n, **_: dict(prompt=str(n)))) for n in (0, 1)
    ]

    @asynccontextmanager
    async def serving(self):
        yield

    def slots(self, task):
        return [task]

    async def run_slot(self, task, context):
        if task.data.number:
            raise RuntimeError("{CANARIES["Raised"]}")
        trace = 'Traceback (most recent call last):\\n  File "/env/tool.py", line 7, in call\\nKeyError: '
        trace += "{CANARIES["GivenUp"]}\\n"
        error = SimpleNamespace(type="ToolError", status_code=None, message="{CANARIES["GivenUp"]}", traceback=trace)
        return SimpleNamespace(ok=False, errors=[error], traces=[])
"""
LOADERS = """
def resolve_env_config(config):
    return config

def load_environment(config):
    from verifiers.v1 import Stockroom
    return Stockroom()
"""


@dataclass
class Said:
    """All that a controller said, as it said it."""

    logs: str
    facts: list[str]
    pages: dict[str, str]
    printed: str  # by the task processes: the log of their container

    @property
    def newest(self) -> RolloutFacts:
        facts = from_member.validate_json(self.facts[-1])
        assert isinstance(facts, RolloutFacts)
        return facts

    @property
    def problems(self) -> dict[str, str]:
        found = [json.loads(each).get("problem") for each in self.facts]
        return {each["reason"]: each["message"] for each in found if each}


@contextmanager
def logged() -> Iterator[io.StringIO]:
    """Every line of this process, down to DEBUG, as a member writes it."""
    stream, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(stream), root.level
    handler.setFormatter(JsonLines())
    handler.addFilter(
        lambda record: not record.name.startswith(("openai", "httpx", "httpcore"))
    )  # of the test's client
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


async def judge(request: web.Request) -> web.Response:
    """Judge as FastAPI does, which quotes what it refuses."""
    asked = await request.json()
    answer = f"{CANARIES['Endpoint']} {json.dumps(asked)}"
    for word, status in (("refused", 422), ("busy", 503), ("garbled", 200)):
        if word in asked["prompt"]:
            return web.Response(text=answer, status=status)
    return web.json_response({"reward": 0.25, "why": answer})


def write_task(directory: Path) -> dict[str, Any]:
    """The prompts of the job: a function's, an endpoint's and an environment's."""
    claim, package = directory / "mine", directory / "image/verifiers/v1/utils"
    claim.mkdir()
    package.mkdir(parents=True)
    for folder in (package.parent.parent, package):
        (folder / "__init__.py").write_text("")
    (package.parent / "__init__.py").write_text(VERIFIERS)
    (package / "loaders.py").write_text(LOADERS)
    (claim / "checks.py").write_text(REWARDS)
    for name, kinds in (("function", ("good", "bad")), ("http", ("good", "refused", "busy", "garbled"))):
        rows = [{"prompt": f"{CANARIES['Prompt']} {kind} {name}", "answer": CANARIES["Answer"]} for kind in kinds]
        (claim / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own: dict[str, Any] = {"claimName": "mine", "heldOutPercent": 0}
    return {
        "mix": {
            "sources": [
                {"file": {**own, "path": "function.jsonl", "reward": {"function": "checks:score"}}},
                {
                    "file": {
                        **own,
                        "path": "http.jsonl",
                        "reward": {"http": {"url": "http://judge/score", "attempts": 1}},
                    }
                },
                {"environment": {"name": "stockroom", "size": 2, "heldOutPercent": 0}},
            ]
        }
    }


@asynccontextmanager
async def talking(directory: Path) -> AsyncIterator[tuple[FakeGate, OperatorEnd, Any, openai.AsyncOpenAI]]:
    """A controller whose engine, endpoint, reward function and environment quote what they are told."""
    spec = make_spec(prompts=write_task(directory), batchSize=4, groupSize=2)
    spec = spec.model_copy(update={"max_staleness": 2, "evaluation": None})
    job = JobOnDisk.write(directory, spec)
    async with AsyncExitStack() as stack:
        application = web.Application()
        application.add_routes([web.post("/score", judge)])
        server = await stack.enter_async_context(TestServer(application))
        session = await stack.enter_async_context(aiohttp.ClientSession(trust_env=False))
        file = JobFile(name="job", namespace="default", uid=JOB_UID, created=datetime.now(UTC), spec=spec)
        endpoints = {
            number: RewardEndpoint(
                reward.model_copy(update={"url": str(server.make_url("/score"))}), file, session, tokens=directory
            )
            for number, reward in endpoints_of(spec.sources).items()
        }
        gate = FakeGate(
            "job-gpu-0-0", job.tls, ScriptedConversation(directory / "model", lambda _: CANARIES["Response"])
        )
        gate.words = f"{CANARIES['Engine']} at {CANARIES['Prompt']}"
        await stack.enter_async_context(gate.listening())
        image = ("/usr/bin/env", f"PYTHONPATH={directory / 'image'}", *COMMAND)
        processes = task_processes(spec.rollout.prompts, directory, command=image, endpoints=endpoints, path=job.tasks)
        running = controller_running(job, (gate.endpoint,), processes=await stack.enter_async_context(processes))
        controller, operator, client = await stack.enter_async_context(running)
        yield gate, operator, controller, client


def test_nothing_that_was_asked_or_answered_is_shown_anywhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown, refused = asyncio.run(_said_of_a_whole_run(tmp_path))
    shown.printed = "".join(capfd.readouterr())
    archive = _archive(shown, tmp_path)

    # it is looked for where it was: the client whose request the engine refused is told what the engine said
    assert CANARIES["Engine"] in refused
    everything = {
        "logs": shown.logs,
        "facts": "\n".join(shown.facts),
        "log of the rewards container": shown.printed,
        **shown.pages,
        **archive,
    }
    for place, text in everything.items():
        assert not [name for name, word in CANARIES.items() if word in text], f"in {place}"

    # and the useful part is there: status and length, type and place
    wanted = {
        "VerifierFailed": ("ValueError at ", f"checks.py:{VERIFIER_LINE}", "of the data"),
        "RewardRefused": ("/score answers 422 and ", " bytes"),
        "RewardUnavailable": ("/score: it answers 503 and ", " bytes"),
        "RewardGarbled": ("not 200 and ", "it is no JSON"),
        "EngineRejected": ("job-gpu-0-0 answered 400 and ", " characters"),
    }
    for reason, words in wanted.items():
        lines = [line for line in shown.logs.splitlines() if f'"{reason}"' in line]
        assert all(any(word in line for line in lines) for word in words), (reason, lines[:3])
    failed = [line for line in shown.logs.splitlines() if '"EpisodeFailed"' in line]
    assert any("ToolError: KeyError at /env/tool.py:7" in line for line in failed)
    assert any("RuntimeError at " in line and "verifiers/v1/__init__.py:" in line for line in failed)
    assert "answered 500 and " in shown.logs
    assert shown.problems


async def _said_of_a_whole_run(directory: Path) -> tuple[Said, str]:
    """Run a job to its end, and return what it said, and the answer to a client whose request the engine refused."""
    with logged() as log:
        async with talking(directory) as (gate, operator, controller, client), aiohttp.ClientSession() as session:
            gate.faults.extend([GateFault.REJECTED, GateFault.ERROR_500, GateFault.GARBLED, GateFault.DROPPED])
            await gate.open(WeightVersion(0, 1))
            reasons = controller._store.reasons
            expected = {
                "VerifierFailed", "RewardRefused", "RewardUnavailable", "RewardGarbled", "EngineRejected",
                "EpisodeFailed",
            }  # fmt: skip
            await until(lambda: expected <= {why for state, why in reasons if state is SampleState.FAILED})
            await operator.until(lambda facts: facts.sealed is not None)
            await operator.until(lambda facts: facts.problem is not None)
            gate.faults.extend([GateFault.REJECTED] * 64)
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model="job", messages=[{"role": "user", "content": CANARIES["Turn"]}]
                )
            ports = controller.member.ports
            pages = {}
            for port, path in ((ports.pages, "/v1/state"), (ports.pages, "/v1/progress"), (ports.metrics, "/metrics")):
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    pages[path] = await answer.text()
            heard = [*operator.heard]
    return Said(log.getvalue(), [each for each in heard if "rolloutFacts" in each], pages, ""), str(refused.value)


def _archive(shown: Said, directory: Path) -> dict[str, str]:
    """Return the files that `kubectl crlj bundle` keeps of a pod that says this."""
    manifest = make_manifest("sums", replicas=1)
    job = {**manifest, "metadata": {**manifest["metadata"], "uid": "uid-1", "generation": 1}}
    problems = [{"name": "sums-rollout-0", "reason": why, "message": text} for why, text in shown.problems.items()]
    job["status"] = {"observedGeneration": 1, "phase": "Rollout", "step": 0, "epoch": 1, "outOfLine": problems}
    labels = {names.ROLE_LABEL: "rollout", names.ATTEMPT_LABEL: "0"}
    containers: list[dict[str, Any]] = [{"name": name, "state": {"running": {}}} for name in ("rollout", "rewards")]
    pod = {
        "metadata": {"name": "sums-rollout-0", "uid": "uid-rollout", "labels": labels},
        "status": {"phase": "Running", "containerStatuses": containers},
    }
    api = ClusterApi(jobs={"sums": job}, pods=[pod])
    api.logs = {("sums-rollout-0", "rollout"): shown.logs, ("sums-rollout-0", "rewards"): shown.printed}
    api.pages = {
        ("sums-rollout-0", path): page(json.loads(shown.pages[path])) for path in ("/v1/state", "/v1/progress")
    }
    path = directory / "sums.tar.gz"
    with play_kubectl(api, directory) as kubectl:
        assert 0 == program.run(["bundle", "sums", "--file", str(path)], kubectl.environment)
    with tarfile.open(path) as archive:
        files = {each.name: archive.extractfile(each) for each in archive}
        found = {name: file.read().decode() for name, file in files.items() if file is not None}
    assert "sums-bundle/pods/sums-rollout-0/rollout.log" in found
    return found
