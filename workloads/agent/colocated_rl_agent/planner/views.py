"""Views are values that hold what the agent knows of its pod: the engine, the trainer ranks, the whole pod. Pure.

A view holds more than the facts reported to the operator: all that `next_actions` needs to choose the next safe action.
Each change of a view is a method here that defines what a confirmed effect means, so that the agent, its journal and
the model that the tests explore can't disagree about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from colocated_rl_api.facts import (
    HELD,
    DeviceFacts,
    EngineFacts,
    EngineLaunch,
    EngineState,
    GateFacts,
    PodFacts,
    Problem,
    RejectedWeights,
    TagState,
    TrainerFacts,
    TrainerState,
)
from colocated_rl_api.logs import one_line
from colocated_rl_api.rungs import Rung, WeightVersion

WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
TAGS = (WEIGHTS, KV_CACHE, CUDA_GRAPH)
LONGEST_REASON = 600  # characters: the text may come from an engine or a trainer


def engine_name(index: int) -> str:
    """Return the runner's name for the process of one of the pod's engines."""
    return f"engine-{index}"


def trainer_name(rank: int) -> str:
    """Return the runner's name for the process of a trainer rank."""
    return f"trainer-{rank}"


@dataclass(frozen=True)
class EngineView:
    """An EngineView is one incarnation of the engine or its absence. It starts with all memory, and may keep some."""

    state: EngineState = EngineState.ABSENT
    incarnation: str | None = None
    starts_on: WeightVersion | None = None
    start_by: float = 0.0  # while STARTING: the deadline past which the engine is replaced
    start_after: float = 0.0  # while ABSENT: end of the back-off after failures
    version: WeightVersion | None = None
    paused: bool = False
    drained: bool = False
    released: bool = False  # some tag was released since the gate last closed: never a second time (H10)
    flushed: bool = True  # the cache holds nothing from other weights or from released memory
    agrees: bool = False  # its answer to the probe of `version` was right
    noise_nats: float | None = None  # how far its last right answer was from the trainer's
    checksum: str | None = None  # of `version`, where the job asks for it
    tags: Mapping[str, TagState] = field(default_factory=lambda: dict.fromkeys(TAGS, TagState.MAPPED))
    broken: str | None = None  # a call failed or its outcome is unknown: the engine is to be replaced
    launch: EngineLaunch | None = None  # of an engine over several pods, in the first of them
    part_of: str | None = None  # incarnation of the engine whose part the process is, or the last one was
    doubted: WeightVersion | None = None  # newest version that this or an earlier incarnation was not shown to hold
    rejected: RejectedWeights | None = None  # weights doubted a second time: no engine starts on them

    @property
    def is_absent(self) -> bool:
        return self.state is EngineState.ABSENT

    @property
    def is_released(self) -> bool:
        return self.facts().is_released

    @property
    def is_whole(self) -> bool:
        """Return whether all memory is mapped."""
        return all(state in HELD for state in self.tags.values())

    def tags_in(self, state: TagState) -> tuple[str, ...]:
        return tuple(tag for tag in TAGS if self.tags[tag] is state)

    def holds(self, version: WeightVersion) -> bool:
        return self.state is EngineState.READY and self.version == version and self.tags[WEIGHTS] in HELD

    # -------------------------------------------------------------------------------- what a confirmed effect means
    def started(
        self,
        incarnation: str,
        version: WeightVersion,
        *,
        start_by: float,
        keeps: tuple[str, ...] = (),
        launch: EngineLaunch | None = None,
        part_of: str | None = None,
    ) -> EngineView:
        """Return the view of a starting engine. keeps: tags that a switch leaves mapped."""
        return EngineView(
            EngineState.STARTING,
            incarnation,
            starts_on=version,
            start_by=start_by,
            tags={tag: TagState.KEPT if tag in keeps else TagState.MAPPED for tag in TAGS},
            launch=launch,
            part_of=part_of,
            doubted=self.doubted,
        )

    def answered(self, version: WeightVersion, checksum: str | None = None) -> EngineView:
        return replace(self, state=EngineState.READY, version=version, checksum=checksum)

    def gate_closed(self) -> EngineView:
        return replace(self, drained=False, released=False)

    def was_paused(self) -> EngineView:
        return replace(self, paused=True)

    def was_flushed(self) -> EngineView:
        """Return the view after a flush, which proves idleness only behind a pause: otherwise work could follow it."""
        return replace(self, drained=self.paused, flushed=True)

    def was_released(self) -> EngineView:
        """Return the view after a release of all tags not kept. Released weights are undefined, of no version (H24)."""
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

    def agreed(self, apart_nats: float | None = None) -> EngineView:
        """Return the view after a right answer to the probe. apart_nats: None: the export has no probe."""
        return replace(self, agrees=True, noise_nats=self.noise_nats if apart_nats is None else apart_nats)

    def broke(self, reason: str, unknown_tags: tuple[str, ...] = ()) -> EngineView:
        """Return the view after a call with an unknown outcome: it may or may not have had its effect (I6)."""
        tags = {**self.tags, **dict.fromkeys(unknown_tags, TagState.UNKNOWN)}
        return replace(self, tags=tags, broken=reason[:LONGEST_REASON])

    def was_doubted(self, version: WeightVersion, reason: str, unknown_tags: tuple[str, ...] = ()) -> EngineView:
        """Return the view of an engine not shown to hold `version`; the check may have ended it. The second time the
        weights are rejected.
        """
        after = replace(self if self.is_absent else self.broke(reason, unknown_tags), doubted=version)
        if self.doubted != version:
            return after
        return replace(after, rejected=RejectedWeights(version=version, message=reason[:LONGEST_REASON]))

    def gone(self, *, start_after: float = 0.0) -> EngineView:
        return EngineView(start_after=start_after, part_of=self.part_of, doubted=self.doubted, rejected=self.rejected)

    def facts(self, *, index: int = 0, failures: int = 0, shut: bool = True) -> EngineFacts:
        """Return the facts to report. failures: number of incarnations that failed since one last served. shut: whether
        its part of the gate is closed.
        """
        return EngineFacts(
            name=engine_name(index),
            state=self.state,
            incarnation=self.incarnation,
            starts_on=self.starts_on,
            shut=shut,
            paused=self.paused,
            drained=self.drained,
            weights=self.tags[WEIGHTS],
            kv_cache=self.tags[KV_CACHE],
            cuda_graph=self.tags[CUDA_GRAPH],
            version=self.version,
            checksum=self.checksum,
            noise_nats=self.noise_nats,
            failures=failures,
            launch=self.launch,
            part_of=self.part_of,
            rejected=self.rejected if self.is_absent else None,
        )


@dataclass(frozen=True)
class RankView:
    """A RankView is the newest incarnation of one trainer rank, alive or not."""

    rank: int
    state: TrainerState = TrainerState.ABSENT
    incarnation: str | None = None
    lineage: int | None = None
    exit_code: int | None = None
    start_by: float = 0.0  # while its checkpoint is not loaded: the deadline past which the trainer is stopped
    step: int | None = None
    mismatch: float | None = None
    scored: int | None = None
    dirty: bool = False
    exported: WeightVersion | None = None  # as the trainer reports; a fact only once its files were verified
    saved: int | None = None
    replay_from: int | None = None
    can_mirror: bool = False
    mirrored: int | None = None
    mirror_fault: str = ""
    can_finish: bool = False
    finished: WeightVersion | None = None
    network_fault: str = ""
    stalled: int | None = None  # progress in a step that has stood still for far longer than usual; None: it goes on
    grown_bytes: int = 0  # host memory that it has gained since its first switch
    broken: str | None = None  # a request failed or was not answered in time: the trainer is to be stopped
    not_retriable: str = ""  # why it ends, and would end again until the job's settings change, as it reported

    @property
    def is_alive(self) -> bool:
        return self.state is not TrainerState.ABSENT

    @property
    def is_off_device(self) -> bool:
        return self.state in (TrainerState.ABSENT, TrainerState.OFFLOADED)

    def started(self, incarnation: str, lineage: int, *, start_by: float) -> RankView:
        return RankView(self.rank, TrainerState.STARTING, incarnation, lineage, start_by=start_by)

    def reported(self, **status: Any) -> RankView:
        """Return the view with the fields of a `TrainerStatus` that the trainer answered."""
        return replace(self, **status)

    def broke(self, reason: str) -> RankView:
        return replace(self, broken=reason[:LONGEST_REASON])

    def ends_for_good(self, reason: str) -> RankView:
        """Return the view after the process reported why it would end again. It may have ended already."""
        return replace(self, not_retriable=one_line(reason)[:LONGEST_REASON])

    def gone(self, exit_code: int) -> RankView:
        """Return the view after the process ended: what identifies it, and its report of why it would end again."""
        return RankView(
            self.rank,
            incarnation=self.incarnation,
            lineage=self.lineage,
            exit_code=exit_code,
            not_retriable=self.not_retriable,
        )

    def facts(self, whole: WeightVersion | None) -> TrainerFacts:
        return TrainerFacts(
            rank=self.rank,
            state=self.state,
            incarnation=self.incarnation,
            exit_code=self.exit_code,
            lineage=self.lineage,
            step=self.step,
            mismatch=self.mismatch,
            scored=self.scored,
            dirty=self.dirty,
            exported=self.exported if self.exported == whole else None,
            saved=self.saved,
            replay_from=self.replay_from,
            mirrored=None if self.mirror_fault else self.mirrored,
            can_finish=self.can_finish,
            finished=self.finished,
            stalled=self.stalled,
            not_retriable=self.not_retriable,
            grown_bytes=self.grown_bytes,
        )


class Share(StrEnum):
    """Names what a pod may do about an engine over several pods."""

    LEADS = "Leads"  # as about any engine: the first pod, all others are there
    LACKS = "Lacks"  # the same, except starting it, because another pod is missing
    FOLLOWS = "Follows"  # start and end a part of it, as another pod does


@dataclass(frozen=True)
class PodView:
    """A PodView holds everything that the choice of the next action depends on, for one of the pod's engines.

    Gate and engine are that engine's; all else is the pod's, and the same in the views for its other engines.
    """

    now: float  # monotonic clock, as every other time here
    runner_known: bool  # connected, and it has reported its children: without it nothing is known
    terminating: bool  # the container got SIGTERM
    gate_open: bool  # to this engine
    in_flight: int  # requests at this engine
    closed_at: float  # when the gate to it last closed
    engine: EngineView
    ranks: tuple[RankView, ...]
    whole: WeightVersion | None = None  # newest export whose files agree with their manifest
    stale_exports: bool = False  # older ones are still there
    crowded: bool | None = False  # another export is there besides the one that engines serve; None: not known
    verify_after: float = 0.0  # end of the back-off after an export differed from its manifest
    shards: int | None = None  # step whose shards are there for every rank
    fetch_after: float = 0.0  # end of the back-off after a failed fetch
    keep_after: float = 0.0  # end of the back-off after a checkpoint or the model could not be written
    agreed: tuple[WeightVersion, str] | None = None  # newest version with a checksum that the group agreed on
    stopped: bool = False
    has_engine: bool = True  # False: engines have pods of their own
    borrows: bool = False  # exports are another pod's to write: trainers report theirs before this pod has compared it
    share: Share | None = None  # in an engine over several pods, see `planner.spans`
    signalled_at: float = 0.0  # when the container got SIGTERM, if it did
    joins_on: WeightVersion | None = None  # the engine has started on these in another pod: a part of it may here

    def facts(self) -> PodFacts:
        """Return the facts of a pod with this engine alone."""
        return pod_facts((self,))


def pod_facts(
    views: Sequence[PodView],
    *,
    epoch: int = 0,
    devices: tuple[DeviceFacts, ...] = (),
    bad_device: str | None = None,
    problem: Problem | None = None,
    took_s: Mapping[Rung, float] | None = None,
    waited_s: float = 0.0,
    engine_failures: Sequence[int] = (),
    reference_ready: bool | None = None,
) -> PodFacts:
    """Return the facts that the views for a pod's engines add up to, one view in a pod without any.

    engine_failures: of each engine's incarnations since one last served; none if it is empty.
    """
    pod = views[0]
    known, is_open = pod.runner_known or pod.stopped, any(view.gate_open for view in views)
    failures = engine_failures or [0] * len(views)
    engines = tuple(
        view.engine.facts(index=index, failures=failed, shut=not view.gate_open)
        for index, (view, failed) in enumerate(zip(views, failures, strict=True))
    )
    return PodFacts(
        epoch=epoch,
        gate=GateFacts(open=is_open, settled=not is_open and not any(view.in_flight for view in views)),
        engines=engines if known and pod.has_engine else (),
        trainers=tuple(rank.facts(rank.exported if pod.borrows else pod.whole) for rank in pod.ranks) if known else (),
        export=pod.whole,
        devices=devices,
        bad_device=bad_device,
        problem=problem,
        took_s=dict(took_s or {}),
        waited_s=waited_s,
        reference_ready=reference_ready,
        stopped=pod.stopped,
        ending=pod.terminating,
    )
