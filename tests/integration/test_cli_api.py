"""The command line reads jobs that Python could not, and that some author left among those of others."""

from __future__ import annotations

import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from colocated_rl_api.bounded_json import MOST_VALUES, REFUSED
from colocated_rl_cli.base.errors import NotReached
from colocated_rl_cli.cluster.api import Api

DEEP = '{"metadata": {"name": "deep"}, "spec": {"trainer": ' + "[" * 5000 + "]" * 5000 + "}}"
OTHER = '{"metadata": {"name": "other"}, "spec": {"trainer": {"config": {}}}}'


LISTED = f'{{"items": [{DEEP}, {OTHER}]}}'
WATCHED = "".join(f'{{"type": "ADDED", "object": {job}}}\n' for job in (DEEP, OTHER))


ENVIRONMENT = json.dumps([{"name": "a"}] * MOST_VALUES)
LARGE = f'{{"metadata": {{"name": "large", "labels": {{}}}}, "spec": {{"containers": {ENVIRONMENT}}}, "status": {{}}}}'
CUT = '{"metadata": '
PODS = f'{{"kind": "PodList", "metadata": {{}}, "items": [{LARGE}]}}'


async def answer(request: web.Request) -> web.Response:
    if request.path.endswith("/pods"):
        return web.Response(text=PODS, content_type="application/json")
    if request.path.endswith("/cut"):
        return web.Response(text=CUT, content_type="application/json")
    text = WATCHED if "watch" in request.query else DEEP if request.path.endswith("/deep") else LISTED
    return web.Response(text=text, content_type="application/json")


async def test_a_job_too_deep_for_python_hides_no_other() -> None:
    application = web.Application()
    application.add_routes([web.get("/{path:.*}", answer)])
    async with TestServer(application) as server, aiohttp.ClientSession(server.make_url("/")) as session:
        api = Api(session, "us")
        assert ["deep", "other"] == await api.job_names()
        assert {"trainer": REFUSED} == (await api.job("deep"))["spec"]
        watched = [each async for each in api.watch(api.jobs, {}, what="jobs")]
        with pytest.raises(NotReached, match="job us/cut: the API server's answer is no JSON: "):  # was a ValueError
            await api.job("cut")
    assert [REFUSED, {"config": {}}] == [job["spec"]["trainer"] for _, job in watched]


async def test_a_large_pod_is_one_of_a_jobs_like_others() -> None:
    """The whole of it was left out, and words were in its place: commands ended with a traceback. Whoever may make a
    pod may give it the label of a job.
    """
    application = web.Application()
    application.add_routes([web.get("/{path:.*}", answer)])
    async with TestServer(application) as server, aiohttp.ClientSession(server.make_url("/")) as session:
        (pod,) = await Api(session, "us").pods_of("sums")
    assert ("large", {}, REFUSED) == (pod["metadata"]["name"], pod["status"], pod["spec"]["containers"])
