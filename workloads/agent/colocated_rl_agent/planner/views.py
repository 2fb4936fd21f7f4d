"""What the agent knows of its pod, as values: an engine, trainer ranks, the whole. Pure.

A view says more than the facts that the operator hears: what `next_action` needs to choose the next safe step. Each
change of a view is a method here that states what a confirmed effect means, so that the agent, its journal and the
model that the tests explore can't disagree about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from colocated_rl_api.facts import (
    HELD,
    DeviceFacts,
    EngineFacts,
    EngineState,
    GateFacts,
    PodFacts,
    Problem,
    RejectedWeights,
    TagState,
    TrainerFacts,
    TrainerState,
)
from colocated_rl_api.rungs import Rung, WeightVersion

WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
TAGS = (WEIGHTS, KV_CACHE, CUDA_GRAPH)
ENGINE_NAME = "engine-0"
LONGEST_REASON = 600  # characters: it may be in the words of an engine or a trainer


def trainer_name(rank: int) -> str:
    """The runner's name of a trainer rank's process."""
    return f"trainer-{rank}"


@dataclass(frozen=True)
class EngineView:
    """One incarnation of the engine, or its absence. It starts with all its memory, of which it may keep some."""

    state: EngineState = EngineState.ABSENT
    incarnation: str | None = None
    starts_on: WeightVersion | None = None
    start_by: float = 0.0  # while STARTING: past it the engine is replaced
    start_after: float = 0.0  # while ABSENT: back-off after failures
    version: WeightVersion | None = None
    paused: bool = False
    drained: bool = False
    released: bool = False  # some tag was released since the gate last closed: never a second time (H10)
    flushed: bool = True  # the cache holds nothing of other weights or of memory that went away
    agrees: bool = False  # with the probe of `version`
    checksum: str | None = None  # of `version`, where the job asks for it
    tags: Mapping[str, TagState] = field(default_factory=lambda: dict.fromkeys(TAGS, TagState.MAPPED))
    broken: str | None = None  # a call failed, or nobody knows its outcome: to be replaced
    doubted: WeightVersion | None = None  # newest that an incarnation was not shown to hold, this one or one before it
    rejected: RejectedWeights | None = None  # doubted a second time: no engine starts on them

    @property
    def is_absent(self) -> bool:
        return self.state is EngineState.ABSENT

    @property
    def is_released(self) -> bool:
        return self.facts().is_released

    @property
    def is_whole(self) -> bool:
        """All memory mapped."""
        return all(state in HELD for state in self.tags.values())

    def tags_in(self, state: TagState) -> tuple[str, ...]:
        return tuple(tag for tag in TAGS if self.tags[tag] is state)

    def holds(self, version: WeightVersion) -> bool:
        return self.state is EngineState.READY and self.version == version and self.tags[WEIGHTS] in HELD

    # -------------------------------------------------------------------------------- what a confirmed effect means
    def started(
        self, incarnation: str, version: WeightVersion, *, start_by: float, keeps: tuple[str, ...] = ()
    ) -> EngineView:
        """keeps: tags that a switch leaves mapped."""
        tags = {tag: TagState.KEPT if tag in keeps else TagState.MAPPED for tag in TAGS}
        return EngineView(
            EngineState.STARTING, incarnation, starts_on=version, start_by=start_by, tags=tags, doubted=self.doubted
        )

    def answered(self, version: WeightVersion, checksum: str | None = None) -> EngineView:
        return replace(self, state=EngineState.READY, version=version, checksum=checksum)

    def gate_closed(self) -> EngineView:
        return replace(self, drained=False, released=False)

    def was_paused(self) -> EngineView:
        return replace(self, paused=True)

    def was_flushed(self) -> EngineView:
        """Flush proves idleness only behind a pause: without one, work could come right after it."""
        return replace(self, drained=self.paused, flushed=True)

    def was_released(self) -> EngineView:
        """All that it does not keep. Released weights are undefined: they belong to no version any more (H24)."""
        after = replace(
            self, tags={**self.tags, **dict.fromkeys(self.tags_in(TagState.MAPPED), TagState.RELEASED)}, released=True
        )
        after = replace(after, agrees=False, flushed=False)
        return after if self.tags[WEIGHTS] is TagState.KEPT else replace(after, version=None, checksum=None)

    def was_resumed(self, tags: tuple[str, ...]) -> EngineView:
        return replace(self, tags={**self.tags, **dict.fromkeys(tags, TagState.MAPPED)}, flushed=False)

    def was_updated(self, version: WeightVersion, checksum: str | None = None) -> EngineView:
        return replace(self, version=version, checksum=checksum, agrees=False, flushed=False)

    def was_continued(self) -> EngineView:
        return replace(self, paused=False, drained=False)

    def agreed(self) -> EngineView:
        return replace(self, agrees=True)

    def broke(self, reason: str, unknown_tags: tuple[str, ...] = ()) -> EngineView:
        """Nothing is known to have happened, nor to have not: I6."""
        tags = {**self.tags, **dict.fromkeys(unknown_tags, TagState.UNKNOWN)}
        return replace(self, tags=tags, broken=reason[:LONGEST_REASON])

    def was_doubted(self, version: WeightVersion, reason: str, unknown_tags: tuple[str, ...] = ()) -> EngineView:
        """It was not shown to hold `version`, and may have ended of the check. The second time they are rejected."""
        after = replace(self if self.is_absent else self.broke(reason, unknown_tags), doubted=version)
        if self.doubted != version:
            return after
        return replace(after, rejected=RejectedWeights(version=version, message=reason[:LONGEST_REASON]))

    def gone(self, *, start_after: float = 0.0) -> EngineView:
        return EngineView(start_after=start_after, doubted=self.doubted, rejected=self.rejected)

    def facts(self, *, failures: int = 0) -> EngineFacts:
        """failures: of its incarnations, since one last served."""
        return EngineFacts(
            name=ENGINE_NAME,
            state=self.state,
            incarnation=self.incarnation,
            starts_on=self.starts_on,
            paused=self.paused,
            drained=self.drained,
            weights=self.tags[WEIGHTS],
            kv_cache=self.tags[KV_CACHE],
            cuda_graph=self.tags[CUDA_GRAPH],
            version=self.version,
            checksum=self.checksum,
            failures=failures,
            rejected=self.rejected if self.is_absent else None,
        )


@dataclass(frozen=True)
class RankView:
    """One trainer rank: its newest incarnation, alive or not."""

    rank: int
    state: TrainerState = TrainerState.ABSENT
    incarnation: str | None = None
    lineage: int | None = None
    exit_code: int | None = None
    start_by: float = 0.0  # while it has not loaded its checkpoint: past it the trainer is stopped
    step: int | None = None
    scored: int | None = None
    dirty: bool = False
    exported: WeightVersion | None = None  # as the trainer says; a fact only once its files were verified
    saved: int | None = None
    replay_from: int | None = None
    can_finish: bool = False
    finished: WeightVersion | None = None
    broken: str | None = None  # a request failed or was not answered in time: to be stopped

    @property
    def is_alive(self) -> bool:
        return self.state is not TrainerState.ABSENT

    @property
    def is_off_device(self) -> bool:
        return self.state in (TrainerState.ABSENT, TrainerState.OFFLOADED)

    def started(self, incarnation: str, lineage: int, *, start_by: float) -> RankView:
        return RankView(self.rank, TrainerState.STARTING, incarnation, lineage, start_by=start_by)

    def reported(self, **status: Any) -> RankView:
        """Fields of a `TrainerStatus` that the trainer answered."""
        return replace(self, **status)

    def broke(self, reason: str) -> RankView:
        return replace(self, broken=reason[:LONGEST_REASON])

    def gone(self, exit_code: int) -> RankView:
        """Lineage and incarnation stay: they say which one died."""
        return RankView(self.rank, incarnation=self.incarnation, lineage=self.lineage, exit_code=exit_code)

    def facts(self, whole: WeightVersion | None) -> TrainerFacts:
        return TrainerFacts(
            rank=self.rank,
            state=self.state,
            incarnation=self.incarnation,
            exit_code=self.exit_code,
            lineage=self.lineage,
            step=self.step,
            scored=self.scored,
            dirty=self.dirty,
            exported=self.exported if self.exported == whole else None,
            saved=self.saved,
            replay_from=self.replay_from,
            can_finish=self.can_finish,
            finished=self.finished,
        )


@dataclass(frozen=True)
class PodView:
    """Everything that the choice of the next action depends on."""

    now: float  # of a clock that only goes forward, as every other time here
    runner_known: bool  # connected, and its children were told: without it nothing is known
    terminating: bool  # the container got SIGTERM
    gate_open: bool
    in_flight: int
    closed_at: float  # when the gate last closed
    engine: EngineView
    ranks: tuple[RankView, ...]
    whole: WeightVersion | None = None  # newest export whose files agree with their manifest
    stale_exports: bool = False  # older ones are still there
    crowded: bool | None = False  # another export is there besides the one that engines serve; None: not known
    verify_after: float = 0.0  # back-off after an export was not what its manifest says
    shards: int | None = None  # step whose shards are there for every rank
    fetch_after: float = 0.0  # back-off after a failed fetch
    keep_after: float = 0.0  # back-off after a checkpoint, or the model, could not be written
    agreed: tuple[WeightVersion, str] | None = None  # newest checksum that the group agreed on, and of what
    stopped: bool = False
    has_engine: bool = True  # False: engines have pods of their own

    def facts(
        self,
        *,
        epoch: int = 0,
        devices: tuple[DeviceFacts, ...] = (),
        problem: Problem | None = None,
        took_s: Mapping[Rung, float] | None = None,
        engine_failures: int = 0,
    ) -> PodFacts:
        known = self.runner_known or self.stopped
        return PodFacts(
            epoch=epoch,
            gate=GateFacts(open=self.gate_open, settled=not self.gate_open and self.in_flight == 0),
            engines=(self.engine.facts(failures=engine_failures),) if known and self.has_engine else (),
            trainers=tuple(rank.facts(self.whole) for rank in self.ranks) if known else (),
            export=self.whole,
            devices=devices,
            problem=problem,
            took_s=dict(took_s or {}),
            stopped=self.stopped,
            ending=self.terminating,
        )
