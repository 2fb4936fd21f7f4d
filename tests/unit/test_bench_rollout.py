"""Whole jobs in virtual time: what the worker does between two switches, and that the bench's bound is one."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from bench import virtual_time
from bench.rollout_bound import least_s
from bench.simulated_engines import PROMPT_TOKENS, EngineMachine, Rates
from bench.simulated_job import SimulatedController, SimulatedJob, apart, colocated, synchronous
from colocated_rl_api.job import AtMaxStaleness, Interruption
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.engines.engines import BURST, PACE_S
from colocated_rl_rollout.rules.samples import SampleState
from colocated_rl_rollout.store.batches import shard_path
from colocated_rl_rollout.store.database import StoreFailed
from colocated_rl_rollout.store.store import Store
from colocated_rl_rollout.worker import SWITCH_S

V0 = WeightVersion(0, 1)


def some_lengths(prompt: int, number: int) -> int:
    """Return a length from 1 to 400, mostly a short one."""
    return 1 + int(400 * random.Random(prompt * 8 + number).random() ** 4)


def small(**fields: Any) -> SimulatedJob:
    return SimulatedJob(**{"trace": some_lengths, "steps": 6, "batch_size": 4, "group_size": 4, "engines": 2, **fields})


def test_without_staleness_a_job_is_as_fast_as_a_synchronous_loop() -> None:
    job = small(max_staleness=0, train_s=0.001)
    assert synchronous(job).took_s == pytest.approx(colocated(job).took_s, rel=0.02)


@settings(max_examples=6)
@given(seed=st.integers(0, 99), staleness=st.integers(0, 4), slots=st.integers(1, 16))
def test_a_job_trains_every_sample_once_and_discards_nothing(seed: int, staleness: int, slots: int) -> None:
    """It takes no less time than its batches would in the best of orders."""

    def lengths(prompt: int, number: int) -> int:
        return some_lengths(prompt + 1000 * seed, number)

    job = small(trace=lengths, max_staleness=staleness, rates=Rates(slots=slots), train_s=0.001)
    outcome = colocated(job)
    assert (job.tokens, 0) == (outcome.trained_tokens, outcome.discarded_tokens)
    assert (job.tokens, job.tokens) == (outcome.finished_tokens, outcome.sealed_tokens), "long ones are not left over"
    assert max(age for batch in outcome.batches for age in batch.staleness) <= staleness
    if staleness == 0:
        assert least_s(job) <= outcome.took_s
    everything_s = job.steps * job.switch_s + job.tokens * (job.train_s + 1 / (2 * job.rates.throughput(slots)))
    assert everything_s < outcome.took_s


def test_what_is_interrupted_starts_over_where_a_job_says_so() -> None:
    job = small(interruption=Interruption.RETRY, max_staleness=2)
    outcome = colocated(job)
    assert (job.tokens, 0) == (outcome.trained_tokens, outcome.resent_tokens)
    assert outcome.discarded_tokens > 0


def test_what_happens_while_gates_are_closed_takes_nothing_from_rollout() -> None:
    """One run therefore stands for every time of switch and training."""
    quick, slow = colocated(small(switch_s=1.0)), colocated(small(switch_s=30.0, train_s=0.01))
    assert quick.phases_s == pytest.approx(slow.phases_s)


@pytest.mark.parametrize("least_s", [1, 3])
def test_a_batch_is_not_sealed_before_its_least_time_in_rollout_while_engines_have_work(least_s: int) -> None:
    """Then the batches that are there already follow one another at once."""
    job = small(steps=12, max_staleness=4, rates=Rates(slots=4))
    assert min(colocated(job).phases_s) < 1
    outcome = colocated(small(steps=12, max_staleness=4, rates=Rates(slots=4), min_rollout_s=least_s))
    working = [phase for phase in outcome.phases_s if phase >= least_s]
    assert len(working) > 1
    assert outcome.trained_tokens == job.tokens
    short = [place for place, phase in enumerate(outcome.phases_s) if phase < least_s]
    assert all(place >= job.steps - 5 for place in short), "only when nothing more may be generated"


def test_what_a_store_holds_does_not_grow_with_the_job() -> None:
    job = small(trace=lambda prompt, number: 1 + some_lengths(prompt, number) // 40, steps=60, max_staleness=2)
    held: list[tuple[int, ...]] = []

    def watch(store: Store) -> None:
        store._writer.flush(deadline_s=60)  # else what is counted is how far the disk has come
        names = ("samples", "segments", "groups", "batches")
        rows = [store.rows(f"SELECT COUNT(*) FROM {name}")[0][0] for name in names]
        held.append((*rows, len(store.groups), len(list(store.batch_directory.iterdir()))))

    colocated(job, watch=watch)
    early, late = ([max(column) for column in zip(*part, strict=True)] for part in (held[5:30], held[30:]))
    assert len(held) == job.steps
    assert all(later <= 1.25 * before for before, later in zip(early, late, strict=True)), (early, late)
    assert late[0] <= (job.max_staleness + 2) * job.samples


def run_scene(job: SimulatedJob, directory: Path, script: Any) -> None:
    async def main() -> None:
        scene = SimulatedController(job, directory)
        async with asyncio.TaskGroup() as group:
            following = group.create_task(scene.engines.run())
            working = group.create_task(scene.worker.run())
            await asyncio.sleep(0)
            await script(scene)
            scene.worker.drain()
            scene.close_gates()
            await working
            following.cancel()
        scene.store.close()

    virtual_time.run(main())


def noting(machine: EngineMachine, sent: list[tuple[float, int]]) -> None:
    """Note when a request came, and how much of it was to be prefilled."""
    generate = machine.generate

    def noted(*, prefill: int, length: int) -> Coroutine[Any, Any, int]:
        sent.append((virtual_time.loop().now, prefill))
        return generate(prefill=prefill, length=length)

    machine.generate = noted  # type: ignore[method-assign]


def test_after_a_switch_interrupted_samples_go_first_and_an_engine_gets_so_many_at_a_time(tmp_path: Path) -> None:
    job = small(trace=lambda prompt, number: 1000, batch_size=128, engines=1, rates=Rates(slots=64))
    sent: list[tuple[float, int]] = []

    async def script(scene: SimulatedController) -> None:
        scene.open_gates(V0)
        await asyncio.sleep(5)
        scene.close_gates()
        await asyncio.sleep(5)
        assert scene.store.counts[SampleState.INTERRUPTED] == 1024
        noting(scene.engines.simulated[0].machine, sent)
        scene.open_gates(V0)
        await asyncio.sleep(5)

    run_scene(job, tmp_path, script)
    assert len(sent) == 1024
    assert all(prefill > PROMPT_TOKENS for _, prefill in sent[:64])
    assert all(prefill == PROMPT_TOKENS for _, prefill in sent[64:])
    times = [time for time, _ in sent]
    assert all(later - earlier >= PACE_S - 1e-6 for earlier, later in zip(times, times[BURST:], strict=False))
    assert times[-1] - times[0] == pytest.approx(PACE_S * (1024 // BURST - 1))


def test_nothing_is_sent_once_a_batch_is_sealed_unless_no_switch_comes(tmp_path: Path) -> None:
    """It would be prefilled, aborted, and prefilled again."""
    job = small(max_staleness=3, engines=1, rates=Rates(slots=2))
    sent: list[tuple[float, int]] = []

    async def script(scene: SimulatedController) -> None:
        scene.open_gates(V0)
        await scene.sealed(1)
        sealed_at = virtual_time.loop().now
        noting(scene.engines.simulated[0].machine, sent)
        scene.close_gates()
        scene.open_gates(V0)
        await asyncio.sleep(SWITCH_S + 1)
        assert sent
        assert all(time == pytest.approx(sealed_at + SWITCH_S) for time, _ in sent[:1])

    run_scene(job, tmp_path, script)


def test_what_an_engine_that_takes_turns_hands_back_goes_on_at_once_at_one_that_does_not(tmp_path: Path) -> None:
    job = small(max_staleness=3, apart=1, rates=Rates(slots=4))
    sent: list[tuple[float, int]] = []

    async def script(scene: SimulatedController) -> None:
        beside, apart = scene.engines.simulated
        scene.open_gates(V0)
        await scene.sealed(1)
        sealed_at = virtual_time.loop().now
        noting(apart.machine, sent)
        beside.close()
        await asyncio.sleep(SWITCH_S / 2)
        assert all(time < sealed_at + SWITCH_S for time, _ in sent)
        assert any(prefill > PROMPT_TOKENS for _, prefill in sent), "tokens that the other engine made are kept"
        assert not scene.store.counts[SampleState.INTERRUPTED]

    run_scene(job, tmp_path, script)


@pytest.mark.parametrize("policy", [AtMaxStaleness.WAIT, AtMaxStaleness.MASK])
def test_samples_of_every_length_are_trained_as_they_were_admitted(tmp_path: Path, policy: AtMaxStaleness) -> None:
    """No bias to short ones: at every step, those trained, those masked and those left over are those admitted. So a
    job's weights have no part in which samples it trains, as with a learning rate of 0."""
    job = small(steps=8, max_staleness=1, at_max_staleness=policy, rates=Rates(slots=4))
    trained: dict[int, list[int]] = {}
    masked = 0

    async def script(scene: SimulatedController) -> None:
        nonlocal masked
        for step in range(1, job.steps + 1):
            scene.open_gates(WeightVersion(step - 1, 1))
            batch = await scene.sealed(step)
            masked += batch.masked_tokens
            scene.close_gates()
            columns = load_file(shard_path(scene.store.batch_directory, step, 0))
            for tokens in np.split(columns["tokens"], columns["sample_end"][:-1]):
                trained.setdefault(int(tokens[0]), []).append(len(tokens) - 1)
            left = [group.prompt.position for group in scene.store.groups.values()]
            assert [*range(scene.store.cursor)] == sorted([*trained, *left])
            await asyncio.sleep(1)
            scene.trained(step)
        figures = [scene.counted(f"colocate_rollout_{each}response_tokens_sum") for each in ("", "sealed_")]
        assert [job.tokens, job.tokens] == figures, "whose means are for people to compare"
        assert scene.counted("colocate_rollout_discarded_tokens_total") == masked

    run_scene(job, tmp_path, script)
    expected = {
        prompt: sorted(job.trace(prompt, number) for number in range(job.group_size))
        for prompt in range(job.steps * job.batch_size)
    }
    assert expected == {prompt: sorted(lengths) for prompt, lengths in trained.items()}
    assert (masked > 0) == (policy is AtMaxStaleness.MASK)


def test_slime_topping_up_stops_while_twice_the_concurrency_waits(tmp_path: Path) -> None:
    """slime's published rule says so: the queue is never above it."""
    job = small(max_staleness=1, max_concurrency=4)
    held: list[int] = []

    async def script(scene: SimulatedController) -> None:
        scene.open_gates(V0)
        for _ in range(200):
            await asyncio.sleep(0.1)
            held.append(len(scene.store.groups) + scene.store.sealed_groups)
        assert 0 == scene.store.counts[SampleState.RUNNING]

    run_scene(job, tmp_path, script)
    assert (8, 8) == (max(held), held[-1])


def test_engines_that_load_new_weights_in_turns_make_a_job_slower_and_lose_no_sample() -> None:
    """The reason why they load together, where each has devices of its own: trainers would wait for all loads."""
    job = small(steps=4, max_staleness=1, train_s=1e-3, switch_s=15.0)
    together, in_turns = apart(job, in_turns=False), apart(job, in_turns=True)
    assert together.took_s < in_turns.took_s
    assert [4, 4] == [len(each.batches) for each in (together, in_turns)]
    assert job.tokens <= min(each.finished_tokens for each in (together, in_turns))


def test_tunix_four_groups_in_batches_of_two_are_two_batches_and_then_no_more(tmp_path: Path) -> None:
    """tunix's published barriers work so: each batch closes its own step, and the last one the job."""
    job = small(steps=2, batch_size=2, max_staleness=3)

    async def script(scene: SimulatedController) -> None:
        for step in (1, 2):
            scene.open_gates(V0)
            assert 2 == (await scene.sealed(step)).groups
            scene.close_gates()
            scene.trained(step)
        scene.open_gates(V0)
        await asyncio.sleep(60)
        assert ({}, 3) == (scene.store.groups, scene.store.next_step)
        assert job.steps * job.samples == scene.store.counts.total()

    run_scene(job, tmp_path, script)


def test_tunix_a_stage_that_fails_ends_everybody_who_waits_for_it(tmp_path: Path) -> None:
    """tunix's published queues work so. Here it is the store that fails, and a trainer's agent waits for its batch."""

    async def main() -> None:
        scene = SimulatedController(small(), tmp_path)
        async with asyncio.TaskGroup() as group:
            group.create_task(scene.engines.run())
            group.create_task(scene.worker.run())
            group.create_task(scene.sealed(1))
            await asyncio.sleep(0)
            with closing(sqlite3.connect(scene.store.path)) as other:
                other.execute("DROP TABLE segments")
            scene.open_gates(V0)

    with pytest.raises(ExceptionGroup) as failed:
        virtual_time.run(main())
    assert failed.value.subgroup(StoreFailed) is not None


def test_a_wait_that_nothing_can_end_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.NothingLeft):
        virtual_time.run(main())
