"""Judge each complete group by the job's filters, before it may enter a batch.

The rules (`rules.filters`) come first and at once. Functions of the job judge what is left; they run where reward code
runs, so a verdict takes a while, and a group that waits for it enters no batch. Where a function gives no verdict, the
whole group fails as a sample without a reward does: that is counted, and another group takes its place. The store keeps
no verdicts: after a restart the functions are asked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from colocated_rl_api.facts import Problem
from colocated_rl_api.job import Filter, Rollout
from colocated_rl_api.logs import log
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.rewards.rewards import RewardFailed, TaskProcesses
from colocated_rl_rollout.rewards.task_connection import TaskUnusable
from colocated_rl_rollout.rules.chat import Chat
from colocated_rl_rollout.rules.filters import judge
from colocated_rl_rollout.rules.samples import Finish, Group, GroupId, Sample, SampleState
from colocated_rl_rollout.store.store import Store
from colocated_rl_rollout.tasks.task_wire import JudgedSample

LOG = logging.getLogger(__name__)


class GroupFilters:
    """Keeps from training what the job's filters select.

    judged: is called with a group when the functions have judged it, or could not.
    """

    def __init__(
        self,
        rollout: Rollout,
        *,
        store: Store,
        processes: TaskProcesses,
        chat: Chat,
        metrics: RolloutMetrics,
        judged: Callable[[Group], None],
    ) -> None:
        self._rollout = rollout
        self._store = store
        self._processes = processes
        self._chat = chat
        self._metrics = metrics
        self._judged = judged
        self._may_pass: set[GroupId] = set()  # by the functions; a group that changes has to be judged anew
        self._unasked: dict[GroupId, Group] = {}
        self._asking: dict[GroupId, asyncio.Task[None]] = {}
        self._dropped = 0  # groups, since the last batch
        self._no_signal: Problem | None = None
        self._fault: Problem | None = None  # of a function, since its last verdict

    @property
    def problem(self) -> Problem | None:
        """Return why groups fail, or why progress may teach nothing."""
        return self._fault or self._no_signal

    def let_pass(self, group: Group) -> bool:
        """Return whether the filters let a group into a batch."""
        if self._rollout.filter_functions:
            return group.id in self._may_pass
        return group.is_complete or not self._rollout.filters

    def judge(self, group: Group) -> None:
        """Judge a group by the rules, once it is complete; what they leave is for the functions, which `send` asks."""
        if not group.is_complete:
            return
        verdict = judge(group, self._rollout.filters)
        if verdict.whole is not None:
            if self._drops(group, verdict.whole):
                return
        elif verdict.samples:
            self._metrics.count_discarded(verdict.samples, Filter.TRUNCATED)
            self._store.leave_out(verdict.samples, Filter.TRUNCATED)
        if self._rollout.filter_functions:
            self.forget(group)
            self._unasked[group.id] = group

    def send(self, tasks: asyncio.TaskGroup) -> None:
        """Ask the functions about all groups that wait for it."""
        for group in self._unasked.values():
            self._asking[group.id] = tasks.create_task(self._ask(group), name=f"judge/{group.id}")
        self._unasked.clear()

    def forget(self, group: Group) -> None:
        """Take back a verdict, also one that is on its way: the group is another one now, or is gone."""
        self._may_pass.discard(group.id)
        self._unasked.pop(group.id, None)
        if task := self._asking.pop(group.id, None):
            task.cancel()

    def drain(self) -> None:
        """End all questions: the next start asks them again."""
        for task in self._asking.values():
            task.cancel()

    def batch_sealed(self, groups: Iterable[Group]) -> int:
        """Begin to count anew, and return how many groups were dropped for the batch of these."""
        for group in groups:
            self.forget(group)
        if self._dropped < self._rollout.filtered_at_most:
            self._no_signal = None
        dropped, self._dropped = self._dropped, 0
        return dropped

    async def _ask(self, group: Group) -> None:
        index = group.prompt.index if group.prompt.index >= 0 else None
        try:
            name = await self._processes.dropped_by(index, [self._described(sample) for sample in group.kept])
        except RewardFailed as error:
            self._fail(group, error)
        except TaskUnusable:
            return  # nothing can be judged until the user fixes the job, which the processes report
        else:
            self._fault = None
            if name is None or not self._drops(group, name):
                self._may_pass.add(group.id)
        self._asking.pop(group.id, None)
        self._judged(group)

    def _described(self, sample: Sample) -> JudgedSample:
        return {
            "response": self._chat.text(sample.tokens.ids.tolist()),
            "tokens": len(sample.tokens),
            "truncated": sample.finish is Finish.LENGTH,
            "reward": sample.reward or 0.0,
            "figures": dict(sample.figures),
        }

    def _drops(self, group: Group, name: str) -> bool:
        """Drop a group for a filter, and return whether that was possible: a batch may cost only so many groups."""
        if self._dropped < self._rollout.filtered_at_most:
            self._dropped += 1
            self._metrics.count_discarded(group.kept, name)
            self._store.give_up(group, name, SampleState.FILTERED)
            return True
        if self._no_signal is None:
            message = (
                f"{self._dropped} groups were left out since the last batch, and now one for {name}: it is trained as "
                "it is; change the task's difficulty, groupSize, maxResponseTokens or temperature"
            )
            self._no_signal = Problem(reason="NoLearningSignal", message=message)
            log(LOG, "learning signal missing", logging.WARNING, step=self._store.next_step, reason=message)
        return False

    def _fail(self, group: Group, error: RewardFailed) -> None:
        row = f"prompt {group.prompt.index + 1} of the data: " if group.prompt.index >= 0 else ""
        message = f"group {group.id} given up: {row}{error}"
        log(LOG, "group not judged", logging.WARNING, group=group.id, reason=error.reason, message=message)
        self._metrics.count_discarded(group.kept, error.reason)
        self._store.give_up(group, error.reason, SampleState.FAILED)
        self._fault = Problem(reason=error.reason, message=message[:1024])
