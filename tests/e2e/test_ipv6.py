"""A job of two pods, with real engines and trainers, in clusters of IPv6 alone and of both families.

It ends once it was looked into, however quick it is: a complete job has no engines.
"""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Iterator

import pytest
from e2e.conftest import apply, installed
from e2e.running_job import KubectlCall, RunningJob

from colocated_rl_api import names

pytestmark = pytest.mark.release  # `make test-slow`
START_S = 900  # engines and trainers of two pods start on two cores
STEPS_S = 600
IPV4 = """
import socket
try:
    socket.create_connection(("10.244.0.1", 443), timeout=5).close()
    print(0)
except OSError as error:
    print(error.errno)
"""


@pytest.fixture(scope="module", params=["IPv6", "IPv6,IPv4"])
def families(request: pytest.FixtureRequest) -> list[str]:
    return str(request.param).split(",")


@pytest.fixture(scope="module")
def kubectl(families: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubectlCall]:
    options = (f"--ip-families={','.join(families)}",)
    with installed(tmp_path_factory.mktemp("ipv6") / "c", options=options) as cluster:
        yield cluster.kubectl


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall) -> Iterator[RunningJob]:
    running = apply(kubectl, "two-pods.yaml")
    yield running
    running.delete()


def test_it_trains_and_completes_where_pods_have_ipv6_addresses(job: RunningJob, families: list[str]) -> None:
    """Its engines are resumed and given weights of two ranks, whose process group meets at an address of a pod."""
    job.wait_for_step(1, deadline_s=START_S)
    for pod in job.pods(names.ROLE_GPU, names.ROLE_ROLLOUT):
        addresses = [ipaddress.ip_address(each["ip"]) for each in pod["status"]["podIPs"]]
        assert families == [f"IPv{address.version}" for address in addresses]
    attempt = int(job.python(job.rollout_pod, names.ROLLOUT_CONTAINER, IPV4))
    assert (attempt == errno.ENETUNREACH) == ("IPv4" not in families)
    job.end_soon()
    job.wait_for_condition("Complete", deadline_s=STEPS_S)
    assert (f"{job.step}-1", 0) == (job.status["weightVersion"], job.status["restarts"])
    assert {pod["metadata"]["name"] for pod in job.pods(names.ROLE_GPU)} == {
        line.pod for line in job.agent_lines("engine started")
    }
