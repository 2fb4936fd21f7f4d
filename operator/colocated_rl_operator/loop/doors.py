"""Hold every neighbour of the operator as one argument."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from colocated_rl_operator.clients.authority import Keyring
from colocated_rl_operator.clients.events import Events
from colocated_rl_operator.clients.kube import Kube
from colocated_rl_operator.clients.members import Members
from colocated_rl_operator.loop.job_queue import Queue
from colocated_rl_operator.loop.nodes import Nodes
from colocated_rl_operator.loop.pods import Pods
from colocated_rl_operator.manifests import resources
from colocated_rl_operator.manifests.belongings import Egress
from colocated_rl_operator.metrics import OperatorMetrics
from colocated_rl_operator.planner.notices import NodeSigns

DELETE_GRACE_S = 30  # of pods whose job is deleted
FORCE_AFTER_S = DELETE_GRACE_S + 15.0  # after this, a deleted job's pod has no node that answers
REPAIR_S = 300.0  # between repairs of objects that somebody may have deleted or changed: no watch reports it


@dataclass(frozen=True)
class Doors:
    """The doors lead to every neighbour of the operator, and hold its settings for them."""

    kube: Kube
    members: Members
    events: Events
    pods: Pods
    keyring: Keyring
    images: resources.PodImages
    metrics: OperatorMetrics
    namespace: str  # the operator's own
    release: str  # this operator as jobs name it: NAMESPACE/LEASE
    confirm: Callable[[], Awaitable[None]]  # returns only if this process leads
    takes_over: frozenset[str] = frozenset()  # operators whose jobs become this one's
    egress: Egress = Egress.NO_METADATA  # what pods of jobs may call
    taints_nodes: bool = False  # those with bad devices
    users_of_namespaces: bool = False  # pods of jobs have users of the range of their namespace
    queue: Queue = field(default_factory=Queue)
    nodes: Nodes = field(default_factory=lambda: Nodes(NodeSigns()))
    version: str = ""  # of this operator
    force_after_s: float = FORCE_AFTER_S
    repair_s: float = REPAIR_S
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], datetime] = lambda: datetime.now(UTC).replace(microsecond=0)
