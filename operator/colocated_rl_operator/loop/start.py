"""Decide what pods are made of: once at each start of the group, recorded, and the same for a pod that is made again.

A start of the group is the making of pods while there are none: of a new job, after a suspension, after the queue. The
pod templates, rendered with the images that the chart names then, are recorded before the first pod is made, and the
digests as nodes report them. So a pod that is replaced after `helm upgrade`, or after somebody moved a tag, is what its
peers are; the next start takes what chart and operator have by then. An older operator recorded the images alone, or
nothing: the rest is rendered as now until the next start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from colocated_rl_api.job_status import ColocatedRLJobStatus, StartStatus
from colocated_rl_operator.clients.kube import Body
from colocated_rl_operator.manifests.resources import Object, PodImages

_DIGEST = re.compile(r"(?:[a-z-]+://)?(?P<name>[^@]+)@(?P<digest>sha256:[0-9a-f]{64})")
_IMAGES = ("agent", "rollout", "gpu")  # fields of PodImages
_CONTAINERS = ("initContainers", "containers")
_STATUSES = ("initContainerStatuses", "containerStatuses")


def start_with(images: PodImages, *, version: str, revision: str = "") -> StartStatus:
    """Return the record of a start. version: of this operator. revision: the object with its pod templates."""
    return StartStatus(operator=version, images={name: getattr(images, name) for name in _IMAGES}, revision=revision)


def recorded_images(start: StartStatus | None, present: PodImages) -> PodImages:
    """Return the images of pods of this start whose templates are not known; those of the chart without a record."""
    known = {} if start is None else start.images
    agent, rollout, gpu = (known.get(name, getattr(present, name)) for name in _IMAGES)
    return replace(present, agent=agent, rollout=rollout, gpu=gpu)


def with_digests(status: ColocatedRLJobStatus, pods: Iterable[Body]) -> ColocatedRLJobStatus:
    """Add the digests of images that nodes have reported; what is recorded stays."""
    if status.start is None:
        return status
    found = {image: reference for pod in pods for image, reference in _digests(pod)}
    digests = found | status.start.digests
    if digests == status.start.digests:
        return status
    return status.model_copy(update={"start": status.start.model_copy(update={"digests": digests})})


def pinned(body: Object, start: StartStatus | None) -> Object:
    """Return the pod with each image by the digest that its peers run, where one is known."""
    digests: Mapping[str, str] = {} if start is None else start.digests
    spec = dict(body["spec"])
    for kind in _CONTAINERS:
        if kind in spec:
            spec[kind] = [each | {"image": digests.get(each["image"], each["image"])} for each in spec[kind]]
    return body | {"spec": spec}


def _digests(pod: Body) -> Iterable[tuple[str, str]]:
    """Yield each image of a pod with the same by digest.

    A node that has an image under another name, or from no registry, gives no digest that can be pulled by this name.
    """
    images = {each["name"]: each["image"] for kind in _CONTAINERS for each in pod["spec"].get(kind, ())}
    for kind in _STATUSES:
        for container in pod.get("status", {}).get(kind, ()):
            image, found = images.get(container["name"], ""), _DIGEST.fullmatch(container.get("imageID", ""))
            name = _name(image)
            if "@" not in image and found is not None and _whole(found["name"]) == _whole(name):
                yield image, f"{name}@{found['digest']}"


def _name(image: str) -> str:
    """Return an image's name without tag and digest; the colon of a registry's port is none of a tag."""
    bare = image.partition("@")[0]
    path, colon, tag = bare.rpartition(":")
    return path if colon and "/" not in tag else bare


def _whole(name: str) -> str:
    """Return the name with the registry and folder that container runtimes add to a short one."""
    host, slash, _ = name.partition("/")
    if not slash:
        return f"docker.io/library/{name}"
    return name if "." in host or ":" in host or host == "localhost" else f"docker.io/{name}"
