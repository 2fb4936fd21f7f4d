"""A switch finds on an NVIDIA GPU what it needs: `make test-gpu` on a machine that has one, no part of `make test`.

16 GiB of device memory are enough. Figures are those of `make bench-gpu`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.gpu.hand_over import beside_a_copy_on_the_device
from bench.gpu.moves import free_bytes, make_state
from colocated_rl_agent.runner.runner import Xids, read_devices
from colocated_rl_trainer.conformance.checks import CHECKS, Check
from colocated_rl_trainer.conformance.ranks import TrainerGroup, TrainerKind
from colocated_rl_trainer.state.residency import MOMENTS, PARAMETERS
from fakes.tiny_model import write_tiny_model

MIB = 2**20
LEFT_AT_MOST = 64 * MIB  # by an offload, of the process's own: a few kernels that were loaded meanwhile
FAR = 4 * 2**30


@pytest.fixture
def device() -> torch.device:
    assert torch.cuda.is_available(), "torch finds no NVIDIA GPU: these tests are for a machine that has one"
    torch.zeros(1, device="cuda:0")  # the context, which no offload gives back
    return torch.device("cuda:0")


def test_an_offload_gives_the_device_back_and_an_onload_brings_every_bit(device: torch.device) -> None:
    before = free_bytes(device)
    state = make_state("0.5B", device)
    assert 0 == state.pageable_bytes, "all of it is pinned on the host"
    state.onload()
    kept = {kind: {name: part.cpu() for name, part in state.named(kind).items()} for kind in (PARAMETERS, *MOMENTS)}
    onloaded = free_bytes(device)
    state.offload()
    offloaded = free_bytes(device)
    assert before is not None
    assert onloaded is not None
    assert offloaded is not None
    assert before - onloaded >= state.size_bytes
    assert before - offloaded <= LEFT_AT_MOST

    state.onload()
    for kind, parts in kept.items():
        for name, part in state.named(kind).items():
            assert torch.equal(parts[name], part.cpu()), (kind, name)
    assert not state.gradients.any()


def test_the_runner_sees_what_comes_and_goes(device: torch.device) -> None:
    """It reads the driver's library, without torch: an engine's release and a trainer's offload are judged by it."""

    def used() -> int:
        measured = read_devices()
        assert measured is not None
        return int(measured[0]["used_bytes"])

    before = used()
    taken = torch.empty(FAR, dtype=torch.uint8, device=device)
    assert abs(used() - before - FAR) <= LEFT_AT_MOST
    del taken
    torch.cuda.empty_cache()
    assert abs(used() - before) <= LEFT_AT_MOST


def test_the_driver_tells_the_runner_of_xids_without_letting_it_wait() -> None:
    """A driver of a virtual GPU may refuse, and then none would ever come."""
    xids = Xids()
    assert xids.indices
    assert {} == xids.read()


def test_weights_come_to_another_process_as_they_are(device: torch.device) -> None:
    """They travel through shared memory and by CUDA's handles: the other process's digest equals that of the sender."""
    beside_a_copy_on_the_device("0.5B", device)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerGroup]:
    folder = tmp_path_factory.mktemp("t")
    command = [sys.executable, "-m", "colocated_rl_trainer"]
    model = write_tiny_model(folder / "model")
    kind = TrainerKind("reference", command, model, {"learningRate": 1e-3, "minibatches": 2})
    with TrainerGroup(kind, folder, size=1, device="cuda:0") as group:
        group.wait_loaded()
        group.onload()
        yield group


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_reference_trainer_conforms(trainer: TrainerGroup, check: Check) -> None:
    check(trainer)


def test_the_benchmark_measures_each_part(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--size", "0.5B"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    assert "not measured" not in done.stdout
