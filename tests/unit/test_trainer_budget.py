"""The training state is estimated before it exists: by arithmetic, against what machine and container have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colocated_rl_api.parts import size_in_bytes
from colocated_rl_trainer.grpo.budget import Budget, choose_recomputing, host_memory
from colocated_rl_trainer.protocol.settings import ConfigError

GIB = 2**30
MIB = 1 / 1024  # in GiB
P = GIB // 4  # parameters that are a GiB in float32


@pytest.mark.parametrize(
    ("options", "device", "host"),
    [
        ({}, 4, 3),
        ({"with_moments": False}, 2, 1),
        ({"parameters_leave": False}, 4, 2),
        ({"updates_on_host": True}, 2, 3.5),
        ({"updates_on_host": True, "shared_by": 8, "ranks_in_pod": 8}, 0.25, 5),
        ({"updates_on_host": True, "on_cpu": True}, None, 4),
        ({"updates_on_host": True, "adapters": P // 8}, 0.75, 1.125),
        ({"keeps_reference": True}, 4, 4),
        ({"shared_by": 2}, 2, 1.5),
        ({"shared_by": 8, "ranks_in_pod": 8}, 0.5, 3),
        ({"ranks_in_pod": 8}, 4, 24),
        ({"adapters": P // 8}, 1, 0.875),
        ({"adapters": P // 8, "with_moments": False}, 0.75, 0.625),
        ({"adapters": P // 8, "keeps_reference": True}, 1, 0.875),
        ({"adapters": P // 8, "shared_by": 2, "ranks_in_pod": 2}, 0.75, 1.25),
        ({"adapters": P // 8, "parameters_leave": False}, 1, 0.5),
        ({"adapters": P // 8, "parameters_leave": False, "shared_by": 2, "ranks_in_pod": 2}, 0.75, 0.5),
        ({"with_moments": False, "parameters_leave": False, "ranks_in_pod": 2}, 2, 2),
        ({"adapters": P // 8, "on_cpu": True, "frozen_bytes": 4}, None, 1.5),
        ({"on_cpu": True}, None, 4),
        ({"on_cpu": True, "keeps_reference": True, "with_moments": False, "ranks_in_pod": 2}, None, 6),
        ({"one_pass": 5 * GIB}, 9, 3),
        ({"one_pass": 5 * GIB, "on_cpu": True, "ranks_in_pod": 2}, None, 18),
        ({"export_bytes": GIB // 2, "ranks_in_pod": 2}, 4, 7),
        ({"export_bytes": GIB // 2, "ranks_in_pod": 2, "on_cpu": True}, None, 9),
        ({"reference": GIB}, 4, 3),
        ({"reference": GIB, "on_cpu": True, "ranks_in_pod": 2}, None, 9),
        ({"mirrored": 4}, 4, 15 + 4 * MIB),
        ({"mirrored": 4, "shared_by": 2, "ranks_in_pod": 2, "on_cpu": True}, None, 10 + 4 * MIB),
        ({"mirrored": 2, "adapters": P // 8}, 1, 1.625 + 2 * MIB),
    ],
)
def test_state_takes(options: dict[str, Any], device: float | None, host: float) -> None:
    """Each number is in GiB: parameters and gradients 1 each, moments 2, a reference 1. Gradients have no copy on the
    host, where a model that is not shared is read.

    With adapters of an eighth of the parameters: 0.5 in bfloat16, which are the reference, and four times 0.125. A pod
    has two exports, each of its ranks a pass of its own, and on the CPU one reference that is another process.
    """
    found = Budget.of(P, **({"on_cpu": False} | options))
    assert (None if device is None else int(device * GIB), int(host * GIB)) == (found.device, found.host)


def test_what_fits_exactly_or_is_not_known_is_not_refused() -> None:
    budget = Budget(device=4 * GIB, host=3 * GIB)
    budget.refuse_what_never_fits(device_has=4 * GIB, host_has=3 * GIB)
    budget.refuse_what_never_fits(device_has=None, host_has=None)
    Budget(device=None, host=GIB).refuse_what_never_fits(device_has=0, host_has=GIB)


def test_what_a_reference_holds_of_each_device_is_not_there_for_a_step() -> None:
    budget = Budget(device=4 * GIB, host=3 * GIB, reference=GIB)
    budget.refuse_what_never_fits(device_has=5 * GIB, host_has=None)
    with pytest.raises(
        ConfigError, match=r"4\.0 GiB of each device beside the 1\.0 GiB of the reference, which has 4\.5"
    ):
        budget.refuse_what_never_fits(device_has=9 * GIB // 2, host_has=None)
    assert (True, False) == tuple(each.is_tight(device_has=6 * GIB, host_has=None) for each in (budget, _alone(budget)))


def _alone(budget: Budget) -> Budget:
    return replace(budget, reference=0)


def test_what_never_fits_is_refused_with_both_numbers_and_what_to_change() -> None:
    budget = Budget(device=4 * GIB, host=3 * GIB, exports=2 * GIB, one_pass=GIB)
    with pytest.raises(
        ConfigError, match=r"takes 4\.0 GiB of each device, which has 3\.5 GiB.* pass takes 1\.0 GiB.*microBatchTokens"
    ):
        budget.refuse_what_never_fits(device_has=7 * GIB // 2, host_has=None)
    with pytest.raises(ConfigError, match=r"take 3\.0 GiB of host memory, and there are 2\.0 GiB.* optimizer: SGD"):
        budget.refuse_what_never_fits(device_has=4 * GIB, host_has=2 * GIB)
    with pytest.raises(ConfigError, match=r"take 2\.0 GiB, and their volume has 1\.0 GiB: set weightSync\.sizeLimit"):
        budget.refuse_what_never_fits(device_has=4 * GIB, host_has=3 * GIB, exports_have=GIB)
    budget.refuse_what_never_fits(device_has=4 * GIB, host_has=3 * GIB, exports_have=2 * GIB)
    kept = Budget(device=4 * GIB, host=3 * GIB, mirrors=2 * GIB)
    with pytest.raises(ConfigError, match=r"2\.0 GiB the state that checkpoint\.inMemory keeps"):
        kept.refuse_what_never_fits(device_has=4 * GIB, host_has=2 * GIB)
    with pytest.raises(ConfigError, match=r"2\.0 GiB of memory .* volume has 1\.0 GiB: set checkpoint\.inMemory"):
        kept.refuse_what_never_fits(device_has=4 * GIB, host_has=3 * GIB, mirrors_have=GIB)
    kept.refuse_what_never_fits(device_has=4 * GIB, host_has=3 * GIB, mirrors_have=2 * GIB)


@pytest.mark.parametrize(
    ("wanted", "on_cpu", "has", "expected"),
    [
        (None, False, 10, False),
        (None, False, 9.9, True),
        (None, True, 9.9, True),
        (None, True, None, False),
        (False, False, 1, False),
        (True, False, 100, True),
    ],
)
def test_activations_are_computed_again_as_wanted_or_where_keeping_them_is_tight(
    wanted: bool | None, on_cpu: bool, has: float | None, expected: bool
) -> None:
    """Eight GiB of ten are room enough. Where a device computes, the host's memory says nothing, and the reverse."""
    kept = Budget(None, host=8 * GIB) if on_cpu else Budget(device=8 * GIB, host=1000 * GIB)
    again = Budget(device=GIB, host=GIB)
    size = None if has is None else int(has * GIB)
    memory = {"device_has": None, "host_has": size} if on_cpu else {"device_has": size, "host_has": GIB}

    chosen = choose_recomputing(wanted, lambda recomputes: again if recomputes else kept, **memory)

    assert (expected, again if expected else kept) == chosen


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [("8Gi", 8 * GIB), ("1.5G", 1_500_000_000), ("2", 2), ("500m", 1), ("3Ki", 3072), ("2k", 2000), ("1E", 10**18)],
)
def test_quantity_in_bytes(quantity: str, expected: int) -> None:
    assert expected == size_in_bytes(quantity)


@pytest.mark.parametrize(
    ("limit", "expected"), [("1073741824\n", GIB), ("9999999999999\n", 8 * GIB), ("max\n", 8 * GIB), (None, 8 * GIB)]
)
def test_host_memory_is_the_machines_or_the_containers(tmp_path: Path, limit: str | None, expected: int) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:        8388608 kB\nMemFree:         1 kB\n")
    if limit is not None:
        (tmp_path / "max").write_text(limit)
    assert expected == host_memory(machine=tmp_path / "meminfo", limit=tmp_path / "max")


def test_host_memory_that_nobody_says_is_not_known(tmp_path: Path) -> None:
    assert host_memory(machine=tmp_path / "none", limit=tmp_path / "none") is None
