"""Whatever rank is killed at whatever place: the run goes on to the parameters of the undisturbed one, bit for bit.

A recorded sequence of sealed batches; two ranks of a pod; the tests do what agents and operator do: a rank that dies
takes its lineage with it, the next one loads what was saved and does the steps since then again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from contract.trainer_in_process import sealed_batches
from safetensors.torch import load_file

from colocated_rl_api.weights import MANIFEST
from colocated_rl_trainer.conformance.ranks import (
    Launch,
    RankLost,
    TrainerGroup,
    TrainerKind,
    UnexpectedStatus,
)
from fakes.tiny_model import write_tiny_model
from fakes.watched_trainer import PLACES, fork

RANKS, STEPS, EVERY, KEEP = 2, 5, 2, 2
FIRST = ("load", "dirty", "exporting", "saving")  # the places of which most can go wrong
CONFIG: dict[str, object] = {
    "learningRate": 1e-2,
    "minibatches": 2,
    "microBatchTokens": 80,
    "threads": 1,
    "warmupSteps": 3,
    "klCoefficient": 0.1,
}
Weights = dict[str, torch.Tensor]


class Run:
    """A job's trainers from step 0 to the last, over as many lineages as it takes."""

    def __init__(
        self, folder: Path, kind: TrainerKind, batches: Sequence[Sequence[Path]], *, former: Path | None = None
    ) -> None:
        self.folder = folder
        self.former = former
        self.folder.mkdir()
        self.kind = kind
        self.batches = batches
        self.lineage = 0
        self.replay_from = 0
        self.trained: list[int] = []  # each step that was asked for, also again

    def to_the_end(self, *, die: tuple[int, str, int] | None = None, harm: int | None = None) -> Weights:
        """Train to the last step.

        die: in the first lineage. harm: a step at whose checkpoint, once saved, all ranks end and it is damaged.
        """
        while True:
            self.lineage += 1
            dies = die if self.lineage == 1 else None

            def launch(environment: dict[str, str], log: Path, dies: tuple[int, str, int] | None = dies) -> Launch:
                return fork(environment, log, die=dies)

            with TrainerGroup(
                self.kind,
                self.folder,
                size=RANKS,
                lineage=self.lineage,
                keep=KEEP,
                launch=launch,
                former=self.former,
                in_one_pod=True,
            ) as group:
                try:
                    return self._climb(group, harm=harm if self.lineage == 1 else None)
                except (UnexpectedStatus, OSError, Lost):
                    continue

    def _climb(self, group: TrainerGroup, *, harm: int | None) -> Weights:
        loaded = self._load(group)
        self.replay_from = min(status.replay_from or 0 for status in (rank.status for rank in group.ranks))
        exported: list[Path] = []
        for step in range(loaded, STEPS + 1):
            group.onload()
            if step > loaded:
                assert step > self.replay_from, f"the batch of step {step} is gone"
                self.trained.append(step)
                group.train(step, self.batches[step - 1])
            exported = group.export(step)
            group.offload()
            if step and step % EVERY == 0:
                saved = group.save(step, KEEP)
                self.replay_from = max(self.replay_from, min(status.replay_from or 0 for status in saved))
                if step == harm:
                    (group.checkpoints / f"step-{step:08d}" / "__1_0.distcp").write_bytes(b"damaged")
                    raise Lost
        return load_file(exported[0] / "model.safetensors")

    def _load(self, group: TrainerGroup) -> int:
        """The step that all stand at."""
        try:
            (step,) = {status.step for status in group.wait_loaded()}
        except RankLost as error:
            raise Lost(str(error)) from error
        assert step is not None
        return step


class Lost(Exception):
    """The ranks of a lineage end."""


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> TrainerKind:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    return TrainerKind("grpo", [], model, CONFIG, has_reference=True)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[list[Path]]:
    return sealed_batches(tmp_path_factory.mktemp("batches"), steps=STEPS, split=RANKS)


@pytest.fixture(scope="module")
def undisturbed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed") / "run"


@pytest.fixture(scope="module")
def undisturbed(kind: TrainerKind, batches: list[list[Path]], undisturbed_folder: Path) -> Iterator[Weights]:
    run = Run(undisturbed_folder, kind, batches)
    yield run.to_the_end()
    assert 1 == run.lineage


@pytest.mark.parametrize(
    "place", [place if place in FIRST else pytest.param(place, marks=pytest.mark.release) for place in PLACES]
)
def test_run_with_a_killed_rank_goes_on_to_the_same_bits(
    kind: TrainerKind, batches: list[list[Path]], undisturbed: Weights, tmp_path: Path, place: str
) -> None:
    step = {"load": 0, "loaded": 0}.get(place, 4 if place.startswith("sav") else 3)
    run = Run(tmp_path / "run", kind, batches)

    weights = run.to_the_end(die=(PLACES.index(place) % RANKS, place, step))

    assert 2 == run.lineage
    assert _same_bits(undisturbed, weights)


@pytest.mark.parametrize(("rank", "place"), [(0, "exporting"), (1, "exporting"), (0, "exported")])
def test_export_of_which_a_rank_was_killed_is_torn(kind: TrainerKind, tmp_path: Path, rank: int, place: str) -> None:
    """All its files may be there and whole: without a manifest no engine gets them."""
    launch = partial(fork, die=(rank, place, 0))
    with TrainerGroup(kind, tmp_path, size=RANKS, launch=launch, in_one_pod=True) as group:
        group.wait_loaded()
        group.onload()
        with pytest.raises((UnexpectedStatus, OSError)):
            group.export(0)
        torn = group.export_directory(0, 0)
    assert torn.is_dir()
    assert not (torn / MANIFEST).exists()


def test_damaged_checkpoint_is_made_up_for_from_the_one_before_it(
    kind: TrainerKind, batches: list[list[Path]], undisturbed: Weights, tmp_path: Path
) -> None:
    """The batches since that one were gone: the job could not go on."""
    run = Run(tmp_path / "run", kind, batches)

    weights = run.to_the_end(harm=4)

    assert [1, 2, 3, 4, 3, 4, 5] == run.trained
    assert _same_bits(undisturbed, weights)


def test_damaged_first_checkpoint_is_made_up_for_from_the_model(
    kind: TrainerKind, batches: list[list[Path]], undisturbed: Weights, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", kind, batches)

    weights = run.to_the_end(harm=2)

    assert [1, 2, 1, 2, 3, 4, 5] == run.trained
    assert _same_bits(undisturbed, weights)


def test_another_job_goes_on_from_a_copy_of_a_checkpoint_to_the_same_bits(
    kind: TrainerKind, batches: list[list[Path]], undisturbed: Weights, undisturbed_folder: Path, tmp_path: Path
) -> None:
    """The first trainers of the new job are killed before it has a checkpoint of its own."""
    backup = tmp_path / "backup"
    shutil.copytree(undisturbed_folder / "checkpoints/step-00000002", backup / "step-00000002")
    run = Run(tmp_path / "run", kind, batches, former=backup)

    weights = run.to_the_end(die=(1, "trained", 3))

    assert (2, [3, 3, 4, 5]) == (run.lineage, run.trained)
    assert _same_bits(undisturbed, weights)


@pytest.mark.parametrize(
    ("config", "hidden", "words"),
    [
        ({"optimizer": "SGD"}, 32, "is of another model or optimizer"),
        ({}, 48, r"is of another model or optimizer, .* \(\(\d+, 32\) there, \(\d+, 48\) here\)"),
    ],
    ids=["optimizer", "model"],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_with_the_difference(
    undisturbed: Weights, undisturbed_folder: Path, tmp_path: Path, config: dict[str, object], hidden: int, words: str
) -> None:
    model = write_tiny_model(tmp_path / "model", hidden=hidden)
    other = TrainerKind("other", [], model, {**CONFIG, **config}, has_reference=True)
    (tmp_path / "job").mkdir()
    former = undisturbed_folder / "checkpoints"
    with (
        TrainerGroup(other, tmp_path / "job", size=1, former=former, launch=fork) as group,
        pytest.raises(RankLost, match=words),
    ):
        group.wait_loaded()


def _same_bits(expected: Weights, weights: Weights) -> bool:
    return expected.keys() == weights.keys() and all(
        torch.equal(tensor, weights[name]) for name, tensor in expected.items()
    )
