"""The fence rejects targets of an older epoch and targets meant for another kind of member (I5).

The highest epoch is made durable before the member acts on a target of it: after a restart it still refuses targets
from a stale operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from colocated_rl_api.member_wire import PodTarget, Refusal, RolloutTarget

TargetT = TypeVar("TargetT", bound=PodTarget | RolloutTarget)


class EpochFence(Generic[TargetT]):
    """An EpochFence holds the newest accepted target of one member.

    remember_epoch: makes an epoch durable, and raises if it can't; called once per epoch, before `admit` returns.
    unfit: returns why this member can't take a target of its kind, or "".
    """

    def __init__(
        self,
        kind: type[TargetT],
        *,
        highest_epoch: int,
        remember_epoch: Callable[[int], None],
        unfit: Callable[[TargetT], str] = lambda target: "",
    ) -> None:
        self._kind = kind
        self._remember_epoch = remember_epoch
        self._unfit = unfit
        self.highest_epoch = highest_epoch
        self.target: TargetT | None = None

    def admit(self, target: PodTarget | RolloutTarget) -> TargetT | Refusal:
        """Keep the target and return it, or return the refusal. Within an epoch the newer message wins."""
        if not isinstance(target, self._kind):
            return self._refusal(
                target, "NotForThisMember", f"this member takes {self._kind.__name__}, not {target.type}"
            )
        if why := self._unfit(target):
            return self._refusal(target, "NotForThisMember", why)
        if target.epoch < self.highest_epoch:
            return self._refusal(
                target, "StaleEpoch", f"epoch {target.epoch} is over: {self.highest_epoch} was accepted"
            )
        if target.epoch > self.highest_epoch:
            self._remember_epoch(target.epoch)
            self.highest_epoch = target.epoch
        self.target = target
        return target

    def _refusal(
        self, target: PodTarget | RolloutTarget, reason: Literal["StaleEpoch", "NotForThisMember"], message: str
    ) -> Refusal:
        return Refusal(epoch=target.epoch, highest_epoch=self.highest_epoch, reason=reason, message=message)
