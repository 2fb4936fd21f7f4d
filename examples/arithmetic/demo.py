"""`make demo`: a ColocatedRLJob from nothing to its end, on a Kubernetes cluster of this machine, and what it learned.

In order: the local cluster, the chart, the job, a view of it while it runs, a table, and a report. Ends with code 0 if
the job completed, learned what it should and was in time; with 1 if not; with 130 if it was interrupted. However it
ends, by a kill -9 too, the cluster ends with it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from colocated_rl_cli.base.errors import CliError
from colocated_rl_cli.cluster.api import Api
from colocated_rl_cli.cluster.following import JobWatch
from colocated_rl_cli.cluster.kubectl import Login
from colocated_rl_cli.evidence.records import Records
from colocated_rl_cli.live import shown
from examples.arithmetic.cluster import ClusterError, LocalCluster, remove_old
from examples.arithmetic.report import render, summary
from examples.arithmetic.verdict import ARITHMETIC, JOB_TOOK, Lesson, shortfalls

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
MODEL = ROOT / ".build/models/arithmetic"
IMAGES = ROOT / ".build/images.yaml"
CHART = ROOT / "charts/colocated-rl"
NAMESPACE = "default"
OPERATOR_NAMESPACE = "colocated-rl-system"
RELEASE = "colocated-rl"
GIVE_UP = 1.5  # times what a job may take


class NotSetUp(Exception):
    """Something that the demo runs is missing. The message says what makes it."""


@dataclass
class Demo:
    """One run; `out` gets its records, its report and, while it runs, its cluster."""

    out: Path
    console: Console
    job: dict[str, Any]
    model: Path = MODEL
    lesson: Lesson = ARITHMETIC
    took_s: dict[str, float] = field(default_factory=dict)

    def run(self) -> Records:
        """Raises ClusterError, NotSetUp."""
        for made in (self.model, IMAGES):
            if not made.exists():
                raise NotSetUp(f"there is no {made}: set-up makes it (`make help`)")
        self.say("cluster: starting etcd, API server, controllers, scheduler and kubelet, about 10 s")
        began = time.monotonic()
        remove_old(self.out / "cluster")
        with LocalCluster.up(self.out / "cluster", images=IMAGES) as cluster:
            began = self._note("cluster", began)
            self.say("chart: installing the operator, about 10 s")
            self.install(cluster)
            began = self._note("chart", began)
            self.say(f"job: {self.job['metadata']['name']}, {self.job['spec']['steps']} steps; to look at it yourself:")
            self.say(f"     {' '.join(cluster.command('kubectl', 'get', 'crlj,pods'))}")
            records = self.apply_and_watch(cluster)
            self.say("cluster: ending it")
        return records

    def install(self, cluster: LocalCluster) -> None:
        values = CHART / "ci/local-values.yaml"
        cluster.helm(
            *("install", RELEASE, CHART, "--namespace", OPERATOR_NAMESPACE, "--create-namespace"),
            *("--values", values, "--wait", "--timeout", "100s"),
        )

    def apply_and_watch(self, cluster: LocalCluster) -> Records:
        claim = self.job["spec"]["model"]["claim"]["name"]
        began = time.monotonic()
        objects = [*model_volume(claim, self.model, namespace=NAMESPACE), self.job]
        cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
        records = asyncio.run(self._watch(cluster, began))
        return replace(records, took_s=self.took_s)

    async def _watch(self, cluster: LocalCluster, began: float) -> Records:
        login = Login(program=tuple(cluster.command("kubectl")))
        async with Api.reach(login, NAMESPACE) as api:
            watch = JobWatch(api, self.job["metadata"]["name"], refuse_lost=cluster.refuse_lost)
            give_up_s = GIVE_UP * self.lesson.job_seconds_at_most
            try:
                async with shown(watch, self.console, screen=False):
                    await watch.until_ended(deadline_s=give_up_s)
            except TimeoutError:
                self.say(f"job: given up after {give_up_s:.0f} s")
            self._note(JOB_TOOK, began)
            return await watch.collect()

    def _note(self, name: str, began: float) -> float:
        now = time.monotonic()
        self.took_s[name] = now - began
        return now

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def model_volume(claim_name: str, model: Path, *, namespace: str) -> list[dict[str, Any]]:
    """A claim on a directory of this machine that holds a model, and its volume."""
    volume, claim = yaml.safe_load_all((HERE / "model-volume.yaml").read_text())
    volume["metadata"]["name"] = claim["metadata"]["name"] = claim["spec"]["volumeName"] = claim_name
    volume["spec"]["claimRef"] = {"name": claim_name, "namespace": namespace}
    volume["spec"]["hostPath"]["path"] = str(model)
    claim["metadata"]["namespace"] = namespace
    return [volume, claim]


def _print_summary(console: Console, records: Records) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in summary(records):
        table.add_row(name, value)
    console.print(table)


def demonstrate(about: str, *, out: Path, job: Path, model: Path, lesson: Lesson) -> int:
    """Run the program of a demo whose words may name another place and another job. Returns its exit code."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out, help="where records and report go")
    parser.add_argument("--job", type=Path, default=job, help="another job of the same model")
    args = parser.parse_args()
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    demo = Demo(args.out.resolve(), console, yaml.safe_load(args.job.read_text()), model, lesson)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        records = demo.run()
    except KeyboardInterrupt:
        demo.say("demo: interrupted")
        return 130
    except (ClusterError, CliError, NotSetUp) as error:
        demo.say(f"demo: {error}")
        return 1
    records.write(args.out / "records.json")
    (args.out / "report.html").write_text(render(records, lesson))
    _print_summary(console, records)
    missing = shortfalls(records, lesson)
    for one in missing:
        demo.say(f"demo: {one}")
    demo.say(f"report: {args.out / 'report.html'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(
        demonstrate(__doc__ or "", out=ROOT / ".build/demo", job=HERE / "job.yaml", model=MODEL, lesson=ARITHMETIC)
    )
