"""Every state of a job whose pod has several engines: the same search, with a pod that is seen once for each of them.

A pod is one value of `fakes.model_pod` for each engine, with what only that engine has: process, gate, journal and what
the agent believes of it. Trainer, export and target are the pod's, and equal in all. The real `planner.engines` chooses
what the agent does next; what an action does is what it does in a pod with one engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.planner.engines import EngineChoice, choices
from colocated_rl_agent.planner.views import pod_facts
from colocated_rl_api import names
from colocated_rl_api.facts import EngineState, PodFacts
from colocated_rl_api.rungs import Rung
from colocated_rl_operator.planner.observation import Job
from fakes.model import JobModel, ModelState, Seen, exports_of, put
from fakes.model_moves import Durable, carried_out, must_close_late, must_rise_together
from fakes.model_pod import (
    CALLS,
    NEVER,
    ModelPod,
    ModelRank,
    Target,
    act,
    admit,
    agent_restarts,
    called_unheard,
    check,
    failed,
    last_barrier,
    must,
    view_of,
    wire_target,
)
from fakes.values import Hashed

ON_DEVICE = (do.Onload, do.Score, do.Train, do.Export)


class PodOfEngines(Hashed):
    """The parts of a pod, one for each engine. What it is asked for that all have in common is the first part's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self[0], name)

    def _replace(self, **changes: Any) -> PodOfEngines:
        return PodOfEngines(part._replace(**changes) for part in self)

    def as_first(self) -> PodOfEngines:
        return PodOfEngines(part.as_first() for part in self)

    @property
    def gate_open(self) -> bool:
        return any(part.gate_open for part in self)

    def with_part(self, index: int, part: ModelPod, *, is_of_all: bool) -> PodOfEngines:
        """Return the pod after something happened to a part. is_of_all: and to what all parts have in common."""
        parts = PodOfEngines(put(self, index, part))
        common = {name: getattr(part, name) for name in ("rank", "whole", "shards", "exports", "stopped")}
        return (parts._replace(**common) if is_of_all else parts).noted()

    def noted(self) -> PodOfEngines:
        """Return the pod with a note of the last barrier that all of it has reached, and no other."""
        target, ladder = self.target, self.ladder
        if target is None:
            return self
        stood = dict(self.stood)
        passed = last_barrier(ladder, ladder.place(standing(self))) or Rung.UNKNOWN
        stood[target.epoch] = max(passed, stood.get(target.epoch, Rung.UNKNOWN), key=ladder.place)
        return self._replace(stood=tuple(sorted(stood.items())))


def facts_of(pod: PodOfEngines) -> PodFacts:
    failures = [int(part.has_failed) for part in pod]
    return pod_facts([view_of(part) for part in pod], epoch=pod.epoch, engine_failures=failures)


def standing(pod: PodOfEngines) -> Rung:
    return Rung.UNKNOWN if pod.target is None else pod.ladder.standing(facts_of(pod), pod.target.version)


def chosen(pod: PodOfEngines, *, now: float = 0.0) -> list[EngineChoice]:
    views = [replace(view_of(part), now=now) for part in pod]
    found = choices(views, wire_target(pod.target) if pod.target else None, pod.rules)
    return [choice for choice in found if not isinstance(choice.action, do.Wait)]


def is_of_all(action: do.Action | do.Wait) -> bool:
    return not isinstance(action, do.Wait) and action.lane not in (do.Lane.GATE, do.Lane.ENGINE)


class SeveralEngines(JobModel):
    """Explores pods of several engines.

    engines: in each pod. Only one pod has trainers: those of several are what `JobModel` is for.
    """

    def __init__(self, job: Job, *, engines: int, **bounds: Any) -> None:
        super().__init__(job, in_all_orders=True, **bounds)
        self._engines = engines
        self._standing_of = cast(Any, standing)
        self._admit = cast(Any, self._admitted)

    def _new_pod(self, seat: str, rank: ModelRank) -> ModelPod:
        part = super()._new_pod(seat, rank)
        engines = 1 if part.role == names.ROLE_TRAINER else self._engines
        return cast(ModelPod, PodOfEngines(part for _ in range(engines)))

    def _admitted(self, pod: PodOfEngines, target: Target) -> PodOfEngines:
        stood = pod.stood
        return PodOfEngines(admit(part, target, has_fence=True) for part in pod)._replace(stood=stood).noted()

    def report(self, pod: ModelPod) -> Seen:
        parts: object = pod
        if not isinstance(parts, PodOfEngines):
            return super().report(pod)
        if pod not in self._seen:
            awaited = any(part.has_failed and part.belief.state is EngineState.STARTING for part in parts)
            seen = super().report(parts[0])._replace(rung=standing(parts), awaited=awaited)
            self._reports.setdefault(seen, facts_of(parts))
            self._seen[pod] = self._reported.kept(seen)
        return self._seen[pod]

    # ------------------------------------------------------------------------------------------------------ its agent
    def _agent_acts(self, state: ModelState, index: int) -> Iterator[tuple[str, ModelState]]:
        pod = cast(PodOfEngines, state.pods[index])
        if not pod.alive or pod.stopped:
            return
        rollout = state.rollout
        durable = Durable(rollout.dropped, rollout.sealed, state.saved)
        for engine, action in chosen(pod):
            assert not isinstance(action, do.Wait)
            self._check_parts(state, pod, engine, action)
            done = carried_out(pod[engine], action, peers=tuple, durable=durable, acted=act)
            if done is None:
                continue
            part, saved = done
            part = part._replace(has_failed=_has_failed(pod[engine], action))
            after = pod.with_part(engine, part, is_of_all=is_of_all(action))
            must_be_apart(after)
            served = state.operator.served
            must_rise_together(
                state.pods,
                cast(ModelPod, pod),
                cast(ModelPod, after),
                action,
                served=served,
                standing_of=self._standing_of,
            )
            yield (
                f"{type(action).__name__} {engine}",
                state._replace(saved=saved).with_pod(index, cast(ModelPod, after)),
            )

    def _check_parts(self, state: ModelState, pod: PodOfEngines, engine: int, action: do.Action) -> None:
        for part in pod if isinstance(action, ON_DEVICE) else (pod[engine],):
            check(part, action, exports_of(state))
        must_close_late(state.pods, pod[engine], action)

    # ---------------------------------------------------------------------------------------------------- what befalls
    def _somebody_dies(self, state: ModelState, index: int) -> Iterator[tuple[str, ModelState]]:
        pod = cast(PodOfEngines, state.pods[index])
        if not pod.alive or pod.stopped:
            return
        unheard = state._replace(operator=state.operator.lost(index))
        into, apart = partial(_with, state, index), partial(_with, unheard, index)
        yield "agent dies", apart(_restarted(pod))
        for engine, action in chosen(pod):
            assert not isinstance(action, do.Wait)
            part, of_all = pod[engine], is_of_all(action)
            if isinstance(action, CALLS):
                left = called_unheard(part, action, has_journal=True)
                yield (
                    f"agent dies in {type(action).__name__} {engine}",
                    apart(_restarted(pod.with_part(engine, left, is_of_all=False))),
                )
            for after in failed(part, action, has_journal=True):
                lost = after._replace(has_failed=part.has_failed or isinstance(action, do.StartEngine))
                yield (
                    f"call {engine}, {type(action).__name__}, fails",
                    into(pod.with_part(engine, lost, is_of_all=of_all)),
                )
        for engine, action in chosen(pod, now=2 * NEVER):
            if isinstance(action, do.KillEngine | do.StopTrainers):
                after = act(pod[engine], action)._replace(has_failed=_has_failed(pod[engine], action))
                yield f"deadline {engine} passes", into(pod.with_part(engine, after, is_of_all=is_of_all(action)))
        for engine, part in enumerate(pod):
            if part.engine is not None:
                dead = part.without_engine()._replace(has_failed=True)
                yield f"engine {engine} dies", into(pod.with_part(engine, dead, is_of_all=False))
        if pod.rank.is_alive:
            yield "trainer dies", into(pod.with_part(0, pod[0].without_trainer(), is_of_all=True))
        if state.operator.known[index] is not None:
            yield "connection breaks", unheard
        yield "pod dies", apart(pod._replace(alive=False))


def _with(state: ModelState, index: int, pod: PodOfEngines) -> ModelState:
    return state.with_pod(index, cast(ModelPod, pod))


def _restarted(pod: PodOfEngines) -> PodOfEngines:
    return PodOfEngines(agent_restarts(part) for part in pod)._replace(has_failed=False)


def _has_failed(before: ModelPod, action: do.Action | do.Wait) -> bool:
    match action:
        case do.OpenGate():
            return False
        case do.KillEngine(is_fault=is_fault):
            return before.has_failed or is_fault or before.belief.broken is not None
        case _:
            return before.has_failed


def must_be_apart(pod: PodOfEngines) -> None:
    """Check that no trainer is on the devices while any engine maps memory there."""
    if pod.rank.is_on_device and not pod.ladder.serves_on:
        gave_up = all(part.engine is None or part.engine.has_given_up for part in pod)
        must(gave_up, "engine and trainer share the devices")
