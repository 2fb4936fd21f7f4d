"""Play episodes of environments side by side: `task_process` does so where its greeting names a model.

    {"play": {"episode": 7, "row": 3, "address": "http://127.0.0.1:8080/v1/sessions/episode:12"}}
    {"stop": {"episode": 7}}

Each episode ends with one reply that names it, a stopped one too. The controller kills a process that does not reply to
a stop, together with everything that the process started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TextIO

from colocated_rl_rollout.tasks.task_wire import Play, Stop, TaskReply
from colocated_rl_rollout.tasks.tasks import SourceUnusable, Tasks, described


async def play(
    requests: TextIO, reply: Callable[[TaskReply], None], tasks: Tasks, *, model: str, note: Callable[[Exception], str]
) -> None:
    """Play until the input ends. Raises SourceUnusable when an environment can't be brought up."""
    async with contextlib.AsyncExitStack() as up:
        for environment in tasks.environments:
            try:
                await up.enter_async_context(environment.serving())
            except Exception as error:  # raised by other people's code
                raise SourceUnusable(f"{environment.title} does not come up: {described(error)}") from error
        reply(TaskReply(value=tasks.data))
        playing: dict[int, asyncio.Task[TaskReply]] = {}

        async def episode(asked: Play) -> TaskReply:
            try:
                reward = await tasks.play(asked.row, model=model, address=asked.address)
            except Exception as error:  # noqa: BLE001 - of another's code; one episode fails, the rest go on
                return TaskReply(episode=asked.episode, error=note(error), reason="EpisodeFailed")
            return TaskReply(episode=asked.episode, value=reward)

        def ended(number: int, task: asyncio.Task[TaskReply]) -> None:
            del playing[number]
            stopped = TaskReply(episode=number, error="stopped", reason="EpisodeFailed")
            reply(stopped if task.cancelled() else task.result())

        reading = ThreadPoolExecutor(1)  # of its own: environments may keep the loop's threads busy
        async with asyncio.TaskGroup() as group:
            while line := await asyncio.get_running_loop().run_in_executor(reading, requests.readline):
                asked = read(line)
                if isinstance(asked, Play):
                    playing[asked.episode] = task = group.create_task(episode(asked))
                    task.add_done_callback(partial(ended, asked.episode))
                elif asked.episode in playing:
                    playing[asked.episode].cancel()
            for each in playing.values():
                each.cancel()


def read(line: str) -> Play | Stop:
    request: dict[str, Any] = json.loads(line)
    return Play.model_validate(request["play"]) if "play" in request else Stop.model_validate(request["stop"])
