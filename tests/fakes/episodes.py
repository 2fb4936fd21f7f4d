"""Episodes without a process that plays: they end as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from colocated_rl_api.prompts import Prompts
from colocated_rl_rollout.episodes import Episodes
from colocated_rl_rollout.gateway.sessions import Sessions
from colocated_rl_rollout.rewards.rewards import TaskProcesses
from colocated_rl_rollout.rules.samples import Trajectory
from colocated_rl_rollout.store import tables
from colocated_rl_rollout.store.database import Statement

E = TypeVar("E", bound=Episodes)


def unplayed(kind: type[E], prompts: Prompts, sessions: Sessions, processes: TaskProcesses, directory: Path) -> E:
    """Return episodes of a job without an environment: no process plays them."""
    return kind(prompts, sessions, data=processes.data, count=0, socket=directory, model="job", gateway=lambda: "")


class ScriptedEpisodes(Episodes):
    """Plays episodes as a test scripts them.

    begun: rows of the episodes that are under way or have ended. ends: of those to come, in order.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.begun: list[int] = []
        self.ends: asyncio.Queue[Trajectory | Exception] = asyncio.Queue()

    async def play(
        self, row: int, *, ending: str, turned: Callable[[int | None], None] = lambda _: None
    ) -> tuple[Trajectory, list[Statement]]:
        self.begun.append(row)
        turned(3)
        end = await self.ends.get()
        if isinstance(end, Exception):
            raise end
        return end, [(tables.FACT, [(ending, row)])]
