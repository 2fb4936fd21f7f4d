"""The OpenAPI documents in docs/openapi; that answers are as they say is shown where there are answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from documents.openapi import trainer
from jsonschema import Draft202012Validator
from pydantic import create_model

from colocated_rl_rollout.pages.interface import interface
from colocated_rl_rollout.pages.openapi import (
    JSON,
    Operation,
    Route,
    document,
)
from colocated_rl_trainer.protocol.rank_server import ROUTES
from fakes.interface import Interface

DOCUMENTS = {"rollout": interface(), "trainer": trainer()}


def test_the_trainers_document_has_every_route_that_a_rank_answers_and_no_other() -> None:
    assert {("GET", "/v1/state")} | {("POST", path) for path in ROUTES} == Interface(trainer()).routes


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_each_schema_is_one_and_each_reference_leads_to_one(document: dict[str, Any]) -> None:
    named = document["components"]["schemas"]
    for schema in named.values():
        Draft202012Validator.check_schema(schema)
    referred = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(document)))
    assert {f"#/components/schemas/{name}" for name in named} == referred, "and none is there that nobody refers to"


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_each_operation_says_what_it_is_for_and_has_a_name_of_its_own(document: dict[str, Any]) -> None:
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert all(operation["summary"] for operation in operations)
    assert len(operations) == len({operation["operationId"] for operation in operations})


def test_two_types_of_one_name_are_not_taken_for_one() -> None:
    kinds = [create_model("Said", what=(kind, ...)) for kind in (int, str)]
    operations = {
        Route("GET", f"/{place}"): Operation(tag="", summary="", answers={JSON: kind})
        for place, kind in enumerate(kinds)
    }
    with pytest.raises(ValueError, match="Said"):
        document(operations)
