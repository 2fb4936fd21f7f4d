"""Several engines in a pod: what the table for one engine adds up to, and which engine a prompt goes to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from builders import make_target
from colocated_rl_agent.gate.dialects import BEGINNINGS, DIALECTS, Dialect
from colocated_rl_agent.gate.entrance import MORE, MOST_KEYS, Backend, Entrance, PromptAffinity
from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.planner.engines import EngineChoice, choices
from colocated_rl_agent.planner.next_actions import Rules
from colocated_rl_agent.planner.views import EngineView, PodView, RankView, pod_facts
from colocated_rl_agent.settings import AgentSettings, Directories
from colocated_rl_api import names
from colocated_rl_api.facts import EngineState, TrainerState
from colocated_rl_api.ladder import RESIDENT, TIME_SLICED, Ladder
from colocated_rl_api.member_wire import Goal
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_member.server import Ports
from fakes.pod import make_job

V0, V1 = (WeightVersion(step, 1) for step in range(2))
NOW = 100.0
RULES = Rules(TIME_SLICED, settle_s=30.0, checkpoint_every=2, probes=False)


def ready(version: WeightVersion = V0) -> EngineView:
    return replace(EngineView(), state=EngineState.READY, incarnation="e", version=version)


def starting(on: WeightVersion) -> EngineView:
    return EngineView().started("e", on, start_by=NOW + 60)


RELEASED = ready().gate_closed().was_paused().was_flushed().was_released()
DRAINED = ready().gate_closed().was_paused().was_flushed()
ABSENT = EngineView()
RANK = RankView(0, TrainerState.OFFLOADED, "t", 1, step=0, exported=V0, saved=0)


def views(*engines: EngineView, rank: RankView = RANK, opened: tuple[int, ...] = ()) -> list[PodView]:
    pod = PodView(
        now=NOW,
        runner_known=True,
        terminating=False,
        gate_open=False,
        in_flight=0,
        closed_at=NOW,
        engine=ABSENT,
        ranks=(rank,),
        whole=V0,
        shards=1,
    )
    return [replace(pod, engine=engine, gate_open=index in opened) for index, engine in enumerate(engines)]


def chosen(*pod: PodView, at: WeightVersion, rung: Rung, rules: Rules = RULES) -> list[EngineChoice]:
    found = choices(pod, make_target(at, rung), rules)
    return [choice for choice in found if not isinstance(choice.action, do.Wait)]


# --------------------------------------------------------------------------------------------------------- its actions
def test_every_engine_goes_its_way_at_once() -> None:
    pod = views(ready(), DRAINED, RELEASED, ABSENT, opened=(0,))
    assert [EngineChoice(0, do.CloseGate()), EngineChoice(1, do.Release())] == chosen(*pod, at=V1, rung=Rung.RELEASED)


@pytest.mark.parametrize("others", [(RELEASED,), (ABSENT,), (RELEASED, ABSENT), ()])
def test_trainers_begin_once_no_engine_maps_memory(others: tuple[EngineView, ...]) -> None:
    assert [EngineChoice(0, do.Onload())] == chosen(*views(RELEASED, *others), at=V1, rung=Rung.TRAINED)


@pytest.mark.parametrize("held", [ready(), DRAINED, starting(V0), RELEASED.was_resumed(("weights",))])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_engine_that_maps_memory_holds_the_trainers_back(held: EngineView, place: int) -> None:
    engines = [RELEASED, ABSENT]
    engines.insert(place, held)
    found = chosen(*views(*engines), at=V1, rung=Rung.TRAINED)
    assert [place] == [choice.engine for choice in found]
    assert not any(isinstance(choice.action, do.TrainerAction) for choice in found)


def test_pod_ends_once_every_engine_has() -> None:
    rank = replace(RANK, state=TrainerState.ABSENT)
    stop = make_target(V0, Rung.SERVING, goal=Goal.STOP)
    one, none = views(ready(), ABSENT, rank=rank), views(ABSENT, ABSENT, rank=rank)
    assert [EngineChoice(0, do.KillEngine("the pod ends"))] == choices(one, stop, RULES)
    assert [EngineChoice(0, do.EndPod(0))] == choices(none, stop, RULES)


def test_files_are_compared_once_for_all_engines() -> None:
    rules = replace(RULES, ladder=RESIDENT)
    pod = [replace(view, whole=None) for view in views(ABSENT, ABSENT, ABSENT)]
    assert [EngineChoice(0, do.VerifyExport(V0))] == chosen(*pod, at=V1, rung=Rung.SEALED, rules=rules)


def test_checkpoint_is_saved_beside_an_engine_that_waits_for_its_next_start() -> None:
    rank = RankView(0, TrainerState.OFFLOADED, "t", 1, step=2, exported=WeightVersion(2, 1), saved=0)
    at = WeightVersion(2, 1)
    dead = replace(ABSENT, start_after=NOW + 30)
    pod = [replace(view, whole=at) for view in views(ready(at), dead, rank=rank, opened=(0,))]
    assert [EngineChoice(0, do.Save(2))] == chosen(*pod, at=at, rung=Rung.SERVING)


def test_old_exports_go_beside_an_engine_that_waits_for_its_next_start() -> None:
    dead = replace(ABSENT, start_after=NOW + 30)
    pod = [replace(view, stale_exports=True) for view in views(ready(), dead, opened=(0,))]
    assert [EngineChoice(0, do.RemoveExports(V0))] == chosen(*pod, at=V0, rung=Rung.SERVING)


@pytest.mark.parametrize("ladder", [TIME_SLICED, RESIDENT])
def test_checkpoint_is_saved_beside_an_engine_that_starts_again(ladder: Ladder) -> None:
    at = WeightVersion(2, 1)
    rank = RankView(0, TrainerState.OFFLOADED, "t", 1, step=2, exported=at, saved=0)
    pod = [replace(view, whole=at) for view in views(ready(at), starting(at), rank=rank, opened=(0,))]
    assert EngineChoice(0, do.Save(2)) in chosen(*pod, at=at, rung=Rung.SERVING, rules=replace(RULES, ladder=ladder))


# ----------------------------------------------------------------------------------------------------------- its facts
def standing(
    *engines: EngineView, at: WeightVersion, opened: tuple[int, ...] = (), failed: tuple[int, ...] = ()
) -> Rung:
    failures = [int(index in failed) for index in range(len(engines))]
    return TIME_SLICED.standing(pod_facts(views(*engines, opened=opened), engine_failures=failures), at)


def test_engine_that_has_failed_is_not_counted_beside_others() -> None:
    assert Rung.SERVING is standing(ready(), ABSENT, at=V0, opened=(0,), failed=(1,))
    assert Rung.SEALED is standing(ready(), ABSENT, at=V1, opened=(0,), failed=(1,))
    assert Rung.DRAINED is standing(DRAINED, ABSENT, at=V1, failed=(1,))
    assert Rung.OFFLOADED is standing(ABSENT, ABSENT, at=V0, failed=(0, 1)), "one of them has to come back"


def test_engine_that_starts_for_the_first_time_is_waited_for() -> None:
    for first in (ABSENT, starting(V0)):
        assert Rung.OFFLOADED is standing(ready(), first, at=V0)


def test_engine_that_starts_again_on_these_weights_is_not_waited_for_and_on_others_it_is() -> None:
    assert Rung.SERVING is standing(ready(), starting(V0), at=V0, opened=(0,), failed=(1,))
    assert Rung.SETTLED is standing(RELEASED, starting(V0), at=V1, failed=(1,)), "it maps memory that trainers need"


def test_pod_stands_where_its_lowest_engine_would_stand_alone() -> None:
    """One that has started again on the new weights beside one that has only its memory back once led below both."""
    assert Rung.OFFLOADED is standing(RELEASED.was_resumed(("weights",)), ready(), at=V0)


def test_pod_serves_once_the_gate_is_open_to_each_engine() -> None:
    """One that was still probed was overtaken by the next switch, and killed in it: memory that came back behind a
    closed gate is not released again.
    """
    assert Rung.RESTORED is standing(ready(), ready(), at=V0, opened=(1,))
    assert Rung.SERVING is standing(ready(), ready(), at=V0, opened=(0, 1))


@given(st.lists(st.sampled_from([ready(), DRAINED, RELEASED, ready(V1), starting(V1)]), min_size=1, max_size=4))
def test_order_of_engines_makes_no_difference(engines: list[EngineView]) -> None:
    assert TIME_SLICED.slowest(standing(engine, at=V1) for engine in engines) is standing(*engines, at=V1)


def test_gate_is_open_while_an_engine_takes_requests_and_settled_once_none_has_any() -> None:
    one, other = views(ready(), ready(), opened=(1,))
    busy, idle = replace(one, in_flight=2), replace(other, gate_open=False)
    assert (True, False) == (pod_facts([one, other]).gate.open, pod_facts([one, other]).gate.settled)
    assert (False, False) == (pod_facts([busy, idle]).gate.open, pod_facts([busy, idle]).gate.settled)
    assert (False, True) == (pod_facts([one, idle]).gate.open, pod_facts([one, idle]).gate.settled)


@pytest.mark.parametrize(
    ("count", "engines", "devices"),
    [(4, 2, [[0, 1], [2, 3]]), (8, 8, [[n] for n in range(8)]), (8, 1, [list(range(8))]), (0, 2, [[], []])],
)
def test_engines_of_a_pod_divide_its_devices(count: int, engines: int, devices: list[list[int]]) -> None:
    job = make_job(gpus={"count": count}, rollout={"engine": {"perPod": engines}})
    settings = AgentSettings("p", names.PodUid("u"), 0, job, Directories.below(Path("/")), Ports(), engine_port=30000)
    assert devices == [list(settings.devices_of(engine)) for engine in range(settings.engines)]


# ------------------------------------------------------------------------------------------------------ who gets which
async def _abort(rid: str) -> None:
    pass


def test_engine_that_takes_no_connection_is_passed_over_until_it_is_opened_again() -> None:
    affinity, engines = PromptAffinity(), entrances(0, 5)
    assert engines[0] is affinity.choose(engines, (1,))
    engines[0].pass_over()
    assert engines[1] is affinity.choose(engines, (1,))
    assert engines[0] is affinity.choose(engines[:1], (1,)), "there is no other"
    backend = engines[0].backend
    assert backend is not None
    engines[0].open(backend)
    assert engines[0] is affinity.choose(engines, (2,))


def entrances(*in_flight: int) -> list[Entrance]:
    found = [Entrance() for _ in in_flight]
    for number, (entrance, count) in enumerate(zip(found, in_flight, strict=True)):
        entrance.open(Backend(f"http://127.0.0.1:{number + 1}", f"e{number}", V0, _abort))
        entrance.in_flight = count
    return found


async def test_samples_of_one_prompt_go_to_one_engine_and_other_prompts_to_the_idlest() -> None:
    affinity, engines = PromptAffinity(), entrances(0, 0)
    first = affinity.choose(engines, (1,))
    assert first is engines[0]
    first.in_flight = MORE
    assert first is affinity.choose(engines, (1,))
    assert engines[1] is affinity.choose(engines, (2,))


async def test_longest_known_beginning_of_a_prompt_decides() -> None:
    affinity, engines = PromptAffinity(), entrances(0, 1)
    assert engines[0] is affinity.choose(engines, (10, 1))
    engines[0].in_flight = 2
    assert engines[1] is affinity.choose(engines, (20, 2))
    assert engines[1] is affinity.choose(engines, (30, 20, 1)), "a turn that goes on from the second prompt"
    assert engines[0] is affinity.choose(engines, (40, 10, 2))


async def test_engine_that_is_far_busier_or_closed_gets_no_prompt_for_its_cache() -> None:
    affinity, engines = PromptAffinity(), entrances(0, 0)
    assert engines[0] is affinity.choose(engines, (1,))
    engines[0].in_flight = MORE + 1
    assert engines[1] is affinity.choose(engines, (1,)), "and that one has it in its cache from now on"
    engines[0].in_flight = 0
    assert engines[1] is affinity.choose(engines, (1,))
    engines[1].close(within_s=1)
    assert engines[0] is affinity.choose(engines, (1,))
    engines[0].close(within_s=1)
    assert affinity.choose(engines, (1,)) is None


async def test_what_is_remembered_of_prompts_is_bounded() -> None:
    affinity, engines = PromptAffinity(), entrances(0)
    for key in range(MOST_KEYS + 10):
        affinity.choose(engines, (key,))
    assert MOST_KEYS == len(affinity._last)


def beginnings(dialect: Dialect, body: object) -> tuple[int, ...]:
    return dialect.request(to_json(body), keyed=True).beginnings


NATIVE, COMPLETIONS, CHAT = DIALECTS


@pytest.mark.parametrize(("dialect", "field"), [(NATIVE, "input_ids"), (COMPLETIONS, "prompt")])
@pytest.mark.parametrize("items", [BEGINNINGS[-1], 1000])
def test_prompt_that_goes_on_has_the_beginnings_of_the_one_before(dialect: Dialect, field: str, items: int) -> None:
    ids = list(range(1, items + 1))
    one, longer = beginnings(dialect, {field: ids}), beginnings(dialect, {field: [*ids, *range(500)]})
    other = beginnings(dialect, {field: [0, *ids]})
    assert one == beginnings(dialect, {field: ids})
    assert set(one[1:]) <= set(longer), "the first is of all of it"
    assert not set(one) & set(other)


@pytest.mark.parametrize(("dialect", "field"), [(NATIVE, "text"), (COMPLETIONS, "prompt")])
def test_text_has_beginnings_too(dialect: Dialect, field: str) -> None:
    one, longer = beginnings(dialect, {field: "a" * 300}), beginnings(dialect, {field: "a" * 300 + "b"})
    assert (3, one[1:]) == (len(one), longer[1:])


def test_turns_of_a_chat_begin_with_the_turns_before() -> None:
    system, question = {"role": "system", "content": "s"}, {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": "a"}
    one, next_turn = (
        beginnings(CHAT, {"messages": [system, question]}),
        beginnings(CHAT, {"messages": [system, question, answer, question]}),
    )
    assert one == next_turn[-2:]
    assert one[-1:] == beginnings(CHAT, {"messages": [system, answer]})[-1:], "the system's message alone is the same"


def test_a_pod_with_one_engine_computes_no_beginnings() -> None:
    assert () == NATIVE.request(to_json({"input_ids": [1, 2]})).beginnings
