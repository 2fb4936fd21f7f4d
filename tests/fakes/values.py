"""Values of which a search compares many, a great many times."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Hashed(tuple[Any, ...]):
    """A tuple that adds up its hash once."""

    def __hash__(self) -> int:
        found: int | None = self.__dict__.get("hash")
        if found is None:
            found = self.__dict__["hash"] = super().__hash__()
        return found


class Values(Generic[T]):
    """Keeps one of those that are equal, which has a number from then on."""

    def __init__(self) -> None:
        self._all: list[T] = []
        self._numbers: dict[T, int] = {}
        self._kept: dict[int, int] = {}  # by id(): of those that are kept, and of no other, which may go

    def __getitem__(self, number: int) -> T:
        return self._all[number]

    def number(self, value: T) -> int:
        found = self._kept.get(id(value))
        if found is None:
            found = self._numbers.setdefault(value, len(self._all))
            if found == len(self._all):
                self._all.append(value)
                self._kept[id(value)] = found
        return found

    def kept(self, value: T) -> T:
        return self._all[self.number(value)]


class TupleTable:
    """Tuples of the same length by number, which are looked up by the id() of their items.

    That compares nothing, so an item that is large is compared once: of those that are equal one is kept.
    """

    def __init__(self, length: int) -> None:
        self._items = [Values[Any]() for _ in range(length)]  # by their place, as 0 is equal to False
        self._all: list[tuple[Any, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}  # by id() of items that are kept, and of no others

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        return self._all[number]

    def number(self, record: tuple[Any, ...]) -> int:
        found = self._numbers.get(tuple(map(id, record)))
        return self._number_of_equal(record) if found is None else found

    def _number_of_equal(self, record: tuple[Any, ...]) -> int:
        kept = tuple(values.kept(item) for values, item in zip(self._items, record, strict=True))
        number = self._numbers.setdefault(tuple(map(id, kept)), len(self._all))
        if number == len(self._all):
            self._all.append(kept)
        return number
