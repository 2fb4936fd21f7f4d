"""Pack samples: several stand one after another in one row, so that no position is padding.

Each layer's attention is computed so that no sample sees another one and nothing is computed between them; the rest of
a layer is unaware of it. On a GPU with torch's kernel for samples of any length one call does it (`attend_at_once`),
elsewhere a call for each sample. That is right for a model whose layers look at other positions by full attention
alone. Any other model (windows, recurrence) is rejected when it is loaded: `check_packing` compares.
"""

from __future__ import annotations

from functools import lru_cache
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from colocated_rl_trainer.protocol.settings import ConfigError

PACKED_ATTENTION = "colocated_rl_packed"
_PROBE = (5, 8, 3)  # lengths of samples
MOST_WIDTH = 256  # of a head, of FlashAttention 2
_ARGUMENTS = {"scale", "window_size", "enable_gqa"}  # of torch 2.13, not of all that came before
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the spread of logits; seeing another sample is all of it
_BESIDE = {"sliding_window": "windows", "softcap": "a soft cap", "s_aux": "sinks"}  # as transformers hands them over


class _MoreThanCausal(Exception):
    """Attention of a model has something that packed samples lack."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sample_ends: tuple[int, ...] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sample. query, key, value: [rows, heads, positions, width].

    sample_ends: where the samples of the one row end; None if each row is one sample.
    """
    if sample_ends is None:
        return _causal(module, query, key, value, attention_mask, options)
    if what := next((words for name, words in _BESIDE.items() if options.get(name) is not None), None):
        raise _MoreThanCausal(what)
    if torch.is_autocast_enabled(query.device.type):  # as attention would, and so that a kernel of that dtype is found
        kind = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(kind) for tensor in (query, key, value))
    is_of_one_width = query.shape[-1] == value.shape[-1]  # MLA's values are less wide
    is_of_kernel = is_of_one_width and has_kernel(query.device, query.dtype, width=query.shape[-1])
    if is_of_kernel and not options.get("dropout"):
        return attend_at_once(query, key, value, sample_ends=sample_ends, scale=options.get("scaling")), None
    parts, start = [], 0
    for end in sample_ends:
        here = slice(start, end)
        parts.append(_causal(module, query[:, :, here], key[:, :, here], value[:, :, here], None, options)[0])
        start = end
    return torch.cat(parts, dim=1), None


def attend_at_once(
    query: Tensor, key: Tensor, value: Tensor, *, sample_ends: tuple[int, ...], scale: float | None
) -> Tensor:
    """Compute causal attention within each sample of one row by one call. Returns [1, positions, heads, width].

    query, key, value: [1, heads, positions, width]; key and value may have fewer heads, which groups of query's share.
    """
    starts = _starts(sample_ends, query.device)
    longest = max(end - start for start, end in pairwise((0, *sample_ends)))
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attended = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=True)
    assert isinstance(attended, Tensor)
    return attended[None]


@lru_cache(maxsize=8)
def has_kernel(device: torch.device, dtype: torch.dtype, *, width: int) -> bool:
    """Return whether torch has a kernel for samples of any length: FlashAttention 2, for NVIDIA's devices since Ampere.

    width: of a head. Source: `mha_varlen_fwd` in torch's aten/src/ATen/native/transformers/cuda/flash_attn.
    """
    if device.type != "cuda" or torch.version.hip or not _ARGUMENTS <= signature(varlen_attn).parameters.keys():
        return False
    is_of_kernel = dtype in (torch.bfloat16, torch.float16) and width <= MOST_WIDTH and width % 8 == 0
    return is_of_kernel and torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache(maxsize=1)
def _starts(sample_ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where each sample begins, and the last one ends. All layers of a pass ask for the same."""
    return torch.tensor((0, *sample_ends), dtype=torch.int32, device=device)


def check_packing(model: PreTrainedModel, name: str) -> None:
    """Raise ConfigError if packing changes a sample's logits. Collective where ranks share the model."""
    config = model.config.get_text_config()
    vocabulary = int(config.vocab_size)
    embedding: Any = model.get_input_embeddings()
    device = embedding.weight.device
    samples = [torch.arange(1, length + 1, device=device) * 7919 % vocabulary for length in _PROBE]
    places = torch.cat([torch.arange(length, device=device) for length in _PROBE])
    try:
        with torch.no_grad():
            alone = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in samples])
            packed = model(
                input_ids=torch.cat(samples)[None],
                position_ids=places[None],
                sample_ends=ends_of(_PROBE),
                use_cache=False,
            ).logits[0]
    except _MoreThanCausal as error:
        raise ConfigError(
            f"packing: attention has {error}, which packed samples lack, in {name}: leave packing out"
        ) from error
    except (TypeError, AttributeError) as error:  # it takes no positions, or needs the mask of all
        raise ConfigError(f"packing: {name} computes attention by itself: leave packing out; {error}") from error
    window = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    windows = getattr(config, "layer_types", None) or [window]  # PhiMoE has its window in the mask alone
    apart = float((alone.float() - packed.float()).abs().max() / alone.float().std())
    if {"full_attention"} != set(windows) or not apart <= _TOLERANCE[alone.dtype]:
        raise ConfigError(f"packing: samples in one row would see each other in {name}: leave packing out")


def ends_of(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sum(lengths[: number + 1]) for number in range(len(lengths)))


def _causal(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, None]:
    attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **options)
    return attended


AttentionInterface.register(PACKED_ATTENTION, attend)
