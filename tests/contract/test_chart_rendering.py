"""The chart renders what was meant, for every values file of its `ci/`, and refuses what it does not know."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from contract.api_server import COMMAND_S, ApiServer, Document, Helm, Kubectl
from documents.values import documented

import quick_yaml
from builders import make_job
from colocated_rl_api import names
from colocated_rl_api.parts import Part
from colocated_rl_api.pod_template import PodSecurity, PullSecret, Toleration
from colocated_rl_operator.clients import authority
from colocated_rl_operator.manifests import resources
from colocated_rl_operator.manifests.profiles import FIELDS, RoleProfile
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.settings import OperatorSettings
from setup.layout import CHECKOUT

pytestmark = pytest.mark.cluster

CHART = CHECKOUT.root / "charts/colocated-rl"
CI = sorted((CHART / "ci").glob("*-values.yaml"))
NAMESPACE = "rl-system"
JOBS = f"/apis/{names.API_VERSION}/namespaces/default/{names.PLURAL}"
CERTIFICATES = "cert-manager.io/v1"
ELSEWHERE = ("monitoring.coreos.com/v1", CERTIFICATES)  # of operators that are not here
LONG_NAMES = ("admissionregistration.k8s.io/v1", "flowcontrol.apiserver.k8s.io/v1", "rbac.authorization.k8s.io/v1")
helm = Helm(CHECKOUT.localcluster)


def render(*words: str | Path) -> list[Document]:
    text = helm("template", "rl", CHART, "--namespace", NAMESPACE, *words)
    return quick_yaml.load_all(text)


def rendered(file: Path, *words: str) -> list[Document]:
    return render("--values", file, *words)


def one(objects: list[Document], kind: str) -> Document:
    [found] = [each for each in objects if each["kind"] == kind]
    return found


def pods_of(objects: list[Document]) -> list[Document]:
    """The operator's, and those that a release runs once."""
    pods = [each if each["kind"] == "Pod" else each["spec"].get("template") for each in objects if "spec" in each]
    found = [each for each in pods if each and "containers" in each["spec"]]
    assert 3 == len(found)
    return found


def environment(deployment: Document) -> dict[str, str]:
    """Return the variables as the process sees them."""
    fields = {"metadata.namespace": NAMESPACE, "metadata.name": "rl-colocated-rl-0"}
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    return {
        each["name"]: each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }


def make_namespace(kubectl: Kubectl, name: str) -> None:
    kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}))


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_server_takes_what_is_rendered(kubectl: Kubectl, api: ApiServer, file: Path) -> None:
    """Strictly: no unknown field, no wrong type. What has to be there before is made for the test."""
    for name in (NAMESPACE, "research", "team-a", "2026"):
        make_namespace(kubectl, name)
    for each in rendered(file):
        if each["kind"] == "Pod":
            account = {"name": each["spec"]["serviceAccountName"], "namespace": NAMESPACE}
            body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account}
            kubectl("apply", "-f", "-", stdin=json.dumps(body))
    known = [each for each in rendered(file) if each["apiVersion"] not in ELSEWHERE]
    objects = {"apiVersion": "v1", "kind": "List", "items": known}
    kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(objects))


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_operator_starts_with_the_environment_that_the_chart_gives(file: Path) -> None:
    settings = OperatorSettings.read(environment(one(rendered(file), "Deployment")))
    assert NAMESPACE == settings.namespace
    assert "rl-colocated-rl-0" == settings.identity


def test_values_reach_the_operator() -> None:
    settings = OperatorSettings.read(
        environment(one(rendered(CHART / "ci/high-availability-values.yaml"), "Deployment"))
    )
    assert (8, 5, 0.5) == (settings.lease.duration_s, settings.lease.renew_deadline_s, settings.lease.retry_s)
    assert (8081, "DEBUG", "Always") == (settings.metrics_port, settings.log_level, settings.images.pull_policy)
    version = (CHECKOUT.root / "operator/VERSION").read_text().strip()
    assert f"colocated-rl/gpu:{version}" == settings.images.gpu
    settings = OperatorSettings.read(environment(one(rendered(CHART / "ci/namespaced-values.yaml"), "Deployment")))
    assert ("research", "team-a") == settings.watch_namespaces
    assert {"old/colocated-rl"} == settings.takes_over
    settings = OperatorSettings.read(environment(one(rendered(CHART / "ci/node-notices-values.yaml"), "Deployment")))
    usual, nvme = (settings.images.profiles.by_name[name] for name in ("default", "nvme"))
    assert 1000660000 == usual.gpu.defaults.security_context.run_as_user, "a whole number still"
    assert RoleProfile() == usual.rollout
    assert (["research"], ["nodeSelector", "serviceAccountName"]) == (nvme.namespaces, nvme.gpu.fixed)
    allowed = [(each.host_network, each.host_paths) for each in (nvme.gpu, nvme.rollout)]
    assert [(True, ["/mnt/nvme", "/mnt/models"]), (False, ["/mnt/rows"])] == allowed


def test_the_chart_knows_the_fields_that_a_profile_may_give_and_fix() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    given, fixed = (schema["definitions"][name]["properties"] for name in ("podFields", "roleProfile"))
    assert [sorted(FIELDS)] * 2 == [sorted(given), sorted(fixed["fixed"]["items"]["enum"])]
    models: tuple[type[Part], ...] = PodSecurity, Toleration, PullSecret
    parts = given["securityContext"], given["tolerations"]["items"], given["imagePullSecrets"]["items"]
    for model, part in zip(models, parts, strict=True):
        assert {field.alias for field in model.model_fields.values()} == part["properties"].keys()


def test_lease_and_authority_are_the_ones_that_the_role_names() -> None:
    objects = rendered(CHART / "ci/local-values.yaml")
    named = [
        name
        for each in objects
        if each["kind"] == "Role"
        for rule in each["rules"]
        for name in rule.get("resourceNames", ())
    ]
    lease = OperatorSettings.read(environment(one(objects, "Deployment"))).lease_name
    assert [lease, authority.SECRET_NAME, authority.TOKENS_SECRET_NAME] == named


def rules_of_own(objects: list[Document]) -> list[Document]:
    [role] = [each for each in objects if each["kind"] == "Role" and each["metadata"]["name"].endswith("-own")]
    rules: list[Document] = role["rules"]
    return rules


def test_an_operator_follows_the_secret_that_cert_manager_makes() -> None:
    words = ("--set", "authority.certManager.enabled=true")
    usual, objects = render(), render(*words)
    certificate, issuer = one(objects, "Certificate"), one(objects, "Issuer")
    secret = certificate["spec"]["secretName"]
    assert secret == OperatorSettings.read(environment(one(objects, "Deployment"))).issued_authority
    assert issuer["metadata"]["name"] == certificate["spec"]["issuerRef"]["name"]
    assert {"selfSigned": {}} == issuer["spec"]
    added = [rule for rule in rules_of_own(objects) if rule not in rules_of_own(usual)]
    expected = [(secret, "get"), (authority.SECRET_NAME, "update")]
    assert expected == [(rule["resourceNames"][0], rule["verbs"][0]) for rule in added]
    assert "" == OperatorSettings.read(environment(one(usual, "Deployment"))).issued_authority
    named = render(*words, "--set", "authority.secretName=mine,authority.certManager.issuer.name=ours")
    assert ("mine", "ours") == (
        one(named, "Certificate")["spec"]["secretName"],
        one(named, "Certificate")["spec"]["issuerRef"]["name"],
    )
    assert "Issuer" not in {each["kind"] for each in named}
    given = render("--set", "authority.secretName=mine")
    assert "mine" == OperatorSettings.read(environment(one(given, "Deployment"))).issued_authority
    assert "Certificate" not in {each["kind"] for each in given}


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


@pytest.mark.parametrize("watched", ["", "watch.namespaces={team-$}"], ids=["all namespaces", "one namespace"])
def test_two_installations_of_one_name_have_no_object_in_common(watched: str) -> None:
    """Helm refused the second; by kubectl it took the rights to nodes from the first, with their common binding."""
    values = (
        "crds.install=false,rbac.aggregate=false,nodes.taint=true,nodes.leavingTaints={example.com/spot-notice},"
        "monitoring.monitors=true,monitoring.rules=true,monitoring.dashboard=true,"
    )

    def made(team: str) -> set[tuple[str, str, str]]:
        text = helm("template", "rl", CHART, "--namespace", f"rl-{team}", "--set", values + watched.replace("$", team))
        found = quick_yaml.load_all(text)
        return {(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]) for each in found}

    assert set() == made("a") & made("b")


def test_job_network_policies_recognize_the_operator(tmp_path: Path) -> None:
    """Below a parent chart with an alias for this one it had the alias as its label, and reached no member."""
    dependency = {"name": CHART.name, "version": ">=0-0", "alias": "rl"}
    parent = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(json.dumps(parent))
    shutil.copytree(CHART, tmp_path / "charts" / CHART.name)
    aliased = quick_yaml.load_all(helm("template", "rl", tmp_path))
    for objects in (rendered(CHART / "ci/default-values.yaml"), aliased):
        labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
        assert names.MANAGED_BY == labels["app.kubernetes.io/name"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("watch.namespace=research", "namespace"),
        ("replica=2", "replica"),
        ("images.operator.registry=example.com", "registry"),
        ("replicas=two", "/replicas"),
        ("logLevel=debug", "/logLevel"),
        ("images.gpu.digest=sha256:abc", "/images/gpu/digest"),
        ("metrics.port=80", "/metrics/port"),
        ("scheduling.gangs[0]=Slurm", "/scheduling/gangs/0"),
        ("authority.secretName=colocated-rl-authority", "/authority/secretName"),
        ("leaderElection.retrySeconds=0", "/leaderElection/retrySeconds"),
        ("watch.namespaces[0]=Research", "/watch/namespaces/0"),
        ("watch.takeOver[0]=colocated-rl", "/watch/takeOver/0"),
        ("resources.limit.memory=1Gi", "limit"),
        ("runAsUser=0", "/runAsUser"),
        ("profiles.nvme.trainer.hostNetwork=true", "trainer"),
        ("profiles.default.gpu.fixed[0]=volumes", "/profiles/default/gpu/fixed/0"),
        ("profiles.nvme.gpu.hostPaths[0]=mnt", "/profiles/nvme/gpu/hostPaths/0"),
        ("profiles.nvme.rollout.defaults.hostNetwork=true", "/profiles/nvme/rollout/defaults"),
        ("profiles.NVME.namespaces[0]=research", "NVME"),
        ("profiles.default.gpu.defaults.priorityClassName=", "priorityClassName"),
        ("profiles.default.gpu.defaults.securityContext.runAsNonRoot=true", "runAsNonRoot"),
        ("profiles.default.gpu.defaults.securityContext.runAsUser=0", "runAsUser"),
        ("profiles.default.gpu.defaults.tolerations[0].tolerationSecond=3", "tolerationSecond"),
        ("profiles.default.gpu.defaults.imagePullSecrets[0].secret=registry", "/imagePullSecrets/0"),
        ("serviceAccount.name=rl_operator", "/serviceAccount/name"),
        ("crds.install=yes-please", "/crds/install"),
        ("crds.install=null", "/crds"),
        ("monitoring=null", "monitoring"),
        ("leaderElection.renewDeadlineSeconds=15", "leaderElection: retrySeconds has to be below"),
        ("leaderElection.retrySeconds=10", "leaderElection: retrySeconds has to be below"),
        (r"podLabels.app\.kubernetes\.io/component=hook", "app.kubernetes.io/component"),
    ],
)
def test_wrong_value_is_refused_by_name(value: str, message: str) -> None:
    assert message in helm.refusal("template", "rl", CHART, "--set", value)


@pytest.mark.parametrize("path", [value.path for value in documented()])
def test_a_value_that_is_taken_away_is_not_needed_or_missed_by_name(path: str) -> None:
    words = ("template", "rl", CHART, "--set", "monitoring.monitors=true", "--set", f"{path}=null")
    done = helm._run(*words, stdin=None)
    if done.returncode != 0:
        parent, _, name = path.rpartition(".")
        assert f"at '{parent and '/'}{parent.replace('.', '/')}': missing property '{name}'" in done.stderr


def test_names_of_the_longest_release_are_names() -> None:
    """Helm's bound is 53 characters; of labels and names of Services it is 63, of most kinds more."""
    words = (
        "--namespace",
        NAMESPACE,
        "--set",
        "monitoring.monitors=true,monitoring.rules=true,monitoring.dashboard=true",
    )
    text = helm("template", "r" * 53, CHART, *words)
    objects = quick_yaml.load_all(text)
    found = [document["metadata"] for document in objects]
    assert 63 >= max(len(each["metadata"]["name"]) for each in objects if each["apiVersion"] not in LONG_NAMES)
    assert 253 >= max(len(each["name"]) for each in found)
    assert 63 >= max(len(value) for each in found for value in each.get("labels", {}).values())


@pytest.mark.parametrize("release", ["1st", "rl.v2", f"{'r' * 29}.v2", "2.colocated-rl"])
def test_server_takes_the_names_of_any_release(api: ApiServer, release: str) -> None:
    """A release's may begin with a digit and have dots: its Service was refused, and the job that `helm test` makes."""
    text = helm("template", release, CHART, "--namespace", "default", "--set", "monitoring.monitors=true")
    objects = quick_yaml.load_all(text)
    places = {"Service": "/api/v1/namespaces/default/services", names.KIND: JOBS}
    for kind, place in places.items():
        made = one(objects, kind)
        answer = api.request("POST", f"{place}?dryRun=All", made)
        assert answer.is_accepted, answer.message
        assert made["metadata"]["name"][0].isalpha()  # of a Service, servers before 1.34 want that too


class NoKeyTwice(yaml.CSafeLoader):
    """This loader rejects a repeated key, as YAML demands and most readers do not."""


def _mapping(loader: yaml.CSafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [key.value for key, _ in node.value]
    assert sorted(set(keys)) == sorted(keys), f"twice, at {node.start_mark}"
    return loader.construct_mapping(node, deep=True)


NoKeyTwice.add_constructor("tag:yaml.org,2002:map", _mapping)


def named(part: Any) -> Iterator[Any]:
    """Yield each value under a key that names something."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key.lower().endswith(("name", "namespace")) and not isinstance(value, dict):
                yield value
            yield from named(value)
    elif isinstance(part, list):
        for each in part:
            yield from named(each)


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_names_stay_texts_and_no_key_comes_twice(file: Path) -> None:
    """A namespace 2026 was a number to the API server; an annotation of one's own stood beside ours of that name."""
    text = helm("template", "1", CHART, "--namespace", "7", "--values", file)
    objects = [each for each in yaml.load_all(text, NoKeyTwice) if each]
    assert {"7"} <= {each["metadata"].get("namespace") for each in objects}
    assert [] == [name for each in objects for name in named(each) if not isinstance(name, str)]
    labels = [value for each in objects for value in each["metadata"].get("labels", {}).values()]
    assert "1" in labels
    assert all(isinstance(value, str) for value in labels)


def test_values_for_images_of_ones_own_are_as_the_page_writes_them(tmp_path: Path) -> None:
    page = (CHECKOUT.root / "docs/install.md").read_text()
    [written] = re.findall(r"^```yaml\n(images:.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "values.yaml").write_text(written)
    settings = OperatorSettings.read(environment(one(rendered(tmp_path / "values.yaml"), "Deployment")))
    images = (settings.images.agent, settings.images.rollout, settings.images.gpu)
    assert tuple(f"registry.example.com/rl/{name}:0.1.0" for name in ("agent", "rollout", "gpu")) == images


def test_given_service_account_needs_its_name() -> None:
    message = helm.refusal("template", "rl", CHART, "--set", "serviceAccount.create=false")
    assert "serviceAccount.name is required with serviceAccount.create: false" in message


def test_a_service_mesh_leaves_every_pod_of_the_chart_alone() -> None:
    """A sidecar that never ends would keep the check before an uninstallation from ending."""
    metadata = [each["metadata"] for each in pods_of(render("--set", "podLabels.team=rl"))]
    expected = {"sidecar.istio.io/inject": "false", "team": "rl"}
    assert all(expected.items() <= each["labels"].items() for each in metadata)
    assert ["disabled"] * 3 == [each["annotations"]["linkerd.io/inject"] for each in metadata]


def test_operator_pod_is_restricted() -> None:
    pod: Any = one(rendered(CHART / "ci/default-values.yaml"), "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}} == (
        container["securityContext"]
    )
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()


def test_what_a_release_runs_are_modules_of_the_operator() -> None:
    """The test and the check before an uninstallation named modules that had been renamed."""
    commands = [each["spec"]["containers"][0].get("command", []) for each in pods_of(render())]
    modules = {words[words.index("-m") + 1] for words in commands if "-m" in words}
    assert {"colocated_rl_operator.helm_test", "colocated_rl_operator.pre_uninstall"} == modules
    assert all(find_spec(module) for module in modules)


def test_every_container_requests_the_memory_that_it_may_take() -> None:
    for each in pods_of(render()):
        [container] = each["spec"]["containers"]
        asked, most = container["resources"]["requests"], container["resources"]["limits"]
        assert ({"cpu", "memory"}, {"memory"}) == (asked.keys(), most.keys())
        assert asked["memory"] == most["memory"], "a node evicts first who is over its request"


# --------------------------------------------------------------------------------------------------------- monitoring
def monitored() -> list[Document]:
    return render("--set", "monitoring.monitors=true,monitoring.rules=true,monitoring.dashboard=true")


def test_nothing_is_monitored_unless_asked_for() -> None:
    kinds = {each["kind"] for each in render()}
    assert not kinds & {"Service", "ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert not [each for each in render() if each["kind"] == "ConfigMap"]


def test_service_monitor_finds_the_operator() -> None:
    objects = monitored()
    service, monitor = one(objects, "Service"), one(objects, "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    pod = one(objects, "Deployment")["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    [port], [endpoint] = service["spec"]["ports"], monitor["spec"]["endpoints"]
    assert (port["name"], port["targetPort"]) == (endpoint["port"], pod["spec"]["containers"][0]["ports"][0]["name"])


@pytest.mark.parametrize("seat", ["gpu-0", "rollout"])
def test_pod_monitor_finds_every_member_and_says_whose_it_is(seat: str) -> None:
    spec = one(monitored(), "PodMonitor")["spec"]
    pod = resources.pod(make_job(), seat, 0, PodImages("agent", "rollout", "gpu", "Never"))
    labels = pod["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    [endpoint] = spec["podMetricsEndpoints"]
    containers = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
    ports = [port for each in containers for port in each.get("ports", ())]
    assert [names.METRICS_PORT] == [port["containerPort"] for port in ports if port["name"] == endpoint["port"]]
    sources = {rule["sourceLabels"][0].removeprefix("__meta_kubernetes_pod_label_") for rule in endpoint["relabelings"]}
    assert sources <= {re.sub(r"[^a-zA-Z0-9]", "_", label) for label in labels}
    assert {"colocatedrljob", "role"} == {rule["targetLabel"] for rule in endpoint["relabelings"]}


def test_rules_and_dashboard_are_the_files_and_runbooks_are_where_the_values_say() -> None:
    objects = monitored()
    texts = ((CHART / f"rules/{file}.yaml").read_text() for file in ("alerts", "recorded"))
    alerts, recorded = (quick_yaml.load(text.replace("colocated-rl-system", NAMESPACE)) for text in texts)
    assert {"groups": alerts["groups"] + recorded["groups"]} == one(objects, "PrometheusRule")["spec"]
    dashboard = one(objects, "ConfigMap")["data"]["colocated-rl.json"]
    assert json.loads((CHART / "dashboards/colocated-rl.json").read_text()) == json.loads(dashboard)
    elsewhere = render("--set", "monitoring.rules=true,monitoring.runbooks=https://wiki.example.com/")
    group, _recorded = one(elsewhere, "PrometheusRule")["spec"]["groups"]
    assert all(rule["annotations"]["runbook_url"].startswith("https://wiki.example.com/") for rule in group["rules"])


@pytest.mark.parametrize("namespace", ["team-a-rl", "2026"])
def test_each_of_several_operators_is_missed(namespace: str) -> None:
    """While any operator of the cluster led, nobody was told that the one of this release did not."""
    text = helm("template", "rl", CHART, "--namespace", namespace, "--set", "monitoring.rules=true")
    objects = quick_yaml.load_all(text)
    missed, *_others = one(objects, "PrometheusRule")["spec"]["groups"][0]["rules"]
    assert f'absent(colocated_rl_operator_leader{{namespace="{namespace}"}} == 1)' == missed["expr"]
    assert namespace == missed["labels"]["namespace"], "else Alertmanager takes two of them for one"


# -------------------------------------------------------------------------------------------------------------- bundle
def test_bundle_is_the_chart_and_kubectl_takes_it(kubectl: Kubectl, api: ApiServer) -> None:
    """Plain `kubectl apply` takes it, which keeps a copy of each object in an annotation of at most 256 KiB."""
    script = (CHECKOUT.root / "charts/bundle.sh", CHECKOUT.localcluster, "helm")
    text = subprocess.run(script, capture_output=True, text=True, timeout=COMMAND_S, check=True).stdout
    namespace, *objects = quick_yaml.load_all(text)
    assert ("Namespace", "colocated-rl-system") == (namespace["kind"], namespace["metadata"]["name"])
    chart = helm("template", "colocated-rl", CHART, "--namespace", "colocated-rl-system", "--no-hooks")
    assert quick_yaml.load_all(chart) == objects
    assert max(len(json.dumps(each)) for each in objects) < 256 * 1024
    make_namespace(kubectl, "colocated-rl-system")
    kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)


def test_bundle_is_of_the_namespace_that_is_named_whatever_it_looks_like() -> None:
    words = (CHECKOUT.root / "charts/bundle.sh", CHECKOUT.localcluster, "helm")
    environment = {**os.environ, "NAMESPACE": "2026"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=True)
    namespace, *objects = quick_yaml.load_all(done.stdout)
    assert "2026" == namespace["metadata"]["name"]
    assert {"2026"} == {each["metadata"]["namespace"] for each in objects if "namespace" in each["metadata"]}


def test_packed_chart_is_the_chart(tmp_path: Path) -> None:
    helm("package", CHART, "--destination", tmp_path)
    [packed] = tmp_path.glob("colocated-rl-*.tgz")
    words = ("--namespace", NAMESPACE, "--set", "monitoring.rules=true,monitoring.dashboard=true")
    assert helm("template", "rl", CHART, *words) == helm("template", "rl", packed, *words)
