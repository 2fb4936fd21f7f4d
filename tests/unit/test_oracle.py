"""The oracle of the tests that kill things notices what it is there to notice, and their faults come in turn."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.oracle import (
    BATCH,
    LOADED,
    TRAINED,
    KeptBatch,
    LogLine,
    StoredJob,
    assert_each_sample_once,
    assert_each_step_once,
    assert_versions,
    by_one_number,
    copy_export,
    read_event,
)
from e2e.test_kills import KINDS, RUNGS, SIGNALS, Between, KillFault, faults
from numpy.typing import NDArray

from colocated_rl_api.rungs import WeightVersion
from fakes.weights import logprob, write_export

PROMPT, RESPONSE, STEPS, WORLD = 2, 3, 4, 2
LENGTH = PROMPT + RESPONSE
Exports = dict[WeightVersion, Path]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Exports of a job whose trainers went back from step 2 to step 1 once."""
    folder, found = tmp_path_factory.mktemp("exports"), {}
    for version in (WeightVersion(0, 0), *(WeightVersion(step, 1) for step in (1, 2)), WeightVersion(2, 2)):
        found[version] = folder / str(version)
        write_export(found[version], version=str(version), weight=version.step + version.lineage / 8)
    return found | {WeightVersion(3, 2): write(folder, 3.25)}


def write(folder: Path, weight: float) -> Path:
    place = folder / f"of-{weight}"
    write_export(place, version="3-2", weight=weight)
    return place


def sealed(step: int) -> KeptBatch:
    """A batch in which the last token of each response is of the newest weights, and the others of those before."""
    tokens = np.arange(BATCH * LENGTH, dtype=np.int32) * step % 97
    mask = np.tile(np.array([0] * PROMPT + [1] * RESPONSE, np.uint8), BATCH)
    newest, before = step - 1, max(0, step - 2)
    named = np.tile(np.array([-1] * PROMPT + [before] * (RESPONSE - 1) + [newest], np.int32), BATCH)
    weights = {0: 0.0, 1: 1.125, 2: 2.125 if step == 3 else 2.25, 3: 3.25}
    logp = np.zeros(len(tokens), np.float32)
    for place in np.flatnonzero(mask):
        logp[place] = logprob(weights[int(named[place])], int(tokens[place - 1]), int(tokens[place]))
    columns: dict[str, NDArray[Any]] = {
        "tokens": tokens, "loss_mask": mask, "token_step": named, "behaviour_logp": logp,
        "sample_end": np.arange(LENGTH, len(tokens) + 1, LENGTH),
        "sample": np.arange(BATCH) + (step - 1) * BATCH + 1, "group": np.arange(BATCH) // 4 + step * BATCH,
    }  # fmt: skip
    return KeptBatch(step, columns)


BATCHES = [sealed(step) for step in range(1, STEPS + 1)]
STORED = StoredJob(BATCHES, samples=STEPS * BATCH, admitted=STEPS * BATCH, failed=0)


def changed(step: int, name: str, place: int, value: Any) -> list[KeptBatch]:
    """Return the batches with another value in a column of one of them."""
    batch = BATCHES[step - 1]
    column = batch.columns[name].copy()
    column[place] = value
    return [
        replace(batch, columns={**batch.columns, name: column}) if batch.step == step else batch for batch in BATCHES
    ]


# ------------------------------------------------------------------------------------------------------------- samples
def test_a_job_with_each_sample_in_one_batch_passes() -> None:
    assert_each_sample_once(STORED)


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (replace(STORED, batches=changed(2, "sample", 0, 5)), "no sample is in two batches"),
        (replace(STORED, batches=BATCHES[:2] + BATCHES[3:]), "a batch for each step"),
        (replace(STORED, batches=changed(2, "group", 0, 1)), "batch 2"),
        (replace(STORED, samples=STORED.samples - 1), "every sample is in one state"),
        (replace(STORED, failed=1), "no more samples were given up"),
    ],
)
def test_a_sample_that_is_twice_there_or_lost_is_noticed(stored: StoredJob, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        assert_each_sample_once(stored)


# --------------------------------------------------------------------------------------------------------------- steps
def line(event: str, lineage: int, rank: int, step: int, tokens: int = BATCH * RESPONSE, **fields: Any) -> LogLine:
    metrics = {"samples": BATCH, "tokens": tokens}
    return LogLine(
        "pod", {"event": event, "lineage": lineage, "rank": rank, "step": step, "metrics": metrics, **fields}
    )


def life(lineage: int, rank: int, before: int, last: int) -> list[LogLine]:
    return [
        line(LOADED, lineage, rank, before),
        *(line(TRAINED, lineage, rank, at) for at in range(before + 1, last + 1)),
    ]


def in_order(lines: list[LogLine]) -> list[LogLine]:
    return [LogLine(each.source, {**each.fields, "ts": float(place)}) for place, each in enumerate(lines)]


OF_RANKS = [*life(1, 0, 0, 2), *life(1, 1, 0, 2), *life(2, 0, 1, STEPS), *life(2, 1, 1, STEPS)]
OF_AGENTS = [each for each in OF_RANKS if each.fields["event"] == TRAINED]


def test_a_job_whose_ranks_went_back_and_trained_each_step_once_passes() -> None:
    assert_each_step_once(BATCHES, in_order(OF_RANKS), OF_AGENTS, step=STEPS, world=WORLD)
    lacks_the_last_line = OF_RANKS[:2] + OF_RANKS[3:]
    assert_each_step_once(BATCHES, in_order(lacks_the_last_line), OF_AGENTS, step=STEPS, world=WORLD)


@pytest.mark.parametrize(
    ("ranks", "agents", "why"),
    [
        ([*OF_RANKS[:3], OF_RANKS[2], *OF_RANKS[3:]], OF_AGENTS, "trains each step once, in order"),
        ([OF_RANKS[0], *OF_RANKS[2:]], OF_AGENTS, "trains each step once, in order"),
        ([*OF_RANKS[:2], line(TRAINED, 1, 0, 2, tokens=5), *OF_RANKS[3:]], OF_AGENTS, "trained on batch 2"),
        (life(1, 0, 0, STEPS) + life(1, 1, 0, 3) + [line(TRAINED, 1, 1, 4, tokens=5)], [], "as its peers"),
        ([*life(1, 0, 0, 2), *life(1, 1, 0, 2), *life(2, 0, 3, 4), *life(2, 1, 3, 4)], [], "was trained before"),
        ([*life(1, 0, 0, 3), *life(1, 1, 0, 3)], [], "every step was trained"),
        (life(1, 0, 0, STEPS), [], "all ranks trained"),
        (OF_RANKS, [*OF_AGENTS, line(TRAINED, 2, 0, 1)], "says itself that it trained step 1"),
        (OF_RANKS, [*OF_AGENTS[:-1], line(TRAINED, 2, 1, STEPS, tokens=5)], "as its agent says"),
    ],
)
def test_a_step_that_is_trained_twice_or_by_nobody_is_noticed(
    ranks: list[LogLine], agents: list[LogLine], why: str
) -> None:
    with pytest.raises(AssertionError, match=why):
        assert_each_step_once(BATCHES, in_order(ranks), agents, step=STEPS, world=WORLD)


# ------------------------------------------------------------------------------------------------------------- versions
def test_tokens_of_the_weights_that_they_name_pass_whichever_lineage_made_those(exports: Exports) -> None:
    tokens, alone = assert_versions(BATCHES, exports, computed=by_one_number)
    assert tokens == STEPS * BATCH * RESPONSE
    assert alone > tokens / 2


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        (changed(3, "token_step", 3, 2), "a token names step 2"),
        (changed(3, "token_step", 4, 1), "a token names step 1"),
        (changed(3, "behaviour_logp", 2, -1.0), "a token names step 1"),
        (changed(3, "token_step", 2, 0), "as old as the job allows"),
        (changed(4, "token_step", 2, 3), "versions go on"),
        (changed(2, "behaviour_logp", 4, np.nan), "log-probabilities"),
    ],
)
def test_a_token_that_other_weights_drew_is_noticed(exports: Exports, batches: list[KeptBatch], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        assert_versions(batches, exports, computed=by_one_number)


def test_an_export_that_nobody_saw_is_noticed(exports: Exports) -> None:
    seen = {version: place for version, place in exports.items() if version.step != 2}
    with pytest.raises(AssertionError, match="no complete export of step 2 was seen"):
        assert_versions(BATCHES, seen, computed=by_one_number)


def test_an_export_is_copied_once_it_is_complete(tmp_path: Path) -> None:
    source, place = tmp_path / "1-1", tmp_path / "kept"
    write_export(source, version="1-1", weight=1.125)
    manifest = (source / "manifest.json").rename(tmp_path / "manifest.json")
    copy_export(source, place)
    assert not place.exists()
    manifest.rename(source / "manifest.json")
    copy_export(source, place)
    assert (source / "model.safetensors").read_bytes() == (place / "model.safetensors").read_bytes()


def test_a_line_of_a_rank_and_one_of_an_agent_are_read_and_no_others() -> None:
    fields = {"event": TRAINED, "step": 3}
    before = b"2026-11-29T17:48:45.10336483Z stdout F "
    assert fields == read_event(before + b"[trainer-0] " + json.dumps(fields).encode())
    assert fields == read_event(before + json.dumps(fields, separators=(",", ":")).encode())
    assert read_event(before + b'{"event": "batch sealed"}') is None
    assert read_event(before + b"[trainer-0] a step trained {") is None


# --------------------------------------------------------------------------------------------------------------- faults
def test_every_kind_is_killed_and_stopped_and_every_rung_struck_before_any_comes_again() -> None:
    chosen = [*itertools.islice(of_processes(7), 2 * len(KINDS))]
    assert {*KINDS} == {fault.kind for fault in chosen[: len(KINDS)]}
    assert {*itertools.product(KINDS, SIGNALS)} == {(fault.kind, fault.number) for fault in chosen}
    assert {*RUNGS} == {fault.rung for fault in chosen[: len(RUNGS)]}
    assert {signal.SIGKILL, signal.SIGSTOP} == {*SIGNALS}


def of_processes(seed: int) -> Iterator[KillFault]:
    return (fault for fault in faults(seed, of_network=True) if not isinstance(fault, Between))


def test_faults_follow_from_their_seed() -> None:
    first: Callable[[int], list[str]] = lambda seed: [*map(str, itertools.islice(faults(seed, of_network=True), 40))]  # noqa: E731
    assert first(7) == first(7)
    assert first(7) != first(8)
