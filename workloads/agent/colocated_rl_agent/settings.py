"""The agent's settings are read once at start.

The environment, written by the operator, identifies the pod. The command line sets where files and ports are, for which
a pod needs only the defaults. The job's own file has the rest.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from colocated_rl_agent.files.exports import export_directory
from colocated_rl_agent.planner.next_actions import Rules
from colocated_rl_agent.planner.views import (
    CUDA_GRAPH,
    KV_CACHE,
    TAGS,
    WEIGHTS,
)
from colocated_rl_api import names
from colocated_rl_api.job import ColocatedRLJobSpec, EngineMemory, Interruption
from colocated_rl_api.member_wire import JobFile
from colocated_rl_api.names import PodUid
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.seats import FIRST_SPARE
from colocated_rl_member.server import Ports
from colocated_rl_member.settings import SettingsError, read_job, required

RUNNER_SOCKET = "runner.sock"
REFERENCE_SOCKET = "reference.sock"
TAG_OF = {EngineMemory.WEIGHTS: WEIGHTS, EngineMemory.KV_CACHE: KV_CACHE, EngineMemory.CUDA_GRAPH: CUDA_GRAPH}


@dataclass(frozen=True)
class Directories:
    """The Directories are the same in the agent's and the GPU container, whose children get them by name."""

    job_file: Path
    trainer_config: Path
    tls: Path
    keys: Path
    state: Path
    sockets: Path
    batches: Path
    weights: Path
    model: Path
    checkpoints: Path
    mirrors: Path
    former: Path

    @classmethod
    def below(cls, root: Path) -> Directories:
        return cls(
            *(
                root / name.lstrip("/")
                for name in (
                    names.JOB_FILE,
                    names.TRAINER_CONFIG_FILE,
                    names.TLS_DIR,
                    names.KEYS_DIR,
                    names.STATE_DIR,
                    names.SOCKET_DIR,
                    names.BATCH_DIR,
                    names.EXPORTS_DIR,
                    names.MODEL_DIR,
                    names.CHECKPOINT_DIR,
                    names.MIRROR_DIR,
                    names.FORMER_DIR,
                )
            )
        )


@dataclass(frozen=True)
class AgentSettings:
    pod: str
    pod_uid: PodUid
    replica: int
    job: JobFile
    directories: Directories
    ports: Ports
    engine_port: int  # of the pod's first engine; those of the others follow it
    role: str = names.ROLE_GPU
    takes_faults: bool = False  # from whoever may forward the pages port

    @property
    def gpus(self) -> int:
        spec = self.job.spec
        return (spec.engine_gpus if self.role == names.ROLE_ENGINE else spec.gpus).count

    @property
    def engines(self) -> int:
        """Return the number of engines of this pod."""
        return self.job.spec.rollout.engine.per_pod if self.has_engine else 0

    def devices_of(self, engine: int) -> range:
        """Return the indices of an engine's devices among the pod's, which its engines divide evenly."""
        each = self.gpus_per_engine
        return range(engine * each, (engine + 1) * each)

    @property
    def gpus_per_engine(self) -> int:
        return self.gpus // self.job.spec.rollout.engine.per_pod

    @property
    def has_engine(self) -> bool:
        return self.role != names.ROLE_TRAINER

    @property
    def pods_per_engine(self) -> int:
        return self.job.spec.rollout.engine.pods if self.has_engine else 1

    @property
    def has_part(self) -> bool:
        """Return whether the engine's first part is in another pod, which serves."""
        return self.replica % self.pods_per_engine > 0

    @property
    def engine_ranks(self) -> int:
        """Return the processes among which an engine divides its weights: one for each of its devices."""
        return max(1, self.gpus_per_engine) * self.pods_per_engine

    @property
    def has_reference(self) -> bool:
        """Return whether a reference belongs beside the engines of this pod. A spare computes nothing."""
        return self.has_engine and not self.is_spare and self.job.spec.scores_beside_engines

    @property
    def shares_weights(self) -> bool:
        """Return whether the pod shares the weights volume with other pods: then rank 0 of the job writes for all."""
        return self.job.spec.placement.shares_weights

    @property
    def tends_exports(self) -> bool:
        """Return whether this agent makes room for exports, because one of its ranks writes them."""
        return bool(self.ranks) and (0 in self.ranks or not self.shares_weights)

    @property
    def borrows_exports(self) -> bool:
        """Return whether its engines take turns with trainers whose exports another pod writes."""
        return self.has_engine and bool(self.ranks) and not self.tends_exports

    @property
    def reads_exports(self) -> bool:
        """Return whether it compares exports with their manifest; if not, the agent beside rank 0 does."""
        return self.tends_exports or self.has_engine

    def weights_of(self, version: WeightVersion) -> Path:
        """Return the directory from which an engine starts with this version."""
        if self.rules.ladder.trains:
            return export_directory(self.directories.weights, version)
        return self.directories.model / self.job.spec.model.path

    @property
    def keeps(self) -> tuple[str, ...]:
        return kept_tags(self.job.spec.rollout.offload)

    @property
    def saved_tags(self) -> tuple[str, ...]:
        """Return the tags whose device memory the engine must be able to release."""
        return tuple(tag for tag in TAGS if tag not in self.keeps) if self.gpus and self.rules.releases else ()

    @property
    def ranks(self) -> range:
        """Return the group-wide trainer ranks of this pod: one for each device, or one if there is none."""
        each = 0 if self.role == names.ROLE_ENGINE else max(1, self.gpus)
        return range(self.replica * each, (self.replica + 1) * each)

    @property
    def is_spare(self) -> bool:
        return self.replica >= FIRST_SPARE

    @property
    def runner_socket(self) -> Path:
        return self.directories.sockets / RUNNER_SOCKET

    @property
    def reference_socket(self) -> Path:
        return self.directories.sockets / REFERENCE_SOCKET

    @property
    def checksums_weights(self) -> bool:
        """Return whether the pod's engine computes checksums of what it holds: also a single one, to compare itself."""
        return self.has_engine and self.job.spec.judges_weights

    @property
    def rules(self) -> Rules:
        return rules_for(self.job.spec, self.role)


def rules_for(spec: ColocatedRLJobSpec, role: str = names.ROLE_GPU) -> Rules:
    """Return the part of a job's settings on which the choice of actions depends. role: of the pod."""
    return Rules(
        ladder=spec.ladder,
        settle_s=spec.switch.settle_seconds,
        checkpoint_every=spec.checkpoint.every_steps,
        compares=spec.compares_engines,
        probes=spec.judges_weights,
        waits=spec.rollout.interruption is Interruption.WAIT,
        is_apart=role == names.ROLE_ENGINE,
    )


def kept_tags(offload: Collection[EngineMemory]) -> tuple[str, ...]:
    """Return the tags of engine memory that a switch leaves mapped; () if the job never releases any."""
    return tuple(tag for memory, tag in TAG_OF.items() if memory not in offload) if offload else ()


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> AgentSettings:
    """Return the settings from command line, environment and job file. Raises SettingsError."""
    parser = argparse.ArgumentParser(prog="python -m colocated_rl_agent", description="The agent of a GPU pod.")
    parser.add_argument("--root", type=Path, default=Path("/"), help="what all directories are in")
    parser.add_argument("--engine-port", type=int, default=names.ENGINE_PORT)
    Ports.add_arguments(parser)
    given = parser.parse_args(arguments)
    directories = Directories.below(given.root)
    return AgentSettings(
        pod=required(environment, names.ENV_POD_NAME),
        pod_uid=names.PodUid(required(environment, names.ENV_POD_UID)),
        replica=_number(environment, names.ENV_REPLICA),
        job=read_job(directories.job_file),
        directories=directories,
        ports=Ports.given(given),
        engine_port=given.engine_port,
        role=_role(environment),
        takes_faults=environment.get(names.ENV_FAULTS) == names.FAULTS_TAKEN,
    )


def _role(environment: Mapping[str, str]) -> str:
    role = environment.get(names.ENV_ROLE) or names.ROLE_GPU
    if role not in names.GPU_ROLES:
        raise SettingsError(f"environment variable {names.ENV_ROLE} is {role!r}: one of {', '.join(names.GPU_ROLES)}")
    return role


def _number(environment: Mapping[str, str], name: str) -> int:
    value = required(environment, name)
    if not (value.isascii() and value.isdigit()):
        raise SettingsError(f"environment variable {name} is {value!r}: a number of 0 or more is needed")
    return int(value)
