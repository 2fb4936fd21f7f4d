"""Define the program's commands and options, and what each is for. docs/cli.md is generated from them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from colocated_rl_api import __version__, names
from colocated_rl_cli.base.output import FORMATS
from colocated_rl_cli.completion import SCRIPTS

EPILOG = """\
exit codes: 0 fine; 1 a problem was found (an invalid manifest, a job that does not move); 2 wrong words;
3 no answer (kubectl, the API server or a member not reached, not allowed, no such job); 130 interrupted.
Logging in is kubectl's: its contexts and plugins work, KUBECTL names another one. docs/cli.md says more.
"""
STATES = (
    "admitted", "running", "interrupted", "scoring", "completed",
    "sealed", "trained", "filtered", "failed", "discarded",
)  # fmt: skip

KINDS = ("", names.SHORT_NAME, names.PLURAL, names.KIND.lower())  # allowed before a job's name, as in crlj/sums


class Command(NamedTuple):
    """One command; `commands.RUN` has the function that runs it. add: adds its arguments to its parser."""

    name: str
    summary: str
    add: Callable[[argparse.ArgumentParser], Any]
    is_of_cluster: bool
    more: str = ""  # for docs/cli.md


def build(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the whole program."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Look at, explain and steer ColocatedRLJobs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    _add_cluster(parser, absent=None)
    chosen = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    for command in COMMANDS:
        words = chosen.add_parser(
            command.name, help=command.summary, description=_sentence(command.summary), allow_abbrev=False
        )
        command.add(words)
        if command.is_of_cluster:
            _add_cluster(words, absent=argparse.SUPPRESS)  # keeps the value of an option before the command
    return parser


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."


def _add_cluster(words: argparse.ArgumentParser, *, absent: str | None) -> None:
    """Add the options that choose a cluster. absent: default for an omitted option."""
    group = words.add_argument_group("cluster", argument_default=absent)
    group.add_argument("-n", "--namespace", metavar="NAME", help="namespace of the job; the context's when absent")
    group.add_argument("--context", metavar="NAME", help="context of the kubeconfig; the current one when absent")
    group.add_argument("--kubeconfig", metavar="FILE", help="as kubectl's")


def _add_job(words: argparse.ArgumentParser) -> None:
    words.add_argument("job", metavar="JOB", type=_job, help="name of the job")


def _job(text: str) -> str:
    """Return the name in NAME or, as kubectl writes objects, in crlj/NAME."""
    kind, _, name = text.rpartition("/")
    if kind.partition(".")[0] not in KINDS or not re.fullmatch("[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
        raise argparse.ArgumentTypeError(f"{text} is no name of a job")
    return name


def _add_output(words: argparse.ArgumentParser) -> None:
    words.add_argument("-o", "--output", choices=FORMATS, default="text", help="form of what is printed")


def _add_job_and_output(words: argparse.ArgumentParser) -> None:
    _add_job(words)
    _add_output(words)


def _add_validate(words: argparse.ArgumentParser) -> None:
    words.add_argument("file", metavar="FILE", nargs="+", help="manifests; - is standard input")
    _add_output(words)


def _add_init(words: argparse.ArgumentParser) -> None:
    words.add_argument("name", metavar="NAME", nargs="?", help="name of the job")
    words.add_argument("--model", metavar="CLAIM[:PATH]", help="claim that holds the model, and where in it")
    words.add_argument("--task", metavar="NAME", help="task of reasoning-gym, such as chain_sum")
    words.add_argument(
        "--prompts",
        metavar="CLAIM:WHAT",
        help="prompts of your own: a file (JSON lines, Parquet, Arrow) or the MODULE:FUNCTION that makes them",
    )
    words.add_argument("--reward", metavar="MODULE:FUNCTION", help="reward of your own, with --prompts")
    words.add_argument("--steps", metavar="N", type=int, default=100, help="training steps (%(default)s)")
    words.add_argument("--replicas", metavar="N", type=int, default=1, help="GPU pods (%(default)s)")
    words.add_argument("--gpus", metavar="N", type=int, default=1, help="devices of each, 0 for CPU (%(default)s)")
    words.add_argument("--batch-size", metavar="N", type=int, default=32, help="prompts in a batch (%(default)s)")
    words.add_argument("--group-size", metavar="N", type=int, default=8, help="samples of each prompt (%(default)s)")
    words.add_argument("--image", metavar="IMAGE", help="image with engine and trainer; the operator's when absent")
    _add_file(words)


def _add_file(words: argparse.ArgumentParser) -> None:
    words.add_argument("-f", "--file", metavar="FILE", help="write there; to standard output when absent")
    words.add_argument("--force", action="store_true", help="replace the file")


def _add_rollout_only(words: argparse.ArgumentParser) -> None:
    _add_job(words)
    words.add_argument("--name", metavar="NAME", help="of the new job; JOB-rollout when absent")
    words.add_argument("--steps", metavar="N", type=_count, help="batches to record; as many as the job has steps")
    _add_file(words)


def _add_train_only(words: argparse.ArgumentParser) -> None:
    _add_job(words)
    words.add_argument("--name", metavar="NAME", help="of the new job; JOB-train when absent")
    words.add_argument("--steps", metavar="N", type=_count, help="batches to train; those that the job has when absent")
    words.add_argument("--recorded", metavar="CLAIM[:PATH]", help="a recording; the job's own store when absent")
    _add_file(words)


def _count(text: str) -> int:
    return _number(text, least=1)


def _bound(text: str) -> int:
    return _number(text, least=0)


def _number(text: str, *, least: int) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text} is no number from {least} up")
    return int(text)


def _add_top(words: argparse.ArgumentParser) -> None:
    _add_job(words)
    words.add_argument("--once", action="store_true", help="print one frame and end")


def _add_samples(words: argparse.ArgumentParser) -> None:
    _add_job_and_output(words)
    words.add_argument("--state", choices=STATES, metavar="STATE", help=f"only of this state: {', '.join(STATES)}")
    words.add_argument("--text", action="store_true", help="prompts and responses too")
    words.add_argument("--limit", metavar="N", type=_bound, help="at most so many, 1000 at most (20); in a file all")
    words.add_argument(
        "--follow", action="store_true", help="the newest that ended, then each as it ends, until the job does"
    )
    words.add_argument("--parquet", metavar="FILE", help="write them there, with tokens and log-probabilities")


def _add_timeline(words: argparse.ArgumentParser) -> None:
    words.add_argument("job", metavar="JOB", type=_job, nargs="?", help="name of the job")
    words.add_argument("--html", metavar="FILE", help="write a page that needs nothing else")
    words.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev")
    words.add_argument("--save", metavar="FILE", help="write what is known, for --records")
    words.add_argument("--records", metavar="FILE", help="of what --save wrote, instead of a job")


def _add_bundle(words: argparse.ArgumentParser) -> None:
    _add_job(words)
    words.add_argument("-f", "--file", metavar="FILE", help="write there; JOB-bundle.tar.gz when absent")
    words.add_argument("--operator", metavar="NAMESPACE", help="the operator's pods too, which run in that namespace")


def _add_completion(words: argparse.ArgumentParser) -> None:
    words.add_argument("shell", choices=[*SCRIPTS], help="which shell")


COMMANDS = (
    Command(
        "init", "write the manifest of a new job", _add_init, False,
        "Each field stands below what it means. What is missing is asked for on a terminal.",
    ),
    Command(
        "validate", "say what the API server would say of manifests", _add_validate, False,
        "Without a cluster, with the line of each fault: `FILE:LINE:COLUMN: FIELD: WORDS`. Lists are looked into, as "
        "`kubectl get crlj -o yaml` prints them.",
    ),
    Command(
        "explain", "say why a job does not move, and what to do", _add_job_and_output, True,
        "Names the rung, the pod, the cause and the remedy; where nothing is wrong, what the job waits for.",
    ),
    Command(
        "top", "show a job while it runs", _add_top, True,
        "Who has each GPU, on which rung, since when; step, reward, staleness, tokens per second, the last switch. "
        "Ends with the job, or with Ctrl-C. Where there is no terminal, a line for each event.",
    ),
    Command(
        "samples", "list the newest samples", _add_samples, True,
        "From the rollout controller's store; those of batches that a checkpoint holds are only counted there. With "
        "`--follow` each is told once, when its reward is in or it was given up, until the job is over, or Ctrl-C; "
        "`-o json` is a line each. A connection that breaks is made again, and no sample is missed. "
        "[Samples](samples.md) has the columns of a Parquet file.",
    ),
    Command("eval", "list the evaluations", _add_job_and_output, True),
    Command(
        "suspend", "free the devices of a job, and keep its volumes", _add_job, True,
        "Sets spec.suspend; it returns at once, and the pods end within a minute.",
    ),
    Command("resume", "let a suspended job go on where it stood", _add_job, True),
    Command(
        "rollout-only", "write the manifest of a job that only generates", _add_rollout_only, True,
        "Rollout of JOB alone (spec.mode: RolloutOnly): a new job generates, rewards and seals batches with the model "
        "as JOB begins with it, and starts no trainer. `kubectl crlj rollout-only JOB | kubectl apply -f -`",
    ),
    Command(
        "train-only", "write the manifest of a job that only trains", _add_train_only, True,
        "Training of JOB alone (spec.mode: TrainOnly): a new job trains recorded batches, in order, from the model as "
        "JOB begins with it, and starts no engine. The recording is what JOB has kept, where it was made by "
        "rollout-only or has spec.storage.keepBatches.",
    ),
    Command(
        "timeline", "show who held each GPU, and why", _add_timeline, True,
        "From the log lines of the job's pods, as far back as their nodes keep them (10 MiB each, usually), its events "
        "and status.",
    ),
    Command(
        "bundle", "write a support archive without secrets", _add_bundle, True,
        "Status, events, pods, logs, members' pages. Secrets are never read, and what looks like one is replaced; no "
        "prompts and responses are in it, unless a reward function or an engine logs them.",
    ),
    Command(
        "completion", "print a script that completes words", _add_completion, False,
        "For bash: `source <(colocated-rl completion bash)`. `kubectl crlj` is completed by kubectl itself, which "
        "finds `kubectl_complete-crlj` on PATH.",
    ),
)  # fmt: skip
