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
OUTPUT = Option(["-o", "--output"], type=Choice(FORMATS), default="text", help="output format")
CLUSTER = (
    Option(["-n", "--namespace"], metavar="NAME", help="namespace of the job; the context's when absent"),
    Option(["--context"], metavar="NAME", help="context of the kubeconfig; the current one when absent"),
    Option(["--kubeconfig"], metavar="FILE", help="as kubectl's"),
)
FILE = (
    Option(["-f", "--file"], metavar="FILE", help="output file; standard output when absent"),
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
            _number("--gpus", 1, "devices of each pod, 0 for CPU"),
            _number("--batch-size", 32, "prompts in a batch"),
            _number("--group-size", 8, "samples of each prompt"),
            Option(["--image"], metavar="IMAGE", help="image with engine and trainer; the operator's when absent"),
            *FILE,
        ],
        "Each field has a comment that explains it. On a terminal, missing options are asked for.",
        is_of_cluster=False,
    ),
    Command(
        "validate", "check manifests as the API server would",
        [Argument(["file"], metavar="FILE", nargs=-1, required=True, help="manifests; - is standard input"), OUTPUT],
        "Needs no cluster, and reports each fault as `FILE:LINE:COLUMN: FIELD: MESSAGE`. It also checks lists as "
        "`kubectl get crlj -o yaml` prints them.",
        is_of_cluster=False,
    ),
    Command(
        "explain", "explain why a job does not move, and what to do", [JOB, OUTPUT],
        "Names the rung, the pod, the cause and the remedy, or, if nothing is wrong, what the job waits for.",
    ),
    Command(
        "top", "show a job while it runs",
        [JOB, Option(["--once"], is_flag=True, help="print one frame and end")],
        "Who has each GPU, on which rung, since when; step, reward, staleness, tokens per second, the last switch. "
        "Ends with the job, or with Ctrl-C. Without a terminal it prints a line for each event.",
    ),
    Command(
        "samples", "list the newest samples",
        [
            JOB,
            OUTPUT,
            Option(["--state"], type=Choice(STATES), metavar="STATE", help=f"only this state: {', '.join(STATES)}"),
            Option(["--text"], is_flag=True, help="with prompts and responses"),
            Option(
                ["--limit"], metavar="N", type=IntRange(0), help="how many, at most 1000 (20); all in a Parquet file"
            ),
            Option(["--follow"], is_flag=True, help="the newest that ended, then each as it ends, until the job ends"),
            Option(
                ["--parquet"],
                metavar="FILE",
                type=click.Path(dir_okay=False),
                help="write samples to this file, with tokens and log-probabilities",
            ),
        ],
        "Samples come from the rollout controller's store, which keeps only the newest of the batches that a "
        "checkpoint holds. With `--follow` each sample is printed once, when it has its reward or was dropped, until "
        "the job ends or Ctrl-C; `-o json` prints a line for each. It reconnects by itself and misses no sample. "
        "[Samples](samples.md) has the columns of a Parquet file.",
    ),
    Command(
        "reader", "serve samples of a job that has ended, is suspended or is queued",
        [
            JOB,
            Option(["--minutes"], metavar="N", type=IntRange(1, 1440), default=60, help="lifetime of the pod (60)"),
        ],
        "Creates a pod of the job's own rollout image, which mounts the claim of its samples read-only. `samples` then "
        "reads from that pod, and it serves [the page](samples.md#in-a-browser) too. It ends by itself or with the "
        "job, and the operator deletes it when the job gets pods again.",
    ),
    Command(
        "eval", "list the evaluations", [JOB, OUTPUT],
        "Evaluations come from the rollout controller's log and the job's status. Once the job has ended, is suspended "
        "or is queued, and the log is gone, `reader` serves all of them from the store; without a reader only the "
        "newest of each set is listed.",
    ),
    Command(
        "cost", "show the GPU hours of a job, or of all jobs of a namespace, by who had the GPUs",
        [
            _job(required=False),
            OUTPUT,
            Option(["-A", "--all-namespaces"], is_flag=True, help="the jobs of all namespaces, without JOB"),
        ],
        "Hours come from the counters of the job's pods, since their agents started, and from the logs of pods that "
        "have ended, as far back as they are kept. A deleted pod is not counted; Prometheus keeps its hours ([what a "
        "job costs](metrics.md#what-a-job-costs)). Without JOB there is a line for each job, and their sum.\n\n"
        "For a job whose engines and trainers share GPUs, a second table shows what that saved. *Colocated* is the sum "
        "of all holders. *Separate* is what the same work would take if rollout and training each had as many GPUs of "
        "their own and worked at the same time: both sides are held for as long as the longer of the two works, so it "
        "is twice the hours of rollout or of training, whichever is more (hours of both at once count for each). It "
        "leaves out start-up, switches and idle time, so it is a lower bound. Engines that have their own GPUs "
        "beside those (`placement: Both`) keep them in both sums. *Saved* is separate minus colocated. It is negative "
        "if both sides work about equally long: then sharing costs its switches.",
    ),
    Command(
        "suspend", "free the devices of a job, and keep its volumes", [JOB],
        "Sets spec.suspend and returns at once; the pods end within a minute. Fields that pods read when they are "
        "created [may change](failures.md#what-may-change) while a job is suspended, also in a failed job before "
        "`retry`.",
    ),
    Command("resume", "continue a suspended job", [JOB]),
    Command(
        "retry", "continue a failed job", [JOB],
        "Adds one to spec.retries. Pods are recreated, trainers start from the newest checkpoint, and the count of "
        "failures starts again at zero. It also ends a suspension.",
    ),
    Command(
        "fault", "crash or slow a part of a job, for a drill",
        [
            JOB,
            Argument(["kind"], type=Choice([*FAULTS]), help="; ".join(map(": ".join, FAULTS.items()))),
            Option(["--pod"], metavar="NAME", help="the pod to break; the first with such a part when absent"),
            Option(
                ["--seconds"], metavar="N", type=FloatRange(0, MAX_FAULT_S, min_open=True), default=30.0,
                help="duration of slow-weights and gate-closed (30)",
            ),
        ],
        "Works only if the chart's value `faultInjection.enabled` was true when the pods were created. The job must "
        "continue by itself, as [what happens when something fails](failures.md) says. The agent logs `fault "
        "injected`.",
    ),
    Command(
        "rollout-only", "write the manifest of a job that only generates",
        [
            JOB,
            Option(["--name"], metavar="NAME", help="name of the new job; JOB-rollout when absent"),
            Option(["--steps"], metavar="N", type=IntRange(1), help="batches to record; the steps of JOB when absent"),
            *FILE,
        ],
        "The new job (spec.mode: RolloutOnly) generates, rewards and seals batches with the model that JOB starts "
        "from, and starts no trainer. `kubectl crlj rollout-only JOB | kubectl apply -f -`",
    ),
    Command(
        "train-only", "write the manifest of a job that only trains",
        [
            JOB,
            Option(["--name"], metavar="NAME", help="name of the new job; JOB-train when absent"),
            Option(
                ["--steps"], metavar="N", type=IntRange(1), help="batches to train; as recorded when absent"
            ),
            Option(["--recorded"], metavar="CLAIM[:PATH]", help="the recording; the store of JOB when absent"),
            *FILE,
        ],
        "The new job (spec.mode: TrainOnly) trains recorded batches in order, from the model that JOB starts from, and "
        "starts no engine. JOB has a recording if it was made by rollout-only or has spec.storage.keepBatches.",
    ),
    Command(
        "timeline", "show who held each GPU, and why",
        [
            _job(required=False),
            Option(["--html"], metavar="FILE", help="write a self-contained page"),
            Option(["--trace"], metavar="FILE", help="write a trace for ui.perfetto.dev"),
            Option(["--save"], metavar="FILE", help="write the records, for --records"),
            Option(["--records"], metavar="FILE", help="read what --save wrote, instead of a job"),
        ],
        "It is drawn from the logs of the job's pods, as far back as their nodes keep them (usually 10 MiB each), its "
        "events and its status. Once the pods are gone, `reader` serves it from the store. There the slowest pod of "
        "each rung stands for all, and starts and failed steps are gaps between rows.",
    ),
    Command(
        "bundle", "write a support archive without secrets",
        [
            JOB,
            Option(["-f", "--file"], metavar="FILE", help="output file; JOB-bundle.tar.gz when absent"),
            Option(["--operator"], metavar="NAMESPACE", help="with the operator's pods, which run in that namespace"),
        ],
        "It has status, events, pods, logs and members' pages. Secrets are never read, and text that looks like one is "
        "replaced. It has no prompts or responses, unless a reward function or an engine logs them.",
    ),
    Command(
        "completion", "print a script for shell completion",
        [Argument(["shell"], type=Choice([*SCRIPTS]), help="shell")],
        "For bash: `source <(colocated-rl completion bash)`. `kubectl crlj` is completed by kubectl itself, which "
        "finds `kubectl_complete-crlj` on PATH.",
        is_of_cluster=False,
    ),
)  # fmt: skip
