"""This program computes a batch with trl: `python trl_step.py FOLDER`, in the environment `peers`.

FOLDER/case.json says which batch (samples with their behaviour log-probabilities and rewards, group by group) and which
variants of the loss; FOLDER/NAME.safetensors holds the weights that variant NAME's second pass begins with. Into
FOLDER/NAME.trl.safetensors go advantages, importance ratios, and of both passes loss, KL and gradients. Only generation
is replaced: the completions are those of the batch. FOLDER/overlong.safetensors gets the soft overlong punishment of
responses of 0 to 40 tokens, with a limit of 30 and a buffer of 10.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from given_batch import rows_of, save, trainer_of  # type: ignore[import-not-found]  # beside this program
from safetensors.torch import load_file, save_file
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment


class GivenCompletions(GRPOTrainer):  # type: ignore[misc]  # untyped where we are checked
    samples: list[dict[str, Any]]

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        def of(name: str) -> list[Any]:
            return [sample[name] for sample in self.samples]

        return of("prompt"), of("response"), of("written"), ["" for _ in prompts], of("logp"), {}, None, None


def run(folder: Path, case: dict[str, Any], variant: dict[str, Any]) -> dict[str, Tensor]:
    usual = {
        "temperature": case["temperature"],
        "use_bias_correction_kl": False,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": case["importanceCap"],
    }
    trainer = trainer_of(GivenCompletions, GRPOConfig, folder, case, **usual | variant["trl"])
    trainer.use_vllm = True  # from here on: behaviour log-probabilities count, nothing is generated
    model = trainer.model
    batch = trainer._generate_and_score_completions(rows_of(case["samples"]))
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    if variant["bypass"]:  # the policy that sampled is the one that ratios are to
        batch["old_per_token_logps"] = batch["sampling_per_token_logps"] * mask
        batch["importance_sampling_ratio"] = torch.ones_like(batch["old_per_token_logps"])
    results = {
        "advantages": batch["advantages"],
        "importance": batch["importance_sampling_ratio"].expand_as(mask)[mask],
    }
    for pass_ in ("first", "second"):
        if pass_ == "second":
            model.load_state_dict(load_file(folder / f"{variant['name']}.safetensors"), strict=False)
        model.zero_grad()
        loss = trainer._compute_loss(model, batch)
        loss.backward()
        results[f"{pass_}.loss"] = loss.detach()
        if trainer.beta:
            results[f"{pass_}.kl"] = torch.tensor(trainer._metrics["train"]["kl"][-1])
        for name, parameter in model.named_parameters():
            results[f"{pass_}.gradient.{name}"] = parameter.grad
    return results


def main(folder: Path) -> None:
    punishment = get_soft_overlong_punishment(max_completion_len=30, soft_punish_cache=10)
    of_each = punishment(completion_ids=[[1] * length for length in range(41)])
    save_file({"punishment": torch.tensor(of_each)}, folder / "overlong.safetensors")
    case = json.loads((folder / "case.json").read_bytes())
    for variant in case["variants"]:
        save(run(folder, case, variant), folder / f"{variant['name']}.trl.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
