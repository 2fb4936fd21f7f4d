"""Whatever comes, every recorded token is in a session, in a sample, or dropped and counted."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry
from unit.test_rollout_store import checkpoint

from colocated_rl_api.job import MANY_STEPS
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.gateway.openai_requests import Conversation, RequestRefused
from colocated_rl_rollout.gateway.sessions import (
    IDLE_S,
    INCOMPLETE_S,
    LOOK_S,
    TURNS_AT_MOST,
    RecordedTurn,
    Session,
    Sessions,
    prompt_after,
)
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.rules.chat import Chat
from colocated_rl_rollout.rules.samples import (
    Finish,
    SampleState,
    Span,
    Tokens,
)
from colocated_rl_rollout.store.backup import back_up
from colocated_rl_rollout.store.former import FormerJob
from colocated_rl_rollout.store.store import Store
from fakes.rollout import JOB_UID, write_model

NAMES = ("a", "b", "c", "d")
GROUP_SIZE = 2


class SessionsMachine(RuleBasedStateMachine):
    """Turns, rewards, time, steps and restarts in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory()
        self.starts = 0
        self.now = 0.0
        self.recorded = 0  # tokens
        self.dropped_before = 0.0  # by processes that are gone
        self.trained = 0
        self.start(Path(self.directory.name, "0"))

    def start(self, path: Path) -> None:
        self.path = path
        self.registry = CollectorRegistry()
        self.store = Store(path, job_uid=JOB_UID)
        self.sessions = Sessions(
            self.store,
            RolloutMetrics(self.registry),
            group_size=GROUP_SIZE,
            max_staleness=1,
            changed=lambda: None,
            clock=lambda: self.now,
        )

    def teardown(self) -> None:
        self.store.close()
        self.directory.cleanup()

    @rule(name=st.sampled_from(NAMES), length=st.integers(1, 5), step=st.integers(0, 2), goes_on=st.booleans())
    def turn(self, name: str, length: int, step: int, goes_on: bool) -> None:
        with suppress(RequestRefused):
            session = self.sessions.begin(name)
            parent = session.turns[-1] if goes_on and session.turns else None
            before = [message for turn in (parent.path if parent else []) for message in turn.messages]
            messages = [*before, {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
            tokens = Tokens(
                np.arange(length, dtype=np.int32),
                -np.ones(length, np.float32),
                (Span(WeightVersion(step, 1), 0, length),),
            )
            prompt = [*(parent.ids if parent else []), 7, 8]
            record = self.sessions.record(
                session,
                parent,
                messages,
                "",
                prompt=np.array(prompt, np.int32),
                tokens=tokens,
                finish=Finish.STOP,
                engine=None,
            )
            asyncio.run(record)
            self.recorded += length
            self.sessions.end(session)

    @rule(name=st.sampled_from(NAMES))
    def turn_without_an_answer(self, name: str) -> None:
        with suppress(RequestRefused):
            self.sessions.end(self.sessions.begin(name))

    @rule(name=st.sampled_from(NAMES), reward=st.sampled_from([0.0, 1.0]), group=st.sampled_from(["g", "h"]))
    def reward(self, name: str, reward: float, group: str) -> None:
        with suppress(RequestRefused):
            asyncio.run(self.sessions.reward(name, reward, group, {"reward-again": reward}))

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        with suppress(RequestRefused):
            asyncio.run(self.sessions.delete(name))

    @rule()
    def admit(self) -> None:
        group = self.sessions.admit()
        if group is not None:
            assert GROUP_SIZE == len(group.kept)
            assert group.is_complete
            assert {SampleState.COMPLETED} == {sample.state for sample in group.samples}

    @rule(seconds=st.sampled_from([1.0, IDLE_S]))
    def time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def step(self) -> None:
        self.store.trained_step += 1

    @rule()
    def kill(self) -> None:
        """The copy is what a kill leaves of everything that was acknowledged."""
        asyncio.run(self.store.flushed())
        self.dropped_before += self.dropped()
        trained = self.store.trained_step
        self.starts += 1
        path = Path(self.directory.name, str(self.starts))
        shutil.copytree(self.path, path)
        self.store.close()
        self.start(path)
        self.store.trained_step = trained

    def dropped(self) -> float:
        return sum(
            sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == "colocate_rollout_discarded_tokens_total"
        )

    def open(self) -> Iterator[Session]:
        for name in NAMES:
            with suppress(RequestRefused):
                yield self.sessions.find(name)

    @invariant()
    def no_session_is_held_for_nothing(self) -> None:
        assert all(session.turns for session in self.open())

    @invariant()
    def nothing_is_lost(self) -> None:
        held = sum(len(turn.tokens) for session in self.open() for turn in session.turns)
        samples = [sample for group in self.store.groups.values() for sample in group.samples]
        sessions = [session for session in self.open() if session.reward is not None]
        assert [{"reward-again": session.reward} for session in sessions] == [each.figures for each in sessions]
        assert [{"reward-again": sample.reward} for sample in samples] == [sample.figures for sample in samples]
        sampled = sum(span.end - span.start for sample in samples for span in sample.tokens.spans)
        assert self.recorded == held + sampled + self.dropped_before + self.dropped()
        assert len(samples) == self.store.counts.total()


TestSessions = SessionsMachine.TestCase
TestSessions.settings = settings(max_examples=12, stateful_step_count=30)


def sessions_of(store: Store, registry: CollectorRegistry | None = None, **options: int) -> Sessions:
    """Return sessions of groups of two, at most a step old, at an hour that stands still."""
    metrics = RolloutMetrics(registry or CollectorRegistry())
    return Sessions(store, metrics, group_size=2, max_staleness=1, changed=lambda: None, clock=lambda: 0.0, **options)


def test_the_longest_history_that_goes_on_is_taken(tmp_path: Path) -> None:
    store = Store(tmp_path, job_uid=JOB_UID)
    sessions = sessions_of(store)
    session = sessions.begin("s")
    user, reply = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    tokens = Tokens(np.array([1], np.int32), -np.ones(1, np.float32), (Span(WeightVersion(0, 1), 0, 1),))
    parent = None
    for turn in range(1, 4):
        messages = [user, reply] * turn
        prompt = [*(parent.ids if parent else []), 7]
        asyncio.run(
            sessions.record(
                session,
                parent,
                messages,
                "[null, {}]",
                prompt=np.array(prompt, np.int32),
                tokens=tokens,
                finish=None,
                engine=None,
            )
        )
        parent = session.turns[-1]
    for known in range(4):
        for more in ([user], [{**user, "content": "other"}]):
            found = session.match(Conversation((*[user, reply] * known, *more)))
            assert known == (found.number if found else 0)
    loose = {"role": "assistant", "content": " ! ", "refusal": "not compared"}
    found = session.match(Conversation((user, loose, user)))
    assert found is session.turns[0]
    assert session.match(Conversation((user, reply, user), options={"enable_thinking": False})) is None
    store.close()


def test_a_session_without_an_answered_turn_is_forgotten_when_its_last_one_ends(tmp_path: Path) -> None:
    """Each client whose first request was refused, or who left, took one of the sessions' places for two hours."""
    registry = CollectorRegistry()
    store = Store(tmp_path, job_uid=JOB_UID)
    sessions = sessions_of(store, registry)
    session = sessions.begin("s")
    assert session is sessions.begin("s")
    sessions.end(session)
    assert session is sessions.find("s"), "the other turn may still be answered"
    sessions.end(session)
    with pytest.raises(RequestRefused, match="no session s"):
        sessions.find("s")
    asyncio.run(store.flushed())
    assert [] == store.rows("SELECT * FROM sessions")
    assert 1 == registry.get_sample_value("colocate_gateway_sessions_ended_total", {"ending": "Empty"})
    store.close()


def test_a_full_volume_takes_no_more_turns(tmp_path: Path) -> None:
    free = [1 << 40]
    store = Store(tmp_path, job_uid=JOB_UID, free_bytes=lambda _: free[0])
    sessions = sessions_of(store)
    session = sessions.begin("s")
    free[0] = 0
    with pytest.raises(RequestRefused, match="volume is full"):
        sessions.begin("s")
    free[0] = 1 << 40
    assert session is sessions.begin("s")
    store.close()


def test_sessions_that_wait_too_long_for_their_group_are_dropped_and_counted(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    store = Store(tmp_path, job_uid=JOB_UID)
    sessions = sessions_of(store, registry)

    async def reward(name: str, group: str) -> Session:
        session = sessions.begin(name)
        tokens = Tokens(np.array([1, 2], np.int32), -np.ones(2, np.float32), (Span(WeightVersion(3, 1), 0, 2),))
        await sessions.record(
            session, None, [], "", prompt=np.array([7], np.int32), tokens=tokens, finish=None, engine=None
        )
        sessions.end(session)
        await sessions.reward(name, 1.0, group)
        return session

    session = asyncio.run(reward("s", "g"))
    store.trained_step = 4
    assert sessions.admit() is None
    assert session is sessions.find("s"), "step 5 may train it"
    store.trained_step = 5
    assert sessions.admit() is None
    with pytest.raises(RequestRefused):
        sessions.find("s")
    for number in range(sessions.group_size):
        asyncio.run(reward(f"late-{number}", "h"))
    assert sessions.admit() is None, "a group that is whole too late is none"
    dropped = registry.get_sample_value("colocate_rollout_discarded_tokens_total", {"reason": "SessionTooStale"})
    assert 2 * (1 + sessions.group_size) == dropped
    store.close()


def test_sessions_that_wait_for_their_group_are_looked_at_once_a_step(tmp_path: Path) -> None:
    """They are not looked at for each group that is requested: a batch would cost the square of those that wait."""
    store = Store(tmp_path, job_uid=JOB_UID)
    looked: list[str] = []

    class AgeWatchedSessions(Sessions):
        def _is_too_old(self, session: Session) -> bool:
            looked.append(session.id)
            return super()._is_too_old(session)

    sessions = AgeWatchedSessions(
        store,
        RolloutMetrics(CollectorRegistry()),
        group_size=2,
        max_staleness=1,
        changed=lambda: None,
        clock=lambda: 0.0,
    )

    async def reward(name: str, group: str) -> None:
        session = sessions.begin(name)
        tokens = Tokens(np.array([1], np.int32), -np.ones(1, np.float32), (Span(WeightVersion(0, 1), 0, 1),))
        await sessions.record(
            session, None, [], "", prompt=np.array([7], np.int32), tokens=tokens, finish=Finish.STOP, engine=None
        )
        sessions.end(session)
        await sessions.reward(name, 1.0, group)

    async def script() -> None:
        for number in range(10):
            await reward(f"alone-{number}", f"group-{number}")
        assert [None] * 50 == [sessions.admit() for _ in range(50)]
        assert 10 == len(looked)
        for number in range(5):
            await reward(f"together-{number}", "g")
        groups = [sessions.admit() for _ in range(3)]
        assert [2, 2] == [len(group.samples) for group in groups if group]
        assert groups[2] is None, "one waits for another"
        await reward("together-5", "g")
        assert sessions.admit()

    asyncio.run(script())
    store.close()


def record_three_tokens(sessions: Sessions, session: Session, messages: Sequence[dict[str, str]] = ()) -> None:
    """Record a first turn: one token of its prompt, two of its response."""
    prompt = np.array([7], np.int32)
    tokens = Tokens(np.array([1, 2], np.int32), -np.ones(2, np.float32), (Span(WeightVersion(0, 1), 0, 2),))
    turn = sessions.record(session, None, messages, "", prompt=prompt, tokens=tokens, finish=Finish.STOP, engine=None)
    asyncio.run(turn)


async def record_and_reward(
    sessions: Sessions, name: str, reward: float, grouping: str, figures: Mapping[str, float] | None = None
) -> None:
    """Begin a session, record its only turn, of one token, and reward it."""
    session = sessions.begin(name)
    segment = Tokens(np.zeros(1, np.int32), np.zeros(1, np.float32), (Span(WeightVersion(0, 1), 0, 1),))
    await sessions.record(
        session, None, (), "", prompt=np.zeros(1, np.int32), tokens=segment, finish=Finish.STOP, engine=None
    )
    sessions.end(session)
    await sessions.reward(name, reward, grouping, figures or {})


def test_a_path_that_was_full_is_truncated_whatever_is_refused_after_it(tmp_path: Path) -> None:
    """A reward that was none, sent first, made it one that the policy had ended."""
    store = Store(tmp_path, job_uid=JOB_UID)
    sessions = sessions_of(store)
    session = sessions.begin("s")
    record_three_tokens(sessions, session)
    sessions.refuse("s", RequestRefused(400, "no room", code="context_length_exceeded"))
    sessions.refuse("s", RequestRefused(400, "reward: NaN is no number there"))
    full = [session.is_full]
    record_three_tokens(sessions, session)
    assert [True, False] == [*full, session.is_full]
    store.close()


def test_a_path_that_was_full_is_truncated_also_after_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path, job_uid=JOB_UID)
    sessions = sessions_of(store)
    for name in ("a", "b"):
        record_three_tokens(sessions, sessions.begin(name))
        sessions.end(sessions.find(name))
    sessions.refuse("a", RequestRefused(400, "no room", code="context_length_exceeded"))
    store.close()
    store = Store(tmp_path, job_uid=JOB_UID)
    sessions = sessions_of(store)
    for name in ("a", "b"):
        asyncio.run(sessions.reward(name, 1.0, "g"))
    group = sessions.admit()
    assert group is not None
    assert [Finish.LENGTH, Finish.STOP] == [sample.finish for sample in group.samples]
    store.close()


def test_no_turn_begins_while_the_sessions_hold_all_tokens_that_they_may(tmp_path: Path) -> None:
    """Existing sessions grew without a bound: only a new one was refused."""
    store = Store(tmp_path, job_uid=JOB_UID)
    sessions = sessions_of(store, tokens_at_most=3)
    for name in ("a", "b"):
        session = sessions.begin(name)
    record_three_tokens(sessions, session)
    sessions.end(session)
    for name in ("a", "b", "c"):
        with pytest.raises(RequestRefused, match="2 sessions hold 3 tokens"):
            sessions.begin(name)
    asyncio.run(sessions.delete("b"))
    assert "c" == sessions.begin("c").id
    store.close()


def test_messages_that_no_template_shows_are_held_too(tmp_path: Path) -> None:
    """A turn of three tokens may come with megabytes that are recorded, and were counted by nobody."""
    store = Store(tmp_path, job_uid=JOB_UID)
    sessions = sessions_of(store, tokens_at_most=40)
    messages = [{"role": "user", "content": "Hi", "note": "x" * 400}, {"role": "assistant", "content": "Ho"}]
    session = sessions.begin("s")
    record_three_tokens(sessions, session, messages)
    sessions.end(session)
    with pytest.raises(RequestRefused, match="1 sessions hold"):
        sessions.begin("another")
    again = sessions_of(store, tokens_at_most=40)
    with pytest.raises(RequestRefused, match="1 sessions hold"):
        again.begin("another")
    asyncio.run(again.delete("s"))
    assert "another" == again.begin("another").id
    store.close()


def test_the_jobs_own_episodes_take_no_room_from_clients(tmp_path: Path) -> None:
    """A few hundred long ones held all the tokens that sessions may hold, and every client was told to delete some."""
    store = Store(tmp_path, job_uid=JOB_UID)
    sessions = sessions_of(store, tokens_at_most=3)
    episode, client = sessions.open(lambda _: None), sessions.begin("a")
    for session in (episode, client):
        assert session is sessions.begin(session.id)
        record_three_tokens(sessions, session)
    sessions.give_up(episode, "EpisodeLost")
    with pytest.raises(RequestRefused, match="1 sessions hold 3 tokens"):
        sessions.begin("b")
    asyncio.run(sessions.delete("a"))
    assert "b" == sessions.begin("b").id
    store.close()


@pytest.mark.parametrize("goes_beyond", ["turns", "tokens"])
def test_an_episode_of_the_jobs_own_does_not_grow_for_ever(tmp_path: Path, goes_beyond: str) -> None:
    """An environment that rewrites its history, so that each turn is a path of its own, took all of the memory; and one
    that began its turns at once had as many of them as it liked.
    """
    store = Store(tmp_path, job_uid=JOB_UID)
    sessions = sessions_of(store, tokens_at_most=3)
    episode = sessions.open(lambda _: None)
    for _ in range(TURNS_AT_MOST if goes_beyond == "turns" else 1):
        sessions.begin(episode.id)
    if goes_beyond == "tokens":
        record_three_tokens(sessions, episode)
    with pytest.raises(RequestRefused, match="1024 turns, or 3 tokens in all of its paths") as refused:
        sessions.begin(episode.id)
    assert "session_too_long" == refused.value.code
    store.close()


def test_the_longest_tokens_that_go_on_are_taken(tmp_path: Path) -> None:
    session = Session("s")

    def turn(number: int, parent: RecordedTurn | None, context: tuple[int, ...], *ids: int) -> RecordedTurn:
        tokens = Tokens(np.array(ids, np.int32), -np.ones(len(ids), np.float32), ())
        session.turns.append(RecordedTurn(number, parent, (), "", np.array(context, np.int32), tokens, None))
        return session.turns[-1]

    first = turn(1, None, (7,), 1, 2)
    second = turn(2, first, (8,), 3)
    other = turn(3, first, (9,), 3)
    again = turn(4, None, (7,), 1, 2)
    assert session.match_ids([7, 1]) is None
    assert session.match_ids([7, 1, 2]) is again, "of two the newer one"
    assert session.match_ids([7, 1, 2, 8]) is again
    assert session.match_ids([7, 1, 2, 8, 3, 5]) is second
    assert session.match_ids([7, 1, 2, 9, 3]) is other
    assert session.match_ids([6, 1, 2, 8, 3]) is None


async def test_sessions_whose_group_is_never_complete_go_after_a_day(tmp_path: Path) -> None:
    """They stayed for good where no staleness ends them, and in the end no client got a turn."""
    now = [0.0]
    store = Store(tmp_path, job_uid=JOB_UID)
    sessions = Sessions(
        store,
        RolloutMetrics(CollectorRegistry()),
        group_size=3,
        max_staleness=MANY_STEPS,
        changed=lambda: None,
        clock=lambda: now[0],
    )
    for name, grouping in (("first", "left"), ("second", "left"), ("third", "new")):
        await record_and_reward(sessions, name, 1.0, grouping)
        now[0] += INCOMPLETE_S / 2
    sessions.begin("fourth")
    assert {"first", "second", "third", "fourth"} == {session.id for session in sessions}
    now[0] += LOOK_S
    sessions.begin("fourth")
    assert {"third", "fourth"} == {session.id for session in sessions}
    store.close()


async def test_a_reward_that_comes_again_changes_nothing_as_long_as_its_sample_is_in_the_store(tmp_path: Path) -> None:
    """Its session is gone once the group is complete, and a client whose answer was lost got 404."""
    store = Store(tmp_path, job_uid=JOB_UID)
    sessions = sessions_of(store)
    for name in ("first", "second"):
        await record_and_reward(sessions, name, 0.1, "g", {"tools": 2.0})
    group = sessions.admit()
    assert group is not None

    async def again(reward: float = 0.1, grouping: str = "g") -> int:
        try:
            await sessions.reward("first", reward, grouping, {"tools": 2.0})
        except RequestRefused as refused:
            return refused.status
        return 200

    assert [200, 409, 409] == [await again(), await again(reward=0.2), await again(grouping="h")]
    store.close()
    store = Store(tmp_path, job_uid=JOB_UID)
    sessions = sessions_of(store)
    assert 200 == await again()
    store.give_up(store.groups[group.id], "TooStale")
    assert 200 == await again()
    store.commit(1)
    store.forget(1)
    assert 404 == await again(), "nothing is kept for good"
    assert 2 == store.counts.total()
    store.close()


@pytest.mark.parametrize("restored", [False, True])
async def test_sessions_of_an_older_copy_of_the_store_are_not_trained_again(tmp_path: Path, restored: bool) -> None:
    """Samples of a backup, and of a former job behind its checkpoint, were given up for that; its sessions were not."""
    store = Store(tmp_path / "first", job_uid=JOB_UID)
    sessions = sessions_of(store)
    for name in ("a", "b"):
        await record_and_reward(sessions, name, 1.0, "g")
    if restored:
        back_up(store.path)
    store.close()
    former = None
    if restored:
        store.path.write_bytes(b"no database")
        store.path.with_name("store.sqlite3-wal").unlink(missing_ok=True)
    else:
        former = FormerJob(checkpoint(tmp_path, 1), samples=tmp_path / "first")
    again = Store(tmp_path / ("first" if restored else "second"), job_uid=JOB_UID, former=former)
    assert [] == [*sessions_of(again)]
    again.close()


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("reply", ["yes<|im_end|>", "yes"])
def test_what_follows_a_reply_has_the_tokens_that_the_whole_conversation_has(
    tmp_path: Path, swallows: bool, reply: str
) -> None:
    """Some end tokens (Phi 3) swallow the space behind them: without the one before it, that was a token of its own."""
    model = write_model(tmp_path)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["rstrip"] = swallows
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    chat = Chat(model)
    messages = [
        {"role": role, "content": text} for role, text in (("user", "1 ?"), ("assistant", "yes"), ("user", "2"))
    ]
    prompt, ids = (np.array(chat.encode(text), np.int32) for text in (chat.rendered(messages[:1]), reply))
    tokens = Tokens(ids, np.zeros(len(ids), np.float32), (Span(WeightVersion(0, 1), 0, len(ids)),))
    turn = RecordedTurn(1, None, tuple(messages[:2]), "", prompt, tokens, Finish.STOP)
    assert chat.encode(chat.rendered(messages)) == prompt_after(turn, Conversation(tuple(messages)), chat)
