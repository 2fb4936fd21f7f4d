"""Complete words in bash, zsh and fish, and those of `kubectl crlj` in every shell that kubectl completes in.

The scripts ask the program itself (`__complete WORD...`, the last word being typed), so none of them repeats its
commands. Names of jobs come from the cluster; if it does not answer soon, there are none.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence

from colocated_rl_cli.base.errors import CliError

NAMES_DEADLINE_S = 3.0

SCRIPTS = {
    "bash": """\
_colocated_rl() {
  local IFS=$'\\n'
  COMPREPLY=($(colocated-rl __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _colocated_rl colocated-rl""",
    "zsh": """\
#compdef colocated-rl
_colocated_rl() {
  local -a found
  found=(${(f)"$(colocated-rl __complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  compadd -a found || _files
}
compdef _colocated_rl colocated-rl""",
    "fish": """\
complete -c colocated-rl -a '(colocated-rl __complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'""",
}


def complete(parser: argparse.ArgumentParser, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return what the last of these words may become, sorted."""
    *before, typed = words or [""]
    candidates = _candidates(parser, before, typed, environment)
    return sorted(one for one in candidates if one.startswith(typed))


def _candidates(
    parser: argparse.ArgumentParser, before: Sequence[str], typed: str, environment: Mapping[str, str]
) -> list[str]:
    commands = subparsers(parser)
    place = next((place for place, word in enumerate(before) if word in commands), None)
    if place is None:
        is_open = not before or before[0].startswith("-")
        return [*commands, *_flags(parser)] if is_open else []
    chosen = commands[before[place]]
    before = [before[place], *before[:place], *before[place + 1 :]]  # options of the cluster may stand before it
    if option := _open_option(chosen, before):
        return [str(choice) for choice in option.choices or ()]
    if typed.startswith("-"):
        return _flags(chosen)
    return _positionals(chosen, before, environment)


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands' own parsers by name."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            return dict(action.choices)
    return {}


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    every = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001
    return [flag for flag in every if flag.startswith("--")]


def _open_option(parser: argparse.ArgumentParser, before: Sequence[str]) -> argparse.Action | None:
    """Return the option whose value is being typed, or None."""
    for action in parser._actions:  # noqa: SLF001
        if before[-1] in action.option_strings and action.nargs != 0:
            return action
    return None


def _positionals(parser: argparse.ArgumentParser, before: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    for action in parser._actions:  # noqa: SLF001
        if action.option_strings:
            continue
        if action.choices is not None:
            return [str(choice) for choice in action.choices]
        if action.dest == "job":
            return _jobs(parser, before, environment)
    return []


def _jobs(parser: argparse.ArgumentParser, before: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the names of the jobs in the namespace and cluster that the words so far name."""
    import asyncio

    from colocated_rl_cli.cluster.api import Api
    from colocated_rl_cli.cluster.kubectl import Login

    known = argparse.Namespace(namespace=None, context=None, kubeconfig=None)
    try:
        parser.parse_known_args([*before[1:], "x"], known)
    except SystemExit:
        return []  # words that are wrong already

    async def ask() -> list[str]:
        login = Login.of(environment, kubeconfig=known.kubeconfig, context=known.context)
        async with asyncio.timeout(NAMES_DEADLINE_S), Api.reach(login, known.namespace) as api:
            return await api.job_names()

    with contextlib.suppress(CliError, TimeoutError):
        return asyncio.run(ask())
    return []
