"""The rollout controller and its task processes exchange one JSON line per message.

The processes run other people's code, so the controller accepts only lines whose form is defined here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from colocated_rl_api.job import EvaluationSet
from colocated_rl_api.prompts import Prompts

PromptContent = str | list[dict[str, Any]]
"""A prompt is a user's question, or a conversation up to where the policy speaks."""


REWARD_AT_MOST = 1e6  # either way: batches and trainers count in float32, where squares of 1e20 are infinite
RewardValue = Annotated[float, Field(allow_inf_nan=False, ge=-REWARD_AT_MOST, le=REWARD_AT_MOST)]

FIGURES_AT_MOST = 32  # beside one reward, and names in one batch
FigureName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_./-]{1,64}$")]
Figures = Annotated[dict[FigureName, RewardValue], Field(max_length=FIGURES_AT_MOST)]
"""What is known of a response beside its reward, in numbers: they reach the batch, and train nothing by themselves."""


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Greeting(_Line):
    """Begins the conversation with a process. processes: how many share the container with it, itself too.

    sets: of the evaluation, those with a source of their own. filters: functions that judge complete groups.
    model: asked by the episodes that it is to play; None: it answers prompts instead.
    """

    prompts: Prompts
    sets: tuple[EvaluationSet, ...] = ()
    filters: tuple[str, ...] = ()
    processes: int
    model: str | None = None


class Play(_Line):
    """Asks a process that plays for an episode of a row's task. address: of the gateway, for the episode's turns."""

    episode: int
    row: int
    address: str


class Stop(_Line):
    """Asks a process that plays to end an episode."""

    episode: int


class TaskReply(_Line):
    """Answers each line, in their order: with a value, or an error and its reason.

    episode: that has ended; these come in any order, and each with the reward or an error.
    """

    value: Any = None
    error: str | None = None
    reason: Literal["VerifierFailed", "RewardTimedOut", "EpisodeFailed"] = "VerifierFailed"
    episode: int | None = None


class Data(_Line):
    """Answers a greeting with what there is. ends: of the rows of each source.

    size: positions of one pass of rollout's prompts. digest: another one for other rows of them. sets_digest: another
    one for other rows of the sources of sets.
    """

    size: Annotated[int, Field(ge=1, lt=2**63)]
    digest: Annotated[str, Field(max_length=64)]
    sets_digest: Annotated[str, Field(max_length=64)] = ""
    ends: tuple[int, ...] = ()

    def size_of(self, source: int | None) -> int:
        """Return the number of rows of a source, 0 of none; None: the positions of one pass of rollout's prompts."""
        if source is None:
            return self.size
        starts = (0, *self.ends)
        return self.ends[source] - starts[source] if source < len(self.ends) else 0


class RewardAnswer(_Line):
    """Holds the reward of a response, and figures beside it. A number alone is a reward without any."""

    reward: RewardValue
    figures: Figures = {}

    @model_validator(mode="before")
    @classmethod
    def _of_a_number(cls, value: Any) -> Any:
        return {"reward": value} if isinstance(value, int | float) else value


class UnscoredRow(_Line):
    """An endpoint, and no process here, rewards this row: it is the answer to `score` instead of a number."""

    source: Annotated[int, Field(ge=0)]  # of the job's sources, from 0
    prompt: PromptContent
    fields: dict[str, Any]


class JudgedSample(TypedDict):
    """A sample of a complete group, as a filter function of the job gets it.

    tokens: of the response. truncated: the token limit ended it.
    """

    response: str
    tokens: int
    truncated: bool
    reward: float
    figures: Mapping[str, float]


class PromptRow(NamedTuple):
    """Holds a prompt, the index of its row, and whether training must not see it. prompt None: the row is played."""

    row: Annotated[int, Field(ge=0, lt=2**63)]
    prompt: PromptContent | None
    held_out: bool


FIGURES: TypeAdapter[dict[str, float]] = TypeAdapter(Figures)
PROMPT_ROWS: TypeAdapter[list[PromptRow]] = TypeAdapter(list[PromptRow])
SCORE: TypeAdapter[RewardAnswer | UnscoredRow] = TypeAdapter(RewardAnswer | UnscoredRow)
DROPPED_BY: TypeAdapter[str | None] = TypeAdapter(str | None)
