"""This program computes with peft on adapters that we have written: `python
peft_step.py FOLDER`, in environment `peers`.

FOLDER/case.json names the model, the directory of the adapters, the samples of a step, and the prompts to continue.
Into FOLDER/peft.safetensors go the adapters as peft read them, the model's weights after it merged them, the gradient
of the step's loss, log-probabilities of the responses, the continuations, and the adapters of a new model. The loss is
written out here: the advantage is the reward minus the group's mean, and each token counts by its truncated importance
ratio, without clipping, as it is in the first update of a step.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM


def load(case: dict[str, Any], *, is_trainable: bool) -> Any:
    base = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    return PeftModel.from_pretrained(base, case["adapter"], is_trainable=is_trainable).eval()


def logp_of(model: Any, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def gradient(model: Any, case: dict[str, Any]) -> dict[str, Tensor]:
    """Return the gradient, and the log-probabilities of all responses as `logp`."""
    samples: list[dict[str, Any]] = case["samples"]
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample["group"], []).append(sample["reward"])
    loss: Any = 0.0
    found = []
    for sample in samples:
        group = rewards[sample["group"]]
        logp = logp_of(model, sample["prompt"], sample["response"], case["temperature"])
        found.append(logp.detach())
        importance = (logp.detach() - torch.tensor(sample["logp"])).exp().clamp(max=case["cap"])
        loss = loss - ((sample["reward"] - sum(group) / len(group)) * importance * logp).sum()
    (loss / sum(len(sample["response"]) for sample in samples)).backward()
    gradients = {
        f"gradient.{name.replace('.default.', '.')}": parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return gradients | {"logp": torch.cat(found)}


def run(case: dict[str, Any]) -> dict[str, Tensor]:
    model = load(case, is_trainable=True)
    found = {f"read.{name}": tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}
    found |= gradient(model, case)
    for number, prompt in enumerate(case["prompts"]):
        with torch.no_grad():
            ids = model.generate(
                input_ids=torch.tensor([prompt]), max_new_tokens=case["tokens"], do_sample=False, eos_token_id=None
            )
        found[f"continuation.{number}"] = ids[0, len(prompt) :].clone()
    merged = load(case, is_trainable=False).merge_and_unload()
    found |= {f"merged.{name}": tensor.clone() for name, tensor in merged.named_parameters()}
    base = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    new = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    return found | {f"new.{name}": tensor.clone() for name, tensor in get_peft_model_state_dict(new).items()}


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)  # peft warns of tensors that it misses or does not know
    folder = Path(sys.argv[1])
    save_file(run(json.loads((folder / "case.json").read_bytes())), folder / "peft.safetensors")
