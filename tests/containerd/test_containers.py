"""These tests show what only containers have, in pods of one small image: their users, their limits and their ends."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from e2e.running_job import RunningJob

NAMESPACE = "containers"
READY_S, ENDED_S = 120.0, 240.0
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
SERVE = "import http.server as h; h.HTTPServer(('', 8080), h.SimpleHTTPRequestHandler).serve_forever()"
SERVES = {"readinessProbe": {"httpGet": {"port": 8080}, "periodSeconds": 1, "timeoutSeconds": 5}}
MISSING = {
    "tag": "localhost/colocated-rl/operator:missing",
    "digest": f"localhost/colocated-rl/operator@sha256:{'0' * 64}",
}
PROCESS = """
import json, os, resource, pathlib
status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
shm = os.statvfs("/dev/shm")
print(json.dumps({
    "ids": [os.getuid(), os.getgid(), sorted(os.getgroups())],
    "capabilities": {status[each].strip() for each in status if each.startswith("Cap")} == {16 * "0"},
    "no new privileges": status["NoNewPrivs"].strip(),
    "seccomp": status["Seccomp"].strip(),
    "root is writable": os.access("/", os.W_OK) or bool(os.statvfs("/").f_flag & os.ST_RDONLY) is False,
    "data": [oct(os.stat("/data").st_mode & 0o7777), os.stat("/data").st_gid, os.access("/data", os.W_OK)],
    "shm": shm.f_blocks * shm.f_frsize >> 20,
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "locked": resource.getrlimit(resource.RLIMIT_MEMLOCK),
}))
"""


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, images: dict[str, str], two: RunningJob, elsewhere: RunningJob) -> Iterator[str]:
    """It has the pods with which a kubelet takes its time, so that the last tests wait for what is left of it.

    The jobs of other tests start beside all of these, which hardly compute.
    """
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    with ExitStack() as pods:
        for name, image in MISSING.items():
            pods.enter_context(pod(cluster, f"missing-{name}", container(image, "")))
        pods.enter_context(pod_that_writes_more_than_it_may(cluster, images["operator"]))
        yield NAMESPACE


def container(image: str, code: str, **fields: Any) -> dict[str, Any]:
    command = ["/opt/colocated-rl/bin/python", "-c", code]
    return {"name": "main", "image": image, "command": command, "securityContext": RESTRICTED, **fields}


@contextmanager
def pod(cluster: Cluster, name: str, *containers: dict[str, Any], **spec: Any) -> Iterator[str]:
    """Made, and deleted at once afterwards."""
    user = {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65531}
    security = user | {"supplementalGroups": [4242], "seccompProfile": {"type": "RuntimeDefault"}}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": name}},
        "spec": {"restartPolicy": "Never", "securityContext": security, "containers": list(containers), **spec},
    }
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(body))
    try:
        yield name
    finally:
        cluster.kubectl("-n", NAMESPACE, "delete", "pod", name, "--ignore-not-found", "--grace-period=0", "--force")


def pod_that_writes_more_than_it_may(cluster: Cluster, image: str) -> AbstractContextManager[str]:
    code = "import time; open('/data/file', 'wb').write(bytes(64 << 20)); time.sleep(3600)"
    mounts = [{"name": "data", "mountPath": "/data"}]
    limits = {"limits": {"ephemeral-storage": "16Mi"}}
    main = container(image, code, volumeMounts=mounts, resources=limits)
    return pod(cluster, "disk", main, volumes=[{"name": "data", "emptyDir": {}}])


def status(cluster: Cluster, name: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get("-n", NAMESPACE, "pod", name)["status"]
    return found


def ended(cluster: Cluster, name: str) -> dict[str, Any]:
    """Return the state in which a pod's container terminated."""

    def look() -> dict[str, Any] | None:
        states = [each["state"].get("terminated") for each in status(cluster, name).get("containerStatuses", [])]
        return states[0] if states else None

    return cluster.wait_for(f"the end of {name}", look, ENDED_S)


def wait_until_ready(cluster: Cluster, *names: str) -> None:
    pods = (f"pod/{name}" for name in names)
    cluster.kubectl(
        "-n", NAMESPACE, "wait", *pods, "--for=condition=Ready", f"--timeout={READY_S:.0f}s", deadline_s=READY_S + 30
    )


def test_process_has_what_the_restricted_standard_leaves_it(
    cluster: Cluster, namespace: str, images: dict[str, str]
) -> None:
    """Groups of the pod on a volume, /dev/shm, and limits of open files and locked memory as containerd gives them."""
    mounts = [{"name": "data", "mountPath": "/data"}]
    with pod(
        cluster, "process", container(images["operator"], PROCESS, volumeMounts=mounts),
        volumes=[{"name": "data", "emptyDir": {}}],
    ) as name:  # fmt: skip
        ended(cluster, name)
        found = json.loads(cluster.kubectl("-n", namespace, "logs", name))
    [containerd] = [each["pid"] for each in cluster.status()["components"] if each["name"] == "containerd-node1"]
    assert limits_of(containerd) == {"files": found.pop("files"), "locked": found.pop("locked")}
    assert {
        "ids": [65532, 65532, [4242, 65531, 65532]],
        "capabilities": True,
        "no new privileges": "1",
        "seccomp": "2",
        "root is writable": False,
        "data": ["0o2777", 65531, True],
        "shm": 64,
    } == found


def limits_of(pid: int) -> dict[str, list[int]]:
    """Soft and hard ones of a process of this machine."""
    text = Path(f"/proc/{pid}/limits").read_text()
    named = {"files": "Max open files", "locked": "Max locked memory"}
    return {
        name: [int(each) for each in re.findall(rf"{words} +(\d+) +(\d+)", text)[0]] for name, words in named.items()
    }


def test_memory_for_shm_counts_against_the_size_that_a_pod_names(
    cluster: Cluster, namespace: str, images: dict[str, str]
) -> None:
    code = "import os; s = os.statvfs('/dev/shm'); print(s.f_blocks * s.f_frsize >> 20)"
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "96Mi"}}
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    main = container(images["operator"], code, volumeMounts=mounts)
    with pod(cluster, "shm", main, volumes=[volume]) as name:
        ended(cluster, name)
        assert "96" == cluster.kubectl("-n", namespace, "logs", name).strip()


@pytest.mark.parametrize("by", ["itself", "child"])
def test_a_container_beyond_its_memory_ends_as_oom_killed(
    cluster: Cluster, namespace: str, images: dict[str, str], by: str
) -> None:
    """The container ends so also where the kernel kills a child of its first process, which exits because of that."""
    grow = "held = bytearray(256 << 20)"
    of_child = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', '{grow}']).returncode != 0)"
    limits = {"resources": {"limits": {"memory": "64Mi"}}}
    main = container(images["operator"], grow if by == "itself" else of_child, **limits)
    with pod(cluster, f"memory-{by}", main) as name:
        assert ("OOMKilled", 137 if by == "itself" else 1) == tuple(
            ended(cluster, name)[each] for each in ("reason", "exitCode")
        )


def test_limits_change_while_a_container_runs(cluster: Cluster, namespace: str, images: dict[str, str]) -> None:
    limits = {"resources": {"limits": {"memory": "128Mi"}}}
    with pod(cluster, "resized", container(images["operator"], SERVE, **SERVES, **limits)) as name:
        wait_until_ready(cluster, name)
        resized = {"spec": {"containers": [{"name": "main", "resources": {"limits": {"memory": "256Mi"}}}]}}
        cluster.kubectl("-n", namespace, "patch", "pod", name, "--subresource=resize", "-p", json.dumps(resized))
        limit = ("sh", "-c", "cd /sys/fs/cgroup; cat memory.max || cat memory/memory.limit_in_bytes")
        cluster.wait_for(
            "the limit in its control group",
            lambda: str(256 << 20) == cluster.kubectl("-n", namespace, "exec", name, "--", *limit).strip(),
            ENDED_S,
        )
        [running] = status(cluster, name)["containerStatuses"]
        assert 0 == running["restartCount"]


def test_names_and_addresses_of_a_service_lead_to_a_pod_on_the_other_node(
    cluster: Cluster, namespace: str, images: dict[str, str]
) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "server", "namespace": namespace},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(service))
    ask = "import time, urllib.request as u\nfor host in ('server', 'server.containers.svc.cluster.local'):\n"
    ask += "    print(u.urlopen(f'http://{host}/', timeout=20).status)"
    with pod(cluster, "server", container(images["operator"], SERVE, **SERVES), nodeName="node1"):
        wait_until_ready(cluster, "server")
        with pod(cluster, "client", container(images["operator"], ask), nodeName="node2", restartPolicy="OnFailure"):
            cluster.wait_for("both answers", lambda: status(cluster, "client").get("phase") == "Succeeded", ENDED_S)
            assert ["200", "200"] == cluster.kubectl("-n", namespace, "logs", "client").split()


def test_ports_are_forwarded_over_a_websocket(cluster: Cluster, namespace: str, images: dict[str, str]) -> None:
    with pod(cluster, "forwarded", container(images["operator"], SERVE, **SERVES), nodeName="node2") as name:
        wait_until_ready(cluster, name)
        command = cluster.command("kubectl", "-v=8", "-n", namespace, "port-forward", f"pod/{name}", ":8080")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as forward:
            try:
                assert forward.stdout is not None
                port = re.findall(r"127\.0\.0\.1:(\d+) ->", forward.stdout.readline())[0]
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
                    assert 200 == answer.status
            finally:
                forward.terminate()
                _, output = forward.communicate(timeout=30)
    assert "portforward.k8s.io" in output
    assert "websocket" in output.lower()


def test_a_sidecar_ends_after_the_container_that_it_serves_within_the_grace_of_the_pod(
    cluster: Cluster, namespace: str, images: dict[str, str]
) -> None:
    code = "import signal, sys, time\ndef end(*_):\n    time.sleep({}); print('{} ends', flush=True); sys.exit()\n"
    code += "signal.signal(signal.SIGTERM, end); print('began', flush=True)\nwhile True: signal.pause()"
    sidecar = container(images["operator"], code.format(0, "sidecar"), restartPolicy="Always") | {"name": "sidecar"}
    main = container(images["operator"], code.format(2, "main"))
    with pod(cluster, "ordered", main, initContainers=[sidecar], terminationGracePeriodSeconds=60) as name:
        wait_until_ready(cluster, name)
        follow = cluster.command(
            "kubectl", "-n", namespace, "logs", "--follow", "--timestamps", "--all-containers", name
        )
        with subprocess.Popen(follow, stdout=subprocess.PIPE, text=True) as following:
            cluster.kubectl("-n", namespace, "delete", "pod", name, "--wait=false")
            output, _ = following.communicate(timeout=READY_S)
    times = {line.split(" ", 1)[1]: line.split(" ", 1)[0] for line in output.splitlines()}
    assert times["main ends"] < times["sidecar ends"]


@pytest.mark.parametrize("name", MISSING)
def test_an_image_that_is_not_there_is_waited_for_and_named(cluster: Cluster, namespace: str, name: str) -> None:
    def backs_off() -> str | None:
        waiting = status(cluster, f"missing-{name}")["containerStatuses"][0]["state"]["waiting"]
        return str(waiting["message"]) if waiting["reason"] == "ImagePullBackOff" else None

    assert MISSING[name] in cluster.wait_for("a back-off", backs_off, ENDED_S)


def test_a_pod_that_writes_more_than_it_may_is_evicted(cluster: Cluster, namespace: str) -> None:
    cluster.wait_for("its eviction", lambda: status(cluster, "disk").get("reason") == "Evicted", ENDED_S)
    assert "ephemeral local storage usage exceeds" in status(cluster, "disk")["message"]
