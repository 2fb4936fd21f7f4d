"""Episodes of environments: this module picks the process that plays one, detects when it hangs, and takes its reward.

A task of an environment is played where other people's code runs (`player`); its turns reach the gateway as any
client's, in a session that is opened here and takes no turn before or after. So turns are sent, wait and resume over a
switch as all do (`turns`), and the generated tokens come from the session, never from the environment: it gives only
the reward.

An episode fails when its environment reports a failure, or when there was no news of it for the deadline of its source
while none of its turns was under way. An episode whose process dies, or does not end it on request, is lost, which is
no verdict on it: it is played again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from colocated_rl_api.facts import Problem
from colocated_rl_api.job import EvaluationSet
from colocated_rl_api.logs import log
from colocated_rl_api.prompts import Prompts, environments_of, sources_of
from colocated_rl_rollout.gateway.sessions import Session, Sessions
from colocated_rl_rollout.rewards.task_connection import (
    RESTART_S,
    ProcessLost,
    TaskConnection,
    TaskUnusable,
)
from colocated_rl_rollout.rules.samples import Trajectory
from colocated_rl_rollout.store.database import Statement
from colocated_rl_rollout.tasks.task_wire import (
    Data,
    Play,
    RewardAnswer,
    Stop,
    TaskReply,
)

LOG = logging.getLogger(__name__)

SEND_S = 30.0  # for a process to take a line
FAULT_AT_MOST = 1000  # characters of a process's error
OTHER_ROWS = (
    "spec.rollout.prompts, or a set of spec.evaluation: the process that plays has other rows than the one that makes "
    "prompts, so a row would be another task, perhaps a held-out one: let the environment list its tasks in one order, "
    "with a seed for what it draws"
)
STOP_S = 30.0  # for an episode to end on request: it has to return its tools and sandboxes


class EpisodeFailed(Exception):
    """An episode ended without a reward: `reason` is CamelCase and stable. Another one is played in its place."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EpisodeLost(Exception):
    """The process that played the episode ended. The episode is played again."""


@dataclass(eq=False)
class _Player:
    """Plays episodes in one process.

    playing: gets None for each episode that is lost with it. lost: why it must be replaced.
    """

    connection: TaskConnection
    ends: Sequence[int]  # end of the rows of each source
    playing: dict[int, asyncio.Future[TaskReply | None]] = field(default_factory=dict)
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def send(self, kind: str, line: Play | Stop) -> None:
        """Send a line; the process counts as lost if it does not take it."""
        try:
            await self.connection.send(f'{{"{kind}": {line.model_dump_json()}}}\n'.encode(), deadline_s=SEND_S)
        except (ProcessLost, TimeoutError) as error:
            self.lose(f"it takes no lines: {error}")

    def lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)


class Episodes:
    """Runs `count` processes that play; `run` keeps them up.

    sets: of the evaluation, those with a source of their own. data: describes the rows that prompts are made of.
    model: the one that episodes ask. gateway: its address on the pod's loopback, for processes beside the controller.
    """

    def __init__(
        self,
        prompts: Prompts,
        sessions: Sessions,
        *,
        sets: Sequence[EvaluationSet] = (),
        data: Callable[[], Awaitable[Data]],
        count: int,
        socket: Path,
        model: str,
        gateway: Callable[[], str],
        stop_s: float = STOP_S,
    ) -> None:
        self._prompts = prompts
        self._sets = sets
        self._data = data
        self._environments = environments_of(sources_of(prompts, sets))
        self._sessions = sessions
        self._count = count if self._environments else 0
        self._socket = socket
        self._model = model
        self._gateway = gateway
        self._stop_s = stop_s
        self._players: list[_Player] = []
        self._some_are_up = asyncio.Event()
        self._numbers = itertools.count()
        self._group: asyncio.TaskGroup  # while `run` is up
        self.problem: Problem | None = None

    async def run(self) -> None:
        """Keep the processes up until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for number in range(self._count):
                group.create_task(self._keep_up(), name=f"player-{number}")

    async def play(
        self, row: int, *, ending: str, turned: Callable[[int | None], None] = lambda _: None
    ) -> tuple[Trajectory, list[Statement]]:
        """Play one episode of a row's task; return its trajectory, and the statements that remove its session.

        The caller writes the statements together with what follows.
        ending: the label that its session is counted under. turned: called with the step of the oldest weights in each
        turn.
        Raises EpisodeFailed, EpisodeLost.
        """
        await self._some_are_up.wait()
        player = min(self._players, key=lambda player: len(player.playing))
        session = self._sessions.open(turned)
        try:
            reply = await self._reply(player, row, session)
            return self._sessions.take(session, _reward_of(reply, session), ending=ending)
        except BaseException as error:
            self._sessions.give_up(session, error.reason if isinstance(error, EpisodeFailed) else "EpisodeLost")
            raise

    # ------------------------------------------------------------------------------------------------- one episode
    async def _reply(self, player: _Player, row: int, session: Session) -> TaskReply:
        """Return the process's reply. Raises EpisodeFailed, EpisodeLost."""
        source = self._environments.get(bisect_right(player.ends, row))
        if source is None:
            player.lose(f"row {row} is of no environment there")
            raise EpisodeLost("the process that was to play it has other rows")
        number = next(self._numbers)
        player.playing[number] = ended = asyncio.get_running_loop().create_future()
        try:
            address = f"{self._gateway()}/sessions/{session.id}"
            await player.send("play", Play(episode=number, row=row, address=address))
            await self._end_of(ended, session, deadline_s=source.deadline_seconds)
        finally:
            if ended.done():
                del player.playing[number]
            elif player in self._players:
                self._group.create_task(self._stop(player, number), name=f"stop/{number}")
        reply: TaskReply | None = ended.result()
        if reply is None:
            raise EpisodeLost("the process that played it ended")
        return reply

    async def _end_of(self, ended: asyncio.Future[TaskReply | None], session: Session, *, deadline_s: float) -> None:
        """Wait until the episode ends. Raises EpisodeFailed when it hangs."""
        while (left_s := deadline_s - self._sessions.quiet_s(session)) > 0:
            await asyncio.wait([ended], timeout=left_s)
            if ended.done():
                return
        raise EpisodeFailed("EpisodeHung", f"it asked for no turn and did not end for {deadline_s:.0f} s")

    async def _stop(self, player: _Player, number: int) -> None:
        """End an episode, or else the process that plays it."""
        await player.send("stop", Stop(episode=number))
        await asyncio.wait([player.playing[number]], timeout=self._stop_s)
        if not player.playing.pop(number).done():
            player.lose(f"an episode did not end within {self._stop_s:.0f} s of being asked to")

    # ------------------------------------------------------------------------------------------------- one process
    async def _keep_up(self) -> None:
        while True:
            try:
                async with TaskConnection.open(self._socket) as connection:
                    data = await connection.greet(self._prompts, sets=self._sets, count=self._count, model=self._model)
                    if data != await self._data():
                        raise TaskUnusable(OTHER_ROWS)
                    await self._attend(_Player(connection, data.ends))
            except ProcessLost as error:
                log(LOG, "player replaced", logging.WARNING, reason=str(error))
                self.problem = Problem(reason="PlayerLost", message=f"{error}; it is started again"[:1024])
            except TaskUnusable as error:
                self.problem = Problem(reason="PromptsUnusable", message=str(error)[:1024])
                return
            await asyncio.sleep(RESTART_S * (0.5 + random.random()))

    async def _attend(self, player: _Player) -> None:
        """Hand out the process's replies until it is lost. Raises ProcessLost."""
        self._players.append(player)
        self._some_are_up.set()
        self.problem = None
        reading = asyncio.ensure_future(_read(player))
        either: list[asyncio.Future[Any]] = [reading, player.lost]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if player.lost.done():
                raise ProcessLost(player.lost.result())
            await reading
        finally:
            self._players.remove(player)
            if not self._players:
                self._some_are_up.clear()
            for ended in player.playing.values():
                if not ended.done():
                    ended.set_result(None)
            reading.cancel()
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.exception()  # marks it as retrieved: the process was lost first


async def _read(player: _Player) -> None:
    """Resolve episodes as replies arrive. Raises ProcessLost."""
    while True:
        reply = await player.connection.receive(deadline_s=None)
        ended = player.playing.get(reply.episode if reply.episode is not None else -1)
        if ended is not None and not ended.done():
            ended.set_result(reply)


def _reward_of(reply: TaskReply, session: Session) -> RewardAnswer:
    """Return the environment's reward; 0 where its session's path was full. Raises EpisodeFailed."""
    if reply.error is not None:
        if session.is_full:
            return RewardAnswer(reward=0.0)
        why = f"; its newest turn was refused: {session.refused.in_short}" if session.refused else ""
        raise EpisodeFailed(reply.reason, f"{reply.error[:FAULT_AT_MOST]}{why}")
    if not session.turns:
        raise EpisodeFailed("EpisodeWithoutTurn", "it ended without a turn of the job's model")
    try:
        return RewardAnswer.model_validate(reply.value)
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False)[0]["msg"]
        raise EpisodeFailed("ReplyGarbled", f"its reward is none: {fault}") from error
