"""Environments of verifiers run unchanged: this module lists their tasks and plays their episodes for a reward.

An episode asks the job's gateway for its turns, below an address of its own, and sees no switch. The gateway records
the generated tokens; this module returns only the reward. Only one of several agents in an episode can be trained: the
others need a model of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from itertools import islice
from typing import Any

from pydantic import ValidationError

from colocated_rl_api.prompts import Environment
from colocated_rl_rollout.tasks.passes import Passes
from colocated_rl_rollout.tasks.task_wire import FIGURES, FIGURES_AT_MOST, REWARD_AT_MOST, RewardAnswer

NO_KEY = "COLOCATED_RL_KEY"  # nobody sets this variable: the gateway needs no key
PLACES_TOLD = 3
CAUSE = re.compile(r"Traceback \(most recent call last\):\n(?P<frames>(?:[ \t].*\n)+)(?P<kind>[\w.]+)")
"""A traceback shows an exception with its causes, the first of them first."""


class EnvironmentUnusable(Exception):
    """The environment can't be loaded; the message states what the author of the job should do."""


class EpisodeGivenUp(Exception):
    """The environment gave an episode up. Its message is left out, because it may quote generated text."""


class EnvironmentTasks:
    """Holds the tasks of one environment, in another order in each pass."""

    def __init__(self, source: Environment) -> None:
        """Load the environment. Raises EnvironmentUnusable, and the environment's own errors."""
        self.title = source.title
        self._verifiers = verifiers = _import_verifiers()
        taskset = {**source.config.get("taskset", {}), "id": source.name}
        loaders = verifiers.utils.loaders
        self._environment = loaders.load_environment(loaders.resolve_env_config({**source.config, "taskset": taskset}))
        self._tasks = list(islice(self._environment.taskset, source.size))
        if not self._tasks:
            raise EnvironmentUnusable("it has no tasks")
        self._serialized = [_serialize(task) for task in self._tasks]
        self.size = len(self._tasks)
        self.digest = hashlib.sha256("\n".join(self._serialized).encode()).hexdigest()
        self._passes = Passes(range(self.size), seed=source.seed)

    def prompt(self, position: int) -> tuple[int, str]:
        """Return the index of a task, and all of its content: tasks with equal content are the same task."""
        data_pass, place = divmod(position, self.size)
        index = self._passes[data_pass][place]
        return index, self._serialized[index]

    def row(self, index: int) -> None:
        """Return no row: a task of an environment is its own."""

    def score(self, index: int, response: str) -> float:
        raise EnvironmentUnusable("a task of an environment is played: a response alone is worth nothing")

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Return a context that runs what episodes share: servers of tools, and the environment's own."""
        serving: AbstractAsyncContextManager[None] = self._environment.serving()
        return serving

    async def play(self, index: int, *, model: str, address: str) -> RewardAnswer:
        """Play one episode and return its reward, with the environment's metrics. Raises EpisodeGivenUp."""
        verifiers = self._verifiers
        # request nothing, so that the gateway's own limits and temperature apply
        client = verifiers.EvalClientConfig(base_url=address, api_key_var=NO_KEY)
        context = verifiers.ModelContext(client=client, model=model, sampling=verifiers.SamplingConfig())
        (slot,) = self._environment.slots(self._tasks[index])
        episode = await self._environment.run_slot(slot, context)
        if not episode.ok:
            raise EpisodeGivenUp(fault(episode))
        ours = [trace for trace in episode.traces if _asks(trace, address)]
        if len(ours) != 1 or not ours[0].agent.trainable:
            names = ", ".join(trace.agent.name for trace in ours)
            raise EpisodeGivenUp(
                f"of its agents ({names}) one can ask the job's model, and is trained: give the others a client and a "
                "model of their own in config"
            )
        return answer_of(ours[0])


def answer_of(trace: Any) -> RewardAnswer:
    """Return the reward of a trace, and its metrics. Raises EpisodeGivenUp."""
    reward = float(trace.reward)
    if not abs(reward) <= REWARD_AT_MOST:
        raise EpisodeGivenUp(f"its reward is {reward}: give a finite number, at most {REWARD_AT_MOST:.0f} either way")
    return RewardAnswer(reward=reward, figures=figures_of(trace.metrics))


def figures_of(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics that can be figures of a sample; an environment's author has not chosen them for that."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        with contextlib.suppress(ValidationError):
            found |= FIGURES.validate_python({} if value is None else {name: value})
    return dict(islice(found.items(), FIGURES_AT_MOST))


def _import_verifiers() -> Any:
    try:
        import verifiers.v1
        import verifiers.v1.utils.loaders
    except ModuleNotFoundError as error:
        if error.name not in ("verifiers", "verifiers.v1"):
            raise
        raise EnvironmentUnusable(
            "the image lacks verifiers: set spec.rollout.prompts.image to one made from the rollout controller's with "
            "verifiers 0.4.0 and the environment's package in it"
        ) from error
    return verifiers.v1


def _serialize(task: Any) -> str:
    """Return the content of a task, whichever field holds it."""
    return json.dumps(task.data.model_dump(mode="json", exclude={"idx"}), sort_keys=True)


def _asks(trace: Any, address: str) -> bool:
    client = trace.agent.config.client
    return client is None or client.base_url == address


def fault(episode: Any) -> str:
    """Return what failed first, and where in whose code; leave out the message, which may quote generated text."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not errors:
        return "it failed without an error"
    error = errors[-1]
    described = error.type if error.status_code is None else f"{error.type} (HTTP {error.status_code})"
    if cause := CAUSE.match(error.traceback or ""):
        places = re.findall(r'^  File "([^"\n]+)", line (\d+)', cause["frames"], re.MULTILINE)[: -PLACES_TOLD - 1 : -1]
        kind = "" if cause["kind"].rpartition(".")[2] == error.type else f": {cause['kind']}"
        described += kind + " at " + ", called at ".join(f"{file}:{line}" for file, line in places)
    return described[:1000]
