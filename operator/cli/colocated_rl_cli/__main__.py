"""Entry points: `kubectl crlj`, `colocated-rl`, and what kubectl asks to complete words."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path

from colocated_rl_cli import completion
from colocated_rl_cli.errors import CliError, Exit
from colocated_rl_cli.output import complain, say
from colocated_rl_cli.parser import build

ASKED_TO_COMPLETE = "__complete"


def main() -> int:
    parser = build("kubectl crlj" if Path(sys.argv[0]).name.startswith("kubectl") else "colocated-rl")
    if sys.argv[1:2] == [ASKED_TO_COMPLETE]:
        print_completions(sys.argv[2:])
        return Exit.FINE
    args = parser.parse_args()
    try:
        outcome = args.run(args)
        return asyncio.run(_ended(outcome)) if asyncio.iscoroutine(outcome) else outcome
    except CliError as error:
        complain(f"{parser.prog} {args.command}: {error}")
        return error.code
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:  # whoever reads has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FINE


async def _ended(outcome: Awaitable[Exit]) -> Exit:
    """SIGTERM and a terminal that goes away end it as Ctrl-C does: the screen is given back, kubectl ends."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        result = await outcome
    except asyncio.CancelledError:
        return Exit.INTERRUPTED
    sys.stdout.flush()
    return result


def print_completions(words: list[str]) -> None:
    for candidate in completion.complete(build("colocated-rl"), words):
        say(candidate)


def complete() -> int:
    """kubectl_complete-crlj: a candidate a line, then what to do when there is none (4: no files, 0: files)."""
    found = completion.complete(build("kubectl crlj"), sys.argv[1:])
    for candidate in found:
        say(candidate)
    say(":4" if found else ":0")
    return Exit.FINE


if __name__ == "__main__":
    sys.exit(main())
