"""Anything that a running job needs is killed, or stands still for a while, at any rung, and the job goes on.

So it does when a second part is hit while the first is still coming back, and when the network between two pods loses
packets, cuts them off, is slow or delays. What it trained is then judged by an oracle (`oracle.py`). Faults follow from
a seed, so that a run can be had again: COLOCATED_RL_KILLS is their number, COLOCATED_RL_SEED the seed. Printed are, for
each kind and signal, the seconds to the next step and to the one after it, which needs what was hit, and where the
agents stood. `make soak ONLY=kills` goes on for an hour, and has the faults of the network, which need root, nft and
tc; with ONLY=network there are no others. All need the local cluster: a container can't kill its own first process, nor
its node's kubelet. What happens to nodes, volumes and the chart besides is in `test_soak.py`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster
from documents.blocks import under
from e2e.conftest import NAMESPACE, SCENARIOS
from e2e.oracle import LogReader, Witness, judge, rung_of
from e2e.pod_network import NetworkFault, faulty, missing_tools
from e2e.running_job import KubectlCall, RunningJob, wait_for
from e2e.terminal import RecordedTerminal
from traces import Process, family, living, send

from colocated_rl_api import names
from colocated_rl_api.faults import FaultKind
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.rungs import Rung

KILLS = int(os.environ.get("COLOCATED_RL_KILLS", "4"))
FOR_S = float(os.environ.get("COLOCATED_RL_KILLS_S", "0"))  # go on for as long, however many there were
ONLY_NETWORK = os.environ.get("COLOCATED_RL_ONLY") == "network"
SEED = int(os.environ.get("COLOCATED_RL_SEED", "7817"))  # an agent, an engine, trainers, the rollout controller
START_S = 900  # two engines and two trainers start on two cores
NEXT_STEP_S = 400  # after a kill: all of them may have to start again
RUNG_S = 60.0  # until a rung is reached; not every step of a job that recovers reaches each
STILL_S = 8.0
NETWORK_S = 20.0
LOOK_S = 0.2
TAIL_S = 0.003  # an agent stands at some rungs for 20 ms
WITH_SECOND = 4  # every so many faults one has a second
OF_NETWORK = 5  # and one of the network follows

IN_CONTAINERS = {  # by a part of the command line; engines and trainers may be those of the tests
    "operator": ("-m colocated_rl_operator",),
    "agent": ("-m colocated_rl_agent",),
    "runner": (f"{names.BIN_DIR}/runner",),
    "engine": ("sglang.launch_server",),
    "engine's scheduler": ("sglang::scheduler",),
    "engine's detokenizer": ("sglang::detokenizer",),
    "trainer rank": ("-m colocated_rl_trainer", "-m fakes.trainer"),
    "rollout controller": ("-m colocated_rl_rollout ",),
    "reward server or process": ("colocated_rl_rollout.tasks",),
}
RUNTIME = "container runtime"
COMPONENTS = {"etcd": "etcd", "API server": "kube-apiserver", "kubelet": "kubelet", RUNTIME: "cri"}  # of any node
KINDS = (*IN_CONTAINERS, *COMPONENTS)
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
RUNGS = TIME_SLICED.rungs

PAIRS = (
    ("agent", "agent"),
    ("agent", "operator"),
    ("agent", "rollout controller"),
    ("operator", "rollout controller"),
)  # of pods


@dataclass(frozen=True)
class KillFault:
    """A signal to a process. second: what is hit while that one is still coming back, or stands still."""

    kind: str
    number: signal.Signals
    rung: Rung
    second: KillFault | None = None

    def __str__(self) -> str:
        after = f", then {self.second.number.name} to {self.second.kind}" if self.second else ""
        return f"{self.number.name} to {self.kind} at {self.rung}{after}"

    @property
    def name(self) -> str:
        """Return kind and signal, of both parts."""
        after = f", {self.second.name}" if self.second else ""
        return f"{self.kind}, {self.number.name}{after}"

    def carry_out(self, cluster: Cluster, job: RunningJob, rng: random.Random, *, rung_s: float) -> float:
        """Let it happen at the rung. Returns when it began, in seconds since the epoch.

        The victim is found before the rung is reached: at some, pods stand for less time than that takes.
        """
        before = await_successor(cluster, self.kind, set())
        assert before, f"no process is a {self.kind}"
        victim = rng.choice(sorted(before))
        held = os.pidfd_open(victim.pid)
        await_rung(cluster, job, self.rung, deadline_s=rung_s)
        began, struck = time.time(), {victim}
        try:
            signal.pidfd_send_signal(held, self.number)
        except ProcessLookupError:  # it has ended, and the rung is reached by the next one
            struck = {strike(cluster, self.kind, self.number, rng)}
        finally:
            os.close(held)
        if self.second is not None:
            if self.number is signal.SIGKILL:
                await_successor(cluster, self.kind, before)
            struck.add(strike(cluster, self.second.kind, self.second.number, rng))
        if signal.SIGSTOP in (self.number, self.second and self.second.number):
            time.sleep(STILL_S)  # it is the fault
        send(living(struck), signal.SIGCONT)
        return began


@dataclass(frozen=True)
class Between:
    """A fault of the network between two pods, which are known by a process of each."""

    fault: NetworkFault
    rung: Rung
    pods: tuple[str, str]

    def __str__(self) -> str:
        return f"a network that {self.fault} between {' and '.join(self.pods)} at {self.rung}"

    @property
    def name(self) -> str:
        return f"network that {self.fault}"

    def carry_out(self, cluster: Cluster, job: RunningJob, rng: random.Random, *, rung_s: float) -> float:
        """Likewise."""
        await_rung(cluster, job, self.rung, deadline_s=rung_s)
        began = time.time()
        first, second = (sorted(victims_of(cluster, kind)) for kind in self.pods)
        one = rng.choice(first)
        other = rng.choice([process for process in second if process != one])
        with faulty(self.fault, one.pid, other.pid):
            time.sleep(NETWORK_S)  # it is the fault
        return began


def chosen_faults(seed: int) -> Iterator[KillFault | Between]:
    """Every kind comes up, in an order of the seed, before any comes up again, and then with the other signal."""
    return network_faults(seed) if ONLY_NETWORK else faults(seed, of_network=FOR_S > 0)


def faults(seed: int, *, of_network: bool, kinds: Sequence[str] = KINDS) -> Iterator[KillFault | Between]:
    further = random.Random(f"{seed}: what is beside them")
    between = network_faults(seed)
    for number, fault in enumerate(single_faults(seed, kinds), 1):
        if number % WITH_SECOND == 0:
            yield replace(fault, second=next(single_faults(further.random(), kinds)))
        else:
            yield fault
        if of_network and number % OF_NETWORK == 0:
            yield next(between)


def network_faults(seed: int) -> Iterator[Between]:
    rng = random.Random(f"{seed}: the network")
    while True:
        for fault, pods in zip(
            rng.sample([*NetworkFault], len(NetworkFault)), rng.sample(PAIRS, len(PAIRS)), strict=True
        ):
            yield Between(fault, rng.choice(RUNGS), pods)


def single_faults(seed: float, kinds: Sequence[str]) -> Iterator[KillFault]:
    rng = random.Random(seed)
    rungs = in_turn(rng, RUNGS)
    while True:
        first = {kind: rng.choice(SIGNALS) for kind in kinds}
        for chosen in (first, {kind: other for kind in kinds for other in SIGNALS if other is not first[kind]}):
            for kind in rng.sample(kinds, len(kinds)):
                yield KillFault(kind, chosen[kind], next(rungs))


def in_turn(rng: random.Random, rungs: Sequence[Rung]) -> Iterator[Rung]:
    """Each comes up before any comes up again."""
    while True:
        yield from rng.sample(rungs, len(rungs))


@contextlib.contextmanager
def under_faults(
    cluster: Cluster | None,
    kubectl: KubectlCall,
    name: str,
    change: Callable[[dict[str, Any]], None],
    *,
    exports: Path,
) -> Iterator[Witness]:
    """A witness of a job of two pods that has begun to train, forgives any number of failures and keeps all batches.

    change: called with its spec. exports: where the witness keeps them.
    """
    if cluster is None:
        pytest.fail("faults and their oracle need the local cluster: run without KUBECONFIG")
    manifest = yaml.safe_load((SCENARIOS / "two-pods.yaml").read_text())
    manifest["metadata"]["name"], spec = name, manifest["spec"]
    spec |= {"backoffLimit": 1000, "switch": {"engineCallSeconds": 20, "settleSeconds": 10}}
    spec["storage"]["keepBatches"] = True
    change(spec)
    running = RunningJob(kubectl, namespace=NAMESPACE, name=name)
    witness = Witness(cluster, running, exports)
    with witness.watching():
        kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=yaml.safe_dump(manifest))
        running.wait_for_step(2, deadline_s=START_S)
        yield witness
    running.delete()


@pytest.fixture(scope="module")
def witness(
    cluster: Cluster | None, kubectl: KubectlCall, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Witness]:
    def retry_at_once(spec: dict[str, Any]) -> None:
        spec["failurePolicy"] = {"backoffSeconds": 0}

    exports = tmp_path_factory.mktemp("exports")
    with under_faults(cluster, kubectl, "kills", retry_at_once, exports=exports) as witness:
        yield witness


@pytest.fixture
def job(witness: Witness) -> RunningJob:
    return witness.job


def test_f97_a_person_injects_faults_and_the_job_goes_on(
    cluster: Cluster, job: RunningJob, terminal: RecordedTerminal
) -> None:
    first, second = job.gpu_pods
    before = job.status
    await_rung(cluster, job, Rung.SERVING)
    for command in under("docs/failures.md", "Drills"):
        terminal(command.replace("120", "5").replace("60", "5"), sums=job.name, POD=second)
    job.wait_for_step(before["step"] + 2, deadline_s=NEXT_STEP_S)
    injected = {(line.pod, line.fields["reason"]) for line in job.agent_lines("fault injected")}
    at_first = FaultKind.ENGINE_CRASH, FaultKind.SLOW_WEIGHTS, FaultKind.GATE_CLOSED
    assert {(second, FaultKind.TRAINER_CRASH), *((first, kind) for kind in at_first)} == injected
    assert before["lineage"] < job.status["lineage"], "the trainers were started together again"
    assert first in {line.pod for line in job.agent_lines("engine gone")}


def test_whatever_is_killed_or_stands_still_the_job_goes_on_and_trains_each_sample_once(
    cluster: Cluster, witness: Witness, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not (FOR_S > 0 and missing_tools()), f"not installed: {missing_tools()}"
    job, until, chosen = witness.job, time.monotonic() + FOR_S, chosen_faults(SEED)
    took: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    rungs: Counter[str] = Counter()
    while rungs.total() < KILLS or time.monotonic() < until:
        fault = next(chosen)
        began = fault.carry_out(cluster, job, random.Random(SEED + rungs.total()), rung_s=RUNG_S)
        witness.look()
        step = witness.step_at(began)
        wait_for(
            f"two steps after {step}, after {fault}, seed {SEED}",  # the first may not have needed what was killed
            lambda step=step: job.step >= step + 2,  # type: ignore[misc]
            deadline_s=NEXT_STEP_S,
            explain=job.describe,
        )
        witness.look()
        seconds = tuple(witness.began(step + further) - began for further in (1, 2))
        took[fault.name].append(seconds)
        rungs[at := witness.rung_at(began)] += 1
        with capsys.disabled():
            after = " and ".join(f"{each:.0f} s" for each in seconds)
            sys.stdout.write(f"\n{fault}, struck at {at}: steps {step + 1} and {step + 2} after {after}\n")
    job.wait_for_step(job.step + 1, deadline_s=NEXT_STEP_S)
    verdict = judge(witness, world=2)
    with capsys.disabled():
        sys.stdout.write(f"\nseed {SEED}: {verdict}\n{table(took)}\n{by_rung(rungs)}\n")


def table(took: Mapping[str, Sequence[tuple[float, ...]]]) -> str:
    """Return a line for each kind and signal: how often, and the seconds to the next step and to the one after it."""
    lines = [f"{'seconds to the next step, and to the one after it':60}  times  median  longest  median  longest"]
    for name, seconds in sorted(took.items()):
        columns = [f"{statistics.median(each):6.0f}  {max(each):7.0f}" for each in zip(*seconds, strict=True)]
        lines.append(f"{name:60}  {len(seconds):5}  {'  '.join(columns)}")
    return "\n".join(lines)


def by_rung(rungs: Mapping[str, int]) -> str:
    return "struck at " + ", ".join(f"{rung} {rungs.get(rung, 0)}" for rung in RUNGS)


def await_rung(cluster: Cluster, job: RunningJob, rung: Rung, *, deadline_s: float = RUNG_S) -> None:
    """Wait until an agent reports the rung, or so many seconds have passed: then any moment will do.

    It reads the files of their logs: where kubectl shows a rung, most have already passed.
    """
    log, until = LogReader(cluster, job, names.AGENT_CONTAINER), time.monotonic() + deadline_s
    log.more()  # what was before
    while all(rung != rung_of(line) for line in log.more()) and time.monotonic() < until:
        time.sleep(TAIL_S)  # a file tells nobody that it has grown


def strike(cluster: Cluster, kind: str, number: signal.Signals, rng: random.Random) -> Process:
    """Send a signal to a process of a kind; wait for one, as what was hit before may have ended it."""
    victims = await_successor(cluster, kind, set())
    assert victims, f"no process is a {kind}"
    victim = rng.choice(sorted(victims))
    os.kill(victim.pid, number)
    return victim


def await_successor(cluster: Cluster, kind: str, before: set[Process]) -> set[Process]:
    """Processes of a kind that were not there before; none after RUNG_S: an engine waits for its trainers."""
    until = time.monotonic() + RUNG_S
    while not (found := victims_of(cluster, kind) - before) and time.monotonic() < until:
        time.sleep(LOOK_S)
    return found


def victims_of(cluster: Cluster, kind: str) -> set[Process]:
    component = COMPONENTS.get(kind, COMPONENTS[RUNTIME])
    pids = {pid for name, pid in cluster.processes().items() if name.partition("-node")[0] == component}
    found = {process for pid in pids for process in family(pid)}
    if kind in COMPONENTS:
        return {process for process in found if process.pid in pids}
    return {one for one in found if any(words in f"{one.words} " for words in IN_CONTAINERS[kind])}
