"""Check one rank's shard of a sealed batch, and divide it: minibatches over all ranks, micro-batches of one.

Which group is in which minibatch follows from the batch alone, never from how samples were dealt out to ranks; so do
the normalizers. Samples that teach nothing (advantage 0) count in the normalizer and are not computed.
Tokens above a trainer's limit of age, where it has one, are context: they count nowhere. Where there is such a limit,
so are tokens without a weight version, because nothing shows that they are within it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from colocated_rl_api.batch import HEADER_KEY, BatchHeader
from colocated_rl_trainer.grpo.loss import group_advantage
from colocated_rl_trainer.protocol.rank import Refused
from colocated_rl_trainer.protocol.settings import Advantage
from colocated_rl_trainer.state.group import Collectives

_COLUMNS = {
    "tokens": torch.int32, "sample_end": torch.int64, "loss_mask": torch.uint8, "behaviour_logp": torch.float32,
    "token_step": torch.int32, "reward": torch.float32, "group": torch.int64, "group_mean": torch.float32,
    "group_std": torch.float32, "group_count": torch.float32, "truncated": torch.uint8,
}  # fmt: skip
_EXPERTS = "experts"  # present if engines reported them, which the header declares
_FIGURES = "figures"  # present if the header has names of figures
_REFERENCE = "reference_logp"  # present if a reference has scored the batch, which the header declares
_BY_TOKEN = ("tokens", "loss_mask", "behaviour_logp", "token_step", _EXPERTS, _REFERENCE)


class BadShard(Refused):
    """A shard can't be trained on. Nothing has changed: the step can be requested again with the right file."""


class PeerRefused(Refused):
    """Another rank can't train on its shard, so this rank has not begun either."""


@dataclass(frozen=True)
class Use:
    """A use is a purpose for which a trainer reads a batch."""

    advantage: Advantage = "Spread"  # `group_advantage`
    max_token_age: int | None = None  # in steps, of the weights that made a token: older tokens are not trained
    experts: tuple[int, int] | None = None  # of a token in all layers, and of a layer; None: none are replayed
    equal_too: bool = False  # samples of groups without a spread are computed: a penalty or bonus may move them


AS_IT_IS = Use()


@dataclass(frozen=True)
class ShardSample:
    """Holds one sample, prompt and response: [length] each, on the requested device."""

    tokens: Tensor  # int64
    is_trained: Tensor  # bool: written by the policy, and not too old
    behaviour_logp: Tensor  # float32, nats, as the engine sampled the token; 0 where `is_trained` is not
    reward: float
    advantage: float  # GRPO's: in spreads of its group's rewards
    reference_logp: Tensor | None  # float32, nats, with which the batch was sealed, 0 as above; or None
    figures: Mapping[str, float]  # what came beside the reward, by name


@dataclass(frozen=True)
class Shard:
    """Holds columns as in `colocated_rl_api.batch`, on the CPU, and values derived from them."""

    header: BatchHeader
    tokens: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T]: to be trained
    behaviour_logp: Tensor
    reference_logp: Tensor | None  # None: no reference scored the batch before it was sealed
    experts: Tensor | None  # int16 [T, width], -1 where not known; None: not in the batch, or not to be used
    token_step: Tensor
    reward: Tensor
    group: Tensor
    figures: Tensor | None  # float32 [n, names in the header], NaN where a sample has none; None: the batch has none
    advantage: Tensor  # [n]
    start: Tensor  # int64 [n], in [T]
    end: Tensor
    loss_tokens: Tensor  # int64 [n]
    written_tokens: int  # by the policy, however old
    use: Use

    @classmethod
    def read(
        cls, path: Path, *, step: int, shard: int, shards: int, use: Use = AS_IT_IS, is_scored: bool = False
    ) -> Shard:
        """Read and check a shard. is_scored: a reference has to have scored it. Raises BadShard with the fault."""
        try:
            with safe_open(path, framework="pt") as file:
                header = BatchHeader.model_validate_json((file.metadata() or {}).get(HEADER_KEY, ""))
                column = {name: file.get_tensor(name) for name in _columns(header, use)}
        except (OSError, SafetensorError, ValidationError) as error:
            raise BadShard(f"shard {path} can't be read: {error}: fetch it again") from error
        if (header.step, header.shard, header.shards) != (step, shard, shards):
            raise BadShard(
                f"{path} is shard {header.shard} of {header.shards} of step {header.step}, "
                f"asked for was shard {shard} of {shards} of step {step}"
            )
        if is_scored and not header.has_reference:
            raise BadShard(f"shard {path} of step {step} was sealed without scores of the job's reference")
        if fault := _fault_of_shapes(column, _columns(header, use)) or _fault_of_values(column, use, header):
            raise BadShard(f"shard {path} of step {step}: {fault}")
        end = column["sample_end"]
        start = torch.cat([end.new_zeros(1), end])[:-1]
        mask = written = column["loss_mask"].bool()
        if use.max_token_age is not None:
            is_known = column["token_step"] >= 0
            mask = written & is_known & (step - 1 - column["token_step"] <= use.max_token_age)
        before = torch.cat([end.new_zeros(1), mask.long().cumsum(0)])
        return cls(
            header=header,
            tokens=column["tokens"].long(),
            loss_mask=mask,
            behaviour_logp=column["behaviour_logp"],
            reference_logp=column.get(_REFERENCE),
            experts=column.get(_EXPERTS),
            token_step=column["token_step"],
            reward=column["reward"],
            group=column["group"],
            figures=column.get(_FIGURES),
            advantage=group_advantage(
                *(column[name] for name in ("reward", "group_mean", "group_std", "group_count")),
                kind=use.advantage,
            ),
            start=start,
            end=end,
            loss_tokens=before[end] - before[start],
            written_tokens=int(written.sum()),
            use=use,
        )

    @property
    def samples(self) -> int:
        return len(self.end)

    def each(self, device: torch.device | str) -> Iterator[ShardSample]:
        """Yield the samples one by one, on `device`, for a loop that does not pack them."""
        for number, (start, end) in enumerate(zip(self.start.tolist(), self.end.tolist(), strict=True)):
            yield ShardSample(
                tokens=self.tokens[start:end].to(device),
                is_trained=self.loss_mask[start:end].to(device),
                behaviour_logp=self.behaviour_logp[start:end].to(device),
                reward=float(self.reward[number]),
                advantage=float(self.advantage[number]),
                reference_logp=None if self.reference_logp is None else self.reference_logp[start:end].to(device),
                figures=self._figures_of(number),
            )

    def _figures_of(self, number: int) -> dict[str, float]:
        values = [] if self.figures is None else self.figures[number].tolist()
        return {name: value for name, value in zip(self.header.figures, values, strict=True) if not math.isnan(value)}

    def groups(self) -> dict[int, GroupShare]:
        """Return this rank's part of each group."""
        shares: dict[int, GroupShare] = {}
        teaching = self.teaching()
        for group, tokens, teaches in zip(
            self.group.tolist(), self.loss_tokens.tolist(), teaching.tolist(), strict=True
        ):
            known = shares.get(group, GroupShare(0, False, 0))
            shares[group] = GroupShare(
                known.loss_tokens + tokens, known.teaches or teaches, known.samples + (tokens > 0)
            )
        return shares

    def teaching(self) -> Tensor:
        """Return which samples have a gradient: bool [n]."""
        return ((self.advantage != 0) | self.use.equal_too) & (self.loss_tokens > 0)


def read_together(
    path: Path, group: Collectives, *, step: int, use: Use = AS_IT_IS, is_scored: bool = False
) -> tuple[Shard, list[dict[int, GroupShare]]]:
    """Read this rank's shard and gather every rank's part of each group. Raises Refused on every rank or on none."""
    shard, fault = None, None
    try:
        shard = Shard.read(path, step=step, shard=group.rank, shards=group.size, use=use, is_scored=is_scored)
    except BadShard as error:
        fault = error
    outcomes = group.gather(
        (str(fault) if fault else None, shard.groups() if shard else {}, shard.written_tokens if shard else 0)
    )
    if fault is not None:
        raise fault
    assert shard is not None
    if faults := [f"rank {peer}: {reason}" for peer, (reason, _, _) in enumerate(outcomes) if reason]:
        raise PeerRefused(f"step {step} not begun: {'; '.join(faults)}")
    loss_tokens = sum(written for _, _, written in outcomes)
    if loss_tokens != shard.header.loss_tokens:
        raise BadShard(f"the shards of step {step} hold {loss_tokens} loss tokens, not {shard.header.loss_tokens}")
    return shard, [share for _, share, _ in outcomes]


def _columns(header: BatchHeader, use: Use) -> Mapping[str, torch.dtype]:
    experts = {_EXPERTS: torch.int16} if header.has_experts and use.experts else {}
    figures = {_FIGURES: torch.float32} if header.figures else {}
    return _COLUMNS | experts | figures | ({_REFERENCE: torch.float32} if header.has_reference else {})


def _fault_of_shapes(column: Mapping[str, Tensor], columns: Mapping[str, torch.dtype]) -> str | None:
    for name, dtype in columns.items():
        tensor = column[name]
        dimensions = 2 if name in (_EXPERTS, _FIGURES) else 1
        if tensor.dtype != dtype or tensor.dim() != dimensions:
            return (
                f"column {name} is {tensor.dtype} {list(tensor.shape)}, should be {dtype} of {dimensions} dimension(s)"
            )
    tokens, samples = len(column["tokens"]), len(column["sample_end"])
    for name, tensor in column.items():
        if len(tensor) != (wanted := tokens if name in _BY_TOKEN else samples):
            return f"column {name} has {len(tensor)} entries, should have {wanted}"
    return None


def _fault_of_values(column: Mapping[str, Tensor], use: Use, header: BatchHeader) -> str | None:
    end = column["sample_end"]
    start = torch.cat([end.new_zeros(1), end])[:-1]
    if bool((end <= start).any()) or len(column["tokens"]) != (int(end[-1]) if len(end) else 0):
        return "sample_end must rise and end at the number of tokens"
    mask = column["loss_mask"].bool()
    if bool(mask[start].any()):
        return "the first token of a sample can't be trained: it has no context"
    for name in ("behaviour_logp", _REFERENCE):
        logp = column.get(name, column["behaviour_logp"])
        if not bool(torch.isfinite(logp).all()) or bool((logp > 1e-3).any()):
            return f"{name} must be finite and at most 0"
    if not header.has_unversioned and bool((column["token_step"][mask] < 0).any()):
        return "a token to be trained has no step, and the header does not declare any (hasUnversioned)"
    for name in ("reward", "group_mean", "group_std", "group_count"):
        if not bool(torch.isfinite(column[name]).all()):
            return f"{name} must be finite"
    if header.figures and column[_FIGURES].shape[1] != len(header.figures):
        return f"figures must be {len(header.figures)} of each sample, as the header names them"
    if use.experts and (chosen := column.get(_EXPERTS)) is not None:
        width, experts = use.experts
        if chosen.shape[1] != width or bool((chosen < -1).any()) or bool((chosen >= experts).any()):
            return f"experts must be {width} of each token, each below {experts}"
    return None


# ------------------------------------------------------------------------------------------ minibatches, over all ranks
@dataclass(frozen=True)
class GroupShare:
    loss_tokens: int
    teaches: bool
    samples: int  # with a token to be trained


@dataclass(frozen=True)
class Minibatch:
    """Holds the groups of one optimizer call. `loss_tokens` and `samples` of all ranks divide means."""

    groups: frozenset[int]
    loss_tokens: int
    teaches: bool
    samples: int


def deal_minibatches(shares: Sequence[Mapping[int, GroupShare]], *, count: int, seed: int) -> list[Minibatch]:
    """Deal the groups of all ranks out into `count` minibatches, those that teach first, so that each has its share.

    shares: each rank's part of the groups. Pure and the same on every rank; neither the order of ranks nor the split
    of groups matters.
    """
    tokens: Counter[int] = Counter()
    samples: Counter[int] = Counter()
    teaches: dict[int, bool] = {}
    for share in shares:
        for group, part in share.items():
            tokens[group] += part.loss_tokens
            samples[group] += part.samples
            teaches[group] = teaches.get(group, False) or part.teaches
    order = sorted(tokens)
    random.Random(seed).shuffle(order)
    order.sort(key=lambda group: not teaches[group])
    hands = [order[start::count] for start in range(count)]
    return [
        Minibatch(
            groups=frozenset(hand),
            loss_tokens=sum(tokens[group] for group in hand),
            teaches=any(teaches[group] for group in hand),
            samples=sum(samples[group] for group in hand),
        )
        for hand in hands
    ]


# ------------------------------------------------------------------------------------------ micro-batches, of one rank
class Samples(Protocol):
    """Holds samples one after another, of a shard or of another caller that computes its samples alike."""

    @property
    def tokens(self) -> Tensor:
        """Return int64 [T]."""

    @property
    def loss_mask(self) -> Tensor:
        """Return bool [T]: tokens whose log-probabilities are computed; never the first of a sample."""

    @property
    def start(self) -> Tensor:
        """Return int64 [n], in [T]."""

    @property
    def end(self) -> Tensor:
        """Return int64 [n], in [T]."""


@dataclass(frozen=True)
class MicroBatch:
    """Holds samples of one forward pass: of similar length, with padding that a causal model can't see; or packed."""

    input_ids: Tensor  # int64 [rows, width]
    positions: Tensor  # int64 [kept]: positions whose logits are needed by at least one row
    predicts: Tensor  # bool [rows, kept]: where the next token is to be trained
    tokens: Tensor  # int64 [trained]: places in the shard's [T] of the tokens that `predicts` selects, row by row
    sample: Tensor  # int64 [trained]: their samples
    places: Tensor  # int64 [rows, width]: places of `input_ids` in the shard's [T]; -1: padding
    ends: tuple[int, ...] | None = None  # of the samples in the one row, when packed


def micro_batches(shard: Shard, minibatch: Minibatch, *, tokens: int, packing: bool = False) -> list[MicroBatch]:
    """Divide this rank's teaching samples of a minibatch into passes of at most `tokens` tokens. May be empty."""
    group = shard.group.tolist()
    chosen = [sample for sample in shard.teaching().nonzero().squeeze(1).tolist() if group[sample] in minibatch.groups]
    return divide_into_passes(shard, chosen, tokens=tokens, packing=packing)


def divide_into_passes(samples: Samples, chosen: Sequence[int], *, tokens: int, packing: bool) -> list[MicroBatch]:
    """Divide the chosen samples into forward passes of at most `tokens` tokens, padding included.

    The shortest come first, so that little is padded. A sample longer than `tokens` gets a pass of its own.
    """
    length = (samples.end - samples.start).tolist()
    rows: list[list[int]] = []
    for sample in sorted(chosen, key=lambda sample: (length[sample], sample)):
        if rows:
            others = sum(length[other] for other in rows[-1]) if packing else len(rows[-1]) * length[sample]
        if not rows or others + length[sample] > tokens:
            rows.append([])
        rows[-1].append(sample)
    return [(_pack if packing else _collate)(samples, row) for row in rows]


def _pack(samples: Samples, row: Sequence[int]) -> MicroBatch:
    places = torch.cat([torch.arange(int(samples.start[sample]), int(samples.end[sample])) for sample in row])
    ends = torch.tensor([int(samples.end[sample] - samples.start[sample]) for sample in row]).cumsum(0)
    positions = samples.loss_mask[places].nonzero().squeeze(1) - 1  # the first of a sample is not trained
    tokens = places[positions] + 1
    return MicroBatch(
        input_ids=samples.tokens[places][None],
        positions=positions,
        predicts=torch.ones(1, len(positions), dtype=torch.bool),
        tokens=tokens,
        sample=torch.tensor(row)[torch.searchsorted(ends, positions, right=True)],
        places=places[None],
        ends=tuple(ends.tolist()),
    )


def _collate(samples: Samples, row: Sequence[int]) -> MicroBatch:
    rows = torch.tensor(row)
    start, end = samples.start[rows, None], samples.end[rows, None]
    place = start + torch.arange(int((end - start).max()))  # [rows, width], in [T]
    real = place < end
    place = place.clamp(max=len(samples.tokens) - 1)
    next_is_trained = torch.zeros_like(real)
    next_is_trained[:, :-1] = (samples.loss_mask[place] & real)[:, 1:]
    positions = next_is_trained.any(0).nonzero().squeeze(1)
    predicts = next_is_trained[:, positions]
    return MicroBatch(
        input_ids=torch.where(real, samples.tokens[place], 0),
        positions=positions,
        predicts=predicts,
        tokens=(place[:, positions] + 1)[predicts],
        sample=rows[:, None].expand_as(predicts)[predicts],
        places=torch.where(real, place, -1),
    )
