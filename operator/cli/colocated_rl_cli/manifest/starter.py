"""Write the manifest of a new job: the requested values, those that most jobs set, and what each means.

The comment above a field is the model's own description, so it reads as in `kubectl explain` and the reference. The
manifest is validated before it is returned.
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
ENGINE_ON_CPU = (  # without these it looks for a GPU, and its cache takes all of the machine's memory
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
    """Wishes are the choices that a person makes for a new job.

    Volumes and files are CLAIM or CLAIM:PATH; a function that makes prompts is CLAIM:MODULE:FUNCTION.
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
    """Return the manifest as commented YAML. Raises UsageError if an API server would refuse it."""
    document = _document(wishes)
    text = f"# {HEAD}\n" + "".join(f"{line}\n" for line in _lines(document, ColocatedRLJob, 0))
    faults = judge(text).faults
    if faults:
        reasons = "; ".join(f"{fault.field}: {fault.message}" for fault in faults)
        raise UsageError(f"no job can be made of that: {reasons}")
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
            "model": _model(wishes.model),
            "gpus": gpus,
            "rollout": {
                **({} if wishes.gpus else {"engine": {"args": list(ENGINE_ON_CPU)}}),
                "prompts": _prompts(wishes),
                "maxPromptTokens": 1024,
                "maxResponseTokens": 1024,
                "batchSize": wishes.batch_size,
                "groupSize": wishes.group_size,
                "maxStaleness": 1,
            },
            "evaluation": {"everySteps": 10, "sets": [{"name": "held-out", "samples": 400}]},
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
    """Return the kind of a source of prompts and its fields.

    Raises UsageError for a file that no rollout controller reads.
    """
    claim, _, what = prompts.partition(":")
    if ":" in what:
        return "function", {"name": what, "claimName": claim}
    ending = PurePosixPath(what).suffix
    if ending[1:].isalpha() and ending not in FILE_ENDINGS:  # a directory may be named after a version
        raise UsageError(f"{what}: a file of prompts ends with one of {', '.join(FILE_ENDINGS)}")
    return "file", _at_claim(prompts, "claimName")


def _model(text: str) -> dict[str, Any]:
    """Return NAME@COMMIT of the hub, CLAIM or CLAIM:PATH as a source of starting weights."""
    name, at, commit = text.partition("@")
    return {"huggingFace": {"name": name, "revision": commit}} if at else {"claim": _at_claim(text, "name")}


def _at_claim(text: str, field: str) -> dict[str, Any]:
    """Return CLAIM or CLAIM:PATH as fields, the claim's name as `field`."""
    claim, _, path = text.partition(":")
    return {field: claim, **({"path": path} if path else {})}


# ---------------------------------------------------------------------------------------------------------------- text
def _lines(values: Mapping[str, Any], model: Model | None, depth: int) -> Iterator[str]:
    """Yield nested mappings as lines of YAML, each field of the spec below its description."""
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
