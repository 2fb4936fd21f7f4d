"""Read the settings of a reference: the job's own file, and where everything is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from colocated_rl_api import names
from colocated_rl_api.job import Trainer
from colocated_rl_api.listening import EVERYWHERE
from colocated_rl_api.member_wire import JobFile
from colocated_rl_trainer.grpo.forecast import ranks_of
from colocated_rl_trainer.protocol.settings import ConfigError, TrainerConfig


@dataclass(frozen=True)
class ReferenceSettings:
    job: JobFile
    model: Path
    tls: Path
    config: TrainerConfig  # of the passes; another trainer's options are ignored
    host: str
    data_port: int
    metrics_port: int
    socket: Path | None = None  # of the pod's agent, in the place of ports

    @classmethod
    def read(cls, arguments: Sequence[str]) -> ReferenceSettings:
        """Read the arguments and the files that they name. Raises ConfigError."""
        parser = argparse.ArgumentParser(
            prog="python3 -m colocated_rl_trainer.ref_policy", description="The reference of a job."
        )
        parser.add_argument("--job-file", type=Path, default=Path(names.JOB_FILE))
        parser.add_argument("--config", type=Path, default=Path(names.TRAINER_CONFIG_FILE))
        parser.add_argument("--models", type=Path, default=Path(names.MODEL_DIR), help="what spec.model.path is in")
        parser.add_argument("--tls", type=Path, default=Path(names.TLS_DIR), help="certificates and data token")
        parser.add_argument("--host", default=EVERYWHERE, help="address to listen on; all of them when absent")
        parser.add_argument("--data-port", type=int, default=names.DATA_PORT)
        parser.add_argument("--metrics-port", type=int, default=names.METRICS_PORT)
        parser.add_argument("--socket", type=Path, help="where the agent of an engine's pod asks; without it, at ports")
        options = parser.parse_args(arguments)
        try:
            job = JobFile.read(options.job_file.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(f"{options.job_file} is not a readable job file: {error}") from error
        is_ours = job.spec.trainer.command == Trainer().command
        return cls(
            job=job,
            model=options.models / job.spec.model.path,
            tls=options.tls,
            config=TrainerConfig.read(options.config) if is_ours else TrainerConfig(),
            host=options.host,
            data_port=options.data_port,
            metrics_port=options.metrics_port,
            socket=options.socket,
        )

    @property
    def is_of_shared(self) -> bool:
        """Return whether the job's trainers divide the model among themselves."""
        return self.config.training_state == "Sharded" and ranks_of(self.job.spec) > 1

    @property
    def devices(self) -> list[str]:
        """Return the devices that each hold the whole model."""
        return [f"cuda:{index}" for index in range(self.job.spec.reference_gpus.count)] or ["cpu"]
