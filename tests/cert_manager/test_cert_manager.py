"""An authority that cert-manager's own controller makes and renews, of what the chart renders, under a running job."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from issued_authority import ISSUED, files_of, must_follow_a_renewal_under_a_running_job
from neighbours import add_kinds, kubectl, running
from real_world import DEADLINE_S, RealWorld, open_real_world

from colocated_rl_api import names
from colocated_rl_operator.clients.authority import Authority
from colocated_rl_operator.clients.cluster import ClusterAccess
from fakes.issuer import issued_files
from real_operator import OPERATORS, cluster_without_nodes, kubeconfig_of
from setup.layout import CHECKOUT

BUILT = CHECKOUT.build / "cert-manager"
CHART = CHECKOUT.root / "charts/colocated-rl"
CERTIFICATE = f"/apis/cert-manager.io/v1/namespaces/{OPERATORS}/certificates/{ISSUED}"


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterAccess]:
    """A cluster with cert-manager's kinds, and with its controller."""
    place = tmp_path_factory.mktemp("c")
    with cluster_without_nodes(place / "c") as access:
        kubeconfig = place / "kubeconfig"
        kubeconfig.write_text(kubeconfig_of(access))
        add_kinds(kubeconfig, BUILT / "crds")
        words = (f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--metrics-listen-address=127.0.0.1:0")
        with running(BUILT / "bin/cert-manager", place, *words):
            yield access


def rendered(*words: str | Path) -> str:
    """Return what the chart renders for cert-manager."""
    chart = ("template", "colocated-rl", CHART, "--namespace", OPERATORS, "--set", "authority.certManager.enabled=true")
    command = [CHECKOUT.localcluster, "helm", *chart, *words, "--show-only", "templates/certificate.yaml"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


async def issue(world: RealWorld) -> Authority:
    """Apply the chart's Certificate, or ask for another one before its time, as `cmctl renew` does."""
    before = await files_of(world, ISSUED)
    if not before:
        kubectl(world.kubeconfig, "apply", "--validate=strict", "-f", "-", stdin=rendered())
    else:
        renewal = {"type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "asked for"}
        found = await world.api.call("GET", CERTIFICATE)
        conditions = [*found["status"]["conditions"], renewal]
        change = {"status": {"conditions": conditions}}
        await world.api.call("PATCH", f"{CERTIFICATE}/status", change, "application/merge-patch+json")
    return Authority.issued(await files_that_are_new(world, before))


async def files_that_are_new(world: RealWorld, before: Mapping[str, bytes]) -> dict[str, bytes]:
    async with asyncio.timeout(DEADLINE_S):
        while (found := await files_of(world, ISSUED)) == before or names.CERT_FILE not in found:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.1)
    return found


def described(files: Mapping[str, bytes]) -> Mapping[str, object]:
    """Return what the operator may rely on in the files of an issued authority."""
    certificate = x509.load_pem_x509_certificate(files[names.CERT_FILE])
    key = serialization.load_pem_private_key(files[names.KEY_FILE], None)
    assert isinstance(key, EllipticCurvePrivateKey)
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    return {
        "files": sorted(files),
        "key": (key.curve.name, files[names.KEY_FILE].splitlines()[0]),
        "name": certificate.subject.rfc4514_string(),
        "is_self_signed": certificate.issuer == certificate.subject and files[names.CA_FILE] == files[names.CERT_FILE],
        "is_ca": certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca,
        "signs": (usage.key_cert_sign, usage.crl_sign),
        "names_its_key": bool(certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest),
    }


async def test_its_renewals_are_followed_in_steps_under_a_running_job(access: ClusterAccess, tmp_path: Path) -> None:
    """The issuer of other tests makes the same as cert-manager does, as far as the operator looks."""
    async with open_real_world(access, tmp_path, {"replicas": 2, "steps": 3}) as world:
        await must_follow_a_renewal_under_a_running_job(world, issue)
        assert described(issued_files()) == described(await files_of(world, ISSUED))


def test_the_server_takes_what_the_chart_renders_with_other_values(access: ClusterAccess, tmp_path: Path) -> None:
    """cert-manager's own kinds judge it strictly: no unknown field, no wrong type."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(kubeconfig_of(access))
    manifest = rendered("--values", CHART / "ci/cert-manager-values.yaml")
    kubectl(kubeconfig, "apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=manifest)
