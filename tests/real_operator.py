"""The operator process and a real API server without nodes, for tests and benchmarks that play the kubelet."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from colocated_rl_api import names
from colocated_rl_operator.clients.cluster import ClusterAccess, find_cluster
from setup.layout import CHECKOUT

Body = dict[str, Any]
NAMESPACE, OPERATORS = "default", "operators"
ACCOUNT = "colocated-rl-operator"
JOBS = f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
START_DEADLINE_S = 90


@contextmanager
def cluster_without_nodes(folder: Path, *options: str) -> Iterator[ClusterAccess]:
    """A cluster with the CRD and a namespace for operators; its nodes run nothing. Raises RuntimeError.

    options: more words for `localcluster up`.
    """
    kubeconfig = folder / "kubeconfig"
    command: list[str | Path] = [CHECKOUT.localcluster, "up", "--dir", folder, "--images", CHECKOUT.images, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as supervisor:
        try:
            assert supervisor.stdout is not None
            output = []
            for line in supervisor.stdout:
                output.append(line)
                if kubeconfig.exists():
                    break
            else:
                raise RuntimeError("the local cluster did not start:\n" + "".join(output))

            def kubectl(*words: str | Path) -> None:
                arguments = [CHECKOUT.localcluster, "--dir", folder, "kubectl", *words]
                subprocess.run(arguments, check=True, capture_output=True, timeout=START_DEADLINE_S)

            kubectl("apply", "--server-side", "-f", CHECKOUT.root / "crds/colocatedrljobs.yaml")
            _wait_until_listed(kubectl)  # first, for `wait` fails at a new one that has no conditions yet
            kubectl("wait", "--for=condition=Established", f"crd/{names.PLURAL}.{names.GROUP}", "--timeout=60s")
            kubectl("cordon", "--selector=kubernetes.io/os=linux")
            kubectl("create", "namespace", OPERATORS)
            kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
            yield find_cluster({"KUBECONFIG": str(kubeconfig)})
        finally:
            supervisor.terminate()
            supervisor.wait(START_DEADLINE_S)


def _wait_until_listed(kubectl: Callable[..., None]) -> None:
    """kubectl knows a kind by what the server lists, and it lists a new one some time after it serves it."""
    until = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            return kubectl("get", names.SHORT_NAME)
        except subprocess.CalledProcessError:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


def account_of_chart(access: ClusterAccess, folder: Path, *words: str) -> ClusterAccess:
    """Install the chart's rights and policies for an operator in the namespace of operators; return its access.

    words: more for `helm template`. The release has the name that the Lease of operators has by default, and the rights
    to see and taint nodes, to read namespaces and to follow an issued authority, which some tests need.
    """
    kubeconfig = folder / "chart-kubeconfig"
    kubeconfig.write_text(kubeconfig_of(access))
    kubeconfig.chmod(0o600)

    def run(*command: str | Path, stdin: str | None = None) -> str:
        words = [CHECKOUT.localcluster, *command]
        return subprocess.run(
            words, check=True, input=stdin, stdout=subprocess.PIPE, text=True, timeout=START_DEADLINE_S
        ).stdout

    shown = [f"--show-only=templates/{name}.yaml" for name in ("serviceaccount", "rbac", "admission", "flowschema")]
    chart = ("helm", "template", ACCOUNT, CHECKOUT.root / "charts/colocated-rl", "--namespace", OPERATORS)
    usual = "nodes.badConditions={GPUMissing=True},nodes.taint=true,authority.secretName=colocated-rl-issued"
    rendered = run(*chart, *shown, "--set", f"{usual},namespaceUsers=true", *words)
    kubectl = ("kubectl", "--kubeconfig", kubeconfig)
    run(*kubectl, "apply", "-f", "-", stdin=rendered)
    token = run(*kubectl, "create", "token", ACCOUNT, "--namespace", OPERATORS, "--duration=24h").strip()
    return replace(access, token_file=None, certificate_pem=None, fixed_token=token)


class NotYet(Exception):
    """The API server does not serve that collection yet."""


@dataclass
class AdminApi:
    """An Api sends requests to the API server as its administrator."""

    access: ClusterAccess
    session: aiohttp.ClientSession

    async def call(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Body:
        headers = {**self.access.headers(), "Content-Type": kind}
        data = None if body is None else json.dumps(body)
        async with self.session.request(method, self.access.server + path, data=data, headers=headers) as answer:
            found: Body = await answer.json()
            if answer.status == 404:
                return {}
            assert answer.status < 300, f"{method} {path}: {found}"
            return found

    async def watch(self, path: str, note: Callable[[str, Body], None]) -> None:
        """Tell `note` of every object of a collection, until cancelled.

        A fresh CRD answers after a moment, and so does a server that was restarted. The server ends a watch whose
        client is slow: the next goes on where it ended, for with ten thousand objects one from the start is as slow.
        """
        newest = ""  # the version that was seen last; without one a watch begins with all that is there
        while True:
            try:
                async for event, body in self._watch(path, newest):
                    newest = "" if event == "ERROR" else body["metadata"]["resourceVersion"]
                    if event in ("ADDED", "MODIFIED", "DELETED"):
                        note(event, body)
            except NotYet:
                newest = ""
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)

    async def _watch(self, path: str, version: str) -> AsyncIterator[tuple[str, Body]]:
        url = f"{self.access.server}{path}?watch=true&allowWatchBookmarks=true&resourceVersion={version}"
        async with self.session.get(url, headers=self.access.headers(), timeout=aiohttp.ClientTimeout()) as answer:
            if answer.status != 200 or answer.connection is None:
                raise NotYet
            transport = answer.connection.transport
            try:
                async for line in answer.content:
                    event = json.loads(line)
                    yield event["type"], event["object"]
            finally:
                if transport is not None:
                    transport.abort()  # a stream that is left in the middle: TLS would wait for the server's goodbye

    async def all(self, path: str) -> list[Body]:
        items: list[Body] = (await self.call("GET", path))["items"]
        return items


@dataclass
class RealOperator:
    process: asyncio.subprocess.Process
    lines: list[Body] = field(default_factory=list)

    async def read(self, heard: Callable[[], None]) -> None:
        """Its log, until it ends."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            sys.stdout.write(line.decode())
            self.lines.append(json.loads(line) if line.startswith(b"{") else {"event": line.decode()})
            heard()

    def logged(self, event: str) -> list[Body]:
        return [line for line in self.lines if line["event"] == event]

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()


def kubeconfig_of(access: ClusterAccess) -> str:
    assert access.ca_pem is not None
    encoded = base64.b64encode(access.ca_pem.encode()).decode()
    return yaml.safe_dump(
        {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": access.server, "certificate-authority-data": encoded}}],
            "users": [{"name": "u", "user": {"token": access.token()}}],
        }
    )


@asynccontextmanager
async def running_operator(
    kubeconfig: Path, name: str, variables: Mapping[str, str], heard: Callable[[], None] = lambda: None
) -> AsyncIterator[RealOperator]:
    """Run an operator. heard: called with each line of its log."""
    environment = (
        os.environ
        | {
            "KUBECONFIG": str(kubeconfig),
            "OPERATOR_NAMESPACE": OPERATORS,
            "POD_NAME": name,
            "AGENT_IMAGE": "colocated-rl/agent:dev",
            "ROLLOUT_IMAGE": "colocated-rl/rollout:dev",
            "GPU_IMAGE": "colocated-rl/gpu:dev",
            "METRICS_PORT": "0",
        }
        | dict(variables)
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "colocated_rl_operator"), env=environment, stdout=PIPE, stderr=STDOUT
    )
    operator = RealOperator(process)
    reader = asyncio.create_task(operator.read(heard))
    try:
        yield operator
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reader
