"""Hold the frozen model on one device, and pass queued samples through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from colocated_rl_trainer.grpo.batch import divide_into_passes
from colocated_rl_trainer.grpo.forward import logp_and_entropy
from colocated_rl_trainer.protocol.settings import TrainerConfig
from colocated_rl_trainer.ref_policy.score_queue import QueuedSample, ScoringFailed
from colocated_rl_trainer.state.weights import load_model


@dataclass(frozen=True)
class _QueuedBatch:
    """Holds queued samples one after another, as `batch.Samples` does."""

    tokens: Tensor
    loss_mask: Tensor
    start: Tensor
    end: Tensor

    @classmethod
    def of(cls, samples: Sequence[QueuedSample]) -> _QueuedBatch:
        ends = torch.tensor([*accumulate(len(sample) for sample in samples)])
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        mask = torch.zeros(int(ends[-1]), dtype=torch.bool)
        for sample, start, end in zip(samples, starts.tolist(), ends.tolist(), strict=True):
            mask[start + sample.start : end] = True
        tokens = torch.cat([torch.frombuffer(sample.ids, dtype=torch.int32) for sample in samples]).long()
        return cls(tokens, mask, starts, ends)


class Scorer:
    """Scores samples with one copy of the model. config: how passes are made, as for trainers.

    of_shared: trainers divide the model among themselves.
    """

    def __init__(self, directory: Path, device: str, config: TrainerConfig, *, of_shared: bool = False) -> None:
        """Load the model. Raises ConfigError, OSError."""
        self._config = config
        self._device = torch.device(device)
        self._dtype = torch.bfloat16 if config.computes_in(device) == "bfloat16" else torch.float32
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        # layers compute as those of a policy with adapters, or of a divided one: other rounding would be divergence
        frozen = self._dtype if config.lora or of_shared else None
        model = load_model(directory, packing=config.packing, frozen=frozen)
        self._model = model.requires_grad_(False).to(self._device)
        self.vocabulary = int(self._model.config.get_text_config().vocab_size)

    def score(self, samples: Sequence[QueuedSample]) -> list[bytes]:
        """Return the answer to each sample. Raises ScoringFailed, after which the model is unchanged."""
        batch, config = _QueuedBatch.of(samples), self._config
        logp = torch.full_like(batch.tokens, torch.nan, dtype=torch.float32)
        passes = divide_into_passes(
            batch, range(len(samples)), tokens=config.micro_batch_tokens, packing=config.packing
        )
        try:
            for micro in passes:
                with torch.inference_mode():
                    logp[micro.tokens] = logp_and_entropy(
                        self._model,
                        batch,
                        micro,
                        temperature=samples[0].temperature,
                        device=self._device,
                        dtype=self._dtype,
                        float32_head=config.fp32_lm_head,
                    )[0].cpu()
        except torch.OutOfMemoryError as error:
            longest = max(map(len, samples))
            raise ScoringFailed(
                f"no memory for a pass over {longest} tokens: lower microBatchTokens (it is "
                f"{config.micro_batch_tokens}) in spec.trainer.config, or give spec.reference larger devices: {error}"
            ) from error
        bounds = zip(samples, batch.start.tolist(), batch.end.tolist(), strict=True)
        return [logp[start + sample.start : end].numpy().tobytes() for sample, start, end in bounds]
