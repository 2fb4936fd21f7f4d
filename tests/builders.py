"""Values for tests, made in one line: `make_job(replicas=2)`, `serving(version)`.

Builders give the usual case; a test names only what it is about.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from colocated_rl_api import names
from colocated_rl_api.facts import (
    EngineFacts,
    EngineState,
    GateFacts,
    PodFacts,
    RolloutFacts,
    SealedBatch,
    TagState,
    TrainerFacts,
    TrainerState,
)
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.job_status import ColocatedRLJobStatus
from colocated_rl_api.ladder import TIME_SLICED, Ladder
from colocated_rl_api.member_wire import Endpoint, Goal, PodTarget, Rendezvous
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_api.seats import ROLLOUT_SEAT
from colocated_rl_operator.planner.observation import (
    Climb,
    FailureTally,
    Job,
    Member,
    Memory,
    Observation,
    PodPhase,
    remember,
)
from colocated_rl_operator.planner.plan import Plan, plan
from colocated_rl_operator.planner.reasons import Cause, ConditionType
from colocated_rl_operator.planner.status import report

UID = names.JobUid("6f1f0c5e-0000-4000-8000-000000000000")
CREATED = datetime(2026, 1, 1, tzinfo=UTC)
BLANK = ColocatedRLJobStatus()


# ------------------------------------------------------------------------------------------------------------- the job
ROLLOUT: dict[str, Any] = {"prompts": {"reasoningGym": {"name": "chain_sum"}}, "batchSize": 4, "groupSize": 2}
RESIDENT_ROLLOUT = ROLLOUT | {"offload": []}
OWN_ROLLOUT = ROLLOUT | {"placement": "OwnDevices", "replicas": 1}
MIXED_ROLLOUT = ROLLOUT | {"placement": "Both", "replicas": 1}
PLACED: dict[Placement, dict[str, Any]] = {  # parts of a spec that lead to each placement
    Placement.TIME_SLICED: {"rollout": ROLLOUT},
    Placement.RESIDENT: {"rollout": RESIDENT_ROLLOUT},
    Placement.DISAGGREGATED: {"rollout": OWN_ROLLOUT},
    Placement.MIXED: {"rollout": MIXED_ROLLOUT},
    Placement.ROLLOUT_ONLY: {"rollout": ROLLOUT, "mode": "RolloutOnly"},
    Placement.TRAIN_ONLY: {"rollout": ROLLOUT, "mode": "TrainOnly", "recorded": {"claimName": "recording"}},
}
IN_ONE_POD = tuple(each for each in Placement if not each.shares_weights)
TOGETHER = (Placement.TIME_SLICED, Placement.RESIDENT)  # those with engines and trainers


def make_manifest(name: str = "sums", **spec: Any) -> dict[str, Any]:
    """A job as a person writes it: on the CPU, two replicas, three steps. Keywords replace parts of the spec."""
    usual: dict[str, Any] = {
        "steps": 3,
        "replicas": 2,
        "model": {"claim": {"name": "model"}},
        "gpus": {"count": 0},
        "rollout": ROLLOUT,
        "failurePolicy": {"backoffSeconds": 0},
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": "default"},
        "spec": usual | spec,
    }


def make_job(name: str = "sums", **spec: Any) -> Job:
    return Job(
        namespace="default",
        name=name,
        uid=UID,
        generation=1,
        created=CREATED,
        spec=ColocatedRLJobSpec.model_validate(make_manifest(name, **spec)["spec"]),
    )


def make_climb(step: int = 0, lineage: int = 1, *, epoch: int = 1, cause: Cause = Cause.FIRST_START) -> Climb:
    """Return a climb of the group that `make_observation` makes."""
    counted = (step,) * 6 if cause is Cause.BACKOFF_LIMIT else ()  # as many as are allowed by default
    tally = FailureTally(counted=counted)
    return Climb(epoch=epoch, step=step, lineage=lineage, group="", cause=cause, tally=tally)


# --------------------------------------------------------------------------------------------------------------- facts
def engine(version: WeightVersion | None, **changes: Any) -> EngineFacts:
    """A ready engine that holds `version`, all mapped."""
    checksum = version and f"of {version}"  # the same in every engine that holds it
    usual = EngineFacts(name="engine-0", state=EngineState.READY, incarnation="e1", version=version, checksum=checksum)
    return usual.model_copy(update=changes)


def released_engine() -> EngineFacts:
    gone = TagState.RELEASED
    return engine(None, paused=True, drained=True, weights=gone, kv_cache=gone, cuda_graph=gone)


def absent_engine() -> EngineFacts:
    return EngineFacts(name="engine-0", state=EngineState.ABSENT)


def trainer(step: int | None, lineage: int, **changes: Any) -> TrainerFacts:
    """A rank that offloaded after `step`."""
    usual = TrainerFacts(rank=0, state=TrainerState.OFFLOADED, incarnation="t1", lineage=lineage, step=step)
    return usual.model_copy(update=changes)


def absent_trainer(lineage: int | None = None, exit_code: int | None = None) -> TrainerFacts:
    return TrainerFacts(rank=0, state=TrainerState.ABSENT, lineage=lineage, exit_code=exit_code)


def pod_facts(
    engine_facts: EngineFacts, trainer_facts: TrainerFacts, *, epoch: int, is_open: bool = False, settled: bool = True
) -> PodFacts:
    gate = GateFacts(open=is_open, settled=settled and not is_open)
    return PodFacts(epoch=epoch, gate=gate, engines=(engine_facts,), trainers=(trainer_facts,))


CLOSED = GateFacts(open=False, settled=True)


def facts_at(rung: Rung, at: WeightVersion, *, epoch: int = 1, ladder: Ladder = TIME_SLICED) -> PodFacts:
    """Facts of a pod that stands at `rung` on its way to `at`, having served the step before."""
    if ladder.serves_on:
        return _resident_facts_at(rung, at, epoch=epoch)
    before = WeightVersion(max(0, at.step - 1), at.lineage)
    old, done = trainer(before.step, at.lineage, exported=before), trainer(at.step, at.lineage, exported=at)
    onloaded = {"state": TrainerState.ONLOADED}
    scored = old.model_copy(update={**onloaded, "scored": at.step})
    gone = {"kv_cache": TagState.RELEASED, "cuda_graph": TagState.RELEASED}
    parts: dict[Rung, tuple[EngineFacts, TrainerFacts]] = {
        Rung.SEALED: (engine(before), old),
        Rung.CLOSED: (engine(before), old),
        Rung.SETTLED: (engine(before), old),
        Rung.PAUSED: (engine(before, paused=True), old),
        Rung.DRAINED: (engine(before, paused=True, drained=True), old),
        Rung.RELEASED: (released_engine(), old),
        Rung.SCORED: (released_engine(), scored),
        Rung.TRAINED: (released_engine(), done.model_copy(update={**onloaded, "exported": None})),
        Rung.EXPORTED: (released_engine(), done.model_copy(update=onloaded)),
        Rung.OFFLOADED: (released_engine(), done),
        Rung.UPDATED: (engine(at, paused=True, drained=True, **gone), done),
        Rung.RESTORED: (engine(at, paused=True), done),
        Rung.SERVING: (engine(at), done),
    }
    is_open = rung in (Rung.SEALED, Rung.SERVING)
    return pod_facts(*parts[rung], epoch=epoch, is_open=is_open, settled=rung is not Rung.CLOSED)


def _resident_facts_at(rung: Rung, at: WeightVersion, *, epoch: int) -> PodFacts:
    before = WeightVersion(max(0, at.step - 1), at.lineage)
    on_device = {"state": TrainerState.ONLOADED}
    old = trainer(before.step, at.lineage, exported=before, **on_device)
    scored = old.model_copy(update={"scored": at.step})
    trained = trainer(at.step, at.lineage, exported=before, **on_device)
    done = trainer(at.step, at.lineage, exported=at, **on_device)
    parts: dict[Rung, tuple[EngineFacts, TrainerFacts]] = {
        Rung.SEALED: (engine(before), old),
        Rung.SCORED: (engine(before), scored),
        Rung.TRAINED: (engine(before), trained),
        Rung.EXPORTED: (engine(before), done),
        Rung.CLOSED: (engine(before), done),
        Rung.SETTLED: (engine(before), done),
        Rung.PAUSED: (engine(before, paused=True), done),
        Rung.DRAINED: (engine(before, paused=True, drained=True), done),
        Rung.UPDATED: (engine(at, paused=True, drained=True), done),
        Rung.SERVING: (engine(at), done),
    }
    is_open = rung in (Rung.SEALED, Rung.SCORED, Rung.TRAINED, Rung.EXPORTED, Rung.SERVING)
    return pod_facts(*parts[rung], epoch=epoch, is_open=is_open, settled=rung is not Rung.CLOSED)


def trainers_at(rung: Rung, at: WeightVersion, *, epoch: int = 1) -> PodFacts:
    """Facts of a pod of trainers, on devices of their own, on the way to `at`."""
    return _resident_facts_at(rung, at, epoch=epoch).model_copy(update={"engines": (), "gate": CLOSED})


def engine_at(rung: Rung, at: WeightVersion, *, epoch: int = 1, export: WeightVersion | None = None) -> PodFacts:
    """Facts of a pod with an engine alone, on the way to `at`. export: what it has compared."""
    facts = _resident_facts_at(rung, at, epoch=epoch)
    known = export or (WeightVersion(at.step - 1, at.lineage) if rung is Rung.TRAINED else at)
    return facts.model_copy(update={"trainers": (), "export": known})


def rollout_facts(*, sealed: int = 0, trained: int = 0, epoch: int = 1, **changes: Any) -> RolloutFacts:
    batch = SealedBatch(step=sealed, groups=4, samples=8, loss_tokens=100) if sealed else None
    return RolloutFacts(epoch=epoch, sealed=batch, trained_step=trained, deals_anew=True).model_copy(update=changes)


def make_target(version: WeightVersion, rung: Rung, *, goal: Goal = Goal.CLIMB, **changes: Any) -> PodTarget:
    target = PodTarget(
        epoch=1,
        goal=goal,
        step=version.step,
        lineage=version.lineage,
        rung=rung,
        rendezvous=Rendezvous(address="10.0.0.1", port=29500, world_size=1),
        batches=Endpoint(pod="rollout", address="10.0.0.2", port=8444),
    )
    return target.model_copy(update=changes)


# -------------------------------------------------------------------------------------------------------- observations
def make_member(seat: str, attempt: int = 0, **changes: Any) -> Member:
    usual: dict[str, Any] = {
        "name": f"sums-{seat}-{attempt}",
        "uid": f"uid-{seat}-{attempt}",
        "phase": PodPhase.RUNNING,
        "created_at": 0.0,
        "address": f"10.0.0.{sum(map(ord, seat)) % 200 + 1}",
    }
    return Member(seat=seat, attempt=attempt, **usual | changes)


def make_observation(
    job: Job,
    pods: list[PodFacts | None],
    *,
    climb: Climb | None,
    rollout: RolloutFacts | None,
    now: float = 100.0,
    raised: bool = True,
    **changes: Any,
) -> Observation:
    """All pods run; `pods` has the facts of each GPU pod. The climb's group is the present one."""
    members = [make_member(seat, facts=facts) for seat, facts in zip(job.gpu_seats, pods, strict=False)]
    members.append(make_member(ROLLOUT_SEAT, facts=rollout))
    epoch = climb.epoch if climb else 0
    memory = Memory(epoch=epoch, raised=raised, epoch_at=now, progress_at=now, heard_since=0.0)
    seen = Observation(now=now, job=job, members=tuple(members), climb=climb, memory=memory)
    if climb is not None:
        seen = replace(seen, climb=replace(climb, group=seen.group or ""))
    return remember(replace(seen, **changes))


def make_first_step(job: Job, pods: list[PodFacts | None], **options: Any) -> Observation:
    """A group on its way to (1, 1), epoch 1, whose engines have served (0, 1). options: of `make_observation`."""
    usual: dict[str, Any] = {
        "climb": make_climb(1, cause=Cause.NEXT_STEP),
        "rollout": rollout_facts(sealed=1),
        "served": WeightVersion(0, 1),
    }
    return make_observation(job, pods, **usual | options)


# ------------------------------------------------------------------------------------------------- what is made of it
def pod_targets(seen: Observation) -> dict[str, PodTarget]:
    """Return what the plan asks of each pod with devices, by name."""
    return {name: each for name, each in plan(seen).targets.items() if isinstance(each, PodTarget)}


def status_of(seen: Observation, before: ColocatedRLJobStatus = BLANK) -> ColocatedRLJobStatus:
    return report(seen, plan(seen), before=before, at=CREATED)


def condition(status: ColocatedRLJobStatus, kind: ConditionType) -> tuple[str, str]:
    """Return status and message of a condition."""
    (found,) = [each for each in status.conditions if each.type == kind]
    return found.status.value, found.message


def plan_past_pods_deadline(missing: Observation) -> Plan:
    """Return what is decided once somebody has been missing for `podsReadyDeadlineSeconds`, which begin now."""
    assert missing.memory.awaited_since == missing.now
    deadline_s = missing.job.spec.pods_ready_deadline_seconds
    return plan(remember(replace(missing, now=missing.now + deadline_s)))
