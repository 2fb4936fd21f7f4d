"""One evaluation is of one weights version."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from waiting import until

from colocated_rl_api.facts import EvaluationResult
from colocated_rl_api.job import Evaluation as Rules
from colocated_rl_api.job import EvaluationSampling, EvaluationSet, Sampling
from colocated_rl_api.names import PromptPosition
from colocated_rl_api.prompts import ReasoningGym
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.controller import EVALUATIONS_SAID, in_one_line
from colocated_rl_rollout.engines.engine_client import Generated, GenerateRequest
from colocated_rl_rollout.engines.engines import Engines
from colocated_rl_rollout.episodes import EpisodeFailed, EpisodeLost
from colocated_rl_rollout.evaluation import Evaluator, Scoreboard, best_of
from colocated_rl_rollout.gateway.sessions import Sessions
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.rewards.prompts import NoPrompts, PromptSource
from colocated_rl_rollout.rewards.rewards import TaskProcesses
from colocated_rl_rollout.rules.samples import (
    Finish,
    Prompt,
    Span,
    Tokens,
    Trajectory,
)
from colocated_rl_rollout.store.store import Store
from fakes.episodes import ScriptedEpisodes, unplayed
from fakes.rollout import JOB_UID, JobOnDisk, make_spec, of_one_set

V = WeightVersion


def test_an_evaluation_ends_when_every_prompt_has_an_answer() -> None:
    board = Scoreboard(3, prompts=4)
    for place, reward in enumerate([1.0, 0.0, 1.0]):
        assert board.take(place, {V(3, 1)}, reward)
        assert board.result() is None
    assert [3] == board.missing()
    assert board.take(3, {V(3, 1)}, 1.0)
    result = board.result()
    assert result is not None
    assert (3, 4, 0.75) == (result.step, result.samples, result.mean)
    assert math.isclose(math.sqrt(0.75 * 0.25 / 3), result.stderr)


def test_rewards_that_are_no_shares_have_a_standard_error_of_their_own() -> None:
    """It was that of a binomial share whatever they were: the root of a negative number for a mean above 1."""
    board = Scoreboard(3, prompts=4)
    for place, reward in enumerate([-1.0, 3.0, 3.0, 3.0]):
        board.take(place, {V(3, 1)}, reward)
    result = board.result()
    assert result is not None
    assert 2.0 == result.mean
    assert math.isclose(math.sqrt(3.0 / 3), result.stderr)


def test_several_answers_to_a_prompt_have_a_best_one_and_count_as_one_for_the_error() -> None:
    board = Scoreboard(3, prompts=3, responses=2)
    for place, reward in enumerate([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]):
        assert board.result() is None
        board.take(place, {V(3, 1)}, reward)
    result = board.result()
    assert result is not None
    assert (6, 0.5, 2 / 3) == (result.samples, result.mean, result.best)
    assert math.isclose(math.sqrt((0.5**2 + 0.5**2) / 2 / 3), result.stderr)


@pytest.mark.parametrize("right", range(9))
def test_best_of_some_answers_is_pass_at_k_where_rewards_are_0_and_1(right: int) -> None:
    """Chen et al. 2021 write it as 1 - C(n - c, k) / C(n, k)."""
    rewards = [1.0] * right + [0.0] * (8 - right)
    for count in range(1, 9):
        assert math.isclose(1 - math.comb(8 - right, count) / math.comb(8, count), best_of(rewards, count))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=7), st.data())
def test_best_of_some_answers_is_the_mean_over_all_choices_of_so_many(
    rewards: list[float], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(rewards)))
    each = [max(chosen) for chosen in itertools.combinations(rewards, count)]
    assert math.isclose(math.fsum(each) / len(each), best_of(rewards, count), rel_tol=1e-9, abs_tol=1e-6)


def test_best_of_2_4_8_is_reported_where_a_prompt_has_more_answers() -> None:
    board = Scoreboard(3, prompts=2, responses=5)
    for place, reward in enumerate([1.0, 0.0, 0.0, 0.0, 0.0, *[1.0] * 5]):
        board.take(place, {V(3, 1)}, reward)
    result = board.result()
    assert result is not None
    assert [2, 4] == [each.answers for each in result.best_of]
    assert [(0.4 + 1) / 2, (0.8 + 1) / 2] == pytest.approx([each.mean for each in result.best_of])
    two = Scoreboard(3, prompts=1, responses=2)
    for place in (0, 1):
        two.take(place, {V(3, 1)}, 1.0)
    assert () == (two.result() or result).best_of, "the best of both is `best`"


def test_answers_of_other_weights_do_not_count() -> None:
    board = Scoreboard(3, prompts=1)
    assert not board.take(0, {V(2, 1)}, 1.0)
    assert not board.take(0, {V(2, 1), V(3, 1)}, 1.0)
    assert not board.take(0, {V(3, 1), V(3, 2)}, 1.0)
    assert not board.take(0, set(), 1.0)
    assert [0] == board.missing()


def test_weights_that_were_made_again_start_the_count_again() -> None:
    board = Scoreboard(3, prompts=2)
    assert board.take(0, {V(3, 1)}, 1.0)
    assert board.take(1, {V(3, 2)}, 0.0)
    assert [0] == board.missing()
    assert not board.take(0, {V(3, 1)}, 1.0)
    assert board.take(0, {V(3, 2)}, 0.0)
    result = board.result()
    assert result is not None
    assert 0.0 == result.mean


def test_the_first_result_of_each_set_is_told_with_the_newest() -> None:
    """Others are compared with it."""
    results = [
        EvaluationResult(name=name, step=step, samples=4, mean=0.5, stderr=0.1)
        for step in range(100)
        for name in ("aime", "sums")
    ]
    told = in_one_line(results)
    assert EVALUATIONS_SAID == len(told)
    assert [*results[:2], *results[2 - EVALUATIONS_SAID :]] == told
    assert results[:9] == in_one_line(results[:9])


# ------------------------------------------------------------------------------------------------ tasks that are played
class Serving:
    """An engine that serves one version."""

    name = "a"
    version = V(3, 1)


class OneEngine(Engines):
    def __init__(self) -> None:
        self.takes = True

    def pick(self, *, preferred: str | None = None, step: int | None = None, at_most: int) -> Any:
        return Serving() if self.takes and step == Serving.version.step else None


SUMS = ReasoningGym(name="chain_sum")
TASKS = [Prompt(PromptPosition(0), 5, ()), Prompt(PromptPosition(1), 6, ())]
QUESTIONS = [Prompt(PromptPosition(0), 5, (1, 2)), Prompt(PromptPosition(1), 6, (3,))]


class HeldOut(PromptSource):
    """Has two prompts of each source, which are tasks, or questions once a test says so. missing: of no source."""

    found = TASKS
    missing = ""

    async def held_out(self, count: int, *, source: int | None = None) -> list[Prompt]:
        if source is None and self.missing:
            raise NoPrompts(self.missing)
        first = 0 if source is None else 10 * source
        return [Prompt(one.position, first + one.index, one.ids) for one in self.found[:count]]


@dataclass
class EvaluationScene:
    """An evaluation of two tasks of an environment, by the weights of step 3."""

    evaluation: Evaluator
    prompts: HeldOut
    episodes: ScriptedEpisodes
    store: Store
    engines: OneEngine
    group: asyncio.TaskGroup

    def send(self, *, at_most: int = 9) -> None:
        self.evaluation.send(self.engines, self.group, at_most=9, episodes_at_most=at_most)

    async def ended(self, *ends: Trajectory | Exception) -> None:
        for end in ends:
            self.episodes.ends.put_nowait(end)
        await until(lambda: not self.answering)

    async def ask_anew(self, found: list[Prompt]) -> None:
        """Ask for other prompts than before: the sets have to be other ones too."""
        self.prompts.found = found
        self.evaluation.ask(None)
        self.evaluation.ask(3)
        await until(lambda: self.evaluation.demand)

    @property
    def answering(self) -> list[asyncio.Task[None]]:
        return [task for run in self.evaluation._runs for task in run.answering.values()]

    @property
    def result(self) -> EvaluationResult:
        (result,) = self.evaluation.results
        return result


@asynccontextmanager
async def evaluating(
    directory: Path, sampling: Sampling | None = None, rules: Rules | None = None, *, missing: str = ""
) -> AsyncIterator[EvaluationScene]:
    job = JobOnDisk.write(directory, make_spec())
    prompts = job.spec.rollout.prompts
    store = Store(directory / "state", job_uid=JOB_UID)
    metrics = RolloutMetrics(CollectorRegistry())
    sessions = Sessions(store, metrics, group_size=2, max_staleness=1, changed=lambda: None, clock=lambda: 0.0)
    processes = TaskProcesses(prompts, count=1, socket=directory)
    episodes = unplayed(ScriptedEpisodes, prompts, sessions, processes, directory)
    held_out = HeldOut(processes, job.chat, max_prompt_tokens=9, position=PromptPosition(0), changed=lambda: None)
    held_out.missing = missing
    evaluation = Evaluator(
        rules or of_one_set(samples=2),
        sources={1: SUMS},
        limit=9,
        sampling=sampling or Sampling(),
        store=store,
        prompts=held_out,
        chat=job.chat,
        processes=processes,
        episodes=episodes,
        changed=lambda: None,
    )
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        preparing = group.create_task(evaluation.prepare())
        evaluation.ask(3)
        await until(lambda: evaluation.demand)
        yield EvaluationScene(evaluation, held_out, episodes, store, OneEngine(), group)
        preparing.cancel()
    store.close()


def played(reward: float, *versions: WeightVersion) -> Trajectory:
    spans = tuple(Span(version, place, place + 1) for place, version in enumerate(versions))
    count = len(versions)
    return Trajectory(Tokens(np.arange(count, dtype=np.int32), -np.ones(count, np.float32), spans), Finish.STOP, reward)


async def test_episodes_of_one_version_are_the_evaluation(tmp_path: Path) -> None:
    async with evaluating(tmp_path) as scene:
        scene.send()
        await until(lambda: [5, 6] == scene.episodes.begun)
        await scene.ended(played(1.0, V(3, 1), V(3, 1)), played(0.0, V(3, 1)))
        assert (3, 2, 0.5) == (scene.result.step, scene.result.samples, scene.result.mean)
        await scene.store.flushed()
        assert 1 == len(scene.store.rows("SELECT value FROM facts WHERE name = 'evaluated'")), "sessions are gone"


async def test_an_episode_of_two_versions_and_one_that_is_lost_are_played_again(tmp_path: Path) -> None:
    async with evaluating(tmp_path) as scene:
        scene.send()
        await scene.ended(played(1.0, V(3, 1), V(4, 1)), EpisodeLost("its process died"))
        assert 2 == scene.evaluation.demand
        scene.send()
        await until(lambda: [5, 6, 5, 6] == scene.episodes.begun)
        await scene.ended(played(1.0, V(3, 1)), played(1.0, V(3, 1)))
        assert 1.0 == scene.result.mean


async def test_an_episode_that_fails_is_worth_nothing(tmp_path: Path) -> None:
    async with evaluating(tmp_path) as scene:
        scene.send()
        await scene.ended(played(1.0, V(3, 1)), EpisodeFailed("EpisodeHung", "it did not end"))
        assert 0.5 == scene.result.mean


async def test_so_many_episodes_at_a_time_are_played_and_none_while_engines_are_off(tmp_path: Path) -> None:
    async with evaluating(tmp_path) as scene:
        scene.engines.takes = False
        scene.send()
        assert not scene.answering
        scene.engines.takes = True
        scene.send(at_most=1)
        scene.send(at_most=1)
        await until(lambda: scene.episodes.begun)
        assert [5] == scene.episodes.begun
        await scene.ended(played(1.0, V(3, 1)))
        scene.send(at_most=1)
        await until(lambda: [5, 6] == scene.episodes.begun)
        await scene.ended(played(1.0, V(3, 1)))


async def test_an_end_is_no_verdict_on_episodes_that_are_under_way(tmp_path: Path) -> None:
    """Their turns are refused then, and they would fail."""
    async with evaluating(tmp_path) as scene:
        scene.send()
        await until(lambda: [5, 6] == scene.episodes.begun)
        scene.evaluation.end_episodes()
        for task in scene.answering:
            await asyncio.wait([task])
            assert task.cancelled()
        assert not scene.evaluation.results


# -------------------------------------------------------------------------------------------------------- several sets
HELD_OUT, OWN = EvaluationSet(name="held-out", samples=2), EvaluationSet(name="own", samples=1, reasoning_gym=SUMS)


async def test_each_set_has_its_prompts_and_a_result_of_its_own(tmp_path: Path) -> None:
    async with evaluating(tmp_path, rules=Rules(sets=[HELD_OUT, OWN])) as scene:
        await until(lambda: scene.evaluation.demand == 3)
        scene.send()
        await until(lambda: [5, 6, 15] == scene.episodes.begun)
        await scene.ended(played(1.0, V(3, 1)), played(0.0, V(3, 1)), played(1.0, V(3, 1)))
        shown = [(each.name, each.step, each.samples, each.mean) for each in scene.evaluation.results]
        assert [("held-out", 3, 2, 0.5), ("own", 3, 1, 1.0)] == shown
        assert 0 == scene.evaluation.demand


async def test_an_evaluation_goes_on_after_a_restart_with_the_sets_that_have_no_result(tmp_path: Path) -> None:
    async with evaluating(tmp_path, rules=Rules(sets=[HELD_OUT, OWN])) as scene:
        await until(lambda: scene.evaluation.demand == 3)
        scene.send()
        await until(lambda: [5, 6, 15] == scene.episodes.begun)
        await scene.ended(played(1.0, V(3, 1)), played(0.0, V(3, 1)), EpisodeLost("its process died"))
        await scene.store.flushed()
    async with evaluating(tmp_path, rules=Rules(sets=[HELD_OUT, OWN])) as scene:
        assert ["held-out"] == [each.name for each in scene.evaluation.results]
        scene.send()
        await until(lambda: [15] == scene.episodes.begun)
        await scene.ended(played(1.0, V(3, 1)))
        assert ["held-out", "own"] == [each.name for each in scene.evaluation.results]


async def test_a_set_that_is_gone_from_the_job_ends_and_one_that_came_begins_while_others_go_on(tmp_path: Path) -> None:
    async with evaluating(tmp_path, rules=Rules(sets=[HELD_OUT, OWN])) as scene:
        await until(lambda: scene.evaluation.demand == 3)
        scene.send()
        await until(lambda: [5, 6, 15] == scene.episodes.begun)
        scene.evaluation.how = Rules(sets=[OWN, EvaluationSet(name="more", samples=1)])
        scene.evaluation.ask(3)
        await until(lambda: scene.evaluation.demand == 2)
        scene.send()
        await until(lambda: [5, 6, 15, 5] == scene.episodes.begun)
        await scene.ended(played(1.0, V(3, 1)), played(1.0, V(3, 1)))
        assert ["own", "more"] == [each.name for each in scene.evaluation.results]


async def test_a_set_without_prompts_is_named_and_holds_up_no_other(tmp_path: Path) -> None:
    async with evaluating(tmp_path, rules=Rules(sets=[HELD_OUT, OWN]), missing="heldOutPercent is 0") as scene:
        scene.evaluation.ask(3)
        scene.send()
        await until(lambda: [15] == scene.episodes.begun)
        await scene.ended(played(1.0, V(3, 1)))
        assert ["own"] == [each.name for each in scene.evaluation.results]
        assert scene.evaluation.problem is not None
        assert ("EvaluationImpossible", "held-out: heldOutPercent is 0") == (
            scene.evaluation.problem.reason,
            scene.evaluation.problem.message,
        )
        scene.evaluation.how = Rules(sets=[OWN])
        await until(lambda: scene.evaluation.problem is None)
        scene.prompts.missing = ""
        scene.evaluation.how = Rules(sets=[HELD_OUT])
        scene.evaluation.ask(4)
        await until(lambda: scene.evaluation.demand and scene.evaluation.problem is None)


async def test_a_source_that_the_controller_did_not_begin_with_is_told(tmp_path: Path) -> None:
    async with evaluating(tmp_path) as scene:
        other = EvaluationSet(name="other", reasoning_gym=ReasoningGym(name="basic_arithmetic"))
        scene.evaluation.how = Rules(sets=[other])
        scene.evaluation.ask(3)
        await until(lambda: scene.evaluation.problem)
        assert "set suspend to true, and to false again" in str(scene.evaluation.problem)


NAMES = st.sampled_from(["a", "b", "c"])


@given(st.lists(NAMES, min_size=1, unique=True), st.lists(st.tuples(NAMES, st.integers(0, 4))), st.integers(0, 4))
def test_a_set_lacks_a_result_until_it_has_one_of_those_weights_or_newer_ones(
    sets: list[str], results: list[tuple[str, int]], step: int
) -> None:
    rules = Rules(sets=[EvaluationSet(name=name) for name in sets])
    known = [EvaluationResult(name=name, step=of, samples=1, mean=0, stderr=0) for name, of in results]
    lacking = [each.name for each in rules.lacking(known, step)]
    assert [name for name in sets if all(of < step for known_name, of in results if known_name == name)] == lacking


# ----------------------------------------------------------------------------------------------- prompts that are asked
class Answering(Serving):
    """Answers to the limit of each request, as an engine that is interrupted there."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Generated:
        self.asked.append(request)
        count = request.max_new_tokens
        spans = (Span(self.version, 0, count),)
        tokens = Tokens(np.full(count, 5, np.int32), -np.ones(count, np.float32), spans)
        return Generated(tokens, None)


class AskedEngine(OneEngine):
    def __init__(self) -> None:
        self.engine = Answering()

    def pick(self, *, preferred: str | None = None, step: int | None = None, at_most: int) -> Any:
        return self.engine

    def send(self, group: asyncio.TaskGroup, engine: Any, attempt: Any, *, name: str) -> asyncio.Task[None]:
        return group.create_task(attempt, name=name)


async def test_answers_are_drawn_and_limited_as_the_evaluation_says(tmp_path: Path) -> None:
    """Answers that the evaluation's limit ends are complete, and worth nothing."""
    async with evaluating(tmp_path) as scene:
        evaluation, engines = scene.evaluation, AskedEngine()
        sampling = EvaluationSampling(temperature=0, top_p=0.9, top_k=7, min_p=0.1)
        evaluation.how = of_one_set(samples=3, max_response_tokens=4, sampling=sampling)
        await scene.ask_anew(QUESTIONS)
        evaluation.send(engines, scene.group, at_most=9, episodes_at_most=0)
        await until(lambda: scene.evaluation.results)
        drawn = [
            (asked.input_ids, asked.max_new_tokens, asked.temperature, asked.top_p, asked.top_k, asked.min_p)
            for asked in engines.engine.asked
        ]
        assert [([1, 2], 4, 0, 0.9, 7, 0.1), ([3], 4, 0, 0.9, 7, 0.1)] == drawn


@pytest.mark.parametrize(
    ("rollout", "own", "expected"),
    [
        (Sampling(), EvaluationSampling(), {"temperature": 1.0, "stop": None}),
        (Sampling(temperature=0.5, stop=["."]), EvaluationSampling(), {"temperature": 0.5, "stop": ["."]}),
        (Sampling(stop=["."]), EvaluationSampling(stop=[], min_tokens=3), {"stop": None, "min_new_tokens": 3}),
        (Sampling(), EvaluationSampling(stop=["?"], min_tokens=99), {"stop": ["?"], "min_new_tokens": 9}),
    ],
)
async def test_answers_are_drawn_as_in_rollout_where_the_evaluation_says_nothing(
    tmp_path: Path, rollout: Sampling, own: EvaluationSampling, expected: dict[str, Any]
) -> None:
    async with evaluating(tmp_path, rollout) as scene:
        evaluation, engines = scene.evaluation, AskedEngine()
        evaluation.how = of_one_set(samples=3, sampling=own)
        await scene.ask_anew(QUESTIONS)
        evaluation.send(engines, scene.group, at_most=9, episodes_at_most=0)
        await until(lambda: scene.evaluation.results)
        sampling = json.loads(engines.engine.asked[0].body())["sampling_params"]
        plain = {"max_new_tokens": 9, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0}
        assert plain | expected == {name: sampling.get(name) for name in plain | expected}
