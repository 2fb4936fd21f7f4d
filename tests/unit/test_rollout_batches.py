"""Files of a sealed batch: columns, partition, and the same bytes each time."""

from __future__ import annotations

import hashlib
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from colocated_rl_api.batch import HEADER_KEY, BatchHeader
from colocated_rl_api.names import PromptPosition
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.rules.samples import (
    Finish,
    Group,
    GroupId,
    Prompt,
    Sample,
    SampleId,
    SampleState,
    Span,
    Tokens,
)
from colocated_rl_rollout.store.batches import (
    LEFT_BYTES,
    BatchRecord,
    partition,
    shard_path,
    work_of,
    write_batch,
    write_shards,
)
from colocated_rl_rollout.tasks.task_wire import FIGURES_AT_MOST


def make_sample(
    group: Group, number: int, *, lengths: list[tuple[int | None, int]], reward: float, finish: Finish = Finish.STOP
) -> Sample:
    """A completed sample; lengths: (step, tokens) of each span, with None for no version."""
    spans, start = [], 0
    for step, length in lengths:
        spans.append(Span(None if step is None else WeightVersion(step, 1), start, start + length))
        start += length
    tokens = Tokens(np.arange(100, 100 + start, dtype=np.int32), np.full(start, -0.25, np.float32), tuple(spans))
    return Sample(
        SampleId(number), group, SampleState.COMPLETED, tokens, segments=len(lengths), finish=finish, reward=reward
    )


def make_groups() -> list[Group]:
    first, second = (
        Group(GroupId(4), Prompt(PromptPosition(0), 0, (7, 8))),
        Group(GroupId(6), Prompt(PromptPosition(1), 1, (9,))),
    )
    first.samples = [
        make_sample(first, 1, lengths=[(1, 2), (2, 1)], reward=1.0),
        make_sample(first, 2, lengths=[(2, 2)], reward=0.0, finish=Finish.LENGTH),
    ]
    second.samples = [
        make_sample(second, 3, lengths=[(2, 1)], reward=1.0),
        make_sample(second, 4, lengths=[(2, 4)], reward=1.0),
    ]
    return [first, second]


def write(directory: Path, shards: int) -> BatchRecord:
    return write_batch(directory, make_groups(), step=3, shards=shards, temperature=0.7, seed=5)


def header_of(directory: Path, shard: int) -> BatchHeader:
    return BatchHeader.model_validate_json(header_text(directory, shard))


def header_text(directory: Path, shard: int) -> str:
    body = shard_path(directory, 3, shard).read_bytes()
    text: str = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"][HEADER_KEY]
    return text


def test_tokens_that_are_too_old_are_context_and_counted(tmp_path: Path) -> None:
    record = write_batch(tmp_path, make_groups(), step=3, shards=1, temperature=0.7, seed=5, oldest_step=2)
    columns = load(shard_path(tmp_path, 3, 0).read_bytes())
    assert [7, 8, 100, 101, 102] == columns["tokens"][:5].tolist()
    assert [0, 0, 0, 0, 1] == columns["loss_mask"][:5].tolist()
    assert [0, 0, 0, 0, -0.25] == columns["behaviour_logp"][:5].tolist()
    assert [-1, -1, -1, -1, 2] == columns["token_step"][:5].tolist()
    assert (8, 2, {0: 8}) == (record.loss_tokens, record.masked_tokens, record.staleness)


def test_tokens_of_the_first_weights_are_trained_where_no_age_is_too_great(tmp_path: Path) -> None:
    group = Group(GroupId(1), Prompt(PromptPosition(0), 0, (7,)))
    group.samples = [make_sample(group, 1, lengths=[(0, 3)], reward=1.0)]
    record = write_batch(tmp_path, [group], step=1, shards=1, temperature=1.0, seed=0)
    assert (3, 0) == (record.loss_tokens, record.masked_tokens)


def test_tokens_without_a_version_are_trained_and_declared_and_counted_apart(tmp_path: Path) -> None:
    groups = make_groups()
    groups[0].samples[0] = make_sample(groups[0], 1, lengths=[(1, 1), (None, 1), (2, 1)], reward=1.0)
    record = write_batch(tmp_path, groups, step=3, shards=1, temperature=0.7, seed=5, oldest_step=2)
    columns = load(shard_path(tmp_path, 3, 0).read_bytes())
    assert [0, 0, 0, 1, 1] == columns["loss_mask"][:5].tolist()
    assert [0, 0, 0, -0.25, -0.25] == columns["behaviour_logp"][:5].tolist()
    assert [-1, -1, -1, -1, 2] == columns["token_step"][:5].tolist()
    assert (9, 1, 1, {0: 8}) == (
        record.loss_tokens, record.unversioned_tokens, record.masked_tokens, record.staleness,
    )  # fmt: skip
    assert (True, 9) == (header_of(tmp_path, 0).has_unversioned, header_of(tmp_path, 0).loss_tokens)
    assert 0.0 == record.staleness_mean


def test_figures_that_came_beside_rewards_are_by_sample_and_name_and_the_commonest_of_too_many(tmp_path: Path) -> None:
    groups = make_groups()
    first, second = groups[0].samples
    first.figures, second.figures = {"format": 0.5, "length": 2.0}, {"length": 3.0}
    write_batch(tmp_path, groups, step=3, shards=2, temperature=0.7, seed=5)
    found: dict[int, list[float]] = {}
    for shard in range(2):
        assert ("format", "length") == header_of(tmp_path, shard).figures
        columns = load(shard_path(tmp_path, 3, shard).read_bytes())
        found |= dict(zip(columns["sample"].tolist(), columns["figures"].tolist(), strict=True))
    nan = pytest.approx(float("nan"), nan_ok=True)
    assert {1: [0.5, 2.0], 2: [nan, 3.0], 3: [nan, nan], 4: [nan, nan]} == found

    second.figures = {f"of-one-{number:02}": 1.0 for number in range(FIGURES_AT_MOST)} | {"said-by-both": 1.0}
    first.figures = {"said-by-both": 0.0}
    write_batch(tmp_path, groups, step=3, shards=1, temperature=0.7, seed=5)
    assert (*sorted(second.figures)[: FIGURES_AT_MOST - 1], "said-by-both") == header_of(tmp_path, 0).figures


def test_a_batch_whose_tokens_have_no_version_has_no_mean_staleness(tmp_path: Path) -> None:
    group = Group(GroupId(1), Prompt(PromptPosition(0), 0, (7,)))
    group.samples = [make_sample(group, 1, lengths=[(None, 2)], reward=1.0)]
    assert write_batch(tmp_path, [group], step=1, shards=1, temperature=1.0, seed=0).staleness_mean is None


def test_columns_say_of_each_token_who_made_it_and_of_each_sample_how_its_group_did(tmp_path: Path) -> None:
    write(tmp_path, 1)
    columns = load(shard_path(tmp_path, 3, 0).read_bytes())
    expected: dict[str, list[float]] = {
        "tokens": [7, 8, 100, 101, 102, 7, 8, 100, 101, 9, 100, 9, 100, 101, 102, 103],
        "sample_end": [5, 9, 11, 16],
        "loss_mask": [0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 1, 1],
        "token_step": [-1, -1, 1, 1, 2, -1, -1, 2, 2, -1, 2, -1, 2, 2, 2, 2],
        "reward": [1.0, 0.0, 1.0, 1.0],
        "group": [4, 4, 6, 6],
        "group_mean": [0.5, 0.5, 1.0, 1.0],
        "group_std": [0.5, 0.5, 0.0, 0.0],
        "group_count": [2.0, 2.0, 2.0, 2.0],
        "truncated": [0, 1, 0, 0],
        "sample": [1, 2, 3, 4],
        "prompt_tokens": [2, 2, 1, 1],
    }
    assert expected == {name: columns[name].tolist() for name in expected}
    assert [0.0 if trained == 0 else -0.25 for trained in expected["loss_mask"]] == columns["behaviour_logp"].tolist()
    dtypes = {name: str(column.dtype) for name, column in columns.items()}
    assert {
        "tokens": "int32", "sample_end": "int64", "loss_mask": "uint8", "behaviour_logp": "float32",
        "token_step": "int32", "reward": "float32", "group": "int64", "group_mean": "float32",
        "group_std": "float32", "group_count": "float32", "truncated": "uint8",
        "sample": "int64", "prompt_tokens": "int32",
    } == dtypes  # fmt: skip


def test_scores_of_a_reference_stand_beside_each_token_that_is_trained(tmp_path: Path) -> None:
    """They do so also where a response has tokens that are too old, which are context."""
    scores = {SampleId(number): -np.arange(1, 9, dtype=np.float32) - number for number in (1, 2, 3, 4)}
    write_batch(
        tmp_path, make_groups(), step=3, shards=1, temperature=0.7, seed=5, oldest_step=2, reference=scores
    )  # fmt: skip
    columns = load(shard_path(tmp_path, 3, 0).read_bytes())
    assert [0, 0, 0, 0, -4, 0, 0, -3, -4, 0, -4, 0, -5, -6, -7, -8] == columns["reference_logp"].tolist()
    assert "float32" == str(columns["reference_logp"].dtype)


def test_experts_stand_beside_the_tokens_that_engines_read_and_none_where_none_were_reported(tmp_path: Path) -> None:
    """An engine has not read the last token of a response, which it drew. It has read tokens that a stop cut off.

    Of the other samples nothing is known.
    """
    groups = make_groups()
    groups[1].samples[0].experts = np.full((5, 2), 7, np.int16)
    groups[0].samples[1].experts = np.array([[1, 2], [3, 4], [5, 6]], np.int16)
    groups[0].samples[0].experts = np.array([[9]], np.int16)  # of another model: no row of this batch's

    write_batch(tmp_path, groups, step=3, shards=2, temperature=0.7, seed=5)
    found = {}
    for shard in range(2):
        columns = load(shard_path(tmp_path, 3, shard).read_bytes())
        ends = columns["sample_end"].tolist()
        for number, start, end in zip(columns["sample"].tolist(), [0, *ends], ends, strict=False):
            found[number] = columns["experts"][start:end].tolist()

    nothing = [-1, -1]
    assert {1: [nothing] * 5, 2: [[1, 2], [3, 4], [5, 6], nothing], 3: [[7, 7]] * 2, 4: [nothing] * 5} == found
    assert all(header_of(tmp_path, shard).has_experts for shard in range(2))


def test_a_batch_of_which_no_experts_are_known_has_no_column_of_them(tmp_path: Path) -> None:
    write(tmp_path, 1)

    assert "experts" not in load(shard_path(tmp_path, 3, 0).read_bytes())
    assert not header_of(tmp_path, 0).has_experts


def test_one_expert_for_each_token_is_a_column_too(tmp_path: Path) -> None:
    groups = make_groups()
    groups[0].samples[1].experts = np.array([[1], [3], [5]], np.int16)
    write_batch(tmp_path, groups, step=3, shards=1, temperature=0.7, seed=5)
    assert header_of(tmp_path, 0).has_experts
    assert [-1] * 5 + [1, 3, 5, -1] == load(shard_path(tmp_path, 3, 0).read_bytes())["experts"][:9, 0].tolist()


def test_a_batch_may_take_all_of_the_volume_but_what_the_store_needs(tmp_path: Path) -> None:
    body = b"x" * 2**20
    with pytest.raises(OSError, match="16 MiB are free, and it takes 17 MiB"):
        write_shards(tmp_path, 3, [body], free_bytes=lambda _: 2**20 + LEFT_BYTES - 1)
    write_shards(tmp_path, 3, [body], free_bytes=lambda _: 2**20 + LEFT_BYTES)
    assert body == shard_path(tmp_path, 3, 0).read_bytes()


def test_a_record_from_before_tokens_were_masked_has_none() -> None:
    kept = BatchRecord(
        step=1, groups=1, samples=1, loss_tokens=1, reward_mean=0, staleness={0: 1}, truncated=0, sha256=("",)
    )
    assert (0, 0) == (kept.masked_tokens, kept.unversioned_tokens)


def test_mean_staleness_is_of_each_token_and_0_without_tokens() -> None:
    record = BatchRecord(
        step=9, groups=1, samples=1, loss_tokens=1, reward_mean=0, staleness={3: 1}, truncated=0, sha256=("",)
    )
    assert 3.0 == record.staleness_mean
    assert 0.0 == record.model_copy(update={"loss_tokens": 0, "staleness": {}}).staleness_mean


def test_the_record_counts_what_the_step_will_see(tmp_path: Path) -> None:
    record = write(tmp_path, 2)
    assert (3, 2, 4, 10) == (record.step, record.groups, record.samples, record.loss_tokens)
    assert ({0: 8, 1: 2}, 0.2) == (record.staleness, record.staleness_mean)
    assert (1, 5, 1, 0.75) == (record.resumed_samples, record.segments, record.truncated, record.reward_mean)
    assert record == BatchRecord.model_validate_json(record.model_dump_json(by_alias=True))


def test_the_header_is_of_the_whole_batch_in_every_shard(tmp_path: Path) -> None:
    write(tmp_path, 2)
    for shard in (0, 1):
        assert BatchHeader(
            step=3, shard=shard, shards=2, groups=2, samples=4, loss_tokens=10, temperature=0.7, seed=5
        ) == header_of(tmp_path, shard)
        assert 10 == json.loads(header_text(tmp_path, shard))["lossTokens"], "as the contract spells it"


def test_the_same_samples_are_the_same_bytes(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", 2), write(tmp_path / "b", 2)
    assert first == second
    for shard, digest in enumerate(first.sha256):
        body = shard_path(tmp_path / "a", 3, shard).read_bytes()
        assert digest == hashlib.sha256(body).hexdigest()
        assert body == shard_path(tmp_path / "b", 3, shard).read_bytes()


def test_more_ranks_than_samples_leave_some_ranks_without(tmp_path: Path) -> None:
    write(tmp_path, 6)
    sizes = [len(load(shard_path(tmp_path, 3, shard).read_bytes())["reward"]) for shard in range(6)]
    assert [1, 1, 1, 1, 0, 0] == sizes


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 9))
def test_shards_hold_each_sample_once_and_are_balanced(lengths: list[int], shards: int) -> None:
    parts = partition(lengths, shards)
    assert list(range(len(lengths))) == sorted(place for part in parts for place in part)
    loads = [sum(work_of(lengths[place]) for place in part) for part in parts]
    assert max(loads) - min(loads) <= max(map(work_of, lengths), default=0)
    assert all(part == sorted(part) for part in parts)


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=6), st.integers(1, 3))
def test_no_dealing_makes_the_slowest_shard_much_faster(lengths: list[int], shards: int) -> None:
    """Graham's bound on longest first, against the best of all dealings."""
    slowest = max(sum(work_of(lengths[place]) for place in part) for part in partition(lengths, shards))

    best = min(
        max(
            sum(work_of(length) for length, hand in zip(lengths, hands, strict=True) if hand == shard)
            for shard in hands
        )
        for hands in product(range(shards), repeat=len(lengths))
    )
    assert 3 * shards * slowest <= (4 * shards - 1) * best


def test_attention_of_a_long_sample_counts() -> None:
    """If tokens alone counted, one sample of 32 thousand would get company as soon as
    the other shard has four of 8 thousand.
    """
    assert [[0], [1, 2, 3, 4, 5]] == partition([32_000, *[8_000] * 5], 2)
    assert (24_576 + 1, 2 * 24_576**2) == (work_of(1), work_of(24_576))


def test_of_shards_with_the_same_work_the_one_with_fewer_samples_gets_the_next() -> None:
    """4 + 1 + 1 tokens are as many as 3 + 3, and so are their squares."""
    assert [[0, 2, 3], [1, 4, 5]] == partition([1, 3, 4, 1, 3, 1], 2)
