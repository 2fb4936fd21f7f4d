"""What the operator and a member say to each other: targets down, facts up.

The operator opens one long-lived WebSocket to each member (`wss://POD_IP:CONTROL_PORT/v1/link`, mutual TLS). Each
message is one JSON text frame of at most MAX_MESSAGE_BYTES, discriminated by `type`:

* member, first: `Hello`, who this is. A reused address with another pod UID is unknown, not another replica.
* member, then at once and on every change: `Facts` in full. Facts are a state, not a log: a newer one replaces an
  older one, and one may be skipped.
* operator: `Target`. A member holds the newest one it accepted and works until its facts agree with it.
* member: `Refusal` of a target, with the reason: an older epoch (I5), or one that is not meant for this member.

Versions may differ by what was added: an upgraded operator drives pods that run until their job ends. Whoever reads a
message or the job's file passes over fields that it does not know, the resource's own parts included, which are strict
anywhere else. What means something else gets another WIRE_VERSION, and then no operator of the other one is a peer.

`GET /v1/state` on the same port, and on the pod's loopback, answers `{hello, target, facts}` for people.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter
from pydantic.alias_generators import to_camel

from colocated_rl_api.job import ColocatedRLJobSpec, Evaluation
from colocated_rl_api.ladder import Rung, WeightVersion

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 256 * 1024
HEARTBEAT_S = 5.0  # WebSocket pings from the operator; a connection without a pong for twice as long is lost


class Wire(BaseModel):
    """Base of every message: camelCase on the wire, immutable, unknown fields ignored so that versions can meet."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, frozen=True, extra="ignore")


def _read_version(value: object) -> WeightVersion:
    if isinstance(value, WeightVersion):
        return value
    if not isinstance(value, str):
        raise ValueError(f"weight version {value!r} is not STEP-LINEAGE")
    return WeightVersion.parse(value)


_Written = Annotated[str, Field(pattern=r"^\d{1,9}-\d{1,9}$")]
Version = Annotated[
    WeightVersion,
    PlainValidator(_read_version, json_schema_input_type=_Written),
    PlainSerializer(str, return_type=str),
]
"""A `WeightVersion`, written STEP-LINEAGE on the wire."""


# ---------------------------------------------------------------------------------------------- facts of a GPU pod
class TagState(StrEnum):
    """One memory tag of one engine incarnation. UNKNOWN after a call whose outcome nobody saw (I6)."""

    MAPPED = "Mapped"
    KEPT = "Kept"  # mapped for as long as the engine lives: the job does not offload it
    RELEASED = "Released"
    UNKNOWN = "Unknown"


HELD = frozenset({TagState.MAPPED, TagState.KEPT})
_GIVEN_UP = frozenset({TagState.RELEASED, TagState.KEPT})


class EngineState(StrEnum):
    ABSENT = "Absent"  # process reaped
    STARTING = "Starting"
    READY = "Ready"  # answers


class EngineFacts(Wire):
    """What is known of one engine. Everything but `state` and `name` belongs to one incarnation."""

    name: str
    state: EngineState
    incarnation: str | None = None
    starts_on: Version | None = None  # weights it was started on, while STARTING
    paused: bool = False
    drained: bool = False  # flush answered 200 after the gate last closed
    weights: TagState = TagState.MAPPED
    kv_cache: TagState = TagState.MAPPED
    cuda_graph: TagState = TagState.MAPPED
    version: Version | None = None  # read back; None from the release of the weights until an update is confirmed
    checksum: str | None = Field(default=None, max_length=128)  # of `version`, by the engine; None: not asked for
    failures: int = 0  # of its incarnations, since one last served

    @property
    def is_absent(self) -> bool:
        return self.state is EngineState.ABSENT

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY

    @property
    def is_paused(self) -> bool:
        return self.is_ready and self.paused

    @property
    def is_drained(self) -> bool:
        return self.is_paused and self.drained

    @property
    def is_released(self) -> bool:
        """Of all that it does not keep."""
        return self.is_drained and _GIVEN_UP.issuperset(self.tags)

    @property
    def weights_mapped(self) -> bool:
        return self.weights in HELD

    @property
    def is_mapped(self) -> bool:
        return HELD.issuperset(self.tags)

    @property
    def tags(self) -> tuple[TagState, TagState, TagState]:
        return self.weights, self.kv_cache, self.cuda_graph


class GateFacts(Wire):
    """The pod's data path. `settled`: closed, and every request that was let in has ended."""

    open: bool
    settled: bool


class TrainerState(StrEnum):
    ABSENT = "Absent"  # no process
    STARTING = "Starting"  # process up, group not formed or checkpoint not loaded
    OFFLOADED = "Offloaded"  # state in host memory, device down to the residue
    ONLOADED = "Onloaded"  # state on the device
    SCORING = "Scoring"  # the reference computes a batch
    TRAINING = "Training"  # a step is under way


class TrainerFacts(Wire):
    """What is known of one trainer rank."""

    rank: int
    state: TrainerState
    incarnation: str | None = None
    exit_code: int | None = None  # of the last incarnation, when ABSENT; negative: signal
    lineage: int | None = None  # the group this process was started for, also of the last incarnation when ABSENT
    step: int | None = None  # last finished step; None until the checkpoint is loaded
    scored: int | None = None  # newest step whose batch the reference has scored, of this incarnation
    dirty: bool = False  # an optimizer call of an unfinished step has happened
    exported: Version | None = None
    saved: int | None = None  # newest durable checkpoint that this rank knows of
    replay_from: int | None = None  # oldest step that a restart may go back to; None: `saved`
    can_finish: bool = False  # it can leave an export as the job's model
    finished: Version | None = None  # that it has left: durable

    @property
    def is_alive(self) -> bool:
        return self.state is not TrainerState.ABSENT

    @property
    def is_offloaded(self) -> bool:
        return self.state is TrainerState.OFFLOADED


class DeviceFacts(Wire):
    """Memory of one GPU, as the runner reads it. None: unmeasured, for instance without a GPU."""

    index: int
    total_bytes: int | None = None
    used_bytes: int | None = None
    residue_bytes: int | None = None  # used while the engine was absent and the trainer offloaded


class Problem(Wire):
    """Why a member does not come nearer to its target, for status and events. `reason` is CamelCase and stable."""

    reason: str = Field(max_length=64)
    message: str = Field(max_length=1024)


class PodFacts(Wire):
    """Everything a plan may depend on in a GPU pod. Without engines or trainers: they are in other pods."""

    type: Literal["podFacts"] = "podFacts"
    epoch: int = 0  # of the target it holds; 0: none yet
    gate: GateFacts
    engines: tuple[EngineFacts, ...]
    trainers: tuple[TrainerFacts, ...]
    export: Version | None = None  # newest weights that this agent has compared with their manifest
    devices: tuple[DeviceFacts, ...] = ()
    problem: Problem | None = None
    took_s: dict[Rung, float] = Field(default_factory=dict)  # seconds from the previous rung, in this epoch
    stopped: bool = False  # goal STOP reached: children gone


# ------------------------------------------------------------------------------------- facts of the rollout controller
class SealedBatch(Wire):
    """A batch that training may consume: immutable from here on."""

    step: int
    groups: int
    samples: int
    loss_tokens: int


class EvaluationResult(Wire):
    """Mean reward of one weights version on the held-out prompts. `stderr` is the standard error of `mean`."""

    step: int
    samples: int  # answers
    mean: float
    stderr: float  # over prompts: answers to one of them are not independent
    best: float | None = None  # mean of the best answer to each prompt; None with one answer each


class RolloutFacts(Wire):
    """Everything a plan or a status may depend on in the rollout controller."""

    type: Literal["rolloutFacts"] = "rolloutFacts"
    epoch: int = 0
    sealed: SealedBatch | None = None  # newest batch; training step `sealed.step` may begin
    trained_step: int = 0  # batches up to here are accounted as trained
    evaluated: EvaluationResult | None = None  # newest finished evaluation
    samples: dict[str, int] = Field(default_factory=dict)  # by state (I3), all of them: they add up to admitted
    reward_mean: float | None = None  # of the newest sealed batch
    staleness_mean: float | None = None  # tokens of the newest sealed batch, in versions, as the trainer will see them
    tokens_per_second: float | None = None  # of attempts that ended over the last 30 s
    gates_open: int = 0
    unscored: int | None = None  # completed samples that wait for a reference on devices of its own; None: no such
    problem: Problem | None = None
    stopped: bool = False


# ---------------------------------------------------------------------------------------------------------- targets
class Goal(StrEnum):
    CLIMB = "Climb"  # reach `rung` for version (step, lineage)
    STOP = "Stop"  # close, end engine and trainers, then end the pod's main container with exit code 0


class Rendezvous(Wire):
    """Where the trainers of this lineage meet. Rank = replica * ranks per pod + local rank."""

    address: str  # pod IP of replica 0
    port: int
    world_size: int


class Endpoint(Wire):
    """A member's data port. TLS name: `names.member_server_name(job uid)`."""

    pod: str
    address: str
    port: int


class PodTarget(Wire):
    """Where a GPU pod should stand. A member that stands higher already does nothing."""

    type: Literal["podTarget"] = "podTarget"
    epoch: int
    goal: Goal
    step: int
    lineage: int
    rung: Rung
    rendezvous: Rendezvous | None = None  # None only with goal STOP
    batches: Endpoint | None = None  # of the rollout controller; None only with goal STOP
    is_last: bool = False  # the job ends with this step: it is saved in any case, and its model is left
    weights: Version | None = None  # newest ones that are whole: what engines in pods of their own may take
    checksum: str | None = None  # of the engines' weights, on which the group agreed: another one does not serve

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.step, self.lineage)


class RolloutTarget(Wire):
    """What the rollout controller should know and do."""

    type: Literal["rolloutTarget"] = "rolloutTarget"
    epoch: int
    goal: Goal
    trained_step: int  # every rank has finished these steps: commit their batches
    saved_step: int  # in every checkpoint that trainers may go back to: batches up to here are not needed again
    engines: tuple[Endpoint, ...]  # gates to use; whether they are open is for the gates to say
    references: tuple[Endpoint, ...] = ()  # on devices of their own; whether they answer they say themselves
    evaluate: int | None = None  # evaluate this step's weights now; the switch waits for it
    # what of the spec may change, as it is now; None: as the job's file says
    last_step: int | None = None  # spec.steps
    concurrency: int | None = None  # groups in flight at most
    temperature: float | None = None  # of requests from here on
    evaluation: Evaluation | None = None  # how, from the next one on


class Hello(Wire):
    """First message of a member."""

    type: Literal["hello"] = "hello"
    wire: int = WIRE_VERSION
    pod: str
    pod_uid: str
    job_uid: str
    role: str  # names.ROLE_ROLLOUT or one of names.GPU_ROLES
    replica: int | None = None
    incarnation: str  # of the member process itself
    highest_epoch: int = 0  # the newest epoch it ever accepted


class Refusal(Wire):
    """A target that the member does not accept. `StaleEpoch`: someone newer decides, never retry."""

    type: Literal["refusal"] = "refusal"
    epoch: int
    highest_epoch: int
    reason: Literal["StaleEpoch", "NotForThisMember"]
    message: str


FromMember = Annotated[Hello | PodFacts | RolloutFacts | Refusal, Field(discriminator="type")]
Target = Annotated[PodTarget | RolloutTarget, Field(discriminator="type")]

from_member: TypeAdapter[Hello | PodFacts | RolloutFacts | Refusal] = TypeAdapter(FromMember)
_target: TypeAdapter[PodTarget | RolloutTarget] = TypeAdapter(Target)


def read_target(text: str | bytes) -> PodTarget | RolloutTarget:
    """Raises pydantic.ValidationError. Fields of a newer operator are passed over, in parts of the spec too."""
    return _target.validate_json(text, extra="ignore")


# -------------------------------------------------------------------------------------------------- the job's own file
class JobFile(Wire):
    """`names.JOB_FILE`: what a member needs to know of its job, as the operator that runs now has it."""

    name: str
    namespace: str
    uid: str
    created: datetime
    spec: ColocatedRLJobSpec

    @classmethod
    def read(cls, text: bytes) -> JobFile:
        """Raises pydantic.ValidationError. Fields of a newer operator are passed over, in the spec too."""
        return cls.model_validate_json(text, extra="ignore")
