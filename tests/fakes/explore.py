"""Looks at every state of `fakes.model`, and says from which of them no end can be reached.

By hand, in the folder of the tests, for bounds that no layer has time for:
`python -m fakes.explore --pods 3 --deaths 1 --of operator` looks at two million states, in six minutes and 2.3 GiB.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass

from builders import make_job
from fakes.model import MORTAL, Model, alike
from fakes.model_pod import Broken


@dataclass(frozen=True)
class Explored:
    """ends: by their cause. hopeless: ways to states from which no end can be reached, a few of them."""

    states: int
    moves: int
    ends: Counter[str]
    frontier: int
    hopeless: list[list[str]]

    def words(self) -> str:
        ends = ", ".join(f"{cause} {count}" for cause, count in sorted(self.ends.items()))
        return f"states: {self.states}, moves: {self.moves}, never looked at: {self.frontier}, ends: {ends}"


def explore(model: Model, *, limit: int) -> Explored:
    """Every state that can be reached, or the first `limit`. Raises Broken, with the way that led there."""
    start = alike(model.start())
    numbers, states, came_from = {start: 0}, [start], [(0, "")]
    before: list[list[int]] = [[]]  # by number of a state, those that it follows
    ends, moves, done = Counter[str](), 0, 0
    while done < len(states) and len(states) < limit:
        state = states[done]
        if state.operator.is_over:
            assert state.operator.climb is not None
            ends[state.operator.climb.cause] += 1
        try:
            following = model.successors(state)
        except Broken as error:
            raise Broken(f"{error}, after {'; '.join(_way(came_from, done))}") from error
        for what, after in following:
            moves += 1
            number = numbers.get(after)
            if number is None:
                number = numbers[after] = len(states)
                states.append(after)
                came_from.append((done, what))
                before.append([])
            before[number].append(done)
        done += 1
    hopeful = _all_before([number for number, state in enumerate(states) if state.operator.is_over], before)
    lost = [number for number in range(done) if number not in hopeful]
    frontier = len(states) - done
    return Explored(len(states), moves, ends, frontier, [_way(came_from, number) for number in lost[:5]])


def _all_before(ends: list[int], before: list[list[int]]) -> set[int]:
    found, todo = set(ends), ends
    while todo:
        for earlier in before[todo.pop()]:
            if earlier not in found:
                found.add(earlier)
                todo.append(earlier)
    return found


def _way(came_from: list[tuple[int, str]], number: int) -> list[str]:
    way = []
    while number:
        number, what = came_from[number]
        way.append(what)
    return way[::-1]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fakes.explore", description="Every state within these bounds.")
    parser.add_argument("--pods", type=int, default=2)
    parser.add_argument("--deaths", type=int, default=0)
    parser.add_argument("--of", nargs="*", choices=MORTAL, default=MORTAL, help="what may die")
    parser.add_argument("--suspensions", type=int, default=0)
    parser.add_argument("--limit", type=int, default=10_000_000, help="states; each takes about 1.2 KiB")
    bounds = parser.parse_args(arguments)
    job = make_job(replicas=bounds.pods, steps=1, checkpoint={"everySteps": 1})
    model = Model(job, deaths=bounds.deaths, of=bounds.of, suspensions=bounds.suspensions)
    explored = explore(model, limit=bounds.limit)
    sys.stdout.write(f"{explored.words()}\n" + "".join(f"no end after {'; '.join(way)}\n" for way in explored.hopeless))
    return 1 if explored.hopeless or explored.frontier else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
