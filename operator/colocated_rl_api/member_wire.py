"""Define the messages between the operator and a member: targets down, facts up.

The operator opens one long-lived WebSocket to each member (`wss://POD_IP:CONTROL_PORT/v1/link`, mutual TLS). Each
message is one JSON text frame of at most MAX_MESSAGE_BYTES, discriminated by `type`:

* member, first: `Hello`, who this is. A reused address with another pod UID is unknown, not another replica.
* member, then at once and on every change: `Facts` in full. Facts are a state, not a log: a newer one replaces an
  older one, and one may be skipped.
* operator: `Target`. A member holds the newest one it accepted and works until its facts agree with it.
* member: `Refusal` of a target, with the reason: an older epoch (I5), or one that is not meant for this member.
* operator: `Keys`, if the member said in its hello which ones it has. It answers with `Renewed`.

Versions may differ by what was added: an upgraded operator drives pods that run until their job ends. Whoever reads a
message or the job's file passes over fields that it does not know, the resource's own parts included, which are strict
anywhere else. What means something else gets another WIRE_VERSION, and then no operator of the other one is a peer.

`GET /v1/state` on the same port, and on the pod's loopback, answers `{hello, target, facts}` for people.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, TypeAdapter

from colocated_rl_api.facts import MOST_PARTS, EngineFacts, GateFacts, PodFacts, RolloutFacts
from colocated_rl_api.job import ColocatedRLJobSpec, Evaluation
from colocated_rl_api.names import JobUid, PodUid
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_api.wire import Version, Wire

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 256 * 1024
HEARTBEAT_S = 5.0  # WebSocket pings from the operator; a connection without a pong for twice as long is lost


# ---------------------------------------------------------------------------------------------------------- targets
class Goal(StrEnum):
    CLIMB = "Climb"  # reach `rung` for version (step, lineage)
    STOP = "Stop"  # close, end engine and trainers, then end the pod's main container with exit code 0


class Rendezvous(Wire):
    """The trainers of this lineage meet here. Rank = replica * ranks per pod + local rank."""

    address: str  # pod IP of replica 0
    port: int
    world_size: int


class Endpoint(Wire):
    """Names a member's data port. TLS name: `names.pod_server_name(job uid, pod)`."""

    pod: str
    address: str
    port: int


class EngineSpan(Wire):
    """Describes the pods of one engine in the order of its ranks: the first serves, the others run parts of it."""

    pods: tuple[PodUid, ...] = Field(max_length=MOST_PARTS)  # those that are there
    address: str | None = None  # pod IP of the first
    engine: EngineFacts | None = None  # as the first reports it, to the others; None: nobody knows
    gate: GateFacts | None = None  # likewise
    lost: str | None = None  # the incarnation of which a part has ended, to the first


class PodTarget(Wire):
    """A target names where a GPU pod should stand. A member that already stands higher does nothing."""

    type: Literal["podTarget"] = "podTarget"
    epoch: int
    goal: Goal
    step: int
    lineage: int
    rung: Rung
    rendezvous: Rendezvous | None = None  # None only with goal STOP
    batches: Endpoint | None = None  # of the rollout controller; None only with goal STOP
    is_last: bool = False  # the job ends with this step: it is saved in any case, and its model is left
    saves: bool = False  # this step is saved in any case: a pod is about to leave its node, or ends
    weights: Version | None = None  # newest ones that are whole: what engines in pods of their own may take
    checksum: str | None = None  # of the engines' weights, on which the group agreed: another one does not serve
    span: EngineSpan | None = None  # of the pod's engine, if it is over several pods

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.step, self.lineage)


class Climbed(Wire):
    """The newest climb that ended with the whole group at the top: its step's, told to whoever keeps it for people."""

    epoch: int
    step: int
    took_s: dict[str, float] = Field(
        max_length=MOST_PARTS,
        description="seconds of the slowest pod to each rung from the one before, to the first from the epoch's begin; "
        "none of a climb that did not begin at the top",
    )
    mismatch: float | None = Field(
        default=None,
        description="of engine and trainer in the step, in nats: mean over its tokens of the present weights of the "
        "difference of log-probabilities; null where trainers measure none",
    )


class RolloutTarget(Wire):
    """A target carries what the rollout controller should know and do."""

    type: Literal["rolloutTarget"] = "rolloutTarget"
    epoch: int
    goal: Goal
    trained_step: int  # every rank has finished these steps: commit their batches
    saved_step: int  # in every checkpoint that trainers may go back to: batches up to here are not needed again
    engines: tuple[Endpoint, ...]  # gates to use; whether they are open is for the gates to say
    references: tuple[Endpoint, ...] = ()  # data ports that score samples; whether they answer they say themselves
    evaluate: int | None = None  # evaluate this step's weights now; the switch waits for it
    climbed: Climbed | None = None  # to be kept for people; None: the operator has seen no whole climb yet
    # what of the spec may change, as it is now; None: as in the job's file
    last_step: int | None = None  # spec.steps
    concurrency: int | None = None  # groups in flight at most
    temperature: float | None = None  # of requests from here on
    evaluation: Evaluation | None = None  # how, from the next one on


class HeldKeys(Wire):
    """A description of a member's keys: digests, without a secret."""

    issuer: str  # certificate of the authority that signed
    trusts: str  # certificates of all authorities that the member trusts
    token: str
    ends: AwareDatetime  # the member's certificate


class Keys(Wire):
    """A member's certificate with its key, what it trusts, and the job's data token. They replace those it has."""

    type: Literal["keys"] = "keys"
    authorities: str  # PEM, the one that signs first
    certificate: str  # PEM
    key: str = Field(repr=False)  # PEM
    token: str = Field(repr=False)
    held: HeldKeys | None = None  # None: in files of an older operator, which renews none


class Hello(Wire):
    """A member sends this message first."""

    type: Literal["hello"] = "hello"
    wire: int = WIRE_VERSION
    pod: str
    pod_uid: PodUid
    job_uid: JobUid
    role: str  # names.ROLE_ROLLOUT or one of names.GPU_ROLES
    replica: int | None = None
    incarnation: str  # of the member process itself
    highest_epoch: int = 0  # the newest epoch it ever accepted
    keys: HeldKeys | None = None  # None: it takes no others


class Refusal(Wire):
    """The member does not accept a target. `StaleEpoch`: someone newer decides, never retry."""

    type: Literal["refusal"] = "refusal"
    epoch: int
    highest_epoch: int
    reason: Literal["StaleEpoch", "NotForThisMember"]
    message: str


class Renewed(Wire):
    """The member uses these keys from now on."""

    type: Literal["renewed"] = "renewed"
    keys: HeldKeys


FromMember = Hello | PodFacts | RolloutFacts | Refusal | Renewed
FromOperator = PodTarget | RolloutTarget | Keys

from_member: TypeAdapter[FromMember] = TypeAdapter(Annotated[FromMember, Field(discriminator="type")])
_from_operator: TypeAdapter[FromOperator] = TypeAdapter(Annotated[FromOperator, Field(discriminator="type")])


def read_from_operator(text: str | bytes) -> FromOperator:
    """Parse a message; pass over a newer operator's fields, in the spec too. Raises pydantic.ValidationError."""
    return _from_operator.validate_json(text, extra="ignore")


# -------------------------------------------------------------------------------------------------- the job's own file
class JobFile(Wire):
    """`names.JOB_FILE`: what a member needs to know of its job, as the operator that runs now has it."""

    name: str
    namespace: str
    uid: JobUid
    created: datetime
    spec: ColocatedRLJobSpec

    @classmethod
    def read(cls, text: bytes) -> JobFile:
        """Parse a job's file; pass over a newer operator's fields, in the spec too. Raises pydantic.ValidationError."""
        return cls.model_validate_json(text, extra="ignore")
