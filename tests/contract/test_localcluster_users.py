"""The local cluster of an ordinary user: of that user alone, with subordinate ids, and where none may have namespaces.

The suite's root lends the ids: that stands for /etc/subuid and newuidmap, which write the same into the same files.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from cluster import Cluster, binary
from traces import family, listens, living, traces, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.release]

USER = 61_234  # nobody's so far
SUBORDINATE = f"0 {USER} 1\n1 1000000 65536\n"
PODS = Path(__file__).parent / "localcluster_pods.yaml"
START_S = 100.0
READY_S = 200.0
GONE_S = 90.0


@pytest.fixture
def directory() -> Iterator[Path]:
    """The user's own, short, with a binary that the user may start wherever the checkout lies."""
    path = Path(tempfile.mkdtemp(prefix="cluster-"))
    shutil.copy2(binary(), path / "localcluster")
    shutil.chown(path, USER, USER)
    yield path
    shutil.rmtree(path)


def start(directory: Path, *before: str) -> subprocess.Popen[bytes]:
    """`localcluster up` as that user, by way of the command `before`; what it says is in `output.txt`."""
    with (directory / "output.txt").open("wb") as output:
        return subprocess.Popen(
            [*before, directory / "localcluster", "up", "--dir", directory / "c", "--stop-on-eof"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd="/",
            env={"PATH": os.environ["PATH"]},
            user=USER,
            group=USER,
            extra_groups=[],
            start_new_session=True,
        )


@contextmanager
def running(directory: Path, supervisor: subprocess.Popen[bytes]) -> Iterator[Cluster]:
    """Run the cluster until the end of the block, which may end it too. Afterwards nothing of it is left."""

    def output() -> str:
        return (directory / "output.txt").read_text()

    def is_ready() -> bool:
        assert supervisor.poll() is None, output()
        return "\nready after" in output()

    with supervisor:
        wait_until("it is ready", is_ready, deadline_s=READY_S, explain=output)
        cluster = Cluster(directory / "c", supervisor, directory / "localcluster")
        everyone = family(supervisor.pid)
        yield cluster
        cluster.down()
    wait_until(
        "nothing is left", lambda: not living(everyone), deadline_s=GONE_S, explain=lambda: f"{living(everyone)}"
    )
    assert not listens(directory / "c")


def wait_for_log(cluster: Cluster, pod: str, *lines: str) -> None:
    """Wait for the first lines of a pod's log: a pod is ready once it runs, and may have written nothing yet."""
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{pod}", f"--timeout={START_S:.0f}s")
    expected = list(lines)
    cluster.wait_for(
        f"log of {pod}", lambda: cluster.kubectl("logs", pod).splitlines()[: len(expected)] == expected, START_S
    )


def run_as_itself(pod: str) -> Sequence[str]:
    return "run", pod, "--image=machine", "--command", "--", "bash", "-c", "id -u; id -G; exec sleep 1000"


def test_user_without_other_ids_gets_a_cluster_whose_pods_run_as_that_user(directory: Path) -> None:
    before = traces(directory)
    supervisor = start(directory)
    with running(directory, supervisor) as cluster:
        assert "pods can run as one user only" in (directory / "output.txt").read_text()
        cluster.kubectl(*run_as_itself("one"))
        wait_for_log(cluster, "one", "0", "0")  # in its namespace
        sleeping = cluster.wait_for(
            "it sleeps", lambda: [one for one in family(supervisor.pid) if one.words == "sleep 1000"] or None, START_S
        )
        (process,) = sleeping
        assert USER == Path(f"/proc/{process.pid}").stat().st_uid  # on the machine
        assert "one" == cluster.kubectl("exec", "one", "--", "hostname").strip()
        supervisor.kill()
    assert before == traces(directory)


def test_user_with_subordinate_ids_gets_pods_of_any_user(directory: Path) -> None:
    """The pod of test_localcluster_pods.py that says most about its user."""
    before = traces(directory)
    manifest = next(one for one in yaml.safe_load_all(PODS.read_text()) if one["metadata"]["name"] == "user")
    with running(directory, start_with_ids(directory)) as cluster:
        cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))
        wait_for_log(cluster, "user", "2000", "2001", "2001 2002 2003", "root is read-only", "2002", "2002")
        assert "2000" == cluster.kubectl("exec", "user", "--", "id", "-u").strip()
        cluster.supervisor.send_signal(signal.SIGINT)
        assert 0 == cluster.supervisor.wait(GONE_S)
    assert before == traces(directory)


def start_with_ids(directory: Path) -> subprocess.Popen[bytes]:
    """Call `start` in a user namespace where the user is root and has other ids."""
    supervisor = start(directory, "unshare", "--user", "--", "sh", "-c", 'read -r go && exec "$@"', "sh")
    mine, its = (Path(f"/proc/{who}/ns/user") for who in ("self", supervisor.pid))
    wait_until("its own user namespace", lambda: its.readlink() != mine.readlink(), deadline_s=START_S)
    for kind in ("uid", "gid"):
        Path(f"/proc/{supervisor.pid}/{kind}_map").write_text(SUBORDINATE)
    assert supervisor.stdin is not None
    supervisor.stdin.write(b"go\n")
    supervisor.stdin.flush()
    return supervisor


def test_machine_that_refuses_namespaces_is_reported_in_one_line(directory: Path) -> None:
    """The kernel makes no user namespace for a process whose root is not that of its mounts."""
    elsewhere = directory / "root"
    elsewhere.mkdir()
    command = f'mount --rbind / {elsewhere} && exec chroot --userspec={USER}:{USER} {elsewhere} "$@"'
    refused = subprocess.run(
        ["unshare", "--mount", "--", "sh", "-c", command, "sh", directory / "localcluster", "up", "--dir", directory],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert 1 == refused.returncode
    assert refused.stderr.startswith("localcluster: this machine lets no ordinary user have namespaces")
    assert "run as root, or allow them" in refused.stderr
    assert 1 == refused.stderr.count("\n")
