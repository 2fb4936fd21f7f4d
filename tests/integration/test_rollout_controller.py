"""The rollout controller against gates that a test steers and a scripted operator, over real TLS on loopback.

Questions and rewards come from reasoning-gym in its own process, which all tests of this file share.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import re
import sqlite3
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from safetensors.numpy import load
from waiting import DEADLINE_S, until

from colocated_rl_api import names
from colocated_rl_api.batch import HEADER_KEY, BatchHeader
from colocated_rl_api.checkpoint import CONTENTS, FORMAT, Contents, checkpoint_name
from colocated_rl_api.facts import EvaluationResult, Problem, RolloutFacts
from colocated_rl_api.job import Evaluation as EvaluationSpec
from colocated_rl_api.job import EvaluationSet, FormerSamples, Mode, Recording, RestoreFrom
from colocated_rl_api.logs import JsonLines
from colocated_rl_api.member_wire import Endpoint, Goal
from colocated_rl_api.prompts import ReasoningGym
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_cli.draw.figures import evaluations_of
from colocated_rl_rollout.controller import Controller
from colocated_rl_rollout.engines import engines
from colocated_rl_rollout.rewards.rewards import REWARD_UNAVAILABLE, RewardFailed, TaskProcesses
from colocated_rl_rollout.settings import read_settings
from colocated_rl_rollout.store.store import Store
from colocated_rl_rollout.tasks.task_wire import PromptContent, RewardAnswer
from fakes.gate import FakeGate, GateFault, experts_of, logp_of
from fakes.interface import Interface, rollout_interface, routes_of
from fakes.rollout import JOB_UID, MARK, JobOnDisk, OperatorEnd, SilentProcesses, WorkedSums, make_spec, of_one_set
from fakes.tasks import are_up, task_processes

pytestmark = pytest.mark.asyncio(loop_scope="module")

V0, V1, V2 = WeightVersion(0, 1), WeightVersion(1, 1), WeightVersion(2, 1)
BATCH = 3  # groups of 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TaskProcesses]:
    async with task_processes(make_spec().rollout.prompts, tmp_path_factory.mktemp("processes")) as made:
        await are_up(made)
        yield made


@dataclass
class Batch:
    """All shards of a batch, as a trainer would read them."""

    headers: list[BatchHeader]
    columns: list[dict[str, NDArray[Any]]]
    is_dealt_anew: bool = False  # among other ranks than it was sealed for: each has what several had, in turn

    @property
    def groups(self) -> list[int]:
        """The group of each sample, once it is seen that every shard has them oldest first."""
        in_shards = [shard["group"].tolist() for shard in self.columns]
        assert self.is_dealt_anew or all(sorted(groups) == groups for groups in in_shards)
        return sorted(chain.from_iterable(in_shards))


@dataclass
class ControllerScene:
    """A running controller, its gates, and an operator."""

    job: JobOnDisk
    gates: list[FakeGate]
    operator: OperatorEnd
    controller: Controller
    session: aiohttp.ClientSession

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(gate.endpoint for gate in self.gates)

    async def target(self, epoch: int = 1, **fields: Any) -> None:
        await self.operator.send(epoch, self.endpoints, **fields)

    async def open(self, version: WeightVersion, *, pace: int | None = None) -> None:
        for gate in self.gates:
            await gate.open(version, pace=pace)

    async def close(self) -> None:
        for gate in self.gates:
            await gate.close()

    async def generating(self, count: int) -> None:
        """Wait until the engines have exactly as many requests."""
        await until(lambda: sum(gate.in_flight for gate in self.gates) == count)

    async def sealed(self, step: int) -> RolloutFacts:
        return await self.operator.until(lambda facts: facts.sealed and facts.sealed.step >= step)

    async def samples(self, **states: int) -> RolloutFacts:
        """Facts with so many samples in each of these states."""
        return await self.operator.until(
            lambda facts: all(facts.samples.get(state, 0) == count for state, count in states.items())
        )

    async def interrupt_all(self, *, epoch: int = 1) -> None:
        """All samples of two batches have begun with V0, and a switch cuts them short."""
        await self.target(epoch)
        await self.open(V0, pace=4)
        await self.generating(2 * BATCH)
        await self.close()
        await self.samples(interrupted=2 * BATCH)

    async def page(self, path: str) -> Any:
        """Return the contents of a page, after a check against the document."""
        async with self.session.get(f"http://127.0.0.1:{self.controller.member.ports.pages}{path}") as response:
            body = await response.read()
            rollout_interface().check("GET", response.url.path, response.status, response.content_type, body)
            return json.loads(body)

    async def figures(self) -> str:
        async with self.session.get(f"http://127.0.0.1:{self.controller.member.ports.metrics}/metrics") as response:
            return await response.text()

    async def batch(self, step: int, *, shards: int = 2) -> Batch:
        batch = Batch([], [])
        for shard in range(shards):
            status, body, digest = await self.job.fetch(
                self.session, self.controller.member.ports.data, f"/v1/batches/{step}?shard={shard}&of={shards}"
            )
            assert status == 200, body
            assert hashlib.sha256(body).hexdigest() == digest
            size = int.from_bytes(body[:8], "little")
            header = json.loads(body[8 : 8 + size])["__metadata__"][HEADER_KEY]
            batch.headers.append(BatchHeader.model_validate_json(header))
            batch.columns.append(load(body))
        return batch


@asynccontextmanager
async def running(
    job: JobOnDisk, processes: TaskProcesses, *, gates: list[FakeGate] | None = None, tail: int = 0
) -> AsyncIterator[ControllerScene]:
    """The controller over the job's volume, with two gates that are closed."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        respond = WorkedSums(job.directory / "model", tail=tail)
        if gates is None:
            gates = [FakeGate(f"job-gpu-{replica}-0", job.tls, respond) for replica in range(2)]
            for gate in gates:
                await stack.enter_async_context(gate.listening())
        settings = read_settings(job.arguments, job.environment)
        controller = Controller(settings, session, processes, CollectorRegistry())
        serving = asyncio.create_task(controller.run())
        try:
            await until(lambda: controller.member.ports.control or serving.done())
            async with job.operator(controller.member.ports.control) as operator:
                yield ControllerScene(job, gates, operator, controller, session)
        finally:
            controller.drain()
            async with asyncio.timeout(DEADLINE_S):
                await serving


@pytest.fixture
def job(tmp_path: Path) -> JobOnDisk:
    return JobOnDisk.write(tmp_path, make_spec())


def with_rollout(tmp_path: Path, **rollout: Any) -> JobOnDisk:
    return JobOnDisk.write(tmp_path, make_spec(**rollout))


def token_rows(batch: Batch) -> list[tuple[int, float, int]]:
    """(token, behaviour log-probability, step of its weights) of each token that is trained."""
    rows = []
    for shard in batch.columns:
        trained = shard["loss_mask"] == 1
        rows += list(
            zip(
                shard["tokens"][trained].tolist(),
                shard["behaviour_logp"][trained].tolist(),
                shard["token_step"][trained].tolist(),
                strict=True,
            )
        )
    return rows


def must_be_of_their_versions(batch: Batch) -> None:
    """Each token has the log-probability that its weights gave it."""
    rows = token_rows(batch)
    assert rows
    for token, logp, step in rows:
        assert logp == pytest.approx(logp_of(WeightVersion(step, 1), token), abs=1e-6)


async def test_a_batch_has_the_groups_it_should_and_a_reward_for_each_answer(
    job: JobOnDisk, processes: TaskProcesses
) -> None:
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0)
        facts = await scene.sealed(1)
        assert facts.sealed is not None
        batch = await scene.batch(1)
        assert (BATCH, 2 * BATCH) == (facts.sealed.groups, facts.sealed.samples)
        assert [1, 1, 2, 2, 3, 3] == batch.groups
        assert facts.sealed.loss_tokens == len(token_rows(batch)) == batch.headers[0].loss_tokens
        rewards = [reward for shard in batch.columns for reward in shard["reward"].tolist()]
        assert set(rewards) <= {0.0, 1.0}
        assert facts.reward_mean == pytest.approx(sum(rewards) / len(rewards))


async def test_generations_span_a_switch_and_come_back_as_one_completion(
    job: JobOnDisk, processes: TaskProcesses
) -> None:
    async with running(job, processes) as scene:
        await scene.interrupt_all()
        await scene.open(V1)
        await scene.sealed(1)
        batch = await scene.batch(1)
        steps = {step for _, _, step in token_rows(batch)}
        assert {0, 1} == steps
        must_be_of_their_versions(batch)
        for shard in batch.columns:
            start = 0
            for end in shard["sample_end"].tolist():
                made_by = shard["token_step"][start:end]
                made_by = made_by[made_by >= 0].tolist()
                assert [0] * 5 + [1] * (len(made_by) - 5) == made_by  # four, and the one that an abort still makes
                start = end
        figures = await scene.figures()
        assert f"\ncolocate_rollout_resent_tokens_total {2 * BATCH * 5}.0\n" in figures
        assert f'\ncolocate_rollout_attempts_total{{ending="interrupted"}} {2 * BATCH}.0\n' in figures
        samples = (await scene.page("/v1/samples?state=sealed"))["samples"]
        assert [(2, 5)] * 2 * BATCH == [(sample["attempts"], sample["resent"]) for sample in samples]


async def test_f6_what_was_interrupted_goes_on_before_anything_new_begins(
    job: JobOnDisk, processes: TaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine takes no more than its share of the interrupted ones, so whatever it is sent came first."""
    async with running(job, processes) as scene:
        await scene.interrupt_all()
        await scene.target(concurrency=2 * BATCH)
        await scene.samples(interrupted=2 * BATCH, admitted=2 * BATCH)
        await until(lambda: not scene.controller._engines._sent)
        monkeypatch.setattr(engines, "BURST", BATCH)
        monkeypatch.setattr(engines, "PACE_S", 10 * DEADLINE_S)
        before = [len(gate.requests) for gate in scene.gates]
        await scene.open(V1, pace=1)
        await scene.generating(2 * BATCH)
        sent = [gate.requests[count:] for gate, count in zip(scene.gates, before, strict=True)]
        limits = [request["sampling_params"]["max_new_tokens"] for requests in sent for request in requests]
        assert [48 - 5] * 2 * BATCH == limits, "each goes on with the rest of its budget"
        await scene.samples(running=2 * BATCH, admitted=2 * BATCH)


async def test_tokens_without_a_version_go_on_beside_others_and_are_told_apart_to_the_batch(
    tmp_path: Path, processes: TaskProcesses
) -> None:
    """Between the two attempts at each sample somebody updates one of the engines."""
    async with running(with_rollout(tmp_path, unversionedTokens="Accept"), processes) as scene:
        await scene.interrupt_all()
        for gate in scene.gates:
            gate.names_versions = False
        await scene.open(V1)
        await scene.sealed(1)
        batch = await scene.batch(1)
        samples = (await scene.page("/v1/samples?state=sealed"))["samples"]
        record = (await scene.page("/v1/progress"))["sealed"]
        figures = await scene.figures()

    steps = [step for _, _, step in token_rows(batch)]
    assert {0, -1} == set(steps)
    assert all(header.has_unversioned for header in batch.headers)
    assert steps.count(-1) == record["unversionedTokens"] == sum(sample["unversioned"] for sample in samples)
    assert {"0": steps.count(0)} == record["staleness"]
    assert all(0 < sample["unversioned"] for sample in samples)
    (line,) = re.findall(r"^colocate_rollout_unversioned_tokens_total (\S+)$", figures, re.MULTILINE)
    assert float(line) >= steps.count(-1)


async def test_tokens_without_a_version_are_refused_and_counted_and_others_go_on(
    job: JobOnDisk, processes: TaskProcesses
) -> None:
    async with running(job, processes) as scene:
        scene.gates[0].names_versions = False
        await scene.target()
        await scene.open(V0)
        await scene.sealed(1)
        batch, figures = await scene.batch(1), await scene.figures()

    assert {0} == {step for _, _, step in token_rows(batch)}
    assert not any(header.has_unversioned for header in batch.headers)
    assert 'colocate_rollout_attempts_total{ending="unversioned"}' in figures
    assert "\ncolocate_rollout_unversioned_tokens_total 0.0\n" in figures


async def test_a_batch_says_which_experts_read_each_token_last(tmp_path: Path, processes: TaskProcesses) -> None:
    """After a switch an engine reads earlier tokens again, and later tokens attend to that pass."""
    async with running(with_rollout(tmp_path, routerReplay=True), processes) as scene:
        await scene.interrupt_all()
        await scene.open(V1)
        await scene.sealed(1)
        batch = await scene.batch(1)

    for header, shard in zip(batch.headers, batch.columns, strict=True):
        assert header.has_experts
        expected = [experts_of(V1, token) for token in shard["tokens"].tolist()]
        for end in shard["sample_end"].tolist():
            expected[end - 1] = [-1, -1]  # drawn, and not read
        assert expected == shard["experts"].tolist()


async def test_engines_are_asked_for_experts_only_where_they_are_replayed(
    job: JobOnDisk, processes: TaskProcesses
) -> None:
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0)
        await scene.sealed(1)
        assert not any("return_routed_experts" in body for gate in scene.gates for body in gate.requests)
        assert not any(header.has_experts for header in (await scene.batch(1)).headers)


async def test_an_end_token_hidden_by_the_abort_ends_the_response(job: JobOnDisk, processes: TaskProcesses) -> None:
    """H49: the engine sets abort before it looks for the end token, so the last id may be one."""
    answer_length = len("Answer: 7") + 1
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0, pace=answer_length - 1)
        await until(lambda: sum(len(gate.requests) for gate in scene.gates) == 2 * BATCH)
        await scene.close()
        facts = await scene.operator.until(
            lambda facts: facts.samples.get("completed") and not {"running", "scoring"} & set(facts.samples)
        )
        await scene.open(V0)
        await scene.sealed(1)
        limits = [request["sampling_params"]["max_new_tokens"] for gate in scene.gates for request in gate.requests]
        assert facts.samples["interrupted"] == sum(limit < 48 for limit in limits), "the others had ended"


async def test_closed_gates_park_everything(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with running(job, processes) as scene:
        await scene.target()
        await scene.samples(admitted=2 * BATCH)
        assert [0, 0] == [gate.refused for gate in scene.gates]
        await scene.open(V0)
        await scene.sealed(1)


async def open_one_after_another(scene: ControllerScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first gate has the older half of the samples, and leaves the second its own, however slow the machine."""
    monkeypatch.setattr(engines, "SHARE_S", 10 * DEADLINE_S)
    await scene.target()
    await scene.samples(admitted=2 * BATCH)
    for count, gate in enumerate(scene.gates, 1):
        await gate.open(V0, pace=2)
        await scene.generating(count * BATCH)


async def test_the_first_gate_to_open_does_not_take_what_the_others_are_to_have(
    job: JobOnDisk, processes: TaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates open one after another when a switch ends, and everything is waiting then."""
    async with running(job, processes) as scene:
        await open_one_after_another(scene, monkeypatch)
        assert [BATCH, BATCH] == [gate.in_flight for gate in scene.gates]
        for share_s, count in ((10 * DEADLINE_S, BATCH), (0.1, 2 * BATCH)):
            await scene.close()
            await until(lambda: not scene.controller._engines.open)
            await scene.generating(0)
            monkeypatch.setattr(engines, "SHARE_S", share_s)
            await scene.gates[0].open(V1, pace=2)
            await scene.generating(count)  # in the end all: the other one does not come back
        assert [2 * BATCH, 0] == [gate.in_flight for gate in scene.gates]


async def test_an_engine_that_crashes_keeps_what_was_read(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0, pace=3)
        await scene.generating(2 * BATCH)
        for gate in scene.gates:
            await gate.crash_engine()
        await scene.samples(interrupted=2 * BATCH)
        before = len(scene.gates[0].requests)
        await scene.gates[1].open(V1)
        await scene.sealed(1)
        assert before == len(scene.gates[0].requests)
        assert {0, 1} == {step for _, _, step in token_rows(await scene.batch(1))}


async def test_f51_a_sample_goes_back_to_the_engine_that_has_its_prefix(
    job: JobOnDisk, processes: TaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(job, processes) as scene:
        await open_one_after_another(scene, monkeypatch)
        before = [sorted(tuple(request["input_ids"]) for request in gate.requests) for gate in scene.gates]
        await scene.close()
        await scene.samples(interrupted=2 * BATCH)
        for gate in scene.gates:
            gate.requests.clear()
        await scene.open(V1, pace=0)
        await scene.generating(2 * BATCH)
        asked = [sorted(tuple(request["input_ids"][:-3]) for request in gate.requests) for gate in scene.gates]
        assert before == asked, "without the two tokens, and the one that an abort still makes"
        for gate in scene.gates:
            await gate.release()


async def test_samples_move_to_another_engine_when_an_agent_is_lost(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0, pace=3)
        await scene.generating(2 * BATCH)
        await scene.gates[0].crash_agent()
        await scene.gates[1].release()
        facts = await scene.sealed(1)
        assert facts.gates_open == 1


async def test_what_one_engine_spoils_another_mends(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with running(job, processes) as scene:
        scene.gates[0].faults.extend([GateFault.ERROR_500, GateFault.GARBLED, GateFault.CUT_OFF])
        scene.gates[1].faults.extend([GateFault.DROPPED, GateFault.EMPTY])
        await scene.target()
        await scene.open(V0)
        await scene.sealed(1)
        facts = await scene.operator.until(lambda facts: not any(gate.faults for gate in scene.gates))
        assert facts.problem is None
        assert 0 == facts.samples.get("failed", 0)
        figures = await scene.figures()
        counted = [
            f'\ncolocate_rollout_attempts_total{{ending="{ending}"}} ' in figures for ending in ("lost", "garbled")
        ]
        assert [True, True] == counted
        assert '\ncolocate_rollout_attempts_total{ending="garbled"} 2.0\n' in figures
        must_be_of_their_versions(await scene.batch(1))  # nothing garbled is in it


async def test_gates_of_an_older_release_which_know_no_columns_are_read_beside_others(
    job: JobOnDisk, processes: TaskProcesses
) -> None:
    async with running(job, processes) as scene:
        scene.gates[0].packs_columns = False
        await scene.target()
        await scene.open(V0)
        await scene.sealed(1)
        assert all(gate.requests for gate in scene.gates)
        must_be_of_their_versions(await scene.batch(1))


async def test_what_a_busy_gate_refuses_was_no_attempt(job: JobOnDisk, processes: TaskProcesses) -> None:
    """A gate that had all it could take used up the attempts of what came on top, until those samples had failed."""
    async with running(job, processes) as scene:
        for gate in scene.gates:
            gate.faults.extend([GateFault.BUSY] * 4)
        await scene.target()
        await scene.open(V0)
        await scene.sealed(1)
        async with scene.session.get(
            f"http://127.0.0.1:{scene.controller.member.ports.pages}/v1/samples?state=sealed"
        ) as response:
            samples = (await response.json())["samples"]
        assert [1] * 2 * BATCH == [sample["attempts"] for sample in samples]


async def test_a_rejected_sample_is_replaced_in_its_group(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with running(job, processes) as scene:
        scene.gates[0].faults.append(GateFault.REJECTED)
        await scene.target()
        await scene.open(V0)
        facts = await scene.sealed(1)
        assert 1 == facts.samples["failed"]
        assert [1, 1, 2, 2, 3, 3] == (await scene.batch(1)).groups


async def test_a_task_without_a_signal_is_reported_and_trained_as_it_is(
    tmp_path: Path, processes: TaskProcesses
) -> None:
    """The fake engine gives every sample of a group the same answer."""
    job = with_rollout(tmp_path, filters=["EqualRewards", "Truncated"], maxFilteredPerBatch=4)
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0)
        facts = await scene.sealed(1)
        assert [5, 5, 6, 6, 7, 7] == (await scene.batch(1)).groups
        facts = await scene.operator.until(lambda facts: facts.problem)
        assert facts.problem
        assert "NoLearningSignal" == facts.problem.reason
        assert 8 <= facts.samples["filtered"]  # of this batch, and what is collected for the next one


async def test_a_job_trains_on_prompts_and_rewards_of_ones_own(tmp_path: Path) -> None:
    rows = [{"prompt": f"problem: {number} + 1 =", "sum": number + 1} for number in range(0, 2000, 7)]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    function = "def score(response, row):\n    return 2.0 if response.endswith(str(row['sum'])) else -0.5\n"
    (tmp_path / "mine/my_rewards.py").write_text(function)
    file = {"claimName": "mine", "path": "sums.jsonl", "reward": {"function": "my_rewards:score"}, "seed": 3}
    job = with_rollout(tmp_path, prompts={"file": file})
    async with task_processes(job.spec.rollout.prompts, tmp_path, count=2) as own, running(job, own) as scene:
        await scene.target(evaluate=0)
        await scene.open(V0)
        await scene.sealed(1)
        batch = await scene.batch(1)
        facts = await scene.operator.until(lambda facts: facts.evaluated)
    assert {2.0, -0.5} >= {reward for shard in batch.columns for reward in shard["reward"].tolist()}
    assert [3, 3] == [header.seed for header in batch.headers]
    [result] = facts.evaluated
    assert -0.5 < result.mean < 2.0


async def test_surplus_waits_in_order_for_the_next_batch(tmp_path: Path, processes: TaskProcesses) -> None:
    job = with_rollout(tmp_path, maxConcurrency=6)
    async with running(job, processes) as scene:
        await scene.target()
        scene.gates[0].preemptions = scene.gates[1].preemptions = 2
        await scene.open(V0)
        facts = await scene.samples(completed=2 * BATCH, sealed=2 * BATCH)
        assert f"\ncolocate_rollout_preemptions_total {2 * 4 * BATCH}.0\n" in await scene.figures()
        assert facts.sealed is not None
        assert facts.sealed.step == 1, "the second batch waits until the first is trained"
        await scene.close()
        await scene.target(trained_step=1)
        facts = await scene.sealed(2)
        assert [4, 4, 5, 5, 6, 6] == (await scene.batch(2)).groups
        tokens = [len(token_rows(await scene.batch(step))) for step in (1, 2)]
        figures = await scene.figures()
        for limit, count in (("0.0", tokens[0]), ("1.0", sum(tokens)), ("+Inf", sum(tokens))):
            assert f'\ncolocate_rollout_sealed_token_staleness_bucket{{le="{limit}"}} {count}.0\n' in figures
        assert f"\ncolocate_rollout_sealed_token_staleness_sum {tokens[1]}.0\n" in figures
        assert facts.staleness_mean == 1.0
        assert 2 * BATCH == facts.samples["trained"]


async def test_a_batch_is_the_same_bytes_each_time_and_goes_once_a_checkpoint_has_it_and_a_newer_one_is_sealed(
    job: JobOnDisk, processes: TaskProcesses
) -> None:
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0)
        await scene.sealed(1)
        port = scene.controller.member.ports.data
        first = [await job.fetch(scene.session, port, f"/v1/batches/1?shard={shard}") for shard in (0, 1)]
        assert first == [await job.fetch(scene.session, port, f"/v1/batches/1?shard={shard}") for shard in (0, 1)]
        assert 400 == (await job.fetch(scene.session, port, "/v1/batches/1?shard=2"))[0]
        assert 404 == (await job.fetch(scene.session, port, "/v1/batches/2?shard=0"))[0]
        await scene.target(trained_step=1, saved_step=1)
        await scene.operator.until(lambda facts: facts.trained_step == 1)
        assert first[0] == await job.fetch(scene.session, port, "/v1/batches/1?shard=0")
        assert 2 * BATCH == len((await scene.page("/v1/samples?state=trained"))["samples"]), "people read them"
        await scene.sealed(2)
        await scene.target(2, trained_step=1, saved_step=1)
        await scene.operator.until(lambda facts: facts.epoch == 2)
        status, body, _ = await job.fetch(scene.session, port, "/v1/batches/1?shard=0")
        assert (404, True) == (status, b"checkpoint" in body)


async def test_no_batch_is_handed_out_before_it_is_durable(job: JobOnDisk, processes: TaskProcesses) -> None:
    """Whoever asked early got one that a kill could still undo, and the next start make of other samples."""
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0, pace=2)
        await scene.generating(2 * BATCH)
        store = scene.controller._store
        with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as slow_disk:
            slow_disk.execute("BEGIN IMMEDIATE")
            for gate in scene.gates:
                await gate.release()
            await until(lambda: store.sealed)
            early = asyncio.create_task(
                job.fetch(scene.session, scene.controller.member.ports.data, "/v1/batches/1?shard=0")
            )
            assert (set(), {early}) == await asyncio.wait([early], timeout=0.3)
        assert 200 == (await early)[0]


async def test_f94_a_full_batch_waits_out_its_time_in_rollout_while_engines_have_work(
    tmp_path: Path, processes: TaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = with_rollout(tmp_path, minRolloutSeconds=86_400)
    async with running(job, processes) as scene:
        await open_one_after_another(scene, monkeypatch)
        await scene.gates[0].release()
        await scene.operator.until(lambda facts: facts.samples.get("completed", 0) >= BATCH)
        early = asyncio.create_task(scene.sealed(1))
        assert (set(), {early}) == await asyncio.wait([early], timeout=0.3), "a whole batch, and it waits"
        await scene.gates[1].release()
        assert (await early).sealed, "nothing more may be generated"


async def test_steps_go_on_through_switches_without_losing_a_sample(tmp_path: Path, processes: TaskProcesses) -> None:
    job = with_rollout(tmp_path, maxConcurrency=5)
    trained: list[int] = []
    async with running(job, processes) as scene:
        for step in range(1, 7):
            version = WeightVersion(step - 1, 1)
            await scene.target(step, trained_step=step - 1, saved_step=max(0, step - 2))
            await scene.open(version, pace=6)
            await scene.operator.until(lambda facts, step=step: facts.epoch == step)  # type: ignore[misc]
            for gate in scene.gates:
                await gate.release()
            await scene.sealed(step)
            await scene.close()
            batch = await scene.batch(step)
            trained += batch.groups
            assert 2 * BATCH == len(batch.groups)
            ages = {step - 1 - made_by for _, _, made_by in token_rows(batch)}
            assert ages <= {0, 1}, "maxStaleness is 1"
        assert len(trained) == len(set(trained)) * 2, "no group twice"
        facts = await scene.samples(running=0, scoring=0)
        assert 2 * 5 * BATCH == facts.samples["trained"]
        assert {"trained", "sealed", "interrupted", "completed", "admitted"} >= set(facts.samples), "none is lost"


async def test_evaluation_counts_answers_of_one_version_only(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with running(job, processes) as scene:
        await scene.target(evaluate=0)
        await scene.gates[0].open(V0)
        await scene.gates[1].open(V1)  # not the weights that are asked about
        facts = await scene.operator.until(lambda facts: facts.evaluated)
        [result] = facts.evaluated
        assert (0, 8) == (result.step, result.samples)
        assert 0 < result.mean < 1
        share = result.mean
        assert result.stderr == pytest.approx(np.sqrt(share * (1 - share) / 7))


OWN_SET = EvaluationSet(
    name="other-sums",
    samples=4,
    responses=3,
    reasoning_gym=ReasoningGym(
        name="chain_sum",
        config={"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        size=4,
        seed=1,
        answer_after=MARK,
    ),
)


async def test_sets_are_evaluated_together_and_after_a_restart_those_that_have_no_result(tmp_path: Path) -> None:
    """The job is suspended between the two, and gains and loses a set."""
    spec = make_spec()
    held_out = EvaluationSet(name="held-out", samples=8)
    first = spec.model_copy(update={"evaluation": EvaluationSpec(sets=[EvaluationSet(name="gone"), held_out])})
    later = spec.model_copy(update={"evaluation": EvaluationSpec(sets=[held_out, OWN_SET])})
    prompts = spec.rollout.prompts
    async with (
        task_processes(prompts, tmp_path / "first") as made,
        running(JobOnDisk.write(tmp_path, first), made) as scene,
    ):
        await scene.target(evaluate=0)
        await scene.open(V0)
        facts = await scene.operator.until(lambda facts: len(facts.evaluated) == 2)
        before = {one.name: one for one in facts.evaluated}
    async with (
        task_processes(prompts, tmp_path / "later", sets=[OWN_SET]) as made,
        running(JobOnDisk.write(tmp_path, later), made) as scene,
    ):
        await scene.target(2, evaluate=0)
        assert [before["held-out"]] == list((await scene.operator.until(lambda facts: facts.epoch == 2)).evaluated)
        await scene.open(V0)
        facts = await scene.operator.until(lambda facts: len(facts.evaluated) == 2)
        _, own = facts.evaluated
        assert (before["held-out"], "other-sums", 0, 12) == (facts.evaluated[0], own.name, own.step, own.samples)
        assert [2] == [each.answers for each in own.best_of]
        shown = await scene.page("/v1/evaluations")
        assert ["gone", "held-out", "other-sums"] == sorted(one["name"] for one in shown["evaluations"])
        figures = await scene.figures()
        for name, labels, value in (
            ("", 'set="held-out"', before["held-out"].mean),
            ("", 'set="other-sums"', own.mean),
            ("_best_of", 'answers="2",set="other-sums"', own.best_of[0].mean),
        ):
            assert f"\ncolocate_rollout_evaluation_reward{name}{{{labels}}} {value}\n" in figures
        assert 'set="gone"' not in figures


async def test_a_controller_begins_its_log_with_the_evaluations_before_it(
    job: JobOnDisk, processes: TaskProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    """The log of the one before went with its pod."""
    async with running(job, processes) as scene:
        await scene.target(evaluate=0)
        await scene.gates[0].open(V0)
        facts = await scene.operator.until(lambda facts: facts.evaluated)
    with caplog.at_level("INFO"):
        async with running(job, processes):
            pass
    [begun] = [record for record in caplog.records if record.msg == "rollout controller ready"]
    assert isinstance(begun.args, dict)
    [known] = evaluations_of([{"event": begun.msg, **begun.args}])
    [result] = facts.evaluated
    assert (0, None, result.mean, 8) == (known.step, known.ts, known.mean, known.samples)


async def test_that_line_is_no_longer_however_long_a_job_has_run(
    job: JobOnDisk, processes: TaskProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    """It grew with each evaluation, and what is longer than a container runtime's line is cut in two: no JSON."""
    count = 10_000
    store = Store(job.directory / "state", job_uid=JOB_UID)
    for step in range(count):
        store.record_evaluation(EvaluationResult(step=step, samples=4096, mean=1 / 3, stderr=1 / 3e9, best=2 / 3))
    for number in range(30):  # sets that came and went
        known = EvaluationResult(name=f"set-{number}", step=count, samples=4096, mean=1 / 3, stderr=1 / 3e9, best=2 / 3)
        store.record_evaluation(known)
    await store.flushed()
    store.close()
    with caplog.at_level("INFO"):
        async with running(job, processes):
            pass
    [begun] = [record for record in caplog.records if record.msg == "rollout controller ready"]
    assert len(JsonLines().format(begun)) < 16 * 1024
    assert isinstance(begun.args, dict)
    told = evaluations_of([{"event": begun.msg, **begun.args}])
    assert {f"set-{number}" for number in range(30)} | {"held-out"} == {one.name for one in told}
    steps = [one.step for one in told if one.name == "held-out"]
    assert range(count - len(steps), count) == range(steps[0], count)


VERIFIER_IS_LOST = """
import json, os, pathlib, sys
json.loads(sys.stdin.readline())
lost = pathlib.Path(sys.argv[1])
data = {"value": {"size": 1000, "digest": "x"}}
print(json.dumps({"error": "its data is gone"} if lost.exists() else data), flush=True)
for line in sys.stdin:
    match json.loads(line):
        case {"prompts": [start, count]}:
            made = [(number, f"problem: {number} + 1 =", number % 5 == 0) for number in range(start, start + count)]
            print(json.dumps({"value": made}), flush=True)
        case _:
            lost.touch()
            os._exit(3)
"""


HAS_FIGURES = """
import json, sys
json.loads(sys.stdin.readline())
print(json.dumps({"value": {"size": 1000, "digest": "x"}}), flush=True)
for line in sys.stdin:
    match json.loads(line):
        case {"prompts": [start, count]}:
            made = [(number, f"problem: {number} + 1 =", False) for number in range(start, start + count)]
            print(json.dumps({"value": made}), flush=True)
        case {"score": [index, text]}:
            value = {"reward": index % 3, "figures": {"row": index, "letters": len(text)}}
            print(json.dumps({"value": value}), flush=True)
"""


async def test_figures_of_a_reward_reach_the_batch_and_whoever_looks_at_samples(job: JobOnDisk, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HAS_FIGURES]
    async with (
        task_processes(job.spec.rollout.prompts, tmp_path, command=command) as judges,
        running(job, judges) as scene,
    ):
        await scene.target()
        await scene.open(V0)
        await scene.sealed(1)
        batch = await scene.batch(1)
        samples = {row["id"]: row for row in (await scene.page("/v1/samples?state=sealed"))["samples"]}
    assert [("letters", "row")] * len(batch.headers) == [header.figures for header in batch.headers]
    for columns in batch.columns:
        for place, number in enumerate(columns["sample"].tolist()):
            shown = samples.pop(number)
            letters, row = columns["figures"][place].tolist()
            assert ({"letters": letters, "row": row}, row % 3) == (shown["figures"], shown["reward"])
            assert (shown["prompt_index"], True) == (row, letters > 0)
    assert not samples


ALL_ARE_RIGHT = """
import json, sys
json.loads(sys.stdin.readline())
print(json.dumps({"value": {"size": 1000, "digest": "x"}}), flush=True)
for line in sys.stdin:
    match json.loads(line):
        case {"prompts": [start, count]}:
            made = [(number, f"problem: {number} + 1 =", number % 5 == 0) for number in range(start, start + count)]
            print(json.dumps({"value": made}), flush=True)
        case _:
            print(json.dumps({"value": 1.0}), flush=True)
"""


@pytest.mark.parametrize(("limit", "mean"), [(48, 1.0), (4, 0.0)])
async def test_what_the_limit_cut_short_is_worth_nothing_in_an_evaluation_too(
    tmp_path: Path, limit: int, mean: float
) -> None:
    """Evaluation counts it as training does; no verifier sees it."""
    job = with_rollout(tmp_path, maxResponseTokens=limit)
    command = [sys.executable, "-c", ALL_ARE_RIGHT]
    async with (
        task_processes(job.spec.rollout.prompts, tmp_path, command=command) as right,
        running(job, right) as scene,
    ):
        await scene.target(evaluate=0)
        await scene.open(V0)
        facts = await scene.operator.until(lambda facts: facts.evaluated)
        [result] = facts.evaluated
        assert mean == result.mean
        facts = await scene.sealed(1)
        assert mean == facts.reward_mean


async def test_an_evaluation_asks_for_as_many_responses_as_it_should(tmp_path: Path, processes: TaskProcesses) -> None:
    evaluation = of_one_set(samples=8, responses=3)
    job = JobOnDisk.write(tmp_path, make_spec().model_copy(update={"evaluation": evaluation}))
    async with running(job, processes) as scene:
        await scene.target(evaluate=0)
        await scene.open(V0)
        facts = await scene.operator.until(lambda facts: facts.evaluated)
        [result] = facts.evaluated
        assert 24 == result.samples
        assert result.mean == pytest.approx(result.best), "the fake engine answers alike"
        shown = result.model_dump(mode="json", by_alias=True)
        assert {"evaluations": [shown]} == await scene.page("/v1/evaluations")
        figures = await scene.figures()
        for name, figure in (("", "mean"), ("_stderr", "stderr"), ("_best", "best")):
            assert f'\ncolocate_rollout_evaluation_reward{name}{{set="held-out"}} {shown[figure]}\n' in figures


async def test_an_evaluation_that_nobody_can_score_has_no_result(job: JobOnDisk, tmp_path: Path) -> None:
    """It was told as 0 right answers of 8."""
    command = [sys.executable, "-c", VERIFIER_IS_LOST, str(tmp_path / "lost")]
    prompts = job.spec.rollout.prompts
    async with task_processes(prompts, tmp_path, command=command) as failing, running(job, failing) as scene:
        evaluation = scene.controller._evaluation
        await scene.target(evaluate=0)
        await scene.open(V0)
        await until(lambda: evaluation.problem and evaluation.problem.reason == "EvaluationImpossible")
        await until(lambda: not evaluation._runs)
        facts = await scene.operator.until(lambda facts: facts.problem and "its data is gone" in facts.problem.message)
        assert not facts.evaluated


async def test_an_evaluation_waits_for_an_endpoint_instead_of_counting_its_silence_as_wrong(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    rows = [json.dumps({"prompt": f"problem: {number} + 1 ="}) for number in range(100)]
    (tmp_path / "mine/sums.jsonl").write_text("\n".join(rows))
    reward = {"http": {"url": "http://judge/"}}
    job = with_rollout(tmp_path, prompts={"file": {"claimName": "mine", "path": "sums.jsonl", "reward": reward}})
    judge = SilentAtFirst(20)
    prompts = job.spec.rollout.prompts
    async with task_processes(prompts, tmp_path, endpoints={0: judge}) as own, running(job, own) as scene:
        await scene.target(evaluate=0)
        await scene.open(V0)
        facts = await scene.operator.until(lambda facts: facts.evaluated)
    [result] = facts.evaluated
    assert 1.0 == result.mean


class SilentAtFirst:
    """An endpoint that rewards everything with 1, once it was asked so often in vain."""

    def __init__(self, times: int) -> None:
        self.problem: Problem | None = None
        self._times = times

    async def score(self, prompt: PromptContent, fields: Mapping[str, Any], response: str) -> RewardAnswer:
        self._times -= 1
        if self._times >= 0:
            raise RewardFailed(REWARD_UNAVAILABLE, "no answer")
        return RewardAnswer(reward=1.0)


async def test_an_evaluation_that_a_switch_breaks_is_asked_again(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with running(job, processes) as scene:
        await scene.target(evaluate=0)
        await scene.open(V0, pace=3)
        await scene.generating(8 + 2 * BATCH)
        await scene.close()
        await scene.open(WeightVersion(0, 2))  # the trainers began again, and exported the same step
        facts = await scene.operator.until(lambda facts: facts.evaluated)
        [result] = facts.evaluated
        assert result.samples == 8


async def test_a_restart_loses_nothing_that_was_accepted(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with running(job, processes) as scene:
        await scene.interrupt_all(epoch=7)
    async with running(job, processes) as scene:
        facts = await scene.samples(interrupted=2 * BATCH)
        assert scene.operator.hello is not None
        assert (7, 7) == (facts.epoch, scene.operator.hello.highest_epoch)
        await scene.target(6)
        await scene.operator.until(lambda _: scene.operator.refusals)
        await scene.target(8)
        await scene.open(V1)
        await scene.sealed(1)
        assert {0, 1} == {step for _, _, step in token_rows(await scene.batch(1))}
        facts = await scene.operator.until(lambda facts: facts.epoch == 8)


@pytest.mark.parametrize("ranks", [1, 3])
async def test_a_group_of_another_size_gets_the_batch_that_the_former_one_had(
    job: JobOnDisk, processes: TaskProcesses, ranks: int
) -> None:
    """Both may ask for it meanwhile: each gets its own shards, or an answer that tells it to ask again."""
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0)
        await scene.sealed(1)
        former = await scene.batch(1)
        dealt = replace(await scene.batch(1, shards=ranks), is_dealt_anew=True)
        assert former.groups == dealt.groups
        assert sorted(token_rows(former)) == sorted(token_rows(dealt))
        assert [(shard, ranks) for shard in range(ranks)] == [(each.shard, each.shards) for each in dealt.headers]
        again = replace(await scene.batch(1), is_dealt_anew=True)
        assert sorted(token_rows(former)) == sorted(token_rows(again))
        port = scene.controller.member.ports.data
        assert 400 == (await job.fetch(scene.session, port, f"/v1/batches/1?shard={ranks}&of={ranks}"))[0]
        assert 404 == (await job.fetch(scene.session, port, f"/v1/batches/2?shard=0&of={ranks}"))[0]
        await scene.target(2, trained_step=1)
        await scene.open(V1)
        await scene.sealed(2)


async def test_a_job_with_fewer_replicas_has_every_sample_that_it_had(job: JobOnDisk, processes: TaskProcesses) -> None:
    """A batch that is not trained, what was interrupted, and what is to come."""
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0)
        await scene.sealed(1)
        former = await scene.batch(1)
        await scene.close()
        before = (await scene.samples(running=0, scoring=0)).samples
    fewer = JobOnDisk.write(job.directory, job.spec.model_copy(update={"replicas": 1}))
    async with running(fewer, processes) as scene:
        facts = await scene.operator.until(lambda facts: facts.sealed is not None)
        assert before == facts.samples
        batch = replace(await scene.batch(1, shards=1), is_dealt_anew=True)
        assert 400 == (await fewer.fetch(scene.session, scene.controller.member.ports.data, "/v1/batches/1?shard=1"))[0]
        assert former.groups == batch.groups
        assert sorted(token_rows(former)) == sorted(token_rows(batch))
        assert {(0, 1)} == {(header.shard, header.shards) for header in batch.headers}
        await scene.target(2, trained_step=1)
        await scene.open(V1)
        await scene.sealed(2)
        assert {1} == {header.shards for header in (await scene.batch(2, shards=1)).headers}


async def test_the_last_step_is_the_one_that_the_spec_names_now(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with running(job, processes) as scene:
        await scene.target(last_step=1)
        await scene.open(V0)
        await scene.sealed(1)
        await scene.target(2, trained_step=1, last_step=1)
        await scene.samples(trained=2 * BATCH, running=0, completed=0)
        await scene.target(3, trained_step=1, last_step=2)
        await scene.sealed(2)


async def test_a_job_of_one_pass_trains_each_prompt_once_and_says_with_which_step_it_ends(tmp_path: Path) -> None:
    """It says so after a restart too. The last batch has the groups that are left."""
    few = {"reasoningGym": {"name": "chain_sum", "size": 9, "heldOutPercent": 20}, "passes": 1}
    job = with_rollout(tmp_path, prompts=few, incompleteBatch="Train")
    ended: list[RolloutFacts] = []
    async with task_processes(job.spec.rollout.prompts, tmp_path) as own:
        rows = [row for row in await own.prompts(0, 9) if not row.held_out]
        batches = [[BATCH] * (len(rows) // BATCH), [len(rows) % BATCH]]
        sizes = [size for size in chain.from_iterable(batches) if size]
        assert sizes[-1] < BATCH, "the last one is smaller"
        found = []
        async with running(job, own) as scene:
            for step, size in enumerate(sizes, 1):
                await scene.target(step, trained_step=step - 1)
                await scene.open(WeightVersion(step - 1, 1))
                facts = await scene.sealed(step)
                assert facts.sealed is not None
                assert (size, 2 * size) == (facts.sealed.groups, facts.sealed.samples)
                found.append(await scene.batch(step))
                await scene.close()
            ended.append(await scene.operator.until(lambda facts: facts.last_step is not None))
        async with running(job, own) as scene:
            await scene.target(len(sizes) + 1, trained_step=len(sizes))
            ended.append(await scene.operator.until(lambda facts: facts.trained_step == len(sizes)))
        expected = sorted(job.chat.prompt_ids(row.prompt) for row in rows for _ in range(2) if row.prompt is not None)
    assert expected == sorted(chain.from_iterable(prompts_of(batch) for batch in found))
    assert [len(sizes)] * 2 == [facts.last_step for facts in ended]
    assert {"trained": 2 * len(rows)} == ended[1].samples


async def test_concurrency_and_temperature_are_those_that_the_spec_names_now(
    job: JobOnDisk, processes: TaskProcesses
) -> None:
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0, pace=0)
        await scene.generating(2 * BATCH)
        await scene.target(concurrency=BATCH + 2)
        await scene.generating(2 * (BATCH + 2))
        assert {1.0} == temperatures(scene)
        await scene.close()
        await scene.samples(interrupted=2 * (BATCH + 2))
        await scene.target(concurrency=BATCH + 2, temperature=0.5)
        await scene.open(V0)
        await scene.sealed(1)
        assert {1.0, 0.5} == temperatures(scene)
        assert {0.5} == {header.temperature for header in (await scene.batch(1)).headers}


def temperatures(scene: ControllerScene) -> set[float]:
    return {request["sampling_params"]["temperature"] for gate in scene.gates for request in gate.requests}


async def test_an_evaluation_may_come_later_and_change_for_the_next_one(
    tmp_path: Path, processes: TaskProcesses
) -> None:
    job = JobOnDisk.write(tmp_path, make_spec().model_copy(update={"evaluation": None}))
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0)
        await scene.sealed(1)
        await scene.target(2, evaluate=0, evaluation=of_one_set(samples=4))
        facts = await scene.operator.until(lambda facts: facts.evaluated)
        [result] = facts.evaluated
        assert (0, 4, None) == (result.step, result.samples, result.best)
        await scene.open(V1)
        await scene.target(3, trained_step=1, evaluate=1, evaluation=of_one_set(samples=6, responses=2))
        facts = await scene.operator.until(lambda facts: facts.evaluated and facts.evaluated[0].step == 1)
        [result] = facts.evaluated
        assert 12 == result.samples
        assert result.best is not None


async def test_goal_stop_ends_the_controller(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0, pace=2)
        await scene.generating(2 * BATCH)
        await scene.target(2, goal=Goal.STOP)
        await scene.operator.until(lambda facts: facts.stopped)


async def test_retry_starts_over_with_the_whole_budget(tmp_path: Path, processes: TaskProcesses) -> None:
    job = with_rollout(tmp_path, interruption="Retry")
    async with running(job, processes) as scene:
        await scene.interrupt_all()
        await scene.open(V1)
        await scene.sealed(1)
        assert {1} == {step for _, _, step in token_rows(await scene.batch(1))}
        assert {48} == {
            request["sampling_params"]["max_new_tokens"] for gate in scene.gates for request in gate.requests
        }


@pytest.mark.parametrize("interruption", ["Resume", "Wait"])
async def test_a_resumed_attempt_has_what_is_left_of_the_budget(
    tmp_path: Path, processes: TaskProcesses, interruption: str
) -> None:
    async with running(with_rollout(tmp_path, interruption=interruption), processes, tail=100) as scene:
        await scene.interrupt_all()
        await scene.open(V0)
        await scene.sealed(1)
        batch = await scene.batch(1)
        assert 2 * BATCH * 48 == batch.headers[0].loss_tokens
        assert [1] * (2 * BATCH) == [flag for shard in batch.columns for flag in shard["truncated"].tolist()]
        assert {0.0} == {reward for shard in batch.columns for reward in shard["reward"].tolist()}
        assert {48, 43} == {
            request["sampling_params"]["max_new_tokens"] for gate in scene.gates for request in gate.requests
        }


async def test_a_sample_that_no_batch_can_take_is_discarded_and_replaced(
    tmp_path: Path, processes: TaskProcesses
) -> None:
    """Within the rules of admission it does not come to that; an engine with weights of the past brings it about."""
    job = with_rollout(tmp_path, maxConcurrency=6)
    async with running(job, processes) as scene:
        await scene.target(trained_step=4)
        await scene.open(WeightVersion(3, 1), pace=3)  # which step 5 may train, and step 6 may not
        await scene.generating(4 * BATCH)
        await scene.close()
        await scene.samples(interrupted=4 * BATCH)
        await scene.target(2, trained_step=5)
        await scene.samples(discarded=4 * BATCH, admitted=4 * BATCH)
        await scene.open(WeightVersion(5, 1))
        await scene.sealed(6)
        assert {5} == {step for _, _, step in token_rows(await scene.batch(6))}


async def test_tokens_beyond_the_limit_are_context_where_the_job_says_so(
    tmp_path: Path, processes: TaskProcesses
) -> None:
    job = with_rollout(tmp_path, maxConcurrency=6, atMaxStaleness="Mask")
    async with running(job, processes) as scene:
        await scene.target(trained_step=4)
        await scene.open(WeightVersion(3, 1), pace=3)  # which step 5 may train, and step 6 may not
        await scene.generating(4 * BATCH)
        await scene.close()
        await scene.samples(interrupted=4 * BATCH)
        await scene.target(2, trained_step=5)
        await scene.open(WeightVersion(5, 1))
        await scene.sealed(6)
        batch = await scene.batch(6)
        facts = await scene.samples(sealed=2 * BATCH)
    assert {5} == {step for _, _, step in token_rows(batch)}
    assert len(token_rows(batch)) == batch.headers[0].loss_tokens
    for shard in batch.columns:
        start = 0
        for end in shard["sample_end"].tolist():
            trained = int(shard["loss_mask"][start:end].sum())
            text = job.chat.text(shard["tokens"][start:end].tolist())
            assert trained == len(text.rpartition("assistant\n")[2]) + 1 - 4, (
                "four before the switch, and the end token"
            )
            start = end
    assert "discarded" not in facts.samples


async def test_a_group_that_keeps_failing_is_given_up_and_reported(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with running(job, processes) as scene:
        for gate in scene.gates:
            gate.faults.extend([GateFault.REJECTED] * 100_000)  # more than there is time for
        await scene.target()
        await scene.open(V0)
        facts = await scene.operator.until(lambda facts: facts.problem)
        assert facts.problem is not None
        assert "EngineRejected" == facts.problem.reason
        assert "answered 400 and " in facts.problem.message
        assert "prompt and response are longer than its context" in facts.problem.message
        for gate in scene.gates:
            gate.faults.clear()
        facts = await scene.sealed(1)
        assert facts.samples["discarded"] + facts.samples["failed"] >= 5
        await scene.operator.until(lambda facts: facts.problem is None)


async def test_only_holders_of_the_data_token_get_a_batch(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with (
        running(job, processes) as scene,
        scene.session.get(
            f"https://127.0.0.1:{scene.controller.member.ports.data}/v1/batches/1?shard=0",
            ssl=job.tls.client_context(),
            server_hostname=names.member_server_name(JOB_UID),
        ) as response,
    ):
        assert 401 == response.status


async def test_pages_and_metrics_show_what_there_is(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with running(job, processes) as scene:
        await scene.target()
        await scene.open(V0)
        await scene.sealed(1)
        ports = scene.controller.member.ports
        progress = await scene.page("/v1/progress")
        assert 6 == progress["sealed"]["samples"]
        assert [(gate.name, True, str(V0), "rollout") for gate in scene.gates] == [
            (engine["pod"], engine["open"], engine["version"], engine["holder"]) for engine in progress["engines"]
        ]
        assert [1] == [batch["step"] for batch in (await scene.page("/v1/batches"))["batches"]]
        for host, status in ((f"127.0.0.1:{ports.pages}", 200), ("localhost", 200), ("rebound.example", 403)):
            async with scene.session.get(f"http://127.0.0.1:{ports.pages}/", headers={"Host": host}) as response:
                assert (host, status) == (host, response.status)
        assert (await scene.page("/v1/state"))["hello"]["pod"] == "job-rollout-0-0"
        newest, last = (await scene.page("/v1/samples?state=sealed&limit=2"))["samples"]
        assert ["sealed", "sealed"] == [newest["state"], last["state"]]
        (further,) = (await scene.page(f"/v1/samples?state=sealed&limit=1&text=1&before={last['id']}"))["samples"]
        assert further["id"] < last["id"] < newest["id"]
        assert further["response"].startswith("Answer: "), "out of its batch"
        for url, expected in (
            (f"http://127.0.0.1:{ports.metrics}/metrics", 'colocate_rollout_samples{state="sealed"} 6.0'),
            (f"http://127.0.0.1:{ports.metrics}/metrics", "\ncolocate_rollout_sealed_response_tokens_count 6.0"),
            (f"http://127.0.0.1:{ports.metrics}/metrics", "\ncolocate_rollout_batch_staleness 0.0"),
            (f"http://127.0.0.1:{ports.metrics}/metrics", "\ncolocate_rollout_store_free_bytes "),
            (f"http://127.0.0.1:{ports.metrics}/metrics", "\ncolocate_rollout_staleness_wait_seconds 0.0"),
        ):
            async with scene.session.get(url) as response:
                assert 200 == response.status
                assert expected in await response.text()
        for query in ("state=lost", "limit=-1", "before=x"):
            async with scene.session.get(f"http://127.0.0.1:{ports.pages}/v1/samples?{query}") as response:
                assert 400 == response.status


async def test_who_follows_samples_hears_of_each_and_of_the_end(job: JobOnDisk, processes: TaskProcesses) -> None:
    async with running(job, processes) as scene:
        pages = f"http://127.0.0.1:{scene.controller.member.ports.pages}"
        async with scene.session.get(f"{pages}/v1/samples?follow=true") as response:
            await scene.target()
            await scene.open(V0)
            rows = [json.loads(await response.content.readline()) for _ in range(2 * BATCH)]
            assert [*range(1, 2 * BATCH + 1)] == [row["ended"] for row in rows]
            await scene.sealed(1)
            scene.controller.drain()
            rest = [json.loads(line) for line in (await response.read()).splitlines() if line]
            assert {"completed"} >= {row["state"] for row in rest}


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_each_batch_is_whole_and_each_token_is_accounted_for(
    tmp_path: Path, processes: TaskProcesses, seed: int
) -> None:
    """A job of eight steps with engines and agents that die, switches at any time, faults, and restarts of its own."""
    chance = random.Random(seed)
    limit = chance.choice([0, 1, 2])
    job = with_rollout(tmp_path, maxStaleness=limit, maxConcurrency=BATCH * (limit + 1))
    respond = WorkedSums(job.directory / "model", tail=8)
    seen: list[int] = []
    async with AsyncExitStack() as stack:
        gates = [FakeGate(f"job-gpu-{replica}-0", job.tls, respond) for replica in range(2)]
        for gate in gates:
            await stack.enter_async_context(gate.listening())
        step, epoch = 1, 0
        while step <= 8:
            async with running(job, processes, gates=gates) as scene:
                for _ in range(chance.randrange(2, 12)):
                    epoch += 1
                    await scene.target(epoch, trained_step=step - 1, saved_step=max(0, step - 3))
                    await disturb(scene, chance, WeightVersion(step - 1, 1))
                    sealed = scene.operator.facts.sealed if scene.operator.facts else None
                    if sealed is None or sealed.step < step:
                        continue
                    batch = await scene.batch(step)
                    check(batch, respond, limit)
                    seen += set(batch.groups)
                    await scene.close()
                    step += 1
                    if step > 8:
                        break
        assert len(seen) == len(set(seen)) == 8 * BATCH


async def disturb(scene: ControllerScene, chance: random.Random, version: WeightVersion) -> None:
    """One thing that happens to a job, and the time in which something may come of it."""
    for gate in scene.gates:
        match chance.choice(["go", "go", "go", "slow", "close", "crash engine", "crash agent", "fault"]):
            case "go":
                await gate.open(version)
                await gate.release()
            case "slow":
                await gate.open(version, pace=chance.randrange(1, 9))
            case "close":
                await gate.close()
            case "crash engine":
                await gate.crash_engine()
            case "crash agent":
                await gate.crash_agent()
                await gate.start()
            case _:
                gate.faults.append(chance.choice(list(GateFault)))
                await gate.open(version)
    with contextlib.suppress(AssertionError):
        await scene.operator.until(lambda facts: facts.sealed and facts.sealed.step > version.step, deadline_s=0.3)


def check(batch: Batch, respond: WorkedSums, limit: int) -> None:
    """Every response is the one that its prompt has, and every token says truly which weights made it."""
    step = batch.headers[0].step
    assert 2 * BATCH == len(batch.groups)
    assert 2 == min(batch.groups.count(group) for group in batch.groups)
    for shard in batch.columns:
        start = 0
        for end in shard["sample_end"].tolist():
            whole, so_far = respond(shard["tokens"][start:end].tolist())
            assert list(whole) == list(so_far)
            length = len(so_far)
            assert [1] * length == shard["loss_mask"][end - length : end].tolist()
            for token, logp, made_by in zip(
                so_far,
                shard["behaviour_logp"][end - length : end],
                shard["token_step"][end - length : end],
                strict=True,
            ):
                assert logp == pytest.approx(logp_of(WeightVersion(int(made_by), 1), token), abs=1e-6)
                assert 0 <= step - 1 - made_by <= limit
            start = end


# ------------------------------------------------------------------------------------------------- one side alone
async def test_a_job_that_only_records_seals_batch_after_batch_however_old_its_tokens(
    tmp_path: Path, processes: TaskProcesses
) -> None:
    """maxStaleness is 1, and the weights are those that the job begins with for ever."""
    spec = make_spec(minRolloutSeconds=3600).model_copy(update={"mode": Mode.ROLLOUT_ONLY, "steps": 5})
    job = JobOnDisk.write(tmp_path, spec)
    for _ in range(2):  # a restart goes on with nothing
        async with running(job, processes) as scene:
            await scene.target()
            await scene.open(V0)
            facts = await scene.sealed(5)
            assert (0, {"sealed": 5 * 2 * BATCH}) == (facts.trained_step, facts.samples)
            for step in range(1, 6):
                batch = await scene.batch(step)
                rows = token_rows(batch)
                assert batch.headers[0].loss_tokens == len(rows) > 0
                assert {0} == {made_by for _, _, made_by in rows}
                responses = [int(shard["loss_mask"].sum()) for shard in batch.columns]
                assert sum(responses) == len(rows), "no token is masked for its age"


async def test_a_job_that_only_trains_serves_what_another_one_has_recorded(
    tmp_path: Path, processes: TaskProcesses
) -> None:
    recording = JobOnDisk.write(
        tmp_path / "first", make_spec().model_copy(update={"mode": Mode.ROLLOUT_ONLY, "steps": 3})
    )
    async with running(recording, processes) as scene:
        await scene.target()
        await scene.open(V0)
        await scene.sealed(3)
        recorded = [await scene.batch(step) for step in (1, 2, 3)]
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "recorded").symlink_to(tmp_path / "first" / "state")
    alone = {"mode": Mode.TRAIN_ONLY, "recorded": Recording(claim_name="store"), "evaluation": None, "steps": 3}
    job = JobOnDisk.write(tmp_path / "second", make_spec().model_copy(update=alone))
    nobody = SilentProcesses(job.spec, job.directory)
    async with running(job, nobody) as scene:
        for step, before in enumerate(recorded, 1):
            await scene.target(trained_step=step - 1)
            facts = await scene.sealed(step)
            batch = await scene.batch(step)
            assert before.headers == batch.headers
            for known, found in zip(before.columns, batch.columns, strict=True):
                assert {name: known[name].tobytes() for name in known} == {
                    name: found[name].tobytes() for name in found
                }
            assert {"sealed": 6, "trained": 6 * (step - 1)} == {"trained": 0} | facts.samples
            assert facts.problem is None
        assert [0, 0] == [len(gate.requests) for gate in scene.gates]
        assert Interface(await scene.page("/openapi.json")).routes == routes_of(scene.controller)


@pytest.mark.parametrize("with_samples", [False, True])
async def test_a_job_goes_on_from_a_former_one_in_the_order_of_its_prompts(
    tmp_path: Path, processes: TaskProcesses, with_samples: bool
) -> None:
    """Its checkpoint is of step 1, and batch 2 is sealed: that is trained again, or others are made of its prompts."""
    first = JobOnDisk.write(tmp_path / "first", make_spec(maxStaleness=0))
    async with running(first, processes) as scene:
        await scene.target()
        await scene.open(V0)
        await scene.sealed(1)
        sealed = [await scene.batch(1)]
        await scene.target(2, trained_step=1)
        await scene.open(V1)
        before = await scene.sealed(2)
        sealed.append(await scene.batch(2))
    (position,) = {header.prompt_position for header in sealed[0].headers}
    former = tmp_path / "second" / "former" / checkpoint_name(1)
    former.mkdir(parents=True)
    contents = Contents(format=FORMAT, step=1, digests={}, prompt_position=position)
    (former / CONTENTS).write_text(contents.model_dump_json())
    (tmp_path / "second" / "former-samples").symlink_to(tmp_path / "first" / "state")
    restore = RestoreFrom(claim_name="old", samples=FormerSamples(claim_name="old") if with_samples else None)
    second = JobOnDisk.write(
        tmp_path / "second", make_spec(maxStaleness=0).model_copy(update={"restore_from": restore})
    )
    async with running(second, processes) as scene:
        facts = await scene.operator.until(lambda facts: facts.began_at is not None)
        assert (1, 1) == (facts.began_at, facts.trained_step)
        assert begun(facts) == (begun(before) if with_samples else {})
        await scene.target(trained_step=1)
        await scene.open(V1)
        await scene.sealed(2)
        again = await scene.batch(2)
    prompts = [prompts_of(batch) for batch in (*sealed, again)]
    assert prompts[1] == prompts[2]
    assert not set(prompts[0]) & set(prompts[1]), "none comes twice, and none is left out"
    assert with_samples == (again.groups == sealed[1].groups)


def begun(facts: RolloutFacts) -> dict[str, int]:
    """The samples by state, but for those that wait for their first engine: a store makes them on its own."""
    return {state: count for state, count in facts.samples.items() if state != "admitted"}


def prompts_of(batch: Batch) -> list[tuple[int, ...]]:
    """The prompt of each sample, sorted."""
    found = []
    for shard in batch.columns:
        starts = np.concatenate([[0], shard["sample_end"][:-1]])
        for start, length in zip(starts.tolist(), shard["prompt_tokens"].tolist(), strict=True):
            found.append(tuple(shard["tokens"][start : start + length].tolist()))
    return sorted(found)
