"""What rollout makes: prompts, groups of samples, and the tokens of a sample with where they came from.

A sample is in exactly one state at every instant (I3); `NEXT` is the whole table of moves, and `Store` is the only one
that makes them. Tokens are immutable: each engine attempt of a sample makes a segment, and segments are joined by
`resume`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from colocated_rl_api.rungs import WeightVersion


class SampleState(StrEnum):
    """The states of I3. The last five are ends, `sealed` on the way to one."""

    ADMITTED = "admitted"  # waits for its first engine
    RUNNING = "running"  # one engine attempt is under way
    INTERRUPTED = "interrupted"  # waits to go on, with the tokens it has
    SCORING = "scoring"  # written to its end, reward not in
    COMPLETED = "completed"  # reward in, waits for a batch
    SEALED = "sealed"  # in a batch
    TRAINED = "trained"  # its batch's step is done by every rank
    FILTERED = "filtered"  # finished, and left out of training by a rule of the job
    FAILED = "failed"  # no answer or no reward could be had, for a reason that is counted
    DISCARDED = "discarded"  # given up by policy, for a reason that is counted


_S = SampleState
WAITING = frozenset({_S.ADMITTED, _S.INTERRUPTED})
LIVE = frozenset({_S.ADMITTED, _S.RUNNING, _S.INTERRUPTED, _S.SCORING})
NEXT: dict[SampleState, frozenset[SampleState]] = {
    _S.ADMITTED: frozenset({_S.RUNNING, _S.DISCARDED}),
    _S.RUNNING: frozenset({_S.INTERRUPTED, _S.SCORING, _S.FAILED, _S.DISCARDED}),
    _S.INTERRUPTED: frozenset({_S.RUNNING, _S.SCORING, _S.FAILED, _S.DISCARDED}),
    _S.SCORING: frozenset({_S.COMPLETED, _S.FAILED, _S.DISCARDED}),
    _S.COMPLETED: frozenset({_S.SEALED, _S.FILTERED, _S.DISCARDED}),
    _S.SEALED: frozenset({_S.TRAINED}),
    _S.TRAINED: frozenset(),
    _S.FILTERED: frozenset(),
    _S.FAILED: frozenset(),
    _S.DISCARDED: frozenset(),
}


class Finish(StrEnum):
    """How a sample ended."""

    STOP = "stop"  # the policy ended it
    LENGTH = "length"  # the token limit did


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a response were made by the weights `version`."""

    version: WeightVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """A response, or a segment of one: ids, behaviour log-probabilities (nats) and the versions that made them.

    The three describe the same tokens. Spans follow one another; a token in none of them was not written by the policy
    (what a tool answered, between two turns of a session): it is context, and its log-probability says nothing.
    """

    ids: NDArray[np.int32]
    logp: NDArray[np.float32]
    spans: tuple[Span, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def first_version(self) -> WeightVersion | None:
        return self.spans[0].version if self.spans else None

    @property
    def last_version(self) -> WeightVersion | None:
        return self.spans[-1].version if self.spans else None

    @property
    def oldest_step(self) -> int | None:
        """Step of the oldest weights that made one of the tokens."""
        return min((span.version.step for span in self.spans), default=None)


NO_TOKENS = Tokens(np.empty(0, np.int32), np.empty(0, np.float32), ())


OF_SESSIONS = -1
OF_RECORDING = -2  # in the store alone: such a group is never looked at again


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the source. `position` counts over all passes of the data, `index` within one.

    Of sessions that clients had both are OF_SESSIONS: no row of the data made it, and nothing can be generated for it.
    A task of an environment has no ids: each of its episodes has a prompt of its own.
    """

    position: int
    index: int
    ids: tuple[int, ...]

    @property
    def is_played(self) -> bool:
        """Whether its samples are episodes."""
        return self.index >= 0 and not self.ids


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """What the turns of a session come to: everything after the group's prompt."""

    tokens: Tokens
    finish: Finish
    reward: float


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What the reference says of a response: a log-probability of each token, in nats, at a temperature."""

    temperature: float
    logp: NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Sample:
    """One completion of a group's prompt. Changed by `Store` alone."""

    id: int
    group: Group
    state: SampleState = SampleState.ADMITTED
    tokens: Tokens = NO_TOKENS
    segments: int = 0  # that `tokens` were joined from
    attempts: int = 0  # engine attempts that ended
    idle_attempts: int = 0  # of them, the last ones in a row that brought no token
    resent: int = 0  # of `tokens`, what those attempts were sent, to be prefilled again
    finish: Finish | None = None
    reward: float | None = None
    ended: int | None = None  # its place among all that ended, from 1 on
    engine: str | None = None  # that has its prefix; not kept over a restart
    playing_since: int | None = None  # step of the oldest weights in the episode under way
    scores: Scores | None = None  # not kept over a restart: they follow from the tokens

    @property
    def oldest_step(self) -> int | None:
        """Step of the oldest weights that made a token of it, or of its episode."""
        steps = (self.tokens.oldest_step, self.playing_since)
        return min((step for step in steps if step is not None), default=None)


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one prompt, those that were replaced included. Changed by `Store` alone."""

    id: int
    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)
    unfinished: int = 0  # samples that are live
    oldest_is_known: bool = False  # until one of its samples changes: it is asked of all groups at each answer
    oldest: int | None = None

    @property
    def kept(self) -> list[Sample]:
        """The samples that may come into a batch, by id."""
        return [sample for sample in self.samples if sample.state in LIVE or sample.state is SampleState.COMPLETED]

    @property
    def is_of_sessions(self) -> bool:
        """Its samples came whole from clients: none can be replaced by another."""
        return self.prompt.index == OF_SESSIONS

    @property
    def is_of_turns(self) -> bool:
        """Whether tokens of its samples are of turns and what is between them, and not of one response alone."""
        return self.is_of_sessions or self.prompt.is_played

    @property
    def is_complete(self) -> bool:
        return self.unfinished == 0

    @property
    def oldest_step(self) -> int | None:
        """Step of the oldest weights in the group; None while it has no token."""
        if not self.oldest_is_known:
            steps = [step for sample in self.kept if (step := sample.oldest_step) is not None]
            self.oldest = min(steps, default=None)
            self.oldest_is_known = True
        return self.oldest
