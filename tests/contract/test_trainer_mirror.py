"""Between checkpoints the state is in the memory of two pods: whoever is lost, no finished step is done again.

Three pods with a rank each, and no checkpoint on the volume, so a run that goes back has to begin with the model. The
tests do what agents and operator do: a rank that dies takes its lineage with it, and the memory of a lost pod is gone.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.trainer_in_process import sealed_batches
from contract.trainer_ranks_in_process import UnwatchedTrainer, in_ranks
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from colocated_rl_api.names import PromptPosition
from colocated_rl_api.trainer_wire import TrainerStatus
from colocated_rl_cli.evidence.records import read_line
from colocated_rl_trainer.conformance import ranks
from colocated_rl_trainer.conformance.ranks import RankLost, TrainerGroup, TrainerKind, UnexpectedStatus
from colocated_rl_trainer.state.mirror import Mirrors
from fakes.tiny_model import write_tiny_model
from fakes.watched_trainer import OF_MIRRORS, fork

PODS, STEPS = 3, 3
CONFIG: dict[str, object] = {"learningRate": 1e-2, "minibatches": 2, "microBatchTokens": 80, "threads": 1}
Weights = dict[str, torch.Tensor]
OF_EITHER = (  # of a dense model and of a mixture of experts
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "eos_token_id", "pad_token_id"),
)


class TrainersOfJob:
    """The trainers of a job, over its lineages."""

    def __init__(self, folder: Path, model: Path, batches: Sequence[Sequence[Path]], *, state: str = "Sharded") -> None:
        self.folder = folder
        self.folder.mkdir()
        self.kind = TrainerKind("grpo", [], model, {**CONFIG, "trainingState": state})
        self.batches = batches
        self.lineage = 0

    def start(self, *, die: tuple[int, str, int] | None = None, size: int = PODS) -> TrainerGroup:
        self.lineage += 1
        launch = partial(fork, die=die)
        return TrainerGroup(self.kind, self.folder, size=size, lineage=self.lineage, launch=launch, mirrors=True)

    def train(self, group: TrainerGroup, step: int) -> None:
        group.onload()
        group.train(step, self.batches[step - 1])
        group.offload()

    def keep_the_first_step(self) -> None:
        with self.start() as group:
            group.wait_loaded()
            self.train(group, 1)
            group.mirror(1)

    def finish(self, group: TrainerGroup, *, after: int) -> Weights:
        """The weights of the last step."""
        for step in range(after + 1, STEPS + 1):
            self.train(group, step)
        group.onload()
        return load_file(group.export(STEPS)[0] / "model.safetensors")

    def lose(self, *pods: int) -> None:
        for pod in pods:
            shutil.rmtree(self.folder / f"pod-{pod}/mirrors")

    def asks(self) -> int:
        """Bytes that the newest trainers want their memory between checkpoints to have."""
        log = (self.folder / f"rank-1-lineage-{self.lineage}.log").read_text().splitlines()
        [asked] = {line["mirrors_bytes"] for line in map(read_line, log) if line and "mirrors_bytes" in line}
        return int(asked)

    def files(self, pod: int) -> list[str]:
        return sorted(file.name for file in (self.folder / f"pod-{pod}/mirrors").iterdir())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[list[Path]]:
    return sealed_batches(tmp_path_factory.mktemp("batches"), steps=STEPS, split=PODS)


def run_undisturbed(folder: Path, model: Path, batches: Sequence[Sequence[Path]], state: str) -> Weights:
    job = TrainersOfJob(folder, model, batches, state=state)
    with job.start() as group:
        group.wait_loaded()
        return job.finish(group, after=0)


@pytest.mark.parametrize(
    ("state", "lost"),
    [pytest.param("Sharded", (), marks=pytest.mark.release), ("Sharded", (0,)), ("Replicated", (2,))],
    ids=["no pod", "first pod", "last pod, each has all"],
)
def test_trainers_go_on_from_the_memory_of_the_pods_that_are_left(
    model: Path, batches: list[list[Path]], tmp_path: Path, state: str, lost: tuple[int, ...]
) -> None:
    """They go on to the bits of the undisturbed run, and may lose another pod after that."""
    job = TrainersOfJob(tmp_path / "job", model, batches, state=state)
    undisturbed = run_undisturbed(tmp_path / "undisturbed", model, batches, state)
    with job.start() as group:
        group.wait_loaded()
        for step in (1, 2):
            job.train(group, step)
            assert {(step, "", 0)} == {(each.mirrored, each.mirror_fault, each.saved) for each in group.mirror(step)}
    job.lose(*lost)
    with job.start() as group:
        assert {(2, 0, None)} == {(each.step, each.saved, each.mirrored) for each in group.wait_loaded()}
        group.mirror(2)
    job.lose(1)
    with job.start() as group:
        assert {2} == steps(group.wait_loaded())
        weights = job.finish(group, after=2)
    assert undisturbed.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in undisturbed.items())


def test_both_pods_that_have_a_part_take_it_with_them(model: Path, batches: list[list[Path]], tmp_path: Path) -> None:
    job = TrainersOfJob(tmp_path / "job", model, batches)
    job.keep_the_first_step()
    job.lose(1, 2)
    with job.start() as group:
        assert {0} == steps(group.wait_loaded())


@pytest.mark.parametrize("place", OF_MIRRORS)
def test_a_rank_that_is_killed_while_a_step_is_kept_leaves_it_or_the_one_before(
    model: Path, batches: list[list[Path]], tmp_path: Path, place: str
) -> None:
    job = TrainersOfJob(tmp_path / "job", model, batches)
    with job.start(die=(1, place, 2)) as group:
        group.wait_loaded()
        job.train(group, 1)
        group.mirror(1)
        job.train(group, 2)
        with pytest.raises((UnexpectedStatus, RankLost, OSError)):
            group.mirror(2)
    with job.start() as group:
        expected = {"writing": (1,), "mirrored": (2,)}.get(place, (1, 2))
        [found] = steps(group.wait_loaded())
        assert found in expected
        assert 2 * [found] == [int(name.split("-")[1]) for name in job.files(0)], "a draft, or files of another step"


@pytest.mark.parametrize("state", ["Sharded", pytest.param("Replicated", marks=pytest.mark.release)])
def test_a_newer_checkpoint_counts_more_and_other_ranks_than_kept_it_go_back_to_one(
    model: Path, batches: list[list[Path]], tmp_path: Path, state: str
) -> None:
    """Ranks of any number go on from a state that each of them had as a whole."""
    job = TrainersOfJob(tmp_path / "job", model, batches, state=state)
    with job.start() as group:
        group.wait_loaded()
        job.train(group, 1)
        group.mirror(1)
        job.train(group, 2)
        group.save(2)
    with job.start() as group:
        assert {(2, 2)} == {(each.step, each.saved) for each in group.wait_loaded()}
        job.train(group, 3)
        group.mirror(3)
    with job.start(size=1) as group:
        assert {(2 if state == "Sharded" else 3, 2)} == {(each.step, each.saved) for each in group.wait_loaded()}


@pytest.mark.parametrize(("pods", "step"), [("1", 1), ("*", 0)], ids=["in one pod", "in both"])
def test_a_part_that_has_changed_is_not_read(
    model: Path, batches: list[list[Path]], tmp_path: Path, pods: str, step: int
) -> None:
    """It comes from the other pod that has it: the whole step was dropped."""
    job = TrainersOfJob(tmp_path / "job", model, batches)
    job.keep_the_first_step()
    for file in job.folder.glob(f"pod-{pods}/mirrors/*.1-of-3.*"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with job.start() as group:
        assert {step} == steps(group.wait_loaded())
    assert "mirror damaged" in (job.folder / "rank-0-lineage-2.log").read_text()


def test_a_step_that_can_not_be_kept_on_one_pod_is_kept_on_none_and_holds_up_nobody(
    model: Path, batches: list[list[Path]], tmp_path: Path
) -> None:
    job = TrainersOfJob(tmp_path / "job", model, batches)
    with job.start() as group:
        group.wait_loaded()
        job.train(group, 1)
        group.mirror(1)
        kept = [job.files(pod) for pod in range(PODS)]
        moved = (job.folder / "pod-1/mirrors").rename(tmp_path / "moved")
        job.train(group, 2)
        found = group.mirror(2)
        assert {2} == {each.mirrored for each in found}
        assert ["rank 1", "mirror not written", "rank 1"] == [each.mirror_fault.partition(":")[0] for each in found]
        moved.rename(job.folder / "pod-1/mirrors")
        assert kept == [job.files(pod) for pod in range(PODS)]
        job.train(group, 3)
        assert {""} == {each.mirror_fault for each in group.mirror(3)}


def test_a_volume_of_the_size_that_the_start_accepts_takes_two_steps(batches: list[list[Path]], tmp_path: Path) -> None:
    """Ranks divide four experts by whole ones, so one of three has twice as much as the others."""
    model = write_tiny_model(tmp_path / "model")
    small = AutoConfig.from_pretrained(model).to_dict()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 2048}
    mixture = Qwen3MoeConfig(**{name: small[name] for name in OF_EITHER}, **experts)
    AutoModelForCausalLM.from_config(mixture).save_pretrained(model)
    job = TrainersOfJob(tmp_path / "job", model, batches)
    job.keep_the_first_step()
    takes = [
        2 * sum(file.stat().st_size for file in (job.folder / f"pod-{pod}/mirrors").iterdir()) for pod in range(PODS)
    ]
    assert max(takes) <= job.asks()
    assert 1.5 * min(takes) < max(takes)


def test_fewer_pods_go_on_where_memory_was_made_for_all(
    model: Path, batches: list[list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their larger parts may find no room, which ends no trainer: memory only spares a repetition."""
    job, whole = TrainersOfJob(tmp_path / "job", model, batches), ranks.job_file
    with job.start() as group:
        group.wait_loaded()
        job.train(group, 1)
        group.save(1)

    def made_for_all(**options: Any) -> dict[str, Any]:
        spec: dict[str, Any] = {"replicas": PODS, "elasticPolicy": {"minReplicas": 2}}
        made: dict[str, Any] = whole(**options)
        made["spec"] |= spec
        made["spec"]["checkpoint"]["inMemory"]["sizeLimit"] = str(asked)
        return made

    asked = job.asks()
    monkeypatch.setattr(ranks, "job_file", made_for_all)
    with job.start(size=2) as group:
        assert {1} == steps(group.wait_loaded())
    assert asked == job.asks(), "no more than there is"


@pytest.mark.parametrize(
    ("in_pod", "lost"), [(2, (1,)), (1, (1, 2))], ids=["two pods of two ranks", "side by side on one node"]
)
def test_copies_are_in_a_pod_half_of_the_group_away(
    model: Path, tmp_path: Path, in_pod: int, lost: tuple[int, ...]
) -> None:
    """One part is larger than one message, and another is empty."""
    lose = partial(keep_and_lose_pods, in_pod=in_pod, lost=lost)
    assert 4 * [[True, True, 7]] == in_ranks(4, tmp_path, model, lose, in_pod=in_pod)


def keep_and_lose_pods(trainer: UnwatchedTrainer, *, in_pod: int, lost: tuple[int, ...]) -> list[object]:
    rank, folder = trainer.rank, tmp_folder(trainer, trainer.rank // in_pod)
    sizes = {"large": 20_000_000 if rank == 3 else 5, "empty": 0 if rank == 1 else 3}
    kept = {name: torch.arange(size) + rank for name, size in sizes.items()}
    mirrors = Mirrors(folder, trainer.group, lineage=1, ranks_in_pod=in_pod, is_divided=True)
    mirrors.keep(7, kept, prompt_position=PromptPosition(160))
    trainer.group.led(lambda: [shutil.rmtree(tmp_folder(trainer, pod)) for pod in lost])  # type: ignore[func-returns-value]
    trainer.group.each(lambda: folder.mkdir(exist_ok=True))
    found = mirrors.newest(after=6)
    assert found is not None
    read = {name: torch.zeros_like(tensor) for name, tensor in kept.items()}
    assert 160 == mirrors.read(found, read)
    assert mirrors.newest(after=7) is None
    return [*(torch.equal(read[name], kept[name]) for name in kept), found.step]


def tmp_folder(trainer: UnwatchedTrainer, pod: int) -> Path:
    folder = trainer.folder / f"mirrors-{pod}"
    folder.mkdir(exist_ok=True)
    return folder


def steps(statuses: Collection[TrainerStatus]) -> set[int | None]:
    return {status.step for status in statuses}
