"""Read all settings of the process from outside, once at start.

The environment (written by the operator) names this pod. The command line has the places of files and ports, which a
pod never has to set. The job's own file has the rest.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from colocated_rl_api import names
from colocated_rl_api.member_wire import JobFile
from colocated_rl_api.names import PodUid
from colocated_rl_member.server import Ports
from colocated_rl_member.settings import read_job, required

PROGRESS_S = 2.0
GATEWAY_TURNS = 4096
GATEWAY_PARKED_S = 3600.0  # the engines may be off for a whole training step
DRAIN_S = 15.0  # of the pod's grace period: responses that end by then are kept


@dataclass(frozen=True)
class RolloutSettings:
    pod: str
    pod_uid: PodUid
    job: JobFile
    state: Path
    tls: Path
    keys: Path
    model: Path
    tasks: Path
    reward_tokens: Path
    recording: Path | None  # None: the job makes its samples
    former: Path | None  # checkpoints of a former job; None: the job begins from spec.model
    former_samples: Path | None  # its store; None: samples begin anew
    ports: Ports
    task_processes: int
    drain_s: float
    progress_s: float
    gateway_turns: int
    gateway_parked_s: float


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> RolloutSettings:
    """Parse the settings. Raises SettingsError."""
    parser = argparse.ArgumentParser(
        prog="python -m colocated_rl_rollout", description="The rollout controller of a job."
    )
    parser.add_argument("--job-file", type=Path, default=Path(names.JOB_FILE))
    parser.add_argument("--state", type=Path, default=Path(names.STATE_DIR), help="directory of the store")
    parser.add_argument(
        "--tls", type=Path, default=Path(names.TLS_DIR), help="directory of certificates and data token"
    )
    parser.add_argument("--keys", type=Path, default=Path(names.KEYS_DIR), help="for what of these is renewed")
    parser.add_argument("--models", type=Path, default=Path(names.MODEL_DIR), help="what spec.model.path is in")
    parser.add_argument("--tasks", type=Path, default=Path(names.TASKS_SOCKET), help="socket of the task server")
    parser.add_argument(
        "--reward-tokens", type=Path, default=Path(names.REWARD_TOKENS_DIR), help="Secrets for endpoints of rewards"
    )
    parser.add_argument("--recorded", type=Path, default=Path(names.RECORDED_DIR), help="what spec.recorded.path is in")
    parser.add_argument("--former", type=Path, default=Path(names.FORMER_DIR), help="what spec.restoreFrom.path is in")
    parser.add_argument(
        "--former-samples", type=Path, default=Path(names.FORMER_SAMPLES_DIR), help="what its samples.path is in"
    )
    Ports.add_arguments(parser)
    parser.add_argument(
        "--task-processes",
        type=int,
        default=max(1, min(4, (os.cpu_count() or 1) // 4)),
        help="processes that make prompts and score answers",
    )
    parser.add_argument("--drain-seconds", type=float, default=DRAIN_S, help="after SIGTERM, for responses to end")
    parser.add_argument("--progress-seconds", type=float, default=PROGRESS_S, help="between reports of progress")
    parser.add_argument(
        "--gateway-turns", type=int, default=GATEWAY_TURNS, help="completions for clients at a time, waiting or not"
    )
    parser.add_argument(
        "--gateway-parked-seconds",
        type=float,
        default=GATEWAY_PARKED_S,
        help="that one of them waits for an engine at a stretch",
    )
    given = parser.parse_args(arguments)
    job = read_job(given.job_file)
    former = job.spec.restore_from
    return RolloutSettings(
        pod=required(environment, names.ENV_POD_NAME),
        pod_uid=names.PodUid(required(environment, names.ENV_POD_UID)),
        job=job,
        state=given.state,
        tls=given.tls,
        keys=given.keys,
        model=given.models / job.spec.model.path,
        tasks=given.tasks,
        reward_tokens=given.reward_tokens,
        recording=given.recorded / job.spec.recorded.path if job.spec.recorded else None,
        former=given.former / former.path if former else None,
        former_samples=given.former_samples / former.samples.path if former and former.samples else None,
        ports=Ports.given(given),
        task_processes=given.task_processes,
        drain_s=given.drain_seconds,
        progress_s=given.progress_seconds,
        gateway_turns=given.gateway_turns,
        gateway_parked_s=given.gateway_parked_seconds,
    )
