"""An observation holds what one pass of the loop sees: the job, its recorded status, its pods and their members' facts.

It is a complete, timestamped value: the plan needs nothing else, so a pass can be replayed from a file. `now` and every
moment beside it are seconds of one monotonic clock. `Memory` is what the operator remembers between passes: its loss
in a restart costs patience (deadlines start again), never safety.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from operator import attrgetter

from colocated_rl_api import names
from colocated_rl_api.checkpoint import checkpoint_name
from colocated_rl_api.facts import PodFacts, RolloutFacts, TrainerFacts
from colocated_rl_api.failure import FailureCause
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.ladder import Ladder
from colocated_rl_api.member_wire import Climbed, Endpoint
from colocated_rl_api.names import JobUid, PodUid
from colocated_rl_api.pod_template import QUEUE_LABEL
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_api.seats import ROLLOUT_SEAT, Seats, role_of, seats_for, spare_seats
from colocated_rl_api.wire import Version
from colocated_rl_operator.planner.notices import Notice
from colocated_rl_operator.planner.reasons import Cause

MAX_AVOIDED = 8  # nodes of one job


@dataclass(frozen=True)
class Job:
    """A job is its identity and its spec, as the API server holds them."""

    namespace: str
    name: str
    uid: JobUid
    generation: int
    created: datetime
    spec: ColocatedRLJobSpec
    queue_labels: Mapping[str, str] = field(default_factory=dict)  # of the job itself, for pods that wait in a queue
    token_name: str = ""  # which data token it has, see `names.DATA_TOKEN_ANNOTATION`
    in_force: int | None = None  # replicas of the group; None: as many as the spec asks for

    @property
    def replicas(self) -> int:
        """Return the replicas of the group, which may be others than the spec asks for, see `resizing`."""
        return self.spec.replicas if self.in_force is None else self.in_force

    def led_by(self, climb: Climb | None) -> Job:
        """Return the job with the climb's number of replicas. At rest it has none: the next start has the spec's."""
        return self.sized(None if climb is None or climb.cause.rests else climb.replicas)

    def sized(self, replicas: int | None) -> Job:
        return self if replicas == self.in_force else replace(self, in_force=replicas)

    @property
    def queue(self) -> str:
        """Return the queue that admits the pods, all together; "" for none. The GPU pods' template names it first."""
        return self.spec.pod_templates.gpu.queue or self.queue_labels.get(QUEUE_LABEL, "")

    @cached_property
    def seats(self) -> Seats:
        return self._seats(self.replicas)

    def _seats(self, replicas: int) -> Seats:
        rollout, reference = self.spec.rollout, self.spec.reference
        return seats_for(
            self.spec.mode,
            rollout.placement,
            replicas=replicas,
            engines=rollout.replicas or 0,
            references=(reference and reference.replicas) or 0,
        )

    @property
    def gpu_seats(self) -> tuple[str, ...]:
        """Return the seats of all pods that climb: those with engines, trainers or both."""
        return self.seats.gpu

    @property
    def trainer_seats(self) -> tuple[str, ...]:
        """Return the seats of pods in which trainers have a place."""
        return self.seats.trainers

    @property
    def engine_seats(self) -> tuple[str, ...]:
        """Return the seats of pods in which an engine has a place."""
        return self.seats.engines

    @property
    def serving_seats(self) -> tuple[str, ...]:
        """Return the seats of pods that serve: of an engine over several pods the first."""
        return self.engine_seats[:: self.spec.rollout.engine.pods]

    @cached_property
    def spans(self) -> Mapping[str, tuple[str, ...]]:
        """Return the seats of the pods of each engine over several pods, by the seat of each of them."""
        each, seats = self.spec.rollout.engine.pods, self.engine_seats
        spans = [seats[first : first + each] for first in range(0, len(seats), each)] if each > 1 else []
        return {seat: span for span in spans for seat in span}

    @property
    def reference_seats(self) -> tuple[str, ...]:
        """Return the seats of a reference with devices of its own; none if there are no samples for it to score."""
        return self.seats.references

    @property
    def scoring_seats(self) -> tuple[str, ...]:
        """Return the seats of the pods that score samples for rollout: a reference's own, or those of the engines."""
        return self.seats.engines if self.spec.scores_beside_engines else self.seats.references

    @property
    def lineage_seats(self) -> tuple[str, ...]:
        """Return the seats whose pods form a lineage: the trainers, which start together, or else the engines."""
        return self.trainer_seats or self.engine_seats

    @cached_property
    def asked_seats(self) -> Seats:
        """Return the seats of a group with as many replicas as the spec asks for."""
        return self._seats(self.spec.replicas)

    @cached_property
    def waiting_seats(self) -> tuple[str, ...]:
        """Return the GPU seats that the spec asks for beyond those of the group, the next one first."""
        return tuple(seat for seat in self.asked_seats.gpu if seat not in self.seats.gpu)

    @cached_property
    def spare_seats(self) -> tuple[str, ...]:
        """Return the seats of the pods of `spec.spares`, which hold room for those of the group."""
        return spare_seats(self.trainer_role, self.spec.spares)

    @cached_property
    def seats_beside(self) -> frozenset[str]:
        """Return the seats of pods that are not of the group: those that wait to join it, and spares."""
        return frozenset((*self.waiting_seats, *self.spare_seats))

    @property
    def file_spec(self) -> ColocatedRLJobSpec:
        """Return the spec for the job's file: no pod of a group of several takes itself for the only one."""
        if self.replicas <= self.spec.replicas:
            return self.spec
        return self.spec.model_copy(update={"replicas": self.replicas})

    @property
    def compares_engines(self) -> bool:
        """Return whether new weights serve only once the checksums of several engines are equal."""
        return self.spec.judges_weights and len(self.serving_seats) * self.spec.rollout.engine.per_pod > 1

    @property
    def trainer_role(self) -> str:
        return names.ROLE_TRAINER if self.spec.rollout.is_apart else names.ROLE_GPU

    @cached_property
    def ladder(self) -> Ladder:
        return self.spec.ladder

    @property
    def ranks_per_pod(self) -> int:
        """Return the trainer ranks in each GPU pod: one per device, or one without devices."""
        return max(1, self.spec.gpus.count)

    def claim_name(self, volume: str) -> str:
        """Return the name of a volume's claim. volume: `store`, `checkpoints` or `weights`."""
        return names.claim_name(self.name, self.uid, volume)


@dataclass(frozen=True)
class FailureTally:
    """A tally counts the losses and failures after which the trainers started again, and names the newest's answer."""

    pod_restarts: int = 0
    step_retries: int = 0
    step: int = 0  # that failed last
    tries: int = 0  # its failures in a row
    cause: str = ""
    action: str = ""
    rule: int | None = None  # of the failure policy; None: the usual answer
    pod: str = ""  # in which the newest death of trainers began; "": in several, or it was another failure
    avoids: tuple[str, ...] = ()  # nodes for GPU pods, the newest last
    counted: tuple[int, ...] = ()  # steps of the failures that count against backoffLimit, see `still_counting`

    def tries_at(self, step: int) -> int:
        """Return the failures in a row before the next one, in a climb to `step`: none once an earlier step is done."""
        return self.tries if step <= self.step else 0


@dataclass(frozen=True)
class Climb:
    """A climb is the decision that an epoch stands for. It is in status before a target of it is sent."""

    epoch: int
    step: int
    lineage: int
    group: str  # hash of the UIDs of the pods whose trainers form the lineage; "": no group yet
    cause: Cause
    tally: FailureTally = FailureTally()
    retries: int = 0  # of spec.retries, those that were acted on
    replicas: int | None = None  # of the group; None: as many as the spec asks for

    @property
    def restarts(self) -> int:
        """Return how many failures count against backoffLimit."""
        return len(self.tally.counted)

    @cached_property
    def version(self) -> WeightVersion:
        return WeightVersion(self.step, self.lineage)


def rests(job: Job, climb: Climb | None) -> bool:
    """Return whether no pod is wanted: the job is suspended or queued, or will be once its pods are gone."""
    return job.spec.suspend if climb is None else climb.cause.rests


_how_far = attrgetter("state", "incarnation", "step", "scored", "exported", "saved", "finished")
"""Progress of a rank changes one of these."""


class PodPhase(StrEnum):
    """A pod's phase has the values of core/v1."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Member:
    """A member is one pod of the job. It has `facts` only while it is connected, with the pod's UID confirmed."""

    seat: str
    attempt: int
    name: str
    uid: PodUid
    phase: PodPhase
    created_at: float  # or first seen by this process
    address: str | None = None
    ends_at: float | None = None  # when the grace of its deletion is over; None: not being deleted
    is_ready: bool = False  # its node reports it ready
    is_gated: bool = False  # a queue holds it back from the scheduler
    is_in_gang: bool = False  # it is placed together with the others or not at all
    is_accepted: bool = False  # the kubelet of its node has taken it on
    node: str | None = None  # where it runs, or ran
    fate: FailureCause | None = None  # why it is lost, as the cluster reports; None: not lost, or unknown
    ill_device: str | None = None  # which device its node reports as unhealthy; None: none, or nobody reports
    notice: Notice | None = None  # of its node
    memory_kills: int = 0  # ends of its GPU container, if the last one was for its memory
    trouble: str | None = None  # why its containers don't run: kubelet's message and their last one
    is_starting: bool = False  # a container of it has not passed its startup probe yet
    silent_since: float | None = None  # running, and not heard since: its last word, or when it was first asked
    highest_epoch: int = 0  # that it ever accepted, as it reports
    facts: PodFacts | RolloutFacts | None = None
    _stood: tuple[WeightVersion, Rung] | None = field(default=None, init=False, repr=False, compare=False)
    _trainers: int | None = field(default=None, init=False, repr=False, compare=False)

    def reporting(
        self, facts: PodFacts | RolloutFacts | None, *, highest_epoch: int, silent_since: float | None
    ) -> Member:
        """Return the same pod with its member's present facts.

        Each rung makes a thousand of these, and the constructor would take five times as long.
        """
        found: Member = object.__new__(Member)
        reported = {"facts": facts, "highest_epoch": highest_epoch, "silent_since": silent_since}
        vars(found).update(vars(self), **reported, _stood=None, _trainers=None)
        return found

    @property
    def is_usable(self) -> bool:
        """Return whether the pod has not ended and is not being deleted."""
        return self.ends_at is None and self.phase not in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    @property
    def is_placed(self) -> bool:
        """Return whether there is room for the pod: its node has taken it on, or a queue holds it.

        A node alone shows nothing: the scheduler still gives pods to one that was lost a moment ago.
        """
        return self.phase is not PodPhase.PENDING or self.is_accepted or self.is_gated

    def was_made_after(self, notice: Notice) -> bool:
        """Return whether the pod is another one than the first in its seat, and came after the notice."""
        return self.attempt > 0 and self.created_at > notice.since

    @property
    def holds_room(self) -> bool:
        return self.is_placed and self.phase not in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    @property
    def is_fit(self) -> bool:
        """Return whether its room is good for another pod: neither its node nor a device has a fault that is known."""
        return self.notice is None and self.bad_device is None

    @property
    def answers(self) -> bool:
        """Return whether the member is connected and, if an agent, has found its GPU container.

        Without that container nothing is known of engine and trainers. A member whose container was signalled to end
        does not answer, perhaps before the cluster reports its pod as drained: its trainers end, and other pods'
        trainers with them, and none of that is a failure. A reference is no member: it answers if its node reports it
        ready.
        """
        facts = self.facts
        if facts is None:
            return self.is_reference and self.is_ready
        return not isinstance(facts, PodFacts) or (bool(facts.engines or facts.trainers) and not facts.ending)

    @property
    def scores(self) -> bool:
        """Return whether the reference in the pod is ready: the pod's own work, or a process beside the engines."""
        facts = self.facts
        return (isinstance(facts, PodFacts) and bool(facts.reference_ready)) or (self.is_reference and self.is_ready)

    @property
    def is_reference(self) -> bool:
        """Return whether the pod is of a reference on devices of its own: no member, so without facts and targets."""
        return role_of(self.seat) == names.ROLE_REFERENCE

    @property
    def pod_facts(self) -> PodFacts | None:
        return self.facts if isinstance(self.facts, PodFacts) else None

    @property
    def is_ending(self) -> bool:
        """Return whether a pod that still reports was told to end, or its container was."""
        facts = self.pod_facts
        return facts is not None and (self.ends_at is not None or facts.ending)

    @property
    def bad_device(self) -> str | None:
        """Return which of the pod's devices is bad, as its node or its agent reports."""
        return self.ill_device or (self.facts.bad_device if isinstance(self.facts, PodFacts) else None)

    @cached_property
    def data_port(self) -> Endpoint | None:
        if self.address is None:
            return None
        return Endpoint(pod=self.name, address=self.address, port=names.DATA_PORT)

    @property
    def trainers(self) -> int:
        """Return a digest of the progress of the pod's ranks."""
        digest = self._trainers
        if digest is None:
            ranks = self.pod_facts.trainers if self.pod_facts else ()
            digest = vars(self)["_trainers"] = hash(tuple(map(_how_far, ranks)))
        return digest

    def standing(self, ladder: Ladder, climb: Climb) -> Rung:
        """Return the pod's rung towards the climb's version. Facts from before its epoch are ignored as stale.

        A pod that reported under an older target may still be moving; its answer under this epoch shows where it is.
        """
        facts, stood = self.pod_facts, self._stood
        if facts is None or facts.epoch != climb.epoch:
            return Rung.UNKNOWN
        if stood is None or stood[0] != climb.version:
            stood = vars(self)["_stood"] = (climb.version, ladder.standing(facts, climb.version))
        return stood[1]

    @property
    def rollout_facts(self) -> RolloutFacts | None:
        return self.facts if isinstance(self.facts, RolloutFacts) else None


@dataclass(frozen=True)
class RefusedPod:
    """A pod was not made, and the job is not stalled: the group can do without it, or its name will be free."""

    until: float  # it is tried again then
    message: str


@dataclass(frozen=True)
class Memory:
    """Memory holds moments this process saw. `reached`: when the slowest pod first reached a rung in this epoch."""

    epoch: int = 0
    raised: bool = False  # the epoch was raised by this process
    epoch_at: float = 0.0
    reached: dict[Rung, float] = field(default_factory=dict)
    highest: dict[str, Rung] = field(default_factory=dict)  # where each pod has stood in this epoch, by UID
    progress: int = 0  # digest of what counts as progress
    progress_at: float = 0.0
    was_up: bool = False  # at the last look: a group that rests has no deadline, however long
    heard_since: float | None = None  # since when some member or other is heard; None: none is
    unready_since: float | None = None  # since when not all members answer; None: they do
    awaited_since: float | None = None  # the same, while that may be their fault: podsReadyDeadlineSeconds runs
    unplaced_since: float | None = None  # since when a pod of the lineage is not placed, or room came free for one
    holders: frozenset[str] = frozenset()  # UIDs of pods that hold room and are not of the group
    freed_at: float | None = None  # when the room of one of them came free last
    ending_since: float | None = None  # since when pods of the group end that still report
    last_switch_s: float | None = None  # None: no whole switch seen yet
    climbed: Climbed | None = None  # the newest whole climb
    attempts: dict[str, int] = field(default_factory=dict)  # highest attempt seen, by seat
    made_at: dict[str, float] = field(default_factory=dict)  # when the newest pod was made or first seen, by seat
    stopped: frozenset[str] = frozenset()  # UIDs of members that reported that they stopped
    died: frozenset[str] = frozenset()  # UIDs of pods whose trainers were the first to die
    died_at: float | None = None
    memory_kills: dict[str, int] = field(default_factory=dict)  # of each pod, by UID, when its trainers were started
    lineage: int | None = None  # of those trainers
    gone: frozenset[str] = frozenset()  # UIDs of pods that were lost by then
    group: str = ""  # of the climb, as far as this process saw it whole
    losses: dict[str, FailureCause | None] = field(default_factory=dict)  # of its pods, by UID: why, as reported last


@dataclass(frozen=True)
class Observation:
    now: float
    job: Job
    members: tuple[Member, ...]  # every pod of the job, former attempts too
    climb: Climb | None = None  # as recorded in status
    trained_step: int = 0  # newest step that every rank has finished, as recorded
    served: Version | None = None  # newest version that every engine served at once, as recorded
    is_over: bool = False  # completed or failed, and every member has stopped
    started_at: float | None = None  # or resumed; None while the job is suspended
    finished_at: float | None = None  # completed or failed
    has_elder: bool = False  # an older job of this operator is queued
    outdated: frozenset[str] = frozenset()  # pods of a reference whose keys should be others
    refused: Mapping[str, RefusedPod] = field(default_factory=dict)  # by seat
    hindrance: str = ""  # what kept the job's objects from being made, or its pods from being deleted, the last time
    memory: Memory = Memory()

    @cached_property
    def current(self) -> dict[str, Member]:
        """Return the pod that fills each seat; a seat without a usable pod is absent."""
        usable = sorted((member for member in self.members if member.is_usable), key=lambda member: member.attempt)
        return {member.seat: member for member in usable}

    @cached_property
    def gpu_members(self) -> tuple[Member, ...]:
        """Return the members in the filled GPU seats, by role and replica."""
        return self._in(self.job.gpu_seats)

    @cached_property
    def trainer_members(self) -> tuple[Member, ...]:
        return self._in(self.job.trainer_seats)

    @cached_property
    def serving_members(self) -> tuple[Member, ...]:
        """Return the members with an engine, or with the first part of one."""
        return self._in(self.job.serving_seats)

    @cached_property
    def lineage_members(self) -> tuple[Member, ...]:
        return self._in(self.job.lineage_seats)

    @cached_property
    def reference_members(self) -> tuple[Member, ...]:
        """Return the reference pods that fill a seat."""
        return self._in(self.job.reference_seats)

    @cached_property
    def scoring_members(self) -> tuple[Member, ...]:
        """Return the pods in their seats that score samples for rollout, those too that are not ready for it."""
        return self._in(self.job.scoring_seats)

    @cached_property
    def spare_members(self) -> tuple[Member, ...]:
        return self._in(self.job.spare_seats)

    @cached_property
    def beside(self) -> tuple[Member, ...]:
        """Return the pods that are not of the group and hold room, those too that end."""
        seats = self.job.seats_beside
        return tuple(pod for pod in self.members if pod.seat in seats and pod.holds_room) if seats else ()

    @cached_property
    def ending(self) -> tuple[Member, ...]:
        """Return the pods of the climb's group that were told to end and still report."""
        return tuple(pod for pod in self.members if pod.is_ending and pod.uid in self.memory.losses)

    def following(self, climb: Climb | None) -> Observation:
        """Return the same under another climb, whose group may have another number of replicas."""
        return replace(self, climb=climb, job=self.job.led_by(climb))

    def _in(self, seats: tuple[str, ...]) -> tuple[Member, ...]:
        return tuple(self.current[seat] for seat in seats if seat in self.current)

    def _without(self, seats: tuple[str, ...], is_so: Callable[[Member], bool]) -> tuple[str, ...]:
        """Return the seats without a pod of which it is so."""
        return tuple(seat for seat in seats if seat not in self.current or not is_so(self.current[seat]))

    @cached_property
    def next_lineage(self) -> int:
        """Return a lineage that was never given to a version: beyond the record, which may have been lost or restored
        from before, and beyond all that members know.
        """
        known = [self.climb.lineage if self.climb else 0, self.served.lineage if self.served else 0]
        for facts in [member.pod_facts for member in self.members if member.pod_facts]:
            held = [facts.export, *(each for engine in facts.engines for each in (engine.version, engine.starts_on))]
            for rank in facts.trainers:
                known.append(rank.lineage or 0)
                held += [rank.exported, rank.finished]
            known += [version.lineage for version in held if version is not None]
        return max(known) + 1

    @property
    def rollout_member(self) -> Member | None:
        return self.current.get(ROLLOUT_SEAT)

    @property
    def rollout_facts(self) -> RolloutFacts | None:
        return self.rollout_member.rollout_facts if self.rollout_member else None

    @property
    def restored_from(self) -> str | None:
        """Return CLAIM/DIRECTORY of the former checkpoint that the job began from; None if it is not known, or none."""
        facts, former = self.rollout_facts, self.job.spec.restore_from
        if former is None or facts is None or facts.began_at is None:
            return None
        path = "" if former.path == "." else f"{former.path}/"
        return f"{former.claim_name}/{path}{checkpoint_name(facts.began_at)}"

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """Return the seats without a pod that answers, or if all members do, without one that scores for rollout."""
        if self.all_answer:
            return self._without(self.job.scoring_seats, attrgetter("scores"))
        return self._without(self.job.seats.all, attrgetter("answers"))

    @cached_property
    def unplaced(self) -> tuple[str, ...]:
        """Return the seats of the lineage without a pod that is placed: perhaps there is no room for one."""
        return self._without(self.job.lineage_seats, attrgetter("is_placed"))

    @cached_property
    def all_answer(self) -> bool:
        """Return whether a member that answers fills every seat but a reference's, for which no climb waits."""
        return len(self.gpu_members) == len(self.job.gpu_seats) and (
            self.rollout_facts is not None and all(member.answers for member in self.gpu_members)
        )

    @cached_property
    def hears_anybody(self) -> bool:
        return any(member.facts for member in self.members)

    @cached_property
    def group(self) -> str | None:
        """Return a hash of the UIDs of a lineage's pods in the order of their seats; None while a seat is empty."""
        members = self.lineage_members
        if len(members) != len(self.job.lineage_seats):
            return None
        return hashlib.sha256(" ".join(member.uid for member in members).encode()).hexdigest()[:16]

    @cached_property
    def standings(self) -> dict[str, Rung]:
        """Return the rung at which each GPU pod stands, by pod name."""
        climb, ladder = self.climb, self.job.ladder
        if climb is None:
            return {member.name: Rung.UNKNOWN for member in self.gpu_members}
        return {member.name: member.standing(ladder, climb) for member in self.gpu_members}

    @cached_property
    def slowest(self) -> Rung:
        """Return the lowest rung of the whole group; UNKNOWN while a seat is empty."""
        if len(self.gpu_members) != len(self.job.gpu_seats):
            return Rung.UNKNOWN
        return self.job.ladder.slowest(self.standings.values())

    @property
    def is_up(self) -> bool:
        """Return whether the whole group stands at the top of its ladder."""
        return self.slowest is self.job.ladder.top

    @property
    def recorded_step(self) -> int:
        """Return the step of the newest sealed batch that the rollout controller reports."""
        facts = self.rollout_facts
        return facts.sealed.step if facts and facts.sealed else 0

    @property
    def last_step(self) -> int:
        """Return the step that the job ends with: spec.steps, or an earlier one with which its prompts end."""
        steps, ends = self.job.spec.steps, self.rollout_facts.last_step if self.rollout_facts else None
        return steps if ends is None else min(steps, ends)

    @property
    def is_finished(self) -> bool:
        """Return whether the climb's step is done, as far as the store is concerned."""
        return self.job.ladder.reaches(self.slowest, self.job.ladder.finished_at)

    @property
    def rests(self) -> bool:
        return rests(self.job, self.climb)

    @property
    def is_deaf(self) -> bool:
        """Return whether the fault is the operator's: every pod has answered before and is ready, but none is heard."""
        seats = (*self.job.gpu_seats, ROLLOUT_SEAT)
        return (
            self.climb is not None
            and self.climb.group == self.group
            and not self.hears_anybody
            and all(seat in self.current and self.current[seat].is_ready for seat in seats)
        )

    @property
    def is_queued(self) -> bool:
        """Return whether a queue holds pods back, or a gang waits for room and has none.

        To give up meanwhile would cost the job its place among those that wait.
        """
        pods = self.current.values()
        nodes = [member.node for member in pods if member.is_in_gang]
        return any(member.is_gated for member in pods) or (bool(nodes) and not any(nodes))

    @property
    def highest_epoch(self) -> int:
        """Return the highest epoch in the record and of every member."""
        return max([self.climb.epoch if self.climb else 0, *(member.highest_epoch for member in self.members)])

    @cached_property
    def ranks(self) -> tuple[TrainerFacts, ...]:
        """Return the trainer ranks of all connected GPU pods."""
        return tuple(rank for member in self.gpu_members if member.pod_facts for rank in member.pod_facts.trainers)

    @property
    def saved_step(self) -> int:
        """Return the step of the newest durable checkpoint that a connected rank knows of."""
        return max((rank.saved or 0 for rank in self.ranks), default=0)

    @property
    def mirrored_step(self) -> int | None:
        """Return the newest step that every connected rank has kept in the memory of pods, if each has one."""
        steps = [rank.mirrored for rank in self.ranks if rank.mirrored is not None]
        return min(steps) if steps and len(steps) == len(self.ranks) else None

    @property
    def finished(self) -> WeightVersion | None:
        """Return the version that rank 0 has saved as the job's final model."""
        return next((rank.finished for rank in self.ranks if rank.rank == 0), None)

    @property
    def keeps_all(self) -> bool:
        """Return whether the last checkpoint is durable, and the final model saved if the trainer can save one."""
        if self.climb is None or self.saved_step < self.climb.step:
            return False
        first = next((rank for rank in self.ranks if rank.rank == 0 and rank.is_alive), None)
        return first is not None and (not first.can_finish or first.finished == self.climb.version)

    @property
    def replay_step(self) -> int:
        """Return the oldest step to which a connected rank may go back: batches after it are needed."""
        steps = [rank.saved if rank.replay_from is None else rank.replay_from for rank in self.ranks]
        return min((step for step in steps if step is not None), default=0)

    @property
    def trainer_died(self) -> bool:
        """Return whether a rank of the climb's lineage has ended, other than by an agent for another lineage."""
        return self.climb is not None and any(_has_died(rank, self.climb) for rank in self.ranks)

    @property
    def not_retriable(self) -> str:
        """Return why a rank of the climb's lineage ends and would end again, as it reported; "" if none did.

        A peer may be seen to end before it, with which it had a collective.
        """
        words = (rank.not_retriable for rank in self.ranks if self.climb and rank.lineage == self.climb.lineage)
        return next(filter(None, words), "")

    @property
    def stalled(self) -> tuple[Member, ...]:
        """Return the pods with the ranks that are furthest behind in a step in which no rank gets on any more.

        Empty while any rank does, or has nothing to compare its standstill with, or is of a former lineage: it ends.
        """
        ranks, lineage = self.ranks, self.climb.lineage if self.climb else 0
        if not ranks or any(rank.stalled is None or rank.lineage != lineage for rank in ranks):
            return ()
        least = min(rank.stalled or 0 for rank in ranks)
        return tuple(
            member
            for member in self.trainer_members
            if member.pod_facts and any(rank.stalled == least for rank in member.pod_facts.trainers)
        )

    @cached_property
    def noticed(self) -> tuple[Member, ...]:
        """Return the GPU pods whose nodes give notice.

        Without one that was made since and came to its node though that is avoided: no other had room. Of more nodes
        than a job avoids, the first would be forgotten for the last: then a pod moves once for a notice.
        """
        avoids = self.climb.tally.avoids if self.climb else ()
        has_all = len(avoids) == MAX_AVOIDED
        return tuple(
            member
            for member in self.gpu_members
            if member.notice and not (member.was_made_after(member.notice) and (has_all or member.node in avoids))
        )

    @property
    def is_warned(self) -> bool:
        """Return whether a pod with trainers is about to go with its node: what they have done is saved before."""
        return any(
            member.notice and member.notice.cause is FailureCause.POD_EVICTED and member.seat in self.job.trainer_seats
            for member in self.noticed
        )

    @property
    def outgrown(self) -> list[str]:
        """Return the pods with a trainer that has gained more host memory than the job allows."""
        limit = self.job.spec.failure_policy.max_growth_bytes
        if limit is None:
            return []
        found = ((member.name, member.pod_facts) for member in self.trainer_members)
        return [name for name, facts in found if facts and any(rank.grown_bytes > limit for rank in facts.trainers)]

    @property
    def dead(self) -> tuple[Member, ...]:
        """Return the pods of ranks of the climb's lineage that have died."""
        climb = self.climb
        return tuple(
            member
            for member in self.gpu_members
            if climb and member.pod_facts and any(_has_died(rank, climb) for rank in member.pod_facts.trainers)
        )

    def has_stopped(self, member: Member) -> bool:
        """Return whether the member has reported that it stopped, perhaps before its connection ended."""
        return member.uid in self.memory.stopped or (member.facts is not None and member.facts.stopped)

    @property
    def memory_kills(self) -> dict[str, int]:
        """Return the memory kills of each pod that had any, by UID."""
        return {member.uid: member.memory_kills for member in self.gpu_members if member.memory_kills}


def _has_died(rank: TrainerFacts, climb: Climb) -> bool:
    return not rank.is_alive and rank.lineage == climb.lineage and rank.exit_code is not None


def remember(seen: Observation) -> Observation:
    """Return the observation with its memory brought up to its `now`."""
    memory, epoch = seen.memory, seen.climb.epoch if seen.climb else 0
    if epoch != memory.epoch:
        memory = in_epoch(seen.climb, seen, memory, now=seen.now)
    for bring_up in (_remember_deaths, _remember_losses, _remember_rungs, _remember_absence, _remember_pods):
        memory = bring_up(seen, memory)
    found = replace(seen, memory=memory)
    vars(found).update({name: value for name, value in vars(seen).items() if name not in vars(found)})
    return found  # keep values derived from the members: memory changes none of them


def in_epoch(climb: Climb | None, seen: Observation, memory: Memory, *, now: float) -> Memory:
    """Return the memory as a climb's epoch starts: no rung is reached in it, and earlier failures are answered."""
    epoch, lineage = (climb.epoch, climb.lineage) if climb else (0, None)
    gone = frozenset(member.uid for member in seen.members if not member.is_usable)
    memory = replace(memory, epoch=epoch, epoch_at=now, reached={}, highest={}, progress_at=now)
    if lineage != memory.lineage:  # kubelet may tell of an end in one epoch, and the agent of the deaths in the next
        memory = replace(memory, lineage=lineage, memory_kills=seen.memory_kills)
    return replace(memory, gone=gone)


def _remember_deaths(seen: Observation, memory: Memory) -> Memory:
    """Record the pods whose trainers died first, which are at fault: a death breaks all other ranks' collectives."""
    dead = seen.dead
    if dead and memory.died_at is None:
        return replace(memory, died=frozenset(member.uid for member in dead), died_at=seen.now)
    if not dead and seen.all_answer and memory.died_at is not None:
        return replace(memory, died=frozenset(), died_at=None)
    return memory


def _remember_losses(seen: Observation, memory: Memory) -> Memory:
    """Record why pods of the group are lost: most of them are gone by the time that the group is whole again.

    A recorded cause stays: a failed pod may be deleted afterwards, and its deletion reports no cause.
    """
    group = seen.climb.group if seen.climb else ""
    if group and seen.group == group:
        if memory.group == group:
            return memory
        return replace(memory, group=group, losses=dict.fromkeys(pod.uid for pod in seen.lineage_members))
    fates: dict[str, FailureCause | None]
    fates = {pod.uid: pod.fate for pod in seen.members if pod.fate is not None and pod.uid in memory.losses}
    return replace(memory, losses=memory.losses | fates) if fates else memory


def _remember_rungs(seen: Observation, memory: Memory) -> Memory:
    """Record where each pod and the group have stood in this epoch, and when anything got on last."""
    now, ladder, highest = seen.now, seen.job.ladder, dict[str, Rung]()
    for member in seen.gpu_members:
        rung, before = seen.standings[member.name], memory.highest.get(member.uid, Rung.UNKNOWN)
        highest[member.uid] = rung if rung is before else max(before, rung, key=ladder.place)
    progress = _progress(seen, highest)
    has_fallen = memory.was_up and not seen.is_up  # its deadline begins now
    progress_at = memory.progress_at if progress == memory.progress and not has_fallen else now
    stood = [rung for rung in ladder.rungs if ladder.reaches(seen.slowest, rung) or rung in memory.reached]
    reached = {rung: memory.reached.get(rung, now) for rung in stood}
    climbed, last_switch_s = _climbed(seen, memory, reached), _last_switch_s(seen, memory, reached)
    memory = replace(memory, climbed=climbed, last_switch_s=last_switch_s, was_up=seen.is_up)
    return replace(memory, reached=reached, highest=highest, progress=progress, progress_at=progress_at)


def _remember_absence(seen: Observation, memory: Memory) -> Memory:
    """Record since when members are awaited. Their deadline does not run while the operator or a queue is at fault."""
    heard_since = seen.now if memory.heard_since is None else memory.heard_since
    memory = replace(memory, heard_since=heard_since if seen.hears_anybody else None)
    ending_since = seen.now if memory.ending_since is None else memory.ending_since
    memory = replace(memory, ending_since=ending_since if seen.ending else None)
    holders = frozenset(pod.uid for pod in seen.beside)
    if memory.holders - holders:  # the scheduler has not given it to anybody yet
        memory = replace(memory, freed_at=seen.now, unplaced_since=None)
    unplaced_since = seen.now if memory.unplaced_since is None else memory.unplaced_since
    is_short = bool(seen.unplaced) and not seen.rests
    memory = replace(memory, holders=holders, unplaced_since=unplaced_since if is_short else None)
    if not seen.absent or seen.rests:
        return replace(memory, unready_since=None, awaited_since=None)
    unready_since = seen.now if memory.unready_since is None else memory.unready_since
    begins = memory.awaited_since is None or seen.is_deaf or seen.is_queued
    return replace(memory, unready_since=unready_since, awaited_since=seen.now if begins else memory.awaited_since)


def _remember_pods(seen: Observation, memory: Memory) -> Memory:
    """Record the newest pod of each seat, and which members have stopped."""
    attempts, made_at = dict(memory.attempts), dict(memory.made_at)
    for member in seen.members:
        attempts[member.seat] = max(member.attempt, attempts.get(member.seat, 0))
        made_at[member.seat] = max(member.created_at, made_at.get(member.seat, member.created_at))
    stopped = frozenset(member.uid for member in seen.members if seen.has_stopped(member))
    return replace(memory, attempts=attempts, made_at=made_at, stopped=stopped)


def with_pod(memory: Memory, seat: str, attempt: int, *, at: float) -> Memory:
    """Return the memory with a pod that was made, even if it is gone before anybody sees it."""
    highest = max(attempt, memory.attempts.get(seat, 0))
    return replace(memory, attempts=memory.attempts | {seat: highest}, made_at=memory.made_at | {seat: at})


def _climbed(seen: Observation, memory: Memory, reached: dict[Rung, float]) -> Climbed | None:
    """Return the newest whole climb. A rung that was seen together with the one before took no time.

    A climb that did not begin at the top has no times: nobody saw all of it.
    """
    climb, top = seen.climb, seen.job.ladder.top
    if climb is None or top not in reached or top in memory.reached:
        return memory.climbed
    moments = (memory.epoch_at, *reached.values())
    took_s = {str(rung): round(end - begin, 4) for rung, (begin, end) in zip(reached, pairwise(moments), strict=True)}
    if climb.cause is not Cause.NEXT_STEP or not memory.raised:
        took_s = {}
    measured = (rank.mismatch for rank in seen.ranks if rank.step == climb.step and rank.mismatch is not None)
    return Climbed(epoch=climb.epoch, step=climb.step, took_s=took_s, mismatch=next(measured, None))


def _last_switch_s(seen: Observation, memory: Memory, reached: dict[Rung, float]) -> float | None:
    """Return the seconds of the newest whole switch: from the raise of the epoch until every gate is open, less those
    of waiting for trainers.
    """
    is_switch = seen.climb is not None and seen.climb.cause is Cause.NEXT_STEP
    if not is_switch or Rung.SERVING not in reached or Rung.SERVING in memory.reached:
        return memory.last_switch_s
    ladder = seen.job.ladder
    training_s = sum(reached[ladder.next_barrier(rung)] - reached[rung] for rung in ladder.training)
    return reached[Rung.SERVING] - memory.epoch_at - training_s


def _progress(seen: Observation, highest: dict[str, Rung]) -> int:
    """Return a digest that changes when a pod stands higher than ever in this epoch, or when a trainer changes.

    A durable checkpoint is progress too. An engine that restarts again and again is none: only what it leads to is.
    """
    return hash(
        tuple(
            (member.uid, highest[member.uid], member.trainers)
            for member in seen.gpu_members
            if member.facts is not None
        )
    )
