"""The worker decides about one sample: bounds on attempts, and the order in which samples are sent."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from safetensors import safe_open
from safetensors.numpy import load_file
from waiting import DEADLINE_S, until

from colocated_rl_api.batch import HEADER_KEY, BatchHeader
from colocated_rl_api.job import AtMaxStaleness, IncompleteBatch
from colocated_rl_api.member_wire import Endpoint, Goal, JobFile, RolloutTarget
from colocated_rl_api.names import PromptPosition
from colocated_rl_api.prompts import HttpReward
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_member.data import DataClient
from colocated_rl_rollout.engines.engine_client import EngineClient, Generated
from colocated_rl_rollout.engines.engines import Engines
from colocated_rl_rollout.episodes import EpisodeFailed, EpisodeLost
from colocated_rl_rollout.gateway.sessions import Sessions
from colocated_rl_rollout.gateway.turns import Turns
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.rewards.prompts import PromptSource
from colocated_rl_rollout.rewards.reward_endpoint import RewardEndpoint
from colocated_rl_rollout.rewards.rewards import TaskProcesses
from colocated_rl_rollout.rules.resume import ATTEMPTS_AT_MOST, IDLE_ATTEMPTS_AT_MOST, RESENT_AT_MOST
from colocated_rl_rollout.rules.samples import (
    NO_TOKENS,
    Finish,
    Group,
    Prompt,
    Sample,
    SampleState,
    Span,
    Tokens,
    Trajectory,
)
from colocated_rl_rollout.store.batches import LEFT_BYTES, shard_path
from colocated_rl_rollout.store.store import SPARE_BYTES, Store
from colocated_rl_rollout.tasks.task_wire import RewardAnswer
from colocated_rl_rollout.worker import Worker
from fakes.episodes import ScriptedEpisodes, unplayed
from fakes.rollout import JOB_UID, JobOnDisk, make_spec


@dataclass
class WorkerScene:
    worker: Worker
    store: Store
    episodes: ScriptedEpisodes
    free: list[int]  # bytes on the volume

    def admit(self) -> list[Sample]:
        return self.store.admit(Prompt(self.store.cursor, 0, (1, 2)), size=2).samples

    def play(self) -> tuple[Group, asyncio.Task[None]]:
        """A group of a task, and the episode of its first sample."""
        group = self.store.admit(Prompt(self.store.cursor, 5, ()), size=2)
        self.store.start(group.samples[0])
        return group, asyncio.create_task(self.worker._play(group.samples[0]))

    def attempt(self, sample: Sample, tokens: Tokens) -> None:
        """One engine attempt, as it ends after an interruption."""
        self.store.start(sample)
        self.store.interrupt(sample, tokens)
        self.worker._limit_attempts(sample)

    async def end(self, running: asyncio.Task[None]) -> None:
        """Let the worker, which runs in this task, finish what is under way."""
        self.worker.drain()
        await asyncio.wait_for(running, DEADLINE_S)

    @property
    def discarded(self) -> dict[str, float]:
        """Tokens that are counted as discarded, by reason."""
        (metric,) = self.worker._metrics.discarded_tokens.collect()
        counted = [sample for sample in metric.samples if sample.name.endswith("_total")]
        return {sample.labels["reason"]: sample.value for sample in counted if sample.value}

    async def complete(self, *rewards: float, finish: Finish = Finish.STOP) -> Group:
        """A group whose samples got these rewards, in the order in which they were scored."""
        samples = self.admit()
        for sample, reward in zip(samples, rewards, strict=True):
            self.store.start(sample)
            self.store.finish(sample, one_token(), finish)
            self.store.score(sample, reward)
            self.worker._filters.judge(sample.group)
        return samples[0].group


@pytest.fixture
async def scene(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[WorkerScene]:
    """A worker whose engines and processes are not there: it decides, and nothing is sent."""
    job = JobOnDisk.write(tmp_path, make_spec(**getattr(request, "param", {})))
    free = [1 << 40]
    store = Store(tmp_path / "state", job_uid=JOB_UID, free_bytes=lambda _: free[0])
    rollout = job.spec.rollout
    processes = TaskProcesses(
        rollout.prompts, filters=rollout.filter_functions, count=1, socket=tmp_path / "tasks.sock"
    )
    metrics = RolloutMetrics(CollectorRegistry())
    sessions = Sessions(store, metrics, group_size=2, max_staleness=1, changed=lambda: None, clock=lambda: 0.0)
    episodes = unplayed(ScriptedEpisodes, rollout.prompts, sessions, processes, tmp_path)
    async with aiohttp.ClientSession() as session:
        yield WorkerScene(
            Worker(
                job.spec,
                store=store,
                engines=Engines(
                    DataClient(session, job.tls, JOB_UID), settle_s=1, changed=lambda: None, count=lambda tokens: None
                ),
                prompts=PromptSource(
                    processes, job.chat, max_prompt_tokens=200, position=PromptPosition(0), changed=lambda: None
                ),
                chat=job.chat,
                processes=processes,
                episodes=episodes,
                evaluation=None,
                turns=Turns(job.chat, metrics, keeps=True, changed=lambda: None, at_most=9, parked_at_most_s=9),
                sessions=sessions,
                metrics=metrics,
                changed=lambda: None,
                full_retry_s=0.01,
            ),
            store,
            episodes,
            free,
        )
    store.close()


def one_token(step: int = 0) -> Tokens:
    return some_tokens(1, step)


def some_tokens(count: int, step: int = 0) -> Tokens:
    spans = (Span(WeightVersion(step, 1), 0, count),)
    return Tokens(np.full(count, 7, np.int32), np.full(count, -1.0, np.float32), spans)


async def test_a_sample_that_makes_no_progress_is_replaced(scene: WorkerScene) -> None:
    """H6: aborted in the waiting queue, with nothing, again and again."""
    sample, _ = scene.admit()
    for _ in range(IDLE_ATTEMPTS_AT_MOST - 1):
        scene.attempt(sample, NO_TOKENS)
    assert SampleState.INTERRUPTED is sample.state
    scene.attempt(sample, one_token())
    for _ in range(IDLE_ATTEMPTS_AT_MOST):
        assert SampleState.INTERRUPTED is sample.state
        scene.attempt(sample, NO_TOKENS)
    assert {(SampleState.FAILED, "NoProgress"): 1} == scene.store.reasons
    assert 2 == len(sample.group.kept)


async def test_a_group_is_given_up_when_twice_its_size_was_replaced(scene: WorkerScene) -> None:
    """A group of two is given up at the fifth replacement."""
    group = scene.admit()[0].group
    for times in range(1, 6):
        assert (group.id in scene.store.groups, 2) == (True, len(group.kept))
        scene.worker._replace(group.kept[0], SampleState.DISCARDED, "Tried", f"{times}")
    assert {} == scene.store.groups
    assert {(SampleState.DISCARDED, "Tried"): 5, (SampleState.DISCARDED, "GroupGivenUp"): 2} == scene.store.reasons


async def test_f28_tokens_that_will_not_be_trained_are_counted_once_by_the_reason(scene: WorkerScene) -> None:
    failed, too_old = scene.admit(), scene.admit()
    scene.attempt(failed[0], some_tokens(3))
    scene.attempt(failed[1], some_tokens(4))
    scene.attempt(too_old[0], some_tokens(8, step=0))
    scene.attempt(too_old[1], some_tokens(16, step=5))
    scene.worker._replace(failed[0], SampleState.FAILED, "RewardFailed", "its verifier ended")
    assert {"RewardFailed": 3} == scene.discarded
    scene.worker._give_up(failed[0].group, "GroupGivenUp")
    scene.store.trained_step = 5
    scene.worker.discard_stale()
    assert {"RewardFailed": 3, "GroupGivenUp": 4, "TooStale": 8} == scene.discarded


@pytest.mark.parametrize("scene", [{"filters": ["EqualRewards"]}], indirect=True)
async def test_f28_what_tools_answered_is_not_counted_where_a_filter_drops_a_group(scene: WorkerScene) -> None:
    samples = scene.admit()
    with_answer = replace(some_tokens(5), spans=(Span(WeightVersion(0, 1), 0, 3),))
    for sample in samples:
        scene.store.start(sample)
        scene.store.finish(sample, with_answer, Finish.STOP)
        scene.store.score(sample, 1.0)
    scene.worker._filters.judge(samples[0].group)
    assert {"EqualRewards": 6} == scene.discarded


@pytest.mark.parametrize("scene", [{"interruption": "Retry"}], indirect=True)
async def test_f28_what_an_interruption_costs_is_counted_where_samples_start_over(scene: WorkerScene) -> None:
    sample, _ = scene.admit()
    for tokens in (some_tokens(3), NO_TOKENS, some_tokens(4)):
        scene.store.start(sample)
        scene.worker._accept(sample, Generated(tokens, None))
    assert ({"Retry": 7}, 0) == (scene.discarded, len(sample.tokens))


@pytest.mark.parametrize("scene", [{"maxResponseTokens": 10 * ATTEMPTS_AT_MOST}], indirect=True)
@pytest.mark.parametrize("each", [1, 10])
async def test_a_sample_is_not_resumed_for_ever(scene: WorkerScene, each: int) -> None:
    """H34: interrupted in every phase, and prefilled again each time. One that grows evenly has all its attempts."""
    sample, _ = scene.admit()
    for _ in range(ATTEMPTS_AT_MOST):
        assert SampleState.FAILED is not sample.state
        scene.attempt(sample, some_tokens(each))
    assert {(SampleState.FAILED, "TooManyAttempts"): 1} == scene.store.reasons


async def test_a_long_response_is_not_sent_again_for_ever(scene: WorkerScene) -> None:
    """Long before the bound on attempts, where each of them brings next to nothing."""
    sample, _ = scene.admit()
    limit = scene.worker._rollout.max_response_tokens
    scene.attempt(sample, some_tokens(limit - 4))
    while SampleState.FAILED is not sample.state:
        assert sample.resent < RESENT_AT_MOST * limit
        scene.attempt(sample, one_token() if sample.attempts % 15 == 0 else NO_TOKENS)
    assert {(SampleState.FAILED, "TooManyTokensResent"): 1} == scene.store.reasons
    assert sample.attempts < ATTEMPTS_AT_MOST


async def test_f3_the_end_of_one_group_admits_the_next_while_others_are_in_flight(scene: WorkerScene) -> None:
    """Admission in waves would leave engines idle until the longest response of each wave has ended."""
    prompts = [Prompt(PromptPosition(position), position, (1, 2)) for position in range(9)]
    scene.worker._prompts._ready.extend(prompts)
    scene.worker._admit()
    first, *others = list(scene.store.groups.values())
    assert scene.worker.concurrency == 1 + len(others)
    assert others
    for sample in scene.store.waiting.copy().values():
        scene.store.start(sample)
    scene.worker._admit()
    assert [first, *others] == [*scene.store.groups.values()], "each place is taken"
    for sample in first.samples:
        scene.store.finish(sample, one_token(), Finish.STOP)
        scene.store.score(sample, 1.0)
    scene.worker._admit()
    assert prompts[: len(others) + 2] == [group.prompt for group in scene.store.groups.values()]
    assert not any(group.is_complete for group in others)


async def test_a_full_volume_stops_admission_until_there_is_room(scene: WorkerScene) -> None:
    scene.worker._prompts._ready.extend(Prompt(PromptPosition(position), position, (1, 2)) for position in range(9))

    def problem_text() -> str:
        problem = scene.store.problem
        return f"{problem.reason}: {problem.message}" if problem else ""

    scene.free[0] = SPARE_BYTES - 1
    scene.worker._admit()
    assert not scene.store.groups
    assert "StoreFull: no more prompts are taken" in problem_text()
    assert "63 MiB are free, 64 MiB are kept" in problem_text()
    for _ in range(20):  # it looks again by itself, each time
        await asyncio.wait_for(scene.worker._wake.wait(), 60)
        scene.worker._wake.clear()
        scene.worker._admit()
    scene.free[0] = SPARE_BYTES
    scene.worker._admit()
    assert 3 == len(scene.store.groups)
    assert not problem_text()


async def test_a_batch_that_the_volume_refuses_is_written_when_there_is_room(scene: WorkerScene) -> None:
    """The controller ended over it, and again at each start; what it had generated meanwhile was lost."""
    samples = [sample for _ in range(3) for sample in scene.admit()]
    for sample in samples:
        scene.store.start(sample)
        scene.store.finish(sample, one_token(), Finish.STOP)
        scene.store.score(sample, 1.0)
    full = scene.store.batch_directory / "1-0.tmp"
    full.parent.mkdir()
    full.symlink_to("/dev/full")
    running = asyncio.create_task(scene.worker.run())
    await until(lambda: scene.store.problem)
    assert scene.store.problem
    assert "batch 1 could not be written: [Errno 28]" in scene.store.problem.message
    full.unlink()
    await until(lambda: scene.store.sealed and not scene.store.problem)
    await scene.end(running)


async def test_a_batch_that_would_take_the_last_of_the_volume_is_not_begun(scene: WorkerScene) -> None:
    """Half of it was written, and the store beside it could not commit: the controller ended, again and again."""
    for _ in range(3):
        await scene.complete(1.0, 0.0)
    scene.free[0] = LEFT_BYTES
    running = asyncio.create_task(scene.worker.run())
    reason = "batch 1 could not be written: [Errno 28] 16 MiB are free"
    await until(lambda: scene.store.problem and reason in scene.store.problem.message)
    assert not [*scene.store.batch_directory.iterdir()]
    scene.free[0] = 1 << 40
    await until(lambda: scene.store.sealed and not scene.store.problem)
    await scene.end(running)


async def test_a_batch_has_the_temperature_of_the_moment_at_which_it_was_chosen(scene: WorkerScene) -> None:
    """A target that came right behind gave it another one than that of the reference's scores."""
    for _ in range(3):
        await scene.complete(1.0, 0.0)
    before = scene.worker.temperature
    async with asyncio.TaskGroup() as group:
        scene.worker._group = group
        scene.worker._seal_if_due()
        scene.worker.tune(
            RolloutTarget(epoch=1, goal=Goal.CLIMB, trained_step=0, saved_step=0, engines=(), temperature=before / 2)
        )
    with safe_open(shard_path(scene.store.batch_directory, 1, 0), framework="np") as file:
        header = BatchHeader.model_validate_json(file.metadata()[HEADER_KEY])
    assert (before, before / 2) == (header.temperature, scene.worker.temperature)


@pytest.mark.parametrize("scene", [{"filters": ["EqualRewards"], "maxFilteredPerBatch": 2}], indirect=True)
async def test_groups_without_a_signal_make_room_for_others_until_there_are_too_many(scene: WorkerScene) -> None:
    taught = await scene.complete(0.0, 1.0)
    for _ in range(2):
        await scene.complete(1.0, 1.0)
    assert ([taught], None) == ([*scene.store.groups.values()], scene.worker.filter_problem)
    assert {(SampleState.FILTERED, "EqualRewards"): 4} == scene.store.reasons
    assert {"EqualRewards": 4} == scene.discarded
    taken = [await scene.complete(0.0, 0.0) for _ in range(2)]
    assert [taught, *taken] == [*scene.store.groups.values()], "as they are"
    assert "2 groups were left out since the last batch" in str(scene.worker.filter_problem)
    running = asyncio.create_task(scene.worker.run())
    await until(lambda: scene.store.sealed and not scene.worker._sealing)
    assert scene.worker.filter_problem is not None, "of this batch"
    scene.store.commit(1)
    for rewards in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.0), (1.0, 0.0)):
        await scene.complete(*rewards)
    scene.worker.wake()
    await until(lambda: scene.store.next_step == 3 and not scene.worker._sealing)
    assert "None" == str(scene.worker.filter_problem)
    await scene.end(running)


@pytest.mark.parametrize("scene", [{"filterFunctions": ["mine:keep"]}], indirect=True)
async def test_a_verdict_on_a_group_of_which_a_sample_was_replaced_counts_for_nothing(scene: WorkerScene) -> None:
    """It may have been about the sample that is gone: too old, while the function was looking."""
    asked = scene.worker._processes._requests
    running = asyncio.create_task(scene.worker.run())
    group = await scene.complete(0.0, 1.0)
    scene.worker.wake()
    await until(lambda: asked.qsize() == 1)
    first = asked.get_nowait().reply
    scene.worker._replace(group.samples[0], SampleState.DISCARDED, "TooStale", "")
    await until(first.cancelled)
    assert not scene.worker._is_ready(group)

    (new,) = [sample for sample in group.kept if sample.state is SampleState.ADMITTED]
    scene.store.start(new)
    scene.store.finish(new, one_token(), Finish.STOP)
    scene.store.score(new, 1.0)
    scene.worker._completed(group)
    scene.worker.wake()
    await until(lambda: asked.qsize() == 1)
    assert not scene.worker._is_ready(group), "it is judged anew"
    asked.get_nowait().reply.set_result(None)
    await until(lambda: scene.worker._is_ready(group))
    await scene.end(running)


@pytest.mark.parametrize("scene", [{"filters": ["EqualRewards"], "filterFunctions": ["mine:keep"]}], indirect=True)
async def test_functions_judge_what_the_rules_leave(scene: WorkerScene) -> None:
    running = asyncio.create_task(scene.worker.run())
    await scene.complete(1.0, 1.0)
    left = await scene.complete(0.0, 1.0)
    scene.worker.wake()
    asked = scene.worker._processes._requests
    await until(lambda: asked.qsize() == 1)
    assert [left] == [*scene.store.groups.values()]
    asked.get_nowait().reply.set_result("mine:keep")
    await until(lambda: not scene.store.groups)
    assert {(SampleState.FILTERED, "EqualRewards"): 2, (SampleState.FILTERED, "mine:keep"): 2} == scene.store.reasons
    await scene.end(running)


@pytest.mark.parametrize("scene", [{"filterFunctions": ["mine:keep"]}], indirect=True)
async def test_no_function_is_asked_about_a_group_while_the_controller_ends(scene: WorkerScene) -> None:
    running = asyncio.create_task(scene.worker.run())
    await scene.complete(0.0, 1.0)
    scene.worker.wake()
    asked = scene.worker._processes._requests
    await until(lambda: asked.qsize() == 1)
    await scene.end(running)
    assert asked.get_nowait().reply.cancelled()
    assert scene.worker._filters.problem is None


@pytest.mark.parametrize("scene", [{"filters": ["Truncated"]}], indirect=True)
async def test_a_group_that_is_cut_short_is_left_out_and_stays_so_after_a_restart(
    scene: WorkerScene, tmp_path: Path
) -> None:
    await scene.complete(0.0, 0.0, finish=Finish.LENGTH)
    assert not scene.store.groups
    await scene.store.flushed()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    again = Store(tmp_path / "copy", job_uid=JOB_UID)
    assert ({}, 2) == (again.groups, again.counts[SampleState.FILTERED])
    again.close()


async def test_a_group_of_sessions_survives_a_restart_and_is_given_up_whole_when_it_is_too_old(
    scene: WorkerScene, tmp_path: Path
) -> None:
    """Nobody can make another sample for it. Between two of its spans a tool answered."""
    spans = (Span(WeightVersion(0, 1), 0, 1), Span(WeightVersion(1, 1), 3, 4))
    tokens = Tokens(np.array([7, 8, 8, 7], np.int32), -np.ones(4, np.float32), spans)
    scene.store.admit_whole((1, 2), [Trajectory(tokens, Finish.STOP, reward) for reward in (0.0, 1.0)])
    await scene.store.flushed()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    again = Store(tmp_path / "copy", job_uid=JOB_UID)
    (group,) = again.groups.values()
    assert ([0.0, 1.0], True) == ([sample.reward for sample in group.kept], group.is_complete and group.is_of_sessions)
    assert {spans} == {sample.tokens.spans for sample in group.kept}
    assert tokens.ids.tolist() == group.kept[0].tokens.ids.tolist()
    again.close()
    scene.store.trained_step = 1
    scene.worker.discard_stale()
    assert scene.store.groups, "step 2 may train it"
    scene.store.trained_step = 2
    scene.worker.discard_stale()
    assert not scene.store.groups
    assert {(SampleState.DISCARDED, "TooStale"): 2} == scene.store.reasons
    assert {"TooStale": 2 * 2} == scene.discarded, "no engine generated what the tool answered"


@pytest.mark.parametrize("scene", [{"atMaxStaleness": policy} for policy in ("Wait", "Mask", "Drop")], indirect=True)
@pytest.mark.parametrize(("step", "is_too_old"), [(2, False), (3, True)])
async def test_a_sample_that_is_finished_can_be_too_old_too(scene: WorkerScene, step: int, is_too_old: bool) -> None:
    """It waits for the rest of its group, whose other sample is younger: that one is kept."""
    old, young = scene.admit()
    for sample, made_by in ((old, 0), (young, 2)):
        scene.store.start(sample)
        scene.store.finish(sample, one_token(made_by), Finish.STOP)
    scene.store.score(old, 1.0)
    scene.store.trained_step = step - 1
    scene.worker.discard_stale()
    masks = scene.worker._rollout.at_max_staleness is AtMaxStaleness.MASK
    assert (SampleState.DISCARDED if is_too_old and not masks else SampleState.COMPLETED) is old.state
    assert (SampleState.SCORING, 2) == (young.state, len(old.group.kept)), "another one takes its place"


@pytest.mark.parametrize("scene", [{"maxConcurrency": 6}], indirect=True)
async def test_a_batch_waits_for_a_group_with_tokens_that_have_no_version(scene: WorkerScene) -> None:
    """They may be as old as the limit allows, and are trained as soon as can be."""
    unknown, _ = scene.admit()
    scene.attempt(unknown, Tokens(np.array([7], np.int32), np.array([-1.0], np.float32), (Span(None, 0, 1),)))
    for sample in [sample for _ in range(4) for sample in scene.admit()]:
        scene.store.start(sample)
        scene.store.finish(sample, one_token(step=0), Finish.STOP)
        scene.store.score(sample, 1.0)
    scene.worker._seal_if_due()
    assert (scene.worker._sealing, True) == (None, scene.worker._held_s() > 0)
    scene.worker.discard_stale()
    assert unknown.group.samples == unknown.group.kept, "nothing is discarded"
    assert unknown is scene.worker._in_order()[0]


async def test_a_sample_that_is_given_up_says_how_its_last_attempt_ended(scene: WorkerScene) -> None:
    group = scene.admit()[0].group
    for _ in range(1 + 2 * 2):
        sample = group.kept[0]
        for _ in range(IDLE_ATTEMPTS_AT_MOST):
            scene.store.start(sample)
            scene.store.interrupt(sample, NO_TOKENS)
        scene.worker._limit_attempts(sample, why="the engine names no version")
    assert scene.worker.problem is not None
    assert scene.worker.problem.message.endswith("attempts brought no token; the last: the engine names no version")


@pytest.mark.parametrize("scene", [{"maxStaleness": 0, "maxConcurrency": 3}], indirect=True)
async def test_time_that_sealing_waits_at_the_staleness_limit_is_measured(scene: WorkerScene) -> None:
    """Three groups of newer weights are complete, and this batch is the last that may have the fourth."""
    late = scene.admit()
    for sample in late:
        scene.attempt(sample, one_token(step=0))
    for sample in [sample for _ in range(3) for sample in scene.admit()]:
        scene.store.start(sample)
        scene.store.finish(sample, one_token(step=1), Finish.STOP)
        scene.store.score(sample, 1.0)
    assert 0 == scene.worker._held_s()
    scene.worker._seal_if_due()
    assert 0 < scene.worker._held_s()
    for sample in late:
        scene.store.start(sample)
        scene.store.finish(sample, NO_TOKENS, Finish.STOP)
        scene.store.score(sample, 1.0)
    running = asyncio.create_task(scene.worker.run())
    await until(lambda: scene.store.sealed)
    assert 0 == scene.worker._held_s()
    await scene.end(running)


async def test_the_most_urgent_goes_first_then_what_was_interrupted_then_the_oldest(scene: WorkerScene) -> None:
    fresh, late, old = scene.admit(), scene.admit(), scene.admit()
    scene.attempt(late[1], one_token(step=3))
    scene.attempt(old[1], one_token(step=2))
    scene.attempt(fresh[1], NO_TOKENS)
    assert [old[1], old[0], late[1], late[0], fresh[1], fresh[0]] == scene.worker._in_order()


async def test_an_episode_becomes_its_sample_together_with_the_end_of_its_session(scene: WorkerScene) -> None:
    group, episode = scene.play()
    experts = np.array([[1, 2]], np.int16)
    scene.episodes.ends.put_nowait(Trajectory(one_token(step=3), Finish.LENGTH, 0.5, {"tools": 2.0}, experts))
    await episode
    sample = group.samples[0]
    assert ({"tools": 2.0}, experts) == (sample.figures, sample.experts)
    assert [5] == scene.episodes.begun
    assert (SampleState.COMPLETED, 0.5, Finish.LENGTH, [7]) == (
        sample.state,
        sample.reward,
        sample.finish,
        sample.tokens.ids.tolist(),
    )
    await scene.store.flushed()
    assert [(5,)] == [tuple(row) for row in scene.store.rows("SELECT value FROM facts WHERE name = 'trained'")]


async def test_an_episode_that_fails_is_played_again_by_another_sample_and_counted(scene: WorkerScene) -> None:
    group, episode = scene.play()
    scene.episodes.ends.put_nowait(EpisodeFailed("EpisodeHung", "it did not end"))
    await episode
    assert {(SampleState.FAILED, "EpisodeHung"): 1} == scene.store.reasons
    assert [SampleState.ADMITTED] * 2 == [sample.state for sample in group.kept]


async def test_an_episode_that_is_lost_is_played_again_and_not_for_ever(scene: WorkerScene) -> None:
    group, episode = scene.play()
    sample = group.samples[0]
    scene.episodes.ends.put_nowait(EpisodeLost("its process died"))
    await episode
    for _ in range(IDLE_ATTEMPTS_AT_MOST - 1):
        assert SampleState.INTERRUPTED is sample.state
        assert not scene.store.reasons
        scene.store.start(sample)
        scene.episodes.ends.put_nowait(EpisodeLost("its process died"))
        await scene.worker._play(sample)
    assert {(SampleState.FAILED, "NoProgress"): 1} == scene.store.reasons


async def test_a_group_is_as_old_as_the_episode_that_is_under_way(scene: WorkerScene) -> None:
    """Else sealing would not wait for it, and it would be too old when it ends."""
    group, episode = scene.play()
    ages = [group.oldest_step]
    await until(lambda: scene.episodes.begun)
    ages.append(group.oldest_step)
    scene.store.turned(group.samples[0], 4)
    ages.append(group.oldest_step)
    scene.episodes.ends.put_nowait(EpisodeLost("its process died"))
    await episode
    assert [None, 3, 3, None] == [*ages, group.oldest_step]


async def test_an_end_waits_for_no_episode_and_a_restart_plays_it_again(scene: WorkerScene, tmp_path: Path) -> None:
    group, episode = scene.play()
    scene.worker._own(group.samples[0], episode)
    await until(lambda: scene.episodes.begun)
    scene.worker.drain()
    await asyncio.wait_for(scene.worker.run(), DEADLINE_S)
    await scene.store.flushed()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    again = Store(tmp_path / "copy", job_uid=JOB_UID)
    (kept,) = again.groups.values()
    assert (True, 5) == (kept.prompt.is_played, kept.prompt.index)
    assert [SampleState.INTERRUPTED, SampleState.ADMITTED] == [sample.state for sample in kept.kept]
    again.close()


class FullEngines(Engines):
    """Open, and none takes a request now."""

    @property
    def open(self) -> list[EngineClient]:
        return [EngineClient(Endpoint(pod="a", address="", port=1), self._client, settle_s=1, changed=self._changed)]

    def share(self, demand: int) -> int:
        return 0


async def test_nothing_is_put_in_order_while_no_engine_takes_it(scene: WorkerScene) -> None:
    """All that waited was sorted at each answer of a full engine: 0.4 s for 16,384 samples."""
    scene.admit()
    scene.worker._engines.__class__ = FullEngines
    scene.worker._in_order = lambda: pytest.fail("put in order")  # type: ignore[method-assign]
    scene.worker._send()


@pytest.mark.parametrize("scene", [{"batchSize": 4, "maxStaleness": 2}], indirect=True)
async def test_slime_of_ten_groups_that_are_ready_four_are_taken_in_order_and_six_stay(scene: WorkerScene) -> None:
    """slime's published case has the rule: never more than are wanted, the rest in order next
    time, and nothing where there is no batch.
    """
    ready = [(await scene.complete(1.0, 0.0)).id for _ in range(10)]
    running = asyncio.create_task(scene.worker.run())
    for step in (1, 2):
        await until(lambda: scene.store.next_step > step)  # noqa: B023 - it is waited for here
        shards = [load_file(shard_path(scene.store.batch_directory, step, shard)) for shard in range(2)]
        groups = sorted(group for shard in shards for group in shard["group"].tolist())
        assert [group for group in ready[4 * step - 4 : 4 * step] for _ in range(2)] == groups
        assert ready[4 * step :] == [*scene.store.groups]
        scene.store.commit(step)
        scene.worker.wake()
    await scene.end(running)
    assert (3, ready[8:]) == (scene.store.next_step, [*scene.store.groups]), "two are no batch of four"


async def test_a_verifier_that_is_away_costs_no_sample_and_holds_up_no_end(
    scene: WorkerScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples failed and took others with them; in an hour a pass over all prompts was over, with nothing trained."""
    worker, store = scene.worker, scene.store
    nobody = HttpReward(url="http://127.0.0.1:9/", attempts=1)
    async with aiohttp.ClientSession() as session:
        job = JobFile(name="job", namespace="us", uid=JOB_UID, created=datetime.now(UTC), spec=make_spec())
        judge = RewardEndpoint(nobody, job, session, tokens=tmp_path, first_pause_s=0.001)
        asked: list[str] = []

        async def ask(_: int, text: str) -> RewardAnswer:
            asked.append(text)
            return await judge.score("", {}, text)

        worker._processes._endpoints = {0: judge}
        monkeypatch.setattr(worker._processes, "score_with_figures", ask)
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(0)
        samples = scene.admit()
        for sample in samples:
            store.start(sample)
            worker._accept(sample, Generated(one_token(), Finish.STOP))
        await until(lambda: judge.problem and len(asked) == len(samples))
        assert {SampleState.SCORING} == {sample.state for sample in samples}
        await scene.end(running)
    assert {SampleState.SCORING: len(samples)} == dict(+store.counts)


ONCE = {"reasoningGym": {"name": "chain_sum"}, "passes": 1}
LAST = {"batchSize": 4, "maxStaleness": 3, "prompts": ONCE}
TRAINED = LAST | {"incompleteBatch": "Train"}


@pytest.mark.parametrize("scene", [TRAINED], indirect=True)
async def test_tunix_what_is_left_of_the_prompts_is_a_last_batch_where_the_job_says_so(scene: WorkerScene) -> None:
    """It is sealed once nothing else can join it: five groups, one of them scored last, are a batch of four and one."""
    scene.worker._prompts._is_at_end = True
    ready = [await scene.complete(1.0, 0.0) for _ in range(4)]
    late = scene.admit()
    running = asyncio.create_task(scene.worker.run())
    await until(lambda: scene.store.next_step > 1)
    scene.store.commit(1)
    scene.worker.wake()
    await asyncio.sleep(0)
    assert ([late[0].group.id], None) == ([*scene.store.groups], scene.worker.ended_at)
    for sample in late:
        scene.store.start(sample)
        scene.store.finish(sample, one_token(), Finish.STOP)
        scene.store.score(sample, 1.0)
    scene.worker.wake()
    await until(lambda: scene.worker.ended_at)
    assert scene.store.sealed is not None
    assert (2, 2, 1, 2) == (scene.worker.ended_at, scene.store.sealed.step, scene.store.sealed.groups, len(late))
    await scene.end(running)
    assert {SampleState.TRAINED: 2 * len(ready), SampleState.SEALED: 2} == +scene.store.counts


@pytest.mark.parametrize("scene", [LAST], indirect=True)
async def test_what_is_left_of_the_prompts_is_discarded_otherwise(scene: WorkerScene) -> None:
    """This happens while the last batch still waits for its trainers. What clients send later is in no batch."""
    scene.worker._prompts._is_at_end = True
    left = [await scene.complete(1.0, 0.0) for _ in range(6)][4:]
    running = asyncio.create_task(scene.worker.run())
    await until(lambda: scene.worker.ended_at)
    assert (1, {}) == (scene.worker.ended_at, scene.store.groups)
    assert {(SampleState.DISCARDED, "IncompleteBatch"): 2 * len(left)} == scene.store.reasons
    assert {SampleState.SEALED: 8, SampleState.DISCARDED: 4} == +scene.store.counts
    scene.worker._prompts._ready.append(Prompt(PromptPosition(9), 0, (1, 2)))  # in place of a client's group
    scene.worker._admit()
    assert {} == scene.store.groups
    await scene.end(running)
    assert scene.worker.problem is None


@pytest.mark.parametrize("scene", [LAST, TRAINED], indirect=True)
async def test_prompts_that_fill_not_even_one_batch_are_a_problem_and_not_a_job_that_is_done(
    scene: WorkerScene,
) -> None:
    """The same holds where smaller batches are trained, if there is no group at all."""
    scene.worker._prompts._is_at_end = True
    if scene.worker._rollout.incomplete_batch is IncompleteBatch.DROP:
        await scene.complete(1.0, 0.0)
    kept = dict(scene.store.groups)
    running = asyncio.create_task(scene.worker.run())
    await until(lambda: scene.worker.problem)
    assert scene.worker.problem is not None
    assert scene.worker.problem.message.startswith(
        f"rollout.prompts.passes are over with {len(kept)} groups, and a batch takes 4: "
    )
    assert (None, kept) == (scene.worker.ended_at, scene.store.groups)
    await scene.end(running)


ON_POLICY = {"batchSize": 2, "maxStaleness": 0, "atMaxStaleness": "Drop", "spareGroups": 3}


@pytest.mark.parametrize("scene", [ON_POLICY], indirect=True)
async def test_the_first_groups_that_are_complete_fill_the_batch_and_spare_ones_go(scene: WorkerScene) -> None:
    """Complete or not, as far as they have tokens of weights that no later step may train. Nothing waits for them."""
    slow, untouched = scene.admit(), scene.admit()
    scene.attempt(slow[0], one_token())
    first, second, spare = [await scene.complete(1.0, 0.0) for _ in range(3)]
    running = asyncio.create_task(scene.worker.run())
    await until(lambda: scene.store.sealed)
    assert {slow[0].group.id, untouched[0].group.id, spare.id} == {*scene.store.groups}
    scene.store.commit(1)
    scene.worker.discard_stale()
    assert [untouched[0].group] == [*scene.store.groups.values()]
    assert {(SampleState.DISCARDED, "Spare"): 4} == scene.store.reasons
    assert {"Spare": 1 + 2} == scene.discarded
    assert {SampleState.TRAINED: 4, SampleState.DISCARDED: 4, SampleState.ADMITTED: 2} == +scene.store.counts
    assert scene.worker.problem is None
    await scene.end(running)
    assert {first.id, second.id}.isdisjoint(scene.store.groups)


@pytest.mark.parametrize(
    "scene", [{"maxResponseTokens": 8, "overlongPenalty": {"bufferTokens": 4, "factor": 2.0}}], indirect=True
)
async def test_reward_of_a_response_near_the_limit_is_less_by_the_penalty(scene: WorkerScene) -> None:
    """A response that the limit ended loses it too; no verifier sees it."""
    longest, _ = scene.admit()
    scene.store.start(longest)
    scene.store.finish(longest, some_tokens(8), Finish.LENGTH)
    await scene.worker._score(longest)

    assert -2.0 == longest.reward


class Verifier(TaskProcesses):
    """One that takes every response."""

    async def score_with_figures(self, index: int, response: str) -> RewardAnswer:
        return RewardAnswer(reward=1.0)


@pytest.mark.parametrize(
    "scene", [{"maxResponseTokens": 8, "overlongPenalty": {"bufferTokens": 4, "factor": 2.0}}], indirect=True
)
async def test_verifiers_reward_is_less_by_the_penalty(scene: WorkerScene, tmp_path: Path) -> None:
    short, longer = scene.admit()
    scene.worker._processes = Verifier(scene.worker._rollout.prompts, count=0, socket=tmp_path)
    for sample, length in ((short, 4), (longer, 6)):
        scene.store.start(sample)
        scene.store.finish(sample, some_tokens(length), Finish.STOP)
        await scene.worker._score(sample)

    assert (1.0, 0.0) == (short.reward, longer.reward)


# ------------------------------------------------------------------------------------------------ how tokens are drawn
def tokens_of(scene: WorkerScene, text: str) -> Tokens:
    ids = np.asarray(scene.worker._chat.encode(text), np.int32)
    return Tokens(ids, np.full(len(ids), -1.0, np.float32), (Span(WeightVersion(0, 1), 0, len(ids)),))


async def accept(scene: WorkerScene, sample: Sample, text: str) -> None:
    """An attempt of a sample comes back with this text."""
    scene.store.start(sample)
    scene.worker._group = asyncio.TaskGroup()
    async with scene.worker._group:
        scene.worker._accept(sample, Generated(tokens_of(scene, text), finish=None))
        for task in scene.worker._tasks.values():
            task.cancel()  # no verifier is here


@pytest.mark.parametrize("scene", [{"sampling": {"stop": ["</answer>"]}}], indirect=True)
async def test_a_stop_text_that_a_switch_cuts_in_two_ends_the_sample_behind_it(scene: WorkerScene) -> None:
    """An engine looks for it in the tokens of its own attempt alone, and goes on."""
    sample, _ = scene.admit()
    scene.attempt(sample, tokens_of(scene, "it is 7</ans"))
    await accept(scene, sample, "wer> and more")
    assert (SampleState.SCORING, Finish.STOP) == (sample.state, sample.finish)
    assert "it is 7</answer>" == scene.worker._chat.text(sample.tokens.ids.tolist())
    assert len(sample.tokens) == len(sample.tokens.logp) == sample.tokens.spans[-1].end


@pytest.mark.parametrize("scene", [{"sampling": {"stop": ["</answer>"]}}], indirect=True)
async def test_a_stop_text_in_what_a_sample_has_already_ends_it_behind_that(scene: WorkerScene) -> None:
    """A former job with other stop texts made these tokens. Some newer ones were kept, and lost their versions."""
    sample, _ = scene.admit()
    scene.attempt(sample, tokens_of(scene, "7</answer> or 8"))
    await accept(scene, sample, ", and so on and so forth")
    assert (SampleState.SCORING, Finish.STOP) == (sample.state, sample.finish)
    assert "7</answer> or 8" == scene.worker._chat.text(sample.tokens.ids.tolist())
    assert sample.tokens.generated == len(sample.tokens)
