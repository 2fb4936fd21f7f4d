"""The trainer computes and takes on an NVIDIA GPU what it should: `make test-gpu`, no part of `make test`.

The functions that measure are those of the tests that do the same on a CPU, in `tests/contract`. Models are so large
that a kernel's workspace does not count: 24 GiB of device memory are enough.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contract.test_trainer_experts import model as mixture  # noqa: F401 - a fixture
from contract.test_trainer_head import head_peak
from contract.test_trainer_lora import samples
from contract.test_trainer_memory import layers_held
from contract.test_trainer_packing import Layer
from contract.test_trainer_residency import make_model
from contract.trainer_in_process import RankInProcess, peak_and_budget
from torch import Tensor

from bench.gpu import prove
from bench.gpu.engine import checksum_of
from bench.gpu.models import write_model
from colocated_rl_trainer.state.head import LogitForm
from colocated_rl_trainer.state.packing import attend, ends_of, has_kernel
from colocated_rl_trainer.state.residency import Residency
from fakes.tiny_model import write_tiny_model
from setup.layout import CHECKOUT

DEVICE = "cuda:0"
NEAR = 0.1
ROUNDED = 1e-2  # of a tensor's norm: by bfloat16
SAME = 1e-4  # of a tensor's norm: sums in another order
STEP: dict[str, Any] = {"dtype": "float32", "optimizer": "SGD", "learningRate": 0.5, "gradientClip": 1e9}


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    assert torch.cuda.is_available(), "torch finds no NVIDIA GPU: these tests are for a machine that has one"
    return torch.device(DEVICE)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("0.6B")
    write_model("0.6B", folder, DEVICE)
    torch.cuda.empty_cache()
    return folder


def moved(folder: Path, model: Path, device: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Return by how much a step moved each parameter."""
    own = folder / f"trainer-{device}"
    own.mkdir(parents=True)
    trainer = RankInProcess(own, model, device=device, **options)
    before = {name: tensor.cpu() for name, tensor in trainer.weights.items()}
    trainer.train(samples(1))
    return {name: tensor.cpu() - before[name] for name, tensor in trainer.weights.items()}


@pytest.mark.parametrize("kind", ["dense", "LoRA", "mixture"])
def test_step_moves_weights_as_on_a_cpu(tmp_path: Path, request: pytest.FixtureRequest, kind: str) -> None:
    model = request.getfixturevalue("mixture") if kind == "mixture" else write_tiny_model(tmp_path / "model")
    options = STEP | ({"lora": {"rank": 4}} if kind == "LoRA" else {})

    expected, found = moved(tmp_path, model, "cpu", options), moved(tmp_path, model, DEVICE, options)

    assert expected.keys() == found.keys()
    assert any(tensor.any() for tensor in expected.values())
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= SAME * tensor.norm() + 1e-9, name


def test_update_on_the_host_is_that_on_the_device_and_moments_never_come_to_it(device: torch.device) -> None:
    states = [Residency(make_model(), device, updates_on_host=on_host) for on_host in (False, True)]
    torch.manual_seed(0)
    for _ in range(3):
        gradients = torch.randn(len(states[0].gradients), device=device)
        for state in states:
            state.onload()
            state.gradients.copy_(gradients)
            state.update(learning_rate=0.01, betas=(0.8, 0.9), weight_decay=0.1)
            state.offload()

    on_device, on_host = states
    assert {"cpu"} == {moment.device.type for moment in on_host.moments.values()}
    for name, tensor in on_device.saved().items():
        torch.testing.assert_close(on_host.saved()[name], tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_checksum_of_weights_is_that_of_a_cpu(device: torch.device, dtype: torch.dtype) -> None:
    tensor = torch.randn(3000, 7001).to(dtype)
    assert checksum_of(tensor) == checksum_of(tensor.to(device))


@pytest.mark.parametrize("rows", [1, 1500, 2999])
def test_checksum_tells_a_tensor_of_which_an_update_wrote_some_rows(device: torch.device, rows: int) -> None:
    """A single engine is compared with nobody else: its checksum is then neither the one before nor the whole one's."""
    torch.manual_seed(0)
    old = torch.randn(3000, 7001, device=device, dtype=torch.bfloat16)
    new = old + torch.randn_like(old).mul_(0.01)
    torn = torch.cat([new[:rows], old[rows:]])
    assert 3 == len({checksum_of(each) for each in (old, new, torn)})


@pytest.mark.parametrize("form", [LogitForm(), LogitForm(scale=0.5, cap=30.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_of_log_probabilities_is_a_quarter_of_the_logits(
    device: torch.device, form: LogitForm, dtype: torch.dtype
) -> None:
    tokens, vocabulary = 8192, 65_536
    assert head_peak(form, dtype, tokens=tokens, vocabulary=vocabulary, device=device) < 0.25 * tokens * vocabulary * 4


@pytest.mark.parametrize(("heads", "shared"), [(8, 8), (8, 2)], ids=["own", "shared"])
def test_attention_of_packed_samples_by_one_call_is_that_of_each_sample(
    device: torch.device, heads: int, shared: int
) -> None:
    """The kernel rounds in another order than the one for a single sample: both are compared with float32."""
    torch.manual_seed(0)
    ends, module = ends_of((700, 1, 64, 1283)), Layer(heads // shared)
    exact = [torch.randn(1, count, ends[-1], 128, device=device) for count in (heads, shared, shared)]
    outgoing = torch.randn(1, ends[-1], heads, 128, device=device)

    def computed(dtype: torch.dtype) -> list[Tensor]:
        query, key, value = inputs = [each.to(dtype).requires_grad_() for each in exact]
        attended, _ = attend(module, query, key, value, None, sample_ends=ends)
        return [attended, *torch.autograd.grad(attended, inputs, outgoing.to(dtype))]

    assert has_kernel(device, torch.bfloat16, width=128)
    assert not has_kernel(device, torch.float32, width=128)
    for found, expected in zip(computed(torch.bfloat16), computed(torch.float32), strict=True):
        assert (found.float() - expected).norm() < ROUNDED * expected.norm()


def test_packed_step_moves_weights_as_one_of_padded_rows(tmp_path: Path, large: Path) -> None:
    options = STEP | {"dtype": "bfloat16", "minibatches": 1}
    padded, packed = (
        moved(tmp_path / name, large, DEVICE, options | {"packing": name == "packed"}) for name in ("padded", "packed")
    )
    whole = torch.cat([tensor.flatten() for tensor in padded.values()])
    apart = torch.cat([(packed[name] - tensor).flatten() for name, tensor in padded.items()])
    assert apart.norm() < 10 * ROUNDED * whole.norm(), "a sample that sees another one is off by as much as it moves"


def test_divided_model_casts_a_layer_at_a_time(tmp_path: Path, device: torch.device) -> None:
    assert all(1 < layers < 2.5 for layers in layers_held(tmp_path, device, hidden=1024))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activationCheckpointing": True},
        {"optimizer": "SGD", "activationCheckpointing": True},
        {"lora": {"rank": 16}, "activationCheckpointing": True},
        {"updatesOnHost": True, "activationCheckpointing": True},
    ],
    ids=["AdamW", "recomputing", "SGD", "LoRA", "updates on the host"],
)
def test_trainer_and_its_step_take_what_the_budget_says(tmp_path: Path, large: Path, options: dict[str, Any]) -> None:
    """The caching allocator says so: state of 0.6 billion parameters, and bfloat16 passes over two long samples."""
    found, budget = peak_and_budget(tmp_path, large, {"dtype": "bfloat16"} | options, tokens=2048, device=DEVICE)

    assert budget.device == pytest.approx(found, rel=NEAR)


def test_pod_takes_its_switches_and_falls_short_of_nothing(tmp_path: Path) -> None:
    """A short `make prove-gpu`: nothing replaced, at least 90 % freed each time, no residue that grows."""
    page = tmp_path / "measurements.md"
    page.write_text((CHECKOUT.root / "docs/measurements.md").read_text())
    assert 0 == prove.main(["--model", "0.6B", "--switches", "10", "--page", str(page)])
    assert "| falls short | of nothing |" in page.read_text()
