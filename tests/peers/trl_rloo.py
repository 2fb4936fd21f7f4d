"""This program computes a batch with trl's RLOO: `python trl_rloo.py FOLDER`, in the environment `peers`.

FOLDER/case.json says which batch, group by group. Advantages, loss and gradients of a pass with the weights that
sampled go into FOLDER/rloo.safetensors. Only generation is replaced: the completions are those of the batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import RLOOConfig, RLOOTrainer


class SamplesOfRloo(RLOOTrainer):  # type: ignore[misc]  # untyped where we are checked
    samples: list[dict[str, Any]]

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        return *([sample[name] for sample in self.samples] for name in ("prompt", "response")), ["" for _ in prompts]


def given_reward(prompts: list[Any], completions: list[Any], given: list[float], **_: object) -> list[float]:
    return given


def main(folder: Path) -> None:
    case = json.loads((folder / "case.json").read_bytes())
    samples = case["samples"]
    rows = [{"prompt": "w3", "given": sample["reward"]} for sample in samples]
    trainer = SamplesOfRloo(
        model=AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32),
        reward_funcs=given_reward,
        args=RLOOConfig(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=len(samples),
            num_generations=case["groupSize"],
            temperature=1.0,
            beta=0.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(case["model"]),
    )
    trainer.samples = samples
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model
    model.train()
    batch = trainer._generate_and_score_completions(rows)
    model.zero_grad()
    loss = trainer._compute_loss(model, batch)
    loss.backward()
    results = {"advantages": batch["advantages"], "loss": loss.detach()}
    results |= {f"gradient.{name}": parameter.grad for name, parameter in model.named_parameters()}
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in results.items()}, folder / "rloo.safetensors"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
