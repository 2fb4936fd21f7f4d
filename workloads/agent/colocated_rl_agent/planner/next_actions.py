"""This table derives the next safe actions from the agent's view of the pod and the operator's target. Pure.

It is level-triggered: called after every change, it stores nothing, so an agent restarted in the middle of a switch
goes on from the facts. From top to bottom it follows the ladders: first time-sliced, where engine and trainers take
turns; then resident, where each works by itself until there are new weights; then disaggregated, where they do so in
pods of their own; then mixed, where pods of both kinds meet; last, jobs with only an engine or only trainers.

It never goes beyond the target's rung, and never back because a target of the same version is lower. For every
placement:

* an engine in an unknown state is replaced, never repaired; a failed trainer is stopped, and the operator
  decides on a new lineage: a rank alone can't rejoin its group;
* an engine starts on, and is updated to, only an export that was compared with its manifest;
* no third engine starts on an export after checks failed to show that two engines held it: the operator fails the step;
* the gate opens last.

Time-sliced:

* memory is released only if the engine is settled, paused and drained since the gate last closed, and never twice;
* no trainer moves onto the device while an engine maps memory, and no engine is started or resumed while a trainer is
  on it (an engine without a process maps nothing).

Resident:

* nothing is released, resumed or offloaded;
* no gate closes for a switch before the new weights are there, and an engine loads them only settled, paused and
  drained.

Disaggregated, in addition:

* an export that other pods may still start on is removed only when every engine has newer weights; one that they serve
  is never removed to make room;
* a replaced engine starts on the version that the operator names as loadable by all, never on an older one than the
  target's once that is here.

Mixed, in addition:

* a pod whose trainers' weights another pod writes compares them once all trainers have exported, and its engine takes
  none before.
"""

from __future__ import annotations

from dataclasses import dataclass

from colocated_rl_agent.planner.actions import (
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
    Mirror,
    Offload,
    Onload,
    OpenGate,
    Pause,
    Release,
    RemoveExports,
    Resume,
    Save,
    SaveModel,
    Score,
    StartEngine,
    StartTrainers,
    StopTrainers,
    Train,
    Update,
    VerifyExport,
    Wait,
)
from colocated_rl_agent.planner.spans import shares_of
from colocated_rl_agent.planner.views import WEIGHTS, EngineView, PodView, RankView
from colocated_rl_api.facts import EngineState, TagState, TrainerState
from colocated_rl_api.ladder import Ladder
from colocated_rl_api.member_wire import Goal, PodTarget
from colocated_rl_api.rungs import Placement, Rung, WeightVersion

INTERRUPT_S = 10.0  # time for an abort to end requests in flight: the rest of settle_s is for responses to finish
ORDER_S = 3.0  # from SIGTERM, for the operator to ask all pods for a checkpoint
TERMINATED = 143  # exit code of a container that got SIGTERM: 128 + SIGTERM


@dataclass(frozen=True)
class Rules:
    """The rules hold the job's settings for a switch, as far as the table depends on them."""

    ladder: Ladder
    settle_s: float
    checkpoint_every: int
    probes: bool  # a gate opens only on an engine that has answered the probe of its weights rightly
    compares: bool = False  # a gate opens only on the checksum that the group has agreed on
    waits: bool = False  # a switch lets responses in flight finish before it interrupts them
    is_apart: bool = False  # the pod's engines have devices of their own

    def asks_for(self, target: PodTarget, rung: Rung) -> bool:
        """Return whether the target lies at `rung` or above it."""
        return self.ladder.reaches(target.rung, rung)

    @property
    def wait_s(self) -> float:
        """Return the seconds between closing the gate and aborting requests."""
        return max(self.settle_s / 2, self.settle_s - INTERRUPT_S) if self.waits else 0.0

    @property
    def releases(self) -> bool:
        """Return whether the pod's engines release their memory for trainers."""
        return self.ladder.takes_turns and not self.is_apart

    def lets_trainers_work(self, target: PodTarget) -> bool:
        return self.asks_for(target, Rung.SCORED if self.ladder.scores else Rung.TRAINED)

    def standing(self, pod: PodView, target: PodTarget) -> Rung:
        return self.ladder.standing(pod.facts(), target.version)

    def checkpoint_is_due(self, step: int) -> bool:
        return step > 0 and step % self.checkpoint_every == 0


def next_actions(pod: PodView, target: PodTarget | None, rules: Rules) -> tuple[Action | Wait, ...]:
    """Return the next safe action or wait; one each for engine and trainers if they don't take turns."""
    return tuple(shares_of(_next_actions(pod, target, rules), pod, target, rules.ladder))


def _next_actions(pod: PodView, target: PodTarget | None, rules: Rules) -> tuple[Action | Wait, ...]:
    if pod.stopped:
        return (Wait(),)
    if not pod.runner_known:
        return (Wait(reason="RunnerUnreachable", message="the GPU container's runner does not answer on its socket"),)
    if (action := _replace(pod)) is not None:
        return (action,)
    if pod.terminating:
        return (_end(pod, rules, code=TERMINATED, keeps=target),)
    if target is None:
        return (Wait(),)
    if target.goal is Goal.STOP:
        return (_end(pod, rules, code=0),)
    return _climb(pod, target, rules)


def _climb(pod: PodView, target: PodTarget, rules: Rules) -> tuple[Action | Wait, ...]:
    match rules.ladder.placement:
        case Placement.TIME_SLICED:
            return (_take_turns(pod, target, rules),)
        case Placement.RESIDENT:
            return _train_beside(pod, target, rules), _serve_on(pod, target, rules)
        case Placement.DISAGGREGATED:
            return (_serve_apart(pod, target, rules) if pod.has_engine else _train_alone(pod, target, rules),)
        case Placement.MIXED if rules.is_apart:
            return (_serve_apart(pod, target, rules),)
        case Placement.MIXED:
            return _take_turns(pod, target, rules), _compare_borrowed(pod, target, rules)
        case Placement.ROLLOUT_ONLY:
            return (_serve_alone(pod, target, rules),)
        case Placement.TRAIN_ONLY:
            return (_train_alone(pod, target, rules),)


def _replace(pod: PodView) -> Action | Wait | None:
    """Return the action that stops a broken engine or trainer, whatever the target, or None."""
    engine = pod.engine
    if pod.gate_open and (engine.state is not EngineState.READY or engine.paused or engine.broken is not None):
        return CloseGate()
    if engine.broken is not None:
        return KillEngine(engine.broken)
    broken = next((rank.broken for rank in pod.ranks if rank.broken is not None), None)
    return StopTrainers(broken) if broken is not None else None


# -------------------------------------------------------------------------------------------------------- time-sliced
def _take_turns(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    if rules.ladder.reaches(rules.standing(pod, target), target.rung):
        return _rest(pod, target, rules)
    if not pod.engine.holds(target.version):
        if (action := _lower(pod, target, rules)) is not None:
            return action
        if not _may_rise(pod, target, rules):  # no engine maps memory here
            if (action := _train(pod, target, rules)) is not None:
                return action
            is_off = all(rank.is_off_device for rank in pod.ranks)
            return Offload() if rules.asks_for(target, Rung.OFFLOADED) and not is_off else Wait()
    return _raise(pod, target, rules)


def _lower(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait | None:
    """Take the engine from Sealed to Released. Return None once it maps no memory or is on its way up already."""
    engine = pod.engine
    if (action := _close(pod, rules)) is not None:
        return action
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
    return Release() if rules.asks_for(target, Rung.RELEASED) else Wait()


def _train(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait | None:
    """Take the trainers to the export of the target's version. Return None once it is whole."""
    at = target.version
    if not rules.lets_trainers_work(target):
        return Wait()
    if target.rendezvous is None or target.batches is None:
        return Wait(
            reason="TargetIncomplete", message=f"the target of epoch {target.epoch} lacks rendezvous or batches"
        )
    if (action := _form_group(pod, at.lineage)) is not None:
        return action
    steps = [rank.step for rank in pod.ranks if rank.step is not None]
    if max(steps) > at.step:
        return Wait(reason="TrainerAhead", message=f"trainers stand at step {min(steps)}, step {at.step} is wanted")
    return _step(pod, target, min(steps), rules) if min(steps) < at.step else _export(pod, target, rules)


def _export(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait | None:
    """Write the weights of a finished step and verify them. Return None once that is done."""
    at = target.version
    if not rules.asks_for(target, Rung.EXPORTED):
        return Wait()
    if all(rank.exported == at for rank in pod.ranks):
        return VerifyExport(at) if pod.whole != at and not pod.borrows else None
    if pod.crowded is None:
        return Wait()  # the agent is listing the volume
    kept = target.weights if rules.ladder.placement.shares_weights else pod.whole  # engines serve it
    if pod.crowded and kept is not None:  # left by an abandoned switch: there is no room for all
        return RemoveExports(keep=kept)
    return Onload() if _any_offloaded(pod) else Export(at)


def _form_group(pod: PodView, lineage: int) -> Action | Wait | None:
    """Form the trainer group. Return None once every rank belongs to the lineage and has loaded its checkpoint."""
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


def _step(pod: PodView, target: PodTarget, done: int, rules: Rules) -> Action | Wait:
    """Train the step after `done`, or do what must come first. A due checkpoint is durable before the next step.

    Of steps that are repeated only the last is mirrored. All pods decide alike: ranks mirror a step together.
    Steps repeated after a reload are scored and trained one by one; before the target's own step, the group waits
    until every reference model has scored it.
    """
    if rules.checkpoint_is_due(done) and _lacks_checkpoint(pod, done):
        return _keep(pod, Save(done)) if _may_save(pod, rules) else Offload()
    if done == target.step - 1 and _lacks_mirror(pod, done, rules):
        return Mirror(done) if _may_save(pod, rules) else Offload()
    if pod.shards != done + 1:
        return FetchShards(done + 1) if pod.now >= pod.fetch_after else Wait(until=pod.fetch_after)
    if _any_offloaded(pod):
        return Onload()
    if rules.ladder.scores and any(rank.scored != done + 1 for rank in pod.ranks):
        return Score(done + 1)
    is_granted = done + 1 < target.step or rules.asks_for(target, Rung.TRAINED)
    return Train(done + 1) if is_granted else Wait()


def _raise(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    """Take the pod from Offloaded to Serving."""
    engine, at = pod.engine, target.version
    if not rules.asks_for(target, Rung.UPDATED):
        return Wait()
    if not all(rank.is_off_device for rank in pod.ranks):
        return Offload()
    if engine.is_absent:
        return _start(pod, at)
    if engine.state is EngineState.STARTING:
        return _await_engine(pod)
    if engine.tags[WEIGHTS] is TagState.RELEASED:
        return Resume((WEIGHTS,))
    if engine.version != at:
        return Update(at)
    if not rules.asks_for(target, Rung.RESTORED):
        return Wait()
    if not engine.is_whole:
        return Resume(engine.tags_in(TagState.RELEASED))
    return _open(pod, rules) if rules.asks_for(target, Rung.SERVING) else Wait()


def _may_rise(pod: PodView, target: PodTarget, rules: Rules) -> bool:
    """Return whether the engine may take the devices and the weights for it are there."""
    is_free = all(rank.state is TrainerState.OFFLOADED and _has_made(rank, target.version) for rank in pod.ranks)
    is_written = is_free and pod.whole == target.version
    return is_written and _makes_way(pod.engine, target.version) and rules.asks_for(target, Rung.UPDATED)


def _has_made(rank: RankView, version: WeightVersion) -> bool:
    return rank.lineage == version.lineage and rank.step == version.step and rank.exported == version


def _makes_way(engine: EngineView, version: WeightVersion) -> bool:
    """Return whether the engine maps no memory, or only memory for this very version."""
    starts = engine.state is EngineState.STARTING and engine.starts_on == version
    is_to_load = engine.version is None and engine.paused and engine.drained
    return engine.is_absent or engine.is_released or starts or is_to_load


# ----------------------------------------------------------------------------------------------------------- resident
def _serve_on(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    """Serve the weights that the engine holds until there are newer ones on every pod."""
    engine, at = pod.engine, target.version
    if engine.is_absent:
        return _start_again(pod, target, rules)
    if engine.state is EngineState.STARTING:
        may_be_up = engine.starts_on != at or rules.asks_for(target, Rung.UPDATED)
        return _await_engine(pod) if may_be_up else Wait()
    if engine.holds(at):
        return _open(pod, rules) if rules.asks_for(target, Rung.SERVING) else Wait()
    if pod.whole == at and (engine.paused or rules.asks_for(target, rules.ladder.shuts_at)):
        return _push(pod, target, rules)
    return _open(pod, rules)


def _start_again(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    """Start the engine on the newest whole export; on the target's only when the group goes on to it."""
    if pod.whole is None:  # this agent has verified none: the trainers report one, or will make one
        exported = {rank.exported for rank in pod.ranks}
        newest = exported.pop() if len(exported) == 1 else None
        return VerifyExport(newest) if newest not in (None, target.version) else Wait()
    return _start_on_whole(pod, target, rules)


def _start_on_whole(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    assert pod.whole is not None, "an engine starts on an export that was verified"
    if pod.whole == target.version and not rules.asks_for(target, Rung.UPDATED):
        return Wait()
    return _start(pod, pod.whole)


def _push(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    """Take the engine from Exported to Updated: it loads new weights into memory that stays mapped."""
    engine = pod.engine
    if (action := _close(pod, rules)) is not None:
        return action
    if not engine.paused:
        return Pause() if rules.asks_for(target, Rung.PAUSED) else Wait()
    if not rules.asks_for(target, Rung.DRAINED):
        return Wait()
    if not (engine.drained and engine.flushed):
        return Flush()
    return Update(target.version) if rules.asks_for(target, Rung.UPDATED) else Wait()


def _train_beside(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    """Train beside the engine. The trainers' state stays on the device from the first step on."""
    if pod.engine.holds(target.version):
        return _rest(pod, target, rules)
    return _train(pod, target, rules) or Wait()


# ------------------------------------------------------------------------------------------------------ disaggregated
def _serve_apart(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    """Keep the engine serving. Verify new weights when nothing else is to be done, other weights only to start on."""
    wanted = target.weights
    if pod.engine.is_absent:
        if wanted is not None and pod.whole not in (wanted, target.version):  # never back from the target's version
            return _verify(pod, wanted)
        return _start_on_whole(pod, target, rules) if pod.whole is not None else Wait()
    choice = _serve_on(pod, target, rules)
    is_idle = isinstance(choice, Wait)
    if wanted == target.version != pod.whole and (is_idle or pod.engine.paused):
        look = _verify(pod, target.version)
        return look if is_idle or isinstance(look, VerifyExport) else choice
    return choice


def _verify(pod: PodView, version: WeightVersion) -> Action | Wait:
    return VerifyExport(version) if pod.now >= pod.verify_after else Wait(until=pod.verify_after)


# -------------------------------------------------------------------------------------------------------------- mixed
def _compare_borrowed(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    """Compare the weights that another pod's trainers have written, while those of this pod leave the devices."""
    is_due = pod.borrows and pod.whole != target.version and rules.asks_for(target, Rung.OFFLOADED)
    return _verify(pod, target.version) if is_due else Wait()


# ----------------------------------------------------------------------------------------------------- one side alone
def _serve_alone(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    """Serve the model as it is."""
    engine = pod.engine
    if not rules.asks_for(target, Rung.SERVING):
        return Wait()
    if engine.is_absent:
        return _start(pod, target.version)
    return _await_engine(pod) if engine.state is EngineState.STARTING else _open(pod, rules)


def _train_alone(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    """Train without an engine in this pod. The trainers' state stays on the device."""
    if rules.ladder.reaches(rules.standing(pod, target), target.rung):
        return _rest(pod, target, rules) if target.rung is rules.ladder.top else Wait()
    return _train(pod, target, rules) or Wait()


# --------------------------------------------------------------------------------------------------------------- both
def _start(pod: PodView, version: WeightVersion) -> Action | Wait:
    engine = pod.engine
    if engine.rejected is not None and engine.rejected.version == version:
        return Wait(reason="WeightsDiffer", message=engine.rejected.message)
    return StartEngine(version) if pod.now >= engine.start_after else Wait(until=engine.start_after)


def _await_engine(pod: PodView) -> Action:
    start_by = pod.engine.start_by
    return AwaitEngine(start_by) if pod.now < start_by else KillEngine("it did not start in time", is_fault=True)


def _open(pod: PodView, rules: Rules) -> Action | Wait:
    """Take an engine that holds weights, with all memory mapped, to an open gate."""
    engine = pod.engine
    assert engine.version is not None, "a gate opens on a version"
    if pod.gate_open:
        return Wait()
    if rules.compares and pod.agreed != (engine.version, engine.checksum):
        return _differ(pod, engine.version)
    if not engine.flushed:
        return Flush()
    if engine.paused:
        return Continue()
    if rules.probes and not engine.agrees:
        return CheckProbe(engine.version)
    return OpenGate(engine.version)


def _differ(pod: PodView, version: WeightVersion) -> Action | Wait:
    """Wait until the group has agreed on a checksum, or kill an engine whose checksum differs."""
    if pod.agreed is None or pod.agreed[0] != version:
        return Wait()
    words = f"its weights {version} have checksum {pod.engine.checksum}, those of most engines {pod.agreed[1]}"
    return KillEngine(words, is_fault=True, doubts=version)


def _rest(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait:
    """Do the work that can run beside rollout, once the pod stands at the target's rung."""
    if rules.standing(pod, target) is not rules.ladder.top:
        return Wait()
    if pod.stale_exports:  # before a checkpoint: the next export may soon be written
        return RemoveExports(keep=target.version)
    is_due = target.is_last or (target.saves and target.step > 0) or rules.checkpoint_is_due(target.step)
    is_there = all(rank.step == target.step for rank in pod.ranks) and _may_save(pod, rules)
    if not is_there:
        return Wait()
    if _lacks_mirror(pod, target.step, rules):  # first: another pod may not know yet that the step is to be saved
        return Mirror(target.step)
    if not is_due:
        return Wait()
    if _lacks_checkpoint(pod, target.step):
        return _keep(pod, Save(target.step))
    return _keep(pod, SaveModel(target.version)) if target.is_last and _lacks_model(pod, target.version) else Wait()


def _end(pod: PodView, rules: Rules, *, code: int, keeps: PodTarget | None = None) -> Action | Wait:
    """Hand partial samples back, then end everything. keeps: the target whose step may be saved before."""
    if pod.gate_open:
        return CloseGate()
    if pod.in_flight > 0:
        return _interrupt(pod, rules)
    if not pod.engine.is_absent:
        return KillEngine("the pod ends")
    if keeps is not None and (action := _save_last(pod, keeps, rules)) is not None:
        return action
    if any(rank.is_alive for rank in pod.ranks):
        return StopTrainers("the pod ends")
    return EndPod(code)


def _save_last(pod: PodView, target: PodTarget, rules: Rules) -> Action | Wait | None:
    """Save the step at which the group rests, with all other pods, if the operator asks for it. Return None once there
    is nothing to save or nobody asks.

    No rank begins by itself: others might be beyond that step. The runner ends the ranks if they take too long.
    """
    is_there = all(rank.lineage == target.lineage and rank.step == target.step for rank in pod.ranks)
    is_wanted = target.goal is Goal.CLIMB and target.step > 0 and _lacks_checkpoint(pod, target.step)
    if not (is_there and is_wanted and _may_save(pod, rules)) or pod.now < pod.keep_after:
        return None
    if not target.saves:
        until = pod.signalled_at + ORDER_S
        return Wait(until=until) if pod.now < until else None
    return Mirror(target.step) if _lacks_mirror(pod, target.step, rules) else Save(target.step)


def _close(pod: PodView, rules: Rules) -> Action | Wait | None:
    """Close the gate for a switch. Return None once nothing is in flight behind it."""
    if pod.gate_open:
        return CloseGate()
    return _settle(pod, rules) if pod.in_flight > 0 else None


def _settle(pod: PodView, rules: Rules) -> Action | Wait:
    """Let requests in flight finish for a switch, if the job waits for them, then interrupt them."""
    interrupted_at = pod.closed_at + rules.wait_s
    return Wait(until=interrupted_at) if pod.now < interrupted_at else _interrupt(pod, rules)


def _interrupt(pod: PodView, rules: Rules) -> Action | Wait:
    until = pod.closed_at + rules.settle_s
    if pod.engine.is_absent:
        return Wait()  # its connections are broken: requests end by themselves
    if pod.now >= until:
        late = f"{pod.in_flight} requests were in flight {rules.settle_s:.0f} s after the gate closed"
        return KillEngine(late, is_fault=True)
    return AbortAll(until)


def _keep(pod: PodView, action: Save | SaveModel) -> Action | Wait:
    """Save now, or wait for the back-off after a failed save. Trainers that find no room keep their state. Meanwhile
    rollout goes on, and past a rung's deadline the operator decides.
    """
    return action if pod.now >= pod.keep_after else Wait(until=pod.keep_after)


def _may_save(pod: PodView, rules: Rules) -> bool:
    """Return whether all ranks are idle, and off the device if an engine needs it: saving runs beside rollout."""
    return all(
        rank.state is TrainerState.OFFLOADED or (rank.state is TrainerState.ONLOADED and not rules.releases)
        for rank in pod.ranks
    )


def _any_offloaded(pod: PodView) -> bool:
    return any(rank.state is TrainerState.OFFLOADED for rank in pod.ranks)


def _lacks_checkpoint(pod: PodView, step: int) -> bool:
    return any(rank.saved is None or rank.saved < step for rank in pod.ranks)


def _lacks_mirror(pod: PodView, step: int, rules: Rules) -> bool:
    """Return whether the step must still be kept in memory: it is not the model's, and no checkpoint of it is due.

    Nothing counts here that only some pods may know.
    """
    is_kept = step == 0 or rules.checkpoint_is_due(step) or not _lacks_checkpoint(pod, step)
    return not is_kept and any(rank.can_mirror and rank.mirrored != step for rank in pod.ranks)


def _lacks_model(pod: PodView, version: WeightVersion) -> bool:
    """Return whether the final model must still be saved, which rank 0 does."""
    return any(rank.rank == 0 and rank.can_finish and rank.finished != version for rank in pod.ranks)
