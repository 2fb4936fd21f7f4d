"""Anything that a running job needs is killed, or stands still for a while, at any rung, and the job goes on.

So it does when a second part is hit while the first is still coming back, and when the network between two pods loses
packets, cuts them off, is slow or delays. What it trained is then checked by an oracle. Faults follow from a seed, so
that a run can be had again: COLOCATED_RL_KILLS is their number, COLOCATED_RL_SEED the seed. `make soak ONLY=kills` goes
on for an hour, and has the faults of the network, which need root, nft and tc; with ONLY=network there are no others.
All need the local cluster: a container can't kill its own first process, nor its node's kubelet. What happens to nodes,
volumes and the chart besides is in `test_soak.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import yaml
from cluster import Cluster, CommandFailed
from documents.blocks import under
from e2e.conftest import NAMESPACE, SCENARIOS
from e2e.pod_network import NetworkFault, faulty, missing_tools
from e2e.running_job import KubectlCall, RunningJob, wait_for
from e2e.terminal import RecordedTerminal
from traces import Process, family, living

from colocated_rl_api import names
from colocated_rl_api.faults import FaultKind
from colocated_rl_api.rungs import Rung

KILLS = int(os.environ.get("COLOCATED_RL_KILLS", "4"))
FOR_S = float(os.environ.get("COLOCATED_RL_KILLS_S", "0"))  # go on for as long, however many there were
ONLY_NETWORK = os.environ.get("COLOCATED_RL_ONLY") == "network"
SEED = int(os.environ.get("COLOCATED_RL_SEED", "139"))  # an agent, the rollout controller, an engine, a trainer
START_S = 900  # two engines and two trainers start on two cores
NEXT_STEP_S = 400  # after a kill: all of them may have to start again
RUNG_S = 60.0  # until a rung is reached; not every step of a job that recovers reaches each
STILL_S = 8.0
NETWORK_S = 20.0
LOOK_S = 0.2
WITH_SECOND = 4  # every so many faults one has a second
OF_NETWORK = 5  # and one of the network follows
BATCH = 16 * 4
MAX_STALENESS = 1

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
RUNGS = (Rung.SERVING, Rung.SEALED, Rung.CLOSED, Rung.DRAINED, Rung.RELEASED, Rung.TRAINED, Rung.EXPORTED, Rung.UPDATED)


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

    def carry_out(self, cluster: Cluster, rng: random.Random) -> None:
        before = victims_of(cluster, self.kind)
        struck = [strike(cluster, self, rng)]
        if self.second is not None:
            if self.number is signal.SIGKILL:
                await_successor(cluster, self.kind, before)
            struck.append(strike(cluster, self.second, rng))
        if signal.SIGSTOP in (self.number, self.second and self.second.number):
            time.sleep(STILL_S)  # it is the fault
        for process in living(set(struck)):
            os.kill(process.pid, signal.SIGCONT)


@dataclass(frozen=True)
class Between:
    """A fault of the network between two pods, which are known by a process of each."""

    fault: NetworkFault
    rung: Rung
    pods: tuple[str, str]

    def __str__(self) -> str:
        return f"a network that {self.fault} between {' and '.join(self.pods)} at {self.rung}"

    def carry_out(self, cluster: Cluster, rng: random.Random) -> None:
        first, second = (sorted(victims_of(cluster, kind)) for kind in self.pods)
        one = rng.choice(first)
        other = rng.choice([process for process in second if process != one])
        with faulty(self.fault, one.pid, other.pid):
            time.sleep(NETWORK_S)  # it is the fault


def chosen_faults(seed: int) -> Iterator[KillFault | Between]:
    """Every kind comes up, in an order of the seed, before any comes up again."""
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
    while True:
        shuffled = [*kinds]
        rng.shuffle(shuffled)
        for kind in shuffled:
            number = signal.SIGKILL if kind == RUNTIME else rng.choice((signal.SIGKILL, signal.SIGSTOP))
            yield KillFault(kind, number, rng.choice(RUNGS))


@dataclass
class Witness:
    """A Witness keeps what the agents logged about training beyond the life of their containers."""

    job: RunningJob
    lines: set[tuple[str, str]] = field(default_factory=set)

    def look(self) -> None:
        for pod in self.job.gpu_pods:
            for words in ((), ("--previous",)):
                with contextlib.suppress(CommandFailed):
                    logged = self.job.kubectl("logs", pod, "-c", names.AGENT_CONTAINER, *words)
                    self.lines |= {(pod, line) for line in logged.splitlines() if '"step trained"' in line}

    @property
    def trained(self) -> dict[tuple[int, int], list[int]]:
        """Steps in the order of their ends, by lineage and rank."""
        lines = sorted((json.loads(line) for _, line in self.lines), key=lambda line: float(line["ts"]))
        found = defaultdict(list)
        for line in lines:
            found[line["lineage"], line["rank"]].append(line["step"])
        return found


@contextlib.contextmanager
def under_faults(
    cluster: Cluster | None, kubectl: KubectlCall, name: str, change: Callable[[dict[str, Any]], None]
) -> Iterator[RunningJob]:
    """A job of two pods that has begun to train, forgives any number of failures and keeps all batches.

    change: called with its spec.
    """
    if cluster is None:
        pytest.fail("faults and their oracle need the local cluster: run without KUBECONFIG")
    manifest = yaml.safe_load((SCENARIOS / "two-pods.yaml").read_text())
    manifest["metadata"]["name"], spec = name, manifest["spec"]
    spec |= {"backoffLimit": 1000, "switch": {"engineCallSeconds": 20, "settleSeconds": 10}}
    spec["storage"]["keepBatches"] = True
    change(spec)
    kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=yaml.safe_dump(manifest))
    running = RunningJob(kubectl, namespace=NAMESPACE, name=name)
    running.wait_for_step(2, deadline_s=START_S)
    yield running
    running.delete()


@pytest.fixture(scope="module")
def job(cluster: Cluster | None, kubectl: KubectlCall) -> Iterator[RunningJob]:
    def retry_at_once(spec: dict[str, Any]) -> None:
        spec["failurePolicy"] = {"backoffSeconds": 0}

    with under_faults(cluster, kubectl, "kills", retry_at_once) as running:
        yield running


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
    cluster: Cluster, job: RunningJob, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not (FOR_S > 0 and missing_tools()), f"not installed: {missing_tools()}"
    witness, until, chosen = Witness(job), time.monotonic() + FOR_S, chosen_faults(SEED)
    done = 0
    while done < KILLS or time.monotonic() < until:
        fault = next(chosen)
        witness.look()
        await_rung(cluster, job, fault.rung)
        step, began = job.step, time.monotonic()
        fault.carry_out(cluster, random.Random(SEED + done))
        wait_for(
            f"two steps after {step}, after {fault}, seed {SEED}",  # the first may not have needed what was killed
            lambda step=step: job.step >= step + 2,  # type: ignore[misc]
            deadline_s=NEXT_STEP_S,
            explain=job.describe,
        )
        done += 1
        with capsys.disabled():
            sys.stdout.write(f"\n{fault}: from step {step} to {job.step} in {time.monotonic() - began:.0f} s\n")
    job.wait_for_step(job.step + 1, deadline_s=NEXT_STEP_S)
    assert_trained_once(job, witness)


def await_rung(cluster: Cluster, job: RunningJob, rung: Rung, *, deadline_s: float = RUNG_S) -> None:
    """Wait until a pod's agent reports the rung, or so many seconds have passed: then any moment will do."""
    words = ("-n", job.namespace, "logs", "--follow", "--tail=0", job.gpu_pods[0], "-c", names.AGENT_CONTAINER)
    with subprocess.Popen([*cluster.command("kubectl"), *words], stdout=subprocess.PIPE, bufsize=0) as follow:
        assert follow.stdout is not None
        heard, until = b"", time.monotonic() + deadline_s
        while f'"rung":"{rung}"'.encode() not in heard:
            ready, _, _ = select.select([follow.stdout], [], [], max(0.0, until - time.monotonic()))
            more = follow.stdout.read(1 << 16) if ready else b""
            if not more:
                break
            heard = heard[-256:] + more
        follow.kill()


def strike(cluster: Cluster, fault: KillFault, rng: random.Random) -> Process:
    """Send the fault's signal to a process of its kind; wait for one, as what was hit before may have ended it."""
    victims = await_successor(cluster, fault.kind, set())
    assert victims, f"no process is a {fault.kind}"
    victim = rng.choice(sorted(victims))
    os.kill(victim.pid, fault.number)
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


# ---------------------------------------------------------------------------------------------------------- the oracle
READ = """
import json, pathlib, sqlite3, sys
from safetensors.numpy import load_file
place = pathlib.Path(sys.argv[1])
db = sqlite3.connect(f'file:{place}/store.sqlite3?mode=ro', uri=True, timeout=60)
db.execute('BEGIN')  # before the files: those of a batch are there before its row
one = lambda sql: db.execute(sql).fetchone()[0] or 0
found = dict(
    kept=[step for (step,) in db.execute('SELECT step FROM batches ORDER BY step')],
    samples=one('SELECT count(*) FROM samples') + one('SELECT sum(count) FROM retired'),
    admitted=one('SELECT max(id) FROM samples'),
    failed=one("SELECT count(*) FROM samples WHERE state IN ('failed', 'discarded')")
    + one("SELECT sum(count) FROM retired WHERE state IN ('failed', 'discarded')"),
)
db.execute('COMMIT')
found['batches'] = batches = []
for step in found['kept']:
    batch = dict(samples=[], groups=[], oldest=step, newest=0, backwards=0, bad_logp=0)
    batches.append(batch)
    for path in sorted((place / 'batches').glob(f'{step}-*.safetensors')):
        columns, start = load_file(path), 0
        batch['samples'] += columns['sample'].tolist()
        batch['groups'] += columns['group'].tolist()
        for end in columns['sample_end'].tolist():
            mask = columns['loss_mask'][start:end] == 1
            made, logp = columns['token_step'][start:end][mask], columns['behaviour_logp'][start:end][mask]
            batch['oldest'] = min(batch['oldest'], int(made.min()))
            batch['newest'] = max(batch['newest'], int(made.max()))
            batch['backwards'] += int((made[1:] < made[:-1]).any())
            batch['bad_logp'] += int((~((logp <= 0) & (logp > -1e4))).sum())
            start = end
print(json.dumps(found))
"""


def assert_trained_once(job: RunningJob, witness: Witness, *, given_up: int = 0) -> None:
    """Check a job of two pods that runs: what it had reached before all of this is read."""
    step = job.step
    witness.look()
    found = json.loads(job.python(job.rollout_pod, names.ROLLOUT_CONTAINER, READ, names.STATE_DIR))
    assert_accounted(found, witness, step=step, ranks=2, given_up=given_up)


def assert_accounted(found: dict[str, Any], witness: Witness, *, step: int, ranks: int, given_up: int = 0) -> None:
    """Check this by the files of all batches, the store's rows and the agents' logs, not by what the job reports.

    found: what READ printed. step: that the job has reached. given_up: samples that may have failed, at most: those
    whose rewards were under way.
    """
    batches: list[dict[str, Any]] = found["batches"]
    assert [*range(1, len(batches) + 1)] == found["kept"], "a batch for each step"
    assert step <= len(batches)
    samples = [sample for batch in batches for sample in batch["samples"]]
    assert len(samples) == len(set(samples)), "no sample is in two batches"
    for number, batch in enumerate(batches, 1):
        assert (BATCH, BATCH // 4) == (len(batch["samples"]), len(set(batch["groups"]))), f"batch {number}"
        assert number - 1 - MAX_STALENESS <= batch["oldest"] <= batch["newest"] <= number - 1, f"batch {number}"
        assert (0, 0) == (batch["backwards"], batch["bad_logp"]), f"batch {number}"
    assert found["admitted"] == found["samples"], "every sample is in one state"
    assert given_up >= found["failed"], "no more samples were given up"
    assert {rank for _, rank in witness.trained} == {*range(ranks)}
    by_any: defaultdict[int, set[int]] = defaultdict(
        set
    )  # an agent that is away meanwhile says nothing of its own rank
    for (lineage, rank), steps in witness.trained.items():
        assert sorted(set(steps)) == steps, f"lineage {lineage}, rank {rank}"
        by_any[lineage].update(steps)
    for lineage, trained in by_any.items():
        assert [*range(min(trained), max(trained) + 1)] == sorted(trained), f"lineage {lineage}"
    assert {*range(1, step + 1)} <= set().union(*by_any.values()), "every step was trained"
