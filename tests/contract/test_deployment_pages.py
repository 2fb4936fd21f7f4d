"""Commands of pages for who installs and operates, as they stand: helm, kubectl and openssl, without a cluster.

Kubectl is a stand-in that finds objects by the words of the command. What it prints of them, and what it makes of
files, is kubectl's own.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from contract.api_server import COMMAND_S, Helm
from documents.blocks import under

from builders import make_job
from colocated_rl_api import names
from colocated_rl_operator.clients.authority import (
    AUTHORITY_LIFE,
    LEAF_LIFE,
    SECRET_NAME,
    Authority,
    Keyholder,
    Keyring,
    secret_files,
)
from colocated_rl_operator.manifests import resources
from colocated_rl_operator.manifests.resources import PodImages
from setup.layout import CHECKOUT

pytestmark = pytest.mark.cluster  # its binary is helm and kubectl

CHART = CHECKOUT.root / "charts/colocated-rl"
RUNBOOK = "docs/runbooks/ca-rotation.md"
KUBECTL = f"""#!{sys.executable}
import json, pathlib, subprocess, sys
words, objects = sys.argv[1:], pathlib.Path({{objects!r}})
kubectl = [{str(CHECKOUT.localcluster)!r}, "kubectl"]
if "create" in words:
    sys.exit(subprocess.run([*kubectl, *words, "--dry-run=client", "-o", "json"]).returncode)
assert "get" in words, words
[path] = [word.removeprefix("jsonpath=") for word in words if word.startswith("jsonpath=")]
whole = "{{{{range .items[*]}}}}"
if path.startswith(whole):  # kubectl prints objects of a file one by one
    path = path.removeprefix(whole).removesuffix("{{{{end}}}}")
    files = sorted(objects.glob("*.json"))
else:
    name = {SECRET_NAME!r} if {SECRET_NAME!r} in words else words[words.index("-l") + 1].partition("=")[2]
    path, files = path.replace(".items[0]", ""), [objects / f"{{{{name}}}}.json"]
for file in files:
    kind = json.loads(file.read_text())["kind"].lower()
    if kind + "s" in words or kind in words:
        show = ["annotate", "--local", "-f", str(file), "shown=once", "-o", "jsonpath=" + path]
        subprocess.run([*kubectl, *show], check=True)
"""


class PageShell:
    """Runs lines of a page in a shell whose kubectl finds the objects of one folder."""

    def __init__(self, place: Path) -> None:
        self.place, self._objects = place, place / "objects"
        self._objects.mkdir()
        (place / "bin").mkdir()
        program = place / "bin/kubectl"
        program.write_text(KUBECTL.format(objects=str(self._objects)))
        program.chmod(0o755)

    def put(self, name: str, body: dict[str, Any]) -> None:
        (self._objects / f"{name}.json").write_text(json.dumps(body))

    def __call__(self, *lines: str) -> str:
        environment = os.environ | {"PATH": f"{self.place / 'bin'}:{os.environ['PATH']}"}
        words = ["bash", "-o", "pipefail", "-c", "\n".join(lines)]
        done = subprocess.run(
            words, cwd=self.place, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        assert not done.stderr, done.stderr
        return done.stdout


@pytest.fixture
def terminal(tmp_path: Path) -> PageShell:
    return PageShell(tmp_path)


def secret(name: str, namespace: str, files: dict[str, bytes]) -> dict[str, Any]:
    data = {file: base64.b64encode(content).decode() for file, content in files.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": namespace}, "data": data}


def keys_of_a_job(authority: Authority, name: str) -> dict[str, Any]:
    keys = Keyring(authority, b"k" * 32).keys(Keyholder(make_job().uid, "sums-gpu-0-0", names.ROLE_GPU))
    return secret(f"{name}-tls", "research", {file: text.encode() for file, text in secret_files(keys).items()})


def ends(printed: str) -> datetime:
    [line] = [line for line in printed.splitlines() if line.startswith("notAfter=")]
    return datetime.strptime(line, "notAfter=%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC)


def fingerprint(printed: str) -> str:
    [line] = [line for line in printed.splitlines() if "ingerprint" in line]
    return line.partition("=")[2]


def test_commands_tell_whom_a_job_trusts_and_until_when(terminal: PageShell) -> None:
    before, present, now = Authority.new(), Authority.new(), datetime.now(UTC)
    terminal.put(SECRET_NAME, secret(SECRET_NAME, "colocated-rl-system", present.files()))
    terminal.put("older", keys_of_a_job(before, "older"))
    terminal.put("newer", keys_of_a_job(present, "newer"))
    of_authority, of_job, job_until, _, export, others, *_ = under(RUNBOOK, "How to be sure")

    authority = terminal(of_authority)
    assert abs(ends(authority) - now - AUTHORITY_LIFE) < timedelta(hours=1)
    assert abs(ends(terminal(job_until.replace("JOB", "newer"))) - now - LEAF_LIFE) < timedelta(hours=1)
    assert fingerprint(authority) == fingerprint(terminal(of_job.replace("JOB", "newer")))
    assert fingerprint(authority) != fingerprint(terminal(of_job.replace("JOB", "older")))
    assert "research older-tls\n" == terminal(export, others)


def test_an_authority_is_restored_from_the_two_files_of_the_page(terminal: PageShell) -> None:
    lost = Authority.new()
    terminal.put(SECRET_NAME, secret(SECRET_NAME, "colocated-rl-system", lost.files()))
    backup = under(RUNBOOK, "Replace the authority")[:2]
    terminal(*backup)

    [create] = [command for command in under(RUNBOOK, "Restore a lost authority") if " create " in command]
    made = json.loads(terminal(create))
    assert (SECRET_NAME, "colocated-rl-system") == (made["metadata"]["name"], made["metadata"]["namespace"])
    restored = Authority.read({name: base64.b64decode(data) for name, data in made["data"].items()})
    assert lost.files() == restored.files()


def test_images_of_the_chart_are_listed_as_the_page_says(tmp_path: Path) -> None:
    command = under("docs/air-gap.md", "List the images")[0]
    program, rest = command.split(" ", 1)
    assert "helm" == program
    (tmp_path / "values.yaml").write_text('images: {gpu: {repository: own/gpu, digest: "sha256:' + "0" * 64 + '"}}')
    words = (
        f"{shlex.quote(str(CHECKOUT.localcluster))} helm {rest.replace('charts/colocated-rl', shlex.quote(str(CHART)))}"
    )
    listed = subprocess.run(
        ["bash", "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=COMMAND_S, check=True
    )
    version = (CHECKOUT.root / "operator/VERSION").read_text().strip()
    ours = [f"colocated-rl/{name}:{version}" for name in ("agent", "operator", "rollout")]
    assert [*ours, f"own/gpu@sha256:{'0' * 64}"] == listed.stdout.split()


def test_images_of_running_pods_are_listed_as_the_page_says(terminal: PageShell) -> None:
    job, images = make_job(), PodImages(agent="agent:1", rollout="rollout:1", gpu="gpu:1", pull_policy="IfNotPresent")
    for seat in job.seats.all:
        terminal.put(seat, resources.pod(job, seat, 0, images))
    assert ["agent:1", "gpu:1", "rollout:1"] == terminal(under("docs/air-gap.md", "List the images")[1]).split()


def test_the_token_of_the_page_for_one_gpu_is_where_pods_look_for_it(terminal: PageShell) -> None:
    [command] = under("docs/first-gpu-job.md", "From flags to fields")
    made = json.loads(terminal(command))
    hub = {"name": "us/gated", "revision": "a" * 40, "secretName": made["metadata"]["name"]}
    job = make_job(model={"huggingFace": hub})
    pods = [resources.pod(job, seat, 0, PodImages("agent", "rollout", "gpu", "Always")) for seat in job.seats.all]
    keys = re.findall(r'"secretKeyRef": (\{.*?\})', json.dumps(pods))
    assert {("hub", "hub-token")} == {(key["name"], key["key"]) for key in map(json.loads, keys)}
    assert "hf_..." == base64.b64decode(made["data"]["hub-token"]).decode()


def test_no_pod_of_the_chart_has_a_user_with_the_words_of_the_page_for_openshift() -> None:
    [command] = under("docs/openshift.md", "The operator")
    given = command.partition(" --values values.yaml ")[2]
    rendered = Helm(CHECKOUT.localcluster)("template", "colocated-rl", CHART, *given.split())
    assert "runAsNonRoot: true" in rendered
    assert not [line for line in rendered.splitlines() if line.strip().startswith(("runAsUser: ", "runAsGroup: "))]
