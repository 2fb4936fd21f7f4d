"""A cluster with the operator installed, and one job of two pods that the tests of a session share.

With KUBECONFIG set, that cluster is used as it is, chart, claims and images included. Otherwise a local one is made,
with the chart, the images and the model of this checkout, and ended with the session.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster, CommandFailed
from e2e.running_job import KubectlCall, RunningJob
from e2e.terminal import RecordedTerminal

import fakes.hub
from colocated_rl_operator.manifests.confinement import RESTRICTED
from examples.arithmetic.demo import model_volume
from setup.environments import FRAMEWORKS
from setup.layout import CHECKOUT

NAMESPACE = "e2e"
OPERATOR_NAMESPACE = "colocated-rl-system"
MODEL = CHECKOUT.build / "models/arithmetic"
SCENARIOS = Path(__file__).parent
HELM_S = 400.0
HUB_MODEL, HUB_PORT = "us/arithmetic", 8000

CommandLine = Callable[..., str]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print the operator's log beside a failure, of this run of the operator and of the one before."""
    report = yield
    kubectl = getattr(item, "funcargs", {}).get("kubectl")
    is_async = asyncio.iscoroutinefunction(getattr(item, "obj", None))  # then so is its kubectl
    if report.failed and callable(kubectl) and not is_async:  # other tests have fixtures of that name
        for which in ("--previous=false", "--previous"):
            try:
                output = kubectl("-n", OPERATOR_NAMESPACE, "logs", "deploy/colocated-rl", "--tail=200", which)
            except (CommandFailed, subprocess.SubprocessError) as error:
                output = str(error)
            report.sections.append((f"operator, {which}", output))
    return report


@contextmanager
def installed(
    place: Path,
    *,
    images: Path = CHECKOUT.images,
    options: Iterable[str] = (),
    cordoned: Iterable[str] = (),
    values: Iterable[str] = (),
) -> Iterator[Cluster]:
    """A local cluster with the chart of this checkout, and the claims that jobs of these tests name.

    options: of `localcluster up`. cordoned: nodes on which nothing is put, the operator neither. values: further ones
    of the chart, as `--set` takes them.
    """
    with Cluster.up(place, images=images, options=options) as cluster:
        for node in cordoned:
            cluster.kubectl("cordon", node)
        prepare(cluster)
        release(cluster, "install", values=values)
        yield cluster


def release(cluster: Cluster, verb: str, *, values: Iterable[str] = ()) -> None:
    """Install the chart of this checkout, or upgrade to it, and wait until its operator runs."""
    chart = CHECKOUT.root / "charts/colocated-rl"
    cluster.helm(
        *(verb, "colocated-rl", chart, "--namespace", OPERATOR_NAMESPACE, "--wait"),
        *("--values", chart / "ci/local-values.yaml"),
        *(f"--set={each}" for each in values),
        deadline_s=HELM_S,
    )


def prepare(cluster: Cluster) -> None:
    """Make the namespaces of operator and jobs, both restricted, and the claims that jobs of these tests name."""
    for namespace in (OPERATOR_NAMESPACE, NAMESPACE):
        cluster.kubectl("create", "namespace", namespace)
        cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    for claim, path in (
        ("arithmetic-model", MODEL),
        ("trained-model", CHECKOUT.trained_model),
        ("own-prompts", SCENARIOS / "own_prompts"),
    ):
        cluster.kubectl("apply", "-f", "-", stdin=volume(claim, path))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster | None]:
    """None: that of the environment."""
    if "KUBECONFIG" in os.environ:
        yield None
        return
    place = tmp_path_factory.mktemp("cluster")
    images = place / "images.yaml"
    further = {"environment": environment_image(), "old-engine": old_engine_image(), "arithmetic-model": model_image()}
    images.write_text(with_images({f"colocated-rl/{name}:dev": image for name, image in further.items()}))
    with installed(place / "c", images=images) as cluster:
        yield cluster


def with_images(further: dict[str, Any]) -> str:
    """This checkout's list of images, and further ones."""
    listed = json.loads(CHECKOUT.images.read_text())
    return json.dumps({"images": listed["images"] | further})


def environment_image() -> dict[str, Any]:
    """The rollout controller's with verifiers, with the environment of these tests, and with the example's `uv`."""
    image = image_of("rollout")
    (libraries,) = CHECKOUT.environment(FRAMEWORKS).glob("lib/python*/site-packages")
    ours, example = SCENARIOS / "own_environment", CHECKOUT.root / "examples/environments"
    binds = [f"{libraries}:/opt/libraries:ro", f"{ours}:/opt/environments:ro", f"{example}:/opt/programs:ro"]
    path = {"PATH": f"/opt/programs:{image['env']['PATH']}", "PYTHONPATH": "/opt/environments:/opt/libraries"}
    return image | {"binds": [*image["binds"], *binds], "env": image["env"] | path}


def old_engine_image() -> dict[str, Any]:
    """The GPU image with an engine that takes itself for an older one."""
    image = image_of("gpu")
    binds = [*image["binds"], f"{SCENARIOS / 'old_engine'}:/opt/old-engine:ro"]
    path = ":".join(filter(None, ("/opt/old-engine", image["env"].get("PYTHONPATH"))))
    return image | {"binds": binds, "env": image["env"] | {"PYTHONPATH": path}}


def model_image() -> dict[str, Any]:
    return {"root": str(MODEL)}


def simulated_gpu_image(place: Path) -> dict[str, Any]:
    """Return this checkout's image, in which `sglang` is the engine of the tests, and `fakes.trainer` a trainer."""
    (place / "sglang").mkdir()
    (place / "sglang/__init__.py").touch()
    (place / "sglang/launch_server.py").write_text("from fakes.engine import main\nmain()\n")
    image = image_of("gpu")
    binds = [*image["binds"], f"{place}:/opt/site:ro", f"{CHECKOUT.root / 'tests/fakes'}:/opt/tests/fakes:ro"]
    return image | {"binds": binds, "env": image["env"] | {"PYTHONPATH": "/opt/site:/opt/tests"}}


def image_of(name: str) -> dict[str, Any]:
    image: dict[str, Any] = json.loads(CHECKOUT.images.read_text())["images"][f"colocated-rl/{name}:dev"]
    return image


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster | None) -> KubectlCall:
    return _kubectl_of_environment if cluster is None else cluster.kubectl


@pytest.fixture(scope="session")
def command_line(cluster: Cluster | None) -> CommandLine:
    """`kubectl crlj` in the namespace of these tests; what it printed."""
    kubectl = {} if cluster is None else {"KUBECTL": shlex.join(cluster.command("kubectl"))}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "colocated_rl_cli", *words, "--namespace", NAMESPACE]
        done = subprocess.run(
            command, env=os.environ | kubectl, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr or done.stdout}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def terminal(
    cluster: Cluster | None, kubectl: KubectlCall, tmp_path_factory: pytest.TempPathFactory
) -> RecordedTerminal:
    """Return a terminal in the namespace of these tests."""
    folder = tmp_path_factory.mktemp("terminal")
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(kubectl("config", "view", "--raw", "--minify", "--flatten"))
    terminal = RecordedTerminal.opened(folder, kubeconfig, is_local=cluster is not None)
    terminal(f"kubectl config set-context --current --namespace={NAMESPACE}")
    return terminal


def _kubectl_of_environment(*words: str, stdin: str | None = None) -> str:
    return subprocess.run(
        ["kubectl", *words], input=stdin, capture_output=True, text=True, timeout=120, check=True
    ).stdout


def volume(claim_name: str, path: Path, *, namespace: str = NAMESPACE) -> str:
    """A claim like that of the demo's model, for a directory of this machine."""
    return yaml.safe_dump_all(model_volume(claim_name, path, namespace=namespace))


@contextmanager
def hub_in_a_pod(kubectl: KubectlCall) -> Iterator[str]:
    """The address of a hub that has the arithmetic model, as `HUB_MODEL`."""
    container = {
        "name": "hub",
        "image": "colocated-rl/rollout:dev",
        "command": ["python3", "-c", Path(fakes.hub.__file__).read_text(), str(HUB_PORT), "/model", HUB_MODEL],
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": "model", "mountPath": "/model", "readOnly": True}],
    }
    spec = {
        "containers": [container],
        "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": "arithmetic-model", "readOnly": True}}],
        "securityContext": {"runAsUser": 65532, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hub"}, "spec": spec}
    kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=json.dumps(pod))
    kubectl("-n", NAMESPACE, "wait", "pod/hub", "--for=condition=Ready", f"--timeout={HELM_S:.0f}s")
    yield f"http://{kubectl('-n', NAMESPACE, 'get', 'pod', 'hub', '-o', 'jsonpath={.status.podIP}')}:{HUB_PORT}"
    kubectl("-n", NAMESPACE, "delete", "pod/hub", "--wait=false")


def apply(kubectl: KubectlCall, file: str, *, suffix: str = "", **instead: object) -> RunningJob:
    """Create the job of a file beside the tests, with other fields of its spec. suffix: of its name."""
    manifest = yaml.safe_load((SCENARIOS / file).read_text())
    manifest["metadata"]["name"] += suffix
    manifest["spec"] |= instead
    kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=json.dumps(manifest))
    return RunningJob(kubectl, namespace=NAMESPACE, name=manifest["metadata"]["name"])
