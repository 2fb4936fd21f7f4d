"""A sealed batch reaches a trainer rank in a file: one safetensors file per shard, with a JSON header.

The rollout controller serves it at `GET /v1/batches/STEP?shard=RANK` on its data port (TLS, data token), any number of
times, always the same bytes; header `X-Content-SHA256` holds the digest of the body. The header of the batch stands in
the safetensors metadata under `HEADER_KEY`. Samples are divided among ranks when the batch is sealed; every normalizer
is in the header or in the columns, so that no result depends on the split.

Columns (n samples, T tokens of all of them, prompt and response, one after another):

    tokens           int32   [T]
    sample_end       int64   [n]    end of each sample in [T]
    loss_mask        uint8   [T]    1: token written by the policy, to be trained
    behaviour_logp   float32 [T]    nats, under the weights that sampled it; 0 where loss_mask is 0
    reference_logp   float32 [T]    nats, under the reference; 0 where loss_mask is 0. Only where the header declares it
    token_step       int32   [T]    step of the weights that made the token; -1 where loss_mask is 0; and of a token
                                    without a weight version, only where the header declares those
    reward           float32 [n]
    group            int64   [n]    group number, as admitted
    group_mean, group_std, group_count   float32 [n]   of the rewards of the sample's group (std: population)
    truncated        uint8   [n]    1: ended by the token limit
    experts          int16   [T, W] experts of each token in each layer of a mixture, as the engine chose them; -1 where
                                    it did not report any. Only where the header says so
    figures          float32 [n, F] what came beside the reward, under the names that the header has; NaN where a sample
                                    has none of that name. Only where the header has names
    sample           int64   [n]    sample number, as admitted; for people, as the next one
    prompt_tokens    int32   [n]    tokens of its prompt, which stand first
"""

from __future__ import annotations

from colocated_rl_api.names import PromptPosition
from colocated_rl_api.wire import Wire

HEADER_KEY = "colocated_rl_batch"
DIGEST_HEADER = "X-Content-SHA256"


class BatchHeader(Wire):
    """A header describes the whole batch. It is the same in every shard, except `shard`."""

    step: int
    shard: int
    shards: int
    groups: int
    samples: int
    loss_tokens: int  # of the whole batch: the normalizer of a token-level loss
    temperature: float  # of sampling: trainer logits, and those of a reference, are divided by it
    seed: int
    prompt_position: PromptPosition | None = None  # a job with only a checkpoint goes on there; None: unknown
    has_experts: bool = False  # engines reported the experts that tokens were routed to: column experts
    has_reference: bool = False  # the reference scored the batch before it was sealed: column reference_logp
    figures: tuple[str, ...] = ()  # names of the figures that came beside rewards: column figures
    has_unversioned: bool = False  # some tokens to be trained have no weight version: their token_step is -1
