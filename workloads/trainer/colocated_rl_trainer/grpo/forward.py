"""Compute the log-probabilities of samples' tokens in one forward pass.

Policy and reference, on whichever devices, are computed here and nowhere else: they differ in weights alone.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from colocated_rl_trainer.grpo.batch import MicroBatch, Samples
from colocated_rl_trainer.grpo.loss import token_logp
from colocated_rl_trainer.state.head import ScoringForward
from colocated_rl_trainer.state.sharding import computing_in


def logp_and_entropy(
    model: PreTrainedModel,
    samples: Samples,
    micro: MicroBatch,
    *,
    temperature: float,
    device: torch.device,
    dtype: torch.dtype,
    float32_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute log-probability and entropy of each selected token in the micro-batch, in nats.

    Both are [selected] float32 on `device`, in the order of `micro.tokens`.

    dtype: of the computation; parameters are float32. float32_head: logits are computed in float32 nevertheless.
    """
    packed: dict[str, object] = {}
    if micro.ends is not None:
        places = torch.cat([torch.arange(end - start) for start, end in pairwise((0, *micro.ends))])
        packed = {"position_ids": places[None].to(device), "sample_ends": micro.ends}
    inputs = {"input_ids": micro.input_ids.to(device), "use_cache": False} | packed
    positions, predicts = micro.positions.to(device), micro.predicts.to(device)
    targets = samples.tokens[micro.tokens].to(device)
    with computing_in(dtype, model, device):
        if isinstance(model.forward, ScoringForward):
            scored: tuple[Tensor, Tensor] = model(
                **inputs, positions=positions, predicts=predicts, targets=targets,
                temperature=temperature, dtype=dtype, float32_head=float32_head,
            )  # fmt: skip
            return scored
        logits = model(**inputs, logits_to_keep=positions).logits
    return token_logp(logits[predicts], targets, temperature=temperature)
