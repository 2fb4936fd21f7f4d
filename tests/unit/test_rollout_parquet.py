"""The Parquet file of samples: read back with pyarrow, it says what the store has."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from unit.test_rollout_batches import make_groups
from unit.test_rollout_store import JOB, S, completed_group, prompt, recorded, seal

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.pages import parquet
from colocated_rl_rollout.rules.samples import NO_TOKENS, Finish, Span, Tokens, Trajectory
from colocated_rl_rollout.store.batches import write_batch
from colocated_rl_rollout.store.store import Store
from setup.layout import CHECKOUT


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, job_uid=JOB)


def read(store: Store, **options: Any) -> pq.ParquetFile:
    store.remember_epoch(1)  # which is durable then, with all before it
    file = io.BytesIO()
    parquet.write(store.path.parent, file, **options)
    return pq.ParquetFile(file)


def rows(store: Store, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(store, **options).read().to_pylist()
    return found


def answer(*lengths: tuple[int | None, int]) -> Tokens:
    """Make a sample's tokens. lengths: step and tokens of each span; -1 is what a tool said, None has no version."""
    total = sum(length for _, length in lengths)
    spans, start = [], 0
    for step, length in lengths:
        if step is None or step >= 0:
            spans.append(Span(None if step is None else WeightVersion(step, 1), start, start + length))
        start += length
    logp = (-np.arange(1, total + 1) / 8).astype(np.float32)
    return Tokens(np.arange(50, 50 + total, dtype=np.int32), logp, tuple(spans))


def test_a_sample_is_the_same_before_and_after_it_is_sealed(tmp_path: Path) -> None:
    written = []
    for sealed in (False, True):
        store = Store(tmp_path / str(sealed), job_uid=JOB)
        group = store.admit(prompt(4), size=2)
        for sample, tokens in zip(
            group.samples, (answer((1, 2), (-1, 1), (2, 1), (None, 1)), answer((2, 3))), strict=True
        ):
            store.start(sample)
            store.finish(sample, tokens, Finish.LENGTH)
            store.score(sample, 0.25, {"format": 0.5} if sample is group.samples[0] else {})
        if sealed:
            seal(store, [group])
        written.append(rows(store))
    before, after = written
    assert {
        "id": 1, "group_id": 1, "prompt_index": 4, "state": "completed", "reason": "", "attempts": 1, "resent": 0,
        "first_step": 1, "last_step": 2, "finish": "length", "reward": 0.25, "step": None, "ended": 1,
        "figures": [{"name": "format", "value": 0.5}], "unversioned": 1, "prompt_length": 3, "response_length": 5,
        "prompt_ids": [1, 2, 3],
        "response_ids": [50, 51, 52, 53, 54], "loss_mask": [True, True, False, True, True],
        "behaviour_logp": [-0.125, -0.25, 0.0, -0.5, -0.625], "token_step": [1, 1, -1, 2, -1],
    } == before[0]  # fmt: skip
    assert [{**row, "state": "sealed", "step": 1} for row in before] == after


def test_a_sealed_sample_without_a_response_has_a_row(store: Store) -> None:
    """A session that was interrupted at once, the last of its batch: no file was written, and no sample shown."""
    group = store.admit_whole(
        (1, 2), [Trajectory(tokens, Finish.LENGTH, 0.5) for tokens in (answer((0, 1)), NO_TOKENS)]
    )
    seal(store, [group])
    assert [[50], []] == [row["response_ids"] for row in rows(store)]
    assert [[1, 2]] * 2 == [row["prompt_ids"] for row in rows(store)]


def test_a_sample_in_any_state_has_a_row_and_types_are_as_documented(store: Store) -> None:
    group = completed_group(store)
    store.start(store.replace(group.samples[0], S.DISCARDED, "TooStale"))
    store.admit(prompt(7), size=1)
    file = read(store)
    assert {name: kind for name, (kind, _) in parquet.COLUMNS.items()} == {
        field.name: field.type for field in file.schema_arrow
    }
    found = file.read().to_pylist()
    assert [(1, "discarded"), (2, "completed"), (3, "running"), (4, "admitted")] == [
        (row["id"], row["state"]) for row in found
    ]
    assert ("TooStale", 0, None) == (found[0]["reason"], found[0]["response_length"], found[2]["reward"])
    assert ([1, 2, 3], [], None) == (found[3]["prompt_ids"], found[3]["token_step"], found[3]["ended"])
    assert [None, None] == [found[3]["first_step"], found[3]["last_step"]]
    assert b"behaviour" not in (file.schema_arrow.field("reward").metadata or {})[b"description"]


def test_an_empty_store_is_an_empty_table(store: Store) -> None:
    assert [] == rows(store, text=str)


def test_state_limit_and_words_are_as_asked(store: Store) -> None:
    for _ in range(3):
        completed_group(store)
    assert [5, 6] == [row["id"] for row in rows(store, limit=2)]
    assert [] == rows(store, state=S.FAILED)
    assert ["[3, 4]"] * 6 == [row["response"] for row in rows(store, state=S.COMPLETED, text=str)]
    assert [] == rows(store, limit=0)


def test_recorded_batches_are_there_though_a_checkpoint_holds_them(tmp_path: Path) -> None:
    store = Store(tmp_path, job_uid=JOB, keeps_batches=True)
    step = seal(store, [completed_group(store)]).step
    store.commit(step)
    store.forget(step)
    seal(store, [completed_group(store)])
    found = rows(store)
    assert [(1, "trained", 1), (2, "trained", 1), (3, "sealed", 2), (4, "sealed", 2)] == [
        (row["id"], row["state"], row["step"]) for row in found
    ]
    assert ([3, 4], [1, 2, 3], 1.0) == (found[0]["response_ids"], found[0]["prompt_ids"], found[0]["reward"])
    assert [] == rows(store, state=S.FAILED)


def test_recorded_batches_that_a_checkpoint_holds_since_are_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint while a long file was written took samples from it that had not come yet."""
    monkeypatch.setattr(parquet, "ROWS_A_PAGE", 3)
    store = Store(tmp_path, job_uid=JOB, keeps_batches=True)
    for step in range(1, 5):
        seal(store, [completed_group(store)])
        store.commit(step)
    store.forget(1)
    store.remember_epoch(1)
    found = parquet._samples(tmp_path, None, None)
    ids = [next(found)[0]["id"] for _ in range(4)]
    store.forget(3)
    store.remember_epoch(2)
    assert [*range(1, 9)] == sorted([*ids, *(row["id"] for row, _ in found)])


def test_batches_of_another_job_are_not_taken_for_ones_own_samples(store: Store) -> None:
    completed_group(store)
    recorded(store)
    groups = make_groups()  # with numbers that this job gave to others
    write_batch(store.batch_directory, groups, step=1, shards=1, temperature=1.0, seed=0)
    found = rows(store)
    assert [2, 2, 0, 0, 0] == [row["response_length"] for row in found]


def test_row_groups_are_small_whatever_there_is(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROWS_A_PAGE", 3)
    monkeypatch.setattr(parquet, "TOKENS_A_GROUP", 12)  # a sample has five
    for _ in range(4):
        completed_group(store)
    file = read(store)
    assert [3, 3, 2] == [file.metadata.row_group(place).num_rows for place in range(file.num_row_groups)]
    assert [*range(1, 9)] == file.read().column("id").to_pylist()


def test_each_column_is_in_the_documentation() -> None:
    page = (CHECKOUT.root / "docs/samples.md").read_text()
    descriptions = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    assert {
        name: re.sub(r"^list<item: (.*)>$", r"list of \1", str(kind))
        for name, (kind, _) in {**parquet.COLUMNS, **parquet.WORDS}.items()
    } == descriptions
