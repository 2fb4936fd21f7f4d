"""Define where a job's starting weights come from: `spec.model` of the resource.

All pods of a job must read the same files, also one that is replaced a week later. So a model of the hub is named by a
commit, never by a branch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from colocated_rl_api.names import DEFAULT_HUB
from colocated_rl_api.parts import (
    Part,
    at_most_one_of,
    inside_rule,
    is_inside,
    is_path,
    is_url,
    one_of,
    path_rule,
    should_match,
    url_rule,
)

_is_model, _model_rule = should_match(
    r"([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*", "should be a model's name: Qwen/Qwen3-0.6B"
)
_is_commit, _commit_rule = should_match(
    r"[0-9a-f]{40}",
    "should be a commit, 40 hexadecimal digits: a branch may move while the job runs "
    "(git ls-remote https://huggingface.co/NAME HEAD prints the newest)",
)


class PullPolicy(StrEnum):
    """When a node pulls an image, as of a container."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ModelClaim(Part):
    """A claim that holds a model."""

    name: str = Field(min_length=1, max_length=253, description="Claim in the job's namespace; mounted read-only.")
    path: Annotated[str, is_inside] = Field(
        default=".",
        max_length=512,
        json_schema_extra=inside_rule,
        description="Directory inside the claim, in Hugging Face format, with tokenizer and chat template.",
    )


class ModelImage(Part):
    """An OCI image, or another artifact of a registry, that holds a model. Each node pulls it once."""

    reference: str = Field(
        min_length=1,
        max_length=512,
        description="registry/models/qwen3@sha256:... A tag may move. The cluster needs image volumes (from 1.35 on).",
    )
    pull_policy: PullPolicy | None = Field(
        default=None, strict=False, description="Kubernetes' own default when absent: Always for :latest."
    )
    path: Annotated[str, is_inside] = Field(
        default=".", max_length=512, json_schema_extra=inside_rule, description="Directory inside the image."
    )


class HubModel(Part):
    """A model of the Hugging Face hub, fetched and verified before a pod's containers start."""

    RULES = (at_most_one_of("the model is kept by", "cacheClaimName", "cacheHostPath"),)

    name: Annotated[str, _is_model] = Field(
        max_length=200, json_schema_extra=_model_rule, description="As on the hub: Qwen/Qwen3-0.6B."
    )
    revision: Annotated[str, _is_commit] = Field(
        max_length=40, json_schema_extra=_commit_rule, description="Commit of it, so that all pods read the same files."
    )
    endpoint: Annotated[str, is_url] = Field(
        default=DEFAULT_HUB, max_length=512, json_schema_extra=url_rule, description="The hub, or a mirror of it."
    )
    secret_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Secret whose entry hub-token is sent to the hub, for a private model; only what fetches has it.",
    )
    cache_claim_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Claim in which the model is kept once for all pods and jobs, ReadWriteMany over several nodes. "
        "Each pod fetches it onto its node's disk when absent.",
    )
    cache_host_path: Annotated[str, is_path] | None = Field(
        default=None,
        max_length=512,
        json_schema_extra=path_rule,
        description="Directory of each node in which the model is kept once for all pods and jobs there, where their "
        "profile allows it.",
    )

    @property
    def path(self) -> str:
        """Directory of the model in the volume into which it is fetched."""
        return f"{self.name}/{self.revision}"


class Model(Part):
    """The source of the starting weights, which engine and trainer both load."""

    RULES = (one_of("a model comes from", "claim", "image", "huggingFace"),)

    claim: ModelClaim | None = Field(default=None, description="A volume that holds them.")
    image: ModelImage | None = Field(default=None, description="An image that holds them.")
    hugging_face: HubModel | None = Field(default=None, description="A model of the hub.")

    @property
    def source(self) -> ModelClaim | ModelImage | HubModel:
        """Return the one source that is given."""
        return next(each for each in (self.claim, self.image, self.hugging_face) if each is not None)

    @property
    def path(self) -> str:
        """Directory of the model below the place where it is mounted."""
        return self.source.path
