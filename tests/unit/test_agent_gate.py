"""The gate between callers and an engine: counting, closing, handing back. The engine is the fake one, in process."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from colocated_rl_agent.drivers.sglang import SGLang
from colocated_rl_agent.gate import Backend, Gate, Refused, engine_request, last_state
from colocated_rl_api.gate_wire import MAX_REQUEST_BYTES, GateState
from colocated_rl_api.ladder import WeightVersion
from fakes.engine import FakeEngine, Sample
from fakes.weights import write_export

VERSION = WeightVersion(2, 1)
DEADLINE_S = 10.0
PROMPT = [5, 6, 7]
ENDLESS = {"max_new_tokens": 4000, "ignore_eos": True, "stream_interval": 1}
SHORT = {"max_new_tokens": 6, "ignore_eos": True}


@dataclass
class Scene:
    """A gate in front of a fake engine, both on real sockets."""

    engine: FakeEngine
    gate: Gate
    backend: Backend
    session: aiohttp.ClientSession
    url: str
    ended: list[tuple[str, int]] = field(default_factory=list)

    async def post(self, body: Any = None, **request: Any) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps({"input_ids": PROMPT, **request}).encode()
        async with self.session.post(f"{self.url}/generate", data=data) as answer:
            return answer.status, await answer.json(content_type=None)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not is_so():  # noqa: ASYNC110 - many things make it so
                await asyncio.sleep(0.002)

    def generated(self) -> list[Sample]:
        return [sample for sample in self.engine.samples.values() if sample.output]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    write_export(tmp_path / "export", version=str(VERSION), weight=1.0)
    engine = FakeEngine(tmp_path / "export", str(VERSION), admin_key="key", memory_saver=False, token_s=0.001)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with (
        TestServer(engine.app(), handler_cancellation=True) as engine_server,
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        url = str(engine_server.make_url("")).rstrip("/")
        driver = SGLang(session, url=url, admin_key="key", call_s=5.0)
        ended: list[tuple[str, int]] = []
        gate = Gate(session, count=lambda outcome, tokens: ended.append((outcome, tokens)))
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.add_routes(gate.routes())
        async with TestServer(app, handler_cancellation=True) as gate_server:
            backend = Backend(url, "e1", VERSION, driver.abort)
            it = Scene(engine, gate, backend, session, str(gate_server.make_url("")).rstrip("/"), ended)
            gate.open(backend)
            yield it
            gate.close()
            await driver.abort_all()


async def test_open_gate_answers_as_the_engine_would(scene: Scene) -> None:
    status, answer = await scene.post(sampling_params=SHORT, return_logprob=True)
    assert 200 == status
    assert {"type": "length", "length": 6} == answer["meta_info"]["finish_reason"]
    assert 6 == len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"])
    assert [("finished", 6)] == scene.ended


async def test_closed_gate_refuses_at_once_with_its_epoch(scene: Scene) -> None:
    scene.gate.enter_epoch(12)
    scene.gate.close()
    assert (503, {"error": "closed", "epoch": 12}) == await scene.post(sampling_params=SHORT)
    assert [] == scene.engine.calls, "nothing reached the engine"


async def test_request_is_counted_until_it_has_ended(scene: Scene) -> None:
    running = asyncio.create_task(scene.post(sampling_params=ENDLESS))
    await scene.until(lambda: bool(scene.generated()))
    scene.gate.close()
    assert 1 == scene.gate.in_flight
    scene.engine.abort("", everything=True)
    async with asyncio.timeout(DEADLINE_S):
        await scene.gate.settled()
    assert 0 == scene.gate.in_flight
    status, answer = await running
    assert (200, "abort") == (status, answer["meta_info"]["finish_reason"]["type"])
    assert "aborted" == scene.ended[0][0]


async def test_h1_body_that_arrives_after_the_gate_closed_does_not_reach_the_engine(scene: Scene) -> None:
    first_half = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"input_ids":'
        await first_half.wait()
        yield b"[5,6]}"

    async def post() -> int:
        async with scene.session.post(f"{scene.url}/generate", data=slowly()) as answer:
            return answer.status

    posting = asyncio.create_task(post())
    await scene.until(lambda: scene.gate.in_flight == 1)
    scene.gate.close()
    first_half.set()
    assert 503 == await posting
    assert [] == scene.engine.calls


async def test_h4_ids_at_the_engine_are_the_gates_own_and_of_one_length(scene: Scene) -> None:
    for _ in range(3):
        await scene.post(sampling_params=SHORT, rid="a")
    ids = [body["rid"] for route, body in scene.engine.calls if route == "/generate"]
    assert {32} == {len(rid) for rid in ids}
    assert 3 == len(set(ids))


async def test_h8_error_of_the_engine_keeps_its_status(scene: Scene) -> None:
    status, answer = await scene.post(sampling_params={"max_new_tokens": 100_000})
    assert 400 == status
    assert "context length" in answer["error"]


async def test_h38_request_that_its_caller_left_is_aborted_at_the_engine(scene: Scene) -> None:
    running = asyncio.create_task(scene.post(sampling_params=ENDLESS))
    await scene.until(lambda: bool(scene.generated()))
    running.cancel()
    await scene.until(lambda: not scene.engine.samples)
    await scene.until(lambda: scene.gate.in_flight == 0)
    assert "client_gone" == scene.ended[0][0]


async def test_h58_broken_stream_hands_back_what_was_read(scene: Scene) -> None:
    scene.engine.faults["/generate"] = "cut"
    status, answer = await scene.post(sampling_params=ENDLESS, return_logprob=True)
    assert (200, "abort") == (status, answer["meta_info"]["finish_reason"]["type"])
    assert 1 <= len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"])
    assert "2-1" == answer["meta_info"]["weight_version"]


async def test_h6_engine_that_is_gone_before_the_first_token_gives_an_empty_abort(scene: Scene) -> None:
    scene.gate.open(Backend("http://127.0.0.1:9", "gone", VERSION, scene.backend.abort))
    status, answer = await scene.post(sampling_params=SHORT)
    assert (200, [], "abort") == (status, answer["output_ids"], answer["meta_info"]["finish_reason"]["type"])


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[]",
        b"3",
        b'{"input_ids":[1],"stream":true}',
        b'{"input_ids":[[1],[2]]}',
        b'{"text":["a","b"]}',
        b'{"input_ids":[1],"sampling_params":{"n":2}}',
        b'{"input_ids":[1],"sampling_params":[]}',
        b'{"input_ids":3}',
    ],
)
async def test_request_that_a_gate_does_not_serve_is_a_400_that_says_why(scene: Scene, body: bytes) -> None:
    status, answer = await scene.post(body)
    assert 400 == status
    assert answer["error"]
    assert 0 == scene.gate.in_flight


async def test_body_over_the_limit_is_refused(scene: Scene) -> None:
    body = io.BytesIO(b" " * (MAX_REQUEST_BYTES + 1))
    async with scene.session.post(f"{scene.url}/generate", data=body) as answer:
        assert 413 == answer.status
    assert 0 == scene.gate.in_flight


async def test_state_is_told_at_once_and_on_each_change(scene: Scene) -> None:
    async with scene.session.get(f"{scene.url}/v1/gate") as answer:
        states = [GateState.model_validate_json(await answer.content.readline())]
        scene.gate.close()
        states.append(GateState.model_validate_json(await answer.content.readline()))
        scene.gate.enter_epoch(4)
        states.append(GateState.model_validate_json(await answer.content.readline()))
        scene.gate.open(scene.backend)
        states.append(GateState.model_validate_json(await answer.content.readline()))
    assert [True, False, False, True] == [state.open for state in states]
    assert [0, 0, 4, 4] == [state.epoch for state in states]
    assert ("e1", VERSION) == (states[-1].incarnation, states[-1].version)


async def test_hundred_requests_at_the_instant_of_closing_all_end_and_the_count_balances(scene: Scene) -> None:
    requests = [asyncio.create_task(scene.post(sampling_params=ENDLESS)) for _ in range(100)]
    await scene.until(lambda: len(scene.generated()) > 20)
    scene.gate.close()
    while scene.gate.in_flight:
        scene.engine.abort("", everything=True)
        await asyncio.sleep(0.005)
    statuses = [status for status, _ in await asyncio.gather(*requests)]
    assert {200, 503} >= set(statuses)
    assert len(scene.ended) == sum(1 for route, _ in scene.engine.calls if route == "/generate")
    assert {} == scene.engine.samples


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["input_ids", "text", "sampling_params", "n", "stream"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.binary(max_size=50) | anything.map(lambda value: json.dumps(value).encode()))
def test_any_body_becomes_a_request_of_ours_or_a_400(body: bytes) -> None:
    try:
        request = engine_request(body)
    except Refused as refusal:
        status = refusal.status
    else:
        assert (True, 32) == (request["stream"], len(request["rid"]))
        assert "stream_interval" in request["sampling_params"]
        status = 400
    assert 400 == status


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ({"type": "abort", "message": "full", "status_code": 503, "err_type": None}, 503),
        ({"type": "abort", "message": "Internal", "status_code": 500, "err_type": None}, 500),
        ({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}, None),
        ({"type": "abort", "message": "Abort in waiting queue"}, None),
        ({"type": "abort", "message": "Aborted by AbortReq.", "status_code": 400}, None),
        ({"type": "stop", "matched": 2}, None),
    ],
)
def test_abort_of_a_switch_is_told_from_an_error_of_the_engine(reason: dict[str, Any], status: int | None) -> None:
    event = json.dumps({"text": "", "output_ids": [4], "meta_info": {"id": "r", "finish_reason": reason}}).encode()
    if status is None:
        assert reason["type"] == last_state(event, rid="r", version=VERSION)["meta_info"]["finish_reason"]["type"]
    else:
        with pytest.raises(Refused) as refusal:
            last_state(event, rid="r", version=VERSION)
        assert status == refusal.value.status
