"""The frozen model on one device, and passes over questions with it."""

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
class _Asked:
    """Questions one after another, as `batch.Samples` has them."""

    tokens: Tensor
    loss_mask: Tensor
    start: Tensor
    end: Tensor

    @classmethod
    def of(cls, questions: Sequence[QueuedSample]) -> _Asked:
        ends = torch.tensor([*accumulate(len(question) for question in questions)])
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        mask = torch.zeros(int(ends[-1]), dtype=torch.bool)
        for question, start, end in zip(questions, starts.tolist(), ends.tolist(), strict=True):
            mask[start + question.start : end] = True
        tokens = torch.cat([torch.frombuffer(question.ids, dtype=torch.int32) for question in questions]).long()
        return cls(tokens, mask, starts, ends)


class Scorer:
    """config: says how passes are made, as it says it to trainers."""

    def __init__(self, directory: Path, device: str, config: TrainerConfig) -> None:
        """Raises ConfigError, OSError."""
        self._config = config
        self._device = torch.device(device)
        self._dtype = torch.bfloat16 if config.computes_in(device) == "bfloat16" else torch.float32
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._model = load_model(directory, packing=config.packing).requires_grad_(False).to(self._device)
        self.vocabulary = int(self._model.config.get_text_config().vocab_size)

    def score(self, questions: Sequence[QueuedSample]) -> list[bytes]:
        """Of each, its answer. Raises NotScored: nothing is wrong with the model."""
        asked, config = _Asked.of(questions), self._config
        logp = torch.full_like(asked.tokens, torch.nan, dtype=torch.float32)
        passes = divide_into_passes(
            asked, range(len(questions)), tokens=config.micro_batch_tokens, packing=config.packing
        )
        try:
            for micro in passes:
                with torch.inference_mode():
                    logp[micro.tokens] = logp_and_entropy(
                        self._model,
                        asked,
                        micro,
                        temperature=questions[0].temperature,
                        device=self._device,
                        dtype=self._dtype,
                    )[0].cpu()
        except torch.OutOfMemoryError as error:
            longest = max(map(len, questions))
            raise ScoringFailed(
                f"no memory for a pass over {longest} tokens: lower microBatchTokens (it is "
                f"{config.micro_batch_tokens}) in spec.trainer.config, or give spec.reference larger devices: {error}"
            ) from error
        bounds = zip(questions, asked.start.tolist(), asked.end.tolist(), strict=True)
        return [logp[start + question.start : end].numpy().tobytes() for question, start, end in bounds]
