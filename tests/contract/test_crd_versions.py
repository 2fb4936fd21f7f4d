"""Stored jobs move to another version of the API as docs/api-changes.md says: served beside the former, then alone.

The CRD of this checkout is installed once more, in a group and under names of its own, so that no other test meets it.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from contract.api_server import COMMAND_S, ApiServer, Document, Kubectl
from documents.blocks import under

import quick_yaml
from builders import make_manifest
from colocated_rl_api import names
from colocated_rl_operator.crd import CRD_FILE
from colocated_rl_operator.loop.observe import read_job
from setup.layout import CHECKOUT

pytestmark = pytest.mark.cluster

GROUP = "next.colocate.dev"
PLURAL, KIND = "movedrljobs", "MovedRLJob"
CRD = f"{PLURAL}.{GROUP}"
BEFORE, AFTER = names.VERSION, "v1beta1"
DEFINITION = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD}"
PAGE = "docs/api-changes.md"
TITLE = "How v1beta1 will come"
SOON_S = 60


def definition(*, served: tuple[str, ...], stored: str) -> Document:
    """The CRD with these versions. The later one has a field more, which has a default."""
    crd: Document = quick_yaml.load((CHECKOUT.root / CRD_FILE).read_text())
    crd["metadata"]["name"], crd["spec"]["group"] = CRD, GROUP
    crd["spec"]["names"] = {"plural": PLURAL, "singular": KIND.lower(), "kind": KIND, "listKind": f"{KIND}List"}
    [usual] = crd["spec"]["versions"]
    crd["spec"]["versions"] = [
        copy.deepcopy(usual) | {"name": version, "storage": version == stored} for version in served
    ]
    for version in crd["spec"]["versions"]:
        if version["name"] == AFTER:
            spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
            spec["addedLater"] = {"type": "integer", "default": 5, "minimum": 0, "maximum": 9}
    return crd


def path(version: str, name: str = "") -> str:
    return f"/apis/{GROUP}/{version}/namespaces/default/{PLURAL}/{name}".removesuffix("/")


@pytest.fixture
def install(api: ApiServer, kubectl: Kubectl) -> Iterator[Callable[..., None]]:
    """Applies the CRD with versions, and returns when each of them answers. Afterwards the group is gone."""

    def apply(*served: str, stored: str) -> None:
        crd = json.dumps(definition(served=served, stored=stored))
        kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=crd)
        # first, for `wait` fails at one that has no conditions yet
        until(lambda: set(served) == {version for version in (BEFORE, AFTER) if is_served(api, version)})
        kubectl("wait", "--for=condition=Established", f"crd/{CRD}", f"--timeout={SOON_S}s")

    yield apply
    kubectl("delete", "crd", CRD, "--ignore-not-found", f"--timeout={SOON_S}s")


def is_served(api: ApiServer, version: str) -> bool:
    return api.request("GET", path(version)).is_accepted


def storage_hash(api: ApiServer) -> str:
    """Return the hash of the version in which the API server stores jobs now."""
    kinds = api.request("GET", f"/apis/{GROUP}/{BEFORE}").body["resources"]
    [found] = [str(each["storageVersionHash"]) for each in kinds if each["name"] == PLURAL]
    return found


def until(what: Callable[[], bool]) -> None:
    """The API server serves a version, or no longer, some time after it took the CRD."""
    deadline = time.monotonic() + SOON_S
    while not what():
        assert time.monotonic() < deadline, "the API server does not serve what its CRD says"


def stored_versions(api: ApiServer) -> list[str]:
    found: list[str] = api.request("GET", DEFINITION).body["status"]["storedVersions"]
    return found


def read(api: ApiServer, version: str) -> Document:
    answer = api.request("GET", path(version, "sums"))
    assert answer.is_accepted, answer.message
    return answer.body


def copied(command: str, kubectl: Kubectl) -> None:
    """Run a command of the page in the group of this file."""
    script = f'kubectl() {{ "{CHECKOUT.localcluster}" kubectl "$@"; }}; set -o pipefail; {command}'
    environment = os.environ | {"KUBECONFIG": str(kubectl.kubeconfig)}
    words = ["bash", "-euc", script.replace(names.GROUP, GROUP).replace(names.PLURAL, PLURAL)]
    subprocess.run(words, env=environment, timeout=COMMAND_S, check=True)


def test_stored_jobs_move_to_the_next_version_as_the_page_says(
    api: ApiServer, kubectl: Kubectl, install: Callable[..., None]
) -> None:
    install(BEFORE, stored=BEFORE)
    made = api.request("POST", path(BEFORE), make_manifest() | {"apiVersion": f"{GROUP}/{BEFORE}", "kind": KIND})
    assert made.is_accepted, made.message
    with_status = made.body | {"status": {"observedGeneration": 1, "phase": "Rollout", "epoch": 3, "operator": "a/b"}}
    first = api.request("PUT", path(BEFORE, "sums") + "/status", with_status).body

    install(BEFORE, AFTER, stored=BEFORE)
    assert [BEFORE] == stored_versions(api)
    assert [f"{GROUP}/{BEFORE}", f"{GROUP}/{AFTER}"] == [read(api, each)["apiVersion"] for each in (BEFORE, AFTER)]

    former = storage_hash(api)
    install(BEFORE, AFTER, stored=AFTER)
    until(lambda: former != storage_hash(api))
    assert [BEFORE, AFTER] == stored_versions(api)
    alone = json.dumps(definition(served=(AFTER,), stored=AFTER))
    refusal = kubectl.refusal("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=alone)
    assert f'status.storedVersions[0]: Invalid value: "{BEFORE}"' in refusal

    rewrite, say_so = under(PAGE, TITLE)
    copied(rewrite, kubectl)
    copied(say_so, kubectl)
    assert [AFTER] == stored_versions(api)
    install(AFTER, stored=AFTER)  # what was still stored as before would be unreadable
    found = read(api, AFTER)
    assert (first["metadata"]["uid"], first["status"]) == (found["metadata"]["uid"], found["status"])
    assert first["spec"] | {"addedLater": 5} == found["spec"]
    assert first["metadata"]["generation"] + 1 == found["metadata"]["generation"], "the new default is written out"
    assert read_job(first).spec == read_job(found).spec
