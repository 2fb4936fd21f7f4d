"""The agent reads the memory of its pod's devices, and waits so long for memory to come free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from colocated_rl_agent.runner.devices import GIB, Devices, MemoryHeld, freed_bytes, require_room, until_freed
from colocated_rl_agent.runner.runner_link import Device, RunnerLink
from colocated_rl_api.facts import DeviceFacts

TOTAL = 80 * GIB


def reading(*used: int | None) -> tuple[DeviceFacts, ...]:
    return tuple(DeviceFacts(index=n, total_bytes=TOTAL, used_bytes=each) for n, each in enumerate(used))


class ScriptedRunner(RunnerLink):
    """A runner whose devices are as they are told, one reading after the other; the last one stays."""

    def __init__(self, *readings: tuple[DeviceFacts, ...]) -> None:
        self._readings: Iterator[tuple[DeviceFacts, ...]] = iter(readings)
        self._last = readings[-1]
        self.asked = 0

    async def devices(self) -> tuple[Device, ...]:
        self.asked += 1
        return tuple(Device.model_validate(each.model_dump()) for each in next(self._readings, self._last))


BEFORE = reading(50 * GIB, 50 * GIB)
ONE_RANK = reading(2 * GIB, 50 * GIB)
BOTH_RANKS = reading(2 * GIB, 3 * GIB)


async def test_h61_a_release_is_judged_once_every_rank_has_freed() -> None:
    runner = ScriptedRunner(ONE_RANK, ONE_RANK, BOTH_RANKS, BEFORE)
    freed = await until_freed(Devices(runner, gpus=2), BEFORE, of=range(2), mapped_bytes=48 * GIB, deadline_s=60)
    assert ({0: 48 * GIB, 1: 47 * GIB}, 3) == (freed, runner.asked)


async def test_release_is_judged_by_the_devices_of_its_engine() -> None:
    """Another engine of the pod is on the second one."""
    freed = await until_freed(
        Devices(ScriptedRunner(ONE_RANK), gpus=2), BEFORE, of=[0], mapped_bytes=48 * GIB, deadline_s=60
    )
    assert {0: 48 * GIB} == freed


async def test_h61_a_rank_that_frees_nothing_is_named_at_the_deadline() -> None:
    runner = ScriptedRunner(ONE_RANK)
    with pytest.raises(MemoryHeld, match=r"^0\.0 GiB of device 1 came free, weights and KV pool had 48\.0"):
        await until_freed(Devices(runner, gpus=2), BEFORE, of=range(2), mapped_bytes=48 * GIB, deadline_s=0.2)
    assert runner.asked > 1, "one reading proves nothing"


@pytest.mark.parametrize(
    ("fell_gib", "mapped_gib", "is_enough"), [(45, 50, True), (44, 50, False), (0, None, True), (-1, None, True)]
)
def test_most_of_what_was_mapped_has_to_come_free(fell_gib: int, mapped_gib: int | None, is_enough: bool) -> None:
    mapped = None if mapped_gib is None else mapped_gib * GIB
    after = reading((60 - fell_gib) * GIB)
    if is_enough:
        assert {0: fell_gib * GIB} == freed_bytes(reading(60 * GIB), after, mapped_bytes=mapped)
    else:
        with pytest.raises(MemoryHeld):
            freed_bytes(reading(60 * GIB), after, mapped_bytes=mapped)


def test_a_device_that_can_not_be_measured_is_left_out() -> None:
    before, after = reading(None, 50 * GIB), reading(1, 1 * GIB)
    assert {1: 49 * GIB} == freed_bytes(before, after, mapped_bytes=48 * GIB)
    assert {} == freed_bytes((), after, mapped_bytes=48 * GIB)
    require_room(reading(None), {0: TOTAL})


def test_an_offload_has_to_leave_the_room_that_the_engine_had() -> None:
    require_room(reading(30 * GIB), {0: 50 * GIB})
    with pytest.raises(MemoryHeld, match=r"^49\.0 GiB of device 0 are free after the offload, the engine needs 50\.0"):
        require_room(reading(31 * GIB), {0: 50 * GIB})
