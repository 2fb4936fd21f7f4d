"""Figures of a step for TensorBoard and Weights & Biases, with their real libraries."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from contract.trainer_in_process import OneRank, only_rank

from colocated_rl_trainer.protocol.settings import ConfigError
from fakes.tiny_model import write_tiny_model
from setup.environments import PEERS
from setup.layout import CHECKOUT
from setup.toolchain import clean_environment

PEER_S = 300.0
PARTS = ("operator", "workloads/trainer")


def test_figures_of_a_step_that_is_done_again_are_told_once(tmp_path: Path) -> None:
    settings = only_rank(tmp_path, tmp_path, {"trackers": ["TensorBoard", "WandB"], "wandbProject": "sums"})

    answer = subprocess.run(
        [CHECKOUT.python(PEERS), CHECKOUT.root / "tests/peers/tracked_steps.py", tmp_path],
        cwd=tmp_path,
        env=clean_environment()
        | {
            "PYTHONPATH": ":".join(str(CHECKOUT.root / part) for part in PARTS),
            "HOME": str(tmp_path),
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "WANDB_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=PEER_S,
        check=False,
    )

    assert answer.returncode == 0, answer.stderr
    assert {"trainer/loss": [[1, 1.0], [2, 2.0], [3, 6.0], [4, 8.0]]} == json.loads(answer.stdout.splitlines()[-1])
    runs = list(tmp_path.glob(f"wandb/offline-run-*/run-{settings.read_job().uid}.wandb"))
    assert runs
    assert all(run.stat().st_size for run in runs)


@pytest.mark.parametrize(("name", "package"), [("TensorBoard", "tensorboard"), ("WandB", "wandb")])
def test_tracker_whose_library_is_absent_is_refused_with_what_to_install(
    tmp_path: Path, name: str, package: str
) -> None:
    model = write_tiny_model(tmp_path / "model")

    with pytest.raises(ConfigError, match=rf"{name} needs the Python package {package}: install it into the image"):
        OneRank(tmp_path, model, trackers=[name])
