"""A pod's life with all that can go wrong in it: the real agent, its journal and its sockets, and no processes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from full_disk import no_room_in
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import TOGETHER
from colocated_rl_agent.agent import Agent
from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.runner.runner_link import ChildExited, ChildStatus, RunnerUnreachable
from colocated_rl_api.facts import EngineState, TrainerState
from colocated_rl_api.ladder import TIME_SLICED, Ladder, ladder_for
from colocated_rl_api.member_wire import Refusal
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from fakes.engine import VOCABULARY, FakeEngine
from fakes.small_pod import ASKED, PATIENT_S, SOON_S, SmallPod, small_pod

V0, V1, V2 = (WeightVersion(step, 1) for step in range(3))
OFFLOADS: dict[Placement, dict[str, Any]] = {
    Placement.TIME_SLICED: {},
    Placement.RESIDENT: {"rollout": {"offload": []}},
}
OFFLOADED: dict[Placement, list[list[str]]] = {
    Placement.TIME_SLICED: [["Weights", "KVCache", "CUDAGraph"], ["KVCache"], ["KVCache", "CUDAGraph"]],
    Placement.RESIDENT: [[]],
}
both_ladders = pytest.mark.parametrize("placement", TOGETHER)
ENGINE_ROUTES = (
    "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/release_memory_occupation",
    "/resume_memory_occupation", "/update_weights_from_disk", "/weights_checker", "/model_info", "/ready", "/generate",
)  # fmt: skip
TRAINER_ROUTES = ("onload", "score", "train", "export", "offload", "save")


@dataclass
class Life:
    """A pod, where it is going, and who has asked it something."""

    pod: SmallPod
    version: WeightVersion = V0
    asked: list[asyncio.Task[str]] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.asked = []

    async def step(self, to: Rung) -> None:
        if self.pod.ladder.standing(self.pod.facts, self.version) is Rung.SERVING:
            self.version = WeightVersion(self.version.step + 1, self.version.lineage)
        self.version = await self.pod.climb(self.version, to)

    async def skip_barriers(self, to: Rung) -> None:
        """Send a target straight to a rung, without waiting for any barrier, which no plan does."""
        self.pod.epoch += 1
        self.pod.send(self.pod.target(self.version, to))

    async def be_told_by_the_past(self, to: Rung) -> None:
        if self.pod.epoch > 1:
            before = self.pod.agent.server.target
            refusal = self.pod.send(self.pod.target(self.version, to, epoch=self.pod.epoch - 1))
            if refusal is None:  # of an agent that has not heard of the newer epoch, as nothing was sent in it
                assert self.pod.agent.server._fence.highest_epoch < self.pod.epoch
            else:
                assert "StaleEpoch" == refusal.reason
                assert before == self.pod.agent.server.target

    async def engine_fails(self, route: str, fault: str) -> None:
        if self.pod.engine is not None:
            self.pod.engine.faults[route] = fault

    async def trainer_fails(self, route: str, fault: str) -> None:
        if self.pod.trainer is not None:
            self.pod.trainer.faults[route] = fault

    def engine_is_known(self) -> bool:
        """Return whether the agent knows each engine's state: of one that is dead, the agent has heard."""
        return all(
            engine.name in self.pod.engines or engine.state is EngineState.ABSENT for engine in self.pod.facts.engines
        )

    async def child_dies(self, name: str) -> None:
        await self.pod.runner.end_child(name, -9)

    async def agent_restarts(self, orderly: bool) -> None:
        await self.pod.restart_agent(orderly=orderly)

    async def container_restarts(self) -> None:
        await self.pod.restart_container()

    async def runner_link_breaks(self, request: str | None) -> None:
        """At once, or before the answer to the next such request."""
        self.pod.runner.breaks_in = request
        if request is None:
            self.pod.runner.hang_up()

    async def ask(self, stream: bool, leaves_after_s: float | None) -> None:
        self.asked.append(asyncio.create_task(self.pod.ask(stream=stream, leaves_after_s=leaves_after_s)))

    async def time_passes(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


Move = Callable[[Life], Coroutine[Any, Any, None]]


def move(
    method: Callable[..., Coroutine[Any, Any, None]], *arguments: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(method), st.tuples(*arguments))


def moves_on(ladder: Ladder) -> st.SearchStrategy[Any]:
    rungs = st.sampled_from(ladder.rungs[1:])
    return st.one_of(
        move(Life.step, rungs),
        move(Life.skip_barriers, rungs),
        move(Life.be_told_by_the_past, rungs),
        move(
            Life.engine_fails,
            st.sampled_from(ENGINE_ROUTES),
            st.sampled_from(["hang", "error", "crash", "act_then_hang"]),
        ),
        move(
            Life.trainer_fails,
            st.sampled_from(TRAINER_ROUTES),
            st.sampled_from(["hang", "error", "crash", "act_then_hang"]),
        ),
        move(Life.child_dies, st.sampled_from(["engine-0", "engine-1", "trainer-0"])),
        move(Life.agent_restarts, st.booleans()),
        move(Life.container_restarts),
        move(Life.runner_link_breaks, st.sampled_from([None, "start", "kill"])),
        move(Life.ask, st.booleans(), st.sampled_from([None, 0.02])),
        move(Life.time_passes, st.floats(0, 0.05)),
    )


@both_ladders
@settings(max_examples=40)
@given(data=st.data())
def test_whatever_happens_nothing_is_broken_and_the_pod_serves_again(placement: Placement, data: st.DataObject) -> None:
    """I1, I5, I6, I7 and the tokens of callers: `SmallPod.broken` is what none of it may do."""
    reference: dict[str, Any] | None = data.draw(st.sampled_from([None, {}]))
    moves = data.draw(st.lists(moves_on(ladder_for(placement, scores=reference is not None)), max_size=7))

    engines = data.draw(st.integers(1, 2))
    rollout = {"offload": data.draw(st.sampled_from(OFFLOADED[placement])), "engine": {"perPod": engines}}
    replicas = data.draw(st.integers(1, 2))  # one engine alone is compared with nothing

    async def live() -> None:
        often = {"everySteps": 2}
        spec: dict[str, Any] = {
            "checkpoint": often,
            "rollout": rollout,
            "replicas": replicas,
            "reference": reference,
        }
        async with small_pod(gives_up_s=SOON_S, **spec) as pod:
            life = Life(pod)
            for what, arguments in moves:
                await what(life, *arguments)
            await pod.news(life.engine_is_known)  # or it may serve, until its agent hears that it is dead
            for sick in (*pod.engines.values(), pod.trainer):
                if sick is not None:
                    sick.faults.clear()
            pod.runner.breaks_in = None
            await life.step(Rung.SERVING)
            assert "length" == await pod.ask(tokens=4)
            for engine in pod.engines.values():
                engine.abort("", everything=True)
            assert {"length", "abort", "closed", "left", "broken"} >= set(await asyncio.gather(*life.asked))
            assert [] == pod.broken

    asyncio.run(live())


WAYS = list(itertools.product(ASKED, (False, True), (None, 0.01)))


@both_ladders
@pytest.mark.parametrize("steps", [2])
async def test_h1_h2_h3_requests_at_every_instant_of_a_switch_all_end_and_the_count_balances(
    steps: int, placement: Placement
) -> None:
    async with small_pod(**OFFLOADS[placement]) as pod:
        life = Life(pod)
        instants: list[str] = []

        def ask_in_all_ways(route: str) -> None:
            if route not in ASKED:
                instants.append(route)
                for path, stream, leaves_after_s in WAYS:
                    asking = pod.ask(path=path, stream=stream, leaves_after_s=leaves_after_s)
                    life.asked.append(asyncio.create_task(asking))

        await life.step(Rung.SERVING)
        engine = pod.engine
        pod.on_call = ask_in_all_ways
        for _ in range(steps):
            ask_in_all_ways("before the switch")
            await life.step(Rung.SERVING)
        pod.on_call = lambda route: None
        assert pod.engine is not None
        assert engine is pod.engine, "none of them kept it from settling"
        while not all(asked.done() for asked in life.asked):
            pod.engine.abort("", everything=True)
            await asyncio.sleep(0.01)
        outcomes = [asked.result() for asked in life.asked]
        assert {"abort", "closed", "left"} >= set(outcomes), "nothing hangs, nothing breaks off"
        assert len(instants) >= (8 if placement is Placement.TIME_SLICED else 6) * steps
        assert {} == pod.engine.samples, "nothing is generated for nobody"
        assert 0 == pod.agent._gate.in_flight
        assert [] == pod.broken


@both_ladders
@pytest.mark.parametrize(("tokens", "settle_s", "ending"), [(150, 60, "length"), (4000, 4, "abort")])
async def test_f86_response_under_way_finishes_before_the_switch_goes_on(
    placement: Placement, tokens: int, settle_s: int, ending: str
) -> None:
    """One that takes too long is interrupted all the same."""
    rollout = OFFLOADS[placement].get("rollout", {}) | {"interruption": "Wait"}
    async with small_pod(rollout=rollout, switch={"settleSeconds": settle_s}) as pod:
        await pod.climb(V0)
        engine = pod.engine
        assert engine is not None
        asked = asyncio.create_task(pod.ask(tokens=tokens))
        await pod.news(lambda: any(sample.output for sample in engine.samples.values()))
        await pod.climb(V1)
        assert ending == await asked
        assert engine is pod.engine
        assert (ending == "abort") == ("/abort_request" in [route for route, _ in engine.calls])
        assert [] == pod.broken


CALLS = (
    "/pause_generation", "/flush_cache", "/release_memory_occupation", "/resume_memory_occupation",
    "/update_weights_from_disk", "/continue_generation", "/model_info", "/ready",
)  # fmt: skip


RELEASES = ("/release_memory_occupation", "/resume_memory_occupation")


async def serving_engine(pod: SmallPod) -> FakeEngine:
    """Return the engine once it serves V0. Its calls are counted from here on."""
    await pod.climb(V0)
    assert pod.engine is not None
    pod.engine.calls.clear()
    return pod.engine


@pytest.mark.parametrize("fault", ["hang", "error", "act_then_hang", "crash"])
@pytest.mark.parametrize(
    ("route", "placement"),
    [
        (route, placement)
        for route in CALLS
        for placement in TOGETHER
        if placement is not Placement.RESIDENT or route not in RELEASES
    ],
)
async def test_h10_h15_h50_h54_call_without_a_good_answer_costs_the_engine_and_is_not_sent_again(
    route: str, placement: Placement, fault: str
) -> None:
    is_late = "hang" in fault or route == "/ready"  # which is repaired, by a call that takes a second
    gives_up_s = SOON_S if is_late else PATIENT_S
    async with small_pod(gives_up_s=gives_up_s, **OFFLOADS[placement]) as pod:
        engine = await serving_engine(pod)
        engine.faults[route] = fault
        await pod.climb(V1)
        assert engine is not pod.engine
        sent = [path.partition("?")[0] for path, _ in engine.calls]
        assert sent.count(route) == (1 if route in sent else 0)
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


@pytest.mark.parametrize("fault", ["hang", "act_then_hang"])
@pytest.mark.parametrize(
    ("route", "placement"),
    [*((route, Placement.TIME_SLICED) for route in CALLS[2:5]), (CALLS[4], Placement.RESIDENT)],
)
async def test_h10_agent_that_dies_in_a_call_leaves_an_engine_that_nobody_calls_again(
    route: str, placement: Placement, fault: str
) -> None:
    async with small_pod(**OFFLOADS[placement]) as pod:
        engine = await serving_engine(pod)
        engine.faults[route] = fault
        called = asyncio.Event()
        pod.on_call = lambda path: called.set() if path == route else None
        climbing = asyncio.create_task(pod.climb(V1))
        await called.wait()
        await pod.restart_agent(orderly=False)
        await climbing
        assert engine is not pod.engine
        assert 1 == [path for path, _ in engine.calls].count(route)
        assert [] == pod.broken


@pytest.mark.parametrize(
    ("before", "placement", "is_spared"),
    [
        ("/flush_cache", Placement.TIME_SLICED, True),  # the intent of the release is not written, nor is it sent
        *((route, Placement.TIME_SLICED, False) for route in (*RELEASES, "/update_weights_from_disk")),
        ("/flush_cache", Placement.RESIDENT, True),
        ("/update_weights_from_disk", Placement.RESIDENT, False),
    ],
)
async def test_i6_agent_whose_journal_finds_no_room_ends_and_what_nobody_knows_costs_the_engine(
    before: str, placement: Placement, is_spared: bool
) -> None:
    async with small_pod(**OFFLOADS[placement]) as pod:
        engine = await serving_engine(pod)
        with ExitStack() as disk:
            called = asyncio.Event()

            def fill(route: str) -> None:
                if route == before and not called.is_set():
                    disk.enter_context(no_room_in(pod.agent._journal._file))
                    called.set()

            pod.on_call = fill
            climbing = asyncio.create_task(pod.climb(V1))
            await called.wait()
            error = await pod.agent_ends()
            assert isinstance(error, ExceptionGroup)
            assert error.split(OSError)[1] is None, "and nothing else"
        await pod.start_agent()
        await climbing
        assert is_spared is (engine is pod.engine)
        sent = [path.partition("?")[0] for path, _ in engine.calls]
        assert {0, 1} >= {sent.count(route) for route in ("/release_memory_occupation", "/update_weights_from_disk")}
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


@both_ladders
async def test_h22_engine_that_says_another_version_than_it_was_given_is_replaced(placement: Placement) -> None:
    async with small_pod(**OFFLOADS[placement]) as pod:
        started: list[object] = []

        def misname_the_first(route: str) -> None:
            assert pod.engine is not None
            if pod.engine not in started:
                started.append(pod.engine)
                pod.engine.shown_version = "9-9" if len(started) == 1 else pod.engine.shown_version

        pod.on_call = misname_the_first
        await pod.climb(V0)
        assert 2 == len(started), "at its start"
        engine = pod.engine
        assert engine is not None
        engine.faults["/update_weights_from_disk"] = "misname"
        await pod.climb(V1)
        assert engine is not pod.engine, "after an update"
        assert pod.engine is not None
        engine, pod.engine.shown_version = pod.engine, "9-9"
        await pod.restart_agent(orderly=False)
        await pod.climb(V1)
        assert engine is not pod.engine, "when an agent finds it"
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


RELEASING = (do.Release, do.Resume)


@pytest.mark.parametrize(
    ("placement", "chosen"),
    [
        (placement, action)
        for placement in TOGETHER
        for action in (do.AwaitEngine, do.AbortAll, do.Pause, do.Flush, do.Update, do.Continue, *RELEASING)
        if placement is Placement.TIME_SLICED or action not in RELEASING
    ],
)
async def test_engine_that_ends_between_the_choice_of_an_action_and_its_beginning_is_replaced(
    placement: Placement, chosen: type[do.EngineAction], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_pod(**OFFLOADS[placement]) as pod:
        ended: list[str] = []

        def end_engine(agent: Agent, action: do.LaneAction, engine: int) -> None:
            put_in_lane(agent, action, engine)
            incarnation = agent._engines[engine].view.incarnation
            if isinstance(action, chosen) and not ended and incarnation is not None:
                ended.append(incarnation)
                pod._ends("engine-0", 1)
                what = {"name": "engine-0", "incarnation": incarnation, "code": 1, "tail": (), "killed": False}
                agent._on_runner(ChildExited.model_validate({"event": "exited", **what}))

        put_in_lane = Agent._put_in_lane
        monkeypatch.setattr(Agent, "_put_in_lane", end_engine)
        await pod.climb(V0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pod.ask(tokens=4000))
            await pod.news(lambda: pod.agent._gate.in_flight == 1)
            await pod.climb(V1)
        assert 1 == len(ended)
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


@both_ladders
@pytest.mark.parametrize("rung", [Rung.TRAINED, Rung.SERVING])
async def test_token_that_no_model_knows_is_refused_by_every_agent_of_an_engine(
    placement: Placement, rung: Rung
) -> None:
    """The engine died of it, and so did the next one that was asked."""
    async with small_pod(**OFFLOADS[placement]) as pod:
        await pod.climb(V0)
        engine = pod.engine
        assert "refused" == await pod.ask(input_ids=[VOCABULARY])
        await pod.climb(V1, rung)
        await pod.restart_agent(orderly=False)
        await pod.climb(V1)
        assert "refused" == await pod.ask(input_ids=[VOCABULARY])
        assert "length" == await pod.ask(tokens=4)
        assert engine is pod.engine
        assert [] == pod.broken


@both_ladders
async def test_i6_engine_whose_start_finds_no_room_in_the_journal_is_nobodys_and_ends(placement: Placement) -> None:
    async with small_pod(**OFFLOADS[placement]) as pod:
        await pod.climb(V0)
        with no_room_in(pod.agent._journal._file):
            await pod.runner.end_child("engine-0", -9)
            await pod.agent_ends()
            unknown = pod.engine
        assert unknown is not None
        await pod.start_agent()
        await pod.climb(V0)
        assert unknown is not pod.engine
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


@both_ladders
async def test_h12_h25_h26_h50_weights_change_once_while_nothing_runs_and_leave_no_cache(placement: Placement) -> None:
    async with small_pod(**OFFLOADS[placement]) as pod:
        await pod.climb(V0)
        seen: list[tuple[str, bool, int]] = []

        def look(route: str) -> None:
            assert pod.engine is not None
            seen.append((route, pod.engine.paused, len(pod.engine.running)))

        asked = [asyncio.create_task(pod.ask()) for _ in range(5)]
        await pod.news(lambda: pod.agent._gate.in_flight == 5)
        pod.on_call = look
        await pod.climb(V1)
        assert ["abort"] * 5 == await asyncio.gather(*asked)
        assert [("/update_weights_from_disk", True, 0)] == [call for call in seen if "update" in call[0]]
        assert pod.engine is not None
        assert not pod.engine.stale_cache
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


@both_ladders
async def test_h55_engine_is_paused_only_when_nothing_is_in_flight(placement: Placement) -> None:
    async with small_pod(**OFFLOADS[placement]) as pod:
        await pod.climb(V0)
        asked = [asyncio.create_task(pod.ask(stream=stream)) for stream in (False, True) * 3]
        in_flight: dict[str, int] = {}

        def look(route: str) -> None:
            in_flight[route] = pod.agent._gate.in_flight

        pod.on_call = look
        await pod.news(lambda: pod.agent._gate.in_flight == 6)
        await pod.climb(V1, to=Rung.DRAINED)
        assert ["abort"] * 6 == await asyncio.gather(*asked)
        assert 0 == in_flight["/pause_generation"]


@both_ladders
async def test_target_that_is_not_on_the_ladder_is_refused_and_nothing_else_happens(placement: Placement) -> None:
    """It ended the agent, and the next one as soon as it was told again."""
    async with small_pod(**OFFLOADS[placement]) as pod:
        await pod.climb(V0)
        before = pod.agent.server.target
        for rung in set(Rung) - set(pod.ladder.rungs):
            refusal = pod.send(pod.target(V1, rung, epoch=pod.epoch + 1))
            assert refusal is not None
            assert ("NotForThisMember", pod.epoch) == (refusal.reason, refusal.highest_epoch)
        assert before == pod.agent.server.target
        assert "length" == await pod.ask(tokens=4)


async def test_figures_tell_a_life() -> None:
    async with small_pod() as pod:
        await pod.climb(V0)
        assert "length" == await pod.ask(tokens=7)
        leaving = asyncio.create_task(pod.ask())
        await pod.news(lambda: pod.agent._gate._held_bytes > 1000)
        leaving.cancel()
        await pod.news(lambda: pod.agent._gate.in_flight == 0)
        asked = [asyncio.create_task(pod.ask(stream=stream)) for stream in (False, True)]
        await pod.news(lambda: pod.agent._gate.in_flight == 2)
        await pod.climb(V1)
        assert ["abort"] * 2 == await asyncio.gather(*asked)
        engine = pod.facts.engines[0].incarnation
        await pod.runner.end_child("engine-0", -9)
        await pod.news(lambda: pod.facts.engines[0].incarnation != engine)
        await pod.climb(V1)

        def figure(name: str, **labels: str) -> float:
            return pod.registry.get_sample_value(f"colocate_{name}", labels) or 0.0

        requests = {ending: figure("gate_requests_total", ending=ending) for ending in ("finished", "aborted")}
        assert {"finished": 1.0, "aborted": 2.0} == requests
        assert 7 == figure("gate_tokens_total", ending="finished")
        assert figure("gate_tokens_total", ending="aborted") > 0
        assert 1 == figure("gate_requests_total", ending="client_gone")
        assert figure("gate_tokens_total", ending="client_gone") > 0, "wasted"
        assert 0 == figure("gate_in_flight")
        assert 2 == figure("incarnations_total", child="engine-0")
        assert 1 == figure("incarnations_total", child="trainer-0")
        assert 1 == figure("engine_replaced_total")
        for rung in (Rung.PAUSED, Rung.DRAINED, Rung.RELEASED, Rung.OFFLOADED):
            assert figure("rung_seconds_count", rung=rung) >= 1
        assert 1 == figure("engine_call_seconds_count", call="release")
        waited_s = figure("barrier_wait_seconds_total")
        assert waited_s > 0
        assert pytest.approx(waited_s, abs=1e-4) == pod.facts.waited_s, "of three epochs, which are all"


async def test_h11_engine_that_somebody_continued_while_it_was_off_is_replaced() -> None:
    async with small_pod() as pod:
        await pod.climb(V0)
        await pod.climb(V1, to=Rung.TRAINED)
        engine = pod.engine
        assert engine is not None
        engine.paused = False
        await pod.restart_agent(orderly=False)
        await pod.climb(V1)
        assert engine is not pod.engine
        assert [] == pod.broken


async def test_starts_that_fail_come_later_each_time_and_are_counted() -> None:
    async with small_pod() as pod:
        problems: list[str] = []
        await pod.climb(V0, to=Rung.OFFLOADED)
        pod.engine_fails_at_start = 3
        pod.send(pod.target(V0, Rung.SERVING))

        def note() -> bool:
            problem = pod.facts.problem
            if problem is not None and problem.message not in problems:
                problems.append(problem.message)
            return TIME_SLICED.standing(pod.facts, V0) is Rung.SERVING

        await pod.news(note)
        assert any("2 times since it last served, the next start in 1 s" in text for text in problems)
        assert any("3 times since it last served, the next start in 2 s" in text for text in problems)
        assert [] == pod.broken


async def test_target_of_an_older_epoch_is_refused_in_a_switch_too() -> None:
    async with small_pod() as pod:
        await pod.climb(V0)
        await pod.climb(V1, to=Rung.RELEASED)
        assert isinstance(pod.send(pod.target(V0, Rung.SERVING, epoch=1)), Refusal)
        await pod.climb(V1)
        assert [] == pod.broken


@pytest.mark.parametrize(
    ("route", "words"),
    [
        ("onload", "it is Offloaded, not Onloaded"),
        ("score", "the newest batch that it scored is None, not 1"),
        ("train", "it stands at step 0, not 1"),
        ("export", "it has exported 0-1, not 1-1"),
        ("offload", "it is Onloaded, not Offloaded"),
        ("save", "its newest checkpoint is None, not 1"),
        ("mirror", "the newest step that it has kept is None, not 1"),
    ],
)
async def test_trainer_that_says_yes_and_does_nothing_is_stopped(route: str, words: str) -> None:
    """It was asked again at once, and again, for as long as it said so: nobody was told why the pod stood still."""
    checkpoint = {"everySteps": 1} if route == "save" else {"inMemory": {"sizeLimit": "1Gi"}}
    async with small_pod(reference={}, checkpoint=checkpoint) as pod:
        await pod.climb(V0)
        assert pod.trainer is not None
        pod.trainer.faults[route] = "idle"
        switch = asyncio.create_task(pod.climb(V1))
        await pod.news(lambda: words in (pod.facts.problem.message if pod.facts.problem else ""))
        await switch
        assert [] == pod.broken


# --------------------------------------------------------------------------------------------- what nobody heard of
async def test_engine_that_was_killed_on_purpose_has_not_failed_though_nobody_heard_of_its_end() -> None:
    """It counted as a failure of the engine, which a failure policy may count against the job."""
    async with small_pod() as pod:
        await pod.climb(V0)
        [engine] = pod.agent._engines
        child = pod.runner.children[engine.name]
        pod.runner.breaks_in = "kill"
        with pytest.raises(RunnerUnreachable):
            await engine.kill("other weights come first", is_fault=False)
        await pod.news(lambda: engine.view.is_absent)
        assert (0, None) == (engine.failures, pod.agent._problems._failure)
        await engine.attach(ChildStatus.model_validate(child.status()))
        assert 0 == engine.failures, "nor when the connection breaks again"


async def test_steps_that_no_checkpoint_holds_are_at_risk_for_the_next_agent_too() -> None:
    """It said that they were none, or had begun with its own next step: an alert came hours late."""
    async with small_pod() as pod:
        await pod.climb(V0)
        await pod.climb(V1)
        await pod.restart_agent(orderly=True)
        await pod.news(lambda: pod.agent._trainers.unsaved() is not None)
        steps, seconds = pod.agent._trainers.unsaved() or (0, 0.0)
        assert 1 == steps
        assert seconds > 0


# ---------------------------------------------------------------------------------------------------- what is over
def refuse(request: web.Request) -> bytes:
    raise web.HTTPServiceUnavailable


@both_ladders
async def test_batch_that_comes_at_last_is_no_problem_while_it_is_trained(placement: Placement) -> None:
    """The pod reported it until the step was done, which may take an hour."""
    async with small_pod(**OFFLOADS[placement]) as pod:
        await pod.climb(V0)
        assert pod.trainer is not None
        pod.trainer.faults["train"] = "hang"
        served, pod._net.batch = pod._net.batch, refuse
        climbing = asyncio.create_task(pod.climb(V1))
        await pod.news(lambda: pod.facts.problem is not None and pod.facts.problem.reason == "BatchUnavailable")
        pod._net.batch = served
        await pod.news(lambda: pod.facts.trainers[0].state is TrainerState.TRAINING)
        assert pod.facts.problem is None
        climbing.cancel()
        await asyncio.wait({climbing})


async def test_trainer_that_has_started_again_is_no_problem_while_it_trains() -> None:
    """Beside an engine that stays no rung is gained before the step is done: the pod could be blamed for its rung."""
    async with small_pod(**OFFLOADS[Placement.RESIDENT]) as pod:
        await pod.climb(V0)
        assert pod.trainer is not None
        pod.trainer.faults["train"] = "crash"
        climbing = asyncio.create_task(pod.climb(V1))
        pod.trainer_faults["train"] = "hang"
        await pod.news(lambda: pod.facts.problem is not None and pod.facts.problem.reason == "TrainerDied")
        await pod.news(
            lambda: (pod.facts.trainers[0].lineage, pod.facts.trainers[0].state) == (2, TrainerState.TRAINING)
        )
        assert pod.facts.problem is None
        climbing.cancel()
        await asyncio.wait({climbing})


# ----------------------------------------------------------------------------------------------------- no room to keep
def waits_for_room(pod: SmallPod, reason: str) -> bool:
    problem = pod.facts.problem
    return problem is not None and problem.reason == reason and "No space left on device" in problem.message


@both_ladders
async def test_full_volume_is_waited_for_and_costs_no_trainer(placement: Placement) -> None:
    """The trainers were ended, and the steps since the last checkpoint done again, only to find it full again."""
    async with small_pod(**OFFLOADS[placement], checkpoint={"everySteps": 1}) as pod:
        await pod.climb(V0)
        trainer = pod.trainer
        assert trainer is not None
        trainer.faults["save"] = "full"
        await pod.climb(V1)
        await pod.news(lambda: waits_for_room(pod, "CheckpointNotWritten"))
        assert "length" == await pod.ask(tokens=4), "rollout goes on"

        below = Rung.RELEASED if pod.ladder.takes_turns else Rung.SEALED
        climbs = asyncio.create_task(pod.climb(V2))
        await pod.news(lambda: pod.ladder.standing(pod.facts, V2) is below)
        await pod.news(lambda: waits_for_room(pod, "CheckpointNotWritten"))
        assert (1, 0) == (pod.facts.trainers[0].step, pod.facts.trainers[0].saved or 0), "the next step waits"
        trainer.faults.clear()

        await climbs
        assert trainer is pod.trainer
        await pod.news(lambda: pod.facts.trainers[0].saved == 2 and pod.facts.problem is None)
        assert [] == pod.broken


@both_ladders
async def test_full_memory_is_waited_for_by_no_step_and_said_for_as_long(placement: Placement) -> None:
    checkpoint = {"everySteps": 100, "inMemory": {"sizeLimit": "1Gi"}}
    async with small_pod(**OFFLOADS[placement], checkpoint=checkpoint) as pod:
        await pod.climb(V0)
        trainer = pod.trainer
        assert trainer is not None
        trainer.faults["mirror"] = "full"
        await pod.climb(V1)
        await pod.news(lambda: waits_for_room(pod, "StateNotMirrored"))
        assert pod.facts.trainers[0].mirrored is None

        await pod.climb(V2)
        await pod.news(lambda: pod.facts.trainers[0].mirrored == 2 and pod.facts.problem is None)
        assert trainer is pod.trainer
        assert [] == pod.broken


async def test_a_slow_network_is_waited_for_by_nothing_and_said_while_nothing_else_is_wrong() -> None:
    def is_said(reason: str | None) -> Callable[[], bool]:
        return lambda: reason == (pod.facts.problem and pod.facts.problem.reason)

    checkpoint = {"everySteps": 100, "inMemory": {"sizeLimit": "1Gi"}}
    async with small_pod(checkpoint=checkpoint) as pod:
        await pod.climb(V0)
        trainer = pod.trainer
        assert trainer is not None
        trainer.network_fault = "NCCL takes TCP to other pods"
        trainer.faults["mirror"] = "full"
        await pod.climb(V1)
        await pod.news(is_said("StateNotMirrored"))
        await pod.climb(V2)
        await pod.news(is_said("SlowNetwork"))
        trainer.network_fault = ""
        await pod.climb(WeightVersion(3, V2.lineage))
        await pod.news(is_said(None))
        assert trainer is pod.trainer
        assert [] == pod.broken


async def test_full_volume_of_the_weights_costs_the_trainers_and_is_named() -> None:
    """Most often it is memory of the pod, which never grows: the step is given up at once."""
    async with small_pod() as pod:
        await pod.climb(V0)
        trainer = pod.trainer
        assert trainer is not None
        trainer.faults["export"] = "full"
        climbing = asyncio.create_task(pod.climb(V1))
        await pod.news(lambda: waits_for_room(pod, "TrainerFailed"))
        assert WeightVersion(1, 2) == await climbing
        assert trainer is not pod.trainer
        assert [] == pod.broken


async def test_full_volume_is_waited_for_at_the_end_too_and_said_for_as_long() -> None:
    async with small_pod() as pod:
        await pod.climb(V0)
        await pod.climb(V1)
        trainer = pod.trainer
        assert trainer is not None
        trainer.faults["finish"] = "full"
        pod.send(pod.target(V1, Rung.SERVING).model_copy(update={"is_last": True}))
        await pod.news(lambda: waits_for_room(pod, "ModelNotWritten"))
        assert 1 == pod.facts.trainers[0].saved
        trainer.faults.clear()

        await pod.news(lambda: pod.facts.trainers[0].finished == V1 and pod.facts.problem is None)
        assert trainer is pod.trainer
