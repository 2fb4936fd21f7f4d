"""A plain torch loop as the trainer of a job: set `spec.trainer.command` to run this file.

The loop is REINFORCE with the group's mean as baseline, on one rank. What makes it a trainer is the shape of the class
and the last line: `serve` answers the agent, calls each method when it is due, and writes manifests and log lines.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocated_rl_api.weights import Probe
from colocated_rl_trainer.batch import Shard
from colocated_rl_trainer.rank_server import serve
from colocated_rl_trainer.settings import RankSettings
from colocated_rl_trainer.weights import probe

LEARNING_RATE = 0.01


class Reinforce:
    model: Any  # of transformers, whose types leave out most of it

    def __init__(self, settings: RankSettings) -> None:
        self.settings = settings

    def load(self) -> int:
        saved = self.saved()
        self.model = AutoModelForCausalLM.from_pretrained(saved[-1] if saved else self.settings.model, dtype="float32")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        return int(saved[-1].name.removeprefix("step-")) if saved else 0

    def onload(self) -> None:
        self.model.to(self.settings.device)

    def offload(self) -> None:
        self.model.to("cpu")

    def train(self, step: int, shard: Path, mark_dirty: Callable[[], None]) -> dict[str, float]:
        batch = Shard.read(shard, step=step, shard=0, shards=1)
        for start, end, advantage in zip(batch.start, batch.end, batch.advantage, strict=True):
            tokens = batch.tokens[start:end].to(self.settings.device)
            logits = self.model(tokens[None]).logits[0, :-1] / batch.header.temperature
            logp = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None]).squeeze(-1)
            response = batch.loss_mask[start + 1 : end].to(self.settings.device)
            (-advantage * logp[response].sum() / batch.header.loss_tokens).backward()
        mark_dirty()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"reward": float(batch.reward.mean())}

    def export(self, directory: Path) -> Probe:
        self.model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(self.settings.model).save_pretrained(directory)
        return probe(self.model, torch.float32)

    def save(self, step: int, keep: int) -> None:
        draft = self.settings.checkpoints / "draft"
        self.model.save_pretrained(draft)
        draft.rename(self.settings.checkpoints / f"step-{step:08d}")
        for old in self.saved()[:-keep]:
            shutil.rmtree(old)

    def saved(self) -> list[Path]:
        return sorted(self.settings.checkpoints.glob("step-*"))


if __name__ == "__main__":
    serve(Reinforce)
