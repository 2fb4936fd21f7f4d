"""This program computes a batch with trl's RLOO: `python trl_rloo.py FOLDER`, in the environment `peers`.

FOLDER/case.json says which batch, group by group. Advantages, loss and gradients of a pass with the weights that
sampled go into FOLDER/rloo.safetensors. Only generation is replaced: the completions are those of the batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from given_batch import rows_of, save, trainer_of  # type: ignore[import-not-found]  # beside this program
from trl import RLOOConfig, RLOOTrainer


class SamplesOfRloo(RLOOTrainer):  # type: ignore[misc]  # untyped where we are checked
    samples: list[dict[str, Any]]

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        return *([sample[name] for sample in self.samples] for name in ("prompt", "response")), ["" for _ in prompts]


def main(folder: Path) -> None:
    case = json.loads((folder / "case.json").read_bytes())
    trainer = trainer_of(SamplesOfRloo, RLOOConfig, folder, case, temperature=1.0, beta=0.0)
    model = trainer.model
    batch = trainer._generate_and_score_completions(rows_of(case["samples"]))
    model.zero_grad()
    loss = trainer._compute_loss(model, batch)
    loss.backward()
    results = {"advantages": batch["advantages"], "loss": loss.detach()}
    results |= {f"gradient.{name}": parameter.grad for name, parameter in model.named_parameters()}
    save(results, folder / "rloo.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
