"""Say as whom containers of a pod run, what they may do, and whose last words its status shows. The module is pure.

Three users and one group: engine, trainers, runner and rollout controller; the agent, whose keys and journal those may
not read; reward code, which may read neither keys nor samples. What they share belongs to the group. Their ids are
those that the job names, or the first of the range that OpenShift gives its namespace, or else the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from colocated_rl_api.pod_template import OWN_USERS, PodSecurity

USERS_ANNOTATION = "openshift.io/sa.scc.uid-range"
GROUPS_ANNOTATION = "openshift.io/sa.scc.supplemental-groups"

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


USUAL_USERS = Users(65532, 65532)


def users_of(security: PodSecurity, usual: Users) -> Users:
    """Return the users that a template chooses, or the usual ones."""
    return Users(security.run_as_user or usual.shared, security.fs_group or usual.group)


def users_of_range(annotations: Mapping[str, str]) -> Users:
    """Return the first users of a namespace's range and its group. Raises ValueError, which names the annotation.

    OpenShift's restricted-v2 admits any user of the range, and as fsGroup the first group alone. A namespace without
    groups has those of the users' range (`getPreallocatedFSGroup` of openshift/apiserver-library-go, September 2025).
    """
    first, count = _block(annotations, USERS_ANNOTATION)
    if count < OWN_USERS:
        raise ValueError(f"annotation {USERS_ANNOTATION} has {count} users, and pods of jobs need {OWN_USERS}")
    group, _ = _block(annotations, GROUPS_ANNOTATION if annotations.get(GROUPS_ANNOTATION) else USERS_ANNOTATION)
    return Users(first, group)


def _block(annotations: Mapping[str, str], name: str) -> tuple[int, int]:
    """Return the first id and the number of ids of an annotation's first block: FIRST/COUNT or FIRST-LAST."""
    value = annotations.get(name, "")
    found = re.fullmatch(r"([0-9]{1,10})([/-])([0-9]{1,10})", value.partition(",")[0].strip())
    if found is None:
        raise ValueError(f"annotation {name} is {value!r}, and should be as OpenShift writes it: 1000660000/10000")
    first, last_or_count = int(found[1]), int(found[3])
    count = last_or_count if found[2] == "/" else last_or_count - first + 1
    if first < 1 or count < 1 or first + count > 2**31:
        raise ValueError(f"annotation {name} is {value!r}: ids should be between 1 and 2147483647")
    return first, count
