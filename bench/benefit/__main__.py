"""`make bench-benefit`: how long whole jobs take to train on so many samples, with and without waiting for the longest.

The local cluster with a real API server and kubelet runs one pod, whose real engine and real trainer take turns on the
cores as they would on a GPU. The same job runs with `maxStaleness` 0, 1, 2 and 3, and with 1 and `interruption: Retry`,
where a response that a switch interrupts starts over. Beside them trl's GRPOTrainer trains the same model on the same
prompts, with the same rewards after the same time, on the same cores and no cluster: once it generates as it does by
itself, with transformers, and once by the same engine, which gets the new weights after each step.

The time begins when the first prompt may be generated, and ends when the last step is trained. Start-up is no part.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml
from rich.console import Console

from bench.benefit import judge
from bench.benefit.workload import question, write_model
from colocated_rl_api.holders import PodHolder
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_cli.draw.figures import batches_of, read_figures, staleness_tokens
from colocated_rl_cli.evidence.records import Records
from engines import ADMIN_KEY, engine_process
from examples.arithmetic.cluster import ClusterError, LocalCluster, remove_old
from examples.arithmetic.demo import IMAGES, NAMESPACE, Demo, NotSetUp, model_volume
from examples.arithmetic.verdict import ARITHMETIC
from fakes import serving
from setup.environments import PEERS
from setup.layout import CHECKOUT
from setup.toolchain import clean_environment

HERE = Path(__file__).parent
OUT = CHECKOUT.root / ".build/benefit"
FILES = "benefit-files"  # the claim of prompts and of the endpoint's program
PROMPTS = 512
START_S = 120.0
RUN_S = 1800.0
TRL_STEPS = 4  # of its own generation, each of which takes long; speeds are by sample
TRL, TRL_ENGINE = "trl, by transformers", "trl, by the same engine"


@dataclass(frozen=True)
class JobTook:
    """Describes one run. age: mean over tokens of how many steps behind the weights were that made them.

    seconds: of all steps. rollout: those of them in which nothing but rollout went on.
    """

    seconds: float
    rollout: float
    samples: int
    tokens: int
    age: float


def variants(job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the jobs by what is said of them."""
    found = {}
    for name, staleness, interruption in (
        ("maxStaleness 0", 0, "Resume"),
        ("maxStaleness 1", 1, "Resume"),
        ("maxStaleness 2", 2, "Resume"),
        ("maxStaleness 3", 3, "Resume"),
        ("maxStaleness 1, starting over", 1, "Retry"),
    ):
        one = found[name] = copy.deepcopy(dict(job))
        one["metadata"]["name"] += f"-{len(found)}"  # pods of the one before may not be gone yet
        one["spec"]["rollout"] |= {"maxStaleness": staleness, "interruption": interruption}
    return found


# ------------------------------------------------------------------------------------------------------------ our jobs
class JobsBench:
    """The local cluster, with the operator and the endpoint of rewards."""

    def __init__(self, cluster: LocalCluster, folder: Path, pod: Mapping[str, Any], console: Console) -> None:
        self._cluster = cluster
        self._folder = folder
        limit = replace(ARITHMETIC, job_seconds_at_most=RUN_S)  # a lesson, of which no more is used
        self._demo = Demo(folder, console, {}, folder / "model", limit)
        self._demo.install(cluster)
        self._url = self._begin_judge(pod)

    def run(self, job: dict[str, Any]) -> JobTook:
        job["spec"]["rollout"]["prompts"]["file"]["reward"]["http"]["url"] = self._url
        records = replace(self._demo, job=job).apply_and_watch(self._cluster)
        records.write(self._folder / "records.json")
        self._cluster.kubectl("delete", "colocatedrljob", job["metadata"]["name"], "--timeout=60s")
        return took(records, job["spec"]["steps"])

    def _begin_judge(self, pod: Mapping[str, Any]) -> str:
        objects = [*model_volume(FILES, self._folder / "files", namespace=NAMESPACE), pod]
        self._cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
        self._cluster.kubectl("wait", "pod/judge", "--for=condition=Ready", f"--timeout={START_S:.0f}s")
        address = self._cluster.kubectl("get", "pod", "judge", "-o", "jsonpath={.status.podIP}").strip()
        return f"http://{address}:8000/"


def took(records: Records, steps: int) -> JobTook:
    """Raises ValueError if the job did not train all its steps."""
    lines = records.lines
    serving = [one["ts"] for one in lines if one.get("event") == "rung reached" and one.get("rung") == Rung.SERVING]
    trained = [one["ts"] for one in lines if one.get("event") == "step trained" and one.get("step") == steps]
    if not serving or not trained:
        raise ValueError("the job has not trained all its steps: its status is in records.json")
    figures, began, ended = read_figures(lines), min(serving), max(trained)
    batches, ages = batches_of(lines), staleness_tokens(figures)
    tokens = sum(ages.values())
    served = [span for span in figures.spans if span.holder is PodHolder.ROLLOUT and span.start < ended]
    return JobTook(
        seconds=ended - began,
        rollout=sum(min(span.end, ended) - max(span.start, began) for span in served),
        samples=sum(batch.samples for batch in batches),
        tokens=tokens,
        age=sum(age * count for age, count in ages.items()) / tokens,
    )


# ----------------------------------------------------------------------------------------------------------------- trl
async def run_trl(folder: Path, job: Mapping[str, Any], engine: str | None) -> JobTook:
    """Return what one run of trl took. engine: where one listens; None: it generates by itself."""
    spec = job["spec"]
    case = {
        "model": str(folder / "model"),
        "prompts": [question(number) for number in range(PROMPTS)],
        "steps": spec["steps"] if engine else min(TRL_STEPS, spec["steps"]),
        "batch": spec["rollout"]["batchSize"], "groupSize": spec["rollout"]["groupSize"],
        "maxTokens": spec["rollout"]["maxResponseTokens"], "learningRate": spec["trainer"]["config"]["learningRate"],
        "threads": spec["trainer"]["config"]["threads"], "engine": engine, "adminKey": ADMIN_KEY,
    }  # fmt: skip
    async with serving.listening(judge.application()) as case["judge"]:
        (folder / "case.json").write_text(json.dumps(case))
        done = await asyncio.to_thread(
            subprocess.run, [CHECKOUT.python(PEERS), CHECKOUT.root / "tests/peers/trl_job.py", folder],
            env=clean_environment() | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, text=True, timeout=RUN_S,
            check=True, cwd=CHECKOUT.root,
        )  # fmt: skip
    return JobTook(**json.loads(done.stdout.splitlines()[-1]))


# ---------------------------------------------------------------------------------------------------------------- main
def prepare(folder: Path) -> None:
    for file in write_model(folder / "model").iterdir():
        file.chmod(0o644)  # pods run as users of their own
    files = folder / "files"
    files.mkdir(exist_ok=True)
    (files / "judge.py").write_text(Path(judge.__file__).read_text())
    (files / "prompts.jsonl").write_text(
        "".join(json.dumps({"question": question(number)}) + "\n" for number in range(PROMPTS))
    )


def show(runs: Mapping[str, Sequence[JobTook]]) -> None:
    """Print one row for each: medians over the turns."""
    print(f"{'':30} {'samples':>8} {'tokens of one':>14} {'age':>5} {'s':>7} {'rollout, s':>11} {'speed':>6}")
    first = median(one.seconds / one.samples for one in next(iter(runs.values())))
    for name, turns in runs.items():
        seconds, rollout = median(one.seconds for one in turns), median(one.rollout for one in turns)
        tokens, age = mean(one.tokens / one.samples for one in turns), mean(one.age for one in turns)
        figures = f"{turns[0].samples:8} {tokens:14.0f} {age:5.2f} {seconds:7.1f} {rollout:11.1f}"
        print(f"{name:30} {figures} {first * turns[0].samples / seconds:6.2f}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.benefit", description=__doc__)
    parser.add_argument("--turns", type=int, default=1, help="of all runs, one after another")
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--only", action="append", help="of the runs, by name")
    given = parser.parse_args(arguments)
    console = Console(stderr=True)
    job, pod = yaml.safe_load_all((HERE / "objects.yaml").read_text())
    job["spec"]["steps"] = given.steps or job["spec"]["steps"]
    jobs = variants(job)
    asked = [name for name in (*jobs, TRL_ENGINE, TRL) if name in (given.only or (*jobs, TRL_ENGINE, TRL))]
    OUT.mkdir(parents=True, exist_ok=True)
    prepare(OUT)
    runs: dict[str, list[JobTook]] = {name: [] for name in asked}
    try:
        for _ in range(given.turns):
            remove_old(OUT / "cluster")
            with LocalCluster.up(OUT / "cluster", images=IMAGES) as cluster:
                bench = JobsBench(cluster, OUT, pod, console)
                for name in asked:
                    if name in jobs:
                        runs[name].append(bench.run(copy.deepcopy(jobs[name])))
            if TRL_ENGINE in asked:
                flags = job["spec"]["rollout"]["engine"]["args"]
                with engine_process(OUT / "model", version=WeightVersion(0, 1), root=OUT, flags=flags) as engine:
                    engine.wait_until_up()
                    runs[TRL_ENGINE].append(asyncio.run(run_trl(OUT, job, engine.url)))
            if TRL in asked:
                runs[TRL].append(asyncio.run(run_trl(OUT, job, None)))
    except (ClusterError, NotSetUp, ValueError) as error:
        print(f"bench-benefit: {error}", file=sys.stderr)
        return 1
    show(runs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
