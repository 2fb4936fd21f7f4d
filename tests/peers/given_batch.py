"""This module makes a trainer of trl for a batch that is given, in the programs beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_settings import QUIET_ON_A_CPU  # type: ignore[import-not-found]  # beside this program


def given_reward(prompts: list[Any], completions: list[Any], given: list[float], **_: object) -> list[float]:
    return given


def rows_of(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"prompt": "w3", "given": sample["reward"]} for sample in samples]


def trainer_of(kind: Any, config: Any, folder: Path, case: dict[str, Any], **settings: Any) -> Any:
    """Return a trainer whose next step is of the case's samples. kind, config: trl's. settings: of its config."""
    samples = case["samples"]
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32),
        reward_funcs=given_reward,
        args=config(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=len(samples),
            num_generations=case["groupSize"],
            bf16=False,
            **QUIET_ON_A_CPU,
            **settings,
        ),
        train_dataset=Dataset.from_list(rows_of(samples)),
        processing_class=AutoTokenizer.from_pretrained(case["model"]),
    )
    trainer.samples = samples
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def save(results: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in results.items()}, path)
