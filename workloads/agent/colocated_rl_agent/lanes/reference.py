"""The reference lane keeps a reference running beside the pod's engines, and passes samples on to it.

A reference never changes, so no switch concerns it: no action is chosen for it, and no ladder has a rung for it. It is
started once the runner's children are known, again after a back-off whenever it has ended, and never because of an
engine or a trainer. The runner ends it with the pod.

An engine measures the memory of its devices when it starts, and a model that is being loaded beside it would make that
a matter of chance. Therefore an engine's start waits for a reference that is being loaded, for ENGINE_WAITS_S at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from http import HTTPStatus

from colocated_rl_agent.drivers.base import DriverError
from colocated_rl_agent.drivers.reference import ReferenceProcess, Scored
from colocated_rl_agent.lanes.last_words import last_words
from colocated_rl_agent.metrics import AgentMetrics
from colocated_rl_agent.runner.runner_link import ChildExited, ChildStatus, RunnerError, RunnerLink
from colocated_rl_agent.settings import AgentSettings
from colocated_rl_api import names
from colocated_rl_api.back_off import doubled_s
from colocated_rl_api.logs import log
from colocated_rl_api.reference_wire import ScoreError

LOG = logging.getLogger(__name__)

NAME = "reference"  # of the process, for the runner
COMMAND = ("python3", "-P", "-m", "colocated_rl_trainer.ref_policy")
START_POLL_S = 0.1  # it has no way to report that it has loaded
ENGINE_WAITS_S = 120.0
LATE_S = 10.0  # after its own deadline of an answer
MAX_BACK_OFF_S = 60.0


class ReferenceLane:
    """The ReferenceLane keeps the process of a pod in which one belongs, and does nothing in any other.

    changed: called when facts have changed, or an engine may start. failed: called with (reason, message) for the pod's
    problem. made_good: called with the reason that is over. ends: returns whether the pod does.
    awaited_until: no engine starts before, on the clock of `time.monotonic`.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        runner: RunnerLink,
        metrics: AgentMetrics,
        changed: Callable[[], None],
        failed: Callable[[str, str], None],
        made_good: Callable[[str], None],
        ends: Callable[[], bool],
    ) -> None:
        switch = settings.job.spec.switch
        self._settings = settings
        self._start_s = switch.trainer_start_seconds
        self._client = ReferenceProcess(settings.reference_socket, answer_s=switch.trainer_progress_seconds + LATE_S)
        self._runner = runner
        self._metrics = metrics
        self._changed, self._failed, self._made_good = changed, failed, made_good
        self._ends = ends
        self._known = asyncio.Event()  # the runner's children are known
        self._incarnation: str | None = None  # that runs
        self._gone = asyncio.Event()
        self._exits: dict[str, ChildExited] = {}  # the newest, which can come before the answer to the start
        self._failures = 0  # since it last scored: sets the back-off of the next start
        self._was_asked = self._is_late = self._is_ready = False
        self.awaited_until = 0.0

    @property
    def is_ready(self) -> bool | None:
        """Return whether it scores; None in a pod where none belongs."""
        return self._is_ready if self._settings.has_reference else None

    async def close(self) -> None:
        await self._client.close()

    # ------------------------------------------------------------------------------------------------- its process
    async def tend(self) -> None:
        """Keep it running until cancelled."""
        while self._settings.has_reference:
            await self._known.wait()
            if self._ends():
                self._known.clear()  # until a runner is attached anew
                continue
            try:
                if self._incarnation is None:
                    await self._start()
                await self._load()
                await self._gone.wait()
            except RunnerError as error:
                self._fail(f"it could not be started: {error}")
            await asyncio.sleep(doubled_s(1.0, self._failures - 1, MAX_BACK_OFF_S) if self._failures else 0)

    async def _start(self) -> None:
        settings, places = self._settings, self._settings.directories
        files = (f"--job-file={places.job_file}", f"--config={places.trainer_config}", f"--models={places.model}")
        command, env = (*COMMAND, f"--socket={settings.reference_socket}", *files), {names.ENV_POD_NAME: settings.pod}
        self._hold_engines()
        self._was_asked = self._is_late = False
        self._incarnation = await self._runner.start(NAME, command, env)
        self._gone.clear()
        self._metrics.incarnations.labels(NAME).inc()
        if (exited := self._exits.get(self._incarnation)) is not None:
            self.exited(exited)

    async def _load(self) -> None:
        """Wait until it has loaded its model, or is gone. Past its deadline it is killed."""
        started = time.monotonic()
        while self._incarnation is not None and not await self._client.is_ready():
            if time.monotonic() >= started + self._start_s:
                self._is_late = True
                self._fail(f"it has not loaded its model within {self._start_s} s")
                await self._runner.kill(NAME)
                return
            await asyncio.sleep(START_POLL_S)
        if self._incarnation is not None:
            log(LOG, "reference loaded", incarnation=self._incarnation, took_s=round(time.monotonic() - started, 4))
            self._made_good("ReferenceFailed")
            self._set(is_ready=True)

    def exited(self, event: ChildExited) -> None:
        """Record that its processes are gone, whoever ended them."""
        self._exits = {event.incarnation: event}
        if event.incarnation != self._incarnation:
            return
        log(LOG, "reference gone", incarnation=event.incarnation, reason=f"code {event.code}")
        if not (self._is_late or self._ends()):
            self._fail(f"it ended with code {event.code}; {last_words(event.tail, was_asked=self._was_asked)}")
        self._is_gone()

    def attach(self, child: ChildStatus | None) -> None:
        """Match what is known to the runner's report, after a restart of either side."""
        if child is None or not child.running:
            self._is_gone()
            if not self._failures:  # after one, its start may wait for as long as an engine would wait for it
                self._hold_engines()
        elif child.incarnation != self._incarnation:
            self._incarnation, self._was_asked = child.incarnation, True
            self._gone.clear()
        self._known.set()

    def detach(self) -> None:
        """Start nothing until the runner's children are known again."""
        self._known.clear()

    def _is_gone(self) -> None:
        self._incarnation = None
        self._gone.set()
        self._set(is_ready=False)

    def _hold_engines(self) -> None:
        if self._settings.has_reference:
            self.awaited_until = time.monotonic() + min(ENGINE_WAITS_S, self._start_s)

    def _set(self, *, is_ready: bool) -> None:
        self._is_ready, self.awaited_until = is_ready, 0.0
        self._changed()

    def _fail(self, why: str) -> None:
        self._failures += 1
        self.awaited_until = 0.0
        self._failed("ReferenceFailed", f"the reference beside the engines: {why}; it is started again")

    # ------------------------------------------------------------------------------------------------- its answers
    async def score(self, query: str, sample: bytes) -> Scored:
        """Return the answer to a request for scores. Without a reference that is ready it is 503."""
        if not self._is_ready:
            return _not_now("Starting", "the reference is being started beside the engines: ask again later")
        self._was_asked = True
        try:
            answer = await self._client.score(query, sample)
        except DriverError as error:
            return _not_now("NotScored", f"the reference beside the engines: {error}")
        if answer.status == HTTPStatus.OK:
            self._failures = 0
        return answer


def _not_now(error: str, message: str) -> Scored:
    body = ScoreError(error=error, message=message).model_dump_json(by_alias=True)
    return Scored(HTTPStatus.SERVICE_UNAVAILABLE, body.encode())
