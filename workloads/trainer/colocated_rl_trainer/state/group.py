"""Form the process group of a lineage's trainer ranks.

Forming the group has a deadline, and so has every wait in it. A collective that fails means that a peer is gone or
late: the group can't be repaired, so `GroupLost` ends this process, its own peers notice at once, and the operator
starts the next lineage. A group of one rank opens no socket.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from colocated_rl_api.interfaces import interface_towards
from colocated_rl_trainer.protocol.rank import Refused
from colocated_rl_trainer.protocol.settings import RankSettings

Item = TypeVar("Item")

_DONE = "done"


class GroupLost(Exception):
    """A peer did not join, or was lost. No data is at fault; every rank of the lineage ends and is started again."""


class Collectives:
    """Runs collectives of all ranks. Every rank makes the same calls in the same order."""

    def __init__(self, *, rank: int, size: int, store: dist.TCPStore | None) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._failures: Counter[str] = Counter()  # failed tries of `once`, by operation

    def gather(self, item: Item) -> list[Item]:
        """Return every rank's item, by rank; the list is the same everywhere."""
        if self.size == 1:
            return [item]
        items: list[Item | None] = [None] * self.size
        with _waiting_for_peers("gather"):
            dist.all_gather_object(items, item)
        return items  # type: ignore[return-value]  # every place is filled

    def sum_in_place(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by the sum over ranks, the same bits everywhere."""
        if self.size > 1:
            with _waiting_for_peers("sum"):
                dist.all_reduce(tensor)

    def broadcast_in_place(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by that of rank 0."""
        if self.size > 1:
            with _waiting_for_peers("broadcast"):
                dist.broadcast(tensor, src=0)

    def each(self, do: Callable[[], Item]) -> list[Item]:
        """Call `do` on every rank and return the results of all, by rank; the list is the same everywhere.

        OSError or Refused of `do` is raised again on its rank, and Refused on every other, after all calls have ended.
        """
        result: Item | None = None
        fault: OSError | Refused | None = None
        try:
            result = do()
        except (OSError, Refused) as error:  # the peers must learn of it, or they wait for this rank's result
            fault = error
        outcomes = self.gather((result, str(fault) if fault else None))
        if fault is not None:
            raise fault
        if faults := [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(outcomes) if reason is not None]:
            raise Refused("; ".join(faults))
        return [result for result, _ in outcomes]  # type: ignore[misc]  # none is missing: no rank has failed

    def led(self, do: Callable[[], Item]) -> Item:
        """Call `do` on rank 0 alone and return its result on every rank. Raises as `each`."""
        return self.each(do if self.rank == 0 else lambda: None)[0]  # type: ignore[return-value]  # rank 0's

    def together(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context for code that calls collectives by itself. It raises GroupLost."""
        return _waiting_for_peers(what)

    def once(self, what: str, do: Callable[[], object], *, within_s: float) -> None:
        """Call `do` on rank 0; every other rank returns when it is done. The ranks need not call at the same time.

        what: unique among the calls of `once`; a failed one may be tried again. Rank 0 raises what `do` raises. Other
        ranks raise Refused for its OSError or Refused, or after `within_s`, and GroupLost if rank 0 is gone.
        """
        if self.rank > 0:
            self._wait_for_rank_0(what, within_s)
            return
        try:
            do()
        except (OSError, Refused) as error:
            self._publish(what, str(error))
            self._next_try(what)
            raise
        self._publish(what, _DONE)

    def _publish(self, what: str, outcome: str) -> None:
        if self._store is not None:
            self._store.set(self._key(what), outcome)

    def _wait_for_rank_0(self, what: str, within_s: float) -> None:
        assert self._store is not None
        try:
            with _waiting_for_peers(f"wait for {what}"):
                self._store.wait([self._key(what)], timedelta(seconds=within_s))
                outcome = self._store.get(self._key(what)).decode()
                while outcome != _DONE and self._store.check([self._next_try(what)]):  # rank 0 has tried again already
                    outcome = self._store.get(self._key(what)).decode()
        except GroupLost as error:
            if isinstance(error.__cause__, dist.DistStoreError):
                raise Refused(f"rank 0 has not {what}: ask again, and see why in the log of its pod") from error
            raise
        if outcome != _DONE:
            raise Refused(f"rank 0 has not {what}: {outcome}")

    def _key(self, what: str) -> str:
        """Return the key under which this try's outcome is stored. Each try has its own."""
        return f"{what}/{self._failures[what]}"

    def _next_try(self, what: str) -> str:
        self._failures[what] += 1
        return self._key(what)


def join_group(settings: RankSettings) -> Collectives:
    """Meet the other ranks of this lineage, with the deadlines of the job. Raises GroupLost."""
    switch = settings.read_job().spec.switch
    return form_group(
        rank=settings.rank,
        size=settings.world_size,
        address=settings.master_address,
        port=settings.master_port,
        device=torch.device(settings.device),
        start_s=switch.trainer_start_seconds,
        progress_s=switch.trainer_progress_seconds,
    )


def form_group(
    *, rank: int, size: int, address: str, port: int, device: torch.device, start_s: float, progress_s: float
) -> Collectives:
    """Meet the other ranks at rank 0's address. Raises GroupLost after `start_s`.

    progress_s: deadline of each collective from then on.
    """
    store: dist.TCPStore | None = None
    if size > 1:
        try:
            interface = interface_towards(address)
        except OSError as error:
            raise GroupLost(f"no way to the group's address {address}: {error}; set GLOO_SOCKET_IFNAME") from error
        for backend in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", interface)
        try:
            store = dist.TCPStore(
                address, port, size, is_master=rank == 0, timeout=timedelta(seconds=start_s), wait_for_workers=False
            )
            dist.init_process_group(
                "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=store, rank=rank, world_size=size, timeout=timedelta(seconds=progress_s),
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise GroupLost(
                f"rank {rank} of {size} found no group at {address}:{port} within {start_s:.0f} s "
                f"(spec.switch.trainerStartSeconds): {_first_line(error)}"
            ) from error
    return Collectives(rank=rank, size=size, store=store)


@contextlib.contextmanager
def _waiting_for_peers(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # this rank has no memory: its peers are there
    except RuntimeError as error:  # all that torch.distributed raises derives from it
        raise GroupLost(f"a peer was lost in a {what}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
