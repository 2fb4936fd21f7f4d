"""This program writes prompts and reads samples as users do: `python tables.py FOLDER`, in environment `peers`.

Writes datasets (`datasets` to disk, pandas as Parquet) with columns as people have them. Then reads `samples.parquet`.
Prints, as JSON, what is in the datasets by their own word, and what pandas and `datasets` find in the samples.
"""

from __future__ import annotations

import json
import sys
import uuid
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas

ROWS = 7


def saved(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each dataset in their order, by directory."""
    plain = datasets.Dataset.from_list(
        [
            {"prompt": f"{n} + «ünïcode» 🙂?", "answer": n, "none": None, "nested": {"answer": [n, None]}}
            for n in range(ROWS)
        ]
    )
    chats = datasets.Dataset.from_list(
        [
            {
                "prompt": [
                    {"role": "system", "content": "Brief.", "name": None},
                    {"role": "user", "content": "?", "name": "a"},
                ]
            },
            {"prompt": [{"role": "user", "content": "?", "tool_calls": None}]},
        ]
    )
    odd = datasets.Dataset.from_dict(
        {
            "prompt": ["a", "b"],
            "level": [0, 1],
            "grid": [np.arange(4).reshape(2, 2).tolist()] * 2,
            "half": [0.5, 1.5],
            "when": [datetime(2026, 1, 2, 3, 4, 5, 678)] * 2,  # noqa: DTZ001 - as people have them
            "raw": [b"\xff", b""],
        },
        features=datasets.Features(
            {
                "prompt": datasets.Value("large_string"),
                "level": datasets.ClassLabel(names=["easy", "hard"]),
                "grid": datasets.Array2D((2, 2), "int32"),
                "half": datasets.Value("float16"),
                "when": datasets.Value("timestamp[ns]"),
                "raw": datasets.Value("binary"),
            }
        ),
    )
    each = {
        "plain": plain,
        "chosen": plain.shuffle(seed=1).select([5, 0, 3]),
        "shards": plain,
        "chats": chats,
        "odd": odd,
    }
    for name, dataset in each.items():
        dataset.save_to_disk(folder / name, num_shards=3 if name == "shards" else None)
    datasets.DatasetDict(train=plain, test=chats).save_to_disk(folder / "splits")
    plain.select([]).save_to_disk(folder / "empty")
    for name in ("plain", "chats"):
        each[name].to_parquet(folder / f"{name}.parquet")
        each[name].to_json(folder / f"{name}.jsonl", force_ascii=False)
    return {name: datasets.load_from_disk(folder / name).to_list() for name in each}


def of_pandas(file: Path) -> None:
    pandas.DataFrame(
        {
            "prompt": pandas.array(["a", "b"], dtype="string"),
            "kind": pandas.Categorical(["x", "y"]),
            "maybe": pandas.array([1, None], dtype="Int64"),
            "when": pandas.to_datetime(["2026-01-02T03:04:05.123456789", None]),
            "zone": pandas.to_datetime(["2026-01-02", "2026-01-03"]).tz_localize("Europe/Berlin"),
            "took": [timedelta(seconds=1.5), timedelta(0)],
            "day": [date(2026, 1, 2), None],
            "id": [uuid.UUID(int=1), uuid.UUID(int=2)],
            "vector": [np.array([0.5, np.nan]), np.array([])],
            "nothing": [np.nan, 1.0],
        },
        index=["first", "second"],
    ).to_parquet(file)


def main(folder: Path) -> None:
    datasets.disable_progress_bars()
    contents = saved(folder)
    of_pandas(folder / "pandas.parquet")
    samples = pandas.read_parquet(folder / "samples.parquet")
    again = datasets.load_dataset("parquet", data_files=str(folder / "samples.parquet"), split="train")
    found = {
        "columns": list(samples.columns),
        "means": samples.groupby("step")["reward"].mean().to_dict(),
        "tokens": [ids.tolist() for ids in samples["response_ids"]],
        "rows": again.to_list(),
    }
    sys.stdout.write(json.dumps({"saved": contents, "found": found}, default=str) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
