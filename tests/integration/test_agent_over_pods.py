"""A pod of an engine over several: the real agent and its journal, told of the other pod by its targets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from builders import CLOSED, absent_engine
from colocated_rl_api.facts import EngineFacts, EngineLaunch, EngineState
from colocated_rl_api.member_wire import EngineSpan
from colocated_rl_api.names import PodUid
from colocated_rl_api.rungs import Rung, WeightVersion
from fakes.small_pod import SmallPod, small_pod
from fakes.weights import write_export

V0 = WeightVersion(0, 1)
OWN, OTHER = PodUid("uid"), PodUid("other")
LAUNCH = EngineLaunch(port=29600)


@asynccontextmanager
async def over_pods(*, replica: int, **changes: Any) -> AsyncIterator[SmallPod]:
    over_both: dict[str, Any] = {
        "replicas": 2,
        "rollout": {"engine": {"pods": 2}},
        "model": {"claim": {"name": "m", "path": "small"}},
    }
    async with small_pod(replica=replica, mode="RolloutOnly", **over_both, **changes) as pod:
        write_export(pod.directories.model / "small", version=str(V0), weight=5)
        yield pod


def told(pod: SmallPod, **changes: Any) -> None:
    """Send the pod a target with what it is to know of its engine."""
    pods = (OWN, OTHER) if pod.agent._settings.replica == 0 else (OTHER, OWN)
    span = EngineSpan(**{"pods": pods, "address": "127.0.0.1", **changes})
    pod.epoch += 1
    pod.send(pod.target(V0, Rung.SERVING).model_copy(update={"span": span}))


def told_of_first(pod: SmallPod, incarnation: str, state: EngineState = EngineState.STARTING) -> None:
    at = {"starts_on": V0} if state is EngineState.STARTING else {"version": V0}
    engine = EngineFacts(name="engine-0", state=state, incarnation=incarnation, launch=LAUNCH, **at)
    told(pod, engine=engine, gate=CLOSED)


def engine_of(pod: SmallPod) -> EngineFacts:
    """Return the facts of its engine; of one that is absent before the agent knows of any."""
    return next(iter(pod.facts.engines), absent_engine())


async def test_part_starts_with_its_engine_is_known_to_the_next_agent_and_ends_with_its_engine() -> None:
    async with over_pods(replica=1) as pod:
        told_of_first(pod, "e1")
        await pod.news(lambda: engine_of(pod).part_of == "e1")
        part = engine_of(pod).incarnation
        await pod.restart_agent(orderly=True)
        told_of_first(pod, "e1", EngineState.READY)
        await pod.news(lambda: engine_of(pod).is_ready)
        assert (part, "e1", V0) == (engine_of(pod).incarnation, engine_of(pod).part_of, engine_of(pod).version)
        told_of_first(pod, "e2")
        await pod.news(lambda: engine_of(pod).part_of == "e2" and engine_of(pod).is_starting)
        assert part != engine_of(pod).incarnation
        assert [] == pod.broken


async def test_part_that_ended_is_lost_to_the_next_agent_too_and_is_not_started_for_the_same_engine_again() -> None:
    async with over_pods(replica=1) as pod:
        told_of_first(pod, "e1")
        await pod.news(lambda: engine_of(pod).part_of == "e1")
        await pod.runner.end_child("engine-0", -9)
        await pod.news(lambda: engine_of(pod).is_absent)
        assert ("e1", 0) == (engine_of(pod).part_of, engine_of(pod).failures)
        await pod.restart_agent(orderly=True)
        told_of_first(pod, "e1")
        await pod.news(lambda: pod.facts.epoch == pod.epoch and bool(pod.facts.engines))
        assert (EngineState.ABSENT, "e1") == (engine_of(pod).state, engine_of(pod).part_of)
        assert 1 == len(pod.engines_started)


async def test_part_that_can_not_be_started_is_lost_and_not_tried_for_ever() -> None:
    async with over_pods(replica=1, gpus={"count": 6}) as pod:
        (pod.directories.model / "small/config.json").write_text(json.dumps({"num_attention_heads": 28}))
        told_of_first(pod, "e1")
        await pod.news(lambda: pod.facts.problem is not None and pod.facts.problem.reason == "EngineLost")
        assert pod.facts.problem is not None
        assert "28 attention heads" in pod.facts.problem.message
        assert "can't be divided among 12 devices" in pod.facts.problem.message
        assert (EngineState.ABSENT, "e1") == (engine_of(pod).state, engine_of(pod).part_of)


async def test_first_pod_waits_for_the_others_and_replaces_its_engine_with_any_of_them() -> None:
    async with over_pods(replica=0) as pod:
        told(pod, pods=(OWN,))
        told(pod)
        await pod.news(lambda: bool(engine_of(pod).launch))
        assert 1 == len(pod.engines_started)
        for changes in ({"lost": engine_of(pod).incarnation}, {"pods": (OWN, PodUid("made again"))}):
            before = engine_of(pod).incarnation
            told(pod, **changes)
            now = {name: value for name, value in changes.items() if name == "pods"}
            told(pod, **now)
            await pod.news(lambda before=before: engine_of(pod).incarnation not in (None, before))  # type: ignore[misc]
        assert [] == pod.broken
