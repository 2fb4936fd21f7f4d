"""Write samples as a Parquet file to standard output: `python -m colocated_rl_rollout.pages.parquet`.

This process yields to others and only reads: it takes time and memory from nobody else. Row groups are small, so it
holds no more memory for a week's samples than for a minute's. The file is whole when the exit code is 0.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from colocated_rl_api.logs import failure_of, in_words
from colocated_rl_rollout.rules.chat import Chat
from colocated_rl_rollout.rules.samples import Finish, SampleState
from colocated_rl_rollout.store import tables, transcripts
from colocated_rl_rollout.store.transcripts import Transcript

ROWS_A_PAGE = 64
ROWS_A_GROUP = 4096
TOKENS_A_GROUP = 500_000
FIGURES = pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))  # Hugging Face datasets read no map

COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "id": (pa.int64(), "number of the sample, as admitted"),
    "group_id": (pa.int64(), "samples of one prompt have one"),
    "prompt_index": (pa.int64(), "row of the data; negative of sessions; null of a batch in a checkpoint"),
    "state": (pa.string(), "admitted, running, interrupted, scoring, completed, sealed, trained, filtered, ..."),
    "reason": (pa.string(), "why it was filtered, failed or discarded; empty otherwise"),
    "attempts": (pa.int32(), "engine attempts that ended; null of a batch in a checkpoint"),
    "resent": (pa.int32(), "tokens sent again, to prefill, after interruptions; null of a batch in a checkpoint"),
    "finish": (pa.string(), "stop or length; null until the response is whole"),
    "reward": (pa.float64(), "null until it is in"),
    "figures": (FIGURES, "name and value of what came beside the reward; in a checkpoint float32"),
    "step": (pa.int32(), "of the batch that holds it; null before"),
    "ended": (pa.int64(), "its place among all that ended; null before, and of a batch in a checkpoint"),
    "first_step": (pa.int32(), "of the oldest weights that drew a token of it; null without such tokens"),
    "last_step": (pa.int32(), "of the newest; the two differ where the response went on over a switch"),
    "unversioned": (pa.int32(), "tokens to be trained for which an engine named no weight version of the job"),
    "prompt_length": (pa.int32(), "tokens"),
    "response_length": (pa.int32(), "tokens, with those that the policy did not write"),
    "prompt_ids": (pa.list_(pa.int32()), "tokens of the prompt"),
    "response_ids": (pa.list_(pa.int32()), "tokens of the response; those below are as long"),
    "loss_mask": (pa.list_(pa.bool_()), "written by the policy, and not too old to be trained"),
    "behaviour_logp": (pa.list_(pa.float32()), "nats, under the weights that drew the token; 0 where loss_mask is not"),
    "token_step": (pa.list_(pa.int32()), "step of the weights that drew the token; -1 without a version, and as above"),
}
WORDS: dict[str, tuple[pa.DataType, str]] = {
    "prompt": (pa.string(), "the prompt in words"),
    "response": (pa.string(), "the response in words"),
}
OF_TRANSCRIPT = {
    "prompt_ids": "prompt", "response_ids": "response", "loss_mask": "written", "behaviour_logp": "behaviour_logp",
    "token_step": "token_step",
}  # fmt: skip

Sample = tuple[Mapping[str, Any], Transcript]


def write(
    state_directory: Path,
    file: BinaryIO,
    *,
    state: SampleState | None = None,
    limit: int | None = None,
    text: Callable[[list[int]], str] | None = None,
) -> None:
    """Write samples by id; first those of recorded batches that a checkpoint holds, and last those that one has taken
    meanwhile. limit: only the newest.
    """
    columns = COLUMNS | (WORDS if text else {})
    schema = pa.schema(
        [pa.field(name, kind, metadata={"description": meaning}) for name, (kind, meaning) in columns.items()]
    )
    with pq.ParquetWriter(pa.PythonFile(_Sink(file), mode="w"), schema, compression="zstd") as writer:
        for group in _groups(_samples(state_directory, state, limit)):
            writer.write_table(_table(group, schema, text))


def _samples(directory: Path, state: SampleState | None, limit: int | None) -> Iterator[Sample]:
    store, batches = directory / "store.sqlite3", directory / "batches"
    with contextlib.closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        steps, written = set[int](), set[int]()  # of batches in a checkpoint; samples of others

        def retired() -> Iterator[Sample]:
            for (step,) in database.execute(tables.RETIRED_BATCHES).fetchall():
                for sample in transcripts.in_batch(batches, step) if step not in steps else ():
                    if sample.id not in written:
                        yield _retired(sample, step), sample.transcript
                steps.add(step)

        has_retired = limit is None and state in (None, SampleState.TRAINED)
        if has_retired:
            yield from retired()
        (after,) = database.execute(tables.BEFORE_NEWEST, {"limit": limit, "state": state}).fetchone()
        while True:
            database.execute("BEGIN")  # rows and tokens as they were at one moment
            rows = database.execute(tables.NUMBERED, {"after": after, "state": state, "limit": ROWS_A_PAGE}).fetchall()
            found = [(tables.shown(row), transcript) for row, transcript in transcripts.of(database, batches, rows)]
            database.execute("COMMIT")
            yield from sorted(found, key=lambda sample: int(sample[0]["id"]))
            written.update(row["id"] for row in rows)
            if len(rows) < ROWS_A_PAGE:
                break
            after = rows[-1]["id"]
        if has_retired:
            yield from retired()  # by a checkpoint since


def _retired(sample: transcripts.SealedSample, step: int) -> dict[str, Any]:
    finish = Finish.LENGTH if sample.truncated else Finish.STOP
    return {
        "id": sample.id, "group_id": sample.group, "state": SampleState.TRAINED, "reason": "", "finish": finish,
        "reward": sample.reward, "figures": sample.figures, "step": step,
    }  # fmt: skip


def _groups(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    tokens = 0
    for sample in samples:
        group.append(sample)
        tokens += len(sample[1].prompt) + len(sample[1].response)
        if tokens >= TOKENS_A_GROUP or len(group) >= ROWS_A_GROUP:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _table(samples: Sequence[Sample], schema: pa.Schema, text: Callable[[list[int]], str] | None) -> pa.Table:
    found = [transcript for _, transcript in samples]
    drawn = [each.token_step[each.written & (each.token_step >= 0)] for each in found]
    made: dict[str, Any] = {
        "figures": [[{"name": name, "value": value} for name, value in row["figures"].items()] for row, _ in samples],
        "prompt_length": [len(each.prompt) for each in found],
        "response_length": [len(each.response) for each in found],
        "first_step": [int(steps.min()) if len(steps) else None for steps in drawn],
        "last_step": [int(steps.max()) if len(steps) else None for steps in drawn],
        "unversioned": [int(each.written.sum()) - len(steps) for each, steps in zip(found, drawn, strict=True)],
    }
    for name, part in OF_TRANSCRIPT.items():
        of_each = [getattr(each, part) for each in found]
        ends = [0, *itertools.accumulate(map(len, of_each))]
        made[name] = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.concatenate(of_each)))
    if text is not None:
        for name in WORDS:
            made[name] = [text(ids.tolist()) if len(ids := getattr(each, name)) else None for each in found]
    rows = [row for row, _ in samples]
    arrays = [made[field.name] if field.name in made else [row.get(field.name) for row in rows] for field in schema]
    return pa.Table.from_arrays(
        [
            each if isinstance(each, pa.Array) else pa.array(each, field.type)
            for each, field in zip(arrays, schema, strict=True)
        ],
        schema=schema,
    )


class _Sink:
    """Counts bytes for the writer: a pipe has no position, but the writer asks for it."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._written = 0

    def write(self, body: bytes) -> int:
        self._file.write(body)
        self._written += len(body)
        return len(body)

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.flush()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m colocated_rl_rollout.pages.parquet", description=__doc__.split("\n")[0]
    )
    parser.add_argument("store", type=Path, help="directory of the store")
    parser.add_argument("--model", type=Path, help="directory of the model: with words")
    parser.add_argument("--state", type=SampleState)
    parser.add_argument("--limit", type=int)
    asked = parser.parse_args(arguments)
    os.nice(10)
    pa.set_memory_pool(pa.system_memory_pool())  # the other pools reserve more than a process here may have
    pa.set_cpu_count(1)
    text = Chat(asked.model).text if asked.model else None
    try:
        write(asked.store, sys.stdout.buffer, state=asked.state, limit=asked.limit, text=text)
    except Exception as error:  # noqa: BLE001 - the last one: the controller logs what is written here
        message = in_words(error) if isinstance(error, sqlite3.Error) else failure_of(error)  # SQLite quotes no values
        print(message, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
