"""This module says who makes room on a port for one that comes: who fills it from one address, or else the oldest.

A member shows within moments what it is there for, so it is never the oldest where many come; and it begins few
connections at a time, so it has never more than half of what makes a port full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ByPeer(Generic[T]):
    """A ByPeer holds what callers have at a port, each peer's in the order in which it came."""

    def __init__(self) -> None:
        self._held: dict[str, dict[T, None]] = {}  # of peers that have any
        self._peers: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[T]:
        return iter(self._peers)

    def __contains__(self, thing: object) -> bool:
        return thing in self._peers

    def add(self, thing: T, peer: str) -> None:
        self._peers[thing] = peer
        self._held.setdefault(peer, {})[thing] = None

    def discard(self, thing: T) -> None:
        peer = self._peers.pop(thing, None)
        if peer is not None:
            del self._held[peer][thing]
            if not self._held[peer]:
                del self._held[peer]

    def count(self, peer: str) -> int:
        return len(self._held.get(peer, ()))

    def peer_of(self, thing: T) -> str:
        return self._peers[thing]

    def oldest_of_most(self) -> T:
        """Return what has been held longest of the peer that has most. Something must be held."""
        return next(iter(self._held[max(self._held, key=self.count)]))

    def first_to_go(self) -> T:
        """Return the oldest of the peer that has more than half, or else of all. Something must be held."""
        oldest = self.oldest_of_most()
        return oldest if 2 * self.count(self.peer_of(oldest)) > len(self) else next(iter(self))

    def oldest_of_least(self, count: Callable[[str], int]) -> T:
        """Return what has been held longest of the peer of which `count` is least. Something must be held."""
        return next(iter(self._held[min(self._held, key=count)]))


def peer_of(peername: object) -> str:
    """Return the address in a socket's name, without its port; "" where there is none, as of a Unix socket."""
    return str(peername[0]) if isinstance(peername, tuple) else ""
