"""Sessions group a client's turns, recorded as they were generated, and become samples for training.

Every answered turn of a session is kept with the token ids that it was made of, never read from text again. Where the
next turn's messages continue recorded ones, its prompt is the recorded ids, plus what the template puts between that
reply and the next one: a tool's answer, a question. That part is context. Where they continue none (a history that was
edited, another agent), the turn begins a path of its own: a session is a tree.

A reward ends a session: the path of its newest turn is its trajectory, other paths are dropped and counted. Sessions of
one group wait until `groupSize` of them have a reward; then they become a group of samples, in one entry of the store.
So a session is either here, open or rewarded, or samples, or dropped for a reason that is counted. Each change is
durable before the client learns of it.

Episodes of the job's own (`episodes`) are sessions too. They are opened and ended there, and not by a reward: one makes
the tokens of one sample, and a restart drops those that were under way, because their samples begin anew.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colocated_rl_rollout.gateway.openai_requests import CHARACTERS_OF_A_TOKEN, Conversation, RequestRefused
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.rules.chat import Chat, Unrenderable
from colocated_rl_rollout.rules.resume import NO_EXPERTS, join_all
from colocated_rl_rollout.rules.samples import (
    NO_FIGURES,
    Finish,
    Group,
    Tokens,
    Trajectory,
)
from colocated_rl_rollout.rules.staleness import deadline
from colocated_rl_rollout.store import tables
from colocated_rl_rollout.store.database import Statement
from colocated_rl_rollout.store.store import Store
from colocated_rl_rollout.tasks.task_wire import RewardAnswer

IDLE_S = 7200.0  # a session without a turn for this long is dropped
INCOMPLETE_S = 86_400.0  # so is a group in which nothing was done for so long, though some of it has a reward
LOOK_S = 60.0
SESSIONS_AT_MOST = 16_384
TOKENS_AT_MOST = 16 * 1024 * 1024  # of all sessions, and of one episode: some 200 MB with their messages
TURNS_AT_MOST = 1024  # of one
RETRY_S = 60
NO_ROOM = "context_length_exceeded"  # of a refusal
EPISODE = "episode:"  # the prefix of the names of episodes that the job plays itself
Given = tuple[float, str | None, Mapping[str, float]]  # a reward, the name of its group, and figures beside it
MARK = "\u2063colocated-rl-reply\u2063"  # stands for a reply while the template renders what follows it


@dataclass(frozen=True, eq=False)
class RecordedTurn:
    """This turn was answered. messages: those since the parent, the reply last. context: ids between the parent's end
    and the reply; for the first turn of a path, the whole prompt.
    """

    number: int
    parent: RecordedTurn | None
    messages: tuple[Mapping[str, Any], ...]
    setting: str  # tools and template options
    context: NDArray[np.int32]
    tokens: Tokens
    finish: Finish | None
    engine: str | None = None
    text_length: int = 0  # of its messages, and of a path's first turn its setting, in JSON

    @property
    def path(self) -> list[RecordedTurn]:
        """Return the turns from the first to this one."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    @property
    def ids(self) -> list[int]:
        """Return all tokens up to the end of its reply."""
        parts = [part for turn in self.path for part in (turn.context, turn.tokens.ids)]
        ids: list[int] = np.concatenate(parts).tolist()
        return ids

    @property
    def history_length(self) -> int:
        """Return how many messages lie up to the end of its reply."""
        return sum(len(turn.messages) for turn in self.path)

    @property
    def size(self) -> int:
        return len(self.context) + len(self.tokens)

    @property
    def held(self) -> int:
        """Return the tokens that it counts for: messages may be much longer than what the template shows of them."""
        return max(self.size, self.text_length // CHARACTERS_OF_A_TOKEN)


@dataclass(eq=False)
class Session:
    """The turns of one client; only `Sessions` changes it. turned: for an episode of the job's own, called with the
    step of the oldest weights in each turn. refused: why its newest turn was refused. experts: of the newest turn's
    prompt and reply as an engine last read them, where training repeats them; not kept over a restart.
    """

    id: str
    turns: list[RecordedTurn] = field(default_factory=list)
    reward: float | None = None
    grouping: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)  # beside the reward
    used_at: float = 0.0
    under_way: int = 0  # turns
    turned: Callable[[int | None], None] | None = None
    refused: RequestRefused | None = None
    experts: NDArray[np.int16] | None = None

    @property
    def is_full(self) -> bool:
        """Return whether its path had no room for another turn."""
        return bool(self.turns) and self.refused is not None and self.refused.code == NO_ROOM

    @property
    def held(self) -> int:
        return sum(turn.held for turn in self.turns)

    def match(self, conversation: Conversation) -> RecordedTurn | None:
        """Return the turn with the longest history that the conversation continues, or None."""
        history, setting = [normalized(message) for message in conversation.messages], setting_of(conversation)
        ends: dict[int, int] = {}  # messages up to the end of each turn that matches
        for turn in self.turns:
            start = ends.get(turn.parent.number, -1) if turn.parent else 0
            end = start + len(turn.messages)
            can_match = start >= 0 and turn.messages and turn.setting == setting
            if can_match and [normalized(message) for message in turn.messages] == history[start:end]:
                ends[turn.number] = end
        best = max(ends, key=lambda number: (ends[number], number), default=None)
        return None if best is None else self.turns[best - 1]

    def match_ids(self, prompt: Sequence[int]) -> RecordedTurn | None:
        """Return the turn with the longest tokens that a prompt continues, or None."""
        ids = np.asarray(prompt, np.int32)
        ends: dict[int, int] = {}  # tokens up to the end of each turn that matches
        for turn in self.turns:
            start = ends.get(turn.parent.number, -1) if turn.parent else 0
            reply, end = start + len(turn.context), start + turn.size
            if (
                start >= 0
                and np.array_equal(ids[start:reply], turn.context)
                and np.array_equal(ids[reply:end], turn.tokens.ids)
            ):
                ends[turn.number] = end
        best = max(ends, key=lambda number: (ends[number], number), default=None)
        return None if best is None else self.turns[best - 1]


class Sessions:
    """Holds all sessions of a job. clock: seconds. changed: called when a group is complete.

    max_staleness: of a session that becomes a sample; None where what is too old is masked, and no session dropped.
    """

    def __init__(
        self,
        store: Store,
        metrics: RolloutMetrics,
        *,
        group_size: int,
        max_staleness: int | None,
        changed: Callable[[], None],
        clock: Callable[[], float],
        tokens_at_most: int = TOKENS_AT_MOST,
    ) -> None:
        self._tokens_at_most = tokens_at_most
        self._store = store
        self._metrics = metrics
        self.group_size = group_size
        self._max_staleness = max_staleness
        self._changed = changed
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._rewarded: dict[str, dict[str, Session]] = {}  # by group, those that wait for it
        self._whole: deque[str] = deque()  # groups that were complete, oldest first; a session may be gone since
        self._swept_for = 0  # the step
        self._of_clients = 0  # sessions: episodes of the job's own are bounded as its samples are
        self._held = 0  # tokens of those
        self._looks_at = 0.0  # for idle ones
        self._read()
        metrics.sessions.set_function(lambda: len(self._sessions))

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    # ------------------------------------------------------------------------------------------------- turns
    def begin(self, name: str) -> Session:
        """Return the session of a turn that begins; the caller must `end` it. Raises RequestRefused."""
        self._drop_idle()
        session = self._sessions.get(name)
        if session is None or session.turned is None:  # episodes are admitted already
            self._refuse_beyond_bounds(session)
        if session is None:
            if name.startswith(EPISODE):
                raise RequestRefused(409, f"episode {name} has ended: it takes no more turns", code="session_ended")
            session = self._sessions[name] = Session(name)
            self._of_clients += 1
        elif session.reward is not None:
            raise RequestRefused(409, f"session {name} has its reward: it takes no more turns", code="session_ended")
        elif len(session.turns) + session.under_way >= TURNS_AT_MOST or session.held >= self._tokens_at_most:
            message = f"session {name} has {TURNS_AT_MOST} turns, or {self._tokens_at_most} tokens in all of its paths"
            raise RequestRefused(409, message, code="session_too_long")
        session.under_way += 1
        session.used_at = self._clock()
        return session

    def _refuse_beyond_bounds(self, session: Session | None) -> None:
        if not self._store.has_room():
            raise RequestRefused(503, "the store's volume is full: see the job's status", code="full", retry_s=RETRY_S)
        if self._held >= self._tokens_at_most or (session is None and self._of_clients >= SESSIONS_AT_MOST):
            held = f"{self._of_clients} sessions hold {self._held} tokens, or text that counts for them"
            message = f"{held}: reward or delete some"
            raise RequestRefused(429, message, code="too_many_sessions", retry_s=RETRY_S)

    def end(self, session: Session) -> None:
        """End a turn. Forget a session without an answered turn: its client knows of none, and starts it anew."""
        session.under_way -= 1
        session.used_at = self._clock()
        is_empty = not session.under_way and not session.turns and session.turned is None
        if is_empty and self._sessions.get(session.id) is session:
            self._drop(session, "Empty")

    async def record(
        self,
        session: Session,
        parent: RecordedTurn | None,
        messages: Sequence[Mapping[str, Any]],
        setting: str,
        *,
        prompt: NDArray[np.int32],
        tokens: Tokens,
        finish: Finish | None,
        engine: str | None,
        experts: NDArray[np.int32] = NO_EXPERTS,
    ) -> None:
        """Record a turn; return when it is durable and may be sent. Raises RequestRefused when the session is gone."""
        if self._sessions.get(session.id) is not session or session.reward is not None:
            raise RequestRefused(409, f"session {session.id} ended before this turn did", code="session_ended")
        start = (len(parent.ids), parent.history_length) if parent else (0, 0)
        own = tuple(messages[start[1] :])
        text = json.dumps(own)
        turn = RecordedTurn(
            len(session.turns) + 1,
            parent,
            own,
            parent.setting if parent else setting,  # the same, and kept once
            prompt[start[0] :].copy(),
            tokens,
            finish,
            engine,
            len(text) + (0 if parent else len(setting)),
        )
        session.turns.append(turn)
        session.refused = None
        session.experts = experts.astype(np.int16) if len(experts) else None
        if session.turned is None:
            self._held += turn.held
        else:
            session.turned(tokens.oldest_step)
        begins = [(tables.SESSION, [(session.id,)])] if turn.number == 1 else []
        self._store.write(*begins, _row_of(session, turn, text))
        await self._store.flushed()

    def refuse(self, name: str, refused: RequestRefused) -> None:
        """Record that a request of this session was refused, if the session exists. A path that was full stays so until
        another turn is recorded.
        """
        if (session := self._sessions.get(name)) is not None and not session.is_full:
            session.refused = refused
            if session.turns and refused.code == NO_ROOM:  # for the next start: only the newest turn's end counts
                self._store.write((tables.CUT_TURN, [(name, len(session.turns))]))

    # ------------------------------------------------------------------------------------------------- episodes
    def open(self, turned: Callable[[int | None], None]) -> Session:
        """Open the session of an episode that begins; end it with `take` or `give_up`."""
        name = f"{EPISODE}{uuid.uuid4().hex}"
        session = self._sessions[name] = Session(name, used_at=self._clock(), turned=turned)
        return session

    def quiet_s(self, session: Session) -> float:
        """Return the time since the newest turn ended; 0 while one is under way."""
        return 0.0 if session.under_way else self._clock() - session.used_at

    def take(self, session: Session, given: RewardAnswer, *, ending: str) -> tuple[Trajectory, list[Statement]]:
        """Return an episode's trajectory, and the statements that remove its session."""
        self._forget(session, ending)
        session.figures = given.figures
        return self._trajectory(session, (), given.reward), _removal(session)

    def give_up(self, session: Session, reason: str) -> None:
        self._drop(session, reason)

    # ------------------------------------------------------------------------------------------------- rewards
    def find(self, name: str) -> Session:
        """Return the session of this name. Raises RequestRefused."""
        if (session := self._sessions.get(name)) is None:
            raise RequestRefused(404, f"there is no session {name}: it had no turn, or has ended", code="no_session")
        return session

    async def reward(self, name: str, reward: float, grouping: str, figures: Mapping[str, float] = NO_FIGURES) -> None:
        """Set the reward; return when it is durable. Raises RequestRefused.

        The same reward again changes nothing, also once the session is a sample, as long as the store has that.
        """
        given = (reward, grouping, figures)
        if name not in self._sessions and (before := await self._reward_of_sample(name)) is not None:
            _refuse_other(name, before, given)
            return
        session = self.find(name)
        if session.turned is not None:
            raise RequestRefused(409, f"{name} is an episode of the job's own, rewarded by its environment")
        if session.reward is not None:
            _refuse_other(name, (session.reward, session.grouping, session.figures), given)
        elif session.under_way:
            raise RequestRefused(409, f"session {name} has a turn under way: wait for it", code="session_busy")
        else:
            session.reward, session.grouping, session.figures = reward, grouping, figures
            self._await_group(session)
            self._store.write((tables.REWARD_SESSION, [(reward, grouping, tables.packed_figures(figures), name)]))
            self._changed()
        await self._store.flushed()

    async def _reward_of_sample(self, name: str) -> Given | None:
        """Return the reward of the newest sample that a session of this name became, or None."""
        await self._store.flushed()
        rows = await asyncio.to_thread(self._store.rows, tables.REWARD_OF_SAMPLE, name)
        return next(((reward, group, tables.unpacked_figures(figures)) for reward, group, figures in rows), None)

    async def delete(self, name: str) -> None:
        """Give a session up. Raises RequestRefused."""
        session = self.find(name)
        if session.turned is not None:
            raise RequestRefused(409, f"{name} is an episode of the job's own, and ends by itself")
        self._drop(session, "Deleted")
        await self._store.flushed()

    def admit(self) -> Group | None:
        """Make a group of samples from the oldest complete group of rewarded sessions; return None without one."""
        if self._swept_for != self._store.next_step:  # once a step: thousands may wait
            self._swept_for = self._store.next_step
            self._drop_stale([session for waiting in self._rewarded.values() for session in waiting.values()])
        while self._whole:
            grouping = self._whole.popleft()
            self._drop_stale(list(self._rewarded.get(grouping, {}).values()))  # rewarded since
            waiting = list(self._rewarded.get(grouping, {}).values())
            if len(waiting) >= 2 * self.group_size:
                self._whole.append(grouping)
            if len(waiting) >= self.group_size:
                return self._become_samples(waiting[: self.group_size])
        return None

    def _await_group(self, session: Session) -> None:
        grouping = session.grouping or ""
        waiting = self._rewarded.setdefault(grouping, {})
        waiting[session.id] = session
        if len(waiting) == self.group_size:
            self._whole.append(grouping)

    def _drop_stale(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            if self._is_too_old(session):
                self._drop(session, "TooStale")

    def _become_samples(self, sessions: Sequence[Session]) -> Group:
        """Admit sessions as samples: their prompts' common beginning is the group's prompt, the rest is context."""
        paths = [session.turns[-1].path for session in sessions]
        places = zip(*(path[0].context.tolist() for path in paths), strict=False)
        prompt = tuple(place[0] for place in takewhile(lambda place: len({*place}) == 1, places))
        for session in sessions:
            self._forget(session, "trained")
        trajectories = [self._trajectory(session, prompt, session.reward or 0.0) for session in sessions]
        return self._store.admit_whole(
            prompt, trajectories, *(statement for session in sessions for statement in _removal(session))
        )

    def _trajectory(self, session: Session, prompt: tuple[int, ...], reward: float) -> Trajectory:
        """Return the path of the newest turn, after a prompt; drop other paths."""
        path = session.turns[-1].path
        kept = {turn.number for turn in path}
        self._count_dropped([turn for turn in session.turns if turn.number not in kept], "OtherPath")
        ended = path[-1].finish is Finish.STOP and not session.is_full
        finish = Finish.STOP if ended else Finish.LENGTH
        tokens = tokens_of(path, after=len(prompt))
        name = session.id if session.turned is None else None
        return Trajectory(tokens, finish, reward, session.figures, session.experts, name, session.grouping)

    def _is_too_old(self, session: Session) -> bool:
        if self._max_staleness is None:
            return False
        steps = [turn.tokens.oldest_step for turn in session.turns[-1].path]
        oldest = min((step for step in steps if step is not None), default=None)
        return deadline(oldest, max_staleness=self._max_staleness) < self._store.next_step

    # ------------------------------------------------------------------------------------------------- giving up
    def _drop_idle(self) -> None:
        now = self._clock()
        if now < self._looks_at:
            return
        self._looks_at = now + LOOK_S
        for session in [each for each in self._sessions.values() if each.used_at < now - IDLE_S]:
            if not session.under_way and session.reward is None and session.turned is None:
                self._drop(session, "Idle")
        for waiting in [each for each in self._rewarded.values() if len(each) < self.group_size]:
            if all(session.used_at < now - INCOMPLETE_S for session in waiting.values()):
                for session in list(waiting.values()):
                    self._drop(session, "Idle")

    def _drop(self, session: Session, reason: str) -> None:
        self._forget(session, reason)
        self._count_dropped(session.turns, reason)
        self._store.write(*_removal(session))

    def _forget(self, session: Session, ending: str) -> None:
        del self._sessions[session.id]
        waiting = self._rewarded.get(session.grouping or "", {})
        if waiting.pop(session.id, None) and not waiting:
            del self._rewarded[session.grouping or ""]
        if session.turned is None:
            self._of_clients -= 1
            self._held -= session.held
        self._metrics.sessions_ended.labels(ending).inc()

    def _count_dropped(self, turns: Sequence[RecordedTurn], reason: str) -> None:
        self._metrics.discarded_tokens.labels(f"Session{reason}").inc(sum(len(turn.tokens) for turn in turns))

    # ------------------------------------------------------------------------------------------------- reading
    def _read(self) -> None:
        now = self._clock()
        for name, reward, grouping, figures in self._store.rows(tables.SESSIONS):
            session = self._sessions[name] = Session(name, reward=reward, grouping=grouping, used_at=now)
            session.figures = tables.unpacked_figures(figures)
            self._of_clients += 1
            if reward is not None:
                self._await_group(session)
        for row in self._store.rows("SELECT * FROM turns ORDER BY session_id, number"):
            session = self._sessions[row["session_id"]]
            parent = session.turns[row["parent"] - 1] if row["parent"] else None
            turn = RecordedTurn(
                row["number"],
                parent,
                tuple(json.loads(row["messages"])),
                parent.setting if parent else row["setting"],
                np.frombuffer(row["context"], np.int32),
                tables.unpacked(row["ids"], row["logp"], row["spans"]),
                Finish(row["finish"]) if row["finish"] else None,
                text_length=len(row["messages"]) + len(row["setting"]),
            )
            session.turns.append(turn)
            self._held += turn.held
        for session in [each for each in self._sessions.values() if each.id.startswith(EPISODE)]:
            self._drop(session, "EpisodeLost")


def _refuse_other(name: str, before: Given, given: Given) -> None:
    """Raise RequestRefused unless the session got this same reward before."""
    if before != given:
        raise RequestRefused(409, f"session {name} has another reward already", code="session_ended")


def prompt_after(turn: RecordedTurn, conversation: Conversation, chat: Chat) -> tuple[int, ...] | None:
    """Return the prompt that continues a recorded turn; None when the template does not show what lies between.

    The template is rendered with a mark in the reply's place: what follows the mark follows the reply.
    """
    known = turn.history_length
    marked = [
        *conversation.messages[: known - 1],
        {"role": "assistant", "content": MARK},
        *conversation.messages[known:],
    ]
    try:
        text = chat.rendered(marked, tools=conversation.tools, options=conversation.options)
        _, *after = text.split(MARK)
        between = chat.encode(after[0]) if len(after) == 1 else ()
        if not between or between[0] not in chat.end_ids:
            return None  # the text's token boundaries would be a guess
        ids = turn.ids
        if between[0] == ids[-1]:  # the policy wrote it: it must not stand twice
            between = between[1:]
        return (*ids, *between)
    except Unrenderable:
        return None


def tokens_of(path: Sequence[RecordedTurn], *, after: int = 0) -> Tokens:
    """Return all tokens of a path from token `after` of its first prompt on; only the policy's own are in a span."""
    segments = [segment for turn in path for segment in (context_tokens(turn.context), turn.tokens)]
    if segments:
        segments[0] = context_tokens(path[0].context[after:])
    return join_all(segments)


def context_tokens(ids: NDArray[np.int32]) -> Tokens:
    return Tokens(ids, np.zeros(len(ids), np.float32), ())


def normalized(message: Mapping[str, Any]) -> Any:
    """Normalize a message for comparison: clients add members to a reply, omit some, and write JSON their own way."""
    if message["role"] != "assistant":
        return message
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"].strip(), calls


def setting_of(conversation: Conversation) -> str:
    return json.dumps([conversation.tools, conversation.options], sort_keys=True)


def _row_of(session: Session, turn: RecordedTurn, messages: str) -> Statement:
    row = (
        session.id,
        turn.number,
        turn.parent.number if turn.parent else None,
        messages,
        "" if turn.parent else turn.setting,
        turn.context.tobytes(),
        *tables.packed(turn.tokens),
        turn.finish,
    )
    return tables.TURN, [row]


def _removal(session: Session) -> list[Statement]:
    return [(tables.DROP_TURNS, [(session.id,)]), (tables.DROP_SESSION, [(session.id,)])]
