"""Writes the manifest of a new job: what was asked for, the values that everybody chooses, and what each means.

The words beside a field are the models' own descriptions, so they say what `kubectl explain` and the reference say.
What comes out is judged before it is handed over.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from colocated_rl_api import names
from colocated_rl_api.job import ColocatedRLJob
from colocated_rl_cli.errors import UsageError
from colocated_rl_cli.fields import Model, field_of, part_of
from colocated_rl_cli.manifest import judge

WIDTH = 110
HEAD = (
    "See docs/reference.md or `kubectl explain crlj.spec` for every field; `kubectl crlj validate FILE` checks changes."
)


@dataclass(frozen=True)
class Wishes:
    """What a person says of a new job. Volumes and files are CLAIM or CLAIM:PATH."""

    name: str
    model: str
    task: str | None = None
    prompts: str | None = None
    reward: str | None = None
    steps: int = 100
    replicas: int = 1
    gpus: int = 1
    batch_size: int = 32
    group_size: int = 8
    image: str | None = None


def manifest(wishes: Wishes) -> str:
    """Raises UsageError where the wishes make no job that an API server would take."""
    document = _document(wishes)
    text = f"# {HEAD}\n" + "".join(f"{line}\n" for line in _lines(document, ColocatedRLJob, 0))
    faults = judge(text).faults
    if faults:
        told = "; ".join(f"{fault.field}: {fault.message}" for fault in faults)
        raise UsageError(f"no job can be made of that: {told}")
    return text


def _document(wishes: Wishes) -> dict[str, Any]:
    gpus: dict[str, Any] = {"count": wishes.gpus}
    if wishes.image:
        gpus["image"] = wishes.image
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": wishes.name},
        "spec": {
            "steps": wishes.steps,
            "replicas": wishes.replicas,
            "model": _at_claim(wishes.model),
            "gpus": gpus,
            "rollout": {
                "prompts": _prompts(wishes),
                "maxPromptTokens": 1024,
                "maxResponseTokens": 1024,
                "batchSize": wishes.batch_size,
                "groupSize": wishes.group_size,
                "maxStaleness": 1,
            },
            "evaluation": {"everySteps": 10, "samples": 400},
            "trainer": {"config": {"learningRate": 1.0e-6}},
            "weightSync": {"sizeLimit": "8Gi"},
            "checkpoint": {"everySteps": 10, "keep": 2, "volume": {"size": "10Gi"}},
            "storage": {"volume": {"size": "10Gi"}},
        },
    }


def _prompts(wishes: Wishes) -> dict[str, Any]:
    if wishes.task and not (wishes.prompts or wishes.reward):
        return {"reasoningGym": {"name": wishes.task}}
    if wishes.prompts and wishes.reward and not wishes.task:
        return {"file": {**_at_claim(wishes.prompts), "reward": {"function": wishes.reward}}}
    raise UsageError(
        "prompts come from one source: --task NAME, or --prompts CLAIM:FILE.jsonl with --reward MODULE:FUNCTION"
    )


def _at_claim(text: str) -> dict[str, Any]:
    claim, _, path = text.partition(":")
    return {"claimName": claim, **({"path": path} if path else {})}


# ---------------------------------------------------------------------------------------------------------------- text
def _lines(values: Mapping[str, Any], model: Model | None, depth: int) -> Iterator[str]:
    """Nested mappings as YAML, each field of the spec below what it means."""
    indent = "  " * depth
    for key, value in values.items():
        field = field_of(model, key)
        if field is not None and field.description:
            means = f"{indent}# "
            yield from textwrap.wrap(field.description, WIDTH, initial_indent=means, subsequent_indent=means)
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, part_of(field), depth + 1)
        else:
            yield f"{indent}{yaml.safe_dump({key: value}, width=10_000).rstrip()}"
