"""A shard of a batch, as a trainer's rank reads it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from colocated_rl_trainer.grpo.batch import BadShard, Shard, deal_minibatches, micro_batches


def batch_shard(data: bytes) -> None:
    """A shard is refused, or every token to be trained is in exactly one pass, with a context."""
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(data)
        file.flush()
        try:
            shard = Shard.read(Path(file.name), step=1, shard=0, shards=1)
        except BadShard as bad:
            str(bad).encode()
            return
        taught = shard.loss_mask.new_zeros(len(shard.tokens))
        for minibatch in deal_minibatches([shard.groups()], count=2, seed=shard.header.seed):
            for micro in micro_batches(shard, minibatch, tokens=64):
                assert not bool(taught[micro.tokens].any())
                taught[micro.tokens] = True
        wanted = shard.loss_mask & shard.teaching().repeat_interleave(shard.end - shard.start)
        assert torch.equal(wanted, taught)
