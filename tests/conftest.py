"""This module holds the set-up of every layer of the tests."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest
from cluster import kubernetes_release
from hypothesis import HealthCheck, settings
from loops import LoopFactory, TidyLoop

if TYPE_CHECKING:
    from scenarios.corpus import Case  # read by two files of tests only

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")  # how long an example takes says how busy the machine is


LONGEST = (  # of the files with few tests
    *("test_plan_states_pods.py", "test_plan_states_engines.py", "test_gpu_kit.py", "test_rollout_environments.py"),
    *("test_trainer_probe.py", "test_bench_gpu.py", "test_trainer_trl.py", "test_rollout_soak.py"),
    *("test_two_pods.py", "test_trained_model.py", "test_kills.py", "test_soak.py", "test_engine_over_pods.py"),
)


@pytest.hookimpl(tryfirst=True)  # pytest selects by markers in this hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, and without a cluster go on with those of most tests: a few run at a time, and the
    last would run alone. On a cluster few tests may take long, and the order of names suits them.

    What is for a release is slow.
    """
    for item in items:
        if item.get_closest_marker("release"):
            item.add_marker("slow")
    places = {name: place for place, name in enumerate(LONGEST)}
    tests = Counter(item.path for item in items)

    def turn(item: pytest.Item) -> tuple[int, int]:
        return places.get(item.path.name, len(LONGEST)), 0 if on_cluster(item) else -tests[item.path]

    items.sort(key=turn)


def on_cluster(item: pytest.Item) -> bool:
    return item.path.parent.name == "e2e" or item.get_closest_marker("cluster") is not None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Tests interrupt programs. Who is started in the background ignores that signal, and so would all it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`make test-kubernetes` leaves out what its release of Kubernetes doesn't have yet."""
    for marker in item.iter_markers("since_kubernetes"):
        if kubernetes_release() < marker.args:
            pytest.skip(f"Kubernetes {'.'.join(map(str, marker.args))} is the first that has it")


def pytest_asyncio_loop_factories() -> Mapping[str, LoopFactory]:
    """A connection that a test leaves fails this test, not a later one."""
    return {"asyncio": TidyLoop}


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """A manifest of tests/scenarios, on the standard output that pytest shows of a test that fails."""
    manifest: Case = request.param
    print(manifest.text)  # noqa: T201 - for the person who reads the failure
    return manifest
