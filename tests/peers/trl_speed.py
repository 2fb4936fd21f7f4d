"""This program times trl's optimization steps: `python trl_speed.py FOLDER`, in the environment `peers`.

FOLDER/case.json has the completions, FOLDER/model the model. Prints the seconds of each step but the first, and by how
much the process grew, as JSON. Generation takes no time: the completions are given.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from resident import peak_bytes, resident_bytes  # type: ignore[import-not-found]  # beside this program
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_settings import QUIET_ON_A_CPU  # type: ignore[import-not-found]  # beside this program


class TimedCompletions(GRPOTrainer):  # type: ignore[misc]  # untyped where we are checked
    samples: list[dict[str, Any]]

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        prompt_ids = [sample["prompt"] for sample in self.samples]
        responses = [sample["response"] for sample in self.samples]
        return prompt_ids, responses, None, ["" for _ in prompts], None, {}, None, None


class StepClock(TrainerCallback):  # type: ignore[misc]  # no types of transformers are read
    """One step: its batch, as many forward and backward passes as it has parts, and the optimizer call."""

    def __init__(self) -> None:
        self.took: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.took.append(time.perf_counter() - self._began)


def given_reward(prompts: list[Any], completions: list[Any], given: list[float], **_: object) -> list[float]:
    return given


def main(folder: Path) -> None:
    case = json.loads((folder / "case.json").read_bytes())
    samples, clock = case["samples"], StepClock()
    begin_bytes = resident_bytes()
    lora, halves = case["lora"], case["dtype"] == "bfloat16"
    adapters = lora and LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], target_modules="all-linear")
    prompts = [samples[number]["reward"] for number in range(0, len(samples), case["groupSize"])]
    trainer = TimedCompletions(
        model=AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.bfloat16 if lora and halves else torch.float32
        ),
        peft_config=adapters,
        reward_funcs=given_reward,
        args=GRPOConfig(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=case["rows"],
            gradient_accumulation_steps=len(samples) // case["rows"],
            num_generations=case["groupSize"],
            max_steps=case["steps"],
            learning_rate=1e-4,
            beta=0.0,
            loss_type="dapo",
            bf16=halves,
            **QUIET_ON_A_CPU,
        ),
        train_dataset=Dataset.from_list([{"prompt": "w3", "given": reward} for reward in prompts]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[clock],
    )
    trainer.samples = samples
    trainer.train()
    found = {"tookS": clock.took[1:], "grewBytes": peak_bytes() - begin_bytes}
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
