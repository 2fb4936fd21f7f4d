"""These tests read the metrics of a real agent while its pod climbs."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from colocated_rl_api.facts import TrainerState
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_api.seats import FIRST_SPARE
from fakes.pod import Network, PodGroup, PodProcesses, make_job, network, pod
from fakes.trainer import METRICS

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)


async def test_metrics_show_the_rung_below_its_target_where_a_pod_stands(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with network(tmp_path_factory.mktemp("n")) as net, pod(net, make_job()) as it:
        group = PodGroup([it])

        async def below_target() -> list[str]:
            async with net.session.get(f"http://127.0.0.1:{it.metrics}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            return [line.split()[0] for line in lines if line.startswith("colocate_below_target_seconds{")]

        await group.climb(V0)
        assert [] == await below_target()
        it.trainer_fault("train", "hang")
        await group.climb(V1, to=Rung.RELEASED)
        assert [] == await below_target(), "it stands where it should"
        await it.send(group.target(V1, Rung.TRAINED))
        await it.until(lambda facts: facts.trainers[0].state is TrainerState.TRAINING, "a step under way")
        assert ['colocate_below_target_seconds{rung="Released"}'] == await below_target()


async def metric_of(net: Network, it: PodProcesses, name: str) -> float | None:
    async with net.session.get(f"http://127.0.0.1:{it.metrics}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)


async def test_another_agent_counts_the_time_of_steps_at_risk_from_the_next_step_on(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """It does not know when the first of them began, and an alert would wait for ever."""
    async with network(tmp_path_factory.mktemp("n")) as net, pod(net, make_job(checkpoint={"everySteps": 100})) as it:
        group = PodGroup([it])
        await group.climb(V0)
        await group.climb(V1)
        await it.restart_agent()
        await group.climb(WeightVersion(2, 1))
        assert 2 == await metric_of(net, it, "colocate_unsaved_steps")
        assert (await metric_of(net, it, "colocate_unsaved_seconds") or 0) > 0


async def test_steps_are_at_risk_until_a_checkpoint_holds_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with network(tmp_path_factory.mktemp("n")) as net, pod(net, make_job(checkpoint={"everySteps": 2})) as it:
        group = PodGroup([it])

        async def shown(name: str) -> float | None:
            return await metric_of(net, it, name)

        assert None is await shown("colocate_unsaved_steps")
        await group.climb(V0)
        assert [0, 0, 1, 0] == [
            await shown(name)
            for name in (
                "colocate_unsaved_steps",
                "colocate_unsaved_seconds",
                "colocate_trainer_load_seconds_count",
                "colocate_checkpoint_write_seconds_count",
            )
        ]
        await group.climb(V1)
        assert it.now is not None
        assert METRICS["mismatch_mean"] == it.now.trainers[0].mismatch
        assert 1 == await shown("colocate_unsaved_steps")
        assert (await shown("colocate_unsaved_seconds") or 0) > 0
        await group.climb(WeightVersion(2, 1))
        await it.until(lambda facts: facts.trainers[0].saved == 2, "saved")
        names = ("colocate_unsaved_steps", "colocate_unsaved_seconds", "colocate_checkpoint_write_seconds_count")
        assert [0, 0, 1] == [await shown(name) for name in names]
        held = [await shown(f'colocate_child_memory_bytes{{child="{child}"}}') for child in ("engine-0", "trainer-0")]
        assert all(bytes_ is not None and bytes_ > 1_000_000 for bytes_ in held), "as of the switches before"


async def test_a_trainer_that_keeps_memory_of_a_step_is_reported_to_have_grown_until_another_process_takes_its_place(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with network(tmp_path_factory.mktemp("n")) as net, pod(net, make_job(checkpoint={"everySteps": 1})) as it:
        group = PodGroup([it])
        await group.climb(V0)
        await group.climb(V1)
        assert it.now is not None
        assert 0 == it.now.trainers[0].grown_bytes
        it.trainer_fault("train", "leaks")
        await group.climb(WeightVersion(2, 1))
        await it.until(lambda facts: facts.trainers[0].grown_bytes == 192 << 20, "growth, in whole steps of 64 MiB")
        await group.climb(WeightVersion(3, 2))
        assert 0 == it.now.trainers[0].grown_bytes


async def test_the_devices_of_a_pod_belong_to_one_holder_after_the_other(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A scrape at each place of a switch: no other counter has moved since the one before."""
    async with network(tmp_path_factory.mktemp("n")) as net, pod(net, make_job(gpus={"count": 1})) as it:
        group, before = PodGroup([it]), dict[str, float]()

        async def moved() -> set[str]:
            nonlocal before
            async with net.session.get(f"http://127.0.0.1:{it.metrics}/metrics") as answer:
                families = text_string_to_metric_families(await answer.text())
            (held,) = (family for family in families if family.name == "colocate_gpu_seconds")
            now = {each.labels["holder"]: each.value for each in held.samples if each.name.endswith("_total")}
            found, before = {holder for holder in now if now[holder] > before.get(holder, 0.0)}, now
            return found

        await group.climb(V0)
        assert {"start-up", "rollout"} == await moved()
        await group.climb(V1, to=Rung.RELEASED)
        assert {"rollout", "switch", "training"} == await moved()
        assert {"training"} == await moved()
        await group.climb(V1)
        await moved()
        assert {"rollout"} == await moved()


async def test_the_devices_of_a_spare_are_idle(tmp_path_factory: pytest.TempPathFactory) -> None:
    spare = make_job(gpus={"count": 1})
    async with network(tmp_path_factory.mktemp("n")) as net, pod(net, spare, replica=FIRST_SPARE) as it:
        for _ in range(2):  # a holder has seconds from the second on
            async with net.session.get(f"http://127.0.0.1:{it.metrics}/metrics") as answer:
                families = list(text_string_to_metric_families(await answer.text()))
    (held,) = (family for family in families if family.name == "colocate_gpu_seconds")
    assert ["idle"] == [each.labels["holder"] for each in held.samples if each.name.endswith("_total") and each.value]
