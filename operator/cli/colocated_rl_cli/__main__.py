"""Run the program: `kubectl crlj`, `colocated-rl`, and `kubectl_complete-crlj`, by which kubectl completes words.

Help and completion answer without loading a library: what commands need is imported when one of them runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from colocated_rl_cli import completion
from colocated_rl_cli.base.errors import CliError, Exit
from colocated_rl_cli.base.output import print_error, print_out
from colocated_rl_cli.parser import build

COMPLETE = "__complete"  # the word before those to complete, in the scripts of `completion`


def main() -> int:
    """Run the program with the process's arguments and return its exit code."""
    prog = "kubectl crlj" if Path(sys.argv[0]).name.startswith("kubectl") else "colocated-rl"
    return run(sys.argv[1:], os.environ, prog=prog)


def run(words: Sequence[str], environment: Mapping[str, str], *, prog: str = "colocated-rl") -> int:
    """Return the exit code. Raises SystemExit as argparse does: for --help, and for wrong words."""
    try:
        try:
            return _answer(words, environment, prog)
        finally:
            sys.stdout.flush()  # not at the interpreter's exit, where a failure could not be handled
    except BrokenPipeError:  # the reader has closed the pipe
        code = Exit.FINE
    except OSError as error:
        print_error(f"{prog}: {error}")
        code = Exit.USAGE
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _answer(words: Sequence[str], environment: Mapping[str, str], prog: str) -> int:
    parser = build(prog)
    if words and words[0] == COMPLETE:
        for candidate in completion.complete(parser, words[1:], environment):
            print_out(candidate)
        return Exit.FINE
    args = parser.parse_args(words)
    args.environment = environment
    try:
        from colocated_rl_cli import commands

        return commands.run(args)
    except CliError as error:
        print_error(f"{prog} {args.command}: {error}")
        return error.code
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


def complete() -> int:
    """Answer kubectl_complete-crlj: a candidate per line, then the shell's directive (:4 no files, :0 files)."""
    found = completion.complete(build("kubectl crlj"), sys.argv[1:], os.environ)
    for candidate in found:
        print_out(candidate)
    print_out(":4" if found else ":0")
    return Exit.FINE


if __name__ == "__main__":
    sys.exit(main())
