"""These tests show what a pod sees and may do in the local cluster, as far as the
cluster does not take it from Kubernetes.

One cluster of two nodes for all, whose pods are in localcluster_pods.yaml. Needs root: an ordinary user's cluster has
one user.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, CommandFailed, kubernetes_release
from traces import family, living

pytestmark = pytest.mark.cluster

MANIFESTS = Path(__file__).parent / "localcluster_pods.yaml"
START_S = 180.0  # for a pod, on a machine that is busy with all the others


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """Short, as sockets lie in it; only its owner may enter."""
    path = Path(tempfile.mkdtemp(prefix="cluster-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def repository(directory: Path) -> Path:
    """A directory that only its owner may enter, with an environment in it."""
    repository = directory / "private" / "repository"
    environment = repository / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "seen.py").write_text(f"WORD = 'imported'\nREPOSITORY = {str(repository)!r}\n")
    (repository / "secret").write_text("not for a container")
    repository.parent.chmod(0o700)
    return repository


@pytest.fixture(scope="module")
def cluster(directory: Path, repository: Path) -> Iterator[Cluster]:
    environment = repository / "environment"
    base = Path(sys.base_prefix)
    images: dict[str, Any] = {
        "machine": {},
        "configured": {
            "env": {"GREETING": "hello"},
            "entrypoint": ["bash", "-c"],
            "cmd": ['echo "$GREETING $PWD $(id -u):$(id -g)"; sleep 1000'],
            "workingDir": "/srv",
            "user": "1234:1235",
        },
        "environment": {
            "hide": ["/tmp", "/root", str(repository)],
            "binds": [f"{environment}:{environment}:ro"] + ([] if base == Path("/usr") else [f"{base}:{base}:ro"]),
            "entrypoint": [str(environment / "bin/python")],
        },
    }
    (directory / "images.yaml").write_text(json.dumps({"images": images}))
    with Cluster.up(
        directory / "c",
        images=directory / "images.yaml",
        options=("--nodes=2", "--extended-resource=nvidia.com/gpu=8", "--devices=4"),
    ) as cluster:
        cluster.kubectl("apply", "-f", MANIFESTS)
        yield cluster


def wait_for_log(cluster: Cluster, pod: str, expected: str, *, container: str = "c") -> None:
    def read() -> bool:
        last.append(cluster.kubectl("logs", pod, "-c", container))
        return last[-1] == expected

    last: list[str] = []
    try:
        cluster.wait_for(f"log of {pod}", read, START_S)
    except AssertionError:
        assert [expected] == last[-1:]  # pytest shows where they differ
        raise


def wait_until_ready(cluster: Cluster, *pods: str) -> None:
    names = [f"pod/{pod}" for pod in pods]
    cluster.kubectl("wait", "--for=condition=Ready", *names, f"--timeout={START_S:.0f}s", deadline_s=2 * START_S)


def wait_for_phase(cluster: Cluster, pod: str, phase: str) -> dict[str, Any]:
    return cluster.wait_for(
        f"{pod} is {phase}",
        lambda: found if (found := cluster.get("pod", pod))["status"]["phase"] == phase else None,
        START_S,
    )


def container_state(pod: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = pod["status"]["containerStatuses"][0]["state"]
    return state


# ---------------------------------------------------------------------------------------------------------- the machine
def test_components_are_processes_of_their_own_in_namespaces_of_their_own(cluster: Cluster) -> None:
    all_up = cluster.wait_for(
        "all are up", lambda: found if (found := cluster.status())["health"] == "ready" else None, START_S
    )
    pids = {part["name"]: part["pid"] for part in all_up["components"]}
    control_plane = {"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "provisioner", "devices"}
    assert control_plane | {"cri-node1", "cri-node2", "kubelet-node1", "kubelet-node2"} == pids.keys()
    assert len(pids) == len(set(pids.values()))
    for kind in ("mnt", "pid", "net"):
        ours = Path(f"/proc/self/ns/{kind}").readlink()
        assert ours not in {Path(f"/proc/{pid}/ns/{kind}").readlink() for pid in pids.values()}
    versions = [node["status"]["nodeInfo"]["kubeletVersion"] for node in cluster.get("nodes")["items"]]
    assert ["v" + ".".join(map(str, kubernetes_release()))] * 2 == versions


def test_secrets_are_for_their_owner_alone(cluster: Cluster) -> None:
    files = [cluster.kubeconfig, *(cluster.directory / "pki").iterdir(), cluster.directory / "logs/audit.log"]
    assert {} == {path: oct(mode) for path in files if (mode := path.stat().st_mode & 0o077)}


def test_api_server_refuses_a_stranger(cluster: Cluster) -> None:
    url = cluster.status()["api"] + "/api/v1/secrets"
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(url, headers={"Authorization": "Bearer guessed"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, context=unchecked, timeout=60)
    assert 401 == refused.value.code
    refused.value.close()


def test_root_in_a_container_can_not_change_the_machine(cluster: Cluster) -> None:
    wait_for_log(cluster, "machine-root", "settings are read-only\nno mounts\n0\n")
    pod = wait_for_phase(cluster, "machine-root", "Succeeded")
    assert "done\n" == container_state(pod)["terminated"]["message"]


def test_requests_are_audited(cluster: Cluster) -> None:
    """The log has user, verb, object and status of every request, and no bodies."""
    wait_for_log(cluster, "configured", "hello /srv 1234:1235\n")
    lines = (cluster.directory / "logs/audit.log").read_text().splitlines()
    events = [json.loads(line) for line in lines[:-1]]  # the last one may be in writing
    made = [
        (event["user"]["username"], event["responseStatus"]["code"])
        for event in events
        if event["verb"] == "create" and event.get("objectRef", {}).get("name") == "configured"
        if event["objectRef"]["resource"] == "pods" and "subresource" not in event["objectRef"]
    ]
    patched = {event["user"]["username"] for event in events if event["verb"] == "patch"}
    assert [("admin", 201)] == made
    assert {"system:node:node1", "system:node:node2"} <= patched
    assert not any("requestObject" in event for event in events)


# ---------------------------------------------------------------------------------------------------------- the network
def test_pods_of_two_nodes_have_a_loopback_and_a_range_each(cluster: Cluster) -> None:
    """Both listen on 127.0.0.1:30000; probes by HTTP, TCP and a command find both ready."""
    wait_until_ready(cluster, "web1", "web2")
    ip1, ip2 = (cluster.get("pod", name)["status"]["podIP"] for name in ("web1", "web2"))
    assert (["10", "244", "1"], ["10", "244", "2"]) == (ip1.split(".")[:3], ip2.split(".")[:3])
    for url, name in ((f"http://{ip1}:8000/name", "web1"), ("http://127.0.0.1:30000/name", "web2")):
        assert name == cluster.kubectl("exec", "web2", "--", "curl", "-s", url).strip()
    assert "eth0\nlo\n" == cluster.kubectl("exec", "web1", "--", "ls", "/sys/class/net")


def test_pod_reaches_the_api_server_as_its_service_account(cluster: Cluster) -> None:
    wait_until_ready(cluster, "web1")
    script = (
        "T=/var/run/secrets/kubernetes.io/serviceaccount; A=https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT;"
        'for path in pods/web1 secrets; do curl -s -o /dev/null -w "%{http_code} " --cacert $T/ca.crt'
        ' -H "Authorization: Bearer $(cat $T/token)" $A/api/v1/namespaces/default/$path; done'
    )
    assert "200 403 " == cluster.kubectl("exec", "web1", "--", "bash", "-c", script)


def test_nothing_else_is_reachable_and_fails_at_once(cluster: Cluster) -> None:
    wait_until_ready(cluster, "web1")
    script = (
        "import socket\n"
        "for attempt in (lambda: socket.create_connection(('192.0.2.1', 80)), lambda: socket.getaddrinfo('a.b', 80)):\n"
        "    try:\n"
        "        attempt()\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__)\n"
    )
    # who waited for an answer would wait for longer than there is: for a connection, and for a name in each domain; one
    # attempt at each, as the kernel limits how often it says that nobody listens
    patient = ("env", "RES_OPTIONS=timeout:30 attempts:1", "timeout", "60", "python3", "-")
    seen = cluster.kubectl("exec", "-i", "web1", "--", *patient, stdin=script)
    assert "OSError\ngaierror\n" == seen


def test_pod_in_the_nodes_network_sees_the_bridge(cluster: Cluster) -> None:
    wait_for_log(cluster, "node-network", "node2\npods0\n")


def test_port_forward_reaches_the_pods_loopback(cluster: Cluster) -> None:
    wait_until_ready(cluster, "web2")
    command = cluster.command("kubectl", "port-forward", "pod/web2", ":30000")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forward:
        assert forward.stdout is not None
        address = forward.stdout.readline().split()[2]
        with urllib.request.urlopen(f"http://{address}/name", timeout=60) as answer:
            assert b"web2\n" == answer.read()
        forward.kill()


def test_exec_passes_input_output_and_exit_code(cluster: Cluster) -> None:
    wait_until_ready(cluster, "web1")
    command = cluster.command("kubectl", "exec", "-i", "web1", "--", "bash", "-c", "cat; echo oops >&2; exit 3")
    done = subprocess.run(command, input="hi", capture_output=True, text=True, timeout=START_S, check=False)
    assert ("hi", 3) == (done.stdout, done.returncode)
    assert done.stderr.startswith("oops\n")


# ----------------------------------------------------------------------------------------------------- security context
def test_user_groups_capabilities_and_read_only_root(cluster: Cluster) -> None:
    expected = "2000\n2001\n2001 2002 2003\nroot is read-only\n2002\n2002\nCapBnd: 0000000000000000\nNoNewPrivs: 1\n"
    wait_for_log(cluster, "user", expected)
    seen = cluster.kubectl("exec", "user", "--", "bash", "-c", "id -u; id -G; grep CapBnd /proc/self/status")
    assert ["2000", "2001", "2002", "2003", "CapBnd:", "0" * 16] == seen.split()


def test_containers_share_processes_when_asked_to(cluster: Cluster) -> None:
    wait_for_log(cluster, "shared-processes", "pod-pause\n")


def test_memory_limit_kills_the_whole_container(cluster: Cluster) -> None:
    """Its first process too, which has little: as Kubernetes has it on version 2 of control groups."""
    ended = container_state(wait_for_phase(cluster, "too-much-memory", "Failed"))["terminated"]
    assert ("OOMKilled", 137) == (ended["reason"], ended["exitCode"])


def test_restricted_namespace_takes_restricted_pods_only(cluster: Cluster) -> None:
    # a controller gives a new namespace its ServiceAccount; before, no pod is admitted
    cluster.wait_for("an account", lambda: cluster.get("serviceaccount", "default", "-n", "restricted"), START_S)
    manifest: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "strict", "namespace": "restricted"},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "machine", "command": ["id", "-u"]}]},
    }
    with pytest.raises(CommandFailed, match='violates PodSecurity "restricted'):
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    manifest["spec"]["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    manifest["spec"]["containers"][0]["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    cluster.wait_for("it ran", lambda: cluster.kubectl("logs", "-n", "restricted", "strict") == "65532\n", START_S)


# --------------------------------------------------------------------------------------------------- images and volumes
def test_sidecar_is_up_before_and_told_to_end_after_the_container(cluster: Cluster) -> None:
    wait_for_log(cluster, "sidecar", "up\n")
    wait_for_phase(cluster, "sidecar", "Succeeded")
    wait_for_log(cluster, "sidecar", "told to end\n", container="side")


def test_memory_volume_replaces_the_pods_shared_memory(cluster: Cluster) -> None:
    wait_for_log(cluster, "memory-volume", "tmpfs\n      300\n")


def test_environment_in_a_hidden_private_directory_runs_as_a_user_without_an_entry(
    cluster: Cluster, repository: Path
) -> None:
    """Every user in the container may pass through the parents of an image's bind; on the machine they stay closed."""
    wait_for_log(cluster, "environment", "65532 / imported ['environment']\n")
    assert 0o700 == repository.parent.stat().st_mode & 0o777


def test_unknown_image_names_those_that_are_known(cluster: Cluster) -> None:
    def waiting() -> str | None:
        statuses = cluster.get("pod", "unknown-image")["status"].get("containerStatuses", [{}])
        reason = statuses[0].get("state", {}).get("waiting", {}).get("reason")
        return reason if reason in ("ErrImagePull", "ImagePullBackOff") else None

    cluster.wait_for("ErrImagePull", waiting, START_S)
    words = 'image "nowhere/else:9" is not in images.yaml, which has: configured, environment, machine'
    command = ("get", "events", "--field-selector=involvedObject.name=unknown-image")
    cluster.wait_for("an event", lambda: words in cluster.kubectl(*command), START_S)


def test_missing_program_is_a_start_error(cluster: Cluster) -> None:
    command = ("get", "events", "--field-selector=involvedObject.name=no-program")
    cluster.wait_for("an event", lambda: "executable file not found" in cluster.kubectl(*command), START_S)


def test_log_of_a_container_is_bounded_and_rotated(cluster: Cluster) -> None:
    """45 MB are written; at most three files of 10 MB stay, the older ones compressed, and the last line is there."""
    cluster.wait_for("the last line", lambda: cluster.kubectl("logs", "chatty", "--tail=1") == "the end\n", START_S)
    pod = cluster.get("pod", "chatty")
    folder = cluster.directory / f"nodes/{pod['spec']['nodeName']}/log/pods/default_chatty_{pod['metadata']['uid']}/c"

    def bounded() -> bool:
        try:
            sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        except FileNotFoundError:
            return False  # one has just got another name
        return "0.log" in sizes and len(sizes) in (2, 3) and sizes["0.log"] < 1 << 20 and sum(sizes.values()) < 30 << 20

    cluster.wait_for("rotated logs", bounded, START_S)


def test_claims_bind_and_data_moves_with_them_to_another_node(cluster: Cluster) -> None:
    wait_for_log(cluster, "writer", "2002\n")
    bound = {"data": "Bound", "kept": "Bound", "one-pod": "Bound"}

    def phases() -> dict[str, str]:
        return {claim["metadata"]["name"]: claim["status"]["phase"] for claim in cluster.get("pvc")["items"]}

    cluster.wait_for("bound claims", lambda: phases() == bound, START_S)
    claims = {claim["metadata"]["name"]: claim for claim in cluster.get("pvc")["items"]}
    volumes = {name: claim["spec"]["volumeName"] for name, claim in claims.items()}
    pod = wait_for_phase(cluster, "writer", "Succeeded")
    cluster.kubectl("delete", "pod", "writer")
    reader = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "reader"},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": "node2"},
            "restartPolicy": "Never",
            "volumes": [volume for volume in pod["spec"]["volumes"] if volume["name"] in "dk"],
            "containers": [
                {
                    "name": "c",
                    "image": "machine",
                    "command": ["cat", "/d/x", "/k/x"],
                    "volumeMounts": [{"name": "d", "mountPath": "/d"}, {"name": "k", "mountPath": "/k"}],
                }
            ],
        },
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(reader))
    wait_for_log(cluster, "reader", "data\nkept\n")
    cluster.kubectl("delete", "pod/reader", "pvc/data", "pvc/kept")

    def present() -> dict[str, str]:
        return {volume["metadata"]["name"]: volume["status"]["phase"] for volume in cluster.get("pv")["items"]}

    cluster.wait_for("reclaim Delete and Retain", lambda: present().get(volumes["kept"]) == "Released", START_S)
    cluster.wait_for("the deleted volume is gone", lambda: volumes["data"] not in present(), START_S)
    assert not (cluster.directory / "volumes" / volumes["data"]).exists()
    assert "kept\n" == (cluster.directory / "volumes" / volumes["kept"] / "x").read_text()


# ------------------------------------------------------------------------------------------------------- nodes, devices
def test_extended_resource_is_counted_on_each_node(cluster: Cluster) -> None:
    wait_until_ready(cluster, "gpu")

    def numbers() -> dict[str, str]:
        nodes = cluster.get("nodes")["items"]
        return {node["metadata"]["name"]: node["status"]["allocatable"]["nvidia.com/gpu"] for node in nodes}

    cluster.wait_for("eight on each", lambda: numbers() == {"node1": "8", "node2": "8"}, START_S)

    def is_too_much() -> bool:
        conditions = cluster.get("pod", "too-many-gpus")["status"].get("conditions", [])
        return any("Insufficient nvidia.com/gpu" in condition.get("message", "") for condition in conditions)

    cluster.wait_for("no node for more", is_too_much, START_S)


@pytest.mark.since_kubernetes(1, 34)
def test_containers_share_a_claim_of_two_devices(cluster: Cluster) -> None:
    wait_for_log(cluster, "claim", "2\n")
    wait_for_log(cluster, "claim", "2\n", container="d")


# ------------------------------------------------------------------------------- last, as it ends every pod of a node
def test_pods_start_anew_after_the_runtime_was_killed(cluster: Cluster) -> None:
    """The pods of the other node go on, and nothing of the old ones is left."""
    wait_until_ready(cluster, "web1", "web2", "user", "shared-processes")
    before = {name: cluster.get("pod", name)["status"]["containerStatuses"][0] for name in ("web1", "web2")}
    runtime = next(part["pid"] for part in cluster.status()["components"] if part["name"] == "cri-node1")
    of_before = {one for one in family(runtime) if one.pid != runtime}
    assert {"sleep 4711", "pod-pause"} <= {one.words for one in of_before}
    os.kill(runtime, 9)

    def restarted() -> dict[str, Any] | None:
        status: dict[str, Any] = cluster.get("pod", "web1")["status"]["containerStatuses"][0]
        return status if status["ready"] and status["containerID"] != before["web1"]["containerID"] else None

    status = cluster.wait_for("web1 runs again", restarted, START_S)
    assert 137 == status["lastState"]["terminated"]["exitCode"]
    assert before["web2"]["containerID"] == cluster.get("pod", "web2")["status"]["containerStatuses"][0]["containerID"]
    cluster.wait_for("no process of before", lambda: not living(of_before), START_S)
    cluster.wait_for("no interface of a pod that is gone", lambda: surplus_interfaces(cluster) <= 0, START_S)


def surplus_interfaces(cluster: Cluster) -> int:
    """Return how many more interfaces of pods than living pods there are; fewer while a pod waits for its next try."""
    living = [
        pod
        for pod in cluster.get("pods", "--all-namespaces")["items"]
        if pod["status"]["phase"] in ("Running", "Pending")
        if "podIP" in pod["status"] and "hostNetwork" not in pod["spec"]
    ]
    interfaces = cluster.kubectl("exec", "node-network", "--", "ls", "/sys/class/net").split()
    return len([name for name in interfaces if name.startswith("v")]) - len(living)
