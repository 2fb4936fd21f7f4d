"""Complete words in bash, zsh and fish, and those of `kubectl crlj` in every shell that kubectl completes in.

The scripts ask the program itself (`__complete WORD...`, the last word being typed), so none of them repeats its
commands. Names of jobs come from the cluster; if it does not answer soon, there are none.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import ShellComplete

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


def complete(program: click.Group, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return what the last of these words may become, sorted; no options of one letter."""
    *before, typed = words or [""]
    found = ShellComplete(program, {"obj": environment}, "", "").get_completions(before, typed)
    return sorted(one.value for one in found if not re.fullmatch("-[a-z]", one.value))


def complete_jobs(context: click.Context, _: click.Parameter, typed: str) -> list[str]:
    """Return the names of the jobs in the namespace and cluster that the words so far name."""
    import asyncio

    from colocated_rl_cli.cluster.api import Api
    from colocated_rl_cli.cluster.kubectl import Login

    known = given(context)

    async def ask() -> list[str]:
        login = Login.of(context.obj, kubeconfig=known["kubeconfig"], context=known["context"])
        async with asyncio.timeout(NAMES_DEADLINE_S), Api.reach(login, known["namespace"]) as api:
            return [name for name in await api.job_names() if name.startswith(typed)]

    with contextlib.suppress(CliError, TimeoutError):
        return asyncio.run(ask())
    return []


def given(context: click.Context) -> dict[str, Any]:
    """Return a command's arguments; options of the cluster may stand before the command, too."""
    before = context.parent.params if context.parent else {}
    return context.params | {name: value for name, value in before.items() if context.params.get(name) is None}
