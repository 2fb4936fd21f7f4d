"""Evaluation measures the mean reward of one weights version on each set of prompts, beside rollout.

Answers to each prompt are sampled as its set asks for, or else as in rollout. Every answer to a set comes from one and
the same version: an answer that other weights made, in part or in whole, is discarded and requested again. A set's
result is recorded when all its answers are in, so that a restart goes on with the sets that have none. An evaluation
ends with its last set, or when the operator asks for another one. A set that can't be evaluated holds up no other.
`worker` sends the requests, before those of rollout.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from colocated_rl_api.facts import BestOf, EvaluationResult, Problem
from colocated_rl_api.job import Evaluation as Rules
from colocated_rl_api.job import EvaluationSet, Sampling
from colocated_rl_api.logs import log
from colocated_rl_api.prompts import Source
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.engines.engine_client import (
    EngineClient,
    GateRefused,
    Generated,
    GenerateRequest,
    RequestRejected,
)
from colocated_rl_rollout.engines.engines import Engines
from colocated_rl_rollout.episodes import EpisodeFailed, EpisodeLost, Episodes
from colocated_rl_rollout.rewards.prompts import NoPrompts, PromptSource
from colocated_rl_rollout.rewards.rewards import REWARD_UNAVAILABLE, RewardFailed, TaskProcesses
from colocated_rl_rollout.rewards.task_connection import TaskUnusable
from colocated_rl_rollout.rules.chat import Chat, Unrenderable
from colocated_rl_rollout.rules.resume import finish_of
from colocated_rl_rollout.rules.samples import Finish, Prompt, Tokens
from colocated_rl_rollout.store.store import Store

LOG = logging.getLogger(__name__)

PREPARE_RETRY_S = 5.0


def best_of(rewards: Sequence[float], answers: int) -> float:
    """Return the mean of the best of `answers` of these rewards, over all choices of so many without replacement.

    Unbiased for any number of rewards from `answers` on. With rewards of 0 and 1 it is the estimator of pass@k of Chen
    et al. 2021 (arXiv:2107.03374).
    """
    ranked, choices = sorted(rewards), math.comb(len(rewards), answers)
    return sum(math.comb(lower, answers - 1) / choices * reward for lower, reward in enumerate(ranked))


class Scoreboard:
    """Collects answers to `prompts` prompts, `responses` to each, by one weights version of `step`. Pure.

    The place of an answer gives its prompt: the first `responses` places belong to the first prompt.
    The newest lineage counts: weights that were made again for the same step are other weights.
    """

    def __init__(self, step: int, *, prompts: int, responses: int = 1, name: str = "held-out") -> None:
        self.name = name
        self.step = step
        self.responses = responses
        self.size = prompts * responses
        self.version: WeightVersion | None = None
        self.rewards: dict[int, float] = {}

    def take(self, place: int, versions: Collection[WeightVersion | None], reward: float) -> bool:
        """Return whether the answer at `place`, made by `versions`, counts. A newer lineage restarts the count.

        An answer with tokens of no version (None) never counts: nobody knows what it measures.
        """
        (version, *others) = versions or (None,)
        if others or version is None or version.step != self.step or (self.version and version < self.version):
            return False
        if version != self.version:
            self.version, self.rewards = version, {}
        self.rewards[place] = reward
        return True

    def missing(self) -> list[int]:
        """Return the places without an answer that counts."""
        return [place for place in range(self.size) if place not in self.rewards]

    def result(self) -> EvaluationResult | None:
        """Return the mean of the rewards with its standard error, or None until all are in."""
        if len(self.rewards) < self.size:
            return None
        rewards = [self.rewards[place] for place in range(self.size)]
        answers = [rewards[start : start + self.responses] for start in range(0, self.size, self.responses)]
        means = [statistics.fmean(each) for each in answers]
        return EvaluationResult(
            name=self.name,
            step=self.step,
            samples=self.size,
            mean=statistics.fmean(means),
            stderr=statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0,
            best=statistics.fmean(max(each) for each in answers) if self.responses > 1 else None,
            best_of=tuple(
                BestOf(answers=count, mean=statistics.fmean(best_of(each, count) for each in answers))
                for count in (2, 4, 8, 16, 32)
                if count < self.responses
            ),
        )


@dataclass(eq=False)
class SetUnderWay:
    """Evaluates one set, by the rules and the temperature with which it began."""

    rules: EvaluationSet
    prompts: list[Prompt]
    temperature: float
    board: Scoreboard
    answering: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # by place
    began: float = field(default_factory=time.monotonic)
    redone: int = 0
    unscored: int = 0

    def prompt(self, place: int) -> Prompt:
        """Return the prompt that the answer at a place is to."""
        return self.prompts[place // self.board.responses]

    @property
    def demand(self) -> int:
        """Return how many answers are under way or missing."""
        return self.board.size - len(self.board.rewards)

    def cancel(self) -> None:
        """Cancel the answers under way, but the one that calls."""
        for task in self.answering.values():
            if task is not asyncio.current_task():
                task.cancel()
        self.answering.clear()


class Evaluator:
    """Evaluates on request. `changed` is called when there is something to send, a result, or a problem.

    sampling: of rollout. sources: of the sets that have one, by its number. how: None until the job has an evaluation.
    A change of it, and of the temperature, applies to what begins after it; a set that is gone from it ends.
    """

    def __init__(
        self,
        how: Rules | None,
        *,
        sources: Mapping[int, Source],
        limit: int,
        sampling: Sampling,
        store: Store,
        prompts: PromptSource,
        chat: Chat,
        processes: TaskProcesses,
        episodes: Episodes,
        changed: Callable[[], None],
    ) -> None:
        self.how = how
        self.temperature = sampling.temperature
        self._sources = sources
        self._rollout_sampling = sampling
        self._limit = limit
        self._store = store
        self._prompts = prompts
        self._chat = chat
        self._processes = processes
        self._episodes = episodes
        self._changed = changed
        self._asked: int | None = None
        self._found: dict[str, tuple[EvaluationSet, list[Prompt]]] = {}  # by name of the set, as it was then
        self._wanted = asyncio.Event()
        self._runs: list[SetUnderWay] = []
        self._refused: list[EvaluationSet] = []  # that can't be evaluated; another request tries them again
        self._problems: dict[str, Problem] = {}  # by name of the set

    @property
    def results(self) -> tuple[EvaluationResult, ...]:
        """Return the newest result of each set of the job, as it is now."""
        known = self._store.evaluated
        return tuple(known[each.name] for each in self._sets if each.name in known)

    @property
    def problem(self) -> Problem | None:
        """Return why a set is not evaluated, of the first such set."""
        return next((self._problems[each.name] for each in self._sets if each.name in self._problems), None)

    @property
    def _sets(self) -> Sequence[EvaluationSet]:
        return self.how.sets if self.how else ()

    def ask(self, step: int | None) -> None:
        """Evaluate the weights of `step` now, on each set without a result of them; None: evaluate nothing."""
        if step != self._asked:
            self._asked = step
            self._refused.clear()
            self._end(self._runs)
        self._begin()

    async def prepare(self) -> None:
        """Find the prompts of each set, and find them again whenever other ones are wanted."""
        while True:
            self._wanted.clear()
            while unprepared := [each for each in self._sets if not (self._prompts_of(each) or each in self._refused)]:
                for each in unprepared:
                    await self._find(each)
                    self._begin()
            await self._wanted.wait()

    async def _find(self, each: EvaluationSet) -> None:
        try:
            found = await self._prompts.held_out(each.samples, source=self._number_of(each))
        except RewardFailed as error:
            log(LOG, "held-out prompts not made", logging.WARNING, name=each.name, reason=str(error))
            message = f"{each.name}: {error}; asked again"
            self._problems[each.name] = Problem(reason="HeldOutPromptsNotMade", message=message[:1024])
            self._changed()
            await asyncio.sleep(PREPARE_RETRY_S)
        except (NoPrompts, TaskUnusable, Unrenderable) as error:
            self._refuse(each, error)
        else:
            self._found[each.name] = each, found
            self._problems.pop(each.name, None)
            if each.source is None and len(found) < each.samples:
                log(LOG, "held-out prompts missing", logging.WARNING, samples=len(found), wanted=each.samples)

    def _number_of(self, each: EvaluationSet) -> int | None:
        """Return the number of a set's source; None: it has held-out prompts of rollout. Raises NoPrompts."""
        if each.source is None:
            return None
        for number, source in self._sources.items():
            if source == each.source:
                return number
        raise NoPrompts("its source came while the job runs: set suspend to true, and to false again")

    def _prompts_of(self, each: EvaluationSet) -> list[Prompt] | None:
        was, found = self._found.get(each.name, (None, None))
        return found if was and (was.source, was.samples) == (each.source, each.samples) else None

    def _refuse(self, each: EvaluationSet, error: Exception) -> None:
        """Leave a set without a result, which is better than a made-up one: the operator's deadline ends the wait."""
        log(LOG, "evaluation refused", logging.ERROR, name=each.name, reason=str(error))
        self._problems[each.name] = Problem(reason="EvaluationImpossible", message=f"{each.name}: {error}"[:1024])
        self._refused.append(each)
        self._end([run for run in self._runs if run.rules.name == each.name])
        self._changed()

    @property
    def demand(self) -> int:
        """Return how many answers are under way or missing."""
        return sum(run.demand for run in self._runs)

    def send(self, engines: Engines, group: asyncio.TaskGroup, *, at_most: int, episodes_at_most: int) -> None:
        """Request missing answers from engines that serve the wanted weights and have fewer than `at_most` requests.

        An episode is played while they are open, with at most `episodes_at_most` at a time.
        """
        for run in self._runs:
            if run.demand == len(run.answering):
                continue  # avoids a loop over tens of thousands of places at each answer
            for place in run.board.missing():
                if place in run.answering:
                    continue
                engine = engines.pick(step=run.board.step, at_most=at_most)
                if engine is None:
                    return
                name = f"evaluation/{run.rules.name}/{place}"
                if not run.prompt(place).is_played:
                    run.answering[place] = engines.send(group, engine, self._answer(run, place, engine), name=name)
                elif sum(len(each.answering) for each in self._runs) < episodes_at_most:
                    run.answering[place] = group.create_task(self._play(run, place, engine), name=name)

    def _begin(self) -> None:
        """Begin with each set that lacks a result and has its prompts; end those that lack none any more."""
        if self.how is None or self._asked is None:
            self._end(self._runs)
            return
        step, lacking = self._asked, self.how.lacking(self._store.evaluated.values(), self._asked)
        names = {each.name for each in lacking}
        self._end([run for run in self._runs if run.rules.name not in names])
        begun = {run.rules.name for run in self._runs}
        for each in lacking:
            if each.name in begun or each in self._refused:
                continue
            if (prompts := self._prompts_of(each)) is None:
                self._wanted.set()
            else:
                self._start(each, prompts, step)
        self._changed()

    def _start(self, each: EvaluationSet, prompts: list[Prompt], step: int) -> None:
        board = Scoreboard(step, prompts=len(prompts), responses=each.responses, name=each.name)
        self._runs.append(SetUnderWay(each, prompts, self.temperature, board))
        self._problems.pop(each.name, None)
        log(LOG, "evaluation started", name=each.name, step=step, samples=len(prompts))

    def _end(self, runs: Sequence[SetUnderWay]) -> None:
        for run in [*runs]:
            run.cancel()
            self._runs.remove(run)

    # ------------------------------------------------------------------------------------------------- one answer
    def _limit_of(self, run: SetUnderWay) -> int:
        limit = run.rules.max_response_tokens
        return self._limit if limit is None else limit

    async def _answer(self, run: SetUnderWay, place: int, engine: EngineClient) -> None:
        prompt, sampling, limit = run.prompt(place), run.rules.sampling, self._limit_of(run)
        request = GenerateRequest(
            list(prompt.ids),
            limit,
            run.temperature if sampling.temperature is None else sampling.temperature,
            self._chat.end_ids,
            self._rollout_sampling.stop if sampling.stop is None else sampling.stop,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            min_new_tokens=min(sampling.min_tokens, limit),
        )
        try:
            generated = await engine.generate(request)
        except GateRefused as error:
            log(LOG, "evaluation answer lost", logging.DEBUG, gate=engine.name, reason=str(error))
        except RequestRejected as error:  # no engine takes this prompt: a missing answer is a wrong one
            log(LOG, "evaluation prompt rejected", logging.WARNING, gate=engine.name, reason=str(error))
            run.board.take(place, [engine.version] if engine.version else [], 0.0)
        else:
            try:
                await self._take(run, place, prompt, generated)
            except TaskUnusable as error:
                if run in self._runs:
                    self._refuse(run.rules, error)
        self._ended(run, place)

    async def _play(self, run: SetUnderWay, place: int, engine: EngineClient) -> None:
        """Play one episode. A failed one scores 0, as an answer that no verifier takes; a lost one is played again."""
        try:
            trajectory, removal = await self._episodes.play(run.prompt(place).index, ending="evaluated")
        except EpisodeLost:
            run.redone += 1
        except EpisodeFailed as error:
            log(LOG, "evaluation episode failed", logging.WARNING, reason=f"{error.reason}: {error}")
            run.unscored += 1
            run.board.take(place, [engine.version] if engine.version else [], 0.0)
        else:
            self._store.write(*removal)
            versions = {span.version for span in trajectory.tokens.spans}
            run.redone += not run.board.take(place, versions, trajectory.reward)
        self._ended(run, place)

    def end_episodes(self) -> None:
        """Cancel episodes when no more tokens are generated: their outcome would be no verdict on the policy."""
        for run in self._runs:
            for place, task in run.answering.items():
                if run.prompt(place).is_played:
                    task.cancel()

    def _ended(self, run: SetUnderWay, place: int) -> None:
        if run.answering.get(place) is asyncio.current_task():
            del run.answering[place]
        self._conclude(run)
        self._changed()

    async def _take(self, run: SetUnderWay, place: int, prompt: Prompt, generated: Generated) -> None:
        """Score a complete answer as in training, 0 unless it ended by itself; request an interrupted one again."""
        tokens = generated.tokens
        finish = finish_of(tokens, generated.finish, limit=self._limit_of(run), end_ids=self._chat.end_ids)
        reward = await self._reward(run, prompt, tokens) if finish is Finish.STOP else 0.0
        if reward is None:
            run.redone += 1
            return
        versions = {span.version for span in tokens.spans}
        run.redone += finish is None or not run.board.take(place, versions, reward)

    async def _reward(self, run: SetUnderWay, prompt: Prompt, tokens: Tokens) -> float | None:
        """Return the reward, or None when no verifier was reachable, which is no verdict on the answer."""
        try:
            return await self._processes.score(prompt.index, self._chat.text(tokens.ids.tolist()))
        except RewardFailed as error:  # the verifier can't take this answer
            reason = f"prompt {prompt.index + 1} of the data: {error}"
            log(LOG, "evaluation answer not scored", logging.WARNING, reason=reason)
            if error.reason == REWARD_UNAVAILABLE:
                return None
            run.unscored += 1
            return 0.0

    def _conclude(self, run: SetUnderWay) -> None:
        result = run.board.result()
        if result is None or run not in self._runs:
            return
        self._end([run])
        self._store.record_evaluation(result)
        log(
            LOG,
            "evaluation ended",
            name=result.name,
            step=result.step,
            version=str(run.board.version),
            samples=result.samples,
            mean=round(result.mean, 4),
            stderr=round(result.stderr, 4),
            best=result.best and round(result.best, 4),
            bestOf=[{"answers": each.answers, "mean": round(each.mean, 4)} for each in result.best_of] or None,
            redone=run.redone,
            unscored=run.unscored,
            took_s=round(time.monotonic() - run.began, 3),
        )
