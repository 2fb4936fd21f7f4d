"""Decide whose devices a role may share: the values of `colocateWith`, and a message for each value that is refused.

A role names another one, `""` asks for devices of its own, and the trainer, whose devices they are, names no role. The
rule exists twice, in CEL for the API server and in Python, with the same messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from colocated_rl_api.parts import Rule

TRAINER = "trainer"
ROLE_MAX = 32  # characters
_ALLOWED = (TRAINER, "")


@dataclass(frozen=True)
class Colocation:
    """A colocation checks the field of one role. peer: the other role that may set the field."""

    role: str
    peer: str

    def refusal(self, named: str, *, peers: str | None) -> str | None:
        """Return why the role can't share the devices of `named`, or None if it can.

        peers: the role that the peer names; None: the job has no peer.
        """
        if named in _ALLOWED:
            return None
        if named not in (self.role, self.peer):
            return self._unknown % named
        if named == self.role:
            return self._itself
        if peers is None:
            return self._inactive
        return self._cycle if peers == self.role else self._indirect

    @property
    def rule(self) -> Rule:
        """Return the same rule for the spec, in CEL."""
        named, peers = f"self.{self.role}.colocateWith", f"self.{self.peer}.colocateWith"
        return Rule(
            field=f"{self.role}.colocateWith",
            rule=f"!has(self.{self.role}) || !has({named}) || "
            + " || ".join(f"{named} == '{each}'" for each in _ALLOWED),
            message=f"{self.role}.colocateWith is {TRAINER} or empty: no other devices are supported yet",
            said=f"!({named} in ['{self.role}', '{self.peer}']) ? '{self._unknown}'.format([{named}]) : "
            f"{named} == '{self.role}' ? '{self._itself}' : "
            f"!has(self.{self.peer}) ? '{self._inactive}' : "
            f"has({peers}) && {peers} == '{self.role}' ? '{self._cycle}' : '{self._indirect}'",
        )

    @property
    def _unknown(self) -> str:
        return f"colocateWith is %s, and the roles are rollout, reference and {TRAINER}: write {TRAINER}"

    @property
    def _itself(self) -> str:
        return f"{self.role} shares no devices by naming itself: write {TRAINER}"

    @property
    def _inactive(self) -> str:
        return f"colocateWith is {self.peer}, and this job has none: write {TRAINER}"

    @property
    def _cycle(self) -> str:
        return f"{self.role} and {self.peer} name each other, and no devices: write {TRAINER} in both"

    @property
    def _indirect(self) -> str:
        return f"{self.role} on the devices of {self.peer} is not supported yet: write {TRAINER}, whose they are"


COLOCATIONS = (Colocation("rollout", peer="reference"), Colocation("reference", peer="rollout"))
