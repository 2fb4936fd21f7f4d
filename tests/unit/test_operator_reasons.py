"""Every reason that the operator gives has a sentence, and a place in the reference.

Conditions and events take no other type than `DocumentedReason`, so there are no others. What members say of themselves
as text is compared with its remedies in `test_cli_explain`.
"""

from __future__ import annotations

import re

import pytest

from colocated_rl_operator import crd
from colocated_rl_operator.planner.reasons import (
    Cause,
    ConditionType,
    DocumentedReason,
    Reason,
)

DOCUMENTED: list[DocumentedReason] = [*ConditionType, *Cause, *Reason]
REFERENCE = crd.reference_page()


@pytest.mark.parametrize("reason", DOCUMENTED, ids=str)
def test_a_reason_is_a_word_with_a_sentence_and_an_advice_that_stands_in_the_reference(
    reason: DocumentedReason,
) -> None:
    assert re.fullmatch("[A-Z][A-Za-z]+", reason)
    assert re.fullmatch(r"[A-Z].*\.", reason.meaning)
    assert not reason.advice or re.fullmatch(r"[a-z].*[^.]", reason.advice)
    assert f"| `{reason}` | {reason.meaning} |" in REFERENCE


def test_what_needs_a_person_says_what_to_do() -> None:
    silent = {reason for reason in (*Cause, *Reason) if not reason.advice}
    assert not {cause for cause in Cause if cause.is_failure or cause.is_recovery} & silent
    advised = {Reason.INVALID_SPEC, Reason.OBJECT_REFUSED, Reason.VOLUME_LOST, Reason.POD_DELETED, Reason.NODE_TAINTED}
    assert not {*advised, Reason.OPERATOR_CUT_OFF} & silent
