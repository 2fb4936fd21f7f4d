"""What the rollout controller and its task processes say to each other, one JSON line each.

The processes run other people's code, so the controller reads nothing of them that is not written down here.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter

from colocated_rl_api.job import Prompts

Question = str | list[dict[str, Any]]
"""What a user asks, or a conversation up to where the policy speaks."""


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Greeting(_Line):
    """The first line to a process. processes: how many share the container with it, itself too."""

    prompts: Prompts
    processes: int


class Reply(_Line):
    """The answer to each line, in their order: one of the two."""

    value: Any = None
    error: str | None = None


Index = Annotated[int, Field(ge=0, lt=2**63)]
SIZE: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(ge=1, lt=2**63)])
QUESTIONS: TypeAdapter[list[tuple[Index, Question]]] = TypeAdapter(list[tuple[Index, Question]])
REWARD: TypeAdapter[float] = TypeAdapter(FiniteFloat)
