"""One job's rollout controller connects the parts, takes targets and reports facts.

Facts are a snapshot, and all of it is durable before the operator sees it. Facts that a plan depends on are reported at
once; progress figures at most every two seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Sequence
from functools import partial

import aiohttp
from prometheus_client import REGISTRY, CollectorRegistry

from colocated_rl_api import names
from colocated_rl_api.facts import (
    EvaluationResult,
    Problem,
    RolloutFacts,
)
from colocated_rl_api.job import ROUTED_EXPERTS, AtMaxStaleness, Interruption
from colocated_rl_api.logs import log
from colocated_rl_api.member_wire import Goal, Hello, RolloutTarget
from colocated_rl_member.data import DataClient
from colocated_rl_member.server import MemberServer
from colocated_rl_member.tls import MemberTls
from colocated_rl_rollout.engines.engines import Engines
from colocated_rl_rollout.episodes import Episodes
from colocated_rl_rollout.evaluation import Evaluator
from colocated_rl_rollout.gateway.gateway import Gateway
from colocated_rl_rollout.gateway.not_found import telling_what_there_is
from colocated_rl_rollout.gateway.sessions import Sessions
from colocated_rl_rollout.gateway.turns import Turns
from colocated_rl_rollout.metrics import RolloutMetrics, StoreGauges, TokenRate
from colocated_rl_rollout.pages.exports import SampleExports
from colocated_rl_rollout.pages.followers import Followers
from colocated_rl_rollout.pages.interface import interface
from colocated_rl_rollout.pages.pages import EngineShown, data_routes, pages
from colocated_rl_rollout.pages.words import in_words
from colocated_rl_rollout.reference import ReferencePods
from colocated_rl_rollout.replay import Replay
from colocated_rl_rollout.rewards.prompts import PromptSource
from colocated_rl_rollout.rewards.rewards import TaskProcesses
from colocated_rl_rollout.rules.chat import Chat
from colocated_rl_rollout.rules.holders import holder_behind
from colocated_rl_rollout.rules.samples import SampleState, Tokens
from colocated_rl_rollout.sealer import Sealer
from colocated_rl_rollout.settings import RolloutSettings
from colocated_rl_rollout.store.batches import KeptClimb
from colocated_rl_rollout.store.former import FormerJob
from colocated_rl_rollout.store.store import Store
from colocated_rl_rollout.worker import Worker

LOG = logging.getLogger(__name__)

FAREWELL_S = 2.0  # for the operator to read that the member has stopped
EVALUATIONS_SAID = 64  # in a line of the log, which container runtimes cut after 16 KiB
FIRST_SAID = 16  # of them, each the first of a set


class Controller:
    """Runs until `drain` or goal Stop.

    session: for the engines' gates; every request has a connection of its own.
    processes: those that make prompts and score answers; the caller keeps them up.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        session: aiohttp.ClientSession,
        processes: TaskProcesses,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """Build the parts. Raises StoreFailed, ModelUnusable, and the errors of MemberTls.read."""
        job, spec = settings.job, settings.job.spec
        self._placement = spec.placement
        self._drain_s = settings.drain_s
        self._filters = (*spec.rollout.filters, *spec.rollout.filter_functions)
        self._progress_s = settings.progress_s
        self._ending = asyncio.Event()
        self._stop = False  # was requested
        self._stopped = False  # is complete
        self._dirty = asyncio.Event()
        self._rate = TokenRate()
        self._metrics = RolloutMetrics(registry)
        tls = MemberTls.read(settings.tls, kept=settings.keys)
        chat = Chat(settings.model)
        former = None
        if spec.restore_from is not None and settings.former is not None:
            former = FormerJob(settings.former, spec.restore_from.step, settings.former_samples)
        self._store = store = Store(
            settings.state, job_uid=job.uid, keeps_batches=spec.storage.keep_batches, former=former
        )
        self._processes = processes
        client = DataClient(session, tls, job.uid)
        self._engines = Engines(
            client,
            settle_s=spec.switch.settle_seconds,
            changed=self._wake,
            count=self._count_tokens,
            accepts_unversioned=spec.rollout.accepts_unversioned,
        )
        self._prompts = PromptSource(
            self._processes,
            chat,
            max_prompt_tokens=spec.rollout.max_prompt_tokens,
            position=store.cursor,
            passes=spec.rollout.prompts.passes,
            known_digest=store.data_digest,
            remember=store.remember_data,
            changed=self._wake,
            count=lambda why: self._metrics.prompts_left_out.labels(why).inc(),
        )
        turns = Turns(
            chat,
            self._metrics,
            keeps=spec.rollout.interruption is not Interruption.RETRY,
            changed=self._wake,
            at_most=settings.gateway_turns,
            parked_at_most_s=settings.gateway_parked_s,
        )
        sessions = Sessions(
            store,
            self._metrics,
            group_size=spec.rollout.group_size,
            max_staleness=None if spec.rollout.at_max_staleness is AtMaxStaleness.MASK else spec.max_staleness,
            changed=self._wake,
            clock=time.monotonic,
        )
        self._episodes = Episodes(
            spec.rollout.prompts,
            sessions,
            sets=spec.own_sets,
            data=processes.data,
            count=settings.task_processes,
            socket=settings.tasks,
            model=job.name,
            gateway=lambda: f"http://127.0.0.1:{self.member.ports.pages}/v1",
        )
        self._evaluation = Evaluator(
            spec.evaluation,
            sources=spec.set_sources,
            limit=spec.rollout.max_response_tokens,
            sampling=spec.rollout.sampling,
            store=store,
            prompts=self._prompts,
            chat=chat,
            processes=self._processes,
            episodes=self._episodes,
            changed=self._wake,
        )
        self._gateway = gateway = Gateway(
            model=job.name,
            chat=chat,
            turns=turns,
            sessions=sessions,
            metrics=self._metrics,
            limit=spec.rollout.max_response_tokens,
            longest=spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens,
            temperature=spec.rollout.sampling.temperature,
            created=int(job.created.timestamp()),
            says_experts=ROUTED_EXPERTS in spec.rollout.engine_flags,
            replays_experts=spec.rollout.router_replay,
        )
        self._reference: ReferencePods | None = None
        if spec.seals_with_scores and settings.recording is None:
            self._reference = ReferencePods(
                client,
                temperature=spec.rollout.sampling.temperature,
                deadline_s=spec.switch.trainer_progress_seconds,
                metrics=self._metrics,
                changed=self._wake,
            )
        self._sealer: Sealer
        if settings.recording is None:
            self._sealer = Worker(
                spec,
                store=store,
                engines=self._engines,
                prompts=self._prompts,
                chat=chat,
                processes=self._processes,
                episodes=self._episodes,
                evaluation=self._evaluation,
                turns=turns,
                sessions=sessions,
                metrics=self._metrics,
                changed=self._dirty.set,
                reference=self._reference,
            )
            self._beside = {
                "prompts": self._prompts.run,
                "episodes": self._episodes.run,
                "evaluation": self._evaluation.prepare,
            }
            served, around = gateway.routes(), [telling_what_there_is(self._metrics)]
        else:  # otherwise no engine would answer
            self._sealer = Replay(spec, store=store, recording=settings.recording, changed=self._dirty.set)
            self._beside, served, around = {}, [], []
        registry.register(StoreGauges(store, lambda: self._evaluation.results))
        words = partial(in_words, decoder=chat)
        self._followers = Followers(store, words)
        self._facts = self._observe()
        self.member = MemberServer(
            hello=Hello(
                pod=settings.pod,
                pod_uid=settings.pod_uid,
                job_uid=job.uid,
                role=names.ROLE_ROLLOUT,
                incarnation=uuid.uuid4().hex,
                highest_epoch=store.epoch,
            ),
            kind=RolloutTarget,
            tls=tls,
            facts=lambda: self._facts,
            accept=self._accept,
            remember_epoch=store.remember_epoch,
            data=data_routes(store, tls, served, around),
            pages=[
                *pages(
                    store,
                    lambda: self._facts,
                    self._engines_shown,
                    words,
                    self._followers,
                    SampleExports(store, settings.model),
                    partial(interface, gateway=bool(served)),
                ),
                *served,
            ],
            around_pages=around,
            ports=settings.ports,
            registry=registry,
        )

    async def run(self) -> None:
        """Serve and generate until the end; what is accepted by then is durable."""
        try:
            evaluations = await asyncio.to_thread(self._store.evaluations)
            async with self.member as member, asyncio.TaskGroup() as group:
                log(
                    LOG,
                    "rollout controller ready",
                    epoch=self._store.epoch,
                    step=self._store.next_step,
                    began_at=self._store.began_at,
                    samples=self._store.counted,
                    # evaluations of earlier pods, whose logs are gone
                    evaluations=[one.model_dump(mode="json", by_alias=True) for one in in_one_line(evaluations)],
                    ports=dataclasses.asdict(member.ports),
                )
                beside = {"engines": self._engines.run, "report": self._report, **self._beside}
                supporters = [group.create_task(run(), name=name) for name, run in beside.items()]
                sealing = group.create_task(self._sealer.run(), name="sealer")
                await self._ending.wait()
                await self._end(sealing)
                for task in supporters:
                    task.cancel()
        finally:
            self._store.close()
        reason = "goal Stop" if self._stop else "SIGTERM"
        log(LOG, "rollout controller ended", reason=reason, samples=self._store.counted)

    @property
    def is_stopped(self) -> bool:
        """Return whether the operator has asked it to stop."""
        return self._stop

    def drain(self) -> None:
        """End soon: responses under way may still end, nothing new begins."""
        self._ending.set()

    async def _end(self, sealing: asyncio.Task[None]) -> None:
        self._sealer.drain()
        if not self._stop:
            await asyncio.wait([sealing], timeout=self._drain_s)
        sealing.cancel()
        await asyncio.wait([sealing])
        self._followers.end()
        self._stopped = self._stop
        await self._publish()
        await asyncio.sleep(FAREWELL_S if self._stop else 0)

    # ------------------------------------------------------------------------------------------------- targets
    def _accept(self, target: RolloutTarget) -> None:
        self._engines.follow(target.engines)
        if self._reference:
            self._reference.follow(target.references)
        self._tune(target)
        if self._store.commit(target.trained_step):
            self._sealer.discard_stale()
        if target.climbed is not None:
            self._store.remember_climb(KeptClimb(**dict(target.climbed), ended=round(time.time(), 3)))
        newest = self._store.next_step - 1  # stays, for people to read
        self._store.forget(min(target.saved_step, newest - 1))
        self._evaluation.ask(target.evaluate)
        if target.goal is Goal.STOP:
            self._stop = True
            self._ending.set()
        self._wake()

    def _tune(self, target: RolloutTarget) -> None:
        """Apply the settings of the spec that may change to everything that begins from here on."""
        self._sealer.tune(target)
        if target.temperature is not None:
            self._evaluation.temperature = self._gateway.temperature = target.temperature
        if target.evaluation is not None:
            self._evaluation.how = target.evaluation

    def _count_tokens(self, tokens: Tokens) -> None:
        self._rate.add(len(tokens))
        self._metrics.tokens.inc(len(tokens))
        self._metrics.unversioned_tokens.inc(tokens.unversioned)

    def _wake(self) -> None:
        self._sealer.wake()
        self._dirty.set()

    # ------------------------------------------------------------------------------------------------- facts
    async def _report(self) -> None:
        """Publish facts that a plan depends on at once, and progress figures now and then."""
        reported, reported_at = self._decisive(), -self._progress_s
        while True:
            self._dirty.clear()
            now = asyncio.get_running_loop().time()
            if self._decisive() != reported or now >= reported_at + self._progress_s:
                reported, reported_at = self._decisive(), now
                await self._publish()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._progress_s):
                    await self._dirty.wait()

    def _decisive(self) -> tuple[object, ...]:
        """Return the facts that a plan depends on."""
        store = self._store
        step, evaluated = store.sealed and store.sealed.step, self._evaluation.results
        ends = self._sealer.ended_at
        return store.epoch, step, store.trained_step, evaluated, len(self._engines.open), ends, self._problem()

    async def _publish(self) -> None:
        facts = self._observe()
        await self._store.flushed()
        self._facts = facts
        self.member.publish()

    def _observe(self) -> RolloutFacts:
        return self._store.facts(
            evaluated=self._evaluation.results,
            last_step=self._sealer.ended_at,
            filtered=self._filtered(),
            tokens_per_second=self._rate.read(),
            gates_open=len(self._engines.open),
            deals_anew=True,
            unscored=self._reference and self._reference.unscored,
            problem=self._problem(),
            stopped=self._stopped,
        )

    def _engines_shown(self) -> list[EngineShown]:
        """Return the engines as people see them, by pod."""
        sealed, trained, shown = self._store.next_step - 1, self._store.trained_step, list[EngineShown]()
        for engine in sorted(self._engines, key=lambda engine: engine.name):
            is_open = engine.state.open if engine.state else None
            holder, why = holder_behind(is_open, self._placement, sealed=sealed, trained=trained)
            version = str(engine.version) if engine.version else None
            shown.append(
                {
                    "pod": engine.name,
                    "open": is_open,
                    "version": version,
                    "inFlight": engine.in_flight,
                    "holder": holder,
                    "why": why,
                }
            )
        return shown

    def _problem(self) -> Problem | None:
        """Return why there is no progress, from the first part that has a problem."""
        parts = (self._store, self._prompts, self._sealer, self._processes, self._episodes, self._evaluation)
        found = next((part.problem for part in parts if part.problem), None)
        found = found or (self._reference and self._reference.problem) or self._sealer.filter_problem
        return found or self._store.deal_problem

    def _filtered(self) -> dict[str, int]:
        """Return how many samples each filter of the job kept from training; a store of a former job knows others."""
        counts = {name: self._store.reasons[SampleState.FILTERED, name] for name in self._filters}
        return {name: count for name, count in counts.items() if count}


def in_one_line(evaluations: Sequence[EvaluationResult]) -> Sequence[EvaluationResult]:
    """Return all evaluations, or the first of each set, which its others are compared with, and the newest."""
    if len(evaluations) <= EVALUATIONS_SAID:
        return evaluations
    of_sets = {one.name: one for one in reversed(evaluations)}  # in order of their newest
    first = [*of_sets.values()][:FIRST_SAID][::-1]
    newest = evaluations[len(first) - EVALUATIONS_SAID :]
    return [*(one for one in first if one not in newest), *newest]
