"""What the training state takes, before it is there: by arithmetic, against what machine and container have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colocated_rl_trainer.grpo.budget import Budget, host_memory
from colocated_rl_trainer.protocol.settings import ConfigError

GIB = 2**30
P = GIB // 4  # parameters that are a GiB in float32


@pytest.mark.parametrize(
    ("options", "device", "host"),
    [
        ({}, 4, 3),
        ({"with_moments": False}, 2, 1),
        ({"parameters_leave": False}, 4, 2),
        ({"keeps_reference": True}, 4, 4),
        ({"shared_by": 2}, 2, 1.5),
        ({"shared_by": 8, "ranks_in_pod": 8}, 0.5, 3),
        ({"ranks_in_pod": 8}, 4, 24),
        ({"adapters": P // 8}, 1, 0.875),
        ({"adapters": P // 8, "keeps_reference": True}, 1, 0.875),
        ({"adapters": P // 8, "shared_by": 2, "ranks_in_pod": 2}, 0.75, 1.25),
        ({"adapters": P // 8, "parameters_leave": False}, 1, 0.25),
        ({"adapters": P // 8, "on_cpu": True, "frozen_bytes": 4}, None, 1.5),
        ({"on_cpu": True}, None, 4),
        ({"on_cpu": True, "keeps_reference": True, "with_moments": False, "ranks_in_pod": 2}, None, 6),
    ],
)
def test_state_takes(options: dict[str, Any], device: float | None, host: float) -> None:
    """In GiB: parameters and gradients 1 each, moments 2, a reference 1; gradients have no copy on the host.

    With adapters of an eighth of the parameters: 0.5 in bfloat16, which are the reference, and four times 0.125.
    """
    expected = Budget(None if device is None else int(device * GIB), int(host * GIB))
    assert expected == Budget.of(P, **({"on_cpu": False} | options))


def test_pinned_copies_are_rounded_up_to_powers_of_two() -> None:
    """7.6 billion parameters have 28.3 GiB, and each copy of as much takes 32."""
    budget = Budget.of(7_600_000_000, on_cpu=False)
    assert (4 * 4 * 7_600_000_000, 3 * 32 * GIB) == (budget.device, budget.host)
    assert 3 * 4 * 7_600_000_000 + 4 * 7_600_000_000 == Budget.of(7_600_000_000, on_cpu=True).host


def test_what_fits_exactly_or_is_not_known_is_not_refused() -> None:
    budget = Budget(device=4 * GIB, host=3 * GIB)
    budget.refuse_what_never_fits(device_has=4 * GIB, host_has=3 * GIB)
    budget.refuse_what_never_fits(device_has=None, host_has=None)
    Budget(device=None, host=GIB).refuse_what_never_fits(device_has=0, host_has=GIB)


def test_what_never_fits_is_refused_with_both_numbers_and_what_to_change() -> None:
    budget = Budget(device=4 * GIB, host=3 * GIB)
    with pytest.raises(
        ConfigError, match=r"takes 4\.0 GiB of each device, which has 3\.5 GiB.* trainingState: Sharded"
    ):
        budget.refuse_what_never_fits(device_has=7 * GIB // 2, host_has=None)
    with pytest.raises(ConfigError, match=r"takes 3\.0 GiB of host memory, and there are 2\.0 GiB.* optimizer: SGD"):
        budget.refuse_what_never_fits(device_has=4 * GIB, host_has=2 * GIB)


@pytest.mark.parametrize(
    ("limit", "of_container", "expected"),
    [("1073741824\n", True, GIB), ("1073741824\n", False, 8 * GIB), ("max\n", True, 8 * GIB), (None, True, 8 * GIB)],
)
def test_host_memory_is_the_machines_or_the_containers(
    tmp_path: Path, limit: str | None, of_container: bool, expected: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:        8388608 kB\nMemFree:         1 kB\n")
    if limit is not None:
        (tmp_path / "max").write_text(limit)
    files = {"machine": tmp_path / "meminfo", "limit": tmp_path / "max"}
    assert expected == host_memory(of_container=of_container, **files)


def test_host_memory_that_nobody_says_is_not_known(tmp_path: Path) -> None:
    assert host_memory(of_container=True, machine=tmp_path / "none", limit=tmp_path / "none") is None
