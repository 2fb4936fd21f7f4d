"""Looks at every state of `fakes.model`, and says from which of them no end can be reached; or walks through some.

By hand for bounds that no layer has time for: `make explore BOUNDS="--pods 2 --deaths 2"`.
"""

from __future__ import annotations

import argparse
import random
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import pytest

from builders import PLACED, make_job
from colocated_rl_api.rungs import Placement
from colocated_rl_operator.planner.reasons import Cause
from fakes.model import FAULTS, MORTAL, JobModel, ModelState
from fakes.model_pod import InvariantBroken, must
from fakes.packed import Moves, Packing
from fakes.values import Values

MOST_STATES = 2_000_000  # of a search in the tests
ANEW = 100  # one state of so many
OFTEN = 250_000  # states after which a search by hand says how far it is
MOST_MOVES = 2000  # of one walk
DEATHS_AT = 0.02  # of the moves of a walk


@dataclass(frozen=True)
class Explored:
    """Holds the result of a search.

    ends: by their cause. hopeless: ways to states from which no end can be reached, a few of them.
    """

    states: int
    moves: int
    ends: Counter[str]
    frontier: int
    hopeless: list[list[str]]

    def words(self) -> str:
        ends = ", ".join(f"{cause} {count}" for cause, count in sorted(self.ends.items()))
        return f"states: {self.states}, moves: {self.moves}, never looked at: {self.frontier}, ends: {ends}"


def bounds_of(model: JobModel) -> str:
    """Return the bounds of the search, for people."""
    job, who = model.job, ", ".join(model.mortal) or "nobody"
    resizes = f", resizes: {model.resizes}" if model.resizes else ""
    pods = f"{'with a reference, ' if job.ladder.scores else ''}pods: {len(job.gpu_seats)}"
    return f"{job.ladder.placement}, {pods}, deaths: {model.deaths} of {who}, suspensions: {model.suspensions}{resizes}"


def all_must_be_well(explored: Explored) -> None:
    """All states were looked at, and from each the job can complete: deaths cost no more restarts than there are."""
    assert 0 == explored.frontier
    assert [] == explored.hopeless
    assert {Cause.ALL_STEPS_DONE} == explored.ends.keys()


def check(model: JobModel, capsys: pytest.CaptureFixture[str]) -> None:
    """Look at every state, print how many there are, and require that all is well."""
    explored = explore(model, limit=MOST_STATES)
    with capsys.disabled():
        sys.stdout.write(f"\n{bounds_of(model)}, {explored.words()}\n")
    all_must_be_well(explored)


def explore(model: JobModel, *, limit: int) -> Explored:
    """Every state that can be reached, or no more than `limit`. Raises Broken, with the way that led there."""
    search = Search(model)
    search.look(limit)
    return search.outcome()


class Search:
    """States by number, in the order in which they were found: about 300 bytes each.

    anew: one of so many is looked at in full all the same, and what was remembered must be what follows it.
    """

    def __init__(self, model: JobModel, *, anew: int = ANEW) -> None:
        start = model.start()
        self._anew = anew
        self.model, self._packing = model, Packing(start, may_swap=model.may_swap)
        self._moves = Moves(model, self._packing)
        self._numbers = {self._packing.pack(start): 0}
        self._found = [*self._numbers]
        self._after, self._ends_at = array("I"), array("Q", [0])  # of each, those that follow it
        self._words = Values[str]()
        self._came_from, self._by = array("I", [0]), array("H", [0])
        self._ends: dict[int, str] = {}

    @property
    def looked_at(self) -> int:
        return len(self._ends_at) - 1

    @property
    def frontier(self) -> int:
        return len(self._found) - self.looked_at

    def states(self) -> Iterator[ModelState]:
        return map(self._packing.unpack, self._found)

    def look(self, limit: int) -> None:
        """Look at so many more states, or at all that are left."""
        for number in range(self.looked_at, self.looked_at + limit):
            if not self.frontier:
                break
            packed = self._found[number]
            try:
                following = self._moves.successors(packed)
                if number % self._anew == 0:
                    must(following == self._moves.in_full(packed), "what is remembered differs from what is so")
            except InvariantBroken as error:
                raise InvariantBroken(f"{error}, after {'; '.join(self._way(number))}") from error
            if not following and (state := self._packing.unpack(packed)).operator.is_over:
                assert state.operator.climb is not None
                self._ends[number] = state.operator.climb.cause
            for what, after in following:
                self._after.append(self._number(after, number, what))
            self._ends_at.append(len(self._after))

    def _number(self, packed: bytes, before: int, what: str) -> int:
        number = self._numbers.setdefault(packed, len(self._found))
        if number == len(self._found):
            self._found.append(packed)
            self._came_from.append(before)
            self._by.append(self._words.number(what))
        return number

    def outcome(self) -> Explored:
        lost = islice((number for number, has_hope in enumerate(self._hopeful()) if not has_hope), 5)
        ways = [self._way(number) for number in lost]
        return Explored(len(self._found), len(self._after), Counter(self._ends.values()), self.frontier, ways)

    def _hopeful(self) -> bytearray:
        """Return, for each state that was looked at, whether an end can be reached from it."""
        hopeful, grows = bytearray(len(self._found)), True
        for number in self._ends:
            hopeful[number] = True
        while grows:
            grows = False
            for number in reversed(range(self.looked_at)):  # most of what follows has a higher number
                if not hopeful[number] and any(map(hopeful.__getitem__, self._following(number))):
                    grows = hopeful[number] = True
        return hopeful[: self.looked_at]

    def _following(self, number: int) -> array[int]:
        return self._after[self._ends_at[number] : self._ends_at[number + 1]]

    def _way(self, number: int) -> list[str]:
        way = []
        while number:
            way.append(self._words[self._by[number]])
            number = self._came_from[number]
        return way[::-1]


def must_walk_to_the_end(model: JobModel, *, seed: int) -> None:
    """One way of all, at random: where there are too many states for a search."""
    rng, state = random.Random(seed), model.start()
    for _ in range(MOST_MOVES):
        if state.operator.is_over:
            break
        lively = [] if rng.random() < DEATHS_AT else model.moves(state)
        _, state = rng.choice(lively or model.successors(state))
    assert state.operator.is_over
    assert state.operator.climb is not None
    assert Cause.ALL_STEPS_DONE is state.operator.climb.cause


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fakes.explore", description="Every state within these bounds.")
    parser.add_argument("--placement", type=Placement, choices=[*Placement], default=Placement.TIME_SLICED)
    parser.add_argument("--pods", type=int, default=2)
    parser.add_argument("--deaths", type=int, default=0)
    parser.add_argument("--of", nargs="*", choices=FAULTS, default=MORTAL, help="what may die, or fail")
    parser.add_argument("--suspensions", type=int, default=0)
    parser.add_argument("--retries", type=int, default=0, help="after failures, each of which then ends the job")
    parser.add_argument("--limit", type=int, default=50_000_000, help="states; each takes about 300 bytes")
    bounds = parser.parse_args(arguments)
    spec = {"checkpoint": {"everySteps": 1}, "backoffLimit": 0 if bounds.retries else 6, **PLACED[bounds.placement]}
    job = make_job(replicas=bounds.pods, steps=1, **spec)
    model = JobModel(job, deaths=bounds.deaths, of=bounds.of, suspensions=bounds.suspensions, retries=bounds.retries)
    search = Search(model)
    while search.frontier and search.looked_at < bounds.limit:
        search.look(min(OFTEN, bounds.limit - search.looked_at))
        sys.stderr.write(f"looked at {search.looked_at} states, {search.frontier} are left\n")
    explored = search.outcome()
    sys.stdout.write(f"{bounds_of(model)}, {explored.words()}\n")
    sys.stdout.writelines(f"no end after {'; '.join(way)}\n" for way in explored.hopeless)
    return 1 if explored.hopeless or explored.frontier else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
