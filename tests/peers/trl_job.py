"""This program runs a whole job by trl's GRPOTrainer: `python trl_job.py FOLDER`, in the environment `peers`.

FOLDER/case.json has the model, the prompts, the sizes, the URL of the endpoint of rewards, and that of an engine, or
none: then trl generates by itself. The engine gets the new weights after each step. Prints as JSON what the steps took,
from the first prompt to the last step, and what was trained.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_settings import QUIET_ON_A_CPU  # type: ignore[import-not-found]  # beside this program

ANSWER_S = 600.0
ROWS = 8  # of a forward pass


class EngineRollout:
    """Generates by an engine that listens, once it has the newest weights."""

    def __init__(self, case: dict[str, Any], folder: Path) -> None:
        self._case = case
        self._weights = folder / "weights"
        self._step = 0

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        return asyncio.run(self._generate(prompts, trainer))

    async def _generate(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        limits = httpx.Limits(max_connections=len(prompts))
        async with httpx.AsyncClient(base_url=self._case["engine"], timeout=ANSWER_S, limits=limits) as client:
            if trainer.state.global_step > self._step:
                self._step = trainer.state.global_step
                trainer.model.save_pretrained(self._weights)
                body = {"model_path": str(self._weights)}
                key = {"Authorization": f"Bearer {self._case['adminKey']}"}
                (await client.post("/update_weights_from_disk", json=body, headers=key)).raise_for_status()
            answers = await asyncio.gather(*(self._one(client, one) for one in ids))
        return {
            "prompt_ids": ids,
            "completion_ids": [[token for _, token, _ in answer] for answer in answers],
            "logprobs": [[logp for logp, _, _ in answer] for answer in answers],
        }

    async def _one(self, client: httpx.AsyncClient, ids: list[int]) -> list[tuple[float, int, Any]]:
        sampling = {"temperature": 1.0, "max_new_tokens": self._case["maxTokens"]}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        answer = (await client.post("/generate", json=body)).raise_for_status().json()
        found: list[tuple[float, int, Any]] = answer["meta_info"]["output_token_logprobs"]
        return found


async def judged(url: str, completions: list[str]) -> list[float]:
    """Return the rewards, all asked for at the same time."""
    limits = httpx.Limits(max_connections=len(completions))
    async with httpx.AsyncClient(timeout=ANSWER_S, limits=limits) as client:
        answers = await asyncio.gather(*(client.post(url, json={"response": one}) for one in completions))
    return [answer.raise_for_status().json()["reward"] for answer in answers]


class WholeRun(TrainerCallback):  # type: ignore[misc]  # no types of transformers are read
    """From the first step's beginning to the last step's end, and how much of it went by until rewards were known."""

    began = ended = rollout = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._step_began = time.perf_counter()
        self.began = self.began or self._step_began

    def rewards_are_known(self) -> None:
        self.rollout += time.perf_counter() - self._step_began

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ended = time.perf_counter()


def main(folder: Path) -> None:
    case = json.loads((folder / "case.json").read_bytes())
    torch.set_num_threads(case["threads"])
    lengths: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths.extend(map(len, completion_ids))
        rewards = asyncio.run(judged(case["judge"], completions))
        clock.rewards_are_known()
        return rewards

    clock, samples = WholeRun(), case["batch"] * case["groupSize"]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=samples // ROWS,
            num_generations=case["groupSize"],
            max_completion_length=case["maxTokens"],
            max_steps=case["steps"],
            learning_rate=case["learningRate"],
            beta=0.0,
            temperature=1.0,
            top_k=0,
            bf16=False,
            **QUIET_ON_A_CPU,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{prompt} go"} for prompt in case["prompts"]]),
        processing_class=AutoTokenizer.from_pretrained(case["model"]),
        rollout_func=EngineRollout(case, folder) if case["engine"] else None,
        callbacks=[clock],
    )
    trainer.train()
    found = {
        "seconds": clock.ended - clock.began,
        "rollout": clock.rollout,
        "samples": len(lengths),
        "tokens": sum(lengths),
        "age": 0.0,
    }
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
