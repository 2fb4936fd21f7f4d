"""These tests hold the real engine and the fake to the same behaviour, so that the fake can't drift.

Numbers H… are those of the hazards that the agent is built around. One start of the real engine serves the whole file,
so each test leaves it as it found it; the one that kills it comes last.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from pydantic import BaseModel
from safetensors.torch import load_file, save_file
from waiting import until

import fakes
from colocated_rl_agent.drivers.base import CallRefused
from colocated_rl_agent.drivers.sglang import SGLang
from colocated_rl_agent.files.exports import verify_export
from colocated_rl_agent.gate.call import Call
from colocated_rl_agent.gate.data_port import DataPort
from colocated_rl_agent.gate.dialects import Dialect, EngineReply, Request
from colocated_rl_agent.gate.entrance import Backend, Entrance
from colocated_rl_agent.gate.gate import Gate
from colocated_rl_agent.gate.running import Running
from colocated_rl_agent.lanes.probe import ProbeDisagrees, require_agreement
from colocated_rl_agent.planner.views import (
    CUDA_GRAPH,
    KV_CACHE,
    TAGS,
    WEIGHTS,
)
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import Probe
from colocated_rl_rollout.engines import engines
from colocated_rl_rollout.engines.engine_client import GenerateRequest
from colocated_rl_rollout.rules.resume import read_answer
from colocated_rl_rollout.rules.samples import Finish
from engines import ADMIN_KEY, EngineProcess, engine_process
from fakes.engine import END_TOKEN
from fakes.engine import VOCABULARY as FAKE_VOCABULARY
from fakes.engine_model import VOCABULARY, write_engine_export
from fakes.gateway import TOOLS_TEMPLATE, controller_running
from fakes.rollout import JobOnDisk, make_spec
from fakes.sse import events, json_events
from fakes.tasks import are_up, task_processes
from fakes.weights import write_export

CALL_S = 60.0
JSON = {"Content-Type": "application/json"}
OLD, NEW = WeightVersion(0, 1), WeightVersion(1, 1)
PROMPT = [5, 6, 7, 8]
LONG = {"max_new_tokens": 3000, "ignore_eos": True, "stream_interval": 1}
POOL_TOKENS, MAX_RUNNING = 32768, 4
HEALTH_S = 2.0
FLAGS = ("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", str(MAX_RUNNING))


@dataclass(frozen=True)
class ServedExports:
    """A running engine process and the exports it can load."""

    engine: EngineProcess
    exports: Path
    vocabulary: int

    def probe(self, version: WeightVersion) -> Probe:
        probe = verify_export(self.exports, version)[0].probe
        assert probe is not None
        return probe


@pytest.fixture(scope="module", params=["fake", "sglang"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedExports]:
    root = tmp_path_factory.mktemp(request.param)
    exports = root / "weights"
    variables: dict[str, str] = {"SGLANG_HEALTH_CHECK_TIMEOUT": str(int(HEALTH_S))}
    if request.param == "fake":
        for version in (OLD, NEW):
            write_export(exports / str(version), version=str(version), weight=float(version.step))
        (root / "sglang").mkdir()
        (root / "sglang/__init__.py").touch()
        (root / "sglang/launch_server.py").write_text("from fakes.engine import main\nmain()\n")
        variables["PYTHONPATH"] = f"{root}:{Path(fakes.__path__[0]).parent}"
    else:
        for version in (OLD, NEW):
            write_engine_export(exports / str(version), version=version, seed=version.step)
    binaries = Path(sys.executable).parent if request.param == "fake" else None
    with engine_process(
        exports / str(OLD), version=OLD, root=root, flags=FLAGS, binaries=binaries, variables=variables
    ) as it:
        it.wait_until_up()
        yield ServedExports(it, exports, FAKE_VOCABULARY if request.param == "fake" else VOCABULARY)


class ObservedSGLang(SGLang):
    """The agent's driver, and what a caller of the engine sees."""

    def __init__(self, session: aiohttp.ClientSession, server: ServedExports) -> None:
        super().__init__(session, url=server.engine.url, admin_key=ADMIN_KEY, call_s=CALL_S)
        self.session, self.server = session, server

    async def stream(self, **request: Any) -> AsyncIterator[dict[str, Any]]:
        async with self.session.post(f"{self.url}/generate", json={"stream": True, **request}) as answer:
            assert answer.status == 200
            async for event in json_events(answer.content):
                yield event

    async def generate(self, **request: Any) -> dict[str, Any]:
        """The last chunk."""
        last: dict[str, Any] = {}
        async for chunk in self.stream(**{"input_ids": PROMPT, "return_logprob": True, **request}):
            last = chunk
        return last

    async def until_running(
        self, request: AsyncIterator[dict[str, Any]], *, tokens: int = 1
    ) -> asyncio.Task[dict[str, Any]]:
        """The rest of a request that has produced so many tokens, as its last chunk."""
        chunk = await anext(request)
        while len(chunk["output_ids"]) < tokens:
            chunk = await anext(request)

        async def rest() -> dict[str, Any]:
            last = chunk
            async for later in request:
                last = later
            return last

        return asyncio.create_task(rest())

    async def post(self, path: str, body: object, *, key: str = ADMIN_KEY) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        async with self.session.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status


@pytest.fixture
async def engine(server: ServedExports) -> AsyncIterator[ObservedSGLang]:
    """Serving version OLD, idle."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        it = ObservedSGLang(session, server)
        yield it
        if server.engine.process.poll() is None:
            await it.continue_()
            await it.abort_all()
            await it.flush()


def reason_of(answer: dict[str, Any]) -> dict[str, Any]:
    reason: dict[str, Any] = answer["meta_info"]["finish_reason"]
    return reason


async def test_h40_started_engine_is_what_a_switch_needs_and_names_its_version(engine: ObservedSGLang) -> None:
    info = await engine.require_suitable(memory_saver=False, gpus=0)
    assert "float32" == info.dtype
    assert await engine.weight_version() == OLD
    assert await engine.is_up()
    assert await engine.takes_requests()


async def test_probe_of_the_trainer_agrees_with_the_engine(engine: ObservedSGLang, server: ServedExports) -> None:
    probe = server.probe(OLD)
    found = await engine.input_logprobs(probe.input_ids)
    assert require_agreement(probe.logp, found, noise_nats=None, is_exact=True) < 1e-4
    with pytest.raises(ProbeDisagrees):
        require_agreement(server.probe(NEW).logp, found, noise_nats=0.0, is_exact=True)


async def test_h41_control_routes_ask_for_the_admin_key(engine: ObservedSGLang) -> None:
    for path in ("/pause_generation", "/release_memory_occupation", "/abort_request", "/update_weights_from_disk"):
        assert 401 == await engine.post(path, {}, key="wrong")
    assert await engine.takes_requests()


async def test_h23_h59_chunks_are_cumulative_and_only_the_last_one_has_spans(engine: ObservedSGLang) -> None:
    limits = {"max_new_tokens": 20, "ignore_eos": True, "stream_interval": 4}
    chunks = [chunk async for chunk in engine.stream(input_ids=PROMPT, return_logprob=True, sampling_params=limits)]
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == sorted(lengths)
    assert 20 == lengths[-1]
    assert len(chunks) <= 7, "chunks are spaced"
    for before, after in itertools.pairwise(chunks):
        assert before["output_ids"] == after["output_ids"][: len(before["output_ids"])]
        assert "weight_versions" not in before["meta_info"]
    last = chunks[-1]["meta_info"]
    assert [{"version": "0-1", "start": 0, "end": 20}] == last["weight_versions"]
    assert {"type": "length", "length": 20} == last["finish_reason"]
    assert chunks[-1]["output_ids"] == [token for _, token, _ in last["output_token_logprobs"]]


async def test_h4_abort_by_id_ends_every_request_whose_id_begins_so(engine: ObservedSGLang) -> None:
    """An id that is none of a request's ends nothing."""
    first = await engine.until_running(engine.stream(input_ids=PROMPT, rid="a" * 31, sampling_params=LONG))
    second = await engine.until_running(engine.stream(input_ids=PROMPT, rid="a" * 32, sampling_params=LONG))
    await engine.abort("a" * 30)
    await stays_open(first, 0.3)
    await engine.abort("a" * 31)
    assert "abort" == reason_of(await first)["type"] == reason_of(await second)["type"]


async def test_abort_of_all_hands_back_what_was_generated(engine: ObservedSGLang) -> None:
    requests = [
        await engine.until_running(engine.stream(input_ids=PROMPT, return_logprob=True, sampling_params=LONG))
        for _ in range(3)
    ]
    await engine.abort_all()
    for answer in await asyncio.gather(*requests):
        assert ("abort", None) == (reason_of(answer)["type"], reason_of(answer).get("status_code"))
        assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) > 0
        assert answer["meta_info"]["weight_versions"][-1]["end"] == len(answer["output_ids"])
        assert 0 == answer["meta_info"]["num_retractions"], "as resume.read_preemptions reads it"


async def test_h11_idle_pause_shows_by_ready(engine: ObservedSGLang) -> None:
    await engine.pause()
    assert (True, False) == (await engine.is_up(), await engine.takes_requests())
    await engine.continue_()
    assert await engine.takes_requests()


async def test_h5_abort_is_harmless_however_often_it_is_sent(engine: ObservedSGLang) -> None:
    running = await engine.until_running(engine.stream(input_ids=PROMPT, sampling_params=LONG))
    for _ in range(3):
        await engine.abort_all()
        await engine.abort("of-nobody")
    assert "abort" == reason_of(await running)["type"]
    await engine.flush()


async def test_h11_pause_is_not_counted(engine: ObservedSGLang) -> None:
    await engine.pause()
    await engine.pause()
    await engine.continue_()
    assert await engine.takes_requests()


async def test_h55_pause_with_work_in_flight_takes_a_second_or_more(engine: ObservedSGLang) -> None:
    running = await engine.until_running(engine.stream(input_ids=PROMPT, sampling_params=LONG))
    started = time.monotonic()
    await engine.pause()
    assert time.monotonic() - started >= 0.9
    assert "abort" == reason_of(await running)["type"]


async def test_h3_request_aborted_while_paused_runs_after_continue(engine: ObservedSGLang) -> None:
    await engine.pause()
    parked = asyncio.create_task(
        engine.generate(rid="p" * 32, sampling_params={"max_new_tokens": 8, "ignore_eos": True})
    )
    await stays_open(parked, 0.3)
    await engine.abort("p" * 32)
    await stays_open(parked, 0.3)
    await engine.continue_()
    assert {"type": "length", "length": 8} == reason_of(await parked)


async def test_h12_flush_waits_for_work_and_refuses_past_its_timeout(engine: ObservedSGLang) -> None:
    running = await engine.until_running(engine.stream(input_ids=PROMPT, sampling_params=LONG))
    assert 400 == await engine.post("/flush_cache?timeout=0.2", {})
    await engine.abort_all()
    await running
    await engine.flush()


async def test_engine_stops_working_for_a_client_that_left_a_stream(engine: ObservedSGLang) -> None:
    request = engine.stream(input_ids=PROMPT, sampling_params=LONG)
    await anext(request)
    await request.aclose()  # type: ignore[attr-defined]
    await engine.flush()


async def test_whole_switch_changes_the_weights_and_their_name(engine: ObservedSGLang, server: ServedExports) -> None:
    for version in (NEW, OLD):
        await engine.pause()
        await engine.flush()
        await engine.release(TAGS)
        await engine.resume((WEIGHTS,))
        await engine.update(server.exports / str(version), version)
        assert version == await engine.weight_version()
        await engine.resume((KV_CACHE, CUDA_GRAPH))
        await engine.flush()
        await engine.continue_()
        assert await engine.takes_requests()
        probe = server.probe(version)
        require_agreement(probe.logp, await engine.input_logprobs(probe.input_ids), noise_nats=None, is_exact=True)
        answer = await engine.generate(sampling_params={"max_new_tokens": 4, "ignore_eos": True})
        assert str(version) == answer["meta_info"]["weight_version"]


@pytest.mark.parametrize("gives_up", [(KV_CACHE,), (KV_CACHE, CUDA_GRAPH), (WEIGHTS, KV_CACHE)])
async def test_engine_goes_through_a_switch_in_which_it_keeps_the_rest(
    engine: ObservedSGLang, server: ServedExports, gives_up: tuple[str, ...]
) -> None:
    for version in (NEW, OLD):
        await engine.pause()
        await engine.flush()
        await engine.release(gives_up)
        if WEIGHTS in gives_up:
            await engine.resume((WEIGHTS,))
        await engine.update(server.exports / str(version), version)
        await engine.resume(tuple(tag for tag in gives_up if tag != WEIGHTS))
        await engine.flush()
        await engine.continue_()
        probe = server.probe(version)
        require_agreement(probe.logp, await engine.input_logprobs(probe.input_ids), noise_nats=None, is_exact=True)
        answer = await engine.generate(sampling_params={"max_new_tokens": 4, "ignore_eos": True})
        assert str(version) == answer["meta_info"]["weight_version"]


async def test_f52_h52_checksum_is_of_the_weights_and_not_of_their_name(
    engine: ObservedSGLang, server: ServedExports, tmp_path: Path
) -> None:
    """The checksum can be read while the KV cache is released too, which is when the agent reads it."""
    started_on = (await engine.checksum())[0]
    await engine.pause()
    await engine.flush()
    await engine.release((KV_CACHE,))
    await engine.update(server.exports / str(NEW), NEW)
    updated_to = (await engine.checksum())[0]
    assert started_on != updated_to
    assert updated_to == (await engine.checksum())[0]
    await engine.update(server.exports / str(OLD), OLD)
    assert started_on == (await engine.checksum())[0], "the same, however the weights came"
    await engine.update(lacking_a_tensor(server.exports / str(NEW), tmp_path / "torn"), NEW)
    assert NEW == await engine.weight_version(), "what it lacks keeps its old values, and that is a success"
    assert updated_to != (await engine.checksum())[0]
    await engine.update(server.exports / str(OLD), OLD)
    await engine.resume((KV_CACHE,))
    assert started_on == (await engine.checksum())[0]


def lacking_a_tensor(export: Path, directory: Path) -> Path:
    """A copy without one of its tensors, of those that are not the same in every model."""
    shutil.copytree(export, directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors[max(name for name in tensors if "norm" not in name)]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def test_h51_update_from_a_directory_without_weights_is_refused(engine: ObservedSGLang, tmp_path: Path) -> None:
    await engine.pause()
    with pytest.raises(CallRefused):
        await engine.update(tmp_path, NEW)
    assert OLD == await engine.weight_version()


async def test_bad_request_in_a_stream_is_an_error_with_its_code(engine: ObservedSGLang) -> None:
    answer = await engine.generate(sampling_params={"max_new_tokens": 100_000})
    assert 400 == answer["error"]["code"]


class Hearing(Gate):
    """Keeps what it was asked, and the replies of which it has received something."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []
        self.begun: set[EngineReply] = set()

    async def _run(self, call: Call, dialect: Dialect, asked: Request, entrance: Entrance) -> Running:
        self.asked.append(json.loads(asked.body))
        return await super()._run(call, dialect, asked, entrance)

    def _hold(self, reply: EngineReply, before: int) -> None:
        super()._hold(reply, before)
        self.begun.add(reply)


@pytest.fixture
def hearing() -> Hearing:
    return Hearing()


async def close(gate: Gate) -> None:
    """Nothing of a test goes on."""
    gate.close()
    async with asyncio.timeout(CALL_S):
        await gate.settled()


@pytest.fixture
async def gate(engine: ObservedSGLang, hearing: Hearing) -> AsyncIterator[str]:
    """The URL of an open gate in front of the engine."""
    async with DataPort(hearing.serve).listening("127.0.0.1", 0) as port:
        hearing.open(Backend(engine.url, "incarnation", OLD, engine.abort, await engine.vocabulary()))
        yield f"http://127.0.0.1:{port}"
        await close(hearing)


async def ask(engine: ObservedSGLang, url: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with engine.session.post(url, json=body) as answer:
        return answer.status, await answer.json()


async def streamed(engine: ObservedSGLang, url: str, **body: Any) -> list[dict[str, Any]]:
    async with engine.session.post(url, json={**body, "stream": True}) as answer:
        assert answer.status == 200
        received = [event async for event in events(answer.content)]
    assert b"[DONE]" == received.pop()
    return [json.loads(event) for event in received]


async def test_gate_forwards_counts_and_hands_back(engine: ObservedSGLang, gate: str) -> None:
    limits = {"max_new_tokens": 12, "ignore_eos": True}
    status, answer = await ask(
        engine, f"{gate}/generate", input_ids=PROMPT, return_logprob=True, sampling_params=limits
    )
    assert (200, {"type": "length", "length": 12}) == (status, reason_of(answer))
    assert 12 == len(answer["meta_info"]["output_token_logprobs"])
    chunks = await streamed(engine, f"{gate}/generate", input_ids=PROMPT, sampling_params=limits)
    assert {"type": "length", "length": 12} == reason_of(chunks[-1])
    status, answer = await ask(
        engine, f"{gate}/generate", input_ids=PROMPT, sampling_params={"max_new_tokens": 100_000}
    )
    assert 400 == status
    assert answer["error"]


async def test_what_an_engine_dies_of_is_refused_at_the_gate(
    engine: ObservedSGLang, gate: str, server: ServedExports
) -> None:
    """The engine keeps all other requests that it works on."""
    tokens = await engine.vocabulary()
    assert server.vocabulary == tokens
    short = {"max_new_tokens": 4}
    for asked, expected in (
        ({"input_ids": [5, tokens]}, 400),
        ({"input_ids": [5, -1]}, 400),
        ({"input_ids": [5], "sampling_params": {**short, "min_new_tokens": 2, "stop_token_ids": [10**6]}}, 400),
        ({"input_ids": [5], "sampling_params": short, "return_logprob": True, "top_logprobs_num": 10**6}, 400),
        ({"input_ids": [5], "sampling_params": {**short, "top_k": 10**12}}, 400),
        ({"input_ids": [5], "sampling_params": {**short, "ignore_eos": 1}}, 400),
        ({"input_ids": [5], "sampling_params": short, "return_logprob": True, "logprob_start_len": -2}, 400),
        ({"input_ids": [5], "sampling_params": short, "return_hidden_states": []}, 400),
        ({"input_ids": [5], "sampling_params": short, "lora_id": [None]}, 400),
        ({"input_ids": [5], "sampling_params": short, "session_params": {"id": 5}}, 400),
        ({"text": "", "sampling_params": short}, 400),
        ({"input_ids": [5, tokens - 1], "sampling_params": {**short, "stop_token_ids": [10**6]}}, 200),
    ):
        status, _ = await ask(engine, f"{gate}/generate", **asked)
        assert expected == status, asked


async def test_what_the_rollout_controller_asks_through_a_gate_is_understood(engine: ObservedSGLang, gate: str) -> None:
    """Stop string, seed and stream of a client's turn. An engine ignores what it does not know."""
    request = GenerateRequest(PROMPT, 24, 0.0, [END_TOKEN])
    async with engine.session.post(f"{gate}/generate", data=request.body(), headers=JSON) as answer:
        reply = await answer.json()
    whole, _ = read_answer(reply)
    stop = next(letter for letter in reply["text"] if letter != "\ufffd")
    request = dataclasses.replace(request, stops=[stop], seed=7)
    async with engine.session.post(f"{gate}/generate", data=request.body(stream=True), headers=JSON) as answer:
        assert answer.status == 200
        chunks = [event async for event in json_events(answer.content)]
    tokens, ending = read_answer(chunks[-1])
    assert Finish.STOP is ending
    assert 0 < len(tokens) < len(whole)
    assert whole.ids[: len(tokens)].tolist() == tokens.ids.tolist()
    assert {"type": "stop", "matched": stop} == reason_of(chunks[-1])


async def test_log_probabilities_are_of_the_whole_distribution_whatever_is_left_to_draw_from(
    engine: ObservedSGLang, gate: str
) -> None:
    """Tokens drawn by top-k, top-p or min-p must therefore not be trained: the only
    token that is left here has probability 1.
    """
    greedy = GenerateRequest(PROMPT, 12, 0.0, [])
    whole, _ = read_answer((await ask(engine, f"{gate}/generate", **json.loads(greedy.body())))[1])
    for left in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        request = dataclasses.replace(greedy, temperature=1.0, **left)
        status, answer = await ask(engine, f"{gate}/generate", **json.loads(request.body()))
        assert 200 == status
        tokens, _ = read_answer(answer)
        assert whole.ids.tolist() == tokens.ids.tolist()
        assert tokens.logp.max() < -0.01
        assert tokens.logp.tolist() == pytest.approx(whole.logp.tolist(), abs=1e-3)


class Find(BaseModel):
    """This tool finds where a thing is."""

    what: str


STRICT_TOOL = openai.pydantic_function_tool(Find)
ENDLESS: dict[str, Any] = {"model": "m", "max_tokens": 3000, "ignore_eos": True}
OPENAI: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one plus two"}], "tools": [STRICT_TOOL]},
}


@pytest.mark.parametrize("path", OPENAI)
async def test_h44_gate_makes_a_whole_of_what_the_openai_routes_stream_whatever_the_models_name(
    engine: ObservedSGLang, gate: str, path: str
) -> None:
    request = {"model": "m", "max_tokens": 12, "ignore_eos": True, "temperature": 0.0, **OPENAI[path]}
    status, answer = await ask(engine, gate + path, **request)
    (choice,) = answer["choices"]
    assert (200, "length", 12) == (status, choice["finish_reason"], answer["usage"]["completion_tokens"])
    spans = [{"version": str(OLD), "start": 0, "end": 12}]
    assert {"weight_version": str(OLD), "weight_versions": spans} == answer["metadata"]
    whole = choice["text"] if "text" in choice else choice["message"]["content"]
    pieces = await streamed(engine, gate + path, **request)
    choices = [choice for piece in pieces for choice in piece["choices"]]
    assert whole == "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    assert "length" == choices[-1]["finish_reason"]
    status, answer = await ask(engine, gate + path, **{**request, "max_tokens": 100_000})
    assert 400 == status


@pytest.mark.parametrize("path", OPENAI)
async def test_abort_ends_the_openai_routes_with_what_was_generated(
    engine: ObservedSGLang, gate: str, path: str
) -> None:
    request = {**ENDLESS, **OPENAI[path]}
    asking = asyncio.create_task(ask(engine, gate + path, **request))
    beside = await engine.until_running(engine.stream(input_ids=PROMPT, sampling_params=LONG), tokens=20)
    while not asking.done():  # one abort can come before the request
        await engine.abort_all()
        await asyncio.wait({asking}, timeout=0.1)
    await beside
    status, answer = await asking
    (choice,) = answer["choices"]
    assert (200, "abort") == (status, choice["finish_reason"])
    assert answer["usage"]["completion_tokens"] < 3000


@pytest.fixture
async def client(
    engine: ObservedSGLang, server: ServedExports, hearing: Hearing, tmp_path: Path
) -> AsyncIterator[openai.AsyncOpenAI]:
    """Yield a client of the gateway of a rollout controller that has the engine, behind its gate."""
    job, model = JobOnDisk.write(tmp_path, make_spec()), tmp_path / "model"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (own := server.exports / str(OLD) / name).exists():  # the fake one has none
            shutil.copyfile(own, model / name)
    (model / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    data = DataPort(hearing.serve, admits=job.tls.admits).listening("127.0.0.1", 0, job.tls.data_context)
    async with data as port:
        hearing.open(Backend(engine.url, "incarnation", OLD, engine.abort))
        endpoint = Endpoint(pod="job-gpu-0-0", address="127.0.0.1", port=port)
        async with controller_running(job, [endpoint]) as (_, _, it):
            yield it
        await close(hearing)


async def test_gateway_answers_what_openais_helpers_ask(client: openai.AsyncOpenAI) -> None:
    """A strict tool, log-probabilities of all tokens, a stream."""
    asked: dict[str, Any] = {
        "model": "job", "messages": [{"role": "user", "content": "one plus two"}], "max_tokens": 12, "temperature": 0.0,
    }  # fmt: skip
    plain = await client.chat.completions.create(**asked)
    asked |= {"tools": [STRICT_TOOL], "logprobs": True}
    whole = await client.chat.completions.create(**asked)
    assert whole.usage.prompt_tokens > plain.usage.prompt_tokens, "the prompt has the tool"
    (choice,) = whole.choices
    assert 0 < len(choice.logprobs.content) == whole.usage.completion_tokens
    pieces = [piece async for piece in await client.chat.completions.create(**asked, stream=True)]
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert (choice.message.content or "") == text


async def test_f91_after_a_switch_the_engine_gets_what_was_interrupted_and_so_many_requests_at_once(
    engine: ObservedSGLang, hearing: Hearing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have one less at once than were interrupted, and the time until it may have more is never over."""
    job = JobOnDisk.write(tmp_path, make_spec(maxResponseTokens=400))
    groups, backend = job.spec.rollout.concurrency, Backend(engine.url, "incarnation", OLD, engine.abort)
    data = DataPort(hearing.serve, admits=job.tls.admits).listening("127.0.0.1", 0, job.tls.data_context)
    async with data as port, task_processes(job.spec.rollout.prompts, tmp_path) as processes:
        await are_up(processes)
        gates = [Endpoint(pod="job-gpu-0-0", address="127.0.0.1", port=port)]
        async with controller_running(job, gates, processes=processes) as (controller, operator, _):
            hearing.open(backend)
            await until(lambda: len(hearing.begun) >= MAX_RUNNING)
            hearing.close()
            await engine.abort_all()
            await hearing.settled()
            await operator.send(1, gates, concurrency=2 * groups)
            new = groups * job.spec.rollout.group_size
            facts = await operator.until(
                lambda facts: facts.samples.get("admitted", 0) >= new and "running" not in facts.samples
            )
            begun, interrupted = [asked["input_ids"] for asked in hearing.asked], facts.samples["interrupted"]
            assert interrupted > 1
            await until(lambda: not controller._engines._sent)
            monkeypatch.setattr(engines, "BURST", interrupted - 1)
            monkeypatch.setattr(engines, "PACE_S", 10 * CALL_S)
            hearing.asked.clear()
            hearing.begun.clear()
            hearing.open(backend)
            await until(lambda: len(hearing.begun) >= interrupted - 1)
            facts = await operator.until(lambda facts: facts.samples.get("interrupted", 0) <= 1)
            hearing.close()
            await engine.abort_all()
    assert 1 == facts.samples.get("interrupted"), "the pace lets no more of them go on"
    assert new <= facts.samples["admitted"], "they wait"
    assert len(hearing.asked) == interrupted - 1
    for asked in hearing.asked:
        assert any(asked["input_ids"][: len(ids)] == ids for ids in begun), "it goes on"


@pytest.mark.parametrize(("prompt_tokens", "limit"), [(5000, 8), (4090, 40)])
async def test_prompt_that_is_too_long_is_refused_in_words_that_the_gateway_knows(
    client: openai.AsyncOpenAI, prompt_tokens: int, limit: int
) -> None:
    """Alone, and together with what may be generated."""
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="job", prompt=[5] * prompt_tokens, max_tokens=limit)
    assert "context_length_exceeded" == refused.value.code


async def test_h6_request_that_is_aborted_in_the_queue_has_no_tokens(engine: ObservedSGLang) -> None:
    running = [
        await engine.until_running(engine.stream(input_ids=PROMPT, sampling_params=LONG)) for _ in range(MAX_RUNNING)
    ]
    queued = asyncio.create_task(engine.generate(rid="q" * 32, sampling_params=LONG))
    while not queued.done():  # one abort can come before the request, and others may not end meanwhile
        await engine.abort("q" * 32)
        await asyncio.wait({queued}, timeout=0.1)
    answer = await queued
    assert ("abort", None, []) == (
        reason_of(answer)["type"],
        reason_of(answer).get("status_code"),
        answer["output_ids"],
    )
    await engine.abort_all()
    await asyncio.gather(*running)


async def test_pool_and_memory_of_an_engine_are_reported(engine: ObservedSGLang) -> None:
    info = await engine.require_suitable(memory_saver=False, gpus=0)
    assert POOL_TOKENS == info.pool_tokens
    both = info.mapped_bytes((WEIGHTS, KV_CACHE))  # on a CPU the weights alone are lost in what other programs take
    assert both is not None
    assert both > 0


async def test_h56_failed_health_probe_leaves_the_engine_unready_until_it_is_repaired(engine: ObservedSGLang) -> None:
    await engine.pause()
    async with engine.session.get(f"{engine.url}/health_generate") as answer:
        assert 503 == answer.status
    assert not await engine.is_up()
    await engine.continue_()
    assert not await engine.takes_requests()
    async with asyncio.timeout(CALL_S):
        while True:
            with contextlib.suppress(CallRefused):  # a probe that a busy machine was too slow for
                await engine.repair()
                break
    assert await engine.takes_requests()


async def test_h2_release_while_busy_kills_the_engine_and_the_stream_keeps_what_it_has(
    engine: ObservedSGLang, gate: str, hearing: Hearing, server: ServedExports
) -> None:
    """Last: the engine is gone afterwards."""
    running = asyncio.create_task(ask(engine, f"{gate}/generate", input_ids=PROMPT, sampling_params=LONG))
    openai = [asyncio.create_task(ask(engine, gate + path, **ENDLESS, **body)) for path, body in OPENAI.items()]
    tokens = engine.stream(input_ids=PROMPT, sampling_params=LONG)
    while len(hearing.begun) < 1 + len(openai):
        await anext(tokens)
    beside = await engine.until_running(tokens)
    release = asyncio.create_task(engine.post("/release_memory_occupation", {}))
    try:
        async with asyncio.timeout(120):
            _, answer = await running
            counted = [whole["usage"]["completion_tokens"] for _, whole in await asyncio.gather(*openai)]
    finally:
        for task in (beside, release):
            task.cancel()
        await asyncio.gather(beside, release, return_exceptions=True)
    assert ("abort", True) == (reason_of(answer)["type"], len(answer["output_ids"]) > 0)
    assert all(tokens > 0 for tokens in counted), "also what the OpenAI routes had made"
    assert 0 != await asyncio.to_thread(server.engine.process.wait, 120)


async def stays_open(task: asyncio.Task[Any], seconds: float) -> None:
    """Check that the task does not end for so many seconds."""
    done, _ = await asyncio.wait({task}, timeout=seconds)
    assert not done
