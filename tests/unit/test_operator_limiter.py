"""The operator begins no more calls than this, by a clock that jumps to whatever is waited for."""

from __future__ import annotations

import asyncio

import pytest

from bench import virtual_time
from colocated_rl_operator.clients.limiter import HOLD_AT_MOST_S, CallLimiter


def begun(count: int, limiter: CallLimiter) -> list[float]:
    """Return when each of so many calls that came at once begins."""

    async def all_of_them() -> list[float]:
        times: list[float] = []

        async def call(number: int) -> None:
            await limiter.wait()
            times.append(asyncio.get_running_loop().time())
            order.append(number)

        order: list[int] = []
        start = asyncio.get_running_loop().time()
        await asyncio.gather(*(call(number) for number in range(count)))
        assert sorted(order) == order, "in the order in which they came"
        return [time - start for time in times]

    return virtual_time.run(all_of_them())


def test_a_burst_begins_at_once_and_the_rest_at_the_rate() -> None:
    assert [0, 0, 0, 0.5, 1.0, 1.5] == pytest.approx(begun(6, CallLimiter(calls_per_s=2, burst=3)))


def test_a_bucket_that_was_emptied_fills_again_and_no_further() -> None:
    limiter = CallLimiter(calls_per_s=2, burst=3)

    async def twice() -> list[float]:
        for _ in range(3):
            await limiter.wait()
        await asyncio.sleep(100)
        start = asyncio.get_running_loop().time()
        times = []
        for _ in range(5):
            await limiter.wait()
            times.append(asyncio.get_running_loop().time() - start)
        return times

    assert [0, 0, 0, 0.5, 1.0] == pytest.approx(virtual_time.run(twice()))


@pytest.mark.parametrize(("asked_s", "held_s"), [(0, 0), (7, 7), (3600, HOLD_AT_MOST_S)])
def test_what_comes_and_what_waits_is_held_back_as_long_as_the_server_asks(asked_s: float, held_s: float) -> None:
    limiter = CallLimiter(calls_per_s=1, burst=1)

    async def while_one_waits() -> list[float]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await limiter.wait()
        waiting = asyncio.create_task(limiter.wait())
        await asyncio.sleep(0.5)
        limiter.hold(asked_s)
        limiter.hold(0)  # a later answer takes nothing back
        await waiting
        return [loop.time() - start]

    assert [max(1.0, 0.5 + held_s)] == pytest.approx(virtual_time.run(while_one_waits()))
