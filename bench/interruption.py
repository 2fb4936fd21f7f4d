"""`make bench-interruption`: how long the real engine takes to end a job's requests and to be idle, by how it is told.

All at once, as the agent aborts them; each by its id; and each by its id beside one request of somebody else, which
goes on: then the engine is idle once that one has ended.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from uuid import uuid4

import aiohttp

from colocated_rl_agent.drivers.sglang import SGLang
from colocated_rl_api.rungs import WeightVersion
from engines import ADMIN_KEY, engine_process
from fakes.engine_model import write_engine_export
from fakes.sse import json_events

VERSION = WeightVersion(0, 1)
REQUESTS, PROMPT_TOKENS = 64, 64
OWN_TOKENS, OTHERS_TOKENS = 1500, 600  # more than the job's requests get until all of them have one
CALL_S, TURNS = 60.0, 5
FLAGS = ("--max-total-tokens", "131072", "--max-running-requests", str(REQUESTS + 1))

Abort = Callable[[SGLang, list[str]], Awaitable[object]]


async def abort_all(client: SGLang, rids: list[str]) -> None:
    await client.abort_all()


async def abort_each(client: SGLang, rids: list[str]) -> None:
    await asyncio.gather(*map(client.abort, rids))


@dataclass(frozen=True)
class TimeToEnd:
    """Seconds from the first abort until the job's requests have ended, and until the engine has proved to be idle."""

    ended_s: float
    idle_s: float


async def generate(client: SGLang, session: aiohttp.ClientSession, rid: str, tokens: int, begun: asyncio.Event) -> str:
    """Ask for so many tokens, read all that come, and return why no more came. begun: set with the first."""
    number = sum(rid.encode())
    body = {
        "rid": rid,
        "stream": True,
        "input_ids": [5 + (number * 31 + place * (number + 1)) % 90 for place in range(PROMPT_TOKENS)],
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
    }
    ending = None
    async with session.post(f"{client.url}/generate", json=body) as answer:
        async for event in json_events(answer.content):
            begun.set()
            ending = event["meta_info"]["finish_reason"]
    return str(ending and ending["type"])


async def measured(client: SGLang, session: aiohttp.ClientSession, abort: Abort, *, others: int) -> TimeToEnd:
    """Interrupt the job's requests once each has a token. others: requests of somebody else, which begin last."""

    async def begin(rids: list[str], tokens: int) -> list[asyncio.Task[str]]:
        begun = [asyncio.Event() for _ in rids]
        tasks = [
            asyncio.create_task(generate(client, session, rid, tokens, event))
            for rid, event in zip(rids, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        return tasks

    rids = [uuid4().hex for _ in range(REQUESTS)]  # new ones: the engine aborts an id again 2 s after its answer
    own = await begin(rids, OWN_TOKENS)
    foreign = await begin([uuid4().hex for _ in range(others)], OTHERS_TOKENS)
    started = time.monotonic()
    await abort(client, rids)
    ends = await asyncio.gather(*own)
    ended_s = time.monotonic() - started
    await client.flush()
    took = TimeToEnd(ended_s, time.monotonic() - started)
    others_ends = await asyncio.gather(*foreign)
    if {*ends} != {"abort"} or {*others_ends} - {"length"}:
        raise AssertionError(f"the job's requests alone should be interrupted: {ends}, of somebody else: {others_ends}")
    return took


async def run(url: str) -> dict[str, list[TimeToEnd]]:
    """Take TURNS of each kind, in turn, so that all see the same machine."""
    kinds = {
        "all that the engine has": partial(measured, abort=abort_all, others=0),
        "each by its id": partial(measured, abort=abort_each, others=0),
        "each by its id, one of somebody else goes on": partial(measured, abort=abort_each, others=1),
    }
    took: dict[str, list[TimeToEnd]] = defaultdict(list)
    timeout, connector = aiohttp.ClientTimeout(total=2 * CALL_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = SGLang(session, url=url, admin_key=ADMIN_KEY, call_s=CALL_S)
        for turn in range(1 + TURNS):
            for kind, measure in kinds.items():
                found = await measure(client, session)
                if turn:  # in the first the engine and its kernels warm up
                    took[kind].append(found)
    return took


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        export = write_engine_export(root / "weights", version=VERSION, seed=0)
        with engine_process(export, version=VERSION, root=root, flags=FLAGS) as engine:
            engine.wait_until_up()
            took = asyncio.run(run(engine.url))
    print(f"{REQUESTS} requests, {TURNS} times: seconds, median (least to most)")
    print(f"{'aborted':48}  {'until they ended':24}  until the engine was idle")
    for kind, times in took.items():
        columns = [[each.ended_s for each in times], [each.idle_s for each in times]]
        print(f"{kind:48}  " + "  ".join(f"{f'{median(c):.2f} ({min(c):.2f} to {max(c):.2f})':24}" for c in columns))


if __name__ == "__main__":
    main()
