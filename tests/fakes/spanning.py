"""A job with one engine over two pods as one value, and every value that can follow: the real plan, table and views.

What an action does to the engine it does to both of its parts. The truth about their memory stands beside what agents
believe, and is what is checked:

* no trainer is on its pod's device while a part of the engine maps memory there, and none comes back while one is
* an engine loads an export that is there in both pods, and only the first pod's agent makes calls

Nothing moves by itself: a report or a target arrives when it arrives, each by itself, and the newest in the place of
those before it. The operator answers at once to what it hears. A part of the engine may end at any time, as often as
`deaths` says. Pods and trainers don't: `fakes.model` looks at those.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

from builders import make_job, make_observation, rollout_facts
from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.planner.next_actions import next_actions
from colocated_rl_agent.planner.spans import as_first, as_part, lost
from colocated_rl_agent.planner.views import EngineView, PodView, RankView, pod_facts
from colocated_rl_agent.settings import rules_for
from colocated_rl_api.facts import EngineLaunch, PodFacts, TrainerState
from colocated_rl_api.member_wire import Goal, PodTarget
from colocated_rl_api.names import PodUid
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_operator.planner.observation import Climb, Observation
from colocated_rl_operator.planner.plan import plan
from fakes.explore import Explored
from fakes.model_pod import InvariantBroken, must
from fakes.values import Hashed

T = TypeVar("T")
ON_DEVICE = (TrainerState.ONLOADED, TrainerState.SCORING, TrainerState.TRAINING)
MOST_MOVES = 3000  # of one walk
DEATHS_AT = 0.03  # of the moves of a walk


class Frozen(dict[Any, Any]):
    """A mapping that nobody changes any more."""

    def __hash__(self) -> int:  # type: ignore[override]  # of a dict, which has none
        return hash(frozenset(self.items()))


class _SpanPod(NamedTuple):
    number: int
    place: int | None
    view: PodView
    target: PodTarget | None = None
    pods: tuple[PodUid, ...] = ()
    maps: bool = False
    failures: int = 0
    starts: int = 0
    exports: frozenset[WeightVersion] = frozenset()


class SpanPod(Hashed, _SpanPod):
    """A pod with a part of the engine, with trainers, or with both.

    place: of its part in the engine; None: it has none. maps: whether its part maps memory that a trainer needs. pods:
    that its part was started with.
    """

    @property
    def seen(self) -> PodView:
        """Return the pod as its agent sees it."""
        span = self.target.span if self.target else None
        if self.place is None:
            return self.view
        return (as_part if self.place else as_first)(self.view, span, pods=2)

    @property
    def is_on_device(self) -> bool:
        return any(rank.state in ON_DEVICE for rank in self.view.ranks)

    def change(self, **changes: Any) -> SpanPod:
        return self._replace(view=replace(self.view, **changes))

    def with_engine(self, engine: EngineView) -> SpanPod:
        return self.change(engine=replace(engine, tags=Frozen(engine.tags)))

    def with_rank(self, **changes: Any) -> SpanPod:
        return self.change(ranks=tuple(replace(rank, **changes) for rank in self.view.ranks))

    def without_part(self, *, fault: bool) -> SpanPod:
        after = self._replace(maps=False, failures=self.failures + (fault and not self.place))
        return after.with_engine(self.view.engine.gone()).change(gate_open=False)


class _SpanRecord(NamedTuple):
    known: tuple[PodFacts | None, ...]
    sent: tuple[PodTarget | None, ...]
    climb: Climb | None = None
    trained_step: int = 0
    served: WeightVersion | None = None
    has_served: bool = False
    is_over: bool = False


class SpanRecord(Hashed, _SpanRecord):
    """The operator's: what it has heard of each pod, the targets that it sent last, and what is in the job's status."""


class SpanState(NamedTuple):
    pods: tuple[SpanPod, ...]
    record: SpanRecord
    deaths: int = 0

    def with_pod(self, pod: SpanPod) -> SpanState:
        return self._replace(pods=(*self.pods[: pod.number], pod, *self.pods[pod.number + 1 :]))


class SpanningJob:
    """The job, with rules for all moves. It remembers what it has planned. deaths: of parts of its engine."""

    def __init__(self, *, steps: int = 1, **spec: Any) -> None:
        rollout = spec.pop("rollout") | {"engine": {"pods": 2}}
        is_apart = "replicas" in rollout
        rollout |= {"replicas": 2} if is_apart else {}
        self.job = make_job(steps=steps, replicas=1 if is_apart else 2, rollout=rollout, **spec)
        self.rules = rules_for(self.job.spec)
        self._looked, self._choices, self._facts = cache(self._look), cache(self._choose), cache(self._facts_of)
        self._kept: dict[Any, Any] = {}

    def start(self, deaths: int) -> SpanState:
        """Every pod runs, and nobody knows anybody."""
        pods = tuple(self._new_pod(index, seat) for index, seat in enumerate(self.job.gpu_seats))
        nobody = (None,) * len(pods)
        return SpanState(pods, SpanRecord(nobody, nobody), deaths)

    def _keep(self, value: T) -> T:
        """Return the first of equal values: comparing it with itself costs nothing."""
        kept: T = self._kept.setdefault(value, value)
        return kept

    def _new_pod(self, index: int, seat: str) -> SpanPod:
        span = self.job.spans.get(seat)
        trains = self.rules.ladder.trains and seat in self.job.trainer_seats
        view = PodView(
            now=0.0,
            runner_known=True,
            terminating=False,
            gate_open=False,
            in_flight=0,
            closed_at=0.0,
            engine=EngineView(),
            ranks=(RankView(index),) if trains else (),
            has_engine=span is not None,
        )
        return SpanPod(index, None if span is None else span.index(seat), view).with_engine(EngineView())

    # ---------------------------------------------------------------------------------------------------------- moves
    def successors(self, state: SpanState) -> list[tuple[str, SpanState]]:
        """Return the possible moves, each with the state that follows. Raises InvariantBroken."""
        found = [] if has_ended(state) else [*self._moves(state), *self._deaths(state)]
        return [(what, self._with_kept(after)) for what, after in found]

    def _with_kept(self, state: SpanState) -> SpanState:
        return state._replace(pods=tuple(map(self._keep, state.pods)))

    def _moves(self, state: SpanState) -> Iterator[tuple[str, SpanState]]:
        record = state.record
        for pod, sent, known in zip(state.pods, record.sent, record.known, strict=True):
            if sent is not None and sent != pod.target and not pod.view.stopped:
                yield f"target {pod.number} arrives", state.with_pod(self._told(pod, sent))
            if known is not (facts := self._facts(pod)):
                heard = (*record.known[: pod.number], facts, *record.known[pod.number + 1 :])
                after = self._looked(record._replace(known=heard))
                yield f"report {pod.number} arrives", state._replace(record=after)
            for action in self._choices(pod):
                if not isinstance(action, do.AwaitEngine) or _is_joined(state):
                    yield f"{pod.number}: {type(action).__name__}", self._act(state, pod, action)

    def _deaths(self, state: SpanState) -> Iterator[tuple[str, SpanState]]:
        if not state.deaths:
            return
        for pod in state.pods:
            if not pod.view.engine.is_absent:
                ended = state.with_pod(pod.without_part(fault=True))
                yield f"part {pod.number} ends", ended._replace(deaths=state.deaths - 1)

    def _told(self, pod: SpanPod, target: PodTarget) -> SpanPod:
        after = pod._replace(target=target)
        reason = lost(pod.view.engine, target.span, pod.pods) if pod.place == 0 else ""
        return after.with_engine(pod.view.engine.broke(reason)) if reason else after

    def _choose(self, pod: SpanPod) -> tuple[do.Action, ...]:
        chosen = next_actions(pod.seen, pod.target, self.rules)
        return tuple(action for action in chosen if not isinstance(action, do.Wait))

    def _facts_of(self, pod: SpanPod) -> PodFacts:
        """Return what the pod reports."""
        epoch = pod.target.epoch if pod.target else 0
        facts = pod_facts((pod.seen,), epoch=epoch, engine_failures=(pod.failures,))
        return self._keep(facts.model_copy(update={"took_s": Frozen()}))

    # ------------------------------------------------------------------------------------------------------- operator
    def _look(self, record: SpanRecord) -> SpanRecord:
        """Return the record once the operator has nothing more to do about it."""
        while (after := self._decide(record)) != record:
            record = after
        return self._keep(record)

    def _decide(self, record: SpanRecord) -> SpanRecord:
        decided = plan(self.observe(record))
        if decided.raises:
            return record._replace(climb=decided.climb)
        sent = tuple(
            self._keep(target) if isinstance(target := decided.targets.get(f"sums-{seat}-0"), PodTarget) else before
            for seat, before in zip(self.job.gpu_seats, record.sent, strict=True)
        )
        record, ladder, climb = record._replace(sent=sent, is_over=decided.is_over), self.job.ladder, record.climb
        if climb is not None and len(decided.standings) == len(self.job.gpu_seats) and climb.cause.goal is Goal.CLIMB:
            slowest = ladder.slowest(decided.standings.values())
            if ladder.reaches(slowest, ladder.finished_at):
                record = record._replace(trained_step=max(record.trained_step, climb.step))
            if slowest is ladder.top:
                record = record._replace(served=climb.version, has_served=True)
        return record

    def observe(self, record: SpanRecord) -> Observation:
        climb = record.climb
        step, is_alone = climb.step if climb else 0, not self.job.ladder.trains
        rollout = rollout_facts(
            sealed=(self.job.spec.steps if record.has_served else 0) if is_alone else step + 1,
            trained=max(0, step - 1),
            epoch=climb.epoch if climb else 0,
            stopped=climb is not None and climb.cause.goal is Goal.STOP,
        )
        recorded: dict[str, Any] = {
            "trained_step": record.trained_step,
            "served": record.served,
            "is_over": record.is_over,
        }
        seen = make_observation(self.job, [*record.known], climb=climb, rollout=rollout, **recorded)
        return seen if climb is None else replace(seen, climb=climb)

    # --------------------------------------------------------------------------------------------------------- agents
    def _act(self, state: SpanState, pod: SpanPod, action: do.Action) -> SpanState:
        engine = pod.view.engine
        match action:
            case do.CloseGate():
                return state.with_pod(pod.with_engine(engine.gate_closed()).change(gate_open=False))
            case do.OpenGate():
                must(engine.is_whole, "the gate opens to an engine without its memory")
                return state.with_pod(pod._replace(failures=0).change(gate_open=True))
            case do.StartEngine(version=version):
                return state.with_pod(self._started(pod, version))
            case do.KillEngine():
                return state.with_pod(pod.without_part(fault=engine.broken is not None))
            case do.EndPod():
                return state.with_pod(pod.change(stopped=True))
            case do.VerifyExport(version=version):
                must(version in _exports(state, pod), "an export that nobody wrote is verified")
                return state.with_pod(pod.change(whole=version))
            case action if action.lane is do.Lane.ENGINE:
                return self._called(state, pod, action)
            case _:
                return state.with_pod(self._trained(pod, action))

    def _started(self, pod: SpanPod, version: WeightVersion) -> SpanPod:
        assert pod.target is not None
        span = pod.target.span
        assert span is not None
        must(not pod.is_on_device or self.rules.ladder.serves_on, "a part starts beside a trainer on the device")
        is_whole = pod.view.whole == version or not self.rules.ladder.trains
        must(is_whole, "a part starts on an export that its pod has not compared")
        first: dict[str, Any] = {"launch": EngineLaunch(port=1)} if not pod.place else {}
        part: dict[str, Any] = {"part_of": span.engine.incarnation} if pod.place and span.engine else {}
        incarnation = f"e{pod.number}.{pod.starts + 1}"
        engine = pod.view.engine.started(incarnation, version, start_by=1e9, **first, **part)
        return pod._replace(pods=span.pods, maps=True, starts=pod.starts + 1).with_engine(engine)

    def _called(self, state: SpanState, pod: SpanPod, action: do.Action) -> SpanState:
        """Carry out a call of the first pod's agent, which reaches both parts or fails."""
        must(pod.place == 0, f"{type(action).__name__} in a pod without a gate")
        engine, parts = pod.view.engine, [each for each in state.pods if each.place is not None]
        if not _is_joined(state):
            return state.with_pod(pod.with_engine(engine.broke(f"{type(action).__name__} failed")))
        maps = pod.maps
        match action:
            case do.AwaitEngine():
                assert engine.starts_on is not None
                after = engine.answered(engine.starts_on, f"of {engine.starts_on}")
            case do.Pause():
                after = engine.was_paused()
            case do.Flush():
                after = engine.was_flushed()
            case do.Release():
                after, maps = engine.was_released(), False
            case do.Resume(tags=tags):
                must(not any(each.is_on_device for each in parts), "memory comes back beside a trainer on the device")
                after, maps = engine.was_resumed(tags), True
            case do.Update(version=version):
                must(all(version in _exports(state, each) for each in parts), "a pod lacks the export")
                after = engine.was_updated(version, f"of {version}")
            case do.Continue():
                after = engine.was_continued()
            case do.CheckProbe():
                after = engine.agreed()
            case _:
                raise AssertionError(action)
        for each in parts:
            state = state.with_pod(each._replace(maps=maps))
        return state.with_pod(pod._replace(maps=maps).with_engine(after))

    def _trained(self, pod: SpanPod, action: do.Action) -> SpanPod:
        rank = pod.view.ranks[0]
        match action:
            case do.StartTrainers(lineage=lineage):
                return pod.change(ranks=(rank.started(f"t{pod.number}", lineage, start_by=1e9),))
            case do.AwaitTrainers():
                return pod.with_rank(state=TrainerState.OFFLOADED, step=0, saved=0, can_finish=not pod.number)
            case do.StopTrainers():
                return pod.change(ranks=(rank.gone(0),))
            case do.FetchShards(step=step):
                return pod.change(shards=step)
            case do.Onload():
                must(not pod.maps or self.rules.ladder.serves_on, "a trainer comes beside a part that maps memory")
                return pod.with_rank(state=TrainerState.ONLOADED)
            case do.Train(step=step):
                return pod.with_rank(step=step)
            case do.Export(version=version):
                return pod._replace(exports=pod.exports | {version}).with_rank(exported=version)
            case do.Offload():
                return pod.with_rank(state=TrainerState.OFFLOADED)
            case do.Save(step=step):
                return pod.with_rank(saved=step)
            case do.SaveModel(version=version):
                return pod.with_rank(finished=version)
            case _:
                raise AssertionError(action)

    # ------------------------------------------------------------------------------------------------ looking at them
    def walk(self, seed: int, *, deaths: int = 0) -> Iterator[SpanState]:
        """Yield the states of one way at random, until the job has ended. Raises InvariantBroken."""
        rng, state = random.Random(seed), self.start(deaths)
        for _ in range(MOST_MOVES):
            yield state
            if has_ended(state):
                return
            dies = [*self._deaths(state)] if rng.random() < DEATHS_AT else []
            following = dies or [*self._moves(state)]
            must(bool(following), f"nobody moves, and there is no end: {state}")
            state = self._with_kept(rng.choice(following)[1])
        raise InvariantBroken(f"no end: {state}")

    def explore(self, *, deaths: int, limit: int) -> Explored:
        """Look at every state that can be reached, or no more than `limit`.

        Raises InvariantBroken, with the way that led there.
        """
        start = self.start(deaths)
        numbers, found, came_from = {start: 0}, deque([start]), [(0, "")]
        before: list[list[int]] = [[]]
        ends: dict[int, str] = {}
        while found and len(numbers) <= limit:
            state = found.popleft()
            number = numbers[state]
            try:
                following = self.successors(state)
            except InvariantBroken as error:
                raise InvariantBroken(f"{error}, after {'; '.join(_way(came_from, number))}") from error
            if has_ended(state) and state.record.climb is not None:
                ends[number] = state.record.climb.cause
            for what, after in following:
                if (known := numbers.setdefault(after, len(numbers))) == len(before):
                    found.append(after)
                    came_from.append((number, what))
                    before.append([])
                before[known].append(number)
        hopeful, rest = set(ends), [*ends]
        while rest:
            fresh = [number for number in before[rest.pop()] if number not in hopeful]
            hopeful.update(fresh)
            rest += fresh
        hopeless = [] if found else [number for number in range(len(before)) if number not in hopeful][:5]
        ways = [_way(came_from, number) for number in hopeless]
        return Explored(len(numbers), sum(map(len, before)), Counter(ends.values()), len(found), ways)


def has_ended(state: SpanState) -> bool:
    return state.record.is_over and all(pod.view.stopped for pod in state.pods)


def _way(came_from: list[tuple[int, str]], number: int) -> list[str]:
    way = []
    while number:
        number, what = came_from[number]
        way.append(what)
    return way[::-1]


def _is_joined(state: SpanState) -> bool:
    """Return whether the parts of the newest engine have met."""
    first, part = (pod.view.engine for pod in state.pods if pod.place is not None)
    return not first.is_absent and not part.is_absent and part.part_of == first.incarnation


def _exports(state: SpanState, pod: SpanPod) -> frozenset[WeightVersion]:
    """Return the exports that the pod reads: its own trainers', or those on the volume that pods share."""
    return pod.exports if pod.view.ranks else state.pods[0].exports
