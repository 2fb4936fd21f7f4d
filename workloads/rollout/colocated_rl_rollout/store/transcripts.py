"""Read prompts and responses, token by token: from the sample's rows until it is sealed, then from its batch's file.
People read them, from another thread or process than the one that writes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from colocated_rl_api.batch import HEADER_KEY, BatchHeader
from colocated_rl_rollout.rules.resume import join
from colocated_rl_rollout.rules.samples import NO_TOKENS, OF_RECORDING, GroupId, SampleId
from colocated_rl_rollout.store.batches import shard_path
from colocated_rl_rollout.store.tables import unpacked


class Transcript(NamedTuple):
    """Holds the tokens of one sample; all fields but the prompt describe its response, token by token.

    written: the policy generated the token, and it may be trained. Elsewhere behaviour_logp is 0 and token_step -1,
    which it also is where the engine named no weight version of the job.
    """

    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    written: NDArray[np.bool_]
    behaviour_logp: NDArray[np.float32]
    token_step: NDArray[np.int32]


class SealedSample(NamedTuple):
    id: SampleId
    group: GroupId
    reward: float
    truncated: bool
    figures: dict[str, float]
    transcript: Transcript


RowT = TypeVar("RowT", bound=Mapping[str, Any])
NO_IDS = np.empty(0, np.int32)
NOTHING = Transcript(NO_IDS, NO_IDS, np.empty(0, np.bool_), np.empty(0, np.float32), NO_IDS)


def of(database: sqlite3.Connection, directory: Path, rows: Iterable[RowT]) -> Iterator[tuple[RowT, Transcript]]:
    """Yield each row of `tables.SHOWN` with its transcript; batches come last, one by one. directory: of batches."""
    sealed: dict[int, dict[int, RowT]] = {}
    for row in rows:
        if row["step"] is None:
            yield row, in_store(database, row["id"], row["group_id"])
        elif row["prompt_index"] == OF_RECORDING:
            yield row, NOTHING  # in its file samples have the ids of the job that made them
        else:
            sealed.setdefault(row["step"], {})[row["id"]] = row
    for step, members in sealed.items():
        for sample in in_batch(directory, step, set(members)):
            yield members.pop(sample.id), sample.transcript
        for row in members.values():
            yield row, NOTHING


def in_store(database: sqlite3.Connection, sample: SampleId, group: GroupId) -> Transcript:
    """Return the transcript of a sample that is in no batch; empty before its first token and after it was given up."""
    (prompt,) = database.execute("SELECT prompt FROM groups WHERE id = ?", [group]).fetchone()
    tokens = NO_TOKENS
    for segment in database.execute(
        "SELECT ids, logp, spans FROM segments WHERE sample_id = ? ORDER BY attempt", [sample]
    ):
        tokens = join(tokens, unpacked(*segment))
    written, steps = np.zeros(len(tokens), np.bool_), np.full(len(tokens), -1, np.int32)
    for span in tokens.spans:
        written[span.start : span.end] = True
        steps[span.start : span.end] = -1 if span.version is None else span.version.step
    return Transcript(
        np.frombuffer(prompt or b"", np.int32),
        tokens.ids,
        written,
        np.where(written, tokens.logp, np.float32(0)),
        steps,
    )


def in_batch(directory: Path, step: int, wanted: Collection[int] | None = None) -> Iterator[SealedSample]:
    """Yield the samples of a sealed batch, or only the wanted ones; only one at a time is in memory.

    Yield none where files are gone, or come from a release that did not record which sample is which.
    """
    shard, shards = 0, 1
    while shard < shards:
        try:
            with safe_open(shard_path(directory, step, shard), framework="np") as file:
                if not {"sample", "prompt_tokens"} <= set(file.keys()):
                    return
                header = BatchHeader.model_validate_json((file.metadata() or {})[HEADER_KEY])
                shards = header.shards
                yield from _in_shard(file, header.figures, wanted)
        except FileNotFoundError:  # a checkpoint holds it by now
            return
        shard += 1


def _in_shard(file: Any, names: Sequence[str], wanted: Collection[int] | None) -> Iterator[SealedSample]:
    of_each = {name: file.get_tensor(name) for name in ("sample", "group", "reward", "truncated", "prompt_tokens")}
    figures = file.get_tensor("figures") if names else np.empty((len(of_each["sample"]), 0), np.float32)
    ends = file.get_tensor("sample_end")
    starts = ends - np.diff(ends, prepend=0)
    by_token = [file.get_slice(name) for name in ("tokens", "loss_mask", "behaviour_logp", "token_step")]
    for place, number in enumerate(of_each["sample"].tolist()):
        if wanted is not None and number not in wanted:
            continue
        begin, end, prompt = int(starts[place]), int(ends[place]), int(of_each["prompt_tokens"][place])
        ids, written, drawn, step = (column[begin:end] for column in by_token)  # an empty slice may be an error
        yield SealedSample(
            number,
            GroupId(int(of_each["group"][place])),
            float(of_each["reward"][place]),
            bool(of_each["truncated"][place]),
            {name: value for name, value in zip(names, figures[place].tolist(), strict=True) if value == value},
            Transcript(ids[:prompt], ids[prompt:], written[prompt:] == 1, drawn[prompt:], step[prompt:]),
        )
