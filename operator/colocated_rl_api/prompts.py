"""Define the sources of prompts and the rewards of their responses: `spec.rollout.prompts` of the resource.

Sources stand alone or in a mix; a set of an evaluation may have one of its own. A source of rows (a file, a dataset of
the hub) declares how its responses are rewarded; tasks and environments bring their own rewards with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field

from colocated_rl_api.names import DEFAULT_HUB
from colocated_rl_api.parts import Options, Part, Resources, is_url, one_of, should_match, url_rule

FILE_ENDINGS = JSON_LINES, PARQUET, ARROW = ".jsonl", ".parquet", ".arrow"  # of files of rows


# ------------------------------------------------------------------------------------------------------------- rewards
is_function, function_rule = should_match(
    r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*",
    "should be MODULE:FUNCTION, in Python: my_rewards:score",
)


class MathReward(Part):
    """1 if the last answer in a response equals the row's, as math-verify compares them, else 0."""

    answer_field: str = Field(
        default="answer",
        min_length=1,
        max_length=253,
        description="Member of each row that has the right answer: a number, or a text in LaTeX. Inside an object of "
        "the row: reward_model.ground_truth.",
    )
    answer_after: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Text before the answer, where that member has more: #### for gsm8k.",
    )


class HttpReward(Part):
    """An endpoint that is asked with a POST of JSON and answers {"reward": NUMBER}, perhaps with figures beside it."""

    url: Annotated[str, is_url] = Field(
        max_length=2048,
        json_schema_extra=url_rule,
        description="Where to ask. The request has prompt, response, fields (the row) and job (name, namespace, uid).",
    )
    secret_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Secret whose entry reward-token is sent as a bearer token.",
    )
    timeout_seconds: int = Field(default=60, ge=1, le=3600, description="For each attempt.")
    attempts: int = Field(
        default=5,
        ge=1,
        le=100,
        description="Most attempts for one response while others are answered; then the sample is replaced. An "
        "endpoint that answers no request costs no sample.",
    )
    max_concurrency: int = Field(default=64, ge=1, le=4096, description="Requests at the same time.")


class Reward(Part):
    """Reward of a response that ended by itself. One that the token limit cut gets 0, and nobody is asked."""

    RULES = (one_of("a reward comes from", "function", "math", "http"),)

    function: Annotated[str, is_function] | None = Field(
        default=None,
        max_length=253,
        json_schema_extra=function_rule,
        description="MODULE:FUNCTION, in the image or beside the rows. Called with the response and its row; returns a "
        "number of at most a million either way, or a dict of reward and figures.",
    )
    math: MathReward | None = Field(default=None, description="Mathematical equality with the row's answer.")
    http: HttpReward | None = Field(default=None, description="An endpoint of one's own.")


# ------------------------------------------------------------------------------------------------------------- sources
HELD_OUT_PERCENT = 10  # of a source of rollout that does not say


class _Source(Part):
    held_out_percent: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Share of prompts, by their hash, for evaluation alone. 10 in rollout.prompts, 100 in "
        "evaluation.sets when absent.",
    )


_is_task_name, _task_name_rule = should_match(
    r"[a-z0-9_]+", "should be the name of a reasoning-gym task, of a-z, 0-9 and _: chain_sum"
)


class ReasoningGym(_Source):
    """Procedural tasks with verifiable answers from the reasoning-gym package."""

    name: Annotated[str, _is_task_name] = Field(
        max_length=64, json_schema_extra=_task_name_rule, description="Task, for instance chain_sum."
    )
    config: Options = Field(default_factory=dict, description="Options of the task, handed through.")
    size: int = Field(
        default=10_000, ge=1, le=10_000_000, description="Number of problems made; they repeat after that."
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of the problems.")
    answer_after: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Text whose last occurrence precedes the answer in a response; the whole response is the answer "
        "when absent.",
    )

    @property
    def title(self) -> str:
        return f"reasoningGym {self.name!r}"


class RowSource(_Source):
    """Rows of data: which member is the prompt, and what responses are worth."""

    prompt_field: str = Field(
        default="prompt",
        min_length=1,
        max_length=253,
        description="Member of each row that is the prompt: a text, or a list of messages with role and content. "
        "In an object of the row: extra.prompt.",
    )
    reward: Reward = Field(description="What a response is worth.")
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Of the order, another one in each pass.")


_is_data_path, _data_path_rule = should_match(
    r"([A-Za-z0-9_][A-Za-z0-9._-]*/)*[A-Za-z0-9_*][A-Za-z0-9._*-]*",
    "should be a path inside the claim, without / at its ends or .. in it, with * in its last part alone: "
    "math/train-*.parquet",
)


class PromptFile(RowSource):
    """Prompts of one's own, from a volume: JSON lines, Parquet or Arrow."""

    claim_name: str = Field(
        min_length=1,
        max_length=253,
        description="Claim that holds the file, mounted read-only where rewards are computed.",
    )
    path: Annotated[str, _is_data_path] = Field(
        max_length=512,
        json_schema_extra=_data_path_rule,
        description="Path inside the claim: a .jsonl, .parquet or .arrow file, several by a * in the last part, or a "
        "directory of datasets.save_to_disk.",
    )

    @property
    def title(self) -> str:
        return f"file {self.path!r}"


_is_dataset, _dataset_rule = should_match(
    r"([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*", "should be a dataset's name: openai/gsm8k"
)


class HuggingFace(RowSource):
    """A public dataset of the Hugging Face hub, fetched when the job begins."""

    name: Annotated[str, _is_dataset] = Field(
        max_length=200, json_schema_extra=_dataset_rule, description="As on the hub: openai/gsm8k."
    )
    config: str | None = Field(
        default=None, min_length=1, max_length=200, description="Part of the dataset, when it has several."
    )
    split: str = Field(default="train", min_length=1, max_length=200, description="Split of it.")
    revision: str = Field(
        default="main",
        min_length=1,
        max_length=200,
        description="Commit, tag or branch. Only a commit stays what it is, and over other rows a job isn't continued.",
    )
    endpoint: Annotated[str, is_url] = Field(
        default=DEFAULT_HUB, max_length=512, json_schema_extra=url_rule, description="The hub, or a mirror of it."
    )

    @property
    def title(self) -> str:
        return f"huggingFace {self.name!r}"


class PromptFunction(RowSource):
    """Rows that a function of one's own makes."""

    name: Annotated[str, is_function] = Field(
        max_length=253,
        json_schema_extra=function_rule,
        description="MODULE:FUNCTION, in the image or at the top of the claim. Called with a number, 0 to size - 1; "
        "returns the row of that number, an object, and each time the same: it is asked again for each response.",
    )
    claim_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Claim that holds the module, mounted read-only where rewards are computed; the image holds it "
        "when absent.",
    )
    size: int = Field(default=10_000, ge=1, le=1_000_000, description="Number of rows; they repeat after that.")

    @property
    def title(self) -> str:
        return f"function {self.name!r}"


_is_environment, _environment_rule = should_match(
    r"([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*", "should be an environment's name: my-environment"
)


class Environment(_Source):
    """An environment of verifiers: tasks, an agent with tools, and rewards. The job plays it, an episode a sample."""

    name: Annotated[str, _is_environment] = Field(
        max_length=200,
        json_schema_extra=_environment_rule,
        description="Name of the taskset for vf-eval; its package and verifiers are in the image of the prompts.",
    )
    config: Options = Field(
        default_factory=dict,
        description="Settings that vf-eval takes as [env]: the agent's program, limits, options of the taskset.",
    )
    size: int = Field(default=10_000, ge=1, le=1_000_000, description="At most so many tasks, the first of its set.")
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Of the order, another one in each pass.")
    deadline_seconds: int = Field(
        default=600,
        ge=1,
        le=86_400,
        description="Longest time that an episode may take at a stretch without the model, for tools and rewards; "
        "past it the episode fails and is replaced.",
    )

    @property
    def title(self) -> str:
        return f"environment {self.name!r}"


SOURCES = ("reasoningGym", "file", "huggingFace", "function", "environment")


Source = ReasoningGym | PromptFile | HuggingFace | PromptFunction | Environment


class OneSource(Part):
    """Fields of which each names a source of another kind."""

    reasoning_gym: ReasoningGym | None = Field(default=None, description="Tasks and verifier of reasoning-gym.")
    file: PromptFile | None = Field(default=None, description="Files of one's own.")
    hugging_face: HuggingFace | None = Field(default=None, description="A dataset of the hub.")
    function: PromptFunction | None = Field(default=None, description="Rows that a function of one's own makes.")
    environment: Environment | None = Field(default=None, description="An environment of verifiers.")

    @property
    def source(self) -> Source | None:
        """Return the source that is named."""
        return self.reasoning_gym or self.file or self.hugging_face or self.function or self.environment


class WeightedSource(OneSource):
    """A source of a mix."""

    RULES = (one_of("a source of a mix is", *SOURCES),)

    weight: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Share of this source: of as many rows as all weights add up to, this many come from here.",
    )


class Mix(Part):
    """Several sources in fixed shares. Each goes through its data at its own pace, and begins again at its end."""

    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Of the order in which sources take turns.")
    sources: list[WeightedSource] = Field(min_length=1, max_length=16, description="Each with its own rewards.")


class Prompts(OneSource):
    """Source of prompts and their rewards, or a mix of sources."""

    RULES = (one_of("prompts come from", *SOURCES, "mix"),)

    mix: Mix | None = Field(default=None, description="Several sources, in fixed shares.")
    passes: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="The job ends after so many passes over the prompts, or after spec.steps if that is earlier. "
        "No limit when absent.",
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Image of the container that makes prompts and computes rewards, based on the rollout "
        "controller's image, which is the default.",
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Resources of that container. 100m of CPU and 256Mi of memory are requested where it names none. "
        "Its processes share the memory limit, each has its part of it.",
    )
    reward_deadline_seconds: int = Field(
        default=30,
        ge=1,
        le=3600,
        description="Longest time for a reward that this container computes, or for 64 prompts; past it the process "
        "is replaced and the sample fails.",
    )

    @property
    def sources(self) -> list[tuple[Source, int]]:
        """Return each source with its weight."""
        parts = self.mix.sources if self.mix else [self]
        return [(part.source, getattr(part, "weight", 1)) for part in parts if part.source]

    @property
    def seed(self) -> int:
        """Return the seed of the order."""
        return self.mix.seed if self.mix else self.sources[0][0].seed


# ------------------------------------------------------------------------------------------------- all sources of a job
def sources_of(prompts: Prompts, others: Iterable[OneSource]) -> list[Source]:
    """Return the sources of prompts, then the others', by their number."""
    own = [source for source, _ in prompts.sources]
    return own + [other.source for other in others if other.source]


def environments_of(sources: Sequence[Source]) -> dict[int, Environment]:
    """Return the environments that are played, by the number of their source."""
    return {number: source for number, source in enumerate(sources) if isinstance(source, Environment)}


def endpoints_of(sources: Sequence[Source]) -> dict[int, HttpReward]:
    """Return the endpoints of rewards, by the number of their source."""
    return {
        number: source.reward.http
        for number, source in enumerate(sources)
        if isinstance(source, RowSource) and source.reward.http
    }


def claim_names_of(sources: Sequence[Source]) -> list[str]:
    """Return the claims that sources lie in, each once."""
    named = (source.claim_name for source in sources if isinstance(source, PromptFile | PromptFunction))
    return sorted({claim for claim in named if claim})


def secret_names_of(sources: Sequence[Source]) -> list[str]:
    """Return the Secrets with tokens for endpoints, each once."""
    return sorted({endpoint.secret_name for endpoint in endpoints_of(sources).values() if endpoint.secret_name})
