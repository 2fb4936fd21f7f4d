"""Evaluation measures the mean reward of one weights version on the held-out prompts, beside rollout.

Answers to each prompt are sampled as the evaluation asks for, or else as in rollout. Every answer comes from one and
the same version: an answer that other weights made, in part or in whole, is discarded and requested again. An
evaluation ends when all answers are in, or when the operator asks for another one. `worker` sends its requests, before
those of rollout.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence

from colocated_rl_api.facts import BestOf, EvaluationResult, Problem
from colocated_rl_api.job import Evaluation as Rules
from colocated_rl_api.job import Sampling
from colocated_rl_api.logs import log
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

    def __init__(self, step: int, *, prompts: int, responses: int = 1) -> None:
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
            step=self.step,
            samples=self.size,
            mean=statistics.fmean(means),
            stderr=statistics.pstdev(means) / math.sqrt(len(means)),
            best=statistics.fmean(max(each) for each in answers) if self.responses > 1 else None,
            best_of=tuple(
                BestOf(answers=count, mean=statistics.fmean(best_of(each, count) for each in answers))
                for count in (2, 4, 8, 16, 32)
                if count < self.responses
            ),
        )


class Evaluator:
    """Evaluates on request. `changed` is called when there is something to send, a result, or a problem.

    sampling: of rollout. how: None until the job has an evaluation. A change of it, and of the temperature, applies to
    the next one.
    """

    def __init__(
        self,
        how: Rules | None,
        *,
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
        self._rollout_sampling = sampling
        self._limit = limit
        self._store = store
        self._prompts = prompts
        self._chat = chat
        self._processes = processes
        self._episodes = episodes
        self._changed = changed
        self._held_out: list[Prompt] = []
        self._found_for: int | None = None  # the number of prompts that was wanted
        self._wanted = asyncio.Event()
        self._board: Scoreboard | None = None
        self._board_how = how or Rules()  # of the evaluation under way
        self._board_temperature = sampling.temperature
        self._asked: int | None = None
        self._under_way: dict[int, asyncio.Task[None]] = {}
        self._began = 0.0
        self._redone = 0
        self._unscored = 0
        self.problem: Problem | None = None

    def ask(self, step: int | None) -> None:
        """Evaluate the weights of `step` now, unless the newest result is of that step; None: evaluate nothing."""
        done = self._store.evaluated.step if self._store.evaluated else None
        wanted = None if step == done else step
        if wanted != self._asked:
            self._asked = wanted
            self._board = None
            self._begin()

    async def prepare(self) -> None:
        """Find the held-out prompts, and find them again whenever more or fewer are wanted."""
        while True:
            self._wanted.clear()
            if self.how is not None and self._found_for != self.how.samples:
                await self._find(self.how.samples)
            await self._wanted.wait()

    async def _find(self, samples: int) -> None:
        while self._found_for != samples:
            try:
                self._held_out, self._found_for = await self._prompts.held_out(samples), samples
            except RewardFailed as error:
                log(LOG, "held-out prompts not made", logging.WARNING, reason=str(error))
                self.problem = Problem(reason="HeldOutPromptsNotMade", message=f"{error}; asked again"[:1024])
                self._changed()
                await asyncio.sleep(PREPARE_RETRY_S)
            except (NoPrompts, TaskUnusable, Unrenderable) as error:
                self._stop(error)
                return
        self.problem = None
        if len(self._held_out) < samples:
            log(LOG, "held-out prompts missing", logging.WARNING, samples=len(self._held_out), wanted=samples)
        self._begin()

    def _stop(self, error: Exception) -> None:
        """Stop without a result, which is better than a made-up one: the operator's deadline ends the wait for it."""
        log(LOG, "evaluation refused", logging.ERROR, reason=str(error))
        self.problem = Problem(reason="EvaluationImpossible", message=str(error)[:1024])
        self._board = None
        self._changed()

    @property
    def demand(self) -> int:
        """Return how many answers are under way or missing."""
        return self._board.size - len(self._board.rewards) if self._board else 0

    def send(self, engines: Engines, group: asyncio.TaskGroup, *, at_most: int, episodes_at_most: int) -> None:
        """Request missing answers from engines that serve the wanted weights and have fewer than `at_most` requests.

        An episode is played while they are open, with at most `episodes_at_most` at a time.
        """
        if self._board is None or self.demand == len(self._under_way):
            return  # avoids a loop over tens of thousands of places at each answer
        for place in self._board.missing():
            if place in self._under_way:
                continue
            engine = engines.pick(step=self._board.step, at_most=at_most)
            if engine is None:
                return
            if self._held_out[place // self._board.responses].is_played:
                if len(self._under_way) < episodes_at_most:
                    played = self._play(self._board, place, engine)
                    self._under_way[place] = group.create_task(played, name=f"evaluation/{place}")
                continue
            answer = self._answer(self._board, place, engine)
            self._under_way[place] = engines.send(group, engine, answer, name=f"evaluation/{place}")

    def _begin(self) -> None:
        for task in self._under_way.values():
            task.cancel()
        self._under_way.clear()
        if self._asked is not None and self.how is not None and self._found_for != self.how.samples:
            self._wanted.set()
        elif self._asked is not None and self.how is not None:
            self._board_how, self._board_temperature = self.how, self.temperature
            self._board = Scoreboard(self._asked, prompts=len(self._held_out), responses=self.how.responses)
            self._began = time.monotonic()
            self._redone = self._unscored = 0
            log(LOG, "evaluation started", step=self._asked, samples=len(self._held_out))
        self._changed()

    # ------------------------------------------------------------------------------------------------- one answer
    @property
    def _board_limit(self) -> int:
        limit = self._board_how.max_response_tokens
        return self._limit if limit is None else limit

    async def _answer(self, board: Scoreboard, place: int, engine: EngineClient) -> None:
        prompt = self._held_out[place // board.responses]
        sampling = self._board_how.sampling
        request = GenerateRequest(
            list(prompt.ids),
            self._board_limit,
            self._board_temperature if sampling.temperature is None else sampling.temperature,
            self._chat.end_ids,
            self._rollout_sampling.stop if sampling.stop is None else sampling.stop,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            min_new_tokens=min(sampling.min_tokens, self._board_limit),
        )
        try:
            generated = await engine.generate(request)
        except GateRefused as error:
            log(LOG, "evaluation answer lost", logging.DEBUG, gate=engine.name, reason=str(error))
        except RequestRejected as error:  # no engine takes this prompt: a missing answer is a wrong one
            log(LOG, "evaluation prompt rejected", logging.WARNING, gate=engine.name, reason=str(error))
            board.take(place, [engine.version] if engine.version else [], 0.0)
        else:
            try:
                await self._take(board, place, prompt, generated)
            except TaskUnusable as error:
                if board is self._board:
                    self._stop(error)
        self._ended(board, place)

    async def _play(self, board: Scoreboard, place: int, engine: EngineClient) -> None:
        """Play one episode. A failed one scores 0, as an answer that no verifier takes; a lost one is played again."""
        row = self._held_out[place // board.responses].index
        try:
            trajectory, removal = await self._episodes.play(row, ending="evaluated")
        except EpisodeLost:
            self._redone += 1
        except EpisodeFailed as error:
            log(LOG, "evaluation episode failed", logging.WARNING, reason=f"{error.reason}: {error}")
            self._unscored += 1
            board.take(place, [engine.version] if engine.version else [], 0.0)
        else:
            self._store.write(*removal)
            versions = {span.version for span in trajectory.tokens.spans}
            self._redone += not board.take(place, versions, trajectory.reward)
        self._ended(board, place)

    def end_episodes(self) -> None:
        """Cancel episodes when no more tokens are generated: their outcome would be no verdict on the policy."""
        for place, task in self._under_way.items():
            if self._board and self._held_out[place // self._board.responses].is_played:
                task.cancel()

    def _ended(self, board: Scoreboard, place: int) -> None:
        if self._under_way.get(place) is asyncio.current_task():
            del self._under_way[place]
        self._conclude(board)
        self._changed()

    async def _take(self, board: Scoreboard, place: int, prompt: Prompt, generated: Generated) -> None:
        """Score a complete answer as in training, 0 unless it ended by itself; request an interrupted one again."""
        tokens = generated.tokens
        finish = finish_of(tokens, generated.finish, limit=self._board_limit, end_ids=self._chat.end_ids)
        reward = await self._reward(prompt, tokens) if finish is Finish.STOP else 0.0
        if reward is None:
            self._redone += 1
            return
        versions = {span.version for span in tokens.spans}
        self._redone += finish is None or not board.take(place, versions, reward)

    async def _reward(self, prompt: Prompt, tokens: Tokens) -> float | None:
        """Return the reward, or None when no verifier was reachable, which is no verdict on the answer."""
        try:
            return await self._processes.score(prompt.index, self._chat.text(tokens.ids.tolist()))
        except RewardFailed as error:  # the verifier can't take this answer
            reason = f"prompt {prompt.index + 1} of the data: {error}"
            log(LOG, "evaluation answer not scored", logging.WARNING, reason=reason)
            if error.reason == REWARD_UNAVAILABLE:
                return None
            self._unscored += 1
            return 0.0

    def _conclude(self, board: Scoreboard) -> None:
        result = board.result()
        if result is None or board is not self._board:
            return
        self._board = self._asked = None
        self._store.record_evaluation(result)
        log(
            LOG,
            "evaluation ended",
            step=result.step,
            version=str(board.version),
            samples=result.samples,
            mean=round(result.mean, 4),
            stderr=round(result.stderr, 4),
            best=result.best and round(result.best, 4),
            bestOf=[{"answers": each.answers, "mean": round(each.mean, 4)} for each in result.best_of] or None,
            redone=self._redone,
            unscored=self._unscored,
            took_s=round(time.monotonic() - self._began, 3),
        )
