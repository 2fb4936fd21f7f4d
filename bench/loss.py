"""`make bench-loss`: how long the group of a job is without one of its two pods, and what takes the time.

The local cluster with a real API server and kubelet; engines and ranks are real, on the cores of this machine, with a
small model, and each step that gets no checkpoint is kept in memory. A pod is deleted by force, as that of a node that
is gone. Its successor has room at once. All moments are of the log lines of operator and agents, in seconds after the
deletion: how long a node takes to be missed, and how long a state of your size takes to be read, is no part.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

from e2e.conftest import OPERATOR_NAMESPACE, apply, installed
from e2e.running_job import KubectlCall, Line, RunningJob, wait_for

from colocated_rl_api.rungs import Rung
from colocated_rl_cli.evidence.records import read_line

LOSSES = 6
START_S, BACK_S = 900.0, 600.0
say = partial(print, file=sys.stdout, flush=True)

MADE = "another pod is made"
ANSWERS = "its agent answers"
LOADED = "all ranks have their state"
SERVES = "all engines serve"
TRAINED = "the group has trained a step again"


def main(losses: int) -> None:
    with tempfile.TemporaryDirectory(prefix="loss-") as place, installed(Path(place) / "c") as cluster:
        job = apply(cluster.kubectl, "two-pods.yaml")
        job.wait_for_step(1, deadline_s=START_S)
        found = [measured(cluster.kubectl, job, number % 2) for number in range(losses)]
        repeated = sum(each.repeated for each in found)
        say(f"seconds after the loss, {losses} losses, each pod in turn: least, median, most")
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


def measured(kubectl: KubectlCall, job: RunningJob, replica: int) -> Loss:
    """Delete a pod while all engines serve, and wait until its group has trained another step."""
    wait_for("all to serve", lambda: job.status["phase"] == "Rollout", deadline_s=BACK_S, explain=job.describe)
    lost = job.gpu_pods[replica]
    done, began = job.step, time.time()
    job.kubectl("delete", "pod", lost, "--force", "--grace-period=0", "--wait=false")

    def again() -> Loss | None:
        lines = sorted((*operator_lines(kubectl), *job.agent_lines()), key=lambda line: line.ts)
        found = Loss(began, [line for line in lines if line.ts >= began], lost=lost, done=done)
        return found if TRAINED in found.at else None

    return wait_for("the group to train", again, deadline_s=BACK_S, explain=job.describe)


def operator_lines(kubectl: KubectlCall) -> Iterator[Line]:
    text = kubectl("-n", OPERATOR_NAMESPACE, "logs", "deploy/colocated-rl")
    for line in filter(None, map(read_line, text.splitlines())):
        yield Line(line["ts"], line["event"], line.get("pod", ""), line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=LOSSES)
    main(parser.parse_args().losses)
