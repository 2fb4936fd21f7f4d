"""The journal keeps what an agent must remember after any end."""

from __future__ import annotations

import itertools
import stat
from pathlib import Path
from typing import Literal

import pytest
from full_disk import no_file_above
from hypothesis import given
from hypothesis import strategies as st

from colocated_rl_agent.files.journal import (
    FILE,
    ChecksumAgreed,
    EngineStarted,
    EpochAccepted,
    Intent,
    Journal,
    JournalState,
    JournalUnreadable,
    Outcome,
    PoolMeasured,
    Record,
    TrainerStarted,
)
from colocated_rl_agent.planner.views import (
    CUDA_GRAPH,
    KV_CACHE,
    TAGS,
    WEIGHTS,
    engine_name,
)
from colocated_rl_api.facts import TagState
from colocated_rl_api.rungs import WeightVersion

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)
ENGINE, OTHER = engine_name(0), engine_name(1)


def reopened(directory: Path, journal: Journal) -> Journal:
    journal.close()
    return Journal(directory)


def started(directory: Path) -> Journal:
    journal = Journal(directory)
    journal.epoch_accepted(3)
    journal.engine_started(EngineStarted(incarnation="e1", version=V0, admin_key="key"))
    journal.trainer_started(0, "t1", 1)
    return journal


def test_everything_is_remembered_by_the_next_agent(tmp_path: Path) -> None:
    journal = reopened(tmp_path, started(tmp_path))
    memory = journal.memory
    engine = memory.engines[ENGINE]
    assert (3, "e1", V0, "key", None) == (
        memory.epoch, engine.incarnation, engine.started.version, engine.started.admin_key, engine.pending,
    )  # fmt: skip
    assert (TrainerStarted(rank=0, incarnation="t1", lineage=1),) == memory.trainers
    journal.close()


def test_what_the_group_agreed_on_is_remembered_and_written_once(tmp_path: Path) -> None:
    journal = started(tmp_path)
    for _ in range(3):
        journal.checksum_agreed(V0, "old")
        journal.checksum_agreed(V1, "new")
        journal.checksum_agreed(V1, "new")
    assert 6 == (tmp_path / FILE).read_text().count('"agreed"')
    journal = reopened(tmp_path, journal)
    assert (V1, "new") == journal.memory.agreed
    journal.close()


def test_intent_without_an_outcome_is_pending_after_a_restart(tmp_path: Path) -> None:
    journal = started(tmp_path)
    journal.intend(Intent(incarnation="e1", call="release", tags=TAGS))
    journal = reopened(tmp_path, journal)
    assert "release" == getattr(journal.memory.engines[ENGINE].pending, "call", None)
    journal.close()


def test_half_a_switch_is_remembered_tag_by_tag(tmp_path: Path) -> None:
    journal = started(tmp_path)
    journal.intend(Intent(incarnation="e1", call="release", tags=TAGS))
    journal.confirm("e1")
    journal.intend(Intent(incarnation="e1", call="resume", tags=(WEIGHTS,)))
    journal.confirm("e1")
    journal = reopened(tmp_path, journal)
    engine = journal.memory.engines.get(ENGINE)
    assert engine is not None
    assert (TagState.MAPPED, TagState.RELEASED) == (engine.view.tags[WEIGHTS], engine.view.tags[KV_CACHE])
    assert engine.view.version is None, "released weights belong to no version"
    journal.close()


def test_what_an_engine_keeps_is_remembered_of_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.engine_started(EngineStarted(incarnation="e1", version=V0, admin_key="key", keeps=(WEIGHTS,)))
    for tags, call in (((KV_CACHE, CUDA_GRAPH), "release"), ((), "update"), ((KV_CACHE,), "resume")):
        version = V1 if call == "update" else None
        journal.intend(Intent.model_validate({"incarnation": "e1", "call": call, "tags": tags, "version": version}))
        journal.confirm("e1")
        before = journal.memory.engines.get(ENGINE)
        journal = reopened(tmp_path, journal)
        assert journal.memory.engines.get(ENGINE) == before, f"after {call}"
    assert before is not None
    assert (TagState.KEPT, TagState.MAPPED, TagState.RELEASED) == tuple(before.view.tags[tag] for tag in TAGS)
    assert V1 == before.view.version, "weights that are kept are always those of a version"
    journal.close()


def test_torn_last_record_counts_as_never_written(tmp_path: Path) -> None:
    journal = started(tmp_path)
    journal.close()
    path = tmp_path / FILE
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut, end in [*((cut, b"") for cut in range(1, last)), *((cut, b"\n") for cut in range(2, last, 7))]:
        path.write_bytes(whole[:-cut] + end)  # the end of a block that was written in part may be there
        journal = Journal(tmp_path)
        assert () == journal.memory.trainers
        journal.trainer_started(0, "t2", 2)
        journal = reopened(tmp_path, journal)
        assert "t2" == journal.memory.trainers[0].incarnation, "what is appended later is not glued to the torn record"
        journal.close()


@pytest.mark.parametrize("room", [0, 1, 10, 22])
def test_record_that_finds_no_room_was_never_written_and_spoils_none_that_follows(tmp_path: Path, room: int) -> None:
    """Half of it stayed, the next one was glued to it, and no later agent could read the file."""
    journal = started(tmp_path)
    size = (tmp_path / FILE).stat().st_size
    with no_file_above(size + room), pytest.raises(OSError, match=r"room for a record|File too large"):
        journal.epoch_accepted(4)
    assert 3 == journal.memory.epoch
    journal.epoch_accepted(5)
    journal = reopened(tmp_path, journal)
    assert 5 == journal.memory.epoch
    journal.close()


def test_journal_that_cannot_be_rewritten_goes_on_in_its_own_file(tmp_path: Path) -> None:
    """The old file was closed first: what came next was written to whatever had got its number since. And a record that
    was written was said not to be.
    """
    journal = Journal(tmp_path, rewrite_after=1)
    (tmp_path / FILE).with_suffix(".draft").mkdir()
    journal.epoch_accepted(4)
    with (tmp_path / "another").open("wb"):
        journal.epoch_accepted(5)
    assert b"" == (tmp_path / "another").read_bytes()
    (tmp_path / FILE).with_suffix(".draft").rmdir()
    journal = reopened(tmp_path, journal)
    assert 5 == journal.memory.epoch
    journal.close()


def test_damage_in_the_middle_stops_the_agent_by_name(tmp_path: Path) -> None:
    started(tmp_path).close()
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes().replace(b'"epoch":3', b'"epoch":?', 1))
    with pytest.raises(JournalUnreadable, match="line 1"):
        Journal(tmp_path)


def test_journal_stays_small_however_long_the_job(tmp_path: Path) -> None:
    started(tmp_path).close()
    journal = Journal(tmp_path, rewrite_after=20)
    for _ in range(30):
        journal.intend(Intent(incarnation="e1", call="release", tags=TAGS))
        journal.confirm("e1")
        assert len((tmp_path / FILE).read_bytes().splitlines()) < 30
    journal.close()


def test_journal_is_readable_for_the_agent_alone(tmp_path: Path) -> None:
    started(tmp_path).close()
    assert 0o600 == stat.S_IMODE((tmp_path / FILE).stat().st_mode)


versions = st.builds(WeightVersion, st.integers(0, 3), st.integers(1, 2))
incarnations = st.sampled_from(["e1", "e2", "f1", "f2"])
records: st.SearchStrategy[Record] = st.one_of(
    st.builds(EpochAccepted, epoch=st.integers(0, 9)),
    st.builds(
        lambda named, version: EngineStarted(name=named[0], incarnation=named[1], version=version, admin_key="k"),
        st.sampled_from([(ENGINE, "e1"), (ENGINE, "e2"), (OTHER, "f1"), (OTHER, "f2")]),
        versions,
    ),
    st.builds(TrainerStarted, rank=st.integers(0, 1), incarnation=st.just("t"), lineage=st.integers(1, 3)),
    st.builds(Outcome, incarnation=incarnations),
    st.builds(PoolMeasured, tokens=st.integers(1, 9)),
    st.builds(ChecksumAgreed, version=versions, checksum=st.sampled_from(["a", "b"])),
)
SWITCH: tuple[tuple[Literal["release", "resume", "update"], tuple[str, ...], bool], ...] = (
    ("release", TAGS, False),
    ("resume", (WEIGHTS,), False),
    ("update", (WEIGHTS,), True),
    ("resume", (KV_CACHE, "cuda_graph"), False),
)


@given(st.lists(records, max_size=12), st.integers(0, 12), st.booleans(), versions)
def test_shortest_journal_means_the_same(
    before: list[Record], calls: int, last_is_open: bool, version: WeightVersion
) -> None:
    """Any journal, with any number of calls of a switch on each engine, the last one perhaps without outcome."""
    memory = JournalState()
    for record in before:
        memory = memory.after(record)
    for number, engine in itertools.product(range(calls), [*memory.engines.values()]):
        call, tags, has_version = SWITCH[number % len(SWITCH)]
        at = version if has_version else None
        memory = memory.after(Intent(incarnation=engine.incarnation, call=call, tags=tags, version=at))
        if number < calls - 1 or not last_is_open:
            memory = memory.after(Outcome(incarnation=engine.incarnation))
    again = JournalState()
    for record in memory.records():
        again = again.after(record)
    assert (memory.epoch, memory.pool_tokens) == (again.epoch, again.pool_tokens)
    assert set(memory.trainers) == set(again.trainers)
    assert memory.engines.keys() == again.engines.keys()
    for name, engine in memory.engines.items():
        found = again.engines[name]
        assert engine.pending == found.pending
        assert (engine.view.tags, engine.view.version) == (found.view.tags, found.view.version)
