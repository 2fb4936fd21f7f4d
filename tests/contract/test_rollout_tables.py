"""Datasets are read as their own libraries say that they are, and samples are opened with what people have."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from contract.peer import run_peer
from unit.test_rollout_store import JOB, completed_group, seal

from colocated_rl_rollout.pages import parquet
from colocated_rl_rollout.store.store import Store
from colocated_rl_rollout.tasks.rows import (
    Row,
    Rows,
    RowsUnusable,
    data_files,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `samples.parquet`."""
    made = tmp_path_factory.mktemp("tables")
    store = Store(made / "state", job_uid=JOB)
    seal(store, [completed_group(store), completed_group(store)])
    completed_group(store)
    store.remember_epoch(1)  # which is durable then, with all before it
    with (made / "samples.parquet").open("wb") as file:
        parquet.write(made / "state", file, text=str)
    store.close()
    return made


@pytest.fixture(scope="module")
def by_libraries(folder: Path) -> dict[str, Any]:
    """Return the contents as the libraries read them."""
    answer = run_peer("tables.py", folder, HOME=str(folder / "home"))
    contents: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return contents


def read(path: Path, folder: Path) -> list[Row]:
    with closing(Rows(data_files(path), cache=folder / "cache", check=lambda _: None)) as rows:
        return [rows[number] for number in range(len(rows))]


@pytest.mark.parametrize("name", ["plain", "chosen", "shards", "chats"])
def test_a_dataset_that_was_saved_is_read_as_its_library_loads_it(
    folder: Path, by_libraries: dict[str, Any], name: str
) -> None:
    assert by_libraries["saved"][name] == read(folder / name, folder)


@pytest.mark.parametrize("name", ["plain", "chats"])
def test_its_other_forms_are_read_alike(folder: Path, by_libraries: dict[str, Any], name: str) -> None:
    assert (
        by_libraries["saved"][name]
        == read(folder / f"{name}.parquet", folder)
        == read(folder / f"{name}.jsonl", folder)
    )


def test_splits_are_named_and_a_dataset_without_a_row_is_reported(folder: Path, by_libraries: dict[str, Any]) -> None:
    with pytest.raises(RowsUnusable, match="splits has several splits: set path to splits/train or splits/test"):
        data_files(folder / "splits")
    assert by_libraries["saved"]["chats"] == read(folder / "splits/test", folder)
    with pytest.raises(RowsUnusable, match="no rows"):
        read(folder / "empty", folder)


def test_columns_of_any_type_become_plain_values(folder: Path, by_libraries: dict[str, Any]) -> None:
    first, _ = read(folder / "odd", folder)
    assert {
        "prompt": "a", "level": 0, "grid": [[0, 1], [2, 3]], "half": 0.5, "when": "2026-01-02T03:04:05.000678",
        "raw": "/w==",
    } == first  # fmt: skip
    row, other = read(folder / "pandas.parquet", folder)
    assert {
        "prompt": "a", "kind": "x", "maybe": 1, "when": "2026-01-02T03:04:05.123456", "took": 1.5, "day": "2026-01-02",
        "zone": "2026-01-02T00:00:00+01:00", "id": "00000000-0000-0000-0000-000000000001", "vector": [0.5, None],
        "nothing": None, "__index_level_0__": "first",
    } == row  # fmt: skip
    assert (None, None, []) == (other["maybe"], other["when"], other["vector"])


def test_samples_are_opened_by_pandas_and_datasets(by_libraries: dict[str, Any]) -> None:
    found = by_libraries["found"]
    assert [*parquet.COLUMNS, *parquet.WORDS] == found["columns"]
    assert {"1.0": 1.0} == found["means"]
    assert found["tokens"] == [row["response_ids"] for row in found["rows"]]
    assert {"sealed": 1, "completed": None} == {row["state"]: row["step"] for row in found["rows"]}
