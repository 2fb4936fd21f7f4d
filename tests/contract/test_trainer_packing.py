"""Attention of packed samples by one call computes what a call for each sample does.

torch's kernel for it is one of GPUs (tests/gpu asks it). Here a plain one takes its place, by torch's description of
the operator, so that all around it is what runs on a GPU: layout, offsets, shared heads, scale, gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from colocated_rl_trainer.state import packing
from colocated_rl_trainer.state.packing import attend, attend_at_once, ends_of, has_kernel
from colocated_rl_trainer.state.sharding import computing_in
from colocated_rl_trainer.state.weights import load_model
from fakes.tiny_model import write_tiny_model

SAME = 1e-5


class Layer(nn.Module):
    """Tells attention how many heads of query share one of key and value."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def weights_of(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """Return how much each position of one sample takes of each. query, key: [heads, positions, width]."""
    scores = query @ key.transpose(1, 2) * (scale or 1 / math.sqrt(query.shape[-1]))
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


def by_head(tensor: Tensor, start: int, end: int, *, heads: int) -> Tensor:
    """Return one sample of [positions, heads, width] as [heads, positions, width], with as many heads as query has."""
    return tensor[start:end].repeat_interleave(heads // tensor.shape[1], dim=1).transpose(0, 1)


def forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, longest: int, longest_key: int,
    is_causal: bool = False, scale: float | None = None, window_size: list[int] | None = None,
    enable_gqa: bool = False, *others: None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert (True, [-1, 0], True) == (is_causal, window_size, enable_gqa)
    assert (torch.int32, torch.int32) == (starts.dtype, key_starts.dtype)
    assert starts.tolist() == key_starts.tolist()
    assert longest == longest_key == max(end - start for start, end in pairwise(starts.tolist()))
    attended, heads = torch.empty_like(query), query.shape[1]
    for start, end in pairwise(starts.tolist()):
        q, k, v = (by_head(each, start, end, heads=heads) for each in (query, key, value))
        attended[start:end] = (weights_of(q, k, scale) @ v).transpose(0, 1)
    return attended, torch.zeros(heads, query.shape[0]), torch.zeros(2, dtype=torch.uint64)


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, starts: Tensor,
    key_starts: Tensor, longest: int, longest_key: int, is_causal: bool, state: Tensor, scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    gradients, heads = [torch.zeros_like(each) for each in (query, key, value)], query.shape[1]
    for start, end in pairwise(starts.tolist()):
        q, k, v, g = (by_head(each, start, end, heads=heads) for each in (query, key, value, gradient))
        weights, of_weights = weights_of(q, k, scale), g @ v.transpose(1, 2)
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
        of_scores = of_scores * (scale or 1 / math.sqrt(query.shape[-1]))
        found = (of_scores @ k, of_scores.transpose(1, 2) @ q, weights.transpose(1, 2) @ g)
        for whole, part in zip(gradients, found, strict=True):
            shared = whole.shape[1]
            whole[start:end] = part.unflatten(0, (shared, heads // shared)).sum(1).transpose(0, 1)
    return tuple(gradients)


@pytest.fixture(scope="module", autouse=True)
def kernel_of_a_cpu() -> Iterator[None]:
    with torch.library._scoped_library("torch_attn", "FRAGMENT") as library:
        torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward, lib=library)
        torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward, lib=library)
        yield


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    scale=st.sampled_from([None, 0.25, 2.0]),
    seed=st.integers(0, 2**16),
)
def test_one_call_computes_what_one_for_each_sample_does(
    lengths: list[int], heads: tuple[int, int], scale: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    of_query, of_key = heads
    module = Layer(of_query // of_key)
    ends = ends_of(tuple(lengths))
    query, key, value = inputs = [
        torch.randn(1, count, ends[-1], 8, requires_grad=True) for count in (of_query, of_key, of_key)
    ]
    outgoing = torch.randn(1, ends[-1], of_query, 8)

    one_by_one, _ = attend(module, query, key, value, None, sample_ends=ends, scaling=scale)
    at_once = attend_at_once(query, key, value, sample_ends=ends, scale=scale)

    assert at_once.shape == one_by_one.shape
    assert (at_once - one_by_one).abs().max() < SAME
    expected, found = (torch.autograd.grad(each, inputs, outgoing) for each in (one_by_one, at_once))
    assert all((mine - other).abs().max() < SAME * 10 for mine, other in zip(found, expected, strict=True))


def test_values_less_wide_than_keys_are_attended_by_a_call_for_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has one width for all: packed on a GPU, DeepSeek-V3 would have ended in its first step."""
    query, key, value = (torch.randn(1, 4, 9, width) for width in (8, 8, 4))

    expected, _ = attend(Layer(1), query, key, value, None, sample_ends=(5, 9))
    monkeypatch.setattr(packing, "has_kernel", lambda *_, **__: True)
    attended, _ = attend(Layer(1), query, key, value, None, sample_ends=(5, 9))

    assert torch.equal(attended, expected)


def test_a_packed_model_computes_by_it_what_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = write_tiny_model(tmp_path / "model")
    lengths = (7, 1, 19, 12)
    ids = torch.arange(sum(lengths))[None] * 7919 % 48
    places = torch.cat([torch.arange(length) for length in lengths])[None]

    def computed(model: Any, **options: Any) -> tuple[Tensor, Tensor]:
        logits = model(input_ids=ids, position_ids=places, use_cache=False, **options).logits[0]
        torch.log_softmax(logits, dim=-1)[:-1].gather(1, ids[0, 1:, None]).sum().backward()
        return logits.detach(), torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    theirs = computed(AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32))
    monkeypatch.setattr(packing, "has_kernel", lambda *_, **__: True)
    ours = computed(load_model(origin, packing=True), sample_ends=ends_of(lengths))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() < SAME * other.norm()


@pytest.mark.parametrize("seed", range(3))
def test_rounding_of_a_kernel_is_not_taken_for_samples_that_see_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Weights of bfloat16, as ranks that share a model and adapters have them, round in other places by it."""
    origin = write_tiny_model(tmp_path / "model", seed=seed, layers=8)
    monkeypatch.setattr(packing, "has_kernel", lambda *_, **__: True)
    load_model(origin, packing=True, frozen=torch.bfloat16)


def test_a_model_that_computes_in_another_dtype_than_its_weights_asks_for_the_kernel_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one rank weights are float32, and so were query and key: on a GPU the kernel was never used."""
    asked, model = [], load_model(write_tiny_model(tmp_path / "model"), packing=True)
    monkeypatch.setattr(packing, "has_kernel", lambda device, dtype, *, width: asked.append(dtype))
    with torch.no_grad(), computing_in(torch.bfloat16, model, torch.device("cpu")):
        model(input_ids=torch.arange(5)[None], sample_ends=(2, 5), use_cache=False)
    assert {torch.bfloat16} == set(asked)


@pytest.mark.parametrize(
    ("device", "dtype", "width"),
    [
        ("cpu", torch.bfloat16, 64),
        ("cuda", torch.float32, 64),
        ("cuda", torch.bfloat16, 257),
        ("cuda", torch.bfloat16, 60),
    ],
)
def test_samples_are_computed_one_by_one_where_there_is_no_kernel(device: str, dtype: torch.dtype, width: int) -> None:
    assert not has_kernel(torch.device(device), dtype, width=width)
