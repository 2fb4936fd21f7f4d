"""Find the API server, and the credentials with which the operator authenticates.

In a pod they are KUBERNETES_SERVICE_HOST and _PORT, which need no DNS, and the service account's files; during
development, the current context of KUBECONFIG. The token file is read for each request, because kubelet rotates it.
"""

from __future__ import annotations

import base64
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from colocated_rl_operator.clients.errors import BadSetting

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class ClusterAccess:
    """This value holds a server and its credentials. `certificate_pem`: the client's certificate, then its key."""

    server: str
    ca_pem: str | None = None
    token_file: Path | None = None
    fixed_token: str | None = None
    certificate_pem: str | None = None

    def token(self) -> str | None:
        if self.token_file is not None:
            return self.token_file.read_text(encoding="ascii").strip()
        return self.fixed_token

    def headers(self) -> dict[str, str]:
        token = self.token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def ssl_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.ca_pem)
        if self.certificate_pem is not None:
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # ssl reads certificates from files alone
                file.write(self.certificate_pem)
                file.flush()
                context.load_cert_chain(file.name)
        return context


def find_cluster(environment: Mapping[str, str], *, service_account: Path = SERVICE_ACCOUNT) -> ClusterAccess:
    """Return the access by service account, or else by KUBECONFIG. Raises BadSetting if there is neither."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if host and (service_account / "token").exists():
        return ClusterAccess(
            server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
            ca_pem=(service_account / "ca.crt").read_text(encoding="ascii"),
            token_file=service_account / "token",
        )
    path = environment.get("KUBECONFIG")
    if not path:
        raise BadSetting("KUBECONFIG", "", "a kubeconfig file, because no service account is mounted in this process")
    try:
        return _read_kubeconfig(Path(path))
    except (OSError, KeyError, TypeError, yaml.YAMLError, StopIteration) as error:
        raise BadSetting("KUBECONFIG", path, f"a kubeconfig with a current context ({error!r})") from error


def _read_kubeconfig(path: Path) -> ClusterAccess:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]

    def pem(part: dict[str, Any], key: str) -> str | None:
        if data := part.get(f"{key}-data"):
            return base64.b64decode(data).decode("ascii")
        return (path.parent / part[key]).read_text(encoding="ascii") if part.get(key) else None

    certificate, key = pem(user, "client-certificate"), pem(user, "client-key")
    return ClusterAccess(
        server=cluster["server"].rstrip("/"),
        ca_pem=pem(cluster, "certificate-authority"),
        token_file=path.parent / user["tokenFile"] if user.get("tokenFile") else None,
        fixed_token=user.get("token"),
        certificate_pem=f"{certificate}\n{key}" if certificate and key else None,
    )


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(entry for entry in entries if entry["name"] == name)
