"""Run the program: `kubectl crlj`, `colocated-rl`, and `kubectl_complete-crlj`, by which kubectl completes words.

Help and completion answer without loading the libraries that only commands need: those are imported when one runs.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from colocated_rl_cli import completion
from colocated_rl_cli.base.errors import Exit
from colocated_rl_cli.base.output import print_error, print_out
from colocated_rl_cli.parser import build

COMPLETE = "__complete"  # the word before those to complete, in the scripts of `completion`


def main() -> int:
    """Run the program with the process's arguments and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # samples have characters that a locale may lack
    prog = "kubectl crlj" if Path(sys.argv[0]).name.startswith("kubectl") else "colocated-rl"
    return run(sys.argv[1:], os.environ, prog=prog)


def run(words: Sequence[str], environment: Mapping[str, str], *, prog: str = "colocated-rl") -> int:
    """Return the exit code."""
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
    program = build(prog)
    if words and words[0] == COMPLETE:
        for candidate in completion.complete(program, words[1:], environment):
            print_out(candidate)
        return Exit.FINE
    try:  # not program.main(), which has exit codes of its own for a broken pipe
        with program.make_context(prog, [*words], obj=environment) as context:
            return int(program.invoke(context))
    except click.ClickException as error:
        message = io.StringIO()
        error.show(message)
        print_error(message.getvalue().removesuffix("\n"))
        return error.exit_code
    except click.exceptions.Exit as ended:  # after --help
        return ended.exit_code


def complete() -> int:
    """Answer kubectl_complete-crlj: a candidate per line, then the shell's directive (:4 no files, :0 files)."""
    found = completion.complete(build("kubectl crlj"), sys.argv[1:], os.environ)
    for candidate in found:
        print_out(candidate)
    print_out(":4" if found else ":0")
    return Exit.FINE


if __name__ == "__main__":
    sys.exit(main())
