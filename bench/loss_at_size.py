"""`make bench-loss-at-size`: how long the group of a job is without a pod that is lost, for 2 to 1,024 pods, simulated.

The plan is the real one, and the clock is simulated. What each pod takes is what `make bench-loss` measured in two
pods; what the operator takes for a message and for the write of an epoch is what `make bench-operator` measured. So the
difference between two sizes is what the operator adds: it has one core, on which messages follow one another. Not
simulated is what else grows, such as the meeting of more ranks.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from builders import (
    absent_engine,
    absent_trainer,
    facts_at,
    make_climb,
    make_job,
    make_member,
    pod_facts,
    rollout_facts,
)
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.member_wire import PodTarget
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_api.seats import ROLLOUT_SEAT
from colocated_rl_operator.planner.actions import CreatePod
from colocated_rl_operator.planner.observation import Climb, Member, Memory, Observation, PodPhase, remember
from colocated_rl_operator.planner.plan import plan
from colocated_rl_operator.planner.reasons import Cause

SIZES = (2, 64, 256, 1024)
MADE_BEFORE_S = 60.0  # one that is lost at once is not made again at once
BEFORE = WeightVersion(1, 1)  # what all serve when the pod is lost
MOST_EVENTS = 1_000_000


@dataclass(frozen=True)
class Stages:
    """Seconds of each stage. The pods' are medians of `make bench-loss`, in docs/sizing.md."""

    made: float = 0.3  # until a pod that was asked for runs
    answers: float = 4.0  # and from then on, until its agent answers
    loads: float = 9.0  # ranks, from the start of their processes
    serves: float = 12.5  # engines, from the export on; as long as the one that starts anew
    trains: float = 1.4  # a step
    moves: float = 0.01  # any other rung
    message: float = 41e-6  # the operator, for a message, either way
    epoch: float = 0.1  # the write of an epoch
    gathers: float = 0.005  # it looks at messages of so long at once
    silence: float = 10.0  # until the connection to a node that is gone counts as lost

    def of(self, rung: Rung, *, starts: bool) -> float:
        match rung:
            case Rung.TRAINED:
                return self.loads if starts else self.trains
            case Rung.UPDATED:
                return self.serves if starts else self.moves
            case _:
                return self.moves


@dataclass
class LossOfPod:
    """Holds seconds after the loss by what came about."""

    answers: float = 0.0
    loaded: float = 0.0
    serves: float = 0.0
    trained: float = 0.0


@dataclass
class Simulated:
    """One job on a simulated clock, all of whose pods serve."""

    pods: int
    stages: Stages = Stages()
    now: float = 0.0
    members: dict[str, Member] = field(default_factory=dict)  # by UID
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._order = count()
        self.job = make_job(replicas=self.pods, steps=5, checkpoint={"everySteps": 1})
        served = facts_at(Rung.SERVING, BEFORE)
        for seat in self.job.gpu_seats:
            self._put(make_member(seat, facts=served, node=f"node of {seat}", created_at=-MADE_BEFORE_S))
        self._put(make_member(ROLLOUT_SEAT, facts=rollout_facts(sealed=1, trained=1)))
        self.sent: dict[str, PodTarget] = {}
        self.memory = Memory(epoch=1, raised=True, heard_since=0.0)
        self.climb: Climb = make_climb(BEFORE.step, cause=Cause.NEXT_STEP)
        self.climb = replace(self.climb, group=self._observe().group or "")
        self.memory = remember(self._observe()).memory
        self.busy_until = 0.0

    def _put(self, member: Member) -> None:
        self.members[member.uid] = member

    def _remove(self, uid: str) -> None:
        self.members.pop(uid, None)

    def _at(self, moment: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.events, (moment, next(self._order), do))

    def _observe(self) -> Observation:
        return Observation(
            self.now, self.job, tuple(self.members.values()), self.climb, trained_step=BEFORE.step, memory=self.memory
        )

    # ------------------------------------------------------------------------------------------------------- the loss
    def lose(self, *, silently: bool) -> LossOfPod:
        """Lose the second pod, and go on until the group has trained another step.

        silently: its node is gone, and nobody says so. Otherwise the pod is deleted by force.
        """
        lost, found = next(pod for pod in self.members.values() if pod.seat == self.job.gpu_seats[1]), LossOfPod()
        self._at(self.stages.silence, partial(self._lose_link, lost.uid)) if silently else self._remove(lost.uid)
        for _ in range(MOST_EVENTS):
            wake_at = self._pass(found)
            if found.trained:
                return found
            moments = [at for at, *_ in self.events[:1]] + ([wake_at] if wake_at is not None else [])
            self.now = max(self.now, min(moments) + self.stages.gathers, self.busy_until)
            while self.events and self.events[0][0] <= self.now:
                heapq.heappop(self.events)[2]()
        raise AssertionError(f"no step is trained in {self.now:.0f} s: {self.climb}")

    def _lose_link(self, uid: str) -> None:
        """Silence counts from the last word, which came with the loss."""
        pod = self.members[uid]
        self._put(pod.reporting(None, highest_epoch=pod.highest_epoch, silent_since=0.0))

    def _pass(self, found: LossOfPod) -> float | None:
        """Observe, plan, act. Return when to look again, if nothing happens."""
        seen = remember(self._observe())
        self.memory, decided, busy_s = seen.memory, plan(seen), 0.0
        self._note(seen, found)
        if decided.raises:
            assert decided.climb is not None
            self.climb, busy_s = decided.climb, self.stages.epoch
            self.memory = replace(self.memory, raised=True)
        uids = {pod.name: pod.uid for pod in self.members.values()}
        for name, target in decided.targets.items():
            if isinstance(target, PodTarget) and self.sent.get(name) != target:
                self.sent[name] = target
                busy_s += 2 * self.stages.message  # with its answer
                self._deliver(uids[name], target, at=self.now + busy_s)
        for action in decided.pods:
            if isinstance(action, CreatePod):
                self._make(action)
            else:
                self._at(self.now, partial(self._remove, action.uid))
        self.busy_until = self.now + busy_s
        return decided.wake_at

    def _note(self, seen: Observation, found: LossOfPod) -> None:
        ladder, is_new = self.job.ladder, self.climb.lineage > BEFORE.lineage
        if self.climb.group and is_new and not found.answers:
            found.answers = self.now
        if is_new and ladder.reaches(seen.slowest, Rung.TRAINED) and not found.loaded:
            found.loaded = self.now
        if is_new and seen.is_up and not found.serves:
            found.serves = self.now
            sealed = make_member(ROLLOUT_SEAT, facts=rollout_facts(sealed=2, trained=1, epoch=self.climb.epoch))
            self._at(self.now, partial(self._put, sealed))
        if self.climb.step > BEFORE.step and ladder.reaches(seen.slowest, Rung.TRAINED) and found.serves:
            found.trained = self.now

    def _deliver(self, uid: str, target: PodTarget, *, at: float) -> None:
        starts = target.step == BEFORE.step
        reached = Rung.SEALED if target.rung is TIME_SLICED.next_barrier(Rung.UNKNOWN) else target.rung
        facts = facts_at(reached, WeightVersion(target.step, target.lineage), epoch=target.epoch)
        self._at(at + self.stages.of(reached, starts=starts), partial(self._report, uid, facts))

    def _report(self, uid: str, facts: object) -> None:
        if (pod := self.members.get(uid)) is not None:
            self._put(pod.reporting(facts, highest_epoch=self.climb.epoch, silent_since=None))  # type: ignore[arg-type]

    def _make(self, action: CreatePod) -> None:
        made = make_member(action.seat, action.attempt, phase=PodPhase.PENDING, created_at=self.now, facts=None)
        self._put(made)
        running_at = self.now + self.stages.made
        self._at(running_at, lambda: self._put(replace(made, phase=PodPhase.RUNNING, silent_since=self.now)))
        blank = pod_facts(absent_engine(), absent_trainer(), epoch=0)
        up = replace(made, phase=PodPhase.RUNNING, facts=blank)
        self._at(running_at + self.stages.answers, lambda: self._put(up))


def main() -> int:
    print("seconds after the loss, simulated   pods  its agent answers  all have their state  all serve  trained again")
    for what, silently in (("a pod is deleted by force", False), ("a node is gone, silently", True)):
        for pods in SIZES:
            found = Simulated(pods).lose(silently=silently)
            print(
                f"{what:34} {pods:5} {found.answers:18.1f} {found.loaded:21.1f} {found.serves:10.1f}"
                f" {found.trained:14.1f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
