"""Keep the reference's scores of one rank's shard in a file beside it, so that a restart costs no second pass.

Scores follow from the shard's bytes and from a model that never changes. So they belong to no lineage, and the next one
may use them. A file that is damaged, or was made from another shard, counts as absent.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from colocated_rl_api.weights import Digest
from colocated_rl_trainer.state.tensor_file import write_tensors

_LOGP = "reference_logp"
_SHARD = "shard"


def write_scores(file: Path, logp: Tensor, *, shard: Digest) -> None:
    """Write the scores of the shard with this digest. Raises OSError.

    logp: [T] float32, nats, as long as the shard's columns; NaN for tokens that no step needs.
    """
    draft = file.with_name(f"{file.name}.draft")
    write_tensors(draft, {_LOGP: logp}, metadata={_SHARD: shard})
    draft.replace(file)


def find_scores(file: Path, *, shard: Digest, needed: Tensor) -> Tensor | None:
    """Return the scores, [T] float32, or None if they have to be computed. needed: bool [T]."""
    try:
        with safe_open(file, framework="pt") as content:
            if (content.metadata() or {}).get(_SHARD) != shard:
                return None
            logp: Tensor = content.get_tensor(_LOGP).clone()  # not a view of the file
    except (OSError, SafetensorError):
        return None
    is_whole = logp.shape == needed.shape and not bool(torch.isnan(logp[needed]).any())
    return logp if is_whole else None
