"""Pods of anybody are read, whatever their makers have put into them, and little of each is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from builders import make_job
from colocated_rl_api import names
from colocated_rl_api.bounded_json import ALONE, LISTED, WATCHED
from colocated_rl_operator.clients.kube import Body
from colocated_rl_operator.clients.pod_text import MOST_ITEMS, brief, read_pods
from colocated_rl_operator.loop.pods import job_of
from colocated_rl_operator.manifests import gangs, resources
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.watches import bounded, read_event

DEEP = '{"f:a":' * 3000 + "{}" + "}" * 3000


def made(**metadata: Any) -> Body:
    """A pod of a job, as the API server has it."""
    pod = resources.pod(make_job("sums"), "gpu-0", 0, PodImages("agent", "rollout", "gpu", "Never"))
    own = {"uid": "uid-0", "resourceVersion": "7", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {**pod, "metadata": {**pod["metadata"], **own, **metadata}, "status": {"phase": "Pending"}}


def around(pod: str, level: int) -> str:
    event = f'{{"type":"ADDED","object":{{"kind":"Pod","apiVersion":"v1",{pod.strip()[1:]}}}'
    return {ALONE: pod, WATCHED: event, LISTED: f'{{"kind":"PodList","items":[{pod}]}}'}[level]


def only(found: Any, level: int) -> Body:
    pod: Body = {ALONE: lambda: found, WATCHED: lambda: found["object"], LISTED: lambda: found["items"][0]}[level]()
    return pod


def without_kind(pod: Body) -> Body:
    return {key: value for key, value in pod.items() if key not in ("kind", "apiVersion")}


@pytest.mark.parametrize("level", [WATCHED, LISTED])
def test_a_pod_deeper_than_python_reads_is_read(level: int) -> None:
    """Whoever makes a pod may write who manages its fields, 10,000 levels deep: one such pod ended the operator, and
    each one after it, which reads the pods of everybody at once.
    """
    pod = without_kind(made(managedFields=[{"fieldsType": "FieldsV1", "fieldsV1": "DEEP"}]))
    text = around(json.dumps(pod).replace('"DEEP"', DEEP), level)
    with pytest.raises(RecursionError):
        json.loads(text)
    assert brief(pod) == without_kind(brief(only(read_pods(text, level=level), level)))


@pytest.mark.parametrize("level", [WATCHED, LISTED])
def test_of_a_pod_with_very_many_parts_little_is_kept(level: int) -> None:
    """Twenty pods of 3 MB took twice as much memory as the operator may have."""
    many = range(1000)
    pod = without_kind(made())
    pod["metadata"] |= {
        "labels": pod["metadata"]["labels"] | {f"{names.GROUP}/x{number}": "" for number in many},
        "annotations": {f"a{number}": "" for number in many},
        "ownerReferences": [*pod["metadata"]["ownerReferences"], *({"uid": str(number)} for number in many)],
        "finalizers": [f"a/b{number}" for number in many],
    }
    pod["spec"]["containers"] = [{"name": f"a{n}", "image": "a", "env": [{"name": "a"}] * 4} for n in many]
    pod["spec"]["volumes"] += [{"name": f"a{number}", "secret": {"secretName": "a"}} for number in many]
    pod["spec"]["schedulingGates"] = [{"name": f"a{number}"} for number in many]
    text = around(json.dumps(pod), level)
    found = only(read_pods(text, level=level), level)
    assert len(json.dumps(found)) < 20_000 < len(text)
    assert make_job("sums").uid == job_of(found)
    assert MOST_ITEMS == len(found["spec"]["containers"]) == len(found["metadata"]["labels"])


def test_what_the_operator_asks_of_a_pod_is_kept() -> None:
    pod = made()
    marks: tuple[Body, ...] = (
        {"metadata": {"labels": {gangs.COSCHEDULING_GROUP: "a"}}},
        {"metadata": {"annotations": {gangs.VOLCANO_GROUP: "a"}}},
        {"spec": {"schedulingGroup": {"podGroupName": "a"}}},
    )
    for mark in marks:
        marked = {**pod, **{part: {**pod[part], **added} for part, added in mark.items()}}
        assert gangs.is_in_gang(brief(marked)), mark
    assert not gangs.is_in_gang(brief(pod))
    assert pod["status"] == brief(pod)["status"]
    assert resources.keys_of(pod) == resources.keys_of(brief(pod)) is not None
    assert job_of(pod) == job_of(brief(pod)) is not None
    assert brief(brief(pod)) == brief(pod)


def test_a_pod_without_its_parts_is_read() -> None:
    """The server sends one for its place in the watch alone."""
    line = (
        '{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"9",'
        '"creationTimestamp":null},"spec":{"containers":null},"status":{}}}'
    )
    assert "9" == read_event(line)["object"]["metadata"]["resourceVersion"]


def test_a_claim_of_a_pods_own_is_no_pod() -> None:
    pod = made()
    pod["spec"]["volumes"].append({"name": "a", "ephemeral": {"volumeClaimTemplate": {"metadata": {}, "spec": {}}}})
    assert brief(pod) == read_pods(json.dumps(pod), level=ALONE)


def test_a_job_in_a_watch_is_whole() -> None:
    job = {"apiVersion": names.API_VERSION, "kind": names.KIND, "spec": {"a": 1}, "metadata": {"b": 1}, "status": {}}
    event = {"type": "ADDED", "object": job}
    assert event == read_event(json.dumps(event, separators=(",", ":")))


@pytest.mark.parametrize(
    ("method", "url", "is_brief"),
    [
        ("get", "/api/v1/pods?labelSelector=a", True),
        ("get", f"/api/v1/namespaces/{names.PLURAL}/pods", True),
        ("get", f"/apis/{names.API_VERSION}/namespaces/a/{names.PLURAL}/pods", False),
        ("get", "/api/v1/nodes", False),
        ("patch", "/api/v1/namespaces/a/pods/pods", False),
    ],
)
async def test_kopf_lists_pods_by_their_briefs(method: str, url: str, is_brief: bool) -> None:
    class AnsweredList:
        async def json(self, *, loads: Any = json.loads) -> Any:
            return loads(json.dumps({"items": [made()]}))

    async def request(*_: object, **__: object) -> Any:
        return AnsweredList()

    found = await (await bounded(request)(method, url)).json()
    assert (brief(made()) if is_brief else made()) == found["items"][0]
