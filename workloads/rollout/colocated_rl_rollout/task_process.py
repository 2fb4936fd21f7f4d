"""A process that makes questions and scores answers, for `rewards`: `python -m colocated_rl_rollout.task_process`.

JSON lines: the task (`ReasoningGym`) comes first and is answered with `{"value": SIZE}`; then each request is answered
in order, `{"questions": [start, count]}` and `{"score": [index, text]}`, with `{"value": ...}` or `{"error": "..."}`.
Ends with its input. Verifiers are other people's code: they may take for ever, print, and take memory; they do it here.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

from colocated_rl_api.job import ReasoningGym
from colocated_rl_rollout.gym import import_reasoning_gym


def answer_in(response: str, answer_after: str | None) -> str | None:
    """What the verifier is shown of a response; None when it has no answer."""
    if answer_after is None:
        return response.strip()
    _before, mark, answer = response.rpartition(answer_after)
    return answer.strip() if mark else None


class Task:
    """One task of reasoning-gym."""

    def __init__(self, task: ReasoningGym) -> None:
        self._dataset = import_reasoning_gym().create_dataset(task.name, seed=task.seed, size=task.size, **task.config)
        self._answer_after = task.answer_after
        self.size = len(self._dataset)
        if self.size != task.size:
            raise ValueError(f"it has {self.size} problems, not the {task.size} of its size")
        self.questions(0, 1)  # what a task lacks it says when it makes one

    def questions(self, start: int, count: int) -> list[str]:
        """Questions [start, start + count) of the data, fewer at its end."""
        return [self._dataset[index]["question"] for index in range(start, min(start + count, self.size))]

    def score(self, index: int, response: str) -> float:
        """1 if the verifier gives full marks, else 0."""
        answer = answer_in(response, self._answer_after)
        if answer is None:
            return 0.0
        return float(self._dataset.score_answer(answer, self._dataset[index]) == 1.0)

    def answer(self, request: dict[str, Any]) -> Any:
        """The value of one request."""
        match request:
            case {"questions": [start, count]}:
                return self.questions(start, count)
            case {"score": [index, response]}:
                return self.score(index, response)
            case other:
                raise ValueError(f"no such request: {sorted(other)}")


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer until the input ends."""

    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    try:
        task = Task(ReasoningGym.model_validate_json(requests.readline()))
    except Exception as error:  # noqa: BLE001 - of another's code; the user reads it in the job's status
        reply(error=_described(error))
        return
    reply(value=task.size)
    for line in requests:
        try:
            value = task.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - of another's code; one answer fails, the rest go on
            reply(error=_described(error))
        else:
            reply(value=value)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a verifier that prints does not break the lines
    serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
