"""Define the ladders, the fixed orders in which a pod's weights change hands, and where a pod stands on one of them.

Placement decides which ladder a job climbs; each is one value here, read by the planner, the agents, the documentation
and the tests. A rung is a named set of facts; a pod stands at the highest rung whose facts all hold, relative to the
weight version that the group is climbing to. Barriers are rungs that every member must reach before any goes on.

Nothing here stores a position: `Ladder.standing` derives it from facts, so a restart of either side costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from colocated_rl_api.facts import EngineFacts, PodFacts
from colocated_rl_api.rungs import Placement, Rung, WeightVersion


@dataclass(frozen=True, eq=False)
class Ladder:
    """A ladder is one order of rungs. Every method raises KeyError for a rung that is not on it."""

    placement: Placement
    rungs: tuple[Rung, ...]
    barriers: frozenset[Rung]
    training: frozenset[Rung]  # a group whose slowest pod stands here waits for its trainers
    finished_at: Rung  # from here on a step is done for the store: nothing new begins on older weights
    stands: Callable[[PodFacts, WeightVersion], Rung]  # of a pod whose facts are known

    @property
    def serves_on(self) -> bool:
        """Return whether all engines serve older weights while trainers work, up to the update."""
        return self.placement in (Placement.RESIDENT, Placement.DISAGGREGATED)

    @property
    def rolls_on(self) -> bool:
        """Return whether any engine does."""
        return self.serves_on or self.placement is Placement.MIXED

    @property
    def takes_turns(self) -> bool:
        """Return whether engines beside trainers release their memory for them, and get it back."""
        return self.placement in (Placement.TIME_SLICED, Placement.MIXED)

    @property
    def shuts_at(self) -> Rung:
        """Return the rung for which engines that have served on close their gates."""
        return Rung.UPDATED if self.placement is Placement.MIXED else Rung.CLOSED

    @property
    def top(self) -> Rung:
        """Return the rung at which a group rests until there is another step."""
        return self.rungs[-1]

    @property
    def serves(self) -> bool:
        """Return whether there are engines."""
        return Rung.SERVING in self._places

    @property
    def trains(self) -> bool:
        """Return whether there are trainers."""
        return Rung.TRAINED in self._places

    @property
    def scores(self) -> bool:
        """Return whether a reference scores each batch before it is trained."""
        return Rung.SCORED in self._places

    def place(self, rung: Rung) -> int:
        """Return the rung's place, for comparing; UNKNOWN is below all."""
        return self._places[rung]

    def reaches(self, rung: Rung, wanted: Rung) -> bool:
        """Return whether `rung` is `wanted` or higher."""
        return self._places[rung] >= self._places[wanted]

    def next_barrier(self, after: Rung) -> Rung:
        """Return the barrier that a group may aim for when its slowest member stands at `after`.

        The group may stand one barrier beyond its slowest member. At the top it stays there.
        """
        above = self.rungs[self._places[after] :]
        return next((rung for rung in above if rung in self.barriers), self.top)

    def slowest(self, standings: Iterable[Rung]) -> Rung:
        """Return the lowest rung of a group; UNKNOWN for an empty one."""
        return min(set(standings), key=self.place, default=Rung.UNKNOWN)

    def standing(self, pod: PodFacts | None, at: WeightVersion) -> Rung:
        """Return the rung of a GPU pod on the way to serving version `at`; UNKNOWN without facts.

        A pod stands at its lowest engine's rung. An engine whose process is gone satisfies every rung below Updated: it
        maps no memory and has nothing in flight, because the gate to it is closed. One that has failed is not counted
        beside others until it is back: they serve without it.
        """
        if pod is None or not (pod.engines or pod.trainers):
            return Rung.UNKNOWN
        shares = self.placement in (Placement.TIME_SLICED, Placement.RESIDENT)
        if (shares and not (pod.engines and pod.trainers)) or (self.placement is Placement.MIXED and not pod.engines):
            return Rung.UNKNOWN
        if len(pod.engines) < 2:
            return self.stands(pod, at)
        there = [engine for engine in pod.engines if not _is_out(engine, at)]
        alone = (pod.model_copy(update={"engines": (engine,)}) for engine in there or pod.engines)
        return self.slowest(self.stands(each, at) for each in alone)

    @cached_property
    def _places(self) -> Mapping[Rung, int]:
        return {rung: place for place, rung in enumerate((Rung.UNKNOWN, *self.rungs))}


# -------------------------------------------------------------------------------------------------------- time-sliced
def _stands_time_sliced(pod: PodFacts, at: WeightVersion) -> Rung:
    if all(_is_updated(engine, at) for engine in pod.engines):
        if not all(engine.is_mapped for engine in pod.engines):
            return Rung.UPDATED
        return Rung.SERVING if _serves(pod) else Rung.RESTORED
    if pod.gate.open:
        return Rung.SEALED
    return _stands_closed(pod, at) if pod.gate.settled else Rung.CLOSED


def _stands_closed(pod: PodFacts, at: WeightVersion) -> Rung:
    """Return the rung from Settled to Offloaded. An engine that is absent holds none of them back."""
    engines = [engine for engine in pod.engines if not engine.is_absent]
    if not all(engine.is_paused for engine in engines):
        # an engine that is starting on this very version was let in by Offloaded; any other one is simply not paused
        return Rung.OFFLOADED if _starts_on(pod, at) else Rung.SETTLED
    if not all(engine.is_drained for engine in engines):
        return Rung.PAUSED
    if not all(engine.is_released for engine in engines):
        # weights that were resumed for the update are mapped, and belong to no version until it is confirmed
        return Rung.OFFLOADED if _is_offloaded(pod, at) else Rung.DRAINED
    if _is_offloaded(pod, at):
        return Rung.OFFLOADED
    if not _is_trained(pod, at):
        return Rung.RELEASED
    return Rung.EXPORTED if _is_exported(pod, at) else Rung.TRAINED


def _starts_on(pod: PodFacts, at: WeightVersion) -> bool:
    return _is_offloaded(pod, at) and all(engine.is_starting and engine.starts_on == at for engine in pod.engines)


# ----------------------------------------------------------------------------------------------------------- resident
def _stands_resident(pod: PodFacts, at: WeightVersion) -> Rung:
    """Return the rung. Below Exported the engine serves older weights, or starts on them, whatever the trainer does."""
    if all(_is_updated(engine, at) for engine in pod.engines):
        return Rung.SERVING if _serves(pod) else Rung.UPDATED
    if not _is_trained(pod, at):
        return Rung.SEALED
    return _stands_aside(pod, at) if _is_exported(pod, at) else Rung.TRAINED


def _stands_aside(pod: PodFacts, at: WeightVersion) -> Rung:
    """Return the rung from Exported to Drained: the new weights exist, and the engine does not hold them yet."""
    if any(engine.is_starting and engine.starts_on != at for engine in pod.engines):
        return Rung.TRAINED  # no other gate closes while an engine starts: all would wait for it
    if pod.gate.open:
        return Rung.EXPORTED
    if not pod.gate.settled:
        return Rung.CLOSED
    if not all(engine.is_paused for engine in pod.engines if engine.is_ready):
        return Rung.SETTLED
    if not all(engine.is_drained for engine in pod.engines if engine.is_ready):
        return Rung.PAUSED
    return Rung.DRAINED


# ------------------------------------------------------------------------------------------------------ disaggregated
def _stands_disaggregated(pod: PodFacts, at: WeightVersion) -> Rung:
    """Return the rung. Trainers' pods are done once the weights are written; an engine's begins once it has them."""
    if pod.trainers:
        rung = _stands_train_only(pod, at)
        return Rung.SERVING if rung is Rung.EXPORTED else rung
    if all(_is_updated(engine, at) for engine in pod.engines):
        return Rung.SERVING if _serves(pod) else Rung.UPDATED
    return _stands_aside(pod, at) if pod.export == at else Rung.TRAINED


# -------------------------------------------------------------------------------------------------------------- mixed
def _stands_mixed(pod: PodFacts, at: WeightVersion) -> Rung:
    """Return the rung. An engine with devices of its own has no part in what lies below Offloaded, nor in Restored."""
    if pod.trainers:
        rung = _stands_time_sliced(pod, at)
        return Rung.EXPORTED if rung is Rung.OFFLOADED and pod.export != at else rung  # it has not compared them yet
    if all(_is_updated(engine, at) for engine in pod.engines):
        return Rung.SERVING if _serves(pod) else Rung.RESTORED
    waits = any(engine.is_starting and engine.starts_on != at for engine in pod.engines)
    return Rung.EXPORTED if waits or pod.export != at else Rung.OFFLOADED


# ----------------------------------------------------------------------------------------------------- one side alone
def _stands_rollout_only(pod: PodFacts, at: WeightVersion) -> Rung:
    """Return the rung. A pod made again names the same weights by another lineage, and the others serve on."""
    is_whole = all(engine.is_ready and engine.version is not None and engine.is_mapped for engine in pod.engines)
    return Rung.SERVING if is_whole and _serves(pod) else Rung.RELEASED


def _stands_train_only(pod: PodFacts, at: WeightVersion) -> Rung:
    """Return the rung. Nothing is saved before all stand at Trained, because a checkpoint is of every rank."""
    if not _is_trained(pod, at):
        return Rung.SEALED
    return Rung.EXPORTED if _is_exported(pod, at) else Rung.TRAINED


# ---------------------------------------------------------------------------------------------------- facts of a pod
def _is_updated(engine: EngineFacts, at: WeightVersion) -> bool:
    return engine.is_ready and engine.version == at and engine.weights_mapped


def _is_out(engine: EngineFacts, at: WeightVersion) -> bool:
    """Return whether an engine has failed and is not back yet. One that starts on other weights maps memory."""
    return engine.failures > 0 and (engine.is_absent or (engine.is_starting and engine.starts_on == at))


def _serves(pod: PodFacts) -> bool:
    return pod.gate.open and not any(engine.shut or engine.is_paused for engine in pod.engines)


def _is_scored(pod: PodFacts, at: WeightVersion) -> bool:
    return all(rank.is_alive and rank.lineage == at.lineage and rank.scored == at.step for rank in pod.trainers)


def _is_trained(pod: PodFacts, at: WeightVersion) -> bool:
    return all(rank.is_alive and rank.lineage == at.lineage and rank.step == at.step for rank in pod.trainers)


def _is_exported(pod: PodFacts, at: WeightVersion) -> bool:
    return _is_trained(pod, at) and all(rank.exported == at for rank in pod.trainers)


def _is_offloaded(pod: PodFacts, at: WeightVersion) -> bool:
    return _is_exported(pod, at) and all(rank.is_offloaded for rank in pod.trainers)


TIME_SLICED = Ladder(
    Placement.TIME_SLICED,
    rungs=(
        Rung.SEALED,
        Rung.CLOSED,
        Rung.SETTLED,
        Rung.PAUSED,
        Rung.DRAINED,
        Rung.RELEASED,
        Rung.TRAINED,
        Rung.EXPORTED,
        Rung.OFFLOADED,
        Rung.UPDATED,
        Rung.RESTORED,
        Rung.SERVING,
    ),
    barriers=frozenset(
        {Rung.SEALED, Rung.PAUSED, Rung.DRAINED, Rung.RELEASED, Rung.TRAINED, Rung.EXPORTED, Rung.UPDATED, Rung.SERVING}
    ),
    training=frozenset({Rung.RELEASED}),
    finished_at=Rung.TRAINED,
    stands=_stands_time_sliced,
)
RESIDENT = Ladder(
    Placement.RESIDENT,
    rungs=(
        Rung.SEALED,
        Rung.TRAINED,
        Rung.EXPORTED,
        Rung.CLOSED,
        Rung.SETTLED,
        Rung.PAUSED,
        Rung.DRAINED,
        Rung.UPDATED,
        Rung.SERVING,
    ),
    barriers=frozenset(
        {Rung.SEALED, Rung.TRAINED, Rung.EXPORTED, Rung.PAUSED, Rung.DRAINED, Rung.UPDATED, Rung.SERVING}
    ),
    training=frozenset({Rung.SEALED, Rung.TRAINED}),
    finished_at=Rung.UPDATED,
    stands=_stands_resident,
)


DISAGGREGATED = replace(RESIDENT, placement=Placement.DISAGGREGATED, stands=_stands_disaggregated)
MIXED = replace(
    TIME_SLICED,
    placement=Placement.MIXED,
    barriers=TIME_SLICED.barriers | {Rung.OFFLOADED},  # up to here engines with devices of their own serve
    finished_at=RESIDENT.finished_at,
    stands=_stands_mixed,
)
ROLLOUT_ONLY = Ladder(
    Placement.ROLLOUT_ONLY,
    rungs=(Rung.RELEASED, Rung.SERVING),
    barriers=frozenset({Rung.RELEASED, Rung.SERVING}),
    training=frozenset(),
    finished_at=Rung.SERVING,
    stands=_stands_rollout_only,
)
TRAIN_ONLY = Ladder(
    Placement.TRAIN_ONLY,
    rungs=(Rung.SEALED, Rung.TRAINED, Rung.EXPORTED),
    barriers=frozenset({Rung.SEALED, Rung.TRAINED, Rung.EXPORTED}),
    training=frozenset({Rung.SEALED, Rung.TRAINED}),
    finished_at=Rung.TRAINED,
    stands=_stands_train_only,
)


# -------------------------------------------------------------------------------------------------- with a reference
def _with_scores(ladder: Ladder) -> Ladder:
    """Return the same ladder with the rung Scored below Trained.

    A step that need not be trained, as at a start on its checkpoint, need not be scored either.
    """
    place = ladder.rungs.index(Rung.TRAINED)
    before = ladder.rungs[place - 1]

    def stands(pod: PodFacts, at: WeightVersion) -> Rung:
        rung = ladder.stands(pod, at)
        return Rung.SCORED if rung is before and _is_scored(pod, at) else rung

    return replace(
        ladder,
        rungs=(*ladder.rungs[:place], Rung.SCORED, *ladder.rungs[place:]),
        barriers=ladder.barriers | {Rung.SCORED},
        training=ladder.training | {Rung.SCORED},
        stands=stands,
    )


SCORED_TIME_SLICED = _with_scores(TIME_SLICED)
SCORED_RESIDENT = _with_scores(RESIDENT)
SCORED_DISAGGREGATED = _with_scores(DISAGGREGATED)
SCORED_MIXED = _with_scores(MIXED)
SCORED_TRAIN_ONLY = _with_scores(TRAIN_ONLY)
LADDERS = (
    TIME_SLICED, RESIDENT, DISAGGREGATED, MIXED, ROLLOUT_ONLY, TRAIN_ONLY,
    SCORED_TIME_SLICED, SCORED_RESIDENT, SCORED_DISAGGREGATED, SCORED_MIXED, SCORED_TRAIN_ONLY,
)  # fmt: skip
_LADDERS = {(ladder.placement, ladder.scores): ladder for ladder in LADDERS}


def ladder_for(placement: Placement, *, scores: bool, spans: bool = False) -> Ladder:
    """Return the ladder that a job climbs.

    scores: it has a reference, which scores nothing if nothing is trained. spans: its engines are over several pods
    each.
    """
    ladder = _LADDERS[placement, scores and placement is not Placement.ROLLOUT_ONLY]
    return _over_pods(ladder) if spans and ladder.takes_turns else ladder


@cache
def _over_pods(ladder: Ladder) -> Ladder:
    """Return the same ladder, on which no engine takes memory back before trainers have left the devices of every pod,
    because it comes back in all pods of the engine at once.
    """
    return replace(ladder, barriers=ladder.barriers | {Rung.OFFLOADED})
