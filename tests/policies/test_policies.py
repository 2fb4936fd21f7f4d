"""A whole job under NetworkPolicies that kube-router enforces, and who reaches whom meanwhile.

Each question is asked of the network and of the model by which other tests go.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import OPERATOR_NAMESPACE, apply
from e2e.pod_network import OPEN_PORTS
from e2e.running_job import KubectlCall, RunningJob

from colocated_rl_api import names
from fakes.network import NetworkPlace, passes

START_S = 900.0  # engines and trainers of two pods start on two cores
STEPS_S = 600.0
STRANGERS = "strangers"
STRANGERS_PORT = 5432
METADATA = "169.254.169.254", 80  # where clouds have what gives a node's identity away
INTERNET = "93.184.215.14", 443
OUTSIDE = {"metadata": METADATA, "internet": INTERNET}
MEMBERS = (names.CONTROL_PORT, names.DATA_PORT, names.METRICS_PORT)
JOB = ("first", "second", "rollout")

ASK = """
import concurrent.futures, json, socket, sys
def connects(target):
    try:
        socket.create_connection(tuple(target), timeout=5).close()
    except OSError:
        return False
    return True
targets = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(32) as pool:
    print(json.dumps([*pool.map(connects, targets)]))
"""
LISTEN = """
import socket, sys, threading
def answer(listener):
    while True:
        listener.accept()[0].close()
for port in map(int, sys.argv[1:]):
    threading.Thread(target=answer, args=(socket.create_server(("", port)),)).start()
"""


@dataclass(frozen=True)
class Somebody:
    """A pod that asks and is asked, by what a policy knows of it."""

    kubectl: KubectlCall
    name: str
    namespace: str
    container: str
    address: str
    labels: Mapping[str, str]

    @staticmethod
    def of(kubectl: KubectlCall, pod: Mapping[str, Any], container: str) -> Somebody:
        metadata = pod["metadata"]
        address = pod["status"]["podIP"]
        return Somebody(
            kubectl, metadata["name"], metadata["namespace"], container, address, metadata.get("labels", {})
        )

    def place(self, port: int = 0) -> NetworkPlace:
        return NetworkPlace(self.address, self.labels, self.namespace, port)

    def python(self, code: str, *args: str) -> str:
        where = ("-n", self.namespace, "exec", "-i", self.name, "-c", self.container, "--", "python3", "-")
        return self.kubectl(*where, *args, stdin=code)

    def ports(self) -> list[int]:
        """Return those that it listens at for others."""
        found: list[int] = json.loads(self.python(OPEN_PORTS))
        return found

    def reaches(self, targets: list[NetworkPlace]) -> list[bool]:
        """Return for each whether a connection to it stands."""
        found: list[bool] = json.loads(self.python(ASK, json.dumps([(each.address, each.port) for each in targets])))
        return found


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall) -> Iterator[RunningJob]:
    running = apply(kubectl, "two-pods.yaml")
    running.wait_for_step(1, deadline_s=START_S)
    yield running
    running.delete()


@pytest.fixture(scope="module")
def everybody(kubectl: KubectlCall, job: RunningJob) -> dict[str, Somebody]:
    """Pods of the job, the operator's, a stranger in either namespace, and one in the other with the job's labels."""
    [operator] = json.loads(kubectl("-n", OPERATOR_NAMESPACE, "get", "pods", "-o", "json"))["items"]
    first, second = job.pods(names.ROLE_GPU)
    [rollout] = job.pods(names.ROLE_ROLLOUT)
    kubectl("create", "namespace", STRANGERS)
    found = {
        "operator": Somebody.of(kubectl, operator, "operator"),
        "first": Somebody.of(kubectl, first, names.GPU_CONTAINER),
        "second": Somebody.of(kubectl, second, names.GPU_CONTAINER),
        "rollout": Somebody.of(kubectl, rollout, names.ROLLOUT_CONTAINER),
        "neighbour": listener(kubectl, job.namespace, "neighbour", {}),
        "stranger": listener(kubectl, STRANGERS, "stranger", {}),
        "impostor": listener(kubectl, STRANGERS, "impostor", rollout["metadata"]["labels"]),
    }
    have_a_way_outside(found, provider=found["stranger"])
    return found


def listener(kubectl: KubectlCall, namespace: str, name: str, labels: Mapping[str, str]) -> Somebody:
    """Make a pod that listens at a port of its own, and at those outside for whoever has a way there."""
    ports = [STRANGERS_PORT, METADATA[1], INTERNET[1]]
    rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": name,
        "image": "colocated-rl/rollout:dev",
        "command": ["python3", "-c", LISTEN, *map(str, ports)],
        "securityContext": rights,
        "readinessProbe": {"tcpSocket": {"port": STRANGERS_PORT}, "periodSeconds": 1},
    }
    user = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels)},
        "spec": {"containers": [container], "securityContext": user, "terminationGracePeriodSeconds": 0},
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    kubectl("-n", namespace, "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=60s")
    found = json.loads(kubectl("-n", namespace, "get", "pod", name, "-o", "json"))
    return Somebody.of(kubectl, found, name)


def have_a_way_outside(all_: Mapping[str, Somebody], *, provider: Somebody) -> None:
    """Give addresses outside of the cluster to one pod, and a way there to each other one: else nobody gets out."""
    for name, somebody in all_.items():
        network = process_in_network_of(somebody)
        for address, _ in OUTSIDE.values():
            words = ("address" if somebody is provider else "route", "add", address)
            done = subprocess.run(
                ["nsenter", "--target", str(network), "--net", "ip", *words, "dev", "eth0"],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{name}: {done.stderr}"


def process_in_network_of(somebody: Somebody) -> int:
    """Return a process of this machine that has the pod's network."""
    wanted = somebody.python("import os; print(os.readlink('/proc/self/ns/net'))").strip()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "ns/net").readlink()) == wanted:
                return int(process.name)
        except OSError:
            continue  # it has ended
    raise AssertionError(f"no process of {somebody.name} is there")


@pytest.fixture(scope="module")
def answers(kubectl: KubectlCall, everybody: dict[str, Somebody]) -> dict[tuple[str, str], bool]:
    """Return whether each pod reaches each port, by their names, once the model has said the same as the network."""
    policies = json.loads(kubectl("get", "networkpolicies", "--all-namespaces", "-o", "json"))["items"]
    targets = {
        f"{name}:{port}": somebody.place(port)
        for name, somebody in everybody.items()
        if name in (*JOB, "neighbour")
        for port in somebody.ports()
    }
    found: dict[tuple[str, str], bool] = {}
    expected: dict[tuple[str, str], bool] = {}
    for name, somebody in everybody.items():
        own = {where: place for where, place in targets.items() if where.startswith(f"{name}:")}
        assert all(somebody.reaches([*own.values()])), f"somebody listens at each port of {name}"
        others = {where: place for where, place in targets.items() if where not in own}
        if somebody.name != "stranger":  # who has those addresses
            others |= {where: NetworkPlace(address, port=port) for where, (address, port) in OUTSIDE.items()}
        for (where, place), reached in zip(others.items(), somebody.reaches([*others.values()]), strict=True):
            found[name, where] = reached
            expected[name, where] = passes(policies, source=somebody.place(), target=place)
    assert expected == found
    return found


def test_only_the_operator_reaches_control_ports(answers: dict[tuple[str, str], bool]) -> None:
    assert {"operator"} == who_reach(answers, names.CONTROL_PORT)


def test_only_pods_of_the_job_reach_its_data_ports(answers: dict[tuple[str, str], bool]) -> None:
    assert {*JOB} == who_reach(answers, names.DATA_PORT)


def test_everybody_else_reaches_metrics_alone(answers: dict[tuple[str, str], bool]) -> None:
    assert {names.METRICS_PORT} == {
        port for port in MEMBERS for name in ("neighbour", "stranger", "impostor") if name in who_reach(answers, port)
    }


def test_only_pods_with_trainers_reach_the_ports_of_their_process_group(answers: dict[tuple[str, str], bool]) -> None:
    """It authenticates nobody. Its first port is the job's, the others are the kernel's choice."""
    of_group = {where for _, where in answers if where.startswith("first:")} - {f"first:{port}" for port in MEMBERS}
    assert of_group
    assert {"second"} == {name for (name, where), reached in answers.items() if reached and where in of_group}


def who_reach(answers: Mapping[tuple[str, str], bool], port: int) -> set[str]:
    """Return who reaches that port of any pod of the job; each of them has it."""
    wanted = {f"{name}:{port}" for name in JOB}
    assert wanted <= {where for _, where in answers}
    return {name for (name, where), reached in answers.items() if reached and where in wanted}


def test_a_job_that_names_nothing_outside_reaches_nobody_but_its_own_pods(
    answers: dict[tuple[str, str], bool],
) -> None:
    """The address of clouds' metadata and one of the internet are there for whoever no policy binds."""
    beyond = (*OUTSIDE, f"neighbour:{STRANGERS_PORT}")
    assert not any(answers[name, where] for name in JOB for where in beyond)
    assert all(answers["operator", where] for where in beyond)
    assert all(answers["neighbour", where] for where in OUTSIDE)


def test_the_job_trains_on_and_completes_behind_its_policies(
    job: RunningJob, answers: dict[tuple[str, str], bool]
) -> None:
    """Its two ranks are in two pods: their process group meets at a port, and goes on at ports of the kernel's."""
    assert answers
    job.wait_for_step(job.step + 1, deadline_s=STEPS_S)
    job.end_soon()
    job.wait_for_condition("Complete", deadline_s=STEPS_S)
    assert 0 == job.status["restarts"]
