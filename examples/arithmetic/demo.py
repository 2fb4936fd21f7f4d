"""`make demo`: a ColocatedRLJob from nothing to its end, on a Kubernetes cluster of this machine, and what it learned.

In order: the small model (made once), the local cluster, the chart, the job, a view of it while it runs, a table, and a
report. Ends with code 0 if the job completed, learned what it should and was in time; with 1 if not; with 130 if it was
interrupted. However it ends, the cluster ends with it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from examples.arithmetic.cluster import ClusterError, LocalCluster, local_cluster
from examples.arithmetic.figures import Line
from examples.arithmetic.live import live_view, plain_line
from examples.arithmetic.records import JOB_TOOK, Records
from examples.arithmetic.report import render, summary
from examples.arithmetic.verdict import JOB_SECONDS_AT_MOST, shortfalls
from examples.arithmetic.watching import JobWatch

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
MODEL = ROOT / ".build/models/arithmetic"
CLUSTER_BINARY = ROOT / ".build/bin/localcluster"
IMAGES = ROOT / ".build/images.yaml"
CHART = ROOT / "charts/colocated-rl"
NAMESPACE = "default"
OPERATOR_NAMESPACE = "colocated-rl-system"
RELEASE = "colocated-rl"
GIVE_UP_S = 1.5 * JOB_SECONDS_AT_MOST
REFRESHES_PER_S = 2


class ModelNotMade(Exception):
    """Its process has said why."""


@dataclass
class Demo:
    """One run; `out` gets its records, its report and, while it runs, its cluster."""

    out: Path
    console: Console
    job: dict[str, Any]
    took_s: dict[str, float] = field(default_factory=dict)

    async def run(self) -> Records:
        """Raises ClusterError, ModelNotMade."""
        began = time.monotonic()
        await self._make_model()
        began = self._note("model", began)
        self.say("cluster: starting etcd, API server, controllers, scheduler and kubelet, about 10 s")
        async with local_cluster(CLUSTER_BINARY, self.out / "cluster", images=IMAGES, say=self.say) as cluster:
            began = self._note("cluster", began)
            self.say("chart: installing the operator, about 10 s")
            await self._install(cluster)
            began = self._note("chart", began)
            self.say(f"job: {self.job['metadata']['name']}, {self.job['spec']['steps']} steps; to look at it yourself:")
            self.say(f"     {CLUSTER_BINARY.relative_to(ROOT)} --dir {self.out / 'cluster'} kubectl get crlj,pods")
            return await self._apply_and_watch(cluster)

    async def _make_model(self) -> None:
        """In a process of its own, which can be ended at any time and needs torch for itself alone."""
        command = (sys.executable, "-m", "examples.arithmetic.model", MODEL)
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, start_new_session=True)
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code:
            raise ModelNotMade(f"the model was not made: {' '.join(map(str, command))} ended with code {code}")

    async def _install(self, cluster: LocalCluster) -> None:
        values = str(CHART / "ci/local-values.yaml")
        await cluster.helm(
            *("install", RELEASE, str(CHART), "--namespace", OPERATOR_NAMESPACE, "--create-namespace"),
            *("--values", values, "--wait", "--timeout", "100s"),
        )

    async def _apply_and_watch(self, cluster: LocalCluster) -> Records:
        volume, claim = yaml.safe_load_all((HERE / "model-volume.yaml").read_text())
        volume["spec"]["hostPath"]["path"] = str(MODEL)
        began = time.monotonic()
        await cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([volume, claim, self.job]))
        watch = JobWatch(cluster, namespace=NAMESPACE, name=self.job["metadata"]["name"])
        with _shown(watch, self.console, began):
            try:
                await watch.until_ended(deadline_s=GIVE_UP_S)
            except TimeoutError:
                self.say(f"job: given up after {GIVE_UP_S:.0f} s")
        self._note(JOB_TOOK, began)
        await watch.collect()
        return Records(job=watch.job, lines=watch.lines, took_s=self.took_s)

    def _note(self, name: str, began: float) -> float:
        now = time.monotonic()
        self.took_s[name] = now - began
        return now

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _shown(watch: JobWatch, console: Console, began: float) -> Iterator[None]:
    """Show the job while this block runs: a view that stays in place on a terminal, lines elsewhere."""
    if not console.is_terminal:
        watch.on_line = lambda line: _print_plain(console, line)
        yield
        return

    def view() -> RenderableType:
        return live_view(watch.job, watch.lines, elapsed_s=time.monotonic() - began)

    with Live(get_renderable=view, console=console, refresh_per_second=REFRESHES_PER_S):
        yield


def _print_plain(console: Console, line: Line) -> None:
    if (text := plain_line(line)) is not None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _print_summary(console: Console, records: Records) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in summary(records):
        table.add_row(name, value)
    console.print(table)


async def _run(demo: Demo) -> Records:
    """As `demo.run`, and ended by SIGTERM as by Ctrl-C."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await demo.run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".build/demo", help="where records and report go")
    parser.add_argument("--job", type=Path, default=HERE / "job.yaml", help="another job of the same model")
    args = parser.parse_args()
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    demo = Demo(args.out.resolve(), console, yaml.safe_load(args.job.read_text()))
    try:
        records = asyncio.run(_run(demo))
    except (KeyboardInterrupt, asyncio.CancelledError):
        demo.say("demo: interrupted")
        return 130
    except (ClusterError, ModelNotMade) as error:
        demo.say(f"demo: {error}")
        return 1
    records.write(args.out / "records.json")
    (args.out / "report.html").write_text(render(records))
    _print_summary(console, records)
    missing = shortfalls(records)
    for one in missing:
        demo.say(f"demo: {one}")
    demo.say(f"report: {args.out / 'report.html'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
