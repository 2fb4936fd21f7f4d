"""The persistent worker keeps groups in flight all the time, across switches, and seals a batch when one is complete.

`run` is the whole loop. Every event (a gate opens, an attempt ends, a prompt is ready, a target arrives) wakes it, and
it does what it may do now: admit, seal, send. It keeps no state of its own: the store and the gates determine the next
action, so a restart resumes where the last process was.

While all gates are closed nothing is sent: samples wait in the store. Samples of the group whose tokens would be too
old soonest go first, and of these the interrupted before those that never began; a group without tokens goes last.
Once a batch is sealed the engines are about to change hands: their requests may end, and nothing is sent that would
only be prefilled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from colocated_rl_api.back_off import MOMENT_S
from colocated_rl_api.facts import Problem
from colocated_rl_api.job import AtMaxStaleness, ColocatedRLJobSpec, IncompleteBatch, Interruption
from colocated_rl_api.logs import log
from colocated_rl_api.member_wire import RolloutTarget
from colocated_rl_rollout.engines.engine_client import (
    EngineClient,
    GateClosed,
    GateRefused,
    Generated,
    GenerateRequest,
    RequestRejected,
)
from colocated_rl_rollout.engines.engines import Engines
from colocated_rl_rollout.episodes import EpisodeFailed, EpisodeLost, Episodes
from colocated_rl_rollout.evaluation import Evaluator
from colocated_rl_rollout.filtering import GroupFilters
from colocated_rl_rollout.gateway.sessions import Sessions
from colocated_rl_rollout.gateway.turns import Turns
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.reference import ReferencePods
from colocated_rl_rollout.rewards.prompts import PromptSource
from colocated_rl_rollout.rewards.rewards import RewardFailed, TaskProcesses
from colocated_rl_rollout.rewards.task_connection import TaskUnusable
from colocated_rl_rollout.rules.chat import Chat
from colocated_rl_rollout.rules.overlong import overlong_penalty
from colocated_rl_rollout.rules.resume import (
    cut,
    exhausted,
    finish_of,
    join,
    remaining,
    stopped_at,
)
from colocated_rl_rollout.rules.samples import (
    NO_TOKENS,
    WAITING,
    Finish,
    Group,
    Sample,
    SampleId,
    SampleState,
)
from colocated_rl_rollout.rules.staleness import (
    Candidate,
    choose,
    deadline,
    room,
)
from colocated_rl_rollout.sealer import FULL_RETRY_S, Sealer, trainer_ranks
from colocated_rl_rollout.store.batches import write_batch
from colocated_rl_rollout.store.store import Store

LOG = logging.getLogger(__name__)

REPLACED_AT_MOST = 2  # times the group's size; beyond that the whole group is given up
SWITCH_S = 5.0  # from a sealed batch to closed gates; past it nobody is there to close them, and rollout goes on


class Worker(Sealer):
    """Generates the samples of one job and seals its batches."""

    def __init__(
        self,
        spec: ColocatedRLJobSpec,
        *,
        store: Store,
        engines: Engines,
        prompts: PromptSource,
        chat: Chat,
        processes: TaskProcesses,
        episodes: Episodes,
        evaluation: Evaluator | None,
        turns: Turns,
        sessions: Sessions,
        metrics: RolloutMetrics,
        changed: Callable[[], None],
        reference: ReferencePods | None = None,
        full_retry_s: float = FULL_RETRY_S,
    ) -> None:
        """Take the parts of the job. reference: one that scores for rollout; no batch is sealed without its scores."""
        super().__init__(spec, store, changed, full_retry_s)
        self._reference = reference
        self._rollout = spec.rollout
        self._stops = tuple(spec.rollout.sampling.stop)
        self._max_staleness = spec.max_staleness
        self._only_records = not spec.ladder.trains  # no step follows, and a sealed batch blocks nothing
        self._engines = engines
        self._prompts = prompts
        self._chat = chat
        self._processes = processes
        self._episodes = episodes
        self._evaluation = evaluation
        self._turns = turns
        self._sessions = sessions
        self._metrics = metrics
        self._filters = GroupFilters(
            spec.rollout, store=store, processes=processes, chat=chat, metrics=metrics, judged=self._judged
        )
        self._group: asyncio.TaskGroup  # while `run` is up
        self._tasks: dict[SampleId, asyncio.Task[None]] = {}  # by sample
        self._sealing: asyncio.Task[None] | None = None
        self._collecting_since = time.monotonic()
        self._looks_again: asyncio.TimerHandle | None = None  # for room on the volume
        # these may change while the job runs
        self.concurrency = spec.rollout.concurrency
        self.temperature = spec.rollout.sampling.temperature
        self._held_since: float | None = None  # a group at its staleness limit that is not complete holds sealing back
        metrics.staleness_wait.set_function(self._held_s)
        self._open_since = (0, 0.0)  # a step, and when its first gate opened
        self._switches_until = 0.0

    # ------------------------------------------------------------------------------------------------- the loop
    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            for kept in list(self._store.groups.values()):
                self._completed(kept)
            for sample in [sample for kept in self._store.groups.values() for sample in kept.kept]:
                if sample.state is SampleState.SCORING:
                    self._own(sample, group.create_task(self._score(sample), name=f"score/{sample.id}"))
            while not self._draining or self._tasks or self._sealing or self._turns.running:
                self._wake.clear()
                if not self._draining:
                    self._admit()
                    self._seal_if_due()
                    self._send()
                    self._filters.send(group)
                    if self._reference:
                        self._reference.send(group)
                self._changed()
                await self._wake.wait()

    def drain(self) -> None:
        has_verifier = self._processes.problem is None
        for sample in [sample for group in self._store.groups.values() for sample in group.kept]:
            is_unjudged = sample.state is SampleState.SCORING and not has_verifier
            if (sample.group.prompt.is_played or is_unjudged) and (task := self._tasks.get(sample.id)):
                task.cancel()  # neither has an end to wait for: it is played, or its reward asked for, again
        if self._evaluation:
            self._evaluation.end_episodes()
        self._turns.end()
        if self._reference:
            self._reference.end()
        self._filters.drain()
        super().drain()

    @property
    def filter_problem(self) -> Problem | None:
        return self._filters.problem

    def tune(self, target: RolloutTarget) -> None:
        super().tune(target)
        if target.concurrency is not None:
            self.concurrency = target.concurrency
        if target.temperature is not None:
            self.temperature = target.temperature
            if self._reference and self._reference.temperature != target.temperature:
                self._reference.temperature = target.temperature
                for group in self._store.groups.values():
                    self._let_reference_score(group)

    def _own(self, sample: Sample, task: asyncio.Task[None]) -> None:
        self._tasks[sample.id] = task
        task.add_done_callback(lambda ended: self._ended(sample, ended))

    def _ended(self, sample: Sample, task: asyncio.Task[None]) -> None:
        if self._tasks.get(sample.id) is task:  # its next attempt may have begun already
            del self._tasks[sample.id]
        self.wake()

    # ------------------------------------------------------------------------------------------------- admission
    def _admit(self) -> None:
        if self.ended_at is not None:
            return
        groups = self._store.groups.values()
        completed = sum(group.is_complete for group in groups)
        admitted = room(
            live=len(groups) - completed,
            completed=completed,
            sealed=self._untrained_groups,
            concurrency=self.concurrency,
            batch_size=self._rollout.batch_size,
            max_staleness=self._max_staleness,
            steps_left=self.last_step + 1 - self._store.next_step,
            spare=self._rollout.spare_groups,
        )
        if admitted and not self._store.has_room():
            loop = asyncio.get_running_loop()
            if self._looks_again is None or self._looks_again.when() <= loop.time() + MOMENT_S:
                self._looks_again = loop.call_later(self._full_retry_s, self.wake)
            return
        for _ in range(admitted):
            if (group := self._sessions.admit()) is not None:  # it is whole already and only takes a group's place
                self._completed(group)
                continue
            prompt = self._prompts.take()
            if prompt is None:
                return  # the source wakes the worker when it has one
            self._store.admit(prompt, size=self._rollout.group_size)

    # ------------------------------------------------------------------------------------------------- attempts
    def _send(self) -> None:
        """Send waiting requests to open gates: evaluation first, then clients' turns; then the most urgent samples,
        interrupted before new, oldest first.
        """
        if not self._engines.open:
            return
        demand = self._store.counts[SampleState.RUNNING] + len(self._store.waiting) + self._turns.demand
        share = self._engines.share(demand + (self._evaluation.demand if self._evaluation else 0))
        if self._evaluation:
            episodes = self.concurrency * self._rollout.group_size  # as many as rollout has
            self._evaluation.send(self._engines, self._group, at_most=share, episodes_at_most=episodes)
        if self._engines.pick(at_most=share) is None:
            return  # before putting in order what may be tens of thousands, at each answer
        self._turns.send(self._engines, self._group, at_most=share)
        if self._is_about_to_switch:
            return
        for sample in self._in_order():
            engine = self._engines.pick(preferred=sample.engine, at_most=share)
            if engine is None:
                return
            self._store.start(sample)
            if sample.group.prompt.is_played:  # its turns are sent as clients' turns are
                self._own(sample, self._group.create_task(self._play(sample), name=f"episode/{sample.id}"))
                continue
            sample.engine = engine.name
            attempt = self._attempt(sample, engine)
            self._own(sample, self._engines.send(self._group, engine, attempt, name=f"sample/{sample.id}"))

    @property
    def _is_about_to_switch(self) -> bool:
        """Return whether all gates are about to close, whatever is in flight behind them."""
        ladder = self._spec.ladder
        if not ladder.takes_turns or ladder.rolls_on or (self._evaluation and self._evaluation.demand):
            return False
        is_sealed = self._sealing is not None or self._untrained_groups > 0
        return is_sealed and asyncio.get_running_loop().time() < self._switches_until - MOMENT_S

    @property
    def _untrained_groups(self) -> int:
        """Return how many groups are in a sealed batch that a step will train."""
        return 0 if self._only_records else self._store.sealed_groups

    def _expect_switch(self) -> None:
        loop = asyncio.get_running_loop()
        self._switches_until = loop.time() + SWITCH_S
        loop.call_later(SWITCH_S, self.wake)

    def _in_order(self) -> list[Sample]:
        waiting = self._store.waiting.values()
        deadlines = {group: self._deadline(group) for group in {sample.group for sample in waiting}}

        def urgency(sample: Sample) -> tuple[int, bool, int, int]:
            return deadlines[sample.group], sample.state is SampleState.ADMITTED, sample.group.id, sample.id

        return sorted(waiting, key=urgency)

    def _deadline(self, group: Group) -> int:
        collected = self._store.next_step if group.has_unversioned else None
        return deadline(group.oldest_step, max_staleness=self._max_staleness, unversioned_at=collected)

    async def _attempt(self, sample: Sample, engine: EngineClient) -> None:
        """Run one engine attempt of a sample."""
        request = GenerateRequest(
            [*sample.group.prompt.ids, *sample.tokens.ids.tolist()],
            remaining(sample.tokens, limit=self._rollout.max_response_tokens),
            self.temperature,
            self._chat.end_ids,
            self._stops,
            experts_from=0 if self._rollout.router_replay else None,  # also of tokens that it reads again, as it does
        )
        try:
            generated = await engine.generate(request)
        except GateClosed as error:
            self._metrics.attempts.labels(error.ending).inc()
            self._store.park(sample)
        except GateRefused as error:
            self._metrics.attempts.labels(error.ending).inc()
            log(LOG, "attempt lost", logging.DEBUG, gate=engine.name, sample=sample.id, reason=str(error))
            self._store.interrupt(sample, NO_TOKENS)
            self._limit_attempts(sample, why=str(error))
        except RequestRejected as error:
            self._metrics.attempts.labels("rejected").inc()
            self._replace(sample, SampleState.FAILED, "EngineRejected", str(error))
        else:
            self._metrics.attempts.labels(generated.finish or "interrupted").inc()
            self._metrics.resent_tokens.inc(len(sample.tokens))
            self._metrics.preemptions.inc(generated.preemptions)
            self._accept(sample, generated)

    async def _play(self, sample: Sample) -> None:
        """Play one episode, from its first turn to its reward."""
        row, turned = sample.group.prompt.index, partial(self._store.turned, sample)
        try:
            trajectory, removal = await self._episodes.play(row, ending="trained", turned=turned)
        except EpisodeFailed as error:
            self._replace(sample, SampleState.FAILED, error.reason, str(error))
        except EpisodeLost:
            self._store.interrupt(sample, NO_TOKENS)
            self._limit_attempts(sample)
        else:
            self._store.complete(sample, trajectory, *removal)
            self._completed(sample.group)

    def _accept(self, sample: Sample, generated: Generated) -> None:
        """Hand the tokens of an attempt to the store."""
        segment = generated.tokens
        experts = generated.experts.astype(np.int16) if len(generated.experts) else None
        whole = join(sample.tokens, segment)
        limit = self._rollout.max_response_tokens
        finish = finish_of(whole, generated.finish, limit=limit, end_ids=self._chat.end_ids)
        stop = stopped_at(whole.ids, self._stops, self._chat.text)
        if stop is not None:
            stop = max(stop, len(sample.tokens))  # tokens of a former job may hold it: they stay as they are
            finish, whole, segment = Finish.STOP, cut(whole, stop), cut(segment, stop - len(sample.tokens))
        if finish is not None:
            self._metrics.response_tokens.observe(len(whole))
            self._store.finish(sample, segment, finish, experts=experts)
            self._own(sample, self._group.create_task(self._score(sample), name=f"score/{sample.id}"))
            return
        keep = self._rollout.interruption is not Interruption.RETRY
        if not keep:
            self._metrics.discarded_tokens.labels("Retry").inc(len(whole))
        self._store.interrupt(sample, segment, keep=keep, experts=experts)
        self._limit_attempts(sample)

    def _limit_attempts(self, sample: Sample, *, why: str | None = None) -> None:
        """Give up a sample after too many attempts. why: the newest one brought nothing."""
        if end := exhausted(
            attempts=sample.attempts,
            idle_attempts=sample.idle_attempts,
            resent=sample.resent,
            limit=self._rollout.max_response_tokens,
        ):
            reason, message = end
            self._replace(sample, SampleState.FAILED, reason, f"{message}; the last: {why}" if why else message)

    async def _score(self, sample: Sample) -> None:
        """Score 0 a response that did not end by itself; the task's verifier scores the others. Long ones lose some."""
        limit, rule = self._rollout.max_response_tokens, self._rollout.overlong_penalty
        penalty = overlong_penalty(len(sample.tokens), limit=limit, rule=rule) if rule else 0.0
        if sample.finish is not Finish.STOP:
            self._store.score(sample, 0.0 - penalty)
            self._completed(sample.group)
            return
        text = self._chat.text(sample.tokens.ids.tolist())
        try:
            given = await self._processes.score_with_figures(sample.group.prompt.index, text)
        except RewardFailed as error:
            message = f"prompt {sample.group.prompt.index + 1} of the data: {error}"
            self._replace(sample, SampleState.FAILED, error.reason, message)
        except TaskUnusable as error:  # nothing can be scored until the user fixes the job: the sample stays as it is
            self.problem = Problem(reason="PromptsUnusable", message=str(error)[:1024])
        else:
            self._store.score(sample, given.reward - penalty, given.figures)
            self.problem = None
            self._completed(sample.group)

    def _completed(self, group: Group) -> None:
        """Judge and score a group after one of its samples completed; perhaps all have."""
        self._filters.judge(group)
        self._let_reference_score(group)

    def _judged(self, group: Group) -> None:
        self._let_reference_score(group)
        self.wake()

    def _let_reference_score(self, group: Group) -> None:
        """Request the reference's scores at once, or where filters may drop the group, once it has passed them."""
        if self._reference and group.id in self._store.groups and self._filters.let_pass(group):
            self._reference.want(group)

    def _is_ready(self, group: Group) -> bool:
        """Return whether the group may go into a batch."""
        is_scored = self._reference is None or self._reference.has_scored(group)
        return group.is_complete and self._filters.let_pass(group) and is_scored

    # ------------------------------------------------------------------------------------------------- giving up
    def _replace(self, sample: Sample, state: SampleState, reason: str, message: str) -> None:
        """End a sample and admit another in its place; give the group up when that happened too often."""
        log(LOG, "sample replaced", sample=sample.id, state=state, reason=reason, message=message)
        self._metrics.count_discarded([sample], reason)
        group = sample.group
        self._filters.forget(group)
        self._store.replace(sample, state, reason)
        if len(group.samples) <= (1 + REPLACED_AT_MOST) * self._rollout.group_size:
            return
        self._give_up(group, "GroupGivenUp")
        self.problem = Problem(reason=reason, message=f"group {group.id} given up: {message}"[:1024])
        log(LOG, "group abandoned", logging.WARNING, group=group.id, reason=message)

    def _give_up(self, group: Group, reason: str) -> None:
        """Discard a group, whatever of it is under way."""
        self._metrics.count_discarded(group.kept, reason)
        for kept in group.kept:
            if task := self._tasks.get(kept.id):
                task.cancel()
        self._filters.forget(group)
        self._store.give_up(group, reason)

    def discard_stale(self) -> None:
        """Replace samples that no batch can take any more: a token of theirs is older than `maxStaleness` allows.

        With spare groups whole groups are discarded: others take their place, with other prompts.
        """
        if self._rollout.at_max_staleness is AtMaxStaleness.MASK:
            return
        step = self._store.next_step
        late = [group for group in self._store.groups.values() if self._deadline(group) < step]
        for group in [group for group in late if group.is_of_sessions]:  # nobody can make another sample for it
            self._give_up(group, "TooStale")
            late.remove(group)
        if self._rollout.spare_groups:
            for group in late:
                self._give_up(group, "Spare")
            return
        for sample in [sample for group in late for sample in group.kept]:
            oldest = deadline(sample.tokens.oldest_step, max_staleness=self._max_staleness)
            if oldest < step and (sample.state in WAITING or sample.state is SampleState.COMPLETED):
                self._replace(sample, SampleState.DISCARDED, "TooStale", f"not in a batch by step {oldest}")

    # ------------------------------------------------------------------------------------------------- sealing
    def _seal_if_due(self) -> None:
        step = self._store.next_step
        if self._sealing:
            return
        groups, size = self._store.groups.values(), self._rollout.batch_size
        if self._prompts.is_over and len(groups) < size and all(map(self._is_ready, groups)):
            if not groups or self._rollout.incomplete_batch is IncompleteBatch.DROP:
                self._end_with_prompts(step)
                return
            size = len(groups)
        if self._untrained_groups or step > self.last_step or self._is_too_soon(step):
            return
        if sum(map(self._is_ready, groups)) < size:
            return
        self.discard_stale()
        candidates = [Candidate(self._deadline(group), group.id, self._is_ready(group)) for group in groups]
        waits = self._rollout.at_max_staleness is AtMaxStaleness.WAIT
        chosen = choose(candidates, step=step, batch_size=size, waits=waits)
        if chosen is None:
            self._held_since = self._held_since or time.monotonic()
        else:
            self._held_since = None
            self._expect_switch()
            sealed = [self._store.groups[number] for number in chosen]
            scores = self._scores_of(sealed)  # now: before the task begins, a target may change the temperature
            self._sealing = self._group.create_task(self._seal(step, sealed, self.temperature, scores))

    def _end_with_prompts(self, step: int) -> None:
        """Discard what fills no batch: none follows that before `step`."""
        left = list(self._store.groups.values())
        if step == 1:
            self.problem = Problem(
                reason="PromptsUnusable",
                message=f"rollout.prompts.passes are over with {len(left)} groups, and a batch takes "
                f"{self._rollout.batch_size}: make a job with a smaller rollout.batchSize, with more passes, or with "
                "rollout.incompleteBatch Train",
            )
        elif self.ended_at is None:
            for group in left:
                self._give_up(group, "IncompleteBatch")
            self.ended_at = step - 1
            log(LOG, "prompts exhausted", step=self.ended_at, groups=len(left))

    def _held_s(self) -> float:
        return 0.0 if self._held_since is None else time.monotonic() - self._held_since

    def _is_too_soon(self, step: int) -> bool:
        """Return whether engines have work, and gates opened less than `minRolloutSeconds` ago for this step."""
        least_s, loop = self._rollout.min_rollout_seconds, asyncio.get_running_loop()
        if self._engines.open and self._open_since[0] != step:
            self._open_since = (step, loop.time())
            if least_s:
                loop.call_later(least_s, self.wake)
        since = self._open_since[1] if self._open_since[0] == step else loop.time()
        works = self._store.counts[SampleState.RUNNING] > 0 or len(self._store.waiting) > 0
        return works and not self._only_records and loop.time() < since + least_s - MOMENT_S

    def _scores_of(self, groups: Iterable[Group]) -> dict[SampleId, NDArray[np.float32]] | None:
        """Return the reference's scores of each response, by sample; None without a reference."""
        if self._reference is None:
            return None
        return {sample.id: sample.scores.logp for group in groups for sample in group.kept if sample.scores}

    async def _seal(
        self,
        step: int,
        groups: list[Group],
        temperature: float,
        scores: Mapping[SampleId, NDArray[np.float32]] | None,
    ) -> None:
        """Make the batch's files durable first; only then seal it and let anybody learn of it.

        scores: of a reference, at this temperature.
        """
        write = partial(
            write_batch,
            self._store.batch_directory,
            groups,
            step=step,
            shards=trainer_ranks(self._spec),
            temperature=temperature,
            seed=self._rollout.prompts.seed,
            oldest_step=step - 1 - self._max_staleness,
            reference=scores,
            prompt_position=self._store.position_after(groups),
            free_bytes=self._store.free_bytes,
        )
        while (record := await self._written(step, write)) is None:  # noqa: ASYNC110 - a volume has no event
            await asyncio.sleep(self._full_retry_s)
        for sample in [sample for group in groups if not group.is_of_turns for sample in group.kept]:
            self._metrics.sealed_tokens.observe(len(sample.tokens))
        self._store.seal(record, groups)
        self._metrics.sealed_staleness.add(record.staleness)
        self._metrics.discarded_tokens.labels("TooStale").inc(record.masked_tokens)
        filtered = self._filters.batch_sealed(groups)
        await self._store.flushed()
        self._log_sealed(record, self._collecting_since, filtered_groups=filtered)
        self._collecting_since = time.monotonic()
        self._sealing = None
        self._expect_switch()
        self.wake()
