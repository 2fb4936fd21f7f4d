"""The stage that has finished samples scored by a reference with devices of its own: it loses none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import uvloop
from prometheus_client import CollectorRegistry
from waiting import until

from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.names import PromptPosition
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_member.data import DataClient
from colocated_rl_member.tls import MemberTls
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.reference import AT_ONCE, TOLD_AFTER, NotScored, ReferencePods
from colocated_rl_rollout.rules.samples import (
    Finish,
    Group,
    GroupId,
    Prompt,
    Sample,
    SampleId,
    SampleState,
    Span,
    Tokens,
)
from colocated_rl_trainer.conformance.ranks import free_port
from fakes.authority import FakeAuthority
from fakes.reference import FakeReference, reference_logp
from fakes.relay import relayed
from fakes.rollout import JOB_UID, TOKEN


@dataclass
class ReferenceScene:
    """The stage, driven as the worker drives it, and its pods."""

    stage: ReferencePods
    pods: list[FakeReference]
    registry: CollectorRegistry
    woken: asyncio.Event

    def follow(self, *pods: FakeReference) -> None:
        self.stage.follow(pod.endpoint for pod in pods)
        self.woken.set()

    def want(self, *groups: Group) -> None:
        for group in groups:
            self.stage.want(group)
        self.woken.set()

    @property
    def problem_text(self) -> str:
        """Return the problem's reason and message; "" while there is none."""
        problem = self.stage.problem
        return "" if problem is None else f"{problem.reason}: {problem.message}"

    def counted(self, ending: str) -> float:
        return self.registry.get_sample_value("colocate_rollout_reference_answers_total", {"ending": ending}) or 0.0


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[ReferenceScene]:
    tls = MemberTls.read(FakeAuthority().member_directory(tmp_path / "tls", job_uid=JOB_UID, token=TOKEN))
    registry, woken = CollectorRegistry(), asyncio.Event()
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        pods = [await stack.enter_async_context(FakeReference(f"r{at}", tls).listening()) for at in range(2)]
        stage = ReferencePods(
            DataClient(session, tls, JOB_UID),
            temperature=1.0,
            deadline_s=60,
            metrics=RolloutMetrics(registry),
            changed=woken.set,
            rest_s=0.001,
        )

        async def drive() -> None:
            async with asyncio.TaskGroup() as group:
                while True:
                    woken.clear()
                    stage.send(group)
                    await woken.wait()

        task = asyncio.create_task(drive())
        yield ReferenceScene(stage, pods, registry, woken)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task.exception()


def make_group(number: int = 1, *, samples: int = 2, prompt: tuple[int, ...] = (3, 4), length: int = 5) -> Group:
    """Finished: rewards are in."""
    group = Group(GroupId(number), Prompt(PromptPosition(0), 0, prompt))
    for place in range(samples):
        ids = np.arange(place, place + length, dtype=np.int32)
        tokens = Tokens(ids, np.full(length, -1, np.float32), (Span(WeightVersion(0, 1), 0, length),))
        sample = Sample(
            SampleId(100 * number + place), group, SampleState.COMPLETED, tokens, finish=Finish.STOP, reward=1.0
        )
        group.samples.append(sample)
    return group


def said_of(sample: Sample) -> list[float]:
    assert sample.scores is not None
    scores: list[float] = sample.scores.logp.tolist()
    return scores


def expected_of(sample: Sample, temperature: float = 1.0) -> list[float]:
    expected: list[float] = reference_logp(sample.tokens.ids, temperature).tolist()
    return expected


async def test_every_finished_sample_gets_the_references_scores_of_its_own_tokens(scene: ReferenceScene) -> None:
    first, second = make_group(1), make_group(2, length=7)
    scene.follow(*scene.pods)
    scene.want(first, second)
    assert (4, False) == (scene.stage.unscored, scene.stage.has_scored(first))
    await until(lambda: not scene.stage.unscored)

    assert scene.stage.has_scored(first)
    assert scene.stage.has_scored(second)
    for sample in (*first.samples, *second.samples):
        assert expected_of(sample) == said_of(sample)
    assert {(7, 2, 1.0), (9, 2, 1.0)} == {asked for pod in scene.pods for asked in pod.asked}
    assert all(pod.asked for pod in scene.pods), "both have their share"
    assert 4 == scene.counted("scored")


async def test_pods_get_samples_that_come_one_by_one_in_turn(scene: ReferenceScene) -> None:
    """Each was done before the next came, and the first pod got them all."""
    scene.follow(*scene.pods)
    for number in range(4):
        scene.want(make_group(number, samples=1))
        await until(lambda: not scene.stage.unscored)
    assert [2, 2] == [len(pod.asked) for pod in scene.pods]


async def test_connection_that_is_left_half_open_has_its_samples_scored_by_another_pod(scene: ReferenceScene) -> None:
    """A node that is gone says nothing: its samples wait for one answer's deadline, or until its pod is replaced."""
    lost, other = scene.pods
    frozen, port = asyncio.Event(), free_port()
    async with relayed(port, lost.endpoint.port, frozen):
        half_open = Endpoint(pod="r0", address="127.0.0.1", port=port)
        scene.stage.follow([half_open])
        lost.hold()
        group = make_group()
        scene.want(group)
        await until(lambda: 2 == lost.at_once)
        frozen.set()
        lost.release()
        await until(lambda: 0 == lost.at_once)
        assert 2 == scene.stage.unscored, "its answers came to nobody"
        scene.follow(other)
        await until(lambda: not scene.stage.unscored)
    assert [expected_of(sample) for sample in group.samples] == [said_of(sample) for sample in group.samples]
    assert 2 == len(other.asked)


async def test_answer_that_a_half_open_connection_keeps_is_asked_for_again_after_its_deadline(
    scene: ReferenceScene,
) -> None:
    scene.stage._deadline_s = 0.2
    frozen, port = asyncio.Event(), free_port()
    async with relayed(port, scene.pods[0].endpoint.port, frozen):
        frozen.set()
        scene.stage.follow([Endpoint(pod="r0", address="127.0.0.1", port=port), scene.pods[1].endpoint])
        group = make_group(samples=4)
        scene.want(group)
        await until(lambda: not scene.stage.unscored)
    assert [expected_of(sample) for sample in group.samples] == [said_of(sample) for sample in group.samples]
    assert scene.counted("failed") >= 1


async def test_tunix_on_devices_of_its_own_a_group_comes_out_before_any_barrier(scene: ReferenceScene) -> None:
    """tunix's published stage works so: each group as it comes, whatever else the batch waits for."""
    scene.follow(*scene.pods)
    for number in (1, 2):
        group = make_group(number)
        scene.want(group)
        await until(lambda: scene.stage.has_scored(group))  # noqa: B023 - it is waited for here


async def test_sample_that_is_scored_is_not_asked_again(scene: ReferenceScene) -> None:
    group = make_group()
    scene.follow(scene.pods[0])
    scene.want(group, group)
    await until(lambda: not scene.stage.unscored)
    scene.want(group)

    assert 0 == scene.stage.unscored
    assert 2 == len(scene.pods[0].asked)


@pytest.mark.parametrize("fault", [500, 503, 429, 400, 0])
async def test_no_sample_is_lost_over_an_answer_that_is_none(scene: ReferenceScene, fault: int) -> None:
    group = make_group()
    scene.pods[0].faults.extend([fault, fault, fault])
    scene.follow(scene.pods[0])
    scene.want(group)
    await until(lambda: not scene.stage.unscored)

    assert [expected_of(sample) for sample in group.samples] == [said_of(sample) for sample in group.samples]
    assert (3, 2) == (scene.counted("failed"), scene.counted("scored"))
    assert not scene.problem_text


async def test_what_one_pod_does_not_answer_another_one_does(scene: ReferenceScene) -> None:
    scene.pods[0].is_down = True
    groups = [make_group(number) for number in range(1, 20)]
    scene.follow(*scene.pods)
    scene.want(*groups)
    await until(lambda: not scene.stage.unscored)

    assert all(scene.stage.has_scored(group) for group in groups)
    assert not scene.problem_text


async def test_samples_wait_with_a_word_while_no_pod_is_there(scene: ReferenceScene) -> None:
    group = make_group()
    assert not scene.problem_text, "nothing waits"
    scene.want(group)

    assert "ReferenceUnavailable: finished samples wait for the reference" in scene.problem_text
    assert "none of its pods is there" in scene.problem_text
    assert not scene.stage.has_scored(group)

    scene.follow(scene.pods[0])
    await until(lambda: scene.stage.has_scored(group))
    assert not scene.problem_text


async def test_word_says_what_the_pods_say_when_all_of_them_fail(scene: ReferenceScene) -> None:
    scene.pods[0].is_down = True
    scene.follow(scene.pods[0])
    scene.want(make_group())
    await until(lambda: scene.problem_text)

    assert "as the test has it: 503" in scene.problem_text
    scene.pods[0].is_down = False
    await until(lambda: not scene.stage.unscored)
    assert not scene.problem_text


@pytest.mark.parametrize("fault", [400, 413])
async def test_sample_that_no_pod_can_score_is_reported_and_tried_again(scene: ReferenceScene, fault: int) -> None:
    poisoned = make_group(1, samples=1)
    scene.pods[0].faults.extend([fault] * (TOLD_AFTER + 3))
    scene.follow(scene.pods[0])
    scene.want(poisoned)
    await until(lambda: scene.problem_text)

    assert f"as the test has it: {fault}" in scene.problem_text
    assert 0 == scene.stage._pods[scene.pods[0].endpoint].failures, "others are still sent to it"
    assert not scene.stage.has_scored(poisoned)
    await until(lambda: scene.stage.has_scored(poisoned))
    assert not scene.problem_text


async def test_pod_that_is_named_no_more_gives_its_samples_to_another_one(scene: ReferenceScene) -> None:
    scene.pods[0].hold()
    group = make_group()
    scene.follow(scene.pods[0])
    scene.want(group)
    await until(lambda: 2 == scene.pods[0].at_once)

    scene.follow(scene.pods[1])
    await until(lambda: scene.stage.has_scored(group))

    assert 2 == len(scene.pods[1].asked)


async def test_pod_gets_no_more_at_once_than_it_may_have(scene: ReferenceScene) -> None:
    scene.pods[0].hold()
    scene.follow(scene.pods[0])
    scene.want(make_group(samples=AT_ONCE + 5))
    await until(lambda: AT_ONCE == scene.pods[0].at_once)
    scene.pods[0].release()
    await until(lambda: not scene.stage.unscored)

    assert AT_ONCE == scene.pods[0].most_at_once


async def test_other_temperature_asks_anew_also_for_what_was_on_its_way(scene: ReferenceScene) -> None:
    scored, asked = make_group(1), make_group(2)
    scene.follow(scene.pods[0])
    scene.want(scored)
    await until(lambda: scene.stage.has_scored(scored))
    scene.pods[0].hold()
    scene.want(asked)
    await until(lambda: 2 == scene.pods[0].at_once)

    scene.stage.temperature = 2.0
    scene.want(scored, asked)
    assert not scene.stage.has_scored(scored)
    scene.pods[0].release()
    await until(lambda: not scene.stage.unscored)

    for sample in (*scored.samples, *asked.samples):
        assert expected_of(sample, 2.0) == said_of(sample)


async def test_sample_that_is_given_up_is_waited_for_no_more(scene: ReferenceScene) -> None:
    group = make_group()
    scene.want(group)
    group.samples[0].state = SampleState.DISCARDED
    assert 1 == scene.stage.unscored
    group.samples[1].state = SampleState.FILTERED

    assert (0, "") == (scene.stage.unscored, scene.problem_text)
    scene.follow(scene.pods[0])
    scene.want(other := make_group(2))
    await until(lambda: scene.stage.has_scored(other))
    assert 2 == len(scene.pods[0].asked), "and it is not asked for"


@pytest.mark.parametrize("length", [1, 4])
async def test_first_token_of_an_episode_has_no_context_and_is_not_asked_for(
    scene: ReferenceScene, length: int
) -> None:
    group = make_group(samples=1, prompt=(), length=length)
    scene.follow(scene.pods[0])
    scene.want(group)
    await until(lambda: not scene.stage.unscored)

    (sample,) = group.samples
    assert [0.0, *expected_of(sample)[1:]] == said_of(sample)
    assert ([(4, 1, 1.0)] if length > 1 else []) == scene.pods[0].asked


def test_a_pod_takes_samples_by_the_last_time_that_its_rest_wakes_anybody() -> None:
    """One rest in three had not ended by then, by the loop of the controller: without other news no sample was sent."""

    async def rest(number: int) -> None:
        await asyncio.sleep(number * 0.0013)
        nobody: Any = None
        took: list[bool] = []
        stage = ReferencePods(
            nobody,
            temperature=1.0,
            deadline_s=60,
            metrics=RolloutMetrics(CollectorRegistry()),
            changed=lambda: took.append(stage._pick() is not None),
            rest_s=0.1,
        )
        stage.follow([Endpoint(pod="r0", address="", port=1)])
        (pod,) = stage._pods.values()
        (sample,) = make_group(samples=1).samples
        stage._failed(sample, pod, NotScored("it is being started"))
        await asyncio.sleep(0.2)
        assert took[-1]

    async def main() -> None:
        await asyncio.gather(*map(rest, range(50)))

    uvloop.run(main())
