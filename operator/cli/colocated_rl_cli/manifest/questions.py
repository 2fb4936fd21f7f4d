"""Ask for what `init` needs and its arguments lack: on a terminal only; without one, that is an error."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TextIO

from colocated_rl_cli.base.errors import UsageError
from colocated_rl_cli.manifest.starter import Wishes


def wishes_from(args: Namespace) -> Wishes:
    """Return a person's wishes from the command's arguments and from the answers. Raises UsageError."""
    ask = _Asker(sys.stdin, sys.stderr) if sys.stdin.isatty() and sys.stderr.isatty() else None
    name = args.name or _needed(ask, "NAME", "name of the job", None)
    model = args.model or _needed(
        ask, "--model", "claim that holds the model, perhaps with :PATH, or NAME@COMMIT of the hub", None
    )
    task, prompts, reward = args.task, args.prompts, args.reward
    if not (task or prompts or reward):
        task = _needed(ask, "--task, or --prompts with --reward", "task of reasoning-gym", "chain_sum")
    return Wishes(
        name=name,
        model=model,
        task=task,
        prompts=prompts,
        reward=reward,
        steps=args.steps,
        replicas=args.replicas,
        gpus=args.gpus,
        batch_size=args.batch_size,
        group_size=args.group_size,
        image=args.image,
    )


def _needed(ask: _Asker | None, flag: str, question: str, default: str | None) -> str:
    if ask is None:
        raise UsageError(f"{flag} is missing ({question}), and there is no terminal to ask on")
    return ask(question, default)


class _Asker:
    def __init__(self, answers: TextIO, questions: TextIO) -> None:
        self._answers = answers
        self._questions = questions

    def __call__(self, question: str, default: str | None) -> str:
        while True:
            self._questions.write(f"{question}{f' [{default}]' if default else ''}: ")
            self._questions.flush()
            line = self._answers.readline()
            if not line:
                raise UsageError(f"no answer: {question}")
            if answer := line.strip() or default:
                return answer
