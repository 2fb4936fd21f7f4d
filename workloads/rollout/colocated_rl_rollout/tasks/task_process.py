"""Make prompts and score answers, for `rewards`, in a process that `task_server` starts.

    python -m colocated_rl_rollout.tasks.task_process CLAIMS CACHE [LIMIT]

JSON lines: a `Greeting` comes first and is answered with `Data`; then each request is answered in order, `{"prompts":
[start, count]}`, `{"prompts_of": [source, start, count]}`, `{"score": [index, text]}` and `{"judge": [index,
samples]}`, with a `TaskReply`; or, where the greeting asks for it, episodes are played (`player`). CLAIMS is where
claims of prompts are mounted, CACHE a directory for copies and downloads, LIMIT the file that has the container's
memory limit. The process ends with its input. Verifiers, filters and environments are other people's code: they may
take for ever, print, and use memory; they do it here.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO

from colocated_rl_api import logs
from colocated_rl_rollout.tasks.player import play
from colocated_rl_rollout.tasks.task_wire import Greeting, PromptRow, TaskReply
from colocated_rl_rollout.tasks.tasks import (
    SourceUnusable,
    Tasks,
    described,
    make_tasks,
)

MIB = 1024 * 1024
MEMORY_LIMIT = "/sys/fs/cgroup/memory.max"
LEAST_MEMORY_BYTES = 1024 * MIB  # libraries of the tasks take a third of it
PROMPTS_BYTES = 16 * MIB  # in one reply; the controller takes four times as much, and so one row of any length
MEMORY_ERRORS = 2  # in a row: leaked memory does not come back


def serve(requests: TextIO, replies: TextIO, *, claims: Path, cache: Path, container_bytes: int | None) -> None:
    """Answer until the input ends, or memory runs out."""
    own = os.getpid()

    def reply(message: TaskReply) -> None:
        if os.getpid() != own:
            os._exit(1)  # a verifier's fork returned here: its parent answers
        replies.write(message.model_dump_json(exclude_defaults=True) + "\n")
        replies.flush()

    try:
        greeting = Greeting.model_validate_json(requests.readline())
        limit_memory(memory_bytes(container_bytes, processes=greeting.processes))
        tasks = make_tasks(greeting.prompts, greeting.sets, greeting.filters, claims=claims, cache=cache)
        if greeting.model is not None:
            asyncio.run(play(requests, reply, tasks, model=greeting.model, note=_noted))
            return
    except SourceUnusable as error:
        if logs.shows_messages():
            traceback.print_exception(error)
        reply(TaskReply(error=str(error)))
        return
    reply(TaskReply(value=tasks.data))
    without_memory = 0
    for line in requests:
        try:
            value = _answer(tasks, json.loads(line))
        except BaseException as error:  # noqa: BLE001 - of another's code, which exits too; one answer fails, the rest go on
            without_memory = without_memory + 1 if isinstance(error, MemoryError) else 0
            reason: Literal["RewardTimedOut", "VerifierFailed"]
            reason = "RewardTimedOut" if isinstance(error, TimeoutError) else "VerifierFailed"
            reply(TaskReply(error=_noted(error), reason=reason))
            if without_memory == MEMORY_ERRORS:
                return  # another process takes over
        else:
            without_memory = 0
            reply(TaskReply(value=value))


def _answer(tasks: Tasks, request: dict[str, Any]) -> Any:
    match request:
        case {"prompts": [start, count]}:
            return _fitting(tasks.prompt, range(start, start + count))
        case {"prompts_of": [source, start, count]}:
            return _fitting(partial(tasks.prompt_of, source), range(start, start + count))
        case {"score": [index, response]}:
            return tasks.score(index, response)
        case {"judge": [index, samples]}:
            return tasks.dropped_by(index, samples)
        case other:
            raise LineUnreadable(f"no such request: {len(other)} members")


def _fitting(prompt: Callable[[int], PromptRow], positions: Iterable[int]) -> list[PromptRow]:
    """Return the prompts of these positions up to PROMPTS_BYTES of them, and one at least."""
    found: list[PromptRow] = []
    size = 0
    for row in map(prompt, positions):
        size += len(json.dumps(row.prompt))
        if found and size > PROMPTS_BYTES:
            break
        found.append(row)
    return found


class LineUnreadable(Exception):
    """The controller sent a request that this process does not know."""


def _noted(error: BaseException) -> str:
    """Return the controller's description of an error. The whole error goes into this container's log on request."""
    if logs.shows_messages():
        traceback.print_exception(error)
    return described(error)


def memory_bytes(container_bytes: int | None, *, processes: int) -> int | None:
    """Return the address space of one of the processes that share a container; None: no bound."""
    return None if container_bytes is None else max(LEAST_MEMORY_BYTES, container_bytes // processes)


def limit_memory(size: int | None) -> None:
    """Limit memory, so that an excess is a MemoryError of one answer, and not the end of the container."""
    if size is not None:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def container_memory_bytes(file: Path) -> int | None:
    """Return the container's limit, or None when it has none or it is unknown."""
    try:
        limit = file.read_text().strip()
    except OSError:
        return None
    return int(limit) if limit.isdigit() else None


def main() -> None:
    claims, cache, limit = (Path(word) for word in [*sys.argv[1:], MEMORY_LIMIT][:3])
    requests = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())  # a verifier that reads takes no line away, and one that prints adds none
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if not logs.shows_messages():
        sys.excepthook = lambda _, error, __: print(logs.in_places(error), file=sys.stderr)  # noqa: T201 - the log here
    serve(requests, replies, claims=claims, cache=cache, container_bytes=container_memory_bytes(limit))


if __name__ == "__main__":
    main()
