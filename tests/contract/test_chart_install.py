"""The chart on a real cluster: it installs into a restricted namespace, upgrades, and leaves what people made."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from contract.api_server import ApiServer, Document, Kubectl
from contract.test_chart_rendering import NAMESPACE as RENDERED
from contract.test_chart_rendering import rendered
from contract.test_chart_rights import GARBAGE_COLLECTION, JOBS, Right, granted
from documents.blocks import under

import quick_yaml
from colocated_rl_api import names
from setup.layout import CHECKOUT

pytestmark = pytest.mark.cluster

CHART = CHECKOUT.root / "charts/colocated-rl"
NAMESPACE = "chart-install"
TEAM = "chart-team"
RELEASE = "rl"
DEPLOYMENT = "deployment/rl-colocated-rl"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:rl-colocated-rl"
CREATED, FORBIDDEN = 201, 403
UNUSED = GARBAGE_COLLECTION | {
    Right(JOBS, names.GROUP, names.PLURAL, "delete"),  # of a job whose ttl is over
    Right(JOBS, "apps", "controllerrevisions", "delete"),  # of a former start, once a job is resumed with other pods
    Right(JOBS, "events.k8s.io", "events", "create"),  # where a life is not as short
    Right(JOBS, "events.k8s.io", "events", "patch"),  # of one that comes again
}
CRD = f"crd/{names.PLURAL}.{names.GROUP}"
# the CRD is there already, applied by kubectl
ADOPT = ("--take-ownership", "--force-conflicts")
VERSION = (CHECKOUT.root / "operator/VERSION").read_text().strip()
WAITING = ("--wait", "--timeout", "5m")
INSTALL = ("--values", CHART / "ci/local-values.yaml", *ADOPT, *WAITING)
DEADLINE_S = 180  # for the operator, garbage collection among others: on a machine that does much else


def namespace(name: str) -> Document:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


@pytest.fixture(scope="module")
def release(kubectl: Kubectl, api: ApiServer) -> Iterator[None]:
    """One release, and a namespace for jobs; `api` has installed the CRD before."""
    for name in (NAMESPACE, TEAM):
        kubectl("apply", "-f", "-", stdin=json.dumps(namespace(name)))
        kubectl.wait_until_pods_may_come(name)
    kubectl.helm("install", RELEASE, CHART, "--namespace", NAMESPACE, *INSTALL)
    yield
    kubectl.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found", "--wait", "--no-hooks")
    kubectl("delete", "namespace", NAMESPACE, TEAM, "--wait=false")


def may(kubectl: Kubectl, who: str, verb: str, resource: str, where: str) -> bool:
    """Asks the server, as that user."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": who,
            "resourceAttributes": {"namespace": where, "verb": verb, **resource_attributes(resource)},
        },
    }
    answer = json.loads(kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review)))
    return bool(answer["status"]["allowed"])


def resource_attributes(resource: str) -> dict[str, str]:
    """`pods`, `pods/log` or `colocatedrljobs.rl.colocate.dev/status`, and `secrets:NAME`."""
    resource, _, name = resource.partition(":")
    full, _, subresource = resource.partition("/")
    plural, _, group = full.partition(".")
    return {"group": group, "resource": plural, "subresource": subresource, "name": name}


def test_operator_runs_in_a_restricted_namespace_and_leads(
    plain_cluster: Cluster, kubectl: Kubectl, release: None
) -> None:
    [pod] = json.loads(kubectl("-n", NAMESPACE, "get", "pods", "-o", "json"))["items"]

    def leads() -> bool:  # which it need not to be ready
        lease = plain_cluster.get("lease", "rl-colocated-rl", "--namespace", NAMESPACE)
        return bool(pod["metadata"]["name"] == lease["spec"].get("holderIdentity"))

    plain_cluster.wait_for("the operator leads", leads, DEADLINE_S)
    assert 0 == pod["status"]["containerStatuses"][0]["restartCount"]


def test_notes_say_what_is_watched(kubectl: Kubectl, release: None) -> None:
    assert "watches all namespaces" in kubectl.helm("get", "notes", RELEASE, "--namespace", NAMESPACE)


def test_helm_test_sees_the_operator_answer_and_leaves_nothing(
    plain_cluster: Cluster, kubectl: Kubectl, release: None
) -> None:
    output = kubectl.helm("test", RELEASE, "--namespace", NAMESPACE, "--logs", "--timeout", "5m")
    assert f"job {NAMESPACE}/rl-colocated-rl-test: Suspended" in output
    jobs = ("-n", NAMESPACE, "get", names.SHORT_NAME, "-o", "name")
    plain_cluster.wait_for("no job is left", lambda: plain_cluster.kubectl(*jobs) == "", DEADLINE_S)


@pytest.mark.parametrize(
    ("verb", "resource", "where"),
    [
        ("watch", "colocatedrljobs.rl.colocate.dev", TEAM),
        ("patch", "colocatedrljobs.rl.colocate.dev/status", TEAM),
        ("delete", "colocatedrljobs.rl.colocate.dev", TEAM),
        ("create", "pods", TEAM),
        ("delete", "pods", TEAM),
        ("create", "secrets", TEAM),
        ("update", "leases.coordination.k8s.io:rl-colocated-rl", NAMESPACE),
        ("get", "secrets:colocated-rl-authority", NAMESPACE),
    ],
)
def test_operator_may_do_its_work(kubectl: Kubectl, release: None, verb: str, resource: str, where: str) -> None:
    assert may(kubectl, ACCOUNT, verb, resource, where)


@pytest.mark.parametrize(
    ("verb", "resource", "where"),
    [
        ("get", "secrets:some", TEAM),
        ("list", "secrets", TEAM),
        ("list", "secrets", NAMESPACE),
        ("get", "secrets:some", NAMESPACE),
        ("delete", "secrets:some", TEAM),
        ("create", "colocatedrljobs.rl.colocate.dev", TEAM),
        ("update", "pods", TEAM),
        ("create", "pods/exec", TEAM),
        ("get", "pods/log", TEAM),
        ("delete", "persistentvolumeclaims", TEAM),
        ("update", "leases.coordination.k8s.io:another", NAMESPACE),
        ("update", "leases.coordination.k8s.io:rl-colocated-rl", TEAM),
        ("list", "nodes", ""),
        ("list", "namespaces", ""),
        ("list", "customresourcedefinitions.apiextensions.k8s.io", ""),
    ],
)
def test_operator_may_do_no_more(kubectl: Kubectl, release: None, verb: str, resource: str, where: str) -> None:
    assert not may(kubectl, ACCOUNT, verb, resource, where)


@pytest.mark.parametrize(("role", "creates"), [("view", False), ("edit", True), ("admin", True)])
def test_people_of_a_namespace_may_do_the_same_with_its_jobs(
    plain_cluster: Cluster, kubectl: Kubectl, release: None, role: str, creates: bool
) -> None:
    person = f"somebody-who-may-{role}"
    kubectl("-n", TEAM, "create", "rolebinding", person, f"--clusterrole={role}", f"--user={person}")
    jobs = f"{names.PLURAL}.{names.GROUP}"

    def aggregated() -> bool:  # by a controller, some time after the parts of the role were made
        return may(kubectl, person, "list", jobs, TEAM) and creates == may(kubectl, person, "create", jobs, TEAM)

    assert plain_cluster.wait_for(f"rights on jobs in {role}", aggregated, DEADLINE_S)
    assert not may(kubectl, person, "patch", f"{jobs}/status", TEAM)
    assert not may(kubectl, person, "list", jobs, "default")


def test_jobs_and_crd_outlive_upgrade_uninstall_and_reinstall(kubectl: Kubectl, release: None) -> None:
    job = quick_yaml.load((CHECKOUT.root / "crds/examples/minimal.yaml").read_text())
    # its model is not there: nothing of it runs
    kubectl("-n", TEAM, "apply", "-f", "-", stdin=json.dumps(job))
    name = f"{names.SHORT_NAME}/{job['metadata']['name']}"

    def uids() -> list[str]:
        uid = "jsonpath={.metadata.uid}"
        return [kubectl("get", CRD, "-o", uid), kubectl("-n", TEAM, "get", name, "-o", uid)]

    before = uids()
    kubectl.helm("upgrade", RELEASE, CHART, "--namespace", NAMESPACE, *INSTALL, "--set", "logLevel=DEBUG")
    assert before == uids()
    uninstall = ("uninstall", RELEASE, "--namespace", NAMESPACE, *WAITING)
    output = kubectl.helm.refusal(*uninstall)
    assert f"would be left half-way: {TEAM}/{job['metadata']['name']}" in output
    assert "1" == kubectl("-n", NAMESPACE, "get", DEPLOYMENT, "-o", "jsonpath={.status.readyReplicas}")
    kubectl.helm(*uninstall, "--no-hooks")
    assert before == uids()
    assert "" == kubectl(
        "-n", NAMESPACE, "get", "deployments,serviceaccounts", "-l", "app.kubernetes.io/instance=rl", "-o", "name"
    )
    kubectl.helm("install", RELEASE, CHART, "--namespace", NAMESPACE, *INSTALL)
    assert before == uids()
    kubectl("-n", TEAM, "delete", name, f"--timeout={DEADLINE_S}s")  # by the operator that is there again
    kubectl.helm(*uninstall)  # now nothing is left half-way
    kubectl.helm("install", RELEASE, CHART, "--namespace", NAMESPACE, *INSTALL)


def images(kubectl: Kubectl) -> list[str]:
    """Return the image of the operator, and those that it gives to jobs."""
    [container] = json.loads(kubectl("-n", NAMESPACE, "get", DEPLOYMENT, "-o", "json"))["spec"]["template"]["spec"][
        "containers"
    ]
    return [container["image"], *(each["value"] for each in container["env"] if each["name"].endswith("_IMAGE"))]


def rendered_of(output: str) -> list[Document]:
    """Return the manifest in what `helm install --dry-run` prints, without hooks and notes."""
    manifest = output.partition("\nMANIFEST:\n")[2].partition("\nNOTES:\n")[0]
    return quick_yaml.load_all(manifest)


def test_chart_installs_and_upgrades_as_the_pages_say(kubectl: Kubectl, release: None, tmp_path: Path) -> None:
    """The commands carry the names of this release. An upgrade that names no values keeps those of the installation."""
    [page] = re.findall(
        r"^```yaml\n(images:.*?)^```", (CHECKOUT.root / "docs/install.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "values.yaml").write_text(page)
    named = {"colocated-rl-system": NAMESPACE, "charts/colocated-rl": str(CHART), "colocated-rl": RELEASE}
    named |= {"values.yaml": str(tmp_path / "values.yaml"), "--create-namespace": ""}

    def words(page: str, heading: str, *, at: int = 0) -> list[str]:
        command = [each for each in under(page, heading) if each.startswith("helm")][at]
        _program, *rest = (named.get(word, word) for word in shlex.split(command))
        return [word for word in rest if word]

    install, upgrade = words("docs/install.md", "The chart"), words("docs/releases.md", "Upgrades")
    output = kubectl.helm(*(RELEASE + "-2" if word == RELEASE else word for word in install), "--dry-run=client")
    assert "registry.example.com/rl/operator:0.1.0" in output
    in_teams = words("docs/install.md", "The chart", at=1)
    output = kubectl.helm(*(RELEASE + "-2" if word == RELEASE else word for word in in_teams), "--dry-run=client")
    bound = [body for body in rendered_of(output) if str(body.get("kind")).endswith("RoleBinding")]
    assert {NAMESPACE, "team-a", "team-b"} == {body["metadata"]["namespace"] for body in bound}
    unnamed = words("docs/first-gpu-job.md", "Install")
    output = kubectl.helm(*(RELEASE + "-3" if word == RELEASE else word for word in unnamed), "--dry-run=client")
    assert f"image: colocated-rl/operator:{VERSION}\n" in output
    before = images(kubectl)
    kubectl.helm(*upgrade, *WAITING)
    assert before == images(kubectl)
    assert all(image.endswith(":dev") for image in before)


def test_a_job_whose_operator_is_gone_for_good_is_released_as_the_runbook_says(kubectl: Kubectl, release: None) -> None:
    job = quick_yaml.load((CHECKOUT.root / "crds/examples/minimal.yaml").read_text())
    name = job["metadata"]["name"]
    kubectl("-n", TEAM, "apply", "-f", "-", stdin=json.dumps(job))
    kubectl("-n", TEAM, "wait", f"crlj/{name}", "--for=jsonpath={.status.phase}", f"--timeout={DEADLINE_S}s")
    mine = f"{names.JOB_NAME_LABEL}={name}"
    claims = kubectl("-n", TEAM, "get", "pvc", "-l", mine, "-o", "name").split()
    assert kubectl(
        "-n", TEAM, "get", "pods,secrets,configmaps,networkpolicies,poddisruptionbudgets", "-l", mine, "-o", "name"
    ).split()
    kubectl("-n", NAMESPACE, "scale", DEPLOYMENT, "--replicas=0")
    operators = ("pods", "-l", "app.kubernetes.io/component=operator")
    kubectl("-n", NAMESPACE, "wait", *operators, "--for=delete", f"--timeout={DEADLINE_S}s")
    try:
        kubectl("-n", TEAM, "delete", "crlj", name, "--wait=false")
        [command] = under("docs/runbooks/operations.md", "A job's deletion hangs")
        program, *words = shlex.split(command)
        assert "kubectl" == program
        kubectl("-n", TEAM, *(name if word == "JOB" else word for word in words))
        kubectl("-n", TEAM, "wait", f"crlj/{name}", "--for=delete", f"--timeout={DEADLINE_S}s")
        for kind in ("pods", "secrets", "configmaps", "networkpolicies", "poddisruptionbudgets"):
            kubectl("-n", TEAM, "wait", kind, "-l", mine, "--for=delete", f"--timeout={DEADLINE_S}s")
        assert claims == kubectl("-n", TEAM, "get", "pvc", "-l", mine, "-o", "name").split()
    finally:
        kubectl("-n", NAMESPACE, "scale", DEPLOYMENT, "--replicas=1")
        kubectl("-n", NAMESPACE, "rollout", "status", DEPLOYMENT, f"--timeout={DEADLINE_S}s")


def requests_of_operators(cluster: Cluster) -> list[Document]:
    """Return the operators' requests, from the API server's audit log."""
    whole_lines, _, _ = (cluster.directory / "logs/audit.log").read_text().rpartition("\n")
    events = map(json.loads, whole_lines.splitlines())
    return [event for event in events if event["user"].get("username") == ACCOUNT and "objectRef" in event]


def used(requests: list[Document]) -> set[Right]:
    found = set()
    for event in requests:
        what, code = event["objectRef"], event["responseStatus"]["code"]
        if code != FORBIDDEN:
            resource = "/".join(part for part in (what["resource"], what.get("subresource")) if part)
            namespace = RENDERED if what.get("namespace") == NAMESPACE else JOBS
            right = Right(namespace, what.get("apiGroup", ""), resource, event["verb"])
            found |= {right, right._replace(verb="create")} if code == CREATED else {right}
    return found


def test_every_right_is_used_and_none_is_missing(plain_cluster: Cluster, kubectl: Kubectl, release: None) -> None:
    """One short job uses every right; those that the operator has only for other users are named."""
    job = quick_yaml.load((CHECKOUT.root / "crds/examples/minimal.yaml").read_text())
    one = ("-n", TEAM, f"{names.SHORT_NAME}/{job['metadata']['name']}")
    before = len(requests_of_operators(plain_cluster))  # of some that lost their rights before they ended
    kubectl("-n", TEAM, "apply", "-f", "-", stdin=json.dumps(job))
    mine = ("pods", "--namespace", TEAM, "--selector", f"{names.JOB_NAME_LABEL}={job['metadata']['name']}")
    plain_cluster.wait_for("its pods", lambda: plain_cluster.get(*mine)["items"] or None, DEADLINE_S)
    kubectl("delete", *one, f"--timeout={DEADLINE_S}s")
    rights = granted(rendered(CHART / "ci/local-values.yaml"), bound_to_jobs="ClusterRole")
    requests = requests_of_operators(plain_cluster)
    assert rights - UNUSED <= used(requests)
    assert not [event for event in requests[before:] if event["responseStatus"]["code"] == FORBIDDEN]


def test_second_release_leaves_the_crd_to_the_first(kubectl: Kubectl, release: None) -> None:
    kubectl.helm(
        *("install", "second", CHART, "--namespace", NAMESPACE, "--dry-run=server", "--set", "crds.install=false"),
        *("--set", "rbac.aggregate=false", "--set", f"watch.namespaces={{{TEAM}}}"),
    )
    output = kubectl.helm.refusal("install", "second", CHART, "--namespace", NAMESPACE, "--dry-run=server")
    assert "cannot be imported into the current release" in output
