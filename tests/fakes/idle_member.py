"""A member's server with nothing behind it: it has the facts of a pod at rest, and takes every target."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry

from colocated_rl_agent.gate.data_port import DataPort
from colocated_rl_api import names
from colocated_rl_api.facts import GateFacts, PodFacts
from colocated_rl_api.listening import EVERYWHERE
from colocated_rl_api.member_wire import Hello, PodTarget
from colocated_rl_member.server import MemberServer, Ports
from colocated_rl_member.tls import MemberTls

JOB_UID = names.JobUid("2f6c1f5e-0f0e-4a39-8f0f-1f2e3d4c5b6a")


def idle_member(
    tls: MemberTls,
    data: DataPort | web.Application,
    *,
    host: str = EVERYWHERE,
    gate_open: bool = False,
    registry: CollectorRegistry | None = None,
) -> MemberServer[PodTarget]:
    """Make the server, on ports of the kernel's choice. host: where it listens, as in a pod unless told."""
    facts = PodFacts(gate=GateFacts(open=gate_open, settled=True), engines=(), trainers=())
    return MemberServer(
        hello=Hello(
            pod="job-gpu-0-0", pod_uid="uid-0", job_uid=JOB_UID, role=names.ROLE_GPU, incarnation="a", highest_epoch=0
        ),
        kind=PodTarget,
        tls=tls,
        facts=lambda: facts,
        accept=lambda _: None,
        remember_epoch=lambda _: None,
        data=data,
        ports=Ports(control=0, data=0, metrics=0, pages=0, host=host),
        registry=registry or CollectorRegistry(),
    )
