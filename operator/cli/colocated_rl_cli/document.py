"""Write docs/cli.md from the program's own definitions: `python -m colocated_rl_cli.document [--check]`.

Commands, options, exit codes and remedies are defined where they are used, and the page repeats them. This module holds
the text that only the page has.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

from click import Choice, Option

from colocated_rl_cli.base.errors import Exit
from colocated_rl_cli.explain.remedies import REMEDIES
from colocated_rl_cli.parser import CLUSTER, COMMANDS, Command

PAGE = Path("docs/cli.md")

HEAD = """\
<!-- Made by `make generate` from operator/cli/colocated_rl_cli: change that instead. -->
# kubectl crlj

The command line for people who run jobs: `kubectl crlj COMMAND`, and the same program as `colocated-rl COMMAND`. It
needs Python 3.11 or newer and kubectl, and neither torch nor the operator's libraries:

    pip install ./operator ./operator/cli    # in a checkout

It reaches the cluster through kubectl, so kubectl's contexts, exec plugins and proxies work; `KUBECTL` names another
kubectl. In a pod without a kubeconfig it has the rights of the pod's ServiceAccount, and looks in the pod's namespace.
Members' pages listen on their pods' loopback. They are reached through the API server's port-forward, so the right to
`pods/portforward` decides who sees samples; no port is opened on your machine.

## Rights
"""

RIGHTS_NOTE = """
`view`, `edit` and `admin` are Kubernetes' own ClusterRoles. They hold these rights to pods, logs, events and
port-forward; the chart adds those to jobs (`rbac.aggregate`). `view` does not include port-forward, because samples are
user data.
"""

RIGHTS = (
    ("`init`, `validate`, `completion`", "nothing", "-"),
    (
        "`top`, `eval`, `timeline`",
        "`get, list, watch` of colocatedrljobs and pods; `get` of pods/log; `list` of events. For a job whose pods "
        "are gone, `eval` and `timeline` ask its reader: `create` of pods/portforward",
        "`view`; with a reader `edit`",
    ),
    (
        "`explain`",
        "the same; with `create` of pods/portforward (`get` before Kubernetes 1.35) the members' own pages too",
        "`view`; with pages `edit`",
    ),
    ("`samples`", "the same, pods/portforward included", "`edit`"),
    ("`reader`", "the same, with `create, delete` of pods and `get` of controllerrevisions", "`edit`"),
    (
        "`cost`",
        "`get, list` of colocatedrljobs, `list` of pods, `create` of pods/portforward; of pods that have ended "
        "`get` of pods/log; `--all-namespaces` needs all of it in each",
        "`edit`",
    ),
    ("`fault`", "`get` of colocatedrljobs, `list` of pods, `create` of pods/portforward", "`edit`"),
    (
        "`rollout-only`, `train-only`",
        "`get` of colocatedrljobs; `create` to apply what they write",
        "`view`; to apply `edit`",
    ),
    ("`suspend`, `resume`, `retry`", "`get, patch` of colocatedrljobs", "`edit`"),
    (
        "`bundle`",
        "as `explain`, and `list` of persistentvolumeclaims; with `--operator` also pods and pods/log in that "
        "namespace. The archive notes what could not be read",
        "`view`; with pages `edit`",
    ),
)

TAIL = """\
## Reasons, and what to do

What `explain` prints for each reason that operator, members or kubelet report. Those that heal by themselves need a
person only if they stay.
"""


def page() -> str:
    """Return the text of docs/cli.md."""
    lines = [HEAD, "| command | needs, in the job's namespace | granted by |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in RIGHTS]
    lines += [RIGHTS_NOTE, "## Commands", ""]
    for command in COMMANDS:
        lines += _command(command)
    lines += ["## Exit codes", "", "| code | means |", "|---|---|"]
    lines += [f"| {code.value} | {_MEANS[code]} |" for code in Exit]
    lines += ["", TAIL, "| reason | means | to do | heals by itself |", "|---|---|---|---|"]
    lines += [
        f"| `{reason}` | {remedy.means} | {remedy.do} | {'usually' if remedy.heals else ''} |"
        for reason, remedy in REMEDIES.items()
    ]
    return "\n".join(lines) + "\n"


_MEANS = {
    Exit.FINE: "success",
    Exit.PROBLEM: "a problem was found: an invalid manifest, a job that needs a person",
    Exit.USAGE: "the command line is wrong, or a file can't be read or written",
    Exit.NO_ANSWER: "no answer: kubectl, the API server or a member is unreachable, a right or the job is missing",
    Exit.INTERRUPTED: "interrupted",
}


def _command(command: Command) -> Iterator[str]:
    yield f"### {command.name}"
    yield ""
    yield f"{command.help}{f' {command.more}' if command.more else ''}"
    yield ""
    yield "| word | |"
    yield "|---|---|"
    for param in command.params:
        if param in CLUSTER:
            continue
        choices = "|".join(param.type.choices) if isinstance(param.type, Choice) else ""
        if isinstance(param, Option):
            words = ", ".join(param.opts) + ("" if param.is_flag else f" {param.metavar or choices}")
        else:
            words = choices or str(param.metavar)
        yield f"| `{words.replace('|', chr(92) + '|')}` | {param.help} |"
    if command.is_of_cluster:
        yield "| `-n`, `--context`, `--kubeconfig` | as kubectl's |"
    yield ""


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or check it; return the exit code."""
    parser = ArgumentParser(prog="python -m colocated_rl_cli.document", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is out of date")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository; the working directory by default")
    options = parser.parse_args(arguments)
    file, text = options.root / PAGE, page()
    if file.is_file() and file.read_text() == text:
        return 0
    if options.check:
        sys.stderr.write(f"out of date: {PAGE}. Run `make generate` and commit the result.\n")
        return 1
    file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
