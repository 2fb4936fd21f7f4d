"""Inject the faults that a person asks for, where the chart allows it.

A fault is made where a real one would come from: a crash is SIGKILL by the runner, which nobody records beforehand. The
agent then has to notice it, and nothing else in it knows that a fault was injected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import assert_never

from aiohttp import web
from pydantic import ValidationError

from colocated_rl_agent.lanes.engine import Engine
from colocated_rl_agent.lanes.trainers import Trainers
from colocated_rl_agent.planner.views import trainer_name
from colocated_rl_agent.runner.runner_link import RunnerError, RunnerLink
from colocated_rl_api import faults
from colocated_rl_api.faults import FaultKind, InjectedFault
from colocated_rl_api.logs import log

LOG = logging.getLogger(__name__)


class NoSuchProcess(Exception):
    """It is raised when no process that the fault is for runs in this pod."""


class Faults:
    """Faults injects what a person asks for. close_gate: closes the gate if it is open."""

    def __init__(
        self, runner: RunnerLink, engines: Sequence[Engine], trainers: Trainers, *, close_gate: Callable[[], None]
    ) -> None:
        self._runner = runner
        self._engines = engines
        self._trainers = trainers
        self._close_gate = close_gate
        self._slow_s = 0.0
        self.gate_closed_until = 0.0  # monotonic

    @property
    def routes(self) -> list[web.RouteDef]:
        return [web.post(faults.PATH, self._serve)]

    async def slow_weights(self) -> None:
        """Wait for as long as the next update of the engine's weights is to take longer."""
        slow_s, self._slow_s = self._slow_s, 0.0
        await asyncio.sleep(slow_s)

    async def _serve(self, request: web.Request) -> web.Response:
        try:
            fault = InjectedFault.model_validate_json(await request.read())
            await self._inject(fault)
        except ValidationError as error:
            return _refused(400, error.errors(include_url=False, include_input=False)[0]["msg"])
        except (NoSuchProcess, RunnerError) as error:
            return _refused(409, str(error))
        log(LOG, "fault injected", logging.WARNING, reason=fault.kind)
        return web.json_response({})

    async def _inject(self, fault: InjectedFault) -> None:
        """Inject a fault. Raises NoSuchProcess, RunnerError."""
        match fault.kind:
            case FaultKind.ENGINE_CRASH:
                engine = next((engine for engine in self._engines if not engine.view.is_absent), None)
                if engine is None:
                    raise NoSuchProcess("no engine runs in this pod now")
                await self._runner.kill(engine.name)
            case FaultKind.TRAINER_CRASH:
                rank = next((view.rank for view in self._trainers.views if view.is_alive), None)
                if rank is None:
                    raise NoSuchProcess("no trainer runs in this pod now")
                await self._runner.kill(trainer_name(rank))
            case FaultKind.SLOW_WEIGHTS:
                self._slow_s = fault.seconds
            case FaultKind.GATE_CLOSED:
                self.gate_closed_until = time.monotonic() + fault.seconds
                self._close_gate()
            case _:
                assert_never(fault.kind)


def _refused(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)
