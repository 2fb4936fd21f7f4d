"""A rank says that NCCL takes TCP where its pod has an RDMA device, by NCCL's own log and by its process's limit."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from colocated_rl_trainer.conformance.ranks import job_file
from colocated_rl_trainer.protocol.network import log_choice, network_fault
from colocated_rl_trainer.protocol.rank_server import watched_network
from colocated_rl_trainer.protocol.settings import RankSettings

LIMIT_BYTES = 64 << 10  # that of older container runtimes, which any process may set
UNLIMITED = resource.RLIM_INFINITY
LOOK = (
    "import os, pathlib, sys; from colocated_rl_trainer.protocol.network import network_fault; "
    "print(network_fault(pathlib.Path(sys.argv[1]), os.environ, devices=pathlib.Path(sys.argv[2])))"
)
# As NCCL 2.30 writes them: src/debug.cc has the beginning, src/init.cc and src/transport/net_ib/init.cc the rest. The
# second begins with NCCL_DEBUG_TIMESTAMP_FORMAT, which NCCL writes before warnings alone unless a job sets its levels.
BEGINS = "sums-gpu-0-0:41:97 [0] NCCL INFO "
BY_TCP = f"{BEGINS}NET/IB : No device found.\n{BEGINS}Using network Socket\n"
BY_IB = f"{BEGINS}Bootstrap: Using eth0:10.244.0.7<0>\n[2026-11-29 17:00:00] {BEGINS}Using network IB\n"
BY_PLUGIN = f"{BEGINS}Using network AWS Libfabric\n"


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A folder like /dev/infiniband of a pod with two network devices."""
    place = tmp_path / "infiniband"
    place.mkdir()
    for name in ("rdma_cm", "uverbs1", "uverbs0"):
        (place / name).touch()
    return place


def said(log: str, devices: Path, limit_bytes: int = LIMIT_BYTES, environment: Mapping[str, str] | None = None) -> str:
    path = devices.parent / "rank-0.nccl"
    path.write_text(log)
    return network_fault(path, environment or {}, devices=devices, limit_bytes=limit_bytes)


def test_a_process_with_a_limit_of_locked_memory_tells_it_before_nccl_has_chosen_with_what_to_do(devices: Path) -> None:
    """NCCL took TCP without an error, steps took several times as long, and nothing said why."""
    limited = ["prlimit", f"--memlock={LIMIT_BYTES}:{LIMIT_BYTES}", sys.executable, "-c", LOOK]
    done = subprocess.run(
        [*limited, str(devices.parent / "none"), str(devices)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = done.stdout.strip()
    assert found.startswith(f"NCCL may take TCP to other pods, and the pod has an RDMA device ({devices}/uverbs0)")
    assert f"locked memory is limited to {LIMIT_BYTES // 1024} KiB: set LimitMEMLOCK=infinity for containerd" in found
    assert found.endswith("To use TCP all the same, set NCCL_NET to Socket")


@pytest.mark.parametrize(
    ("limit_bytes", "words"),
    [
        (LIMIT_BYTES, "set LimitMEMLOCK=infinity for containerd on the node"),
        (UNLIMITED, "locked memory is not limited: see that the image has NCCL's plugin"),
    ],
)
def test_sockets_that_nccl_chose_are_told_with_what_the_limit_says_of_them(
    limit_bytes: int, words: str, devices: Path
) -> None:
    found = said(BY_TCP, devices, limit_bytes)
    assert "NCCL takes TCP to other pods" in found
    assert words in found


@pytest.mark.parametrize("log", [BY_IB, BY_PLUGIN, BY_TCP + BY_IB], ids=["ib", "plugin", "a later choice"])
def test_a_network_that_nccl_chose_is_no_fault_whatever_the_limit(log: str, devices: Path) -> None:
    assert "" == said(log, devices)


def test_no_limit_is_no_fault_before_nccl_has_chosen(devices: Path) -> None:
    assert "" == said("", devices, UNLIMITED)


@pytest.mark.parametrize(
    "environment", [{"NCCL_NET": "Socket"}, {"NCCL_NET": "socket"}, {"NCCL_IB_DISABLE": "1"}], ids=str
)
def test_tcp_that_the_job_asks_for_is_no_fault(environment: dict[str, str], devices: Path) -> None:
    assert "" == said(BY_TCP, devices, environment=environment)


def test_without_a_device_tcp_is_all_there_is(devices: Path) -> None:
    for device in devices.glob("uverbs*"):
        device.unlink()
    assert "" == said(BY_TCP, devices)


def test_nccl_is_asked_for_its_choice_unless_the_job_logs_its_messages_elsewhere(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.nccl"
    log.write_text(BY_TCP)
    asked: dict[str, str] = {}
    log_choice(log, asked)
    assert {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(log)} == asked
    assert not log.exists(), "of a former process"

    own = {"NCCL_DEBUG": "WARN"}
    log_choice(log, own)
    assert {"NCCL_DEBUG": "WARN"} == own


@pytest.mark.parametrize(
    ("device", "rank", "gpus", "is_watched"),
    [
        ("cuda:0", 0, 1, True),
        ("cuda:0", 2, 2, True),
        ("cuda:1", 3, 2, False),
        ("cuda:0", 0, 4, False),
        ("cpu", 0, 1, False),
    ],
    ids=["rank 0", "the first of another pod", "another of a pod", "all in one pod", "no device"],
)
def test_the_first_rank_of_each_pod_looks_at_the_network_between_them(
    device: str, rank: int, gpus: int, is_watched: bool, tmp_path: Path
) -> None:
    made: dict[str, Any] = job_file()
    job = tmp_path / "job.json"
    job.write_text(json.dumps(made | {"spec": made["spec"] | {"gpus": {"count": gpus}}}))
    settings = RankSettings(
        socket=tmp_path / f"trainer-{rank}.sock",
        config=tmp_path / "trainer.json",
        job=job,
        model=tmp_path,
        checkpoints=tmp_path,
        lineage=1,
        rank=rank,
        world_size=4,
        local_rank=rank % gpus,
        master_address="10.244.0.7",
        master_port=29502,
        device=device,
    )
    environment: dict[str, str] = {}
    assert "" == watched_network(settings, environment)()
    log = str(tmp_path / f"trainer-{rank}.nccl")
    assert (log if is_watched else None) == environment.get("NCCL_DEBUG_FILE")
