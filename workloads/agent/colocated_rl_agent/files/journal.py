"""What the agent must remember across its own restarts: epochs, incarnations, and calls that can't be repeated.

A record is durable before the effect it announces (`intend`) and after the effect it reports (`confirm`). Everything is
tied to an incarnation id of the runner: what this file does not know is not the agent's and gets killed, and an intent
without an outcome means that nobody knows (I6). Bounded: it is rewritten as its own meaning when it is opened and after
every REWRITE_AFTER records. A torn last record is what a crash leaves and counts as never written; anything else that
can't be read stops the agent, because forgetting the epoch would let an operator of the past in (I5).

Appending blocks for one fsync, a few times a switch.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from colocated_rl_agent.planner.views import EngineView
from colocated_rl_api.facts import TagState
from colocated_rl_api.logs import log
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.wire import Version

LOG = logging.getLogger(__name__)

FILE = "journal.jsonl"
REWRITE_AFTER = 1000


class JournalUnreadable(ValueError):
    """The journal is damaged beyond a torn end: the pod must be replaced."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EpochAccepted(_Record):
    kind: Literal["epoch"] = "epoch"
    epoch: int


class EngineStarted(_Record):
    kind: Literal["engine"] = "engine"
    incarnation: str
    version: Version
    admin_key: str = Field(repr=False)
    keeps: tuple[str, ...] = ()  # tags that a switch leaves mapped


class TrainerStarted(_Record):
    kind: Literal["trainer"] = "trainer"
    rank: int
    incarnation: str
    lineage: int


class PoolMeasured(_Record):
    """KV pool of the pod's first engine, which its replacements get."""

    kind: Literal["pool"] = "pool"
    tokens: int


class ChecksumAgreed(_Record):
    """Which weights of a version the group agreed on: later the operator compares those of newer ones."""

    kind: Literal["agreed"] = "agreed"
    version: Version
    checksum: str


class Intent(_Record):
    """Of a call that must not be repeated. `tags` for release and resume, `version` for an update."""

    kind: Literal["intent"] = "intent"
    incarnation: str
    call: Literal["release", "resume", "update"]
    tags: tuple[str, ...] = ()
    version: Version | None = None


class Outcome(_Record):
    """The intended call of this incarnation took effect."""

    kind: Literal["outcome"] = "outcome"
    incarnation: str


Record = EpochAccepted | EngineStarted | TrainerStarted | PoolMeasured | ChecksumAgreed | Intent | Outcome
_record: TypeAdapter[Record] = TypeAdapter(Record)


@dataclass(frozen=True)
class EngineRecord:
    """What is remembered of the newest engine. `pending`: a call whose outcome was not written down."""

    started: EngineStarted
    view: EngineView
    pending: Intent | None = None

    @property
    def incarnation(self) -> str:
        return self.started.incarnation


@dataclass(frozen=True)
class JournalState:
    """The meaning of a journal."""

    epoch: int = 0
    engine: EngineRecord | None = None
    trainers: tuple[TrainerStarted, ...] = ()  # newest of each rank
    pool_tokens: int | None = None
    agreed: tuple[WeightVersion, str] | None = None  # newest checksum that the group agreed on, and of what

    def after(self, record: Record) -> JournalState:
        match record:
            case EpochAccepted(epoch=epoch):
                return replace(self, epoch=max(self.epoch, epoch))
            case EngineStarted():
                return replace(self, engine=EngineRecord(record, _fresh(record)))
            case TrainerStarted(rank=rank):
                others = tuple(started for started in self.trainers if started.rank != rank)
                return replace(self, trainers=(*others, record))
            case PoolMeasured(tokens=tokens):
                return replace(self, pool_tokens=tokens)
            case ChecksumAgreed(version=version, checksum=checksum):
                return replace(self, agreed=(version, checksum))
            case Intent(incarnation=incarnation):
                if self.engine is None or self.engine.incarnation != incarnation:
                    return self
                return replace(self, engine=replace(self.engine, pending=record))
            case Outcome(incarnation=incarnation):
                engine = self.engine
                if engine is None or engine.incarnation != incarnation or engine.pending is None:
                    return self
                return replace(self, engine=replace(engine, view=_effect(engine.view, engine.pending), pending=None))

    def records(self) -> list[Record]:
        """The shortest journal of this meaning."""
        records: list[Record] = [EpochAccepted(epoch=self.epoch)] if self.epoch else []
        if self.pool_tokens is not None:
            records.append(PoolMeasured(tokens=self.pool_tokens))
        if self.agreed is not None:
            version, checksum = self.agreed
            records.append(ChecksumAgreed(version=version, checksum=checksum))
        if (engine := self.engine) is not None:
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
    view = EngineView().started(started.incarnation, started.version, start_by=0.0, keeps=started.keeps)
    return view.answered(started.version)


def _history(engine: EngineRecord) -> list[Intent]:
    """Calls that lead from a fresh engine to what is remembered of it."""
    start = _fresh(engine.started)
    if engine.view.tags == start.tags and engine.view.version == start.version:
        return []
    update = Intent(incarnation=engine.incarnation, call="update", version=engine.view.version)
    if not engine.view.released:
        return [update]  # resident: nothing ever was
    calls = [Intent(incarnation=engine.incarnation, call="release", tags=start.tags_in(TagState.MAPPED))]
    if resumed := engine.view.tags_in(TagState.MAPPED):
        calls.append(Intent(incarnation=engine.incarnation, call="resume", tags=resumed))
    if engine.view.version != start.was_released().version:
        calls.append(update)
    return calls


class Journal:
    """The file, held open for appending."""

    def __init__(self, directory: Path, *, rewrite_after: int = REWRITE_AFTER) -> None:
        """Raises JournalUnreadable, OSError."""
        self._rewrite_after = rewrite_after
        self._path = directory / FILE
        self.memory = _read(self._path)
        self._appended = 0
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)  # it holds a key
        self._rewrite()

    def epoch_accepted(self, epoch: int) -> None:
        self._append(EpochAccepted(epoch=epoch))

    def engine_started(
        self, incarnation: str, version: WeightVersion, admin_key: str, *, keeps: tuple[str, ...] = ()
    ) -> None:
        self._append(EngineStarted(incarnation=incarnation, version=version, admin_key=admin_key, keeps=keeps))

    def trainer_started(self, rank: int, incarnation: str, lineage: int) -> None:
        self._append(TrainerStarted(rank=rank, incarnation=incarnation, lineage=lineage))

    def pool_measured(self, tokens: int) -> None:
        self._append(PoolMeasured(tokens=tokens))

    def checksum_agreed(self, version: WeightVersion, checksum: str) -> None:
        """Written once, however often it is told."""
        if self.memory.agreed != (version, checksum):
            self._append(ChecksumAgreed(version=version, checksum=checksum))

    def intend(self, intent: Intent) -> None:
        """Before the call."""
        self._append(intent)

    def confirm(self, incarnation: str) -> None:
        """After the call took effect."""
        self._append(Outcome(incarnation=incarnation))

    def close(self) -> None:
        os.close(self._file)

    def _append(self, record: Record) -> None:
        """Raises OSError; the record was not written then, nor a part of it: the next one would be glued to that."""
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
            except OSError as error:  # the record is written: only the file is longer than it need be
                log(LOG, "journal not rewritten, it goes on as it is", logging.WARNING, reason=str(error))

    def _rewrite(self) -> None:
        """Raises OSError; what is appended goes to the file that is in its place, whichever that is."""
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
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _line(record: Record) -> bytes:
    return record.model_dump_json(exclude_defaults=False).encode() + b"\n"


def _read(path: Path) -> JournalState:
    memory = JournalState()
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return memory
    for number, line in enumerate(lines, start=1):
        try:
            parsed: Any = json.loads(line)
            memory = memory.after(_record.validate_python(parsed))
        except (ValueError, ValidationError) as error:
            if number == len(lines) and not torn:
                break  # a block that was written in part can end with the newline of the record
            raise JournalUnreadable(f"{path}, line {number} can't be read: replace this pod") from error
    return memory
