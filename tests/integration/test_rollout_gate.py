"""The controller's client against an agent's own gate: each outcome arrives as what it was."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from waiting import until

from colocated_rl_agent.gate.data_port import DataPort
from colocated_rl_agent.gate.entrance import Backend
from colocated_rl_agent.gate.gate import Gate
from colocated_rl_api.gate_wire import GATE_LINE_S
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_member.data import DataClient
from colocated_rl_rollout.engines import engine_client
from colocated_rl_rollout.engines.engine_client import (
    BEGIN_AT_ONCE,
    AnswerGarbled,
    AnswerUnversioned,
    AttemptLost,
    EngineClient,
    GateBusy,
    GateClosed,
    GateConnector,
    GenerateRequest,
    RequestRejected,
    gate_socket,
)
from colocated_rl_rollout.rules.samples import Finish, Span, Tokens
from fakes.engine import CONTEXT, END_TOKEN, FakeEngine
from fakes.exhausted import no_descriptors
from fakes.rollout import JOB_UID, JobOnDisk, make_spec
from fakes.serving import listen
from fakes.weights import logprob, write_export

VERSION = WeightVersion(4, 2)
WEIGHT = 0.5


@dataclass
class EngineClientScene:
    engine: FakeEngine
    gate: Gate
    backend: Backend
    client: EngineClient

    async def open(self) -> None:
        self.gate.open(self.backend)
        await until(lambda: self.client.is_open)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[EngineClientScene]:
    job = JobOnDisk.write(tmp_path, make_spec())
    write_export(tmp_path / "export", version=str(VERSION), weight=WEIGHT)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        engine = FakeEngine(tmp_path / "export", str(VERSION), admin_key="", memory_saver=False, token_s=0.001)
        url = f"http://127.0.0.1:{await listen(stack, engine.app())}"

        async def abort(rid: str) -> None:
            engine.abort(rid, everything=False)

        gate = Gate()
        data = DataPort(gate.serve, admits=job.tls.admits).listening("127.0.0.1", 0, job.tls.data_context)
        endpoint = Endpoint(pod="job-gpu-0-0", address="127.0.0.1", port=await stack.enter_async_context(data))
        client = EngineClient(endpoint, DataClient(session, job.tls, JOB_UID), settle_s=5, changed=lambda: None)
        watching = asyncio.create_task(client.watch())
        yield EngineClientScene(engine, gate, Backend(url, "a", VERSION, abort), client)
        watching.cancel()
        await asyncio.wait([watching])


def request(prompt: list[int], limit: int = 200) -> GenerateRequest:
    return GenerateRequest(prompt, limit, 1.0, {END_TOKEN})


async def test_a_response_comes_back_with_log_probabilities_and_the_version_that_made_it(
    scene: EngineClientScene,
) -> None:
    await scene.open()
    assert (VERSION, True) == (scene.client.version, scene.client.takes_requests)
    generated = await scene.client.generate(request([5, 6, 7]))
    assert Finish.STOP is generated.finish
    ids = generated.tokens.ids.tolist()
    assert END_TOKEN == ids[-1]
    assert [span.version for span in generated.tokens.spans] == [VERSION]
    expected = [logprob(WEIGHT, before, token) for before, token in zip([7, *ids], ids, strict=False)]
    assert expected == pytest.approx(generated.tokens.logp.tolist())


async def test_the_limit_is_the_one_that_was_asked_for(scene: EngineClientScene) -> None:
    await scene.open()
    generated = await scene.client.generate(request([5, 6, 7], limit=3))
    assert (Finish.LENGTH, 3) == (generated.finish, len(generated.tokens))


async def test_a_switch_brings_back_what_was_generated(scene: EngineClientScene) -> None:
    await scene.open()
    scene.engine.token_s = 0.02
    asked = asyncio.create_task(scene.client.generate(request([5, 6, 7])))
    await until(lambda: any(sample.output for sample in scene.engine.samples.values()))
    scene.gate.close()
    scene.engine.abort("", everything=True)
    generated = await asked
    assert generated.finish is None
    assert len(generated.tokens) == len(generated.tokens.logp) > 0
    await until(lambda: not scene.client.is_open)
    with pytest.raises(GateClosed):
        await scene.client.generate(request([5, 6, 7]))


async def test_what_was_read_from_a_lost_engine_is_kept(scene: EngineClientScene) -> None:
    await scene.open()
    scene.engine.faults["/generate"] = "cut"
    generated = await scene.client.generate(request([5, 6, 7]))
    assert (None, 1) == (generated.finish, len(generated.tokens))
    assert [span.version for span in generated.tokens.spans] == [VERSION]


@pytest.mark.parametrize("named", ["", "default"])
@pytest.mark.parametrize("fault", [None, "cut"])
async def test_f26_tokens_of_weights_that_have_no_version_get_none_and_are_not_used(
    scene: EngineClientScene, named: str, fault: str | None
) -> None:
    """An engine that somebody started or updated without a version names none. The gate then named its own."""
    await scene.open()
    scene.engine.version = named
    if fault:
        scene.engine.faults["/generate"] = fault
    with pytest.raises(AnswerUnversioned, match=r"rollout\.unversionedTokens: Accept"):
        await scene.client.generate(request([5, 6, 7]))


@pytest.mark.parametrize("streams", [False, True])
async def test_f26_a_job_may_accept_tokens_that_have_no_version_and_counts_them(
    scene: EngineClientScene, streams: bool
) -> None:
    await scene.open()
    scene.engine.version = "default"
    counted: list[int] = []
    scene.client._accepts_unversioned = True
    scene.client._count = lambda tokens: counted.append(tokens.unversioned)
    grown: list[Tokens] = []
    generated = await scene.client.generate(request([5, 6, 7]), grown.append if streams else None)
    length = len(generated.tokens)
    assert ((Span(None, 0, length),), [length]) == (generated.tokens.spans, counted)
    assert {None} >= {span.version for tokens in grown for span in tokens.spans}


async def test_a_request_that_the_engine_will_never_take_is_distinguished_from_trouble_that_passes(
    scene: EngineClientScene,
) -> None:
    await scene.open()
    with pytest.raises(
        RequestRejected, match="answered 400 and 64 characters: prompt and response are longer than its context"
    ):
        await scene.client.generate(request([5] * CONTEXT))
    assert scene.client.takes_requests, "the engine answered: what one client sends costs no other"
    scene.gate.open(Backend("http://127.0.0.1:1", "b", VERSION, scene.backend.abort))
    generated = await scene.client.generate(request([5, 6, 7]))
    assert (None, 0) == (generated.finish, len(generated.tokens))
    assert not scene.client.takes_requests, "an engine that brings nothing is let be for a while"


async def test_a_gate_without_room_is_distinguished_from_an_attempt(scene: EngineClientScene) -> None:
    await scene.open()
    scene.gate.in_flight = scene.gate._full.most
    with pytest.raises(GateBusy, match="answered 429 and 64 characters"):
        await scene.client.generate(request([5, 6, 7]))
    assert not scene.client.takes_requests, "it is let be for a while"


async def test_an_answer_without_end_is_not_read_to_its_end(scene: EngineClientScene) -> None:
    await scene.open()
    scene.client._max_answer_bytes = 100
    with pytest.raises(AnswerGarbled, match="more than 100 bytes"):
        await scene.client.generate(request([5, 6, 7]))


async def test_an_attempt_that_begins_as_its_gate_is_lost_is_given_up_too(scene: EngineClientScene) -> None:
    """Only attempts under way got a deadline: one that was about to begin waited for ever."""
    await scene.open()
    scene.engine.token_s = 3600.0
    scene.client.abandon()
    async with asyncio.timeout(60):
        with pytest.raises(AttemptLost, match="given up"):
            await scene.client.generate(request([5, 6, 7]))


def test_a_connection_to_a_machine_that_is_gone_ends() -> None:
    """Nothing else would end a request whose answer the network lost, while its gate is open."""
    with gate_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("", 0))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert [20, 20, 3, 80_000] == [made.getsockopt(socket.IPPROTO_TCP, option) for option in options]


def test_what_log_probabilities_do_not_describe_is_off_whatever_the_engine_prefers() -> None:
    sampling = json.loads(request([5]).body())["sampling_params"]
    off = {"top_p": 1, "top_k": -1, "min_p": 0, "min_new_tokens": 0}
    penalties = {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}
    asked = {"max_new_tokens": 200, "temperature": 1, "stop_token_ids": [END_TOKEN]}
    assert {**off, **penalties, **asked} == sampling


async def test_a_gate_that_sends_nothing_is_lost_and_asked_again(
    scene: EngineClientScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine may be gone without a word. A gate says a line every so often, here too seldom."""
    monkeypatch.setattr(engine_client, "SILENCE_S", GATE_LINE_S / 20)
    monkeypatch.setattr(engine_client, "RECONNECT_S", 0.01)
    await scene.open()
    seen: list[bool] = []
    client = EngineClient(
        scene.client.endpoint, scene.client._client, settle_s=5, changed=lambda: seen.append(client.is_open)
    )
    watching = asyncio.create_task(client.watch())
    await until(lambda: len(seen) >= 3)
    watching.cancel()
    await asyncio.wait([watching])
    assert [True, False, True] == seen[:3]


async def test_a_silent_agent_does_not_hold_a_request_for_ever(scene: EngineClientScene) -> None:
    await scene.open()
    scene.engine.token_s = 3600.0
    asked = asyncio.create_task(scene.client.generate(request([5, 6, 7])))
    await until(lambda: scene.engine.samples)
    scene.client.abandon()
    with pytest.raises(AttemptLost, match="given up"):
        await asked
    await until(lambda: all(sample.abort_asked for sample in scene.engine.samples.values()))


async def test_a_request_for_which_there_is_no_descriptor_is_sent_later_and_its_gate_is_not_lost(
    scene: EngineClientScene,
) -> None:
    """It ended as if the engine had been lost, and took the gate with it."""
    await scene.open()
    with no_descriptors(), pytest.raises(GateBusy):
        await scene.client.generate(request([5, 6, 7]))
    assert scene.client.is_open
    await until(lambda: scene.client.takes_requests)
    assert len((await scene.client.generate(request([5, 6, 7]))).tokens)


async def test_few_connections_to_a_gate_begin_at_once_and_others_as_those_end() -> None:
    """A gate ends what is silent for longest when it has no room, and thousands that begin together are silent."""
    arrived: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: arrived.append(writer), "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, aiohttp.ClientSession(connector=GateConnector()) as session:
        calls = [asyncio.create_task(session.get(url)) for _ in range(3 * BEGIN_AT_ONCE)]
        await until(lambda: len(arrived) >= BEGIN_AT_ONCE)
        for ended in range(1, 4):  # a handshake that fails makes room for one
            arrived[ended].transport.abort()
            await until(lambda ended=ended: len(arrived) >= BEGIN_AT_ONCE + ended)  # type: ignore[misc]
            assert BEGIN_AT_ONCE + ended == len(arrived)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for writer in arrived:
            writer.transport.abort()
