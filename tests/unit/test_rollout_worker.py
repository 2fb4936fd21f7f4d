"""What the worker decides about one sample: bounds on attempts, and the order in which samples are sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from colocated_rl_api.ladder import WeightVersion
from colocated_rl_member.data import DataClient
from colocated_rl_rollout.engines import Engines
from colocated_rl_rollout.metrics import Metrics
from colocated_rl_rollout.prompts import PromptSource
from colocated_rl_rollout.rewards import TaskProcesses
from colocated_rl_rollout.samples import NO_TOKENS, Prompt, Sample, SampleState, Span, Tokens
from colocated_rl_rollout.store import Store
from colocated_rl_rollout.worker import ATTEMPTS_AT_MOST, IDLE_ATTEMPTS_AT_MOST, Worker
from fakes.rollout import JOB_UID, JobOnDisk, make_spec


@dataclass
class Scene:
    worker: Worker
    store: Store

    def admit(self) -> list[Sample]:
        return self.store.admit(Prompt(self.store.cursor, 0, (1, 2)), size=2).samples

    def attempt(self, sample: Sample, tokens: Tokens) -> None:
        """One engine attempt, as it ends after an interruption."""
        self.store.start(sample)
        self.store.interrupt(sample, tokens)
        self.worker._limit_attempts(sample)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """A worker whose engines and processes are not there: it decides, and nothing is sent."""
    job = JobOnDisk.write(tmp_path, make_spec())
    store = Store(tmp_path / "state", job_uid=JOB_UID)
    task = job.spec.rollout.prompts.reasoning_gym
    processes = TaskProcesses(task, count=1, cache=tmp_path)
    async with aiohttp.ClientSession() as session:
        yield Scene(
            Worker(
                job.spec,
                store=store,
                engines=Engines(
                    DataClient(session, job.tls, JOB_UID), settle_s=1, changed=lambda: None, count=lambda tokens: None
                ),
                prompts=PromptSource(
                    task, processes, job.chat, max_prompt_tokens=200, position=0, changed=lambda: None
                ),
                chat=job.chat,
                processes=processes,
                evaluation=None,
                metrics=Metrics(CollectorRegistry()),
                changed=lambda: None,
            ),
            store,
        )
    store.close()


def one_token(step: int = 0) -> Tokens:
    return Tokens(np.array([7], np.int32), np.array([-1.0], np.float32), (Span(WeightVersion(step, 1), 0, 1),))


async def test_a_sample_that_makes_no_progress_is_replaced(scene: Scene) -> None:
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


async def test_a_sample_is_not_resumed_for_ever(scene: Scene) -> None:
    """H34: interrupted in every phase, and prefilled again each time."""
    sample, _ = scene.admit()
    for _ in range(ATTEMPTS_AT_MOST):
        assert SampleState.FAILED is not sample.state
        scene.attempt(sample, one_token())
    assert {(SampleState.FAILED, "TooManyAttempts"): 1} == scene.store.reasons


async def test_the_most_urgent_goes_first_then_what_was_interrupted_then_the_oldest(scene: Scene) -> None:
    fresh, late, old = scene.admit(), scene.admit(), scene.admit()
    scene.attempt(late[1], one_token(step=3))
    scene.attempt(old[1], one_token(step=2))
    scene.attempt(fresh[1], NO_TOKENS)
    order = sorted(scene.store.waiting.values(), key=scene.worker._urgency)
    assert [old[1], old[0], late[1], late[0], fresh[1], fresh[0]] == order
