"""A job as one value, and every value that can follow: the real plan, action table, journal and fence.

Nothing moves by itself. `JobModel.successors` lists what may happen next, to anybody: a target or a report that
arrives, an agent's next action, a collective that fails, and, as long as they last, a death or a suspension; operator
and rollout controller answer at once to what they hear, which may be long ago. What an operator knows of a pod is some
report since the newest one that it heard, because a report arrives when it arrives; a target that was not delivered is
overtaken by the next one. After a take-over the old leader is still about, with a plan in its hands: its targets may
arrive at any time, its raise of the epoch may be tried.

Each move is checked, against the truth and not against what anybody believes:

* I1 no trainer is on a device while its engine maps memory, and nobody's memory comes back while one is
* I2 nobody goes beyond a barrier before every pod has stood at it in the same epoch, and no target asks for it
* I3 a batch is trained in order, while the store has it, and what the store was told is never taken back
* I5 an epoch stands for one decision, and a target of an older one changes nothing
* I6 nothing is released, resumed or updated on top of a call whose outcome nobody knows

Time passes only when nothing else can happen: then the plan is asked again at the moment that it named.

Two things are left out, because what they would add differs in nothing that is checked (`in_all_orders` looks at them
all the same, and a test compares):

* *Which pod is which.* Pods of a role are made at once and do the same, but for rank 0, which alone leaves the job's
  model and at whose address trainers meet. Until one of them would do something else with that rank, or is lost,
  nothing depends on who has it: so nobody has it yet, and then any of them may turn out to be the one, in the first
  seat. All others may change places, in the order of their attempts: the plan knows a seat by its pod's UID, and a
  group by the UIDs of its pods, which is another whenever one is made again. Not so under a failure policy: it names
  nodes, and answers failures in the order of seats.
* *Who ends first.* Once all steps are done and that is on record, nothing that one pod does, hears or suffers changes
  what another may, and the operator waits for all: any order can be sorted into one in which they end one by one, with
  as many deaths. Not so while an operator may die, who is everybody's, or where pods share a volume.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import chain, islice
from typing import Any, NamedTuple

from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.settings import kept_tags, rules_for
from colocated_rl_api import names
from colocated_rl_api.facts import (
    GateFacts,
    PodFacts,
    RolloutFacts,
    SealedBatch,
    TrainerState,
)
from colocated_rl_api.failure import FailureCause
from colocated_rl_api.job import Verify
from colocated_rl_api.ladder import Ladder
from colocated_rl_api.member_wire import Goal, RolloutTarget
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_api.seats import ROLLOUT_SEAT, is_spare, role_of
from colocated_rl_operator.planner.actions import CreatePod, PodAction
from colocated_rl_operator.planner.notices import Notice
from colocated_rl_operator.planner.observation import (
    Climb,
    Job,
    Member,
    Memory,
    Observation,
    PodPhase,
    rests,
)
from colocated_rl_operator.planner.plan import Plan, plan
from colocated_rl_operator.planner.reasons import Cause
from fakes.model_moves import (
    Durable,
    acted,
    carried_out,
    is_alone,
    must_close_late,
    must_cost_no_step,
    must_have_stood,
    must_rise_together,
    without_peers,
)
from fakes.model_pod import (
    CALLS,
    FIRST,
    OTHER,
    ModelPod,
    ModelRank,
    Target,
    admit,
    agent_restarts,
    called_unheard,
    check,
    chosen,
    facts_of,
    failed,
    last_barrier,
    must,
    past_deadline,
    standing_of,
)
from fakes.values import Hashed, Values

MORTAL = ("agent", "connection", "engine", "operator", "pod", "trainer")
FAILING = ("call", "deadline")  # of an agent: as a death, it costs an engine or a trainer
FAULTS = (*MORTAL, *FAILING)
LEAVING = "node"  # which gives notice that it is about to go, and goes or stays
ROOMLESS = "room"  # for a pod: its node is lost, for as long as there is no other
SIGNALLED = "container"  # of a pod that is drained: it ends by itself, and may save its step before
GROWING = "memory"  # of a trainer, which is no fault, and matters under failurePolicy.maxTrainerGrowth alone
CLOSED = GateFacts(open=False, settled=True)  # of a pod that does nothing
WAITS = 4  # one after another, at most: a deadline, and the back-offs that follow it


class _Seen(NamedTuple):
    role: str
    epoch: int
    durable: int
    rung: Rung
    version: WeightVersion | None
    rank: ModelRank
    stopped: bool
    rejected: WeightVersion | None
    awaited: bool = False  # an engine beside others starts again
    ending: bool = False  # its container was signalled to end


class Seen(Hashed, _Seen):
    """A Seen is a report as far as a plan may depend on it, and the epoch that its pod would never go back from.

    Facts count under the epoch they were reported in, and an epoch stands for one version: of gate, engine and export
    it is the rung that matters, towards the target that the pod holds.
    """

    def as_first(self) -> Seen:
        """The same of a pod with rank 0."""
        return self._replace(rank=self.rank.as_first())


class ModelRollout(NamedTuple):
    """The rollout controller, which does not die here, and its store."""

    goal: Goal = Goal.CLIMB
    target_trained: int = 0
    target_saved: int = 0
    sealed: int = 0
    trained: int = 0
    dropped: int = 0  # batches up to here
    epoch: int = 0
    stopped: bool = False
    attempt: int = 0
    there: bool = True  # its pod


class ModelSpare(NamedTuple):
    """A Spare is a pod that holds room and computes nothing. Its agent stops when it is told to, and moves never."""

    seat: str
    attempt: int = -1
    there: bool = False
    stopped: bool = False


class ModelOperator(NamedTuple):
    """An Operator holds the record in the job's status, and what the leading process has heard and sent."""

    climb: Climb | None = None
    trained_step: int = 0
    served: WeightVersion | None = None
    is_over: bool = False
    raised: bool = False
    known: tuple[Seen | None, ...] = ()
    sent: tuple[Target | None, ...] = ()

    def lost(self, index: int) -> ModelOperator:
        """The connection to a pod is gone."""
        return self._replace(known=put(self.known, index, None), sent=put(self.sent, index, None))


class ModelState(NamedTuple):
    pods: tuple[ModelPod, ...]
    rollout: ModelRollout
    operator: ModelOperator
    saved: int = 0  # newest durable checkpoint
    deaths: int = 0  # that may still come
    stale: tuple[Target | None, ...] = ()  # of a leader that is none any more, on their way
    sleeper: Climb | None = None  # a raise that it would like to record
    decisions: tuple[Climb, ...] = ()  # of the newest epochs in which a target was sent
    suspend: bool = False  # spec.suspend
    suspensions: int = 0  # that may still come
    spec_retries: int = 0
    retries: int = 0  # that may still come
    replicas: int = 0  # spec.replicas
    resizes: int = 0  # changes of it that may still come
    lost: int = 0  # nodes, of as many as there are pods
    spares: tuple[ModelSpare, ...] = ()
    unplaced: tuple[str, ...] = ()  # seats with pods that no node has taken on, the oldest first; of a job with spares

    def with_pod(self, index: int, pod: ModelPod) -> ModelState:
        pods = put(self.pods, index, pod)
        oldest = min((each.epoch for each in pods if each.alive), default=0)  # nobody acts under an older one any more
        if any(each.stood and each.stood[0][0] < oldest for each in pods):
            pods = tuple(each._replace(stood=tuple(item for item in each.stood if item[0] >= oldest)) for each in pods)
        return self._replace(pods=pods)


class _ShownRank(NamedTuple):
    is_alive: bool
    lineage: int | None
    step: int | None
    can_mirror: bool
    mirrored: int | None


class Shown(NamedTuple):
    """A Shown is the part of a pod that others see, and an operator beside its report. Reading more raises an error."""

    attempt: int
    alive: bool
    there: bool
    epoch: int
    gate_open: bool
    stood: tuple[tuple[int, Rung], ...]
    ladder: Ladder
    exports: frozenset[WeightVersion] | None
    is_first: bool
    rank: _ShownRank
    leaves: bool
    parts: tuple[tuple[str, int], ...]
    about_to_keep: tuple[do.Action, ...]

    @classmethod
    def of(cls, pod: ModelPod) -> Shown:
        rank = _ShownRank(pod.rank.is_alive, pod.rank.lineage, pod.rank.step, pod.rank.can_mirror, pod.rank.mirrored)
        keeping = (pod.parts, pod.about_to_keep)
        place = (pod.attempt, pod.alive, pod.there, pod.epoch, pod.gate_open)
        return cls(*place, pod.stood, pod.ladder, pod.exports, pod.is_first, rank, pod.leaves, *keeping)


class Decided(NamedTuple):
    """A plan, its targets as they are sent, and where the slowest of those stands whose standing it knows."""

    plan: Plan
    rollout: RolloutTarget | None
    targets: tuple[tuple[int, Target], ...]
    slowest: Rung
    stops_spares: bool


class JobModel:
    """deaths, suspensions, retries, resizes: how many may happen. of: what may die or fail. in_all_orders: nothing is
    left out, as where the seats of a group are not always the same.

    The others are what a seeded defect leaves out.
    """

    def __init__(
        self,
        job: Job,
        *,
        deaths: int,
        of: Collection[str] = MORTAL,
        suspensions: int = 0,
        retries: int = 0,
        resizes: int = 0,
        in_all_orders: bool = False,
        has_journal: bool = True,
        has_fence: bool = True,
        has_precondition: bool = True,
    ) -> None:
        probes = job.spec.judges_weights
        alone = job.spec.weight_sync.model_copy(
            update={"verify": Verify.VERSION}
        )  # engines are not compared, but probed
        job = replace(job, spec=job.spec.model_copy(update={"weight_sync": alone}))
        self.job = job
        self._rules = {role: replace(rules_for(job.spec, role), probes=probes) for role in names.GPU_ROLES}
        self._keeps = kept_tags(job.spec.rollout.offload)
        self.deaths = deaths
        self.mortal = of
        self.suspensions = suspensions
        self.retries = retries
        self.resizes = resizes
        self._is_resized = bool(resizes) or job.spec.elastic_policy is not None
        self._mirrors = job.spec.checkpoint.in_memory is not None
        self._spares = tuple(map(ModelSpare, job.spare_seats))
        self._nodes = len(job.gpu_seats) + len(self._spares)
        is_whole_alone = self._spares and job.spec.elastic_policy is None  # then the job is hopeless with fewer
        self._least_nodes = len(job.gpu_seats) if is_whole_alone else 1
        in_all_orders = bool(in_all_orders or self._is_resized or self._mirrors or self._spares)  # parts are of seats
        self.in_all_orders = in_all_orders
        self.may_swap = not (in_all_orders or job.spec.failure_policy.rules or LEAVING in of or SIGNALLED in of)
        self._job_as = cache(
            lambda suspend, retries, replicas, climb: replace(
                job, spec=job.spec.model_copy(update={"suspend": suspend, "retries": retries, "replicas": replicas})
            ).led_by(climb)
        )
        self.has_journal = has_journal
        self.has_fence = has_fence
        self.has_precondition = has_precondition
        self.plans = 0  # that were made
        self._admit = cache(partial(admit, has_fence=has_fence))  # of a pod that was seen before, all is known
        self._check, self._act, self._standing_of = cache(check), cache(acted), cache(standing_of)
        self._restart, self._called_unheard = (
            cache(agent_restarts),
            cache(partial(called_unheard, has_journal=has_journal)),
        )
        self._failed = cache(lambda pod, action: tuple(failed(pod, action, has_journal=has_journal)))
        self._past_deadline = cache(lambda pod: tuple(past_deadline(pod)))
        self._plans: dict[object, Decided] = {}
        self._climbs, self._reported = Values[Climb | None](), Values[Seen]()
        self._actions: dict[ModelPod, tuple[do.Action, ...]] = {}
        self._seen: dict[ModelPod, Seen] = {}
        self._reports: dict[Seen, PodFacts] = {}  # one that says just that

    def start(self) -> ModelState:
        """Every pod runs, and nobody knows anybody."""
        nobody = (None,) * len(self.job.gpu_seats)
        pods = tuple(self._new_pod(seat, OTHER) for seat in self.job.gpu_seats)
        if not self.may_swap or self._shares_a_volume:
            pods = first_of(pods, 0)
        return ModelState(
            pods,
            ModelRollout(),
            ModelOperator(known=nobody, sent=nobody),
            deaths=self.deaths,
            stale=nobody,
            suspensions=self.suspensions,
            retries=self.retries,
            replicas=self.job.spec.replicas,
            resizes=self.resizes,
            spares=self._spares,
        )

    @property
    def _shares_a_volume(self) -> bool:
        """Return whether pods share a volume, to which the pod with rank 0 writes."""
        return self.job.spec.placement.shares_weights

    def _new_pod(self, seat: str, rank: ModelRank) -> ModelPod:
        writes = self._shares_a_volume and seat == self.job.trainer_seats[0]
        exports = frozenset[WeightVersion]() if writes else None
        role = role_of(seat)
        return ModelPod(rules=self._rules[role], keeps=self._keeps, role=role, exports=exports, rank=rank)

    def successors(self, state: ModelState) -> list[tuple[str, ModelState]]:
        """Return the possible moves, each with the state that follows. Raises Broken."""
        if state.operator.is_over:
            return self._as_values(self._retried(state))
        if apart := self._first_chosen(state):
            return apart
        if not (self.end_alone(state) and (moves := self._moves_one_by_one(state))):
            moves = [*self._moves(state), *self._befalls(state)]
        return self._as_values(moves)

    def moves(self, state: ModelState) -> list[tuple[str, ModelState]]:
        """Return the moves in which nobody dies, and no person takes part."""
        if state.operator.is_over:
            return []
        return self._first_chosen(state) or self._as_values(self._moves(state))

    def moves_of(self, state: ModelState, index: int) -> list[tuple[str, ModelState]]:
        """Return the moves of one pod, which depend only on what other pods show."""
        return self._as_values(self._moves_of(state, index))

    def deaths_of(self, state: ModelState, index: int) -> list[tuple[str, ModelState]]:
        """Likewise."""
        return self._as_values(self._deaths(state, index))

    def befalls_all(self, state: ModelState) -> list[tuple[str, ModelState]]:
        """Return the events that belong to no pod."""
        return self._as_values(self._befalls_all(state))

    def is_quiet(self, state: ModelState) -> bool:
        """Nothing happens at once, which depends on what pods show and operator and rollout controller know alone."""
        return not self._moves_at_once(state)

    def _moves(self, state: ModelState) -> list[tuple[str, ModelState]]:
        found = self._moves_at_once(state)
        if not found:
            found = [move for index in range(len(state.pods)) for move in self._moves_of(state, index)]
            if state.sleeper is not None:
                found.append(("old leader", decided_on(state._replace(sleeper=None), state.sleeper)))
        return found or [*self._operator_passes(state, late=True)]

    def _moves_at_once(self, state: ModelState) -> list[tuple[str, ModelState]]:
        """Nobody gains by waiting."""
        return [*islice(chain(self._rollout_acts(state), self._operator_passes(state, late=False)), 1)]

    def _moves_of(self, state: ModelState, index: int) -> Iterator[tuple[str, ModelState]]:
        """Yield the moves of one pod."""
        yield from self._targets_arrive(state, index)
        yield from self._reports_arrive(state, index)
        yield from self._agent_acts(state, index)

    def end_alone(self, state: ModelState) -> bool:
        """Pods do, each for itself: see above."""
        climb, is_settled = state.operator.climb, not (state.suspend or state.suspensions or state.sleeper)
        has_ended = climb is not None and climb.cause is Cause.ALL_STEPS_DONE
        is_led = not (state.deaths and "operator" in self.mortal)
        return has_ended and is_led and is_settled and not (self.in_all_orders or self._shares_a_volume)

    def _moves_one_by_one(self, state: ModelState) -> list[tuple[str, ModelState]]:
        """Return the moves of the first pod that has any; pods that have none may still die."""
        if found := self._moves_at_once(state):
            return found + self._befalls(state)
        for index in range(len(state.pods)):
            moves = [*self._moves_of(state, index)]
            found += [*moves, *self._deaths(state, index)]
            if moves:
                return found
        return []

    def _befalls(self, state: ModelState) -> list[tuple[str, ModelState]]:
        deaths = [death for index in range(len(state.pods)) for death in self._deaths(state, index)]
        return deaths + self._befalls_all(state)

    def _befalls_all(self, state: ModelState) -> list[tuple[str, ModelState]]:
        found = []
        if state.deaths and state.operator.climb is not None and "operator" in self.mortal:
            found.append(("operator dies", self._next_leader(state._replace(deaths=state.deaths - 1))))
        if state.suspend:
            found.append(("resumed", state._replace(suspend=False)))
        elif state.suspensions:
            found.append(("suspended", state._replace(suspend=True, suspensions=state.suspensions - 1)))
        if state.lost:
            found.append(("node is back", self._placed(state._replace(lost=0))))
        if state.deaths and ROOMLESS in self.mortal and self._may_lose_a_node(state):
            lost = state._replace(deaths=state.deaths - 1, lost=state.lost + 1)
            found += [(f"room of {each.seat} is lost", without_spare(lost, each)) for each in running_spares(state)]
        if state.resizes and state.operator.climb is not None:
            others = (size for size in range(1, len(state.pods) + 1) if size != state.replicas)
            found += [(f"{n} asked for", state._replace(replicas=n, resizes=state.resizes - 1)) for n in others]
        return found

    def _retried(self, state: ModelState) -> Iterator[tuple[str, ModelState]]:
        """A person tells a failed job to go on."""
        climb = state.operator.climb
        if state.retries and climb is not None and climb.cause.is_failure:
            retried = state._replace(spec_retries=state.spec_retries + 1, retries=state.retries - 1)
            yield "retried", self._carry_out(retried, self._plan(retried, late=False))

    def _as_values(self, found: Iterable[tuple[str, ModelState]]) -> list[tuple[str, ModelState]]:
        return [(what, self._without_the_refused(after)) for what, after in found]

    def _first_chosen(self, state: ModelState) -> list[tuple[str, ModelState]]:
        """Whoever may have rank 0, once that makes a difference; else nothing."""
        pods = state.pods
        if pods[0].is_first or not any(map(self.tells_apart, pods)):
            return []
        return [(f"{index} has rank 0", with_first(state, index)) for index in range(len(pods))]

    def tells_apart(self, pod: ModelPod) -> bool:
        """It is lost, or would do something else if it had rank 0."""
        return not pod.alive or self._choices(pod) != self._choices(pod.as_first())

    def _without_the_refused(self, state: ModelState) -> ModelState:
        """Old targets that would change nothing have arrived, whenever they do."""
        if not self.has_fence or not any(state.stale):
            return state
        stale = tuple(
            old if old and pod.alive and old.epoch >= pod.durable.epoch and old != pod.target else None
            for old, pod in zip(state.stale, state.pods, strict=True)
        )
        return state._replace(stale=stale)

    # ----------------------------------------------------------------------------------------------------- the operator
    def _operator_passes(self, state: ModelState, *, late: bool) -> Iterator[tuple[str, ModelState]]:
        after = self._carry_out(state, self._plan(state, late=late))
        if after is not state and after != state:
            yield "operator, late" if late else "operator", after

    def _plan(self, state: ModelState, *, late: bool) -> Decided:
        operator, places = state.operator, tuple((pod.attempt, pod.alive, pod.there, pod.leaves) for pod in state.pods)
        climb = self._climbs.number(operator.climb)
        asked = (state.suspend, state.spec_retries, state.replicas)
        key = (climb, operator[1:-1], state.rollout, places, late, *asked, state.spares, state.unplaced)
        decided = self._plans.get(key)
        if decided is None:
            self.plans += 1
            seen = self.observe(state)
            made = plan(seen)
            for _ in range(WAITS if late else 0):
                if made.raises or made.wake_at is None:
                    break
                seen = replace(seen, now=made.wake_at)
                made = plan(seen)
                if made.pods:
                    break
            decided = self._plans[key] = self._as_sent(made)
        return decided

    def _as_sent(self, made: Plan) -> Decided:
        rollout, targets, stops_spares = None, [], False
        for name, target in made.targets.items():
            if is_spare(name_of_seat(name)):
                must(target.goal is Goal.STOP, "a spare is sent up the ladder")
                stops_spares = True
                continue
            is_recorded = made.climb is not None and target.epoch == made.climb.epoch
            must(is_recorded, "a target of an epoch that is not recorded")
            if isinstance(target, RolloutTarget):
                rollout = target
            else:
                targets.append((self._place_of(name), Target.of(target)))
        slowest = min(made.standings.values(), key=self.job.ladder.place, default=Rung.UNKNOWN)
        made = replace(made, climb=self._climbs.kept(made.climb))
        return Decided(made, rollout, tuple(targets), slowest, stops_spares)

    def observe(self, state: ModelState) -> Observation:
        operator = state.operator
        members = [
            Member(
                seat=seat,
                attempt=pod.attempt,
                name=f"{seat}-{pod.attempt}",
                uid=names.PodUid(f"{seat}-{pod.attempt}"),
                phase=_phase(state, seat, is_alive=pod.alive),
                created_at=-1000.0,
                address=f"10.0.0.{index}",
                node=f"node-{index}",
                notice=Notice(FailureCause.POD_EVICTED, "a taint") if pod.leaves else None,
                fate=None if pod.alive or seat in state.unplaced else FailureCause.POD_FAILED,
                silent_since=None if known else 0.0,
                highest_epoch=known.durable if known else 0,
                facts=self._reports[known] if known else None,
            )
            for index, (seat, pod, known) in enumerate(zip(self.job.gpu_seats, state.pods, operator.known, strict=True))
            if pod.there
        ]
        members += [_spare_member(state, spare) for spare in state.spares if spare.there]
        rollout = state.rollout
        batch = SealedBatch(step=rollout.sealed, groups=1, samples=2, loss_tokens=1) if rollout.sealed else None
        facts = RolloutFacts(
            epoch=rollout.epoch,
            sealed=batch,
            trained_step=rollout.trained,
            stopped=rollout.stopped,
            deals_anew=True,
        )
        if rollout.there:
            name = f"rollout-{rollout.attempt}"
            running = (PodPhase.RUNNING, -1000.0)
            members.append(
                Member(
                    ROLLOUT_SEAT, rollout.attempt, name, names.PodUid(name), *running, address="10.0.0.9", facts=facts
                )
            )
        job = self._job_as(state.suspend, state.spec_retries, state.replicas, operator.climb)
        group, is_at_rest = self._size(state, operator.climb), rests(job, operator.climb)
        is_awaited = (None in operator.known[:group] or not rollout.there) and not is_at_rest
        is_unplaced = not all(pod.there and pod.alive for pod in state.pods[:group]) and not is_at_rest
        memory = Memory(
            epoch=operator.climb.epoch if operator.climb else 0,
            raised=operator.raised,
            reached={job.ladder.top: 0.0},  # when it is reached, its time has been
            unready_since=0.0 if is_awaited else None,
            awaited_since=0.0 if is_awaited else None,
            unplaced_since=0.0 if is_unplaced else None,
            ending_since=0.0 if any(known and known.ending for known in operator.known) else None,
            attempts={seat: pod.attempt for seat, pod in zip(self.job.gpu_seats, state.pods, strict=True)}
            | {ROLLOUT_SEAT: rollout.attempt}
            | {spare.seat: spare.attempt for spare in state.spares if spare.attempt >= 0},
        )
        memory = replace(memory, made_at=dict.fromkeys(memory.attempts, -1000.0))
        recorded = (operator.climb, operator.trained_step, operator.served, operator.is_over)
        seen = Observation(0.0, job, tuple(members), *recorded, memory=memory)
        if dead := frozenset(member.uid for member in seen.dead):
            seen = replace(seen, memory=replace(memory, died=dead, died_at=0.0))
        return seen

    def _carry_out(self, state: ModelState, decided: Decided) -> ModelState:
        """Record, send, make pods, report. The same state, if all of it has been done."""
        before, made = state.operator, decided.plan
        operator = self._record(before, made)
        must_cost_no_step(made, before=before.climb, saved=state.saved)
        state = self._send(state, operator, decided)
        if decided.stops_spares and running_spares(state):
            state = state._replace(spares=tuple(each._replace(stopped=each.there) for each in state.spares))
        if made.pods:
            state = self._make_pods(state, made)
        operator, climb, ladder = state.operator, state.operator.climb, self.job.ladder
        trained, served = operator.trained_step, operator.served
        if rests(self.job, climb):
            served = None
        if climb is not None and not made.raises and len(made.standings) == self._size(state, climb):
            if ladder.reaches(decided.slowest, ladder.finished_at):
                trained = max(trained, climb.step)
            if decided.slowest is ladder.top:
                served = climb.version
        if (trained, served, made.is_over) != (operator.trained_step, operator.served, operator.is_over):
            operator = operator._replace(trained_step=trained, served=served, is_over=made.is_over)
        return state if operator is state.operator else state._replace(operator=operator)

    def _record(self, operator: ModelOperator, made: Plan) -> ModelOperator:
        if not made.raises:
            must(made.climb == operator.climb, "the climb changed without a new epoch")
            return operator
        assert made.climb is not None
        gives_up = made.climb.cause is Cause.PODS_NOT_READY
        must(not (gives_up and self._spares), "a job gives its devices back, and a spare had room for its pod")
        must(made.climb.epoch > (operator.climb.epoch if operator.climb else 0), "a raise that is none")
        ends = Cause.ALL_STEPS_DONE is made.climb.cause is not (operator.climb and operator.climb.cause)
        if ends and self.job.ladder.trains:
            left = {seen.rank.finished for seen in operator.known if seen}
            must(made.climb.version in left, "the job ends without its model")
        return operator._replace(climb=made.climb, raised=True)

    def _send(self, state: ModelState, operator: ModelOperator, decided: Decided) -> ModelState:
        """Send targets. Those that were sent before are on their way, and their recipients were checked then."""
        rollout, sent, climb = state.rollout, operator.sent, operator.climb
        if (target := decided.rollout) is not None:
            must(target.trained_step >= rollout.target_trained, "what was trained is taken back")
            saved = max(target.saved_step, rollout.target_saved)
            news = (target.goal, target.trained_step, saved, target.epoch)
            if news != (rollout.goal, rollout.target_trained, rollout.target_saved, rollout.epoch):
                goal, trained, saved, epoch = news
                rollout = rollout._replace(goal=goal, target_trained=trained, target_saved=saved, epoch=epoch)
        for index, pod_target in decided.targets:
            if sent[index] == pod_target:
                continue
            if pod_target.goal is Goal.CLIMB:
                below = last_barrier(self.job.ladder, self.job.ladder.place(pod_target.rung) - 1)
                pods = state.pods[: self._size(state, climb)]
                must_have_stood(pods, pod_target.epoch, below, f"a target asks for {pod_target.rung}")
            sent = put(sent, index, pod_target)
        if sent is not operator.sent:
            operator = operator._replace(sent=sent)
        if operator is not state.operator or rollout is not state.rollout:
            state = state._replace(rollout=rollout, operator=operator)
        if not decided.plan.targets:
            return state
        assert climb is not None
        return decided_on(state, climb)

    def _make_pods(self, state: ModelState, made: Plan) -> ModelState:
        """Create or delete pods."""
        operator, pods, rollout = state.operator, list(state.pods), state.rollout
        spares, unplaced = {each.seat: each for each in state.spares}, [*state.unplaced]
        must_give_no_more_room_than_needed(state, made)
        for action in made.pods:
            seat = action.seat if isinstance(action, CreatePod) else name_of_seat(action.name)
            if seat == ROLLOUT_SEAT:
                rollout = with_pod_or_without(rollout, action)
                continue
            if seat in unplaced:
                unplaced.remove(seat)
            if isinstance(action, CreatePod) and self._spares:
                unplaced.append(seat)
            if is_spare(seat):
                is_made = isinstance(action, CreatePod)
                attempt = action.attempt if isinstance(action, CreatePod) else spares[seat].attempt
                spares[seat] = ModelSpare(seat, attempt, there=is_made)
                continue
            index = self.job.gpu_seats.index(seat)
            if isinstance(action, CreatePod):
                if not self._spares and sum(pod.alive for pod in pods) >= len(pods) - state.lost:
                    continue  # it has no node
                must(not pods[index].alive, f"two pods in {action.seat}")
                before, rank = pods[index], FIRST if pods[index].is_first else OTHER
                pods[index] = self._new_pod(seat, rank)._replace(
                    attempt=action.attempt, stood=before.stood, exports=before.exports, alive=not self._spares
                )
            else:
                pods[index] = pods[index]._replace(alive=False, there=False)
            operator = operator.lost(index)
        after = state._replace(pods=tuple(pods), operator=operator, rollout=rollout)
        return self._placed(after._replace(spares=tuple(spares.values()), unplaced=tuple(unplaced)))

    def _placed(self, state: ModelState) -> ModelState:
        """The scheduler gives pods without a node the room that there is, the oldest first."""
        room = self._nodes - state.lost - sum(pod.alive for pod in state.pods) - len(running_spares(state))
        for seat in state.unplaced[: max(0, room)]:
            state = state._replace(unplaced=state.unplaced[1:])
            if not is_spare(seat):
                index = self.job.gpu_seats.index(seat)
                state = state._replace(pods=put(state.pods, index, state.pods[index]._replace(alive=True)))
        return state

    def _may_lose_a_node(self, state: ModelState) -> bool:
        return state.lost + 1 <= self._nodes - self._least_nodes

    # --------------------------------------------------------------------------------------------------------- channels
    def _targets_arrive(self, state: ModelState, index: int) -> Iterator[tuple[str, ModelState]]:
        pod, sent, stale = state.pods[index], state.operator.sent[index], state.stale[index]
        if not pod.alive or pod.stopped:
            return
        if sent is not None and sent != pod.target:
            after = self._admit(pod, sent)
            if after != pod:
                yield f"target {index}", state.with_pod(index, after)
        if stale is not None:
            after = self._admit(pod, stale)
            gone = state._replace(stale=put(state.stale, index, None))
            yield f"old target {index}", gone.with_pod(index, after)

    def _reports_arrive(self, state: ModelState, index: int) -> Iterator[tuple[str, ModelState]]:
        pod, operator = state.pods[index], state.operator
        if pod.alive and (seen := self.report(pod)) != operator.known[index]:
            yield f"report {index}", state._replace(operator=operator._replace(known=put(operator.known, index, seen)))

    def report(self, pod: ModelPod) -> Seen:
        if (known := self._seen.get(pod)) is not None:
            return known
        rank = pod.rank._replace(
            state=TrainerState.STARTING if pod.rank.is_alive else TrainerState.ABSENT,
            incarnation=None,
            step=None if pod.target else pod.rank.step,  # a record that was lost is made from it
            scored=None,
            exported=None,
            broken=None,
        )
        version = pod.target.version if pod.target else None
        rejected = None if pod.engine else pod.belief.rejected
        seen = Seen(
            *(pod.role, pod.epoch, pod.durable.epoch, standing_of(pod), version, rank, pod.stopped, rejected),
            ending=pod.ending,
        )
        if seen not in self._reports:
            self._reports[seen] = facts_of(pod)
        seen = self._seen[pod] = self._reported.kept(seen)
        if not pod.is_first:
            self.report(pod.as_first())  # as which it may turn out
        return seen

    # ----------------------------------------------------------------------------------------------------------- agents
    def _agent_acts(self, state: ModelState, index: int) -> Iterator[tuple[str, ModelState]]:
        pod = state.pods[index]
        if not pod.alive or pod.stopped:
            return
        for action in self._choices(pod):
            self._check(pod, action, exports_of(state))
            must_close_late(self._group_of(state, pod), pod, action)
            name = f"{type(action).__name__} {index}"
            if (after := self._effect(state, index, action)) is not None:
                yield name, after
            elif is_alone(pod.rank, self._peers(state, index)):
                yield f"{name} fails", state.with_pod(index, without_peers(pod))

    def _choices(self, pod: ModelPod) -> tuple[do.Action, ...]:
        choices = self._actions.get(pod)
        if choices is None:
            choices = self._actions[pod] = chosen(pod)
        return choices

    def _effect(self, state: ModelState, index: int, action: do.Action) -> ModelState | None:
        """None: it does not end yet, because others are not where it needs them."""
        before, rollout = state.pods[index], state.rollout
        durable = Durable(rollout.dropped, rollout.sealed, state.saved, self._kept(state, before))
        done = carried_out(before, action, peers=partial(self._peers, state, index), durable=durable, acted=self._act)
        if done is None:
            return None
        pod, saved = done
        after = state._replace(saved=saved).with_pod(index, pod)
        if isinstance(action, do.EndPod) and pod.ending:
            ended = pod._replace(alive=False, stopped=False)
            after = after._replace(operator=state.operator.lost(index)).with_pod(index, ended)
        if isinstance(action, do.Mirror):
            after = self._mirrored(after, pod, action.step)
        served = state.operator.served
        group = self._group_of(state, pod)
        must_rise_together(group, before, pod, action, served=served, standing_of=self._standing_of)
        return after

    def _trainers(self, state: ModelState, pod: ModelPod) -> list[tuple[int, str, ModelPod]]:
        """Return the pods with trainers of a pod's group, each with its place and its seat."""
        seats = zip(self.job.gpu_seats, self._group_of(state, pod), strict=False)
        return [(at, seat, each) for at, (seat, each) in enumerate(seats) if seat in self.job.trainer_seats]

    def _kept(self, state: ModelState, pod: ModelPod) -> int | None:
        """Return the newest step of which the memory of pods has every part; None: the job keeps none there."""
        if not self._mirrors:
            return None
        trainers = self._trainers(state, pod)
        held = [dict(each.parts) for _, _, each in trainers if each.alive]
        return min(max((parts.get(seat, 0) for parts in held), default=0) for _, seat, _ in trainers)

    def _mirrored(self, state: ModelState, pod: ModelPod, step: int) -> ModelState:
        """All ranks keep a step at once, each in its pod and in another, half of the group away."""
        trainers = self._trainers(state, pod)
        half, pods = max(1, len(trainers) // 2), list(state.pods)
        for at, _, each in trainers:
            pods[at] = each._replace(rank=each.rank._replace(mirrored=step))
        for (at, seat, _), (following, _, _) in zip(trainers, trainers[half:] + trainers[:half], strict=True):
            for holder in {at, following}:
                parts = dict(pods[holder].parts) | {seat: step}
                pods[holder] = pods[holder]._replace(parts=tuple(sorted(parts.items())))
        return state._replace(pods=tuple(pods))

    def _peers(self, state: ModelState, index: int) -> Iterator[ModelPod]:
        """Other pods with trainers."""
        return (pod for other, _, pod in self._trainers(state, state.pods[index]) if other != index)

    def _group_of(self, state: ModelState, pod: ModelPod) -> tuple[ModelPod, ...]:
        """Return the pods of the group that a pod's target is for: fewer than there are seats, or all."""
        if pod.target is None or not self._is_resized:
            return state.pods
        return state.pods[: pod.target.world_size]

    def _size(self, state: ModelState, climb: Climb | None) -> int:
        """Return how many GPU pods a climb's group has."""
        job = self._job_as(state.suspend, state.spec_retries, state.replicas, climb)
        return len(job.gpu_seats)

    # --------------------------------------------------------------------------------------------------------- the rest
    def _rollout_acts(self, state: ModelState) -> Iterator[tuple[str, ModelState]]:
        rollout = state.rollout
        if not rollout.there:
            return
        if rollout.goal is Goal.STOP:
            if not rollout.stopped:
                yield "rollout", state._replace(rollout=rollout._replace(stopped=True))
            return
        sealed, trained, dropped = rollout.sealed, rollout.target_trained, rollout.target_saved
        if not self.job.ladder.serves or any(pod.alive and pod.gate_open for pod in state.pods):
            sealed = max(sealed, trained + 1)
        if (sealed, trained, dropped) != (rollout.sealed, rollout.trained, rollout.dropped):
            after = rollout._replace(sealed=sealed, trained=trained, dropped=dropped)
            yield "rollout", state._replace(rollout=after)

    def _deaths(self, state: ModelState, index: int) -> list[tuple[str, ModelState]]:
        """Return the deaths in one pod of those that may die."""
        if not state.deaths:
            return []
        found = self._somebody_dies(state._replace(deaths=state.deaths - 1), index)
        return [death for death in found if death[0].split()[0] in self.mortal]

    def _somebody_dies(self, state: ModelState, index: int) -> Iterator[tuple[str, ModelState]]:
        pod = state.pods[index]
        if not pod.alive or pod.stopped:
            return
        unheard = state._replace(operator=state.operator.lost(index))
        yield f"agent {index} dies", unheard.with_pod(index, self._restart(pod))
        for action in self._choices(pod):
            if isinstance(action, CALLS):
                left = self._restart(self._called_unheard(pod, action))
                yield f"agent {index} dies in {type(action).__name__}", unheard.with_pod(index, left)
            for after in self._failed(pod, action):
                yield f"call {index}, {type(action).__name__}, fails", state.with_pod(index, after.noted())
        for after in self._past_deadline(pod):
            yield f"deadline {index} passes", state.with_pod(index, after.noted())
        if pod.engine is not None:
            yield f"engine {index} dies", state.with_pod(index, pod.without_engine().noted())
        if pod.rank.is_alive:
            yield f"trainer {index} dies", state.with_pod(index, pod.without_trainer())
            yield f"memory {index} grows", state.with_pod(index, pod.with_large_trainer())
        if state.operator.known[index] is not None:
            yield f"connection {index} breaks", unheard
        if not pod.ending:
            yield f"container {index} is signalled to end", state.with_pod(index, pod._replace(ending=True))
        if not pod.leaves:
            yield f"node {index} gives notice", state.with_pod(index, pod._replace(leaves=True))
        yield f"pod {index} dies", unheard.with_pod(index, pod._replace(alive=False))
        if self._may_lose_a_node(state):
            lost = unheard._replace(lost=state.lost + 1)
            yield f"room {index} is lost", lost.with_pod(index, pod._replace(alive=False))

    def _next_leader(self, state: ModelState) -> ModelState:
        """It knows what is recorded. The old one was only paused, with a plan in its hands."""
        operator, decided, nobody = state.operator, self._plan(state, late=False), (None,) * len(state.pods)
        stale, made = operator.sent, decided.plan
        for index, target in () if made.raises else decided.targets:
            stale = put(stale, index, target)
        return state._replace(
            operator=operator._replace(raised=False, known=nobody, sent=nobody),
            stale=stale,
            sleeper=made.climb if made.raises and not self.has_precondition else None,
        )

    def _place_of(self, pod_name: str) -> int:
        return self.job.gpu_seats.index(name_of_seat(pod_name))


# ------------------------------------------------------------------------------------------------------------- plumbing
def name_of_seat(pod_name: str) -> str:
    return pod_name.rpartition("-")[0]


def running_spares(state: ModelState) -> list[ModelSpare]:
    return [each for each in state.spares if each.there and each.seat not in state.unplaced]


def without_spare(state: ModelState, lost: ModelSpare) -> ModelState:
    """Return the state once the object of a spare's pod is gone with its node."""
    return state._replace(
        spares=tuple(each._replace(there=False) if each.seat == lost.seat else each for each in state.spares)
    )


def must_give_no_more_room_than_needed(state: ModelState, made: Plan) -> None:
    """Check that spares go for pods of the group that no node has taken on, one for each, or with all others."""
    if made.climb is None or made.climb.cause.goal is Goal.STOP or state.suspend:
        return
    gone = {action.name for action in made.pods if not isinstance(action, CreatePod)}
    given = sum(f"{each.seat}-{each.attempt}" in gone for each in running_spares(state))
    needed = sum(not is_spare(seat) for seat in state.unplaced)
    must(given <= needed, f"{given} spares give their room, and {needed} pods need some")


def _phase(state: ModelState, seat: str, *, is_alive: bool) -> PodPhase:
    if seat in state.unplaced:
        return PodPhase.PENDING
    return PodPhase.RUNNING if is_alive else PodPhase.FAILED


def _spare_member(state: ModelState, spare: ModelSpare) -> Member:
    name = f"{spare.seat}-{spare.attempt}"
    phase = _phase(state, spare.seat, is_alive=True)
    facts = PodFacts(epoch=0, gate=CLOSED, engines=(), trainers=(), stopped=spare.stopped)
    is_heard = phase is PodPhase.RUNNING
    placed: dict[str, Any] = {"node": f"node-{spare.seat}", "address": "10.0.0.8", "facts": facts} if is_heard else {}
    return Member(spare.seat, spare.attempt, name, names.PodUid(name), phase, created_at=-1000.0, **placed)


def first_of(pods: tuple[ModelPod, ...], index: int) -> tuple[ModelPod, ...]:
    """Return the pods with rank 0 in one of them, which takes the first seat."""
    return (pods[index].as_first(), *pods[:index], *pods[index + 1 :])


def with_first(state: ModelState, index: int) -> ModelState:
    def begin(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return (items[index], *items[:index], *items[index + 1 :])

    first, *others = begin(state.operator.known)
    operator = state.operator._replace(known=(first and first.as_first(), *others), sent=begin(state.operator.sent))
    return state._replace(pods=first_of(state.pods, index), operator=operator, stale=begin(state.stale))


def decided_on(state: ModelState, climb: Climb) -> ModelState:
    """A target of this epoch is about."""
    if state.decisions == (climb,):
        return state
    made = {decision.epoch: decision for decision in state.decisions[-1:]}
    must(made.setdefault(climb.epoch, climb) == climb, f"epoch {climb.epoch} stands for two decisions")
    return state._replace(decisions=tuple(made.values()))


def with_pod_or_without(rollout: ModelRollout, action: PodAction) -> ModelRollout:
    """Return the rollout controller after its pod was created or deleted. The store keeps its contents."""
    if isinstance(action, CreatePod):
        must(not rollout.there, "two pods of the store")
        return rollout._replace(goal=Goal.CLIMB, stopped=False, attempt=action.attempt, there=True)
    return rollout._replace(stopped=True, there=False)


def exports_of(state: ModelState) -> frozenset[WeightVersion] | None:
    """Return the exports on the volume that pods share; None where they share none."""
    return next((pod.exports for pod in state.pods if pod.exports is not None), None)


def put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])
