"""Pages for OpenShift and for several teams tell of a job's objects what is rendered of them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from builders import PLACED, make_job
from colocated_rl_api.rungs import Placement
from colocated_rl_operator.manifests import belongings, resources
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.planner.observation import Job
from setup.layout import CHECKOUT

IMAGES = PodImages(agent="agent", rollout="rollout", gpu="gpu", pull_policy="IfNotPresent")
APART: dict[str, Any] = {"reference": {"placement": "OwnDevices", "replicas": 1}}
JOBS = {placement.value: make_job(**PLACED[placement]) for placement in Placement}
JOBS["a reference apart"] = make_job(**APART)


def pods(job: Job) -> list[dict[str, Any]]:
    return [resources.pod(job, seat, 0, IMAGES) for seat in job.seats.all]


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_users_and_groups_of_pods_are_those_that_the_page_for_openshift_names(job: Job) -> None:
    """`restricted-v2` compares every user with the first annotation, fsGroup with the beginning of the second."""
    page = (CHECKOUT.root / "docs/openshift.md").read_text()
    [(first, count)] = re.findall(r"sa\.scc\.uid-range=(\d+)/(\d+)", page)
    [(group, _)] = re.findall(r"sa\.scc\.supplemental-groups=(\d+)/(\d+)", page)
    for spec in (pod["spec"] for pod in pods(job)):
        context = spec["securityContext"]
        asked = [each["securityContext"].get("runAsUser") for each in (*spec["initContainers"], *spec["containers"])]
        users = {context["runAsUser"], *(user for user in asked if user is not None)}
        assert users <= set(range(int(first), int(first) + int(count)))
        assert int(group) == context["fsGroup"] == context["runAsGroup"]


@pytest.mark.parametrize(
    ("job", "claims", "policies"),
    [(JOBS["TimeSliced"], 2, 2), (JOBS["Disaggregated"], 3, 2), (JOBS["a reference apart"], 2, 3)],
)
def test_a_job_has_as_many_objects_as_the_page_for_teams_says(job: Job, claims: int, policies: int) -> None:
    assert claims == len(belongings.claims(job))
    kinds = [each["kind"] for each in belongings.applied(job, operator_namespace="rl-system")]
    assert ["ConfigMap", *["NetworkPolicy"] * policies, "PodDisruptionBudget"] == kinds
    assert "| `count/poddisruptionbudgets.policy` | 1 |" in (CHECKOUT.root / "docs/multi-tenancy.md").read_text()


def test_memory_that_the_page_for_teams_adds_is_the_agents() -> None:
    [pod] = [pod for pod in pods(make_job(replicas=1)) if pod["metadata"]["name"].startswith("sums-gpu-0")]
    requested = {each["name"]: each["resources"]["requests"] for each in pod["spec"]["initContainers"]}
    assert "2Gi" == requested["agent"]["memory"]
    assert "| 2 GiB for the agent of each GPU pod |" in (CHECKOUT.root / "docs/multi-tenancy.md").read_text()
