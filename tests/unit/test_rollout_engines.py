"""The next request goes to the engine that a look at all of them would choose, whatever came before."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import virtual_time
from bench.simulated_engines import SimulatedEngine
from bench.simulated_job import SimulatedEngines, SimulatedJob
from colocated_rl_api.gate_wire import GateState
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.engines.engine_client import (
    REST_AT_MOST_S,
    REST_S,
    AttemptLost,
    EngineClient,
    Generated,
    GenerateRequest,
)
from colocated_rl_rollout.engines.engines import BURST, PACE_S, Engines
from colocated_rl_rollout.rules.samples import Span, Tokens

OPEN = GateState(open=True, epoch=1, incarnation="e1", version=WeightVersion(0, 1), in_flight=0)


def tokens_of_one() -> Tokens:
    return Tokens(np.array([5], np.int32), np.array([-1], np.float32), (Span(WeightVersion(0, 1), 0, 1),))


MOVES = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 12)),  # with at most so many requests at each
    st.tuples(st.just("burst"), st.integers(0, 3)),
    st.tuples(st.just("end"), st.integers(0, 99)),
    st.tuples(st.just("open"), st.integers(0, 3)),
    st.tuples(st.just("close"), st.integers(0, 3)),
    st.tuples(st.just("wait"), st.integers(1, 3)),
)


def looked_for(engines: Engines, at_most: int) -> EngineClient | None:
    """The one with the fewest requests, of all that take one."""
    found = [
        client
        for client in engines._clients.values()
        if client.takes_requests and client.in_flight < at_most and engines._sent[client] < BURST
    ]
    return min(found, key=lambda client: (client.in_flight, client.name), default=None)


async def play(moves: list[tuple[str, int]]) -> None:
    engines = SimulatedEngines(SimulatedJob(lambda prompt, number: 1, engines=4), changed=lambda: None)
    under_way: list[asyncio.Event] = []
    attempts: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as group:
        following = group.create_task(engines.run())
        await asyncio.sleep(0)

        def send(to: EngineClient) -> None:
            ends = asyncio.Event()
            under_way.append(ends)
            attempts.append(engines.send(group, to, attempt(ends), name="attempt"))

        for move, number in moves:
            simulated: list[SimulatedEngine] = engines.simulated
            match move:
                case "send" if picked := engines.pick(at_most=number):
                    send(picked)
                case "burst" if simulated[number].is_open:
                    for _ in range(BURST - engines._sent[simulated[number]]):
                        send(simulated[number])
                case "end" if under_way:
                    under_way.pop(number % len(under_way)).set()
                case "open":
                    simulated[number].open(WeightVersion(0, 1))
                case "close":
                    simulated[number].close()
                case "wait":
                    await asyncio.sleep(number * PACE_S / 2)
                case _:
                    pass  # there is nothing to send to, or to end
            await asyncio.sleep(0)
            for at_most in (1, 2, 5, 1000):
                assert looked_for(engines, at_most) is engines.pick(at_most=at_most)
        for ends in under_way:
            ends.set()
        await asyncio.gather(*attempts)
        following.cancel()


async def attempt(ends: asyncio.Event) -> None:
    await ends.wait()


@settings(max_examples=60)
@given(st.lists(MOVES, max_size=40))
def test_the_engine_with_the_fewest_requests_is_picked_whatever_came_before(moves: list[tuple[str, int]]) -> None:
    virtual_time.run(play([("open", 0), ("open", 1), *moves]))


def test_no_more_requests_are_sent_than_there_are_descriptors_for_until_one_ends() -> None:
    """Requests that are not sent wait in the store, as they do while gates are closed."""

    async def main() -> None:
        nobody: Any = None
        engines = Engines(nobody, settle_s=1, changed=lambda: None, count=lambda _: None, requests_at_most=2)
        client = EngineClient(Endpoint(pod="a", address="", port=1), nobody, settle_s=1, changed=engines._gate_changed)
        engines._clients[client.endpoint] = client
        client._set(OPEN)
        async with asyncio.TaskGroup() as group:
            ends = [asyncio.Event() for _ in range(2)]
            attempts: list[asyncio.Task[None]] = []
            for end in ends:
                assert client is engines.pick(at_most=9)
                attempts.append(engines.send(group, client, attempt(end), name="attempt"))
            assert engines.pick(at_most=9) is None
            assert engines.pick(preferred="a", at_most=9) is None
            ends[0].set()
            await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
            assert client is engines.pick(at_most=9)
            ends[1].set()

    virtual_time.run(main())


class ScriptedClient(EngineClient):
    """Brings nothing, but where it is told what to bring."""

    brings: Generated | None = None

    async def _post(self, body: bytes, read: Any) -> Generated:
        if self.brings is None:
            raise AttemptLost("as ever")
        return self.brings


class SilentClient(EngineClient):
    """Its gate answers no request, and a connection takes a moment to end."""

    async def _post(self, body: bytes, read: Any) -> Generated:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
        raise AssertionError("nobody sets it")


def test_an_engine_that_brings_nothing_rests_twice_as_long_each_time_until_it_brings_something() -> None:
    """Otherwise one that refuses everything would be asked without end, and hold up what the others could take."""

    async def rest(client: EngineClient) -> float:
        with suppress(AttemptLost):
            await client.generate(GenerateRequest([1], 9, 1.0, end_ids=[2]))
        now = asyncio.get_running_loop().time()
        pause_s = max(0.0, client._rests_until - now)
        assert client.takes_requests is (pause_s == 0)
        await asyncio.sleep(pause_s)
        return pause_s

    async def main() -> None:
        nobody: Any = None
        client = ScriptedClient(Endpoint(pod="a", address="", port=1), nobody, settle_s=1, changed=lambda: None)
        client._set(OPEN)
        growing = [min(REST_S * 2**times, REST_AT_MOST_S) for times in range(12)]
        assert growing == pytest.approx([await rest(client) for _ in range(12)])
        client.brings = Generated(tokens_of_one(), None)
        assert 0 == await rest(client)
        client.brings = None
        assert growing[:2] == pytest.approx([await rest(client) for _ in range(2)])

    virtual_time.run(main())


def test_whoever_is_told_that_a_rest_is_over_finds_an_engine_that_takes_requests() -> None:
    """One in four was told too early by the loop of the controller: an engine without a request was forgotten."""

    async def rest(number: int) -> None:
        await asyncio.sleep(number * 0.0013)
        nobody: Any = None
        told = asyncio.Event()
        client = ScriptedClient(Endpoint(pod="a", address="", port=1), nobody, settle_s=1, changed=told.set)
        client._set(OPEN)
        told.clear()
        with suppress(AttemptLost):
            await client.generate(GenerateRequest([1], 9, 1.0, end_ids=[2]))
        await told.wait()
        assert client.takes_requests

    async def main() -> None:
        await asyncio.gather(*map(rest, range(100)))

    uvloop.run(main())


def test_a_gate_that_opens_ends_the_rest_of_its_engine() -> None:
    async def main() -> None:
        nobody: Any = None
        client = ScriptedClient(Endpoint(pod="a", address="", port=1), nobody, settle_s=1, changed=lambda: None)
        client._set(OPEN)
        with suppress(AttemptLost):
            await client.generate(GenerateRequest([1], 9, 1.0, end_ids=[2]))
        assert not client.takes_requests
        for state in (OPEN.model_copy(update={"open": False, "version": None}), OPEN):
            client._set(state)
        assert client.takes_requests

    virtual_time.run(main())


@pytest.mark.parametrize("event", ["open", "lost", "abandoned"])
def test_a_gate_that_changes_while_its_attempts_are_being_given_up_ends_nothing_else(event: str) -> None:
    """The deadline of an attempt can't be moved once it has passed: the controller ended of the error."""

    async def main() -> None:
        nobody: Any = None
        client = SilentClient(Endpoint(pod="a", address="", port=1), nobody, settle_s=1, changed=lambda: None)
        client._set(OPEN)
        asked = asyncio.create_task(client.generate(GenerateRequest([1], 9, 1.0, end_ids=[2])))
        await asyncio.sleep(0)
        client._set(OPEN.model_copy(update={"open": False, "version": None}))
        await asyncio.sleep((client._given_up_at or 0.0) - asyncio.get_running_loop().time())
        assert [True] == [attempt.expired() for attempt in client._under_way]
        if event == "abandoned":
            client.abandon()
        else:
            client._set(OPEN if event == "open" else None)
        with pytest.raises(AttemptLost, match="given up"):
            await asked

    virtual_time.run(main())


@pytest.mark.parametrize(
    ("first", "more"),
    [(None, {}), (0, {"return_routed_experts": True, "routed_experts_start_len": 0}),
     (7, {"return_routed_experts": True, "routed_experts_start_len": 7})],
)  # fmt: skip
def test_h28_routed_experts_are_asked_for_from_the_first_token_without(first: int | None, more: dict[str, Any]) -> None:
    """They come for the prompt too, which is longer in each attempt."""
    request = GenerateRequest([1, 2], 9, 1.0, end_ids=[2], stops=["x"], seed=1, experts_from=first)
    for stream in (False, True):
        body = json.loads(request.body(stream=stream))
        assert more == {name: body.pop(name) for name in more}
        assert {"input_ids", "sampling_params", "return_logprob", "stream"} == set(body)
