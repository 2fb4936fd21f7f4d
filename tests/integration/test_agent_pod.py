"""A pod from its first target to its last: real agent, real runner, real TLS; engine and trainer are fakes."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from colocated_rl_api.facts import (
    EngineState,
    PodFacts,
    TagState,
    TrainerState,
)
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.rungs import Rung, WeightVersion
from fakes.device import GIB, TOTAL_BYTES, FakeDevice
from fakes.pod import DEADLINE_S, Network, PodGroup, PodProcesses, make_job, network, pod
from fakes.trainer import SLOW_STEP_S

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)
PROMPT = [5, 6, 7]


@pytest.fixture
async def net(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    async with network(tmp_path_factory.mktemp("n")) as it:
        yield it


def is_serving(version: WeightVersion) -> Callable[[PodFacts], bool]:
    return lambda facts: TIME_SLICED.standing(facts, version) is Rung.SERVING


async def test_new_pod_climbs_to_serving_trains_a_step_and_serves_it(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        assert (200, "0-1") == await served_version(it)
        first = it.now
        assert first is not None
        await group.climb(V1)
        assert (200, "1-1") == await served_version(it)
        rungs = it.standings(V1, epoch=group.epoch)
        assert rungs == [rung for rung in TIME_SLICED.rungs if rung in rungs]
        assert it.now is not None
        assert first.engines[0].incarnation == it.now.engines[0].incarnation, "the engine goes through a switch"
        assert ["/v1/batches/1?shard=0&of=1"] == net.served
        await until(lambda: exports(it) == ["1-1"])


async def test_h13_h14_h16_h39_h53_engine_calls_of_a_switch_come_in_their_order_and_are_all(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        before = len(await it.engine_calls())
        await group.climb(V1)
        calls = (await it.engine_calls())[before:]
        assert [
            "/pause_generation",
            "/flush_cache",
            "/release_memory_occupation",
            "/resume_memory_occupation",
            "/weights_checker",
            "/update_weights_from_disk",
            "/weights_checker",
            "/resume_memory_occupation",
            "/flush_cache",
            "/continue_generation",
            "/generate",
        ] == calls


async def test_request_in_flight_comes_back_with_its_tokens_when_a_switch_begins(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        long = asyncio.create_task(it.generate(input_ids=PROMPT, sampling_params=endless()))
        await it.generating(1)
        await group.climb(V1, to=Rung.RELEASED)
        status, answer = await long
        assert (200, "abort") == (status, answer["meta_info"]["finish_reason"]["type"])
        assert len(answer["output_ids"]) > 0
        assert (503, {"error": "closed", "epoch": 2}) == await it.generate(input_ids=PROMPT)


async def test_h21_group_waits_at_each_barrier_for_its_slow_replica(net: Network) -> None:
    job, slows = make_job(replicas=2), {"FAKE_SLOW_RANK": "1"}  # by more than pods differ on a busy machine
    async with pod(net, job) as fast, pod(net, job, replica=1, children=slows) as slow:
        group = PodGroup([fast, slow])
        await group.climb(V0)
        assert fast.now is not None
        assert slow.now is not None
        waited_s = fast.now.waited_s, slow.now.waited_s
        await group.climb(V1, to=Rung.TRAINED)
        assert slow.now.took_s[Rung.TRAINED] > 0.9 * SLOW_STEP_S
        assert Rung.TRAINED == fast.standings(V1, epoch=group.epoch)[-1], "trained, and not a rung further"
        await group.go_on(V1)
        assert fast.now.waited_s - waited_s[0] > slow.now.waited_s - waited_s[1], "the straggler waits the least"
        assert {"/v1/batches/1?shard=0&of=2", "/v1/batches/1?shard=1&of=2"} == set(net.served)


async def test_h46_target_of_an_older_epoch_changes_nothing(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        group.epoch = 6
        await group.climb(V0)
        await it.send(group.target(V1, Rung.RELEASED, epoch=6))
        await group.news(lambda: bool(it.refusals))
        assert ("StaleEpoch", 7) == (it.refusals[0].reason, it.refusals[0].highest_epoch)
        assert (200, "0-1") == await served_version(it)


async def test_f47_nobody_asks_an_engine_for_its_health_while_it_starts_or_is_off(net: Network) -> None:
    """With weights released, /health would fail or kill it; and each good answer costs a token."""
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        it.trainer_fault("train", "slow")
        await group.climb(V1)
        assert "/release_memory_occupation" in (calls := await it.engine_calls())
        assert [] == [call for call in calls if call.startswith("/health")]


async def test_f2_target_of_an_older_epoch_opens_no_gate(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        old = group.target(V0, Rung.SERVING)
        await group.climb(V1, to=Rung.RELEASED)
        before = len(it.refusals)
        await it.send(old)
        await group.news(lambda: len(it.refusals) > before)
        assert (503, {"error": "closed", "epoch": 2}) == await it.generate(input_ids=PROMPT)
        await group.go_on(V1)
        assert (200, "1-1") == await served_version(it)


async def test_older_epoch_is_refused_by_a_restarted_agent_too(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        group.epoch = 6
        await group.climb(V0)
        await it.restart_agent()
        await it.send(group.target(V1, Rung.RELEASED, epoch=6))
        await group.news(lambda: bool(it.refusals))
        assert it.hello is not None
        assert 7 == it.hello.highest_epoch


async def test_engine_killed_while_serving_hands_its_tokens_back_and_comes_again(net: Network) -> None:
    async with pod(net, make_job()) as it:
        await PodGroup([it]).climb(V0)
        first = it.now
        assert first is not None
        long = asyncio.create_task(it.generate(input_ids=PROMPT, sampling_params=endless()))
        await it.generating(1)
        it.kill("sglang")
        status, answer = await long
        assert (200, "abort") == (status, answer["meta_info"]["finish_reason"]["type"])
        assert len(answer["output_ids"]) > 0
        again = await it.until(
            lambda facts: is_serving(V0)(facts) and facts.engines[0].incarnation != first.engines[0].incarnation,
            "serving with another engine",
        )
        assert first.engines[0].incarnation != again.engines[0].incarnation
        assert (200, "0-1") == await served_version(it)


async def test_engine_that_dies_at_its_start_is_reported_and_started_again(net: Network) -> None:
    async with pod(net, make_job()) as it:
        (it.directories.sockets / "engine-fault").touch()
        await PodGroup([it]).climb(V0)
        problems = [facts.problem.message for facts in it.facts if facts.problem]
        assert any("told to crash at the start" in problem for problem in problems)
        assert {1} == {facts.engines[0].failures for facts in it.facts if facts.engines and facts.problem}
        last = await it.until(lambda facts: facts.gate.open, "open")
        assert 0 == last.engines[0].failures, "it serves"
        assert (200, "0-1") == await served_version(it)


async def test_h18_engine_killed_while_trained_stays_absent_until_the_trainer_is_off_the_device(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        await group.climb(V1, to=Rung.TRAINED)
        it.kill("sglang")
        await it.until(lambda facts: facts.engines[0].is_absent, "absent")
        seen = len(it.facts)
        await group.go_on(V1)
        for facts in it.facts[seen:]:
            if not facts.engines[0].is_absent:
                assert all(rank.state is TrainerState.OFFLOADED for rank in facts.trainers)
        assert (200, "1-1") == await served_version(it)


@pytest.mark.parametrize(
    ("rung", "number"),
    [
        (Rung.DRAINED, signal.SIGKILL),
        (Rung.RELEASED, signal.SIGTERM),
        (Rung.TRAINED, signal.SIGKILL),
        (Rung.EXPORTED, signal.SIGKILL),
        (Rung.UPDATED, signal.SIGKILL),
    ],
)
async def test_agent_that_is_restarted_in_a_switch_goes_on(net: Network, rung: Rung, number: signal.Signals) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        engine, trainer = identities(it)
        await group.climb(V1, to=rung)
        await it.restart_agent(number)
        await it.until(lambda facts: bool(facts.engines), "attached")
        await group.go_on(V1)
        assert (engine, trainer) == identities(it), "engine and trainer outlive the agent"
        assert (200, "1-1") == await served_version(it)


async def test_h47_agent_that_is_told_to_end_hands_back_what_is_in_flight(net: Network) -> None:
    async with pod(net, make_job()) as it:
        await PodGroup([it]).climb(V0)
        long = asyncio.create_task(it.generate(input_ids=PROMPT, sampling_params=endless()))
        await it.generating(1)
        it.agent.terminate()
        status, answer = await long
        assert (200, "abort") == (status, answer["meta_info"]["finish_reason"]["type"])
        assert 0 == await it.agent.wait()


async def test_restarted_container_is_a_loss_of_engine_and_trainers(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        it.runner.kill()
        await it.runner.wait()
        await it.start_runner()
        lost = (TrainerState.ABSENT, -9, 1)
        await it.until(lambda facts: bool(facts.trainers) and lost == trainer_of(facts), "the trainer lost")
        await group.climb(WeightVersion(0, 2))
        assert (200, "0-2") == await served_version(it)


async def test_h10_release_that_is_never_answered_costs_the_engine_and_is_not_sent_again(net: Network) -> None:
    async with pod(net, make_job(switch={"engineCallSeconds": 5})) as it:
        group = PodGroup([it])
        await group.climb(V0)
        await it.fault("/release_memory_occupation", "act_then_hang")
        await group.climb(V1, to=Rung.RELEASED)
        assert it.now is not None
        assert EngineState.ABSENT is it.now.engines[0].state
        await group.go_on(V1)
        assert (200, "1-1") == await served_version(it)


async def test_h24_h52_engine_that_disagrees_with_the_probe_never_serves(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        it.trainer_fault("export", "lies")
        await group.set_out(V1, Rung.SERVING, after=Rung.UPDATED)
        facts = await it.until(lambda facts: facts.problem is not None, "problem")
        assert facts.problem is not None
        assert "nats" in facts.problem.message
        assert not any(facts.gate.open for facts in it.facts if TIME_SLICED.standing(facts, V1) is not Rung.SEALED)


@pytest.mark.parametrize("rollout", [{}, {"offload": []}], ids=["time-sliced", "resident"])
async def test_exports_of_a_switch_that_is_given_up_make_room_for_the_next(
    net: Network, rollout: dict[str, Any]
) -> None:
    """The volume has room for two: what serves, and what will."""
    async with pod(net, make_job(rollout=rollout)) as it:
        group = PodGroup([it])
        await group.climb(V0)
        for lineage in (1, 2, 3):
            await group.climb(WeightVersion(1, lineage), to=Rung.EXPORTED)
            assert 2 == len(exports(it))
            it.kill("fakes.trainer")
            await it.until(lambda facts: facts.trainers[0].exit_code is not None, "trainer dead")
        await group.climb(WeightVersion(1, 4))
        assert (200, "1-4") == await served_version(it)
        await until(lambda: exports(it) == ["1-4"])


async def test_torn_export_never_reaches_an_engine(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        it.trainer_fault("export", "torn")
        await group.set_out(V1, Rung.EXPORTED, after=Rung.TRAINED)
        facts = await it.until(lambda facts: facts.trainers[0].state is TrainerState.ABSENT, "trainer stopped")
        assert facts.problem is not None
        assert "model.safetensors is not a safetensors file" in facts.problem.message
        await group.climb(WeightVersion(1, 2))
        assert (200, "1-2") == await served_version(it)


async def test_trainer_that_crashes_is_reported_with_its_last_words_and_left_to_the_operator(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        it.trainer_fault("train", "crash")
        await group.set_out(V1, Rung.TRAINED, after=Rung.RELEASED)
        facts = await it.until(lambda facts: facts.trainers[0].exit_code is not None, "trainer dead")
        assert (TrainerState.ABSENT, 17, 1) == trainer_of(facts)
        place = "RuntimeError at "
        facts = await it.until(lambda facts: place in (facts.problem.message if facts.problem else ""), "told why")
        assert facts.problem is not None
        assert "told to crash" not in facts.problem.message, "what a trainer raises may quote a sample"
        await group.climb(WeightVersion(1, 2))
        assert (200, "1-2") == await served_version(it)


async def test_trainer_that_would_fail_again_is_stopped_and_its_reason_outlives_it(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        it.trainer_fault("train", "hopeless")
        await group.set_out(V1, Rung.TRAINED, after=Rung.RELEASED)
        facts = await it.until(lambda facts: facts.trainers[0].exit_code is not None, "trainer stopped")
        assert "the gradient is nan: lower learningRate" == facts.trainers[0].not_retriable
        await group.climb(WeightVersion(1, 2))
        facts = await it.until(lambda facts: facts.trainers[0].step == 1, "trained")
        assert "" == facts.trainers[0].not_retriable


async def test_trainer_that_hangs_is_stopped_at_its_deadline(net: Network) -> None:
    async with pod(net, make_job(switch={"trainerProgressSeconds": 5})) as it:
        group = PodGroup([it])
        await group.climb(V0)
        it.trainer_fault("train", "hang")
        await group.set_out(V1, Rung.TRAINED, after=Rung.RELEASED)
        facts = await it.until(lambda facts: facts.trainers[0].exit_code is not None, "trainer stopped")
        assert (TrainerState.ABSENT, -9, 1) == trainer_of(facts)


async def test_trainer_that_stalls_says_where_it_stands_until_it_goes_on(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        it.trainer_fault("train", "stall")
        await group.set_out(V1, Rung.TRAINED, after=Rung.RELEASED)
        facts = await it.until(lambda facts: facts.trainers[0].stalled is not None, "stalled")
        assert (3, "TrainerStalled") == (facts.trainers[0].stalled, facts.problem.reason if facts.problem else "")
        assert facts.problem is not None
        assert (
            "rank 0 has not got on for 90 s, and never stood still for more than 0.2 s in a finished step; it is in "
            "all_reduce (group.py:7)" == facts.problem.message
        )
        (it.directories.sockets / "go").touch()
        facts = await it.until(lambda facts: facts.trainers[0].step == 1, "trained")
        assert (None, None) == (facts.trainers[0].stalled, facts.problem)


async def test_new_lineage_interrupts_a_step_that_waits_for_a_dead_peer(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        it.trainer_fault("train", "hang")
        await group.set_out(V1, Rung.TRAINED, after=Rung.RELEASED)
        await it.until(lambda facts: facts.trainers[0].state is TrainerState.TRAINING, "training")
        await it.trainer_has_failed()
        await group.climb(WeightVersion(1, 2))
        assert (200, "1-2") == await served_version(it)


async def test_checkpoint_is_saved_beside_rollout_and_before_the_next_step(net: Network) -> None:
    async with pod(net, make_job(checkpoint={"everySteps": 1})) as it:
        group = PodGroup([it])
        await group.climb(V0)
        await group.climb(V1)
        facts = await it.until(lambda facts: facts.trainers[0].saved == 1, "saved")
        assert is_serving(V1)(facts), "rollout goes on meanwhile"
        assert ["step-1"] == [path.name for path in it.directories.checkpoints.iterdir()]


async def test_model_is_left_once_when_the_last_step_is_saved(net: Network) -> None:
    async with pod(net, make_job(checkpoint={"everySteps": 1})) as it:
        group = PodGroup([it])
        await group.climb(V0)
        await group.climb(V1)
        await it.until(lambda facts: facts.trainers[0].saved == 1, "saved")
        last = group.target(V1, Rung.SERVING).model_copy(update={"is_last": True})
        await it.send(last)
        await it.until(lambda facts: facts.trainers[0].finished == V1, "left")
        left, export = it.directories.checkpoints / "model-00000001", it.directories.weights / "1-1"
        assert {path.name: path.read_bytes() for path in export.iterdir()} == {
            path.name: path.read_bytes() for path in left.iterdir()
        }
        await it.send(last)
        asked = (it.directories.sockets / "asked").read_text().split()
        assert 1 == asked.count("finish")


async def test_model_that_can_not_be_left_costs_the_trainers_and_is_named(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        await group.climb(V1)
        it.trainer_fault("finish", "error")
        await it.send(group.target(V1, Rung.SERVING).model_copy(update={"is_last": True}))
        problem = (await it.until(lambda facts: facts.problem is not None, "it is said")).problem
        assert problem is not None
        assert "finish: trainer /v1/finish: ToldToFail" in problem.message
        assert ["step-1"] == [path.name for path in it.directories.checkpoints.iterdir()], "its checkpoint is kept"


@pytest.fixture
def device(tmp_path: Path) -> FakeDevice:
    return FakeDevice(tmp_path)


@pytest.mark.parametrize(
    ("offload", "kept"),
    [(["Weights", "KVCache", "CUDAGraph"], 0.0), (["Weights", "KVCache"], 1.0), (["KVCache"], 11.0)],
)
async def test_device_memory_is_measured_through_a_switch(
    net: Network, device: FakeDevice, offload: list[str], kept: float
) -> None:
    """Memory that the job does not offload is not expected to come free."""
    async with pod(net, make_job(gpus={"count": 1}, rollout={"offload": offload}), device=device) as it:
        group = PodGroup([it])
        await group.climb(V0)
        used: dict[Rung, int | None] = {}
        for rung in (Rung.DRAINED, Rung.RELEASED, Rung.TRAINED, Rung.OFFLOADED, Rung.SERVING):
            await group.climb(V1, to=rung)
            assert it.now is not None
            (facts,) = it.now.devices
            used[rung] = facts.used_bytes
            assert (TOTAL_BYTES, int(0.7 * GIB)) == (facts.total_bytes, facts.residue_bytes)
        assert {
            Rung.DRAINED: 52.2, Rung.RELEASED: 1.2 + kept, Rung.TRAINED: 60.5 + kept, Rung.OFFLOADED: 1.2 + kept,
            Rung.SERVING: 52.2,
        } == {rung: round((bytes_ or 0) / GIB, 1) for rung, bytes_ in used.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("process", "breaks", "words"),
    [
        ("sglang", lambda device: device.breaks("ecc", count=2), "its memory had 2 errors that can't be corrected"),
        ("fakes.trainer", lambda device: device.reports(74), "its driver reported XID 74"),
    ],
)
async def test_device_that_broke_is_reported_once_a_process_has_ended_of_it(
    net: Network, device: FakeDevice, process: str, breaks: Callable[[FakeDevice], None], words: str
) -> None:
    async with pod(net, make_job(gpus={"count": 1}, rollout={"offload": ["KVCache"]}), device=device) as it:
        group = PodGroup([it])
        await group.climb(V0)
        breaks(device)
        it.kill(process)
        await it.until(lambda facts: facts.bad_device is not None, "the device is reported")
        assert it.now is not None
        assert f"device 0: {words}" == it.now.bad_device


async def test_f54_engine_over_two_devices_and_a_rank_on_each_of_them_take_turns(net: Network, tmp_path: Path) -> None:
    """Each role keeps its own shape: one process over both, and one for each. Every device is looked at."""
    async with pod(net, make_job(gpus={"count": 2}), device=FakeDevice(tmp_path, count=2)) as it:
        group = PodGroup([it])
        await group.climb(V0)
        assert "--tp-size\x002" in it.command("sglang")
        for rung, used in ((Rung.DRAINED, 52.2), (Rung.RELEASED, 1.2), (Rung.TRAINED, 60.5), (Rung.SERVING, 52.2)):
            await group.climb(V1, to=rung)
            assert it.now is not None
            assert [used, used] == [round((device.used_bytes or 0) / GIB, 1) for device in it.now.devices]
        facts = it.now
        assert facts is not None
        assert ([(0, 1), (1, 1)], 1) == ([(rank.rank, rank.step) for rank in facts.trainers], len(facts.engines))
        it.trainer_fault("offload", "leaks")  # one of them, on its device
        await group.set_out(WeightVersion(2, 1), Rung.UPDATED, after=Rung.EXPORTED)
        await it.until(lambda facts: all(rank.exit_code is not None for rank in facts.trainers), "trainers stopped")
        assert any("free after the offload" in each.problem.message for each in it.facts if each.problem)


async def test_h43_release_that_frees_nothing_costs_the_engine_and_lets_no_trainer_in(
    net: Network, device: FakeDevice
) -> None:
    job = make_job(gpus={"count": 1}, switch={"engineCallSeconds": 5})
    async with pod(net, job, device=device) as it:
        group = PodGroup([it])
        await group.climb(V0)
        await it.fault("/release_memory_occupation", "leak")
        await group.climb(V1, to=Rung.RELEASED)
        facts = it.now
        assert facts is not None
        assert facts.engines[0].is_absent, "memory of a process that is gone is free"
        await until(lambda: "0.0 GiB of device 0 came free" in it.log.read_text())
        await group.go_on(V1)
        assert (200, "1-1") == await served_version(it)


async def test_h61_release_that_shows_after_its_answer_is_waited_for(net: Network, device: FakeDevice) -> None:
    """The engine of rank 0 answers; its other ranks unmap after that."""
    async with pod(net, make_job(gpus={"count": 1}), device=device) as it:
        group = PodGroup([it])
        await group.climb(V0)
        engine, _ = identities(it)
        await it.fault("/release_memory_occupation", "lag")
        await group.climb(V1)
        assert (engine, (200, "1-1")) == (identities(it)[0], await served_version(it))


async def test_trainer_that_leaves_no_room_for_the_engine_is_stopped(net: Network, device: FakeDevice) -> None:
    async with pod(net, make_job(gpus={"count": 1}), device=device) as it:
        group = PodGroup([it])
        await group.climb(V0)
        it.trainer_fault("offload", "leaks")
        await group.set_out(V1, Rung.UPDATED, after=Rung.EXPORTED)
        facts = await it.until(lambda facts: facts.trainers[0].exit_code is not None, "trainer stopped")
        assert (TrainerState.ABSENT, -9, 1) == trainer_of(facts)
        assert any("free after the offload" in each.problem.message for each in it.facts if each.problem)
        trained = [each for each in it.facts if each.trainers and each.trainers[0].step == 1]
        assert all(each.engines[0].weights is TagState.RELEASED for each in trained)
        await group.climb(WeightVersion(1, 2))
        assert (200, "1-2") == await served_version(it)


async def test_engine_that_replaces_another_gets_its_pool(net: Network) -> None:
    async with pod(net, make_job()) as it:
        await PodGroup([it]).climb(V0)
        it.kill("sglang")
        await it.until(lambda facts: not is_serving(V0)(facts), "the engine lost")
        await it.until(is_serving(V0), "serving again")
        assert "--max-total-tokens\x0032768" in it.command("sglang")


async def test_h56_engine_that_a_probe_made_unready_is_repaired(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        engine, _ = identities(it)
        await group.climb(V1, to=Rung.RELEASED)
        async with net.session.get(f"http://127.0.0.1:{it.engine}/health_generate") as answer:
            assert 503 == answer.status
        await group.go_on(V1)
        assert engine == identities(it)[0]
        assert (200, "1-1") == await served_version(it)


async def test_goal_stop_ends_children_and_runner_with_code_0_and_nothing_to_warn_of(net: Network) -> None:
    async with pod(net, make_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        await group.climb(V1)
        await group.stop()
        await it.until(lambda facts: facts.stopped, "stopped")
        async with asyncio.timeout(DEADLINE_S):
            assert 0 == await it.runner.wait()
        await it.restart_agent(signal.SIGTERM)
        lines = [json.loads(line) for line in it.log.read_text().splitlines() if line.startswith("{")]
        assert [] == [line for line in lines if line.get("level") not in ("info", None)]


async def test_terminated_container_hands_back_what_is_in_flight_before_it_ends(net: Network) -> None:
    async with pod(net, make_job()) as it:
        await PodGroup([it]).climb(V0)
        long = asyncio.create_task(it.generate(input_ids=PROMPT, sampling_params=endless()))
        await it.generating(1)
        it.runner.terminate()
        status, answer = await long
        assert (200, "abort") == (status, answer["meta_info"]["finish_reason"]["type"])
        async with asyncio.timeout(DEADLINE_S):
            assert 143 == await it.runner.wait()
        await it.until(lambda facts: facts.ending and not facts.trainers, "without its container")
        ended = [facts for facts in it.facts if any(rank.exit_code is not None for rank in facts.trainers)]
        assert all(facts.ending for facts in ended), "its trainer was ended, and has not died"


async def test_terminated_container_saves_the_step_at_which_it_stands_before_it_ends_if_it_is_asked_to(
    net: Network,
) -> None:
    """No checkpoint is due. Its engine has gone by then."""
    async with pod(net, make_job(checkpoint={"everySteps": 100})) as it:
        group = PodGroup([it])
        await group.climb(V0)
        await group.climb(V1)
        it.runner.terminate()
        await it.until(lambda facts: facts.ending, "signalled")
        await it.send(group.target(V1, Rung.SERVING).model_copy(update={"saves": True}))
        async with asyncio.timeout(DEADLINE_S):
            assert 143 == await it.runner.wait()
        [saved] = {facts.engines[0].state for facts in it.facts if facts.trainers and facts.trainers[0].saved == 1}
        assert EngineState.ABSENT is saved


async def test_secrets_are_in_no_log(net: Network) -> None:
    async with pod(net, make_job()) as it:
        await PodGroup([it]).climb(V0)
        journal = (it.directories.state / "journal.jsonl").read_text().splitlines()
        keys = [record["admin_key"] for record in map(json.loads, journal) if "admin_key" in record]
        assert len(keys) == 1
        await until(lambda: "admin_api_key='***'" in it.log.read_text())  # the engine shows its key when it starts
        assert keys[0] not in it.log.read_text()
        assert not (it.directories.sockets / "engine-0.yaml").exists()


def exports(it: PodProcesses) -> list[str]:
    """Return the exports on the volume; an agent makes room once the engine has newer ones."""
    return sorted(path.name for path in it.directories.weights.iterdir())


def endless() -> dict[str, object]:
    return {"max_new_tokens": 4000, "ignore_eos": True, "stream_interval": 1}


def identities(it: PodProcesses) -> tuple[str | None, str | None]:
    assert it.now is not None
    return it.now.engines[0].incarnation, it.now.trainers[0].incarnation


def trainer_of(facts: PodFacts) -> tuple[TrainerState, int | None, int | None]:
    (rank,) = facts.trainers
    return rank.state, rank.exit_code, rank.lineage


async def served_version(it: PodProcesses) -> tuple[int, str]:
    status, answer = await it.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 4}, return_logprob=True)
    assert all(token < 1000 for token in answer["output_ids"]), "no token is made from released weights"
    return status, answer["meta_info"]["weight_version"]
