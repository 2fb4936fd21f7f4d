"""Pages for OpenShift and for several teams tell of a job's objects what is rendered of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from builders import PLACED, make_job
from colocated_rl_api.pod_template import PodTemplates
from colocated_rl_api.rungs import Placement
from colocated_rl_operator.manifests import belongings, resources
from colocated_rl_operator.manifests.confinement import (
    GROUPS_ANNOTATION,
    USERS_ANNOTATION,
    Users,
    users_of_range,
)
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.planner.observation import Job
from setup.layout import CHECKOUT

IMAGES = PodImages(agent="agent", rollout="rollout", gpu="gpu", pull_policy="IfNotPresent")
APART: dict[str, Any] = {"reference": {"placement": "OwnDevices", "replicas": 1}}
JOBS = {placement.value: make_job(**PLACED[placement]) for placement in Placement}
JOBS["a reference apart"] = make_job(**APART)


def pods(job: Job) -> list[dict[str, Any]]:
    return [resources.pod(job, seat, 0, IMAGES) for seat in job.seats.all]


OPENSHIFT = (CHECKOUT.root / "docs/openshift.md").read_text()


def users(spec: dict[str, Any]) -> set[int]:
    asked = [each["securityContext"].get("runAsUser") for each in (*spec["initContainers"], *spec["containers"])]
    return {spec["securityContext"]["runAsUser"], *(user for user in asked if user is not None)}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_users_and_groups_of_pods_are_those_that_the_page_for_openshift_names(job: Job) -> None:
    [(first, last, group)] = re.findall(r"users (\d+) to (\d+), group and `fsGroup` (\d+)", OPENSHIFT)
    for spec in (pod["spec"] for pod in pods(job)):
        assert users(spec) <= set(range(int(first), int(last) + 1))
        assert int(group) == spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]


@pytest.mark.parametrize("name", JOBS)
def test_with_the_fields_of_that_page_every_user_is_of_the_namespaces_range(name: str) -> None:
    """`restricted-v2` compares every user with the range, and fsGroup with the beginning of the groups'."""
    [templates] = [
        found["spec"]["podTemplates"]
        for found in map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", OPENSHIFT, re.DOTALL))
        if "runAsUser" in str(found)
    ]
    chosen = templates["gpu"]["spec"]["securityContext"]
    first = chosen["runAsUser"]
    named = JOBS[name]
    job = replace(named, spec=named.spec.model_copy(update={"pod_templates": PodTemplates.model_validate(templates)}))
    for spec in (pod["spec"] for pod in pods(job)):
        assert users(spec) <= {*range(first, first + 3)}
        assert chosen["fsGroup"] == spec["securityContext"]["fsGroup"] == 1000660000


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize(
    ("annotations", "first", "group"),
    [
        ({"uid-range": "1000660000/10000", "supplemental-groups": "1000670000/10000"}, 1000660000, 1000670000),
        ({"uid-range": "1000660000-1000660002", "supplemental-groups": "5-9,70/10"}, 1000660000, 5),
        ({"uid-range": "1000660000/3"}, 1000660000, 1000660000),
    ],
)
def test_every_user_is_of_the_range_of_a_namespace_and_all_pods_have_its_group(
    job: Job, annotations: dict[str, str], first: int, group: int
) -> None:
    here = replace(
        IMAGES, users=users_of_range({f"openshift.io/sa.scc.{key}": annotations[key] for key in annotations})
    )
    for seat in job.seats.all:
        spec = resources.pod(job, seat, 0, here)["spec"]
        assert users(spec) <= {*range(first, first + 3)}
        assert group == spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]
        assert first == spec["securityContext"]["runAsUser"], "who writes what pods share is one user in all of them"


def test_a_user_of_a_template_goes_before_the_range_of_the_namespace() -> None:
    job = make_job(podTemplates={"gpu": {"spec": {"securityContext": {"runAsUser": 7000}}}})
    spec = resources.pod(job, "gpu-0", 0, replace(IMAGES, users=Users(1000660000, 5)))["spec"]
    assert (users(spec), 5) == ({7000, 7001}, spec["securityContext"]["fsGroup"])


@given(first=st.integers(1, 2**31 - 4), beyond=st.integers(3, 10_000), separator=st.sampled_from("/-"))
def test_a_range_is_read_in_both_forms_that_openshift_writes(first: int, beyond: int, separator: str) -> None:
    count = min(beyond, 2**31 - first)
    text = f"{first}/{count}" if separator == "/" else f"{first}-{first + count - 1}"
    assert Users(first, first) == users_of_range({USERS_ANNOTATION: text})


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({}, f"annotation {USERS_ANNOTATION} is '', and should be as OpenShift writes it"),
        ({USERS_ANNOTATION: "1000660000"}, "should be as OpenShift writes it"),
        ({USERS_ANNOTATION: "1000660000/2"}, "has 2 users, and pods of jobs need 3"),
        ({USERS_ANNOTATION: "9-5"}, "ids should be between"),
        ({USERS_ANNOTATION: "0/10000"}, "ids should be between"),
        ({USERS_ANNOTATION: "2147483646/10000"}, "ids should be between"),
        ({USERS_ANNOTATION: "5/5", GROUPS_ANNOTATION: "many"}, f"annotation {GROUPS_ANNOTATION} is 'many'"),
    ],
)
def test_a_range_that_is_none_or_too_small_is_named(annotations: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        users_of_range(annotations)


@pytest.mark.parametrize(
    ("job", "claims", "policies"),
    [(JOBS["TimeSliced"], 2, 3), (JOBS["Disaggregated"], 3, 3), (JOBS["a reference apart"], 2, 4)],
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
