"""A job of two pods with one engine over both: the real plan, the real action table and the real views, in one process.

What an action does to an engine it does to both of its parts; the truth about their memory stands beside what the
agents believe, and is what is checked:

* no trainer is on its pod's device while a part of the engine maps memory there, and none comes back while one is
* an update finds its export in both pods, and only the first pod's agent makes calls
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from typing import Any

from builders import make_job, make_observation, rollout_facts
from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.planner.next_actions import next_actions
from colocated_rl_agent.planner.spans import as_first, as_part, lost
from colocated_rl_agent.planner.views import EngineView, PodView, RankView, pod_facts
from colocated_rl_agent.settings import rules_for
from colocated_rl_api.facts import EngineLaunch, PodFacts, TrainerState
from colocated_rl_api.member_wire import Goal, PodTarget
from colocated_rl_api.names import PodUid
from colocated_rl_operator.planner.observation import Climb, Job, Observation
from colocated_rl_operator.planner.plan import plan
from fakes.model_pod import must

ON_DEVICE = (TrainerState.ONLOADED, TrainerState.SCORING, TrainerState.TRAINING)


class SpanPod:
    """One of the two pods. maps: whether its part of the engine maps memory that a trainer needs."""

    def __init__(self, index: int, job: Job) -> None:
        self.index, self.rules = index, rules_for(job.spec)
        self.target: PodTarget | None = None
        self.pods: tuple[PodUid, ...] = ()  # that the engine was started with
        self.maps = False
        self.failures = 0
        self.view = PodView(
            now=0.0,
            runner_known=True,
            terminating=False,
            gate_open=False,
            in_flight=0,
            closed_at=0.0,
            engine=EngineView(),
            ranks=(RankView(index),) if self.rules.ladder.trains else (),
        )

    @property
    def seen(self) -> PodView:
        """Return the pod as its agent sees it."""
        span = self.target.span if self.target else None
        return (as_part if self.index else as_first)(self.view, span, pods=2)

    @property
    def facts(self) -> PodFacts:
        epoch = self.target.epoch if self.target else 0
        return pod_facts((self.seen,), epoch=epoch, engine_failures=(self.failures,))

    @property
    def is_on_device(self) -> bool:
        return any(rank.state in ON_DEVICE for rank in self.view.ranks)

    def change(self, **changes: object) -> None:
        self.view = replace(self.view, **changes)  # type: ignore[arg-type]  # of its fields

    def rank(self, **changes: object) -> None:
        self.change(ranks=tuple(replace(rank, **changes) for rank in self.view.ranks))  # type: ignore[arg-type]

    def part_ends(self, *, fault: bool) -> None:
        self.maps = False
        self.failures += fault and not self.index
        self.change(engine=self.view.engine.gone(), gate_open=False)


class SpanningJob:
    """The job, its operator and both pods. Nothing moves by itself: `move` lets one of them do one thing."""

    def __init__(self, seed: int, **spec: Any) -> None:
        self.random = random.Random(seed)
        rollout = spec.pop("rollout") | {"engine": {"pods": 2}}
        self.job = make_job(steps=2, replicas=2, rollout=rollout, **spec)
        self.pods = [SpanPod(index, self.job) for index in range(2)]
        self.climb: Climb | None = None
        self.incarnations = count(1)
        self.starts = 0
        self.rollout_stopped = False
        self.has_served = False

    # ------------------------------------------------------------------------------------------------------- operator
    def observation(self, facts: list[PodFacts | None]) -> Observation:
        step = self.climb.step if self.climb else 0
        is_alone = not self.job.ladder.trains
        rollout = rollout_facts(
            sealed=(self.job.spec.steps if self.has_served else 0) if is_alone else step + 1,
            trained=max(0, step - 1),
            epoch=self.climb.epoch if self.climb else 0,
            stopped=self.rollout_stopped,
        )
        seen = make_observation(self.job, facts, climb=self.climb, rollout=rollout)
        return seen if self.climb is None else replace(seen, climb=self.climb)

    def operator_looks(self) -> None:
        seen = self.observation([pod.facts for pod in self.pods])
        decided = plan(seen)
        if decided.raises:
            assert decided.climb is not None
            self.climb = decided.climb
            self.rollout_stopped = decided.climb.cause.goal is Goal.STOP
            return
        for member in seen.gpu_members:
            target, pod = decided.targets.get(member.name), self.pods[int(member.seat[-1])]
            if isinstance(target, PodTarget) and target != pod.target and not pod.view.stopped:
                pod.target = target
                if not pod.index and (reason := lost(pod.view.engine, target.span, pod.pods)):
                    pod.change(engine=pod.view.engine.broke(reason))

    # --------------------------------------------------------------------------------------------------------- agents
    def choices(self) -> list[tuple[SpanPod, do.Action]]:
        found = [
            (pod, action)
            for pod in self.pods
            for action in next_actions(pod.seen, pod.target, pod.rules)
            if not isinstance(action, do.Wait)
        ]
        return [(pod, action) for pod, action in found if not isinstance(action, do.AwaitEngine) or self.is_joined]

    @property
    def is_joined(self) -> bool:
        """Return whether the parts of the newest engine have met."""
        first, part = (pod.view.engine for pod in self.pods)
        return not first.is_absent and not part.is_absent and part.part_of == first.incarnation

    def move(self) -> bool:
        """Let somebody do something; return whether anybody could."""
        found = self.choices()
        if found and self.random.random() < 0.7:
            self.act(*self.random.choice(found))
            return True
        before = (self.climb, [pod.target for pod in self.pods])
        self.operator_looks()
        return bool(found) or before != (self.climb, [pod.target for pod in self.pods])

    def act(self, pod: SpanPod, action: do.Action) -> None:
        view, engine = pod.view, pod.view.engine
        match action:
            case do.CloseGate():
                pod.change(gate_open=False, engine=engine.gate_closed())
            case do.OpenGate():
                must(engine.is_whole, "the gate opens to an engine without its memory")
                pod.failures = 0
                self.has_served = True
                pod.change(gate_open=True)
            case do.StartEngine(version=version):
                self._start(pod, version)
            case do.KillEngine():
                pod.part_ends(fault=engine.broken is not None)
            case do.EndPod():
                pod.change(stopped=True)
            case do.VerifyExport(version=version):
                pod.change(whole=version)
            case do.RemoveExports():
                pod.change(stale_exports=False, crowded=False)
            case action if action.lane is do.Lane.ENGINE:
                self._call(pod, action)
            case _:
                self._train(pod, view.ranks[0], action)

    def _start(self, pod: SpanPod, version: object) -> None:
        assert pod.target is not None
        span = pod.target.span
        assert span is not None
        must(not pod.is_on_device or pod.rules.ladder.serves_on, "a part starts beside a trainer on the device")
        incarnation = f"e{next(self.incarnations)}"
        first = {"launch": EngineLaunch(port=1)} if not pod.index else {}
        part = {"part_of": span.engine.incarnation} if pod.index and span.engine else {}
        pod.pods = span.pods
        pod.maps = True
        self.starts += 1
        pod.change(engine=pod.view.engine.started(incarnation, version, start_by=1e9, **first, **part))  # type: ignore[arg-type]

    def _call(self, pod: SpanPod, action: do.Action) -> None:
        """Carry out a call of the first pod's agent, which reaches both parts or fails."""
        must(not pod.index, f"{action} in a pod without a gate")
        engine = pod.view.engine
        if not self.is_joined:
            pod.change(engine=engine.broke(f"{action} failed"))
            return
        match action:
            case do.AwaitEngine():
                assert engine.starts_on is not None
                after = engine.answered(engine.starts_on, f"of {engine.starts_on}")
            case do.Pause():
                after = engine.was_paused()
            case do.Flush():
                after = engine.was_flushed()
            case do.Release():
                after = engine.was_released()
                for each in self.pods:
                    each.maps = False
            case do.Resume(tags=tags):
                after = engine.was_resumed(tags)
                for each in self.pods:
                    must(not each.is_on_device, "memory comes back beside a trainer on the device")
                    each.maps = True
            case do.Update(version=version):
                must(all(each.view.whole == version for each in self.pods), "a pod lacks the export")
                after = engine.was_updated(version, f"of {version}")
            case do.Continue():
                after = engine.was_continued()
            case do.CheckProbe():
                after = engine.agreed()
            case _:
                raise AssertionError(action)
        pod.change(engine=after)

    def _train(self, pod: SpanPod, rank: RankView, action: do.Action) -> None:
        match action:
            case do.StartTrainers(lineage=lineage):
                pod.change(ranks=(rank.started(f"t{next(self.incarnations)}", lineage, start_by=1e9),))
            case do.AwaitTrainers():
                pod.rank(state=TrainerState.OFFLOADED, step=0, saved=0, can_finish=not pod.index)
            case do.StopTrainers():
                pod.change(ranks=(rank.gone(0),))
            case do.FetchShards(step=step):
                pod.change(shards=step)
            case do.Onload():
                must(not pod.maps or pod.rules.ladder.serves_on, "a trainer comes beside a part that maps memory")
                pod.rank(state=TrainerState.ONLOADED)
            case do.Train(step=step):
                pod.rank(step=step)
            case do.Export(version=version):
                pod.rank(exported=version)
            case do.Offload():
                pod.rank(state=TrainerState.OFFLOADED)
            case do.Save(step=step):
                pod.rank(saved=step)
            case do.SaveModel(version=version):
                pod.rank(finished=version)
            case _:
                raise AssertionError(action)

    def runs_to_its_end(self, *, deaths: int = 0, moves: int = 3000) -> None:
        """Move until everybody has stopped. deaths: of parts of the engine, whenever there is one."""
        for _ in range(moves):
            if all(pod.view.stopped for pod in self.pods):
                return
            living = [pod for pod in self.pods if not pod.view.engine.is_absent]
            if deaths and living and self.random.random() < 0.03:
                deaths -= 1
                self.random.choice(living).part_ends(fault=True)
            elif not self.move() and not self.move():
                raise AssertionError(f"nobody moves: {self.climb}, {[pod.facts for pod in self.pods]}")
        raise AssertionError(f"no end: {self.climb}, {[pod.facts for pod in self.pods]}")
