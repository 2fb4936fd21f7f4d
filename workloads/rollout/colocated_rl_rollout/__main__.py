"""Run the rollout controller: `python -m colocated_rl_rollout`.

It exits with 0 after goal Stop, with 143 after SIGTERM, else with 1. A pod that was taken away has not succeeded: a
queue counts one that has for as long as its group exists, and would admit no other in its place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import aiohttp
import uvloop

from colocated_rl_api import descriptors, garbage, logs, names
from colocated_rl_api.prompts import endpoints_of
from colocated_rl_member.settings import SettingsError
from colocated_rl_rollout.controller import Controller
from colocated_rl_rollout.engines.engine_client import GateConnector
from colocated_rl_rollout.rewards.reward_endpoint import RewardEndpoint
from colocated_rl_rollout.rewards.rewards import TaskProcesses
from colocated_rl_rollout.rules.chat import ModelUnusable
from colocated_rl_rollout.settings import RolloutSettings, read_settings
from colocated_rl_rollout.store.database import StoreFailed

LOG = logging.getLogger(__name__)


async def serve(settings: RolloutSettings) -> int:
    """Run one controller until it ends; return the exit code. Raises the errors of its parts, in a group or alone."""
    async with (
        aiohttp.ClientSession(connector=GateConnector(), trust_env=False) as session,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False) as outside,
    ):
        spec = settings.job.spec
        processes = TaskProcesses(
            spec.rollout.prompts,
            sets=spec.own_sets,
            filters=spec.rollout.filter_functions,
            count=settings.task_processes,
            socket=settings.tasks,
            endpoints={
                number: RewardEndpoint(reward, settings.job, outside, tokens=settings.reward_tokens)
                for number, reward in endpoints_of(spec.sources).items()
            },
        )
        controller = Controller(settings, session, processes)
        garbage.look_seldom()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, controller.drain)
        async with asyncio.TaskGroup() as group:
            makes = settings.recording is None  # makes prompts and rewards; a recording already has them
            keeping = group.create_task(processes.run(), name="task-processes") if makes else None
            await controller.run()
            if keeping is not None:
                keeping.cancel()
    return 0 if controller.is_stopped else 128 + signal.SIGTERM


def main() -> int:
    logs.configure(role=names.ROLE_ROLLOUT)
    descriptors.raise_limit()
    try:
        settings = read_settings(sys.argv[1:], os.environ)
        logs.configure(role=names.ROLE_ROLLOUT, job=settings.job.name, job_uid=settings.job.uid, pod=settings.pod)
        return uvloop.run(serve(settings))
    except (SettingsError, ModelUnusable, StoreFailed, ValueError, OSError) as error:
        logs.log(LOG, "rollout controller failed", logging.ERROR, reason=str(error))
        return 1
    except ExceptionGroup as died:  # a part died: the next start resumes from the last commit
        of_store, others = died.split(StoreFailed)
        if of_store is not None:  # in words of ours, with what to do
            logs.log(LOG, "rollout controller failed", logging.ERROR, reason=str(_first(of_store)))
        if others is not None:
            LOG.error("rollout controller failed", exc_info=others)
        return 1


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
