"""The gateway with OpenAI's own client, over gates that a test steers: no switch is seen, whenever it comes."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
import socket
import sys
import threading
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from documents.blocks import blocks
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from waiting import DEADLINE_S, until

from colocated_rl_api import names
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.engines.engine_client import Generated
from colocated_rl_rollout.engines.engines import Engines
from colocated_rl_rollout.gateway import turns
from colocated_rl_rollout.gateway.gateway import MAX_REQUEST_BYTES, Reading
from colocated_rl_rollout.gateway.openai_requests import ONLY, RequestRefused
from colocated_rl_rollout.gateway.turns import RETRY_S, Turn
from colocated_rl_rollout.tasks.task_server import COMMAND
from fakes.gate import GateFault, logp_of
from fakes.gateway import ANSWER, QUESTION, TOOLS, TOOLS_TEMPLATE, extra, gateway_running, text_of
from fakes.gateway import GatewayScene as Scene
from fakes.interface import Checked, Interface, rollout_interface, routes_of
from fakes.rollout import JOB_UID, TOKEN

BATCH_S = 25.0
V0, V1, V2 = WeightVersion(0, 1), WeightVersion(1, 1), WeightVersion(2, 1)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with gateway_running(tmp_path) as made:
        yield made


async def test_a_chat_is_answered_and_counted(scene: Scene) -> None:
    await scene.gate.open(V0)
    completion = await scene.ask(logprobs=True)
    (choice,) = completion.choices
    assert (ANSWER, "stop") == (choice.message.content, choice.finish_reason)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(ANSWER.encode()) + 1
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert completion.usage.completion_tokens == len(tokens)
    assert ANSWER.encode() == b"".join(
        bytes(token.bytes) if token.bytes else ANSWER.encode()[place : place + 1]
        for place, token in enumerate(tokens[:-1])
    )
    (request,) = scene.gate.requests
    assert [logp_of(V0, token) for token in scene.job.chat.encode(ANSWER)] == pytest.approx(
        [token.logprob for token in tokens[:-1]]
    )
    assert (48, 1.0) == (request["sampling_params"]["max_new_tokens"], request["sampling_params"]["temperature"])
    assert list(scene.job.chat.prompt_ids("Where is it?")) == request["input_ids"]
    assert 1 == scene.figure("turns_total", ending="stop")


async def test_the_document_has_every_route_that_is_served_and_no_other(scene: Scene) -> None:
    """The clients of this file and of others check the answers themselves against it (`fakes.interface`)."""
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http:
        answer = await http.get(f"http://127.0.0.1:{scene.controller.member.ports.pages}/openapi.json")
    assert Interface(answer.json()).routes == rollout_interface().routes == routes_of(scene.controller)


async def test_a_switch_at_every_instant_is_not_seen(tmp_path: Path) -> None:
    """However many tokens are there when the gate closes, none and all but one included, and twice in one answer."""
    async with gateway_running(tmp_path) as scene:
        size = len(ANSWER.encode()) + 1
        for pace in range(1, size):
            await scene.gate.open(V0, pace=pace)
            asked = asyncio.create_task(scene.ask(logprobs=True))
            await scene.generating()
            await scene.switch(V1, pace=1)
            if pace + 2 < size:
                await scene.generating()
            await scene.switch(V2)
            completion = await asked
            assert ANSWER == text_of(completion)
            assert completion.choices[0].logprobs is not None
            content = completion.choices[0].logprobs.content or []
            assert size == len(content)
            spans = [(span["version"], span["start"], span["end"]) for span in extra(completion)["weight_versions"]]
            assert size == spans[-1][2]
            ids = [*scene.job.chat.encode(ANSWER), 2]
            expected = [
                logp_of(WeightVersion.parse(version), token)
                for version, start, end in spans
                for token in ids[start:end]
            ]
            assert expected == pytest.approx([token.logprob for token in content])
            assert not extra(completion)["interrupted"]
        assert scene.figure("resumed_total") > size


async def test_a_turn_that_fails_as_nobody_thought_of_is_its_own_end_alone(scene: Scene) -> None:
    """Raised in the worker's group, it ended the controller: every sample in flight and every other client's turn."""
    turns = scene.controller._gateway._turns

    def breaks(turn: Turn, generated: Generated) -> None:
        raise ZeroDivisionError("with the prompt's words")

    turns._accept = breaks  # type: ignore[method-assign]
    await scene.gate.open(V0)
    with pytest.raises(openai.InternalServerError, match="failed: ZeroDivisionError at test_rollout") as refused:
        await scene.ask()
    assert "words" not in str(refused.value)
    assert 1 == scene.figure("turns_total", ending="failed")
    del turns._accept
    assert ANSWER == text_of(await scene.ask())


async def test_a_text_is_completed_too(scene: Scene) -> None:
    await scene.gate.open(V0)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    completion = await scene.client.completions.create(model="job", prompt=prompt, logprobs=0, max_tokens=8)
    (choice,) = completion.choices
    assert (ANSWER[:8], "length") == (choice.text, choice.finish_reason)
    assert choice.logprobs is not None
    assert [*ANSWER[:8]] == choice.logprobs.tokens
    assert [*range(8)] == choice.logprobs.text_offset
    assert [logp_of(V0, token) for token in scene.job.chat.encode(ANSWER[:8])] == pytest.approx(
        choice.logprobs.token_logprobs
    )
    ids = list(scene.job.chat.encode(prompt))
    again = await scene.client.completions.create(model="job", prompt=ids, extra_body={"return_token_ids": True})
    assert (ANSWER, ids) == (again.choices[0].text, (again.model_extra or {})["prompt_token_ids"])
    assert [*scene.job.chat.encode(ANSWER), 2] == (again.choices[0].model_extra or {})["token_ids"]


async def test_the_model_is_listed_under_the_jobs_name(scene: Scene) -> None:
    assert ["job"] == [model.id async for model in scene.client.models.list()]
    assert "job" == (await scene.client.models.retrieve("job")).id
    with pytest.raises(openai.NotFoundError, match="this job's model is job"):
        await scene.client.models.retrieve("gpt")


# ---------------------------------------------------------------------------------------------------- streams
async def test_a_stream_says_what_an_answer_at_once_says_whenever_a_switch_comes(tmp_path: Path) -> None:
    """The switch may come in the middle of a character too: nothing that was sent is ever taken back."""
    async with gateway_running(tmp_path) as scene:
        await scene.gate.open(V0)
        whole = await scene.ask(logprobs=True)
        assert whole.choices[0].logprobs is not None
        expected = [token.token for token in whole.choices[0].logprobs.content or []]
        for pace in (1, 16, 17, 18, 30):
            await scene.switch(V0, pace=pace)
            chunks: list[ChatCompletionChunk] = []
            reading = asyncio.create_task(read_into(chunks, scene, logprobs=True))
            await text_begins(chunks)
            await scene.switch(V1)
            await reading
            assert ANSWER == "".join(pieces(chunks))
            assert "assistant" == chunks[0].choices[0].delta.role
            tokens = [
                token.token
                for chunk in chunks
                for choice in chunk.choices
                if choice.logprobs
                for token in choice.logprobs.content or []
            ]
            assert expected == tokens
            assert "stop" == chunks[-2].choices[0].finish_reason
            assert [V0, V1] == [WeightVersion.parse(span["version"]) for span in extra(chunks[-2])["weight_versions"]]
            assert whole.usage == chunks[-1].usage


async def read_into(chunks: list[ChatCompletionChunk], scene: Scene, **options: Any) -> None:
    stream = await scene.client.chat.completions.create(
        model="job", messages=[QUESTION], stream=True, stream_options={"include_usage": True}, **options
    )
    async for chunk in stream:
        chunks.append(chunk)  # noqa: PERF401 - read while it comes


async def text_begins(chunks: list[ChatCompletionChunk]) -> None:
    """Wait until some of the text is there."""
    await until(lambda: "".join(pieces(chunks)))


async def ending(
    scene: Scene, *, streams: bool, **options: Any
) -> tuple[str | None, ChatCompletion | ChatCompletionChunk]:
    """Text of a completion, and what says how it ended."""
    if not streams:
        completion = await scene.ask(**options)
        return text_of(completion), completion
    chunks: list[ChatCompletionChunk] = []
    await read_into(chunks, scene, **options)
    return "".join(pieces(chunks)), chunks[-2]


def pieces(chunks: list[ChatCompletionChunk]) -> list[str]:
    return [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]


async def test_what_was_streamed_from_a_lost_engine_is_kept(scene: Scene) -> None:
    await scene.gate.open(V0, pace=5)
    chunks: list[ChatCompletionChunk] = []
    reading = asyncio.create_task(read_into(chunks, scene))
    await text_begins(chunks)
    await scene.gate.crash_agent()
    await scene.gate.start()
    await scene.gate.open(V1)
    await reading
    assert ANSWER == "".join(pieces(chunks))
    assert [V0, V1] == [WeightVersion.parse(span["version"]) for span in extra(chunks[-2])["weight_versions"]]


async def test_a_text_is_streamed_too(scene: Scene) -> None:
    await scene.gate.open(V0)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    stream = await scene.client.completions.create(model="job", prompt=prompt, stream=True, logprobs=0)
    chunks = [chunk async for chunk in stream]
    assert ANSWER == "".join(chunk.choices[0].text for chunk in chunks)
    assert "stop" == chunks[-1].choices[0].finish_reason


# ---------------------------------------------------------------------------------------------------- waiting
async def test_a_request_waits_while_no_engine_is_open_and_so_many_at_most(tmp_path: Path) -> None:
    async with gateway_running(tmp_path, arguments=("--gateway-turns", "2")) as scene:
        asked = [asyncio.create_task(scene.ask()) for _ in range(2)]
        await until(lambda: scene.figure("parked") == 2)
        with pytest.raises(openai.RateLimitError, match="2 requests are held, 2 of them until") as refused:
            await scene.ask()
        assert "10" == refused.value.response.headers["Retry-After"]
        assert ("too_many_requests", "rate_limit_error") == (refused.value.code, refused.value.type)
        assert 1 == scene.figure("refused_total", status="429")
        await scene.gate.open(V0)
        assert [ANSWER, ANSWER] == [text_of(await each) for each in asked]
        assert 0 == scene.figure("parked")
        assert ANSWER == text_of(await scene.ask())


async def test_a_long_request_counts_also_where_the_template_shows_little_of_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of such requests, megabytes each, were held by the few tokens of their prompts."""
    monkeypatch.setattr(turns, "TOKENS_HELD_AT_MOST", 1000)
    message: Any = {**QUESTION, "note": "x" * 6000}
    first = asyncio.create_task(scene.ask(message))
    await until(lambda: scene.figure("parked") == 1)
    with pytest.raises(openai.RateLimitError, match="1 requests are held"):
        await asyncio.wait_for(scene.ask(message), DEADLINE_S / 4)
    await scene.gate.open(V0)
    assert ANSWER == text_of(await first)


async def test_turns_of_the_jobs_own_episodes_wait_however_many(tmp_path: Path) -> None:
    """Beyond the gateway's bounds, and beyond 256 connections, they were refused, and their episodes failed."""
    many, body = 300, {"model": "job", "messages": [QUESTION]}
    async with gateway_running(tmp_path, arguments=("--gateway-turns", "2")) as scene:
        sessions, pages = scene.controller._gateway._sessions, scene.controller.member.ports.pages
        episodes = [sessions.open(lambda _: None).id for _ in range(many)]
        async with httpx.AsyncClient(
            trust_env=False, timeout=DEADLINE_S, limits=httpx.Limits(max_connections=many)
        ) as http:

            async def ask(name: str) -> None:
                await http.post(f"http://127.0.0.1:{pages}/v1/sessions/{name}/chat/completions", json=body)

            asked: list[asyncio.Task[Any]] = [asyncio.create_task(ask(name)) for name in episodes]
            await until(lambda: scene.figure("parked") == many)
            asked += [asyncio.create_task(scene.ask()) for _ in range(2)]
            await until(lambda: scene.figure("parked") == many + 2)  # clients have all of their room
            with pytest.raises(openai.RateLimitError, match="302 requests are held"):
                await scene.ask()
            for each in asked:
                each.cancel()
            await asyncio.wait(asked)


async def test_an_evaluation_goes_first_then_clients_then_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever came first. A switch waits for the one, and clients for the other."""
    sent: list[str] = []
    send = Engines.send

    def noting(engines: Engines, *args: Any, name: str) -> Any:
        sent.append(name.partition("/")[0])
        return send(engines, *args, name=name)

    monkeypatch.setattr(Engines, "send", noting)
    async with gateway_running(tmp_path, tasks=COMMAND) as scene:
        await scene.operator.until(lambda facts: facts.samples.get("admitted") == 6)
        asked = asyncio.create_task(scene.ask())
        await until(lambda: scene.figure("parked"))
        await scene.operator.send(2, (scene.gate.endpoint,), evaluate=0)
        await until(lambda: scene.controller._evaluation.demand)
        await scene.gate.open(V0)
        await asked
        assert [*["evaluation"] * 8, "turn", *["sample"] * 6] == sent[:15]


async def test_a_request_that_waits_too_long_is_told_so(tmp_path: Path) -> None:
    async with gateway_running(tmp_path, arguments=("--gateway-parked-seconds", "0.05")) as scene:
        with pytest.raises(openai.APIStatusError, match="no engine took it within 0 s: they are with the") as late:
            await scene.client.with_options(max_retries=2).chat.completions.create(model="job", messages=[QUESTION])
        assert (504, "no_engine") == (late.value.status_code, late.value.code)
        with pytest.raises(openai.APIStatusError, match="no engine took it") as late:
            await read_into([], scene)
        assert 504 == late.value.status_code
        assert 2 == scene.figure("turns_total", ending="no_engine"), "trying again at once would wait as long again"
        turns = scene.controller._gateway._turns
        at_most_s, turns._parked_at_most_s = turns._parked_at_most_s, DEADLINE_S
        await scene.gate.open(V0, pace=3)
        chunks: list[ChatCompletionChunk] = []
        reading = asyncio.create_task(read_into(chunks, scene))
        await text_begins(chunks)
        turns._parked_at_most_s = at_most_s
        await scene.gate.close()
        with pytest.raises(openai.APIError, match="no engine took it"):
            await reading  # as an event: a stream that has begun has no status any more


async def test_a_stream_that_waits_shows_that_somebody_is_there(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colocated_rl_rollout.gateway.gateway.SILENCE_S", 0.01)
    async with scene.client.chat.completions.with_streaming_response.create(
        model="job", messages=[QUESTION], stream=True
    ) as response:
        lines = response.iter_lines()
        assert ": waiting for an engine" == await anext(lines)
        await scene.gate.open(V0)
        assert "data: [DONE]" in [line async for line in lines]


async def test_a_session_whose_stream_had_no_room_is_full_as_without_a_stream(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An episode whose stream had begun, by a comment, failed instead of being cut short."""
    monkeypatch.setattr("colocated_rl_rollout.gateway.gateway.SILENCE_S", 0.01)
    named = {"X-Session-ID": "s"}
    await scene.gate.open(V0)
    await scene.ask(extra_headers=named)
    await scene.gate.close()
    (session,) = scene.controller._gateway._sessions
    async with scene.client.chat.completions.with_streaming_response.create(
        model="job", messages=[QUESTION], stream=True, extra_headers=named
    ) as response:
        lines = response.iter_lines()
        assert ": waiting for an engine" == await anext(lines)
        scene.gate.faults.append(GateFault.REJECTED)
        await scene.gate.open(V0)
        assert "context_length_exceeded" in "".join([line async for line in lines])
    assert session.is_full


async def test_a_stream_whose_call_is_held_back_shows_that_somebody_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token that came began the silence anew, though nothing was sent."""
    monkeypatch.setattr("colocated_rl_rollout.gateway.gateway.SILENCE_S", 0.5)
    call = '<tool_call>\n{"name": "find", "arguments": {"what": "%s"}}\n</tool_call>' % ("x" * 2000)
    async with gateway_running(tmp_path, lambda _: call, template=TOOLS_TEMPLATE, maxResponseTokens=4000) as scene:
        await scene.gate.open(V0, pace=12)
        async with scene.client.chat.completions.with_streaming_response.create(
            model="job", messages=[QUESTION], tools=TOOLS, stream=True
        ) as response:
            lines = response.iter_lines()

            async def read_comments() -> None:
                for _ in range(3):  # the first ones may be of the time before the steps below
                    while not (await anext(lines)).startswith(":"):
                        pass

            comments = asyncio.create_task(read_comments())

            def is_commented() -> bool:
                for attempt in scene.gate._attempts:
                    if attempt.left:
                        attempt.step()
                return comments.done()

            await until(is_commented)
            assert [True] == [bool(attempt.left) for attempt in scene.gate._attempts], "before the last token"
            await scene.gate.release()


async def test_a_client_that_leaves_takes_its_work_with_it(scene: Scene) -> None:
    """H38: while it is parked, while it is generated, and in the middle of a stream."""
    asked = asyncio.create_task(scene.ask())
    await until(lambda: scene.figure("parked") == 1)
    asked.cancel()
    await until(lambda: scene.figure("parked") == 0)
    await scene.gate.open(V0, pace=3)
    asked = asyncio.create_task(scene.ask())
    await scene.generating()
    asked.cancel()
    await scene.generating(0)
    chunks: list[ChatCompletionChunk] = []
    reading = asyncio.create_task(read_into(chunks, scene))
    await text_begins(chunks)
    reading.cancel()
    await scene.generating(0)
    await until(lambda: scene.figure("turns_total", ending="client_gone") == 3)
    await scene.gate.release()
    assert ANSWER == text_of(await scene.ask()), "nobody else was disturbed"


async def test_a_client_that_does_not_read_its_answer_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework waited for it for ever, with the whole answer in memory."""
    body = json.dumps({"model": "job", "messages": [QUESTION], "logprobs": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    length = 60_000  # tokens, a hundred bytes each: more than the kernel keeps for a client
    async with gateway_running(tmp_path, lambda _: "a" * length, maxResponseTokens=length) as scene:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, ("127.0.0.1", scene.controller.member.ports.pages))
            await loop.sock_sendall(deaf, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: scene.figure("parked") == 1)
            monkeypatch.setattr("colocated_rl_rollout.clients.CLIENT_S", 0.1)
            await scene.gate.open(V0)
            port = scene.controller.member.ports.pages
            await until(lambda: not is_connected(port, deaf.getsockname()[1]))


def is_connected(port: int, client: int) -> bool:
    """Return whether the end at `port` of a connection of this machine is open, as the kernel sees it."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()]
    ends = f":{port:04X}", f":{client:04X}"
    return any((local[-5:], remote[-5:]) == ends and state == "01" for _, local, remote, state, *_ in rows[1:])


async def test_the_end_of_the_controller_is_reported(tmp_path: Path) -> None:
    async with gateway_running(tmp_path) as scene:
        asked = asyncio.create_task(scene.ask())
        await until(lambda: scene.figure("parked") == 1)
        scene.controller.drain()
        with pytest.raises(openai.APIStatusError, match="the rollout controller ends") as ended:
            await asked
        assert (503, "10") == (ended.value.status_code, ended.value.response.headers["Retry-After"])


async def test_a_request_that_an_engine_brings_nothing_for_goes_to_it_again(scene: Scene) -> None:
    scene.gate.faults.extend([GateFault.EMPTY, GateFault.ERROR_500, GateFault.GARBLED, GateFault.BUSY])
    await scene.gate.open(V0)
    assert ANSWER == text_of(await scene.ask())
    scene.gate.faults.append(GateFault.REJECTED)
    with pytest.raises(openai.BadRequestError, match="longer than the context") as refused:
        await scene.ask()
    assert "context_length_exceeded" == refused.value.code


# ---------------------------------------------------------------------------------------------------- without resume
async def test_who_does_not_want_to_be_resumed_gets_what_there_is(scene: Scene) -> None:
    """F27: and it is marked, with the version that made it."""
    for streams in (False, True):
        await scene.gate.open(V1, pace=5)
        asked = asyncio.create_task(ending(scene, streams=streams, extra_body={"resume": False}))
        await scene.generating()
        await scene.gate.close()
        text, last = await asked
        assert (ANSWER[:6], "abort") == (text, last.choices[0].finish_reason)
        spans = [{"version": str(V1), "start": 0, "end": 6}]
        assert {"interrupted": True, "segments": 1, "weight_versions": spans} == extra(last)


async def test_a_job_that_starts_over_does_so_for_clients_too(tmp_path: Path) -> None:
    async with gateway_running(tmp_path, interruption="Retry") as scene:
        await scene.gate.open(V0, pace=5)
        chunks: list[ChatCompletionChunk] = []
        asked = asyncio.create_task(scene.ask()), asyncio.create_task(read_into(chunks, scene))
        await scene.generating(2)
        await scene.switch(V1)
        await asyncio.gather(*asked)
        assert ANSWER == text_of(asked[0].result()) == "".join(pieces(chunks))
        more = extra(asked[0].result())
        assert [V1] == [WeightVersion.parse(span["version"]) for span in more["weight_versions"]]
        assert 1 == more["segments"], "what was thrown away is none"


# ---------------------------------------------------------------------------------------------------- what is asked
async def test_verl_a_lean_configuration_is_tolerated(scene: Scene) -> None:
    """verl's published case has no rollout section: neither job nor client says how to sample."""
    await scene.gate.open(V0)
    assert ANSWER == text_of(await scene.ask())
    (request,) = scene.gate.requests
    assert (48, 1.0) == tuple(request["sampling_params"][name] for name in ("max_new_tokens", "temperature"))


async def test_verl_callers_parameters_are_never_changed(scene: Scene) -> None:
    """F21: and the budget holds over all attempts."""
    await scene.gate.open(V0, pace=4)
    asked = asyncio.create_task(
        scene.ask(temperature=0.25, max_completion_tokens=20, seed=7, stop=["nowhere", "never"])
    )
    for version in (V1, V2):
        await scene.generating()
        await scene.switch(version, pace=4)
    await scene.generating()
    await scene.gate.release()
    completion = await asked
    assert (ANSWER.encode()[:20].decode(), "length") == (text_of(completion), completion.choices[0].finish_reason)
    sampling = [request["sampling_params"] for request in scene.gate.requests]
    assert [20, 15, 10] == [each.pop("max_new_tokens") for each in sampling]
    assert sampling[0] == sampling[1] == sampling[2]
    own = {"temperature": 0.25, "sampling_seed": 7, "stop": ["nowhere", "never"], "top_p": 1, "top_k": -1}
    assert own == {name: sampling[0][name] for name in own}


async def test_verl_each_attempts_prompt_is_the_prompt_and_all_tokens_so_far(scene: Scene) -> None:
    """verl's published case has the experts of tokens too; a single attempt is passed through."""
    prompt, whole = [*scene.job.chat.prompt_ids("Where is it?")], [*scene.job.chat.encode(ANSWER), 2]
    for switches in (0, 3):
        await scene.gate.open(V0, pace=4 if switches else None)
        scene.gate.requests.clear()
        asked = asyncio.create_task(scene.ask(extra_body={"return_token_ids": True}))
        for step in range(1, switches + 1):
            await scene.generating()
            await scene.switch(WeightVersion(step, 1), pace=4 if step < switches else None)
        completion = await asked
        attempts = [request["input_ids"] for request in scene.gate.requests]
        assert [[*prompt, *whole[: 5 * attempt]] for attempt in range(switches + 1)] == attempts
        assert (prompt, whole) == (completion.prompt_token_ids, completion.choices[0].token_ids)


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens", None])
@pytest.mark.parametrize("length", [92, 136, 2048])
async def test_verl_budget_holds_over_any_number_of_resumes(tmp_path: Path, key: str | None, length: int) -> None:
    """verl's published case has prompts of so many tokens and either key of the limit,
    or none: then the job's limit holds.
    """
    async with gateway_running(tmp_path, lambda question: "and so on " * 99, maxResponseTokens=40) as scene:
        await scene.gate.open(V0, pace=3)
        limit = 33 if key else 40
        content = "x" * (length - len(scene.job.chat.prompt_ids("")))
        asked = asyncio.create_task(scene.ask({"role": "user", "content": content}, **({key: limit} if key else {})))
        for step in range(1, 8):
            await scene.generating()
            await scene.switch(WeightVersion(step, 1), pace=3)
        await scene.generating()
        await scene.gate.release()
        completion = await asked
        assert completion.usage is not None
        assert (length, limit) == (completion.usage.prompt_tokens, completion.usage.completion_tokens)
        assert ("length", 8) == (completion.choices[0].finish_reason, extra(completion)["segments"])


async def test_a_stop_string_is_found_also_where_a_switch_cut_it(scene: Scene) -> None:
    """The engine sees its own part of it only, and goes on: what it makes after the end is no part of the answer."""
    for pace in (4, 5, 6, 7, 8, 9, 10, 11, 12):  # "In the north" is cut at each of its last characters
        for streams in (False, True):
            await scene.gate.open(V0, pace=pace)
            asked = asyncio.create_task(ending(scene, streams=streams, stop="north"))
            await scene.generating()
            await scene.switch(V1)
            text, last = await asked
            assert ("In the ", "stop") == (text, last.choices[0].finish_reason)
            assert len("In the north") == extra(last)["weight_versions"][-1]["end"]


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("n", {"n": 2}),
        ("top_p", {"top_p": 0.9}),
        ("top_p", {"extra_body": {"top_p": True}}),  # is no 1, though Python has it so
        ("presence_penalty", {"presence_penalty": 1.0}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 5}),
        ("tool_choice", {"tool_choice": "required"}),
        ("max_tokens", {"max_tokens": 49}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("temperature", {"temperature": 3}),
        ("stop", {"stop": [""]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("guided_json", {"extra_body": {"guided_json": {}}}),
        ("return_routed_experts", {"extra_body": {"return_routed_experts": True}}),
        ("messages.0.content", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}),
        ("messages", {"messages": []}),
    ],
)
async def test_what_can_not_be_done_faithfully_is_refused(scene: Scene, param: str, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await scene.client.chat.completions.create(**{"model": "job", "messages": [QUESTION], **options})
    assert refused.value.type == "invalid_request_error"
    assert (refused.value.param or "").startswith(param)
    assert param.split(".")[0] in refused.value.message


async def test_only_the_closing_event_of_a_stream_has_its_usage(scene: Scene) -> None:
    await scene.gate.open(V0)
    chunks: list[ChatCompletionChunk] = []
    await read_into(chunks, scene)
    assert [False] * (len(chunks) - 1) + [True] == [chunk.usage is not None for chunk in chunks]
    assert all("usage" in chunk.model_fields_set for chunk in chunks), "null, as OpenAI has it"
    assert [] == chunks[-1].choices


def raw(body: bytes, *headers: str) -> bytes:
    named = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*named, "", ""]).encode() + body


async def answers_to(scene: Scene, *sent: bytes, count: int) -> list[tuple[int, Any]]:
    """Status and body of so many answers on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", scene.controller.member.ports.pages)
    found: list[tuple[int, Any]] = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            for piece in sent:
                writer.write(piece)
                await writer.drain()
            while len(found) < count:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = int(head.partition("content-length: ")[2].split("\r\n")[0])
                found.append((int(head.split()[1]), json.loads(await reader.readexactly(size))))
    finally:
        writer.transport.abort()
    return found


async def test_requests_may_come_in_pieces_and_one_behind_the_other(scene: Scene) -> None:
    """Pipelined, and with a body in chunks that are cut anywhere, in the middle of a character too."""
    await scene.gate.open(V0)
    body = json.dumps({"model": "job", "messages": [{"role": "user", "content": "Où?"}]}, ensure_ascii=False).encode()
    sized = raw(body, f"Content-Length: {len(body)}")
    pieces = [b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:-7], body[-7:-5], body[-5:])]
    chunked = [raw(b"", "Transfer-Encoding: chunked"), *pieces, b"0\r\n\r\n"]
    found = await answers_to(scene, sized + sized, *chunked, sized, count=4)
    assert [(200, ANSWER)] * 4 == [(status, each["choices"][0]["message"]["content"]) for status, each in found]
    assert 1 == len({tuple(request["input_ids"]) for request in scene.gate.requests})


async def test_a_body_that_breaks_off_disturbs_nobody(scene: Scene) -> None:
    await scene.gate.open(V0)
    for begun in (raw(b'{"model": ', "Content-Length: 1000"), raw(b"a\r\n{", "Transfer-Encoding: chunked")):
        _, writer = await asyncio.open_connection("127.0.0.1", scene.controller.member.ports.pages)
        writer.write(begun)
        await writer.drain()
        writer.transport.abort()
    reader, writer = await asyncio.open_connection("127.0.0.1", scene.controller.member.ports.pages)
    writer.write(raw(b"no size\r\n", "Transfer-Encoding: chunked"))
    assert b" 400 " in await reader.readline()
    writer.transport.abort()
    assert ANSWER == text_of(await scene.ask())
    assert (0, 0) == (scene.figure("parked"), scene.gate.in_flight)


UNREADABLE = {
    "first line": b"NONSENSE sk-secret\r\n\r\n",
    "version": b"GET /v1/models HTTP/sk-secret\r\n\r\n",
    "header": raw(b"", "Authorization: Bearer sk-secret\x01"),
    "long header": raw(b"", "Authorization: Bearer sk-secret" + 9000 * "x"),
    "many headers": raw(b"", *(f"X-{number}: sk-secret" for number in range(100))),
    "length": raw(b"{}", "Content-Length: -5 sk-secret"),
    "two lengths": raw(b"{}", "Content-Length: 2", "Transfer-Encoding: chunked"),
    "chunk": raw(b"sk-secret\r\n{}", "Transfer-Encoding: chunked"),
}


@pytest.mark.parametrize("sent", UNREADABLE.values(), ids=UNREADABLE)
async def test_what_is_no_request_of_http_is_an_error_like_any_other(
    scene: Scene, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    """It was a line of text, and a stack trace in the log, each with what the caller wrote: prompts, and tokens."""
    caplog.set_level("DEBUG")
    [(status, answer)] = await answers_to(scene, sent, count=1)
    assert (400, "invalid_request_error") == (status, answer["error"]["type"])
    assert re.match(r"this can't be read as a request of HTTP: \w+", answer["error"]["message"])
    assert "secret" not in caplog.text + json.dumps(answer)


async def test_a_route_that_fails_is_an_error_in_the_same_shape(scene: Scene) -> None:
    def breaks() -> dict[str, Any]:
        raise ZeroDivisionError("with the prompt's words")

    scene.controller._gateway._listed = breaks  # type: ignore[method-assign]
    with pytest.raises(openai.InternalServerError, match="Internal Server Error: see the log") as refused:
        await scene.client.models.list()
    assert ("server_error", None) == (refused.value.type, refused.value.code)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
async def test_a_compressed_body_is_refused_as_it_came(scene: Scene, encoding: str) -> None:
    """A few bytes would expand to any number, in memory that is counted by what was sent."""
    body = gzip.compress(b" " * 10_000_000)
    [(status, answer)] = await answers_to(
        scene, raw(body, f"Content-Length: {len(body)}", f"Content-Encoding: {encoding}"), count=1
    )
    assert (415, "the body comes as it is: without a Content-Encoding") == (status, answer["error"]["message"])


async def test_what_asks_for_nothing_is_taken(scene: Scene) -> None:
    await scene.gate.open(V0)
    nothing: dict[str, Any] = {
        "n": 1, "top_p": 1.0, "frequency_penalty": 0, "response_format": {"type": "text"}, "logit_bias": {},
        "user": "somebody", "metadata": {"a": "b"}, "store": False, "seed": None, "tools": [],
        "extra_body": {
            "top_k": -1, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": [],
        },
    }  # fmt: skip
    assert ANSWER == text_of(await scene.ask(**nothing))
    parts: ChatCompletionMessageParam = {"role": "user", "content": [{"type": "text", "text": "Where is it?"}]}
    assert ANSWER == text_of(await scene.ask(parts))
    assert scene.gate.requests[0] == scene.gate.requests[1]


async def test_another_model_is_not_found(scene: Scene) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt': this job's is job") as refused:
        await scene.client.chat.completions.create(model="gpt", messages=[QUESTION])
    assert ("model", "model_not_found") == (refused.value.param, refused.value.code)


ELSEWHERE = [
    (
        404,
        "POST /v1/responses here: ask POST /v1/chat/completions",
        lambda job: job.responses.create(model="job", input="?"),
    ),
    (404, "POST /v1/embeddings here: the policy", lambda job: job.embeddings.create(model="job", input="?")),
    (404, "POST /v1/moderations here: the policy", lambda job: job.moderations.create(input="?")),
    (404, "POST /v1/images/generations here: the policy", lambda job: job.images.generate(prompt="?")),
    (404, "GET /v1/files here: the policy", lambda job: job.files.list()),
    (404, "GET /v1/chat/completions/1 here: there are POST", lambda job: job.chat.completions.retrieve("1")),
    (405, "GET /v1/chat/completions: ask POST", lambda job: job.chat.completions.list()),
    (405, "DELETE /v1/models/job: ask GET", lambda job: job.models.delete("job")),
    (404, "POST /v1/sessions/a/responses here: ask", lambda job: job.post("/sessions/a/responses", cast_to=object)),
    (405, "PUT /v1/sessions/a: ask DELETE or GET", lambda job: job.put("/sessions/a", cast_to=object)),
]


@pytest.mark.parametrize(
    ("status", "message", "ask"), ELSEWHERE, ids=[message.partition(":")[0] for _, message, _ in ELSEWHERE]
)
async def test_what_is_not_there_is_reported_with_what_to_ask_instead(
    scene: Scene, status: int, message: str, ask: Callable[[openai.AsyncOpenAI], Awaitable[object]]
) -> None:
    """Such a request was answered with a line that is no error to OpenAI's client: without a word, or a code."""
    with pytest.raises(openai.APIStatusError, match=f"there is no {re.escape(message)}") as refused:
        await ask(scene.client)
    assert status == refused.value.status_code
    assert ("invalid_request_error", None) == (refused.value.type, refused.value.param)
    assert {404: "unknown_url", 405: "method_not_supported"}[status] == refused.value.code
    assert ("Allow" in refused.value.response.headers) == (status == 405)
    assert 1 == scene.figure("refused_total", status=str(status))


@pytest.mark.parametrize("path", ["", "/v1/v1", "/v1/chat/completions", "/openai/deployments/job"])
async def test_another_base_url_is_told_the_right_one(scene: Scene, path: str) -> None:
    origin = f"http://127.0.0.1:{scene.controller.member.ports.pages}"
    client = scene.client.with_options(base_url=origin + path)
    with pytest.raises(openai.NotFoundError, match=f"{path}/chat/completions here: set base_url to {origin}/v1"):
        await client.chat.completions.create(model="job", messages=[QUESTION])


# ---------------------------------------------------------------------------------------------------- tools
async def test_tool_calls_are_read_as_the_models_template_has_them_written(tmp_path: Path) -> None:
    async with gateway_running(tmp_path, answer_with_tool, template=TOOLS_TEMPLATE, maxResponseTokens=200) as scene:
        for pace in (1, 12, 40, 80):
            await scene.gate.open(V0, pace=pace)
            chunks: list[ChatCompletionChunk] = []
            asked = (
                asyncio.create_task(scene.ask(tools=TOOLS)),
                asyncio.create_task(read_into(chunks, scene, tools=TOOLS)),
            )
            await scene.generating(2)
            await scene.switch(V1)
            await asyncio.gather(*asked)
            (choice,) = asked[0].result().choices
            assert ("Let me look.\n", "tool_calls") == (choice.message.content, choice.finish_reason)
            (call,) = choice.message.tool_calls or []
            assert call.type == "function"
            assert ("find", {"what": "it <b>"}) == (call.function.name, json.loads(call.function.arguments))
            assert "Let me look.\n" == "".join(pieces(chunks))
            streamed = [
                (part.function.name, json.loads(part.function.arguments or ""))
                for chunk in chunks
                for each in chunk.choices
                for part in each.delta.tool_calls or []
                if part.function
            ]
            assert [("find", {"what": "it <b>"})] == streamed
            assert "tool_calls" == chunks[-2].choices[0].finish_reason
            answered = await scene.ask(
                QUESTION,
                {
                    "role": "assistant",
                    "content": choice.message.content,
                    "tool_calls": [
                        {
                            "id": call.id,
                            "type": "function",
                            "function": {"name": "find", "arguments": call.function.arguments},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": call.id, "content": "north"},
                tools=TOOLS,
            )
            assert "It is north." == text_of(answered)
            await scene.gate.close()


def answer_with_tool(question: str) -> str:
    if "north" in question:
        return "It is north."
    return 'Let me look.\n<tool_call>\n{"name": "find", "arguments": {"what": "it <b>"}}\n</tool_call>'


# ---------------------------------------------------------------------------------------------------- where it listens
async def test_other_pods_of_the_job_reach_it_with_the_data_token_over_tls(scene: Scene) -> None:
    """The documentation promises it: the certificate is checked against the job's name, whatever the address."""
    await scene.gate.open(V0)

    async def name_the_job(request: httpx.Request) -> None:
        request.extensions["sni_hostname"] = names.member_server_name(JOB_UID)

    http = httpx.AsyncClient(
        verify=scene.job.tls.client_context(), trust_env=False, event_hooks={"request": [name_the_job]}
    )
    url = f"https://127.0.0.1:{scene.controller.member.ports.data}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0, http_client=http) as client:
        completion = await client.chat.completions.create(model="job", messages=[QUESTION])
        assert ANSWER == text_of(completion)
        with pytest.raises(openai.NotFoundError, match="ask POST /v1/chat/completions"):
            await client.responses.create(model="job", input="?")
        with pytest.raises(openai.AuthenticationError, match="data token") as refused:
            await client.with_options(api_key="x" * 32).chat.completions.create(model="job", messages=[QUESTION])
        assert ("invalid_request_error", "invalid_api_key") == (refused.value.type, refused.value.code)


async def test_programs_of_the_page_do_what_it_says(scene: Scene) -> None:
    """They run in one process after the other, with the addresses and the files of this job."""
    await scene.gate.open(V0)
    ports = scene.controller.member.ports
    here, elsewhere = (block.text for block in blocks("docs/gateway.md") if block.language == "python")
    begin, ask = here.strip().rsplit("\n", 1)
    shows = f"print({ask.replace('sums', 'job')}.choices[0].message.content)\n"
    named = {"127.0.0.1:8080": f"127.0.0.1:{ports.pages}", "POD_IP:8444": f"127.0.0.1:{ports.data}", "JOB_UID": JOB_UID}
    for program in (f"{begin}\n{shows}", f"{begin}\n{elsewhere}{shows}"):
        for word, name in named.items():
            program = program.replace(word, name)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program), cwd=scene.job.directory / "tls", stdout=PIPE, stderr=PIPE
        )
        async with asyncio.timeout(DEADLINE_S):
            output, errors = await process.communicate()
        assert (ANSWER, "") == (output.decode().strip(), errors.decode())


async def test_many_long_conversations_leave_threads_to_others(scene: Scene) -> None:
    """All of the process's threads made prompts for clients, and a batch waited behind hundreds of them."""
    await scene.gate.open(V0)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(5))
    chat, go_on = scene.job.chat, threading.Event()
    under_way: list[str] = []

    class LongConversations:
        def __getattr__(self, name: str) -> Any:
            return getattr(chat, name)

        def encode(self, text: str, *, special: bool = False) -> tuple[int, ...]:
            under_way.append(text)
            assert go_on.wait(DEADLINE_S)
            return chat.encode(text, special=special)

    scene.controller._gateway._chat = LongConversations()  # type: ignore[assignment]
    try:
        async with asyncio.TaskGroup() as clients:
            asked = [clients.create_task(scene.ask()) for _ in range(8)]
            await until(lambda: len(under_way) >= 3)
            async with asyncio.timeout(BATCH_S):
                await asyncio.to_thread(chat.encode, "a batch")
            go_on.set()
        assert [ANSWER] * 8 == [text_of(each.result()) for each in asked]
    finally:
        go_on.set()


@pytest.mark.parametrize(("place", "threads"), [("gateway", 3), ("pages", 1)])
async def test_clients_that_leave_do_not_take_the_threads_of_others(scene: Scene, place: str, threads: int) -> None:
    """Each that left before its answer was made let another one in, and its thread worked on beside that."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads + 1))
    controller, go_on = scene.controller, threading.Event()
    work = controller._gateway._in_thread if place == "gateway" else controller._followers.in_turn
    under_way: list[int] = []

    def take_long() -> None:
        under_way.append(1)
        assert go_on.wait(DEADLINE_S)

    try:
        async with asyncio.TaskGroup() as clients:
            leaving = [clients.create_task(work(take_long)) for _ in range(threads)]
            await until(lambda: len(under_way) == threads)
            for each in leaving:
                each.cancel()
            await asyncio.wait(leaving)
            coming = clients.create_task(work(take_long))
            await asyncio.sleep(0)  # it begins, where there is a place
            async with asyncio.timeout(BATCH_S):
                await asyncio.to_thread(scene.job.chat.encode, "a batch")
            go_on.set()
            await coming
    finally:
        go_on.set()


async def test_many_who_look_at_samples_leave_threads_to_others(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look took a thread of the process, and a batch waited behind all of them."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(5))
    store, go_on = scene.controller._store, threading.Event()
    recent, under_way = store.recent, []

    def slow(*given: Any, **options: Any) -> Any:
        under_way.append(given)
        assert go_on.wait(DEADLINE_S)
        return recent(*given, **options)

    monkeypatch.setattr(store, "recent", slow)
    url = f"http://127.0.0.1:{scene.controller.member.ports.pages}/v1/samples"
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http, asyncio.TaskGroup() as lookers:
            looks = [lookers.create_task(http.get(url)) for _ in range(16)]
            await until(lambda: under_way)
            async with asyncio.timeout(BATCH_S):
                await asyncio.to_thread(scene.job.chat.encode, "a batch")
            go_on.set()
        assert [200] * 16 == [each.result().status_code for each in looks]
    finally:
        go_on.set()


async def test_clients_that_are_slow_to_send_hold_up_nobody(scene: Scene) -> None:
    """Sixteen of them held all places for half a minute, and everybody else waited."""
    await scene.gate.open(V0)
    port = scene.controller.member.ports.pages
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 9\r\n\r\n{"
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(head)
        async with asyncio.timeout(BATCH_S):
            assert ANSWER == text_of(await scene.ask())


async def test_bodies_are_read_in_turn_and_never_more_than_so_many_bytes_at_a_time() -> None:
    chance = random.Random(5)
    reading, held, most, order = Reading(10), 0, 0, []

    async def read(number: int, size: int) -> None:
        nonlocal held, most
        async with reading.of(size):
            order.append(number)
            held += size
            most = max(most, held)
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            held -= size

    tasks = [asyncio.create_task(read(number, chance.randrange(11))) for number in range(200)]
    for _ in range(3):
        await asyncio.sleep(0)
    gone = set(chance.sample(range(len(order), 200), 50))
    for number in gone:
        tasks[number].cancel()
    await asyncio.wait(tasks)
    assert [number for number in range(200) if number not in gone] == order
    assert (0, 10) == (held, most)


async def test_a_body_that_finds_no_room_is_refused_for_now() -> None:
    reading = Reading(10, wait_s=0.01)
    async with reading.of(6):
        with pytest.raises(RequestRefused, match="later") as refused:
            async with reading.of(5):
                pass
        assert (429, RETRY_S) == (refused.value.status, refused.value.retry_s)
        async with reading.of(4):
            pass
    async with reading.of(10):
        pass


async def test_a_body_that_takes_long_to_read_leaves_the_event_loop_to_others(scene: Scene) -> None:
    """Tool calls were read, and histories compared, on the event loop: a few bodies of 6 MiB kept it for a minute, and
    the operator's link was lost. By processor time, which no load of the machine changes.
    """
    await scene.gate.open(V0)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2, 3]}'}}
    calls = {"role": "assistant", "content": "x", "tool_calls": [call] * 15}
    body = json.dumps({"model": "job", "messages": [QUESTION] + [calls] * 2000}).encode()
    url = f"http://127.0.0.1:{scene.controller.member.ports.pages}/v1/sessions/s/chat/completions"
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S, transport=Checked()) as http:
        before = time.thread_time(), time.process_time()
        said = await http.post(url, content=body, headers={"Content-Type": "application/json"})
        of_loop, of_all = (
            now - then for now, then in zip((time.thread_time(), time.process_time()), before, strict=True)
        )
    assert said.status_code in (200, 400)
    assert 4 * of_loop < of_all


async def test_a_body_is_bounded_and_json(scene: Scene) -> None:
    with pytest.raises(openai.APIStatusError, match="larger than") as refused:
        await scene.ask({"role": "user", "content": "x" * MAX_REQUEST_BYTES})
    assert 413 == refused.value.status_code
    url = f"http://127.0.0.1:{scene.controller.member.ports.pages}/v1/chat/completions"
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S, transport=Checked()) as http:
        answer = await http.post(url, content="model=job", headers={"Content-Type": "text/plain"})
        assert (415, "invalid_request_error") == (answer.status_code, answer.json()["error"]["type"])


@pytest.mark.parametrize("seed", range(3))
async def test_no_body_is_an_error_of_ours(scene: Scene, seed: int) -> None:
    """Bodies that were damaged anywhere: answered, or refused in OpenAI's shape, and nothing is left behind."""
    await scene.gate.open(V0)
    chance = random.Random(seed)
    good: dict[str, Any] = {
        "model": "job",
        "messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": []}, QUESTION],
        "prompt": "<|im_start|>assistant\n",
        "stop": ["x"],
        "stream": False,
    }
    values: list[Any] = [None, 0, -1, 1e308, "", "\ud800", [], {}, [{}], [[]], True, "auto", {"role": "user"}]

    def damaged(value: Any) -> Any:
        if chance.random() < 0.1:
            return chance.choice(values)
        if isinstance(value, dict):
            return {name: damaged(inner) for name, inner in value.items() if chance.random() > 0.05}
        return [damaged(inner) for inner in value] if isinstance(value, list) else value

    url = f"http://127.0.0.1:{scene.controller.member.ports.pages}/v1/"
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S, transport=Checked()) as http:
        for _ in range(100):
            path, other = chance.choice([("chat/completions", "prompt"), ("completions", "messages")])
            body = {**good, chance.choice(sorted(ONLY)): chance.choice(values)}
            del body[other]
            text = bytearray(json.dumps(damaged(body)).encode())
            for _ in range(chance.choice([0, 0, 0, 1, 3])):
                text[chance.randrange(len(text))] = chance.randrange(256)
            answer = await http.post(url + path, content=bytes(text), headers={"Content-Type": "application/json"})
            assert answer.status_code in (200, 400, 404), answer.text
            if answer.status_code != 200:
                assert {"message", "type", "param", "code"} == set(answer.json()["error"])
    assert (0, 0) == (scene.figure("parked"), scene.gate.in_flight)
