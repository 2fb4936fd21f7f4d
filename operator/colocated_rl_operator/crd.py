"""Make the CustomResourceDefinition and the field reference from the models of `colocated_rl_api.job`.

pydantic writes JSON Schema; an API server takes only *structural* schemas: no `$ref`, no `anyOf` with null, no title,
nothing that can't be pruned by. `structural_schema` translates, and refuses what it can't translate faithfully: a
keyword it doesn't know; a pattern, for which the server has no words (a rule has), but that of a quantity; and a
string, list, map or number of the spec without bounds (the server estimates the cost of CEL rules from them). Optional
fields are absent, never null.

`python -m colocated_rl_operator.crd` writes the files, `--check` fails when they are out of date.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from colocated_rl_api import names
from colocated_rl_api.failure import FailureAction, FailureCause
from colocated_rl_api.job import ColocatedRLJob, ColocatedRLJobSpec
from colocated_rl_api.job_status import ColocatedRLJobStatus
from colocated_rl_api.parts import VALIDATIONS
from colocated_rl_operator.planner.reasons import Cause, ConditionType, Reason

Schema = dict[str, Any]

CRD_FILE = Path("crds/colocatedrljobs.yaml")
CHART_FILE = Path("charts/colocated-rl/templates/crd.yaml")
REFERENCE_FILE = Path("docs/reference.md")

_GENERATED = "Made by `make generate` from job.py and job_status.py in operator/colocated_rl_api: change those instead."

# name, JSON path, type, priority (1: only with -o wide), description
_COLUMNS = (
    ("Phase", ".status.phase", "string", 0, "Summary for people."),
    ("Step", ".status.step", "integer", 0, "Last finished step."),
    ("Ready", ".status.readyReplicas", "integer", 0, "GPU pods that answer."),
    ("Replicas", ".status.replicas", "integer", 0, "GPU pods of the group."),
    ("Holder", ".status.gpuHolder", "string", 0, "Who computes on the GPUs."),
    ("Version", ".status.weightVersion", "string", 0, "Weights that all engines serve, STEP-LINEAGE."),
    ("Age", ".metadata.creationTimestamp", "date", 0, "Since the job was made."),
    ("Rung", ".status.rung", "string", 1, "Rung of the slowest pod."),
    ("Reward", ".status.rollout.reward", "number", 1, "Mean reward of the newest batch."),
    ("Staleness", ".status.rollout.staleness", "number", 1, "Mean staleness of its tokens, in steps."),
    ("Checkpoint", ".status.checkpoint.step", "integer", 1, "Step of the newest durable checkpoint."),
    ("Saved", ".status.checkpoint.time", "date", 1, "Since it was first seen."),
    ("Last-Switch", ".status.lastSwitchSeconds", "number", 1, "Seconds of the last switch."),
)

_KEPT = (  # in the order in which they are written
    "type", "format", "x-kubernetes-int-or-string", "description", "default", "enum", "minLength", "maxLength",
    "minimum", "maximum", "minItems", "maxItems", "minProperties", "maxProperties",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", VALIDATIONS, "required",
)  # fmt: skip
_TRANSLATED = frozenset({"title", "const", "properties", "additionalProperties", "items", "propertyNames"})
_BOUND = {"string": "maxLength", "array": "maxItems", "integer": "maximum", "number": "maximum"}
_UNITS = {"Seconds": "seconds", "Percent": "percent", "Tokens": "tokens"}  # by the last word of a field's name


class UntranslatableSchema(Exception):
    """A model needs what a structural schema can't express: a bug in the model, never raised at run time."""


class Fact(NamedTuple):
    """A fact holds what a person wants to know of one field."""

    path: str
    type: str
    unit: str
    default: str
    bounds: str
    sentence: str


# ------------------------------------------------------------------------------------------------------- translation
class _WithoutNull(GenerateJsonSchema):
    """The generator writes JSON Schema with every default in it, and none that is null."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        factory = schema.get("default_factory")
        default = schema.get("default") if factory is None else factory()  # type: ignore[call-arg]  # takes no data here
        if default is None:
            return inner
        return {**inner, "default": self.encode_default(_sparse(default))}


def _sparse(default: object) -> object:
    """Return what of a default has to be written: the server fills nested defaults in by itself."""
    if isinstance(default, list):
        return [_sparse(each) for each in default]
    return default.model_dump(by_alias=True, exclude_unset=True) if isinstance(default, BaseModel) else default


def structural_schema(model: type[BaseModel], *, path: str = "") -> Schema:
    """Return the schema of `model` as the API server accepts it, at `path` of the resource.

    Raises UntranslatableSchema, naming the field, for what has no faithful translation.
    """
    raw = model.model_json_schema(by_alias=True, schema_generator=_WithoutNull)
    return _translate(raw, raw.get("$defs", {}), path=path)


def resource_schema() -> Schema:
    """Return the schema of the whole resource."""
    status = structural_schema(ColocatedRLJobStatus, path=".status")
    _drop_defaults(status)
    status["default"] = {"observedGeneration": -1}  # else kstatus takes a job that no operator has seen for one at rest
    return {
        "type": "object",
        "description": inspect.getdoc(ColocatedRLJob),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{names.GROUP} and the version of this schema."},
            "kind": {"type": "string", "description": f"Always {names.KIND}."},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": structural_schema(ColocatedRLJobSpec, path=".spec"),
            "status": status,
        },
        VALIDATIONS: [rule.in_schema for rule in ColocatedRLJob.RULES],
    }


def _drop_defaults(schema: Schema) -> None:
    """Drop the defaults of a status: it holds what was reported, and nothing that the server filled in."""
    schema.pop("default", None)
    for part in (*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else ())):
        _drop_defaults(part)


def _translate(raw: Schema, definitions: dict[str, Schema], *, path: str) -> Schema:
    raw = {key: value for key, value in raw.items() if key != "$defs"}
    if "$ref" in raw:
        reference = raw.pop("$ref").removeprefix("#/$defs/")
        raw = definitions[reference] | raw  # what stands beside a reference is about this use of it
    kept = (*_KEPT, "pattern") if raw.get("x-kubernetes-int-or-string") else _KEPT
    if unknown := raw.keys() - {*kept} - _TRANSLATED:
        raise UntranslatableSchema(
            f"{path or 'root'}: {', '.join(sorted(unknown))} has no place in a structural schema"
        )

    if "const" in raw:
        raw["enum"] = [raw["const"]]
    if raw.get("x-kubernetes-int-or-string"):
        del raw["type"]
    schema: Schema = {key: raw[key] for key in kept if key in raw}
    if "description" in raw:  # of a docstring, its summary
        schema["description"] = raw["description"].split("\n\n")[0]
    if "properties" in raw:
        schema["properties"] = {
            name: _translate(field, definitions, path=f"{path}.{name}") for name, field in raw["properties"].items()
        }
    elif schema.get("type") == "object":
        _translate_map(raw, schema, definitions, path=path)
    if "items" in raw:
        schema["items"] = _translate(raw["items"], definitions, path=f"{path}[]")
    _require_bounds(schema, path=path)
    _enforce_fractional_bounds(schema)
    return schema


def _translate_map(raw: Schema, schema: Schema, definitions: dict[str, Schema], *, path: str) -> None:
    values = raw.get("additionalProperties", True)
    # A map of unknown values, not an object with preserved unknown fields: on those, CEL's == misses a renamed key.
    schema["additionalProperties"] = (
        {"nullable": True, "x-kubernetes-preserve-unknown-fields": True}
        if values is True
        else _translate(values, definitions, path=f"{path}.*")
    )
    if "maxProperties" not in schema:
        raise UntranslatableSchema(f"{path}: a map needs max_length")
    if "maxLength" in (keys := raw.get("propertyNames", {})):  # the server has no schema for keys
        limit = keys["maxLength"]
        _add_rule(schema, f"self.all(key, size(key) <= {limit})", f"keys should have at most {limit} characters")


def _enforce_fractional_bounds(schema: Schema) -> None:
    """Repeat a bound like 0.01 as a rule: the server cuts it to 0 before it compares it with a whole number."""
    for keyword, operator, words in (("minimum", ">=", "greater"), ("maximum", "<=", "less")):
        if isinstance(bound := schema.get(keyword), float) and not bound.is_integer():
            _add_rule(schema, f"self {operator} {bound}", f"should be {words} than or equal to {bound}")


def _add_rule(schema: Schema, rule: str, message: str) -> None:
    schema.setdefault(VALIDATIONS, []).append({"rule": rule, "message": message})


def _require_bounds(schema: Schema, *, path: str) -> None:
    kind = schema.get("type")
    bound = _BOUND.get(str(kind))
    is_number = kind in ("integer", "number")
    if bound is None or "enum" in schema or (kind == "string" and "format" in schema):
        return
    if is_number and not path.startswith(".spec"):  # the operator's own numbers
        return
    if bound not in schema or (is_number and "minimum" not in schema):
        raise UntranslatableSchema(f"{path}: {kind} without bounds; the server estimates the cost of rules from them")


# --------------------------------------------------------------------------------------------------------------- facts
def facts_of(schema: Schema, *, path: str) -> Iterator[Fact]:
    """Yield each field below `schema`, in order of declaration."""
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        yield _fact(field, path=here, required=name in schema.get("required", ()))
        yield from facts_of(field, path=here)
        if "items" in field:
            yield from facts_of(field["items"], path=f"{here}[]")


def _fact(field: Schema, *, path: str, required: bool) -> Fact:
    unit = next((unit for suffix, unit in _UNITS.items() if path.endswith(suffix)), "")
    default = field.get("default")
    if required:
        shown = "required"
    elif default is None or default in ({}, []):
        shown = ""
    else:
        shown = json.dumps(default)
    return Fact(path, _type_of(field), unit, shown, _bounds_of(field), field["description"])


def _type_of(field: Schema) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    match field.get("type"):
        case "array":
            return f"list of {_type_of(field['items'])}"
        case "object" if "additionalProperties" in field:
            return f"map to {_type_of(field['additionalProperties'])}"
        case "string" if field.get("format") == "date-time":
            return "time"
        case None:
            return "any"
        case kind:
            return str(kind)


def _bounds_of(field: Schema) -> str:
    if "enum" in field:
        return "one of " + ", ".join(field["enum"]) if len(field["enum"]) > 1 else f"only {field['enum'][0]}"
    if field.get("x-kubernetes-int-or-string"):
        return "a number, then m, k, M, G, T, P, E, Ki, Mi, Gi, Ti, Pi, Ei or nothing: 500m, 4Gi, 2"
    if "minimum" in field and "maximum" in field:
        return f"{field['minimum']:,} to {field['maximum']:,}"
    if "minimum" in field:
        return f"at least {field['minimum']:,}"
    for low, high, what in (
        ("minLength", "maxLength", "characters"),
        ("minItems", "maxItems", "items"),
        ("minProperties", "maxProperties", "entries"),
    ):
        if high in field:
            return f"{field[low]} to {field[high]} {what}" if low in field else f"at most {field[high]} {what}"
    return ""


def _explain(schema: Schema, *, path: str = "") -> Schema:
    """Return the schema with unit, bounds and default in each description: `kubectl explain` shows nothing else."""
    explained = dict(schema)
    if "properties" in schema:
        explained["properties"] = {
            name: _explain(field, path=f"{path}.{name}") for name, field in schema["properties"].items()
        }
    if "items" in schema:
        explained["items"] = _explain(schema["items"], path=path)
    if path.startswith(".spec.") and "description" in schema and "properties" not in schema:
        fact = _fact(schema, path=path, required=False)
        limits = [fact.unit, "" if "enum" in schema else fact.bounds, f"default {fact.default}" if fact.default else ""]
        text = "; ".join(part for part in limits if part)
        explained["description"] = schema["description"] + (f" ({text})" if text else "")
    return explained


# ----------------------------------------------------------------------------------------------------------- documents
def custom_resource_definition() -> Schema:
    """Return the CRD, as it is applied."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT_NAME],
                "categories": ["rl"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "priority": priority, "description": text}
                        for name, path, kind, priority, text in _COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": _explain(resource_schema())},
                }
            ],
        },
    }


def _rules_of(schema: Schema, *, path: str) -> Iterator[tuple[str, str]]:
    for rule in schema.get(VALIDATIONS, ()):
        yield path, rule["message"]
    for name, field in schema.get("properties", {}).items():
        yield from _rules_of(field, path=f"{path}.{name}")
    if "items" in schema:
        yield from _rules_of(schema["items"], path=f"{path}[]")


def _reasons() -> Iterator[str]:
    """Yield the lines about every value that a program may wait for."""
    waited_for = "`kubectl wait --for=condition=TYPE`. kstatus, hence Flux and `helm --wait`, reads the first three."
    members = (
        "Of conditions, besides the causes. Completed, InvalidSpec, ObjectRefused, VolumeLost and PodDeleted are "
        "events too, and NodeTainted is one alone. What members report in `status.outOfLine` is in "
        "[cli.md](cli.md#reasons-and-what-to-do)."
    )
    causes = "In `status.cause`, and as reasons of conditions. Each but OperatorRestarted has an event."
    for heading, words, intro in (
        ("## Conditions", ConditionType, waited_for),
        ("## Causes", Cause, causes),
        ("## Reasons", Reason, members),
    ):
        yield from ("", heading, "", intro, "", "| | what it means | what to do |", "|---|---|---|")
        for word in words:
            advice = f"{word.advice[0].upper()}{word.advice[1:]}." if word.advice else ""
            yield f"| `{word}` | {word.meaning} | {advice} |"


def _failures() -> Iterator[str]:
    """Yield the lines about what can fail, and which actions may answer it."""
    intro = (
        "The answers of `spec.failurePolicy`. Without a rule that matches, the usual answer is followed, and a failure"
    )
    more = "counts as its cause does. [failures.md](failures.md) has more."
    yield from ("", "## Failures", "", f"{intro} {more}")
    yield from ("", "| cause | what it is | counts against backoffLimit | usual answer | other answers |")
    yield "|---|---|---|---|---|"
    for cause in FailureCause:
        usual, *others = (f"`{action}`" for action in cause.answers)
        counts = "yes" if cause.counts else "no"
        yield f"| `{cause}` | {cause.meaning} | {counts} | {usual} | {', '.join(others)} |"
    yield from ("", "| action | what is done |", "|---|---|")
    for action in FailureAction:
        yield f"| `{action}` | {action.meaning} |"


def reference_page() -> str:
    """Return `docs/reference.md`: every field with type, unit, default and bounds; every reason."""
    schema = resource_schema()
    spec, status = schema["properties"]["spec"], schema["properties"]["status"]
    lines = [
        f"<!-- {_GENERATED} -->",
        "# ColocatedRLJob",
        "",
        schema["description"],
        "",
        f"`apiVersion: {names.API_VERSION}`, `kind: {names.KIND}`. Unknown fields are refused. The same text, field by",
        f"field: `kubectl explain {names.SHORT_NAME}.spec`.",
        "",
        "## spec",
        "",
        "| field | type | unit | default | bounds | |",
        "|---|---|---|---|---|---|",
    ]
    for fact in facts_of(spec, path="spec"):
        default = f"`{fact.default}`" if fact.default not in ("", "required") else fact.default
        lines.append(
            f"| `{fact.path.removeprefix('spec.')}` | {fact.type} | {fact.unit} | {default} | {fact.bounds} "
            f"| {fact.sentence} |"
        )
    lines += ["", "## Rules", "", "| where | rule |", "|---|---|"]
    lines += [f"| `{path or 'job'}` | {message} |" for path, message in _rules_of(schema, path="")]
    lines += _failures()
    lines += ["", "## status", "", "Written by the operator.", "", "| field | type | |", "|---|---|---|"]
    lines += [
        f"| `{fact.path.removeprefix('status.')}` | {fact.type} | {fact.sentence}"
        f"{f' {fact.bounds[0].upper()}{fact.bounds[1:]}.' if fact.bounds.startswith('one of') else ''} |"
        for fact in facts_of(status, path="status")
    ]
    lines += _reasons()
    lines += ["", "## Columns", "", "| `kubectl get` | from | |", "|---|---|---|"]
    lines += [
        f"| {name.upper()}{' (`-o wide`)' if priority else ''} | `{path}` | {text} |"
        for name, path, _, priority, text in _COLUMNS
    ]
    return "\n".join(lines) + "\n"


class _AnchorlessDumper(yaml.SafeDumper):
    """The dumper writes YAML without anchors: no CRD has them."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _yaml(document: Schema) -> str:
    return yaml.dump(document, Dumper=_AnchorlessDumper, sort_keys=False, width=120, allow_unicode=True)


@cache
def documents() -> dict[Path, str]:
    """Return the text of each generated file, by its path in the repository."""
    crd = custom_resource_definition()
    kept = crd | {"metadata": crd["metadata"] | {"annotations": {"helm.sh/resource-policy": "keep"}}}
    return {
        CRD_FILE: f"# {_GENERATED}\n{_yaml(crd)}",
        CHART_FILE: f"# {_GENERATED}\n{{{{- if .Values.crds.install }}}}\n{_yaml(kept)}{{{{- end }}}}\n",
        REFERENCE_FILE: reference_page(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m colocated_rl_operator.crd", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is out of date")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository; the working directory by default")
    options = parser.parse_args(arguments)
    stale = []
    for path, text in documents().items():
        file = options.root / path
        if file.is_file() and file.read_text() == text:
            continue
        stale.append(str(path))
        if not options.check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    if stale and options.check:
        sys.stderr.write(f"out of date: {', '.join(stale)}. Run `make generate` and commit the result.\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
