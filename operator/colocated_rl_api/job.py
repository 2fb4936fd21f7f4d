"""Define the `ColocatedRLJob` resource, v1alpha1: the single source of the CRD, the reference page and every parser.

A field stands here together with its behaviour, never before. Bounds, defaults and rules over several fields go into
the schema; the rules are evaluated here too, from the same text (`cel`). A corpus of manifests gets the same verdict
from the API server and from here (tests/contract/test_manifest_corpus.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel

from colocated_rl_api.elastic import COUNTS, IN_RANGE, SPARES_COUNT, ElasticPolicy, not_queued
from colocated_rl_api.facts import EvaluationResult
from colocated_rl_api.failure import FailurePolicy
from colocated_rl_api.job_status import ColocatedRLJobStatus
from colocated_rl_api.ladder import Ladder, ladder_for
from colocated_rl_api.model import Model
from colocated_rl_api.names import OPERATOR
from colocated_rl_api.parts import (
    Claimed,
    Distinct,
    Options,
    Part,
    Quantity,
    Resources,
    Rule,
    Volume,
    at_most_one_of,
    fixed,
    fixed_while_running,
    inside_rule,
    is_inside,
    should_match,
)
from colocated_rl_api.pod_template import APART, PodTemplates
from colocated_rl_api.prompts import SOURCES, OneSource, Prompts, Source, function_rule, is_function, sources_of
from colocated_rl_api.rungs import Placement, ReferencePlacement, RolloutPlacement
from colocated_rl_api.scheduling import Scheduling, Topology

MANY_STEPS = 1_000_000
USUAL_PROFILE = "default"
JOB_NAME_MAX = 40  # longest derived name: NAME-trainer-REPLICA-ATTEMPT, at most 63 characters

_CLAIM = Rule(
    field="resourceClaimTemplateName",
    rule="!has(self.resourceClaimTemplateName) || self.count > 0",
    message="resourceClaimTemplateName needs a count above 0: as many devices as the template asks for",
)


def _has_counted(part: str) -> str:
    """Return CEL for it; the server also asks it of the default, {}, which it has not filled in yet."""
    return f"has(self.resources) && has(self.resources.{part}) && self.resourceName in self.resources.{part}"


_COUNTED = Rule(
    field="resources",
    rule=f"!({_has_counted('limits')} || {_has_counted('requests')})",
    message="resources may not have resourceName, which is governed by count",
    expression="'%s is governed by count: remove it from resources, and say in count how many devices a pod has'"
    ".format([self.resourceName])",
)


_ONE_SLICE = Rule(
    field="count",
    rule="!has(self.resourceName) || !self.resourceName.matches('/mig-') || self.count <= 1",
    message="a pod has one MIG slice at most: a process of CUDA sees no second one, and NCCL connects none. Use more "
    "replicas of count 1",
)


DEVICES = ("count", "resourceName", "resourceClaimTemplateName")  # of `Gpus`: what a job keeps


class Gpus(Part):
    """The devices of a pod."""

    RULES = (_CLAIM, _COUNTED, _ONE_SLICE)

    count: int = Field(default=1, ge=0, le=16, description="Devices per replica; 0 runs everything on the CPU.")
    resource_name: str = Field(
        default="nvidia.com/gpu", min_length=1, max_length=253, description="Resource that the device plugin offers."
    )
    resource_claim_template_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="ResourceClaimTemplate by which each GPU pod gets a claim for count devices (dynamic resource "
        "allocation); resourceName is used when absent.",
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Image that holds engine and trainer; the operator's default when absent.",
    )
    resources: Resources = Field(
        default_factory=Resources, description="Further resources of the GPU container (devices come from count)."
    )


_Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)]


class Sampling(Part):
    """Sampling of tokens that a trainer can follow: it computes log-probabilities of the whole distribution.

    SGLang (0.5.23, `Sampler.forward`) reports them before top-p, top-k and min-p take tokens away, and after a least
    number of tokens has taken the end token away, which a trainer does not know: rollout has none of these.
    """

    temperature: float = Field(
        default=1.0,
        ge=0.01,
        le=10,
        description="Softmax temperature of rollout and training. May change; earlier samples are corrected by their "
        "behaviour log-probabilities.",
    )
    stop: _Stops = Field(
        default_factory=list,
        description="Texts that end an answer to a prompt, and are part of it; without special tokens. Not of episodes "
        "of environments.",
    )


ROUTED_EXPERTS = "--enable-return-routed-experts"
_ADMITTED = "(self.maxStaleness + 1) * self.batchSize + self.spareGroups"
_CONCURRENCY = Rule(
    field="maxConcurrency",
    rule=f"!has(self.maxConcurrency) || self.maxConcurrency <= {_ADMITTED}",
    message="maxConcurrency must be at most (maxStaleness + 1) * batchSize + spareGroups: more groups are never "
    "admitted",
    expression="'maxConcurrency is %d, and no more than (maxStaleness + 1) * batchSize + spareGroups = %d groups are "
    f"ever admitted: write at most that'.format([self.maxConcurrency, {_ADMITTED}])",
)


def _own(what: str, condition: str, named: str) -> tuple[Rule, ...]:
    """Return the rules of a role that has pods and devices of its own in some placements: the fields of those pods.

    condition: on self.placement, in CEL. named: the placements.
    """
    is_apart = f"has(self.placement) && self.placement {condition}"
    return (
        Rule(
            "replicas",
            f"has(self.replicas) == ({is_apart})",
            f"replicas is the number of {what} pods with devices of their own: give it with placement {named}, and "
            "only there",
        ),
        Rule(
            "gpus",
            f"!has(self.gpus) || {is_apart}",
            f"gpus are the devices of {what} pods of their own: give them with placement {named}, and only there",
        ),
        Rule(
            "topology",
            f"!has(self.topology) || {is_apart}",
            f"topology is where {what} pods of their own are near one another: give it with placement {named}; for "
            "all pods with devices it is scheduling.topology",
        ),
    )


class Interruption(StrEnum):
    RESUME = "Resume"  # partial tokens kept and continued
    RETRY = "Retry"  # start over
    WAIT = "Wait"  # let finish, in time


class EngineType(StrEnum):
    SGLANG = "SGLang"


_SPANS = Rule(
    field="pods",
    rule="!has(self.pods) || self.pods == 1 || self.perPod == 1",
    message="an engine over several pods takes all devices of each: pods above 1 needs perPod 1",
)


class RolloutEngine(Part):
    """The server that generates: one or more in each pod of engines, or one over several pods."""

    RULES = (_SPANS,)

    type: EngineType = Field(default=EngineType.SGLANG, strict=False, description="Which server.")
    per_pod: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Engines in each pod, which divide its devices evenly. May change while the job is suspended.",
    )
    pods: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Pods over which each engine spans with all of their devices. It must divide the number of pods "
        "with engines. May change while the job is suspended.",
    )
    args: list[Annotated[str, Field(max_length=256)]] = Field(
        default_factory=list,
        max_length=64,
        description="Further flags of the server, one list item for each word; without --tp-size and --pp-size an "
        "engine spans all of its devices. May change while the job is suspended.",
    )


class EngineMemory(StrEnum):
    WEIGHTS = "Weights"
    KV_CACHE = "KVCache"
    CUDA_GRAPH = "CUDAGraph"


_OFFLOAD = Rule(
    field="offload",
    rule=f"!has(self.offload) || size(self.offload) == 0 || '{EngineMemory.KV_CACHE}' in self.offload",
    message="offload needs KVCache, because the KV cache is never on the devices together with gradients and optimizer "
    "state of a trainer that takes turns; [] lets engines and trainer both stay",
)


class AtMaxStaleness(StrEnum):
    WAIT = "Wait"  # the batch waits for the group
    MASK = "Mask"  # the tokens are context and not trained
    DROP = "Drop"  # the sample is discarded and replaced


class IncompleteBatch(StrEnum):
    DROP = "Drop"  # its groups are discarded
    TRAIN = "Train"  # as a batch of fewer groups


class UnversionedTokens(StrEnum):
    REFUSE = "Refuse"  # the attempt brought nothing
    ACCEPT = "Accept"  # they are trained, apart from others in counts and batch


class Filter(StrEnum):
    EQUAL_REWARDS = "EqualRewards"  # a group whose samples were all rewarded the same
    TRUNCATED = "Truncated"  # a sample that ended by the token limit


_SPARE = Rule(
    field="spareGroups",
    rule=f"self.spareGroups == 0 || self.atMaxStaleness == '{AtMaxStaleness.DROP}'",
    message="spareGroups need atMaxStaleness Drop: groups that are too old are discarded, and not waited for or masked",
)


_INCOMPLETE = Rule(
    field="incompleteBatch",
    rule=f"self.incompleteBatch == '{IncompleteBatch.DROP}' || has(self.prompts.passes)",
    message="incompleteBatch Train needs prompts.passes: without them prompts never end, and each batch is full",
)


class OverlongPenalty(Part):
    """Penalty on the reward of responses near maxResponseTokens (DAPO's soft overlong punishment)."""

    buffer_tokens: int = Field(
        ge=1,
        le=10_000_000,
        description="Last tokens before maxResponseTokens, over which the penalty rises evenly from 0 to factor.",
    )
    factor: float = Field(
        default=1.0, ge=0.001, le=1_000_000, description="Penalty of a response as long as maxResponseTokens."
    )


_OVERLONG = Rule(
    field="overlongPenalty.bufferTokens",
    rule="!has(self.overlongPenalty) || self.overlongPenalty.bufferTokens <= self.maxResponseTokens",
    message="overlongPenalty.bufferTokens must be at most maxResponseTokens, of which it is the end",
    expression="'overlongPenalty.bufferTokens is %d, and must be at most maxResponseTokens, %d, of which it is the "
    "end'.format([self.overlongPenalty.bufferTokens, self.maxResponseTokens])",
)


class Rollout(Part):
    """Generating samples, all the time, across training steps."""

    RULES = (
        _CONCURRENCY,
        _OVERLONG,
        _SPARE,
        _INCOMPLETE,
        _OFFLOAD,
        *_own("engine", f"!= '{RolloutPlacement.WITH_TRAINER}'", "OwnDevices or Both"),
        *fixed(
            *("placement", "engine.type", "replicas", "offload", "prompts"),
            *("maxPromptTokens", "maxResponseTokens"),
            *("batchSize", "groupSize", "maxStaleness", "atMaxStaleness", "interruption", "filters"),
            *("filterFunctions", "maxFilteredPerBatch", "minRolloutSeconds", "overlongPenalty", "sampling.stop"),
            *("incompleteBatch", "spareGroups", "routerReplay", "unversionedTokens"),
        ),
    )

    placement: RolloutPlacement = Field(
        default=RolloutPlacement.WITH_TRAINER,
        strict=False,
        description="WithTrainer: engines share the trainers' devices, as offload chooses. OwnDevices: they have pods "
        "and devices of their own, and rollout continues beside training. Both: some take turns with the trainers, and "
        "replicas more have their own.",
    )
    replicas: int | None = Field(default=None, ge=1, le=1024, description="Engine pods with devices of their own.")
    gpus: Gpus | None = Field(
        default=None,
        description="Devices of each of them; spec.gpus when absent.",
    )
    topology: Topology | None = Field(
        default=None,
        description="As scheduling.topology, for them alone.",
    )
    offload: Distinct[Annotated[EngineMemory, Field(strict=False)]] = Field(
        default=list(EngineMemory),
        max_length=len(EngineMemory),
        description="Memory that the engines release while the trainer works: with KVCache the two take turns, without "
        "Weights or CUDAGraph the switch is shorter, and with none ([]) rollout continues beside training.",
    )
    engine: RolloutEngine = Field(default_factory=RolloutEngine, description="The server that generates.")
    router_replay: bool = Field(
        default=False,
        description="Of a mixture of experts: batches say which experts the engines chose for each token, and training "
        "repeats their choice.",
    )
    prompts: Prompts = Field(description="Source of prompts and rewards.")
    max_prompt_tokens: int = Field(default=1024, ge=1, le=10_000_000, description="Longer prompts are not used.")
    max_response_tokens: int = Field(
        default=1024, ge=1, le=10_000_000, description="Limit of a response over all its segments."
    )
    batch_size: int = Field(ge=1, le=65_536, description="Groups (prompts) in the batch of one training step.")
    group_size: int = Field(ge=2, le=1024, description="Samples of each prompt; advantages are relative to their mean.")
    incomplete_batch: IncompleteBatch = Field(
        default=IncompleteBatch.DROP,
        strict=False,
        description="What happens to groups that fill no batch when prompts.passes are over: they are discarded "
        "(Drop), or trained as a last batch that is smaller (Train).",
    )
    max_concurrency: int | None = Field(
        default=None,
        ge=1,
        le=1_048_576,
        description="Groups in flight at most; batchSize + spareGroups when absent. May change.",
    )
    spare_groups: int = Field(
        default=0,
        ge=0,
        le=65_536,
        description="Groups beyond those that batches have places for: the first that are complete fill a batch. Those "
        "that are too old for every later one are discarded, complete or not, and others take their place. Needs "
        "atMaxStaleness Drop.",
    )
    max_staleness: int = Field(
        default=1,
        ge=0,
        le=64,
        description="Oldest weights, in steps behind the step that trains a token, that may have made it. "
        "0 trains only on the current policy.",
    )
    at_max_staleness: AtMaxStaleness = Field(
        default=AtMaxStaleness.WAIT,
        strict=False,
        description="What happens to a group that would grow too stale: its batch waits for it (Wait), its stale "
        "tokens are not trained (Mask), or its stale samples are replaced (Drop).",
    )
    unversioned_tokens: UnversionedTokens = Field(
        default=UnversionedTokens.REFUSE,
        strict=False,
        description="What happens to tokens for which an engine names no weight version of the job, because somebody "
        "else updated it: the attempt is repeated (Refuse), or they are kept and trained, apart from others in every "
        "count and in the batch (Accept).",
    )
    interruption: Interruption = Field(
        default=Interruption.RESUME,
        strict=False,
        description="What a switch does to unfinished samples: keep their tokens and continue (Resume), start over "
        "(Retry), or let them finish until shortly before switch.settleSeconds (Wait).",
    )
    filters: list[Annotated[Filter, Field(strict=False)]] = Field(
        default_factory=list,
        max_length=2,
        description="Samples that are replaced instead of trained: groups without a learning signal (EqualRewards), "
        "and samples that the token limit cut (Truncated).",
    )
    filter_functions: Distinct[Annotated[str, Field(max_length=253, json_schema_extra=function_rule), is_function]] = (
        Field(
            default_factory=list,
            max_length=8,
            description="MODULE:FUNCTION, in the image or beside the rows. Called with the samples of a complete group "
            "and their row; returns whether the group is kept. One that is not is replaced.",
        )
    )
    max_filtered_per_batch: int | None = Field(
        default=None,
        ge=1,
        le=1_048_576,
        description="Most groups that filters keep from one batch; further ones are trained, and the status shows "
        "NoLearningSignal. 4 * batchSize when absent.",
    )
    min_rollout_seconds: int = Field(
        default=0,
        ge=0,
        le=86_400,
        description="Shortest time between a step and the next batch, because a switch costs the same after a short "
        "rollout; a batch is sealed earlier only if nothing more may be generated.",
    )
    overlong_penalty: OverlongPenalty | None = Field(
        default=None,
        description="Penalty on the reward of long responses in training; episodes and sessions of clients have none.",
    )
    sampling: Sampling = Field(default_factory=Sampling, description="How tokens are drawn.")
    resources: Resources = Field(
        default_factory=Resources,
        description="Resources of the rollout controller. 200m of CPU and 512Mi of memory are requested where it names "
        "none. May change while the job is suspended.",
    )

    @property
    def engine_flags(self) -> list[str]:
        """Further flags of the server: those of the job, and what its other fields need."""
        needed = [ROUTED_EXPERTS] if self.router_replay else []
        return [*self.engine.args, *(flag for flag in needed if flag not in self.engine.args)]

    @property
    def is_apart(self) -> bool:
        """Return whether all engines have pods and devices of their own."""
        return self.placement is RolloutPlacement.OWN_DEVICES

    @property
    def accepts_unversioned(self) -> bool:
        """Return whether tokens without a weight version may be trained."""
        return self.unversioned_tokens is UnversionedTokens.ACCEPT

    @property
    def concurrency(self) -> int:
        """Return how many groups may be in flight."""
        return self.batch_size + self.spare_groups if self.max_concurrency is None else self.max_concurrency

    @property
    def filtered_at_most(self) -> int:
        """Return how many groups filters may keep from one batch."""
        return 4 * self.batch_size if self.max_filtered_per_batch is None else self.max_filtered_per_batch


class EvaluationSampling(Part):
    """Sampling of an evaluation's tokens: nothing is trained on them."""

    temperature: float | None = Field(
        default=None, ge=0, le=10, description="Softmax temperature, 0 for greedy; that of rollout when absent."
    )
    top_p: float = Field(
        default=1.0, ge=0.001, le=1, description="Only the most likely tokens, with this probability together."
    )
    top_k: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Only so many of the most likely tokens; all when absent."
    )
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="Only tokens at least so likely, relative to the most likely one."
    )
    min_tokens: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        description="No end token is drawn before so many tokens; limit and stop end an answer all the same.",
    )
    stop: _Stops | None = Field(
        default=None, description="Texts that end an answer and are part of it; those of rollout when absent."
    )


_is_set_name, _set_name_rule = should_match(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "should be of a-z, 0-9 and -, without - at its ends: aime-2024"
)
_OWN_PROMPTS = " || ".join(f"has(each.{source})" for source in SOURCES)


class EvaluationSet(OneSource):
    """Prompts that are evaluated together: held-out ones of rollout, or those of a source of its own."""

    RULES = (
        at_most_one_of("the prompts of a set come from", *SOURCES),
        *(
            rule._replace(
                message=f"{rule.field} can't change: give the set another name, so that its results stay apart"
            )
            for rule in fixed(*SOURCES)
        ),
    )

    name: Annotated[str, _is_set_name] = Field(
        min_length=1,
        max_length=63,
        json_schema_extra=_set_name_rule,
        description="Its results are reported under this name, once in the list.",
    )
    samples: int = Field(
        default=400, ge=1, le=1_000_000, description="Number of prompts, the first ones; all if there are fewer."
    )
    responses: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Responses to each of them. With more than one the result also has the mean of the best of each "
        "prompt, and of the best of 2, 4, 8 ... of them: pass@k where rewards are 0 or 1.",
    )
    sampling: EvaluationSampling = Field(
        default_factory=EvaluationSampling,
        description="Of answers to prompts; episodes of environments are drawn as in rollout.",
    )
    max_response_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Limit of an answer to a prompt; that of rollout when absent.",
    )


def _check_names(sets: list[EvaluationSet]) -> list[EvaluationSet]:
    names = [each.name for each in sets]
    if len(set(names)) != len(names):
        raise ValueError(f"names should differ: {', '.join(names)} has one of them twice")
    return sets


class Evaluation(Part):
    """Mean reward on sets of prompts, beside rollout: before the first step, every few steps and after the last."""

    every_steps: int = Field(default=10, ge=1, le=1_000_000, description="Steps between evaluations.")
    sets: Annotated[list[EvaluationSet], AfterValidator(_check_names)] = Field(
        default=[EvaluationSet(name="held-out")],
        min_length=1,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        description="What is evaluated, in this order. A set without a source has prompts that rollout holds out; one "
        "with a source is added while the job is suspended.",
    )
    deadline_seconds: int = Field(
        default=1800,
        ge=1,
        le=604_800,
        description="The switch waits for an evaluation of all sets at most this long.",
    )

    def lacking(self, results: Iterable[EvaluationResult], step: int) -> list[EvaluationSet]:
        """Return the sets without a result of the weights of `step`, or of newer ones."""
        done = {result.name for result in results if result.step >= step}
        return [each for each in self.sets if each.name not in done]


class Reference(Part):
    """The frozen policy that KL is measured against, on the devices of another role or on its own."""

    RULES = (*_own("reference", f"== '{ReferencePlacement.OWN_DEVICES}'", "OwnDevices"), *fixed("placement"))

    placement: ReferencePlacement = Field(
        default=ReferencePlacement.WITH_TRAINER,
        strict=False,
        description="WithTrainer: trainers score each batch before its step, by a copy in host memory. WithRollout, "
        "OwnDevices: samples are scored as they finish, by a process beside engines that stay on their devices, or in "
        "pods of its own.",
    )
    replicas: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Reference pods, where it has devices of its own. May change while the job is suspended.",
    )
    gpus: Gpus | None = Field(
        default=None,
        description="Devices of each pod; each device holds the whole model. spec.gpus when absent. May change "
        "while the job is suspended.",
    )
    topology: Topology | None = Field(
        default=None,
        description="As scheduling.topology, for them alone.",
    )

    @property
    def is_with_rollout(self) -> bool:
        """Return whether the reference shares pods and devices of the engines."""
        return self.placement is ReferencePlacement.WITH_ROLLOUT

    @property
    def is_stage_of_rollout(self) -> bool:
        """Return whether samples are scored as they finish, and not by the trainers."""
        return self.placement is not ReferencePlacement.WITH_TRAINER


class TrainerMemory(StrEnum):
    PARAMETERS = "Parameters"
    GRADIENTS = "Gradients"
    OPTIMIZER = "Optimizer"


_STATE = Rule(
    field="offload",
    rule="!has(self.offload) || "
    f"'{TrainerMemory.GRADIENTS}' in self.offload && '{TrainerMemory.OPTIMIZER}' in self.offload",
    message="offload needs Gradients and Optimizer, because they are never on the devices together with the KV cache "
    "of an engine that takes turns; Parameters may stay",
)


class Trainer(Part):
    """The training side: any program that speaks the trainer protocol."""

    RULES = (_STATE,)

    command: list[Annotated[str, Field(max_length=1024)]] = Field(
        default=["python3", "-m", "colocated_rl_trainer"],
        min_length=1,
        max_length=64,
        description="Command of each trainer rank, in the GPU container.",
    )
    config: Options = Field(default_factory=dict, description="Handed to the trainer as a file, as it stands.")
    offload: Distinct[Annotated[TrainerMemory, Field(strict=False)]] = Field(
        default=list(TrainerMemory),
        min_length=1,
        max_length=len(TrainerMemory),
        description="Trainer state that moves to host memory while the engines have the devices; Parameters may stay "
        "where there is room.",
    )


class Mode(StrEnum):
    FULL = "Full"
    ROLLOUT_ONLY = "RolloutOnly"
    TRAIN_ONLY = "TrainOnly"


class Recording(Part):
    """Sealed batches that a job has left: files STEP-SHARD.safetensors, from step 1 on."""

    claim_name: str = Field(
        min_length=1,
        max_length=253,
        description="Claim in the job's namespace that holds them, such as the store of the job that made them; "
        "mounted read-only.",
    )
    path: Annotated[str, is_inside] = Field(
        default="batches",
        max_length=512,
        json_schema_extra=inside_rule,
        description="Directory inside the claim; where a store has them when absent.",
    )


_RECORDED = Rule(
    field="recorded",
    rule=f"has(self.recorded) == (has(self.mode) && self.mode == '{Mode.TRAIN_ONLY}')",
    message="recorded names the batches that a TrainOnly job trains: give it there, and nowhere else",
)
_EVALUATED = Rule(
    field="evaluation",
    rule=f"!has(self.evaluation) || !has(self.mode) || self.mode != '{Mode.TRAIN_ONLY}'",
    message="evaluation needs engines, and a TrainOnly job has none: leave it out",
)


class Verify(StrEnum):
    VERSION = "Version"  # the engine names the version it holds
    WEIGHTS = "Weights"  # and was shown to hold it: by checksums of its memory, and by a probe of its outputs


class WeightSync(Part):
    """Transport of new weights to the engines: safetensors, in memory shared with the trainer or on a volume."""

    size_limit: Quantity = Field(
        default="8Gi",
        description="Size of the memory-backed volume for weights, twice that of the model. Counts as pod memory. May "
        "change while the job is suspended.",
    )
    volume: Claimed = Field(
        default_factory=Claimed,
        description="Volume, ReadWriteMany, through which engines with devices of their own read new weights; it "
        "needs twice their size.",
    )
    verify: Verify = Field(
        default=Verify.WEIGHTS,
        strict=False,
        description="Proof that an engine holds new weights before its gate opens: their version (Version), or also "
        "that parameters changed where the exports differ, that checksums of all engines agree, and that "
        "log-probabilities are as near the trainer's as when the engine had just started (Weights). May change while "
        "the job is suspended.",
    )


class Switch(Part):
    """Deadlines of a switch. Past one, the engine is replaced or the trainers start again: never 'go on anyway'."""

    settle_seconds: int = Field(
        default=30, ge=1, le=3600, description="From the closing of the gate to nothing in flight."
    )
    engine_call_seconds: int = Field(
        default=60,
        ge=1,
        le=3600,
        description="For each pause, flush, release, resume, weight update and checksum. A weight update has a second "
        "more for each 100 MB of weights, up to engineStartSeconds.",
    )
    engine_start_seconds: int = Field(
        default=900, ge=1, le=7200, description="From an engine's start to its first answer."
    )
    trainer_start_seconds: int = Field(
        default=900, ge=1, le=7200, description="From a trainer's start to the loaded checkpoint, all ranks joined."
    )
    trainer_progress_seconds: int = Field(
        default=1800,
        ge=1,
        le=86_400,
        description="For each onload, step, export, offload and save of a trainer, and to keep a step in memory.",
    )


_MILESTONE = Rule(
    field="milestoneEverySteps",
    rule="!has(self.milestoneEverySteps) || self.milestoneEverySteps % self.everySteps == 0",
    message="milestoneEverySteps must be a multiple of everySteps, which is 10 when absent: no other step is saved",
)


class InMemory(Part):
    """The state after the newest step in host memory, each part in two pods, between checkpoints."""

    size_limit: Quantity = Field(
        description="Size of the memory-backed volume for it in each pod: four times the state of the pod's ranks, "
        "12 bytes a parameter by the default trainer; twice in a job of one pod. Counts as pod memory.",
    )


class Checkpoint(Part):
    """Checkpoints of the trainer, on a volume of the job."""

    RULES = (_MILESTONE,)

    every_steps: int = Field(
        default=10,
        ge=1,
        le=1_000_000,
        description="Steps between checkpoints; also after the last. May change while the job is suspended.",
    )
    keep: int = Field(
        default=2,
        ge=1,
        le=1000,
        description="Checkpoints kept, with the sealed batches since the oldest of them. May change while the job is "
        "suspended.",
    )
    milestone_every_steps: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Checkpoints of these steps are kept beside those, for restoreFrom of other jobs; this one never "
        "goes back to them. None when absent. May change while the job is suspended.",
    )
    in_memory: InMemory | None = Field(
        default=None,
        description="The state after each step without a checkpoint is kept in the memory of pods, so that the loss of "
        "a trainer, or of one of several pods, repeats at most one step. Off when absent. May change while the job is "
        "suspended.",
    )
    volume: Volume = Field(
        default_factory=Volume,
        description="Volume of checkpoints, ReadWriteMany for several replicas; it must hold keep + 1 checkpoints and "
        "the milestones, of 12 bytes a parameter by the default trainer.",
    )


class FormerSamples(Part):
    """The store of a former job's samples."""

    claim_name: str = Field(
        min_length=1, max_length=253, description="Claim in the job's namespace; mounted read-only, and copied."
    )
    path: Annotated[str, is_inside] = Field(
        default=".",
        max_length=512,
        json_schema_extra=inside_rule,
        description="Directory inside the claim that has store.sqlite3 and batches.",
    )


class RestoreFrom(Part):
    """A checkpoint of a former job, which takes the place of the model as what training begins from."""

    claim_name: str = Field(
        min_length=1,
        max_length=253,
        description="Claim in the job's namespace, such as a former job's or one restored from a backup; mounted "
        "read-only by trainers and rollout controller, as long as the job exists.",
    )
    path: Annotated[str, is_inside] = Field(
        default=".",
        max_length=512,
        json_schema_extra=inside_rule,
        description="Directory inside the claim that has directories step-00000010 and so on.",
    )
    step: int | None = Field(
        default=None, ge=1, le=MANY_STEPS, description="Step of the checkpoint; the newest when absent."
    )
    samples: FormerSamples | None = Field(
        default=None,
        description="Samples, sealed batches and evaluations of that job are continued. When absent, the job has no "
        "samples, and prompts continue after the checkpoint.",
    )


_ADDED_SETS = Rule(
    field="evaluation",
    rule="(has(oldSelf.suspend) && oldSelf.suspend) || !has(self.evaluation) || "
    f"self.evaluation.sets.all(each, !({_OWN_PROMPTS}) || "
    "has(oldSelf.evaluation) && oldSelf.evaluation.sets.exists(old, old.name == each.name))",
    message="evaluation.sets gains a set with a source only between runs: set suspend to true, add it, and set suspend "
    "to false again",
)
_DIVIDED = (
    Rule(
        field="rollout.engine.perPod",
        rule="has(self.rollout.gpus) || self.gpus.count % self.rollout.engine.perPod == 0",
        message="rollout.engine.perPod must divide gpus.count: each engine has as many devices of the pod as any other",
        expression="'rollout.engine.perPod is %d, which does not divide the %d devices of gpus.count: each engine has "
        "as many devices of the pod as any other'.format([self.rollout.engine.perPod, self.gpus.count])",
    ),
    Rule(
        field="rollout.engine.perPod",
        rule="!has(self.rollout.gpus) || self.rollout.gpus.count % self.rollout.engine.perPod == 0",
        message="rollout.engine.perPod must divide rollout.gpus.count: each engine has as many devices of the pod as "
        "any other",
    ),
    Rule(
        field="rollout.engine.pods",
        rule="has(self.rollout.replicas) || self.replicas % self.rollout.engine.pods == 0",
        message="rollout.engine.pods must divide replicas: each engine has as many pods as any other",
        expression="'rollout.engine.pods is %d, which does not divide the %d replicas: each engine has as many pods as "
        "any other'.format([self.rollout.engine.pods, self.replicas])",
    ),
    Rule(
        field="rollout.engine.pods",
        rule="!has(self.rollout.replicas) || self.rollout.replicas % self.rollout.engine.pods == 0",
        message="rollout.engine.pods must divide rollout.replicas: each engine has as many pods as any other",
    ),
    Rule(
        field="elasticPolicy",
        rule="!has(self.elasticPolicy) || has(self.rollout.replicas) || self.rollout.engine.pods == 1",
        message="elasticPolicy leaves single pods out, and with rollout.engine.pods above 1 an engine would lack one: "
        "give only one of both",
    ),
)
_BOTH = Rule(
    field="rollout.placement",
    rule=f"!has(self.rollout.placement) || self.rollout.placement != '{RolloutPlacement.BOTH}' || "
    "size(self.rollout.offload) > 0 && self.rollout.engine.pods == 1 && "
    "(!has(self.rollout.gpus) || self.rollout.gpus.count == self.gpus.count)",
    message="placement Both needs engines that take turns with trainers (offload other than []), of one pod each "
    "(engine.pods 1), all of one shape (rollout.gpus.count as gpus.count): their checksums are compared",
)
_BESIDE_ENGINES = Rule(
    field="reference.placement",
    rule="!has(self.reference) || !has(self.reference.placement) || "
    f"self.reference.placement != '{ReferencePlacement.WITH_ROLLOUT}' || size(self.rollout.offload) == 0 || "
    f"has(self.rollout.placement) && self.rollout.placement == '{RolloutPlacement.OWN_DEVICES}'",
    message="reference.placement WithRollout needs engines that stay on their devices (rollout.offload [] or placement "
    "OwnDevices): these make room for trainers, and it would not; use WithTrainer",
)
_HAS_REFERENCE = Rule(
    field="reference",
    rule="has(self.reference) == has(oldSelf.reference)",
    message="reference can't change once the job exists: make a new job with the new value",
)
_REFERENCE_GPUS = Rule(  # of which only the pods depend: scores are those of spec.model on any devices
    field="reference.gpus",
    rule="(has(oldSelf.suspend) && oldSelf.suspend) || !has(self.reference) || !has(oldSelf.reference) || "
    "has(self.reference.gpus) == has(oldSelf.reference.gpus) && "
    "(!has(self.reference.gpus) || self.reference.gpus == oldSelf.reference.gpus)",
    message="reference.gpus can't change while the job runs: set suspend to true, change it, and set suspend to false "
    "again",
)
_RESTORED = Rule(
    field="restoreFrom",
    rule=f"!has(self.restoreFrom) || !has(self.mode) || self.mode != '{Mode.ROLLOUT_ONLY}'",
    message="restoreFrom is what trainers begin from, and a RolloutOnly job has none: leave it out",
)


class Storage(Part):
    """The sample store of the rollout controller."""

    volume: Volume = Field(default_factory=Volume, description="Local or block storage: SQLite needs real locks.")
    keep_batches: bool = Field(
        default=False,
        description="Keep sealed batches that checkpoints no longer need: a recording, which a TrainOnly job can "
        "train.",
    )


_is_manager, _manager_rule = should_match(
    r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?",
    f"should be a domain, / and a name: {OPERATOR}",
)
_TEN_YEARS_S = 315_360_000
_is_profile, _profile_rule = should_match(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "should be of a-z, 0-9 and -, without - at its ends: rdma"
)


class ColocatedRLJobSpec(Part):
    """Desired state of the job: model, devices, duration."""

    RULES = (
        _RECORDED,
        _EVALUATED,
        _ADDED_SETS,
        _BESIDE_ENGINES,
        _HAS_REFERENCE,
        _REFERENCE_GPUS,
        _RESTORED,
        IN_RANGE,
        COUNTS,
        SPARES_COUNT,
        *_DIVIDED,
        _BOTH,
        *APART,
        *fixed(
            *("mode", "recorded", "model", "restoreFrom", "storage", "managedBy"),
            *(f"{gpus}.{field}" for gpus in ("gpus", "rollout.gpus?") for field in DEVICES),
            *("weightSync.volume", "checkpoint.volume"),
        ),
        *fixed_while_running(
            *(f"{gpus}.{field}" for gpus in ("gpus", "rollout.gpus?") for field in ("image", "resources")),
            *(
                "rollout.engine.args",
                "rollout.engine.perPod",
                "rollout.engine.pods",
                "rollout.resources",
                "weightSync.sizeLimit",
                "weightSync.verify",
            ),
            *("checkpoint.everySteps", "checkpoint.keep", "checkpoint.milestoneEverySteps", "checkpoint.inMemory"),
            *("trainer", "switch", "podTemplates", "profile", "scheduling"),
        ),
    )

    steps: int = Field(
        ge=1, le=MANY_STEPS, description="Training steps; the job is complete after the last. May change."
    )
    mode: Mode = Field(
        default=Mode.FULL,
        strict=False,
        description="Full trains on its own rollout; RolloutOnly generates and records batches without a trainer; "
        "TrainOnly trains recorded batches without an engine.",
    )
    recorded: Recording | None = Field(default=None, description="What a TrainOnly job trains.")
    suspend: bool = Field(
        default=False,
        description="True ends the job's pods, which frees its devices, and keeps its volumes; false continues the "
        "job. May change.",
    )
    replicas: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Number of GPU pods. May change: the group uses the new number from its next step, or when it is "
        "resumed, and no sample is lost. From one to more only while the job is suspended.",
    )
    model: Model = Field(description="Starting weights.")
    restore_from: RestoreFrom | None = Field(
        default=None,
        description="Former checkpoint to continue from. Model and optimizer must be those of that job. The reference "
        "stays spec.model.",
    )
    gpus: Gpus = Field(
        default_factory=Gpus,
        description="Devices of each replica, shared by its engine and its trainer. Image and resources may change "
        "while the job is suspended.",
    )
    rollout: Rollout = Field(description="Generating samples.")
    evaluation: Evaluation | None = Field(
        default=None, description="No evaluation when absent. May change, for the next one."
    )
    reference: Reference | None = Field(
        default=None,
        description="Frozen policy that KL is measured against: the initial model scores everything before it is "
        "trained. No reference when absent. The devices and the number of pods of its own may change while the job is "
        "suspended.",
    )
    trainer: Trainer = Field(
        default_factory=Trainer, description="Training on them. May change while the job is suspended."
    )
    weight_sync: WeightSync = Field(default_factory=WeightSync, description="How new weights reach the engines.")
    switch: Switch = Field(
        default_factory=Switch, description="Deadlines of a switch. May change while the job is suspended."
    )
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Checkpoints of the trainer.")
    storage: Storage = Field(default_factory=Storage, description="Store of the rollout controller.")
    pod_templates: PodTemplates = Field(
        default_factory=PodTemplates,
        description="Where pods run, under which names, and what they have beside. May change while the job is "
        "suspended.",
    )
    profile: Annotated[str, _is_profile] = Field(
        default=USUAL_PROFILE,
        min_length=1,
        max_length=63,
        json_schema_extra=_profile_rule,
        description="What an admin lets its pods have: a profile of the operator's chart. May change while the job is "
        "suspended.",
    )
    scheduling: Scheduling = Field(
        default_factory=Scheduling,
        description="Placement of pods with devices. May change while the job is suspended.",
    )
    backoff_limit: int = Field(
        default=6,
        ge=0,
        le=1000,
        description="Failures within backoffWindowSteps after which trainers are started again; one more fails the "
        "job. May change.",
    )
    backoff_window_steps: int = Field(
        default=10,
        ge=1,
        le=MANY_STEPS,
        description="Number of finished steps after which a failure no longer counts against backoffLimit. May change.",
    )
    retries: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Number of retries asked for: raising it, as `kubectl crlj retry` does, continues a failed job "
        "from its newest checkpoint. May change.",
    )
    spares: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Pods like those of replicas that have started, hold their devices and compute nothing: where a "
        "pod of the group is lost and no node has room for another, one of them gives its room within seconds. May "
        "change; of a job with one replica from none to some only while it is suspended.",
    )
    elastic_policy: ElasticPolicy | None = Field(
        default=None,
        description="How the job continues with fewer replicas while there is no room for all. When absent, it waits "
        "for all. May change.",
    )
    failure_policy: FailurePolicy = Field(
        default_factory=FailurePolicy,
        description="What is done about failures, by cause, and after how long. May change.",
    )
    pods_ready_deadline_seconds: int = Field(
        default=1800,
        ge=1,
        le=604_800,
        description="Time in which all members must answer after a start or a loss; past it the job gives its devices "
        "back and is queued. May change.",
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=_TEN_YEARS_S,
        description="Time from status.startTime after which a job that is not complete fails. No limit when absent. "
        "May change.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        le=_TEN_YEARS_S,
        description="Time from completion or failure to the deletion of the job and its pods; never when absent. May "
        "change.",
    )
    managed_by: Annotated[str, Field(max_length=63, json_schema_extra=_manager_rule), _is_manager] | None = Field(
        default=None,
        description=f"Controller that acts on the job: {OPERATOR}, which is meant when absent. A job of another one is "
        "left alone, its status and finalizers too.",
    )

    @property
    def not_queued(self) -> dict[str, str]:
        """Return the fields that the job may not have in a queue: why, by name."""
        has = {"elasticPolicy": self.elastic_policy is not None, "spares": self.spares > 0}
        return {field: not_queued(field) for field in has if has[field]}

    @property
    def own_sets(self) -> list[EvaluationSet]:
        """Return the sets of the evaluation that have a source of their own."""
        return [each for each in (self.evaluation.sets if self.evaluation else ()) if each.source]

    @property
    def sources(self) -> list[Source]:
        """Return the sources of all prompts by their number: those of rollout, then those of `own_sets`."""
        return sources_of(self.rollout.prompts, self.own_sets)

    @property
    def set_sources(self) -> dict[int, Source]:
        """Return the sources of `own_sets` by their number, which is behind those of rollout."""
        return dict([*enumerate(self.sources)][len(self.rollout.prompts.sources) :])

    @property
    def placement(self) -> Placement:
        """Return which side computes when."""
        match self.mode:
            case Mode.FULL if self.rollout.is_apart:
                return Placement.DISAGGREGATED
            case Mode.FULL if self.rollout.placement is RolloutPlacement.BOTH:
                return Placement.MIXED
            case Mode.FULL:
                return Placement.TIME_SLICED if self.rollout.offload else Placement.RESIDENT
            case Mode.ROLLOUT_ONLY:
                return Placement.ROLLOUT_ONLY
            case Mode.TRAIN_ONLY:
                return Placement.TRAIN_ONLY

    @property
    def engine_gpus(self) -> Gpus:
        """Return the devices of each pod with an engine."""
        return self.rollout.gpus or self.gpus

    @property
    def compares_engines(self) -> bool:
        """Return whether new weights serve only once the engines' checksums are equal; one engine needs no peer."""
        engine, pods = self.rollout.engine, self.rollout.replicas or 0
        pods += 0 if self.rollout.is_apart else self.replicas
        return self.judges_weights and pods // engine.pods * engine.per_pod > 1

    @property
    def judges_weights(self) -> bool:
        """Return whether an engine has to be shown to hold new weights; where none are trained there are none."""
        return self.weight_sync.verify is Verify.WEIGHTS and self.ladder.trains and self.ladder.serves

    @property
    def reference_gpus(self) -> Gpus:
        """Return the devices of each pod with a reference that is no trainer's."""
        if self.reference is not None and self.reference.is_with_rollout:
            return self.engine_gpus
        return (self.reference and self.reference.gpus) or self.gpus

    @property
    def scores_beside_engines(self) -> bool:
        """Return whether each pod with an engine has a process of the reference. Recorded batches have its scores."""
        reference = self.reference
        return reference is not None and reference.is_with_rollout and self.mode is not Mode.TRAIN_ONLY

    @property
    def seals_with_scores(self) -> bool:
        """Return whether the reference, a stage of rollout, scores each sample before it enters a batch."""
        return self.reference is not None and self.reference.is_stage_of_rollout

    @property
    def max_staleness(self) -> int:
        """Return it in steps; where weights never change no token is ever too old."""
        return MANY_STEPS if self.mode is Mode.ROLLOUT_ONLY else self.rollout.max_staleness

    @property
    def ladder(self) -> Ladder:
        scores = self.reference is not None and not self.seals_with_scores
        return ladder_for(self.placement, scores=scores, spans=self.rollout.engine.pods > 1)


_JOB_NAME_WORDS = (
    f"must be at most {JOB_NAME_MAX} of a-z, 0-9 and '-', begin with a letter and not end with '-': "
    "names of pods are derived from it"
)
_JOB_NAME = Rule(
    field="metadata.name",
    rule=f"size(self.metadata.name) <= {JOB_NAME_MAX} && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    message=f"metadata.name {_JOB_NAME_WORDS}",
    expression=f'"metadata.name %s {_JOB_NAME_WORDS}".format([self.metadata.name])',
)


_HAS_NO_PODS = (  # whoever makes pods first records its name
    "has(oldSelf.spec.suspend) && oldSelf.spec.suspend && "
    "(!has(oldSelf.status) || !has(oldSelf.status.operator) || "
    "has(oldSelf.status.phase) && oldSelf.status.phase == 'Suspended')"
)
_REPLICAS = Rule(
    field="spec.replicas",
    rule="has(self.spec.replicas) == has(oldSelf.spec.replicas) && "
    "(!has(self.spec.replicas) || self.spec.replicas == oldSelf.spec.replicas) || "
    "has(oldSelf.status) && has(oldSelf.status.groupReplicas) && "  # it is on record, whatever the spec says
    f"has(oldSelf.spec.replicas) && oldSelf.spec.replicas > 1 || {_HAS_NO_PODS}",
    message="replicas can't change from one to more while the job has pods, nor before it has started: "
    "set suspend to true, change it once condition Suspended is true, and set suspend to false again",
)


_REFERENCE_REPLICAS = Rule(
    field="spec.reference.replicas",
    rule="!has(self.spec.reference) || !has(self.spec.reference.replicas) || !has(oldSelf.spec.reference) || "
    "!has(oldSelf.spec.reference.replicas) || self.spec.reference.replicas == oldSelf.spec.reference.replicas || "
    f"{_HAS_NO_PODS}",
    message="reference.replicas can't change while the job has pods: set suspend to true, change it once condition "
    "Suspended is true, and set suspend to false again",
)
_SPARES = Rule(
    field="spec.spares",
    rule="!has(self.spec.spares) || self.spec.spares == 0 || "
    "has(oldSelf.spec.spares) && oldSelf.spec.spares > 0 || "
    f"has(oldSelf.spec.replicas) && oldSelf.spec.replicas > 1 || {_HAS_NO_PODS}",
    message="a job with one replica can't get spares while it has pods, as only one may mount its checkpoints: set "
    "suspend to true, change it once condition Suspended is true, and set suspend to false again",
)


class Metadata(BaseModel):
    """The part of ObjectMeta that is read here; the rest passes."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="allow")

    name: str
    namespace: str | None = None
    uid: str | None = None
    generation: int | None = None
    resource_version: str | None = None

    @field_validator("name")
    @classmethod
    def _leaves_room_for_derived_names(cls, name: str) -> str:
        if words := _JOB_NAME.complaint({"metadata": {"name": name}}):
            raise ValueError(words)
        return name


class ColocatedRLJob(BaseModel):
    """A reinforcement-learning post-training job whose rollout engines and trainer share GPUs."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        _JOB_NAME,
        _REPLICAS,
        _SPARES,
        _REFERENCE_REPLICAS,
    )  # the first is checked by `Metadata`, the others on changes
    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="forbid")

    api_version: Literal["rl.colocate.dev/v1alpha1"]
    kind: Literal["ColocatedRLJob"]
    metadata: Metadata
    spec: ColocatedRLJobSpec
    status: ColocatedRLJobStatus | None = None

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """Return the job of a manifest, or as the API server sent it.

        Raises ValidationError where the server would refuse it.
        """
        return cls.model_validate(dict(document), by_alias=True, by_name=False)
