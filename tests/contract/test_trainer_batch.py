"""Reading a shard, and dividing a batch so that no result depends on how it was split among ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from colocated_rl_api.batch import HEADER_KEY, BatchHeader
from colocated_rl_trainer.conformance.shards import Example, Values, columns, write_shard, write_shards
from colocated_rl_trainer.grpo.batch import (
    AS_IT_IS,
    BadShard,
    GroupShare,
    Minibatch,
    PeerRefused,
    Shard,
    Use,
    deal_minibatches,
    divide_into_passes,
    micro_batches,
    read_together,
)
from colocated_rl_trainer.state.group import Collectives
from fuzz.batch import batch_shard
from fuzz.targets import corpus

SAMPLES = [
    Example(prompt=[1, 2, 3], response=[4, 5], logp=[-0.1, -0.2], reward=1.0, group=7, token_step=2),
    Example(prompt=[1, 2, 3], response=[6], logp=[-0.3], reward=0.0, group=7, token_step=2),
    Example(prompt=[8], response=[9, 10, 11], logp=[-0.4, -0.5, -0.6], reward=0.5, group=9, token_step=1),
    Example(prompt=[8], response=[12], logp=[-0.7], reward=0.5, group=9, token_step=2),
]
HEADER = BatchHeader(step=3, shard=0, shards=1, groups=2, samples=4, loss_tokens=7, temperature=1.0, seed=0)
REPLAYED = Use(experts=(3, 4))  # three of four, in all layers together
Columns = dict[str, tuple[str, Values]]


def read(path: Path, use: Use = AS_IT_IS, *, is_scored: bool = False) -> Shard:
    return Shard.read(path, step=3, shard=0, shards=1, use=use, is_scored=is_scored)


def test_samples_are_found_in_the_columns(tmp_path: Path) -> None:
    shard = read(write_shards(tmp_path, SAMPLES, step=3, split=1)[0])

    assert 4 == shard.samples
    assert [0, 5, 9, 13] == shard.start.tolist()
    assert [2, 1, 3, 1] == shard.loss_tokens.tolist()
    assert [0.7071, -0.7071, 0.0, 0.0] == pytest.approx(shard.advantage.tolist(), abs=1e-3)
    assert [True, True, False, False] == shard.teaching().tolist()
    assert {7: GroupShare(3, True, 2), 9: GroupShare(4, False, 2)} == shard.groups()


def test_rank_without_samples_has_an_empty_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, SAMPLES, step=3, split=[1, 1, 1, 1])

    shard = Shard.read(tmp_path / "step-3-shard-0-of-2.safetensors", step=3, shard=0, shards=2)

    assert 0 == shard.samples
    assert {} == shard.groups()
    assert [] == micro_batches(shard, Minibatch(frozenset({7}), 3, True, 1), tokens=100)


def change(name: str, values: Values, kind: str | None = None) -> Callable[[Columns], None]:
    def apply(columns: Columns) -> None:
        columns[name] = (kind or columns[name][0], values)

    return apply


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda columns: columns.pop("reward"), "can't be read"),
        (change("reward", [1, 1, 1, 1], "int64"), "column reward is torch.int64"),
        (change("reward", [1.0, 1.0]), "column reward has 2 entries, should have 4"),
        (change("reward", [1.0] * 5), "column reward has 5 entries, should have 4"),
        (change("behaviour_logp", [0.0] * 14), "column behaviour_logp has 14 entries, should have 15"),
        (change("sample_end", [5, 5, 13, 15]), "sample_end must rise"),
        (change("sample_end", [5, 9, 7, 15]), "sample_end must rise"),
        (change("sample_end", [5, 9, 13, 14]), "sample_end must rise and end at the number of tokens"),
        (change("sample_end", [5, 9, 13, 16]), "sample_end must rise and end at the number of tokens"),
        (change("loss_mask", [1] * 15), "first token of a sample can't be trained"),
        (change("behaviour_logp", [float("nan")] * 15), "behaviour_logp must be finite"),
        (change("behaviour_logp", [0.5] * 15), "behaviour_logp must be finite and at most 0"),
        (change("token_step", [-1] * 15), "a token to be trained has no step"),
        (change("reward", [float("inf")] * 4), "reward must be finite"),
        (change("group_mean", [float("nan")] * 4), "group_mean must be finite"),
        (change("group_std", [float("inf")] * 4), "group_std must be finite"),
        (change("group_count", [float("inf")] * 4), "group_count must be finite"),
    ],
)
def test_shard_that_contradicts_itself_is_refused(
    tmp_path: Path, harm: Callable[[Columns], object], message: str
) -> None:
    content = columns(SAMPLES, {7: [1.0, 0.0], 9: [0.5, 0.5]})
    harm(content)
    write_shard(tmp_path / "shard", HEADER, content)

    with pytest.raises(BadShard, match=message):
        read(tmp_path / "shard")


def test_rounding_above_a_probability_of_one_is_accepted(tmp_path: Path) -> None:
    content = columns(SAMPLES, {7: [1.0, 0.0], 9: [0.5, 0.5]})
    change("behaviour_logp", [1e-3] * 15)(content)
    write_shard(tmp_path / "shard", HEADER, content)

    assert 4 == read(tmp_path / "shard").samples


@pytest.mark.parametrize("header", [{"step": 2}, {"step": 4}, {"shard": 1}, {"shards": 2}])
def test_shard_of_another_place_is_refused(tmp_path: Path, header: dict[str, int]) -> None:
    content = columns(SAMPLES, {7: [1.0, 0.0], 9: [0.5, 0.5]})
    write_shard(tmp_path / "shard", HEADER.model_copy(update=header), content)

    with pytest.raises(BadShard, match="asked for was shard 0 of 1 of step 3"):
        read(tmp_path / "shard")


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None])
def test_file_that_is_no_shard_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "shard").write_bytes(content)

    with pytest.raises(BadShard, match="fetch it again"):
        read(tmp_path / "shard")


@pytest.mark.parametrize(
    ("age", "trained", "teaching"),
    [
        (None, [2, 1, 3, 1], [True, True, True, True]),
        (1, [2, 1, 3, 1], [True, True, True, True]),
        (0, [2, 1, 0, 1], [True, True, False, True]),
    ],
)
def test_tokens_of_weights_that_are_too_old_are_context(
    tmp_path: Path, age: int | None, trained: list[int], teaching: list[bool]
) -> None:
    """SAMPLES are of step 3; the third one's tokens were made by the weights of step 1, one step before the newest."""
    (file,) = write_shards(tmp_path, SAMPLES, step=3, split=1)

    shard = read(file, Use(max_token_age=age, equal_too=True))

    assert trained == shard.loss_tokens.tolist()
    assert sum(trained) == int(shard.loss_mask.sum())
    assert teaching == shard.teaching().tolist()
    assert sum(trained) == sum(share.loss_tokens for share in shard.groups().values())
    assert sum(map(bool, trained)) == sum(share.samples for share in shard.groups().values())
    assert 7 == shard.written_tokens


@pytest.mark.parametrize(("age", "trained"), [(None, [2, 1, 3, 1]), (2, [2, 1, 0, 1]), (10, [2, 1, 0, 1])])
def test_tokens_without_a_version_are_trained_where_the_batch_declares_them_and_no_age_is_set(
    tmp_path: Path, age: int | None, trained: list[int]
) -> None:
    """Nothing shows that they are within a limit of age. Otherwise no shard may lack a step (above)."""
    samples = [*SAMPLES[:2], replace(SAMPLES[2], token_step=-1), replace(SAMPLES[3], token_step=0)]
    content = columns(samples, {7: [1.0, 0.0], 9: [0.5, 0.5]})
    write_shard(tmp_path / "shard", HEADER.model_copy(update={"has_unversioned": True}), content)

    shard = read(tmp_path / "shard", Use(max_token_age=age))

    assert trained == shard.loss_tokens.tolist()
    assert 7 == shard.written_tokens


def write_with(path: Path, further: dict[str, torch.Tensor], **header: object) -> Path:
    """Write SAMPLES with columns that only some batches have."""
    found = columns(SAMPLES, {7: [1.0, 0.0], 9: [0.5, 0.5]})
    tensors = {name: torch.tensor(values, dtype=getattr(torch, kind)) for name, (kind, values) in found.items()}
    declared = HEADER.model_copy(update=header).model_dump_json(by_alias=True)
    save_file({**tensors, **further}, path, {HEADER_KEY: declared})
    return path


def test_figures_beside_a_reward_come_with_their_sample(tmp_path: Path) -> None:
    """A row of a batch's names each; a sample without a figure has NaN."""
    nan = float("nan")
    figures = torch.tensor([[1.0, 5.0], [nan, 4.0], [nan, nan], [0.0, nan]])
    file = write_with(tmp_path / "shard", {"figures": figures}, figures=("format", "length"))

    samples = list(read(file).each("cpu"))

    assert [{"format": 1.0, "length": 5.0}, {"length": 4.0}, {}, {"format": 0.0}] == [each.figures for each in samples]


def test_figures_without_a_name_or_without_a_value_are_refused(tmp_path: Path) -> None:
    for names in (("format",), ("format", "length", "other")):
        file = write_with(tmp_path / "shard", {"figures": torch.ones(4, 2)}, figures=names)
        with pytest.raises(BadShard, match=f"figures must be {len(names)} of each sample"):
            read(file)


def test_scores_of_a_reference_are_read_and_asked_for_where_the_job_has_one(tmp_path: Path) -> None:
    without = write_with(tmp_path / "without", {})
    scored = write_with(tmp_path / "scored", {"reference_logp": torch.full((15,), -0.5)}, has_reference=True)

    with pytest.raises(BadShard, match="sealed without scores"):
        read(without, is_scored=True)
    assert read(without).reference_logp is None
    found = read(scored, is_scored=True).reference_logp
    assert found is not None
    assert [-0.5] * 15 == found.tolist()


def experts(*values: int) -> dict[str, torch.Tensor]:
    """Return the column of experts, the same for each token."""
    return {"experts": torch.tensor([values] * 15, dtype=torch.int16)}


def test_experts_are_read_only_if_they_are_there_and_replayed(tmp_path: Path) -> None:
    with_them = write_with(tmp_path / "with", experts(-1, 0, 3), has_experts=True)
    without = write_with(tmp_path / "without", {})

    found = read(with_them, REPLAYED).experts
    assert found is not None
    assert [[-1, 0, 3]] * 15 == found.tolist()
    assert read(with_them).experts is None
    assert read(without, REPLAYED).experts is None


@pytest.mark.parametrize("values", [(0, 1), (0, 1, 2, 3), (-2, 0, 0), (0, 0, 4), (0, 0, 5)])
def test_experts_that_the_model_does_not_have_are_refused(tmp_path: Path, values: tuple[int, ...]) -> None:
    file = write_with(tmp_path / "shard", experts(*values), has_experts=True)

    with pytest.raises(BadShard, match="experts must be 3 of each token, each below 4"):
        read(file, REPLAYED)


def test_experts_without_their_tokens_are_refused(tmp_path: Path) -> None:
    file = write_with(tmp_path / "shard", {"experts": torch.zeros(15, dtype=torch.int16)}, has_experts=True)

    with pytest.raises(BadShard, match="of 2 dimension"):
        read(file, REPLAYED)


def test_a_column_of_too_many_dimensions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadShard, match="of 1 dimension"):
        read(write_with(tmp_path / "shard", {"reward": torch.ones(4, 1)}))


class RanksSaying(Collectives):
    """All ranks of a group, of which one is this. others: what the others say, the second rank's first."""

    def __init__(self, *others: object) -> None:
        super().__init__(rank=0, size=1 + len(others), store=None)
        self.others = others
        self.said: object = None

    def gather(self, item: Any) -> list[Any]:
        self.said = item
        return [item, *self.others]


def write_half(path: Path, *, loss_tokens: int = 7) -> Path:
    """Write the first rank's shard of two, with 3 of 7 tokens to be trained."""
    header = HEADER.model_copy(update={"shards": 2, "loss_tokens": loss_tokens})
    write_shard(path, header, columns(SAMPLES[:2], {7: [1.0, 0.0]}))
    return path


def test_ranks_read_their_shards_together(tmp_path: Path) -> None:
    mine, its = {7: GroupShare(3, True, 2)}, {9: GroupShare(4, False, 2)}
    ranks = RanksSaying((None, its, 4))

    shard, shares = read_together(write_half(tmp_path / "shard"), ranks, step=3)

    assert 2 == shard.samples
    assert [mine, its] == shares
    assert (None, mine, 3) == ranks.said


@pytest.mark.parametrize("loss_tokens", [6, 8])
def test_ranks_begin_no_step_whose_shards_are_not_the_whole_batch(tmp_path: Path, loss_tokens: int) -> None:
    with pytest.raises(BadShard, match=f"hold 7 loss tokens, not {loss_tokens}"):
        read_together(write_half(tmp_path / "shard", loss_tokens=loss_tokens), RanksSaying((None, {}, 4)), step=3)


def test_ranks_begin_no_step_that_one_of_them_can_not_train_on(tmp_path: Path) -> None:
    with pytest.raises(PeerRefused, match="step 3 not begun: rank 1: it is torn"):
        read_together(write_half(tmp_path / "shard"), RanksSaying(("it is torn", {}, 0)), step=3)
    ranks = RanksSaying((None, {}, 4))
    with pytest.raises(BadShard, match="fetch it again"):
        read_together(tmp_path / "absent", ranks, step=3)
    assert "fetch it again" in str(ranks.said)


def test_tokens_that_the_policy_did_not_write_are_context(tmp_path: Path) -> None:
    with_a_tool = replace(SAMPLES[2], written=[True, False, True], logp=[-0.4, 0.0, -0.6])
    shard = read(write_shards(tmp_path, [*SAMPLES[:2], with_a_tool, SAMPLES[3]], step=3, split=1)[0])

    assert [2, 1, 2, 1] == shard.loss_tokens.tolist()
    assert 6 == shard.written_tokens


GROUPS = st.dictionaries(
    st.integers(0, 1000),
    st.builds(GroupShare, st.integers(0, 50), st.booleans(), st.integers(0, 8)),
    min_size=0,
    max_size=40,
)


@given(GROUPS, st.integers(1, 5), st.integers(0, 10), st.randoms(use_true_random=False))
def test_minibatches_depend_on_the_batch_and_not_on_its_split(
    groups: dict[int, GroupShare], count: int, seed: int, chance: random.Random
) -> None:
    ranks: list[dict[int, GroupShare]] = [{}, {}, {}]
    for group, whole in groups.items():  # each group in two parts, on ranks by chance
        cut = chance.randint(0, whole.loss_tokens)
        there = chance.randint(0, whole.samples)
        for tokens, samples in ((cut, there), (whole.loss_tokens - cut, whole.samples - there)):
            rank = chance.choice(ranks)
            known = rank.get(group, GroupShare(0, False, 0))
            teaches = known.teaches or whole.teaches
            rank[group] = GroupShare(known.loss_tokens + tokens, teaches, known.samples + samples)

    assert deal_minibatches([groups], count=count, seed=seed) == deal_minibatches(ranks, count=count, seed=seed)


@given(GROUPS, st.integers(1, 5), st.integers(0, 10))
def test_minibatches_share_groups_evenly_and_lose_none(groups: dict[int, GroupShare], count: int, seed: int) -> None:
    minibatches = deal_minibatches([groups], count=count, seed=seed)

    assert count == len(minibatches)
    assert sorted(groups) == sorted(group for minibatch in minibatches for group in minibatch.groups)
    for counted in (set(groups), {group for group, share in groups.items() if share.teaches}):
        sizes = [len(minibatch.groups & counted) for minibatch in minibatches]
        assert max(sizes) - min(sizes) <= 1
    for minibatch in minibatches:
        assert sum(groups[group].loss_tokens for group in minibatch.groups) == minibatch.loss_tokens
        assert sum(groups[group].samples for group in minibatch.groups) == minibatch.samples
        assert any(groups[group].teaches for group in minibatch.groups) == minibatch.teaches


def test_minibatches_are_dealt_anew_each_step() -> None:
    groups = {group: GroupShare(1, True, 1) for group in range(20)}

    assert 1 < len({deal_minibatches([groups], count=2, seed=seed)[0].groups for seed in range(5)})


def test_minibatches_are_those_that_teach_first() -> None:
    groups = {7: GroupShare(1, False, 1), 8: GroupShare(1, True, 1)}

    for seed in range(5):
        assert [True, False] == [each.teaches for each in deal_minibatches([groups], count=2, seed=seed)]


@pytest.mark.parametrize("tokens", [1, 5, 12, 1000])
def test_micro_batches_hold_each_trained_token_once_with_its_context(tmp_path: Path, tokens: int) -> None:
    chance = random.Random(tokens)
    samples = []
    for number in range(20):
        length = chance.randint(1, 9)
        prompt = [chance.randrange(48) for _ in range(chance.randint(1, 5))]
        response = [chance.randrange(48) for _ in range(length)]
        samples.append(Example(prompt, response, [-1.0] * length, float(number % 3 == 0), group=number % 4))
    shard = read(write_shards(tmp_path, samples, step=3, split=1)[0])

    batches = micro_batches(shard, Minibatch(frozenset({0, 1, 3}), 1, True, 1), tokens=tokens)

    seen: list[int] = []
    for batch in batches:
        assert 1 == len(batch.input_ids) or batch.input_ids.numel() <= tokens
        rows, kept = batch.predicts.nonzero(as_tuple=True)
        for row, position, token, sample in zip(
            rows.tolist(), batch.positions[kept].tolist(), batch.tokens.tolist(), batch.sample.tolist(), strict=True
        ):
            start = int(shard.start[sample])
            assert shard.tokens[start:token].tolist() == batch.input_ids[row, : position + 1].tolist()
            assert start <= token < shard.end[sample]
        seen += batch.tokens.tolist()
    chosen = shard.teaching() & (shard.group != 2)
    expected = [
        token
        for sample in chosen.nonzero().squeeze(1).tolist()
        for token in range(int(shard.start[sample]), int(shard.end[sample]))
        if shard.loss_mask[token]
    ]
    assert expected == sorted(seen)


@pytest.mark.parametrize("tokens", [5, 12, 1000])
def test_packed_micro_batches_hold_whole_samples_and_no_padding(tmp_path: Path, tokens: int) -> None:
    shard = read(write_shards(tmp_path, SAMPLES, step=3, split=1)[0])

    batches = micro_batches(shard, Minibatch(frozenset({7, 9}), 7, True, 4), tokens=tokens, packing=True)

    seen: list[tuple[int, int]] = []
    for batch in batches:
        assert batch.ends is not None
        assert (1, batch.ends[-1]) == batch.input_ids.shape
        assert 1 == len(batch.ends) or batch.ends[-1] <= tokens
        assert batch.predicts.all()
        for position, token in zip(batch.positions.tolist(), batch.tokens.tolist(), strict=True):
            assert shard.tokens[token] == batch.input_ids[0, position + 1]
        seen += zip(batch.tokens.tolist(), batch.sample.tolist(), strict=True)
    assert [(3, 0), (4, 0), (8, 1)] == sorted(seen)


@pytest.mark.parametrize(
    ("packing", "tokens", "passes"),
    [
        (False, 8, [[3, 1], [2], [0]]),
        (False, 10, [[3, 1], [2, 0]]),
        (True, 9, [[3, 1], [2, 0]]),
        (True, 10, [[3, 1, 2], [0]]),
    ],
)
def test_passes_are_filled_with_the_shortest_samples_first(
    tmp_path: Path, packing: bool, tokens: int, passes: list[list[int]]
) -> None:
    """The samples have 5, 4, 4 and 2 tokens. Padding counts, up to the longest of a pass."""
    shard = read(write_shards(tmp_path, SAMPLES, step=3, split=1)[0])

    batches = divide_into_passes(shard, range(4), tokens=tokens, packing=packing)

    assert passes == [batch.sample.unique_consecutive().tolist() for batch in batches]
    for batch in batches:
        assert (1 if packing else len(batch.input_ids), len(batch.positions)) == batch.predicts.shape
        for token, sample in zip(batch.tokens.tolist(), batch.sample.tolist(), strict=True):
            assert int(shard.start[sample]) < token < int(shard.end[sample])


def test_padding_is_of_no_place_in_the_shard(tmp_path: Path) -> None:
    shard = read(write_shards(tmp_path, SAMPLES, step=3, split=1)[0])

    (batch,) = divide_into_passes(shard, [0, 3], tokens=10, packing=False)

    assert [[8, 12, 0, 0, 0], [1, 2, 3, 4, 5]] == batch.input_ids.tolist()
    assert [[13, 14, -1, -1, -1], [0, 1, 2, 3, 4]] == batch.places.tolist()


def test_only_the_positions_that_predict_a_trained_token_are_kept(tmp_path: Path) -> None:
    long_prompt = replace(SAMPLES[0], prompt=[1] * 50)
    shard = read(write_shards(tmp_path, [long_prompt, SAMPLES[1]], step=3, split=1)[0])

    (batch,) = micro_batches(shard, Minibatch(frozenset({7}), 3, True, 1), tokens=1000)

    assert [2, 49, 50] == batch.positions.tolist()


@pytest.mark.parametrize("file", list(corpus("batch_shard")), ids=lambda file: str(file.name))
def test_no_file_of_the_fuzzers_corpus_does_what_must_not_happen(file: Path) -> None:
    batch_shard(file.read_bytes())
