"""States of `fakes.model` as a few numbers, and what follows one, by those numbers.

What a pod may do next is found once, and remembered for every state in which it, what the others show it, and all that
is no pod's are the same: with three pods, 98 times of a hundred that it is asked for. That nothing else matters is no
belief: the model is asked about a state in which the others are only what they show (`fakes.model.Shown`), and of some
states a search asks once more in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from struct import Struct
from typing import Any, NamedTuple, cast

from colocated_rl_api import names
from fakes.model import JobModel, ModelOperator, ModelState, Seen, Shown
from fakes.model_pod import ModelPod, Target
from fakes.values import TupleTable, Values

Row = tuple[ModelPod, Seen | None, Target | None, Target | None]
RECORDED = len(ModelOperator._fields) - 2  # before what it has of each pod


def rows_of(state: ModelState) -> Iterator[Row]:
    """Return a row for each pod."""
    return zip(state.pods, state.operator.known, state.operator.sent, state.stale, strict=True)


def rest_of(state: ModelState) -> tuple[Any, ...]:
    """All else."""
    _, rollout, operator, saved, deaths, _, *others = state
    *recorded, _, _ = operator
    return (*recorded, rollout, saved, deaths, *others)


def state_of(rows: Iterable[Row], rest: tuple[Any, ...]) -> ModelState:
    pods, known, sent, stale = zip(*rows, strict=True)
    rollout, saved, deaths, *others = rest[RECORDED:]
    return ModelState(
        pods, rollout, ModelOperator._make((*rest[:RECORDED], known, sent)), saved, deaths, stale, *others
    )


class Packing:
    """States as a few numbers, of what there is of each pod and of all the rest.

    may_swap: pods that may change places have those that the numbers give them, so states that differ in it are one.
    """

    def __init__(self, start: ModelState, *, may_swap: bool) -> None:
        self._numbers = Struct(f"{len(start.pods) + 1}I")
        self._may_swap = may_swap
        self._rows, self._rests = TupleTable(len(next(rows_of(start)))), TupleTable(len(rest_of(start)))
        self._seat_of = cache(self._seat)

    def pack(self, state: ModelState) -> bytes:
        return self.pack_numbers([*map(self._rows.number, rows_of(state))], self._rests.number(rest_of(state)))

    def pack_numbers(self, rows: list[int], rest: int) -> bytes:
        if self._may_swap:
            rows.sort(key=self._seat_of)
        return self._numbers.pack(*rows, rest)

    def unpack(self, packed: bytes) -> ModelState:
        rows, rest = self.unpack_numbers(packed)
        return state_of(map(self.row, rows), self._rests[rest])

    def unpack_numbers(self, packed: bytes) -> tuple[list[int], int]:
        numbers: tuple[int, ...] = self._numbers.unpack(packed)
        *rows, rest = numbers
        return rows, rest

    def row(self, number: int) -> Row:
        return cast(Row, self._rows[number])

    def numbers_at(self, state: ModelState, index: int) -> tuple[int, int]:
        """Return the numbers of one pod's row and of all the rest."""
        known, sent = state.operator.known[index], state.operator.sent[index]
        row = (state.pods[index], known, sent, state.stale[index])
        return self._rows.number(row), self._rests.number(rest_of(state))

    def _seat(self, row: int) -> tuple[int, bool, int, int]:
        pod: ModelPod = self._rows[row][0]
        return names.GPU_ROLES.index(pod.role), not pod.is_first, pod.attempt, row


class TakesAll(Exception):
    """The states that follow depend on more than the key that is remembered: all of them are computed again."""


class Rest(NamedTuple):
    """Describes all that is no pod's.

    is_plain: pods alone move. one_by_one: they end so. deaths: some may come. befalls: something may, to no pod.
    """

    is_plain: bool
    one_by_one: bool
    deaths: bool
    befalls: bool


Key = tuple[int, ...]
Found = list[tuple[str, bytes]]  # what happens, and the state after it


class OfOnePod:
    """An OfOnePod remembers what a pod may do, or what may happen to it, by its place,
    its number, the rest and what others show.
    """

    def __init__(self, look: Callable[[ModelState, int], list[tuple[str, ModelState]]], packing: Packing) -> None:
        self._look, self._packing = look, packing
        self._found: dict[Key, list[tuple[str, int, int]] | None] = {}  # None: it changes others too

    def after(self, packed: bytes, rows: list[int], shown: list[int], rest: int, index: int) -> Found:
        key = (index, rows[index], rest, *shown[:index], *shown[index + 1 :])
        if key not in self._found:
            self._found[key] = self._find(packed, index)
        if (moves := self._found[key]) is None:
            raise TakesAll
        found = []
        for what, row_after, rest_after in moves:
            rows_after = rows.copy()
            rows_after[index] = row_after
            found.append((what, self._packing.pack_numbers(rows_after, rest_after)))
        return found

    def _find(self, packed: bytes, index: int) -> list[tuple[str, int, int]] | None:
        before = shown_to(self._packing.unpack(packed), index)
        moves = self._look(before, index)
        others = without(before.pods, index)
        if any(without(after.pods, index) != others for _, after in moves):
            return None
        return [(what, *self._packing.numbers_at(after, index)) for what, after in moves]


class Moves:
    """A Moves lists what follows a state, as `JobModel.successors` does, and in the same order."""

    def __init__(self, model: JobModel, packing: Packing) -> None:
        self._model, self._packing = model, packing
        self._moves, self._deaths = OfOnePod(model.moves_of, packing), OfOnePod(model.deaths_of, packing)
        self._quiet: dict[Key, bool] = {}
        self._rests: dict[int, Rest] = {}
        shown, known = Values[Shown](), Values[tuple[Any, ...]]()
        self._shown = cache(lambda row: shown.number(Shown.of(packing.row(row)[0])))
        self._known = cache(lambda row: known.number((Shown.of(packing.row(row)[0]), *packing.row(row)[1:3])))
        self._is_first = cache(lambda row: packing.row(row)[0].is_first)
        self._tells_apart = cache(lambda row: model.tells_apart(packing.row(row)[0]))

    def successors(self, packed: bytes) -> Found:
        try:
            return self._remembered(packed)
        except TakesAll:
            return self.in_full(packed)

    def in_full(self, packed: bytes) -> Found:
        return self._packed(self._model.successors(self._packing.unpack(packed)))

    def _remembered(self, packed: bytes) -> Found:
        rows, rest = self._packing.unpack_numbers(packed)
        if len(rows) == 1:
            raise TakesAll  # with nobody beside it, it is hardly ever the same
        others = self._rests.get(rest) or self._look_at(rest, packed)
        is_told_apart = not self._is_first(rows[0]) and any(map(self._tells_apart, rows))
        if is_told_apart or not others.is_plain or not self._is_quiet(rows, rest, packed):
            raise TakesAll
        at = (packed, rows, [*map(self._shown, rows)], rest)
        found: Found = []
        deaths: Found = []
        for index in range(len(rows)):
            moves = self._moves.after(*at, index)
            found += moves
            if others.deaths:
                (found if others.one_by_one else deaths).extend(self._deaths.after(*at, index))
            if moves and others.one_by_one:
                return found
        if others.one_by_one or not found:
            raise TakesAll  # nobody moves: time passes
        befalls = self._model.befalls_all(self._packing.unpack(packed)) if others.befalls else []
        return found + deaths + self._packed(befalls)

    def _packed(self, moves: Iterable[tuple[str, ModelState]]) -> Found:
        return [(what, self._packing.pack(after)) for what, after in moves]

    def _look_at(self, rest: int, packed: bytes) -> Rest:
        state, model = self._packing.unpack(packed), self._model
        is_plain = not state.operator.is_over and state.sleeper is None
        befalls = is_plain and bool(model.befalls_all(state))
        found = self._rests[rest] = Rest(is_plain, model.end_alone(state), bool(state.deaths), befalls)
        return found

    def _is_quiet(self, rows: list[int], rest: int, packed: bytes) -> bool:
        key = (rest, *map(self._known, rows))
        if key not in self._quiet:
            self._quiet[key] = self._model.is_quiet(shown_to(self._packing.unpack(packed), None))
        return self._quiet[key]


def without(pods: tuple[ModelPod, ...], index: int) -> tuple[ModelPod, ...]:
    return pods[:index] + pods[index + 1 :]


def shown_to(state: ModelState, index: int | None) -> ModelState:
    """Return the state as the pod at that place sees it, or as operator and rollout controller do."""
    pods = tuple(pod if each == index else cast(ModelPod, Shown.of(pod)) for each, pod in enumerate(state.pods))
    if index is None:
        return state._replace(pods=pods)

    def own(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(item if each == index else None for each, item in enumerate(items))

    operator = state.operator._replace(known=own(state.operator.known), sent=own(state.operator.sent))
    return state._replace(pods=pods, operator=operator, stale=own(state.stale))
