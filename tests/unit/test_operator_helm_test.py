"""`helm test` waits for the end of one job."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.clients.errors import NotAdmitted
from colocated_rl_operator.clients.kube import Kube
from colocated_rl_operator.helm_test import verdict


def job(**conditions: str) -> dict[str, Any]:
    """Types with their status and reason: `Complete="True AllDone"`."""
    found = [
        {"type": kind, "status": words.split()[0], "reason": words.split()[1], "message": "some words"}
        for kind, words in conditions.items()
    ]
    return {"status": {"conditions": found}}


async def tried(*answers: dict[str, Any] | int, deadline_s: float = 20) -> tuple[bool, str]:
    """The last answer is given again and again."""
    left = list(answers)

    async def answer(_: web.Request) -> web.Response:
        now = left.pop(0) if len(left) > 1 else left[0]
        return web.json_response({"message": "some"}, status=now) if isinstance(now, int) else web.json_response(now)

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    async with TestServer(application) as server, Kube(ClusterAccess(str(server.make_url("")).rstrip("/"))) as kube:
        return await verdict(
            kube, namespace="n", name="j", wanted="Complete", deadline_s=deadline_s, look_again_s=0.001
        )


async def test_it_waits_until_the_condition_is_true_whatever_comes_between() -> None:
    answers: tuple[dict[str, Any] | int, ...] = (
        404,
        {},
        job(Ready="False Climbing"),
        503,
        job(Ready="True Serving", Complete="False StepsRemain"),
    )
    assert (True, "Complete: Completed some words") == await tried(*answers, job(Complete="True Completed"))


async def test_a_job_that_needs_a_person_ends_it_at_once_with_its_reason() -> None:
    assert (False, "ObjectRefused: some words") == await tried(job(Ready="False Some", Stalled="True ObjectRefused"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [({}, "does one watch this namespace?"), (job(Ready="False PodsStarting"), "PodsStarting: some words")],
    ids=["nobody looked", "on its way"],
)
async def test_at_the_deadline_it_says_how_far_the_job_came(answer: dict[str, Any], message: str) -> None:
    came_true, output = await tried(answer, deadline_s=0.05)
    assert not came_true
    assert "not Complete within 0 s" in output
    assert message in output


async def test_what_is_not_allowed_is_no_matter_of_time() -> None:
    with pytest.raises(NotAdmitted):
        await tried(403)
