"""How a local cluster begins and ends: on command, by a signal, by a kill -9; and that nothing of it is left behind."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cluster
import pytest
from cluster import Cluster, binary

READY_S = 200.0
GONE_S = 30.0

SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "net/ipv4/ip_forward",
)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, as sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="cluster-"))
    yield path
    shutil.rmtree(path)


def traces(directory: Path) -> dict[str, object]:
    """What a cluster could leave on the machine."""
    tag = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
    return {
        "settings": {name: Path("/proc/sys", name).read_text() for name in SETTINGS},
        "mounts": [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(directory) in line],
        "interfaces": sorted(path.name for path in Path("/sys/class/net").iterdir()),
        "processes": processes_of(directory),
        "cgroups": list(Path("/sys/fs/cgroup").glob(f"**/localcluster-{tag}")),
        "places": [Path(path).exists() for path in ("/var/lib/kubelet", "/var/log/pods", "/var/log/containers")],
    }


def processes_of(directory: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            words = path.read_bytes().decode(errors="replace").split("\0")
            if any(str(directory) in word for word in words):
                found.append(" ".join(words))
    return found


def wait_until(what: str, holds: Callable[[], bool], *, deadline_s: float) -> None:
    until = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.05)


def run(*words: str | Path, deadline_s: float = READY_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [binary(), *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s, check=False
    )


def api_answers(url: str) -> bool:
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(url.removeprefix("https://"), context=unchecked, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


def test_cluster_in_the_background_is_started_once_and_ends_on_command(directory: Path) -> None:
    """Also that a second start with other options is refused, and that objects are there again after a restart."""
    before = traces(directory)
    up = ("up", "--detach", "--dir", directory, "--extended-resource", "nvidia.com/gpu=2")
    assert 3 == run("status", "--dir", directory).returncode

    first = run(*up)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "ready after" in first.stdout
    again = run(*up)
    assert (0, "already running") == (again.returncode, again.stdout[:15])
    other = run(*up, "--nodes", "2")
    assert other.returncode == 1
    assert "--nodes is 1 and not 2" in other.stderr
    foreground = run("up", "--dir", directory)
    assert "is in use by another supervisor" in foreground.stderr

    status = json.loads(run("status", "--json", "--dir", directory).stdout)
    assert ("ready", [{"name": "node1", "ready": True, "pods": 0}]) == (status["health"], status["nodes"])
    assert {"etcd", "kube-apiserver", "kubelet-node1", "cri-node1", "provisioner"} <= {
        part["name"] for part in status["components"] if part["pid"]
    }
    path = run("kubeconfig", "--dir", directory).stdout.strip()
    assert f"{directory}/kubeconfig" == path
    made = run("--dir", directory, "kubectl", "create", "configmap", "remembered")
    assert made.returncode == 0, made.stderr

    assert 0 == run("down", "--dir", directory).returncode
    assert before == traces(directory)
    assert not api_answers(status["api"])
    assert "not running" in run("down", "--dir", directory).stdout
    assert 1 == run("kubeconfig", "--dir", directory).returncode

    with Cluster.up(directory, extended_resources={"nvidia.com/gpu": 2}) as restarted:
        assert restarted.get("configmap", "remembered")
        assert status["api"] == restarted.status()["api"]  # the same port, so a kubeconfig stays true
    assert before == traces(directory)


def test_killed_supervisor_leaves_nothing(directory: Path) -> None:
    """kill -9 in the middle of work: a pod with a volume runs. Nothing but the directory stays."""
    before = traces(directory)
    killed = Cluster.up(directory)
    killed.kubectl("run", "one", "--image=machine", "--command", "--", "sleep", f"{os.getpid()}{time.time_ns()}")
    killed.kubectl("wait", "--for=condition=Ready", "pod/one", "--timeout=60s")
    api = killed.status()["api"]
    assert api_answers(api)
    assert before != traces(directory)

    killed.supervisor.kill()
    killed.supervisor.wait()
    wait_until("nothing is left", lambda: traces(directory) == before, deadline_s=GONE_S)
    assert not api_answers(api)
    assert not killed.kubeconfig.exists()
    assert subprocess.run(["pgrep", "-f", f"sleep {os.getpid()}"], check=False, stdout=subprocess.DEVNULL).returncode
    killed.down()


def test_cluster_ends_with_the_process_that_started_it(directory: Path) -> None:
    """A kill -9 of the test run, so to speak."""
    before = traces(directory)
    code = "import pathlib, sys, time, cluster; cluster.Cluster.up(pathlib.Path(sys.argv[1])); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", code, directory], cwd=Path(cluster.__file__).parent) as holder:
        wait_until("it is ready", lambda: (directory / "kubeconfig").exists(), deadline_s=READY_S)
        holder.kill()
    wait_until("nothing is left", lambda: traces(directory) == before, deadline_s=GONE_S)


def test_interrupt_while_starting_leaves_nothing(directory: Path) -> None:
    before = traces(directory)
    with subprocess.Popen(
        [binary(), "up", "--detach", "--dir", directory], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as up:
        wait_until("the API server starts", lambda: (directory / "run").exists(), deadline_s=READY_S)
        up.send_signal(signal.SIGINT)
        _, error = up.communicate(timeout=GONE_S)
        assert b"before the cluster was ready" in error
    wait_until("nothing is left", lambda: traces(directory) == before, deadline_s=GONE_S)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0"], "--nodes 0: a cluster here has 1 to 99 nodes"),
        (["--extended-resource", "gpu=8"], 'extended resource "gpu=8": the name must be DOMAIN/NAME'),
        (["--images", "/no/such/file"], "image file: stat /no/such/file: no such file"),
    ],
)
def test_option_that_can_not_work_is_one_clear_line(directory: Path, words: list[str], message: str) -> None:
    done = run("up", "--dir", directory, *words)
    assert done.returncode == 1
    assert done.stderr.startswith(f"localcluster: {message}")
    assert 1 == done.stderr.count("\n")
