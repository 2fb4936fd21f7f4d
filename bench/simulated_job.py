"""A whole job in virtual time: the rollout controller's own worker, store and engines, beside a script that takes turns
as operator and trainer do; and the same job as a synchronous loop, for comparison.

Everything that decides is the real thing: admission, order, resume, staleness, sealing, the database. Simulated are the
engines (`simulated_engines`), prompts and rewards, and training: it takes a stated time for each token of a batch.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from bench import virtual_time
from bench.simulated_engines import PROMPT_TOKENS, EngineMachine, Numbers, Rates, SimulatedEngine, Trace
from colocated_rl_api import names
from colocated_rl_api.job import AtMaxStaleness, ColocatedRLJobSpec, Interruption
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.names import PromptPosition
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_member.room import Bound
from colocated_rl_rollout.engines.engine_client import EngineClient
from colocated_rl_rollout.engines.engines import Engines
from colocated_rl_rollout.episodes import Episodes
from colocated_rl_rollout.gateway.sessions import Sessions
from colocated_rl_rollout.gateway.turns import Turns
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.rewards.prompts import PromptSource
from colocated_rl_rollout.rewards.rewards import TaskProcesses
from colocated_rl_rollout.rules.chat import Chat
from colocated_rl_rollout.rules.samples import Prompt, SampleState
from colocated_rl_rollout.store.batches import BatchRecord
from colocated_rl_rollout.store.store import Store
from colocated_rl_rollout.tasks.task_wire import RewardAnswer
from colocated_rl_rollout.worker import Worker
from fakes.episodes import unplayed

RECORDS = 8  # of trained batches that the store keeps, at most: few, so that a short job meets that bound too


@dataclass(frozen=True)
class SimulatedJob:
    """Describes a simulated job.

    switch_s: beside training, each step. train_s: of a token. apart: of the engines, those with devices of their own.
    """

    trace: Trace
    steps: int = 50
    batch_size: int = 32
    group_size: int = 8
    engines: int = 4
    rates: Rates = field(default_factory=Rates)
    switch_s: float = 5.0
    train_s: float = 0.0
    max_staleness: int = 1
    at_max_staleness: AtMaxStaleness = AtMaxStaleness.WAIT
    max_concurrency: int | None = None
    interruption: Interruption = Interruption.RESUME
    min_rollout_s: int = 0
    apart: int = 0

    @property
    def samples(self) -> int:
        return self.batch_size * self.group_size

    @property
    def tokens(self) -> int:
        """Return the tokens of all samples that the job trains; prompts come in order, and each is trained once."""
        prompts = range(self.steps * self.batch_size)
        return sum(self.trace(prompt, number) for prompt in prompts for number in range(self.group_size))


@dataclass
class SimulatedOutcome:
    """Holds what a simulated job took.

    took_s: until the last step is trained. phases_s: of it, with gates open, before each step. resent_tokens: that were
    prefilled again.
    """

    took_s: float = 0.0
    phases_s: list[float] = field(default_factory=list)
    trained_tokens: int = 0
    resent_tokens: int = 0
    discarded_tokens: int = 0
    finished_tokens: int = 0
    sealed_tokens: int = 0
    batches: list[BatchRecord] = field(default_factory=list)

    def take(self, batch: BatchRecord) -> None:
        """Count a batch that is trained."""
        self.trained_tokens += batch.loss_tokens
        self.batches.append(batch)

    @property
    def rollout_s(self) -> float:
        return sum(self.phases_s)

    @property
    def staleness_mean(self) -> float:
        ages = [(age, count) for batch in self.batches for age, count in batch.staleness.items()]
        return sum(age * count for age, count in ages) / max(1, sum(count for _, count in ages))


# ----------------------------------------------------------------------------------------------------- synchronous
def synchronous(job: SimulatedJob) -> SimulatedOutcome:
    """Each step generates its own batch to the end, and then trains it."""
    return virtual_time.run(_synchronous(job))


async def _synchronous(job: SimulatedJob) -> SimulatedOutcome:
    loop = virtual_time.loop()
    machines = [EngineMachine(job.rates) for _ in range(job.engines)]
    outcome = SimulatedOutcome()
    for step in range(job.steps):
        began, prompts = loop.now, range(step * job.batch_size, (step + 1) * job.batch_size)
        lengths = [job.trace(prompt, number) for prompt in prompts for number in range(job.group_size)]
        requests = [
            machines[place % job.engines].generate(prefill=PROMPT_TOKENS, length=length)
            for place, length in enumerate(lengths)
        ]
        tokens = sum(await asyncio.gather(*requests))
        outcome.phases_s.append(loop.now - began)
        outcome.trained_tokens += tokens
        await asyncio.sleep(job.switch_s + tokens * job.train_s)
    outcome.took_s = loop.now
    return outcome


# ------------------------------------------------------------------------------------------------------ this system
def colocated(job: SimulatedJob, *, watch: Callable[[Store], None] = lambda _: None) -> SimulatedOutcome:
    """The real worker over simulated engines. watch: called after each step."""
    return virtual_time.run(_colocated(job, watch))


async def _colocated(job: SimulatedJob, watch: Callable[[Store], None]) -> SimulatedOutcome:
    loop = virtual_time.loop()
    async with _running(job) as (scene, outcome):
        for step in range(1, job.steps + 1):
            began = loop.now
            scene.open_gates(WeightVersion(step - 1, 1))
            batch = await scene.sealed(step)
            scene.close_gates()
            outcome.phases_s.append(loop.now - began)
            outcome.take(batch)
            await asyncio.sleep(job.switch_s + batch.loss_tokens * job.train_s)
            scene.trained(step)
            watch(scene.store)
    return outcome


def apart(job: SimulatedJob, *, in_turns: bool) -> SimulatedOutcome:
    """Engines on devices of their own: rollout goes on beside training, until new weights come.

    An engine takes `switch_s` to load them: all at once, or `in_turns`, while the others serve.
    """
    return virtual_time.run(_apart(job, in_turns=in_turns))


async def _apart(job: SimulatedJob, *, in_turns: bool) -> SimulatedOutcome:
    async with _running(job) as (scene, outcome):
        scene.open_gates(WeightVersion(0, 1))
        engines = scene.engines.simulated
        turns = [[engine] for engine in engines] if in_turns else [engines]
        for step in range(1, job.steps + 1):
            batch = await scene.sealed(step)
            outcome.take(batch)
            await asyncio.sleep(batch.loss_tokens * job.train_s)
            for loading in turns:
                for engine in loading:
                    engine.close()
                await asyncio.sleep(job.switch_s)
                for engine in loading:
                    engine.open(WeightVersion(step, 1))
            scene.trained(step)
    return outcome


@asynccontextmanager
async def _running(job: SimulatedJob) -> AsyncIterator[tuple[SimulatedController, SimulatedOutcome]]:
    """A controller that runs until the end of the block; the outcome is complete behind it."""
    with _in_memory() as directory:
        scene, outcome = SimulatedController(job, Path(directory)), SimulatedOutcome()
        async with asyncio.TaskGroup() as group:
            following = group.create_task(scene.engines.run(), name="engines")
            working = group.create_task(scene.worker.run(), name="worker")
            await asyncio.sleep(0)
            yield scene, outcome
            outcome.took_s = virtual_time.loop().now
            scene.worker.drain()
            await working
            following.cancel()
        outcome.resent_tokens = scene.counted("colocate_rollout_resent_tokens_total")
        outcome.discarded_tokens = scene.counted("colocate_rollout_discarded_tokens_total")
        outcome.finished_tokens = scene.counted("colocate_rollout_response_tokens_sum")
        outcome.sealed_tokens = scene.counted("colocate_rollout_sealed_response_tokens_sum")
        assert scene.store.counts[SampleState.TRAINED] == job.steps * job.samples, scene.store.counts
        scene.store.close()


def _in_memory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


class SimulatedController:
    """The parts of one rollout controller, put together as `controller` does it."""

    def __init__(self, job: SimulatedJob, directory: Path) -> None:
        spec = spec_of(job)
        self._changed = asyncio.Event()
        self._registry = CollectorRegistry()
        metrics, chat = RolloutMetrics(self._registry), NoText()
        self.store = store = PatientStore(directory, job_uid=names.JobUid("simulated"), records_at_most=RECORDS)
        processes = Rewards(spec)
        self.engines = SimulatedEngines(job, changed=self._wake)
        sessions = Sessions(
            store,
            metrics,
            group_size=job.group_size,
            max_staleness=job.max_staleness,
            changed=self._wake,
            clock=virtual_time.loop().time,
        )
        self.worker = Worker(
            spec,
            store=store,
            engines=self.engines,
            prompts=PromptsInOrder(store.cursor),
            chat=chat,
            processes=processes,
            episodes=unplayed(Episodes, spec.rollout.prompts, sessions, processes, directory),
            evaluation=None,
            turns=Turns(chat, metrics, keeps=True, changed=self._wake, at_most=1, parked_at_most_s=1.0),
            sessions=sessions,
            metrics=metrics,
            changed=self._changed.set,
        )

    def _wake(self) -> None:
        self.worker.wake()

    def open_gates(self, version: WeightVersion) -> None:
        for engine in self.engines.simulated:
            engine.open(version)

    def close_gates(self) -> None:
        for engine in self.engines.simulated:
            engine.close()

    async def sealed(self, step: int) -> BatchRecord:
        """The batch of a step, once it is durable."""
        while (batch := self.store.batch(step)) is None:
            self._changed.clear()
            await self._changed.wait()
        await self.store.flushed()
        return batch

    def trained(self, step: int) -> None:
        """Take note of a trained step, as a target of the operator reports it."""
        self.store.commit(step)
        self.worker.discard_stale()
        self.store.forget(step)
        self.worker.wake()

    def counted(self, name: str) -> int:
        found = [
            sample.value for metric in self._registry.collect() for sample in metric.samples if sample.name == name
        ]
        return int(sum(found))


def spec_of(job: SimulatedJob) -> ColocatedRLJobSpec:
    rollout: dict[str, Any] = {
        "prompts": {"reasoningGym": {"name": "chain_sum", "size": 1}},
        "maxPromptTokens": 1,
        "maxResponseTokens": 10_000_000,
        "batchSize": job.batch_size,
        "groupSize": job.group_size,
        "maxStaleness": job.max_staleness,
        "atMaxStaleness": job.at_max_staleness,
        "maxConcurrency": job.max_concurrency or (job.max_staleness + 1) * job.batch_size,
        "interruption": job.interruption,
    }
    if job.min_rollout_s:
        rollout["minRolloutSeconds"] = job.min_rollout_s
    if job.apart:
        rollout |= {"placement": "Both", "replicas": job.apart}
    fields = {"steps": job.steps, "model": {"claim": {"name": "model"}}, "gpus": {"count": 0}, "rollout": rollout}
    return ColocatedRLJobSpec.model_validate(fields)


class PatientStore(Store):
    """A PatientStore lies on a volume whose commits take no time of the simulation."""

    async def flushed(self) -> None:
        with virtual_time.loop().outside():
            await super().flushed()


class SimulatedEngines(Engines):
    """Named at once, and open when the script says so."""

    def __init__(self, job: SimulatedJob, *, changed: Callable[[], None]) -> None:
        self._clients = {}
        self._renamed = asyncio.Event()
        self._named = tuple(Endpoint(pod=f"gpu-{number}", address="", port=1) for number in range(job.engines))
        self._changed = changed
        self._share_until = 0.0
        self._any_open = False
        self._sent = Counter()
        self._open = []
        self._named_so = {}
        self._ranked = []
        self._full, self.in_flight = Bound(sys.maxsize, "never"), 0  # whatever this machine allows
        self._job = job
        self._numbers = Numbers(job.group_size)

    def _client_of(self, endpoint: Endpoint) -> EngineClient:
        job = self._job
        return SimulatedEngine(
            endpoint,
            EngineMachine(job.rates),
            trace=job.trace,
            numbers=self._numbers,
            keeps=job.interruption is Interruption.RESUME,
            changed=self._gate_changed,
        )

    @property
    def simulated(self) -> list[SimulatedEngine]:
        return [client for client in self._clients.values() if isinstance(client, SimulatedEngine)]


class PromptsInOrder(PromptSource):
    """A source of prompts of one token each: the prompt's number."""

    is_over = False

    def __init__(self, position: int = 0) -> None:
        self._position = position
        self.problem = None

    def take(self) -> Prompt | None:
        prompt = Prompt(PromptPosition(self._position), self._position, (self._position,))
        self._position += 1
        return prompt


class Rewards(TaskProcesses):
    """Every other response is right."""

    def __init__(self, spec: ColocatedRLJobSpec) -> None:
        super().__init__(spec.rollout.prompts, count=1, socket=Path("/nowhere"))

    async def score_with_figures(self, index: int, response: str) -> RewardAnswer:
        return RewardAnswer(reward=index % 2)


class NoText(Chat):
    """Tokens that stand for nothing."""

    def __init__(self) -> None:
        self.end_ids = frozenset({2})

    def text(self, ids: Any) -> str:
        return ""
