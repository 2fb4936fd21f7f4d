"""Validate a manifest without a cluster, to the API server's verdict, with the line of each fault.

The rules are those of the models (`colocated_rl_api.job`), from which the CRD is generated too, and those of the
engine's flags (`colocated_rl_api.engines`), which the operator asks of a job that the server took. This module adds the
positions in the file, and Kubernetes' own rules for metadata. It looks into lists, as `kubectl get -o yaml` prints
them, and skips objects of other kinds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic

from colocated_rl_api import names
from colocated_rl_api.engines import refusals
from colocated_rl_api.job import ColocatedRLJob, Metadata
from colocated_rl_api.pod_template import QUEUE_LABEL
from colocated_rl_cli.base.yaml_text import (
    Document,
    Path,
    Position,
    Unreadable,
    read,
)
from colocated_rl_cli.manifest.fields import (
    Model,
    field_of,
    names_of,
    part_of,
)

TEXTS = {"generateName", "selfLink"}  # besides those in the model
MAPS_OF_TEXTS = {"labels", "annotations"}
GENERATED = "x" * 5  # what the server adds to generateName
MAX_ANNOTATIONS_BYTES = 256 * 1024
OTHER_METADATA = {
    "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "finalizers",
    "ownerReferences", "managedFields",
}  # fmt: skip
KNOWN_METADATA = TEXTS | MAPS_OF_TEXTS | OTHER_METADATA | {*names_of(Metadata)}

SHOULD_BE = {  # by pydantic's error types, whose own messages name Python types
    "model_type": "an object", "dict_type": "an object", "list_type": "a list", "string_type": "a text",
    "int_type": "a whole number", "float_type": "a number", "bool_type": "true or false",
}  # fmt: skip
UNQUOTED_TYPES = {"int_type", "float_type", "bool_type"}
UNQUOTED = re.compile("true|false|-?[0-9]+([.][0-9]+)?")  # strings that are another type without quotes
MANY_FIELDS = 8

_WORD = "[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_DOMAIN = "(?=.{1,253}/)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
_LABEL_VALUE = re.compile(f"({_WORD})?")
_KEY = re.compile(f"({_DOMAIN}/)?{_WORD}")
_NAMESPACE = re.compile("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, order=True)
class Fault:
    """Describes one thing that the API server or the operator would refuse."""

    place: Position
    field: str  # as the server writes it: spec.rollout.engine.args[1]; "" for the whole document
    message: str


@dataclass(frozen=True)
class ManifestVerdict:
    """Holds the verdict on one file. jobs: names of the jobs in it."""

    jobs: tuple[str, ...]
    others: int  # objects of other kinds
    faults: tuple[Fault, ...]

    @property
    def is_accepted(self) -> bool:
        return bool(self.jobs) and not self.faults


def judge(text: str) -> ManifestVerdict:
    """Validate every document of a file."""
    jobs: list[str] = []
    faults: list[Fault] = []
    others = 0
    try:
        for document in _objects(read(text)):
            if _is_job(document.value):
                jobs.append(_name(document.value))
                faults += faults_of(document)
            elif _is_object(document.value):
                others += 1
            else:
                faults.append(Fault(document.place(()), "", f"no object: apiVersion and kind {names.KIND} are missing"))
    except Unreadable as error:
        faults.append(Fault(error.place, "", str(error)))
    if not (jobs or faults):
        faults.append(Fault(Position(1, 1), "", f"no {names.KIND} in it"))
    return ManifestVerdict(tuple(jobs), others, tuple(sorted(faults)))


def _objects(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield each object, those of a list one by one."""
    for document in documents:
        value = document.value
        if _is_object(value) and str(value["kind"]).endswith("List") and isinstance(value.get("items"), list):
            yield from _objects(document.parts("items"))
        else:
            yield document


def faults_of(document: Document) -> list[Fault]:
    """Return everything that is wrong with a job's manifest."""
    value: Mapping[str, Any] = {key: part for key, part in document.value.items() if key != "status"}
    metadata = value.get("metadata")
    found = list(_metadata_faults(document, metadata))
    if isinstance(metadata, Mapping) and metadata.get("name") is None and isinstance(metadata.get("generateName"), str):
        value = {**value, "metadata": {**metadata, "name": metadata["generateName"] + GENERATED}}
    try:
        job = ColocatedRLJob.read(value)
    except pydantic.ValidationError as error:
        return found + [_fault(document, one) for one in error.errors(include_url=False)]
    for field, words in refusals(job.spec):
        path: Path = ("spec", *field)
        found.append(Fault(document.place(path), spelled(path), words))
    labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
    queue = job.spec.pod_templates.gpu.queue or (isinstance(labels, Mapping) and labels.get(QUEUE_LABEL))
    for name, words in job.spec.not_queued.items() if queue else ():
        path = ("spec", name)
        found.append(Fault(document.place(path), spelled(path), words))
    return found


def _is_job(value: object) -> bool:
    """Return whether an object is meant as a job: its kind or its API group is ours, so one may have a typo."""
    if not isinstance(value, Mapping):
        return False
    group = str(value.get("apiVersion", "")).split("/")[0]
    return value.get("kind") == names.KIND or group == names.GROUP


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value.get("kind")) and bool(value.get("apiVersion"))


def _name(value: Mapping[str, Any]) -> str:
    metadata = value.get("metadata")
    return str(metadata.get("name") or metadata.get("generateName") or "") if isinstance(metadata, Mapping) else ""


# --------------------------------------------------------------------------------------------------------------- words
def _fault(document: Document, error: Any) -> Fault:
    path, message = tuple(error["loc"]), str(error["msg"]).removeprefix("Value error, ")
    if path and path[-1] == "[key]":  # a bad key is reported as a fault of its map
        return Fault(document.place(path[:-1]), spelled(path[:-2]), f"key {str(path[-2])[:80]!r}: {message}")
    if error["type"] == "rule" and (field := (*path, *error["ctx"]["field"].split("."))) in document.places:
        path = field
    if error["type"] == "extra_forbidden":
        message = f"unknown field{_suggestion(path)}"
    elif error["type"] == "missing":
        message = "required, and not there"
    else:
        if error["type"] in SHOULD_BE:
            message = f"should be {SHOULD_BE[error['type']]}{_fields_of(path) if error['type'] == 'model_type' else ''}"
        if not isinstance(error["input"], Mapping | list) and error["type"] != "value_error":
            message = f"{message}, not {_shown(error['input'])}"[:300]
        if error["type"] in UNQUOTED_TYPES and isinstance(error["input"], str) and UNQUOTED.fullmatch(error["input"]):
            message += ": write it without quotes"
    return Fault(document.place(path), spelled(path), message.removeprefix(f"{spelled(path)} "))


def _suggestion(path: Path) -> str:
    """Suggest the known field that an unknown one resembles."""
    model = _model_at(path[:-1])
    if model is None:
        return ""
    known = {name.lower(): name for name in names_of(model)}
    close = difflib.get_close_matches(str(path[-1]).lower().replace("_", ""), known, n=1)
    return f": did you mean {known[close[0]]}?" if close else ""


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _fields_of(path: Path) -> str:
    """List the fields of the expected object if they are few."""
    model = _model_at(path)
    known = names_of(model) if model else []
    if not 0 < len(known) <= MANY_FIELDS:
        return ""
    return f" with field{'s' if len(known) > 1 else ''} {', '.join(known)}"


def _model_at(path: Path) -> Model | None:
    model: Model | None = ColocatedRLJob
    for part in path:
        model = part_of(field_of(model, str(part)))
    return model


def spelled(path: Path) -> str:
    """Return a path as the API server writes it: `spec.rollout.engine.args[1]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


# ------------------------------------------------------------------------------------------------------------ metadata
def _metadata_faults(document: Document, metadata: object) -> Iterator[Fault]:
    """Yield the faults that the API server finds in ObjectMeta before it looks at the job."""
    if not isinstance(metadata, Mapping):
        return
    for key, value in metadata.items():
        path: Path = ("metadata", key)
        if key in TEXTS and not isinstance(value, str | None):
            yield Fault(document.place(path), spelled(path), f"should be a text, not {value!r}")
        elif key in MAPS_OF_TEXTS and value is not None:
            yield from _map_faults(document, path, value)
        elif key == "namespace" and isinstance(value, str) and value and not _NAMESPACE.fullmatch(value):
            yield Fault(document.place(path), spelled(path), f"{value!r} is no name of a namespace")
        elif key not in KNOWN_METADATA:
            yield Fault(document.place(path), spelled(path), "unknown field")


def _map_faults(document: Document, path: Path, value: object) -> Iterator[Fault]:
    if not isinstance(value, Mapping):
        yield Fault(document.place(path), spelled(path), "should be a map of texts")
        return
    for key, text in value.items():
        where = (*path, key)
        if not isinstance(text, str | None):
            yield Fault(document.place(where), spelled(where), f"should be a text, not {text!r}: quote it")
        elif not _KEY.fullmatch(key if path[-1] == "labels" else key.lower()):
            yield Fault(document.place(where), spelled(path), f"{key!r} is no key: write word, or domain/word")
        elif path[-1] == "labels" and not _LABEL_VALUE.fullmatch(text or ""):
            message = f"{text!r} is no value of a label: at most 63 letters, digits, and -_. between them"
            yield Fault(document.place(where), spelled(where), message)
    if path[-1] == "annotations" and _bytes(value) > MAX_ANNOTATIONS_BYTES:
        yield Fault(document.place(path), spelled(path), f"more than {MAX_ANNOTATIONS_BYTES} bytes")


def _bytes(annotations: Mapping[str, Any]) -> int:
    return sum(len(part.encode()) for pair in annotations.items() for part in pair if isinstance(part, str))
