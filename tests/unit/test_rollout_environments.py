"""The report of a failed episode has everything but words that may quote the model."""

from __future__ import annotations

import math
import re
import traceback
from types import SimpleNamespace

import pytest
import yaml

from colocated_rl_api.job import ColocatedRLJob
from colocated_rl_api.parts import size_in_bytes
from colocated_rl_rollout.tasks.environments import EpisodeGivenUp, answer_of, fault, figures_of
from colocated_rl_rollout.tasks.task_wire import FIGURES_AT_MOST, RewardAnswer
from setup.layout import CHECKOUT

SECRET = "what was generated\nTraceback of nothing"


class TaskError(Exception):
    pass


def tool() -> None:
    raise ValueError(SECRET)


def scored() -> str:
    """Return an error as verifiers wraps what an environment raises."""
    try:
        try:
            tool()
        except ValueError as error:
            raise TaskError(f"reward: {error}") from error
    except TaskError:
        return traceback.format_exc()
    raise AssertionError


def test_metrics_of_an_environment_are_figures_as_far_as_they_can_be() -> None:
    metrics = {"turns": 3.0, "not scored": 1.0, "unknown": None, "endless": math.inf}
    assert {"turns": 3.0} == figures_of(metrics)
    assert FIGURES_AT_MOST == len(figures_of({f"m{number}": 0.0 for number in range(2 * FIGURES_AT_MOST)}))


@pytest.mark.parametrize("reward", [math.nan, math.inf, -1e7])
def test_a_reward_that_nobody_can_train_with_ends_its_episode(reward: float) -> None:
    with pytest.raises(EpisodeGivenUp, match="give a finite number"):
        answer_of(SimpleNamespace(reward=reward, metrics={}))
    assert RewardAnswer(reward=0.5) == answer_of(SimpleNamespace(reward=0.5, metrics={}))


def test_a_failure_is_reported_by_its_first_cause_and_its_place_without_its_words() -> None:
    error = SimpleNamespace(type="TaskError", message=SECRET, status_code=None, traceback=scored())
    words = fault(SimpleNamespace(errors=[], traces=[SimpleNamespace(errors=[error])]))
    here = re.escape(__file__)
    assert re.fullmatch(rf"TaskError: ValueError at {here}:\d+, called at {here}:\d+", words)


def test_a_failure_without_a_place_is_reported_by_its_type() -> None:
    error = SimpleNamespace(type="ProviderError", message=SECRET, status_code=400, traceback=None)
    assert "ProviderError (HTTP 400)" == fault(SimpleNamespace(errors=[error], traces=[]))
    assert "it failed without an error" == fault(SimpleNamespace(errors=[], traces=[]))


def test_the_example_has_memory_for_the_episodes_of_rollout_and_as_many_of_an_evaluation() -> None:
    """It had memory for those of rollout alone. An episode takes what the page measured."""
    page = (CHECKOUT.root / "docs/environments.md").read_text()
    measured = re.search(r"An episode of the example takes (\d+) MB for its program and (\d+) MB for its tools", page)
    assert measured is not None
    manifest = yaml.safe_load((CHECKOUT.root / "examples/gpu/environment-4b.yaml").read_text())
    job = ColocatedRLJob.model_validate(manifest)
    rollout = job.spec.rollout
    episodes = 2 * rollout.concurrency * rollout.group_size
    taken = episodes * sum(map(int, measured.groups())) * 1_000_000
    assert taken < size_in_bytes(rollout.prompts.resources.limits["memory"])
