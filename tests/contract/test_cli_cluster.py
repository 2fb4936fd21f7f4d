"""The command line on a real cluster: kubectl's login through a plugin, Kubernetes' own roles, kubelet's port-forward.

The job is an object that no operator acts on; its rollout pod is a program with pages on its loopback.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from cluster import Cluster
from contract.api_server import ApiServer, Document, Kubectl
from contract.test_chart_rendering import CHART, rendered

from builders import make_manifest
from colocated_rl_api import names
from colocated_rl_cli.base.errors import Exit, NotReached
from colocated_rl_cli.cluster.kubectl import Login
from setup.layout import CHECKOUT

pytestmark = pytest.mark.cluster

NAMESPACE = "command-line"
POD = "sums-rollout-0"
DEADLINE_S = 180.0
SAMPLE = {"id": 7, "state": "trained", "reward": 1.0}
PAGES = """\
import json, http.server
class Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        facts = {"type": "rolloutFacts", "gatesOpen": 0}
        body = {"samples": [dict(SAMPLE, asked=self.path)]} if "samples" in self.path else {"hello": {}, "facts": facts}
        body = json.dumps(body).encode() + b" " * 200_000  # several frames
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
ended = {"ts": 1.0, "event": "evaluation ended", "step": 0, "mean": 0.25, "stderr": 0.01, "samples": 8}
print(json.dumps(ended), flush=True)
http.server.HTTPServer(("127.0.0.1", PORT), Pages).serve_forever()
""".replace("SAMPLE", repr(SAMPLE)).replace("PORT", str(names.PAGES_PORT))
PEOPLE = {"viewer": "view", "editor": "edit", "stranger": None}

Run = Callable[..., subprocess.CompletedProcess[str]]


def job() -> Document:
    manifest: Document = make_manifest("sums", replicas=1)
    manifest["metadata"]["namespace"] = NAMESPACE
    return manifest


def pod() -> Document:
    labels = {names.JOB_NAME_LABEL: "sums", names.ROLE_LABEL: names.ROLE_ROLLOUT, names.ATTEMPT_LABEL: "0"}
    connect = f"import socket; socket.create_connection(('127.0.0.1', {names.PAGES_PORT}))"
    probe = {"exec": {"command": ["python3", "-c", connect]}, "periodSeconds": 1, "timeoutSeconds": 30}
    container = {
        "name": names.ROLLOUT_CONTAINER, "image": "colocated-rl/rollout:dev", "command": ["python3", "-c", PAGES],
        "env": [{"name": "WANDB_API_KEY", "value": "hunter2hunter2"}], "readinessProbe": probe,
    }  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD, "namespace": NAMESPACE, "labels": labels},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False},
    }


def people() -> list[Document]:
    made: list[Document] = []
    for name, role in PEOPLE.items():
        metadata = {"name": name, "namespace": NAMESPACE}
        made.append({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
        if role:
            made.append(
                {
                    "apiVersion": "rbac.authorization.k8s.io/v1",
                    "kind": "RoleBinding",
                    "metadata": metadata,
                    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                    "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}],
                }
            )
    return made


@pytest.fixture(scope="module")
def cluster(plain_cluster: Cluster, kubectl: Kubectl, api: ApiServer) -> Iterator[None]:
    """A job without an operator, its pod, people with Kubernetes' own roles, and the chart's additions to these."""
    roles = [
        each
        for each in rendered(CHART / "ci/local-values.yaml")
        if each["kind"] == "ClusterRole" and each["metadata"]["name"].endswith(("-view", "-edit"))
    ]
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    kubectl("apply", "-f", "-", stdin=json.dumps(namespace))
    kubectl.wait_until_pods_may_come(NAMESPACE)
    objects = [*roles, *people(), job(), pod()]
    kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    kubectl("-n", NAMESPACE, "wait", "--for=condition=Ready", f"pod/{POD}", f"--timeout={DEADLINE_S:.0f}s")
    for person, verb in (("viewer", "get"), ("editor", "patch")):  # a controller puts the roles together
        account = f"system:serviceaccount:{NAMESPACE}:{person}"
        can = ("auth", "can-i", verb, names.PLURAL, f"--as={account}", f"--namespace={NAMESPACE}")
        plain_cluster.wait_for(f"the rights of a {person}", partial(plain_cluster.kubectl, *can), DEADLINE_S)
    yield
    kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture
def run(cluster: None, kubectl: Kubectl, tmp_path: Path) -> Run:
    """Return a function that runs a command as one of the users, who logs in with kubectl's
    plugin: `run("viewer", "explain", "sums")`.
    """

    def run(who: str, *words: str) -> subprocess.CompletedProcess[str]:
        token = kubectl("-n", NAMESPACE, "create", "token", who).strip()
        program = tmp_path / "kubectl"  # the cluster's binary is kubectl when it is called so
        program.unlink(missing_ok=True)
        program.symlink_to(CHECKOUT.localcluster)
        environment = {
            **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "COLUMNS": "120",
            "KUBECONFIG": str(logged_in(kubectl.kubeconfig, tmp_path, token)),
        }  # fmt: skip
        return subprocess.run(
            [sys.executable, "-m", "colocated_rl_cli", *words],
            env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip

    return run


def logged_in(original: Path, folder: Path, token: str) -> Path:
    """A kubeconfig whose user is known through a plugin, and whose context names the namespace."""
    plugin = folder / "login"
    credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": token}}
    plugin.write_text(f"#!/bin/sh\ncat <<'E'\n{json.dumps(credential)}\nE\n")
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    config = yaml.safe_load(original.read_text())
    login = {"apiVersion": credential["apiVersion"], "command": str(plugin), "interactiveMode": "Never"}
    config["users"] = [{"name": "person", "user": {"exec": login}}]
    config["contexts"] = [
        {
            "name": "work",
            "context": {"cluster": config["clusters"][0]["name"], "user": "person", "namespace": NAMESPACE},
        }
    ]
    config["current-context"] = "work"
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def test_who_may_edit_reads_samples_through_port_forward(run: Run) -> None:
    done = run("editor", "samples", "sums", "--limit", "3", "-o", "json")
    assert (Exit.FINE, "") == (done.returncode, done.stderr)
    assert [{**SAMPLE, "asked": "/v1/samples?limit=3"}] == json.loads(done.stdout)


def test_who_may_only_view_does_not_see_samples_and_reads_which_right_is_missing(run: Run) -> None:
    done = run("viewer", "samples", "sums")
    assert (Exit.NO_ANSWER, "") == (done.returncode, done.stdout)
    assert 'resource "pods/portforward"' in done.stderr
    assert "docs/cli.md lists the rights that each command needs" in done.stderr


def test_who_may_only_view_has_the_job_explained_from_its_status(run: Run) -> None:
    done = run("viewer", "explain", "sums", "-o", "json")
    assert Exit.PROBLEM == done.returncode, done.stderr
    explanation = json.loads(done.stdout)
    assert ["NotSeen"] == [cause["reason"] for cause in explanation["causes"]]
    assert "pods/portforward" in explanation["notes"][0]
    assert [] == json.loads(run("editor", "explain", "sums", "-o", "json").stdout)["notes"]


def test_who_may_only_view_sees_evaluations_and_top(run: Run) -> None:
    assert ["0", "held-out", "0.25", "0.01", "-", "8"] == run("viewer", "eval", "sums").stdout.splitlines()[1].split()
    done = run("viewer", "top", "sums", "--once")
    assert (Exit.FINE, True) == (done.returncode, f"{NAMESPACE}/sums" in done.stdout)


def test_who_has_no_right_is_told_so(run: Run) -> None:
    for words in (("explain", "sums"), ("samples", "sums"), ("bundle", "sums")):
        done = run("stranger", *words)
        assert (Exit.NO_ANSWER, "") == (done.returncode, done.stdout)
        assert f'cannot get resource "{names.PLURAL}"' in done.stderr


def test_only_who_may_edit_suspends(run: Run, kubectl: Kubectl) -> None:
    assert Exit.NO_ANSWER == run("viewer", "suspend", "sums").returncode
    assert Exit.FINE == run("editor", "suspend", "sums").returncode
    read = ("-n", NAMESPACE, "get", "crlj", "sums", "-o", "jsonpath={.spec.suspend}")
    assert "true" == kubectl(*read)
    assert Exit.FINE == run("editor", "resume", "sums").returncode
    assert "false" == kubectl(*read)


def test_a_bundle_holds_what_its_maker_may_read_and_no_secret(run: Run, tmp_path: Path) -> None:
    done = run("viewer", "bundle", "sums")
    assert Exit.FINE == done.returncode, done.stderr
    with tarfile.open(tmp_path / "sums-bundle.tar.gz") as archive:
        texts = {member.name.partition("/")[2]: archive.extractfile(member) for member in archive.getmembers()}
        read = {name: file.read().decode() for name, file in texts.items() if file}
    assert {"job.yaml", f"pods/{POD}.yaml", f"pods/{POD}/rollout.log", "not-read.txt", "claims.yaml"} <= read.keys()
    assert f"pods/{POD}/state.json" in read["not-read.txt"]
    assert not [name for name, text in read.items() if "hunter2" in text]


def test_a_port_where_nobody_listens_is_reported(run: Run, tmp_path: Path) -> None:
    """The pod has no metrics."""
    assert Exit.FINE == run("editor", "bundle", "sums").returncode
    with tarfile.open(tmp_path / "sums-bundle.tar.gz") as archive:
        why = archive.extractfile("sums-bundle/not-read.txt")
        assert why is not None
        [line] = why.read().decode().splitlines()
    assert line.startswith(f"pods/{POD}/metrics.txt: page /metrics of pod {POD}: ")
    assert "connection refused" in line or f"port {names.METRICS_PORT} of the pod gave no answer" in line


def test_kubectl_finds_it_as_a_plugin_and_completes_its_words(kubectl: Kubectl, tmp_path: Path) -> None:
    (tmp_path / "kubectl").symlink_to(CHECKOUT.localcluster)
    programs = CHECKOUT.python("dev").parent
    environment = {**os.environ, "PATH": f"{tmp_path}:{programs}:{os.environ['PATH']}"}

    def kubectl_says(*words: str | Path) -> str:
        command = [tmp_path / "kubectl", *words]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True
        ).stdout

    example = CHECKOUT.root / "crds/examples/minimal.yaml"
    assert f"{example}: fine: minimal\n" == kubectl_says("crlj", "validate", example)
    assert ["explain", ":4"] == kubectl_says("__complete", "crlj", "exp").split()[:2]


# ----------------------------------------------------------------------------------------------------------- in a pod
IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.fixture
def login(tmp_path: Path) -> Login:
    """Return the login of a pod without a kubeconfig, by the real kubectl, which asks no server for it."""
    for name, content in (("token", "secret"), ("namespace", "of-the-pod")):
        (tmp_path / name).write_text(content)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **IN_POD}
    return Login(None, None, (str(CHECKOUT.localcluster), "kubectl"), environment, tmp_path)


async def test_the_namespace_is_the_pods_own_where_no_context_names_one(login: Login, tmp_path: Path) -> None:
    """There was no answer without -n: kubectl has no context to show there, though it logs in."""
    assert "of-the-pod" == await login.namespace()
    chosen = replace(login, environment={**login.environment, "POD_NAMESPACE": "told"})
    assert "told" == await chosen.namespace(), "as kubectl has it"
    for context, namespace in ((kubeconfig(), "of-the-pod"), (kubeconfig("named"), "named")):
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps(context))
        assert namespace == await replace(login, kubeconfig=str(file)).namespace()


async def test_where_kubectl_can_not_log_in_a_pods_namespace_helps_nobody(login: Login, tmp_path: Path) -> None:
    with pytest.raises(NotReached, match="no such context"):
        await replace(login, context="other").namespace()
    with pytest.raises(NotReached, match="knows no cluster"):
        await replace(login, kubeconfig=str(tmp_path / "missing")).namespace()
    with pytest.raises(NotReached, match="knows no cluster"):
        await replace(login, environment={"HOME": str(tmp_path)}).namespace()
    (tmp_path / "token").unlink()
    with pytest.raises(NotReached, match="knows no cluster"):
        await login.namespace()


def kubeconfig(namespace: str | None = None) -> Document:
    context = {"cluster": "one", "user": "one"} | ({"namespace": namespace} if namespace else {})
    return {
        "kind": "Config",
        "apiVersion": "v1",
        "current-context": "one",
        "clusters": [{"name": "one", "cluster": {"server": "https://localhost"}}],
        "users": [{"name": "one", "user": {}}],
        "contexts": [{"name": "one", "context": context}],
    }
