"""An engine over several pods as each of them sees it, and what each does of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import CLOSED, make_target
from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.planner.spans import as_first, as_part, lost, shares_of
from colocated_rl_agent.planner.views import EngineView, PodView, Share
from colocated_rl_api.facts import EngineFacts, EngineState, GateFacts, TagState
from colocated_rl_api.ladder import DISAGGREGATED, RESIDENT, ROLLOUT_ONLY, TIME_SLICED, Ladder
from colocated_rl_api.member_wire import EngineSpan, Goal, PodTarget
from colocated_rl_api.names import PodUid
from colocated_rl_api.rungs import Rung, WeightVersion

V0, V1 = (WeightVersion(step, 1) for step in range(2))
PODS = (PodUid("first"), PodUid("second"))
FIRST = "e1"  # incarnation of the engine
ABSENT = EngineView()
PART = EngineView().started("part", V0, start_by=100.0, part_of=FIRST)
SERVING = EngineFacts(name="engine-0", state=EngineState.READY, incarnation=FIRST, version=V0, checksum="c")
STARTING = EngineFacts(name="engine-0", state=EngineState.STARTING, incarnation=FIRST, starts_on=V0)
OPEN = GateFacts(open=True, settled=False)
CLOSING = GateFacts(open=False, settled=False)


def pod(process: EngineView = ABSENT, **changes: Any) -> PodView:
    usual: dict[str, Any] = {
        "now": 1.0,
        "runner_known": True,
        "terminating": False,
        "gate_open": False,
        "in_flight": 0,
        "closed_at": 0.0,
        "ranks": (),
    }
    return PodView(engine=process, **usual | changes)


def span(engine: EngineFacts | None = None, gate: GateFacts | None = CLOSED, **changes: Any) -> EngineSpan:
    return EngineSpan(pods=changes.pop("pods", PODS), address="10.0.0.1", engine=engine, gate=gate, **changes)


def seen(process: EngineView, of: EngineSpan | None, **changes: Any) -> PodView:
    return as_part(pod(process, **changes), of, pods=2)


# ------------------------------------------------------------------------------------------------------- what it sees
def test_part_that_lives_is_what_the_first_pod_reports() -> None:
    released = {"weights": TagState.RELEASED, "kv_cache": TagState.RELEASED, "cuda_graph": TagState.KEPT}
    for changes in ({}, {"paused": True}, {"paused": True, "drained": True, **released}, {"noise_nats": 0.1}):
        engine = SERVING.model_copy(update=changes)
        view = seen(PART, span(engine)).engine
        found = view.facts().model_copy(
            update={"incarnation": FIRST, "part_of": None, "shut": False, "starts_on": None}
        )
        assert engine == found
        assert view.released == ("weights" in changes)
        assert ("part", FIRST, None) == (view.incarnation, view.part_of, view.broken)


@pytest.mark.parametrize(("gate", "is_open", "in_flight"), [(OPEN, True, 1), (CLOSING, False, 1), (CLOSED, False, 0)])
def test_its_gate_is_the_first_pods(gate: GateFacts, is_open: bool, in_flight: int) -> None:
    found = seen(PART, span(SERVING, gate))
    assert (is_open, in_flight) == (found.gate_open, found.in_flight)
    for alone in (
        seen(PART, span(SERVING, gate), terminating=True),
        seen(PART, span(STARTING, gate)),
        seen(ABSENT, span(SERVING, gate)),
        seen(PART, None),
        seen(PART, span(SERVING, None)),
    ):
        assert (False, 0) == (alone.gate_open, alone.in_flight)


@pytest.mark.parametrize(
    ("process", "engine", "state", "is_broken"),
    [
        (ABSENT, SERVING, EngineState.ABSENT, False),
        (PART, None, EngineState.STARTING, False),
        (PART, STARTING, EngineState.STARTING, False),
        (PART, SERVING.model_copy(update={"incarnation": "e2"}), EngineState.STARTING, True),
        (PART, EngineFacts(name="engine-0", state=EngineState.ABSENT), EngineState.STARTING, True),
        (PART.broke("its call failed"), SERVING, EngineState.STARTING, True),
    ],
    ids=["no process", "not known", "starts", "another engine", "no engine", "broken by itself"],
)
def test_part_that_is_of_no_engine_any_more_is_broken(
    process: EngineView, engine: EngineFacts | None, state: EngineState, is_broken: bool
) -> None:
    view = seen(process, span(engine)).engine
    assert (state, is_broken) == (view.state, view.broken is not None)


@pytest.mark.parametrize(
    ("process", "of", "joins_on"),
    [
        (ABSENT, span(STARTING), V0),
        (replace(ABSENT, part_of="e0"), span(STARTING), V0),
        (replace(ABSENT, part_of=FIRST), span(STARTING), None),
        (ABSENT, span(SERVING), None),
        (ABSENT, span(None), None),
        (ABSENT, None, None),
        (ABSENT, span(STARTING, pods=PODS[:1]), None),
    ],
    ids=["it starts", "after another", "it ended here", "too late", "not known", "no target", "a pod is missing"],
)
def test_part_joins_each_engine_once_while_it_starts(
    process: EngineView, of: EngineSpan | None, joins_on: WeightVersion | None
) -> None:
    found = seen(process, of)
    assert (Share.FOLLOWS, joins_on) == (found.share, found.joins_on)


def test_first_pod_starts_its_engine_once_all_pods_are_there() -> None:
    for of, share in ((span(), Share.LEADS), (span(pods=PODS[:1]), Share.LACKS), (None, Share.LACKS)):
        assert replace(pod(), share=share) == as_first(pod(), of, pods=2)


def test_engine_is_lost_with_any_part_and_with_any_pod() -> None:
    running = EngineView().started(FIRST, V0, start_by=1.0)
    assert "" == lost(running, span(), PODS)
    assert "" == lost(running, span(lost="e0"), PODS)
    assert "" == lost(running, None, PODS)
    assert "" == lost(ABSENT, span(pods=PODS[:1]), PODS)
    assert "has ended" in lost(running, span(lost=FIRST), PODS)
    for pods in (PODS[:1], PODS[::-1], (PODS[0], PodUid("made again"))):
        assert "recreated" in lost(running, span(pods=pods), PODS)


# ------------------------------------------------------------------------------------------------------- what it does
ALL = (do.CloseGate(), do.Pause(), do.Update(V0), do.StartEngine(V0), do.KillEngine("late"), do.Onload(), do.EndPod(0))
OF_POD = {do.Onload(), do.EndPod(0)}
CLIMB = make_target(V0, Rung.SERVING)
STOP = make_target(V0, Rung.SERVING, goal=Goal.STOP)


def done(view: PodView, target: PodTarget | None = CLIMB, ladder: Ladder = TIME_SLICED) -> set[do.Action]:
    return {action for action in shares_of(ALL, view, target, ladder) if not isinstance(action, do.Wait)}


def test_pods_with_engines_of_their_own_and_first_pods_do_all_of_it() -> None:
    assert {*ALL} == done(pod())
    assert {*ALL} == done(pod(share=Share.LEADS))
    assert {*ALL} - {do.StartEngine(V0)} == done(pod(share=Share.LACKS))


def test_other_pods_make_no_call_and_move_their_trainers() -> None:
    assert OF_POD == done(pod(share=Share.FOLLOWS))
    assert OF_POD == done(pod(share=Share.FOLLOWS), None)
    assert OF_POD | {do.StartEngine(V0)} == done(pod(share=Share.FOLLOWS, joins_on=V0))
    assert OF_POD == done(pod(share=Share.FOLLOWS, joins_on=V1)), "the table chose other weights"


@pytest.mark.parametrize(
    ("view", "target"),
    [(pod(PART.broke("lost")), CLIMB), (pod(PART, terminating=True), CLIMB), (pod(PART), STOP)],
    ids=["it is broken", "the pod ends", "the job ends"],
)
def test_part_is_ended_by_its_own_pod(view: PodView, target: PodTarget) -> None:
    assert OF_POD | {do.KillEngine("late")} == done(replace(view, share=Share.FOLLOWS), target)
    assert OF_POD == done(pod(PART, share=Share.FOLLOWS))


@pytest.mark.parametrize("ladder", [RESIDENT, ROLLOUT_ONLY])
def test_where_trainers_stay_on_the_devices_a_part_starts_on_what_the_first_pod_started_on(ladder: Ladder) -> None:
    joins = pod(share=Share.FOLLOWS, joins_on=V1, whole=V1)
    assert OF_POD | {do.StartEngine(V1)} == done(joins, ladder=ladder)
    assert [do.Wait(until=5.0), do.StartEngine(V1)] == [*shares_of([do.Wait(until=5.0)], joins, CLIMB, ladder)]
    for view, target in (
        (replace(joins, terminating=True), CLIMB),
        (replace(joins, runner_known=False), CLIMB),
        (replace(joins, engine=PART), CLIMB),
        (replace(joins, joins_on=None), CLIMB),
        (joins, STOP),
        (joins, None),
    ):
        assert do.StartEngine(V1) not in done(view, target, ladder)


@pytest.mark.parametrize("ladder", [RESIDENT, DISAGGREGATED])
@pytest.mark.parametrize("whole", [None, V0])
def test_a_part_compares_the_weights_that_it_starts_on_with_their_manifest_first(
    ladder: Ladder, whole: WeightVersion | None
) -> None:
    joins = pod(share=Share.FOLLOWS, joins_on=V1, whole=whole)
    assert OF_POD | {do.VerifyExport(V1)} == done(joins, ladder=ladder)
    later = replace(joins, verify_after=5.0)
    assert [do.Wait(until=5.0)] == [*shares_of([], later, CLIMB, ladder)]
    assert OF_POD | {do.VerifyExport(V1)} == done(replace(later, now=5.0), ladder=ladder)
    assert OF_POD | {do.StartEngine(V1)} == done(replace(joins, whole=V1), ladder=ladder)
    assert OF_POD | {do.StartEngine(V1)} == done(joins, ladder=ROLLOUT_ONLY), "its model has no manifest"
