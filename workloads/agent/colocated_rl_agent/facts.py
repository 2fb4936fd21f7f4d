"""The action table: from what the agent knows and where the operator wants the pod, the next safe action. Pure.

Level-triggered: called after every change, it stores nothing, so an agent that was restarted in the middle of a switch
goes on where the facts stand. Read top to bottom it is the ladder.

It never goes beyond the target's rung, and never back because a target of the same version is lower. Whatever it
chooses:

* nothing is released unless the engine is settled, paused and drained since the gate last closed, and nothing twice;
* no trainer is let onto the device while an engine maps memory, and no engine is started or resumed while a trainer is
  on it (an engine without a process maps nothing);
* an engine whose state can't be known is replaced, never repaired; a trainer that failed is stopped, and the operator
  decides on a new lineage: a rank alone can't rejoin its group;
* the gate opens last.
"""

from __future__ import annotations

from dataclasses import dataclass

from colocated_rl_agent.actions import (
    AbortAll,
    Action,
    AwaitEngine,
    AwaitTrainers,
    CheckProbe,
    CloseGate,
    Continue,
    EndPod,
    Export,
    FetchShards,
    Flush,
    KillEngine,
    Offload,
    Onload,
    OpenGate,
    Pause,
    Release,
    RemoveExports,
    Resume,
    Save,
    StartEngine,
    StartTrainers,
    StopTrainers,
    Train,
    Update,
    VerifyExport,
    Wait,
)
from colocated_rl_agent.views import CUDA_GRAPH, KV_CACHE, WEIGHTS, PodView
from colocated_rl_api.ladder import Ladder, Rung, WeightVersion
from colocated_rl_api.member_wire import EngineState, Goal, PodTarget, TagState, TrainerState

TERMINATED = 143  # exit code of a container that was told to end: 128 + SIGTERM


@dataclass(frozen=True)
class Rules:
    """What the job says about a switch, as far as the table depends on it."""

    ladder: Ladder
    settle_s: float
    checkpoint_every: int
    probe: bool

    def asks_for(self, target: PodTarget, rung: Rung) -> bool:
        """Whether the target lies at `rung` or above it."""
        return self.ladder.reaches(target.rung, rung)

    def standing(self, pod: PodView, target: PodTarget) -> Rung:
        return self.ladder.standing(pod.facts(), target.version)

    def checkpoint_is_due(self, step: int) -> bool:
        return step > 0 and step % self.checkpoint_every == 0


def next_action(pod: PodView, target: PodTarget | None, rules: Rules) -> Action | Wait:
    """The next safe action, or what is being waited for."""
    if pod.stopped:
        return Wait()
    if not pod.runner_known:
        return Wait(reason="RunnerUnreachable", message="the GPU container's runner does not answer on its socket")
    if (action := _replace(pod)) is not None:
        return action
    if pod.terminating:
        return _end(pod, rules, code=TERMINATED)
    if target is None:
        return Wait()
    if target.goal is Goal.STOP:
        return _end(pod, rules, code=0)
    if rules.ladder.reaches(rules.standing(pod, target), target.rung):
        return _rest(pod, target, rules)
    if not pod.engine.holds(target.version):
        if (action := _lower(pod, target, rules)) is not None:
            return action
        if (action := _train(pod, target, rules)) is not None:
            return action
    return _raise(pod, target, rules)


def _replace(pod: PodView) -> Action | Wait | None:
    """What can't go on as it is, whatever the target."""
    engine = pod.engine
    if pod.gate_open and (engine.state is not EngineState.READY or engine.paused or engine.broken is not None):
        return CloseGate()
    if engine.broken is not None:
        return KillEngine(engine.broken)
    broken = next((rank.broken for rank in pod.ranks if rank.broken is not None), None)
    return StopTrainers(broken) if broken is not None else None


def _lower(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait | None:
    """Sealed to Released. None once no engine maps memory, or when the engine is on its way up already."""
    engine = pod.engine
    if pod.gate_open:
        return CloseGate()
    if pod.in_flight > 0:
        return _settle(pod, rules)
    if engine.is_absent or engine.is_released or _may_rise(pod, target, rules):
        return None
    if engine.state is EngineState.STARTING:
        return KillEngine(f"it starts on {engine.starts_on}, and {target.version} can't be served yet")
    if not rules.asks_for(target, Rung.PAUSED):
        return Wait()
    if not engine.paused:
        return Pause()
    if not rules.asks_for(target, Rung.DRAINED):
        return Wait()
    if not engine.is_whole or engine.released:
        return KillEngine("it is neither whole nor released, and nothing is released twice behind one closed gate")
    if not (engine.drained and engine.flushed):  # drained perhaps before its memory came back, by an earlier agent
        return Flush()
    if not rules.asks_for(target, Rung.RELEASED):
        return Wait()
    return Release()


def _train(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait | None:
    """Released to Offloaded; no engine maps memory here. None when the trainers are off the device again."""
    ranks, at = pod.ranks, target.version
    if _may_rise(pod, target, rules):
        return None
    if not rules.asks_for(target, Rung.TRAINED):
        return Wait()
    if target.rendezvous is None or target.batches is None:
        return Wait(
            reason="TargetIncomplete", message=f"the target of epoch {target.epoch} lacks rendezvous or batches"
        )
    if (action := _form_group(pod, at.lineage)) is not None:
        return action
    step = min(rank.step for rank in ranks if rank.step is not None)
    if max(rank.step for rank in ranks if rank.step is not None) > at.step:
        return Wait(reason="TrainerAhead", message=f"trainers stand at step {step}, step {at.step} is wanted")
    if step < at.step:
        return _step(pod, step, rules)
    if not rules.asks_for(target, Rung.EXPORTED):
        return Wait()
    if any(rank.exported != at for rank in ranks):
        return Onload() if _any_offloaded(pod) else Export(at)
    if pod.whole != at:
        return VerifyExport(at)
    if not rules.asks_for(target, Rung.OFFLOADED):
        return Wait()
    return Offload()


def _form_group(pod: PodView, lineage: int) -> Action | Wait | None:
    """None once every rank belongs to the lineage and has loaded its checkpoint."""
    ranks = pod.ranks
    if any(rank.is_alive and rank.lineage != lineage for rank in ranks):
        return StopTrainers(f"lineage {lineage} is wanted")
    if dead := [rank for rank in ranks if not rank.is_alive and rank.lineage == lineage]:
        return Wait(
            reason="TrainerDied",
            message=f"trainer rank {dead[0].rank} of lineage {lineage} ended with code {dead[0].exit_code}",
        )
    if any(not rank.is_alive for rank in ranks):
        return StartTrainers(lineage)
    if any(rank.step is None for rank in ranks):
        start_by = min(rank.start_by for rank in ranks)
        return AwaitTrainers(start_by) if pod.now < start_by else StopTrainers("its checkpoint was not loaded in time")
    return None


def _step(pod: PodView, done: int, rules: Rules) -> Action | Wait:
    """One step after `done`, or what must come before it. A checkpoint that is due is durable before the next step."""
    if rules.checkpoint_is_due(done) and _lacks_checkpoint(pod, done):
        return Save(done) if all(rank.is_off_device for rank in pod.ranks) else Offload()
    if pod.shards != done + 1:
        return FetchShards(done + 1) if pod.now >= pod.fetch_after else Wait(until=pod.fetch_after)
    return Onload() if _any_offloaded(pod) else Train(done + 1)


def _raise(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    """Offloaded to Serving."""
    engine, at = pod.engine, target.version
    if not rules.asks_for(target, Rung.UPDATED):
        return Wait()
    if not all(rank.is_off_device for rank in pod.ranks):
        return Offload()
    if engine.is_absent:
        return StartEngine(at) if pod.now >= engine.start_after else Wait(until=engine.start_after)
    if engine.state is EngineState.STARTING:
        return AwaitEngine(engine.start_by) if pod.now < engine.start_by else KillEngine("it did not start in time")
    if engine.tags[WEIGHTS] is TagState.RELEASED:
        return Resume((WEIGHTS,))
    if engine.version != at:
        return Update(at)
    if not rules.asks_for(target, Rung.RESTORED):
        return Wait()
    if not engine.is_whole:
        return Resume((KV_CACHE, CUDA_GRAPH))
    if not engine.flushed:
        return Flush()
    if engine.paused:
        return Continue()
    if rules.probe and not engine.agrees:
        return CheckProbe(at)
    return OpenGate(at) if rules.asks_for(target, Rung.SERVING) else Wait()


def _rest(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    """The pod stands where it should. What can be done beside rollout is done now."""
    if rules.standing(pod, target) is not Rung.SERVING:
        return Wait()
    can_save = all(rank.state is TrainerState.OFFLOADED and rank.step == target.step for rank in pod.ranks)
    is_due = target.is_last or rules.checkpoint_is_due(target.step)
    if can_save and is_due and _lacks_checkpoint(pod, target.step):
        return Save(target.step)
    if pod.stale_exports:
        return RemoveExports(keep=target.version)
    return Wait()


def _end(pod: PodView, rules: Rules, *, code: int) -> Action | Wait:
    """Partial samples are handed back, then everything ends."""
    if pod.gate_open:
        return CloseGate()
    if pod.in_flight > 0:
        return _settle(pod, rules)
    if not pod.engine.is_absent:
        return KillEngine("the pod ends")
    if any(rank.is_alive for rank in pod.ranks):
        return StopTrainers("the pod ends")
    return EndPod(code)


def _settle(pod: PodView, rules: Rules) -> Action | Wait:
    until = pod.closed_at + rules.settle_s
    if pod.engine.is_absent:
        return Wait()  # its connections are broken: requests end by themselves
    if pod.now >= until:
        return KillEngine(f"{pod.in_flight} requests were in flight {rules.settle_s:.0f} s after the gate closed")
    return AbortAll(until)


def _may_rise(pod: PodView, target: PodTarget, rules: Rules) -> bool:
    """Whether the devices are the engine's, and the weights for it are there."""
    at: WeightVersion = target.version
    offloaded = all(
        rank.state is TrainerState.OFFLOADED
        and rank.lineage == at.lineage
        and rank.step == at.step
        and rank.exported == at
        for rank in pod.ranks
    )
    engine = pod.engine
    clean = (
        engine.is_absent
        or engine.is_released
        or (engine.state is EngineState.STARTING and engine.starts_on == at)
        or (engine.version is None and engine.paused and engine.drained)
    )
    return offloaded and pod.whole == at and clean and rules.asks_for(target, Rung.UPDATED)


def _any_offloaded(pod: PodView) -> bool:
    return any(rank.state is TrainerState.OFFLOADED for rank in pod.ranks)


def _lacks_checkpoint(pod: PodView, step: int) -> bool:
    return any(rank.saved is None or rank.saved < step for rank in pod.ranks)
