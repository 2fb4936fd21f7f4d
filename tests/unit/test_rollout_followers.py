"""Following samples over HTTP: each as it ends, once, in order, and again from where a follower was cut off."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from unit.test_rollout_store import JOB, PlainDecoder, S, completed_group, prompt, recorded, seal, segment
from waiting import until

from colocated_rl_api.facts import RolloutFacts
from colocated_rl_rollout.pages.exports import SampleExports
from colocated_rl_rollout.pages.followers import LINES, Followers
from colocated_rl_rollout.pages.pages import pages
from colocated_rl_rollout.pages.words import in_words
from colocated_rl_rollout.rules.samples import Finish
from colocated_rl_rollout.store.store import Store
from fakes.interface import rollout_interface
from fakes.serving import end

DEADLINE_S = 60.0


@dataclass
class FollowersScene:
    store: Store
    followers: Followers
    port: int
    client: aiohttp.ClientSession

    @asynccontextmanager
    async def following(self, query: str = "") -> AsyncIterator[aiohttp.ClientResponse]:
        async with asyncio.timeout(DEADLINE_S), self.client.get(f"/v1/samples?follow=true{query}") as response:
            yield response

    async def whole(self, query: str) -> list[dict[str, Any]]:
        """Return what a follower receives from first to last, after a check against the document."""
        async with self.following(query) as response:
            body = await response.read()
        rollout_interface().check("GET", "/v1/samples", response.status, response.content_type, body)
        return [json.loads(line) for line in body.splitlines() if line]


async def next_row(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The next sample."""
    while not (line := await response.content.readline()).strip():
        assert line, "the answer has ended"
    row: dict[str, Any] = json.loads(line)
    return row


@asynccontextmanager
async def serving(
    store: Store, *, text: Callable[[list[int]], str] = str, model: Path = Path(), **options: Any
) -> AsyncIterator[FollowersScene]:
    words = partial(in_words, decoder=PlainDecoder(text))
    followers = Followers(store, words, pace_s=0, **options)
    application = web.Application()
    facts = RolloutFacts(epoch=1)
    application.add_routes(pages(store, lambda: facts, list, words, followers, SampleExports(store, model), dict))
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            yield FollowersScene(store, followers, port, client)
    finally:
        followers.end()
        await end(runner)
        store.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, job_uid=JOB)


async def test_samples_are_reported_as_they_end_and_in_that_order(store: Store) -> None:
    async with serving(store) as scene, scene.following() as response:
        assert (200, LINES) == (response.status, response.content_type)
        first, second = store.admit(prompt(0), size=2).samples
        for sample in (second, first):
            store.start(sample)
            store.finish(sample, segment(2), Finish.STOP)
            store.score(sample, 0.5)
            row = await next_row(response)
            assert (sample.id, "completed", 0.5) == (row["id"], row["state"], row["reward"])
        assert [2, 1] == [sample.ended for sample in (first, second)]


async def test_each_way_to_end_is_reported_once(store: Store) -> None:
    group = completed_group(store)
    store.replace(group.samples[0], S.DISCARDED, "TooStale")  # it had ended already
    running = group.samples[-1]
    store.start(running)
    store.replace(running, S.FAILED, "EngineRejected")
    store.give_up(group, "GroupGivenUp")
    seal(store, [completed_group(store)])
    store.commit(1)
    recorded(store)
    async with serving(store) as scene:
        scene.followers.end()
        rows = await scene.whole("&after=0")
    assert [*range(1, 10)] == [row["ended"] for row in rows]
    ends = [(row["state"], row["reason"]) for row in rows]
    assert ("discarded", "TooStale") == ends[0], "as it is when it is told"
    assert ("failed", "EngineRejected") == ends[2]
    assert [("trained", "")] * 2 + [("sealed", "")] * 3 == ends[4:]


async def test_a_follower_begins_with_the_newest_and_goes_on_where_it_was_cut_off(store: Store, tmp_path: Path) -> None:
    for _ in range(3):
        completed_group(store)
    async with serving(store) as scene, scene.following("&limit=2") as response:
        assert [5, 6] == [(await next_row(response))["ended"] for _ in range(2)]
    again = Store(tmp_path, job_uid=JOB)  # the controller's next start
    completed_group(again)
    async with serving(again) as scene:
        scene.followers.end()
        assert [7, 8] == [row["ended"] for row in await scene.whole("&after=6")]
        assert [] == await scene.whole("&limit=0")


async def test_places_are_never_given_twice_though_a_checkpoint_removes_samples(store: Store, tmp_path: Path) -> None:
    step = seal(store, [completed_group(store)]).step
    store.commit(step)
    store.forget(step)
    store.close()
    again = Store(tmp_path, job_uid=JOB)
    assert [3, 4] == [sample.ended for sample in completed_group(again).samples]
    async with serving(again) as scene:
        scene.followers.end()
        assert [3, 4] == [row["ended"] for row in await scene.whole("&after=0")]


async def test_nothing_is_reported_that_a_kill_could_undo(store: Store) -> None:
    async with serving(store) as scene, scene.following() as response:
        with closing(sqlite3.connect(store.path, isolation_level=None)) as disk:
            disk.execute("BEGIN IMMEDIATE")
            group = completed_group(store)
            reading = asyncio.create_task(next_row(response))
            async with scene.client.get("/v1/progress") as page:  # while it waits, others are answered
                assert page.status == 200
            assert not reading.done()
            disk.execute("COMMIT")
        assert group.samples[0].id == (await reading)["id"]


async def test_only_samples_of_a_state_are_reported_and_with_words_where_they_are_asked_for(store: Store) -> None:
    group = completed_group(store)
    store.start(store.replace(group.samples[0], S.DISCARDED, "TooStale"))
    async with serving(store, text=lambda ids: f"{len(ids)} tokens") as scene:
        scene.followers.end()
        [row] = await scene.whole("&after=0&state=completed&text=true")
        assert (2, "3 tokens", "2 tokens") == (row["ended"], row["prompt"], row["response"])
        assert [{"step": 0, "trained": True, "tokens": 2, "text": "2 tokens"}] == row["spans"]


async def test_batches_are_read_a_page_after_another(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colocated_rl_rollout.pages.pages.BATCHES_AT_MOST", 2)
    for _ in range(3):
        seal(store, [completed_group(store)])
        store.commit(store.next_step - 1)
    store.forget(2)
    await store.flushed()
    async with serving(store) as scene:
        pages = []
        for after in (0, 2, 3):
            async with scene.client.get(f"/v1/batches?after={after}") as response:
                body = await response.read()
            rollout_interface().check("GET", "/v1/batches", response.status, response.content_type, body)
            pages.append([batch["step"] for batch in json.loads(body)["batches"]])
        assert [[1, 2], [3], []] == pages


async def test_who_comes_too_late_sees_the_gap(store: Store) -> None:
    for _ in range(2):
        step = seal(store, [completed_group(store)]).step
        store.commit(step)
        store.forget(step)
    completed_group(store)
    async with serving(store) as scene:
        scene.followers.end()
        assert [5, 6] == [row["ended"] for row in await scene.whole("&after=1")]


async def test_an_empty_line_says_that_somebody_is_there(store: Store) -> None:
    async with serving(store, silence_s=0.01) as scene, scene.following() as response:
        assert [b"\n", b"\n"] == [await response.content.readline() for _ in range(2)]


async def test_so_many_follow_and_no_more(store: Store) -> None:
    async with serving(store, at_most=2) as scene:
        async with scene.following(), scene.following(), scene.following() as refused:
            assert (429, "10") == (refused.status, refused.headers["Retry-After"])
        await until(lambda: not store.followers)  # who left is noticed
        async with scene.following() as response:
            assert response.status == 200


async def test_who_does_not_read_is_hung_up_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds a page of lines until then, while the store goes on."""
    monkeypatch.setattr("colocated_rl_rollout.clients.CLIENT_S", 0.1)
    async with serving(store, text=lambda ids: "a" * 100_000) as scene:
        for _ in range(30):
            completed_group(store)
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, ("127.0.0.1", scene.port))
            await loop.sock_sendall(deaf, b"GET /v1/samples?follow=1&after=0&text=1 HTTP/1.1\r\nHost: job\r\n\r\n")
            await until(lambda: bool(store.followers))
            await until(lambda: not store.followers)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("follow=true&before=3", "follow goes on with ?after="),
        ("after=3", "pages go on with ?before="),
        ("follow=true&after=1", "only 0 samples have ended"),
        ("follow=true&after=-1", "?after=:"),
        ("follow=perhaps", "?follow=:"),
        ("format=csv", "?format=:"),
        ("format=parquet&follow=true", "neither ?follow= nor ?before="),
    ],
)
async def test_what_can_not_be_followed_is_refused(store: Store, query: str, named: str) -> None:
    async with serving(store) as scene, scene.client.get(f"/v1/samples?{query}") as response:
        assert 400 == response.status
        assert named in await response.text()


async def test_a_store_of_an_older_program_goes_on(store: Store, tmp_path: Path) -> None:
    before = completed_group(store)
    store.close()
    with closing(sqlite3.connect(store.path)) as database:
        database.executescript(
            "DROP INDEX samples_by_session; ALTER TABLE samples DROP COLUMN session;"
            "ALTER TABLE samples DROP COLUMN grouping;"
            "DROP INDEX samples_by_end; ALTER TABLE samples DROP COLUMN ended; ALTER TABLE samples DROP COLUMN resent;"
            "ALTER TABLE samples DROP COLUMN unversioned; ALTER TABLE samples DROP COLUMN figures;"
            "ALTER TABLE sessions DROP COLUMN figures;"
        )
    again = Store(tmp_path, job_uid=JOB)
    assert [1.0, 1.0] == [sample.reward for sample in again.groups[before.id].samples]
    completed_group(again)
    async with serving(again) as scene:
        scene.followers.end()
        assert [3, 4] == [row["ended"] for row in await scene.whole("&after=0")]
