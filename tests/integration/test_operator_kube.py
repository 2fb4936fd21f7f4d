"""The door to the API server, what is told through it, and the authority that is kept there."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from builders import UID, make_manifest
from colocated_rl_api import names
from colocated_rl_operator.clients.authority import (
    SECRET_NAME,
    TOKENS_SECRET_NAME,
    Authority,
    Keyholder,
    Keyring,
    find_authority,
    find_keyring,
    read_again,
    secret_files,
)
from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.clients.errors import (
    ApiError,
    ApiUnreachable,
    Conflict,
    NotAdmitted,
    NotFound,
)
from colocated_rl_operator.clients.events import SERIES_S, About, Events
from colocated_rl_operator.clients.kube import AT_ONCE, Kube
from colocated_rl_operator.clients.limiter import CallLimiter
from colocated_rl_operator.loop.keys import next_step
from fakes.api_server import FakeApiServer
from fakes.issuer import issued_files

JOB_PATH = f"/apis/{names.API_VERSION}/namespaces/default/{names.PLURAL}/sums"
X = {"metadata": {"name": "x"}}


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
    [(403, NotAdmitted), (422, NotAdmitted), *((code, ApiUnreachable) for code in (401, 409, 410, 429, 500, 503))],
)
async def test_answers_become_errors_that_say_what_was_asked(
    api: FakeApiServer, kube: Kube, code: int, error: type[Exception]
) -> None:
    api.refuse_next(code)
    with pytest.raises(error, match=rf"post /api/v1/namespaces/default/pods: {code} refused by the test"):
        await kube.create_pod("default", {"metadata": {"name": "x"}})


async def test_a_conflict_of_a_new_object_is_that_there_is_one(api: FakeApiServer, kube: Kube) -> None:
    """A quota that two count at once is a conflict too: the job's Secret was taken for made, and never was."""
    pod = {"metadata": {"name": "x"}}
    await kube.create_pod("default", pod)
    with pytest.raises(Conflict, match="already exists"):
        await kube.create_pod("default", pod)


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    async with Kube(ClusterAccess("http://127.0.0.1:1")) as kube:
        with pytest.raises(ApiUnreachable, match="no answer"):
            await kube.read_job("default", "sums")


@pytest.mark.parametrize(("code", "message"), [(200, "no JSON"), (302, "302")])
async def test_something_in_between_that_answers_is_no_api_server(code: int, message: str) -> None:
    """A page of a proxy ended the job's loop; a redirect was followed wherever it led."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=code, text="<html>", headers={"Location": "/elsewhere"} if code == 302 else {})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(application) as server, Kube(ClusterAccess(str(server.make_url("")).rstrip("/"))) as kube:
        with pytest.raises(ApiUnreachable, match=message):
            await kube.read_job("default", "sums")


async def test_a_webhook_that_takes_its_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take 30 s. Who hung up after 20 never made an object, and never heard which webhook it was."""
    monkeypatch.setattr("colocated_rl_operator.clients.kube.REQUEST_DEADLINE_S", 0.05)
    is_late = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        await is_late.wait()
        return web.json_response(X)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(application) as server, Kube(ClusterAccess(str(server.make_url("")).rstrip("/"))) as kube:
        making = [kube.create_pod("default", X), kube.apply("default", {"apiVersion": "v1", "kind": "ConfigMap", **X})]
        made = [asyncio.create_task(each) for each in making]
        with pytest.raises(ApiUnreachable, match="no answer"):
            await kube.read_job("default", "sums")
        is_late.set()
        assert [X, X] == await asyncio.gather(*made)


async def test_calls_that_hang_hold_up_none_of_another_kind_or_namespace() -> None:
    """A webhook of one namespace that answered no pod took every connection there was: no job was switched any more."""
    hanging, heard, end = 0, asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal hanging
        if request.path == "/api/v1/namespaces/held/pods":
            hanging += 1
            heard.set()
            await end.wait()
        return web.json_response({"metadata": {"name": "x"}, "items": []})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(application) as server, Kube(ClusterAccess(str(server.make_url("")).rstrip("/"))) as kube:
        async with asyncio.TaskGroup() as tasks:
            held = [tasks.create_task(kube.create_pod("held", {})) for _ in range(4 * AT_ONCE)]
            while hanging < AT_ONCE:
                heard.clear()
                await heard.wait()
            assert [] == await kube.list_pods("default", UID)
            await kube.write_status("held", "sums", resource_version="1", status={})
            assert AT_ONCE == hanging
            end.set()
        assert all(task.result() for task in held)


async def test_a_call_has_its_time_from_its_turn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn counted as time of the server: of 500 jobs that switched at once, calls gave up before they were made, and
    went to the end of the queue; the last job served after 82 s instead of 13.
    """
    turn = asyncio.Event()

    async def wait(_: CallLimiter) -> None:
        await turn.wait()

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(X)

    monkeypatch.setattr(CallLimiter, "wait", wait)
    monkeypatch.setattr("colocated_rl_operator.clients.kube.REQUEST_DEADLINE_S", 1.0)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(application) as server, Kube(ClusterAccess(str(server.make_url("")).rstrip("/"))) as kube:
        reading = asyncio.create_task(kube.read_job("default", "sums"))
        _, waits = await asyncio.wait({reading}, timeout=1.5)
        assert {reading} == waits
        turn.set()
        assert X == await reading
        turn.clear()
        monkeypatch.setattr("colocated_rl_operator.clients.kube.TURN_DEADLINE_S", 0.01)
        with pytest.raises(ApiUnreachable, match="too many calls were before it"):
            await kube.read_job("default", "sums")


@pytest.mark.parametrize(
    ("code", "retry_after", "held_s"),
    [(429, "7", 7), (503, "1", 1), (429, None, 0), (429, "soon", 0), (429, "-1", 0), (200, "7", 0), (422, "7", 0)],
)
async def test_a_server_that_is_too_busy_is_left_alone_for_as_long_as_it_says(
    monkeypatch: pytest.MonkeyPatch, code: int, retry_after: str | None, held_s: float
) -> None:
    """All calls but those of the lease, without which the operator would end."""
    held: list[float] = []
    waits = 0

    async def wait(_: CallLimiter) -> None:
        nonlocal waits
        waits += 1

    monkeypatch.setattr(CallLimiter, "wait", wait)
    monkeypatch.setattr(CallLimiter, "hold", lambda _, seconds: held.append(seconds))

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(
            {**X, "items": []}, status=code, headers={"Retry-After": retry_after} if retry_after else {}
        )

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(application) as server, Kube(ClusterAccess(str(server.make_url("")).rstrip("/"))) as kube:
        for call in (kube.list_pods("default", UID), kube.read_lease("operators", "lease")):
            with contextlib.suppress(ApiError):
                await call
    assert ([held_s] * 2, 1) == (held, waits)


async def test_a_missing_object_is_distinguished_from_a_missing_kind(api: FakeApiServer, kube: Kube) -> None:
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


async def test_our_finalizer_alone_is_dropped_and_only_of_a_job_on_its_way_out(api: FakeApiServer, kube: Kube) -> None:
    finalizers = ["theirs", names.FINALIZER]
    manifest = make_manifest()
    job = api.put(JOB_PATH, {**manifest, "metadata": {**manifest["metadata"], "finalizers": finalizers}})
    uid = job["metadata"]["uid"]
    await kube.drop_finalizer("default", "sums", uid=uid)
    assert job == api.objects[JOB_PATH]
    job = api.put(JOB_PATH, {**job, "metadata": {**job["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})
    await kube.drop_finalizer("default", "sums", uid=names.JobUid("another"))
    assert job == api.objects[JOB_PATH]
    await kube.drop_finalizer("default", "sums", uid=uid)
    assert ["theirs"] == api.objects[JOB_PATH]["metadata"]["finalizers"]
    api.remove(JOB_PATH)
    await kube.drop_finalizer("default", "sums", uid=uid)


async def test_deleting_spares_another_pod_of_the_same_name(api: FakeApiServer, kube: Kube) -> None:
    path = "/api/v1/namespaces/default/pods/x"
    api.put(path, {"metadata": {"name": "x"}})
    await kube.delete_pod("default", "x", uid=names.PodUid("another"))
    assert path in api.objects
    await kube.delete_pod("default", "x", uid=api.objects[path]["metadata"]["uid"])
    await kube.delete_pod("default", "x", uid=names.PodUid("gone already"))
    assert path not in api.objects


# --------------------------------------------------------------------------------------------------------------- events
async def test_the_same_event_is_counted_and_a_new_one_is_made(api: FakeApiServer, kube: Kube) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    events, about = Events(kube, instance="test", now=lambda: now), About("default", "sums", UID)
    for note in ("step 1", "step 1", "step 1", "step 2"):
        await events.publish(about, "Normal", "NextStep", note, action="RaiseEpoch")
    assert ["step 1", "step 2"] == [event["note"] for event in api.all("events")]
    assert 3 == api.all("events")[0]["series"]["count"]
    now += timedelta(seconds=SERIES_S)
    await events.publish(about, "Normal", "NextStep", "step 1", action="RaiseEpoch")
    assert 3 == len(api.all("events"))


async def test_an_event_that_somebody_deleted_is_reported_anew(api: FakeApiServer, kube: Kube) -> None:
    """It was counted where nobody could see it, for as long as it went on happening."""
    events, about = Events(kube, instance="test"), About("default", "sums", UID)
    for _ in range(2):
        await events.publish(about, "Warning", "BackingOff", "x", action="BackOff")
        [event] = api.all("events")
        api.remove(f"/apis/events.k8s.io/v1/namespaces/default/events/{event['metadata']['name']}")


async def test_a_long_note_is_cut_to_what_the_server_takes_in_bytes(api: FakeApiServer, kube: Kube) -> None:
    """1024 characters of a trainer's last words may be three times as many bytes, and then there was no event."""
    await Events(kube, instance="test").publish(
        About("default", "sums", UID), "Warning", "TrainerDied", 1024 * "\u2588", action="RaiseEpoch"
    )
    [event] = api.all("events")
    assert 341 * "\u2588" == event["note"]


async def test_a_lost_event_stops_nobody(api: FakeApiServer, kube: Kube) -> None:
    api.refuse_next(403)
    await Events(kube, instance="test").publish(
        About("default", "sums", UID), "Warning", "TrainerDied", "x", action="RaiseEpoch"
    )
    assert [] == api.all("events")


# ------------------------------------------------------------------------------------------------------------ authority
GPU_POD = Keyholder(UID, "sums-gpu-0-0", names.ROLE_GPU)


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


def test_a_members_certificate_serves_its_own_name_and_nothing_else() -> None:
    authority = Authority.new()
    files = secret_files(Keyring(authority, b"k" * 32).keys(GPU_POD))
    certificate = x509.load_pem_x509_certificate(files[names.CERT_FILE].encode())
    alternative = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [names.pod_server_name(UID, GPU_POD.pod)] == alternative.get_values_for_type(x509.DNSName)
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [ExtendedKeyUsageOID.SERVER_AUTH] == list(purposes)
    assert names.OPERATOR_CLIENT_NAME not in str(certificate.subject)


def test_members_have_a_key_each_and_only_the_rollout_controller_serves_the_jobs_name() -> None:
    keyring = Keyring(Authority.new(), b"k" * 32)
    rollout = replace(GPU_POD, pod="sums-rollout-0", role=names.ROLE_ROLLOUT)
    keys = [keyring.keys(each) for each in (GPU_POD, replace(GPU_POD, pod="sums-gpu-1-0"), rollout)]
    assert 3 == len({each.key for each in keys})
    served = [
        x509.load_pem_x509_certificate(each.certificate.encode())
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value.get_values_for_type(x509.DNSName)
        for each in keys
    ]
    assert [False, False, True] == [names.member_server_name(UID) in each for each in served]


def test_a_jobs_data_token_is_its_own_and_another_one_by_name_and_not_the_authoritys() -> None:
    keyring, another = Keyring(Authority.new(), b"k" * 32), Keyring(Authority.new(), b"k" * 32)
    jobs = [GPU_POD, replace(GPU_POD, job_uid=names.JobUid("another")), replace(GPU_POD, token_name="2")]
    assert 3 == len({keyring.token(each) for each in jobs})
    assert [keyring.token(each) for each in jobs] == [another.token(each) for each in jobs]
    assert keyring.token(GPU_POD) != Keyring(keyring.authority, b"l" * 32).token(GPU_POD)


@pytest.mark.parametrize(
    ("days", "is_current"),
    [(0, True), (19.9, True), (20.1, False), (31, False), (-0.9, True), (-1.1, False)],
    ids=["new", "19", "20", "over", "of a clock that was ahead", "of one that was far ahead"],
)
def test_certificates_of_thirty_days_are_renewed_when_ten_are_left_or_the_clock_was_ahead(
    days: float, is_current: bool
) -> None:
    now = datetime.now(UTC)
    keyring = Keyring(Authority.new(), b"k" * 32, wall=lambda: now)
    held = keyring.keys(GPU_POD).held
    assert held is not None
    assert timedelta(days=30) - timedelta(seconds=1) <= held.ends - now <= timedelta(days=30)
    now += timedelta(days=days)
    assert is_current is keyring.is_current(held, GPU_POD)


def test_keys_are_outdated_when_authority_trust_or_token_has_changed() -> None:
    former, next_one, token_key = Authority.new(), Authority.new(), b"k" * 32
    keyring = Keyring(former, token_key)
    held = keyring.keys(GPU_POD).held
    assert held is not None
    for authority in (replace(former, others=(next_one.certificate,)), replace(next_one, others=(former.certificate,))):
        assert keyring.replace(authority, token_key)
        assert not keyring.is_current(held, GPU_POD)
    assert keyring.replace(former, token_key)
    assert keyring.is_current(held, GPU_POD)
    assert not keyring.is_current(held, replace(GPU_POD, token_name="2"))
    assert keyring.replace(former, b"l" * 32)
    assert not keyring.is_current(held, GPU_POD)
    assert not keyring.replace(former, b"l" * 32)


async def test_an_authority_whose_key_is_anothers_is_refused(api: FakeApiServer, kube: Kube) -> None:
    files = Authority.new().files() | {names.CA_FILE: Authority.new().files()[names.CA_FILE]}
    data = {name: base64.b64encode(content).decode() for name, content in files.items()}
    api.put(f"/api/v1/namespaces/operators/secrets/{SECRET_NAME}", {"metadata": {"name": SECRET_NAME}, "data": data})
    with pytest.raises(ApiUnreachable, match="is not that of"):
        await find_keyring(kube, "operators")


async def test_a_token_key_that_is_damaged_is_not_replaced(api: FakeApiServer, kube: Kube) -> None:
    path = f"/api/v1/namespaces/operators/secrets/{TOKENS_SECRET_NAME}"
    api.put(path, {"metadata": {"name": TOKENS_SECRET_NAME}, "data": {"token.key": "c2hvcnQ="}})
    with pytest.raises(ApiUnreachable, match=r"has no token\.key of 32 bytes"):
        await find_keyring(kube, "operators")


async def test_secrets_that_are_gone_are_not_made_again_under_a_leader(api: FakeApiServer, kube: Kube) -> None:
    """It goes on by the keys that it has."""
    keyring = await find_keyring(kube, "operators")
    assert not await read_again(kube, "operators", keyring)
    api.remove(f"/api/v1/namespaces/operators/secrets/{SECRET_NAME}")
    with pytest.raises(NotFound):
        await read_again(kube, "operators", keyring)


def test_the_operator_trusts_its_own_authority_alone() -> None:
    context = Keyring(Authority.new(), b"k" * 32).operator_context()
    assert ssl.CERT_REQUIRED is context.verify_mode
    assert context.check_hostname
    assert 1 == len(context.get_ca_certs())


# ----------------------------------------------------------------------------------------------- an authority of others
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
)


def test_an_issued_authority_signs_only_while_everybody_trusts_it_and_the_former_one() -> None:
    former, issued = Authority.new(), Authority.new()
    steps, present = list[tuple[Any, list[Any]]](), former
    while (nearer := next_step(present, issued)) is not None:
        present = nearer
        steps.append((present.certificate, [*present.others]))
    first, second = former.certificate, issued.certificate
    assert [(first, [second]), (second, [first]), (second, [])] == steps
    assert next_step(issued, issued) is None


def test_another_authority_that_is_issued_meanwhile_is_followed_from_there() -> None:
    former, issued, newest = Authority.new(), Authority.new(), Authority.new()
    half_way = next_step(former, issued)
    assert half_way is not None
    again = next_step(half_way, newest)
    assert again is not None
    assert (former.certificate, (newest.certificate,)) == (again.certificate, again.others)


def test_members_trust_a_certificate_whose_issuer_names_its_key_by_another_hash(tmp_path: Path) -> None:
    """Go names keys by SHA-256, we by SHA-1, and OpenSSL takes a certificate for another authority's."""
    for form in (serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL):
        files = issued_files(form=form)
        authority = Authority.issued(files)
        keys = Keyring(authority, b"k" * 32).keys(GPU_POD)
        for name, content in (("ca.pem", keys.authorities), ("leaf.pem", keys.certificate)):
            (tmp_path / name).write_text(content)
        words: list[str | Path] = [
            "openssl",
            "verify",
            "-x509_strict",
            "-CAfile",
            tmp_path / "ca.pem",
            tmp_path / "leaf.pem",
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (0, f"{tmp_path}/leaf.pem: OK\n") == (done.returncode, done.stdout), done.stderr


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (lambda: issued_files(issuer=Authority.new()), "is not self-signed"),
        (lambda: issued_files(is_ca=False), "needs isCA: true"),
        (lambda: issued_files() | {names.KEY_FILE: issued_files()[names.KEY_FILE]}, "is not that of"),
        (lambda: issued_files() | {names.KEY_FILE: RSA_KEY}, "is not an elliptic curve key"),
        (lambda: {names.CERT_FILE: b""}, "tls.key"),
    ],
    ids=["intermediate", "no authority", "another key", "RSA", "half"],
)
async def test_what_is_no_authority_of_its_own_is_not_taken(
    api: FakeApiServer, kube: Kube, files: Callable[[], dict[str, bytes]], words: str
) -> None:
    """Behind an intermediate one, everybody would trust its issuer, and whoever has a certificate of that."""
    put_secret(api, "issued", files())
    with pytest.raises(ApiUnreachable, match=words):
        await find_authority(kube, "operators", "issued")
    assert ["issued"] == [each["metadata"]["name"] for each in api.all("secrets")]


async def test_an_operator_waits_for_its_first_authority_until_it_is_issued(api: FakeApiServer, kube: Kube) -> None:
    with pytest.raises(ApiUnreachable, match="describe certificate"):
        await find_authority(kube, "operators", "issued")
    files = issued_files()
    put_secret(api, "issued", files)
    assert Authority.issued(files).files() == (await find_authority(kube, "operators", "issued")).files()
    assert Authority.issued(files).files() == (await _read(api)).files(), "and goes on without the other Secret"


def put_secret(api: FakeApiServer, name: str, files: Mapping[str, bytes]) -> None:
    data = {file: base64.b64encode(content).decode() for file, content in files.items()}
    api.put(f"/api/v1/namespaces/operators/secrets/{name}", {"metadata": {"name": name}, "data": data})
