"""Whose devices a role may share, and the one message of everything that it may not."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from builders import ROLLOUT, make_job
from colocated_rl_api.colocation import COLOCATIONS

ROLES = ("rollout", "reference", "trainer", "", "critic")


@pytest.mark.parametrize("reference", [None, {}, {"colocateWith": "trainer"}])
def test_the_trainers_devices_are_shared_also_when_nothing_is_said(reference: dict[str, str] | None) -> None:
    spec = make_job(reference=reference, rollout=ROLLOUT | {"colocateWith": "trainer"}).spec
    assert "trainer" == spec.rollout.colocate_with == (spec.reference or spec.rollout).colocate_with


@pytest.mark.parametrize(
    ("rollout", "reference", "words"),
    [
        ("trainer", "reference", "reference shares no devices by naming itself: write trainer"),
        ("rollout", None, "rollout shares no devices by naming itself: write trainer"),
        ("reference", None, "colocateWith is reference, and this job has none: write trainer"),
        ("reference", "rollout", "rollout and reference name each other, and no devices: write trainer in both"),
        ("reference", "trainer", "rollout on the devices of reference is not supported yet: write trainer, whose they"),
        ("trainer", "rollout", "reference on the devices of rollout is not supported yet: write trainer, whose they"),
        (
            "trainer",
            "critic",
            "colocateWith is critic, and the roles are rollout, reference and trainer: write trainer",
        ),
    ],
)
def test_what_makes_no_sense_or_is_not_there_yet_is_refused_with_what_to_write(
    rollout: str, reference: str | None, words: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)) as refused:
        make_job(
            rollout=ROLLOUT | {"colocateWith": rollout},
            reference=None if reference is None else {"colocateWith": reference},
        )
    assert 1 == refused.value.error_count()


def test_the_trainer_names_nobody() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        make_job(trainer={"colocateWith": "rollout"})


def test_server_and_models_say_the_same_words() -> None:
    for colocation in COLOCATIONS:
        for named in ROLES:
            for peers in (None, *ROLES):
                words = colocation.refusal(named, peers=peers)
                assert (words is None) == (named in ("trainer", ""))
                assert (words or "").replace("critic", "%s") in (colocation.rule.said or "")
