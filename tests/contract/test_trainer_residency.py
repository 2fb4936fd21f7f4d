"""The training state as flat buffers: what moves, what stays, and that an update is AdamW's."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch
from allocations import allocated_by
from torch import nn

from colocated_rl_trainer.state import residency
from colocated_rl_trainer.state.residency import (
    GRADIENTS,
    MOMENTS,
    PARAMETERS,
    Residency,
)

CPU = torch.device("cpu")


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 7, bias=False))
    model[1].weight.requires_grad_(False)
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    result: torch.Tensor = model(torch.tensor([0, 3, 6])).square().sum()
    return result


def test_parameters_and_gradients_are_views_of_one_buffer_each() -> None:
    plain, model = make_model(), make_model()
    state = Residency(model, CPU)

    loss_of(model.eval()).backward()
    loss_of(plain.eval()).backward()

    trained = {name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad}
    assert sum(parameter.numel() for parameter in trained.values()) == len(state.parameters[0])
    for name, parameter in trained.items():
        assert parameter.grad is not None
        torch.testing.assert_close(state.named(PARAMETERS)[name], parameter.data, rtol=0, atol=0)
        torch.testing.assert_close(state.named(GRADIENTS)[name], parameter.grad, rtol=0, atol=0)


def test_gradients_of_several_backward_passes_add_up_in_place() -> None:
    model = make_model().eval()
    state = Residency(model, CPU)
    place = state.gradients.data_ptr()

    loss_of(model).backward()
    once = state.gradients.clone()
    loss_of(model).backward()

    torch.testing.assert_close(state.gradients, 2 * once)
    assert place == state.gradients.data_ptr()


def test_norm_of_many_gradients_is_not_rounded_away() -> None:
    """One sum over all of them was 1 % off at 100 million parameters: by as much a clipped gradient was too large."""
    state = Residency(nn.Linear(4096, 4096, bias=False), CPU, with_moments=False)
    state.gradients.normal_(std=1e-4, generator=torch.Generator().manual_seed(0))

    exact = sum(float(part.double().square().sum()) for part in state.gradients.split(1 << 20)) ** 0.5
    assert float(state.gradient_norm()) == pytest.approx(exact, rel=1e-5)


def test_update_is_that_of_adamw() -> None:
    plain, model = make_model().eval(), make_model().eval()
    state = Residency(model, CPU)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in plain.parameters() if parameter.requires_grad],
        lr=0.01, betas=(0.8, 0.9), weight_decay=0.1,
    )  # fmt: skip
    for _ in range(5):
        loss_of(plain).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model).backward()
        state.update(learning_rate=0.01, betas=(0.8, 0.9), weight_decay=0.1)

    assert 5 == state.updates
    assert not state.gradients.any()
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


@pytest.mark.parametrize("stays", [(), (PARAMETERS,)])
@pytest.mark.parametrize("piece", [3, 1 << 26], ids=["in pieces", "whole"])
def test_update_on_the_host_is_that_of_adamw_and_moments_never_come_to_the_device(
    stays: tuple[str, ...], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "PIECE", piece)
    plain, model = make_model().eval(), make_model().eval()
    resident, state = Residency(plain, CPU), Residency(model, CPU, moves=True, updates_on_host=True, stays=stays)
    places = [moment.data_ptr() for moment in state.moments.values()]
    for _ in range(3):
        state.onload()
        assert state.size_bytes == resident.size_bytes - 2 * 4 * len(state.parameters[0]), "no moments"
        for each, one in ((plain, resident), (model, state)):
            loss_of(each).backward()
            one.update(learning_rate=0.01, betas=(0.8, 0.9), weight_decay=0.1)
        assert not state.gradients.any()
        torch.testing.assert_close(loss_of(model), loss_of(plain))
        state.offload()

    assert places == [moment.data_ptr() for moment in state.moments.values()]
    assert 3 == state.updates
    assert resident.saved().keys() == state.saved().keys()
    for name, tensor in resident.saved().items():
        torch.testing.assert_close(state.saved()[name], tensor)


def test_update_on_the_host_allocates_nothing_that_grows_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a buffer of two pieces from its start on, pinned like moments and parameters."""
    monkeypatch.setattr(residency, "PIECE", 1000)
    driver, model = FakeDriver(), nn.Linear(300, 300, bias=False)
    state = Residency(model, CPU, moves=True, updates_on_host=True, driver=driver)
    assert sorted([*[4 * 300**2] * 3, 2 * 4 * 1000]) == sorted(driver.pinned.values())
    state.onload()
    model(torch.ones(1, 300)).sum().backward()

    def update() -> None:
        state.update(learning_rate=0.01, betas=(0.9, 0.95), weight_decay=0.0)

    assert allocated_by(update).peak < 4 * 1000


def test_checkpoint_fills_moments_that_are_on_the_host() -> None:
    one, other = (Residency(make_model(seed), CPU, moves=True, updates_on_host=True) for seed in (1, 2))
    for name, tensor in one.saved().items():
        tensor.fill_(0.5)
        other.saved()[name].copy_(tensor)
    assert all((moment == 0.5).all() for moment in other.moments.values())


def test_update_without_moments_is_that_of_sgd() -> None:
    plain, model = make_model().eval(), make_model().eval()
    state = Residency(model, CPU, moves=True, with_moments=False)
    optimizer = torch.optim.SGD((parameter for parameter in plain.parameters() if parameter.requires_grad), lr=0.01)
    for _ in range(3):
        state.onload()
        loss_of(plain).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model).backward()
        state.update(learning_rate=0.01, betas=(0.8, 0.9), weight_decay=0.0)
        state.offload()
    state.onload()

    assert {} == state.moments
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


@pytest.mark.parametrize("onloaded", [False, True])
def test_reference_computes_what_the_model_did_and_costs_no_memory(onloaded: bool) -> None:
    reference, model = make_model().eval(), make_model().eval()
    state = Residency(model, CPU, moves=True)
    if onloaded:
        state.onload()
    state.keep_reference()
    state.onload()
    state.parameters[0].mul_(1.5)
    own, place = loss_of(model).detach(), state.parameters[0].data_ptr()

    with torch.no_grad(), state.as_reference():
        frozen = loss_of(model)

    torch.testing.assert_close(frozen, loss_of(reference).detach())
    torch.testing.assert_close(own, loss_of(model).detach())
    assert place == state.parameters[0].data_ptr()
    assert not state.gradients.any()


def test_on_the_cpu_nothing_is_copied() -> None:
    model = make_model()
    state = Residency(model, CPU)
    places = [parameter.data_ptr() for parameter in model.parameters()]

    state.offload()
    state.onload()

    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    assert state.is_onloaded


def test_what_is_trained_between_two_moves_is_what_stands_on_the_host() -> None:
    stays, model = make_model().eval(), make_model().eval()
    resident, moving = Residency(stays, CPU), Residency(model, CPU, moves=True)
    host = moving.named(PARAMETERS)["0.weight"].data_ptr()
    for _ in range(3):
        moving.onload()
        assert host != moving.named(PARAMETERS)["0.weight"].data_ptr()
        for each, state in ((stays, resident), (model, moving)):
            loss_of(each).backward()
            state.update(learning_rate=0.01, betas=(0.9, 0.95), weight_decay=0.0)
        moving.offload()

    assert host == moving.named(PARAMETERS)["0.weight"].data_ptr()
    for block in (*moving.parameters, *moving.moments.values(), moving.gradients):
        assert 0 == block.untyped_storage().nbytes()
    assert moving.saved().keys() == resident.saved().keys()
    for name, tensor in moving.saved().items():
        torch.testing.assert_close(tensor, resident.saved()[name], rtol=0, atol=0)
    moving.onload()
    torch.testing.assert_close(loss_of(model), loss_of(stays), rtol=0, atol=0)


def test_moves_are_idempotent() -> None:
    state = Residency(make_model(), CPU, moves=True)
    state.offload()
    state.onload()
    place = state.parameters[0].data_ptr()
    state.onload()

    assert place == state.parameters[0].data_ptr()


@pytest.mark.parametrize("stays", [(), (PARAMETERS,), (GRADIENTS,), MOMENTS, (PARAMETERS, GRADIENTS, *MOMENTS)])
def test_what_stays_is_not_moved_and_what_leaves_takes_no_memory(stays: tuple[str, ...]) -> None:
    plain, model = make_model().eval(), make_model().eval()
    resident, state = Residency(plain, CPU), Residency(model, CPU, moves=True, stays=stays)
    for _ in range(3):
        state.onload()
        for each, one in ((plain, resident), (model, state)):
            loss_of(each).backward()
            one.update(learning_rate=0.01, betas=(0.9, 0.95), weight_decay=0.0)
        state.offload()
        blocks = {PARAMETERS: state.parameters[0], GRADIENTS: state.gradients} | state.moments
        assert set(stays) == {kind for kind, block in blocks.items() if block.untyped_storage().nbytes()}
        for name, tensor in resident.saved().items():
            torch.testing.assert_close(state.saved()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("stays", [(), (PARAMETERS,)])
def test_frozen_parameters_leave_with_those_that_are_trained_and_come_back_as_they_were(stays: tuple[str, ...]) -> None:
    model = make_model().eval()
    frozen = next(iter(model.parameters())).requires_grad_(False)
    before = frozen.detach().clone()
    state = Residency(model, CPU, moves=True, stays=stays)
    for _ in range(2):
        assert (PARAMETERS in stays) == bool(frozen.untyped_storage().nbytes())
        state.onload()
        torch.testing.assert_close(frozen.detach(), before, rtol=0, atol=0)
        state.offload()


# ------------------------------------------------------------------------------------------------------ pinned memory
class FakeDriver:
    """Pins nothing, and knows what it should have pinned."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.pinned: dict[int, int] = {}  # sizes by address
        self._refuses = refuses

    def pin(self, address: int, size: int) -> str | None:
        if self._refuses:
            return "out of memory"
        assert mapped(address) >= size
        self.pinned[address] = size
        return None

    def unpin(self, address: int) -> None:
        assert mapped(address), "unmapped before it was unpinned"
        del self.pinned[address]


def mapped(address: int) -> int:
    """Bytes of the mapping of this process that begins at the address or contains it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return end - address
    return 0


def test_copies_on_the_host_are_pinned_in_their_exact_size_as_long_as_they_are_there() -> None:
    """torch rounds each up to a power of two: 7.6 billion parameters took three times 32 GiB for 28.3."""
    driver, model = FakeDriver(), nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 100))
    model[0].requires_grad_(False)
    state = Residency(model, CPU, moves=True, driver=driver)
    state.keep_reference()

    frozen, trained = 4 * 300 * 301, 4 * 301 * 100
    assert sorted([frozen, *[trained] * 4]) == sorted(driver.pinned.values())
    assert all(address % mmap.PAGESIZE == 0 for address in driver.pinned)
    assert 0 == state.pageable_bytes

    del state
    gc.collect()
    assert {} == driver.pinned


def test_what_a_driver_does_not_pin_is_pageable_and_said(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = make_model().eval(), make_model().eval()
    resident, state = Residency(plain, CPU), Residency(model, CPU, moves=True, driver=FakeDriver(refuses=True))
    for _ in range(2):
        for each, one in ((plain, resident), (model, state)):
            one.onload()
            loss_of(each).backward()
            one.update(learning_rate=0.01, betas=(0.9, 0.95), weight_decay=0.0)
            one.offload()

    assert sum(tensor.nbytes for tensor in resident.saved().values()) < state.pageable_bytes
    assert {"host memory not pinned"} == {record.message for record in caplog.records}
    for name, tensor in resident.saved().items():
        torch.testing.assert_close(state.saved()[name], tensor, rtol=0, atol=0)
