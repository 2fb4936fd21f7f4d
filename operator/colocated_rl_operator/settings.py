"""Read the operator's settings from its environment, once at start.

| variable | meaning | default |
|---|---|---|
| OPERATOR_NAMESPACE | its own namespace: Lease and authority live there | required |
| POD_NAME | who it is in the Lease | the host name |
| WATCH_NAMESPACES | namespaces of jobs, separated by commas; all when empty | empty |
| TAKE_OVER | operators whose jobs it takes over, as NAMESPACE/LEASE with commas between | empty |
| AGENT_IMAGE, ROLLOUT_IMAGE, GPU_IMAGE | images of jobs that name none | required |
| IMAGE_PULL_POLICY | of the pods it makes | IfNotPresent |
| FAULT_INJECTION | whether agents take faults that a person injects: true or false | false |
| JOB_EGRESS | what pods of jobs may call, by NetworkPolicies: Open, NoMetadata, Named or OwnPods | NoMetadata |
| NAMESPACE_USERS | whether pods of jobs have users of the range of their namespace: true or false | false |
| TAINT_NODES | whether nodes with bad devices are tainted: true or false | false |
| PROFILES | what an admin lets pods of jobs have, by the name of the profile, in JSON: `Profile` | {} |
| GANGS | kinds of gangs that the cluster has, with commas between: a job that names none has the first | empty |
| GANG_SCHEDULERS | names of their schedulers, as KIND=NAME with commas between | empty |
| LEASE_NAME | the Lease that its replicas compete for | colocated-rl-operator |
| LEASE_DURATION_S, LEASE_RENEW_DEADLINE_S, LEASE_RETRY_S | seconds | 15, 10, 2 |
| AUTHORITY_SECRET | Secret of its namespace of which it takes its authority; empty: it makes one | empty |
| KEYS_CHECK_S | seconds between two looks at the Secrets of its keys and at the certificates of members | 60 |
| METRICS_PORT | /metrics, /healthz, /readyz; plain HTTP | 9090 |
| LOG_LEVEL | DEBUG, INFO, WARNING or ERROR | INFO |

`cluster.find_cluster` finds the API server (by service account, or by KUBECONFIG during development).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from colocated_rl_api.scheduling import Gang
from colocated_rl_operator.clients.errors import BadSetting
from colocated_rl_operator.manifests.belongings import Egress
from colocated_rl_operator.manifests.gangs import Gangs
from colocated_rl_operator.manifests.profiles import Profile, Profiles
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.planner.notices import NodeSigns

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
PULL_POLICIES = ("Always", "IfNotPresent", "Never")


@dataclass(frozen=True)
class LeaseTimes:
    """These times govern the lease. duration_s: others wait this long after the last change.

    renew_deadline_s: a leader that has not renewed for this long ends. retry_s: between two attempts.
    """

    duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0


@dataclass(frozen=True)
class OperatorSettings:
    namespace: str
    identity: str
    images: PodImages
    watch_namespaces: tuple[str, ...] = ()
    takes_over: frozenset[str] = frozenset()
    node_signs: NodeSigns = field(default_factory=NodeSigns)
    taints_nodes: bool = False
    users_of_namespaces: bool = False
    lease_name: str = "colocated-rl-operator"
    lease: LeaseTimes = LeaseTimes()
    egress: Egress = Egress.NO_METADATA
    issued_authority: str = ""
    keys_check_s: float = 60.0
    metrics_port: int = 9090
    log_level: str = "INFO"

    @property
    def release(self) -> str:
        """Return this operator as jobs name it."""
        return f"{self.namespace}/{self.lease_name}"

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> OperatorSettings:
        """Read the settings. Raises BadSetting, which names the variable, its value and what is expected."""
        read = _EnvironmentReader(environment)
        lease = LeaseTimes(
            duration_s=read.seconds("LEASE_DURATION_S", 15.0),
            renew_deadline_s=read.seconds("LEASE_RENEW_DEADLINE_S", 10.0),
            retry_s=read.seconds("LEASE_RETRY_S", 2.0),
        )
        if not lease.retry_s < lease.renew_deadline_s < lease.duration_s:
            raise BadSetting(
                "LEASE_RENEW_DEADLINE_S",
                str(lease.renew_deadline_s),
                f"between LEASE_RETRY_S ({lease.retry_s}) and LEASE_DURATION_S ({lease.duration_s})",
            )
        return cls(
            namespace=read.text("OPERATOR_NAMESPACE"),
            identity=read.text("POD_NAME", socket.gethostname()),
            images=PodImages(
                agent=read.text("AGENT_IMAGE"),
                rollout=read.text("ROLLOUT_IMAGE"),
                gpu=read.text("GPU_IMAGE"),
                pull_policy=read.choice("IMAGE_PULL_POLICY", "IfNotPresent", PULL_POLICIES),
                takes_faults=read.choice("FAULT_INJECTION", "false", ("true", "false")) == "true",
                requests_disk=read.choice("REQUEST_DISK", "true", ("true", "false")) == "true",
                profiles=read.profiles(),
                gangs=read.gangs(),
            ),
            watch_namespaces=read.several("WATCH_NAMESPACES"),
            takes_over=read.operators("TAKE_OVER"),
            node_signs=NodeSigns(
                bad_conditions=frozenset(read.pairs("BAD_NODE_CONDITIONS")),
                leaving_taints=frozenset(read.several("LEAVING_NODE_TAINTS")),
            ),
            taints_nodes=read.choice("TAINT_NODES", "false", ("true", "false")) == "true",
            users_of_namespaces=read.choice("NAMESPACE_USERS", "false", ("true", "false")) == "true",
            lease_name=read.text("LEASE_NAME", "colocated-rl-operator"),
            lease=lease,
            egress=Egress(read.choice("JOB_EGRESS", Egress.NO_METADATA, tuple(Egress))),
            issued_authority=read.text("AUTHORITY_SECRET", ""),
            keys_check_s=read.seconds("KEYS_CHECK_S", 60.0),
            metrics_port=read.port("METRICS_PORT", 9090),
            log_level=read.choice("LOG_LEVEL", "INFO", LOG_LEVELS),
        )


@dataclass(frozen=True)
class _EnvironmentReader:
    environment: Mapping[str, str]

    def text(self, name: str, default: str | None = None) -> str:
        value = self.environment.get(name, "").strip() or default
        if value is None:
            raise BadSetting(name, "", "a value: it is required")
        return value

    def several(self, name: str) -> tuple[str, ...]:
        """Return the values between commas."""
        return tuple(value.strip() for value in self.environment.get(name, "").split(",") if value.strip())

    def operators(self, name: str) -> frozenset[str]:
        """Return operators as jobs name them: NAMESPACE/LEASE between commas."""
        for value in self.several(name):
            if [bool(part) for part in value.split("/")] != [True, True]:
                raise BadSetting(name, value, "NAMESPACE/NAME, as status.operator of a job names its operator")
        return frozenset(self.several(name))

    def pairs(self, name: str) -> list[tuple[str, str]]:
        """Return KEY=VALUE between commas."""
        found = []
        for value in self.several(name):
            key, _, text = value.partition("=")
            if not (key and text):
                raise BadSetting(name, value, "TYPE=STATUS, several with a comma between, such as GPUHealthy=False")
            found.append((key, text))
        return found

    def gangs(self) -> Gangs:
        schedulers = dict(self.pairs("GANG_SCHEDULERS"))
        for name, values in (("GANGS", self.several("GANGS")), ("GANG_SCHEDULERS", tuple(schedulers))):
            if unknown := [value for value in values if value not in tuple(Gang)]:
                raise BadSetting(name, unknown[0], "one of " + ", ".join(Gang))
        return Gangs(tuple(map(Gang, self.several("GANGS"))), {Gang(kind): name for kind, name in schedulers.items()})

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        value = self.text(name, default)
        if value not in choices:
            raise BadSetting(name, value, "one of " + ", ".join(choices))
        return value

    def profiles(self) -> Profiles:
        text = self.text("PROFILES", "{}")
        try:
            written = TypeAdapter(dict[str, Profile]).validate_json(text)
        except ValidationError as error:
            [first, *_] = error.errors(include_url=False)
            place = ".".join(map(str, first["loc"]))
            raise BadSetting("PROFILES", text, f"JSON by name of a profile; {place}: {first['msg']}") from error
        return Profiles({**Profiles().by_name, **written})

    def seconds(self, name: str, default: float) -> float:
        value = self.text(name, str(default))
        try:
            seconds = float(value)
        except ValueError as error:
            raise BadSetting(name, value, "seconds, for instance 2.5") from error
        if not 0 < seconds < 3600:
            raise BadSetting(name, value, "seconds above 0 and below 3600")
        return seconds

    def port(self, name: str, default: int) -> int:
        value = self.text(name, str(default))
        if not value.isdigit() or not 0 <= int(value) <= 65_535:
            raise BadSetting(name, value, "a port, 0 to 65535 (0: any free one)")
        return int(value)
