"""A job of four pods on three nodes reaches its last step, whatever happens to nodes, pods, volumes and the operator.

Nodes are drained, fall silent and come back, pods are evicted, the operator's chart is upgraded, devices break, volumes
fill up, and processes are killed, in an order that follows from COLOCATED_RL_SEED. Each fault begins once the job has
trained two steps since the end of the one before, and has all its pods. At last its `steps` are lowered, and the oracle
(`oracle.py`) judges what it trained. Printed are the time from the beginning of each fault to these two steps, and how
long the job was in each phase.

Once each kind of fault has come up, with the engine and the trainer of the tests: they compute nothing, and a driver
library of the tests reports that their devices break. `make soak` goes on for an hour with real ones, whose devices
break by a condition of their node, and with faults of the network. Needs root: the volumes of all claims are one small
file system in memory.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, CommandFailed
from e2e.conftest import NAMESPACE, installed, release, simulated_gpu_image, with_images
from e2e.oracle import Witness, judge
from e2e.pod_network import missing_tools
from e2e.running_job import KubectlCall, wait_for
from e2e.test_kills import FOR_S, KINDS, NEXT_STEP_S, SEED, Between, KillFault, faults, under_faults
from full_disk import FILL

from colocated_rl_api import names
from colocated_rl_api.failure import FailureCause
from fakes.device import FakeDevice

pytestmark = pytest.mark.release  # `make test-slow`

IS_REAL = os.environ.get("COLOCATED_RL_SOAK") == "real"
PODS, NODES = 4, 3
SIMULATED = "colocated-rl/simulated:dev"
OF_TESTS = tuple(kind for kind in KINDS if "'s " not in kind)  # the engine of the tests is one process
DEVICE = "/dev/shm"
BROKEN = "GPUHealthy"
VOLUMES_SIZE = "512m"
DRAINED_S = 300
LOST_S = 120.0 if IS_REAL else 75.0  # a node comes back after it, if the job has not gone on elsewhere before
FULL_S = 15.0
RUNG_S = 60.0 if IS_REAL else 10.0  # as for kills; but the engine of the tests is at some for too short a time
LOOK_S = 1.0
AWAY = "(no answer)"


class Installation:
    """The cluster with the chart as it is installed, and the file system of its claims."""

    def __init__(self, cluster: Cluster, witness: Witness, values: tuple[str, ...]) -> None:
        self.cluster = cluster
        self.witness = witness
        self.job = witness.job
        self._values = values
        self._upgrades = 0

    @property
    def volumes(self) -> Path:
        return self.cluster.directory / "volumes"

    def upgrade(self) -> None:
        """The operator's pod is another one each time."""
        self._upgrades += 1
        release(self.cluster, "upgrade", values=(*self._values, f"podAnnotations.upgrade=u{self._upgrades}"))

    def some_node(self, rng: random.Random) -> str:
        return rng.choice(sorted({*self.job.nodes.values()}))

    def some_pod(self, rng: random.Random) -> str:
        return rng.choice(sorted(self.job.nodes))


# ---------------------------------------------------------------------------------------------------------- the faults
def drain(there: Installation, rng: random.Random) -> None:
    node = there.some_node(rng)
    words = ("--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={DRAINED_S}s")
    try:
        there.cluster.kubectl("drain", node, *words, deadline_s=DRAINED_S + 30)
    finally:
        there.cluster.kubectl("uncordon", node)


def evict(there: Installation, rng: random.Random) -> None:
    """Ask the Eviction API, which says no while the disruption budget of the job has nothing left."""
    pod = rng.choice([*sorted(there.job.nodes), there.job.rollout_pod])
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
    ask = partial(there.cluster.kubectl, "create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    wait_for(f"{pod} to be evicted", ask, deadline_s=NEXT_STEP_S, explain=there.job.describe)
    there.job.kubectl("wait", "--for=delete", f"pod/{pod}", "--timeout=110s")


def lose_node(there: Installation, rng: random.Random) -> None:
    """It comes back once the job has gone on without it, or LOST_S later: the operator or the store may be there."""
    with there.cluster.silenced(there.some_node(rng)):
        step, until = there.job.step, time.monotonic() + LOST_S
        while there.job.step < step + 2 and time.monotonic() < until:
            time.sleep(LOOK_S)


def upgrade(there: Installation, rng: random.Random) -> None:
    there.upgrade()


def break_device(there: Installation, rng: random.Random) -> None:
    """Its driver tells of an error, or its node has a condition, until the pod has left."""
    job, pod = there.job, there.some_pod(rng)
    node = job.nodes[pod]
    if IS_REAL:
        report_devices(there.cluster, node, "False")
    else:
        job.python(pod, names.GPU_CONTAINER, f"open('{DEVICE}/ecc.0', 'w').write('1')")

    def has_left() -> bool:
        return pod not in job.nodes and job.status.get("failures", {}).get("cause") == FailureCause.BAD_DEVICE

    wait_for(f"{pod} to leave for its device", has_left, deadline_s=NEXT_STEP_S, explain=job.describe)
    if IS_REAL:
        report_devices(there.cluster, node, "True")


def report_devices(cluster: Cluster, node: str, are_healthy: str) -> None:
    patch = {"status": {"conditions": [{"type": BROKEN, "status": are_healthy, "reason": "Soak"}]}}
    cluster.kubectl("patch", "node", node, "--subresource=status", "-p", json.dumps(patch))


def fill_weights(there: Installation, rng: random.Random) -> None:
    """Fill the volume of new weights of one pod."""
    job, pod = there.job, there.some_pod(rng)
    with suppress(CommandFailed):  # its container may end meanwhile
        job.python(pod, names.GPU_CONTAINER, FILL, names.WEIGHTS_DIR, "0")
    time.sleep(FULL_S)  # it is the fault

    def has_room() -> bool:
        if pod in job.nodes:
            job.kubectl("exec", pod, "-c", names.GPU_CONTAINER, "--", "rm", "-f", f"{names.WEIGHTS_DIR}/filler")
        return True

    wait_for(f"room in {pod}, or another in its place", has_room, deadline_s=NEXT_STEP_S, explain=job.describe)


def fill_claims(there: Installation, rng: random.Random) -> None:
    """Leave store and checkpoints not a byte."""
    subprocess.run([sys.executable, "-c", FILL, there.volumes, "0"], check=True, timeout=60, capture_output=True)
    time.sleep(FULL_S)  # it is the fault
    (there.volumes / "filler").unlink()


FAULTS: dict[str, Callable[[Installation, random.Random], None]] = {
    "drain of a node": drain,
    "eviction of a pod": evict,
    "lost node": lose_node,
    "upgrade of the chart": upgrade,
    "bad device": break_device,
    "full volume of weights": fill_weights,
    "full volumes of store and checkpoints": fill_claims,
}
PROCESS_AFTER = 2  # every so many of these, one of a process, or of the network
ROUND = len(FAULTS) + len(FAULTS) // PROCESS_AFTER


def schedule(seed: int) -> Iterator[str | KillFault | Between]:
    """Every kind comes up, in an order of the seed, before any comes up again."""
    rng = random.Random(f"{seed}: the soak")
    others = faults(seed, of_network=IS_REAL, kinds=KINDS if IS_REAL else OF_TESTS)
    while True:
        for number, name in enumerate(rng.sample([*FAULTS], len(FAULTS)), 1):
            yield name
            if number % PROCESS_AFTER == 0:
                yield next(others)


def name_of(fault: str | KillFault | Between) -> str:
    return fault if isinstance(fault, str) else fault.name


# ------------------------------------------------------------------------------------------------------------- the job
def on_three_nodes(spec: dict[str, Any]) -> None:
    """Pods prefer other nodes than their peers', and may share one while another is away."""
    template = spec["podTemplates"]["gpu"]["spec"]
    selected = {"matchLabels": {names.JOB_NAME_LABEL: "soak", names.ROLE_LABEL: names.ROLE_GPU}}
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    template |= {
        "terminationGracePeriodSeconds": 30,
        "topologySpreadConstraints": [spread | {"labelSelector": selected}],
    }
    spec |= {"replicas": PODS, "failurePolicy": {"backoffSeconds": 0}}
    del spec["evaluation"]
    if not IS_REAL:
        spec["gpus"] = {"count": 1, "image": SIMULATED}
        spec["trainer"] = {"command": ["python3", "-m", "fakes.trainer"]}
        del spec["rollout"]["engine"], spec["checkpoint"]["inMemory"]


@contextmanager
def file_system(place: Path) -> Iterator[None]:
    """In memory, and so small that it can be filled. There before the cluster begins, which sees it then."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={VOLUMES_SIZE}", "none", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("soak")
    for name in ("site", "exports"):
        (folder / name).mkdir()
    driver = FakeDevice(folder).environment
    image = simulated_gpu_image(folder / "site")
    image["binds"] += [f"{driver['LD_LIBRARY_PATH']}:/opt/driver:ro"]
    image["env"] |= driver | {"LD_LIBRARY_PATH": "/opt/driver", "FAKE_DEVICE": DEVICE}
    images = folder / "images.yaml"
    images.write_text(with_images({SIMULATED: image}))
    options = (f"--nodes={NODES}", f"--extended-resource=nvidia.com/gpu={PODS}")
    values = (f"nodes.badConditions={{{BROKEN}=False}}",)
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as place,  # short, as the cluster's sockets lie in it
        file_system(Path(place) / "volumes"),
        installed(Path(place), images=images, options=options, values=values) as cluster,
        under_faults(cluster, cluster.kubectl, "soak", on_three_nodes, exports=folder / "exports") as witness,
    ):
        yield Installation(cluster, witness, values)


@pytest.fixture
def kubectl(there: Installation) -> KubectlCall:
    return there.cluster.kubectl


# ------------------------------------------------------------------------------------------------------------ its story
@contextmanager
def phases_of(there: Installation) -> Iterator[dict[str, float]]:
    """Measure the seconds that the job is in each phase."""
    seconds: defaultdict[str, float] = defaultdict(float)
    over = threading.Event()
    words = ("-n", NAMESPACE, "get", names.PLURAL, there.job.name, "-o", "jsonpath={.status.phase}")

    def watch() -> None:
        since = time.monotonic()
        while not over.wait(LOOK_S):
            try:
                phase = there.cluster.kubectl(*words, deadline_s=10)
            except CommandFailed:
                phase = AWAY
            now = time.monotonic()
            seconds[phase] += now - since
            since = now

    with ThreadPoolExecutor(1) as executor:
        watching = executor.submit(watch)
        try:
            yield seconds
        finally:
            over.set()
        watching.result()


def endure(there: Installation, fault: str | KillFault | Between, rng: random.Random) -> tuple[int, float]:
    """Let it happen. Returns the step at its end, and the seconds from its beginning to two steps after its end."""
    job, began = there.job, time.time()
    if isinstance(fault, str):
        FAULTS[fault](there, rng)
    else:
        began = fault.carry_out(there.cluster, job, rng, rung_s=RUNG_S)
    step = wait_for("the step", lambda: job.status["step"], deadline_s=NEXT_STEP_S)  # there may be no API server
    wait_for(
        f"all pods and two steps after {step}, after {fault}, seed {SEED}",
        lambda: (now := job.status)["step"] >= step + 2 and now.get("readyReplicas") == PODS,
        deadline_s=NEXT_STEP_S,
        explain=job.describe,
    )
    return step, time.time() - began


def report(recoveries: dict[str, list[float]], seconds: dict[str, float]) -> str:
    lines = ["", f"{'seconds to two steps after the end of':60}  times  median  longest"]
    for name, took in sorted(recoveries.items()):
        lines.append(f"{name:60}  {len(took):5}  {statistics.median(took):6.0f}  {max(took):7.0f}")
    lines.append(f"{'seconds in phase':60}")
    for phase, spent in sorted(seconds.items(), key=lambda each: -each[1]):
        lines.append(f"{phase or 'none yet':60}  {spent:5.0f}  {100 * spent / sum(seconds.values()):5.1f} %")
    return "\n".join([*lines, ""])


@pytest.mark.usefixtures("kubectl")  # the operator's log is printed beside a failure
def test_a_job_of_four_pods_on_three_nodes_reaches_its_last_step_and_trains_each_sample_once(
    there: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not (IS_REAL and missing_tools()), f"not installed: {missing_tools()}"
    job = there.job
    assert (PODS, NODES) == (len(job.nodes), len({*job.nodes.values()}))
    recoveries: defaultdict[str, list[float]] = defaultdict(list)
    began = time.monotonic()
    with phases_of(there) as seconds:
        for number, fault in enumerate(schedule(SEED)):
            if number >= ROUND and time.monotonic() - began >= FOR_S:
                break
            step, took = endure(there, fault, random.Random(SEED + number))
            recoveries[name_of(fault)].append(took)
            with capsys.disabled():
                sys.stdout.write(f"\n{fault}: from step {step} to {job.step} in {took:.0f} s")
        job.end_soon()
        job.wait_for_condition("Complete", deadline_s=NEXT_STEP_S)
    status = job.get()["status"]
    with capsys.disabled():
        sys.stdout.write(f"\nseed {SEED}, {status['step']} steps, lineage {status['lineage']}")
        sys.stdout.write(report(recoveries, seconds))
    assert job.get()["spec"]["steps"] == status["step"]
    verdict = judge(there.witness, world=PODS, are_real=IS_REAL)
    with capsys.disabled():
        sys.stdout.write(f"{verdict}\n")
