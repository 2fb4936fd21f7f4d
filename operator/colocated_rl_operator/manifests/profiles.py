"""Judge pods by the profile that their job names: what an admin of the cluster allows, gives and fixes, by role.

A pod is judged as it goes to the API server, wherever its template comes from. A path is allowed as it stands, and
not what lies below it: whoever may write there could put a link to anywhere in the way. A mount's `subPath`, which the
kubelet resolves inside the volume, leads to what is below. The module is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from colocated_rl_api.job import USUAL_PROFILE
from colocated_rl_api.parts import Part, should_match
from colocated_rl_api.pod_template import OWNED_VOLUMES, TEMPLATE_OF, PodDefaults, stated
from colocated_rl_operator.planner.observation import Job

FIELDS = frozenset(str(each.alias) for each in PodDefaults.model_fields.values())
"""Fields of a template that a profile may give and fix, in core/v1's words."""

_is_path, _ = should_match("(/[^/]+)+", "should be a path from the root, without / at its end: /mnt/nvme")


def _check_field(name: str) -> str:
    if name not in FIELDS:
        raise ValueError(f"should be one of {', '.join(sorted(FIELDS))}")
    return name


class RoleProfile(Part):
    """Names what pods with one template may have, and what they have where their job says nothing."""

    host_network: bool = False
    host_paths: list[Annotated[str, _is_path]] = Field(default_factory=list)
    defaults: PodDefaults = Field(default_factory=PodDefaults)
    fixed: list[Annotated[str, AfterValidator(_check_field)]] = Field(default_factory=list)


class Profile(Part):
    """Names what the pods of a job may have, by template. namespaces: of jobs that may name it; of all when empty."""

    namespaces: list[str] = Field(default_factory=list)
    gpu: RoleProfile = Field(default_factory=RoleProfile)
    engine: RoleProfile = Field(default_factory=RoleProfile)
    reference: RoleProfile = Field(default_factory=RoleProfile)
    rollout: RoleProfile = Field(default_factory=RoleProfile)

    def of(self, role: str) -> RoleProfile:
        found: RoleProfile = getattr(self, TEMPLATE_OF[role])
        return found

    def is_for(self, namespace: str) -> bool:
        return not self.namespaces or namespace in self.namespaces


@dataclass(frozen=True)
class Profiles:
    """Profiles are all that jobs may name, by name."""

    by_name: Mapping[str, Profile] = field(default_factory=lambda: {USUAL_PROFILE: Profile()})

    def defaults(self, job: Job, role: str) -> PodDefaults:
        """Return what pods of the role have where the job's template says nothing."""
        profile = self.by_name.get(job.spec.profile)
        return profile.of(role).defaults if profile else PodDefaults()

    def refusals(self, job: Job, role: str, spec: Mapping[str, Any]) -> Iterator[str]:
        """Yield what a pod of the job may not have, with who may allow it. spec: of the pod, as it is to be made."""
        name = job.spec.profile
        usable = [each for each, profile in self.by_name.items() if profile.is_for(job.namespace)]
        if name not in usable:
            value = f"profiles.{name}" + (".namespaces" if name in self.by_name else "")
            yield (
                f"spec.profile is {name}, and jobs of namespace {job.namespace} may have "
                f"{', '.join(usable) or 'none yet'}: name one that they may have, or {_allowed_by(value)}"
            )
            return
        allowed, value = self.by_name[name].of(role), f"profiles.{name}.{TEMPLATE_OF[role]}"
        if spec.get("hostNetwork") and not allowed.host_network:
            yield _refusal(role, name, "the network of their node (hostNetwork)", f"{value}.hostNetwork")
        for volume in spec["volumes"]:
            path = volume.get("hostPath", {}).get("path")
            if path is not None and path not in allowed.host_paths:
                what = f"{path} of their node (hostPath of volume {volume['name']})"
                source = "spec.model.huggingFace" if volume["name"] in OWNED_VOLUMES else "spec.podTemplates"
                yield _refusal(role, name, what, f"{value}.hostPaths", source=source)
        own = stated(job.spec.pod_templates.of(role).spec)
        for each in allowed.fixed:
            if each in own:
                yield _refusal(role, name, f"{each} of their own", f"{value}.fixed")


def _refusal(role: str, profile: str, what: str, value: str, *, source: str = "spec.podTemplates") -> str:
    return (
        f"{role} pods of profile {profile} may not have {what}: remove it from {source}, name another spec.profile, or "
        f"{_allowed_by(value)}"
    )


def _allowed_by(value: str) -> str:
    return f"have an admin of the cluster allow it by {value} in the values of the operator's chart"


NO_PROFILES = Profiles()
