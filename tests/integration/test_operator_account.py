"""A real API server goes by the chart in what a thief of the operator's token may do, and in how it ranks calls.

The thief's account has every right here, so that nothing but a policy refuses. That the operator is refused nothing is
shown by `test_operator_cluster`, whose operators have this account, with no right but the chart's.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from builders import OWN_ROLLOUT, make_job
from colocated_rl_api import names
from colocated_rl_api.job import USUAL_PROFILE
from colocated_rl_api.names import PodUid
from colocated_rl_api.seats import ROLLOUT_SEAT, role_of
from colocated_rl_operator.clients.authority import SECRET_NAME
from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.manifests import belongings, resources
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.planner.observation import Job
from real_operator import ACCOUNT, OPERATORS, Body, account_of_chart, cluster_without_nodes

pytestmark = pytest.mark.cluster

DEADLINE_S = 60
IMAGES = PodImages("agent", "rollout", "gpu", "Never")
CORE = f"/api/v1/namespaces/{OPERATORS}"
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
MERGE = "application/merge-patch+json"
PLACES = {
    **{kind: f"{CORE}/{kind.lower()}s" for kind in ("Pod", "Secret", "ConfigMap")},
    "ControllerRevision": f"/apis/apps/v1/namespaces/{OPERATORS}/controllerrevisions",
    "NetworkPolicy": f"/apis/networking.k8s.io/v1/namespaces/{OPERATORS}/networkpolicies",
    "PodDisruptionBudget": f"/apis/policy/v1/namespaces/{OPERATORS}/poddisruptionbudgets",
}
NO_SHAPE = "only pods of its jobs"


@dataclass(frozen=True)
class ApiCaller:
    access: ClusterAccess
    session: aiohttp.ClientSession

    async def refusal(self, method: str, path: str, body: object = None, *, dry: bool = True) -> str:
        """Return the server's words; "": it does so, or would do so."""
        kind = MERGE if method == "PATCH" else "application/json"
        headers = {**self.access.headers(), "Content-Type": kind}
        url = f"{self.access.server}{path}{'?dryRun=All' if dry else ''}"
        async with self.session.request(method, url, json=body, headers=headers) as answer:
            found: Body = await answer.json()
            assert answer.status in (200, 201, 202, 403), found
            return "" if answer.status < 300 else str(found["message"])

    async def make(self, body: Body, *, dry: bool = True) -> str:
        return await self.refusal("POST", PLACES[body["kind"]], body, dry=dry)


@asynccontextmanager
async def calling(admin: ClusterAccess, thief: ClusterAccess) -> AsyncIterator[tuple[ApiCaller, ApiCaller]]:
    """An admin, and a thief who may do anything by roles. What the admin makes is foreign to the operator."""
    connector = aiohttp.TCPConnector(ssl=admin.ssl_context())
    binding = {
        "metadata": {"name": "thief"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": OPERATORS}],
    }
    async with aiohttp.ClientSession(connector=connector) as session, AsyncExitStack() as stack:
        by_admin, by_thief = ApiCaller(admin, session), ApiCaller(thief, session)
        assert "" == await by_admin.refusal("POST", BINDINGS, binding, dry=False)
        stack.push_async_callback(by_admin.refusal, "DELETE", f"{BINDINGS}/thief", dry=False)
        for body in FOREIGN:
            assert "" == await by_admin.make(body, dry=False)
            path = f"{PLACES[body['kind']]}/{body['metadata']['name']}"
            stack.push_async_callback(by_admin.refusal, "DELETE", path, {"gracePeriodSeconds": 0}, dry=False)
        async with asyncio.timeout(DEADLINE_S):
            while NO_SHAPE not in await by_thief.make(foreign_pod("trial")):  # noqa: ASYNC110 - servers take up policies later
                await asyncio.sleep(0.1)
        yield by_admin, by_thief


# ------------------------------------------------------------------------------------------------------------- objects
def job_here(**spec: Any) -> Job:
    """Return a job of the operators' namespace, which no pod security guards."""
    return replace(make_job(**spec), namespace=OPERATORS)


def foreign_pod(name: str, **spec: Any) -> Body:
    container = {"name": "a", "image": "a"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [container], **spec}}


def foreign(kind: str, name: str, **parts: Any) -> Body:
    version = {"ControllerRevision": "apps/v1", "NetworkPolicy": "networking.k8s.io/v1"}.get(kind, "v1")
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **parts}


FOREIGN = [
    foreign_pod("theirs"),
    foreign("Secret", "theirs"),
    foreign("ConfigMap", "theirs"),
    foreign("ControllerRevision", "web-5d6f", revision=1, data={}),
    foreign("NetworkPolicy", "theirs", spec={"podSelector": {}}),
]


def pod_of_a_job(change: Callable[[Body], object], *, profile: str = USUAL_PROFILE, seat: str = "gpu-0") -> Body:
    body = copy.deepcopy(resources.pod(job_here(profile=profile), seat, 0, IMAGES))
    change(body)
    return body


def without_owner(body: Body) -> None:
    del body["metadata"]["ownerReferences"]


def owned_by_another(body: Body) -> None:
    body["metadata"]["ownerReferences"][0]["kind"] = "Job"


def of_another_job(body: Body) -> None:
    body["metadata"]["labels"][names.JOB_UID_LABEL] = "0b0e9f0e-8f7e-4c43-9d2a-0c0e5a1b2c3d"


def with_volume(**source: Any) -> Callable[[Body], None]:
    return lambda body: body["spec"]["volumes"].append({"name": "own", **source})


def in_spec(**parts: Any) -> Callable[[Body], None]:
    return lambda body: body["spec"].update(parts)


def in_container(**parts: Any) -> Callable[[Body], None]:
    return lambda body: body["spec"]["containers"][0].update(securityContext=parts)


def with_ports(**port: int) -> Callable[[Body], None]:
    return lambda body: body["spec"]["containers"][0].update(ports=[port])


def token_for(**audience: str) -> Callable[[Body], None]:
    return with_volume(projected={"sources": [{"serviceAccountToken": {"path": "token", **audience}}]})


def certificate_of(signer: str) -> Callable[[Body], None]:
    source = {"signerName": signer, "keyType": "ED25519", "credentialBundlePath": "a.pem"}
    return with_volume(projected={"sources": [{"podCertificate": source}]})


NO_TOKEN = "audience that pods of jobs may have none for"
NO_PRIVILEGE = "no container of a job is privileged"
NO_NODE = "only what their profile"

HOST_PROCESS = {"windowsOptions": {"hostProcess": True}}
PODS_REFUSED = {
    "without an owner": (without_owner, NO_SHAPE),
    "owned by another kind": (owned_by_another, NO_SHAPE),
    "labels of one job, owner another": (of_another_job, NO_SHAPE),
    "token mounted": (in_spec(automountServiceAccountToken=True, serviceAccountName=ACCOUNT), "token mounted"),
    "token by default": (lambda body: body["spec"].pop("automountServiceAccountToken"), "token mounted"),
    "token projected": (token_for(), NO_TOKEN),
    "token projected for a server": (token_for(audience="https://kubernetes.default.svc.cluster.local"), NO_TOKEN),
    "privileged": (in_container(privileged=True), NO_PRIVILEGE),
    "capabilities": (in_container(capabilities={"add": ["SYS_ADMIN"]}), NO_PRIVILEGE),
    "network of its node": (in_spec(hostNetwork=True), NO_NODE),
    "processes of its node": (in_spec(hostPID=True), NO_NODE),
    "path of its node": (with_volume(hostPath={"path": "/"}), NO_NODE),
    "port of its node": (with_ports(containerPort=80, hostPort=80), NO_NODE),
    "process of its node": (in_spec(hostNetwork=True, securityContext=HOST_PROCESS), NO_PRIVILEGE),
}  # fmt: skip


def key_of_a_pod(**changes: Any) -> Body:
    files = {names.CA_FILE: "-"}
    body = belongings.pod_keys(
        job_here(),
        name="sums-gpu-0-0-tls-0",
        pod="sums-gpu-0-0",
        pod_uid=PodUid("some"),
        role=names.ROLE_GPU,
        files=files,
    )
    return body | changes


def objects_of(job: Job) -> list[Body]:
    """Everything that the operator makes of the kinds that policies judge, but for gangs."""
    pods = [resources.pod(job, seat, 0, IMAGES) for seat in job.seats.all]
    keys = [
        belongings.pod_keys(
            job,
            name=f"{pod['metadata']['name']}-tls-0",
            pod=pod["metadata"]["name"],
            pod_uid=PodUid("0b0e9f0e-8f7e-4c43-9d2a-0c0e5a1b2c3d"),
            role=role_of(seat),
            files={names.CA_FILE: "-"},
        )
        for pod, seat in zip(pods, job.seats.all, strict=True)
    ]
    record = belongings.start_record(job, belongings.start_parts(job, IMAGES))
    clients = belongings.client_keys(job, mark="0123456789", files={names.CA_FILE: "-"})
    return [*pods, *keys, clients, record, *belongings.applied(job, operator_namespace=OPERATORS)]


def named_as_if_of_a_job(body: Body) -> Body:
    return body | {"metadata": body["metadata"] | {"name": "coredns"}}


def policy_for_all() -> Body:
    body, _ = belongings.egress_policies(job_here(), belongings.Egress.OPEN)
    return body | {"spec": body["spec"] | {"podSelector": {}}}


REFUSED_OBJECTS = [
    (foreign("Secret", "some"), "only Secrets of its jobs"),
    (key_of_a_pod(immutable=False), "only Secrets of its jobs"),
    (key_of_a_pod(type="kubernetes.io/basic-auth", stringData={"username": "a", "password": "b"}), "type Opaque"),
    (foreign("ConfigMap", "some"), "only objects of its jobs"),
    (named_as_if_of_a_job(belongings.config(job_here())), "only objects of its jobs"),
    (policy_for_all(), "for pods of their job"),
]

REFUSED_CALLS = [
    ("DELETE", f"{CORE}/pods/theirs", None, "deletes only pods of its jobs"),
    ("PATCH", f"{CORE}/pods/theirs", {"metadata": {"labels": {names.JOB_UID_LABEL: "x"}}}, "changes no pod"),
    ("DELETE", f"{CORE}/secrets/theirs", None, "deletes no Secret"),
    ("PATCH", f"{CORE}/secrets/theirs", {"metadata": {"labels": {"a": "b"}}}, "changes no Secret but its own two"),
    ("DELETE", f"{CORE}/configmaps/theirs", None, "only the records of its jobs' starts"),
    ("PATCH", f"{CORE}/configmaps/theirs", {"data": {"a": "b"}}, "only objects of its jobs"),
    ("DELETE", f"{PLACES['ControllerRevision']}/web-5d6f", None, "only the records of its jobs' starts"),
    ("PATCH", f"{PLACES['NetworkPolicy']}/theirs", {"spec": {"policyTypes": ["Egress"]}}, "only objects of its jobs"),
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ policies
async def test_a_thief_of_the_token_makes_no_pod_that_is_none_of_a_job(
    access: ClusterAccess, operators: ClusterAccess
) -> None:
    """Each with a ServiceAccount of another: by roles alone the token ran any program as any account of the cluster."""
    async with calling(access, operators) as (admin, thief):
        assert NO_SHAPE in await thief.make(foreign_pod("some", serviceAccountName="default"))
        assert "" == await admin.make(foreign_pod("some", serviceAccountName="default")), "others may as before"
        for what, (change, words) in PODS_REFUSED.items():
            body = pod_of_a_job(change)
            assert words in await thief.make(body), what
        assert "" == await thief.make(pod_of_a_job(token_for(audience="sts.amazonaws.com"))), "a cloud's identity"


@pytest.mark.since_kubernetes(1, 35)  # with certificates of pods
async def test_a_thief_of_the_token_makes_no_pod_with_a_certificate_for_the_server(tmp_path: Path) -> None:
    """It is no token, and names the pod's ServiceAccount as well. Another's signer is none that the server goes by."""
    gates = ("--feature-gates=PodCertificateRequest=true", "--runtime-config=certificates.k8s.io/v1beta1=true")
    with cluster_without_nodes(tmp_path / "c", *gates) as access:
        async with calling(access, account_of_chart(access, tmp_path)) as (_, thief):
            certificate = certificate_of("kubernetes.io/kube-apiserver-client-pod")
            assert "would know the pod's ServiceAccount" in await thief.make(pod_of_a_job(certificate))
            assert "" == await thief.make(pod_of_a_job(certificate_of("vault.example/pods")))


async def test_a_thief_of_the_token_makes_changes_and_deletes_nothing_of_others(
    access: ClusterAccess, operators: ClusterAccess
) -> None:
    async with calling(access, operators) as (admin, thief):
        for body, words in REFUSED_OBJECTS:
            assert words in await thief.make(body), body
        for method, path, change, words in REFUSED_CALLS:
            assert words in await thief.refusal(method, path, change), (method, path)
            assert "" == await admin.refusal(method, path, change), "others may as before"


@pytest.mark.parametrize(
    "spec",
    [{}, {"rollout": OWN_ROLLOUT, "reference": {"placement": "OwnDevices", "replicas": 1}}, {"spares": 1}],
    ids=["two pods", "each with pods of its own", "a spare"],
)
async def test_whatever_the_operator_renders_is_let_through(
    access: ClusterAccess, operators: ClusterAccess, spec: Body
) -> None:
    async with calling(access, operators) as (_, thief):
        for body in objects_of(job_here(**spec)):
            assert "" == await thief.make(body), body
        own = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": {"name": SECRET_NAME}, "data": {}}
        answer = await thief.make(own)
        assert answer == "" or "already exists" in answer


async def test_what_an_admin_allows_by_the_charts_values_is_let_through(
    access: ClusterAccess, operators: ClusterAccess, tmp_path: Path
) -> None:
    """A profile holds for pods of one role, in its namespaces; a list of ServiceAccounts refuses all others by name."""
    allowed = (
        *("--set", "profiles.nvme.gpu.hostNetwork=true,profiles.nvme.gpu.hostPaths={/mnt/rows}"),
        *("--set", f"profiles.nvme.namespaces={{{OPERATORS}}},profiles.theirs.namespaces={{research}}"),
        *("--set", f"profiles.nvme.gpu.defaults.serviceAccountName={ACCOUNT}"),
        *("--set", "admission.tokenAudiences={vault},admission.serviceAccounts={reader}"),
    )
    account_of_chart(access, tmp_path, *allowed)
    try:
        async with calling(access, operators) as (_, thief):
            refused = pod_of_a_job(in_spec(serviceAccountName=ACCOUNT))
            async with asyncio.timeout(DEADLINE_S):
                while f"may not have the ServiceAccount {ACCOUNT}" not in await thief.make(refused):  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.1)
            for change in (in_spec(hostNetwork=True), with_volume(hostPath={"path": "/mnt/rows"})):
                assert "" == await thief.make(pod_of_a_job(change, profile="nvme"))
                assert NO_NODE in await thief.make(pod_of_a_job(change))
                assert NO_NODE in await thief.make(pod_of_a_job(change, profile="nvme", seat=ROLLOUT_SEAT))
            assert NO_NODE in await thief.make(pod_of_a_job(with_volume(hostPath={"path": "/mnt"}), profile="nvme"))
            theirs = await thief.make(pod_of_a_job(lambda _: None, profile="theirs"))
            assert f"profile theirs is not for jobs of namespace {OPERATORS}" in theirs
            assert "" == await thief.make(pod_of_a_job(token_for(audience="vault")))
            words = await thief.make(pod_of_a_job(in_spec(serviceAccountName="reader")))
            assert "serviceaccount" in words, "there is no such account, which is another one's to say"
            given = in_spec(serviceAccountName=ACCOUNT)
            assert "" == await thief.make(pod_of_a_job(given, profile="nvme"))
            of_rollout = await thief.make(pod_of_a_job(given, profile="nvme", seat=ROLLOUT_SEAT))
            assert f"may not have the ServiceAccount {ACCOUNT}" in of_rollout
            assert NO_TOKEN in await thief.make(pod_of_a_job(token_for(audience="sts.amazonaws.com")))
    finally:
        account_of_chart(access, tmp_path)


async def test_the_server_finds_nothing_wrong_with_the_types_in_policies(
    access: ClusterAccess, operators: ClusterAccess
) -> None:
    place = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    async with calling(access, operators) as (admin, _), asyncio.timeout(DEADLINE_S):
        for name in ("pods", "secrets", "objects"):
            url = f"{access.server}{place}/{OPERATORS}.{ACCOUNT}-{name}"
            while True:
                async with admin.session.get(url, headers=access.headers()) as answer:
                    found = await answer.json()
                if found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"]:
                    break
                await asyncio.sleep(0.1)
            assert {} == found["status"].get("typeChecking", {})


# ---------------------------------------------------------------------------------------------------------------- rank
async def test_the_operators_calls_are_ranked_by_the_charts_flow_schemas(
    access: ClusterAccess, operators: ClusterAccess
) -> None:
    """The server names in each answer which one it went by. Those of the lease have one of their own."""
    schemas = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas"
    leases = "/apis/coordination.k8s.io/v1/namespaces"
    name = f"{OPERATORS}.{ACCOUNT}"
    paths = {
        f"{CORE}/pods": name,
        f"/apis/{names.API_VERSION}/{names.PLURAL}": name,
        "/version": name,
        f"{leases}/default/leases/{ACCOUNT}": name,
        f"{leases}/{OPERATORS}/leases/{ACCOUNT}": f"{name}-lease",
    }
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=access.ssl_context())) as session:

        async def ranked(by: ClusterAccess, path: str) -> str | None:
            async with session.get(access.server + path, headers=by.headers()) as answer:
                return answer.headers.get("X-Kubernetes-PF-FlowSchema-UID")

        async with session.get(access.server + schemas, headers=access.headers()) as answer:
            uids = {each["metadata"]["name"]: each["metadata"]["uid"] for each in (await answer.json())["items"]}
        expected = {path: uids[schema] for path, schema in paths.items()}
        async with asyncio.timeout(DEADLINE_S):
            while expected != (found := {path: await ranked(operators, path) for path in paths}):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.1)
        assert expected == found
        assert await ranked(access, f"{CORE}/pods") not in expected.values(), "others' calls are none of theirs"
