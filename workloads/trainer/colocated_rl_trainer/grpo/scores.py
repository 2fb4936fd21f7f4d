"""What a reference says of one rank's shard, in a file beside it: found again after a restart, it costs no second pass.

It follows from the shard's bytes and from a model that never changes, and so belongs to no lineage: whichever asks next
may use it. A file that is damaged, or was made from another shard, is one that is not there.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from colocated_rl_api.weights import Digest
from colocated_rl_trainer.state.weights import write_tensors

_LOGP = "reference_logp"
_SHARD = "shard"


def write_scores(file: Path, logp: Tensor, *, shard: Digest) -> None:
    """logp: [T] float32, as long as the columns of the shard with this digest; NaN where nobody needs it.

    Raises OSError.
    """
    draft = file.with_name(f"{file.name}.draft")
    write_tensors(draft, {_LOGP: logp}, {_SHARD: shard})
    draft.replace(file)


def find_scores(file: Path, *, shard: Digest, needed: Tensor) -> Tensor | None:
    """[T] float32, or None if they have to be computed. needed: bool [T]."""
    try:
        with safe_open(file, framework="pt") as content:
            if (content.metadata() or {}).get(_SHARD) != shard:
                return None
            logp: Tensor = content.get_tensor(_LOGP).clone()  # no view of the file
    except (OSError, SafetensorError):
        return None
    is_whole = logp.shape == needed.shape and not bool(torch.isnan(logp[needed]).any())
    return logp if is_whole else None
