"""Pods as operator, chart, command line and pages make them, before OpenShift's own admission.

`build.sh` builds it. Who may use which constraint is decided by Kubernetes' own authorizer, from the roles and bindings
that OpenShift ships and the binding of the page. A namespace's annotations are the tests', as OpenShift writes them.
"""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from contract.api_server import Helm
from contract.test_chart_rendering import CHART, pods_of
from documents.blocks import blocks, under
from integration.test_operator_account import PLACES, calling
from unit.test_deployment_pages import IMAGES, JOBS

import quick_yaml
from builders import make_job
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.pod_template import PodTemplates
from colocated_rl_api.seats import role_of
from colocated_rl_cli.cluster.reader import reader_pod
from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.clients.pod_text import brief
from colocated_rl_operator.manifests import belongings, resources
from colocated_rl_operator.manifests.confinement import users_of_range
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.planner.observation import Job
from real_operator import ACCOUNT, OPERATORS
from scenarios.corpus import GOOD
from setup.layout import CHECKOUT

OPENSHIFT = CHECKOUT.build / "openshift"
PAGE = "docs/openshift.md"
USERS, GROUPS, LEVEL = (f"openshift.io/sa.scc.{of}" for of in ("uid-range", "supplemental-groups", "mcs"))
USUAL = {USERS: "1000660000/10000", GROUPS: "1000660000/10000"}
FIRST = 1000660000
REFUSED = "unable to validate against any security context constraint"

Object = dict[str, Any]
Pods = dict[str, Object]
Answers = dict[str, Object]  # by the pod's name, each with `asked`, and with `admitted` or `error`

OWN_IDS, BINDING, OWN_ACCOUNT, OWN_GROUP = (
    quick_yaml.load(each.text) for each in blocks(PAGE) if each.heading in ("Jobs", "Volumes")
)
FEW = {**JOBS, "a spare": make_job(spares=1)}
MANY = FEW | {
    name: replace(make_job(), spec=ColocatedRLJobSpec.model_validate(quick_yaml.load(case.text)["spec"]))
    for name, case in GOOD.items()
}


def ask(pods: Pods, *bindings: Object, annotations: Mapping[str, str] = USUAL) -> Answers:
    """Ask for pods that the operator's account makes in a namespace with these bindings and annotations."""
    namespace = {"metadata": {"name": OPERATORS, "annotations": {**annotations, LEVEL: "s0:c26,c5"}}}
    question = {"namespace": namespace, "bindings": bindings, "creator": f"{OPERATORS}/{ACCOUNT}", "pods": pods}
    command = (OPENSHIFT / "admission", OPENSHIFT / "manifests")
    done = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answers: Answers = json.loads(done.stdout)
    return answers


def sccs(answers: Answers) -> set[str]:
    """Return the constraints that admitted the pods, and REFUSED where none did."""
    errors = {each["error"] for each in answers.values() if "error" in each}
    admitted = (each["admitted"]["metadata"]["annotations"] for each in answers.values() if "admitted" in each)
    refused = {REFUSED if REFUSED in error else error for error in errors}
    return refused | {annotations["openshift.io/scc"] for annotations in admitted}


def binding(scc: str = "nonroot-v2", account: str = "default") -> Object:
    """Return the binding of the page for a ServiceAccount of the namespace, or such a one to another constraint."""
    made: Object = copy.deepcopy(BINDING)
    made["metadata"]["namespace"] = OPERATORS
    made["roleRef"]["name"] = made["roleRef"]["name"].replace("nonroot-v2", scc)
    made["subjects"] = [made["subjects"][0] | {"name": account, "namespace": OPERATORS}]
    return made


def with_users_of(annotations: Mapping[str, str]) -> PodImages:
    return replace(IMAGES, users=users_of_range(annotations))


def pods(jobs: Mapping[str, Job], images: PodImages = IMAGES, page: Object | None = None) -> Pods:
    """Return a pod of each role. page: what the page adds to the job's manifest."""
    found = {}
    for name, job in jobs.items():
        here = replace(job, namespace=OPERATORS)
        if page is not None:
            templates = PodTemplates.model_validate(page["spec"]["podTemplates"])
            here = replace(here, spec=job.spec.model_copy(update={"pod_templates": templates}))
        for role, seat in {role_of(seat): seat for seat in here.seats.all}.items():
            found[f"{role} of {name}"] = pod = resources.pod(here, seat, 0, images)
            pod["spec"].pop("schedulingGroup", None)  # of Kubernetes 1.36, which OpenShift's code does not know yet
    return found


def is_beyond(pod: Object) -> bool:
    """Say whether a pod has what both constraints refuse to it."""
    kinds = {kind for volume in pod["spec"]["volumes"] for kind in volume}
    return bool(pod["spec"].get("hostNetwork") or kinds & {"hostPath", "nfs"})


def reader(images: PodImages) -> Object:
    job = replace(make_job(), namespace=OPERATORS)
    about = {"metadata": {"name": job.name, "uid": job.uid}, "status": {"start": {}}}
    return reader_pod(about, belongings.start_record(job, belongings.start_parts(job, images)), minutes=60)


def of_chart(*words: str) -> Pods:
    rendered = Helm(CHECKOUT.localcluster)("template", "colocated-rl", CHART, *words)
    made = pods_of(quick_yaml.load_all(rendered))
    return {pod["spec"]["containers"][0]["name"]: pod for pod in made}


def with_additions(asked: Object, scc: str, whose: str) -> Object:
    """Return the pod with all that admission adds to one that names its users and groups."""
    pod = copy.deepcopy(asked)
    pod["metadata"].setdefault("annotations", {}).update(
        {
            "openshift.io/scc": scc,
            "security.openshift.io/validated-scc-subject-type": whose,
            "seccomp.security.alpha.kubernetes.io/pod": "runtime/default",
        }
    )
    pod["spec"]["securityContext"]["seLinuxOptions"] = {"level": "s0:c26,c5"}
    return pod


def assert_admitted(answers: Answers, scc: str, whose: str) -> None:
    assert {scc} == sccs(answers)
    for name, found in answers.items():
        assert with_additions(found["asked"], scc, whose) == found["admitted"], name


@pytest.mark.parametrize(
    ("annotations", "jobs"),
    [
        (USUAL, MANY),
        ({USERS: "1000660000/3", GROUPS: "1000670000-1000679999,5/5"}, FEW),
        ({USERS: "1000660000-1000669999"}, FEW),
    ],
    ids=["usual", "three users and other groups", "no groups"],
)
def test_pods_with_users_of_their_namespace_are_admitted_as_they_are(
    annotations: Mapping[str, str], jobs: Mapping[str, Job]
) -> None:
    images = with_users_of(annotations)
    asked = {name: pod for name, pod in pods(jobs, images).items() if not is_beyond(pod)}
    assert jobs is FEW or any("image" in volume for pod in asked.values() for volume in pod["spec"]["volumes"])
    assert_admitted(ask(asked | {"reader": reader(images)}, annotations=annotations), "restricted-v2", "user")


def test_pods_with_the_usual_users_are_refused_but_for_the_binding_of_the_page() -> None:
    asked = pods(FEW) | {"reader": reader(IMAGES)}
    answers = ask(asked)
    assert {REFUSED} == sccs(answers)
    for name, found in answers.items():
        assert "provider restricted-v2: .containers[0].runAsUser: Invalid value: 65532" in found["error"], name
        assert 'provider "nonroot-v2": Forbidden: not usable by user or serviceaccount' in found["error"], name
    assert_admitted(ask(asked, binding()), "nonroot-v2", "serviceaccount")
    assert_admitted(ask(asked, binding(account=ACCOUNT)), "nonroot-v2", "user")
    assert {"restricted-v2"} == sccs(ask(pods(FEW, with_users_of(USUAL)), binding())), "which has fewer rights"


def test_jobs_with_a_serviceaccount_of_their_own_need_a_binding_of_it() -> None:
    asked = pods(FEW, page=OWN_ACCOUNT)
    assert {REFUSED} == sccs(ask(asked, binding()))
    assert_admitted(ask(asked, binding(account="colocated-rl-jobs")), "nonroot-v2", "serviceaccount")


def test_ids_and_groups_that_the_page_puts_into_a_job_are_admitted() -> None:
    assert_admitted(ask(pods(JOBS, page=OWN_IDS)), "restricted-v2", "user")
    assert_admitted(ask(pods(JOBS, page=OWN_GROUP), binding()), "nonroot-v2", "serviceaccount")
    assert_admitted(ask(pods(JOBS, with_users_of(USUAL), OWN_GROUP)), "restricted-v2", "user")


def test_the_usual_users_are_admitted_in_a_user_namespace_too() -> None:
    asked = pods(JOBS)
    for pod in asked.values():
        pod["spec"]["hostUsers"] = False
    assert {"restricted-v3"} == sccs(ask(asked))


def admitting(asked: Pods) -> set[str]:
    """Return those of OpenShift's constraints that admit any of the pods."""
    shipped = {file.stem.partition("_00_scc-")[2] for file in (OPENSHIFT / "manifests").glob("*_00_scc-*.yaml")}
    return {scc for scc in shipped if {REFUSED} != sccs(ask(asked, binding(scc)))}


def test_paths_of_the_node_and_nfs_are_for_privileged_alone_and_its_network_for_one_more() -> None:
    images = with_users_of(USUAL)
    asked = {name: pod for name, pod in pods(MANY, images).items() if is_beyond(pod)}
    kinds = {kind for pod in asked.values() for volume in pod["spec"]["volumes"] for kind in volume}
    assert {"hostPath", "nfs"} <= kinds
    assert {"privileged"} == admitting(asked)
    assert {"privileged"} == sccs(ask(asked, binding("privileged")))
    network = {"spec": {"podTemplates": {"gpu": {"spec": {"hostNetwork": True}}}}}
    asked = {name: pod for name, pod in pods(JOBS, images, network).items() if is_beyond(pod)}
    assert {"hostnetwork-v2", "privileged"} == admitting(asked)
    assert {"hostnetwork-v2"} == sccs(ask(asked, binding("hostnetwork-v2")))


def test_pods_of_the_chart_are_admitted_with_the_words_of_the_page() -> None:
    [command] = under(PAGE, "The operator")
    asked = of_chart(*command.partition(" --values values.yaml ")[2].split())
    answers = ask(asked)
    assert ({"restricted-v2"}, 3) == (sccs(answers), len(answers))
    for found in answers.values():
        expected = with_additions(found["asked"], "restricted-v2", "user")
        expected["spec"]["securityContext"]["fsGroup"] = FIRST
        for container in expected["spec"]["containers"]:
            container["securityContext"]["runAsUser"] = FIRST
        assert expected == found["admitted"]
    assert {REFUSED} == sccs(ask(of_chart()))
    accounts = {pod["spec"]["serviceAccountName"] for pod in asked.values()}
    assert {"nonroot-v2"} == sccs(ask(of_chart(), *(binding(account=account) for account in accounts)))


@pytest.mark.parametrize(
    ("scc", "bindings", "change"),
    [
        (REFUSED, (), {}),
        ("nonroot-v2", (binding(),), {}),
        ("restricted-v2", (), {"runAsUser": FIRST, "runAsGroup": FIRST, "fsGroup": FIRST}),
        ("nonroot-v2", (binding(),), {"runAsUser": 1}),
        (REFUSED, (binding(),), {"runAsUser": 0, "runAsNonRoot": None}),
    ],
    ids=["as it is", "bound", "ids of a job", "any user", "but root"],
)
def test_the_copier_of_the_page_for_backups_is_judged_as_this_page_says(
    scc: str, bindings: tuple[Object, ...], change: Object
) -> None:
    [copier] = [
        quick_yaml.load(each.text) for each in blocks("docs/runbooks/backup.md") if each.text.startswith("apiVersion")
    ]
    copier["spec"]["securityContext"] |= change
    assert {scc} == sccs(ask({"copier": copier}, *bindings))


async def test_the_charts_policies_and_the_operator_take_a_pod_as_admission_leaves_it(
    access: ClusterAccess, operators: ClusterAccess
) -> None:
    """Policies judge a pod after all other admission has changed it, and the operator keeps of it what `brief` has."""
    async with calling(access, operators) as (_, thief):
        for name, found in ask(pods(FEW, with_users_of(USUAL))).items():
            assert "" == await thief.refusal("POST", PLACES["Pod"], found["admitted"]), name
            assert brief(found["asked"]) == brief(found["admitted"]), name
