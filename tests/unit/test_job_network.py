"""Pods of a job may call these, and be called by these, by a model of NetworkPolicies. No plugin enforces them here."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from documents.blocks import blocks

from builders import make_job
from colocated_rl_api import names
from colocated_rl_api.seats import ROLLOUT_SEAT, gpu_seat
from colocated_rl_operator.manifests import belongings, resources
from colocated_rl_operator.manifests.belongings import Egress
from colocated_rl_operator.manifests.resources import PodImages
from fakes.network import NetworkPlace, passes

IMAGES = PodImages(agent="agent:1", rollout="rollout:1", gpu="gpu:1", pull_policy="IfNotPresent")
HUB = {"huggingFace": {"name": "us/small", "revision": "a" * 40}}
SIZES = {"batchSize": 4, "groupSize": 2}
MATH: dict[str, Any] = {"reward": {"math": {}}}
ROWS = {"huggingFace": {"name": "us/rows", **MATH}}
JUDGED = {"file": {"claimName": "c", "path": "p.jsonl", "reward": {"http": {"url": "http://judge/"}}}}
METADATA = [
    NetworkPlace("169.254.169.254", port=80),
    NetworkPlace("100.100.100.200", port=80),  # Alibaba Cloud
    *(NetworkPlace("168.63.129.16", port=port) for port in (80, 32526)),  # Azure
    NetworkPlace("fd00:ec2::254", port=80),
    NetworkPlace("fd20:ce::254", port=80),  # Google Cloud
    NetworkPlace("fe80::a9fe:a9fe", port=80),
]
OUTSIDE = [
    NetworkPlace("93.184.215.14", port=443),
    NetworkPlace("2606:2800:21f::1", port=443),
    NetworkPlace("10.0.0.7", port=5432),
]
RESOLVER = [NetworkPlace("10.96.0.10", port=53), NetworkPlace("169.254.20.10", port=53, protocol="UDP")]
APART: dict[str, Any] = {"reference": {"placement": "OwnDevices", "replicas": 1}}
SEATS = (gpu_seat(0), ROLLOUT_SEAT, gpu_seat(0, names.ROLE_REFERENCE))


def pod(seat: str, port: int = 0, **spec: Any) -> NetworkPlace:
    body = resources.pod(make_job(**APART, **spec), seat, 0, IMAGES)
    return NetworkPlace("10.244.0.9", body["metadata"]["labels"], port=port)


def may_call(egress: Egress, target: NetworkPlace, *, seat: str = ROLLOUT_SEAT, **spec: Any) -> bool:
    applied = belongings.applied(make_job(**APART, **spec), operator_namespace="operators", egress=egress)
    policies = [each for each in applied if each["kind"] == "NetworkPolicy"]
    return passes(policies, source=pod(seat, **spec), target=target)


@pytest.mark.parametrize("seat", SEATS)
@pytest.mark.parametrize("egress", [Egress.NO_METADATA, Egress.NAMED])
@pytest.mark.parametrize("spec", [{}, {"model": HUB}], ids=["claim", "hub"])
def test_no_pod_of_a_job_reaches_the_metadata_service_of_a_cloud(egress: Egress, seat: str, spec: Any) -> None:
    """Reward code reached it, and with it what the node may do in the cloud."""
    assert [] == [each for each in METADATA if may_call(egress, each, seat=seat, **spec)]


@pytest.mark.parametrize(
    ("egress", "spec", "expected"),
    [
        (Egress.OPEN, {}, SEATS),
        (Egress.NO_METADATA, {}, SEATS),
        (Egress.NAMED, {}, ()),
        (Egress.NAMED, {"model": HUB}, SEATS),
        (Egress.NAMED, {"rollout": SIZES | {"prompts": ROWS}}, (ROLLOUT_SEAT,)),
        (Egress.NAMED, {"rollout": SIZES | {"prompts": JUDGED}}, (ROLLOUT_SEAT,)),
        (Egress.OWN_PODS, {"rollout": SIZES | {"prompts": JUDGED}}, ()),
        (Egress.OWN_PODS, {"model": HUB}, ()),
    ],
    ids=[
        *("open", "no metadata", "nothing named", "a hub for the model", "a hub for prompts", "an endpoint"),
        *("an endpoint that others open", "a hub that others open"),
    ],
)
@pytest.mark.parametrize("seat", SEATS)
def test_only_pods_that_call_what_the_job_names_reach_anything_outside(
    egress: Egress, spec: Any, expected: tuple[str, ...], seat: str
) -> None:
    """An endpoint of rewards opened every address to trainers, which never call it."""
    assert {seat in expected} == {may_call(egress, each, seat=seat, **spec) for each in OUTSIDE}


@pytest.mark.parametrize("egress", Egress)
@pytest.mark.parametrize("seat", SEATS)
def test_every_pod_reaches_those_of_its_job_and_dns_unless_others_open_that(egress: Egress, seat: str) -> None:
    is_open = egress is not Egress.OWN_PODS
    assert [is_open] * len(RESOLVER) == [may_call(egress, each, seat=seat) for each in RESOLVER]
    gpu, rollout, reference = SEATS
    assert may_call(egress, pod(gpu, names.DATA_PORT), seat=rollout)
    assert may_call(egress, pod(rollout, names.DATA_PORT), seat=gpu)
    assert may_call(egress, pod(reference, names.DATA_PORT), seat=rollout)
    assert may_call(egress, pod(gpu, names.RENDEZVOUS_PORT), seat=gpu)
    assert not may_call(egress, pod(gpu, names.RENDEZVOUS_PORT), seat=rollout)
    assert not may_call(egress, pod(gpu, names.CONTROL_PORT), seat=gpu)


def test_the_policy_of_the_page_opens_one_address_and_dns_to_rollout_pods_where_the_operator_opens_nothing() -> None:
    (text,) = (each.text for each in blocks("docs/multi-tenancy.md") if "kind: NetworkPolicy" in each.text)
    policy = yaml.safe_load(text)
    policy["metadata"]["namespace"] = "default"
    job = make_job(**APART, rollout=SIZES | {"prompts": JUDGED})
    made = [policy, *belongings.egress_policies(job, Egress.OWN_PODS)]
    judge, other = NetworkPlace("10.20.0.7", port=443), NetworkPlace("10.20.0.8", port=443)
    resolver = NetworkPlace("10.244.0.2", {"k8s-app": "kube-dns"}, "kube-system", 53, protocol="UDP")
    reached = {
        seat: [passes(made, source=pod(seat), target=each) for each in (judge, resolver, other, *METADATA, *OUTSIDE)]
        for seat in SEATS
    }
    nothing = [False] * (3 + len(METADATA) + len(OUTSIDE))
    gpu, rollout, reference = SEATS
    assert {gpu: nothing, rollout: [True, True, *nothing[2:]], reference: nothing} == reached


def test_pods_of_others_are_no_pods_of_the_job_though_they_have_its_name() -> None:
    stranger = NetworkPlace("10.244.0.7", {"app": "db"}, port=5432)
    impostor = NetworkPlace("10.244.0.8", pod(ROLLOUT_SEAT).labels, "another", names.DATA_PORT)
    assert not may_call(Egress.NAMED, stranger)
    assert not may_call(Egress.NAMED, impostor)
    assert may_call(Egress.OPEN, stranger)


def test_an_open_setting_leaves_a_policy_that_lets_all_through_in_the_place_of_the_former() -> None:
    """The operator may not delete policies: one that was made under another setting would stay."""
    made = [each for setting in Egress for each in belongings.egress_policies(make_job(), setting)]
    assert 2 == len({each["metadata"]["name"] for each in made})
    assert all(may_call(Egress.OPEN, each) for each in (*METADATA, *OUTSIDE))


def of_the_node(address: str = "10.0.0.7") -> NetworkPlace:
    """A pod with the network of its node: to a policy an address, and no pod."""
    return NetworkPlace(address, port=names.DATA_PORT)


def may_be_called(source: NetworkPlace, seat: str, port: int, **spec: Any) -> bool:
    applied = belongings.applied(make_job(**APART, **spec), operator_namespace="operators", egress=Egress.NAMED)
    policies = [each for each in applied if each["kind"] == "NetworkPolicy"]
    return passes(policies, source=source, target=pod(seat, port, **spec))


@pytest.mark.parametrize("seat", SEATS)
@pytest.mark.parametrize("template", ["gpu", "rollout"])
def test_pods_with_the_network_of_their_nodes_reach_those_of_their_job_and_are_reached(
    template: str, seat: str
) -> None:
    """No policy knows them. Who has the job's token alone is let in behind it: nothing else is open for them."""
    spec = {"podTemplates": {template: {"spec": {"hostNetwork": True}}}}
    assert may_be_called(of_the_node(), seat, names.DATA_PORT, **spec)
    assert not may_be_called(of_the_node(), seat, names.CONTROL_PORT, **spec)
    assert not may_be_called(of_the_node(), seat, names.RENDEZVOUS_PORT, **spec)
    assert may_call(Egress.NAMED, of_the_node(), seat=seat, **spec)
    assert not may_be_called(of_the_node(), seat, names.DATA_PORT)
    assert not may_call(Egress.NAMED, of_the_node(), seat=seat)
