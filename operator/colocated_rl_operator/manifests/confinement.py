"""Say as whom containers of a pod run, what they may do, and whose last words its status shows. The module is pure.

Three users and one group: engine, trainers, runner and rollout controller; the agent, whose keys and journal those may
not read; reward code, which may read neither keys nor samples. What they share belongs to the group.
"""

from __future__ import annotations

from dataclasses import dataclass

from colocated_rl_api.pod_template import PodSecurity

USUAL_USER, USUAL_GROUP = 65532, 65532

LAST_WORDS = "FallbackToLogsOnError"  # the end of the log goes into the pod's status: it outlives the pod there
NO_WORDS = "File"  # of containers that run other people's code, whose log may quote prompts and responses

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
}


@dataclass(frozen=True)
class Users:
    """Users are three ids in a row, and a group."""

    shared: int  # rollout controller, runner, engine and trainer
    group: int

    @property
    def agent(self) -> int:
        return self.shared + 1

    @property
    def rewards(self) -> int:
        return self.shared + 2


def users_of(security: PodSecurity) -> Users:
    """Return the users that a template chooses, as of the range that a namespace has, or the usual ones."""
    return Users(security.run_as_user or USUAL_USER, security.fs_group or USUAL_GROUP)
