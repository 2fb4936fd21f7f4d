"""The conformance suite: ours hold it, and it sees what a trainer does wrong."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from documents.blocks import blocks

from colocated_rl_trainer.conformance import checks
from colocated_rl_trainer.conformance.checks import (
    CHECKS,
    SCORING,
    Broken,
    Check,
    answers_its_state_during_a_step,
    exports_what_is_whole_named_and_readable,
    goes_on_from_its_checkpoint_when_it_is_killed,
    ignores_what_it_does_not_know_in_a_request,
    refuses_a_shard_that_is_torn,
    trains_a_batch_that_leaves_ranks_without_a_sample,
)
from colocated_rl_trainer.conformance.ranks import Launch, RankProcess, TrainerGroup, TrainerKind, UnexpectedStatus
from fakes.tiny_model import write_tiny_model
from fakes.watched_trainer import fork
from setup.layout import CHECKOUT

ANSWER_S = 300.0
RANKS = 2
TOY = str(CHECKOUT.root / "tests/fakes/toy_trainer.py")
BROKEN_TRAINER = str(CHECKOUT.root / "tests/fakes/broken_trainer.py")
COMMANDS = {
    "toy": [sys.executable, TOY],
    "grpo": [sys.executable, "-m", "colocated_rl_trainer"],
}
GRPO_CONFIG = {"learningRate": 1e-3, "minibatches": 2, "threads": 1}


@pytest.fixture(scope="module", params=COMMANDS)
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerGroup]:
    """All ranks of one trainer, onloaded."""
    folder = tmp_path_factory.mktemp("t")
    name = request.param
    config = GRPO_CONFIG if name == "grpo" else {}
    (model := folder / "model").mkdir()
    if name == "grpo":  # the weights of the other are of no model
        write_tiny_model(model)
    kind = TrainerKind(name, COMMANDS[name], model, config)
    with TrainerGroup(kind, folder, size=RANKS) as group:
        group.wait_loaded()
        group.onload()
        yield group


@pytest.fixture(scope="module", params=["all weights", "adapters"])
def scoring(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerGroup]:
    """The default trainer, in a job with a reference."""
    folder = tmp_path_factory.mktemp("s")
    config: dict[str, object] = {**GRPO_CONFIG, "klCoefficient": 0.1}
    if request.param == "adapters":
        config["lora"] = {}
    kind = TrainerKind("scoring", COMMANDS["grpo"], write_tiny_model(folder / "model"), config, has_reference=True)
    with TrainerGroup(kind, folder, size=RANKS, launch=fork) as group:  # the checks start others by the command
        group.wait_loaded()
        group.onload()
        yield group


@pytest.mark.parametrize("check", [*SCORING, *CHECKS[:-1]], ids=lambda check: check.__name__)
def test_our_trainer_with_a_reference(scoring: TrainerGroup, check: Check) -> None:
    check(scoring)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_our_trainer(trainer: TrainerGroup, check: Check) -> None:
    check(trainer)


FINDS_FAKES = {"PYTHONPATH": f"{CHECKOUT.root / 'tests'}:{os.environ.get('PYTHONPATH', '')}"}


def conformance(
    folder: Path, *command: str, ranks: int = RANKS, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    (folder / "model").mkdir(exist_ok=True)
    model = ["--model", str(folder / "model")]
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "colocated_rl_trainer.conformance",
            "--ranks",
            str(ranks),
            *model,
            *options,
            "--",
            *command,
        ],
        env=os.environ | FINDS_FAKES,
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        check=False,
    )


def processes_with(variable: str) -> list[str]:
    found = []
    for path in (place / "environ" for place in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append((path.parent / "cmdline").read_text())
    return found


@pytest.mark.parametrize(
    ("defect", "broken"),
    [
        ("ForgetsItsCheckpoints", "goes on from its checkpoint when it is killed: saved at step"),
        ("LoadsOtherWeights", "goes on from its checkpoint when it is killed: weights of step"),
        ("ForgetsItsMomentum", "trained again on the same batch after a restart, leads elsewhere: "),
        ("TakesATornShard", "a shard that is cut off after 100 bytes was trained on"),
        ("NeverLearns", "changes its weights by training: a step leaves the weights as they were"),
        ("ReturnsNothing", "NoFigure: train returned a NoneType, and not figures by name"),
        ("FailsItsThirdStep", "answers its state during a step: UnexpectedStatus: 500 Failed: ArithmeticError"),
        ("MakesNoProgress", "makes progress in a step: `progress` was"),
        (
            "WritesOnlyInItsFirstPod",
            "exports what is whole named and readable: UnexpectedStatus: 500 Failed: NotAnExport",
        ),
        ("DiffersByPod", "exports the same weights in every pod: weights of one version differ"),
        ("WritesInEveryPod", "ranks [1] wrote weights too, where all pods share one volume of them"),
        ("PromisesWhatItHasNotYet", "saves while offloaded: `replay_from` is"),
        ("RefusesInWebPages", "refuses a step that is not next: JSONDecodeError: Expecting value"),
        ("DiesOfAFullVolume", "saves that can't be written are answered [500, 500], not each 503"),
    ],
)
def test_defect_is_seen_and_named(tmp_path: Path, defect: str, broken: str) -> None:
    answer = conformance(tmp_path, sys.executable, BROKEN_TRAINER, defect)

    assert (1, "") == (answer.returncode, answer.stderr)
    assert broken in answer.stdout
    assert "held    says who it is and where it stands" in answer.stdout


@pytest.mark.parametrize(
    ("defect", "check", "broken"),
    [
        ("CountsItsFirstStepTooSoon", answers_its_state_during_a_step, "step 1 is reported as finished while it is "),
        ("AnswersOneRequestAtATime", answers_its_state_during_a_step, "GET /v1/state got no answer in 1 s of a step"),
        ("KnowsEveryField", ignores_what_it_does_not_know_in_a_request, "that is not in the protocol is answered 400"),
        ("ExportsWithoutConfig", exports_what_is_whole_named_and_readable, "config.json', 'tokenizer_config.json'] of"),
        ("ExportsItsWrapper", exports_what_is_whole_named_and_readable, "its own first is module.model.embed_tokens"),
        ("ProbesWithLosses", exports_what_is_whole_named_and_readable, "a log-probability of the probe is 2.5, and "),
        ("NeedsASample", trains_a_batch_that_leaves_ranks_without_a_sample, "500 Failed: ValueError at "),
        ("LosesItsMomentumOffTheDevice", goes_on_from_its_checkpoint_when_it_is_killed, "leads elsewhere: "),
        ("NeverCopiesBackToTheHost", goes_on_from_its_checkpoint_when_it_is_killed, "leads elsewhere: "),
    ],
)
def test_defect_is_seen_by_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str, check: Check, broken: str
) -> None:
    """Each of them conformed."""
    monkeypatch.setenv("PYTHONPATH", FINDS_FAKES["PYTHONPATH"])
    if defect == "AnswersOneRequestAtATime":
        monkeypatch.setattr(checks, "STATE_S", 1.0)  # it would need all of it
    (model := tmp_path / "model").mkdir()
    if defect in ("ExportsWithoutConfig", "ExportsItsWrapper"):
        write_tiny_model(model)
    kind = TrainerKind(defect, [sys.executable, BROKEN_TRAINER, defect], model, {})
    with TrainerGroup(kind, tmp_path, size=RANKS) as group:
        group.wait_loaded()
        group.onload()
        with pytest.raises((Broken, UnexpectedStatus), match=re.escape(broken)):
            check(group)


def test_trainer_that_relies_on_all_that_a_job_gives_it_conforms(tmp_path: Path) -> None:
    """The suite left out two columns of each batch, and did not declare its bodies as JSON."""
    answer = conformance(tmp_path, sys.executable, BROKEN_TRAINER, "ReliesOnAllThatAJobGives")

    assert (0, "") == (answer.returncode, answer.stderr), answer.stdout


def test_what_needs_a_rank_that_has_ended_is_not_made(tmp_path: Path) -> None:
    """Sixteen refused connections hid the one line that mattered."""
    answer = conformance(tmp_path, sys.executable, BROKEN_TRAINER, "ReturnsNothing")

    lines = answer.stdout.splitlines()
    assert 1 == len([line for line in lines if line.startswith("BROKEN")])
    assert "a rank has ended: the other checks need it, and were not made" in lines
    assert f"3 of {len(CHECKS)} checks held" == lines[-1]


@pytest.mark.parametrize("command", [[sys.executable, TOY], ["sh", "-c", f"{sys.executable} {TOY}; exit"]])
def test_trainer_that_conforms_is_told_so_in_one_line_for_each_check(tmp_path: Path, command: Sequence[str]) -> None:
    """Nothing keeps running: the suite ends the command that it started, and that alone."""
    answer = conformance(tmp_path, *command)

    late = time.monotonic() + ANSWER_S
    while left := processes_with(f"COLOCATE_MODEL={tmp_path / 'model'}"):  # the killed take a moment
        assert time.monotonic() < late, left
        time.sleep(0.01)
    assert (0, "") == (answer.returncode, answer.stderr)
    lines = answer.stdout.splitlines()
    assert [f"held    {check.__name__.replace('_', ' ')}" for check in CHECKS] == lines[:-1]
    assert f"{len(CHECKS)} of {len(CHECKS)} checks held" == lines[-1]


def test_command_of_the_page_says_that_its_example_conforms(tmp_path: Path) -> None:
    """The command runs as the pages have it, in the folder of the example."""
    [written] = [block.text.strip() for block in blocks("examples/own_trainer/README.md") if block.is_command]
    same = [block.text for block in blocks("docs/bring-your-own.md") if block.is_command]
    assert [written.replace("python3 trainer.py", "python3 -m mine")] == [text.strip() for text in same]
    model = write_tiny_model(tmp_path / "model")
    command = shlex.split(written.replace("path/to/a/small/model", str(model)).replace("python3", sys.executable))
    answer = subprocess.run(
        command,
        cwd=CHECKOUT.root / "examples/own_trainer",
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        check=False,
    )

    assert (0, "") == (answer.returncode, answer.stderr), answer.stdout
    assert f"{len(CHECKS)} of {len(CHECKS)} checks held" == answer.stdout.splitlines()[-1]


def test_trainer_that_cannot_score_is_told_so_where_that_is_asked(tmp_path: Path) -> None:
    answer = conformance(tmp_path, sys.executable, TOY, ranks=1, options=["--reference"])

    assert (1, "") == (answer.returncode, answer.stderr)
    assert "BROKEN  `canScore` is false: in a job with a reference this trainer is refused\n" == answer.stdout


@pytest.mark.parametrize(
    ("options", "command", "why"),
    [
        (
            [],
            ["./no-such-trainer"],
            "the trainer did not load: [Errno 2] No such file or directory: './no-such-trainer'",
        ),
        ([], ["/"], "the trainer did not load: [Errno 13] Permission denied: '/'"),
        (["--config", "/no/such.json"], ["true"], "argument --config: /no/such.json can't be read: "),
        (["--config", TOY], ["true"], f"argument --config: {TOY} can't be read: Extra data"),
        (["--model", "/no/model"], ["true"], "argument --model: there is no directory /no/model"),
        (["--ranks", "0"], ["true"], "argument --ranks: 0 is no number of ranks: 1 at least"),
    ],
)
def test_what_can_not_be_started_is_reported_in_a_line(
    tmp_path: Path, options: Sequence[str], command: Sequence[str], why: str
) -> None:
    """Each was a traceback, and exit code 1: that of a check that did not hold."""
    answer = conformance(tmp_path, *command, options=options)

    assert 2 == answer.returncode
    assert why in f"{answer.stdout}{answer.stderr}"
    assert "Traceback" not in answer.stderr


def test_trainer_may_end_over_a_torn_shard_whenever_that_is_seen(tmp_path: Path) -> None:
    """The suite reported a trainer as broken if it had ended between two requests, which was most of the time."""
    command = [sys.executable, BROKEN_TRAINER, "EndsOverATornShard"]
    started: list[EndsUnseen] = []

    def launch(environment: dict[str, str], log: Path) -> Launch:
        with log.open("ab") as stream:
            started.append(
                EndsUnseen(command, env=environment | FINDS_FAKES, stdout=stream, stderr=stream, start_new_session=True)
            )
        return started[-1]

    kind = TrainerKind("ends", command, tmp_path, {})
    with TrainerGroup(kind, tmp_path, size=RANKS, launch=launch) as group:
        group.wait_loaded()
        group.onload()
        for process in started:
            process.ends = True
        refuses_a_shard_that_is_torn(group)


class EndsUnseen(RankProcess):
    """Seen to run for the last time when it has just ended."""

    ends = False

    def poll(self) -> int | None:
        if not self.ends:
            return super().poll()
        self.ends = False
        self.wait(ANSWER_S)
        return None


def test_command_that_is_no_trainer_ends_with_its_last_words(tmp_path: Path) -> None:
    answer = conformance(tmp_path, sys.executable, "-c", "raise SystemExit('no such loop')", ranks=1)

    assert 2 == answer.returncode
    assert "the trainer did not load: trainer ended with 1" in answer.stdout
    assert "no such loop" in answer.stdout
