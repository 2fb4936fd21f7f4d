"""The rollout controller and its task processes exchange one JSON line per message.

The processes run other people's code, so the controller accepts only lines whose form is defined here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

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
    """The first line to a process. processes: how many share the container with it, itself too.

    sets: of the evaluation, those with a source of their own.
    model: asked by the episodes that it is to play; None: it answers prompts instead.
    """

    prompts: Prompts
    sets: tuple[EvaluationSet, ...] = ()
    processes: int
    model: str | None = None


class Play(_Line):
    """To a process that plays: an episode of the task of a row. address: of the gateway, for this episode's turns."""

    episode: int
    row: int
    address: str


class Stop(_Line):
    """To a process that plays: end an episode."""

    episode: int


class TaskReply(_Line):
    """The answer to each line, in their order: a value, or an error and its reason.

    episode: that has ended; these come in any order, and each with the reward or an error.
    """

    value: Any = None
    error: str | None = None
    reason: Literal["VerifierFailed", "RewardTimedOut", "EpisodeFailed"] = "VerifierFailed"
    episode: int | None = None


class Data(_Line):
    """The answer to a greeting: what there is. ends: of the rows of each source.

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
    """The reward of a response, and figures beside it. A number alone is a reward without any."""

    reward: RewardValue
    figures: Figures = {}

    @model_validator(mode="before")
    @classmethod
    def _of_a_number(cls, value: Any) -> Any:
        return {"reward": value} if isinstance(value, int | float) else value


class UnscoredRow(_Line):
    """A row that an endpoint rewards and no process here: the answer to `score` instead of a number."""

    source: Annotated[int, Field(ge=0)]  # of the job's sources, from 0
    prompt: PromptContent
    fields: dict[str, Any]


class PromptRow(NamedTuple):
    """A prompt, the index of its row, and held_out: it is kept from training. None: it is played, not asked."""

    row: Annotated[int, Field(ge=0, lt=2**63)]
    prompt: PromptContent | None
    held_out: bool


FIGURES: TypeAdapter[dict[str, float]] = TypeAdapter(Figures)
PROMPT_ROWS: TypeAdapter[list[PromptRow]] = TypeAdapter(list[PromptRow])
SCORE: TypeAdapter[RewardAnswer | UnscoredRow] = TypeAdapter(RewardAnswer | UnscoredRow)
