"""The benchmark for GPUs on a CPU, where its figures mean nothing: its ways are gone and its checks are made."""

from __future__ import annotations

import re

import pytest
import torch

from bench.gpu.__main__ import PARTS, main
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
