"""The benchmark counts the memory of these processes, each as one part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.memory import Peak, family, kind_of


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("python3 -m sglang.launch_server --config /run/colocate/sock/engine-0.yaml", "engine"),
        ("sglang::scheduler_TP0", "engine"),
        ("python3 -m colocated_rl_trainer", "trainer rank"),
        ("/opt/colocated-rl/bin/python -m colocated_rl_rollout", "rollout controller"),
        ("python -P -W ignore -m colocated_rl_rollout.tasks.task_process", "task process of the rollout controller"),
        ("localcluster --dir /x kubectl get pods", "kubectl"),
        ("localcluster kube-apiserver --etcd-servers=x", "API server"),
        ("localcluster etcd /x", "other processes of the local cluster"),
        ("vim notes", None),
    ],
)
def test_process_is_known_by_its_command_line(words: str, kind: str | None) -> None:
    assert kind == kind_of(words)


def test_only_what_a_process_has_started_is_counted_with_it() -> None:
    words = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '1000'])"]
    with subprocess.Popen(words, process_group=0) as one, subprocess.Popen(["sleep", "1000"]) as another:
        try:
            while len(found := family(one.pid)) < 2:
                assert one.poll() is None
            assert Path(f"/proc/{one.pid}") == found[0]
            assert Path(f"/proc/{another.pid}") not in found
        finally:
            os.killpg(one.pid, signal.SIGKILL)
            another.kill()


def test_peak_keeps_the_largest_of_each() -> None:
    peak = Peak()
    peak.rise([3, 4])
    peak.rise([6])
    assert Peak(processes=2, largest=6, together=7) == peak
