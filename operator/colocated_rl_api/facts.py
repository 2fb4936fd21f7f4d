"""Define what members report: all that a plan or a status may depend on. Positions are derived, never reported.

Facts are a state, not a log: a newer report replaces an older one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from colocated_rl_api.logs import one_line
from colocated_rl_api.rungs import Rung
from colocated_rl_api.wire import Version, Wire

MOST_PARTS = 128
"""Items of whatever facts list. No pod and no job has more; a member that reports more costs the operator no memory."""


# ---------------------------------------------------------------------------------------------- facts of a GPU pod
class TagState(StrEnum):
    """Names the state of a memory tag of an engine incarnation: UNKNOWN after a call whose outcome nobody saw (I6)."""

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


class RejectedWeights(Wire):
    """No engine starts in this one's place on these weights: two in a row failed the check of them."""

    version: Version
    message: str = Field(max_length=1024)  # the result of the second check


class EngineLaunch(Wire):
    """The first pod of an engine over several pods says by this how the parts in the others join it."""

    port: int  # of the first pod, where all parts meet
    pool_tokens: int | None = None  # of the KV cache, equal in all parts; None: they find out


class EngineFacts(Wire):
    """These facts describe one engine. Everything but `state`, `name`, `rejected` and `part_of` belongs to one
    incarnation.

    A pod that runs a part of another pod's engine reports that engine's facts for as long as its part lives.
    """

    name: str
    state: EngineState
    incarnation: str | None = None
    starts_on: Version | None = None  # weights it was started on, while STARTING
    shut: bool = False  # the gate lets no request through to it, as while it answers the probe of its weights
    paused: bool = False
    drained: bool = False  # flush answered 200 after the gate last closed
    weights: TagState = TagState.MAPPED
    kv_cache: TagState = TagState.MAPPED
    cuda_graph: TagState = TagState.MAPPED
    version: Version | None = None  # read back; None from the release of the weights until an update is confirmed
    checksum: str | None = Field(default=None, max_length=128)  # of `version`, by the engine; None: not asked for
    noise_nats: float | None = None  # mean difference from the trainer's log-probabilities, as last accepted
    failures: int = 0  # of its incarnations, since one last served
    launch: EngineLaunch | None = None  # of an engine over several pods, in the first of them
    part_of: str | None = None  # incarnation of the engine whose part runs here, or was the last one to
    rejected: RejectedWeights | None = None  # only while ABSENT: the step fails, unless another of the pod holds them

    @property
    def is_absent(self) -> bool:
        return self.state is EngineState.ABSENT

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY

    @property
    def is_starting(self) -> bool:
        return self.state is EngineState.STARTING

    @property
    def is_paused(self) -> bool:
        return self.is_ready and self.paused

    @property
    def is_drained(self) -> bool:
        return self.is_paused and self.drained

    @property
    def is_released(self) -> bool:
        """Return whether the engine has released all memory that it does not keep."""
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
    """Describes the pod's data path. `settled`: closed, and every request that was let in has ended."""

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
    """These facts describe one trainer rank."""

    rank: int
    state: TrainerState
    incarnation: str | None = None
    exit_code: int | None = None  # of the last incarnation, when ABSENT; negative: signal
    lineage: int | None = None  # the group this process was started for, also of the last incarnation when ABSENT
    step: int | None = None  # last finished step; None until the checkpoint is loaded
    mismatch: float | None = None  # of that step, in nats: `trainer_wire.MISMATCH`; None: not measured
    scored: int | None = None  # newest step whose batch the reference has scored, of this incarnation
    dirty: bool = False  # an optimizer call of an unfinished step has happened
    exported: Version | None = None
    saved: int | None = None  # newest durable checkpoint that this rank knows of
    replay_from: int | None = None  # oldest step that a restart may go back to; None: `saved`
    mirrored: int | None = None  # newest step that this rank has kept in the memory of pods
    can_finish: bool = False  # it can leave an export as the job's model
    finished: Version | None = None  # that it has left: durable
    stalled: int | None = None  # progress in a step that has stood still for far longer than usual; None: it goes on
    not_retriable: str = Field(default="", max_length=1024)  # why the process ends, and would end again; "": not known
    grown_bytes: int = 0  # host memory that this incarnation has gained since its first switch, as last measured

    @property
    def is_alive(self) -> bool:
        return self.state is not TrainerState.ABSENT

    @property
    def is_offloaded(self) -> bool:
        return self.state is TrainerState.OFFLOADED


class DeviceFacts(Wire):
    """Holds the memory of one GPU, as the runner reads it. None: unmeasured, for instance without a GPU."""

    index: int
    total_bytes: int | None = None
    used_bytes: int | None = None
    residue_bytes: int | None = None  # used while the engine was absent and the trainer offloaded


class Problem(Wire):
    """A problem keeps a member from its target. Status and events show it; `reason` is CamelCase and stable."""

    # A message may have words of others in it, so what is no text is replaced on both sides of the wire: to refuse it
    # would make a member of a stray character that is lost.
    reason: str = Field(max_length=64, pattern=r"^[A-Za-z0-9]*$")
    message: Annotated[str, BeforeValidator(lambda text: one_line(text) if isinstance(text, str) else text)] = Field(
        max_length=1024
    )


EPOCHS_OF_WAITS = 8  # the newest epochs whose waits PodFacts.waited_s adds up


class PodFacts(Wire):
    """Everything a plan may depend on in a GPU pod. Without engines or trainers: they are in other pods."""

    type: Literal["podFacts"] = "podFacts"
    epoch: int = 0  # of the target it holds; 0: none yet
    gate: GateFacts
    engines: tuple[EngineFacts, ...] = Field(max_length=MOST_PARTS)
    trainers: tuple[TrainerFacts, ...] = Field(max_length=MOST_PARTS)
    export: Version | None = None  # newest weights that this agent has compared with their manifest
    devices: tuple[DeviceFacts, ...] = Field(default=(), max_length=MOST_PARTS)
    bad_device: str | None = Field(default=None, max_length=256)  # what is wrong with one of them; None: nothing known
    problem: Problem | None = None
    took_s: dict[Rung, float] = Field(default_factory=dict)  # seconds from the previous rung, in this epoch
    waited_s: float = 0.0  # seconds that it stood where its target sent it, below the top; a wait counts when it ends
    reference_ready: bool | None = None  # of the process beside the engines; None: none belongs here
    stopped: bool = False  # goal STOP reached: children gone
    ending: bool = False  # its container was signalled to end: what ends in it from here on has not failed


# ------------------------------------------------------------------------------------- facts of the rollout controller
class SealedBatch(Wire):
    """Describes a batch that training may consume: it is immutable from here on."""

    step: int
    groups: int
    samples: int
    loss_tokens: int


class BestOf(Wire):
    """Mean reward of the best of `answers` answers to a prompt."""

    answers: int
    mean: float


class EvaluationResult(Wire):
    """Holds the mean reward of one weights version on one set of prompts. `stderr` is the standard error of `mean`."""

    name: str = "held-out"  # of the set; a store of an older program has no other
    step: int
    samples: int  # answers
    mean: float
    stderr: float  # over prompts: answers to one of them are not independent; 0 with one, which tells of no spread
    best: float | None = None  # mean of the best answer to each prompt; None with one answer each
    # of fewer answers than each prompt has: 2, 4, 8 and so on
    best_of: tuple[BestOf, ...] = Field(default=(), max_length=MOST_PARTS)


class RolloutFacts(Wire):
    """Everything a plan or a status may depend on in the rollout controller."""

    type: Literal["rolloutFacts"] = "rolloutFacts"
    epoch: int = 0
    sealed: SealedBatch | None = None  # newest batch; training step `sealed.step` may begin
    trained_step: int = 0  # batches up to here are accounted as trained
    # newest result of each set that is evaluated now
    evaluated: tuple[EvaluationResult, ...] = Field(default=(), max_length=MOST_PARTS)
    began_at: int | None = None  # step of the former checkpoint that the store began from; None: from the model
    last_step: int | None = None  # no batch follows this one, because the prompts' passes are over; None: not known
    # by state (I3), all of them: they add up to admitted; and those that filters kept from training, by filter
    samples: dict[str, int] = Field(default_factory=dict, max_length=MOST_PARTS)
    filtered: dict[str, int] = Field(default_factory=dict, max_length=MOST_PARTS)
    reward_mean: float | None = None  # of the newest sealed batch
    staleness_mean: float | None = None  # tokens of the newest sealed batch, in versions, as the trainer will see them
    tokens_per_second: float | None = None  # of attempts that ended over the last 30 s
    gates_open: int = 0
    deals_anew: bool = False  # a batch is dealt to as many ranks as whoever asks for it has
    unscored: int | None = None  # completed samples that wait for the scores of a reference; None: it gives none
    problem: Problem | None = None
    stopped: bool = False
