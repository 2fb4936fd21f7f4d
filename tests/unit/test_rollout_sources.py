"""Prompts come from files of any form, which give the same rows, and sources take turns in an order that comes back."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_rl_api.prompts import HuggingFace
from colocated_rl_rollout.tasks.hub import files_of
from colocated_rl_rollout.tasks.rows import (
    BATCH_ROWS,
    Row,
    Rows,
    RowsUnusable,
    data_files,
)
from colocated_rl_rollout.tasks.task_wire import PromptContent, UnscoredRow
from colocated_rl_rollout.tasks.tasks import MixPart, Tasks

ROWS: list[Row] = [
    {"prompt": f"{number} + 1?", "answer": number + 1, "tags": ["sum", None], "source": {"page": number / 2}}
    for number in range(600)
]


def accept(_: Row) -> None:
    return None


def read(directory: Path, *names: str) -> list[Row]:
    with closing(Rows([directory / name for name in names], cache=directory / "cache", check=accept)) as rows:
        backwards = [rows[number] for number in reversed(range(len(rows)))]
    return backwards[::-1]


def write(path: Path, rows: list[Row] | pyarrow.Table) -> None:
    table = rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist(rows)
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
        case ".parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=250)
        case ".arrow":
            with pyarrow.ipc.new_stream(str(path), table.schema) as writer:  # as datasets writes them
                writer.write_table(table, max_chunksize=100)
        case ending:
            raise AssertionError(ending)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".arrow"])
def test_rows_are_the_same_whatever_they_are_read_from(tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"all{ending}", ROWS)
    assert ROWS == read(tmp_path, f"all{ending}")


def test_rows_of_several_files_follow_one_another(tmp_path: Path) -> None:
    write(tmp_path / "a-00001.parquet", ROWS[:300])
    write(tmp_path / "a-00002.parquet", ROWS[300:301])
    write(tmp_path / "b.jsonl", ROWS[301:])
    shards = data_files(tmp_path / "a-*.parquet")
    assert ["a-00001.parquet", "a-00002.parquet"] == [path.name for path in shards]
    assert ROWS == read(tmp_path, *(path.name for path in shards), "b.jsonl")


def test_a_file_may_begin_with_the_mark_of_some_editors(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [{"prompt": "a"}, {"prompt": "b"}] == read(tmp_path, "all.jsonl")


def test_an_arrow_file_is_read_too(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(str(tmp_path / "all.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    assert ROWS == read(tmp_path, "all.arrow")


def test_a_directory_that_datasets_saved_is_read_in_its_order(tmp_path: Path) -> None:
    """The layout of `Dataset.save_to_disk` and `DatasetDict.save_to_disk`."""
    train = tmp_path / "gsm8k/train"
    train.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    write(train / names[0], ROWS[:200])
    write(train / names[1], ROWS[200:])
    (train / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (tmp_path / "gsm8k/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert ROWS == read(tmp_path, *(str(path.relative_to(tmp_path)) for path in data_files(train)))
    with pytest.raises(RowsUnusable, match="has several splits: set path to gsm8k/train or gsm8k/test"):
        data_files(tmp_path / "gsm8k")


def test_what_json_has_no_word_for_becomes_text(tmp_path: Path) -> None:
    row = {"day": date(2026, 1, 2), "at": datetime(2026, 1, 2, 3, tzinfo=UTC), "price": Decimal("1.50"), "raw": b"\xff"}
    write(tmp_path / "all.parquet", [row | {"id": UUID(int=1)}])
    plain = {"day": "2026-01-02", "at": "2026-01-02T03:00:00+00:00", "price": "1.50", "raw": "/w=="}
    assert [plain | {"id": "00000000-0000-0000-0000-000000000001"}] == read(tmp_path, "all.parquet")


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_moments_are_read_though_they_have_nanoseconds(tmp_path: Path, ending: str) -> None:
    """pandas writes them so: a file with such a column, which nobody had asked for, could not be used."""
    moment = pyarrow.array([1_767_323_045_123_456_789, None], pyarrow.timestamp("ns", "UTC"))
    offsets = pyarrow.array([0, 1, 2], pyarrow.int64())
    columns = {
        "at": moment,
        "took": pyarrow.array([1_500_000_001, 0], pyarrow.duration("ns")),
        "clock": pyarrow.array([3_600_000_000_001, 0], pyarrow.time64("ns")),
        "inner": pyarrow.StructArray.from_arrays([moment], ["at"]),
        "more": pyarrow.ListArray.from_arrays([0, 1, 2], moment),
        "many": pyarrow.LargeListArray.from_arrays(offsets, moment),  # as polars writes them
        "one": pyarrow.FixedSizeListArray.from_arrays(moment, 1),
        "named": pyarrow.MapArray.from_arrays([0, 1, 2], pyarrow.array(["a", "b"]), moment),
        "known": moment.dictionary_encode(),
    }
    write(tmp_path / f"all{ending}", pyarrow.table(columns))
    moment_text = "2026-01-02T03:04:05.123456+00:00"
    row = {"at": moment_text, "took": 1.5, "clock": "01:00:00", "inner": {"at": moment_text}, "more": [moment_text]}
    row |= {"many": [moment_text], "one": [moment_text], "named": [["a", moment_text]], "known": moment_text}
    assert row == read(tmp_path, f"all{ending}")[0]


YEAR_10000_S, YEAR_0_S = 253_402_300_800, -62_135_596_801
NO_MOMENTS = {
    "year 10000": pyarrow.array([YEAR_10000_S], pyarrow.timestamp("s")),
    "year 0": pyarrow.array([YEAR_0_S], pyarrow.timestamp("s", "UTC")),
    "10000 in its zone": pyarrow.array([YEAR_10000_S - 1], pyarrow.timestamp("s", "Asia/Tokyo")),
    "zone": pyarrow.array([0], pyarrow.timestamp("s", "Nowhere/At_all")),
    "day": pyarrow.array([YEAR_10000_S // 86_400], pyarrow.date32()),
    "list": pyarrow.array([[0, YEAR_10000_S]], pyarrow.list_(pyarrow.timestamp("s"))),
    "inner": pyarrow.array([{"at": YEAR_0_S}], pyarrow.struct([("at", pyarrow.timestamp("s"))])),
    "took": pyarrow.array([10**15], pyarrow.duration("s")),
    "text": pyarrow.array([b"\xff"], pyarrow.binary()).view(pyarrow.string()),
}


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
@pytest.mark.parametrize("value", NO_MOMENTS.values(), ids=NO_MOMENTS)
def test_what_python_has_no_value_for_is_named_with_its_row_and_column(
    tmp_path: Path, value: pyarrow.Array, ending: str
) -> None:
    """The error named the whole file and no place in it; about a zone that nobody knows it was a stack trace."""
    empty = pyarrow.nulls(BATCH_ROWS + 2, value.type)
    columns = {"prompt": ["?"] * len(empty) + ["?"], "then": pyarrow.concat_arrays([empty, value])}
    write(tmp_path / f"all{ending}", pyarrow.table(columns))
    with pytest.raises(RowsUnusable, match=rf"all{ending} can't be read: row {BATCH_ROWS + 3}, column 'then': \w+"):
        read(tmp_path, f"all{ending}")


def test_a_copy_is_made_once_and_again_when_the_file_is_another(tmp_path: Path) -> None:
    write(tmp_path / "all.parquet", ROWS[:3])
    assert read(tmp_path, "all.parquet") == read(tmp_path, "all.parquet")
    (copy,) = (tmp_path / "cache").glob("*.jsonl")
    write(tmp_path / "all.parquet", ROWS[:5])
    assert ROWS[:5] == read(tmp_path, "all.parquet")
    assert copy.exists()


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"all{ending}").write_text("nothing of the kind, and longer than any magic number is")
    with pytest.raises(RowsUnusable, match=f"all{ending} can't be read: "):
        read(tmp_path, f"all{ending}")


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_two_columns_of_one_name_are_told(tmp_path: Path, ending: str) -> None:
    """The last one counted, and nothing said so."""
    table = pyarrow.Table.from_arrays([["3?"], ["4"], ["5"]], names=["prompt", "answer", "answer"])
    write(tmp_path / f"all{ending}", table)
    with pytest.raises(RowsUnusable, match="several columns of one name, 'answer'"):
        read(tmp_path, f"all{ending}")


@pytest.mark.parametrize("name", ["../other.jsonl", "/etc/hosts", ".."])
def test_a_directory_that_datasets_saved_names_no_file_but_its_own(tmp_path: Path, name: str) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(RowsUnusable, match=r"state\.json names .*, which is not beside it"):
        data_files(tmp_path)


def test_the_row_that_is_wrong_is_named_with_its_file(tmp_path: Path) -> None:
    write(tmp_path / "good.parquet", ROWS[:10])
    write(tmp_path / "bad.parquet", [*ROWS[:7], {**ROWS[7], "prompt": ""}])
    paths = [tmp_path / "good.parquet", tmp_path / "bad.parquet"]
    with pytest.raises(RowsUnusable, match=r"row 8 of bad\.parquet: empty"):
        Rows(paths, cache=tmp_path, check=lambda row: None if row["prompt"] else "empty")


# ------------------------------------------------------------------------------------------------------------- the hub
HUB = ["README.md", "main/train-0.parquet", "main/test-0.parquet", "hard/train-0.parquet", "notes/trained.jsonl"]


@pytest.mark.parametrize(
    ("asked", "names", "configs", "expected"),
    [
        ({}, ["train.jsonl", "test.jsonl"], [], ["train.jsonl"]),
        ({}, ["data/train-00001-of-2.parquet", "data/train-00000-of-2.parquet", "data/test-0.parquet"], [],
         ["data/train-00000-of-2.parquet", "data/train-00001-of-2.parquet"]),
        ({"split": "test"}, HUB, [], ["main/test-0.parquet"]),
        ({"config": "hard"}, HUB, [], ["hard/train-0.parquet"]),
        ({"config": "main"}, HUB, [{"config_name": "main", "data_files": [{"split": "train", "path": "main/train-*"}]}],
         ["main/train-0.parquet"]),
        ({}, HUB, [{"config_name": "main", "data_files": "notes/*.jsonl"}], ["notes/trained.jsonl"]),
        ({}, HUB, [{"config_name": "a"}, {"config_name": "b", "default": True, "data_files": ["**/train-*.parquet"]}],
         ["hard/train-0.parquet", "main/train-0.parquet"]),
        ({}, ["README.md", "b.jsonl", "a.parquet"], [], ["a.parquet", "b.jsonl"]),
        ({"config": "hard"}, HUB, [{"config_name": "main"}, {"config_name": "hard", "data_dir": "hard"}],
         ["hard/train-0.parquet"]),
        ({}, ["sums.jsonl"], [{"data_dir": "."}], ["sums.jsonl"]),
        ({}, ["v2/sums.jsonl", "v1/sums.jsonl"], [{"data_dir": "./v2"}, {"config_name": "x"}], ["v2/sums.jsonl"]),
        ({}, HUB, [{"config_name": "main", "data_dir": "main", "data_files": "t*"}],
         ["main/test-0.parquet", "main/train-0.parquet"]),
    ],
)  # fmt: skip
def test_the_files_of_a_split_are_those_that_the_card_or_their_names_say(
    asked: dict[str, Any], names: list[str], configs: list[dict[str, Any]], expected: list[str]
) -> None:
    assert expected == files_of(dataset(**asked), names, configs)


def test_a_split_or_config_that_is_not_there_is_told_what_is() -> None:
    with pytest.raises(RowsUnusable, match=r"belongs to split 'dev'; its data files: main/train-0\.parquet, main/test"):
        files_of(dataset(split="dev"), HUB, [])
    with pytest.raises(RowsUnusable, match=r"belongs to split 'train'; its data files: sums-validation\.jsonl"):
        files_of(dataset(), ["sums-validation.jsonl", "more.jsonl"], [])
    with pytest.raises(RowsUnusable, match="has several configs: set config to one of main, socratic"):
        files_of(dataset(), HUB, [{"config_name": "main"}, {"config_name": "socratic"}])
    with pytest.raises(RowsUnusable, match=r"none that ends with \.jsonl, \.parquet, \.arrow"):
        files_of(dataset(), ["train.csv"], [])


def dataset(**fields: Any) -> HuggingFace:
    return HuggingFace(**{"name": "us/sums", "reward": {"math": {}}, **fields})


# ----------------------------------------------------------------------------------------------------------- in turns
class CountingSource:
    """A source whose question says which source it is of, and how far that is."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.digest = name, size, ""

    def prompt(self, position: int) -> tuple[int, PromptContent]:
        return position % self.size, f"{self.name}{position}"

    def row(self, index: int) -> dict[str, Any]:
        return {"of": self.name, "index": index}

    def score(self, index: int, response: str) -> float | dict[str, Any]:
        return {"prompt": self.name, "fields": {"index": index}} if response == "ask" else float(index)


MIX = [
    MixPart(CountingSource("a", 7), weight=3),
    MixPart(CountingSource("b", 100)),
    MixPart(CountingSource("c", 2), weight=2),
]


def test_a_filter_function_gets_the_row_of_its_source() -> None:
    rows: list[Any] = []

    def look(_samples: object, row: object) -> bool:
        rows.append(row)
        return True

    tasks = Tasks(MIX, seed=1, filters={"mine:look": look})
    assert [None] * 4 == [tasks.dropped_by(index, []) for index in (6, 7, 107, None)]
    assert [("a", 6), ("b", 0), ("c", 0)] == [(row["of"], row["index"]) for row in rows[:3]]
    assert [None] == rows[3:]


def test_sources_take_turns_in_their_shares_each_at_its_own_pace() -> None:
    tasks = Tasks(MIX, seed=1)
    asked = [str(tasks.prompt(position).prompt) for position in range(600)]
    for start in range(0, 600, 6):
        assert {"a": 3, "b": 1, "c": 2} == Counter(name[0] for name in asked[start : start + 6])
    for name in "abc":
        own = [int(each[1:]) for each in asked if each[0] == name]
        assert list(range(len(own))) == own, "none of its positions is left out, none comes twice"
    assert len({tuple(name[0] for name in asked[start : start + 6]) for start in range(0, 600, 6)}) > 20


@given(st.integers(0, 10_000), st.integers(0, 3))
def test_a_restart_at_any_position_goes_on_in_the_same_order(position: int, seed: int) -> None:
    going, again = Tasks(MIX, seed=seed), Tasks(MIX, seed=seed)
    before = [going.prompt(place) for place in range(position, position + 10)]
    assert before[5:] == [again.prompt(place) for place in range(position + 5, position + 10)]


def test_a_row_of_a_mix_is_found_again_by_its_index() -> None:
    tasks = Tasks(MIX, seed=1)
    for position in range(tasks.size):
        asked = tasks.prompt(position)
        scored = tasks.score(asked.row, "ask")
        assert isinstance(scored, UnscoredRow)
        assert str(asked.prompt)[0] == scored.prompt == "abc"[scored.source]
    assert {"a": 7, "b": 100, "c": 2} == Counter(
        str(tasks.prompt(position).prompt)[0]
        for position in {tasks.prompt(position).row: position for position in range(tasks.size)}.values()
    ), "one pass over the mix shows every row of every source"


@given(st.integers(0, 700), st.integers(0, 3), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_sets_of_an_evaluation_change_nothing_of_the_prompts_of_rollout(
    position: int, seed: int, sizes: list[int]
) -> None:
    own = [MixPart(CountingSource(name, size), weight=0) for name, size in zip("xyz", sizes, strict=False)]
    alone, beside = Tasks(MIX, seed=seed), Tasks([*MIX, *own], seed=seed)
    assert (alone.size, alone.digest) == (beside.size, beside.digest)
    assert alone.prompt(position) == beside.prompt(position)
    assert alone.sets_digest != beside.sets_digest


def test_a_row_of_a_set_is_found_by_its_index() -> None:
    tasks = Tasks([*MIX, MixPart(CountingSource("x", 3), weight=0, held_out_percent=100)], seed=1)
    asked = [tasks.prompt_of(3, place) for place in range(3)]
    assert [("x0", True), ("x1", True), ("x2", True)] == [(each.prompt, each.held_out) for each in asked]
    assert [0.0, 1.0, 2.0] == [tasks.score(each.row, "") for each in asked]
    assert (3, 7, 0) == (tasks.data.size_of(3), tasks.data.size_of(0), tasks.data.size_of(4))
    assert tasks.size == tasks.data.size_of(None)


def test_each_source_holds_out_its_own_share() -> None:
    tasks = Tasks([MixPart(CountingSource("a", 100), held_out_percent=100), MixPart(CountingSource("b", 100))], seed=0)
    asked = [tasks.prompt(position) for position in range(200)]
    assert {("a", True), ("b", False)} == {(str(each.prompt)[0], each.held_out) for each in asked}
