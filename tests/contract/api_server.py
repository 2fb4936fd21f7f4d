"""A real API server as tests speak to it: plain HTTPS without conversions, and command lines."""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Document = dict[str, Any]


class Answer(NamedTuple):
    status: int
    body: Document

    @property
    def is_accepted(self) -> bool:
        return 200 <= self.status < 300

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))

    @property
    def fields(self) -> list[str]:
        """Fields that were wrong."""
        details = self.body.get("details") or {}
        return [cause.get("field", "") for cause in details.get("causes", ())]


COMMAND_S = 600.0  # what is waited for has a shorter time of its own


class ApiServer:
    """Reads one kubeconfig with a token. One connection, kept."""

    def __init__(self, kubeconfig: Path, *, timeout_s: float = 60) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
        host = cluster["server"].removeprefix("https://")
        self._connection = http.client.HTTPSConnection(host, context=context, timeout=timeout_s)
        self._headers = {"Authorization": f"Bearer {user['token']}", "Accept": "application/json"}

    def request(self, method: str, path: str, body: object = None, *, content_type: str = "application/json") -> Answer:
        """`body`: bytes as they are, anything else as JSON."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body)
        headers = self._headers | {"Content-Type": content_type}
        try:
            response = self._exchange(method, path, content, headers)
        except (ConnectionError, ssl.SSLError):  # it ends connections that were idle, and answered nothing
            self._connection.close()
            response = self._exchange(method, path, content, headers)
        text = response.read()
        try:
            return Answer(response.status, json.loads(text))
        except json.JSONDecodeError:
            return Answer(response.status, {"message": text.decode(errors="replace")})

    def _exchange(
        self, method: str, path: str, content: str | bytes | None, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        self._connection.request(method, path, content, headers)
        return self._connection.getresponse()

    def close(self) -> None:
        self._connection.close()


class CommandLine:
    """A command line program, of which people read what it prints."""

    def __init__(self, binary: Path, program: str, kubeconfig: Path | None) -> None:
        self._words = (binary, program)
        self._environment = os.environ | ({} if kubeconfig is None else {"KUBECONFIG": str(kubeconfig)})

    def __call__(self, *words: str | Path, stdin: str | None = None) -> str:
        """Return the printed output. Raises AssertionError with the error output when the command fails."""
        done = self._run(*words, stdin=stdin)
        assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.stderr or done.stdout}"
        return done.stdout

    def refusal(self, *words: str | Path, stdin: str | None = None) -> str:
        """Its error output. Raises AssertionError when it succeeds."""
        done = self._run(*words, stdin=stdin)
        assert done.returncode != 0, f"{' '.join(map(str, words))} succeeded: {done.stdout}"
        return done.stderr

    def _run(self, *words: str | Path, stdin: str | None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._words, *words],
            env=self._environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )


class Kubectl(CommandLine):
    def __init__(self, binary: Path, kubeconfig: Path) -> None:
        super().__init__(binary, "kubectl", kubeconfig)
        self.kubeconfig = kubeconfig
        self.helm = Helm(binary, kubeconfig)

    def wait_until_pods_may_come(self, namespace: str) -> None:
        """A controller gives a new namespace its ServiceAccount; before, no pod is admitted."""
        self("-n", namespace, "wait", "--for=create", "serviceaccount/default", "--timeout=60s")


class Helm(CommandLine):
    """Helm can only render without a kubeconfig."""

    def __init__(self, binary: Path, kubeconfig: Path | None = None) -> None:
        super().__init__(binary, "helm", kubeconfig)
