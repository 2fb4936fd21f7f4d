"""A local cluster with the operator, and with Kueue's own manager, built from its module by `build.sh`.

Whole jobs run on one node. Four others stand in two racks, for jobs whose pods are placed there and never run.

The API server reaches Kueue's webhooks by address instead of by Service: the local cluster has no service proxy.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from e2e.conftest import installed, with_images
from e2e.running_job import KubectlCall
from racks import RACK

from setup.layout import CHECKOUT

KUEUE = CHECKOUT.build / "kueue"
HERE = Path(__file__).parent
WEBHOOKS = "https://127.0.0.1:19443"  # manager.yaml
RACKED, DEVICE = "example.com/racked", "example.com/gpu"
RACKS = {"node2": "a", "node3": "b", "node4": "a", "node5": "b"}  # in the order of names, neighbours stand apart
SERVED = {
    "pod",
    "clusterqueue",
    "cohort",
    "localqueue",
    "resourceflavor",
    "topology",
    "workload",
}  # by what manager.yaml asks for
LEFT_ALONE = ["kube-system", "kueue-system", "colocated-rl-system"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = tmp_path_factory.mktemp("cluster")
    images = place / "images.yaml"
    manager = {"binds": [f"{KUEUE}/bin:{KUEUE}/bin:ro"], "entrypoint": [f"{KUEUE}/bin/kueue"]}
    images.write_text(with_images({"kueue": manager}))
    options = (f"--nodes={1 + len(RACKS)}", f"--extended-resource={DEVICE}=2")
    with installed(place / "c", images=images, options=options, cordoned=RACKS) as cluster:
        for node, rack in RACKS.items():
            cluster.kubectl("label", "node", node, f"{RACK}={rack}", f"{RACKED}=true")
        install_kueue(cluster)
        yield cluster


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster) -> KubectlCall:
    return cluster.kubectl


def install_kueue(cluster: Cluster) -> None:
    certificate, key = make_certificate()
    cluster.kubectl("apply", "--server-side", "-f", KUEUE / "config/components/crd/bases")
    cluster.kubectl("apply", "-f", HERE / "manager.yaml")
    files = {"tls.crt": certificate, "tls.key": key}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "kueue-certificates", "namespace": "kueue-system"},
        "data": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(secret))
    cluster.kubectl("wait", "pod/kueue", "-n", "kueue-system", "--for=condition=Ready", "--timeout=110s")
    served = (KUEUE / "config/components/webhook/manifests.yaml").read_text()
    for configuration in yaml.safe_load_all(served):
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(by_address(configuration, certificate)))
    # not at once: the API server has to know of the webhooks, and the manager to serve them
    cluster.wait_for("queues", lambda: cluster.kubectl("apply", "-f", HERE / "queues.yaml"), deadline_s=120)


def by_address(configuration: dict[str, Any], certificate: bytes) -> dict[str, Any]:
    """Return the webhooks that Kueue's manager serves here, by address."""
    selector = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": LEFT_ALONE}
    kept = []
    for webhook in configuration["webhooks"]:
        if webhook["name"][1:].removesuffix(".kb.io") in SERVED:
            path = webhook["clientConfig"]["service"]["path"]
            client = {"url": WEBHOOKS + path, "caBundle": base64.b64encode(certificate).decode()}
            kept.append(webhook | {"clientConfig": client, "namespaceSelector": {"matchExpressions": [selector]}})
    return configuration | {"webhooks": kept}


def make_certificate() -> tuple[bytes, bytes]:
    """Return a self-signed certificate for the webhooks' address, as PEM, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kueue")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain),
    )
