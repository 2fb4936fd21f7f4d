"""A job's prompts come in a fixed order, divided into those that train and those that are held out.

The order is that of the source, pass after pass, without end or for `passes` of them; the store keeps the position, so
a restart resumes where it was. A prompt is held out by its hash, wherever it stands and however often: it never trains.
Prompts longer than `maxPromptTokens`, and those that the model's chat template refuses, are left out and counted. A
task of an environment has no prompt: its episodes ask their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from enum import StrEnum

from colocated_rl_api.facts import Problem
from colocated_rl_api.logs import log
from colocated_rl_api.names import PromptPosition
from colocated_rl_rollout.rewards.rewards import RewardFailed, TaskProcesses
from colocated_rl_rollout.rewards.task_connection import OTHER_DATA, TaskUnusable
from colocated_rl_rollout.rules.chat import Chat, Unrenderable
from colocated_rl_rollout.rules.samples import Prompt
from colocated_rl_rollout.tasks.task_wire import PromptRow

LOG = logging.getLogger(__name__)

CHUNK = 64  # rows requested at once
AHEAD = 256  # prompts held ready
RETRY_S = 5.0
REFUSED_AT_MOST = 64  # in a row; beyond that the template or all of the data is at fault, and a person has to fix it
TOLD_AT_MOST = 8  # refusals that one process logs


class NoPrompts(Exception):
    """The data has no prompt of the kind that is wanted. The user has to fix the job."""


class LeftOut(StrEnum):
    """Names the reason why a row trains nothing."""

    HELD_OUT = "HeldOut"
    TOO_LONG = "TooLong"
    REFUSED = "TemplateRefused"


class PromptSource:
    """Makes the prompts of one job. `run` keeps AHEAD of them ready.

    passes: after which there are no more; None: without end. is_over: there are none to take, and none will come.
    changed: called when there is something new to take, or a problem came or went. known_digest: of the data that the
    position refers to; remember: called with the data's digest. count: called for each prompt that is left out.
    """

    def __init__(
        self,
        processes: TaskProcesses,
        chat: Chat,
        *,
        max_prompt_tokens: int,
        position: PromptPosition,
        passes: int | None = None,
        changed: Callable[[], None],
        known_digest: str | None = None,
        remember: Callable[[str], None] = lambda _: None,
        count: Callable[[LeftOut], None] = lambda _: None,
        retry_s: float = RETRY_S,
    ) -> None:
        self._processes = processes
        self._chat = chat
        self._max_prompt_tokens = max_prompt_tokens
        self._changed = changed
        self._known_digest = known_digest
        self._remember = remember
        self._count = count
        self._retry_s = retry_s
        self._position: int = position  # of the next row to look at
        self._passes = passes
        self._is_at_end = False
        self._ready: deque[Prompt] = deque()
        self._taken = asyncio.Event()
        self.left_out: Counter[LeftOut] = Counter()
        self._refused_in_a_row = 0
        self.problem: Problem | None = None

    @property
    def is_over(self) -> bool:
        return self._is_at_end and not self._ready

    def take(self) -> Prompt | None:
        """Return the next prompt to train on, or None while it is being made."""
        if not self._ready:
            return None
        self._taken.set()
        return self._ready.popleft()

    async def run(self) -> None:
        """Make prompts ahead of need until cancelled."""
        barren = 0  # rows in succession without a usable prompt
        while True:
            try:
                data = await self._processes.data()
                if data.digest != (self._known_digest or data.digest):
                    self._stop("PromptsUnusable", OTHER_DATA)
                    return
                self._remember(data.digest)
                end = self._passes and self._passes * data.size
                count = CHUNK if end is None else max(0, min(CHUNK, end - self._position))
                found, count = await self._look(self._position, count, held_out=False) if count else ([], 0)
            except RewardFailed as error:
                log(LOG, "prompts not made", logging.WARNING, reason=str(error))
                self._report(Problem(reason="PromptsNotMade", message=f"{error}; asked again"[:1024]))
                await asyncio.sleep(self._retry_s)
                continue
            except (TaskUnusable, Unrenderable) as error:
                self._stop("PromptsUnusable", str(error))
                return
            if self.problem:
                self._report(None)
            self._position += count
            barren = 0 if found else barren + count
            if barren >= data.size:
                self._stop("PromptsUnusable", f"no prompt to train on among {data.size}: {self._counts_left_out()}")
                return
            self._ready.extend(found)
            self._is_at_end = end is not None and self._position >= end
            if found or self._is_at_end:
                self._changed()
            if self._is_at_end:
                return
            while len(self._ready) >= AHEAD:
                self._taken.clear()
                await self._taken.wait()

    async def held_out(self, count: int, *, source: int | None = None) -> list[Prompt]:
        """Return the first `count` different held-out prompts of rollout's data, or of a source by its number.

        There are fewer when the data has no more.
        Raises NoPrompts, TaskUnusable, Unrenderable, RewardFailed.
        """
        found: dict[tuple[int, ...], Prompt] = {}
        size = (await self._processes.data()).size_of(source)
        position, end = 0, size if source is not None or self._processes.holds_out else 0
        while position < end and len(found) < count:
            prompts, seen = await self._look(position, CHUNK, held_out=True, source=source)
            position += seen
            for prompt in prompts:
                found.setdefault(prompt.ids or (prompt.index,), prompt)
        if not found:
            raise NoPrompts(f"no held-out prompt among {size}: {self._counts_left_out()}")
        return list(found.values())[:count]

    async def _look(
        self, start: int, count: int, *, held_out: bool, source: int | None = None
    ) -> tuple[list[Prompt], int]:
        """Return the usable prompts of the next rows, and how many rows these were: `count` at most."""
        found = []
        rows = await self._processes.prompts(start, count, source=source)
        of_kind = [(position, row) for position, row in enumerate(rows, start) if row.held_out is held_out]
        for _ in range(0 if held_out else len(rows) - len(of_kind)):
            self._leave_out(LeftOut.HELD_OUT)
        # in a thread: a chunk with prompts of many thousand tokens takes seconds
        tokens = await asyncio.to_thread(lambda: [self._ids(row) for _, row in of_kind])
        for (position, row), ids in zip(of_kind, tokens, strict=True):
            if isinstance(ids, Unrenderable):
                self._refuse(f"prompt {row.row + 1} of the data: {ids}")
                continue
            self._refused_in_a_row = 0
            if len(ids) > self._max_prompt_tokens:
                self._leave_out(LeftOut.TOO_LONG)
                continue
            found.append(Prompt(PromptPosition(position), row.row, ids))
        return found, len(rows)

    def _ids(self, row: PromptRow) -> tuple[int, ...] | Unrenderable:
        try:
            return () if row.prompt is None else self._chat.prompt_ids(row.prompt)
        except Unrenderable as error:
            return error

    def _refuse(self, why: str) -> None:
        """Count a refusal. Raises Unrenderable when the template has refused many in a row."""
        self._leave_out(LeftOut.REFUSED)
        if self.left_out[LeftOut.REFUSED] <= TOLD_AT_MOST:
            log(LOG, "prompt left out", logging.WARNING, reason=why)
        self._refused_in_a_row += 1
        if self._refused_in_a_row == REFUSED_AT_MOST:
            raise Unrenderable(f"{REFUSED_AT_MOST} prompts in a row were refused; {why}")

    def _leave_out(self, why: LeftOut) -> None:
        self.left_out[why] += 1
        self._count(why)

    def _counts_left_out(self) -> str:
        return (
            f"{self.left_out[LeftOut.HELD_OUT]} were held out (heldOutPercent), "
            f"{self.left_out[LeftOut.TOO_LONG]} were longer than maxPromptTokens ({self._max_prompt_tokens}), "
            f"{self.left_out[LeftOut.REFUSED]} were refused by the model's chat template"
        )

    def _stop(self, reason: str, message: str) -> None:
        log(LOG, "prompts unusable", logging.ERROR, reason=message)
        self._report(Problem(reason=reason, message=message[:1024]))

    def _report(self, problem: Problem | None) -> None:
        self.problem = problem
        self._changed()
