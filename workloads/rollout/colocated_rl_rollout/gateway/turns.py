"""Turns are the completions that clients of the gateway request, from their arrival to their end.

This module owns parking, resume and retry of a turn, as the store and the worker do for a sample, by the same rules
(`resume`). A turn waits here while no engine takes it. The number of waiting turns and the time of each are bounded,
except for those of the job's own episodes, which are bounded elsewhere and wait as samples do. A switch that interrupts
a turn adds a segment; its client sees one completion. `worker` sends the turns, as it sends everything.

Turns are in memory alone: a turn lasts as long as its client's connection, so a kill loses nothing that was reported. A
client that leaves ends its turn, also at the engine.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colocated_rl_api.logs import log
from colocated_rl_rollout.engines.engine_client import (
    EngineClient,
    GateClosed,
    GateRefused,
    Generated,
    GenerateRequest,
    RequestRejected,
)
from colocated_rl_rollout.engines.engines import Engines
from colocated_rl_rollout.gateway.openai_requests import CHARACTERS_OF_A_TOKEN, CompletionRequest, RequestRefused
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.rules.chat import Chat
from colocated_rl_rollout.rules.resume import (
    NO_EXPERTS,
    cut,
    exhausted,
    finish_of,
    join,
    join_experts,
    remaining,
    stopped_at,
)
from colocated_rl_rollout.rules.samples import NO_TOKENS, Finish, Tokens

LOG = logging.getLogger(__name__)

TOKENS_HELD_AT_MOST = 32 * 1024 * 1024  # prompts and limits of all turns together
EXPERTS_WEIGH = 128  # times the weight of a token: 1.5 kB with 48 layers and 8 experts
RETRY_S = 10


@dataclass(eq=False)
class Turn:
    """Holds one completion. Only `Turns` changes it.

    tokens: of ended attempts; joined and cut at a stop string. so_far: with those of the attempt under way.
    resent: how many of `tokens` ended attempts were sent, to prefill again.
    experts: those that tokens of prompt and response were routed to, where the client wants them.
    replays: training repeats the experts of the engine's last reading, which are in `replayed`.
    finish: None until the turn has ended, and for one that was interrupted and is not resumed.
    grew: set when there is more to read; the reader clears it.
    """

    number: int
    asked: CompletionRequest
    streams: bool = False
    asked_bytes: int = 0  # of the client's request
    engine: str | None = None  # that has its prefix
    is_own: bool = False  # of an episode that the job plays
    tokens: Tokens = NO_TOKENS
    so_far: Tokens = NO_TOKENS
    experts: NDArray[np.int32] = field(default_factory=lambda: NO_EXPERTS)
    replays: bool = False
    replayed: NDArray[np.int32] = field(default_factory=lambda: NO_EXPERTS)
    attempts: int = 0
    idle_attempts: int = 0
    resent: int = 0
    segments: int = 0
    finish: Finish | None = None
    ended: bool = False
    refused: RequestRefused | None = None
    grew: asyncio.Event = field(default_factory=asyncio.Event)
    attempt: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None

    @property
    def held(self) -> int:
        """Return the tokens that it counts for: a request may be much longer than what the template shows of it."""
        tokens = (len(self.asked.prompt) + self.asked.limit) * (EXPERTS_WEIGH if self.asked.experts else 1)
        return max(tokens, self.asked_bytes // CHARACTERS_OF_A_TOKEN)

    async def wait_done(self) -> None:
        """Return when the turn has ended. Raises RequestRefused."""
        while not self.ended:
            self.grew.clear()
            await self.grew.wait()
        if self.refused is not None:
            raise self.refused


class Turns:
    """Holds all turns of the gateway.

    keeps: an interrupted turn resumes with its tokens; otherwise it starts over. changed: called when there is
    something to send. at_most: turns at a time. parked_at_most_s: longest time that a turn waits at a stretch.
    """

    def __init__(
        self,
        chat: Chat,
        metrics: RolloutMetrics,
        *,
        keeps: bool,
        changed: Callable[[], None],
        at_most: int,
        parked_at_most_s: float,
    ) -> None:
        self._chat = chat
        self._metrics = metrics
        self._keeps = keeps
        self._changed = changed
        self._at_most = at_most
        self._parked_at_most_s = parked_at_most_s
        self._turns: dict[int, Turn] = {}
        self._waiting: dict[int, Turn] = {}
        self._count = 0
        self._bounded = 0  # turns that are not of the job's own episodes
        self._held = 0  # by those
        self._ending = False
        metrics.parked_turns.set_function(lambda: len(self._waiting))

    # ------------------------------------------------------------------------------------------------- for the gateway
    @contextmanager
    def begin(
        self,
        asked: CompletionRequest,
        *,
        streams: bool = False,
        asked_bytes: int = 0,
        engine: str | None = None,
        is_own: bool = False,
        replays: bool = False,
    ) -> Iterator[Turn]:
        """Hold a turn for as long as its client is connected. Raises RequestRefused."""
        streams = streams and self._keeps
        turn = Turn(self._count + 1, asked, streams, asked_bytes, engine, is_own, replays=replays)
        if self._ending:
            raise _ended()
        if not is_own:
            self._refuse_beyond_bounds(turn)
        self._count = turn.number
        self._turns[turn.number] = turn
        if not is_own:
            self._bounded += 1
            self._held += turn.held
        try:
            self._park(turn)
            self._changed()
            yield turn
        finally:
            del self._turns[turn.number]
            if not is_own:
                self._bounded -= 1
                self._held -= turn.held
            if not turn.ended:
                self._end(turn, "client_gone")
                if turn.attempt is not None:
                    turn.attempt.cancel()

    def _refuse_beyond_bounds(self, turn: Turn) -> None:
        if self._bounded >= self._at_most or (self._bounded and self._held + turn.held > TOKENS_HELD_AT_MOST):
            message = f"{len(self._turns)} requests are held, {len(self._waiting)} of them until an engine is open"
            raise RequestRefused(429, f"{message}: send it later", code="too_many_requests", retry_s=RETRY_S)

    # ------------------------------------------------------------------------------------------------- for the worker
    @property
    def demand(self) -> int:
        """Return how many turns are under way or waiting to be sent."""
        return len(self._turns)

    @property
    def running(self) -> int:
        """Return how many turns are with an engine."""
        return sum(not turn.ended and turn.attempt is not None for turn in self._turns.values())

    def send(self, engines: Engines, group: asyncio.TaskGroup, *, at_most: int) -> None:
        """Send waiting turns, oldest first, to engines that have fewer than `at_most` requests."""
        for turn in sorted(self._waiting.values(), key=lambda turn: turn.number):
            engine = engines.pick(preferred=turn.engine, at_most=at_most)
            if engine is None:
                return
            self._unpark(turn)
            turn.engine = engine.name
            turn.attempt = engines.send(group, engine, self._attempt(turn, engine), name=f"turn/{turn.number}")

    def end(self) -> None:
        """Take no more turns; refuse those that wait, and let those with an engine end."""
        self._ending = True
        for turn in list(self._waiting.values()):
            self._refuse(turn, _ended())

    # ------------------------------------------------------------------------------------------------- one attempt
    async def _attempt(self, turn: Turn, engine: EngineClient) -> None:
        try:
            await self._try(turn, engine)
        except asyncio.CancelledError:
            if not turn.ended:  # the process ends, not the client's connection
                self._refuse(turn, _ended())
            raise
        except Exception as error:  # noqa: BLE001 - a bug; raised in the worker's group it would end everybody's turns
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = (
                f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"  # its text may quote a prompt
            )
            log(LOG, "turn failed", logging.ERROR, gate=engine.name, turn=turn.number, reason=reason)
            if not turn.ended:
                self._refuse(turn, RequestRefused(500, f"the rollout controller failed: {reason}", code="failed"))

    async def _try(self, turn: Turn, engine: EngineClient) -> None:
        asked = turn.asked
        request = GenerateRequest(
            [*asked.prompt.tolist(), *turn.tokens.ids.tolist()],
            remaining(turn.tokens, limit=asked.limit),
            asked.temperature,
            self._chat.end_ids,
            asked.stops,
            asked.seed,
            0 if turn.replays else len(turn.experts) if asked.experts else None,
            turn.experts.shape[1],
        )

        def grew(segment: Tokens) -> None:
            turn.so_far = join(turn.tokens, segment)
            turn.grew.set()

        if len(turn.tokens):
            self._metrics.resumed_turns.inc()
        try:
            generated = await engine.generate(request, grew if turn.streams else None)
        except GateClosed:
            turn.attempt = None
            self._park(turn)
        except GateRefused as error:
            log(LOG, "turn attempt lost", logging.DEBUG, gate=engine.name, turn=turn.number, reason=str(error))
            turn.resent += len(turn.tokens)
            self._interrupt(turn, why=str(error))
        except RequestRejected as error:
            self._refuse(turn, refusal_of(error))
        else:
            self._metrics.resent_tokens.inc(len(turn.tokens))
            self._metrics.preemptions.inc(generated.preemptions)
            turn.resent += len(turn.tokens)
            self._accept(turn, generated)

    def _accept(self, turn: Turn, generated: Generated) -> None:
        asked, brought = turn.asked, len(generated.tokens) > 0
        whole = join(turn.tokens, generated.tokens)
        stop = stopped_at(whole.ids, asked.stops, self._chat.text)
        turn.tokens = turn.so_far = whole if stop is None else cut(whole, stop)
        read = generated.experts
        if turn.replays and len(read):
            turn.replayed, read = read, read[len(turn.experts) :]
        if asked.experts:
            turn.experts = join_experts(turn.experts, read)[: len(asked.prompt) + len(turn.tokens) - 1]
        turn.segments += brought
        turn.finish = (
            finish_of(whole, generated.finish, limit=asked.limit, end_ids=self._chat.end_ids)
            if stop is None
            else Finish.STOP
        )
        if turn.finish is None:
            self._interrupt(turn, brought=brought)
        else:
            turn.attempts += 1
            self._end(turn, turn.finish)

    def _interrupt(self, turn: Turn, *, brought: bool = False, why: str | None = None) -> None:
        """Park a turn whose attempt did not end it, or end it. why: the attempt brought nothing."""
        turn.attempt = None
        turn.attempts += 1
        turn.idle_attempts = 0 if brought else turn.idle_attempts + 1
        if not turn.asked.resume:
            self._end(turn, "interrupted")
        elif end := exhausted(
            attempts=turn.attempts, idle_attempts=turn.idle_attempts, resent=turn.resent, limit=turn.asked.limit
        ):
            message = f"no engine ended it: {end[1]}{f'; the last: {why}' if why else ''}"
            self._refuse(turn, RequestRefused(503, message, code="no_progress", retry_s=RETRY_S))
        else:
            if not self._keeps:
                turn.tokens, turn.so_far, turn.experts, turn.replayed = NO_TOKENS, NO_TOKENS, NO_EXPERTS, NO_EXPERTS
                turn.segments = 0
            self._park(turn)

    # ------------------------------------------------------------------------------------------------- waiting
    def _park(self, turn: Turn) -> None:
        if self._ending:
            self._refuse(turn, _ended())
            return
        self._waiting[turn.number] = turn
        if not turn.is_own:
            turn.deadline = asyncio.get_running_loop().call_later(self._parked_at_most_s, self._give_up, turn)

    def _unpark(self, turn: Turn) -> None:
        self._waiting.pop(turn.number, None)
        if turn.deadline is not None:
            turn.deadline.cancel()
            turn.deadline = None

    def _give_up(self, turn: Turn) -> None:
        message = (
            f"no engine took it within {self._parked_at_most_s:.0f} s: they are with the trainer, or lost; "
            "see the job's status"
        )
        self._refuse(turn, RequestRefused(504, message, code="no_engine"))

    def _refuse(self, turn: Turn, refused: RequestRefused) -> None:
        turn.refused = refused
        self._end(turn, refused.code or "refused")

    def _end(self, turn: Turn, ending: str) -> None:
        self._unpark(turn)
        self._metrics.turns.labels(ending).inc()
        turn.ended = True
        turn.grew.set()


def _ended() -> RequestRefused:
    return RequestRefused(503, "the rollout controller ends: send it again", code="ending", retry_s=RETRY_S)


def refusal_of(error: RequestRejected) -> RequestRefused:
    """Return the engine's rejection in its own words, which have both numbers where a prompt is too long."""
    code = "context_length_exceeded" if error.is_too_long else "rejected_by_engine"
    return RequestRefused(400, error.detail, code=code)
