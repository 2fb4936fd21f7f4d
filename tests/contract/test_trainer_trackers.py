"""Figures of a step for TensorBoard and Weights & Biases, with their real libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from contract.peer import run_peer
from contract.trainer_in_process import RankInProcess, only_rank

from colocated_rl_trainer.protocol.settings import ConfigError
from fakes.tiny_model import write_tiny_model
from setup.layout import CHECKOUT

PARTS = ("operator", "workloads/trainer")


def test_figures_of_a_step_that_is_done_again_are_reported_once(tmp_path: Path) -> None:
    settings = only_rank(tmp_path, tmp_path, {"trackers": ["TensorBoard", "WandB"], "wandbProject": "sums"})

    answer = run_peer(
        "tracked_steps.py",
        tmp_path,
        PYTHONPATH=":".join(str(CHECKOUT.root / part) for part in PARTS),
        WANDB_MODE="offline",
        WANDB_SILENT="true",
        WANDB_DIR=str(tmp_path),
    )

    assert {"trainer/loss": [[1, 1.0], [2, 2.0], [3, 6.0], [4, 8.0]]} == json.loads(answer.splitlines()[-1])
    runs = list(tmp_path.glob(f"wandb/offline-run-*/run-{settings.read_job().uid}.wandb"))
    assert runs
    assert all(run.stat().st_size for run in runs)


@pytest.mark.parametrize(("name", "package"), [("TensorBoard", "tensorboard"), ("WandB", "wandb")])
def test_tracker_whose_library_is_absent_is_refused_with_what_to_install(
    tmp_path: Path, name: str, package: str
) -> None:
    model = write_tiny_model(tmp_path / "model")

    with pytest.raises(ConfigError, match=rf"{name} needs the Python package {package}: install it into the image"):
        RankInProcess(tmp_path, model, trackers=[name])
