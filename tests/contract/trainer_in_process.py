"""The default trainer as the only rank of its group, without a process of its own: for what one step computes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from allocations import allocated_by

from colocated_rl_trainer.conformance.ranks import job_file, scores_beside
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.grpo.budget import Budget
from colocated_rl_trainer.grpo.loop import GRPOTrainer
from colocated_rl_trainer.protocol.settings import RankSettings, TrainerConfig
from fakes.tiny_model import VOCABULARY


def sealed_batches(folder: Path, *, steps: int, split: int) -> list[list[Path]]:
    """Write a batch of random samples for each step, and return the shards of each."""
    sealed = []
    for step in range(1, steps + 1):
        chance = random.Random(step)
        samples = []
        for number in range(24):
            prompt, response = ([chance.randrange(VOCABULARY) for _ in range(chance.randint(2, 8))] for _ in range(2))
            logp = [-chance.uniform(2.5, 5.0) for _ in response]
            samples.append(Example(prompt, response, logp, chance.random(), number // 4, step - 1))
        sealed.append(write_shards(folder, samples, step=step, split=split))
    return sealed


def only_rank(
    folder: Path,
    model: Path,
    config: Mapping[str, object],
    *,
    has_reference: bool = False,
    is_apart: bool = False,
    replays: bool = False,
    longest: int | None = None,
    device: str = "cpu",
) -> RankSettings:
    """`folder` keeps its checkpoints: another one there goes on where this one saved. is_apart: the reference is.

    replays: the engines' choice of experts. longest: limit of a sample, in tokens.
    """
    (folder / "checkpoints").mkdir(exist_ok=True)
    job = job_file(has_reference=has_reference)
    if is_apart:
        job["spec"] = {**cast(dict[str, object], job["spec"]), "reference": {"placement": "OwnDevices", "replicas": 1}}
    rollout = cast(dict[str, dict[str, object]], job["spec"])["rollout"]
    if replays:
        rollout["routerReplay"] = True
    if longest is not None:
        rollout |= {"maxPromptTokens": 1, "maxResponseTokens": longest - 1}
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "trainer.json").write_text(json.dumps(config))
    return RankSettings(
        socket=folder / "unused.sock",
        config=folder / "trainer.json",
        job=folder / "job.json",
        model=model,
        checkpoints=folder / "checkpoints",
        lineage=1,
        rank=0,
        world_size=1,
        local_rank=0,
        master_address="127.0.0.1",
        master_port=1,
        device=device,
    )


class RankInProcess:
    """The default trainer. reference_apart: the job's has devices of its own, and batches come with its scores."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        has_reference: object = False,
        reference_apart: object = False,
        replays: object = False,
        longest: object = None,
        device: object = "cpu",
        **config: object,
    ) -> None:
        self.folder = folder
        self.has_reference = bool(has_reference)
        settings = only_rank(
            folder,
            model,
            {"threads": 1} | config,
            has_reference=self.has_reference,
            is_apart=bool(reference_apart),
            replays=bool(replays),
            longest=longest if isinstance(longest, int) else None,
            device=str(device),
        )
        self.loop = GRPOTrainer(settings, TrainerConfig.read(settings.config))
        self.step = self.loop.load()
        self.updates: list[int] = []  # steps, once for each optimizer call
        self.progressed = 0
        self.at_update: Callable[[], None] = lambda: None  # called before each
        self.loop.onload()

    def train(
        self,
        samples: Sequence[Example],
        *,
        temperature: float = 1.0,
        finish: Callable[[Path], None] = lambda shard: None,
    ) -> Mapping[str, float]:
        """One step on these samples. finish: called with their file before it is read."""
        step = self.step + 1
        (shard,) = write_shards(self.folder, samples, step=step, split=1, temperature=temperature)
        finish(shard)
        if self.has_reference:
            self.loop.score(step, shard, scores_beside(shard), self)
        metrics = self.loop.train(step, shard, self)
        self.step = step
        return metrics

    def progress(self) -> None:
        self.progressed += 1

    def mark_dirty(self) -> None:
        self.updates.append(self.step + 1)
        self.at_update()

    def save(self, keep: int = 2) -> None:
        self.loop.save(self.step, keep)

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.grad.clone() for name, tensor in self.loop.model.named_parameters() if tensor.grad is not None
        }

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.loop.model.named_parameters()}


def peak_and_budget(
    folder: Path, model: Path, options: dict[str, Any], *, tokens: int, device: str = "cpu"
) -> tuple[int, Budget]:
    """Return the bytes that a trainer and its step allocated on a device at the peak, and the trainer's own budget.

    The count begins before the model is read: state, reference, adapters, passes over two samples of full length.
    """
    length = tokens - 1
    samples = [Example([1], [3] * length, [-1.0] * length, reward, 0, 0) for reward in (0.0, 1.0)]
    trainers: list[RankInProcess] = []

    def start_and_train() -> None:
        trainers.append(RankInProcess(folder, model, longest=tokens, device=device, microBatchTokens=1, **options))
        trainers[0].train(samples)

    found = allocated_by(start_and_train, torch.device(device)).peak
    return found, trainers[0].loop._forecast.budget(bool(options.get("activationCheckpointing")))
