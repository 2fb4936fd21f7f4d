"""The OpenAPI documents, held against the standard by its own validator."""

from __future__ import annotations

from typing import Any

import pytest
from documents.openapi import trainer
from openapi_spec_validator import OpenAPIV31SpecValidator

from colocated_rl_rollout.pages.interface import interface


@pytest.mark.parametrize("document", [interface(), trainer()], ids=["rollout", "trainer"])
def test_documents_are_openapi_3_1(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1.")
    assert [] == [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()]


def test_what_is_no_document_is_found() -> None:
    assert [*OpenAPIV31SpecValidator({**trainer(), "paths": {"no-slash": {}}}).iter_errors()]
    assert [*OpenAPIV31SpecValidator({**trainer(), "info": {"title": "without a version"}}).iter_errors()]
