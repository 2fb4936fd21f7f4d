"""The gate between callers and an engine: counting, closing, handing back. The engine is the fake one, in process."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import io
import itertools
import json
import math
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import BaseTestServer, TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import until
from yarl import URL

from colocated_rl_agent.drivers.base import OutcomeUnknown
from colocated_rl_agent.drivers.sglang import SGLang
from colocated_rl_agent.gate import gate as gate_module
from colocated_rl_agent.gate.call import Call
from colocated_rl_agent.gate.data_port import CALLER_S, CallerConnection, DataPort
from colocated_rl_agent.gate.dialects import (
    DIALECTS,
    DONE,
    OF_EACH_SAMPLE,
    Dialect,
    GateRefusal,
    Native,
    join,
)
from colocated_rl_agent.gate.entrance import Backend
from colocated_rl_agent.gate.gate import Gate
from colocated_rl_agent.gate.limiter import Limiter
from colocated_rl_agent.gate.running import (
    LARGE_BYTES,
    MAX_COMMENT_BYTES,
    MAX_EVENT_BYTES,
    Running,
    ServerSentEvents,
)
from colocated_rl_agent.gate.upstream import (
    MAX_HEARD_BYTES,
    Take,
    Upstream,
    UpstreamConnection,
    UpstreamLost,
)
from colocated_rl_api.columns import COLUMNS, CONTENT_TYPE, HEADER, unpack
from colocated_rl_api.gate_wire import MAX_REQUEST_BYTES, GateState
from colocated_rl_api.rungs import WeightVersion
from fakes import serving
from fakes.engine import VOCABULARY, EngineRequest, FakeEngine
from fakes.exhausted import no_descriptors
from fakes.sse import events
from fakes.weights import write_export

VERSION = WeightVersion(2, 1)
DEADLINE_S = 60.0
PROMPT = [5, 6, 7]
ENDLESS = {"max_new_tokens": 4000, "ignore_eos": True}
SHORT = {"max_new_tokens": 6, "ignore_eos": True}
PROMPTS: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": PROMPT},
    "/v1/completions": {"model": "m", "prompt": PROMPT},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "abc"}]},
}
OPENAI = [path for path in PROMPTS if path != "/generate"]


@dataclass
class GateScene:
    """A gate in front of a fake engine, both on real sockets."""

    engine: FakeEngine
    gate: Gate
    backend: Backend
    session: aiohttp.ClientSession
    engine_server: BaseTestServer
    url: str
    ended: list[tuple[str, int]] = field(default_factory=list)

    async def post(
        self, body: bytes | None = None, *, path: str = "/generate", **request: Any
    ) -> tuple[int, dict[str, Any]]:
        data = body if body is not None else json.dumps(PROMPTS[path] | request).encode()
        async with self.session.post(self.url + path, data=data) as answer:
            return answer.status, await answer.json(content_type=None)

    async def stream(self, *, path: str = "/generate", **request: Any) -> list[dict[str, Any]]:
        """Every event of a streamed answer, which must end with [DONE]."""
        received: list[dict[str, Any]] = []
        async with self.session.post(self.url + path, json=PROMPTS[path] | request | {"stream": True}) as answer:
            assert (200, "text/event-stream") == (answer.status, answer.content_type)
            async for event in events(answer.content):
                if event == DONE:
                    return received
                received.append(json.loads(event))
        raise AssertionError(f"a stream without an end, after {received[-1:]}")

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not is_so():  # noqa: ASYNC110 - many things make it so
                await asyncio.sleep(0.002)

    def break_engine_connections(self) -> None:
        runner = self.engine_server.runner
        assert runner is not None
        serving.hang_up(runner)

    def generated(self) -> list[EngineRequest]:
        return [sample for sample in self.engine.samples.values() if sample.output]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[GateScene]:
    async with served_gate(tmp_path) as it:
        yield it


@asynccontextmanager
async def served_gate(directory: Path) -> AsyncIterator[GateScene]:
    if not (directory / "export").exists():
        write_export(directory / "export", version=str(VERSION), weight=1.0)
    engine = FakeEngine(directory / "export", str(VERSION), admin_key="key", memory_saver=False, token_s=0.001)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with (
        TestServer(engine.app(), handler_cancellation=True) as engine_server,
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        url = str(engine_server.make_url("")).rstrip("/")
        driver = SGLang(session, url=url, admin_key="key", call_s=DEADLINE_S)
        ended: list[tuple[str, int]] = []
        gate = Gate(count=lambda ending, tokens: ended.append((ending, tokens)))
        async with DataPort(gate.serve).listening("127.0.0.1", 0) as port:
            backend = Backend(url, "e1", VERSION, driver.abort, VOCABULARY)
            it = GateScene(engine, gate, backend, session, engine_server, f"http://127.0.0.1:{port}", ended)
            gate.open(backend)
            yield it
            gate.close()
            await driver.abort_all()


async def test_open_gate_answers_as_the_engine_would(scene: GateScene) -> None:
    status, answer = await scene.post(sampling_params=SHORT, return_logprob=True)
    assert 200 == status
    assert {"type": "length", "length": 6} == answer["meta_info"]["finish_reason"]
    assert 6 == len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"])
    assert [("finished", 6)] == scene.ended


async def test_request_goes_to_another_engine_if_one_takes_no_connection(scene: GateScene) -> None:
    """The one had fewest requests in flight, because each ended at once: it took all of them, and lost them."""
    ended: list[tuple[str, int]] = []
    gate = Gate(engines=2, count=lambda ending, tokens: ended.append((ending, tokens)))
    with closing(socket.socket()) as refusing:  # bound, and not listening
        refusing.bind(("127.0.0.1", 0))
        gate.open(dataclasses.replace(scene.backend, url=f"http://127.0.0.1:{refusing.getsockname()[1]}"), engine=0)
        gate.open(scene.backend, engine=1)
        async with DataPort(gate.serve).listening("127.0.0.1", 0) as port:
            scene.url = f"http://127.0.0.1:{port}"
            answers = await asyncio.gather(*(scene.post(sampling_params=SHORT) for _ in range(10)))
            assert ["length"] * 10 == [answer["meta_info"]["finish_reason"]["type"] for _, answer in answers]
            assert [("finished", 6)] * 10 == ended
            gate.close(engine=1)
            _, answer = await scene.post(sampling_params=SHORT)
    assert "abort" == answer["meta_info"]["finish_reason"]["type"], "of the one that is left it is said as ever"
    assert ("aborted", 0) == ended[-1]
    assert 0 == gate.in_flight


async def test_closed_gate_refuses_at_once_with_its_epoch(scene: GateScene) -> None:
    scene.gate.enter_epoch(12)
    scene.gate.close()
    assert (503, {"error": "closed", "epoch": 12}) == await scene.post(sampling_params=SHORT)
    assert [] == scene.engine.calls, "nothing reached the engine"


async def test_h13_h37_request_is_counted_until_it_has_ended(scene: GateScene) -> None:
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


async def test_h1_body_that_arrives_after_the_gate_closed_does_not_reach_the_engine(scene: GateScene) -> None:
    first_half = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"input_ids":'
        await first_half.wait()
        yield b"[5,6]}"

    async def post() -> int:
        async with scene.session.post(f"{scene.url}/generate", data=slowly()) as answer:
            return answer.status

    posting = asyncio.create_task(post())
    await scene.until(lambda: scene.gate._reading._value < gate_module.MAX_READING)
    scene.gate.close()
    first_half.set()
    assert 503 == await posting
    assert [] == scene.engine.calls


async def test_h4_ids_at_the_engine_are_the_gates_own_and_of_one_length(scene: GateScene) -> None:
    for _ in range(3):
        await scene.post(sampling_params=SHORT, rid="a")
    ids = [body["rid"] for route, body in scene.engine.calls if route == "/generate"]
    assert {32} == {len(rid) for rid in ids}
    assert 3 == len(set(ids))


async def test_h8_error_of_the_engine_keeps_its_status(scene: GateScene) -> None:
    status, answer = await scene.post(sampling_params={"max_new_tokens": 100_000})
    assert 400 == status
    assert "context length" in answer["error"]


async def test_h38_request_that_its_caller_left_is_aborted_at_the_engine(scene: GateScene) -> None:
    running = asyncio.create_task(scene.post(sampling_params=ENDLESS))
    await scene.until(lambda: bool(scene.generated()))
    running.cancel()
    await scene.until(lambda: not scene.engine.samples)
    await scene.until(lambda: scene.gate.in_flight == 0)
    assert "client_gone" == scene.ended[0][0]
    (rid,) = [body["rid"] for route, body in scene.engine.calls if route == "/generate"]
    assert ("/abort_request", {"rid": rid, "abort_all": False}) in scene.engine.calls, "not left to what it notices"


async def test_abort_that_the_engine_fails_after_nobody_waits_for_it_is_no_error(
    scene: GateScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio reported it once for each request: an exception that nobody had retrieved."""
    monkeypatch.setattr(gate_module, "ABORT_S", 0.0)
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    fails, has_failed = asyncio.Event(), asyncio.Event()

    async def abort(rid: str) -> None:
        await fails.wait()
        has_failed.set()
        raise OutcomeUnknown("the engine is lost")

    await scene.gate._abort(dataclasses.replace(scene.backend, abort=abort), "rid")
    fails.set()
    await has_failed.wait()
    await asyncio.sleep(0)
    gc.collect()
    assert [] == reported


async def test_h58_broken_stream_hands_back_what_was_read(scene: GateScene) -> None:
    scene.engine.faults["/generate"] = "cut"
    status, answer = await scene.post(sampling_params=ENDLESS, return_logprob=True)
    assert (200, "abort") == (status, answer["meta_info"]["finish_reason"]["type"])
    assert 1 <= len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"])
    assert "2-1" == answer["meta_info"]["weight_version"]


async def test_h6_engine_that_is_gone_before_the_first_token_gives_an_empty_abort(scene: GateScene) -> None:
    scene.gate.open(Backend("http://127.0.0.1:9", "gone", VERSION, scene.backend.abort))
    status, answer = await scene.post(sampling_params=SHORT)
    assert (200, [], "abort") == (status, answer["output_ids"], answer["meta_info"]["finish_reason"]["type"])


async def test_request_for_which_the_gate_has_no_descriptor_is_told_to_come_later(
    scene: GateScene, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended as if the engine had been lost, of which the log said nothing."""
    async with scene.session.get(scene.url + "/v1/nothing") as answer:  # whose connection is kept
        await answer.read()
    with no_descriptors():
        statuses = [(await scene.post())[0] for _ in range(3)]
    assert [429, 429, 429] == statuses
    assert 0 == scene.gate.in_flight
    assert 1 == [record.message for record in caplog.records].count("descriptors exhausted")
    assert 200 == (await scene.post())[0]


# ------------------------------------------------------------------------------------------------- answers in columns
async def in_columns(scene: GateScene, **request: Any) -> tuple[str, bytes]:
    """Return the content type and the body of an answer for a caller that reads columns."""
    headers = {HEADER: COLUMNS}
    body = PROMPTS["/generate"] | request
    async with scene.session.post(scene.url + "/generate", json=body, headers=headers) as answer:
        assert 200 == answer.status
        return answer.content_type, await answer.read()


@pytest.mark.parametrize("ending", ["length", "switch", "cut"])
async def test_an_answer_in_columns_has_what_it_has_in_json_however_it_ended(scene: GateScene, ending: str) -> None:
    if ending == "cut":
        scene.engine.faults["/generate"] = "cut"
    sampling = SHORT if ending == "length" else ENDLESS
    asking = asyncio.create_task(in_columns(scene, sampling_params=sampling, return_logprob=True))
    if ending == "switch":
        await scene.until(lambda: any(len(sample.output) > 3 for sample in scene.engine.samples.values()))
        scene.engine.abort("", everything=True)
    content_type, body = await asking
    assert CONTENT_TYPE == content_type
    read = unpack(body)
    ids, logp = np.frombuffer(read.ids, "<i4"), np.frombuffer(read.logp, "<f4")
    meta = read.head["meta_info"]
    assert ("length" if ending == "length" else "abort") == meta["finish_reason"]["type"]
    assert 1 <= len(ids) == len(logp) == meta["completion_tokens"]
    assert "2-1" == meta["weight_version"]
    if ending == "length":
        status, as_json = await scene.post(sampling_params=sampling, return_logprob=True)
        scored = as_json["meta_info"]["output_token_logprobs"]
        assert (200, as_json["output_ids"]) == (status, ids.tolist())
        assert np.array([entry[0] for entry in scored], np.float32).tolist() == logp.tolist()


async def test_an_answer_without_a_log_probability_for_each_token_is_json_for_whoever_asks(scene: GateScene) -> None:
    content_type, body = await in_columns(scene, sampling_params=SHORT)
    assert "application/json" == content_type
    assert json.loads(body)["output_ids"]


async def test_a_stream_is_no_columns(scene: GateScene) -> None:
    content_type, _ = await in_columns(scene, sampling_params=SHORT, return_logprob=True, stream=True)
    assert "text/event-stream" == content_type


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b"3", b"\xff{}", b'{"a":' * 5000])
async def test_body_that_is_no_object_is_a_400_that_says_so(scene: GateScene, path: str, body: bytes) -> None:
    status, answer = await scene.post(body, path=path)
    assert (400, True) == (status, answer["error"].startswith("the body "))
    assert [] == scene.engine.calls


@pytest.mark.parametrize(
    ("path", "asked", "named"),
    [
        ("/generate", {"input_ids": [[1], [2]]}, "input_ids"),
        ("/generate", {"input_ids": [[1]]}, "input_ids"),
        ("/generate", {"input_ids": 3}, "input_ids"),
        ("/generate", {"input_ids": [True]}, "input_ids"),
        ("/generate", {"text": ["a", "b"]}, "text"),
        ("/generate", {"text": "", "input_ids": None}, "text"),
        ("/generate", {"logprob_start_len": -2}, "logprob_start_len"),
        ("/generate", {"sampling_params": {"top_k": 10**12}}, "top_k"),
        *((path, {"top_k": most}, "top_k") for path in OPENAI for most in (10**12, 1e12, "1000000000000")),
        ("/v1/chat/completions", {"input_ids": ["1000000"]}, "input_ids"),
        ("/v1/chat/completions", {"input_ids": [1e6]}, "input_ids"),
        ("/v1/chat/completions", {"top_logprobs": "1000000"}, "top_logprobs"),
        ("/generate", {"input_ids": None, "input_embeds": [[[0.1]], [[0.2]]]}, "input_embeds"),
        ("/generate", {"positional_embed_overrides": {"a": 1}}, "positional_embed_overrides"),
        ("/generate", {"session_params": {"id": 5}}, "session_params"),
        *(("/generate", {name: [1]}, name) for name in OF_EACH_SAMPLE),
        *((path, {name: []}, name) for path in PROMPTS for name in ("return_hidden_states", "lora_id")),
        ("/generate", {"sampling_params": {"n": 2}}, "n and beam_width"),
        ("/generate", {"sampling_params": {"n": None}}, "n and beam_width"),
        ("/generate", {"sampling_params": {"beam_width": 2}}, "n and beam_width"),
        ("/generate", {"sampling_params": []}, "sampling_params"),
        ("/generate", {"sampling_params": [{"n": 1}, {"n": 1}]}, "sampling_params"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
        ("/v1/completions", {"prompt": [[1, 2]]}, "prompt"),
        ("/v1/completions", {"best_of": 2}, "n and best_of"),
        *((path, {"n": 2}, "n and best_of") for path in OPENAI),
        *((path, {"stream_options": "include_usage"}, "stream_options") for path in OPENAI),
        *((path, {"stream": "false"}, "stream") for path in PROMPTS),
    ],
)
async def test_request_that_a_gate_does_not_serve_is_a_400_that_says_why(
    scene: GateScene, path: str, asked: dict[str, Any], named: str
) -> None:
    status, answer = await scene.post(path=path, **asked)
    assert (400, True) == (status, answer["error"].startswith(f"{named} "))
    assert [] == scene.engine.calls
    assert 0 == scene.gate.in_flight


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        *(
            (path, {field: [5, token, 6]})
            for path, field in (
                ("/generate", "input_ids"), ("/v1/completions", "prompt"), ("/v1/chat/completions", "input_ids")
            )
            for token in (-1, VOCABULARY, 10**30)
        ),
        ("/generate", {"sampling_params": {"min_new_tokens": 2, "stop_token_ids": [2, VOCABULARY]}}),
        ("/generate", {"return_logprob": True, "top_logprobs_num": VOCABULARY + 1}),
        *((path, {"min_tokens": 2, "stop_token_ids": [-1]}) for path in OPENAI),
        ("/v1/completions", {"logprobs": VOCABULARY + 1}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": VOCABULARY + 1}),
        *(
            ("/generate", {"sampling_params": {name: value}})
            for name, value in (
                ("max_new_tokens", 64.0), ("max_new_tokens", True), ("min_new_tokens", 10**12),
                ("stream_interval", "x"), ("sampling_seed", 1.5), ("ignore_eos", 1), ("skip_special_tokens", 1),
                ("spaces_between_special_tokens", 0), ("temperature", True), ("top_p", "0.5"), ("json_schema", {}),
                ("structural_tag", {"type": "object"}), ("logit_bias", [1]), ("logit_bias", {"5": "x"}),
                ("stop", ["a", 1]), ("stop_token_ids", [2.0]), ("custom_params", {"a": [[1]]}),
                ("is_normalized", True), ("ebnf_full_assistant", None),
            )
        ),
        *(
            (path, {"sampling_params": {name: value}} if path == "/generate" else {name: value})
            for path in PROMPTS
            for name, value in (
                ("temperature", 1e39), ("temperature", math.nan), ("logit_bias", {"5": -1e39}),
                ("custom_params", {"a": {"b": {}}}), ("top_k", 1.0),
            )
        ),
        *((path, {"min_tokens": 10**12}) for path in OPENAI),
        ("/v1/chat/completions", {"chat_template_kwargs": {"spaces_between_special_tokens": 1}}),
    ],
)  # fmt: skip
async def test_what_an_engine_dies_of_does_not_reach_it(scene: GateScene, path: str, asked: dict[str, Any]) -> None:
    """Each of these ended the real one, and would have ended the next that it was sent to."""
    status, answer = await scene.post(path=path, **asked)
    assert 400 == status
    assert answer["error"].endswith((f"the {VOCABULARY} of the model", "that the engine bears"))
    assert [] == scene.engine.calls


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/generate", {"input_ids": [VOCABULARY - 1, 0], "top_logprobs_num": VOCABULARY}),
        ("/generate", {"sampling_params": {"max_new_tokens": 2, "stop_token_ids": [VOCABULARY]}}),  # of its tokenizer
        (
            "/generate",
            {
                "sampling_params": {
                    "max_new_tokens": 2, "temperature": 1, "top_p": None, "top_k": -1, "ignore_eos": True, "n": 1,
                    "stop": ["a"], "stop_token_ids": [], "json_schema": None, "logit_bias": {"5": -100, "6": 0.5},
                    "sampling_seed": -(1 << 62), "custom_params": {"a": 1, "b": [1.5, None], "c": {"d": "e"}},
                    "of another version": {},
                }
            },
        ),
        ("/v1/completions", {"prompt": [VOCABULARY - 1, 0], "logprobs": 5}),
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"logprobs": True, "chat_template_kwargs": {"enable_thinking": False}}),
    ],
)  # fmt: skip
async def test_what_an_engine_bears_reaches_it(scene: GateScene, path: str, asked: dict[str, Any]) -> None:
    status, _ = await scene.post(path=path, **asked)
    assert (200, 1) == (status, len(scene.engine.calls))


async def test_body_over_the_limit_is_refused(scene: GateScene) -> None:
    body = io.BytesIO(b" " * (MAX_REQUEST_BYTES + 1))
    async with scene.session.post(f"{scene.url}/generate", data=body) as answer:
        assert 413 == answer.status
    assert 0 == scene.gate.in_flight


async def test_state_is_reported_at_once_and_on_each_change(scene: GateScene) -> None:
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


async def test_hundred_requests_at_the_instant_of_closing_all_end_and_the_count_balances(scene: GateScene) -> None:
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


@pytest.mark.parametrize("path", OPENAI)
async def test_openai_route_answers_with_the_whole_its_tokens_and_their_version(scene: GateScene, path: str) -> None:
    status, answer = await scene.post(path=path, max_tokens=7, ignore_eos=True)
    (choice,) = answer["choices"]
    assert (200, "length") == (status, choice["finish_reason"])
    spans = [{"version": "2-1", "start": 0, "end": 7}]
    assert {"weight_version": "2-1", "weight_versions": spans} == answer["metadata"]
    text = choice["text"] if path == "/v1/completions" else choice["message"]["content"]
    assert 7 == len(text) == len(choice["logprobs"]["token_logprobs"]) == answer["usage"]["completion_tokens"]
    assert {"/v1/completions": "text_completion", "/v1/chat/completions": "chat.completion"}[path] == answer["object"]
    assert [("finished", 7)] == scene.ended


@pytest.mark.parametrize("path", OPENAI)
async def test_openai_stream_is_passed_on_piece_by_piece(scene: GateScene, path: str) -> None:
    pieces = await scene.stream(path=path, max_tokens=7, ignore_eos=True)
    assert all(piece["choices"] for piece in pieces), "the count of tokens was not asked for"
    assert [None, "length"] == [pieces[0]["choices"][0]["finish_reason"], pieces[-1]["choices"][0]["finish_reason"]]
    counted = await scene.stream(path=path, max_tokens=7, ignore_eos=True, stream_options={"include_usage": True})
    assert ([], 7) == (counted[-1]["choices"], counted[-1]["usage"]["completion_tokens"])
    assert [("finished", 7)] * 2 == scene.ended


@pytest.mark.parametrize("path", OPENAI)
async def test_openai_error_keeps_its_status(scene: GateScene, path: str) -> None:
    status, _ = await scene.post(path=path, max_tokens=100_000)
    assert 400 == status
    assert [("error", 0)] == scene.ended


async def test_stream_is_passed_on_as_it_comes_and_ends_as_the_engine_ends_it(scene: GateScene) -> None:
    chunks = await scene.stream(sampling_params={**SHORT, "max_new_tokens": 40}, return_logprob=True)
    assert [1, 17, 33, 40] == [len(chunk["output_ids"]) for chunk in chunks]
    assert [None, "length"] == [
        chunks[0]["meta_info"]["finish_reason"],
        chunks[-1]["meta_info"]["finish_reason"]["type"],
    ]
    assert [("finished", 40)] == scene.ended


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("streams", [False, True])
async def test_switch_ends_a_request_with_what_was_generated(scene: GateScene, path: str, streams: bool) -> None:
    request: dict[str, Any] = (
        {"sampling_params": ENDLESS} if path == "/generate" else {"max_tokens": 3000, "ignore_eos": True}
    )

    async def last_said() -> dict[str, Any]:
        if streams:
            return (await scene.stream(path=path, **request))[-1]
        return (await scene.post(path=path, **request))[1]

    running = asyncio.create_task(last_said())
    await scene.until(lambda: bool(scene.generated()))
    scene.gate.close()
    scene.engine.abort("", everything=True)
    answer = await running
    reason = answer["meta_info"]["finish_reason"]["type"] if path == "/generate" else finish_reason(answer)
    assert "abort" == reason
    ((ending, tokens),) = scene.ended
    assert ("aborted", True) == (ending, tokens > 0)
    assert 0 == scene.gate.in_flight


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("fault", ["cut", "torn"])
async def test_h17_h58_engine_that_is_lost_in_a_request_leaves_what_it_sent(
    scene: GateScene, fault: str, streams: bool
) -> None:
    scene.engine.faults["/generate"] = fault
    if streams:
        last = (await scene.stream(sampling_params=ENDLESS, return_logprob=True))[-1]
    else:
        _, last = await scene.post(sampling_params=ENDLESS, return_logprob=True)
    assert ("abort", "2-1") == (last["meta_info"]["finish_reason"]["type"], last["meta_info"]["weight_version"])
    assert (1 if fault == "cut" else 0) == len(last["output_ids"])
    assert "aborted" == scene.ended[0][0]


@pytest.mark.parametrize("path", OPENAI)
async def test_h58_openai_stream_that_breaks_off_ends_as_an_abort(scene: GateScene, path: str) -> None:
    running = asyncio.create_task(scene.stream(path=path, max_tokens=3000, ignore_eos=True))
    await scene.until(lambda: any(running.reply.tokens for running in scene.gate.entrances[0].running))
    scene.break_engine_connections()
    pieces = await running
    assert "abort" == finish_reason(pieces[-1])
    assert [("aborted", len(text_of(pieces)))] == scene.ended, "the fake's tokens are letters"
    assert len(text_of(pieces)) > 0


@pytest.mark.parametrize("path", OPENAI)
async def test_h58_openai_answer_of_an_engine_that_was_lost_counts_its_tokens(scene: GateScene, path: str) -> None:
    """Such a request counted none: the engine's usage came with the last chunk, and there was no last chunk."""
    scene.engine.faults[path] = "cut"
    _, answer = await scene.post(path=path, max_tokens=3000, ignore_eos=True)
    assert "abort" == finish_reason(answer)
    assert answer["usage"]["completion_tokens"] > 0
    assert [("aborted", answer["usage"]["completion_tokens"])] == scene.ended


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("options", "counts"),
    [({}, []), ({"include_usage": True}, [6]), ({"continuous_usage_stats": True}, [1, 2, 3, 4, 5, 6])],
)
async def test_caller_of_an_openai_stream_sees_the_counts_that_it_asked_for(
    scene: GateScene, path: str, options: dict[str, bool], counts: list[int]
) -> None:
    pieces = await scene.stream(path=path, max_tokens=6, ignore_eos=True, stream_options=options)
    assert counts == [piece["usage"]["completion_tokens"] for piece in pieces if piece["usage"]]
    assert 6 == len(text_of(pieces))
    assert [("finished", 6)] == scene.ended


@pytest.mark.parametrize("streams", [False, True])
async def test_h8_abort_that_is_an_error_is_no_interruption(scene: GateScene, streams: bool) -> None:
    scene.engine.faults["/generate"] = "queue_full"
    if streams:
        (last,) = await scene.stream(sampling_params=SHORT)
        assert 503 == last["meta_info"]["finish_reason"]["status_code"]
    else:
        status, answer = await scene.post(sampling_params=SHORT)
        assert (503, {"error": "The request queue is full."}) == (status, answer)
    assert [("error", 0)] == scene.ended


async def test_h7_h9_natural_end_wins_over_an_abort_that_comes_too_late(scene: GateScene) -> None:
    running = asyncio.create_task(scene.post(sampling_params=SHORT))
    await scene.until(lambda: not scene.engine.samples and bool(scene.engine.calls))
    scene.gate.close()
    scene.engine.abort("", everything=True)
    status, answer = await running
    assert (200, "length", 6) == (status, answer["meta_info"]["finish_reason"]["type"], len(answer["output_ids"]))


async def test_h31_parameters_of_the_caller_reach_the_engine_as_they_are(scene: GateScene) -> None:
    sampling = {"temperature": 0.7, "stop_token_ids": [2], **SHORT}
    await scene.post(sampling_params=sampling, return_logprob=True, logprob_start_len=-1)
    ((_, sent),) = scene.engine.calls
    assert sampling == {name: sent["sampling_params"][name] for name in sampling}
    assert (True, -1) == (sent["return_logprob"], sent["logprob_start_len"])


@pytest.mark.parametrize("path", PROMPTS)
async def test_h38_tokens_of_a_caller_that_left_are_counted_as_wasted(scene: GateScene, path: str) -> None:
    running = asyncio.create_task(scene.stream(path=path, sampling_params=ENDLESS, max_tokens=3000, ignore_eos=True))
    await scene.until(lambda: any(running.reply.tokens for running in scene.gate.entrances[0].running))
    running.cancel()
    await scene.until(lambda: bool(scene.ended))
    ((ending, tokens),) = scene.ended
    assert ("client_gone", True) == (ending, tokens > 0)
    await scene.until(lambda: not scene.engine.samples)


async def test_caller_that_does_not_read_its_stream_holds_up_no_switch(scene: GateScene) -> None:
    """It kept the count above zero without a deadline, and past settleSeconds that costs the engine."""
    host, _, port = scene.url.removeprefix("http://").partition(":")
    body = json.dumps({"input_ids": PROMPT, "sampling_params": ENDLESS, "return_logprob": True, "stream": True})
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(f"POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    await reader.readline()
    for sample in scene.engine.samples.values():
        sample.interval = 1  # many chunks, each with all tokens so far
    await scene.until(
        lambda: any(running.call.is_stalled for running in scene.gate.entrances[0].running)
    )  # its buffers are full
    scene.gate.close()
    async with asyncio.timeout(DEADLINE_S):
        await scene.gate.settled()
    assert "client_gone" == scene.ended[0][0]
    await scene.until(lambda: not scene.engine.samples)
    writer.transport.abort()


async def test_body_that_is_still_coming_does_not_hold_up_a_switch(scene: GateScene) -> None:
    """It was counted as in flight, and nothing could abort it: past settleSeconds that cost the engine."""
    host, _, port = scene.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 100\r\n\r\n{")
    await scene.until(lambda: scene.gate._reading._value < gate_module.MAX_READING)
    scene.gate.close()
    async with asyncio.timeout(CALLER_S / 2):
        await scene.gate.settled()
    writer.write(b" " * 99)
    assert b"400" in await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", path)
        for path in (
            "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/update_weights_from_disk",
            "/release_memory_occupation", "/resume_memory_occupation", "/update_weight_version", "/weights_checker",
            "/generate/", "//generate", "/generate/../pause_generation", "/generate%2f..%2fpause_generation",
            "/v1/../flush_cache", "/v1/gate/../../pause_generation", "/%2e%2e/pause_generation", "/GENERATE",
            "/generate;/pause_generation", "/v1/responses", "/invocations", "/api/generate",
        )
    ]
    + [("GET", path) for path in ("/server_info", "/model_info", "/health", "/generate", "/release_memory_occupation")]
    + [("PUT", "/generate"), ("DELETE", "/v1/completions"), ("OPTIONS", "/v1/gate")],
)  # fmt: skip
async def test_only_the_generation_routes_reach_the_engine(scene: GateScene, method: str, path: str) -> None:
    async with scene.session.request(method, URL(scene.url + path, encoded=True), json={}) as answer:
        assert answer.status in (404, 405)
    assert [] == scene.engine.calls


@pytest.mark.parametrize(
    ("sampling", "interval"),
    [({}, 16), ({"max_new_tokens": 512}, 16), ({"max_new_tokens": 32_000}, 1000), ({"stream_interval": 1}, 16)],
)
def test_long_requests_come_in_as_many_chunks_as_short_ones(sampling: dict[str, Any], interval: int) -> None:
    """Chunks of 16 tokens were a gigabyte for one sample of 32,000."""
    request = Native().request(json.dumps({"input_ids": [1], "sampling_params": sampling}).encode())
    assert interval == json.loads(request.body)["sampling_params"]["stream_interval"]


async def test_nothing_is_kept_for_a_lost_engine_when_there_is_no_room(scene: GateScene) -> None:
    scene.gate._held_bytes = gate_module.MAX_HELD_BYTES - 200
    running = asyncio.create_task(scene.post(sampling_params=ENDLESS, return_logprob=True))
    await scene.until(lambda: bool(scene.generated()) and len(scene.generated()[0].output) > 50)
    assert scene.gate._held_bytes <= gate_module.MAX_HELD_BYTES
    scene.engine.abort("", everything=True)
    status, answer = await running
    assert (200, "abort") == (status, answer["meta_info"]["finish_reason"]["type"])
    assert len(answer["output_ids"]) > 50, "an engine that is not lost says all of it again"
    assert gate_module.MAX_HELD_BYTES - 200 == scene.gate._held_bytes


@pytest.mark.parametrize("path", OPENAI)
async def test_whole_that_has_no_room_is_refused_and_aborted_and_a_stream_goes_on(scene: GateScene, path: str) -> None:
    """Nothing bounded it: pieces of an answer were joined for as long as they came."""
    scene.gate._held_bytes = before = gate_module.MAX_HELD_BYTES - 3000
    status, answer = await scene.post(path=path, max_tokens=3000, ignore_eos=True)
    assert (429, True) == (status, "ask for a stream" in answer["error"])
    assert before == scene.gate._held_bytes
    ((_, asked),) = [call for call in scene.engine.calls if call[0] == path]
    assert ("/abort_request", {"rid": asked["rid"], "abort_all": False}) in scene.engine.calls
    assert 200 == len(text_of(await scene.stream(path=path, max_tokens=200, ignore_eos=True)))
    assert before == scene.gate._held_bytes


class Reads:
    """A connection to an engine that is read, or not. The only double of one: it says what it was told."""

    def __init__(self) -> None:
        self.is_read = True

    def pause(self) -> None:
        self.is_read = False

    def resume(self) -> None:
        self.is_read = True


@pytest.mark.parametrize(("most", "most_held"), [(1, math.inf), (9, 3 * LARGE_BYTES)])
async def test_large_chunks_that_come_at_once_are_read_in_turn(scene: GateScene, most: int, most_held: float) -> None:
    """A switch ends all requests at once, each with all that it has generated."""
    turns = Limiter(most, most_held)
    request = Native().request(json.dumps(PROMPTS["/generate"]).encode())
    half = b"x" * LARGE_BYTES
    answers = []
    for _ in range(5):
        call = Call(CallerConnection(DataPort(scene.gate.serve)))
        answer = Running(call, request, Native().reply(request, VERSION), scene.gate._hold, turns), Reads()
        answer[0].begin(cast("UpstreamConnection", answer[1]))
        answers.append(answer)
        answer[0].take(200, [b"data: ", half, half])
    assert [True, False, False, False, False] == [reads.is_read for _, reads in answers], "the rest stays there"
    for place, (running, _) in enumerate(answers):
        assert place + 1 == sum(reads.is_read for _, reads in answers)
        running.take(200, [b"\n\n", b"data: [DONE]\n\n"])
    assert 0 == turns.taken


async def test_connections_to_the_engine_are_used_again(scene: GateScene) -> None:
    runner = scene.engine_server.runner
    assert runner is not None
    assert runner.server is not None
    seen: set[object] = set()
    for stream in (False, True) * 5:
        await (scene.stream(sampling_params=SHORT) if stream else scene.post(sampling_params=SHORT))
        seen.update(runner.server.connections)
    assert 1 == len(seen)


async def test_a_connection_is_not_used_again_after_an_error_of_the_engines_own() -> None:
    statuses = iter([500, 200, 400, 200])
    used: list[object] = []

    async def serve(request: web.Request) -> web.Response:
        used.append(request.transport)
        return web.Response(status=next(statuses))

    app = web.Application()
    app.router.add_post("/generate", serve)
    async with TestServer(app) as server:
        upstream = Upstream(str(server.make_url("")))
        for status in (500, 200, 400, 200):
            connection = await upstream.connect()
            request = upstream.request("/generate", b"{}")
            assert status == await connection.exchange(request, lambda *_: True)
        upstream.close()
    first, *others = used
    assert first not in others
    assert 1 == len({*others})


class Saying(asyncio.Protocol):
    """A connection of an engine that says the same to each request on it.

    connections: the open ones. used: of each request.
    """

    def __init__(self, answer: bytes, connections: set[Saying], used: list[Saying]) -> None:
        self.answer, self.connections, self.used = answer, connections, used

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self.used.append(self)
        self.transport.write(self.answer)

    def connection_lost(self, error: Exception | None) -> None:
        self.connections.discard(self)


@asynccontextmanager
async def saying(*answers: bytes) -> AsyncIterator[tuple[Upstream, list[Saying]]]:
    """An engine with one of these answers for each connection in turn; the connection of each request that it had."""
    turns = itertools.cycle(answers)
    connections: set[Saying] = set()
    used: list[Saying] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Saying(next(turns), connections, used), "127.0.0.1", 0)
    async with server:
        upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield upstream, used
        upstream.close()
        await until(lambda: not connections)


@dataclass
class Taking:
    taken: list[bytes]

    def __call__(self, status: int, pieces: list[bytes]) -> bool:
        self.taken += pieces
        return True


async def test_what_follows_an_answer_is_nobodys_and_ends_its_connection() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    for follows, connections in ((b"", 1), (answer, 2), (b"HTTP/1.1 4", 2), (b"x", 2)):
        async with saying(answer + follows) as (upstream, used):
            taken: list[bytes] = []
            for _ in range(2):
                connection = await upstream.connect()
                assert 200 == await connection.exchange(upstream.request("/generate", b"{}"), Taking(taken))
        assert [b"{}"] * 2 == taken
        assert connections == len({*used})


async def test_an_engine_that_falls_silent_has_lost_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colocated_rl_agent.gate.upstream.SILENCE_S", 0.05)
    async with saying(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}") as (upstream, _):
        taken: list[bytes] = []
        connection = await upstream.connect()
        with pytest.raises(UpstreamLost, match="silent"):
            await connection.exchange(upstream.request("/generate", b"{}"), Taking(taken))
        assert [b"{}"] == taken
        assert not connection.is_open


@pytest.mark.parametrize("most", [MAX_HEARD_BYTES, 0])
async def test_an_answer_that_can_not_be_taken_costs_none_of_those_that_came_with_it(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colocated_rl_agent.gate.upstream.MAX_HEARD_BYTES", most)

    def refuse(status: int, pieces: list[bytes]) -> bool:
        raise GateRefusal(502, "not this one")

    async with saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as (upstream, _):
        request = upstream.request("/generate", b"{}")
        takes: list[Take] = [refuse, Taking([]), refuse, Taking([])]
        connections = [await upstream.connect() for _ in takes]
        exchanges = (each.exchange(request, take) for each, take in zip(connections, takes, strict=True))
        ended = await asyncio.gather(*exchanges, return_exceptions=True)
    assert [GateRefusal, int, GateRefusal, int] == [type(each) for each in ended]


@pytest.mark.parametrize("status", [b"000", b"099", b"101"])
async def test_a_status_that_no_engine_has_breaks_its_own_exchange_alone(status: bytes) -> None:
    """A 101 took the answers that were heard in the same turn with it, and a status below 100 was waited on."""
    odd = b"HTTP/1.1 %b Odd\r\nUpgrade: other\r\nConnection: Upgrade\r\n\r\n" % status
    async with saying(odd, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as (upstream, _):
        connections = [await upstream.connect() for _ in range(6)]
        request = upstream.request("/generate", b"{}")
        async with asyncio.timeout(DEADLINE_S):
            exchanges = (connection.exchange(request, Taking([])) for connection in connections)
            ended = await asyncio.gather(*exchanges, return_exceptions=True)
        assert [UpstreamLost, int] * 3 == [type(each) for each in ended]


@pytest.mark.parametrize("sent", [b"HTTP/1.1 200 OK", b"HTTP/1.1 500 Internal"])
async def test_an_answer_that_comes_for_ever_and_never_gets_on_has_lost_the_request(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of it gave the engine its whole time to be silent once more."""
    monkeypatch.setattr("colocated_rl_agent.gate.upstream.SILENCE_S", 0.05)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent + b"\r\nContent-Type: text/event-stream\r\n\r\n")
        with closing(writer), suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b":\n\n")
                await writer.drain()
                await asyncio.sleep(0.01)  # the pace of this engine

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as engine:
        upstream = Upstream(f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}")
        connection = await upstream.connect()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(UpstreamLost, match="silent"):
                await connection.exchange(upstream.request("/generate", b"{}"), lambda *_: False)


async def test_requests_beyond_what_can_be_held_are_sent_away_for_now(scene: GateScene) -> None:
    scene.gate._held_bytes = gate_module.MAX_HELD_BYTES
    status, answer = await scene.post(sampling_params=SHORT)
    assert (429, True) == (status, "send it later" in answer["error"])
    scene.gate._held_bytes, scene.gate.in_flight = 0, scene.gate._full.most
    assert 429 == (await scene.post(sampling_params=SHORT))[0]
    scene.gate.in_flight = 0
    assert 200 == (await scene.post(sampling_params=SHORT))[0]
    assert 0 == scene.gate._held_bytes, "all that was held is let go"


async def test_of_a_body_one_copy_is_held_while_the_engine_answers(scene: GateScene) -> None:
    """Three were, so that 192 MiB of bodies took an agent 1.2 GiB."""
    body = json.dumps({"input_ids": PROMPT, "sampling_params": ENDLESS, "pad": "p" * 500_000}).encode()
    tracemalloc.start()
    try:
        asked = asyncio.create_task(scene.post(body))
        await scene.until(lambda: bool(scene.generated()))
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/colocated_rl_agent/*")])
    finally:
        tracemalloc.stop()
    assert 1 == sum(trace.size // len(body) for trace in ours.traces)
    scene.gate.close()
    scene.engine.abort("", everything=True)
    assert 200 == (await asked)[0]


def test_comments_without_an_end_are_no_engines() -> None:
    """They held a request for as long as they came."""
    parsed = ServerSentEvents()
    comment = b":" + bytes(1021) + b"\n\n"
    for _ in range(MAX_COMMENT_BYTES // len(comment)):
        assert [b"1"] == parsed.feed(comment + b"data: 1\n\n")
    with pytest.raises(GateRefusal, match="that are no data"):
        parsed.feed(comment)


def test_chunk_without_an_end_is_no_engines() -> None:
    parsed = ServerSentEvents()
    assert [] == parsed.feed(b"data: " + bytes(MAX_EVENT_BYTES - 6))
    with pytest.raises(GateRefusal, match="a chunk of more than"):
        parsed.feed(b"x")


def anything(*names: str) -> st.SearchStrategy[bytes]:
    """Bodies and events with these fields."""
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.sampled_from(["abort", "stop", "x"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(names), inner, max_size=4),
        max_leaves=12,
    )
    return st.binary(max_size=50) | values.map(lambda value: json.dumps(value).encode())


ASKED = ("input_ids", "text", "sampling_params", "n", "stream", "prompt", "messages", "stream_options", "best_of")
SAID = (
    "meta_info", "finish_reason", "type", "status_code", "message", "output_ids", "completion_tokens", "error", "code",
    "choices", "delta", "content", "logprobs", "tool_calls", "index", "usage",
)  # fmt: skip


@given(st.sampled_from(DIALECTS), anything(*ASKED))
def test_any_body_becomes_a_request_of_ours_or_a_400(dialect: Dialect, body: bytes) -> None:
    status = None
    try:
        request = dialect.request(body)
    except GateRefusal as refusal:
        status = refusal.status
    else:
        sent = json.loads(request.body)
        assert (True, request.rid) == (sent["stream"], sent["rid"])
    assert status in (None, 400)


@given(st.sampled_from(DIALECTS), st.lists(anything(*SAID), max_size=4))
def test_whatever_an_engine_says_there_is_an_answer_or_an_error(dialect: Dialect, sent: list[bytes]) -> None:
    request = dialect.request(json.dumps(PROMPTS[dialect.path]).encode())
    reply = dialect.reply(request, VERSION)
    answer: Any = {}
    try:
        for event in sent:
            reply.take(event)
        answer = json.loads(reply.answer())
    except GateRefusal:
        pass
    assert isinstance(answer, dict)
    assert reply.tokens >= 0
    assert reply.ending in ("finished", "aborted", "error")


heads = st.lists(
    st.sampled_from(
        [
            b"POST /generate HTTP/1.1", b"GET /v1/gate HTTP/1.1", b"Host: g", b"Connection: close", b"", b"{}", b"0",
            b"Content-Length: 3", b"Content-Length: -1", b"Transfer-Encoding: chunked", b"Content-Encoding: gzip",
            b"Expect: 100-continue", b"Upgrade: websocket", b"Content-Type: multipart/form-data; boundary=x",
            b"ffffffffffffffff",
        ]
    )
    | st.binary(max_size=40),
    max_size=12,
).map(b"\r\n".join)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(heads, min_size=10, max_size=10))
def test_whatever_is_sent_to_a_gate_it_stays_up_and_answers_no_500(tmp_path: Path, sent: list[bytes]) -> None:
    async def send() -> None:
        async with served_gate(tmp_path) as it:
            host, _, port = it.url.removeprefix("http://").partition(":")
            for data in sent:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(data + b"\r\n\r\n")
                writer.write_eof()
                async with asyncio.timeout(DEADLINE_S):
                    status_line = await reader.readline()
                writer.transport.abort()
                assert not status_line.startswith(b"HTTP/1.1 5") or status_line.startswith(b"HTTP/1.1 501"), (
                    data,
                    status_line,
                )
            assert 200 == (await it.post(sampling_params=SHORT))[0]
            assert 0 == it.gate.in_flight

    asyncio.run(send())


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
def test_h8_abort_of_a_switch_is_distinguished_from_an_error_of_the_engine(
    reason: dict[str, Any], status: int | None
) -> None:
    reply = Native().reply(Native().request(b'{"input_ids":[1]}'), VERSION)
    reply.take(json.dumps({"output_ids": [4], "meta_info": {"id": "r", "finish_reason": reason}}).encode())
    if status is None:
        assert reason["type"] == json.loads(reply.answer())["meta_info"]["finish_reason"]["type"]
    else:
        with pytest.raises(GateRefusal) as refusal:
            reply.answer()
        assert status == refusal.value.status


def test_pieces_of_a_chat_become_one_message() -> None:
    whole: dict[str, Any] = {}
    for piece in (
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None},
        {"index": 0, "delta": {"content": "one "}, "logprobs": {"content": [{"token": "one"}]}},
        {"index": 0, "delta": {"content": "two", "role": None}, "logprobs": {"content": [{"token": "two"}]}},
        {"index": 0, "delta": {"tool_calls": [call(0, "a", name="add", arguments="")]}},
        {"index": 0, "delta": {"tool_calls": [call(0, arguments='{"x":'), call(1, "b", name="sub")]}},
        {"index": 0, "delta": {"tool_calls": [call(0, arguments="1}")]}, "finish_reason": "tool_calls"},
    ):
        join(whole, piece)
    assert {"role": "assistant", "content": "one two"} == {
        name: value for name, value in whole["delta"].items() if name != "tool_calls"
    }
    assert ["one", "two"] == [entry["token"] for entry in whole["logprobs"]["content"]]
    first, second = whole["delta"]["tool_calls"]
    assert ("a", {"name": "add", "arguments": '{"x":1}'}) == (first["id"], first["function"])
    assert ("b", "sub") == (second["id"], second["function"]["name"])
    assert "tool_calls" == whole["finish_reason"]


def test_h27_chat_whose_log_probabilities_are_not_those_of_its_tokens_is_no_answer() -> None:
    """The engine's streams of chats have none for a token that only begins a character: one went missing in silence."""
    chat = DIALECTS[2]
    for count in (2, 1):
        reply = chat.reply(chat.request(b'{"messages":[],"logprobs":true}'), VERSION)
        logprobs = {"content": [{"token": "\ufffd", "logprob": -1.0, "top_logprobs": []}] * count}
        piece = {"index": 0, "delta": {"content": "\u05c6"}, "logprobs": logprobs, "finish_reason": "length"}
        reply.take(json.dumps({"choices": [piece], "usage": {"completion_tokens": 2}}).encode())
        if count == 2:
            assert 2 == len(json.loads(reply.answer())["choices"][0]["logprobs"]["content"])
        else:
            with pytest.raises(GateRefusal, match="log-probabilities of 1 of 2 tokens") as refused:
                reply.answer()
            assert 502 == refused.value.status


def test_probabilities_of_a_token_that_is_called_index_are_those_of_one_place() -> None:
    """They were joined with another place's, or taken for what no engine says."""
    whole: dict[str, Any] = {"top_logprobs": [None]}
    places = [{"index": -0.5, "a": -1.0}, {"index": -0.5, "b": -2.0}]
    for place in places:
        join(whole, {"top_logprobs": [dict(place)]})
    assert [None, *places] == whole["top_logprobs"]


class Unsearched(list[Any]):
    """A list that nobody looks through."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("all entries were looked at")


def test_a_log_probability_is_joined_without_a_search_through_those_before_it() -> None:
    """The search took the agent's event loop 1.5 s for 16,000 tokens."""
    whole: dict[str, Any] = {"content": Unsearched()}
    for place in range(3):
        join(whole, {"content": [{"token": str(place), "logprob": -1.0}, None, {"index": -0.5}]})
    assert 9 == len(whole["content"])


def text_of(pieces: list[dict[str, Any]]) -> str:
    choices = [choice for piece in pieces for choice in piece["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def finish_reason(answer: dict[str, Any]) -> Any:
    return answer["choices"][0]["finish_reason"]


def call(index: int, key: str | None = None, **function: str) -> dict[str, Any]:
    return {"index": index, "id": key, "function": function}
