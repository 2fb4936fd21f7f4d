"""A whole job that moves: pods, agents, trainers, rollout controller and operator, without time or sockets.

`ModelGroup` keeps the truth. GPU pods are the values of `fakes.model_pod`, and move by single actions of the real table
(`fakes.model_moves`), which check what must never happen; real operators drive them too (`fakes.member`). `Simulation`
adds an operator with its real plan: what it sees of members is what they last reported, possibly less than the truth,
and its targets take their time and may be overtaken. Beside what the moves check:

* a target asks for no barrier before every pod has stood at the one before it (I2)
* an epoch is recorded before a target carries it, and an older target changes nothing (I5)
* a batch is trained once in each lineage, in order

The search through all states (`fakes.model`) has an operator of its own. There a state must not hold its history, so
what the operator remembers is made up from the state, a report is a rung, and time passes only when nothing else can
happen. This one keeps what it has seen (`remember`), a clock, whole reports, all targets on their way, nodes,
evaluations and other replicas: with them, the number of states has no bound. Hence one pod and one set of moves, but
two operators.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import count
from operator import is_

from builders import rollout_facts
from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.settings import kept_tags, rules_for
from colocated_rl_api import names
from colocated_rl_api.facts import EvaluationResult, PodFacts, RolloutFacts
from colocated_rl_api.failure import FailureCause
from colocated_rl_api.member_wire import Goal, PodTarget, RolloutTarget
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_api.seats import ROLLOUT_SEAT, is_spare, role_of
from colocated_rl_operator.planner.actions import CreatePod
from colocated_rl_operator.planner.notices import Notice
from colocated_rl_operator.planner.observation import (
    MAX_AVOIDED,
    Climb,
    Job,
    Member,
    Memory,
    Observation,
    PodPhase,
    remember,
)
from colocated_rl_operator.planner.plan import Plan, plan
from fakes.model_moves import (
    Durable,
    carried_out,
    is_alone,
    must_close_late,
    must_cost_no_step,
    must_have_stood,
    must_rise_together,
    without_peers,
)
from fakes.model_pod import (
    FIRST,
    OTHER,
    ModelPod,
    Target,
    admit,
    agent_restarts,
    check,
    chosen,
    facts_of,
    last_barrier,
    must,
    standing_of,
)


class SimPod:
    """Hold what both kinds of pod have. reported: what the operator knows of its member; None while not connected."""

    def __init__(self, seat: str, attempt: int, uid: str) -> None:
        self.seat, self.attempt, self.uid = seat, attempt, uid
        self.alive = True
        self.fate = FailureCause.POD_FAILED  # once it is not
        self.reported: PodFacts | RolloutFacts | None = None
        self.notice: Notice | None = None  # of its node
        self.known: tuple[tuple[object, ...], Member] | None = None  # as the operator saw it last, and of what

    @property
    def stopped(self) -> bool:
        raise NotImplementedError

    @property
    def facts(self) -> PodFacts | RolloutFacts:
        raise NotImplementedError

    def disconnect(self) -> None:
        self.reported = None


class GpuPod(SimPod):
    """One agent with its engine and trainer.

    state: the truth. engine_failures: since it last served. sent: newest target over the present connection.
    """

    def __init__(self, seat: str, attempt: int, uid: str, state: ModelPod | None = None) -> None:
        self.state = state or ModelPod()
        super().__init__(seat, attempt, uid)
        self.target: PodTarget | None = None
        self.engine_failures = 0
        self.sent: PodTarget | None = None
        self.inbox: list[PodTarget] = []
        self._facts: tuple[ModelPod, int, PodFacts] | None = None  # the newest, and what they were made of

    @property
    def alive(self) -> bool:
        return self.state.alive

    @alive.setter
    def alive(self, is_alive: bool) -> None:
        self.state = self.state._replace(alive=is_alive)

    @property
    def stopped(self) -> bool:
        return self.state.stopped

    @property
    def durable_epoch(self) -> int:
        return self.state.durable.epoch

    def disconnect(self) -> None:
        super().disconnect()
        self.sent = None
        self.inbox.clear()

    @property
    def facts(self) -> PodFacts:
        """The same ones, as long as nothing has moved: most who ask want to know that."""
        if self._facts is None or self._facts[0] is not self.state or self._facts[1] != self.engine_failures:
            facts = facts_of(self.state, engine_failures=self.engine_failures)
            self._facts = self.state, self.engine_failures, facts
        return self._facts[2]

    @property
    def rung(self) -> Rung:
        """Return the rung at which it stands towards its target."""
        return standing_of(self.state)


class RolloutPod(SimPod):
    """The rollout controller; what it has sealed and trained is in the store, and survives it."""

    def __init__(self, seat: str, attempt: int, uid: str, *, sealed: int, trained: int) -> None:
        super().__init__(seat, attempt, uid)
        self.target: RolloutTarget | None = None
        self.sealed, self.trained = sealed, trained
        self.evaluated: int | None = None
        self.has_stopped = False

    @property
    def stopped(self) -> bool:
        return self.has_stopped

    @property
    def facts(self) -> RolloutFacts:
        epoch = self.target.epoch if self.target else 0
        return _rollout_facts(self.sealed, self.trained, epoch, self.evaluated, self.stopped)


@cache
def _rollout_facts(sealed: int, trained: int, epoch: int, evaluated: int | None, stopped: bool) -> RolloutFacts:
    results = () if evaluated is None else (EvaluationResult(step=evaluated, samples=1, mean=0, stderr=0),)
    return rollout_facts(sealed=sealed, trained=trained, epoch=epoch, evaluated=results, stopped=stopped)


class ModelGroup:
    """The truth about every pod of a job, and what each may do next."""

    def __init__(self, job: Job) -> None:
        self.job, self.ladder = job, job.ladder
        self.incarnations = count(1)
        self.pods: list[GpuPod] = []
        self.rollouts: list[RolloutPod] = []
        self.saved = 0  # newest checkpoint
        self.mirrors: dict[str, dict[str, int]] = {}  # by pod's uid and trainer's seat: the step whose part it has
        self.kept_after = 0  # batches up to here were dropped by the store
        self.sealed = self.store_trained = 0  # durable in the store
        self.trained_in: dict[int, list[int]] = {}  # by lineage, in order
        self.served: WeightVersion | None = None  # newest version that every engine served at once
        self.stood: dict[int, dict[str, Rung]] = {}  # by epoch and seat: the highest barrier since it was accepted
        self.seats_in: dict[int, tuple[str, ...]] = {}  # of the group, by epoch; without one: as the job asks
        self._nobody = ModelPod(alive=False, there=False, rules=rules_for(job.spec))
        self._former: dict[str, ModelPod] = {}  # by seat: the last pod, once its object is gone

    def resize(self, replicas: int) -> None:
        """A person writes spec.replicas. The API server takes no more than one replica while there are pods of one."""
        if self.job.spec.replicas > 1 or not any(pod.alive for pod in self.everybody):
            self.job = replace(self.job, spec=self.job.spec.model_copy(update={"replicas": replicas}))

    @property
    def compares(self) -> bool:
        return self.job.spec.compares_engines

    @property
    def everybody(self) -> list[SimPod]:
        return [*self.pods, *self.rollouts]

    def states(self, epoch: int) -> dict[str, ModelPod]:
        """Return the truth about the pod in each seat of an epoch's group, also about one that is gone or never was."""
        return {seat: self._in(seat) for seat in self.seats_in.get(epoch, self.job.gpu_seats)}

    def _in(self, seat: str) -> ModelPod:
        found = (pod.state for pod in reversed(self.pods) if pod.seat == seat)
        return next(found, self._former.get(seat, self._nobody))

    def add(self, seat: str, attempt: int, uid: str) -> GpuPod | RolloutPod:
        """A pod begins to run."""
        must(not any(pod.alive and pod.seat == seat for pod in self.everybody), f"two pods in seat {seat}")
        if seat == ROLLOUT_SEAT:
            rollout = RolloutPod(seat, attempt, uid, sealed=self.sealed, trained=self.store_trained)
            self.rollouts.append(rollout)
            return rollout
        spec, is_first = self.job.file_spec, seat == self.job.lineage_seats[0]
        state = ModelPod(
            rules=rules_for(spec, role_of(seat)),
            keeps=kept_tags(spec.rollout.offload),
            role=role_of(seat),
            rank=FIRST if is_first else OTHER,
            stood=self._in(seat).stood,
        )
        pod = GpuPod(seat, attempt, uid, state)
        self.pods.append(pod)
        return pod

    def remove(self, uid: str) -> None:
        """A pod's object is deleted."""
        for pod in self.everybody:
            if pod.uid == uid:
                pod.alive = False
                pod.disconnect()
        self._former |= {pod.seat: pod.state for pod in self.pods if pod.uid == uid}
        self.pods = [pod for pod in self.pods if pod.uid != uid]
        self.rollouts = [pod for pod in self.rollouts if pod.uid != uid]

    def accept(self, pod: GpuPod, target: PodTarget) -> None:
        """A target arrives; one of an older epoch changes nothing. It tells how many trainers its epoch has."""
        if target.rendezvous is not None:
            replicas = target.rendezvous.world_size // self.job.ranks_per_pod
            self.seats_in.setdefault(target.epoch, self.job.sized(replicas).gpu_seats)
        after = admit(pod.state, Target.of(target), has_fence=True)
        if after.target == Target.of(target):
            pod.target = target
        self._change(pod, after)

    def _change(self, pod: GpuPod, after: ModelPod) -> None:
        """Note where the pod has stood. What it holds of epochs under which nobody acts any more is dropped."""
        if after.stood:
            epoch, rung = after.stood[-1]
            self.stood.setdefault(epoch, {})[pod.seat] = rung
        oldest = min((each.state.epoch for each in self.pods if each.alive), default=0)
        if after.stood and after.stood[0][0] < oldest:
            after = after._replace(stood=tuple(item for item in after.stood if item[0] >= oldest))
        pod.state = after

    # ---------------------------------------------------------------------------------------------------- an agent
    def agent_moves(self, pod: GpuPod, rng: random.Random | None = None) -> bool:
        """Carry out the next safe action towards the target. rng: chooses among several. False if nothing is done."""
        before = pod.state
        if not pod.alive or before.stopped:
            return False
        if before.ending and pod.reported is not None and pod.reported != pod.facts:
            return False  # an agent that was told to end says so first
        actions = [*chosen(before)]
        if rng is not None:
            rng.shuffle(actions)
        return any(self._carry_out(pod, action) for action in actions)

    def _carry_out(self, pod: GpuPod, action: do.Action) -> bool:
        before, pods = pod.state, [*self.states(pod.state.epoch).values()]
        peers = partial(self._peers, pod)
        check(before, action)
        must_close_late(pods, before, action)
        durable = Durable(self.kept_after, self.sealed, self.saved, self._kept(before.epoch))
        done = carried_out(before, action, peers=peers, durable=durable)
        if done is None:
            if not is_alone(before.rank, peers()):
                return False
            self._change(pod, without_peers(before))
            return True
        after, self.saved = done
        must_rise_together(pods, before, after, action, served=self.served)
        self._change(pod, after)
        match action:
            case do.Train(step=step):
                self._note_training(before.rank.lineage or 0, step)
            case do.Mirror(step=step):
                self._mirror(before.epoch, step)
            case do.KillEngine(is_fault=is_fault) if is_fault or before.belief.broken:
                pod.engine_failures += 1
            case do.OpenGate():
                pod.engine_failures = 0
            case do.EndPod() if before.ending:
                self.pod_is_evicted(pod)
            case _:
                pass
        return True

    def _trainers(self, epoch: int) -> list[GpuPod]:
        """Return the pods that are there with trainers of an epoch's group, by seat."""
        seats = self.seats_in.get(epoch, self.job.gpu_seats)
        by_seat = {pod.seat: pod for pod in self.pods if pod.alive}
        return [by_seat[seat] for seat in seats if role_of(seat) == self.job.trainer_role and seat in by_seat]

    def _mirror(self, epoch: int, step: int) -> None:
        """All ranks keep a step at once, each in its pod and in another, half of the group away."""
        pods = self._trainers(epoch)
        half = max(1, len(pods) // 2)
        for pod, following in zip(pods, pods[half:] + pods[:half], strict=True):
            self._change(pod, pod.state._replace(rank=pod.state.rank._replace(mirrored=step)).noted())
            for holder in (pod, following):
                self.mirrors.setdefault(holder.uid, {})[pod.seat] = step

    def _kept(self, epoch: int) -> int | None:
        """Return the newest step of which the memory of pods has every part; None: the job keeps none there."""
        if self.job.spec.checkpoint.in_memory is None:
            return None
        seats = [
            seat for seat in self.seats_in.get(epoch, self.job.gpu_seats) if role_of(seat) == self.job.trainer_role
        ]
        held = [self.mirrors.get(pod.uid, {}) for pod in self._trainers(epoch)]
        return min(max((parts.get(seat, 0) for parts in held), default=0) for seat in seats)

    def _note_training(self, lineage: int, step: int) -> None:
        trained = self.trained_in.setdefault(lineage, [])
        if not trained or trained[-1] < step:
            must(not trained or step == trained[-1] + 1, f"{lineage} trained {trained}, then {step}")
            trained.append(step)

    def _peers(self, pod: GpuPod) -> Iterator[ModelPod]:
        """Other pods with trainers."""
        role = self.job.trainer_role
        found = self.states(pod.state.epoch).items()
        return (each for seat, each in found if seat != pod.seat and role_of(seat) == role)

    # -------------------------------------------------------------------------------------- the rollout controller
    def rollout_moves(self, pod: RolloutPod) -> bool:
        target = pod.target
        if not pod.alive or pod.stopped or target is None:
            return False
        if target.goal is Goal.STOP:
            pod.has_stopped = True
        elif pod.trained < target.trained_step:
            pod.trained = self.store_trained = target.trained_step
        elif self.kept_after < target.saved_step:
            self.kept_after = target.saved_step
        elif target.evaluate is not None and pod.evaluated != target.evaluate:
            pod.evaluated = target.evaluate
        elif self._may_seal(pod):
            pod.sealed = self.sealed = pod.sealed + 1
        else:
            return False
        return True

    def _may_seal(self, pod: RolloutPod) -> bool:
        """A batch that is made waits to be trained, if it ever is; one that was recorded is there at once."""
        is_made = not self.ladder.serves or any(gpu.alive and gpu.state.gate_open for gpu in self.pods)
        is_wanted = pod.sealed <= pod.trained if self.ladder.trains else pod.sealed < self.job.spec.steps
        return is_made and is_wanted

    # --------------------------------------------------------------------------------------------------------- faults
    def engine_dies(self, pod: GpuPod) -> bool:
        if not pod.alive or pod.state.engine is None:
            return False
        self._change(pod, pod.state.without_engine().noted())  # absent satisfies what lies below Updated
        pod.engine_failures += 1
        return True

    def trainer_dies(self, pod: GpuPod) -> bool:
        if not pod.alive or not pod.state.rank.is_alive:
            return False
        pod.state = pod.state.without_trainer()
        return True

    def trainer_grows(self, pod: GpuPod) -> bool:
        if not pod.alive or not pod.state.rank.is_alive:
            return False
        pod.state = pod.state.with_large_trainer()
        return True

    def weights_spoil(self, pod: GpuPod, loads: int) -> bool:
        """The next loads of the pod's engines leave other weights in memory than they say."""
        spoilt = tuple(f"spoilt {next(self.incarnations)}" for _ in range(loads))
        pod.state = pod.state._replace(spoilt=spoilt)
        return True

    def agent_restarts(self, pod: GpuPod) -> bool:
        """The journal keeps the epoch and what was agreed on; target and connection are lost."""
        if not pod.alive:
            return False
        pod.state, pod.target = agent_restarts(pod.state), None
        pod.disconnect()
        return True

    def pod_is_evicted(self, pod: SimPod) -> bool:
        pod.fate = FailureCause.POD_EVICTED
        return self.pod_is_lost(pod)

    def pod_is_drained(self, pod: GpuPod) -> bool:
        """End the pod as kubelet does, which informs the API server after the pod itself."""
        is_first = pod.alive and not pod.state.ending
        pod.state = pod.state._replace(ending=True)
        return is_first

    def pod_is_lost(self, pod: SimPod) -> bool:
        if not pod.alive:
            return False
        pod.alive = False
        pod.disconnect()
        return True

    def connection_breaks(self, pod: SimPod) -> bool:
        if not pod.alive or pod.reported is None:
            return False
        pod.disconnect()
        return True


class Simulation(ModelGroup):
    """A group with its operator: the real plan, members that report late, targets that arrive late."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.now = 0.0
        self.climb: Climb | None = None  # as recorded
        self.trained_step = 0
        self.is_over = False
        self.memory = Memory()
        self.sent = 0
        self.blocked: set[str] = set()  # seats for whose pods there is no node
        self.room: int | None = None  # for so many GPU pods; None: for all
        self.pending: dict[str, Member] = {}  # pods that no node has taken on, by UID

    # -------------------------------------------------------------------------------------------------- the operator
    def operator_pass(self, *, dies_after_record: bool = False) -> Plan:
        """observe, plan, act, with everything recorded before it is sent."""
        self._place_pending()
        seen = remember(self._observe())
        self.memory = seen.memory
        decided = plan(seen)
        must(decided.climb is None or self.climb is None or decided.climb.epoch >= self.climb.epoch, "the epoch fell")
        if decided.raises:
            assert decided.climb is not None
            must(decided.climb.epoch > (self.climb.epoch if self.climb else 0), "not raised")
            must_cost_no_step(decided, before=self.climb, saved=self.saved)
            self.climb = decided.climb
            self.job = self.job.led_by(self.climb)
            self.seats_in[decided.climb.epoch] = self.job.gpu_seats
            self.memory = replace(self.memory, raised=True)
            if dies_after_record:
                self.memory = Memory()
                return decided
        else:
            must(decided.climb == self.climb, "the climb changed without a new epoch")
        for name, target in decided.targets.items():
            self._send(name, target)
        for action in decided.pods:
            if isinstance(action, CreatePod):
                must(len(action.avoids) <= MAX_AVOIDED, "ever more nodes are avoided")
                self._make(action)
            else:
                self.pending.pop(action.uid, None)
                self.remove(action.uid)
        self._place_pending()
        if seen.climb is not None:
            if seen.is_finished:
                self.trained_step = max(self.trained_step, seen.climb.step)
            if seen.is_up:
                self.served = seen.climb.version
        self.is_over = decided.is_over
        return decided

    def _make(self, action: CreatePod) -> None:
        uid, name = names.PodUid(f"uid-{next(self.incarnations)}"), f"{action.seat}-{action.attempt}"
        self.pending[uid] = Member(
            action.seat, action.attempt, name, uid, PodPhase.PENDING, created_at=self.now, node=None
        )

    def _place_pending(self) -> None:
        """The scheduler gives each pod a node, the oldest first, if there is one."""
        for uid, pod in list(self.pending.items()):
            if self._has_room(pod.seat):
                del self.pending[uid]
                self.add(pod.seat, pod.attempt, uid)

    def _has_room(self, seat: str) -> bool:
        there = sum(pod.alive for pod in self.pods)
        return seat not in self.blocked and (seat == ROLLOUT_SEAT or self.room is None or there < self.room)

    def node_is_lost(self, pod: GpuPod) -> bool:
        """The pod is lost, and there is no other node for it."""
        if not self.pod_is_lost(pod):
            return False
        whole = len(self.job.asked_seats.gpu) + len(self.job.spare_seats)
        there = whole if self.room is None else self.room
        self.room = max(1, there - 1)
        return True

    def node_is_back(self) -> None:
        self.room = None

    def _observe(self) -> Observation:
        return Observation(
            now=self.now,
            job=self.job,
            members=(*(self._member(index, pod) for index, pod in enumerate(self.everybody)), *self.pending.values()),
            climb=self.climb,
            trained_step=self.trained_step,
            served=self.served,
            is_over=self.is_over,
            memory=self.memory,
        )

    def _member(self, index: int, pod: SimPod) -> Member:
        """The same one, as long as there is nothing else to see."""
        silent_since = None if pod.reported else self.now
        parts = (index, pod.alive, pod.reported, silent_since, pod.notice)
        if pod.known is None or not all(map(is_, pod.known[0], parts)):
            member = Member(
                seat=pod.seat,
                attempt=pod.attempt,
                name=f"{pod.seat}-{pod.attempt}",
                uid=names.PodUid(pod.uid),
                phase=PodPhase.RUNNING if pod.alive else PodPhase.FAILED,
                node=f"node-{pod.uid}",
                notice=pod.notice,
                fate=None if pod.alive else pod.fate,
                created_at=-1000.0,
                address=f"10.0.0.{index}",
                silent_since=silent_since,
                highest_epoch=pod.reported.epoch if pod.reported else 0,
                facts=pod.reported if pod.alive else None,
            )
            pod.known = parts, member
        return pod.known[1]

    def _send(self, name: str, target: PodTarget | RolloutTarget) -> None:
        must(self.climb is not None and target.epoch == self.climb.epoch, "a target's epoch is not the recorded one")
        if isinstance(target, RolloutTarget):
            for rollout in self.rollouts:
                if rollout.alive and name == f"{ROLLOUT_SEAT}-{rollout.attempt}" and rollout.target != target:
                    must(target.trained_step >= rollout.trained, "trained_step fell")
                    rollout.target = target
                    self.sent += 1
            return
        if target.goal is Goal.CLIMB:
            below = last_barrier(self.ladder, self.ladder.place(target.rung) - 1)
            pods = [*self.states(target.epoch).values()]
            must_have_stood(pods, target.epoch, below, f"a target asks for {target.rung}")
        for pod in self.pods:
            if pod.alive and name == f"{pod.seat}-{pod.attempt}" and pod.sent != target:
                must(target.goal is Goal.STOP or not is_spare(pod.seat), "a spare is sent up the ladder")
                pod.sent = target
                pod.inbox.append(target)
                self.sent += 1

    def node_gives_notice(self, pod: GpuPod) -> bool:
        """It is about to go, and its pod is lost with it unless it has left by then."""
        if not pod.alive or pod.notice is not None:
            return False
        pod.notice = Notice(FailureCause.POD_EVICTED, "a taint", since=self.now)
        return True

    def suspend(self, is_asked: bool) -> None:
        """A person writes spec.suspend."""
        self.job = replace(self.job, spec=self.job.spec.model_copy(update={"suspend": is_asked}))

    def retry(self) -> None:
        """A person raises spec.retries."""
        spec = self.job.spec
        self.job = replace(self.job, spec=spec.model_copy(update={"retries": spec.retries + 1}))

    # --------------------------------------------------------------------------------------------------- deliveries
    def deliver(self, pod: GpuPod) -> bool:
        """The oldest target on its way reaches the agent."""
        if not pod.inbox or not pod.alive:
            return False
        self.accept(pod, pod.inbox.pop(0))
        return True

    def report(self, pod: SimPod) -> bool:
        """Let the operator know the member's present facts."""
        facts = pod.facts
        if not pod.alive or pod.reported is facts or pod.reported == facts:
            return False
        pod.reported = facts
        return True

    def operator_restarts(self) -> None:
        """Keep only what is recorded; targets that were on their way to members still arrive."""
        self.memory = Memory()
        for pod in self.pods:
            pod.sent = None

    @property
    def outcome(self) -> str | None:
        """Return how the job ended; None while it runs."""
        if not self.is_over or self.climb is None:
            return None
        return str(self.climb.cause)
