"""A GPU pod as a value: the truth about its engine and trainer, what its agent believes and has written down.

The agent's choices are the real action table's, its journal and its fence are the real ones. What a call does to an
engine, and what an agent finds out about an engine that it did not start, stand here once more, as small tables. The
search through all states (`fakes.model`) and the group that walks or real operators move (`fakes.group`) share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from colocated_rl_agent.files.journal import (
    ChecksumAgreed,
    EngineStarted,
    EpochAccepted,
    Intent,
    Outcome,
    Record,
)
from colocated_rl_agent.files.journal import JournalState as Journal
from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.planner.next_actions import Rules, next_actions
from colocated_rl_agent.planner.views import (
    KV_CACHE,
    TAGS,
    WEIGHTS,
    EngineView,
    PodView,
    RankView,
    engine_name,
    pod_facts,
)
from colocated_rl_api import names
from colocated_rl_api.facts import (
    EngineState,
    PodFacts,
    RejectedWeights,
    TagState,
    TrainerState,
)
from colocated_rl_api.ladder import TIME_SLICED, Ladder
from colocated_rl_api.member_wire import (
    Endpoint,
    Goal,
    PodTarget,
    Refusal,
    Rendezvous,
)
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_member.fence import EpochFence
from fakes.values import Hashed

KILLED = -9
NEVER = 1e12
ENGINE = "engine"  # the incarnation of the only one that there is at a time
ANY_RULES = Rules(TIME_SLICED, settle_s=30.0, checkpoint_every=1, probes=True)
RENDEZVOUS = Rendezvous(address="10.0.0.1", port=29500, world_size=2)
BATCHES = Endpoint(pod="sums-rollout-0", address="10.0.0.9", port=8444)
ON_DEVICE = (TrainerState.ONLOADED, TrainerState.SCORING, TrainerState.TRAINING)
UNREPEATABLE = (do.Release, do.Resume, do.Update)
CALLS = (do.StartEngine, do.Pause, do.Flush, do.Continue, *UNREPEATABLE)


class InvariantBroken(AssertionError):
    """An invariant does not hold."""


def must(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantBroken(what)


# ---------------------------------------------------------------------------------------------------------- its values
class ModelEngine(NamedTuple):
    """The truth about an engine process. `reports`: the version it would name, though its weights may be gone."""

    reports: WeightVersion
    holds: WeightVersion | None
    up: bool = False
    paused: bool = False
    keeps: tuple[str, ...] = ()
    mapped: tuple[str, ...] = TAGS
    is_drained: bool = False  # flushed behind a pause since the gate last closed
    has_released: bool = False  # since the gate last closed
    checksum: str | None = None  # of what is in memory, where the job compares engines

    @property
    def has_given_up(self) -> bool:
        """All that it does not keep; the KV cache nobody keeps."""
        return KV_CACHE not in self.mapped and set(self.mapped) <= set(self.keeps)


class Belief(NamedTuple):
    """An `EngineView`, as a value that is quick to compare."""

    state: EngineState
    incarnation: str | None
    starts_on: WeightVersion | None
    version: WeightVersion | None
    paused: bool
    drained: bool
    released: bool
    flushed: bool
    agrees: bool
    checksum: str | None
    tags: tuple[TagState, ...]
    broken: str | None
    doubted: WeightVersion | None
    rejected: WeightVersion | None

    @classmethod
    def of(cls, view: EngineView) -> Belief:
        return cls(
            *(view.state, view.incarnation, view.starts_on, view.version, view.paused, view.drained, view.released),
            *(view.flushed, view.agrees, view.checksum, tuple(view.tags.values())),
            "broken" if view.broken else None,
            *(view.doubted, view.rejected.version if view.rejected else None),
        )


class ModelRank(NamedTuple):
    """A `RankView`, likewise. A trainer tells its agent the truth."""

    number: int  # rank 0 leaves the model
    state: TrainerState
    incarnation: str | None
    lineage: int | None
    exit_code: int | None
    step: int | None
    scored: int | None
    exported: WeightVersion | None
    saved: int | None
    finished: WeightVersion | None
    broken: str | None
    grown_bytes: int
    can_mirror: bool = False
    mirrored: int | None = None

    @classmethod
    def of(cls, view: RankView) -> ModelRank:
        return cls(
            *(
                view.rank,
                view.state,
                view.incarnation,
                view.lineage,
                view.exit_code,
                view.step,
                view.scored,
                view.exported,
                view.saved,
                view.finished,
            ),
            "broken" if view.broken else None,
            view.grown_bytes,
            view.can_mirror,
            view.mirrored,
        )

    def as_first(self) -> ModelRank:
        return self._replace(number=0)

    @property
    def is_alive(self) -> bool:
        return self.state is not TrainerState.ABSENT

    @property
    def is_on_device(self) -> bool:
        return self.state in ON_DEVICE


class Target(NamedTuple):
    """A `PodTarget`, without what is the same in all."""

    epoch: int
    goal: Goal
    step: int
    lineage: int
    rung: Rung
    is_last: bool
    saves: bool = False
    weights: WeightVersion | None = None
    checksum: str | None = None
    world_size: int = 2

    @classmethod
    def of(cls, target: PodTarget) -> Target:
        return cls(
            *(target.epoch, target.goal, target.step, target.lineage, target.rung, target.is_last),
            *(target.saves, target.weights, target.checksum),
            *((target.rendezvous.world_size,) if target.rendezvous else ()),
        )

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.step, self.lineage)


NO_ENGINE = Belief.of(EngineView())
FIRST, OTHER = (
    ModelRank.of(RankView(number)) for number in range(2)
)  # of a pod that is new; any rank but 0 is like another


class _ModelPod(NamedTuple):
    attempt: int = 0
    alive: bool = True
    journal: int = 0
    target: Target | None = None
    gate_open: bool = False
    in_flight: int = 0
    engine: ModelEngine | None = None
    belief: Belief = NO_ENGINE
    rank: ModelRank = OTHER
    whole: WeightVersion | None = None
    shards: int | None = None
    stopped: bool = False
    stood: tuple[tuple[int, Rung], ...] = ()
    rules: Rules = ANY_RULES
    there: bool = True  # False: the object is deleted
    keeps: tuple[str, ...] = ()  # tags that a switch leaves mapped
    role: str = names.ROLE_GPU
    exports: frozenset[WeightVersion] | None = None
    ending: bool = False
    spoilt: tuple[str, ...] = ()
    has_failed: bool = False
    leaves: bool = False
    parts: tuple[tuple[str, int], ...] = ()


class ModelPod(Hashed, _ModelPod):
    """A Pod holds the truth about a GPU pod and what its agent believes.

    stood: by epoch, the highest barrier at which its seat has stood under a target of it.
    exports: on the volume that pods share, in the pod with rank 0, which alone writes and removes; None in all others.
    ending: its container was signalled to end, as in a drain.
    leaves: its node gives notice that it is about to go.
    spoilt: checksums of the engine's next loads, which leave other weights in memory than they say.
    has_failed: its engine has, since it last served; only where a pod has several (`fakes.several_engines`).
    parts: of steps, in the memory of the pod: the newest of the trainers of each seat. They outlive processes.
    """

    @property
    def ladder(self) -> Ladder:
        return self.rules.ladder

    @property
    def epoch(self) -> int:
        return self.target.epoch if self.target else 0

    @property
    def is_first(self) -> bool:
        return self.rank.number == 0

    def as_first(self) -> ModelPod:
        return self._replace(rank=self.rank.as_first())

    @property
    def about_to_keep(self) -> tuple[do.Action, ...]:
        """Return what the agent does next to keep a step, of a job that keeps steps in memory."""
        actions = chosen(self) if self.rank.can_mirror else ()
        return tuple(action for action in actions if isinstance(action, do.Save | do.Mirror))

    @property
    def durable(self) -> Journal:
        return JOURNALS[self.journal]

    def wrote(self, *records: Record) -> ModelPod:
        return self._replace(journal=JOURNALS.after(self.journal, *records))

    def noted(self) -> ModelPod:
        """Return the pod with a note of the last barrier that it has reached."""
        if self.target is None or self.target.goal is Goal.STOP:
            return self
        stood, ladder = dict(self.stood), self.ladder
        passed = last_barrier(ladder, ladder.place(standing_of(self))) or Rung.UNKNOWN
        stood[self.epoch] = max(passed, stood.get(self.epoch, Rung.UNKNOWN), key=ladder.place)
        return self._replace(stood=tuple(sorted(stood.items())))

    def without_engine(self) -> ModelPod:
        """Return the pod without its engine, and without the journal's part about it, which nobody reads any more."""
        journal = JOURNALS.without_engine(self.journal)
        belief = Belief.of(engine_view(self.belief).gone())
        return self._replace(engine=None, belief=belief, gate_open=False, in_flight=0, journal=journal)

    def with_large_trainer(self) -> ModelPod:
        return self._replace(rank=self.rank._replace(grown_bytes=1 << 40))

    def without_trainer(self) -> ModelPod:
        return self._replace(rank=ModelRank.of(rank_view(self.rank).gone(KILLED)))


@cache
def last_barrier(ladder: Ladder, places: int) -> Rung | None:
    """Return the last barrier among the lowest `places` rungs, or None."""
    passed = [each for each in ladder.rungs[: max(0, places)] if each in ladder.barriers]
    return passed[-1] if passed else None


class Journals:
    """Every journal that was reached, by number: 0 is empty, and two that mean the same are one."""

    def __init__(self) -> None:
        self._all: list[Journal] = []
        self._numbers: dict[str, int] = {}
        self._after: dict[tuple[int, str], int] = {}
        self._number(Journal())

    def __getitem__(self, number: int) -> Journal:
        return self._all[number]

    def after(self, number: int, *records: Record) -> int:
        for record in records:
            key = (number, repr(record))
            if key not in self._after:
                self._after[key] = self._number(self._all[number].after(record))
            number = self._after[key]
        return number

    def without_engine(self, number: int) -> int:
        return self._number(replace(self._all[number], engines={}))

    def _number(self, journal: Journal) -> int:
        meaning = repr(journal.records())
        if meaning not in self._numbers:
            self._numbers[meaning] = len(self._all)
            self._all.append(journal)
        return self._numbers[meaning]


JOURNALS = Journals()


# ------------------------------------------------------------------------------------------------- as the agent sees it
@cache
def engine_view(belief: Belief) -> EngineView:
    return EngineView(
        *(belief.state, belief.incarnation, belief.starts_on, NEVER, 0.0, belief.version, belief.paused),
        *(belief.drained, belief.released, belief.flushed, belief.agrees),
        checksum=belief.checksum,
        tags=dict(zip(TAGS, belief.tags, strict=True)),
        broken=belief.broken,
        doubted=belief.doubted,
        rejected=belief.rejected and RejectedWeights(version=belief.rejected, message="they differ"),
    )


@cache
def rank_view(rank: ModelRank) -> RankView:
    return RankView(
        *(rank.number, rank.state, rank.incarnation, rank.lineage, rank.exit_code, NEVER, rank.step),
        scored=rank.scored,
        exported=rank.exported,
        saved=rank.saved,
        can_mirror=rank.can_mirror,
        mirrored=rank.mirrored,
        can_finish=rank.is_alive and rank.number == 0,
        finished=rank.finished,
        broken=rank.broken,
        grown_bytes=rank.grown_bytes,
    )


def view_of(pod: ModelPod) -> PodView:
    target = pod.target
    kept = None if target is None else (target.version, target.weights)
    return _view(*view_key(pod), kept, pod.durable.agreed)


@cache
def _view(
    gate_open: bool,
    in_flight: int,
    belief: Belief,
    rank: ModelRank,
    whole: WeightVersion | None,
    shards: int | None,
    stopped: bool,
    role: str,
    exports: frozenset[WeightVersion] | None,
    ending: bool,
    shares: bool,
    kept: tuple[WeightVersion, WeightVersion | None] | None = None,
    agreed: tuple[WeightVersion, str] | None = None,
) -> PodView:
    """Return the view that the action table gets. kept: the target's version, and what engines serve. shares: pods do
    share a volume of exports.
    """
    ranks = () if role == names.ROLE_ENGINE else (rank_view(rank),)
    trusts = role == names.ROLE_TRAINER and exports is None
    at, served = kept or (None, None)
    return PodView(
        *(0.0, True, ending, gate_open, in_flight, 0.0, engine_view(belief), ranks, rank.exported if trusts else whole),
        stale_exports=exports is not None and at is not None and bool(exports - {at}),
        crowded=exports is not None and served is not None and bool(exports - {served}),
        shards=shards,
        agreed=agreed,
        stopped=stopped,
        signalled_at=-NEVER,
        has_engine=role != names.ROLE_TRAINER,
        borrows=shares and role == names.ROLE_GPU and exports is None,
    )


def standing_of(pod: ModelPod) -> Rung:
    """Towards the target that it holds."""
    return Rung.UNKNOWN if pod.target is None else _standing(pod.ladder, view_key(pod), pod.target.version)


def view_key(pod: ModelPod) -> tuple[Any, ...]:
    return (*pod[4:6], *pod[7:12], pod.role, pod.exports, pod.ending, pod.ladder.placement.shares_weights)


@cache
def _standing(ladder: Ladder, key: tuple[object, ...], version: WeightVersion) -> Rung:
    return ladder.standing(_facts(key), version)


@cache
def _facts(key: tuple[Any, ...]) -> PodFacts:
    return _view(*key).facts()


def facts_of(pod: ModelPod, *, engine_failures: int = 0) -> PodFacts:
    key = view_key(pod)
    if engine_failures:
        return pod_facts((_view(*key),), epoch=pod.epoch, engine_failures=[engine_failures])
    return _facts(key).model_copy(update={"epoch": pod.epoch})


@cache
def wire_target(target: Target) -> PodTarget:
    parts = target._asdict()
    rendezvous = RENDEZVOUS.model_copy(update={"world_size": parts.pop("world_size")})
    parts |= {"rendezvous": rendezvous, "batches": BATCHES} if target.goal is Goal.CLIMB else {}
    return PodTarget(**parts)


def chosen(pod: ModelPod, *, now: float = 0.0) -> tuple[do.Action, ...]:
    """Return what the agent does next."""
    view, target = view_of(pod), wire_target(pod.target) if pod.target else None
    view = replace(view, now=now) if now else view
    return tuple(each for each in next_actions(view, target, pod.rules) if not isinstance(each, do.Wait))


# --------------------------------------------------------------------------------------------------- what may befall it
def admit(pod: ModelPod, target: Target, *, has_fence: bool) -> ModelPod:
    """A target arrives."""
    epochs: list[int] = []
    fence = EpochFence(PodTarget, highest_epoch=pod.durable.epoch if has_fence else 0, remember_epoch=epochs.append)
    if isinstance(fence.admit(wire_target(target)), Refusal):
        return pod
    must(target.epoch >= pod.epoch, f"a target of epoch {target.epoch} was accepted after one of epoch {pod.epoch}")
    is_needed = pod.whole == target.version or not pod.rules.releases
    whole = pod.whole if is_needed else None  # no engine starts on another one
    pod = pod._replace(target=target, whole=whole)
    if target.checksum is not None:
        pod = pod.wrote(ChecksumAgreed(version=target.version, checksum=target.checksum))
    return pod.wrote(*(EpochAccepted(epoch=epoch) for epoch in epochs)).noted()


def check(pod: ModelPod, action: do.Action, exports: frozenset[WeightVersion] | None = None) -> None:
    """Check what must hold, whatever the agent believes. exports: on the volume, where pods share one."""
    engine, name = pod.engine, type(action).__name__
    _check_side(pod, action, exports)
    takes_turns = pod.rules.releases
    match action:
        case do.StartEngine() if not pod.ladder.serves:
            must(False, "an engine starts where nothing is generated")
        case do.StartTrainers() if not pod.ladder.trains:
            must(False, "a trainer starts where nothing is trained")
        case do.Pause():
            must(not pod.gate_open, "paused behind an open gate")
        case do.Continue():
            must(engine is not None and engine.mapped == TAGS, "continued with half its memory")
        case do.Release() | do.Resume() | do.Offload() if not takes_turns:
            must(False, f"{name} on the {pod.ladder.placement} ladder")
        case do.Release():
            must(engine is not None and engine.paused and engine.is_drained, "released before it was drained")
            must(engine is not None and engine.mapped == TAGS and not engine.has_released, "released twice")
            must(not pod.gate_open and pod.in_flight == 0, "released with requests in flight")
        case do.Resume(tags=tags):
            must(engine is not None and not set(tags) & set(engine.mapped), "resumed twice")
            must(not pod.rank.is_on_device, f"{name} while a trainer is on the device")
        case do.Update(version=version):
            must(engine is not None and WEIGHTS in engine.mapped, "updated without memory")
            was_drained = engine is not None and (engine.is_drained or engine.mapped != TAGS)  # or it was not released
            must(engine is not None and engine.paused and was_drained, "updated before it was drained")
            must(not pod.gate_open and pod.in_flight == 0, "updated with requests in flight")
            must(pod.whole == version, "an engine takes an export that nobody has verified")
            must(pod.belief.rejected != version, "an engine takes weights that two were not shown to hold")
        case do.StartEngine(version=version):
            must(not (takes_turns and pod.rank.is_on_device), f"{name} while a trainer is on the device")
            is_verified = pod.whole == version or not pod.ladder.trains
            must(is_verified, "an engine starts on an export that nobody has verified")
            must(pod.belief.rejected != version, "an engine starts on weights that two were not shown to hold")
        case do.Onload() | do.Score() | do.Train() | do.Export() if takes_turns:
            must(engine is None or engine.has_given_up, f"{name} while engine memory is mapped")
        case do.OpenGate(version=version):
            must(engine is not None and engine.mapped == TAGS and not engine.paused, "a gate opens on half an engine")
            must(engine is not None and engine.holds == version, "a gate opens on other weights")
            is_shown = pod.belief.agrees or not pod.rules.probes
            must(is_shown, "a gate opens on weights that no probe has shown")
            is_asked = not takes_turns or (pod.target is not None and version == pod.target.version)
            must(is_asked, "a gate opens on other weights than the group's")
        case _:
            pass


def _check_side(pod: ModelPod, action: do.Action, exports: frozenset[WeightVersion] | None) -> None:
    name = type(action).__name__
    if isinstance(action, do.StartEngine | do.Update | do.VerifyExport) and exports is not None:
        must(action.version in exports, f"{name} on an export that is not there")
    match action:
        case do.StartEngine() if pod.role == names.ROLE_TRAINER:
            must(False, "an engine starts in a pod of trainers")
        case do.StartTrainers() | do.Export() | do.RemoveExports() if pod.role == names.ROLE_ENGINE:
            must(False, f"{name} in the pod of an engine")
        case do.RemoveExports() | do.VerifyExport() if pod.role == names.ROLE_TRAINER:
            must(pod.exports is not None, f"{name} in a pod of trainers without rank 0")
        case _:
            pass


def act(pod: ModelPod, action: do.Action) -> ModelPod:  # noqa: C901 - a table
    """The action ends well, and the agent knows. Not of those for which other pods are needed."""
    match action:
        case do.CloseGate():
            closed = Belief.of(engine_view(pod.belief).gate_closed())
            return pod._replace(gate_open=False, belief=closed, engine=_since_closing(pod.engine))
        case do.OpenGate():
            return pod._replace(gate_open=True, in_flight=1)
        case do.AbortAll():
            return pod._replace(in_flight=0)
        case do.StartEngine(version=version):
            started = engine_view(pod.belief).started(ENGINE, version, start_by=NEVER, keeps=pod.keeps)
            pod = _with_engine(pod, version)._replace(belief=Belief.of(started))
            return pod.wrote(EngineStarted(incarnation=ENGINE, version=version, admin_key="", keeps=pod.keeps))
        case do.KillEngine(doubts=version) if version is not None and pod.belief.broken is None:
            doubted = engine_view(pod.belief).was_doubted(version, "it differs", TAGS)
            return pod._replace(belief=Belief.of(doubted)).without_engine()
        case do.KillEngine():
            return pod.without_engine()
        case do.StartTrainers(lineage=lineage):
            return pod._replace(rank=ModelRank.of(RankView(pod.rank.number).started("", lineage, start_by=NEVER)))
        case do.StopTrainers():
            return pod.without_trainer()
        case do.Onload():
            return pod._replace(rank=pod.rank._replace(state=TrainerState.ONLOADED))
        case do.Offload():
            return pod._replace(rank=pod.rank._replace(state=TrainerState.OFFLOADED))
        case do.Export(version=version):
            there = None if pod.exports is None else pod.exports | {version}
            return pod._replace(rank=pod.rank._replace(exported=version), exports=there)
        case do.RemoveExports(keep=keep):
            assert pod.exports is not None
            return pod._replace(exports=pod.exports & {keep})
        case do.VerifyExport(version=version):
            return pod._replace(whole=version)
        case do.FetchShards(step=step):
            return pod._replace(shards=step)
        case do.EndPod():
            return pod._replace(stopped=True)
        case _:
            return _called(pod, action)


def _called(pod: ModelPod, action: do.Action) -> ModelPod:
    assert pod.engine is not None
    loads = _loaded(pod, action.version) if isinstance(action, do.Update) else None
    engine, view = call_of(pod.engine, engine_view(pod.belief), action, loads)
    pod = pod._replace(engine=engine, belief=Belief.of(view), spoilt=pod.spoilt[1:] if loads else pod.spoilt)
    if not isinstance(action, UNREPEATABLE):
        return pod
    return pod.wrote(_intent(action), Outcome(incarnation=ENGINE))


def called_unheard(pod: ModelPod, action: do.Action, *, has_journal: bool) -> ModelPod:
    """The call takes effect, and nobody is there to hear its answer."""
    if isinstance(action, do.StartEngine):
        return _with_engine(pod, action.version)
    assert pod.engine is not None
    loads = _loaded(pod, action.version) if isinstance(action, do.Update) else None
    engine, _ = call_of(pod.engine, engine_view(pod.belief), action, loads)
    pod = pod._replace(engine=engine)
    return pod.wrote(_intent(action)) if has_journal and isinstance(action, UNREPEATABLE) else pod


def failed(pod: ModelPod, action: do.Action, *, has_journal: bool) -> Iterator[ModelPod]:
    """The action ends badly: without its effect, or after it, which the agent can't tell apart."""
    view, rank = engine_view(pod.belief), rank_view(pod.rank)
    match action:
        case do.StartEngine():
            yield pod.without_engine()
        case do.StartTrainers(lineage=lineage):
            yield pod._replace(rank=ModelRank.of(rank.started("", lineage, start_by=NEVER).gone(127)))
        case do.CheckProbe(version=version):
            yield pod._replace(belief=Belief.of(view.was_doubted(version, "it differs", TAGS)))
        case do.AwaitEngine() | do.Pause() | do.Flush() | do.Continue() | do.Release() | do.Resume() | do.Update():
            broken = Belief.of(view.broke("it failed", TAGS))
            began = has_journal and isinstance(action, UNREPEATABLE)
            yield (pod.wrote(_intent(action)) if began else pod)._replace(belief=broken)
            yield called_unheard(pod, action, has_journal=has_journal)._replace(belief=broken)
        case do.Onload() | do.Offload() | do.Export():
            for after in (pod, act(pod, action)):
                yield after._replace(rank=ModelRank.of(rank_view(after.rank).broke("it failed")))
        case do.AwaitTrainers() | do.Score() | do.Train() | do.Save() | do.Mirror() | do.SaveModel():
            yield pod._replace(rank=ModelRank.of(rank.broke("it failed")))
        case _:
            pass  # asked again, or nothing that can fail


def past_deadline(pod: ModelPod) -> Iterator[ModelPod]:
    """Yield the pod after a wait of its agent took longer than it may."""
    for action in chosen(pod, now=2 * NEVER):
        if isinstance(action, do.KillEngine | do.StopTrainers):
            yield act(pod, action)


def agent_restarts(pod: ModelPod) -> ModelPod:
    """Another one looks at what is there. Its gate is closed, and what it held in memory is gone."""
    return pod._replace(
        target=None,
        gate_open=False,
        in_flight=0,
        whole=None,
        shards=None,
        belief=Belief.of(recognized(pod)),
        engine=_since_closing(pod.engine),
        rank=pod.rank._replace(broken=None),
    )


def _loaded(pod: ModelPod, version: WeightVersion) -> tuple[WeightVersion | None, str | None]:
    """Return the weights that are in memory after a load, and their checksum."""
    if pod.spoilt:
        return None, pod.spoilt[0]
    return version, f"of {version}" if pod.rules.compares else None


def _with_engine(pod: ModelPod, version: WeightVersion) -> ModelPod:
    holds, checksum = _loaded(pod, version)
    return pod._replace(engine=ModelEngine(version, holds, keeps=pod.keeps, checksum=checksum), spoilt=pod.spoilt[1:])


def call_of(
    engine: ModelEngine,
    view: EngineView,
    action: do.Action,
    loads: tuple[WeightVersion | None, str | None] | None = None,
) -> tuple[ModelEngine, EngineView]:
    """Return what a call makes of the engine, and of the view of an agent that hears its answer.

    loads: what an update leaves in memory, and its checksum.
    """
    match action:
        case do.AwaitEngine():
            return engine._replace(up=True), view.answered(engine.reports, engine.checksum)
        case do.Pause():
            return engine._replace(paused=True), view.was_paused()
        case do.Flush():
            return engine._replace(is_drained=engine.paused), view.was_flushed()
        case do.Release():
            holds = engine.holds if WEIGHTS in engine.keeps else None
            return engine._replace(mapped=engine.keeps, holds=holds, has_released=True), view.was_released()
        case do.Resume(tags=tags):
            mapped = tuple(tag for tag in TAGS if tag in (*engine.mapped, *tags))
            return engine._replace(mapped=mapped), view.was_resumed(tags)
        case do.Update(version=version):
            assert loads is not None
            holds, checksum = loads
            after = engine._replace(reports=version, holds=holds, checksum=checksum)
            return after, view.was_updated(version, checksum)
        case do.Continue():
            return engine._replace(paused=False, is_drained=False), view.was_continued()
        case do.CheckProbe():
            must(engine.holds == engine.reports, "the probe disagrees")
            return engine, view.agreed()
        case _:
            raise AssertionError(f"{action} is no call of an engine")


def recognized(pod: ModelPod) -> EngineView:
    """Return the view that the agent's lane, `attach`, makes from the journal and from what the engine can be asked."""
    engine, memory = pod.engine, pod.durable.engines.get(engine_name(0))
    if engine is None:
        return EngineView()
    if memory is None:
        return EngineView().started(ENGINE, engine.reports, start_by=NEVER).broke("nobody knows it")
    if memory.pending is not None:
        return memory.view.broke("nobody knows the outcome", memory.pending.tags)
    if not engine.up:
        return EngineView().started(ENGINE, memory.started.version, start_by=NEVER, keeps=memory.started.keeps)
    remembered = memory.view
    if not remembered.is_whole and not engine.paused:
        return remembered.broke("it takes requests while memory is released")
    if remembered.version is not None and remembered.version != engine.reports:
        return remembered.broke("it holds another version than the journal says")
    drained = engine.paused and not remembered.is_whole
    checksum = engine.checksum if remembered.version is not None else None
    return replace(remembered, checksum=checksum, paused=engine.paused, drained=drained, flushed=False)


def _since_closing(engine: ModelEngine | None) -> ModelEngine | None:
    return engine and engine._replace(is_drained=False, has_released=False)


def _intent(action: do.Action) -> Intent:
    match action:
        case do.Resume(tags=tags):
            return Intent(incarnation=ENGINE, call="resume", tags=tags)
        case do.Update(version=version):
            return Intent(incarnation=ENGINE, call="update", tags=(WEIGHTS,), version=version)
        case _:
            return Intent(incarnation=ENGINE, call="release", tags=TAGS)
