"""Looks at every state of `fakes.model`, and says from which of them no end can be reached."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fakes.model import Model, alike
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
