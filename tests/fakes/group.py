"""A whole job as a value that moves: pods, agents, trainers, rollout controller and operator, without time or sockets.

`Group` keeps the truth. Members move by single actions, as the contract of an agent allows. `Simulation` adds the
operator with its real plan: what it sees of members is what they last reported, possibly less than the truth, and its
targets take their time and may be overtaken. Each move is checked for what must never happen:

* a member passes no barrier before every member of the group has stood at it in the same epoch (I2)
* an epoch is recorded before a target carries it, and an older target changes nothing (I5)
* a trainer computes only while its pod's engine maps nothing (I1)
* a batch is trained once in each lineage, in order, and is still there when it is needed
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from operator import is_

from builders import absent_engine, absent_trainer, released_engine, rollout_facts
from colocated_rl_api.facts import (
    EngineFacts,
    EngineState,
    EvaluationResult,
    GateFacts,
    PodFacts,
    RejectedWeights,
    RolloutFacts,
    TagState,
    TrainerFacts,
    TrainerState,
)
from colocated_rl_api.failure import FailureCause
from colocated_rl_api.ladder import Ladder
from colocated_rl_api.member_wire import (
    Goal,
    PodTarget,
    RolloutTarget,
)
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_api.seats import ROLLOUT_SEAT
from colocated_rl_operator.planner.actions import CreatePod
from colocated_rl_operator.planner.failure_policy import MAX_AVOIDED
from colocated_rl_operator.planner.observation import (
    Climb,
    Job,
    Member,
    Memory,
    Observation,
    PodPhase,
    remember,
)
from colocated_rl_operator.planner.plan import Plan, plan

GONE = absent_engine()
NO_TRAINER = absent_trainer()


class Broken(AssertionError):
    """An invariant does not hold."""


def must(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


@dataclass
class SimPod:
    """What both kinds of pod have. reported: what the operator knows of its member; None while not connected."""

    seat: str
    attempt: int
    uid: str
    alive: bool = True
    fate: FailureCause = FailureCause.POD_FAILED  # once it is not
    stopped: bool = False
    reported: PodFacts | RolloutFacts | None = None
    known: tuple[tuple[object, ...], Member] | None = None  # as the operator saw it last, and what that was made of

    @property
    def facts(self) -> PodFacts | RolloutFacts:
        raise NotImplementedError

    def disconnect(self) -> None:
        self.reported = None


@dataclass
class GpuPod(SimPod):
    """One agent with its engine and trainer. `durable_epoch` survives the agent's restart, `target` does not."""

    durable_epoch: int = 0
    target: PodTarget | None = None
    gate: GateFacts = field(default_factory=lambda: GateFacts(open=False, settled=True))
    engine: EngineFacts = GONE
    trainer: TrainerFacts = NO_TRAINER
    engine_failures: int = 0  # since it last served
    agreed: tuple[WeightVersion, str] | None = None  # newest checksum of the group that its agent was told
    doubted: WeightVersion | None = None  # weights that an engine was not shown to hold
    spoils: int = 0  # loads to come that leave other weights in memory than they say
    export: WeightVersion | None = None  # newest
    sent: PodTarget | None = None  # newest over the present connection
    inbox: list[PodTarget] = field(default_factory=list)
    ending: bool = False  # its container was signalled to end, as in a drain
    told: tuple[tuple[object, ...], PodFacts] | None = None  # its newest facts, and what they were made of
    rungs: dict[WeightVersion, Rung] = field(default_factory=dict)  # where it stands by them, of those who asked

    def disconnect(self) -> None:
        super().disconnect()
        self.sent = None
        self.inbox.clear()

    @property
    def facts(self) -> PodFacts:
        """The same ones, as long as nothing has moved: most who ask want to know that."""
        epoch = self.target.epoch if self.target else 0
        parts = (epoch, self.gate, self.engine, self.engine_failures, self.trainer, self.stopped, self.ending)
        if self.told is None or not all(map(is_, self.told[0], parts)):
            engine = self.engine.model_copy(update={"failures": self.engine_failures})
            facts = PodFacts(
                epoch=epoch,
                gate=self.gate,
                engines=(engine,),
                trainers=(self.trainer,),
                stopped=self.stopped,
                ending=self.ending,
            )
            self.told, self.rungs = (parts, facts), {}
        return self.told[1]

    def rejects(self, version: WeightVersion) -> bool:
        return self.engine.rejected is not None and self.engine.rejected.version == version

    def standing(self, ladder: Ladder, at: WeightVersion) -> Rung:
        facts = self.facts
        if at not in self.rungs:
            self.rungs[at] = ladder.standing(facts, at)
        return self.rungs[at]


@dataclass
class RolloutPod(SimPod):
    """The rollout controller; what it has sealed and trained is in the store, and survives it."""

    target: RolloutTarget | None = None
    sealed: int = 0
    trained: int = 0
    evaluated: int | None = None

    @property
    def facts(self) -> RolloutFacts:
        epoch = self.target.epoch if self.target else 0
        return _rollout_facts(self.sealed, self.trained, epoch, self.evaluated, self.stopped)


@cache
def _rollout_facts(sealed: int, trained: int, epoch: int, evaluated: int | None, stopped: bool) -> RolloutFacts:
    result = None if evaluated is None else EvaluationResult(step=evaluated, samples=1, mean=0, stderr=0)
    return rollout_facts(sealed=sealed, trained=trained, epoch=epoch, evaluated=result, stopped=stopped)


class Group:
    """The truth about every pod of a job, and what each may do next."""

    def __init__(self, job: Job) -> None:
        self.job, self.ladder = job, job.ladder
        self.incarnations = count(1)
        self.pods: list[GpuPod] = []
        self.rollouts: list[RolloutPod] = []
        self.checkpoints: set[int] = set()
        self.kept_after = 0  # batches up to here were dropped by the store
        self.sealed = self.store_trained = 0  # durable in the store
        self.trained_in: dict[int, list[int]] = {}  # by lineage, in order
        self.stood: dict[int, dict[str, Rung]] = {}  # by epoch and seat: the highest rung since it was accepted

    def resize(self, replicas: int) -> None:
        """A person writes spec.replicas, which the API server takes while there are no pods."""
        if not any(pod.alive for pod in self.everybody):
            self.job = replace(self.job, spec=self.job.spec.model_copy(update={"replicas": replicas}))

    @property
    def compares(self) -> bool:
        return self.job.spec.compares_engines

    @property
    def everybody(self) -> list[SimPod]:
        return [*self.pods, *self.rollouts]

    def add(self, seat: str, attempt: int, uid: str) -> GpuPod | RolloutPod:
        """A pod begins to run."""
        must(not any(pod.alive and pod.seat == seat for pod in self.everybody), f"two pods in seat {seat}")
        if seat == ROLLOUT_SEAT:
            rollout = RolloutPod(seat, attempt, uid, sealed=self.sealed, trained=self.store_trained)
            self.rollouts.append(rollout)
            return rollout
        pod = GpuPod(seat, attempt, uid)
        self.pods.append(pod)
        return pod

    def accept(self, pod: GpuPod, target: PodTarget) -> None:
        """A target that passed the fence."""
        pod.durable_epoch, pod.target = target.epoch, target
        if target.checksum is not None:
            pod.agreed = target.version, target.checksum
        self._note(pod)

    # ---------------------------------------------------------------------------------------------------- an agent
    def agent_moves(self, pod: GpuPod) -> bool:
        """The next safe action towards the target; False if there is none."""
        if pod.ending:
            return self._end(pod)
        if not pod.alive or pod.target is None or pod.stopped:
            return False
        before = pod.standing(self.ladder, pod.target.version)
        if not self._move(pod, pod.target, before):
            return False
        if pod.target.goal is Goal.CLIMB:
            after = pod.standing(self.ladder, pod.target.version)
            if not self.ladder.reaches(before, after):
                # an engine that starts on the export is Updated and Restored at once
                self.must_have_stood(pod.target.epoch, before, f"{pod.seat} went on to {after}")
            self._note(pod)
        uses = pod.trainer.state in (TrainerState.ONLOADED, TrainerState.SCORING, TrainerState.TRAINING)
        shares = not self.ladder.takes_turns
        must(self.ladder.serves or pod.engine.is_absent, f"{pod.seat}: an engine where nothing is generated")
        must(self.ladder.trains or not pod.trainer.is_alive, f"{pod.seat}: a trainer where nothing is trained")
        must(shares or not uses or _maps_nothing(pod.engine), f"{pod.seat}: trainer and engine are both on the device")
        return True

    def _move(self, pod: GpuPod, target: PodTarget, rung: Rung) -> bool:
        if target.goal is Goal.STOP:
            pod.gate, pod.engine, pod.trainer = GateFacts(open=False, settled=True), GONE, NO_TRAINER
            pod.stopped = True
            return True
        if not self.ladder.trains:
            return self._serve_alone(pod, target)
        if self.ladder.serves_on and self._serve_on(pod, target):
            return True
        if self.ladder.reaches(rung, target.rung):
            return rung is self.ladder.top and self._save(pod, target)
        if not self.ladder.takes_turns:
            is_due = self._lets_trainers_work(target) and not _is_done(pod, target)
            return is_due and self._train(pod, target)
        holds_it = pod.engine.version == target.version and pod.engine.weights_mapped
        if self.ladder.reaches(target.rung, Rung.CLOSED) and not holds_it and self._go_down(pod, target):
            return True
        if self._lets_trainers_work(target) and _maps_nothing(pod.engine) and not _is_done(pod, target):
            return self._train(pod, target)
        if self.ladder.reaches(target.rung, Rung.UPDATED) and _is_done(pod, target):
            return self._go_up(pod, target)
        return False

    def _end(self, pod: GpuPod) -> bool:
        """Of a drain that nobody but its agent knows of: all in it ends, it says so, others' collectives break."""
        if not pod.alive or (pod.reported is not None and pod.reported is not pod.facts):
            return False
        if pod.engine.is_absent and not pod.trainer.is_alive:
            for other in self.pods:
                if other is not pod and other.trainer.state in (TrainerState.ONLOADED, TrainerState.STARTING):
                    self.trainer_dies(other)
            return self.pod_is_evicted(pod)
        pod.gate, pod.engine = GateFacts(open=False, settled=True), GONE
        self.trainer_dies(pod)
        self._note(pod)
        return True

    def _serve_on(self, pod: GpuPod, target: PodTarget) -> bool:
        """The engine of a resident pod: it serves what there is, and takes what all have."""
        engine, at = pod.engine, target.version
        asks = partial(self.ladder.reaches, target.rung)
        if engine.is_absent:
            if pod.export is None or pod.rejects(pod.export) or (pod.export == at and not asks(Rung.UPDATED)):
                return False
            pod.engine = self._new_engine(pod.export)
        elif engine.state is EngineState.STARTING:
            if engine.starts_on == at and not asks(Rung.UPDATED):
                return False
            assert engine.starts_on is not None
            pod.engine = self._loaded(pod, engine.starts_on, state=EngineState.READY, starts_on=None)
        elif engine.version != at and _is_done(pod, target) and (asks(Rung.PAUSED) or engine.paused):
            return self._push(pod, target)
        elif engine.version == at and not asks(Rung.SERVING):
            return False
        else:
            return not pod.gate.open and self._open(pod)
        return True

    def _serve_alone(self, pod: GpuPod, target: PodTarget) -> bool:
        """The engine of a job that trains nothing serves the model as it is."""
        engine = pod.engine
        if target.rung is not Rung.SERVING or pod.gate.open:
            return False
        if engine.is_absent:
            pod.engine = self._new_engine(target.version)
        elif engine.state is EngineState.STARTING:
            pod.engine = self._loaded(pod, target.version, state=EngineState.READY, starts_on=None)
        else:
            return self._open(pod)
        return True

    def _loaded(self, pod: GpuPod, version: WeightVersion, **changes: object) -> EngineFacts:
        """With the weights of an export, or what it takes for them."""
        spoilt = f", spoilt {next(self.incarnations)}" if pod.spoils else ""
        pod.spoils = max(0, pod.spoils - 1)
        checksum = f"{version}{spoilt}" if self.compares else None
        return pod.engine.model_copy(update={"version": version, "checksum": checksum, **changes})

    def _open(self, pod: GpuPod) -> bool:
        """Of an engine that holds some weights, all of it mapped."""
        engine = pod.engine
        if self.compares and pod.agreed != (engine.version, engine.checksum):
            if pod.agreed is None or pod.agreed[0] != engine.version:
                return False
            rejected = (
                RejectedWeights(version=pod.agreed[0], message="spoilt") if pod.doubted == pod.agreed[0] else None
            )
            pod.engine, pod.doubted = GONE.model_copy(update={"rejected": rejected}), pod.agreed[0]
            pod.engine_failures += 1
        elif engine.paused:
            pod.engine = engine.model_copy(update={"paused": False, "drained": False})
        else:
            must("spoilt" not in (engine.checksum or ""), f"{pod.seat} serves other weights than it says")
            pod.gate, pod.engine_failures = GateFacts(open=True, settled=False), 0
        return True

    def _push(self, pod: GpuPod, target: PodTarget) -> bool:
        engine = pod.engine
        if pod.gate.open:
            self.must_have_stood(target.epoch, Rung.EXPORTED, f"{pod.seat} closed its gate")
            pod.gate = GateFacts(open=False, settled=False)
        elif not pod.gate.settled:
            pod.gate = GateFacts(open=False, settled=True)
        elif not engine.paused:
            pod.engine = engine.model_copy(update={"paused": True})
        elif self.ladder.reaches(target.rung, Rung.DRAINED) and not engine.drained:
            pod.engine = engine.model_copy(update={"drained": True})
        elif self.ladder.reaches(target.rung, Rung.UPDATED):
            must(engine.drained and pod.gate.settled, f"{pod.seat} was updated before it was drained")
            pod.engine = self._loaded(pod, target.version)
        else:
            return False
        return True

    def _go_down(self, pod: GpuPod, target: PodTarget) -> bool:
        engine = pod.engine
        if pod.gate.open:
            pod.gate = GateFacts(open=False, settled=False)
        elif not pod.gate.settled:
            pod.gate = GateFacts(open=False, settled=True)
        elif engine.state is EngineState.STARTING and engine.starts_on != target.version:
            pod.engine = GONE
        elif engine.is_absent or engine.state is EngineState.STARTING:
            return False
        elif self.ladder.reaches(target.rung, Rung.PAUSED) and not engine.paused:
            pod.engine = engine.model_copy(update={"paused": True})
        elif self.ladder.reaches(target.rung, Rung.DRAINED) and not engine.drained:
            pod.engine = engine.model_copy(update={"drained": True})
        elif self.ladder.reaches(target.rung, Rung.RELEASED) and not engine.is_released and not _is_done(pod, target):
            pod.engine = released_engine().model_copy(update={"incarnation": engine.incarnation})
        else:
            return False
        return True

    def _lets_trainers_work(self, target: PodTarget) -> bool:
        return self.ladder.reaches(target.rung, Rung.SCORED if self.ladder.scores else Rung.TRAINED)

    def _train(self, pod: GpuPod, target: PodTarget) -> bool:
        rank = pod.trainer
        if rank.lineage != target.lineage or not rank.is_alive:
            if rank.is_alive:
                pod.trainer = NO_TRAINER.model_copy(update={"lineage": rank.lineage})
            elif rank.lineage == target.lineage and rank.exit_code is not None:
                return False  # it died: the operator raises the lineage
            else:
                pod.trainer = self._new_trainer(TrainerState.STARTING, target.lineage)
            return True
        if rank.step is None:
            if not self._others_joined(pod, -1):
                return False
            newest = max((step for step in self.checkpoints if step <= target.step), default=0)
            pod.trainer = rank.model_copy(update={"step": newest, "state": TrainerState.OFFLOADED})
        elif rank.state is TrainerState.OFFLOADED:
            pod.trainer = rank.model_copy(update={"state": TrainerState.ONLOADED})
        elif rank.step < target.step:
            return self._step(pod, target, rank.step + 1)
        elif self.ladder.reaches(target.rung, Rung.EXPORTED):
            pod.trainer = rank.model_copy(update={"exported": target.version})
            pod.export = target.version
        else:
            return False
        return True

    def _step(self, pod: GpuPod, target: PodTarget, step: int) -> bool:
        rank = pod.trainer
        if not self._others_joined(pod, step - 1):
            return False
        must(self.kept_after < step <= self.sealed, f"batch {step} is not there ({self.kept_after}, {self.sealed}]")
        if self.ladder.scores and rank.scored != step:
            pod.trainer = rank.model_copy(update={"scored": step})
            return True
        if step == target.step and not self.ladder.reaches(target.rung, Rung.TRAINED):
            return False
        pod.trainer = rank.model_copy(update={"step": step})
        trained = self.trained_in.setdefault(target.lineage, [])
        if not trained or trained[-1] < step:
            must(not trained or step == trained[-1] + 1, f"{target.lineage} trained {trained}, then {step}")
            trained.append(step)
        return True

    def _new_engine(self, version: WeightVersion) -> EngineFacts:
        incarnation = f"e{next(self.incarnations)}"
        return EngineFacts(name="engine-0", state=EngineState.STARTING, incarnation=incarnation, starts_on=version)

    def _new_trainer(self, state: TrainerState, lineage: int) -> TrainerFacts:
        return TrainerFacts(rank=0, state=state, incarnation=f"t{next(self.incarnations)}", lineage=lineage)

    def _others_joined(self, pod: GpuPod, step: int) -> bool:
        """Collectives need every rank of the lineage, at that step or just beyond it."""
        others = [other.trainer for other in self.pods if other.alive and other is not pod]
        return len(others) == self.job.spec.replicas - 1 and all(
            other.is_alive
            and other.lineage == pod.trainer.lineage
            and (-1 if other.step is None else other.step) >= step
            for other in others
        )

    def _go_up(self, pod: GpuPod, target: PodTarget) -> bool:
        engine, version = pod.engine, target.version
        if not pod.trainer.is_offloaded:
            pod.trainer = pod.trainer.model_copy(update={"state": TrainerState.OFFLOADED})
        elif engine.is_absent:
            if pod.rejects(version):
                return False
            pod.engine = self._new_engine(version)
        elif engine.state is EngineState.STARTING:
            pod.engine = self._loaded(pod, version, state=EngineState.READY, starts_on=None)
        elif engine.version != version:
            pod.engine = self._loaded(pod, version, weights=TagState.MAPPED)
        elif target.rung is not Rung.SERVING:
            return False
        elif not engine.is_mapped:
            mapped = TagState.MAPPED
            pod.engine = engine.model_copy(update={"kv_cache": mapped, "cuda_graph": mapped})
        else:
            return self._open(pod)
        return True

    def _save(self, pod: GpuPod, target: PodTarget) -> bool:
        step = target.step
        due = target.is_last or step % self.job.spec.checkpoint.every_steps == 0
        rank = pod.trainer
        if not due or not rank.is_alive or rank.step != step or rank.saved == step:
            return False
        pod.trainer = rank.model_copy(update={"saved": step})
        self.checkpoints.add(step)
        return True

    # -------------------------------------------------------------------------------------- the rollout controller
    def rollout_moves(self, pod: RolloutPod) -> bool:
        target = pod.target
        if not pod.alive or pod.stopped or target is None:
            return False
        if target.goal is Goal.STOP:
            pod.stopped = True
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
        is_made = not self.ladder.serves or any(gpu.alive and gpu.gate.open for gpu in self.pods)
        is_wanted = pod.sealed <= pod.trained if self.ladder.trains else pod.sealed < self.job.spec.steps
        return is_made and is_wanted

    # --------------------------------------------------------------------------------------------------------- faults
    def engine_dies(self, pod: GpuPod) -> bool:
        if not pod.alive or pod.engine.is_absent:
            return False
        pod.engine, pod.gate = GONE, GateFacts(open=False, settled=True)
        pod.engine_failures += 1
        self._note(pod)  # absent satisfies what lies below Updated
        return True

    def trainer_dies(self, pod: GpuPod) -> bool:
        if not pod.alive or not pod.trainer.is_alive:
            return False
        pod.trainer = NO_TRAINER.model_copy(update={"lineage": pod.trainer.lineage, "exit_code": -9})
        return True

    def agent_restarts(self, pod: GpuPod) -> bool:
        """The journal keeps the epoch and what was agreed on; target and connection are lost."""
        if not pod.alive:
            return False
        pod.target = pod.doubted = None
        pod.engine = pod.engine.model_copy(update={"rejected": None})
        pod.disconnect()
        return True

    def pod_is_evicted(self, pod: SimPod) -> bool:
        pod.fate = FailureCause.POD_EVICTED
        return self.pod_is_lost(pod)

    def pod_is_drained(self, pod: GpuPod) -> bool:
        """As by kubelet, which tells the API server after the pod itself."""
        is_first = pod.alive and not pod.ending
        pod.ending = True
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

    # ----------------------------------------------------------------------------------------------------- invariants
    def _note(self, pod: GpuPod) -> None:
        if pod.target is None or pod.target.goal is Goal.STOP:
            return
        stood = self.stood.setdefault(pod.target.epoch, {})
        rung = pod.standing(self.ladder, pod.target.version)
        stood[pod.seat] = max(rung, stood.get(pod.seat, Rung.UNKNOWN), key=self.ladder.place)

    def must_have_stood(self, epoch: int, rung: Rung, what: str) -> None:
        """Every pod, at the last barrier up to `rung`."""
        ladder, stood = self.ladder, self.stood.get(epoch, {})
        passed = [each for each in ladder.rungs[: ladder.place(rung)] if each in ladder.barriers]
        for seat in self.job.gpu_seats if passed else ():
            has = ladder.reaches(stood.get(seat, Rung.UNKNOWN), passed[-1])
            must(has, f"{what} in epoch {epoch} before {seat} stood at {passed[-1]}")


class Simulation(Group):
    """A group with its operator: the real plan, members that report late, targets that arrive late."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.now = 0.0
        self.climb: Climb | None = None  # as recorded
        self.trained_step = 0
        self.served: WeightVersion | None = None
        self.is_over = False
        self.memory = Memory()
        self.sent = 0
        self.blocked: set[str] = set()  # seats for whose pods there is no node

    # -------------------------------------------------------------------------------------------------- the operator
    def operator_pass(self, *, dies_after_record: bool = False) -> Plan:
        """observe, plan, act, with everything recorded before it is sent."""
        seen = remember(self._observe())
        self.memory = seen.memory
        decided = plan(seen)
        must(decided.climb is None or self.climb is None or decided.climb.epoch >= self.climb.epoch, "the epoch fell")
        if decided.raises:
            must(
                decided.climb is not None and decided.climb.epoch > (self.climb.epoch if self.climb else 0),
                "not raised",
            )
            self.climb = decided.climb
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
                if action.seat not in self.blocked:
                    self.add(action.seat, action.attempt, f"uid-{next(self.incarnations)}")
            else:
                self._delete(action.uid)
        if seen.climb is not None:
            if seen.is_finished:
                self.trained_step = max(self.trained_step, seen.climb.step)
            if seen.is_up:
                self.served = seen.climb.version
        self.is_over = decided.is_over
        return decided

    def _observe(self) -> Observation:
        return Observation(
            now=self.now,
            job=self.job,
            members=tuple(self._member(index, pod) for index, pod in enumerate(self.everybody)),
            climb=self.climb,
            trained_step=self.trained_step,
            served=self.served,
            is_over=self.is_over,
            memory=self.memory,
        )

    def _member(self, index: int, pod: SimPod) -> Member:
        """The same one, as long as there is nothing else to see."""
        silent_since = None if pod.reported else self.now
        parts = (index, pod.alive, pod.reported, silent_since)
        if pod.known is None or not all(map(is_, pod.known[0], parts)):
            member = Member(
                seat=pod.seat,
                attempt=pod.attempt,
                name=f"{pod.seat}-{pod.attempt}",
                uid=pod.uid,
                phase=PodPhase.RUNNING if pod.alive else PodPhase.FAILED,
                node=f"node-{pod.uid}",
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
            below = (Rung.UNKNOWN, *self.ladder.rungs)[self.ladder.place(target.rung) - 1]
            self.must_have_stood(target.epoch, below, f"target {target.rung}")
        for pod in self.pods:
            if pod.alive and name == f"{pod.seat}-{pod.attempt}" and pod.sent != target:
                pod.sent = target
                pod.inbox.append(target)
                self.sent += 1

    def _delete(self, uid: str) -> None:
        for pod in self.everybody:
            if pod.uid == uid:
                pod.alive = False
                pod.disconnect()
        self.pods = [pod for pod in self.pods if pod.uid != uid]
        self.rollouts = [pod for pod in self.rollouts if pod.uid != uid]

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
        target = pod.inbox.pop(0)
        if target.epoch < pod.durable_epoch:
            return True  # refused: an older epoch changes nothing
        self.accept(pod, target)
        return True

    def report(self, pod: SimPod) -> bool:
        """What the operator knows of the member becomes the truth of now."""
        facts = pod.facts
        if not pod.alive or pod.reported is facts or pod.reported == facts:
            return False
        pod.reported = facts
        return True

    def operator_restarts(self) -> None:
        """Only what is recorded remains; what was on its way to members still arrives."""
        self.memory = Memory()
        for pod in self.pods:
            pod.sent = None

    @property
    def outcome(self) -> str | None:
        """How the job ended; None while it runs."""
        if not self.is_over or self.climb is None:
            return None
        return str(self.climb.cause)


def _maps_nothing(engine: EngineFacts) -> bool:
    return engine.is_absent or engine.is_released


def _is_done(pod: GpuPod, target: PodTarget) -> bool:
    rank = pod.trainer
    return (
        rank.is_alive
        and rank.lineage == target.lineage
        and rank.step == target.step
        and rank.exported == target.version
    )
