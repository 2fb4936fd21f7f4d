"""One forward pass over samples, which computes the log-probabilities of their tokens.

Policy and reference, on the trainer's devices or on devices of its own, are computed here and nowhere else: they differ
in weights alone.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from colocated_rl_trainer.grpo.batch import MicroBatch, Samples
from colocated_rl_trainer.grpo.loss import token_logp
from colocated_rl_trainer.state.sharding import computing_in


def logp_and_entropy(
    model: PreTrainedModel,
    samples: Samples,
    micro: MicroBatch,
    *,
    temperature: float,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Compute log-probability and entropy of each selected token in the micro-batch, in nats.

    Both are [selected] float32 on `device`, in the order of `micro.tokens`.

    dtype: of the computation; parameters are float32.
    """
    packed: dict[str, object] = {}
    if micro.ends is not None:
        places = torch.cat([torch.arange(end - start) for start, end in pairwise((0, *micro.ends))])
        packed = {"position_ids": places[None].to(device), "sample_ends": micro.ends}
    with computing_in(dtype, model, device):
        logits = model(
            input_ids=micro.input_ids.to(device),
            logits_to_keep=micro.positions.to(device),
            use_cache=False,
            **packed,
        ).logits
    return token_logp(
        logits[micro.predicts.to(device)],
        samples.tokens[micro.tokens].to(device),
        temperature=temperature,
    )
