"""A pod as a value: what its agent believes, what is so, and an operator, where everything may fail at any point.

The agent's real table (`planner.next_actions` of the agent) chooses each action; a check of the truth stands before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any, assert_never

from hypothesis import strategies as st

from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.planner.next_actions import Rules, next_actions
from colocated_rl_agent.planner.views import (
    CUDA_GRAPH,
    KV_CACHE,
    TAGS,
    WEIGHTS,
    EngineView,
    PodView,
    RankView,
)
from colocated_rl_api.facts import EngineState, TagState, TrainerState
from colocated_rl_api.job import Verify
from colocated_rl_api.ladder import (
    RESIDENT,
    SCORED_RESIDENT,
    SCORED_TIME_SLICED,
    TIME_SLICED,
    Ladder,
)
from colocated_rl_api.member_wire import (
    Endpoint,
    Goal,
    PodTarget,
    Rendezvous,
)
from colocated_rl_api.rungs import Rung, WeightVersion

V0 = WeightVersion(0, 1)
RULES = Rules(TIME_SLICED, settle_s=30.0, checkpoint_every=2, verify=Verify.PROBE)
NOW = 100.0
NEW_POD = PodView(
    now=NOW,
    runner_known=True,
    terminating=False,
    gate_open=False,
    in_flight=0,
    closed_at=NOW,
    engine=EngineView(),
    ranks=(RankView(0),),
)
KEPT = ((), (WEIGHTS,), (CUDA_GRAPH,), (WEIGHTS, CUDA_GRAPH))  # of a time-sliced engine; never the KV cache
KINDS = [*((TIME_SLICED, keeps) for keeps in KEPT), (RESIDENT, ()), (SCORED_TIME_SLICED, ()), (SCORED_RESIDENT, ())]


def make_target(version: WeightVersion, rung: Rung, *, goal: Goal = Goal.CLIMB) -> PodTarget:
    return PodTarget(
        epoch=1,
        goal=goal,
        step=version.step,
        lineage=version.lineage,
        rung=rung,
        rendezvous=Rendezvous(address="10.0.0.1", port=29500, world_size=1),
        batches=Endpoint(pod="rollout", address="10.0.0.2", port=8444),
    )


CANT_FAIL = (do.KillEngine, do.StopTrainers, do.CloseGate, do.OpenGate)


class Chance(Enum):
    """What may happen instead of the next action's plain success."""

    GOES_WELL = auto()
    FAILS = auto()  # the call is answered no, or not at all
    FAILS_AFTER_ITS_EFFECT = auto()  # the agent can't tell it from the one before
    ENGINE_DIES = auto()
    TRAINER_DIES = auto()
    BOTH_DIE = auto()
    AGENT_RESTARTS = auto()
    AGENT_RESTARTS_MEANWHILE = auto()  # the call had its effect, nobody wrote it down
    REQUESTS_COME = auto()
    TIME_PASSES = auto()


@dataclass
class Engine:
    """The truth about an engine process."""

    number: int
    version: WeightVersion | None
    up: bool = False
    paused: bool = False
    released: set[str] = field(default_factory=set)
    flushed_in: int = -1  # closing of the gate in which the last flush was


@dataclass
class World:
    """A pod, its operator, and the checks. `view` is what the agent believes, the rest is so."""

    view: PodView
    ladder: Ladder = TIME_SLICED
    keeps: tuple[str, ...] = ()
    epoch_version: WeightVersion = V0
    engine: Engine | None = None
    on_device: bool = False
    journal_version: WeightVersion | None = None
    closings: int = 0
    releases: set[tuple[int, int]] = field(default_factory=set)  # (engine, closing)
    started: int = 0
    pending: bool = False
    turns: int = 0
    last_waits: tuple[do.Action | do.Wait, ...] = ()

    @cached_property
    def rules(self) -> Rules:
        return replace(RULES, ladder=self.ladder)

    # ------------------------------------------------------------------------------------------------- the operator
    def target(self) -> PodTarget:
        """A trainer that died calls for a new lineage, unless the pod serves; so do weights that are rejected.

        Else one barrier up.
        """
        at = self.epoch_version
        rung = self.ladder.standing(self.view.facts(), at)
        rank = self.view.ranks[0]
        has_died = rung is not Rung.SERVING and rank.lineage == at.lineage and not rank.is_alive
        if has_died or self.rejects(at):
            self.epoch_version = at = WeightVersion(at.step, at.lineage + 1)
            rung = self.ladder.standing(self.view.facts(), at)
        return make_target(at, self.ladder.next_barrier(rung))

    # --------------------------------------------------------------------------------------------------- what happens
    def advance(self, chance: Chance) -> None:
        self.befall(chance)
        elapsed = 40.0 if chance is Chance.TIME_PASSES else 0.01
        self.view = replace(self.view, now=self.view.now + elapsed)
        choices = next_actions(self.view, self.target(), self.rules)
        actions = [choice for choice in choices if not isinstance(choice, do.Wait)]
        if not actions:
            self.last_waits = choices
            until = max((choice.until or 0.0 for choice in choices if isinstance(choice, do.Wait)), default=0.0)
            self.view = replace(self.view, now=max(self.view.now, until))
            return
        self.turns += 1
        action = actions[self.turns % len(actions)]
        self.check(action)
        before = self.view
        fails = chance in (Chance.FAILS, Chance.FAILS_AFTER_ITS_EFFECT) and not isinstance(action, CANT_FAIL)
        if chance is not Chance.FAILS or not fails:
            self.take_effect(action)
        if fails:
            self.view = before
            self.fail(action)
        if chance is Chance.AGENT_RESTARTS_MEANWHILE:
            self.pending = isinstance(action, do.Release | do.Resume | do.Update)
            self.agent_restarts()

    def fail(self, action: do.Action) -> None:
        if isinstance(action, do.StartEngine):
            self.engine = None
            self.set_engine(self.view.engine.gone(start_after=self.view.now + 1))
        elif isinstance(action, do.StartTrainers):
            self.set_rank(RankView(0).started("", action.lineage, start_by=0.0).gone(127))
        elif isinstance(action, do.CheckProbe):
            self.set_engine(self.view.engine.was_doubted(action.version, "it differs", TAGS))
        elif action.lane is do.Lane.ENGINE:
            self.set_engine(self.view.engine.broke("it failed", TAGS))
        elif isinstance(action, do.FetchShards):
            self.view = replace(self.view, fetch_after=self.view.now + 1)
        else:
            self.on_device = self.on_device or isinstance(action, do.Onload)
            self.set_rank(self.view.ranks[0].broke("it failed"))

    def befall(self, chance: Chance) -> None:
        """What happens to the pod by itself."""
        if chance in (Chance.ENGINE_DIES, Chance.BOTH_DIE):
            self.engine_dies()
        if chance in (Chance.TRAINER_DIES, Chance.BOTH_DIE):
            self.trainer_dies()
        if chance is Chance.AGENT_RESTARTS:
            self.agent_restarts()
        if chance is Chance.REQUESTS_COME and self.view.gate_open:
            assert self.engine is not None
            assert not self.engine.paused
            assert not self.engine.released
            self.view = replace(self.view, in_flight=3)

    def engine_dies(self) -> None:
        self.engine = None
        self.set_engine(self.view.engine.gone())
        self.view = replace(self.view, in_flight=0)

    def trainer_dies(self) -> None:
        if self.view.ranks[0].is_alive:
            self.on_device = False
            self.set_rank(self.view.ranks[0].gone(-9))

    def agent_restarts(self) -> None:
        """As `engine.Engine.attach`: what the journal says, and what the engine can be asked."""
        self.closings += 1
        engine, view = self.engine, EngineView()
        if engine is not None:
            start_by, on = self.view.now + 30, self.journal_version or V0
            view = EngineView().started(str(engine.number), on, start_by=start_by, keeps=self.keeps)
            if engine.up:
                whole = not engine.released
                view = replace(
                    view.answered(V0),
                    version=engine.version,
                    paused=engine.paused,
                    drained=engine.paused and not whole,
                    flushed=False,
                    tags={**view.tags, **dict.fromkeys(engine.released, TagState.RELEASED)},
                )
            if self.pending:
                view = view.broke("the agent ended during a call", TAGS)
        self.pending = False
        self.view = replace(
            self.view,
            gate_open=False, in_flight=0, closed_at=self.view.now, engine=view, whole=None, shards=None,
        )  # fmt: skip

    def set_engine(self, engine: EngineView) -> None:
        self.view = replace(self.view, engine=engine)

    def set_rank(self, rank: RankView) -> None:
        self.view = replace(self.view, ranks=(rank,))

    def rejects(self, version: WeightVersion) -> bool:
        rejected = self.view.engine.rejected
        return rejected is not None and rejected.version == version

    # ------------------------------------------------------------------------------------------------------ the checks
    def check(self, action: do.Action) -> None:
        """What must be true of the pod, not of what the agent believes, when an action is taken."""
        engine = self.engine
        if self.ladder.serves_on:
            assert not isinstance(action, do.Release | do.Resume | do.Offload), "nothing leaves the device"
            is_well = self.view.engine.state is EngineState.READY and self.view.engine.broken is None
            if isinstance(action, do.CloseGate) and is_well:
                assert self.view.whole == self.epoch_version, "no gate closes before the new weights are there"
        if isinstance(action, do.Release):
            assert engine is not None
            assert not self.view.gate_open
            assert self.view.in_flight == 0
            assert engine.paused
            assert engine.flushed_in == self.closings, "drained since the gate last closed"
            assert not engine.released
            assert (engine.number, self.closings) not in self.releases, "once per incarnation and closing"
            self.releases.add((engine.number, self.closings))
        if isinstance(action, do.StartEngine | do.Resume):
            assert self.ladder.serves_on or not self.on_device, "no engine memory while a trainer is on the device"
        if isinstance(action, do.StartEngine | do.Update):
            assert self.view.whole == action.version
            assert not self.rejects(action.version), "two engines were not shown to hold these"
        if isinstance(action, do.Update):
            assert engine is not None
            assert not self.view.gate_open
            assert self.view.in_flight == 0
            assert engine.paused
            assert not self.ladder.serves_on or engine.flushed_in == self.closings, "drained since the gate closed"
        if isinstance(action, do.Resume):
            assert engine is not None
            assert set(action.tags) <= engine.released
        if isinstance(action, do.Onload | do.Score | do.Train | do.Export):
            is_off = engine is None or engine.released == set(TAGS) - set(self.keeps)
            assert self.ladder.serves_on or is_off, "no trainer while engine memory is mapped that it does not keep"
            assert self.ladder.serves_on or engine is None or KV_CACHE in engine.released
        if isinstance(action, do.Update):
            assert engine is not None
            assert WEIGHTS not in engine.released
        if isinstance(action, do.Continue | do.OpenGate):
            assert engine is not None
            assert not engine.released
            assert self.ladder.serves_on or engine.version == self.epoch_version
        if isinstance(action, do.OpenGate):
            assert action.version == self.view.engine.version
            assert engine is not None
            assert not engine.paused
            assert self.view.engine.agrees

    def take_effect(self, action: do.Action) -> None:  # noqa: C901 - a table
        engine, view, rank = self.engine, self.view.engine, self.view.ranks[0]
        match action:
            case do.CloseGate():
                self.closings += 1
                self.view = replace(self.view, gate_open=False, closed_at=self.view.now, engine=view.gate_closed())
            case do.OpenGate():
                self.view = replace(self.view, gate_open=True)
            case do.StartEngine(version=version):
                self.started += 1
                self.engine, self.journal_version = Engine(self.started, version), version
                start_by = self.view.now + 30
                self.set_engine(view.started(str(self.started), version, start_by=start_by, keeps=self.keeps))
            case do.KillEngine():
                self.engine_dies()
            case do.StopTrainers():
                self.trainer_dies()
            case do.AbortAll():
                self.view = replace(self.view, in_flight=0)
            case do.StartTrainers(lineage=lineage):
                self.set_rank(RankView(0).started("t", lineage, start_by=self.view.now + 30))
            case do.AwaitTrainers():
                self.set_rank(rank.reported(state=TrainerState.OFFLOADED, step=0, saved=0))
            case do.FetchShards(step=step):
                self.view = replace(self.view, shards=step)
            case do.Onload():
                self.on_device = True
                self.set_rank(rank.reported(state=TrainerState.ONLOADED))
            case do.Offload():
                self.on_device = False
                self.set_rank(rank.reported(state=TrainerState.OFFLOADED))
            case do.Score(step=step):
                assert rank.step == step - 1
                self.set_rank(rank.reported(scored=step))
            case do.Train(step=step):
                assert not self.ladder.scores or rank.scored == step, "no batch is trained unscored"
                self.set_rank(rank.reported(step=step))
            case do.Export(version=version):
                self.set_rank(rank.reported(exported=version))
            case do.VerifyExport(version=version):
                self.view = replace(self.view, whole=version)
            case do.Save(step=step):
                self.set_rank(rank.reported(saved=step))
            case do.RemoveExports() | do.SaveModel() | do.EndPod():
                raise AssertionError(f"{action} is not expected here")
            case _:
                assert engine is not None
                self.set_engine(self.change_engine(action, engine, view))

    def change_engine(self, action: do.EngineAction, engine: Engine, view: EngineView) -> EngineView:
        match action:
            case do.AwaitEngine():
                engine.up = True
                assert engine.version is not None
                return view.answered(engine.version)
            case do.Pause():
                engine.paused = True
                return view.was_paused()
            case do.Flush():
                engine.flushed_in = self.closings if engine.paused else -1
                return view.was_flushed()
            case do.Release():
                engine.released = set(TAGS) - set(self.keeps)
                engine.version = engine.version if WEIGHTS in self.keeps else None
                return view.was_released()
            case do.Resume(tags=tags):
                engine.released -= set(tags)
                return view.was_resumed(tags)
            case do.Update(version=version):
                engine.version = version
                return view.was_updated(version)
            case do.Continue():
                engine.paused = False
                return view.was_continued()
            case do.CheckProbe():
                return view.agreed()
            case do.StartEngine() | do.KillEngine() | do.AbortAll():
                raise AssertionError(f"{action} is not a call that changes an engine")
            case _:
                assert_never(action)


CHANCES: dict[str, st.SearchStrategy[Any]] = {
    "chances": st.dictionaries(st.integers(0, 70), st.sampled_from(Chance), max_size=8),
    "steps": st.integers(1, 3),
}


def must_arrive(ladder: Ladder, keeps: tuple[str, ...], *, chances: dict[int, Chance], steps: int) -> None:
    """chances: what happens at which action; all others go well."""
    world, action = World(NEW_POD, ladder, keeps), 0
    for step in range(steps + 1):
        world.epoch_version = WeightVersion(step, world.epoch_version.lineage)
        while ladder.standing(world.view.facts(), world.epoch_version) is not Rung.SERVING:
            world.advance(chances.get(action, Chance.GOES_WELL))
            action += 1
            assert action < 600, f"stuck below Serving: {world.last_waits}, {world.view}"
        world.view = replace(world.view, in_flight=2)
    assert WeightVersion(steps, world.epoch_version.lineage) == world.view.engine.version
