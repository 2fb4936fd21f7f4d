"""A process that makes questions and scores answers, for `rewards`.

    python -m colocated_rl_rollout.task_process DIR [BYTES]

JSON lines: the source (`Prompts`) comes first and is answered with `{"value": SIZE}`; then each request is answered in
order, `{"questions": [start, count]}` and `{"score": [index, text]}`, with `{"value": ...}` or `{"error": "..."}`. DIR
is where the claim of a file is mounted, BYTES the address space that the process may have. Ends with its input.
Verifiers are other people's code: they may take for ever, print, and take memory; they do it here.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, TextIO

from colocated_rl_api.job import Prompts
from colocated_rl_rollout.tasks import Task, make_task


def serve(requests: TextIO, replies: TextIO, directory: Path) -> None:
    """Answer until the input ends."""

    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    try:
        task = make_task(Prompts.model_validate_json(requests.readline()), directory)
    except Exception as error:  # noqa: BLE001 - of another's code; the user reads it in the job's status
        reply(error=_described(error))
        return
    reply(value=task.size)
    for line in requests:
        try:
            value = _answer(task, json.loads(line))
        except Exception as error:  # noqa: BLE001 - of another's code; one answer fails, the rest go on
            reply(error=_described(error))
        else:
            reply(value=value)


def _answer(task: Task, request: dict[str, Any]) -> Any:
    match request:
        case {"questions": [start, count]}:
            return [task.question(position) for position in range(start, start + count)]
        case {"score": [index, response]}:
            return task.score(index, response)
        case other:
            raise ValueError(f"no such request: {sorted(other)}")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def main() -> None:
    directory, *limit = sys.argv[1:]
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (int(limit[0]), int(limit[0])))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a verifier that prints does not break the lines
    serve(sys.stdin, replies, Path(directory))


if __name__ == "__main__":
    main()
