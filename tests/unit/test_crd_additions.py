"""The CRD only ever gains: what the newest release took, this one takes, and reads in the same way.

tests/scenarios/released-crd.yaml is that release's; whoever makes a release puts its CRD there.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any

import pytest

import quick_yaml
from colocated_rl_operator import crd
from colocated_rl_operator.crd import Schema
from setup.layout import CHECKOUT

LOWER = ("minimum", "minLength", "minItems", "minProperties")
UPPER = ("maximum", "maxLength", "maxItems", "maxProperties")
KEPT = (
    *("type", "format", "pattern", "default", "nullable"),
    *("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
)

DECIDED: dict[str, str] = {
    **{
        f".spec.podTemplates.{role}.metadata.labels: a rule more: kueue.x-k8s.io/queue-name and "
        "kueue.x-k8s.io/priority-class have a name as their value: leave the label out; for a rollout pod that waits "
        "in no queue set scheduling.queuedPods to WithDevices": "an empty string meant something, before any release"
        for role in ("engine", "gpu", "reference", "rollout")
    },
    ".spec.failurePolicy.rules[].action: a rule more: MemberSilent is answered by ReplacePodElsewhere, RestartPod, "
    "FailJob: write one of them, or a rule of its own for that cause": "it allows the same, and names the usual first",
    ".spec.reference.placement: a rule more: reference.placement WithRollout needs engines that stay on their "
    "devices (rollout.offload [] or placement OwnDevices): these make room for trainers, and it would not; use "
    "WithTrainer": "it is about a new value",
    ".spec.rollout.placement: a rule more: placement Both needs engines that take turns with trainers (offload other "
    "than []), of one pod each (engine.pods 1), all of one shape (rollout.gpus.count as gpus.count): their checksums "
    "are compared": "it is about a new value",
    **{
        f".spec.{field}, and only there": "it takes the place of one that allowed less"
        for field in (
            "podTemplates.engine: a rule more: podTemplates.engine is of engine pods with devices of their own: give "
            "it with rollout.placement OwnDevices or Both",
            "rollout.gpus: a rule more: gpus are the devices of engine pods of their own: give them with placement "
            "OwnDevices or Both",
            "rollout.replicas: a rule more: replicas is the number of engine pods with devices of their own: give it "
            "with placement OwnDevices or Both",
        )
    },
    ".spec.replicas: a rule more: replicas can't change from one to more while the job has pods, nor before it has "
    "started: set suspend to true, change it once condition Suspended is true, and set suspend to false again": (
        "it takes the place of one that allowed less"
    ),
    **{
        f".spec.reference{field}: a rule more: {words}": "it takes the place of one by which nothing there could change"
        for field, words in {
            "": "reference can't change once the job exists: make a new job with the new value",
            ".placement": "placement can't change once the job exists: make a new job with the new value",
            ".gpus": "reference.gpus can't change while the job runs: set suspend to true, change it, and set suspend "
            "to false again",
            ".replicas": "reference.replicas can't change while the job has pods: set suspend to true, change it once "
            "condition Suspended is true, and set suspend to false again",
        }.items()
    },
    **{
        f".spec.podTemplates.{role}.spec.volumes[].name: a rule more: name is a volume of the operator's: choose "
        "another, such as one with a word of yours before it": "of jobs with a volume `mirrors`, which is new"
        for role in ("engine", "gpu", "reference", "rollout")
    },
    ".spec.model.huggingFace.cacheClaimName: a rule more: the model is kept by at most one of cacheClaimName and "
    "cacheHostPath": "it is about a new field",
    ".spec.failurePolicy.rules[].action: a rule more: NotRetriable is answered by FailJob, RetryStep, RollBack: write "
    "one of them, or a rule of its own for that cause": "it is about a new value",
    ".spec.trainer: a rule more: trainer can't change while the job runs: set suspend to true, change it, and set "
    "suspend to false again": "it takes the place of one by which nothing there could change",
}
"""A person allows these differences: a rule that binds nobody who was there, a loss that is announced."""


def losses(old: Schema, new: Schema, path: str) -> Iterator[str]:
    """Yield each part of `old` that `new` refuses, or reads otherwise."""
    for key in KEPT:
        if old.get(key) != new.get(key):
            yield f"{path}: {key} was {old.get(key)!r} and is {new.get(key)!r}"
    yield from tighter(old, new, path)
    if added := set(new.get("required", ())) - set(old.get("required", ())):
        yield f"{path}: {', '.join(sorted(added))} is required"
    known_rules = {each["rule"] for each in old.get("x-kubernetes-validations", ())}
    for rule in new.get("x-kubernetes-validations", ()):
        if rule["rule"] not in known_rules and is_known(old, rule.get("fieldPath", "")):
            yield f"{path}{rule.get('fieldPath', '')}: a rule more: {rule['message']}"
    for name, field in old.get("properties", {}).items():
        if name in new.get("properties", {}):
            yield from losses(field, new["properties"][name], f"{path}.{name}")
        else:
            yield f"{path}.{name} is gone"
    for key, shown in (("items", "[]"), ("additionalProperties", ".*")):
        if key in old:
            yield from losses(old[key], new.get(key, {}), path + shown)


def tighter(old: Schema, new: Schema, path: str) -> Iterator[str]:
    """Bounds between which there are fewer values."""
    for keys, is_less in ((LOWER, operator.lt), (UPPER, operator.gt)):
        for key in keys:
            if key in new and (key not in old or is_less(old[key], new[key])):
                yield f"{path}: {key} was {old.get(key)} and is {new[key]}"
    if "enum" in new and (gone := set(old.get("enum", ["anything"])) - set(new["enum"])):
        yield f"{path}: {', '.join(sorted(gone))} is no value any more"


def is_known(schema: Schema, path: str) -> bool:
    """Return whether the field that a rule is about existed; a rule about a new field takes nothing from anybody."""
    for name in path.split(".")[1:]:
        if name not in schema.get("properties", {}):
            return False
        schema = schema["properties"][name]
    return True


def versions(definition: Schema) -> dict[str, Schema]:
    served = (each for each in definition["spec"]["versions"] if each["served"])
    return {each["name"]: each["schema"]["openAPIV3Schema"] for each in served}


def all_losses(old: Schema, new: Schema) -> list[str]:
    found = [
        f"{key} was {old['spec'][key]} and is {new['spec'][key]}"
        for key in ("group", "scope", "names")
        if old["spec"][key] != new["spec"][key]
    ]
    for name, schema in versions(old).items():
        found += losses(schema, versions(new)[name], "") if name in versions(new) else [f"{name} is not served"]
    return found


RELEASED: Schema = quick_yaml.load((CHECKOUT.root / "tests/scenarios/released-crd.yaml").read_text())


def test_what_the_newest_release_took_is_taken_and_means_the_same() -> None:
    assert sorted(DECIDED) == sorted(all_losses(RELEASED, crd.custom_resource_definition()))


def changed(path: str, **values: Any) -> Schema:
    """The released CRD with a field changed; None takes the key away, and without values the whole field."""
    definition = copy.deepcopy(RELEASED)
    part = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    *parents, last = path.split(".")
    for name in parents:
        part = part["properties"][name]
    if not values:
        del part["properties"][last]
    for key, value in values.items():
        if value is None:
            part["properties"][last].pop(key)
        else:
            part["properties"][last][key] = value
    return definition


VERIFY = ".spec.weightSync.verify"


def rule(about: str) -> dict[str, Any]:
    return {"x-kubernetes-validations": [{"rule": "false", "message": "never", "fieldPath": about}]}


@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        (changed("spec.evaluation"), ".spec.evaluation is gone"),
        (changed("status.rung"), ".status.rung is gone"),
        (changed("spec.replicas", maximum=512), ".spec.replicas: maximum was 1024 and is 512"),
        (changed("spec.replicas", minimum=2), ".spec.replicas: minimum was 1 and is 2"),
        (changed("spec.managedBy", maxLength=9), ".spec.managedBy: maxLength was 63 and is 9"),
        (changed("spec.switch.settleSeconds", default=31), ".spec.switch.settleSeconds: default was 30 and is 31"),
        (changed("spec.suspend", default=None), ".spec.suspend: default was False and is None"),
        (changed("spec.suspend", type="string"), ".spec.suspend: type was 'boolean' and is 'string'"),
        (
            changed("spec.rollout.interruption", enum=["Resume"]),
            ".spec.rollout.interruption: Retry, Wait is no value any more",
        ),
        (changed("spec.managedBy", enum=["a"]), ".spec.managedBy: anything is no value any more"),
        (changed("spec.checkpoint", required=["keep"]), ".spec.checkpoint: keep is required"),
        (changed("spec.checkpoint", **rule(".keep")), ".spec.checkpoint.keep: a rule more: never"),
        (changed("spec.checkpoint", **rule("")), ".spec.checkpoint: a rule more: never"),
    ],
)
def test_a_loss_is_named(definition: Schema, expected: str) -> None:
    assert [expected] == all_losses(RELEASED, definition)


@pytest.mark.parametrize(
    "definition",
    [
        changed("spec.replicas", maximum=2048, minimum=0, description="Others words."),
        changed("spec.managedBy", maxLength=None),
        changed("spec.rollout.interruption", enum=["Resume", "Retry", "Wait"]),
        changed("spec.model", required=[]),
        changed("spec.checkpoint", **rule(".newer")),
        changed("spec.rollout", **{"x-kubernetes-validations": []}),
    ],
)
def test_a_gain_is_none(definition: Schema) -> None:
    assert [] == all_losses(RELEASED, definition)


def test_a_version_that_is_not_served_any_more_is_a_loss() -> None:
    definition = copy.deepcopy(RELEASED)
    definition["spec"]["versions"][0]["served"] = False
    definition["spec"]["names"] = definition["spec"]["names"] | {"shortNames": []}
    assert "v1alpha1 is not served" == all_losses(RELEASED, definition)[-1]
    assert all_losses(RELEASED, definition)[0].startswith("names was")
