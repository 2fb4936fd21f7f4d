"""The commands for GPUs run on a CPU, where their figures mean nothing: their ways are gone, their checks made."""

from __future__ import annotations

import re

import pytest
import torch

from bench.gpu import prove
from bench.gpu.__main__ import PARTS, main
from bench.gpu.engine import FREED, SAVER, FreedMemory, SavedMemory, checksum_of, choose_memory
from bench.gpu.models import MODELS
from bench.gpu.switches import Proof
from setup.layout import CHECKOUT


@pytest.mark.parametrize("part", ["moves", "release"])
def test_a_part_runs_to_its_end(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    PARTS[part]("tiny", torch.device("cpu"))
    output = capsys.readouterr().out
    if part == "moves":
        for figure in ("onload", "offload"):
            assert re.search(rf"^  {figure} .* GiB/s +\d+\.\d\d$", output, re.MULTILINE), output
    else:
        assert "not measured" in output


@pytest.mark.release  # the kit runs it too, where there is a GPU
def test_weights_are_handed_over_and_compared(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(CHECKOUT.root)
    assert 0 == main(["--device", "cpu", "--size", "tiny", "--only", "hand-over"])
    output = capfd.readouterr().out
    for way in ("CUDA's handles, and a copy by the other", "a file in shared memory, written and read"):
        assert re.search(rf"^  {way} .* GiB/s +\d+\.\d\d$", output, re.MULTILINE), output


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert 2 == main([])
    assert "or with --device cpu" in capsys.readouterr().err


@pytest.mark.release  # the kit's own test takes such switches too, of another model
def test_a_pod_takes_its_switches_and_falls_short_of_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """The real agent, runner and trainer, and an engine whose weights are real: its device is one of the tests."""
    assert 0 == prove.main(["--device", "cpu", "--model", "tiny-LoRA", "--switches", "5"])
    output = capfd.readouterr().out
    for line in (
        "| switches | 5 of 5 |",
        "| processes replaced | 0 |",
        "| least share that came free | engine 1.000, trainer 1.000 |",
        "| falls short | of nothing |",
    ):
        assert line in output


def test_a_proof_that_falls_short_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = Proof("tiny", asked=5, switches=(), flops=1.0, peak_flops=1.0, released_by="nobody", ended="it was ended")
    monkeypatch.setattr(prove, "prove_model", lambda *_, **__: proof)
    assert 1 == prove.main(["--device", "cpu", "--model", "tiny"])
    assert "| falls short | ended after 0 of 5 switches: it was ended" in capsys.readouterr().out


def test_a_proof_without_a_gpu_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert 2 == prove.main([])
    assert "or with --device cpu" in capsys.readouterr().err


def test_an_engine_without_the_memory_saver_frees_its_memory_and_says_so() -> None:
    def cannot() -> SavedMemory:
        raise OSError("libcudart.so.13: cannot open shared object file")

    memory, why = choose_memory(torch.device("cuda"), cannot)

    assert (FREED, "OSError: libcudart.so.13: cannot open shared object file") == (memory.name, why)
    assert SAVER != memory.name


def test_freed_memory_comes_back_under_the_same_tensors() -> None:
    memory, tensor = FreedMemory(torch.device("cpu")), torch.ones(8)
    memory.map("weights", lambda: [tensor])

    memory.pause("weights")
    assert 0 == tensor.untyped_storage().nbytes()
    memory.resume("weights")
    tensor.fill_(2)
    assert [2.0] * 8 == tensor.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_checksum_changes_with_any_element_and_with_two_that_change_places(dtype: torch.dtype) -> None:
    tensor = torch.linspace(-1, 1, 1000).to(dtype)
    exchanged, other = tensor.clone(), tensor.clone()
    exchanged[[3, 700]] = tensor[[700, 3]]
    other[999] += 0.25

    assert checksum_of(tensor) == checksum_of(tensor.clone().reshape(10, 100))
    assert 3 == len({checksum_of(each) for each in (tensor, exchanged, other)})


@pytest.mark.parametrize(("model", "billions"), [("0.6B", 0.596), ("7B-SGD", 7.07)])
def test_a_models_work_is_that_of_the_products_with_its_weights(model: str, billions: float) -> None:
    """The embedding is looked up: it counts where it is the head too. A frozen weight has no gradient."""
    assert pytest.approx(6e9 * billions, rel=1e-2) == MODELS[model].flops
    assert pytest.approx(4e9 * 7.07, rel=1e-2) == MODELS["7B-LoRA"].flops
