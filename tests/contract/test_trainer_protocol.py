"""The conformance suite: ours hold it, and it sees what a trainer does wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from colocated_rl_trainer.conformance.checks import CHECKS, SCORING, Check
from colocated_rl_trainer.conformance.ranks import TrainerGroup, TrainerKind, running
from fakes.tiny_model import write_tiny_model
from setup.layout import CHECKOUT

ANSWER_S = 120.0
RANKS = 2
TOY = str(CHECKOUT.root / "tests/fakes/toy_trainer.py")
COMMANDS = {
    "toy": [sys.executable, TOY],
    "own": [sys.executable, str(CHECKOUT.root / "examples/own_trainer/trainer.py")],
    "reference": [sys.executable, "-m", "colocated_rl_trainer"],
}
REFERENCE_CONFIG = {"learningRate": 1e-3, "minibatches": 2, "threads": 1}


@pytest.fixture(scope="module", params=COMMANDS)
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerGroup]:
    """All ranks of one trainer, onloaded."""
    folder = tmp_path_factory.mktemp("t")
    name = request.param
    config = REFERENCE_CONFIG if name == "reference" else {}
    kind = TrainerKind(name, COMMANDS[name], write_tiny_model(folder / "model"), config)
    with running(kind, folder, size=RANKS) as group:
        group.wait_loaded()
        group.onload()
        yield group


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerGroup]:
    """The reference trainer, in a job with a reference."""
    folder = tmp_path_factory.mktemp("s")
    config = REFERENCE_CONFIG | {"klCoefficient": 0.1}
    kind = TrainerKind("scoring", COMMANDS["reference"], write_tiny_model(folder / "model"), config, has_reference=True)
    with running(kind, folder, size=RANKS) as group:
        group.wait_loaded()
        group.onload()
        yield group


@pytest.mark.parametrize("check", [*SCORING, *CHECKS[:-1]], ids=lambda check: check.__name__)
def test_our_trainer_with_a_reference(scoring: TrainerGroup, check: Check) -> None:
    check(scoring)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_our_trainer(trainer: TrainerGroup, check: Check) -> None:
    check(trainer)


def conformance(
    folder: Path, *command: str, ranks: int = RANKS, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    (folder / "model").mkdir()
    model = ["--model", str(folder / "model")]
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "colocated_rl_trainer.conformance",
            "--ranks",
            str(ranks),
            *options,
            *model,
            "--",
            *command,
        ],
        env=os.environ | {"PYTHONPATH": f"{CHECKOUT.root / 'tests'}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("defect", "broken"),
    [
        ("ForgetsItsCheckpoints", "goes on from its checkpoint when it is killed: saved at step"),
        ("LoadsOtherWeights", "goes on from its checkpoint when it is killed: weights of step"),
        ("TakesATornShard", "a shard that is cut off after 100 bytes was trained on"),
        ("MakesNoProgress", "makes progress in a step: `progress` was"),
        ("WritesOnlyInItsFirstPod", "exports what is whole named and readable: Refusal: 500 Failed: NotAnExport"),
        ("DiffersByPod", "exports the same weights in every pod: weights of one version differ"),
        ("WritesInEveryPod", "ranks [1] wrote weights too, where all pods share one volume of them"),
        ("PromisesWhatItHasNotYet", "saves while offloaded: `replay_from` is"),
        ("DiesOfAFullVolume", "saves that can't be written are answered [500, 500], not each 503"),
    ],
)
def test_defect_is_seen_and_named(tmp_path: Path, defect: str, broken: str) -> None:
    answer = conformance(tmp_path, sys.executable, str(CHECKOUT.root / "tests/fakes/broken_trainer.py"), defect)

    assert (1, "") == (answer.returncode, answer.stderr)
    assert broken in answer.stdout
    assert "held    says who it is and where it stands" in answer.stdout


def test_trainer_that_conforms_is_told_so_in_one_line_for_each_check(tmp_path: Path) -> None:
    answer = conformance(tmp_path, sys.executable, TOY)

    assert (0, "") == (answer.returncode, answer.stderr)
    lines = answer.stdout.splitlines()
    assert [f"held    {check.__name__.replace('_', ' ')}" for check in CHECKS] == lines[:-1]
    assert f"{len(CHECKS)} of {len(CHECKS)} checks held" == lines[-1]


def test_trainer_that_cannot_score_is_told_so_where_that_is_asked(tmp_path: Path) -> None:
    answer = conformance(tmp_path, sys.executable, TOY, ranks=1, options=["--reference"])

    assert (1, "") == (answer.returncode, answer.stderr)
    assert "BROKEN  `canScore` is false: in a job with a reference this trainer is refused\n" == answer.stdout


def test_command_that_is_no_trainer_ends_with_its_last_words(tmp_path: Path) -> None:
    answer = conformance(tmp_path, sys.executable, "-c", "raise SystemExit('no such loop')", ranks=1)

    assert 2 == answer.returncode
    assert "the trainer did not load: trainer ended with 1" in answer.stdout
    assert "no such loop" in answer.stdout
