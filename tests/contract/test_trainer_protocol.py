"""The trainer protocol, as any trainer must speak it: run against each of ours, and against yours.

    export COLOCATED_RL_TRAINER="python3 my_trainer.py" COLOCATED_RL_TRAINER_MODEL=DIR
    pytest tests/contract/test_trainer_protocol.py

runs it against that command alone. DIR: a small model in Hugging Face format. `COLOCATED_RL_TRAINER_CONFIG` (JSON) and
`COLOCATED_RL_TRAINER_RANKS` (1) are optional. Batches are random, so nothing is said about how well it learns.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.trainer_process import Refusal, TrainerGroup, TrainerKind, TrainerProcess, running

from colocated_rl_api.ladder import WeightVersion
from colocated_rl_api.member_wire import TrainerState
from colocated_rl_api.weights import MANIFEST, Manifest
from colocated_rl_trainer.manifest import sha256_of, tensor_entries
from fakes.shards import Sample, write_shards
from fakes.tiny_model import VOCABULARY, write_tiny_model
from setup.layout import CHECKOUT

PROMPT_END_S = 5.0
YOURS = os.environ.get("COLOCATED_RL_TRAINER")


def kinds(folder: Path) -> dict[str, tuple[TrainerKind, int]]:
    """Trainers to run against, each with its number of ranks."""
    if YOURS:
        model = Path(os.environ["COLOCATED_RL_TRAINER_MODEL"])
        config = json.loads(os.environ.get("COLOCATED_RL_TRAINER_CONFIG", "{}"))
        ranks = int(os.environ.get("COLOCATED_RL_TRAINER_RANKS", "1"))
        return {"yours": (TrainerKind("yours", shlex.split(YOURS), model, config), ranks)}
    model = write_tiny_model(folder / "model")
    config = {"learningRate": 1e-3, "minibatches": 2, "threads": 1}
    python = sys.executable
    return {
        "toy": (TrainerKind("toy", [python, str(CHECKOUT.root / "tests/fakes/toy_trainer.py")], model, {}), 2),
        "own": (TrainerKind("own", [python, str(CHECKOUT.root / "examples/own_trainer/trainer.py")], model, {}), 2),
        "reference": (TrainerKind("reference", [python, "-m", "colocated_rl_trainer"], model, config), 2),
    }


@pytest.fixture(scope="module", params=["yours"] if YOURS else ["toy", "own", "reference"])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerGroup]:
    """All ranks of one trainer, loaded. Tests of this module leave it ONLOADED and go on from the step it stands at."""
    folder = tmp_path_factory.mktemp("t")
    kind, size = kinds(folder)[request.param]
    with running(kind, folder, size=size) as ranks:
        ranks.wait_loaded()
        ranks.onload()
        yield ranks


@pytest.fixture
def rank(group: TrainerGroup) -> TrainerProcess:
    return group.ranks[0]


def step_of(group: TrainerGroup) -> int:
    step = group.ranks[0].status.step
    assert step is not None
    return step


def shards(group: TrainerGroup, step: int) -> list[Path]:
    """A batch of random tokens that the trainer's model knows; the same one for the same step."""
    config = group.kind.model / "config.json"
    vocabulary = json.loads(config.read_bytes())["vocab_size"] if config.exists() else VOCABULARY
    chance = random.Random(step)
    samples = []
    for number in range(16):
        prompt, response = ([chance.randrange(vocabulary) for _ in range(length)] for length in (4, 2 + number % 5))
        samples.append(Sample(prompt, response, [-3.0] * len(response), float(number % 3 == 0), number // 4, step - 1))
    return write_shards(group.folder, samples, step=step, split=group.size)


def train_next(group: TrainerGroup) -> int:
    step = step_of(group) + 1
    group.train(step, shards(group, step))
    return step


def test_loaded_trainer_says_who_it_is_and_where_it_stands(group: TrainerGroup) -> None:
    for number, rank in enumerate(group.ranks):
        status = rank.status
        assert (1, number, group.lineage) == (status.protocol, status.rank, status.lineage)
        assert status.step is not None
        assert not status.dirty


def test_socket_is_for_the_group_too(rank: TrainerProcess) -> None:
    assert 0o060 == rank.socket.stat().st_mode & 0o077


def test_onload_and_offload_can_be_asked_twice(group: TrainerGroup) -> None:
    for _ in range(2):
        assert {TrainerState.OFFLOADED} == {status.state for status in group.offload()}
    for _ in range(2):
        assert {TrainerState.ONLOADED} == {status.state for status in group.onload()}


def test_step_is_trained_once_and_answered_again(group: TrainerGroup) -> None:
    step = step_of(group) + 1
    files = shards(group, step)

    first = group.train(step, files)
    again = group.train(step, files)

    assert [step] * group.size == [status.step for status in first]
    assert first == again
    assert not any(status.dirty for status in first)


def test_same_step_asked_for_twice_at_once_is_trained_once(group: TrainerGroup) -> None:
    step = step_of(group) + 1
    files = shards(group, step)
    second: list[list[object]] = []
    joined = threading.Thread(target=lambda: second.append(list(group.train(step, files))))
    joined.start()

    first = group.train(step, files)
    joined.join()

    assert [first] == second
    assert step == step_of(group)


def test_state_is_answered_during_a_step(group: TrainerGroup) -> None:
    step = step_of(group) + 1
    files = shards(group, step)
    trained = threading.Thread(target=lambda: group.train(step, files))
    trained.start()

    states = [group.ranks[0].status.state]
    while trained.is_alive():
        states.append(group.ranks[0].status.state)
    trained.join()

    assert {TrainerState.ONLOADED, TrainerState.TRAINING} >= set(states)


@pytest.mark.parametrize("ahead", [-1, 2])
def test_step_that_is_not_next_is_refused(group: TrainerGroup, rank: TrainerProcess, ahead: int) -> None:
    step = step_of(group)

    with pytest.raises(Refusal) as refused:
        rank.train(step + ahead, group.folder / "no-such-shard")

    assert (409, step) == (refused.value.code, step_of(group))


def test_offloaded_trainer_refuses_to_train_or_export(group: TrainerGroup, rank: TrainerProcess) -> None:
    step = step_of(group)
    group.offload()
    with pytest.raises(Refusal) as no_step:
        rank.train(step + 1, shards(group, step + 1)[0])
    with pytest.raises(Refusal) as no_export:
        rank.export(WeightVersion(step, group.lineage), group.folder / "never")
    group.onload()

    assert [409, 409] == [no_step.value.code, no_export.value.code]
    assert not (group.folder / "never").exists()


@pytest.mark.parametrize("body", ["{", "[]", '{"step": "one"}', '{"step": 1}'])
def test_request_that_makes_no_sense_changes_nothing(rank: TrainerProcess, body: str) -> None:
    before = rank.status

    code, content = rank.ask_raw("POST", "/v1/train", body)

    assert (400, before) == (code, rank.status)
    assert content["error"]
    assert content["message"]


def test_export_is_whole_named_and_readable_by_the_group(group: TrainerGroup) -> None:
    step = train_next(group)

    folders = group.export(step)

    for folder in folders:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        files = sorted(folder.glob("*.safetensors"))
        assert WeightVersion(step, group.lineage) == manifest.version
        assert {file.name: sha256_of(file) for file in files} == manifest.sha256
        assert {name: entry for file in files for name, entry in tensor_entries(file).items()} == manifest.tensors
        assert all(0o060 == file.stat().st_mode & 0o060 for file in folder.iterdir())
        if manifest.probe is not None:
            assert len(manifest.probe.input_ids) == len(manifest.probe.logp) + 1
    assert {WeightVersion(step, group.lineage)} == {rank.status.exported for rank in group.ranks}


def test_every_pod_exports_the_same_weights(group: TrainerGroup) -> None:
    step = train_next(group)

    assert 1 == len({json.dumps(_hashes(folder)) for folder in group.export(step)})


def test_export_asked_for_twice_is_written_once(group: TrainerGroup) -> None:
    step = train_next(group)
    first = [(folder / MANIFEST).stat() for folder in group.export(step)]

    again = [(folder / MANIFEST).stat() for folder in group.export(step)]

    assert [(was.st_ino, was.st_mtime_ns) for was in first] == [(now.st_ino, now.st_mtime_ns) for now in again]


def test_torn_export_is_replaced(group: TrainerGroup) -> None:
    step = train_next(group)
    torn = group.folder / "pod-0" / str(WeightVersion(step, group.lineage))
    torn.mkdir()
    (torn / "left.safetensors").write_bytes(b"half")

    group.export(step)

    assert (torn / MANIFEST).exists()
    assert not (torn / "left.safetensors").exists()


@pytest.mark.parametrize("version", [(0, 1), (1, 0)])
def test_export_of_other_weights_is_refused(
    group: TrainerGroup, rank: TrainerProcess, version: tuple[int, int]
) -> None:
    other = WeightVersion(step_of(group) + version[0], group.lineage + version[1])

    with pytest.raises(Refusal) as refused:
        rank.export(other, group.folder / "never")

    assert 409 == refused.value.code
    assert not (group.folder / "never").exists()


def test_checkpoint_is_written_while_offloaded(group: TrainerGroup) -> None:
    step = train_next(group)
    group.offload()

    assert {step} == {status.saved for status in group.save(step)}
    assert {step} == {status.saved for status in group.save(step)}
    group.onload()


def test_killed_trainer_goes_on_from_its_checkpoint_with_the_same_weights(group: TrainerGroup) -> None:
    """The last test but one of a group: it ends this one, and starts the next lineage where it saved."""
    saved = train_next(group)
    exported = _hashes(group.export(saved)[0])
    group.save(saved)
    lost = train_next(group)
    for rank in group.ranks:
        rank.end(signal.SIGKILL)

    with running(group.kind, group.folder, size=group.size, lineage=group.lineage + 1) as again:
        assert {(saved, saved)} == {(status.step, status.saved) for status in again.wait_loaded()}
        again.onload()
        assert exported == _hashes(again.export(saved)[0])
        again.train(lost, shards(again, lost))
        assert {lost} == {status.step for status in (rank.status for rank in again.ranks)}

        torn = again.folder / "torn"
        torn.write_bytes(shards(again, lost + 1)[0].read_bytes()[:100])
        with pytest.raises((Refusal, OSError)):
            again.train(lost + 1, [torn] * again.size)
        for rank in again.ranks:  # it may end over it; it may not take it for a step
            if rank.process.poll() is None:
                assert (lost, False) == (rank.status.step, rank.status.dirty)

        for rank in again.ranks:
            rank.process.terminate()
        assert all(rank.process.wait(PROMPT_END_S) != 0 for rank in again.ranks)


def _hashes(folder: Path) -> dict[str, str]:
    return Manifest.model_validate_json((folder / MANIFEST).read_bytes()).sha256
