"""Which engine takes the next request: as a look at all of them would say, whatever came before."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from bench import virtual_time
from bench.simulated_engines import SimulatedEngine
from bench.simulated_job import Job, SimulatedEngines
from colocated_rl_api.ladder import WeightVersion
from colocated_rl_rollout.engine_client import EngineClient, GenerateRequest
from colocated_rl_rollout.engines import BURST, PACE_S, Engines

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
    engines = SimulatedEngines(Job(lambda prompt, number: 1, engines=4), changed=lambda: None)
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


@settings(max_examples=60, deadline=None)
@given(st.lists(MOVES, max_size=40))
def test_the_engine_with_the_fewest_requests_is_picked_whatever_came_before(moves: list[tuple[str, int]]) -> None:
    virtual_time.run(play([("open", 0), ("open", 1), *moves]))


def test_h28_nobody_asks_for_what_repeats_the_prefix() -> None:
    """Routed experts come for the prompt too, which is longer in each attempt: nothing here would read them."""
    request = GenerateRequest([1, 2], 9, 1.0, end_ids=[2], stops=["x"], seed=1)
    for stream in (False, True):
        assert {"input_ids", "sampling_params", "return_logprob", "stream"} == set(
            json.loads(request.body(stream=stream))
        )
