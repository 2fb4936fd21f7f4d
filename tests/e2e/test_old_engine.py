"""A whole job whose engine is another version than this release drives: its status names it, and nothing is switched.

The engine is the real one, which says of itself that it is older (`old_engine/sitecustomize.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from e2e.conftest import NAMESPACE, SCENARIOS
from e2e.running_job import KubectlCall, RunningJob, wait_for

pytestmark = pytest.mark.release

START_S = 900  # a trainer and an engine start on two cores


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall) -> Iterator[RunningJob]:
    manifest = yaml.safe_load((SCENARIOS / "one-pod.yaml").read_text())
    manifest["metadata"]["name"] = "old-engine"
    manifest["spec"]["gpus"]["image"] = "colocated-rl/old-engine:dev"
    kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=yaml.safe_dump(manifest))
    running = RunningJob(kubectl, namespace=NAMESPACE, name="old-engine")
    yield running
    running.delete()


def test_f34_an_engine_that_is_too_old_is_named_in_the_status_before_the_first_switch(job: RunningJob) -> None:
    wanted = "SGLang 0.5.6 is not known: use"
    status = wait_for(
        "the version in the status",
        lambda: status if wanted in str((status := job.status).get("outOfLine")) else None,
        deadline_s=START_S,
        explain=job.describe,
    )
    (ready,) = (each for each in status["conditions"] if each["type"] == "Ready")
    assert ("False", True) == (ready["status"], wanted in ready["message"]), ready
    assert (0, None) == (status.get("step", 0), status.get("weightVersion"))
    assert not {"Pause", "Release", "Update", "OpenGate"} & {
        line.fields["action"] for line in job.agent_lines("action ended")
    }
