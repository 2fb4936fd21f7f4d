"""Print the plan for an observation in a file: `python -m colocated_rl_operator.simulate FILE`. It needs no cluster.

The file holds an `Observation` as JSON (`--example` prints one), from a log or a test, or made up.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.names import JobUid
from colocated_rl_operator.planner.observation import Job, Observation
from colocated_rl_operator.planner.plan import Plan, plan

observation: TypeAdapter[Observation] = TypeAdapter(Observation)
decided: TypeAdapter[Plan] = TypeAdapter(Plan)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="simulate", description="Print the plan for an observation.")
    parser.add_argument("file", nargs="?", type=Path, help="observation as JSON")
    parser.add_argument("--example", action="store_true", help="print an observation of a new job instead")
    chosen = parser.parse_args(arguments)
    if chosen.example:
        sys.stdout.buffer.write(observation.dump_json(example(), indent=2, by_alias=True) + b"\n")
        return 0
    if chosen.file is None:
        parser.error("a file, or --example")
    try:
        seen = observation.validate_json(chosen.file.read_bytes())
    except (OSError, ValidationError) as error:
        sys.stderr.write(f"{chosen.file}: {error}\n")
        return 2
    sys.stdout.buffer.write(decided.dump_json(plan(seen), indent=2, by_alias=True) + b"\n")
    return 0


def example() -> Observation:
    spec = ColocatedRLJobSpec.model_validate(
        {
            "steps": 3,
            "replicas": 2,
            "model": {"claim": {"name": "model"}},
            "gpus": {"count": 0},
            "rollout": {"prompts": {"reasoningGym": {"name": "chain_sum"}}, "batchSize": 8, "groupSize": 4},
        }
    )
    job = Job(
        "default", "example", JobUid("6f1f0c5e-0000-4000-8000-000000000000"), 1, datetime(2026, 1, 1, tzinfo=UTC), spec
    )
    return Observation(now=0.0, job=job, members=())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
