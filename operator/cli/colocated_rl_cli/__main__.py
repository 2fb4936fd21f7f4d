"""Entry points: `kubectl crlj`, `colocated-rl`, and what kubectl asks to complete words."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path

from colocated_rl_cli import completion
from colocated_rl_cli.base.errors import CliError, Exit
from colocated_rl_cli.base.output import print_error, print_out
from colocated_rl_cli.parser import build

ASKED_TO_COMPLETE = "__complete"


def main() -> int:
    prog = "kubectl crlj" if Path(sys.argv[0]).name.startswith("kubectl") else "colocated-rl"
    return run(sys.argv[1:], os.environ, prog=prog)


def run(words: Sequence[str], environment: Mapping[str, str], *, prog: str = "colocated-rl") -> int:
    """The exit code. Raises SystemExit where argparse does: for --help, and for words that are wrong."""
    try:
        try:
            return _answer(words, environment, prog)
        finally:
            sys.stdout.flush()  # not at the interpreter's end, where nobody can say what it means
    except BrokenPipeError:  # whoever reads has had enough
        code = Exit.FINE
    except OSError as error:
        print_error(f"{prog}: {error}")
        code = Exit.USAGE
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _answer(words: Sequence[str], environment: Mapping[str, str], prog: str) -> int:
    parser = build(prog)
    if words and words[0] == ASKED_TO_COMPLETE:
        for candidate in completion.complete(parser, words[1:], environment):
            print_out(candidate)
        return Exit.FINE
    args = parser.parse_args(words)
    args.environment = environment
    try:
        outcome = args.run(args)
        return asyncio.run(_ended(outcome)) if asyncio.iscoroutine(outcome) else outcome
    except CliError as error:
        print_error(f"{prog} {args.command}: {error}")
        return error.code
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


async def _ended(outcome: Awaitable[Exit]) -> Exit:
    """SIGTERM and a terminal that goes away end it as Ctrl-C does: the screen is given back, kubectl ends."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await outcome
    except asyncio.CancelledError:
        return Exit.INTERRUPTED


def complete() -> int:
    """kubectl_complete-crlj: a candidate a line, then what to do when there is none (4: no files, 0: files)."""
    found = completion.complete(build("kubectl crlj"), sys.argv[1:], os.environ)
    for candidate in found:
        print_out(candidate)
    print_out(":4" if found else ":0")
    return Exit.FINE


if __name__ == "__main__":
    sys.exit(main())
