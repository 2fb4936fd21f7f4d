"""Render a job's objects other than pods: configuration, keys, volumes, network policies and a budget of disruptions.

The module is pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from colocated_rl_api import names
from colocated_rl_api.member_wire import JobFile
from colocated_rl_api.names import PodUid
from colocated_rl_api.parts import Claimed, Volume
from colocated_rl_api.prompts import HuggingFace, endpoints_of
from colocated_rl_api.seats import role_of
from colocated_rl_operator.manifests.gangs import pod_group
from colocated_rl_operator.manifests.resources import (
    Object,
    PodImages,
    client_keys_name,
    config_name,
    metadata_of,
    pod_templates,
)
from colocated_rl_operator.planner.observation import Job

DNS_PORT = 53


class Egress(StrEnum):
    """Names what pods of jobs may call. Admins of the cluster decide, by the chart."""

    OPEN = "Open"  # anything
    NO_METADATA = "NoMetadata"  # all but the addresses at which clouds have what gives a node's identity away
    NAMED = "Named"  # pods of the job and DNS; those that call what the job names, as NoMetadata
    OWN_PODS = "OwnPods"  # pods of the job; policies of admins open what else it calls, which may know names


METADATA = {
    "0.0.0.0/0": ["169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32"],
    "::/0": ["fe80::/10", "fd00:ec2::/32", "fd20:ce::254/128"],
}
"""Every address, and those of clouds' metadata services: link-local ones, and others of Alibaba Cloud, Azure (a node's
agent gets its certificates there), AWS and Google Cloud.
"""


def applied(job: Job, *, operator_namespace: str, egress: Egress = Egress.NO_METADATA) -> list[Object]:
    """Return the objects that are applied again and again; Secrets and claims are created once."""
    policies = [network_policy(job, operator_namespace=operator_namespace), *egress_policies(job, egress)]
    policies += [reference_policy(job)] if job.reference_seats else []
    return [config(job), *policies, disruption_budget(job)]


def config(job: Job) -> Object:
    """Return the ConfigMap with the job as its members read it, and the trainer's configuration as it was written."""
    job_file = JobFile(name=job.name, namespace=job.namespace, uid=job.uid, created=job.created, spec=job.file_spec)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata_of(job, config_name(job)),
        "data": {
            _name(names.JOB_FILE): job_file.model_dump_json(by_alias=True, exclude_none=True),
            _name(names.TRAINER_CONFIG_FILE): json.dumps(job.spec.trainer.config, sort_keys=True),
        },
    }


@dataclass(frozen=True)
class StartParts:
    """All pods of one start are made of these: the pod templates, by role, and the PodGroup of their gang, if any."""

    templates: Mapping[str, Object]
    gang: Object | None = None


def start_parts(job: Job, images: PodImages) -> StartParts:
    """Return what a start that begins now is made of."""
    return StartParts(pod_templates(job, images), _gang(job, images))


def _gang(job: Job, images: PodImages) -> Object | None:
    if (group := pod_group(job, images.gangs, priority=images.priority(job))) is None:
        return None
    return {
        "apiVersion": group.version,
        "kind": "PodGroup",
        "metadata": metadata_of(job, group.name),
        "spec": group.spec,
    }


def start_record(job: Job, parts: StartParts) -> Object:
    """Return the ControllerRevision that keeps the parts of one start, for pods that are made again.

    The API server lets nobody change its data, and Kubernetes' roles for people let them write none. Its name has a
    digest of the data, so that equal parts have one record, and `recorded_parts` takes no others for them.
    """
    data = {"templates": dict(parts.templates), **({} if parts.gang is None else {"gang": parts.gang})}
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": metadata_of(job, f"{job.name}-pods-{_digest(data)}-{job.uid}"),
        "revision": job.generation,
        "data": data,
    }


def recorded_parts(job: Job, record: Object) -> StartParts | None:
    """Return the parts in a record; None if it is not what its name says."""
    data = record.get("data")
    if record["metadata"]["name"] != f"{job.name}-pods-{_digest(data)}-{job.uid}":
        return None
    return StartParts(record["data"]["templates"], record["data"].get("gang"))


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def claims(job: Job) -> list[Object]:
    """Return the claims for the store, for checkpoints, and for weights if engines have pods of their own.

    A retained claim has no owner, so that deleting the job leaves it.
    """
    spec = job.spec
    found = [
        _claim(job, "store", spec.storage.volume, many_pods=False),
        _claim(job, "checkpoints", spec.checkpoint.volume, many_pods=spec.replicas + spec.spares > 1),
    ]
    if spec.placement.shares_weights:
        found.append(_claim(job, "weights", spec.weight_sync.volume, many_pods=True))
    return found


def irreplaceable(job: Job) -> dict[str, str]:
    """Return the claims of a job that has begun whose content can't be made again: their content, by claim name."""
    found = {job.claim_name("store"): "its samples, sealed batches and place in the prompts"}
    if job.ladder.trains:
        found[job.claim_name("checkpoints")] = "its trained weights and the optimizer's state"
    return found


def _claim(job: Job, name: str, volume: Claimed, *, many_pods: bool) -> Object:
    spec: Object = {
        "accessModes": ["ReadWriteMany" if many_pods else "ReadWriteOnce"],
        "resources": {"requests": {"storage": volume.size}},
    }
    if volume.storage_class_name is not None:
        spec["storageClassName"] = volume.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata_of(job, job.claim_name(name), owned=not (isinstance(volume, Volume) and volume.retain)),
        "spec": spec,
    }


def network_policy(job: Job, *, operator_namespace: str) -> Object:
    """Return the job's policy: the operator may reach control ports, the job's pods data ports, anybody metrics.

    The trainers' process group authenticates nobody: its ports, some of them picked by the kernel, are open only among
    the job's pods with trainers, and to pods with engines if an engine is over several of those. The rollout pod, where
    rewards run, is none of them. A reference has a policy of its own: one policy can't forbid what another one allows.
    A pod that has the network of its node is no pod to a policy: where the job has one, anybody reaches data ports, and
    still needs the job's token there.
    """
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": operator_namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": names.MANAGED_BY}},
    }
    own = {names.JOB_UID_LABEL: job.uid}
    roles = (job.trainer_role, *(role_of(seat) for seat in job.spans))
    no_reference = {"key": names.ROLE_LABEL, "operator": "NotIn", "values": [names.ROLE_REFERENCE]}
    return _policy(
        job,
        f"{job.name}-{job.uid}",
        {"matchLabels": own, "matchExpressions": [no_reference]},
        {"from": [operator], "ports": [_tcp(names.CONTROL_PORT)]},
        _from(job, own) | {"ports": [_tcp(names.DATA_PORT)]},
        {
            "from": [_pods(own | {names.ROLE_LABEL: role}) for role in dict.fromkeys(roles)],
            "ports": _all_but(names.CONTROL_PORT),
        },
        {"ports": [_tcp(names.METRICS_PORT)]},
    )


def reference_policy(job: Job) -> Object:
    """Return the policy of a reference: only the rollout controller reaches its data port, and anybody its metrics."""
    own = {names.JOB_UID_LABEL: job.uid}
    return _policy(
        job,
        f"{job.name}-reference-{job.uid}",
        {"matchLabels": own | {names.ROLE_LABEL: names.ROLE_REFERENCE}},
        _from(job, own | {names.ROLE_LABEL: names.ROLE_ROLLOUT}) | {"ports": [_tcp(names.DATA_PORT)]},
        {"ports": [_tcp(names.METRICS_PORT)]},
    )


def disruption_budget(job: Job, *, ends: bool = False) -> Object:
    """Return the budget by which evictions take one pod of the job at a time: the next once its successor is ready.

    ends: the group ends, and no pod has to stay. A budget whose pods are gone for long is an alert of most clusters.

    A number of pods that stay, not of pods that may go: for the latter Kubernetes asks the pods' owner for its scale,
    which a job does not have. A pod that is not ready may always go. So may spares, and pods that wait to join the
    group, because only its seats count: else as many more could go at once as there are of those.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata_of(job, f"{job.name}-{job.uid}"),
        "spec": {
            "minAvailable": 0 if ends else len(job.seats.all) - 1,
            "selector": {
                "matchLabels": {names.JOB_UID_LABEL: job.uid},
                "matchExpressions": [{"key": names.SEAT_LABEL, "operator": "In", "values": [*job.seats.all]}],
            },
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def egress_policies(job: Job, egress: Egress) -> list[Object]:
    """Return the policies for what the job's pods may call: one of the rollout pod, one of all others.

    There are both in any case: another setting has to change what was made before. Policies know addresses and no
    names, so pods that call an endpoint or a hub, or pods with addresses of nodes, may call any address but those of
    METADATA, unless policies of others are to say which: policies add up.
    """
    rollout = {"key": names.ROLE_LABEL, "values": [names.ROLE_ROLLOUT]}
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata_of(job, f"{job.name}-{name}-{job.uid}"),
            "spec": {
                "podSelector": {"matchLabels": {names.JOB_UID_LABEL: job.uid}, "matchExpressions": [whose]},
                "policyTypes": ["Egress"],
                "egress": _egress_rules(job, egress, calls_outside=calls_outside),
            },
        }
        for name, whose, calls_outside in (
            ("egress", rollout | {"operator": "NotIn"}, _fetches_model(job)),
            ("egress-rollout", rollout | {"operator": "In"}, _fetches_model(job) or _calls_others(job)),
        )
    ]


def _egress_rules(job: Job, egress: Egress, *, calls_outside: bool) -> list[Object]:
    own: Object = {"to": [_pods({names.JOB_UID_LABEL: job.uid})]}
    dns = {"ports": [_tcp(DNS_PORT), _tcp(DNS_PORT) | {"protocol": "UDP"}]}
    outside = {"to": [{"ipBlock": {"cidr": all_, "except": but}} for all_, but in METADATA.items()]}
    match egress:
        case Egress.OPEN:
            return [{}]
        case Egress.NO_METADATA:
            return [own, dns, outside]
        case Egress.NAMED:
            is_open = calls_outside or job.spec.pod_templates.has_host_network
            return [own, dns, outside] if is_open else [own, dns]
        case Egress.OWN_PODS:
            return [own]


def _fetches_model(job: Job) -> bool:
    """Return whether each pod of the job calls a hub, for the model."""
    return job.spec.model.hugging_face is not None


def _calls_others(job: Job) -> bool:
    """Return whether the rollout pod calls an endpoint of rewards or a hub of prompts."""
    sources = job.spec.sources
    return any(isinstance(each, HuggingFace) for each in sources) or bool(endpoints_of(sources))


def _policy(job: Job, name: str, selector: Object, *ingress: Object) -> Object:
    """Return a policy under which nothing but `ingress` reaches the pods that `selector` selects."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata_of(job, name),
        "spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": list(ingress)},
    }


def _from(job: Job, labels: Mapping[str, str]) -> Object:
    return {} if job.spec.pod_templates.has_host_network else {"from": [_pods(labels)]}


def _pods(labels: Mapping[str, str]) -> Object:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _tcp(first: int, last: int | None = None) -> Object:
    port: Object = {"protocol": "TCP", "port": first}
    return port if last is None else port | {"endPort": last}


def _all_but(port: int) -> list[Object]:
    """Return the ports that any user may listen at, without one."""
    return [_tcp(1024, port - 1), _tcp(port + 1, 65535)]


def pod_keys(job: Job, *, name: str, pod: str, pod_uid: PodUid, role: str, files: Mapping[str, str]) -> Object:
    """Return the Secret of one pod, which is created once, never changed, and never read by the operator.

    It goes with its pod. name: as the pod's volume has it. files: by their names in `names.TLS_DIR`.
    """
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": pod_uid}
    made = _secret(job, name, files)
    metadata = metadata_of(job, name, {names.ROLE_LABEL: role}) | {"ownerReferences": [owner]}
    return made | {"metadata": metadata}


def client_keys(job: Job, *, mark: str, files: Mapping[str, str]) -> Object:
    """Return the Secret for clients of the job in other pods: whom to trust, and the data token.

    mark: of authorities and token. When they change, there is another Secret.
    """
    return _secret(job, client_keys_name(job, mark), files)


def _secret(job: Job, name: str, files: Mapping[str, str]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": metadata_of(job, name),
        "stringData": dict(files),
    }


def _name(path: str) -> str:
    return path.rsplit("/", 1)[1]
