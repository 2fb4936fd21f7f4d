"""The chart renders what was meant, for every values file of its `ci/`, and refuses what it does not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from contract.api_server import ApiServer, Document, Helm, Kubectl

from colocated_rl_api import names
from colocated_rl_operator import authority
from colocated_rl_operator.settings import Settings
from setup.layout import CHECKOUT

pytestmark = pytest.mark.cluster

CHART = CHECKOUT.root / "charts/colocated-rl"
CI = sorted((CHART / "ci").glob("*-values.yaml"))
NAMESPACE = "rl-system"
helm = Helm(CHECKOUT.localcluster)


def render(*words: str | Path) -> list[Document]:
    text = helm("template", "rl", CHART, "--namespace", NAMESPACE, *words)
    return [document for document in yaml.safe_load_all(text) if document]


def rendered(file: Path, *words: str) -> list[Document]:
    return render("--values", file, *words)


def one(objects: list[Document], kind: str) -> Document:
    [found] = [each for each in objects if each["kind"] == kind]
    return found


def environment(deployment: Document) -> dict[str, str]:
    """As the process sees it."""
    fields = {"metadata.namespace": NAMESPACE, "metadata.name": "rl-colocated-rl-0"}
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    return {
        each["name"]: each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_server_takes_what_is_rendered(kubectl: Kubectl, api: ApiServer, file: Path) -> None:
    """Strictly: no unknown field, no wrong type. The namespaces are made for the test."""
    for name in (NAMESPACE, "research", "team-a"):
        kubectl(
            "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        )
    objects = {"apiVersion": "v1", "kind": "List", "items": rendered(file)}
    kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(objects))


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_operator_starts_with_the_environment_that_the_chart_gives(file: Path) -> None:
    settings = Settings.read(environment(one(rendered(file), "Deployment")))
    assert NAMESPACE == settings.namespace
    assert "rl-colocated-rl-0" == settings.identity


def test_values_reach_the_operator() -> None:
    settings = Settings.read(environment(one(rendered(CHART / "ci/high-availability-values.yaml"), "Deployment")))
    assert (8, 5, 0.5) == (settings.lease.duration_s, settings.lease.renew_deadline_s, settings.lease.retry_s)
    assert (8081, "DEBUG", "Always") == (settings.metrics_port, settings.log_level, settings.images.pull_policy)
    version = (CHECKOUT.root / "operator/VERSION").read_text().strip()
    assert f"colocated-rl/gpu:{version}" == settings.images.gpu
    settings = Settings.read(environment(one(rendered(CHART / "ci/namespaced-values.yaml"), "Deployment")))
    assert ("research", "team-a") == settings.watch_namespaces


def test_lease_and_authority_are_the_ones_that_the_role_names() -> None:
    objects = rendered(CHART / "ci/local-values.yaml")
    named = [
        name
        for each in objects
        if each["kind"] == "Role"
        for rule in each["rules"]
        for name in rule.get("resourceNames", ())
    ]
    lease = Settings.read(environment(one(objects, "Deployment"))).lease_name
    assert [lease, authority.SECRET_NAME] == named


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_everything_is_labelled_and_the_crd_is_kept(file: Path) -> None:
    for each in rendered(file):
        if each["kind"] == "CustomResourceDefinition":
            assert "keep" == each["metadata"]["annotations"]["helm.sh/resource-policy"]
        else:
            assert names.MANAGED_BY == each["metadata"]["labels"]["app.kubernetes.io/name"]


def test_chart_owns_no_namespace_and_no_secret() -> None:
    """The namespace holds other things; a Secret of a chart is made anew at each rendering."""
    for file in CI:
        assert not {"Namespace", "Secret"} & {each["kind"] for each in rendered(file)}


def test_namespaced_mode_has_nothing_cluster_wide() -> None:
    assert not [each for each in rendered(CHART / "ci/namespaced-values.yaml") if "namespace" not in each["metadata"]]


def test_job_network_policies_recognize_the_operator() -> None:
    labels = one(rendered(CHART / "ci/default-values.yaml"), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert names.MANAGED_BY == labels["app.kubernetes.io/name"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("watch.namespace=research", "namespace"),
        ("replica=2", "replica"),
        ("images.operator.registry=example.com", "registry"),
        ("replicas=two", "/replicas"),
        ("logLevel=debug", "/logLevel"),
        ("images.gpu.digest=sha256:abc", "/images/gpu/digest"),
        ("metrics.port=80", "/metrics/port"),
        ("leaderElection.retrySeconds=0", "/leaderElection/retrySeconds"),
        ("watch.namespaces[0]=Research", "/watch/namespaces/0"),
        ("resources.limit.memory=1Gi", "limit"),
        ("runAsUser=0", "/runAsUser"),
        ("crds.install=yes-please", "/crds/install"),
    ],
)
def test_wrong_value_is_refused_by_name(value: str, says: str) -> None:
    assert says in helm.refusal("template", "rl", CHART, "--set", value)


def test_given_service_account_needs_its_name() -> None:
    said = helm.refusal("template", "rl", CHART, "--set", "serviceAccount.create=false")
    assert "serviceAccount.name is required with serviceAccount.create: false" in said


def test_operator_pod_is_restricted() -> None:
    pod: Any = one(rendered(CHART / "ci/default-values.yaml"), "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}} == (
        container["securityContext"]
    )
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
