"""Define the requests of an agent to a trainer rank: HTTP/1.1 with JSON over a Unix socket per rank.

The agent starts the trainer's command through the runner with the environment of `TrainerEnvironment`; the trainer
opens `SOCKET` and answers:

* `GET /v1/state`: where it stands, at any time, also during a step.
* `POST /v1/onload` `{}`: state to the device. Asked for once in a resident job, before the first step or export.
* `POST /v1/offload` `{}`: state to host memory, device to the residue. Never asked for in a resident job.
* `POST /v1/score` `ScoreRequest`: the reference's log-probabilities of the next batch. Only asked for in a job with a
  reference, and there before each step, of a trainer that reports `canScore`. Collective.
* `POST /v1/train` `TrainRequest`: one optimizer step on one sealed batch. Collective: every rank is asked.
* `POST /v1/export` `ExportRequest`: write weights with a manifest (`colocated_rl_api.weights`) into `directory`.
* `POST /v1/save` `SaveRequest`: checkpoint of the finished step, on or off the device; durable when it answers.
* `POST /v1/mirror` `MirrorRequest`: keep the finished step in the memory of pods, on or off the device. Asked between
  checkpoints in a job with `spec.checkpoint.inMemory`, of a trainer that reports `canMirror`. Collective. A step that
  could not be kept counts as mirrored, and `mirrorFault` says why: the next step does not wait for it.
* `POST /v1/finish` `FinishRequest`: leave an export as the job's model, on or off the device; durable when it answers.
  Asked of rank 0 alone, after the last step is saved, where the trainer reports `canFinish`. Not collective.

Bodies are declared as `application/json`. Fields are added within a version of the protocol: a trainer ignores those
that it does not know, as agents do. Its group, but nobody else, may use the socket, and its group may read and write
what it exports: agent and trainer have different users. SIGTERM ends it at once: exports and checkpoints are whole or
torn, so nothing needs cleaning up.

Each answers 200 with `TrainerStatus` when the effect holds. Every request is idempotent: asked again for an effect that
holds, it answers at once; asked again while it is under way, it waits for that one. Otherwise it answers a
`TrainerError`, whose `message` names what to do:

* 409: it can't be done from the present state.
* 503: it was tried, and nothing has changed: a volume has no room, for instance. A save or finish is asked for again
  after a while, of every rank: a save is done on all of them or on none.
* 500: it failed, and nobody knows the trainer's state: its process is ended. With the error `NOT_RETRIABLE` it would
  fail again until the job's settings change, and the message names which: the job fails. A trainer that can't start
  with its settings answers so to `/v1/state`.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from colocated_rl_api.facts import TrainerState
from colocated_rl_api.wire import Version, Wire

PROTOCOL = 1  # rises when who speaks an older one can't be understood any more

NOT_RETRIABLE = "NotRetriable"
MISMATCH = "mismatch_mean"
"""This metric of a step reaches the job's page: |engine - trainer| of log-probabilities of the same weights, in nats,
as a mean over the step's tokens, the same on every rank."""


class TrainerEnvironment(StrEnum):
    """Names the environment variables that a trainer process starts with."""

    SOCKET = "COLOCATE_TRAINER_SOCKET"  # path to listen on
    CONFIG = "COLOCATE_TRAINER_CONFIG"  # JSON file: spec.trainer.config
    JOB = "COLOCATE_JOB_FILE"  # JSON file: JobFile
    MODEL = "COLOCATE_MODEL"  # directory, Hugging Face format
    CHECKPOINTS = "COLOCATE_CHECKPOINTS"  # directory shared by all ranks
    FORMER = "COLOCATE_FORMER"  # directory of a former job's checkpoints: only with spec.restoreFrom
    MIRRORS = "COLOCATE_MIRRORS"  # directory in memory, of the pod's ranks: only with spec.checkpoint.inMemory
    LINEAGE = "COLOCATE_LINEAGE"
    RANK = "RANK"
    WORLD_SIZE = "WORLD_SIZE"
    LOCAL_RANK = "LOCAL_RANK"
    MASTER_ADDR = "MASTER_ADDR"
    MASTER_PORT = "MASTER_PORT"
    DEVICE = "COLOCATE_DEVICE"  # "cpu" or "cuda:N"


class Standstill(Wire):
    """A request under way has made no progress for a while. No value of a variable is in here."""

    seconds: float  # since its last progress
    usual_s: float | None = None  # longest such time in this process's finished requests of the kind; None: none yet
    moved: int = 0  # how often `progress` has risen in this request
    where: str = ""  # what the main thread is in, innermost first: FUNCTION (FILE:LINE) < ...


class TrainerStatus(Wire):
    protocol: int = PROTOCOL
    state: TrainerState
    rank: int
    lineage: int
    step: int | None = None  # last finished; None until the checkpoint is loaded
    can_score: bool = False  # answers `/v1/score`; reported once the checkpoint is loaded
    scored: int | None = None  # newest step whose batch this process has scored, or found scored
    dirty: bool = False
    exported: Version | None = None
    saved: int | None = None  # newest durable checkpoint
    replay_from: int | None = None  # oldest step that a restart may go back to, if newer checkpoints are damaged: the
    # batches after it are kept. None: never behind `saved`
    can_mirror: bool = False  # answers `/v1/mirror`; reported once the checkpoint is loaded
    mirrored: int | None = None  # newest step that this process has kept in memory, or tried to
    mirror_fault: str = ""  # why that step could not be kept
    can_finish: bool = False  # answers `/v1/finish`; reported once the checkpoint is loaded
    finished: Version | None = None  # newest export that this process has left as the job's model
    network_fault: str = ""  # why it reaches other pods more slowly than its devices could, and what to do
    progress: int = 0  # rises while a request goes on; its deadline counts from the last rise
    standstill: Standstill | None = None  # reported once it has lasted for a while, by a trainer that measures it
    metrics: dict[str, float] = Field(default_factory=dict)  # of the last finished step


class TrainRequest(Wire):
    step: int  # the trainer must stand at step - 1, or at step: then it answers what it has
    shard: str  # path of this rank's shard, `colocated_rl_api.batch`


class ScoreRequest(Wire):
    step: int  # the trainer must stand at step - 1
    shard: str  # as for training it
    scores: str  # path beside it where this rank may keep what it found, to find it again after a restart


class ExportRequest(Wire):
    """Every rank is asked, local rank 0 writes; where pods share the directory (placement OwnDevices), rank 0."""

    version: Version
    directory: str  # made by the trainer; complete when `weights.MANIFEST` is there


class SaveRequest(Wire):
    step: int
    keep: int


class MirrorRequest(Wire):
    step: int


class FinishRequest(Wire):
    version: Version  # of the finished step, which is saved
    export: str  # path of its export, which is whole
    directory: str  # in the checkpoints' volume: complete when `weights.MANIFEST` is there


class TrainerError(Wire):
    error: str  # CamelCase, stable
    message: str
