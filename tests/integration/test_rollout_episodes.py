"""Episodes of environments, played by processes of other people's code: what they come to when something misbehaves.

Here a process is scripted: the row of a task says how its episode goes. Real environments: test_rollout_environments.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from waiting import DEADLINE_S, until

from colocated_rl_api.job import EvaluationSet
from colocated_rl_api.prompts import Environment, Mix, Prompts, ReasoningGym, WeightedSource
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.episodes import EpisodeFailed, EpisodeLost, Episodes
from colocated_rl_rollout.gateway.openai_requests import RequestRefused
from colocated_rl_rollout.gateway.sessions import Session, Sessions
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.rules.samples import (
    Finish,
    Span,
    Tokens,
    Trajectory,
)
from colocated_rl_rollout.store.store import Store
from colocated_rl_rollout.tasks.player import play
from colocated_rl_rollout.tasks.task_wire import Data, TaskReply
from fakes.rollout import JOB_UID
from fakes.tasks import task_server

REWARDED, FAILING, SILENT, STUBBORN, DYING, NOT_A_NUMBER = range(6)
PATIENT = 6  # the first row of the second source, whose deadline is far away
PROMPTS = Prompts(
    mix=Mix(
        sources=[
            WeightedSource(environment=Environment(name="hasty", deadline_seconds=1)),
            WeightedSource(environment=Environment(name="patient", deadline_seconds=3600)),
        ]
    )
)
PLAYER = """
import json, os, sys
greeting = json.loads(sys.stdin.readline())
assert ("the-model", 2) == (greeting["model"], greeting["processes"]), greeting
print(json.dumps({"value": {"size": 12, "digest": "x", "ends": [6, 12]}}), flush=True)
rows = {}
for line in sys.stdin:
    command = json.loads(line)
    if "stop" in command:
        number = command["stop"]["episode"]
        if rows[number] != 3:
            print(json.dumps({"episode": number, "error": "stopped", "reason": "EpisodeFailed"}), flush=True)
        continue
    number, row = command["play"]["episode"], command["play"]["row"]
    rows[number] = row
    assert command["play"]["address"].startswith("http://gateway/v1/sessions/episode:"), said
    if row in (0, 1, 5, 11):
        open(sys.argv[1] + "/go").read()
    if row in (0, 11):
        value = {"reward": 0.25, "figures": {"tools": 2}}
        print(json.dumps({"episode": number, "value": value}), flush=True)
    if row == 1:
        print(json.dumps({"episode": number, "error": "TaskError", "reason": "EpisodeFailed"}), flush=True)
    if row == 4:
        os._exit(3)
    if row == 5:
        print(json.dumps({"episode": number, "value": "much"}), flush=True)
"""


class WatchedSessions(Sessions):
    """Counts looks. looks: at whether an episode is heard of."""

    looks = 0

    def quiet_s(self, session: Session) -> float:
        self.looks += 1
        return super().quiet_s(session)


class EpisodeClock:
    """Stands still but for the test. It is looked at once a second, while something is waited for."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class EpisodesScene:
    """Episodes over a real store and task server. Turns are recorded by the test, as the gateway does."""

    episodes: Episodes
    sessions: WatchedSessions
    store: Store
    registry: CollectorRegistry
    directory: Path
    clock: EpisodeClock

    async def go(self) -> None:
        """The environment says what it has to say."""
        await asyncio.to_thread(self.directory.joinpath("go").write_text, "")

    def play(self, row: int) -> asyncio.Task[Trajectory]:
        async def played() -> Trajectory:
            trajectory, removal = await self.episodes.play(row, ending="trained")
            self.store.write(*removal)
            return trajectory

        return asyncio.create_task(played())

    async def session(self) -> Session:
        """Return the session of the one episode that is under way."""
        await until(lambda: [*self.sessions])
        (session,) = self.sessions
        return session

    async def turn(self, session: Session, *, step: int = 0) -> None:
        tokens = Tokens(np.array([5, 2], np.int32), -np.ones(2, np.float32), (Span(WeightVersion(step, 1), 0, 2),))
        parent = session.turns[-1] if session.turns else None
        prompt = np.array([*(parent.ids if parent else []), 7], np.int32)
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}] * (len(session.turns) + 1)
        assert session is self.sessions.begin(session.id)
        await self.sessions.record(
            session, parent, messages, "", prompt=prompt, tokens=tokens, finish=Finish.STOP, engine="a"
        )
        self.sessions.end(session)

    def ended(self, ending: str) -> float | None:
        return self.registry.get_sample_value("colocate_gateway_sessions_ended_total", {"ending": ending})


@asynccontextmanager
async def playing(
    directory: Path,
    *,
    stop_s: float = 60.0,
    program: str = PLAYER,
    prompts: Prompts = PROMPTS,
    sets: Sequence[EvaluationSet] = (),
    digest: str = "x",
) -> AsyncIterator[EpisodesScene]:
    """Play with that program. digest: of the rows that prompts are made of; the player's is x."""
    registry = CollectorRegistry()
    store, metrics = Store(directory / "state", job_uid=JOB_UID), RolloutMetrics(registry)
    clock = EpisodeClock()
    sessions = WatchedSessions(
        store,
        metrics,
        group_size=2,
        max_staleness=1,
        changed=lambda: None,
        clock=clock,
    )
    os.mkfifo(directory / "go")

    async def data() -> Data:
        return Data(size=12, digest=digest, ends=(6, 12))

    with task_server(directory, command=[sys.executable, "-c", program]) as path:
        episodes = Episodes(
            prompts,
            sessions,
            sets=sets,
            data=data,
            count=1,
            socket=path,
            model="the-model",
            gateway=lambda: "http://gateway/v1",
            stop_s=stop_s,
        )
        running = asyncio.create_task(episodes.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield EpisodesScene(episodes, sessions, store, registry, directory, clock)
        finally:
            running.cancel()
            await asyncio.wait([running])
    store.close()


async def failure(episode: asyncio.Task[Trajectory]) -> tuple[str, str]:
    with pytest.raises(EpisodeFailed) as failed:
        await episode
    return failed.value.reason, str(failed.value)


async def test_an_episode_is_its_recorded_turns_and_the_reward_of_its_environment(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        episode = scene.play(REWARDED)
        session = await scene.session()
        await scene.turn(session)
        await scene.turn(session, step=1)
        await scene.go()
        played = await episode
        assert (0.25, Finish.STOP, [7, 5, 2, 7, 5, 2]) == (played.reward, played.finish, played.tokens.ids.tolist())
        assert (Span(WeightVersion(0, 1), 1, 3), Span(WeightVersion(1, 1), 4, 6)) == played.tokens.spans
        assert ({"tools": 2.0}, 1) == (played.figures, scene.ended("trained"))
        with pytest.raises(RequestRefused, match="has ended: it takes no more turns"):
            scene.sessions.begin(session.id)
        await scene.store.flushed()
        assert [] == scene.store.rows("SELECT * FROM turns"), "they are the sample's"


async def test_an_environment_of_a_set_of_the_evaluation_is_played(tmp_path: Path) -> None:
    own = EvaluationSet(name="own", environment=Environment(name="patient"))
    prompts = Prompts(reasoning_gym=ReasoningGym(name="chain_sum"))
    async with playing(tmp_path, prompts=prompts, sets=[own]) as scene:
        episode = scene.play(11)
        await scene.turn(await scene.session())
        await scene.go()
        assert 0.25 == (await episode).reward


async def test_a_reward_without_a_turn_is_no_episode(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        episode = scene.play(REWARDED)
        await scene.go()
        assert ("EpisodeWithoutTurn", "it ended without a turn of the job's model") == await failure(episode)
        assert 1 == scene.ended("EpisodeWithoutTurn")


async def test_a_reward_that_is_no_number_is_none(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        episode = scene.play(NOT_A_NUMBER)
        await scene.turn(await scene.session())
        await scene.go()
        assert "ReplyGarbled" == (await failure(episode))[0]


async def test_an_episode_that_fails_tells_why_its_newest_turn_was_refused(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        episode = scene.play(FAILING)
        session = await scene.session()
        await scene.turn(session)
        scene.sessions.refuse(
            session.id, RequestRefused(400, "the template takes no secret", param="tools", code="unsupported_value")
        )
        await scene.go()
        words = "TaskError; its newest turn was refused: 400 unsupported_value (tools)"
        assert ("EpisodeFailed", words) == await failure(episode)
        assert 1 == scene.ended("EpisodeFailed")


async def test_an_episode_that_fails_for_want_of_room_is_cut_short_and_worth_nothing(tmp_path: Path) -> None:
    """Else long ones would never train, and the policy would not hear of it."""
    async with playing(tmp_path) as scene:
        episode = scene.play(FAILING)
        session = await scene.session()
        await scene.turn(session)
        scene.sessions.refuse(session.id, RequestRefused(400, "no room", code="context_length_exceeded"))
        await scene.go()
        played = await episode
        assert (0.0, Finish.LENGTH, [7, 5, 2]) == (played.reward, played.finish, played.tokens.ids.tolist())


async def test_time_in_which_a_turn_waits_does_not_count_and_time_between_turns_does(tmp_path: Path) -> None:
    """An hour of training is in the middle of a turn; a tool that hangs is between two."""
    async with playing(tmp_path) as scene:
        episode = scene.play(SILENT)
        session = await scene.session()
        scene.sessions.begin(session.id)
        scene.clock.now_s, looks = 3600.0, scene.sessions.looks
        await until(lambda: scene.sessions.looks > looks)
        assert not episode.done()
        scene.sessions.end(session)
        scene.clock.now_s += 1.0
        assert ("EpisodeHung", "it asked for no turn and did not end for 1 s") == await failure(episode)
        await until(lambda: not scene.episodes._players[0].playing)  # it was told to stop, and did


async def test_an_episode_that_nobody_waits_for_is_stopped(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        episode = scene.play(PATIENT)
        await scene.session()
        episode.cancel()
        await asyncio.wait([episode])
        assert [] == [*scene.sessions]
        await until(lambda: not scene.episodes._players[0].playing)


async def test_a_process_that_does_not_end_a_hung_episode_is_replaced_with_all_that_it_plays(tmp_path: Path) -> None:
    async with playing(tmp_path, stop_s=0.1) as scene:
        other = scene.play(PATIENT)
        await scene.session()
        hung = scene.play(STUBBORN)
        await until(lambda: len([*scene.sessions]) == 2)
        scene.clock.now_s += 1.0
        assert "EpisodeHung" == (await failure(hung))[0]
        with pytest.raises(EpisodeLost):
            await other
        await until(lambda: scene.episodes.problem)
        problem = scene.episodes.problem
        assert problem is not None
        assert "PlayerLost" == problem.reason
        assert "an episode did not end within 0 s of being asked to" in problem.message
        again = scene.play(FAILING)
        await scene.go()
        assert "EpisodeFailed" == (await failure(again))[0], "another one plays"
        assert scene.episodes.problem is None


async def test_a_process_that_dies_loses_its_episodes_and_another_one_plays(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        with pytest.raises(EpisodeLost):
            await scene.play(DYING)
        again = scene.play(FAILING)
        await scene.go()
        assert "EpisodeFailed" == (await failure(again))[0]
        assert 1 == scene.ended("EpisodeLost")


async def test_episodes_under_way_are_dropped_by_a_restart(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        episode = scene.play(PATIENT)
        await scene.turn(await scene.session())
        registry = CollectorRegistry()
        again = Sessions(
            scene.store,
            RolloutMetrics(registry),
            group_size=2,
            max_staleness=1,
            changed=lambda: None,
            clock=lambda: 0.0,
        )
        assert [] == [*again]
        assert 2 == registry.get_sample_value(
            "colocate_rollout_discarded_tokens_total", {"reason": "SessionEpisodeLost"}
        )
        await scene.store.flushed()
        assert [] == scene.store.rows("SELECT * FROM turns")
        episode.cancel()


async def test_a_process_without_the_row_that_is_to_be_played_is_replaced(tmp_path: Path) -> None:
    """A stranger's process reports which rows it has, and that report is not trusted."""
    async with playing(tmp_path) as scene:
        with pytest.raises(EpisodeLost):
            await scene.play(50)
        await until(lambda: scene.episodes.problem)
        problem = scene.episodes.problem
        assert problem is not None
        assert "row 50 is of no environment there; it is started again" == problem.message
        await until(lambda: scene.episodes.problem is None)


async def test_a_process_with_other_rows_than_prompts_are_made_of_plays_none(tmp_path: Path) -> None:
    """An environment that shuffles its tasks anew: a group's episodes were of several tasks, and of held-out ones."""
    async with playing(tmp_path, digest="y") as scene:
        episode = scene.play(REWARDED)
        await until(lambda: scene.episodes.problem)
        assert scene.episodes.problem is not None
        assert "the process that plays has other rows" in scene.episodes.problem.message
        assert [] == [*scene.sessions]
        episode.cancel()


class BusyTasks:
    """Its episodes keep every thread of the loop busy, as tools that are not asynchronous do."""

    def __init__(self) -> None:
        self.environments: list[Any] = []
        self.data = None
        self.begun: list[int] = []
        self.go_on = threading.Event()

    async def play(self, row: int, *, model: str, address: str) -> None:
        self.begun.append(row)
        await asyncio.gather(*(asyncio.to_thread(self.go_on.wait, DEADLINE_S) for _ in range(8)))


async def test_an_environment_that_keeps_all_threads_busy_is_still_told_what_to_do() -> None:
    """Lines waited for a thread behind its tools: an episode was not told to stop, and its process was replaced."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    tasks: Any = BusyTasks()
    lines, end = os.pipe()
    replies: list[TaskReply] = []
    with os.fdopen(lines) as requests, os.fdopen(end, "w") as asked:
        playing = asyncio.create_task(play(requests, replies.append, tasks, model="job", note=str))
        try:
            for row in range(2):
                print(json.dumps({"play": {"episode": row, "row": row, "address": ""}}), file=asked, flush=True)
            await until(lambda: len(tasks.begun) == 2)
            print(json.dumps({"stop": {"episode": 0}}), file=asked, flush=True)
            await until(lambda: 0 in [reply.episode for reply in replies])
        finally:
            tasks.go_on.set()
            asked.close()
            await playing
