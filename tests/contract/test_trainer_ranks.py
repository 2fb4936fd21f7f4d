"""Ranks of one group: they compute what one rank would, refuse together, and none outlives the group by much."""

from __future__ import annotations

import errno
import json
import random
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from contract.trainer_in_process import RankInProcess
from safetensors.torch import load_file

from colocated_rl_api.interfaces import interface_towards
from colocated_rl_trainer.conformance.ranks import TrainerGroup, TrainerKind, UnexpectedStatus
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.protocol.rank import Refused
from colocated_rl_trainer.state.group import (
    Collectives,
    GroupLost,
    _waiting_for_peers,
    form_group,
)
from fakes.tiny_model import VOCABULARY, write_tiny_model

CONFIG: dict[str, object] = {"learningRate": 1e-2, "minibatches": 2, "microBatchTokens": 60, "threads": 1}
DEADLINE_S = 300.0  # torch and the model, ten seconds of a processor that others may share
SAMPLES = 24


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> TrainerKind:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    return TrainerKind("grpo", [sys.executable, "-m", "colocated_rl_trainer"], model, CONFIG)


@dataclass
class Pair:
    """Two ranks, and one rank that does the same steps."""

    two: TrainerGroup
    one: RankInProcess

    def train(self, samples: list[Example], split: list[int]) -> tuple[Mapping[str, float], list[Mapping[str, float]]]:
        """The metrics of the one, and of each of the two."""
        files = write_shards(self.two.folder, samples, step=self.one.step + 1, split=split)
        alone = self.one.train(samples)
        return alone, [status.metrics for status in self.two.train(self.one.step, files)]


@pytest.fixture(scope="module")
def pair(kind: TrainerKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with TrainerGroup(kind, tmp_path_factory.mktemp("two"), size=2) as two:
        one = RankInProcess(tmp_path_factory.mktemp("one"), kind.model, **CONFIG)
        two.wait_loaded()
        two.onload()
        yield Pair(two, one)


def make_samples(seed: int, *, same_reward: bool = False) -> list[Example]:
    chance = random.Random(seed)
    samples = []
    for number in range(SAMPLES):
        prompt, response = ([chance.randrange(VOCABULARY) for _ in range(chance.randint(2, 8))] for _ in range(2))
        logp = [-chance.uniform(2.5, 5.0) for _ in response]
        samples.append(Example(prompt, response, logp, 0.5 if same_reward else chance.random(), number // 4, seed - 1))
    return samples


@pytest.mark.parametrize(
    "split",
    [
        [number % 2 for number in range(SAMPLES)],
        [number // 12 for number in range(SAMPLES)],
        [int(number >= 3) for number in range(SAMPLES)],
        [1] * SAMPLES,
    ],
    ids=["in turn", "halves", "uneven", "all on one"],
)
def test_the_split_of_a_batch_changes_nothing_but_rounding(pair: Pair, split: list[int]) -> None:
    begin = pair.one.weights

    alone, together = pair.train(make_samples(pair.one.step + 1), split)

    assert together[0] == together[1]
    assert {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in alone.items()} == together[0]
    exported = [load_file(folder / "model.safetensors") for folder in pair.two.export(pair.one.step)]
    for name, expected in pair.one.weights.items():
        assert torch.equal(exported[0][name], exported[1][name]), name
        moved = (expected - begin[name]).norm()
        assert (exported[0][name] - expected).norm() < 1e-2 * moved, name


def test_batch_that_teaches_nothing_ends_its_step_on_every_rank(pair: Pair) -> None:
    _, together = pair.train(make_samples(1, same_reward=True), [number % 2 for number in range(SAMPLES)])

    assert [0.0, 0.0] == [metrics["updates"] for metrics in together]
    assert {pair.one.step} == {rank.status.step for rank in pair.two.ranks}


def test_a_rank_that_waits_for_a_peer_in_a_collective_says_where_until_the_peer_is_back(pair: Pair) -> None:
    split = [number % 2 for number in range(SAMPLES)]
    pair.train(make_samples(1), split)
    waiting, stopped = pair.two.ranks
    stopped.process.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            step = pool.submit(pair.train, make_samples(2), split)
            standstill = waiting.wait_until(lambda status: status.standstill is not None).standstill
            stopped.process.send_signal(signal.SIGCONT)
            _, together = step.result(DEADLINE_S)
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    assert standstill is not None
    assert standstill.usual_s is not None
    assert "(distributed_c10d.py:" in standstill.where
    assert "train (loop.py:" in standstill.where
    assert together[0] == together[1]
    assert waiting.status.standstill is None


@pytest.mark.parametrize("state", ["Sharded", pytest.param("Replicated", marks=pytest.mark.release)])
def test_updates_whose_gradient_is_not_finite_are_skipped_on_every_rank_up_to_a_limit(
    kind: TrainerKind, tmp_path: Path, state: str
) -> None:
    """Such a batch ended the trainer, which came back with the same batch, until the job had no restart left."""
    config = CONFIG | {"trainingState": state, "advantage": "Mean", "nonFiniteGradient": "Skip", "maxSkippedUpdates": 3}
    with TrainerGroup(replace(kind, config=config), tmp_path, size=2) as two:
        two.wait_loaded()
        two.onload()

        def train(step: int, *, of_size: float = 1.0) -> Mapping[str, float]:
            samples = [replace(sample, reward=sample.reward * of_size) for sample in make_samples(step)]
            split = [number % 2 for number in range(SAMPLES)]
            first, second = two.train(step, write_shards(tmp_path, samples, step=step, split=split))
            assert first.metrics == second.metrics
            return first.metrics

        def exported(step: int) -> Mapping[str, torch.Tensor]:
            return load_file(two.export(step)[0] / "model.safetensors")

        assert (2, 0) == (train(1)["updates"], two.ranks[0].status.metrics["skipped_updates"])
        before = exported(1)
        assert (0, 2) == (train(2, of_size=1e30)["updates"], two.ranks[0].status.metrics["skipped_updates"])
        after = exported(2)
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name
        assert (2, 0) == (train(3)["updates"], two.ranks[0].status.metrics["skipped_updates"])
        assert any(not torch.equal(tensor, after[name]) for name, tensor in exported(3).items())
        assert 2 == train(4, of_size=1e30)["skipped_updates"]
        with pytest.raises(UnexpectedStatus, match="NotRetriable"):
            train(5, of_size=1e30)


def test_shard_that_one_rank_cannot_read_is_refused_by_all_and_can_be_sent_again(pair: Pair) -> None:
    step = pair.one.step + 1
    files = write_shards(
        pair.two.folder, make_samples(step), step=step, split=[number % 2 for number in range(SAMPLES)]
    )
    torn = pair.two.folder / "torn"
    torn.write_bytes(files[1].read_bytes()[:-4])

    def refusal(number: int) -> UnexpectedStatus:
        with pytest.raises(UnexpectedStatus) as refused:
            pair.two.ranks[number].train(step, [files[0], torn][number])
        return refused.value

    refusals = pair.two.all(lambda number, _: refusal(number))

    assert ["PeerRefused", "BadShard"] == [refused.error for refused in refusals]
    assert "rank 1: shard" in refusals[0].message
    assert [(step - 1, False)] * 2 == [(rank.status.step, rank.status.dirty) for rank in pair.two.ranks]
    pair.one.train(make_samples(step))
    assert [step] * 2 == [status.step for status in pair.two.train(step, files)]


def test_no_rank_calls_a_checkpoint_durable_before_it_is_written(pair: Pair) -> None:
    step = pair.one.step
    early = threading.Thread(target=lambda: pair.two.ranks[1].save(step))
    early.start()

    assert step != pair.two.ranks[1].status.saved
    pair.two.ranks[0].save(step)
    early.join()

    assert [step] * 2 == [rank.status.saved for rank in pair.two.ranks]


def test_rank_whose_peer_is_gone_ends_at_once_and_says_why(pair: Pair) -> None:
    """The last test of the pair."""
    step = pair.one.step + 1
    files = write_shards(
        pair.two.folder, make_samples(step), step=step, split=[number % 2 for number in range(SAMPLES)]
    )
    left, lost = pair.two.ranks
    lost.end()

    with pytest.raises(UnexpectedStatus) as refused:
        left.train(step, files[0])

    assert "GroupLost: a peer was lost" in refused.value.message
    assert 1 == left.process.wait(DEADLINE_S)
    assert "GroupLost" in left.events("trainer failed, its process ends")[0]["reason"]


def test_rank_that_nobody_joins_gives_up_at_its_deadline_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in ("GLOO", "NCCL"):  # what a rank sets for its own process
        monkeypatch.setenv(f"{backend}_SOCKET_IFNAME", "lo")

    with pytest.raises(
        GroupLost, match=r"rank 0 of 2 found no group .* within 1 s \(spec\.switch\.trainerStartSeconds\)"
    ):
        form_group(rank=0, size=2, address="127.0.0.1", port=0, device=torch.device("cpu"), start_s=1, progress_s=1)


def test_config_that_makes_no_sense_ends_the_trainer_with_one_clear_line(kind: TrainerKind, tmp_path: Path) -> None:
    wrong = TrainerKind(kind.name, kind.command, kind.model, {"learnRate": 1e-3})
    with TrainerGroup(wrong, tmp_path, size=1) as group:
        assert 2 == group.ranks[0].process.wait(DEADLINE_S)

        (line,) = group.ranks[0].events("trainer start failed")
        assert "unknown key learnRate in spec.trainer.config, did you mean learningRate?" in line["reason"]


def test_news_that_does_not_come_is_not_waited_for_beyond_the_deadline() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = Collectives(rank=1, size=2, store=store)

    done: list[str] = []

    with pytest.raises(Refused, match="rank 0 has not saved step 3: ask again"):
        group.once("saved step 3", lambda: done.append("by 1"), within_s=0.05)
    Collectives(rank=0, size=2, store=store).once("saved step 3", lambda: done.append("by 0"), within_s=DEADLINE_S)
    group.once("saved step 3", lambda: done.append("by 1"), within_s=DEADLINE_S)

    assert ["by 0"] == done


def test_failure_of_the_one_that_does_it_is_reported_to_those_who_wait_and_is_not_the_last_word() -> None:
    """They waited for the whole deadline, and so did whoever asked them all."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, other, late = (Collectives(rank=rank, size=3, store=store) for rank in range(3))

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        first.once("saved step 3", full, within_s=DEADLINE_S)
    with pytest.raises(Refused, match=r"rank 0 has not saved step 3: \[Errno 28\] No space left on device"):
        other.once("saved step 3", lambda: None, within_s=DEADLINE_S)

    with pytest.raises(Refused, match="ask again"):  # the next try has not ended, so the last one is not told again
        other.once("saved step 3", lambda: None, within_s=0.05)
    first.once("saved step 3", lambda: None, within_s=DEADLINE_S)
    for rank in (other, late):
        rank.once("saved step 3", lambda: None, within_s=DEADLINE_S)


def test_rank_without_memory_does_not_blame_its_peers() -> None:
    """torch's error is a RuntimeError, as those of a lost peer are."""
    with pytest.raises(torch.OutOfMemoryError), _waiting_for_peers("sum"):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("address", ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])])
def test_interface_is_the_one_that_leads_to_the_group(address: str) -> None:
    """Gloo's own choice is what the host's name resolves to: in a pod often loopback, or nothing."""
    assert "lo" == interface_towards(address)


def test_group_that_no_route_leads_to_is_named() -> None:
    with pytest.raises(GroupLost, match=r"no-such-host\.invalid"):
        form_group(
            rank=0, size=2, address="no-such-host.invalid", port=1, device=torch.device("cpu"), start_s=1, progress_s=1
        )


def test_log_lines_have_the_fields_of_every_process(pair: Pair) -> None:
    (first, *_) = pair.two.ranks[1].events("step trained")

    assert ("trainer", "sums", 1, 1, 1) == (first["role"], first["job"], first["rank"], first["lineage"], first["step"])
    assert 0 <= first["took_s"]
    assert json.dumps(first["metrics"])
