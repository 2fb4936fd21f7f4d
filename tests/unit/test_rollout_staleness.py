"""Admission, deadlines and the choice of a batch: tables, and the bound that they keep together."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_rl_rollout.rules.samples import GroupId
from colocated_rl_rollout.rules.staleness import (
    NO_DEADLINE,
    Candidate,
    choose,
    deadline,
    room,
    staleness,
)


@pytest.mark.parametrize(
    ("live", "completed", "sealed", "max_staleness", "expected"),
    [
        (0, 0, 0, 0, 8),  # an empty job fills one batch
        (0, 0, 0, 1, 8),  # concurrency bounds
        (4, 0, 0, 1, 4),
        (0, 8, 0, 0, 0),  # a whole batch waits to be sealed
        (0, 8, 0, 1, 8),  # one batch ahead
        (0, 8, 8, 1, 0),  # sealed groups count until their step is trained
        (0, 0, 8, 1, 8),
        (0, 0, 8, 0, 0),  # on policy: nothing runs while training
        (2, 7, 0, 1, 6),
        (8, 0, 8, 1, 0),
        (8, 8, 8, 1, 0),  # never negative
    ],
)
def test_admission_keeps_to_concurrency_and_to_the_batches_that_may_be_ahead(
    live: int, completed: int, sealed: int, max_staleness: int, expected: int
) -> None:
    assert expected == room(
        live=live,
        completed=completed,
        sealed=sealed,
        concurrency=8,
        batch_size=8,
        max_staleness=max_staleness,
        steps_left=100,
    )


@pytest.mark.parametrize(
    ("live", "completed", "steps_left", "expected"),
    [(0, 0, 1, 8), (3, 2, 1, 3), (0, 8, 1, 0), (4, 4, 0, 0), (0, 0, 0, 0)],
)
def test_nothing_is_admitted_for_a_step_that_will_not_come(
    live: int, completed: int, steps_left: int, expected: int
) -> None:
    assert expected == room(
        live=live, completed=completed, sealed=0, concurrency=99, batch_size=8, max_staleness=1, steps_left=steps_left
    )


@pytest.mark.parametrize(
    ("live", "completed", "sealed", "steps_left", "expected"),
    [
        (0, 0, 0, 5, 11),
        (3, 8, 0, 5, 0),  # a batch is complete, and the spare ones are under way
        (0, 3, 8, 5, 0),  # nothing new while training
        (0, 0, 0, 1, 11),  # also for the last step
        (3, 0, 0, 0, 0),
    ],
)
def test_spare_groups_are_admitted_beyond_the_batch(
    live: int, completed: int, sealed: int, steps_left: int, expected: int
) -> None:
    admitted = room(
        live=live, completed=completed, sealed=sealed, concurrency=99, batch_size=8, max_staleness=0, spare=3,
        steps_left=steps_left,
    )  # fmt: skip
    assert expected == admitted


def test_staleness_counts_from_the_weights_that_a_step_starts_from() -> None:
    assert 0 == staleness(4, at_step=5)
    assert 2 == staleness(2, at_step=5)


@pytest.mark.parametrize(("oldest", "limit", "expected"), [(0, 0, 1), (0, 1, 2), (3, 2, 6), (None, 1, NO_DEADLINE)])
def test_the_deadline_is_the_last_step_within_the_limit(oldest: int | None, limit: int, expected: int) -> None:
    assert expected == deadline(oldest, max_staleness=limit)
    if oldest is not None:
        assert limit == staleness(oldest, at_step=expected)


@pytest.mark.parametrize(("oldest", "expected"), [(None, 5), (4, 5), (3, 5), (2, 4)])
def test_a_token_without_a_version_is_due_in_the_batch_that_is_collected(oldest: int | None, expected: int) -> None:
    """Its group may be due before that, by tokens whose age is known."""
    assert expected == deadline(oldest, max_staleness=1, unversioned_at=5)


LATER = 7  # a deadline that no step of the tables below reaches


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param([(LATER, 1, True), (LATER, 2, True)], [1, 2], id="exactly a batch"),
        pytest.param([(LATER, 1, True), (LATER, 2, False)], None, id="not enough are complete"),
        pytest.param([(LATER, 3, True), (LATER, 1, True), (LATER, 2, True)], [1, 2], id="the oldest first"),
        pytest.param([(LATER, 1, False), (LATER, 2, True), (LATER, 3, True)], [2, 3], id="a slow one is passed by"),
        pytest.param(
            [(LATER, 1, True), (LATER, 2, True), (1, 3, True)], [1, 3], id="the most urgent before the oldest"
        ),
        pytest.param([(1, 1, False), (LATER, 2, True), (LATER, 3, True)], None, id="waits for one at the limit"),
        pytest.param([(1, 1, True), (1, 2, True), (1, 3, False)], [1, 2], id="does not wait when it would not help"),
        pytest.param(
            [(2, 1, False), (2, 2, False), (2, 3, False), (LATER, 4, True), (LATER, 5, True)],
            None,
            id="waits when three would be left for a batch of two",
        ),
        pytest.param(
            [(2, 1, False), (2, 2, False), (LATER, 4, True), (LATER, 5, True)], [4, 5], id="two fit into the next batch"
        ),
        pytest.param(
            [(2, 1, False), (LATER, 4, True), (LATER, 5, True)], [4, 5], id="there is more room than is needed"
        ),
        pytest.param(
            [(1, 1, True), (1, 2, True), (2, 3, False), (2, 4, False), (2, 5, False)],
            [1, 2],
            id="nothing less urgent could give way, so waiting for three would not help",
        ),
        pytest.param([(NO_DEADLINE, 1, False), (2, 2, True), (2, 3, True)], [2, 3], id="one without tokens can wait"),
    ],
)
def test_a_batch_is_chosen_so_that_no_group_passes_its_deadline(
    groups: list[tuple[int, int, bool]], expected: list[int] | None
) -> None:
    assert expected == choose(
        [Candidate(due, GroupId(number), is_complete) for due, number, is_complete in groups], step=1, batch_size=2
    )


def test_a_job_that_does_not_wait_takes_what_is_complete() -> None:
    groups = [Candidate(1, GroupId(1), False), *(Candidate(LATER, GroupId(number), True) for number in (2, 3))]
    assert [2, 3] == choose(groups, step=1, batch_size=2, waits=False)


@dataclass
class _Group:
    id: int
    oldest: int | None = None
    left: int = 0  # turns until it is complete


@given(
    lengths=st.lists(st.integers(1, 12), min_size=60, max_size=60),
    max_staleness=st.integers(0, 3),
    batch_size=st.integers(1, 4),
    turns_per_step=st.integers(1, 6),
)
def test_no_group_is_ever_too_old_whatever_their_lengths(
    lengths: list[int], max_staleness: int, batch_size: int, turns_per_step: int
) -> None:
    """A whole job in turns: admitted as room says, each group some turns long, sealed as choose says, training slow.

    The bound holds without ever discarding a group, and the job always comes to its end.
    """
    steps = 40 // batch_size
    groups: list[_Group] = []
    admitted, sealed, trained, training = 0, 0, 0, 0
    for _ in range(20 * steps * (12 + turns_per_step)):
        if trained == steps:
            break
        complete = sum(group.left == 0 for group in groups)
        for _ in range(
            room(
                live=len(groups) - complete,
                completed=complete,
                sealed=batch_size if sealed > trained else 0,
                concurrency=(max_staleness + 1) * batch_size,
                batch_size=batch_size,
                max_staleness=max_staleness,
                steps_left=steps - sealed,
            )
        ):
            groups.append(_Group(admitted, left=lengths[admitted % len(lengths)]))
            admitted += 1
        if sealed > trained:  # the gates are closed
            training += 1
            if training == turns_per_step:
                trained, training = trained + 1, 0
            continue
        for group in groups:
            if group.left:
                group.oldest = trained if group.oldest is None else group.oldest
                group.left -= 1
        chosen = choose(
            [
                Candidate(deadline(group.oldest, max_staleness=max_staleness), GroupId(group.id), group.left == 0)
                for group in groups
            ],
            step=sealed + 1,
            batch_size=batch_size,
        )
        if chosen is not None:
            sealed += 1
            for group in [group for group in groups if group.id in chosen]:
                assert group.oldest is not None
                assert 0 <= staleness(group.oldest, at_step=sealed) <= max_staleness
                groups.remove(group)
    assert steps == trained
