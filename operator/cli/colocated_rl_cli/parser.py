"""Define the program's commands and options, and what each is for. docs/cli.md is generated from them."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence

import click
from click import Argument, Choice, FloatRange, IntRange, Option

from colocated_rl_api import __version__, names
from colocated_rl_cli.base.errors import CliError, Exit
from colocated_rl_cli.base.output import FORMATS, print_error
from colocated_rl_cli.completion import SCRIPTS, complete_jobs, given

EPILOG = """\
\b
exit codes: 0 fine; 1 a problem was found (an invalid manifest, a job that does not move); 2 wrong words;
3 no answer (kubectl, the API server or a member not reached, not allowed, no such job); 130 interrupted.
Logging in is kubectl's: its contexts and plugins work, KUBECTL names another one. docs/cli.md has more.
"""
STATES = (
    "admitted", "running", "interrupted", "scoring", "completed",
    "sealed", "trained", "filtered", "failed", "discarded",
)  # fmt: skip

FAULTS = {  # kinds of `colocated_rl_api.faults`, which is loaded only by the command itself
    "engine-crash": "SIGKILL to the engine",
    "trainer-crash": "SIGKILL to a trainer rank",
    "slow-weights": "the next update of the engine's weights takes longer",
    "gate-closed": "the gate closes, and stays so",
}
MAX_FAULT_S = 3600
KINDS = ("", names.SHORT_NAME, names.PLURAL, names.KIND.lower())  # allowed before a job's name, as in crlj/sums


def build(prog: str) -> click.Group:
    """Return the whole program."""
    return click.version_option(__version__, message="%(version)s")(
        Program(
            prog,
            commands=COMMANDS,
            help="Look at, explain and steer ColocatedRLJobs.",
            epilog=EPILOG,
            params=[*CLUSTER],
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
        )
    )


class Program(click.Group):
    """Lists its commands in their order, and completes nothing after a word that is no command."""

    def list_commands(self, context: click.Context) -> list[str]:
        return [*self.commands]

    def resolve_command(
        self, context: click.Context, words: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(context, words)
        return name, command or click.Command(name, add_help_option=False), rest


class Command(click.Command):
    """One command; `commands.RUN` has the function that runs it. more: for docs/cli.md."""

    def __init__(
        self, name: str, summary: str, params: Sequence[click.Parameter], more: str = "", *, is_of_cluster: bool = True
    ) -> None:
        super().__init__(
            name,
            params=[*params, *(CLUSTER if is_of_cluster else ())],
            help=f"{summary[0].upper()}{summary[1:]}.",
            short_help=summary,
        )
        self.summary = summary
        self.is_of_cluster = is_of_cluster
        self.more = more

    def invoke(self, context: click.Context) -> Exit:
        """Run the command. A failure is printed, and is its exit code."""
        try:
            from colocated_rl_cli import commands

            return commands.run(Namespace(command=self.name, environment=context.obj, **given(context)))
        except CliError as error:
            print_error(f"{context.command_path}: {error}")
            return error.code
        except KeyboardInterrupt:
            return Exit.INTERRUPTED


class JobName(click.ParamType[str]):
    """Accepts a job's name as NAME or, as kubectl writes objects, as crlj/NAME."""

    name = "job"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        kind, _, name = value.rpartition("/")
        if kind.partition(".")[0] not in KINDS or not re.fullmatch("[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
            self.fail(f"{value} is no name of a job", param, ctx)
        return name


def _job(*, required: bool = True) -> Argument:
    return Argument(
        ["job"],
        metavar="JOB",
        type=JobName(),
        required=required,
        shell_complete=complete_jobs,
        help="name of the job",
    )


def _number(flag: str, default: int, text: str) -> Option:
    return Option([flag], metavar="N", type=int, default=default, help=f"{text} ({default})")


JOB = _job()
OUTPUT = Option(["-o", "--output"], type=Choice(FORMATS), default="text", help="form of what is printed")
CLUSTER = (
    Option(["-n", "--namespace"], metavar="NAME", help="namespace of the job; the context's when absent"),
    Option(["--context"], metavar="NAME", help="context of the kubeconfig; the current one when absent"),
    Option(["--kubeconfig"], metavar="FILE", help="as kubectl's"),
)
FILE = (
    Option(["-f", "--file"], metavar="FILE", help="write there; to standard output when absent"),
    Option(["--force"], is_flag=True, help="replace the file"),
)

COMMANDS = (
    Command(
        "init", "write the manifest of a new job",
        [
            Argument(["name"], metavar="NAME", required=False, help="name of the job"),
            Option(
                ["--model"],
                metavar="MODEL",
                help="CLAIM or CLAIM:PATH that holds the model, or NAME@COMMIT, a model of the Hugging Face hub",
            ),
            Option(["--task"], metavar="NAME", help="task of reasoning-gym, such as chain_sum"),
            Option(
                ["--prompts"],
                metavar="CLAIM:WHAT",
                help="prompts of your own: a file (JSON lines, Parquet, Arrow) or the MODULE:FUNCTION that makes them",
            ),
            Option(["--reward"], metavar="MODULE:FUNCTION", help="reward of your own, with --prompts"),
            _number("--steps", 100, "training steps"),
            _number("--replicas", 1, "GPU pods"),
            _number("--gpus", 1, "devices of each, 0 for CPU"),
            _number("--batch-size", 32, "prompts in a batch"),
            _number("--group-size", 8, "samples of each prompt"),
            Option(["--image"], metavar="IMAGE", help="image with engine and trainer; the operator's when absent"),
            *FILE,
        ],
        "Each field stands below what it means. What is missing is asked for on a terminal.",
        is_of_cluster=False,
    ),
    Command(
        "validate", "judge manifests as the API server would",
        [Argument(["file"], metavar="FILE", nargs=-1, required=True, help="manifests; - is standard input"), OUTPUT],
        "Without a cluster, with the line of each fault: `FILE:LINE:COLUMN: FIELD: WORDS`. Lists are looked into, as "
        "`kubectl get crlj -o yaml` prints them.",
        is_of_cluster=False,
    ),
    Command(
        "explain", "explain why a job does not move, and what to do", [JOB, OUTPUT],
        "Names the rung, the pod, the cause and the remedy; where nothing is wrong, what the job waits for.",
    ),
    Command(
        "top", "show a job while it runs",
        [JOB, Option(["--once"], is_flag=True, help="print one frame and end")],
        "Who has each GPU, on which rung, since when; step, reward, staleness, tokens per second, the last switch. "
        "Ends with the job, or with Ctrl-C. Where there is no terminal, a line for each event.",
    ),
    Command(
        "samples", "list the newest samples",
        [
            JOB,
            OUTPUT,
            Option(["--state"], type=Choice(STATES), metavar="STATE", help=f"only of this state: {', '.join(STATES)}"),
            Option(["--text"], is_flag=True, help="prompts and responses too"),
            Option(
                ["--limit"], metavar="N", type=IntRange(0), help="at most so many, 1000 at most (20); in a file all"
            ),
            Option(["--follow"], is_flag=True, help="the newest that ended, then each as it ends, until the job does"),
            Option(["--parquet"], metavar="FILE", help="write them there, with tokens and log-probabilities"),
        ],
        "From the rollout controller's store; of batches that a checkpoint holds only the newest is there. With "
        "`--follow` each is shown once, when its reward is in or it was given up, until the job is over, or Ctrl-C; "
        "`-o json` is a line each. A connection that breaks is made again, and no sample is missed. "
        "[Samples](samples.md) has the columns of a Parquet file.",
    ),
    Command(
        "reader", "serve samples of a job that is over, or suspended",
        [
            JOB,
            Option(["--minutes"], metavar="N", type=IntRange(1, 1440), default=60, help="then its pod ends (60)"),
        ],
        "Makes a pod of the job's own rollout image, which mounts the claim of its samples read-only. `samples` asks "
        "that pod then, and it has [the page](samples.md#in-a-browser) too. It ends by itself, goes with the job, and "
        "the operator removes it when the job gets pods again.",
    ),
    Command(
        "eval", "list the evaluations", [JOB, OUTPUT],
        "From the rollout controller's log and the job's status. Of a job that is over or suspended, whose log is "
        "gone, all come from the store, if `reader` serves it, and without one the newest of each set.",
    ),
    Command(
        "cost", "show the GPU hours of a job, or of all jobs of a namespace, by who had the GPUs",
        [
            _job(required=False),
            OUTPUT,
            Option(["-A", "--all-namespaces"], is_flag=True, help="the jobs of all namespaces, without JOB"),
        ],
        "From the counters of the job's pods, since their agents started, and from the logs of those that have ended, "
        "as far back as they are kept: a pod that is gone is not counted. Prometheus keeps them for good ([what a job "
        "costs](metrics.md#what-a-job-costs)). Without JOB there is a line for each job, and their sum.\n\n"
        "Of a job whose engines and trainers share GPUs a second table says what that saved. *Colocated* are the GPU "
        "hours that all holders had. *Separate* are those of GPUs of their own for rollout and for training, as many "
        "for each: both work at the same time then, and both sides are held for as long as the longer of the two "
        "works, so it is 2 x the hours of rollout or of training, whichever are more (those of both at once count for "
        "each). Start-up, switches and idle time are left out of it: it is the least that the same work would hold "
        "there. *Saved* is separate less colocated. Below zero, both sides have about as many hours, and sharing "
        "cost its switches.",
    ),
    Command(
        "suspend", "free the devices of a job, and keep its volumes", [JOB],
        "Sets spec.suspend; it returns at once, and the pods end within a minute. Fields that pods read when they are "
        "made may change then ([what may change](failures.md#what-may-change)); of a failed job too, before `retry`.",
    ),
    Command("resume", "let a suspended job go on where it stood", [JOB]),
    Command(
        "retry", "let a failed job go on where it stood", [JOB],
        "Adds one to spec.retries. Its pods are made again and its trainers start from the newest checkpoint, with no "
        "failures counted. Ends a suspension too.",
    ),
    Command(
        "fault", "crash or slow a part of a job, for a drill",
        [
            JOB,
            Argument(["kind"], type=Choice([*FAULTS]), help="; ".join(map(": ".join, FAULTS.items()))),
            Option(["--pod"], metavar="NAME", help="in this pod; in the job's first that has such a part when absent"),
            Option(
                ["--seconds"], metavar="N", type=FloatRange(0, MAX_FAULT_S, min_open=True), default=30.0,
                help="for as long, of the kinds that last (30)",
            ),
        ],
        "Only where the chart's value `faultInjection.enabled` was true when the pods were made. The job has to go on "
        "by itself; [when something fails](failures.md) says how. The agent's log has `fault injected`.",
    ),
    Command(
        "rollout-only", "write the manifest of a job that only generates",
        [
            JOB,
            Option(["--name"], metavar="NAME", help="of the new job; JOB-rollout when absent"),
            Option(["--steps"], metavar="N", type=IntRange(1), help="batches to record; as many as the job has steps"),
            *FILE,
        ],
        "Rollout of JOB alone (spec.mode: RolloutOnly): a new job generates, rewards and seals batches with the model "
        "as JOB begins with it, and starts no trainer. `kubectl crlj rollout-only JOB | kubectl apply -f -`",
    ),
    Command(
        "train-only", "write the manifest of a job that only trains",
        [
            JOB,
            Option(["--name"], metavar="NAME", help="of the new job; JOB-train when absent"),
            Option(
                ["--steps"], metavar="N", type=IntRange(1), help="batches to train; those that the job has when absent"
            ),
            Option(["--recorded"], metavar="CLAIM[:PATH]", help="a recording; the job's own store when absent"),
            *FILE,
        ],
        "Training of JOB alone (spec.mode: TrainOnly): a new job trains recorded batches, in order, from the model as "
        "JOB begins with it, and starts no engine. The recording is what JOB has kept, where it was made by "
        "rollout-only or has spec.storage.keepBatches.",
    ),
    Command(
        "timeline", "show who held each GPU, and why",
        [
            _job(required=False),
            Option(["--html"], metavar="FILE", help="write a page that needs nothing else"),
            Option(["--trace"], metavar="FILE", help="write a trace for ui.perfetto.dev"),
            Option(["--save"], metavar="FILE", help="write what is known, for --records"),
            Option(["--records"], metavar="FILE", help="of what --save wrote, instead of a job"),
        ],
        "From the log lines of the job's pods, as far back as their nodes keep them (10 MiB each, usually), its events "
        "and status. Of a job that is over or suspended, whose pods are gone, from the store, if `reader` serves it: "
        "there the slowest pod of each rung stands for all, and starts and steps that failed are gaps between rows.",
    ),
    Command(
        "bundle", "write a support archive without secrets",
        [
            JOB,
            Option(["-f", "--file"], metavar="FILE", help="write there; JOB-bundle.tar.gz when absent"),
            Option(["--operator"], metavar="NAMESPACE", help="the operator's pods too, which run in that namespace"),
        ],
        "Status, events, pods, logs, members' pages. Secrets are never read, and what looks like one is replaced; no "
        "prompts and responses are in it, unless a reward function or an engine logs them.",
    ),
    Command(
        "completion", "print a script that completes words",
        [Argument(["shell"], type=Choice([*SCRIPTS]), help="which shell")],
        "For bash: `source <(colocated-rl completion bash)`. `kubectl crlj` is completed by kubectl itself, which "
        "finds `kubectl_complete-crlj` on PATH.",
        is_of_cluster=False,
    ),
)  # fmt: skip
