"""The door to the API server, what is told through it, and the authority that is kept there."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from builders import UID, make_manifest
from colocated_rl_api import names
from colocated_rl_operator.authority import SECRET_NAME, Authority, find_authority
from colocated_rl_operator.cluster import ClusterAccess
from colocated_rl_operator.errors import ApiUnreachable, Conflict, NotFound, Refused
from colocated_rl_operator.events import SERIES_S, About, Events
from colocated_rl_operator.kube import Kube
from fakes.api_server import FakeApiServer

JOB_PATH = f"/apis/{names.API_VERSION}/namespaces/default/{names.PLURAL}/sums"


@pytest.fixture
async def api() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer() as api:
        yield api


@pytest.fixture
async def kube(api: FakeApiServer) -> AsyncIterator[Kube]:
    async with Kube(api.access) as kube:
        yield kube


# --------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("code", "error"),
    [(409, Conflict), (403, Refused), (422, Refused), *((code, ApiUnreachable) for code in (401, 429, 500, 503))],
)
async def test_answers_become_errors_that_say_what_was_asked(
    api: FakeApiServer, kube: Kube, code: int, error: type[Exception]
) -> None:
    api.refuse_next(code)
    with pytest.raises(error, match=rf"post /api/v1/namespaces/default/pods: {code} refused by the test"):
        await kube.create_pod("default", {"metadata": {"name": "x"}})


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    async with Kube(ClusterAccess("http://127.0.0.1:1")) as kube:
        with pytest.raises(ApiUnreachable, match="no answer"):
            await kube.read_job("default", "sums")


@pytest.mark.parametrize(("code", "says"), [(200, "no JSON"), (302, "302")])
async def test_something_in_between_that_answers_is_no_api_server(code: int, says: str) -> None:
    """A page of a proxy ended the job's loop; a redirect was followed wherever it led."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=code, text="<html>", headers={"Location": "/elsewhere"} if code == 302 else {})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(application) as server, Kube(ClusterAccess(str(server.make_url("")).rstrip("/"))) as kube:
        with pytest.raises(ApiUnreachable, match=says):
            await kube.read_job("default", "sums")


async def test_a_missing_object_is_told_from_a_missing_kind(api: FakeApiServer, kube: Kube) -> None:
    with pytest.raises(NotFound) as missing:
        await kube.read_job("default", "sums")
    assert missing.value.is_kind_known


async def test_every_answer_is_counted(api: FakeApiServer) -> None:
    counted: list[tuple[str, str, int]] = []
    async with Kube(api.access, count=lambda *answer: counted.append(answer)) as kube:
        await kube.list_pods("default", UID)
    assert [("get", "pods", 200)] == counted


# --------------------------------------------------------------------------------------------------------- precondition
async def test_a_status_is_written_only_over_the_version_that_was_read(api: FakeApiServer, kube: Kube) -> None:
    version = api.put(JOB_PATH, make_manifest())["metadata"]["resourceVersion"]
    written = await kube.write_status("default", "sums", resource_version=version, status={"epoch": 1})
    with pytest.raises(Conflict):
        await kube.write_status("default", "sums", resource_version=version, status={"epoch": 1})
    newest = written["metadata"]["resourceVersion"]
    replaced = await kube.write_status("default", "sums", resource_version=newest, status={"step": 1})
    assert {"step": 1} == replaced["status"]  # the whole status: what is not written is gone


async def test_deleting_spares_another_pod_of_the_same_name(api: FakeApiServer, kube: Kube) -> None:
    path = "/api/v1/namespaces/default/pods/x"
    api.put(path, {"metadata": {"name": "x"}})
    await kube.delete_pod("default", "x", uid="another")
    assert path in api.objects
    await kube.delete_pod("default", "x", uid=api.objects[path]["metadata"]["uid"])
    await kube.delete_pod("default", "x", uid="gone already")
    assert path not in api.objects


# --------------------------------------------------------------------------------------------------------------- events
async def test_the_same_event_is_counted_and_a_new_one_is_made(api: FakeApiServer, kube: Kube) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    events, about = Events(kube, instance="test", now=lambda: now), About("default", "sums", UID)
    for note in ("step 1", "step 1", "step 1", "step 2"):
        await events.tell(about, "Normal", "NextStep", note, action="RaiseEpoch")
    assert ["step 1", "step 2"] == [event["note"] for event in api.all("events")]
    assert 3 == api.all("events")[0]["series"]["count"]
    now += timedelta(seconds=SERIES_S)
    await events.tell(about, "Normal", "NextStep", "step 1", action="RaiseEpoch")
    assert 3 == len(api.all("events"))


async def test_a_lost_event_stops_nobody(api: FakeApiServer, kube: Kube) -> None:
    api.refuse_next(403)
    await Events(kube, instance="test").tell(
        About("default", "sums", UID), "Warning", "TrainerDied", "x", action="RaiseEpoch"
    )
    assert [] == api.all("events")


# ------------------------------------------------------------------------------------------------------------ authority
async def test_replicas_that_start_at_once_agree_on_one_authority(api: FakeApiServer) -> None:
    async with Kube(api.access) as first, Kube(api.access) as second:
        found = await asyncio.gather(find_authority(first, "operators"), find_authority(second, "operators"))
    assert found[0].files() == found[1].files()
    assert found[0].files() == (await _read(api)).files()


async def _read(api: FakeApiServer) -> Authority:
    async with Kube(api.access) as kube:
        return await find_authority(kube, "operators")


async def test_an_authority_that_cannot_be_read_is_not_replaced(api: FakeApiServer, kube: Kube) -> None:
    api.put(f"/api/v1/namespaces/operators/secrets/{SECRET_NAME}", {"metadata": {"name": SECRET_NAME}, "data": {}})
    with pytest.raises(ApiUnreachable, match="holds no authority"):
        await find_authority(kube, "operators")


def test_a_jobs_certificate_serves_its_own_name_and_nothing_else() -> None:
    authority = Authority.new()
    files = authority.job_files(UID)
    certificate = x509.load_pem_x509_certificate(files[names.CERT_FILE].encode())
    alternative = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [names.member_server_name(UID)] == alternative.get_values_for_type(x509.DNSName)
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [ExtendedKeyUsageOID.SERVER_AUTH] == list(purposes)
    assert names.OPERATOR_CLIENT_NAME not in str(certificate.subject)
    assert files[names.DATA_TOKEN_FILE] != authority.job_files(UID)[names.DATA_TOKEN_FILE]


def test_the_operator_trusts_its_own_authority_alone() -> None:
    context = Authority.new().operator_context()
    assert ssl.CERT_REQUIRED is context.verify_mode
    assert context.check_hostname
    assert 1 == len(context.get_ca_certs())
