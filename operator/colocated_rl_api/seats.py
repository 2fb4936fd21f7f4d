"""Name the seats of a job: places that one pod each fills, whatever its attempt. A name is `ROLE-REPLICA` or `rollout`.

The seats follow from the mode and from how many pods of each kind the job asks for. Operator and command line read them
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from colocated_rl_api import names
from colocated_rl_api.job import Mode
from colocated_rl_api.rungs import RolloutPlacement

ROLLOUT_SEAT = names.ROLE_ROLLOUT
FIRST_SPARE = 1024  # replicas are below: a seat is a spare's or the group's for good, whatever the job asks for later


def gpu_seat(replica: int, role: str = names.ROLE_GPU) -> str:
    return f"{role}-{replica}"


def role_of(seat: str) -> str:
    return seat if seat == ROLLOUT_SEAT else seat.rpartition("-")[0]


def spare_seats(role: str, number: int) -> tuple[str, ...]:
    """Return the seats of pods that are like those of a role, and of no group."""
    return tuple(gpu_seat(FIRST_SPARE + each, role) for each in range(number))


def is_spare(seat: str) -> bool:
    replica = seat.rpartition("-")[2]
    return replica.isdecimal() and int(replica) >= FIRST_SPARE


@dataclass(frozen=True)
class Seats:
    """Seats list the pods with trainers and those with an engine. The first are all among the second, or none is.

    references: the pods of a reference with devices of its own.
    """

    trainers: tuple[str, ...]
    engines: tuple[str, ...]
    references: tuple[str, ...] = ()

    @cached_property
    def gpu(self) -> tuple[str, ...]:
        """Return the seats of all pods that climb: those with engines, trainers or both."""
        return tuple(dict.fromkeys((*self.trainers, *self.engines)))

    @cached_property
    def all(self) -> tuple[str, ...]:
        return (*self.gpu, *self.references, ROLLOUT_SEAT)

    def __contains__(self, seat: str) -> bool:
        return seat in self._known

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.all)


def seats_for(mode: str, placement: str, *, replicas: int, engines: int = 0, references: int = 0) -> Seats:
    """Return the seats of a job. mode, and placement of the engines: may be one of a newer version, unknown here.

    engines: the number of pods with only an engine. references: the number of pods of a reference, which has seats only
    if there are samples for it to score.
    """
    generates = mode != Mode.TRAIN_ONLY
    apart = _of(names.ROLE_ENGINE, engines if generates else 0)
    scoring = _of(names.ROLE_REFERENCE, references if generates else 0)
    if placement == RolloutPlacement.OWN_DEVICES:
        return Seats(_of(names.ROLE_TRAINER, 0 if mode == Mode.ROLLOUT_ONLY else replicas), apart, scoring)
    together = _of(names.ROLE_GPU, replicas)
    return Seats(together, (*together, *apart), scoring)


def _of(role: str, number: int) -> tuple[str, ...]:
    return tuple(gpu_seat(replica, role) for replica in range(number))
