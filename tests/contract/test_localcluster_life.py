"""A local cluster begins and ends on command, by a signal and by kill -9, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import cluster
import pytest
from cluster import Cluster, binary
from traces import family, listens, living, traces, wait_until

pytestmark = pytest.mark.cluster

READY_S = 200.0
GONE_S = 90.0


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, as sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="cluster-"))
    yield path
    shutil.rmtree(path)


def run(*words: str | Path, keep_open: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [binary(), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=READY_S,
        check=False,
        pass_fds=[] if keep_open is None else [keep_open],
    )


def test_cluster_in_the_background_is_started_once_and_ends_on_command(directory: Path) -> None:
    """A second start with other options is refused, and the objects are there again after a restart."""
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
    path = run("kubeconfig", "--dir", directory).stdout.strip()
    assert f"{directory}/kubeconfig" == path
    made = run("--dir", directory, "kubectl", "create", "configmap", "remembered")
    assert made.returncode == 0, made.stderr
    assert listens(directory)

    assert 0 == run("down", "--dir", directory).returncode
    assert before == traces(directory)
    assert not listens(directory)
    assert "not running" in run("down", "--dir", directory).stdout
    assert 1 == run("kubeconfig", "--dir", directory).returncode

    with Cluster.up(directory, options=up[4:]) as restarted:
        assert restarted.get("configmap", "remembered")
        assert status["api"] == restarted.status()["api"]  # the same port, so a kubeconfig stays true
    assert before == traces(directory)


def test_cluster_in_the_background_holds_nothing_that_its_starter_had_open(directory: Path) -> None:
    """A lock that the caller of `up --detach` held used to stay locked for as long as the cluster ran."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    try:
        started = run("up", "--detach", "--dir", directory, keep_open=write)
        os.close(write)
        assert (0, b"") == (started.returncode, os.read(read, 1))  # its end: nobody has the other one any more
    finally:
        os.close(read)
        run("down", "--dir", directory)


def test_killed_supervisor_leaves_nothing(directory: Path) -> None:
    """kill -9 in the middle of work: a pod runs. Nothing but the directory stays."""
    before = traces(directory)
    killed = Cluster.up(directory)
    killed.kubectl("run", "one", "--image=machine", "--command", "--", "sleep", "1000")
    killed.kubectl("wait", "--for=condition=Ready", "pod/one", "--timeout=100s")
    pid = killed.supervisor.pid
    wait_until("it sleeps", lambda: "sleep 1000" in {one.words for one in family(pid)}, deadline_s=GONE_S)
    everyone = family(pid)
    assert listens(directory)
    assert before != traces(directory)

    killed.supervisor.kill()
    killed.supervisor.wait()
    wait_until(
        "nothing is left",
        lambda: not living(everyone) and traces(directory) == before,
        deadline_s=GONE_S,
        explain=lambda: f"{living(everyone)}",
    )
    assert not listens(directory)
    assert not killed.kubeconfig.exists()
    killed.down()


def test_cluster_ends_with_the_process_that_started_it(directory: Path) -> None:
    """A kill -9 of the test run, so to speak."""
    before = traces(directory)
    code = "import pathlib, sys, time, cluster; cluster.Cluster.up(pathlib.Path(sys.argv[1])); time.sleep(1000)"
    here = Path(cluster.__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", code, directory], cwd=here, env=os.environ | {"PYTHONPATH": str(here.parent)}
    ) as holder:
        wait_until("it is ready", lambda: (directory / "kubeconfig").exists(), deadline_s=READY_S)
        everyone = family(holder.pid)
        holder.kill()
    wait_until("nothing is left", lambda: not living(everyone) and traces(directory) == before, deadline_s=GONE_S)


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


def test_component_that_does_not_come_up_ends_the_cluster_with_its_last_words(directory: Path) -> None:
    before = traces(directory)
    (directory / "etcd").write_text("where a directory should be")
    failed = run("up", "--dir", directory)
    assert 1 == failed.returncode
    assert "etcd ended with exit code 1, 3 times before the cluster was ready; its log" in failed.stderr
    assert "not a directory" in failed.stderr
    assert before == traces(directory)


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
