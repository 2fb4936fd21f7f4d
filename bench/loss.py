"""`make bench-loss`: how long the group of a job is without one of its two pods, and what takes the time.

The local cluster with a real API server and kubelet; engines and ranks are real, on the cores of this machine, with a
small model, and each step that gets no checkpoint is kept in memory. A pod is deleted by force, as that of a node that
is gone; or with SILENT=1 its node stands still, and its connections stay open. Its successor has room at once. All
moments are of the log lines of operator and agents, in seconds after the loss: how long a state of your size takes to
be read is no part.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from cluster import Cluster
from e2e.conftest import OPERATOR_NAMESPACE, apply, installed
from e2e.running_job import KubectlCall, Line, RunningJob, wait_for

from colocated_rl_api import names
from colocated_rl_api.rungs import Rung
from colocated_rl_cli.evidence.records import read_line

LOSSES = 6
START_S, BACK_S = 900.0, 600.0
LOOK_S = 5.0  # a look costs a quarter of a second of a processor that the job needs; the log lines have the moments
HOME, *OTHERS = NODES = ("node1", "node2", "node3")  # operator, store and a pod of the group stay at home
say = partial(print, file=sys.stdout, flush=True)

MADE = "another pod is made"
ANSWERS = "its agent answers"
LOADED = "all ranks have their state"
SERVES = "all engines serve"
TRAINED = "the group has trained a step again"


def main(losses: int, *, silent: bool) -> None:
    options, cordoned = ((f"--nodes={len(NODES)}",), OTHERS) if silent else ((), [])
    with (
        tempfile.TemporaryDirectory(prefix="loss-") as place,
        installed(Path(place) / "c", options=options, cordoned=cordoned) as cluster,
    ):
        for node in cordoned[:1]:
            cluster.kubectl("uncordon", node)
        job = apply(cluster.kubectl, "two-pods.yaml", **on_two_nodes() if silent else {})
        job.wait_for_step(1, deadline_s=START_S)
        for node in cordoned[1:]:  # it has room for whoever is lost
            cluster.kubectl("uncordon", node)
        found = [measured(cluster, job, number % 2, silent=silent) for number in range(losses)]
        repeated = sum(each.repeated for each in found)
        which = "of a node that falls silent" if silent else "each pod in turn"
        say(f"seconds after the loss, {losses} losses, {which}: least, median, most")
        for moment in (MADE, ANSWERS, LOADED, SERVES, TRAINED):
            took = sorted(each.at[moment] for each in found)
            say(f"{moment:38} {took[0]:6.1f} {median(took):6.1f} {took[-1]:6.1f}")
        say(f"steps trained again: {repeated}; restarts that count: {job.status['restarts']}")


class Loss:
    """One loss. at: seconds after it by what came about. repeated: steps that were trained a second time."""

    def __init__(self, began: float, lines: list[Line], *, lost: str, done: int) -> None:
        self.at: dict[str, float] = {}
        self.repeated = 0
        loaded: set[str] = set()
        for line in lines:
            after_s = line.ts - began
            match line.event:
                case "pod created":
                    self.at.setdefault(MADE, after_s)
                case "member connected" if line.fields["pod"] != lost:
                    self.at.setdefault(ANSWERS, after_s)
                case "trainers loaded":
                    loaded.add(line.pod)
                    if len(loaded) == 2:
                        self.at.setdefault(LOADED, after_s)
                case "rung reached" if line.fields.get("role") == "operator":
                    if line.fields["rung"] == Rung.SERVING and LOADED in self.at:
                        self.at.setdefault(SERVES, after_s)
                    elif line.fields["rung"] == Rung.TRAINED and SERVES in self.at:
                        self.at.setdefault(TRAINED, after_s)
                        self.repeated = max(0, done + 1 - line.fields["step"])


def on_two_nodes() -> dict[str, Any]:
    """Return what keeps the pods of the group apart, and the store at home."""
    others = {"matchLabels": {names.ROLE_LABEL: names.ROLE_GPU}}
    apart = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": others}]
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}}
    at_home = {"nodeSelector": {"kubernetes.io/hostname": HOME}}
    return {"podTemplates": {"gpu": {"spec": {"affinity": affinity}}, "rollout": {"spec": at_home}}}


def measured(cluster: Cluster, job: RunningJob, replica: int, *, silent: bool) -> Loss:
    """Lose a pod while all engines serve, and wait until its group has trained another step.

    silent: the pod that is not at home, with its node, which comes back then. Otherwise the pod of the replica.
    """
    wait_for("all to serve", lambda: job.status["phase"] == "Rollout", deadline_s=BACK_S, explain=job.describe)
    nodes = job.nodes
    lost = next(pod for pod, node in nodes.items() if node != HOME) if silent else job.gpu_pods[replica]
    done, began = job.step, time.time()
    loss: AbstractContextManager[None] = nullcontext()
    if silent:
        loss = cluster.silenced(nodes[lost])
    else:
        job.kubectl("delete", "pod", lost, "--force", "--grace-period=0", "--wait=false")

    def again() -> Loss | None:
        agents = [job.lines(pod, names.AGENT_CONTAINER) for pod in job.nodes if pod != lost]
        lines = sorted((*operator_lines(cluster.kubectl), *chain.from_iterable(agents)), key=lambda line: line.ts)
        found = Loss(began, [line for line in lines if line.ts >= began], lost=lost, done=done)
        return found if TRAINED in found.at else None

    with loss:
        wait_for("the step", lambda: job.step > done, deadline_s=BACK_S, explain=job.describe, every_s=LOOK_S)
        found = wait_for("the group to train", again, deadline_s=BACK_S, explain=job.describe)
    wait_for("the lost pod to end", lambda: lost not in job.gpu_pods, deadline_s=BACK_S, explain=job.describe)
    return found


def operator_lines(kubectl: KubectlCall) -> Iterator[Line]:
    text = kubectl("-n", OPERATOR_NAMESPACE, "logs", "deploy/colocated-rl")
    for line in filter(None, map(read_line, text.splitlines())):
        yield Line(line["ts"], line["event"], line.get("pod", ""), line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=LOSSES)
    parser.add_argument("--silent", action="store_true")
    given = parser.parse_args()
    main(given.losses, silent=given.silent)
