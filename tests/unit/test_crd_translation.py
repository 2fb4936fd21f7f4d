"""The CRD is a faithful translation of the models, or there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

import quick_yaml
from colocated_rl_api.job import ColocatedRLJob
from colocated_rl_api.parts import Quantity
from colocated_rl_operator import crd
from setup.layout import CHECKOUT

CLIENT_SIDE_APPLY_LIMIT = 262_144  # bytes of an annotation: kubectl apply without --server-side keeps the object in one


class Inner(BaseModel):
    """The schema describes this model."""

    size: int = Field(default=3, ge=1, le=9)


class Outer(BaseModel):
    inner: Inner = Field(default_factory=Inner, description="What it is for.")
    maybe: Inner | None = None
    word: str | None = Field(default=None, max_length=5)
    words: list[Annotated[str, Field(max_length=4)]] = Field(default_factory=list, max_length=2)
    free: dict[str, Any] = Field(default_factory=dict, max_length=7)


def test_parts_are_inlined_with_defaults_and_without_null() -> None:
    inner = {
        "type": "object",
        "properties": {"size": {"type": "integer", "default": 3, "minimum": 1, "maximum": 9}},
    }
    assert {
        "type": "object",
        "properties": {
            "inner": inner | {"description": "What it is for.", "default": {}},
            "maybe": inner | {"description": "The schema describes this model."},
            "word": {"type": "string", "maxLength": 5},
            "words": {
                "type": "array",
                "default": [],
                "maxItems": 2,
                "items": {"type": "string", "maxLength": 4},
            },
            "free": {
                "type": "object",
                "default": {},
                "maxProperties": 7,
                "additionalProperties": {"nullable": True, "x-kubernetes-preserve-unknown-fields": True},
            },
        },
    } == crd.structural_schema(Outer, path=".spec")


def test_fractional_bound_is_a_rule_too_because_the_server_cuts_it_for_whole_numbers() -> None:
    class Shared(BaseModel):
        share: float = Field(default=1, ge=0.01, le=10)

    rules = crd.structural_schema(Shared)["properties"]["share"]["x-kubernetes-validations"]
    assert [{"rule": "self >= 0.01", "message": "should be greater than or equal to 0.01"}] == rules


def test_length_of_keys_is_a_rule_because_the_server_has_no_schema_for_keys() -> None:
    class Named(BaseModel):
        by_name: dict[Annotated[str, Field(max_length=8)], Annotated[str, Field(max_length=4)]] = Field(max_length=3)

    rules = crd.structural_schema(Named)["properties"]["by_name"]["x-kubernetes-validations"]
    assert [{"rule": "self.all(key, size(key) <= 8)", "message": "keys should have at most 8 characters"}] == rules


def test_a_quantity_has_a_pattern_and_no_rule_because_kubernetes_1_33_bounds_the_cost_of_none() -> None:
    """No cluster of 1.33 took the CRD: its server estimates the cost of a rule as if the text had 3 MB."""

    class Sized(BaseModel):
        size: Quantity

    size = crd.structural_schema(Sized)["properties"]["size"]
    assert "pattern" in size
    assert "x-kubernetes-validations" not in size


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (str, "string without bounds"),
        (int, "integer without bounds"),
        (Annotated[int, Field(ge=0)], "integer without bounds"),
        (list[Annotated[str, Field(max_length=3)]], "array without bounds"),
        (Annotated[list[str], Field(max_length=3)], r"\.spec\.field\[\]: string without bounds"),
        (dict[str, Any], "a map needs max_length"),
        (Annotated[int, Field(gt=0, le=5)], "exclusiveMinimum has no place"),
        (Annotated[int | Annotated[str, Field(max_length=3)], Field()], "anyOf has no place"),
        (Annotated[str, Field(pattern="^a$", max_length=1)], "pattern has no place"),
        (Annotated[int, Field(multiple_of=2, ge=0, le=8)], "multipleOf has no place"),
    ],
)
def test_what_has_no_faithful_translation_is_refused_by_name(annotation: Any, message: str) -> None:
    model = type("Part", (BaseModel,), {"__annotations__": {"field": annotation}})
    with pytest.raises(
        crd.UntranslatableSchema, match=rf"\.spec\.field.*{message}" if "field" not in message else message
    ):
        crd.structural_schema(model, path=".spec")


def test_generated_files_are_up_to_date() -> None:
    assert crd.main(["--check", "--root", str(CHECKOUT.root)]) == 0, "run `make generate`"


def test_check_names_the_file_that_is_out_of_date_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert crd.main(["--root", str(tmp_path)]) == 0
    (tmp_path / crd.REFERENCE_FILE).write_text("old")
    assert crd.main(["--check", "--root", str(tmp_path)]) == 1
    assert "out of date: docs/reference.md. Run `make generate`" in capsys.readouterr().err
    assert (tmp_path / crd.REFERENCE_FILE).read_text() == "old"


def test_crd_fits_into_the_annotation_of_a_plain_kubectl_apply() -> None:
    text = json.dumps(crd.custom_resource_definition(), separators=(",", ":"))
    escaped = sum(map(text.count, "&<>"))  # kubectl writes each as \\u0026
    assert len(text) + 5 * escaped < CLIENT_SIDE_APPLY_LIMIT * 0.9


def read(text: str) -> Any:
    return quick_yaml.load(text)


def test_chart_has_the_same_crd_and_keeps_it() -> None:
    documents = crd.documents()
    template = documents[crd.CHART_FILE]
    assert template.count("{{") == 2, "a description that Helm would take for a template"
    chart = read("\n".join(line for line in template.splitlines() if not line.startswith("{{")))
    assert {"helm.sh/resource-policy": "keep"} == chart["metadata"].pop("annotations")
    assert read(documents[crd.CRD_FILE]) == chart


def fields() -> list[crd.Fact]:
    properties = crd.resource_schema()["properties"]
    return [fact for part in ("spec", "status") for fact in crd.facts_of(properties[part], path=part)]


@pytest.fixture(scope="module")
def reference() -> str:
    return crd.reference_page()


def test_every_field_has_a_sentence_and_a_place_in_the_reference(reference: str) -> None:
    assert [] == [fact.path for fact in fields() if not fact.sentence.endswith(".")]
    assert [] == [fact.path for fact in fields() if f"| `{fact.path.split('.', 1)[1]}` |" not in reference]


def test_status_takes_nothing_from_defaults_but_that_nobody_has_looked_at_it() -> None:
    status = crd.resource_schema()["properties"]["status"]
    assert {"observedGeneration": -1} == status.pop("default")
    assert "default" not in str(status)


def test_manifest_is_read_by_the_names_that_the_server_knows() -> None:
    job = quick_yaml.load((CHECKOUT.root / "crds/examples/minimal.yaml").read_text())
    ColocatedRLJob.read(job)
    job["spec"]["backoff_limit"] = 1
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        ColocatedRLJob.read(job)
