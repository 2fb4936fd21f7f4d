"""These tests show which weights a pod serves: checksums that the group compares,
memory that is kept, needless updates.
"""

from __future__ import annotations

from typing import Any

import pytest

from colocated_rl_api.rungs import Rung, WeightVersion
from fakes.small_pod import PATIENT_S, SOON_S, SmallPod, small_group, small_pod
from fakes.weights import PROBE, weights_checksum

V0, V1, V2 = (WeightVersion(step, 1) for step in range(3))
CHECKED: dict[str, Any] = {"replicas": 2}  # there is another engine to compare with


def checksum(pod: SmallPod) -> str | None:
    return pod.facts.engines[0].checksum


def probes(pod: SmallPod) -> list[int]:
    """Return how many tokens each probe had."""
    assert pod.engine is not None
    return [len(body["input_ids"]) for _, body in pod.engine.calls if body and body.get("logprob_start_len") == 0]


def routes(pod: SmallPod) -> list[str]:
    assert pod.engine is not None
    return [path.partition("?")[0] for path, _ in pod.engine.calls]


@pytest.mark.parametrize("offload", [["Weights", "KVCache", "CUDAGraph"], ["KVCache"], []])
async def test_f52_checksum_is_reported_when_an_engine_starts_and_with_each_update(offload: list[str]) -> None:
    async with small_pod(**CHECKED, rollout={"offload": offload}) as pod:
        await pod.climb(V0, to=Rung.UPDATED)
        started_on = checksum(pod)
        assert started_on is not None
        assert not pod.facts.gate.open, "nobody has compared it"
        await pod.climb(V0)
        await pod.climb(V1)
        assert checksum(pod) not in (None, started_on)
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


@pytest.mark.parametrize("offload", [["Weights", "KVCache", "CUDAGraph"], ["KVCache"], []])
async def test_f52_h21_h52_engine_that_differs_from_the_group_is_replaced_before_it_serves(offload: list[str]) -> None:
    async with small_pod(**CHECKED, rollout={"offload": offload}) as pod:
        await pod.climb(V0)
        differs = pod.engine
        assert differs is not None
        differs.faults["/update_weights_from_disk"] = "other"
        differs.calls.clear()
        await pod.climb(V1, to=Rung.UPDATED)
        assert V1 == pod.facts.engines[0].version, "it says that it took them"
        stale = checksum(pod)
        pod.others_hold = fresh_checksum(V1)
        assert stale != pod.others_hold
        await pod.climb(V1)
        assert differs is not pod.engine
        assert "/continue_generation" not in [path for path, _ in differs.calls], "it never served"
        assert pod.others_hold == checksum(pod)
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


async def test_f52_engine_whose_export_differs_too_never_serves_and_says_so() -> None:
    async with small_pod(**CHECKED) as pod:
        pod.others_hold = "of most engines"
        pod.epoch += 1
        for rung in (Rung.TRAINED, Rung.EXPORTED, Rung.UPDATED):
            await pod.climb(V0, to=rung)
        pod.send(pod.target(V0, Rung.SERVING))
        await pod.news(lambda: pod.rejects(V0))
        assert pod.waits_for_other_weights()
        problem = pod.facts.problem
        assert problem is not None
        assert "WeightsDiffer" == problem.reason
        assert "those of most engines of most engines" in problem.message
        assert not pod.facts.gate.open
        assert ["0-1", "0-1"] == pod.engines_started


async def test_resident_agent_that_comes_again_beside_training_knows_what_was_agreed_on() -> None:
    """Its gate stayed closed until there were other weights: the operator compares those of the climb alone."""
    async with small_pod(**CHECKED, rollout={"offload": []}) as pod:
        await pod.climb(V0)
        await pod.climb(V1, to=Rung.TRAINED)
        await pod.restart_agent(orderly=True)
        pod.send(pod.target(V1, Rung.TRAINED))
        await pod.news(lambda: pod.facts.gate.open)
        assert V0 == pod.facts.engines[0].version
        assert [] == pod.broken


# ------------------------------------------------------------------------------------- engines that compute in 16 bits
PLACED_IN_A_POD: list[dict[str, Any]] = [{}, {"offload": ["KVCache"]}, {"offload": []}]
OFF_NATS = 0.08  # of a trained model in bfloat16, on equal weights
FAR_NATS = 0.4  # five times that
WRONG_NATS = 1.0  # more than any engine is off that has just started


@pytest.mark.parametrize("rollout", PLACED_IN_A_POD)
@pytest.mark.parametrize("replicas", [1, 2])
async def test_engine_of_a_trained_model_in_bfloat16_serves_by_default(rollout: dict[str, Any], replicas: int) -> None:
    """The probe was the default: such an engine was killed and started again for ever, and the job never began."""
    async with small_pod(rollout=rollout, replicas=replicas) as pod:
        pod.logprob_error = OFF_NATS
        for version in (V0, V1, V2):
            await pod.climb(version)
            assert "length" == await pod.ask(tokens=4)
        assert ["0-1"] == pod.engines_started
        assert [] == pod.broken


@pytest.mark.parametrize("rollout", PLACED_IN_A_POD)
async def test_engine_that_an_update_leaves_further_off_than_before_is_started_again_and_serves(
    rollout: dict[str, Any],
) -> None:
    """Its checksums changed as they had to; that layers are in one another's place shows in its outputs alone."""
    async with small_pod(rollout=rollout) as pod:
        pod.logprob_error = OFF_NATS
        await pod.climb(V0)
        await pod.climb(V1)
        assert OFF_NATS == pytest.approx(pod.facts.engines[0].noise_nats)
        assert pod.engine is not None
        pod.engine.logprob_error = FAR_NATS
        await pod.climb(V2)
        assert ["0-1", "2-1"] == pod.engines_started
        assert OFF_NATS == pytest.approx(pod.facts.engines[0].noise_nats)
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


async def test_a_model_that_gets_noisier_costs_one_start_of_an_engine() -> None:
    async with small_pod() as pod:
        pod.logprob_error = OFF_NATS
        await pod.climb(V0)
        assert pod.engine is not None
        pod.logprob_error = pod.engine.logprob_error = FAR_NATS
        await pod.climb(V1)
        await pod.climb(V2)
        assert ["0-1", "1-1"] == pod.engines_started
        assert FAR_NATS == pytest.approx(pod.facts.engines[0].noise_nats)
        assert [] == pod.broken


@pytest.mark.parametrize("rollout", PLACED_IN_A_POD)
async def test_engine_that_the_probe_rejects_is_started_again_once_on_each_export(rollout: dict[str, Any]) -> None:
    async with small_pod(rollout=rollout) as pod:
        pod.logprob_error = WRONG_NATS
        for lineage in (1, 2):
            version = WeightVersion(0, lineage)
            pod.epoch += 1
            await pod.climb(version, to=Rung.UPDATED)
            pod.send(pod.target(version, Rung.SERVING))
            await pod.news(lambda: pod.rejects(version))  # noqa: B023 - awaited here
            assert pod.waits_for_other_weights()
            problem = pod.facts.problem
            assert problem is not None
            assert "WeightsDiffer" == problem.reason
            assert "are 1 nats from the trainer's on average, 0.5 are allowed, because it has" in problem.message
            assert not pod.facts.gate.open
            assert 2 * lineage == len(pod.engines_started)
            assert 2 == pod.engines_started.count(str(version))
        assert [] == pod.broken


@pytest.mark.parametrize("rollout", PLACED_IN_A_POD)
async def test_engine_that_differs_once_serves_after_it_was_started_on_the_export(rollout: dict[str, Any]) -> None:
    async with small_pod(rollout=rollout) as pod:
        await pod.climb(V0)
        assert pod.engine is not None
        pod.engine.faults["/update_weights_from_disk"] = "skip"
        await pod.climb(V1)
        assert ["0-1", "1-1"] == pod.engines_started
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


async def test_engine_that_would_make_float16_of_the_weights_is_not_started() -> None:
    rollout = {"engine": {"args": ["--dtype", "float16"]}}
    async with small_pod(rollout=rollout, trainer={"command": ["python3", "train.py"]}) as pod:
        pod.epoch += 1
        await pod.climb(V0, to=Rung.EXPORTED)
        pod.send(pod.target(V0, Rung.UPDATED))
        await pod.news(lambda: pod.facts.problem is not None and pod.facts.problem.reason == "EngineLost")
        assert pod.facts.problem is not None
        assert "float16 has not the range of weights exported as F32" in pod.facts.problem.message
        assert [] == pod.engines_started


async def test_engine_with_a_short_context_is_asked_for_a_beginning_of_the_probe() -> None:
    async with small_pod() as pod:
        pod.engine_info = {"context_length": len(PROBE)}
        await pod.climb(V0)
        assert [len(PROBE) - 1] == probes(pod), "and the engine adds a token"
        assert ["0-1"] == pod.engines_started
        assert [] == pod.broken


async def test_export_without_a_probe_is_judged_by_checksums_alone() -> None:
    async with small_pod() as pod:
        pod.trainer_writes_probe = False
        await pod.climb(V0)
        await pod.climb(V1)
        assert [] == probes(pod)
        assert None is pod.facts.engines[0].noise_nats
        assert ["0-1"] == pod.engines_started
        assert [] == pod.broken


async def test_engine_pod_apart_that_the_probe_rejects_starts_no_third_engine() -> None:
    async with small_group() as group:
        pod = group.engine
        pod.logprob_error = WRONG_NATS
        await group.climb(V0, to=Rung.UPDATED)
        group.send(V0, Rung.SERVING)
        await group.news(lambda: pod.rejects(V0))
        assert pod.waits_for_other_weights()
        assert ["0-1", "0-1"] == pod.engines_started
        await group.climb(WeightVersion(0, 2), to=Rung.UPDATED)
        assert ["0-1", "0-1", "0-2"] == pod.engines_started
        assert [] == group.broken


async def test_agent_that_comes_again_tries_a_rejected_export_twice_more_at_most() -> None:
    async with small_pod() as pod:
        pod.logprob_error = WRONG_NATS
        for times in (1, 2):
            await pod.climb(V0, to=Rung.UPDATED)
            pod.send(pod.target(V0, Rung.SERVING))
            await pod.news(lambda: pod.rejects(V0))
            assert pod.waits_for_other_weights()
            assert 2 * times == len(pod.engines_started)
            await pod.restart_agent(orderly=True)
        assert [] == pod.broken


async def test_f52_agent_that_comes_again_takes_the_checksum_again() -> None:
    async with small_pod(**CHECKED) as pod:
        await pod.climb(V0)
        before, engine = checksum(pod), pod.engine
        await pod.restart_agent(orderly=True)
        await pod.climb(V0)
        assert before == checksum(pod)
        assert engine is pod.engine


@pytest.mark.parametrize("fault", ["hang", "error", "crash"])
async def test_f52_engine_that_gives_no_checksum_is_replaced(fault: str) -> None:
    async with small_pod(gives_up_s=SOON_S if fault == "hang" else PATIENT_S, **CHECKED) as pod:
        await pod.climb(V0)
        engine = pod.engine
        assert engine is not None
        engine.faults["/weights_checker"] = fault
        await pod.climb(V1)
        assert engine is not pod.engine
        assert [] == pod.broken


@pytest.mark.parametrize("fault", ["error", "crash"])
@pytest.mark.parametrize("offload", [["Weights", "KVCache", "CUDAGraph"], []])
async def test_engines_that_can_give_no_checksum_are_started_twice_on_an_export(fault: str, offload: list[str]) -> None:
    async with small_pod(**CHECKED, rollout={"offload": offload}) as pod:
        pod.engine_fault = fault
        pod.epoch += 1
        for rung in (Rung.TRAINED, Rung.EXPORTED):
            await pod.climb(V0, to=rung)
        pod.send(pod.target(V0, Rung.UPDATED))
        await pod.news(lambda: pod.rejects(V0))
        assert pod.waits_for_other_weights()
        problem = pod.facts.problem
        assert problem is not None
        assert ("WeightsDiffer", True) == (
            problem.reason,
            "make the job with spec.weightSync.verify: Version" in problem.message,
        )
        assert ["0-1", "0-1"] == pod.engines_started


async def test_an_engine_that_keeps_the_old_weights_is_found_without_another_one() -> None:
    """With one engine there was nothing to compare with, and it served the weights of the step before."""
    async with small_pod() as pod:
        await pod.climb(V0)
        keeps = pod.engine
        assert keeps is not None
        keeps.faults["/update_weights_from_disk"] = "skip"
        keeps.calls.clear()
        await pod.climb(V1)
        assert keeps is not pod.engine
        assert "/continue_generation" not in [path for path, _ in keeps.calls], "it never served"
        assert ["0-1", "1-1"] == pod.engines_started
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


async def test_an_update_is_taken_by_an_engine_alone_and_not_judged_after_its_agent_came_again() -> None:
    async with small_pod() as pod:
        await pod.climb(V0)
        await pod.climb(V1)
        await pod.restart_agent(orderly=True)
        await pod.climb(V1)
        await pod.climb(V2)
        assert ["0-1"] == pod.engines_started
        assert [] == pod.broken


async def test_export_that_cannot_be_removed_is_reported_and_costs_the_agent_nothing_else() -> None:
    """The agent died of it, each time that it came again."""
    async with small_pod() as pod:
        stays = pod.directories.weights / "9-9"
        stays.symlink_to(pod.directories.batches)
        await pod.climb(V0)
        await pod.news(lambda: pod.facts.problem is not None)
        assert pod.facts.problem is not None
        assert "ExportsNotRemoved" == pod.facts.problem.reason
        assert "length" == await pod.ask(tokens=4)
        stays.unlink()
        await pod.climb(V1)
        assert [] == pod.broken


async def test_export_that_cannot_be_removed_keeps_no_checkpoint_from_being_written() -> None:
    """The table removes before it saves; after a removal that failed the volume is listed anew, and it saves first."""
    async with small_pod(checkpoint={"everySteps": 1}) as pod:
        await pod.climb(V0)
        await pod.climb(V1, to=Rung.EXPORTED)
        (pod.directories.weights / "9-9").symlink_to(pod.directories.batches)
        await pod.climb(V1)
        await pod.news(lambda: 1 == pod.facts.trainers[0].saved)
        assert pod.facts.problem is not None
        assert "ExportsNotRemoved" == pod.facts.problem.reason
        assert [] == pod.broken


# -------------------------------------------------------------------------------------------------- memory that is kept
@pytest.mark.parametrize(
    ("offload", "released", "resumed"),
    [
        (
            ["Weights", "KVCache", "CUDAGraph"],
            ["weights", "kv_cache", "cuda_graph"],
            [["weights"], ["kv_cache", "cuda_graph"]],
        ),
        (["Weights", "KVCache"], ["weights", "kv_cache"], [["weights"], ["kv_cache"]]),
        (["KVCache", "CUDAGraph"], ["kv_cache", "cuda_graph"], [["kv_cache", "cuda_graph"]]),
        (["KVCache"], ["kv_cache"], [["kv_cache"]]),
    ],
)
async def test_engine_releases_what_the_job_offloads_and_takes_that_back(
    offload: list[str], released: list[str], resumed: list[list[str]]
) -> None:
    async with small_pod(rollout={"offload": offload}) as pod:
        await pod.climb(V0)
        engine = pod.engine
        assert engine is not None
        for version in (V1, V2):
            engine.calls.clear()
            await pod.climb(version)
            tags = {
                path: [body["tags"] for route, body in engine.calls if route == path]
                for path in routes(pod)
                if "memory" in path
            }
            assert {"/release_memory_occupation": [released], "/resume_memory_occupation": resumed} == tags
            assert "length" == await pod.ask(tokens=4)
        assert engine is pod.engine
        assert [] == pod.broken


@pytest.mark.parametrize("rung", [Rung.RELEASED, Rung.TRAINED, Rung.UPDATED])
@pytest.mark.parametrize("offload", [["KVCache"], ["Weights", "KVCache"]])
async def test_agent_that_comes_again_knows_what_its_engine_keeps(offload: list[str], rung: Rung) -> None:
    async with small_pod(rollout={"offload": offload}) as pod:
        await pod.climb(V0)
        engine = pod.engine
        await pod.climb(V1, to=rung)
        before = pod.facts.engines[0].tags
        await pod.restart_agent(orderly=False)
        await pod.news(lambda: bool(pod.facts.engines))
        assert before == pod.facts.engines[0].tags
        await pod.climb(V1)
        assert engine is pod.engine
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


# ------------------------------------------------------------------------------------------ updates that are not needed
@pytest.mark.parametrize("offload", [["Weights", "KVCache", "CUDAGraph"], ["KVCache"], []])
@pytest.mark.parametrize("agent_restarts", [False, True])
async def test_f67_engine_that_holds_the_version_is_not_updated_to_it(offload: list[str], agent_restarts: bool) -> None:
    """A new epoch with the same goal: a take-over, an agent that comes again."""
    async with small_pod(rollout={"offload": offload}) as pod:
        await pod.climb(V0)
        await pod.climb(V1)
        assert pod.engine is not None
        pod.engine.calls.clear()
        if agent_restarts:
            await pod.restart_agent(orderly=True)
        await pod.climb(V1)
        assert not {"/update_weights_from_disk", "/release_memory_occupation", "/pause_generation"} & set(routes(pod))
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


async def test_f67_engine_that_was_updated_when_its_agent_ended_is_not_updated_again() -> None:
    async with small_pod() as pod:
        await pod.climb(V0)
        await pod.climb(V1, to=Rung.UPDATED)
        engine = pod.engine
        await pod.restart_agent(orderly=True)
        await pod.climb(V1)
        assert engine is pod.engine
        assert 1 == routes(pod).count("/update_weights_from_disk")


def fresh_checksum(version: WeightVersion) -> str:
    """Return the checksum of an engine that holds what the trainer of a small pod exported."""
    return weights_checksum(version.step + version.lineage / 8)
