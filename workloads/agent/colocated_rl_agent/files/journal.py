"""The journal keeps what must survive agent restarts: epochs, incarnations, and calls that can't be repeated.

A record is durable before the effect it announces (`intend`) and after the effect it reports (`confirm`). Every record
of a process carries its incarnation id from the runner: a process that the journal does not know is killed, and an
intent without an outcome means that the outcome is unknown (I6). Its size is bounded: it is rewritten as the shortest
equal journal when it is opened and after every REWRITE_AFTER records. A torn last record is left by a crash and counts
as never written; any other damage stops the agent, because forgetting the epoch would admit a stale operator (I5).

Appending blocks for one fsync, a few times a switch.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from colocated_rl_agent.planner.views import TAGS, EngineView, engine_name
from colocated_rl_api.durable import sync
from colocated_rl_api.facts import EngineLaunch, TagState
from colocated_rl_api.logs import log
from colocated_rl_api.names import PodUid
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.wire import Version

LOG = logging.getLogger(__name__)

FILE = "journal.jsonl"
REWRITE_AFTER = 1000
MAX_JOURNAL_BYTES = 16 * 1024 * 1024  # as many records, each far larger than any


class JournalUnreadable(ValueError):
    """The journal is damaged beyond a torn end: the pod must be replaced."""


def _known(tags: tuple[str, ...]) -> tuple[str, ...]:
    if not set(tags) <= set(TAGS):
        raise ValueError("no tag of an engine's memory")
    return tags


Tags = Annotated[tuple[str, ...], AfterValidator(_known)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EpochAccepted(_Record):
    kind: Literal["epoch"] = "epoch"
    epoch: int


class EngineStarted(_Record):
    kind: Literal["engine"] = "engine"
    name: str = engine_name(0)
    incarnation: str
    version: Version
    admin_key: str = Field(repr=False)
    keeps: Tags = ()  # tags that a switch leaves mapped
    launch: EngineLaunch | None = None  # of an engine over several pods, in the first of them
    pods: tuple[PodUid, ...] = ()  # likewise: all of them
    part_of: str | None = None  # incarnation of another pod's engine, of which this is a part

    def view(self, *, start_by: float) -> EngineView:
        """Return the view of the engine as it starts."""
        return EngineView().started(
            self.incarnation,
            self.version,
            start_by=start_by,
            keeps=self.keeps,
            launch=self.launch,
            part_of=self.part_of,
        )


class TrainerStarted(_Record):
    kind: Literal["trainer"] = "trainer"
    rank: int
    incarnation: str
    lineage: int


class PoolMeasured(_Record):
    """Records the KV pool of the pod's first engine, which its replacements get."""

    kind: Literal["pool"] = "pool"
    tokens: int


class ChecksumAgreed(_Record):
    """The group agreed on this checksum of a version: later the operator compares those of newer ones."""

    kind: Literal["agreed"] = "agreed"
    version: Version
    checksum: str


class Intent(_Record):
    """An intent precedes a call that must not be repeated. `tags`: of release and resume. `version`: of an update."""

    kind: Literal["intent"] = "intent"
    incarnation: str
    call: Literal["release", "resume", "update"]
    tags: Tags = ()
    version: Version | None = None

    @model_validator(mode="after")
    def _is_of_something(self) -> Self:
        if self.call == "update" and self.version is None:
            raise ValueError("an update has a version")
        return self


class Outcome(_Record):
    """The intended call of this incarnation took effect."""

    kind: Literal["outcome"] = "outcome"
    incarnation: str


Record = EpochAccepted | EngineStarted | TrainerStarted | PoolMeasured | ChecksumAgreed | Intent | Outcome
_record: TypeAdapter[Record] = TypeAdapter(Record)


@dataclass(frozen=True)
class EngineRecord:
    """An EngineRecord holds the state of an engine's newest process. `pending`: a call without a recorded outcome."""

    started: EngineStarted
    view: EngineView
    pending: Intent | None = None

    @property
    def incarnation(self) -> str:
        return self.started.incarnation


@dataclass(frozen=True)
class JournalState:
    """A JournalState is the state that a journal's records add up to."""

    epoch: int = 0
    engines: Mapping[str, EngineRecord] = field(default_factory=dict)  # newest process of each name
    trainers: tuple[TrainerStarted, ...] = ()  # newest of each rank
    pool_tokens: int | None = None
    agreed: tuple[WeightVersion, str] | None = None  # newest version with a checksum that the group agreed on

    def after(self, record: Record) -> JournalState:
        match record:
            case EpochAccepted(epoch=epoch):
                return replace(self, epoch=max(self.epoch, epoch))
            case EngineStarted():
                return self._with(EngineRecord(record, _fresh(record)))
            case TrainerStarted(rank=rank):
                others = tuple(started for started in self.trainers if started.rank != rank)
                return replace(self, trainers=(*others, record))
            case PoolMeasured(tokens=tokens):
                return replace(self, pool_tokens=tokens)
            case ChecksumAgreed(version=version, checksum=checksum):
                return replace(self, agreed=(version, checksum))
            case Intent(incarnation=incarnation):
                engine = self._engine(incarnation)
                return self if engine is None else self._with(replace(engine, pending=record))
            case Outcome(incarnation=incarnation):
                engine = self._engine(incarnation)
                if engine is None or engine.pending is None:
                    return self
                return self._with(replace(engine, view=_effect(engine.view, engine.pending), pending=None))

    def _engine(self, incarnation: str) -> EngineRecord | None:
        return next((engine for engine in self.engines.values() if engine.incarnation == incarnation), None)

    def _with(self, engine: EngineRecord) -> JournalState:
        return replace(self, engines={**self.engines, engine.started.name: engine})

    def records(self) -> list[Record]:
        """Return the shortest journal with this state."""
        records: list[Record] = [EpochAccepted(epoch=self.epoch)] if self.epoch else []
        if self.pool_tokens is not None:
            records.append(PoolMeasured(tokens=self.pool_tokens))
        if self.agreed is not None:
            version, checksum = self.agreed
            records.append(ChecksumAgreed(version=version, checksum=checksum))
        for engine in self.engines.values():
            records.append(engine.started)
            for intent in _history(engine):
                records += [intent, Outcome(incarnation=engine.incarnation)]
            if engine.pending is not None:
                records.append(engine.pending)
        return records + list(self.trainers)


def _effect(view: EngineView, intent: Intent) -> EngineView:
    match intent.call:
        case "release":
            return view.was_released()
        case "resume":
            return view.was_resumed(intent.tags)
        case "update":
            assert intent.version is not None
            return view.was_updated(intent.version)


def _fresh(started: EngineStarted) -> EngineView:
    return started.view(start_by=0.0).answered(started.version)


def _history(engine: EngineRecord) -> list[Intent]:
    """Return the calls that lead from a fresh engine to its recorded view."""
    start = _fresh(engine.started)
    if engine.view.tags == start.tags and engine.view.version == start.version:
        return []
    version = engine.view.version
    update = [Intent(incarnation=engine.incarnation, call="update", version=version)] if version is not None else []
    if not engine.view.released:
        return update  # resident: it never releases anything
    calls = [Intent(incarnation=engine.incarnation, call="release", tags=start.tags_in(TagState.MAPPED))]
    if resumed := engine.view.tags_in(TagState.MAPPED):
        calls.append(Intent(incarnation=engine.incarnation, call="resume", tags=resumed))
    if engine.view.version != start.was_released().version:
        calls += update
    return calls


class Journal:
    """A Journal is the file, held open for appending."""

    def __init__(self, directory: Path, *, rewrite_after: int = REWRITE_AFTER) -> None:
        """Read and rewrite the journal in `directory`. Raises JournalUnreadable, OSError."""
        self._rewrite_after = rewrite_after
        self._path = directory / FILE
        self.memory = _read(self._path)
        self._appended = 0
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)  # it holds a key
        self._rewrite()

    def epoch_accepted(self, epoch: int) -> None:
        self._append(EpochAccepted(epoch=epoch))

    def engine_started(self, started: EngineStarted) -> None:
        self._append(started)

    def trainer_started(self, rank: int, incarnation: str, lineage: int) -> None:
        self._append(TrainerStarted(rank=rank, incarnation=incarnation, lineage=lineage))

    def pool_measured(self, tokens: int) -> None:
        self._append(PoolMeasured(tokens=tokens))

    def checksum_agreed(self, version: WeightVersion, checksum: str) -> None:
        """Record an agreed checksum once, however often it is reported."""
        if self.memory.agreed != (version, checksum):
            self._append(ChecksumAgreed(version=version, checksum=checksum))

    def intend(self, intent: Intent) -> None:
        """Record the intent before the call."""
        self._append(intent)

    def confirm(self, incarnation: str) -> None:
        """Record the outcome after the call took effect."""
        self._append(Outcome(incarnation=incarnation))

    def close(self) -> None:
        os.close(self._file)

    def _append(self, record: Record) -> None:
        """Append a record durably. Raises OSError with no part of it left, to which the next one would be glued."""
        line, size = _line(record), os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, f"{self._path}: no room for a record of {len(line)} bytes")
            os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, size)
            raise
        self.memory = self.memory.after(record)
        self._appended += 1
        if self._appended >= self._rewrite_after:
            try:
                self._rewrite()
            except OSError as error:  # the record is written: the file is only longer than necessary
                log(LOG, "journal not rewritten", logging.WARNING, reason=str(error))

    def _rewrite(self) -> None:
        """Replace the file by the shortest equal journal. Raises OSError; appends go on to the file then in place."""
        draft = self._path.with_suffix(".draft")
        file = os.open(draft, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(file, "wb", closefd=False) as stream:
                stream.writelines(_line(record) for record in self.memory.records())
            os.fsync(file)
            draft.replace(self._path)
        except OSError:
            os.close(file)
            raise
        old, self._file = self._file, file
        os.close(old)
        self._appended = 0
        sync(self._path.parent)


def _line(record: Record) -> bytes:
    return record.model_dump_json(exclude_defaults=False).encode() + b"\n"


def _read(path: Path) -> JournalState:
    memory = JournalState()
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_JOURNAL_BYTES + 1)
    except FileNotFoundError:
        return memory
    if len(text) > MAX_JOURNAL_BYTES:
        raise JournalUnreadable(f"{path} has more than {MAX_JOURNAL_BYTES} bytes: replace this pod")
    *lines, torn = text.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            parsed: Any = json.loads(line)
            memory = memory.after(_record.validate_python(parsed))
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not torn:
                break  # a partly written block can end with the record's newline
            raise JournalUnreadable(f"{path}, line {number} can't be read: replace this pod") from error
    return memory
