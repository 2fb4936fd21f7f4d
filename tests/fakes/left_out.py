"""These checks compare a search of `fakes.model` that leaves states out with one that looks at all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from colocated_rl_operator.planner.observation import Climb, Job
from colocated_rl_operator.planner.reasons import Cause
from fakes.explore import Search
from fakes.model import JobModel, ModelState, with_first
from fakes.packed import rows_of

MOST_STATES = 1_000_000


def searched(job: Job, *, of: tuple[str, ...], in_all_orders: bool) -> Search:
    """Search with one death among these."""
    search = Search(JobModel(job, deaths=bool(of), of=of, in_all_orders=in_all_orders))
    search.look(MOST_STATES)
    assert 0 == search.frontier
    return search


def must_mean_the_same(few: Search, each: Search) -> None:
    """Compare the states before the end: rank 0 in any pod where nobody has it yet, and the other pods in order.

    Beside the end it is the same of each pod.
    """
    meant = [*_with_first(few.states())]
    assert _before_the_end(each.model, each.states()) == _before_the_end(few.model, meant)
    assert _at_the_end(each.states()) == _at_the_end(meant)


def _with_first(states: Iterable[ModelState]) -> Iterator[ModelState]:
    for state in states:
        if state.pods[0].is_first:
            yield state
        else:
            yield from (with_first(state, index) for index in range(len(state.pods)))


def _before_the_end(model: JobModel, states: Iterable[ModelState]) -> set[tuple[object, ...]]:
    """Whichever pod is which, but for that with rank 0. A group's name says which: it is the present one's or not."""
    groups: dict[tuple[object, ...], str | None] = {}
    found = set[tuple[object, ...]]()
    for state in states:
        if not _has_ended(state):
            places = tuple((pod.attempt, pod.alive, pod.there) for pod in state.pods)
            if places not in groups:
                groups[places] = model.observe(state).group
            (first, *others), rest = rows_of(state), _without_pods(state)
            climbs = tuple(_named(climb, groups[places]) for climb in (rest.operator.climb, *rest.decisions))
            rest = rest._replace(operator=rest.operator._replace(climb=None), decisions=())
            found.add((first, frozenset(Counter(others).items()), climbs, rest))
    return found


def _without_pods(state: ModelState) -> ModelState:
    return state._replace(pods=(), stale=(), operator=state.operator._replace(known=(), sent=()))


@cache
def _named(climb: Climb | None, present: str | None) -> Climb | None:
    return climb and replace(climb, group=climb.group and f"present: {climb.group == present}")


def _at_the_end(states: Iterable[ModelState]) -> set[tuple[object, ...]]:
    """`stood` aside: what it forgets depends on the others, and no check looks there any more."""
    rows = (row for state in states if _has_ended(state) for row in rows_of(state))
    return {(pod._replace(stood=()), *others) for pod, *others in rows}


def _has_ended(state: ModelState) -> bool:
    return state.operator.climb is not None and state.operator.climb.cause is Cause.ALL_STEPS_DONE
