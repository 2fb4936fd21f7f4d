"""Writes the manifest of a new job: what was asked for, the values that everybody chooses, and what each means.

The words beside a field are the models' own descriptions, so they say what `kubectl explain` and the reference say.
What comes out is judged before it is handed over.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from colocated_rl_api import names
from colocated_rl_api.job import ColocatedRLJob
from colocated_rl_api.prompts import FILE_ENDINGS
from colocated_rl_cli.base.errors import UsageError
from colocated_rl_cli.base.yaml_text import written
from colocated_rl_cli.manifest.fields import Model, field_of, part_of
from colocated_rl_cli.manifest.manifest import judge

WIDTH = 110
ENGINE_ON_CPU = (  # it looks for a GPU otherwise, and for its cache takes what memory the machine has
    "--device=cpu",
    "--attention-backend=torch_native",
    "--disable-overlap-schedule",
    "--dtype=float32",
    "--max-total-tokens=32768",
)
HEAD = (
    "See docs/reference.md or `kubectl explain crlj.spec` for every field; `kubectl crlj validate FILE` checks changes."
)


@dataclass(frozen=True)
class Wishes:
    """What a person says of a new job. Volumes and files are CLAIM or CLAIM:PATH, what makes prompts
    CLAIM:MODULE:FUNCTION.
    """

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
                **({} if wishes.gpus else {"engineArgs": list(ENGINE_ON_CPU)}),
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
        kind, source = _rows(wishes.prompts)
        return {kind: {**source, "reward": {"function": wishes.reward}}}
    raise UsageError(
        "prompts come from one source: --task NAME, or --prompts CLAIM:FILE.jsonl or --prompts CLAIM:MODULE:FUNCTION "
        "with --reward MODULE:FUNCTION"
    )


def _rows(prompts: str) -> tuple[str, dict[str, Any]]:
    """A kind of source, and what is said of it. Raises UsageError for a file that no rollout controller reads."""
    claim, _, what = prompts.partition(":")
    if ":" in what:
        return "function", {"name": what, "claimName": claim}
    ending = PurePosixPath(what).suffix
    if ending[1:].isalpha() and ending not in FILE_ENDINGS:  # a directory may be named after a version
        raise UsageError(f"{what}: a file of prompts ends with one of {', '.join(FILE_ENDINGS)}")
    return "file", _at_claim(prompts)


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
            yield textwrap.indent(written({key: value}, width=10_000).rstrip(), indent)
